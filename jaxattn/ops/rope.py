"""Rotary position embedding of heads, from a table of cosines and sines."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxattn import _checks, _mechanism, _rope
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.ops.softmax_scale import rope_magnitude
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import rope as mosaic

_OP = "rope"


def rope(
    x: Float[Array, "N H D"],
    positions: Int[Array, " N"],
    cos_sin: Float[Array, "P Dr"],
    *,
    interleaved: bool = True,
    first: bool = False,
    inverse: bool = False,
    checked: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "N H D"]:
    """Every head with `Dr` of its numbers rotated by the angles of its token's position; the others are copied.

        (a, b) -> (a cos - b sin, b cos + a sin)

    in float32 (float64 for float64), one rounding. Who rotates what:

    | model | pairs | part |
    |---|---|---|
    | Llama, GPT-NeoX | halves (`interleaved=False`) | all of D |
    | DeepSeek-V2, V3 | neighbours | the 64 rotary numbers, kept apart |
    | DeepSeek-V3.2 indexer | by configuration | first 64 (`first=True`) |
    | DeepSeek-V4 attention, compressor, indexer | neighbours | last 64 |

    Args:
        x: heads, bfloat16, float16 or float32 (float64: reference only).
        positions: int32 or int64. A position outside the table takes the table's nearest row; see `checked`.
        cos_sin: `rope_table`'s rows `cos || sin`, any float dtype; vLLM's op for V3 takes a table in the dtype of `x`.
        interleaved: pairs are neighbours (2i, 2i + 1), else (i, i + Dr / 2).
        first: the rotary part comes first, else last.
        inverse: rotate back (V4's attention output carries the rotation of its values).
        checked: read `positions` and raise if one is outside the table; needs a concrete array.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        the dtype of `x`.

    Raises:
        TypeError: dtypes; ValueError: shapes, or positions in checked mode;
        NotImplementedError: the named implementation cannot run this call.

    Source: https://arxiv.org/abs/2104.09864, equation 34; vLLM 0.26.0 csrc/pos_encoding_kernels.cu.
    """
    args = prepare(x, positions, cos_sin, interleaved=interleaved, first=first, inverse=inverse, checked=checked)
    return _mechanism.run(MECHANISM, args, implementation, config)


def rope_table(
    rotary_dim: int,
    length: int,
    *,
    base: float = 10000.0,
    factor: float = 1.0,
    original: int | None = None,
    mscale: float = 0.0,
    mscale_all_dim: float | None = 0.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    dtype: Any = jnp.float32,
) -> Float[Array, "length Dr"]:
    """`cos || sin` of positions 0 to `length - 1`, stretched by YaRN if `factor` is not 1.

    Frequencies and products are formed in vLLM's order; the magnitude is that of `rope_magnitude`.

    Args:
        rotary_dim: Dr, even.
        length: rows; vLLM makes `original * factor` of them.
        base: theta; V4 has 10000 on window layers and 160000 on compressed ones.
        factor: by how much the context is stretched.
        original: context of the training before that; needed with a factor.
        mscale: the checkpoint's number of that name: 1 for V3, 0 for V4.
        mscale_all_dim: the same; None = plain YaRN.
        beta_fast: turns over the original context from which a pair keeps its frequency.
        beta_slow: turns below which a pair is stretched in full.
        truncate: round the ends of the ramp between both to whole pairs; gpt-oss does not.
        dtype: of frequencies, angles and the table: float32, or float64 for truths.

    Raises:
        ValueError: sizes, or a factor without the original context.

    Source: https://arxiv.org/abs/2309.00071, section 3.2; vLLM 0.26.0 `deepseek_scaling_rope.py`.
    """
    op = "rope_table"
    _checks.check_count(op, rotary_dim=rotary_dim, length=length)
    _checks.check_positive(op, base=base, factor=factor)
    if rotary_dim % 2:
        raise ValueError(f"{op}: rotary_dim must be even, got {rotary_dim}")
    if factor != 1.0 and original is None:
        raise ValueError(f"{op}: a factor of {factor} stretches the original context; give original=")
    inverse = _rope.frequencies(
        rotary_dim,
        base,
        factor=factor,
        original=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=truncate,
        dtype=np.dtype(dtype),
    )
    magnitude = rope_magnitude(factor, mscale=mscale, mscale_all_dim=mscale_all_dim)
    return _rope.table(jnp.asarray(inverse), jnp.arange(length), magnitude)


def prepare(x, positions, cos_sin, *, interleaved=True, first=False, inverse=False, checked=False) -> Args:
    """Validate and complete the arguments of `rope`; raises as it does."""
    dims = _checks.check_shapes(_OP, x=(x, "N H D"), positions=(positions, "N"), cos_sin=(cos_sin, "P Dr"))
    _checks.check_dtype(_OP, "x", x, _checks.FLOATS)
    _checks.check_dtype(_OP, "positions", positions, ("int32", "int64"))
    check_table(_OP, cos_sin, dims["D"])
    if checked:
        check_positions(positions, dims["P"])
    return {
        "x": x,
        "positions": positions,
        "cos_sin": cos_sin,
        "interleaved": bool(interleaved),
        "first": bool(first),
        "inverse": bool(inverse),
    }


def check_table(op: str, cos_sin: Any, D: int) -> None:
    """Raise unless `cos_sin` [P, Dr] is a table for heads of D numbers."""
    _checks.check_dtype(op, "cos_sin", cos_sin, _checks.FLOATS)
    P, Dr = cos_sin.shape
    if not P or Dr % 2 or not 0 < Dr <= D:
        raise ValueError(
            f"{op}: cos_sin must be [P Dr] with at least one row and an even Dr of at most D={D}, got {P} rows of {Dr}"
        )


def check_positions(positions: Int[Array, " N"], P: int) -> None:
    """Raise `ValueError` unless every position is a row of the table, or if they cannot be read (under jit)."""
    if not _checks.is_concrete(positions):
        raise ValueError(f"{_OP}: checked=True reads the positions and needs a concrete array; check them before jit")
    host = np.asarray(positions)
    bad = np.flatnonzero((host < 0) | (host >= P))
    if bad.size:
        i = int(bad[0])
        raise ValueError(f"{_OP}: positions[{i}] must be a row of the table, 0 to {P - 1}, got {host[i]}")


def _reference(x, positions, cos_sin, *, interleaved, first, inverse):
    """The formula on the rotary part."""
    kept, part = _rope.split(p.wide(x), cos_sin.shape[1], first)
    turned = _rope.rotate(part, _rope.rows(cos_sin, positions)[:, None], interleaved=interleaved, inverse=inverse)
    return _rope.join(kept, turned, first).astype(x.dtype)


def _cost(*, x, cos_sin, **_):
    """Read and written once; six operations a pair; one row of the table a token."""
    N, H, D = x.shape
    Dr, width = cos_sin.shape[1], jnp.dtype(x.dtype).itemsize
    return 3 * N * H * Dr, 2 * N * H * D * width + N * (Dr * jnp.dtype(cos_sin.dtype).itemsize + 4)


def make_inputs(
    rng: np.random.Generator,
    N: int,
    H: int,
    D: int,
    *,
    Dr: int = 64,
    P: int = 50,
    dtype: str = "bfloat16",
    table: str = "float32",
    **options,
) -> Args:
    """Random arguments of `rope`; rows of the table that no position names are NaN.

    Args:
        rng: source of randomness.
        N: tokens.
        H: heads.
        D: head dim.
        Dr: rotary part.
        P: rows of the table.
        dtype: of the heads.
        table: dtype of the table.
        **options: passed on to the op.
    """
    positions = rng.integers(0, P, N).astype(np.int32)
    positions[:1] = P - 1
    cos_sin = np.array(_rope.table(jnp.asarray(_rope.frequencies(Dr, 10000.0)), jnp.arange(P)))
    cos_sin[np.setdiff1d(np.arange(P), positions)] = np.nan
    return {
        "x": jnp.asarray(rng.standard_normal((N, H, D)), dtype),
        "positions": jnp.asarray(positions),
        "cos_sin": jnp.asarray(cos_sin, table),
        **options,
    }


def _case(name: str, N: int, H: int, D: int, *tags: str, shapes: Any = None, **options) -> Case:
    tagged = frozenset(tags or ("smoke",))
    return Case(name=name, make=lambda rng: make_inputs(rng, N, H, D, **options), tags=tagged, shapes=shapes)


_CASES = (
    _case("N7-H4-D512-last", 7, 4, 512),
    _case("N6-H8-D128-first-fp32", 6, 8, 128, dtype="float32", first=True),
    _case("N5-H3-D64-halves-fp32", 5, 3, 64, dtype="float32", interleaved=False),
    _case("N5-H8-D128-inverse-fp32", 5, 8, 128, dtype="float32", inverse=True),
    _case("N9-H5-D64-bf16-table", 9, 5, 64, table="bfloat16"),
    _case("N3-H1-D128-all-halves-fp16", 3, 1, 128, Dr=128, dtype="float16", interleaved=False),
    _case("N3-H16-D128-first-inverse", 3, 16, 128, first=True, inverse=True),
    _case(
        "N4096-H64-D512",
        4096,
        64,
        512,
        "full",
        "bench",
        P=4096,
        shapes=lambda: _struct("bfloat16", 512, 64, N=4096, H=64),
    ),
    _case("N4096-H128-D64", 4096, 128, 64, "full", "bench", P=4096, table="bfloat16"),
)


def _struct(dtype: str, D: int, Dr: int, *, N: int = 64, H: int = 16, **options) -> Args:
    return {
        "x": jax.ShapeDtypeStruct((N, H, D), jnp.dtype(dtype)),
        "positions": jax.ShapeDtypeStruct((N,), jnp.int32),
        "cos_sin": jax.ShapeDtypeStruct((4096, Dr), jnp.float32),
        **options,
    }


_SUPPORT = tuple(
    (f"{dtype}, D {D}, {what} {Dr} rotated", _struct(dtype, D, Dr, **options))
    for dtype in ("bfloat16", "float16", "float32")
    for D, Dr, what, options in (
        (64, 64, "neighbours, all", {}),
        (128, 64, "neighbours, first", {"first": True}),
        (512, 64, "neighbours, last", {}),
        (128, 128, "halves, all", {"interleaved": False}),
    )
)

MECHANISM = Mechanism(
    name=_OP,
    source="https://arxiv.org/abs/2104.09864; YaRN: https://arxiv.org/abs/2309.00071; vLLM 0.26.0 rotary_embedding/",
    op=rope,
    prepare=prepare,
    reference=_reference,
    outputs=lambda **_: ("o",),
    kernels={
        "mosaic": Kernel(
            run=mosaic.rope,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    captures=("mla/rope_*",),
    support=_SUPPORT,
)
