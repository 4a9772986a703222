"""V4's step before attention on Mosaic GPU: one pass over memory, see `jaxattn.ops.qnorm_rope_kv_insert`.

A thread block takes some heads of one token, each head in eight lanes (16 for float32) and in two arrays: what is only
normed, and the rotated rest. One more block a token rotates kv and writes its cache row, in place.
"""

import dataclasses
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _codes, _frames, _mosaic, _packed_rows, _rotary, _rows
from pallas_kernels._frames import Frame

_DTYPES = ("bfloat16", "float16", "float32")
_D, _ROTARY = 512, 64
_KEPT = _D - _ROTARY
_ROWS = (8, 16, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`rows`: heads of one token in a thread block.

    With `table` the kernel looks its angles up itself, in a float32 table, instead of two launches before it. With
    `again` what is only normed is read once more, from the first cache, after the sum of squares: it need not wait in
    registers, and more thread blocks run on a multiprocessor. With `free` warps of a block do not wait for each other
    around their stores.
    """

    rows: int
    table: bool = False
    again: bool = False
    free: bool = False

    def __post_init__(self):
        if self.rows not in _ROWS:
            raise ValueError(f"rows must be {_mosaic.either(_ROWS)}, got {self.rows}")


def why_not(*, q, cos_sin, cache, format, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    (_, H, D), dtype = q.shape, jnp.dtype(q.dtype).name
    if dtype not in _DTYPES:
        return f"q and kv must be {_mosaic.either(_DTYPES)}, got {dtype}"
    if (D, cos_sin.shape[1]) != (_D, _ROTARY):
        return f"heads must have {_D} numbers, {_ROTARY} of them rotated, got {D} and {cos_sin.shape[1]}"
    if not H:
        return "there are no heads"
    if format == "v4" and cache.shape[1] % 4:
        return f"a page must be a multiple of 4 bytes, got {cache.shape[1]}"
    return None


def _legal(q, heads: int) -> list[int]:
    """Tiles that divide the heads once these are whole smallest tiles."""
    least = _rows.smallest(_ROTARY, _rows.vector(q.dtype))
    return [r for r in _ROWS if r >= least and -(-heads // least) * least % r == 0]


def default_config(*, q, heads, **_) -> Config:
    """The smallest tile: 64 numbers a lane."""
    return Config(rows=_legal(q, heads)[0])


def configs(*, q, cos_sin, heads, **_) -> Iterable[Config]:
    """All legal tiles, in each way."""
    tables = (False, True) if _table(cos_sin) else (False,)
    ways = itertools.product(tables, (False, True), (False, True))
    return [Config(rows=r, table=t, again=a, free=f) for t, a, f in ways for r in _legal(q, heads)]


def _table(cos_sin) -> bool:
    """True if the kernel can read this table of angles."""
    return jnp.dtype(cos_sin.dtype) == jnp.float32


def qnorm_rope_kv_insert(*, config: Config, q, kv, positions, cos_sin, cache, slots, format, page, heads, eps):
    """Launch; arguments as prepared by `jaxattn.ops.qnorm_rope_kv_insert`."""
    (N, H, _), rows, dtype = q.shape, config.rows, q.dtype
    if rows not in _legal(q, heads):
        raise ValueError(f"qnorm_rope_kv_insert: {rows=} is not legal for {heads} heads of {jnp.dtype(dtype).name}")
    if config.table and not _table(cos_sin):
        raise ValueError(f"qnorm_rope_kv_insert: table=True needs a float32 table, got {jnp.dtype(cos_sin.dtype).name}")
    if not N:
        return jnp.zeros((0, heads, _D), dtype), cache
    # whole tiles of heads, which for fewer than 16 (float32: 8) costs a copy
    given, wanted = (-(-n // rows) * rows for n in (H, heads))
    q = jnp.pad(q, ((0, 0), (0, given - H), (0, 0)))
    frame = Frame((rows, _ROTARY), _rows.vector(dtype), _frames.is_narrow(dtype))
    whole = Frame((rows, _KEPT), frame.vec, frame.narrow)
    of_angles = (cos_sin, positions) if config.table else _rotary.angles(cos_sin, positions)
    pages, size = cache.shape[0], cache.shape[1] if page is None else page
    flat = cache if format == "v4" else cache.reshape(pages, size, 8, _ROTARY)

    def angles(token, first_ref, second_ref, part):
        """Factors of the rotary part of a token, as the rows of a frame [rows, 64] have them."""
        kind, shape = part.numbers.reduce(0), (_ROTARY,)
        if config.table:
            found = _rotary.from_table(first_ref, second_ref[token], shape, kind)
        else:
            found = [plgpu.load(ref.at[token], layout=kind, optimized=False) for ref in (first_ref, second_ref)]
        return (lax.broadcast_in_dim(x, part.shape, [1]) for x in found)

    def norm_and_turn(token, tile, q_ref, cos_ref, sin_ref, o_ref):
        at, out = (pl.ds(token * n + tile * rows, rows) for n in (given, wanted))
        kept = whole.load(q_ref.at[at, pl.ds(0, _KEPT)]).astype(jnp.float32)
        part = frame.load(q_ref.at[at, pl.ds(_KEPT, _ROTARY)]).astype(jnp.float32)
        cos, sin = angles(token, cos_ref, sin_ref, frame)
        squares = whole.reduce(jnp.sum, kept * kept) + frame.reduce(jnp.sum, part * part)
        mean = frame.divide_rows(squares, float(_D)) + frame.full(eps)
        root = frame.divide_rows(frame.full(1.0), frame.row("sqrt.rn.f32", jnp.sqrt, mean))

        def scale(i, _):
            here = pl.ds(i * _ROTARY, _ROTARY)
            x = _frames.wide(frame.load(q_ref.at[at, here])) * frame.spread(root)
            _mosaic.store(o_ref.at[out, here], x.astype(dtype))

        if config.again:
            lax.fori_loop(0, _KEPT // _ROTARY, scale, None)
        else:
            _mosaic.store(o_ref.at[out, pl.ds(0, _KEPT)], (kept * whole.spread(root)).astype(dtype))
        part = _rotary.turned(part * frame.spread(root), cos, sin, frame.numbers)
        _mosaic.store(o_ref.at[out, pl.ds(_KEPT, _ROTARY)], part.astype(dtype))

    def insert(token, kv_ref, cos_ref, sin_ref, slots_ref, cache_ref):
        slot = slots_ref[token]

        @pl.when((slot >= 0) & (slot < pages * size))
        def _():
            row = _packed_rows.V4
            at = _packed_rows.place_of(slot, size)
            x = row.load(kv_ref.at[token]).astype(jnp.float32)
            block = plgpu.broadcasted_iota(jnp.int32, row.shape, 0, layout=row.numbers)
            cos, sin = angles(token, cos_ref, sin_ref, row)
            x = jnp.where(block == 7, _rotary.turned(x, cos, sin, row.numbers), x)
            if format == "v4":
                _packed_rows.put_v4(cache_ref, at, _codes.rounded(x, dtype))
            else:
                _mosaic.store(cache_ref.at[at.number, at.place], x.astype(dtype))

    def body(q_ref, kv_ref, cos_ref, sin_ref, slots_ref, cache_ref, o_ref):
        tile, token = lax.axis_index("tile"), lax.axis_index("token")
        tiles = given // rows

        @pl.when(tile < tiles)
        def _():
            norm_and_turn(token, tile, q_ref, cos_ref, sin_ref, o_ref)

        if wanted > given:

            @pl.when((tile >= tiles) & (tile < wanted // rows))
            def _():
                out = pl.ds(token * wanted + tile * rows, rows)
                for ref, part in (
                    (o_ref.at[out, pl.ds(0, _KEPT)], whole),
                    (o_ref.at[out, pl.ds(_KEPT, _ROTARY)], frame),
                ):
                    _mosaic.store(ref, plgpu.layout_cast(jnp.zeros(part.shape, dtype), part.numbers))

        @pl.when(tile == wanted // rows)
        def _():
            insert(token, kv_ref, cos_ref, sin_ref, slots_ref, cache_ref)

    launch = plgpu.kernel(
        body,
        out_type=(),
        grid=(wanted // rows + 1, N),
        grid_names=("tile", "token"),
        kernel_name="qnorm_rope_kv_insert",
        # no thread reads what it writes
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=config.free),
    )
    read = q.reshape(N * given, _D), kv.reshape(N, 8, _ROTARY), *of_angles, slots
    out = jax.ShapeDtypeStruct((N * wanted, _D), dtype)
    written, out = _packed_rows.in_place(lambda *refs: launch(*read, *refs), [flat], [out])
    return out.reshape(N, wanted, _D)[:, :heads], written.reshape(cache.shape)
