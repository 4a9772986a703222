"""Queries of the lightning indexer: rotated, quantized, and the head weights that carry their scales."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxattn import _checks, _latent_cache, _mechanism, _rope
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.ops.rope import check_table
from jaxattn.quant import mx
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import indexer_q as mosaic

_OP = "indexer_q"
FORMATS = ("fp8", "mxfp4")


def indexer_q(
    q: Float[Array, "N H D"],
    weights: Float[Array, "N H"],
    positions: Int[Array, " N"],
    cos_sin: Float[Array, "P Dr"],
    *,
    scales: tuple[float, float] | None = None,
    format: str = "fp8",
    first: bool = False,
    interleaved: bool = True,
    floor: float = _latent_cache.FLOOR,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[Array, ...]:
    """FP8 (or MXFP4) codes of rotated queries, and float32 head weights with all scales folded in.

        x = q with Dr numbers rotated in float32, rounded to the dtype of q
        fp8: s = 2^ceil(log2(max(amax, floor) / 448)) per token and head, code e4m3(x / s),
             w' = ((weights * s) * scales[0]) * scales[1]
        mxfp4: codes and UE8M0 bytes of 32 numbers (`jaxattn.quant.mx`), w' = (weights * scales[0]) * scales[1]

    Args:
        q: bfloat16, float16 or float32 (float64: reference only, codes are not rounded).
        weights: of heads, any float dtype.
        positions: int32 or int64 rows of the table, those outside take the nearest row.
        cos_sin: `cos || sin`, any float dtype.
        scales: None = `(D^-0.5, H^-0.5)`, see `softmax_scale(D, indexer_heads=H)`.
        format: "fp8" or "mxfp4".
        first: the rotary part comes first (V3.2), else last (V4).
        interleaved: its pairs are neighbours, else halves.
        floor: smallest amax of "fp8": 1e-4 (V4) or 1e-10 (V3.2).
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        fp8: float8_e4m3fn `q` [N, H, D] and float32 `weights` [N, H]; mxfp4: uint8 `q` [N, H, D / 2], `weights`, and
        uint8 `scale` [N, H, D / 32].

    Raises:
        TypeError: dtypes; ValueError: shapes or options; NotImplementedError: the named implementation cannot run this.

    Source: vLLM 0.26.0 `models/deepseek_v4/common/ops/fused_indexer_q.py`.
    """
    args = prepare(
        q,
        weights,
        positions,
        cos_sin,
        scales=scales,
        format=format,
        first=first,
        interleaved=interleaved,
        floor=floor,
    )
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(
    q,
    weights,
    positions,
    cos_sin,
    *,
    scales=None,
    format="fp8",
    first=False,
    interleaved=True,
    floor=_latent_cache.FLOOR,
) -> Args:
    """Validate and complete the arguments of `indexer_q`; raises as it does."""
    dims = _checks.check_shapes(
        _OP, q=(q, "N H D"), weights=(weights, "N H"), positions=(positions, "N"), cos_sin=(cos_sin, "P Dr")
    )
    for name, x in (("q", q), ("weights", weights)):
        _checks.check_dtype(_OP, name, x, _checks.FLOATS)
    _checks.check_dtype(_OP, "positions", positions, ("int32", "int64"))
    check_table(_OP, cos_sin, dims["D"])
    if format not in FORMATS:
        raise ValueError(f"{_OP}: format must be one of {', '.join(FORMATS)}, got {format!r}")
    if format == "mxfp4" and dims["D"] % mx.GROUP:
        raise ValueError(f"{_OP}: format mxfp4 needs D a multiple of {mx.GROUP}, got {dims['D']}")
    scales = (dims["D"] ** -0.5, max(dims["H"], 1) ** -0.5) if scales is None else scales
    if len(scales) != 2:
        raise ValueError(f"{_OP}: scales must be two numbers, of the scores and of the heads, got {scales}")
    _checks.check_positive(_OP, floor=floor, **{f"scales[{i}]": s for i, s in enumerate(scales)})
    return {
        "q": q,
        "weights": weights,
        "positions": positions,
        "cos_sin": cos_sin,
        "scales": (float(scales[0]), float(scales[1])),
        "format": format,
        "first": bool(first),
        "interleaved": bool(interleaved),
        "floor": float(floor),
    }


def _reference(q, weights, positions, cos_sin, *, scales, format, first, interleaved, floor):
    """Rotation, rounding, quantizer, weights in the order of the formula."""
    kept, part = _rope.split(p.wide(q), cos_sin.shape[1], first)
    part = _rope.rotate(part, _rope.rows(cos_sin, positions)[:, None], interleaved=interleaved)
    x = p.wide(p.rounded(_rope.join(kept, part, first), q.dtype))
    weights = weights.astype(x.dtype)
    if format == "mxfp4":
        codes, bytes_ = mx.quantize(x, "mxfp4")
        return codes, _folded(weights, scales), bytes_
    code = p.ue8m0_ceil(p.divide(jnp.maximum(p.amax(x, -1), floor), p.E4M3_MAX))
    s = p.ue8m0_value(code).astype(x.dtype)
    return p.to_float8(p.divide_by_ue8m0(x, code)), _folded(weights * s[..., 0], scales)


def _folded(weights, scales):
    """Two products; XLA would multiply the constants with each other first."""
    return lax.optimization_barrier(weights * jnp.asarray(scales[0], weights.dtype)) * scales[1]


def _outputs(*, format, **_):
    return ("q", "weights", "scale") if format == "mxfp4" else ("q", "weights")


def _cost(*, q, format, **_):
    """Read once, codes and weights written."""
    width = jnp.dtype(q.dtype).itemsize
    return 6 * q.size, int(q.size * (width + (0.53125 if format == "mxfp4" else 1))) + 8 * q.shape[0] * q.shape[1]


def make_inputs(
    rng: np.random.Generator,
    N: int,
    H: int,
    *,
    D: int = 128,
    Dr: int = 64,
    P: int = 50,
    dtype: str = "bfloat16",
    **options,
) -> Args:
    """Random arguments of `indexer_q` with a head of zeros, and NaN in rows of the table that no position names."""
    q = rng.standard_normal((N, H, D)).astype(np.float32)
    q[0, 0], q[-1, -1] = 0, q[-1, -1] * np.float32(1e-6)
    positions = rng.integers(0, P, N).astype(np.int32)
    cos_sin = np.array(_rope.table(jnp.asarray(_rope.frequencies(Dr, 160000.0)), jnp.arange(P)))
    cos_sin[np.setdiff1d(np.arange(P), positions)] = np.nan
    return {
        "q": jnp.asarray(q, dtype),
        "weights": jnp.asarray(rng.standard_normal((N, H)), dtype),
        "positions": jnp.asarray(positions),
        "cos_sin": jnp.asarray(cos_sin),
        **options,
    }


def _case(name: str, N: int, H: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, H, **options), tags=frozenset(tags or ("smoke",)))


def _struct(dtype: str, **options) -> Args:
    return {
        "q": jax.ShapeDtypeStruct((128, 64, 128), jnp.dtype(dtype)),
        "weights": jax.ShapeDtypeStruct((128, 64), jnp.dtype(dtype)),
        "positions": jax.ShapeDtypeStruct((128,), jnp.int32),
        "cos_sin": jax.ShapeDtypeStruct((4096, 64), jnp.float32),
        **options,
    }


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 vllm/models/deepseek_v4/common/ops/fused_indexer_q.py",
    op=indexer_q,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.indexer_q,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=(
        _case("N5-H64", 5, 64),
        _case("N4-H8-fp32", 4, 8, dtype="float32"),
        _case("N5-H8-first-halves-fp32", 5, 8, dtype="float32", first=True, interleaved=False, floor=1e-10),
        _case("N3-H8-mxfp4", 3, 8, format="mxfp4"),
        _case("N4096-H64", 4096, 64, "full", "bench", P=4096),
    ),
    cost=_cost,
    captures=("dsv4/indexer_q_*",),
    module="jaxattn.nn.deepseek_v32:DeepseekV32Attention",
    support=tuple(
        (f"{dtype}, {format}", _struct(dtype, format=format)) for dtype in ("bfloat16", "float32") for format in FORMATS
    ),
)
