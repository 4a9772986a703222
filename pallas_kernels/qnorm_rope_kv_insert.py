"""V4's step before attention on Mosaic GPU: one pass over memory, see `jaxattn.ops.qnorm_rope_kv_insert`.

A thread block takes some heads of one token, each head in eight lanes (16 for float32) and in two arrays: what is only
normed, and the rotated rest. One more block for some tokens rotates kv and writes cache rows, in place. The kernel
looks its angles up itself.
"""

import dataclasses
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
_ROWS, _TOKENS = (8, 16, 32), (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`rows`: heads of a token in a thread block; of so many `tokens` one block writes the cache rows.

    With `packed` numbers of 16 bits wait as such for the sum of squares, in half the registers, so that more thread
    blocks run on a multiprocessor.
    """

    rows: int
    tokens: int = 1
    packed: bool = False

    def __post_init__(self):
        if self.rows not in _ROWS:
            raise ValueError(f"rows must be {_mosaic.either(_ROWS)}, got {self.rows}")
        if self.tokens not in _TOKENS:
            raise ValueError(f"tokens must be {_mosaic.either(_TOKENS)}, got {self.tokens}")


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
    return Config(rows=_legal(q, heads)[0], tokens=4, packed=q.dtype.itemsize == 2)


def configs(*, q, heads, **_) -> Iterable[Config]:
    """All legal ones."""
    every = [Config(rows=r, tokens=n) for n in _TOKENS for r in _legal(q, heads)]
    return every + [dataclasses.replace(c, packed=True) for c in every if q.dtype.itemsize == 2]


def qnorm_rope_kv_insert(*, config: Config, q, kv, positions, cos_sin, cache, slots, format, page, heads, eps):
    """Launch; arguments as prepared by `jaxattn.ops.qnorm_rope_kv_insert`."""
    (N, H, _), rows, tokens, dtype = q.shape, config.rows, config.tokens, q.dtype
    if rows not in _legal(q, heads):
        raise ValueError(f"qnorm_rope_kv_insert: {rows=} is not legal for {heads} heads of {jnp.dtype(dtype).name}")
    if config.packed and q.dtype.itemsize != 2:
        raise ValueError(f"qnorm_rope_kv_insert: packed=True is for types of 16 bits, got {jnp.dtype(dtype).name}")
    if not N:
        return jnp.zeros((0, heads, _D), dtype), cache
    # whole tiles of heads, which for fewer than 16 (float32: 8) costs a copy
    given, wanted = (-(-n // rows) * rows for n in (H, heads))
    q = jnp.pad(q, ((0, 0), (0, given - H), (0, 0)))
    whole_tiles = wanted // rows
    parts = whole_tiles * tokens + 1
    frame = Frame((rows, _ROTARY), _rows.vector(dtype), _frames.is_narrow(dtype))
    whole = Frame((rows, _KEPT), frame.vec, frame.narrow)
    pages, size = cache.shape[0], cache.shape[1] if page is None else page
    flat = cache if format == "v4" else cache.reshape(pages, size, 8, _ROTARY)

    def angles(token, table_ref, positions_ref, part):
        """Factors of the rotary part of a token, as the rows of a frame [rows, 64] have them."""
        found = _rotary.from_table(table_ref, positions_ref[token], (_ROTARY,), part.numbers.reduce(0))
        return (lax.broadcast_in_dim(x, part.shape, [1]) for x in found)

    def norm_and_turn(token, tile, q_ref, table_ref, positions_ref, o_ref):
        at, out = (pl.ds(token * n + tile * rows, rows) for n in (given, wanted))
        loaded = whole.load(q_ref.at[at, pl.ds(0, _KEPT)])
        kept, part = _frames.wide(loaded), _frames.wide(frame.load(q_ref.at[at, pl.ds(_KEPT, _ROTARY)]))
        cos, sin = angles(token, table_ref, positions_ref, frame)
        squares = whole.reduce(jnp.sum, kept * kept) + frame.reduce(jnp.sum, part * part)
        mean = frame.divide_rows(squares, float(_D)) + frame.full(eps)
        root = frame.divide_rows(frame.full(1.0), frame.row("sqrt.rn.f32", jnp.sqrt, mean))
        if config.packed:
            kept = _frames.wide(_packed_rows.held(loaded, whole.numbers))
        _mosaic.store(o_ref.at[out, pl.ds(0, _KEPT)], (kept * whole.spread(root)).astype(dtype))
        part = _rotary.turned(part * frame.spread(root), cos, sin, frame.numbers)
        _mosaic.store(o_ref.at[out, pl.ds(_KEPT, _ROTARY)], part.astype(dtype))

    def insert(block, kv_ref, table_ref, positions_ref, slots_ref, cache_ref):
        row = _packed_rows.V4
        loaded = [(slots_ref[n], row.load(kv_ref.at[n]), *angles(n, table_ref, positions_ref, row)) for n in block]
        for slot, x, cos, sin in [(slot, *(_packed_rows.held(x, row.numbers) for x in more)) for slot, *more in loaded]:

            @pl.when((slot >= 0) & (slot < pages * size))
            def _(slot=slot, x=x, cos=cos, sin=sin):
                at = _packed_rows.place_of(slot, size)
                x = _frames.wide(x)
                part = plgpu.broadcasted_iota(jnp.int32, row.shape, 0, layout=row.numbers)
                x = jnp.where(part == 7, _rotary.turned(x, cos, sin, row.numbers), x)
                if format == "v4":
                    _packed_rows.put_v4(cache_ref, at, _codes.rounded(x, dtype))
                else:
                    _mosaic.store(cache_ref.at[at.number, at.place], x.astype(dtype))

    def body(q_ref, kv_ref, table_ref, positions_ref, slots_ref, cache_ref, o_ref):
        part, group = lax.axis_index("part"), lax.axis_index("group")
        token, tile, inserts = group * tokens, part, part == parts - 1
        if tokens > 1:
            token, tile = token + lax.div(part, jnp.int32(whole_tiles)), lax.rem(part, jnp.int32(whole_tiles))
        heading, tiles = ~inserts & (token < N), given // rows

        @pl.when(heading & (tile < tiles))
        def _():
            norm_and_turn(token, tile, q_ref, table_ref, positions_ref, o_ref)

        if wanted > given:

            @pl.when(heading & (tile >= tiles))
            def _():
                out = pl.ds(token * wanted + tile * rows, rows)
                for ref, part in (
                    (o_ref.at[out, pl.ds(0, _KEPT)], whole),
                    (o_ref.at[out, pl.ds(_KEPT, _ROTARY)], frame),
                ):
                    _mosaic.store(ref, plgpu.layout_cast(jnp.zeros(part.shape, dtype), part.numbers))

        @pl.when(inserts)
        def _():
            # beyond the last token it is done again
            block = [
                jnp.minimum(group * tokens + i, N - 1) if N % tokens else group * tokens + i for i in range(tokens)
            ]
            insert(block, kv_ref, table_ref, positions_ref, slots_ref, cache_ref)

    launch = plgpu.kernel(
        body,
        out_type=(),
        grid=(parts, pl.cdiv(N, tokens)),
        grid_names=("part", "group"),
        kernel_name="qnorm_rope_kv_insert",
    )
    read = q.reshape(N * given, _D), kv.reshape(N, 8, _ROTARY), cos_sin.astype(jnp.float32), positions, slots
    out = jax.ShapeDtypeStruct((N * wanted, _D), dtype)
    written, out = _packed_rows.in_place(lambda *refs: launch(*read, *refs), [flat], [out])
    return out.reshape(N, wanted, _D)[:, :heads], written.reshape(cache.shape)
