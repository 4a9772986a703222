"""Input of DeepSeek-V4's multi-token prediction: the next token's embedding joins the hidden streams."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxattn import _checks, _mechanism, _rope
from jaxattn._mechanism import Args, Case, Mechanism
from jaxattn.quant import primitives as p

_OP = "mtp"


def mtp(
    embedding: Float[Array, "N M"],
    hidden: Float[Array, "N streams M"],
    positions: Int[Array, " N"],
    e_weight: Float[Array, " M"],
    h_weight: Float[Array, " M"],
    e_proj: Float[Array, "M M"],
    h_proj: Float[Array, "M M"],
    *,
    eps: float = 1e-6,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "N streams M"]:
    """`T(norm(hidden) h_proj) + T(norm(e) e_proj)` with e the embedding, zeros at position 0.

    norm is `T(x / sqrt(mean(x^2) + eps) * weight)`, of each stream by itself; T rounds to the dtype of `embedding`.
    Two projections and a sum take the place of V3's one projection of `[norm(e) | norm(h)]`.

    Args:
        embedding: of the tokens to predict from, bfloat16, float16 or float32 (float64: reference only).
        hidden: streams of the model before its head (or of the step before), the dtype of `embedding`.
        positions: int32 or int64. At position 0 there is no token before: the embedding is not used and may be NaN.
        e_weight: of the embedding's norm, the dtype of `embedding`, as the others.
        h_weight: of the streams' norm.
        e_proj: [in, out].
        h_proj: [in, out].
        eps: added to the mean of squares.
        implementation: None or "reference", there is no kernel.
        config: None, for the same reason.

    Returns:
        streams for one decoder layer, the dtype of `embedding`.

    Raises:
        TypeError: dtypes; ValueError: shapes or options.

    Source: DeepSeek-V4; vLLM 0.26.0 `models/deepseek_v4/nvidia/mtp.py`; https://arxiv.org/abs/2412.19437, section 2.2.
    """
    args = prepare(embedding, hidden, positions, e_weight, h_weight, e_proj, h_proj, eps=eps)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(embedding, hidden, positions, e_weight, h_weight, e_proj, h_proj, *, eps=1e-6) -> Args:
    """Validate and complete the arguments of `mtp`; raises as it does."""
    named = {
        "embedding": (embedding, "N M"),
        "hidden": (hidden, "N streams M"),
        "positions": (positions, "N"),
        "e_weight": (e_weight, "M"),
        "h_weight": (h_weight, "M"),
        "e_proj": (e_proj, "M M"),
        "h_proj": (h_proj, "M M"),
    }
    _checks.check_shapes(_OP, **named)
    dtype = _checks.check_dtype(_OP, "embedding", embedding, _checks.FLOATS)
    for name, (x, _) in named.items():
        _checks.check_dtype(_OP, name, x, ("int32", "int64") if name == "positions" else (dtype,))
    _checks.check_positive(_OP, eps=eps)
    return {name: x for name, (x, _) in named.items()} | {"eps": float(eps)}


def _reference(embedding, hidden, positions, e_weight, h_weight, e_proj, h_proj, *, eps):
    """The formula with its roundings."""
    dtype = embedding.dtype

    def project(x, weight, kernel):
        x = p.wide(x)
        x = p.rounded(x * _rope.rms(x, eps) * weight.astype(x.dtype), dtype)
        return p.wide(p.rounded(jnp.matmul(p.wide(x), p.wide(kernel), precision="highest"), dtype))

    embedding = jnp.where((positions == 0)[:, None], 0, embedding)
    joined = project(hidden, h_weight, h_proj) + project(embedding, e_weight, e_proj)[:, None]
    return joined.astype(dtype)


def _cost(*, hidden, **_):
    """Two products; every input and output once."""
    N, streams, M = hidden.shape
    width = jnp.dtype(hidden.dtype).itemsize
    return 2 * N * (streams + 1) * M * M, width * (N * (2 * streams + 1) * M + 2 * M * M)


def make_inputs(rng: np.random.Generator, N: int, M: int, *, streams: int = 4, dtype: str = "bfloat16") -> Args:
    """Random arguments of `mtp`; token 0 stands at position 0, its embedding is NaN."""

    def normal(*shape, scale=1.0):
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    embedding, positions = normal(N, M), np.arange(N, dtype=np.int32) * 7
    embedding[positions == 0] = np.nan
    arrays = {
        "embedding": embedding,
        "hidden": normal(N, streams, M),
        "e_weight": normal(M),
        "h_weight": normal(M),
        "e_proj": normal(M, M, scale=M**-0.5),
        "h_proj": normal(M, M, scale=M**-0.5),
    }
    return {name: jnp.asarray(x, dtype) for name, x in arrays.items()} | {"positions": jnp.asarray(positions)}


def _case(name: str, *sizes: int, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, *sizes, **options), tags=frozenset({"smoke"}))


_ROW, _SQUARE = jax.ShapeDtypeStruct((4096,), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)

MECHANISM = Mechanism(
    name=_OP,
    source="https://arxiv.org/abs/2412.19437, section 2.2; vLLM 0.26.0 vllm/models/deepseek_v4/nvidia/mtp.py",
    op=mtp,
    prepare=prepare,
    reference=_reference,
    outputs=lambda **_: ("x",),
    kernels={},
    cases=(
        _case("N5-M64", 5, 64),
        _case("N3-M32-fp32", 3, 32, dtype="float32"),
        _case("N4-M48-one-stream-fp16", 4, 48, streams=1, dtype="float16"),
    ),
    cost=_cost,
    module="jaxattn.nn.deepseek_v4_layer:MTPBlock",
    support=(
        (
            "4 streams of 4096",
            {
                "embedding": jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16),
                "hidden": jax.ShapeDtypeStruct((64, 4, 4096), jnp.bfloat16),
                "positions": jax.ShapeDtypeStruct((64,), jnp.int32),
                "e_weight": _ROW,
                "h_weight": _ROW,
                "e_proj": _SQUARE,
                "h_proj": _SQUARE,
            },
        ),
    ),
)
