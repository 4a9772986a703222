"""Attention output on its way to V4's grouped projection: rotated back and quantized to FP8."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxattn import _checks, _mechanism, _rope
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.ops.rope import check_table
from jaxattn.quant import fp8
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import inv_rope_fp8_quant as mosaic

_OP = "inv_rope_fp8_quant"
BLOCK = 128
"""Numbers that share a scale."""


def inv_rope_fp8_quant(
    o: Float[Array, "N H D"],
    positions: Int[Array, " N"],
    cos_sin: Float[Array, "P Dr"],
    *,
    groups: int,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[Float[Array, "N groups width"], Float[Array, "N groups blocks"]]:
    """FP8 codes of the output with the rotation of its values undone, heads in groups, a scale per 128 numbers.

        y = inverse rope(o) on the last Dr numbers, float32, not rounded
        s = 2^ceil(log2(max(amax, 1e-10) / 448)) of 128 numbers,   q = e4m3(y / s)

    Args:
        o: attention output, bfloat16, float16 or float32 (float64: reference only, codes are not rounded).
        positions: int32 or int64, of the queries; rows of the table, those outside take the nearest row.
        cos_sin: `cos || sin`, any float dtype.
        groups: of heads; H a multiple. Group g holds heads `g H / groups` on.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        float8_e4m3fn `q` [N, groups, H / groups * D], float32 `scale` [N, groups, H / groups * D / 128].

    Raises:
        TypeError: dtypes; ValueError: shapes or options; NotImplementedError: the named implementation cannot run this.

    Source: vLLM 0.26.0 `models/deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py`.
    """
    return _mechanism.run(MECHANISM, prepare(o, positions, cos_sin, groups=groups), implementation, config)


def prepare(o, positions, cos_sin, *, groups) -> Args:
    """Validate and complete the arguments of `inv_rope_fp8_quant`; raises as it does."""
    dims = _checks.check_shapes(_OP, o=(o, "N H D"), positions=(positions, "N"), cos_sin=(cos_sin, "P Dr"))
    _checks.check_dtype(_OP, "o", o, _checks.FLOATS)
    _checks.check_dtype(_OP, "positions", positions, ("int32", "int64"))
    check_table(_OP, cos_sin, dims["D"])
    _checks.check_count(_OP, groups=groups)
    if not dims["H"] or dims["H"] % groups or dims["D"] % BLOCK:
        raise ValueError(
            f"{_OP}: H must be a multiple of groups={groups} and D of {BLOCK}, got H={dims['H']} and D={dims['D']}"
        )
    return {"o": o, "positions": positions, "cos_sin": cos_sin, "groups": int(groups)}


def _reference(o, positions, cos_sin, *, groups):
    """Rotation, then the quantizer of groups."""
    N, H, D = o.shape
    kept, part = _rope.split(p.wide(o), cos_sin.shape[1], False)
    part = _rope.rotate(part, _rope.rows(cos_sin, positions)[:, None], inverse=True)
    y = _rope.join(kept, part, False).reshape(N, groups, H // groups * D)
    return fp8.quantize(y, "group", group=BLOCK, rule="triton", ue8m0=True)


def _cost(*, o, **_):
    """Read once, a byte a code written, a float32 a block."""
    return 6 * o.size, o.size * (jnp.dtype(o.dtype).itemsize + 1) + o.size // BLOCK * 4


def make_inputs(
    rng: np.random.Generator,
    N: int,
    H: int,
    *,
    D: int = 512,
    Dr: int = 64,
    P: int = 50,
    groups: int = 2,
    dtype: str = "bfloat16",
    plain: bool = False,
) -> Args:
    """Random arguments of `inv_rope_fp8_quant` with zero, tiny and huge blocks (unless `plain`)."""
    o = rng.standard_normal((N, H, D)).astype(np.float32)
    if not plain:
        o[0, 0], o[-1, -1, :BLOCK], o[-1, 0, 3] = 0, o[-1, -1, :BLOCK] * np.float32(1e-12), 3e4
    positions = rng.integers(0, P, N).astype(np.int32)
    cos_sin = np.array(_rope.table(jnp.asarray(_rope.frequencies(Dr, 10000.0)), jnp.arange(P)))
    cos_sin[np.setdiff1d(np.arange(P), positions)] = np.nan
    return {
        "o": jnp.asarray(o, dtype),
        "positions": jnp.asarray(positions),
        "cos_sin": jnp.asarray(cos_sin),
        "groups": groups,
    }


def _case(name: str, N: int, H: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, H, **options), tags=frozenset(tags or ("smoke",)))


def _struct(dtype: str, H: int, groups: int, D: int = 512) -> Args:
    return {
        "o": jax.ShapeDtypeStruct((128, H, D), jnp.dtype(dtype)),
        "positions": jax.ShapeDtypeStruct((128,), jnp.int32),
        "cos_sin": jax.ShapeDtypeStruct((4096, 64), jnp.float32),
        "groups": groups,
    }


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 vllm/models/deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py",
    op=inv_rope_fp8_quant,
    prepare=prepare,
    reference=_reference,
    outputs=lambda **_: ("q", "scale"),
    kernels={
        "mosaic": Kernel(
            run=mosaic.inv_rope_fp8_quant,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=(
        _case("N5-H8", 5, 8),
        _case("N4-H4-fp32", 4, 4, dtype="float32"),
        _case("N3-H6-D128-fp16", 3, 6, D=128, groups=3, dtype="float16"),
        _case("N130-H64", 130, 64, "full", groups=8),
        _case("N4096-H64", 4096, 64, "full", "bench", groups=8, P=4096, plain=True),
    ),
    cost=_cost,
    captures=("dsv4/inv_rope_fp8_quant*",),
    support=tuple(
        (f"{dtype}, H {H} in {groups} groups", _struct(dtype, H, groups))
        for dtype in ("bfloat16", "float16", "float32")
        for H, groups in ((64, 8), (128, 16))
    ),
)
