"""Rows sorted by expert on Mosaic GPU: a counting sort, then one pass over the rows, see `jaxattn.ops.permute`.

A thread block takes a few tokens. It finds where their pairs go (`_counting`), then reads each token's row once and
writes it to every place: rows are read in order and written where they belong, so that nothing is read twice and no
list of sources is made. Pairs that take no part have places too, behind all others, and write zeros there.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _counting, _mosaic, _routing, _row_copies

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32")
_TOKENS, _TOGETHER, _CHUNKS = (4, 8, 16, 32), (1, 2, 4), (384, 512, 1024, 2048)
_REGISTERS, _PIECES = 64, 8
"""Of a thread for what is read together, and the most pieces that rows are cut into for it."""

i32 = jnp.int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a thread block's work."""

    tokens: int = 8
    """Of one thread block: 4, 8, 16 or 32."""
    together: int = 2
    """Rows that are read before the first of them is written: 1, 2 or 4."""
    chunk: int = 512
    """Pairs that are counted together, at most if it fits: 384, 512, 1024 or 2048."""

    def __post_init__(self):
        for name, known in (("tokens", _TOKENS), ("together", _TOGETHER), ("chunk", _CHUNKS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {_mosaic.either(known)}, got {getattr(self, name)}")


def why_not(*, x, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    dtype = jnp.dtype(x.dtype).name
    if dtype not in DTYPES:
        return f"x must be {_mosaic.either(DTYPES)}, got {dtype}"
    return _row_copies.why_not(x.shape[1], x.dtype)


def default_config(*, x, topk_ids, **_) -> Config:
    """Few tokens are spread over the card; many pairs have longer chunks, whose counts every thread block reads."""
    return Config(
        tokens=8 if x.shape[0] >= 16 * _mosaic.num_sms() else 4,
        chunk=_counting.default_chunk(topk_ids.size),
    )


def configs(*, x, **_) -> Iterator[Config]:
    """Every configuration that is worth a try."""
    del x
    for tokens in _TOKENS:
        for together in _TOGETHER:
            for chunk in _CHUNKS:
                yield Config(tokens=tokens, together=together, chunk=chunk)


def permute(*, config: Config, x, topk_ids, num_experts, expert_map):
    """Launch; arguments as prepared by `jaxattn.ops.permute`."""
    (T, A), (_, M), E, dtype = topk_ids.shape, x.shape, num_experts, x.dtype
    if not T * A:
        return jnp.zeros((0, M), dtype), jnp.zeros(E + 1, i32), jnp.zeros((T, A), i32)
    if dtype.itemsize == 1:
        x = lax.bitcast_convert_type(x, jnp.uint8)
    part = config.tokens * A
    chunk = _counting.chunk(part, min(config.chunk, T * A))
    sort = _counting.Sort(pairs=T * A, num_experts=E, part=part, chunk=chunk)
    if expert_map is not None:
        topk_ids = _routing.local_experts(topk_ids, E, expert_map)
    ids = _counting.flat(sort, topk_ids)
    counts = _counting.counted(sort, ids) if sort.chunks > 1 else []
    pieces = -(-config.together * _row_copies.registers(M, dtype) // _REGISTERS)
    row = _row_copies.Row(M, x.dtype, min(pieces, _PIECES))

    def body(x_ref, ids_ref, *refs, starts_ref, places_ref, **scratch):
        *counts_refs, o_ref, offsets_ref, positions_ref = refs
        memory = _counting.Memory(ids_ref, *(counts_refs or [None]), **scratch)
        block = lax.axis_index("block")

        @pl.when(block == 0)
        def _():
            _counting.find_starts(sort, memory, starts_ref)
            _counting.write_out(offsets_ref, starts_ref, E + 1)

        @pl.when(block > 0)
        def _():
            first = (block - 1) * config.tokens

            def take(start, count, experts, place):
                place = jnp.where(experts < E, place, -1 - place)
                places_ref[pl.ds(start, count)] = place
                where = pl.ds((block - 1) * part + start, count)
                _mosaic.store(positions_ref.at[where], jnp.maximum(place, -1))

            _counting.find_places(sort, memory, block - 1, take)

            def copy(step, _):
                tokens = [step * config.together + i for i in range(config.together)]
                for piece in row.places:
                    rows = [row.load(x_ref, jnp.minimum(first + t, T - 1), piece) for t in tokens]
                    for t, value in zip(tokens, rows, strict=True):
                        pl.when(first + t < T)(lambda t=t, value=value, piece=piece: _write(t, value, piece))

            def _write(token, value, piece):
                for a in range(A):
                    at = places_ref[token * A + a]
                    pl.when(at >= 0)(lambda at=at: row.store(o_ref, at, piece, value))
                    pl.when(at < 0)(lambda at=at: row.store(o_ref, -1 - at, piece, row.zeros()))

            lax.fori_loop(0, config.tokens // config.together, copy, None)

    permuted, offsets, positions = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((T * A, *row.shape), x.dtype),
            jax.ShapeDtypeStruct((E + 1,), i32),
            jax.ShapeDtypeStruct((sort.parts * part,), i32),
        ],
        scratch_types=sort.scratch | {"starts_ref": sort.starts, "places_ref": plgpu.SMEM((part,), i32)},
        grid=(1 + sort.parts,),
        grid_names=("block",),
        kernel_name="permute_rows",
    )(x.reshape(T, *row.shape), ids, *counts)
    permuted = permuted.reshape(T * A, M)
    if dtype != permuted.dtype:
        permuted = lax.bitcast_convert_type(permuted, dtype)
    return permuted, offsets, positions[: T * A].reshape(T, A)
