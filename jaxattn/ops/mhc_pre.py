"""The first half of a hyper-connection: gates and mixing matrix from the residual streams, and the layer's input."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxattn import _checks, _hyper, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import mhc_pre as mosaic

_OP = "mhc_pre"


def mhc_pre(
    residual: Float[Array, "N streams M"],
    fn: Float[Array, "O SM"],
    scale: Float[Array, " 3"],
    base: Float[Array, " O"],
    *,
    y: Float[Array, "N M"] | None = None,
    post: Float[Array, "N streams"] | None = None,
    comb: Float[Array, "N streams streams"] | None = None,
    iters: int = 20,
    post_mult: float = 2.0,
    eps: float = 1e-6,
    rms_eps: float = 1e-6,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[Array, ...]:
    r"""Layer input, output gates and mixing matrix of one manifold-constrained hyper-connection.

    With C streams of M numbers a token, x a token's C M numbers in float32, and O = (2 + C) C:

        u = (x fn^T) / sqrt(mean(x^2) + rms_eps)
        pre  = sigmoid(u[:C] scale0 + base[:C]) + eps
        post = post_mult sigmoid(u[C:2C] scale1 + base[C:2C])
        A = softmax(u[2C:] scale2 + base[2C:] as [C, C], last axis) + eps,   A /= colsum(A) + eps
        comb = A after iters - 1 times  (A /= rowsum(A) + eps,  A /= colsum(A) + eps)
        layer_input = sum_i pre_i residual_i

    The product runs on the unnormalised numbers; the norm multiplies its result. All of it is float32, also the product
    (not TF32), `layer_input` is rounded once. `comb[i, j]` leads from stream i to stream j; its columns sum to 1.

    Args:
        residual: streams, bfloat16, float16 or float32 (float64: reference only).
        fn: float32; rows are C of pre, C of post, C C of comb, row by row.
        scale: float32, of pre, post and comb.
        base: float32.
        y: output of the layer before this one, dtype of `residual`: the streams are first updated as by `mhc_post` with
            `post` and `comb`, and rounded before anything else is made of them (as in vLLM above 16 tokens).
        post: gates that belong to `y`, float32.
        comb: mixing matrix that belongs to `y`, float32.
        iters: Sinkhorn steps, the first softmax and its column step included.
        post_mult: largest output gate.
        eps: of pre, comb and every sum of Sinkhorn's steps.
        rms_eps: added to the mean of squares.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `layer_input` [N, M] in the dtype of `residual`, float32 `post` [N, C] and `comb` [N, C, C], and with `y` the
        updated streams.

    Raises:
        TypeError: dtypes; ValueError: shapes or options that do not belong together;
        NotImplementedError: the named implementation cannot run this call.

    Source: https://arxiv.org/abs/2512.24880; vLLM 0.26.0 `model_executor/kernels/mhc/torch.py`.
    """
    args = prepare(
        residual,
        fn,
        scale,
        base,
        y=y,
        post=post,
        comb=comb,
        iters=iters,
        post_mult=post_mult,
        eps=eps,
        rms_eps=rms_eps,
    )
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(
    residual, fn, scale, base, *, y=None, post=None, comb=None, iters=20, post_mult=2.0, eps=1e-6, rms_eps=1e-6
) -> Args:
    """Validate and complete the arguments of `mhc_pre`; raises as it does."""
    named = {"residual": (residual, "N streams M"), "fn": (fn, "O SM"), "scale": (scale, "three"), "base": (base, "O")}
    given = [x is not None for x in (y, post, comb)]
    if any(given) and not all(given):
        raise ValueError(
            f"{_OP}: y, post and comb belong together: give all three to update the streams first, or none"
        )
    if y is not None:
        named |= {"y": (y, "N M"), "post": (post, "N streams"), "comb": (comb, "N streams streams")}
    dims = _checks.check_shapes(_OP, **named)
    C, M = dims["streams"], dims["M"]
    if not C or not M or (dims["O"], dims["SM"], dims["three"]) != ((2 + C) * C, C * M, 3):
        raise ValueError(
            f"{_OP}: {C} streams of {M} numbers need fn [(2+C)C, C M] = [{(2 + C) * C}, {C * M}] and scale [3], got fn "
            f"{list(fn.shape)} and scale {list(scale.shape)}"
        )
    dtype = _checks.check_dtype(_OP, "residual", residual, _checks.FLOATS)
    if y is not None:
        _checks.check_dtype(_OP, "y", y, (dtype,), "y and residual need one dtype; cast one of them")
    weights = {"fn": fn, "scale": scale, "base": base} | ({} if y is None else {"post": post, "comb": comb})
    for name, x in weights.items():
        _checks.check_dtype(_OP, name, x, (_checks.F64,) if dtype == _checks.F64 else ("float32",))
    _checks.check_count(_OP, iters=iters)
    _checks.check_positive(_OP, post_mult=post_mult, eps=eps, rms_eps=rms_eps)
    return {
        "residual": residual,
        "fn": fn,
        "scale": scale,
        "base": base,
        "y": y,
        "post": post,
        "comb": comb,
        "iters": int(iters),
        "post_mult": float(post_mult),
        "eps": float(eps),
        "rms_eps": float(rms_eps),
    }


def _reference(residual, fn, scale, base, *, y, post, comb, iters, post_mult, eps, rms_eps):
    """The formulas, after the update of the streams."""
    updated = residual if y is None else _hyper.mix(residual, y, post, comb)
    pre, post, comb = _hyper.coefficients(
        updated, fn, scale, base, iters=iters, post_mult=post_mult, eps=eps, rms_eps=rms_eps
    )
    x = jnp.sum(pre[..., None] * p.wide(updated), 1).astype(residual.dtype)
    return (x, post, comb) if y is None else (x, post, comb, updated)


def _outputs(*, y, **_):
    return ("layer_input", "post", "comb") + (() if y is None else ("new_residual",))


def _cost(*, residual, fn, y, iters, **_):
    """Streams read once, the layer's input and the coefficients written; with y, streams written too."""
    N, C, M = residual.shape
    width = jnp.dtype(residual.dtype).itemsize
    flops = N * (2 * fn.size + 4 * C * M + iters * 4 * C * C)
    moved = N * (C + 1) * M * width + fn.size * 4 + N * C * (1 + C) * 4
    return flops + (0 if y is None else 2 * N * C * C * M), moved + (0 if y is None else N * (C + 1) * M * width)


def make_inputs(
    rng: np.random.Generator,
    N: int,
    M: int,
    *,
    C: int = 4,
    dtype: str = "bfloat16",
    fused: bool = False,
    spread: float = 1.0,
    **options,
) -> Args:
    """Random arguments of `mhc_pre`.

    Args:
        rng: source of randomness.
        N: tokens.
        M: numbers of a stream.
        C: streams.
        dtype: of the streams.
        fused: with `y`, `post` and `comb`.
        spread: factor of the logits; 30 drives gates and matrices into saturation.
        **options: passed on to the op.
    """

    def normal(*shape, scale=1.0):
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    rows = (2 + C) * C
    args: Args = {
        "residual": jnp.asarray(normal(N, C, M), dtype),
        "fn": jnp.asarray(normal(rows, C * M, scale=spread * (C * M) ** -0.5)),
        "scale": jnp.asarray(np.array([0.7, 1.1, 0.9], np.float32)),
        "base": jnp.asarray(normal(rows, scale=0.5 * spread)),
    }
    if fused:
        comb = rng.random((N, C, C)).astype(np.float32)
        args |= {
            "y": jnp.asarray(normal(N, M), dtype),
            "post": jnp.asarray(2 * rng.random((N, C)).astype(np.float32)),
            "comb": jnp.asarray(comb / comb.sum(1, keepdims=True)),
        }
    return args | options


def _case(name: str, N: int, M: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, M, **options), tags=frozenset(tags or ("smoke",)))


_CASES = (
    _case("N5-C4-M512", 5, 512),
    _case("N9-C4-M512-fp32", 9, 512, dtype="float32"),
    _case("N6-C4-M256-fp32-extreme", 6, 256, dtype="float32", spread=30.0),
    _case("N4-C4-M256-fused-extreme", 4, 256, fused=True, spread=30.0),
    _case("N5-C4-M256-fused-fp32", 5, 256, dtype="float32", fused=True),
    _case("N3-C1-M128-fp16", 3, 128, C=1, dtype="float16"),
    _case("N2-C2-M96-one-step", 2, 96, C=2, iters=1),
    _case("N11-C4-M256", 11, 256),
    _case("N13-C4-M256-fused", 13, 256, fused=True),
    _case("N130-C4-M4096", 130, 4096, "full"),
    _case("N70-C4-M4096-fused", 70, 4096, "full", fused=True),
    _case("N4096-C4-M4096", 4096, 4096, "full", "bench"),
    _case("N4096-C4-M7168", 4096, 7168, "full", "bench"),
    _case("N4096-C4-M4096-fused", 4096, 4096, "full", "bench", fused=True),
    _case("N16-C4-M4096-fused", 16, 4096, "full", "bench", fused=True),
)


def _struct(dtype: str, M: int, C: int = 4, fused: bool = False) -> Args:
    def array(shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    rows = (2 + C) * C
    args: Args = {
        "residual": array((256, C, M), dtype),
        "fn": array((rows, C * M)),
        "scale": array((3,)),
        "base": array((rows,)),
    }
    more = {"y": array((256, M), dtype), "post": array((256, C)), "comb": array((256, C, C))}
    return args | (more if fused else {})


_SUPPORT = (
    *((f"{dtype}, 4 streams of {M}", _struct(dtype, M)) for dtype in ("bfloat16", "float32") for M in (4096, 7168)),
    ("bfloat16, 4 streams of 4096, fused with the update", _struct("bfloat16", 4096, fused=True)),
    ("bfloat16, 2 streams of 4096", _struct("bfloat16", 4096, C=2)),
    ("bfloat16, 4 streams of 100", _struct("bfloat16", 100)),
    ("float16, 4 streams of 4096", _struct("float16", 4096)),
)

MECHANISM = Mechanism(
    name=_OP,
    source="https://arxiv.org/abs/2512.24880; vLLM 0.26.0 vllm/model_executor/kernels/mhc/torch.py",
    op=mhc_pre,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.mhc_pre,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    captures=("dsv4/mhc_*",),
    module="jaxattn.nn.hyper:HyperConnections",
    support=_SUPPORT,
)
