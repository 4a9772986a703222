"""DeepSeek-V4's grouped low-rank output projection: one FP8 product per group of heads."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.quant import fp8
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import grouped_projection as mosaic

_OP = "grouped_projection"
BLOCK = 128


def grouped_projection(
    x: Float[Array, "N groups W"],
    x_scale: Float[Array, "N groups xblocks"],
    weight: Float[Array, "groups R W"],
    weight_scale: Float[Array, "groups rblocks xblocks"],
    *,
    dtype: str = "bfloat16",
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "N groups R"]:
    """`y[n, g, r] = sum_w (x x_scale)[n, g, w] (weight weight_scale)[g, r, w]`, float32 sums, rounded once.

    The product of a block-diagonal matrix of `groups` blocks. A second, dense projection follows.

    Args:
        x: float8_e4m3fn codes of `inv_rope_fp8_quant`, or plain numbers of any float dtype.
        x_scale: float32, one per 128 numbers of a token's group; W a multiple of 128.
        weight: codes of the dtype of `x`, one matrix a group.
        weight_scale: float32, one per block of 128 x 128.
        dtype: of the result.
        implementation: None (choose), "mosaic" (Hopper) or "reference".
        config: launch configuration of the named kernel.

    Returns:
        [N, groups, R] in `dtype` (float64 for float64 inputs).

    Raises:
        TypeError: dtypes; ValueError: shapes; NotImplementedError: the named implementation cannot run this call.

    Source: DeepSeek-V4; vLLM 0.26.0 `models/deepseek_v4/nvidia/ops/o_proj.py`.
    """
    return _mechanism.run(MECHANISM, prepare(x, x_scale, weight, weight_scale, dtype=dtype), implementation, config)


def prepare(x, x_scale, weight, weight_scale, *, dtype="bfloat16") -> Args:
    """Validate the arguments of `grouped_projection`; raises as it does."""
    dims = _checks.check_shapes(
        _OP,
        x=(x, "N groups W"),
        x_scale=(x_scale, "N groups xblocks"),
        weight=(weight, "groups R W"),
        weight_scale=(weight_scale, "groups rblocks xblocks"),
    )
    W, R = dims["W"], dims["R"]
    if W % BLOCK or (dims["xblocks"], dims["rblocks"]) != (W // BLOCK, -(-R // BLOCK)):
        raise ValueError(
            f"{_OP}: W must be a multiple of {BLOCK} with a scale per {BLOCK} numbers, and weight_scale [groups, "
            f"ceil(R / {BLOCK}), W / {BLOCK}], got W={W}, R={R}, x_scale {list(x_scale.shape)} and weight_scale "
            f"{list(weight_scale.shape)}"
        )
    given = _checks.check_dtype(_OP, "x", x, ("float8_e4m3fn", *_checks.FLOATS))
    _checks.check_dtype(_OP, "weight", weight, (given,), "x and weight need one dtype; cast one of them")
    wide = (_checks.F64,) if given == _checks.F64 else ("float32",)
    for name, s in (("x_scale", x_scale), ("weight_scale", weight_scale)):
        _checks.check_dtype(_OP, name, s, wide)
    _checks.check_dtype(_OP, "dtype", jax.ShapeDtypeStruct((), jnp.dtype(dtype)), _checks.FLOATS)
    return {"x": x, "x_scale": x_scale, "weight": weight, "weight_scale": weight_scale, "dtype": jnp.dtype(dtype).name}


def _reference(x, x_scale, weight, weight_scale, *, dtype):
    """Dequantize, multiply."""
    dense = p.wide(x) * fp8.expand(x_scale, x.shape, "group", BLOCK)
    kernel = p.wide(weight) * fp8.expand(weight_scale, weight.shape, "block", BLOCK)
    y = jnp.einsum("ngw,grw->ngr", dense, kernel, precision="highest")
    return y if y.dtype == jnp.float64 else y.astype(dtype)


def _cost(*, x, weight, dtype, **_):
    """Every input and output once."""
    (N, groups, W), R = x.shape, weight.shape[1]
    codes = (x.size + weight.size) * jnp.dtype(x.dtype).itemsize
    return 2 * N * groups * W * R, codes + N * groups * R * jnp.dtype(dtype).itemsize


def _probe(rng: np.random.Generator, **args: Any) -> tuple[Args, np.ndarray]:
    """A few tokens, the first and the last among them."""
    rows = np.unique([0, *rng.integers(0, args["x"].shape[0], 6), args["x"].shape[0] - 1])
    return args | {name: args[name][rows] for name in ("x", "x_scale")}, rows


def make_inputs(rng: np.random.Generator, N: int, groups: int, W: int, R: int, *, dtype: str = "float8_e4m3fn") -> Args:
    """Random arguments of `grouped_projection`."""
    rows, blocks = -(-R // BLOCK), W // BLOCK
    return {
        "x": jnp.asarray(rng.standard_normal((N, groups, W)), jnp.float32).astype(dtype),
        "x_scale": jnp.asarray(np.exp2(rng.integers(-3, 3, (N, groups, blocks))), jnp.float32),
        "weight": jnp.asarray(rng.standard_normal((groups, R, W)), jnp.float32).astype(dtype),
        "weight_scale": jnp.asarray(np.exp2(rng.integers(-3, 3, (groups, rows, blocks))), jnp.float32),
    }


def _case(name: str, *sizes: int, tags: tuple[str, ...] = ("smoke",), **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, *sizes, **options), tags=frozenset(tags))


MECHANISM = Mechanism(
    name=_OP,
    source="DeepSeek-V4; vLLM 0.26.0 vllm/models/deepseek_v4/nvidia/ops/o_proj.py",
    op=grouped_projection,
    prepare=prepare,
    reference=_reference,
    outputs=lambda **_: ("y",),
    kernels={
        "mosaic": Kernel(
            run=mosaic.grouped_projection,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=(
        _case("N5-G2-W384-R32", 5, 2, 384, 32),
        _case("N9-G2-W256-R160", 9, 2, 256, 160, tags=("full",)),
        _case("N131-G3-W640-R256", 131, 3, 640, 256, tags=("full",)),
        _case("N3-G4-W128-R128-fp32", 3, 4, 128, 128, dtype="float32"),
        *(_case(f"N{N}-G8-W4096-R1024", N, 8, 4096, 1024, tags=("full", "bench", "eight_bit")) for N in (64, 4096)),
    ),
    cost=_cost,
    probe=_probe,
    captures=("quant/block_fp8_mm_*",),
    support=(
        (
            "float8_e4m3fn, 8 groups of 4096 to 1024",
            {
                "x": jax.ShapeDtypeStruct((64, 8, 4096), jnp.float8_e4m3fn),
                "x_scale": jax.ShapeDtypeStruct((64, 8, 32), jnp.float32),
                "weight": jax.ShapeDtypeStruct((8, 1024, 4096), jnp.float8_e4m3fn),
                "weight_scale": jax.ShapeDtypeStruct((8, 8, 32), jnp.float32),
            },
        ),
    ),
)
