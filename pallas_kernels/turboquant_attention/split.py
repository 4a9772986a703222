"""Attention over a packed TurboQuant cache on Mosaic GPU (Hopper): decode and continuation prefill, split over keys.

A thread block computes one tile: `block_q` consecutive tokens of one request times `block_g` of the query heads that
share a KV head, for all KV heads, over one of `splits` equal parts of the keys. It walks over blocks of 64 tokens,
whose slots of all KV heads are one contiguous piece of each page, brought in by TMA as plain bytes into a ring. Each
warpgroup serves its share of the KV heads: it unpacks keys and values into registers, as operand A of

    S^T [64, rows] = K [64, D] q^T        O^T [D, rows] += V^T [D, 64] P^T

(`unpack.py`), so unpacked numbers never touch shared memory, and the rows of a tile are the small dimension N of wgmma.
Keys stay rotated; queries are rotated once, before the kernel. Values are scaled before their product.

Operands are float16 and sums float32: queries are scaled by a power of two for each tile and KV head so that they fit,
P by 2^8. Partial results of the splits are merged in XLA.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._online_softmax import FLOOR, LOG2E
from pallas_kernels.turboquant_attention import unpack
from pallas_kernels.turboquant_attention.unpack import ACC, KEYS, TOKENS

HEAD_DIMS = (64, 128, 256)
PAGES = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float16")
ROWS = (8, 16, 32)
_REGISTERS = {1: 72, 2: 72, 3: 48, 4: 32}
"""Registers of a thread for outputs and sums, by number of warpgroups; with more ptxas spills."""
_BOX = 256
"""Largest extent of a TMA copy in each dimension."""
_P_BITS = 8.0
"""P is scaled by two to this power."""
_Q_BITS = 12
"""The largest query element of a tile and KV head is scaled to between two to this power and twice as much."""

f16, f32, i32 = jnp.float16, jnp.float32, jnp.int32


# ---------------------------------------------------------------- configuration and legality
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut."""

    rows: int = 8
    """Rows of a tile, tokens times query heads of one KV head: the N of wgmma."""
    splits: int = 1
    """Parts of the keys."""
    warpgroups: int = 1
    """Warpgroups of a thread block, among which the KV heads are dealt out."""
    num_stages: int = 2
    """Blocks of 64 tokens that may be on their way at once."""

    def __post_init__(self):
        if self.rows not in ROWS:
            raise ValueError(f"rows must be {_mosaic.either(ROWS)}, got {self.rows}")
        if not 1 <= self.splits <= 256:
            raise ValueError(f"splits must lie between 1 and 256, got {self.splits}")
        if self.warpgroups not in (1, 2, 3, 4):
            raise ValueError(f"warpgroups must lie between 1 and 4, got {self.warpgroups}")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must lie between 1 and 8, got {self.num_stages}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """Everything about a call that is known when it is compiled."""

    N: int
    H: int
    D: int
    pool: int
    page: int
    K: int
    slot: int
    B: int
    pages: int
    dtype: Any
    scale: float
    key_bits: int
    value_bits: int
    norm_correction: bool
    levels: tuple[float, ...]
    rows: int
    splits: int
    warpgroups: int
    num_stages: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.H // self.K

    @property
    def block_g(self) -> int:
        """Heads of a tile: the largest divisor of the group that fits."""
        return max(g for g in range(1, min(self.group, self.rows) + 1) if self.group % g == 0)

    @property
    def block_q(self) -> int:
        """Tokens of a tile."""
        return self.rows // self.block_g

    @property
    def chunks(self) -> int:
        """Parts of a KV head's query heads."""
        return self.group // self.block_g

    @property
    def tiles(self) -> int:
        """Slots for tiles: tile i of request b takes slot query_start[b] // block_q + b + i."""
        return self.N // self.block_q + self.B + 1

    @property
    def heads(self) -> int:
        """KV heads of a warpgroup."""
        return self.K // self.warpgroups

    @property
    def run(self) -> int:
        """Tokens of one copy: contiguous in the cache."""
        return min(self.page, TOKENS)

    @property
    def width(self) -> int:
        """Bytes of a row, as TMA sees the cache."""
        return math.gcd(self.run * self.K * self.slot, _BOX)

    @property
    def lines(self) -> int:
        """Rows of one run."""
        return self.run * self.K * self.slot // self.width

    @property
    def boxes(self) -> tuple[tuple[int, int], ...]:
        """First row and number of rows of the TMA copies of a run; all but the last are of full height."""
        return tuple((first, min(_BOX, self.lines - first)) for first in range(0, self.lines, _BOX))

    @property
    def height(self) -> int:
        """Rows from one run to the next in shared memory, where TMA writes to multiples of 128 bytes."""
        return -(-self.lines * self.width // 128) * 128 // self.width

    @property
    def state(self) -> int:
        """Registers of a thread that outputs and sums take."""
        return self.heads * (self.D * self.rows // 128 + self.rows // 2)

    @property
    def values(self) -> int:
        """Numbers of a value that are unpacked at once: fewer leave registers for wide outputs."""
        return 64 if self.rows > 8 else min(self.D, 128)

    @property
    def slots(self) -> unpack.Slots:
        """The block's layout for device code."""
        return unpack.Slots(
            D=self.D,
            values=self.values,
            run=self.run,
            pad=(self.height - self.lines) * self.width,
            row=self.K * self.slot,
            slot=self.slot,
            heads=self.heads,
            key_bits=self.key_bits,
            value_bits=self.value_bits,
            norm_correction=self.norm_correction,
            levels=self.levels,
        )


def _plan(config: Config, *, q, pages, page_table, scale, key_bits, value_bits, norm_correction, levels, **_) -> _Plan:
    letters = ("N", "H", "D", "pool", "page", "K", "slot", "B", "pages")
    return _Plan(
        **dict(zip(letters, (*q.shape, *pages.shape, *page_table.shape), strict=True)),
        dtype=jnp.dtype(q.dtype),
        scale=scale,
        key_bits=key_bits,
        value_bits=value_bits,
        norm_correction=norm_correction,
        levels=levels if key_bits != 8 else (),
        **dataclasses.asdict(config),
    )


def why_not(**args) -> str | None:
    """None if the kernel can run these arguments, else one sentence; shapes, dtypes and options are enough."""
    x = _plan(Config(), **args)
    if x.dtype.name not in DTYPES:
        return f"q must be {_mosaic.either(DTYPES)}, because operands are float16, got {x.dtype.name}"
    if x.D not in HEAD_DIMS:
        return f"the head dim must be {_mosaic.either(HEAD_DIMS)}, got {x.D}"
    if x.page not in PAGES:
        return f"the page size must be {_mosaic.either(PAGES)}, got {x.page}"
    if 0 in (x.N, x.B, x.pages):
        return f"needs a query row, a request and a table column, got N={x.N}, B={x.B} and {x.pages} columns"
    if x.pool * x.page * x.K * x.slot // x.width >= 2**31:
        return f"the cache must have fewer than 2^31 rows of {x.width} bytes, got {x.pool} pages"
    if _illegal(_plan(_shape(x), **args)) is not None:
        return (
            f"64 tokens of K={x.K} KV heads of D={x.D} ({x.slot} bytes) must fit shared memory and registers, and do "
            "not; use fewer KV heads, for example by tensor parallelism"
        )
    return None


def _shape(x: _Plan, rows: int = 8, stages: int = 1) -> Config:
    """The configuration with most warpgroups that share the KV heads evenly and have registers for them."""
    best = 1
    for n in (2, 3, 4) if x.K > 2 else ():
        plan = dataclasses.replace(x, rows=rows, warpgroups=n)
        best = n if x.K % n == 0 and plan.state <= _REGISTERS[n] else best
    return Config(rows=rows, warpgroups=best, num_stages=stages)


def default_config(**args) -> Config:
    """As many parts as fill the multiprocessors once, as many stages as fit."""
    x = _plan(Config(), **args)
    decode = x.N <= x.B
    rows = 8 if x.group <= 8 and decode else 16
    if _illegal(_plan(_shape(x, rows), **args)) is not None:
        rows = 8
    tiles = x.B if decode else x.N * x.group // rows + x.B
    tokens = x.pages * x.page
    splits = max(1, min(_mosaic.num_sms() // max(1, tiles), -(-tokens // (2 * TOKENS)), 64))
    # two blocks on their way suffice where they are large: 131 us with two, 136 us with three (4bit_nc, K 8, D 128)
    most = 2 if TOKENS * x.K * x.slot >= 2**15 else 4
    fitting = [n for n in range(1, most + 1) if _illegal(_plan(_shape(x, rows, n), **args)) is None]
    return dataclasses.replace(_shape(x, rows, fitting[-1]), splits=splits)


def configs(**args) -> Iterator[Config]:
    """Every configuration that fits."""
    x = _plan(Config(), **args)
    default = default_config(**args)
    for rows in ROWS:
        for num_stages in (1, 2, 3, 4):
            for splits in sorted({1, default.splits, 2 * default.splits, 4 * default.splits}):
                config = dataclasses.replace(_shape(x, rows, num_stages), splits=min(splits, 256))
                if _illegal(_plan(config, **args)) is None:
                    yield config


def _illegal(x: _Plan) -> str | None:
    if x.K % x.warpgroups:
        return f"warpgroups must divide the KV heads, got {x.warpgroups} and K={x.K}"
    if x.state > _REGISTERS[x.warpgroups]:
        given = f"{x.warpgroups} warpgroups with {x.heads} KV heads each and {x.rows} rows of {x.D}"
        return f"{given} do not fit their registers; use fewer rows"
    if (used := _mosaic.smem_bytes(_scratch(x).values())) > _mosaic.SMEM_BYTES:
        given = f"rows={x.rows}, num_stages={x.num_stages}"
        return f"{given} needs {used} bytes of shared memory, more than {_mosaic.SMEM_BYTES}; use smaller values"
    return None


def _scratch(x: _Plan) -> dict[str, Any]:
    """Scratch of one thread block."""
    swizzled = _mosaic.swizzled(128, bytes_per_value=2)
    return {
        "ring": plgpu.SMEM((x.num_stages, TOKENS // x.run * x.height, x.width), jnp.uint8),
        "q": plgpu.SMEM((x.K * x.rows, x.D), f16, transforms=swizzled),
        "p": plgpu.SMEM((x.warpgroups, x.rows, TOKENS), f16, transforms=swizzled),
        "scales": plgpu.SMEM((x.warpgroups, x.heads, 2, TOKENS), f16),
        "room": plgpu.SMEM((x.warpgroups, x.heads, 4, x.rows), f32),
        "q_bar": plgpu.Barrier(),
        "full": plgpu.Barrier(num_arrivals=TOKENS // x.run * len(x.boxes), num_barriers=x.num_stages),
        "free": plgpu.Barrier(num_arrivals=x.warpgroups, num_barriers=x.num_stages),
    }


# ---------------------------------------------------------------- launch
def turboquant_attention(*, config: Config, return_lse: bool, **args):
    """Run the kernel on prepared arguments of `jaxattn.turboquant_attention`, all by name.

    Returns:
        o [N, H, D] in q's dtype, and with `return_lse` the natural-log lse [N, H] in float32.

    Raises:
        ValueError: `config` does not fit these shapes.
    """
    x = _plan(config, **args)
    if reason := _illegal(x):
        raise ValueError(f"turboquant_attention: {reason}")
    q, sharp = _query_tiles(x, args["q"], args["query_start"])
    inputs = {
        "q_tiles": q,
        "sharp": sharp,
        "bytes": args["pages"].reshape(-1, x.width),
        "page_table": args["page_table"],
        "lengths": args["lengths"],
        "query_start": args["query_start"],
    }
    if args["stored"] is not None:
        inputs["stored"] = args["stored"]
    lead = (x.tiles, x.chunks, x.splits, x.K)
    outputs = [jax.ShapeDtypeStruct((*lead, x.D, x.rows), f32), jax.ShapeDtypeStruct((*lead, 2, x.rows), f32)]

    def body(*refs, **scratch):
        given = dict(zip((*inputs, "o", "sums"), refs, strict=True))
        _block(x, SimpleNamespace(**{"stored": None} | given | scratch))

    partial, sums = plgpu.kernel(
        body,
        out_type=outputs,
        scratch_types=_scratch(x),
        grid=(x.splits, x.chunks, x.tiles),
        grid_names=("split", "chunk", "tile"),
        num_threads=x.warpgroups,
        thread_name="wg",
        kernel_name="turboquant_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(*inputs.values())
    o, lse = _merged(x, partial, sums, args["query_start"])
    return (o, lse) if return_lse else o


def _places(x: _Plan, query_start):
    """Of each query token its tile and place there, of each place in a tile its token; and which of them are real."""
    token = jnp.arange(x.N, dtype=i32)
    start = jnp.clip(query_start, 0, x.N)
    b = jnp.searchsorted(start[1:], token, side="right", method="compare_all").astype(i32)
    first = start[b]
    tile = first // x.block_q + b + (token - first) // x.block_q
    slot = jnp.arange(x.tiles, dtype=i32)
    slots = start[:-1] // x.block_q + jnp.arange(x.B, dtype=i32)  # of each request's first tile
    owner = jnp.searchsorted(slots, slot, side="right", method="compare_all").astype(i32) - 1
    of = start[owner] + (slot - slots[owner]) * x.block_q
    of = of[:, None] + jnp.arange(x.block_q, dtype=i32)
    return SimpleNamespace(
        tile=tile, at=(token - first) % x.block_q, live=b < x.B, of=of, real=of < start[owner + 1][:, None]
    )


@functools.partial(jax.jit, static_argnums=0)
def _query_tiles(x: _Plan, q, query_start):
    """Rotated queries as float16 [tiles, chunks, K, rows, D], and what scores are multiplied with [tiles, chunks, K].

    Row `token * block_g + head`; rows without a query are zero.
    """
    where = _places(x, query_start)
    tiles = jnp.where(where.real[..., None, None], q[jnp.clip(where.of, 0, x.N - 1)], 0).astype(f32)
    order = unpack.query_order(x.D, x.key_bits)
    if x.key_bits == 8:
        tiles = tiles[..., order]
    else:  # one product rotates and reorders
        tiles = jnp.einsum("...d,de->...e", tiles, _rotation(x.D)[:, order], precision="highest")
    tiles = tiles.reshape(x.tiles, x.block_q, x.K, x.chunks, x.block_g, x.D)
    tiles = tiles.transpose(0, 3, 2, 1, 4, 5)  # tile, chunk, K, token, head, D
    top = jnp.max(jnp.where(jnp.isfinite(tiles), jnp.abs(tiles), 0), axis=(3, 4, 5))
    exponent = _Q_BITS - jnp.floor(jnp.log2(jnp.maximum(top, 2.0**-100))).astype(i32)
    factor = _power_of_two(exponent)[:, :, :, None, None, None]
    tiles = (tiles * factor).astype(f16).reshape(*tiles.shape[:3], x.block_q * x.block_g, x.D)
    tiles = jnp.pad(tiles, [(0, 0)] * 3 + [(0, x.rows - tiles.shape[3]), (0, 0)])
    return tiles.reshape(x.tiles, x.chunks, x.K * x.rows, x.D), (_power_of_two(-exponent) * (x.scale * LOG2E)).reshape(
        -1
    )


def _power_of_two(exponent):
    return lax.bitcast_convert_type((exponent + 127) << 23, f32)


def _rotation(D: int) -> np.ndarray:
    """Sylvester's Hadamard matrix over sqrt(D), float32."""
    i = np.arange(D)
    return np.where(np.bitwise_count(i[:, None] & i) % 2, -(D**-0.5), D**-0.5).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _merged(x: _Plan, partial, sums, query_start):
    """O [N, H, D] and lse [N, H] from the splits' unnormalised outputs, maxima and sums."""
    where = _places(x, query_start)

    def rows(y):  # tile, chunk, split, K, ..., rows -> N, chunk, split, K, ..., head
        y = y[..., : x.block_q * x.block_g].reshape(*y.shape[:-1], x.block_q, x.block_g)
        return y[where.tile, ..., where.at, :]

    sums = rows(sums)
    m, total = sums[..., 0, :], sums[..., 1, :]  # N, chunk, split, K, head
    top = m.max(2)
    weight = jnp.exp2(m - top[:, :, None])
    whole = (weight * total).sum(2)
    o = (weight[..., None, :] * rows(partial)).sum(2) / jnp.where(whole > 0, whole, 1)[..., None, :]
    lse = jnp.where(whole > 0, top * (1 / LOG2E) + jnp.log(whole) - _P_BITS / LOG2E, -jnp.inf)
    o = o.transpose(0, 2, 1, 4, 3)[..., unpack.output_order(x.D)].reshape(x.N, x.H, x.D)
    lse = lse.transpose(0, 2, 1, 3).reshape(x.N, x.H)
    live = where.live[:, None]
    return jnp.where(live[..., None], o, 0).astype(x.dtype), jnp.where(live, lse, -jnp.inf)


# ---------------------------------------------------------------- device code
def _block(x: _Plan, r: Any) -> None:
    """One thread block: find the tile's request and its part of the keys, attend, store."""
    split, chunk, slot, wg = (lax.axis_index(name) for name in ("split", "chunk", "tile", "wg"))

    def start_of(b):
        return jnp.clip(r.query_start[b], 0, x.N)

    def halve(_, bounds):
        low, high = bounds
        middle = lax.div(low + high + 1, i32(2))
        inside = lax.div(start_of(middle), i32(x.block_q)) + middle <= slot
        return jnp.where(inside, middle, low), jnp.where(inside, high, middle - 1)

    b, _ = lax.fori_loop(0, x.B.bit_length(), halve, (i32(0), i32(x.B)))
    request = jnp.minimum(b, x.B - 1)
    start, end = start_of(request), start_of(request + 1)
    length = jnp.clip(r.lengths[request], 0, x.pages * x.page)
    skipped = (slot - lax.div(start, i32(x.block_q)) - b) * x.block_q
    count = jnp.minimum(end - start - skipped, x.block_q)
    position = length - (end - start) + skipped
    seen = length if r.stored is None else jnp.clip(r.stored[request], 0, length)
    high = jnp.clip(position + count, 0, seen)
    t = SimpleNamespace(split=split, chunk=chunk, slot=slot, wg=wg, request=request, position=position, high=high)
    pl.when((b < x.B) & (count > 0))(lambda: _attend(x, r, t))


def _attend(x: _Plan, r: Any, t: Any) -> None:
    """Online softmax over the tile's blocks of tokens of this split."""
    blocks = lax.div(t.high + (TOKENS - 1), i32(TOKENS))
    per = lax.div(blocks + (x.splits - 1), i32(x.splits))
    first = jnp.minimum(t.split * per, blocks)
    last = jnp.minimum(first + per, blocks)
    final = lax.div(jnp.maximum(t.high - 1, 0), i32(x.run))
    runs, parts = TOKENS // x.run, x.page // x.run

    def fetch(j):
        at = lax.rem(j - first, i32(x.num_stages))
        for i in range(runs):
            n = jnp.minimum(j * runs + i, final)
            number = jnp.clip(r.page_table[t.request, lax.div(n, i32(parts))], 0, x.pool - 1)
            row = (number * parts + lax.rem(n, i32(parts))) * x.lines
            for begin, size in x.boxes:
                plgpu.copy_gmem_to_smem(
                    r.bytes.at[pl.ds(row + begin, size)],
                    r.ring.at[at, pl.ds(i * x.height + begin, size)],
                    r.full.at[at],
                )

    @pl.when(t.wg == 0)
    def _():
        plgpu.copy_gmem_to_smem(r.q_tiles.at[t.slot, t.chunk], r.q, r.q_bar)
        for i in range(x.num_stages):
            pl.when(first + i < last)(functools.partial(fetch, first + i))

    sharp = [r.sharp[(t.slot * x.chunks + t.chunk) * x.K + t.wg * x.heads + i] for i in range(x.heads)]
    plgpu.barrier_wait(r.q_bar)

    def refill(j):
        """Block j takes the place of the one before the current one, which all warpgroups have done with."""

        @pl.when((t.wg == 0) & (j >= first + x.num_stages) & (j < last))
        def _():
            plgpu.barrier_wait(r.free.at[lax.rem(j - first, i32(x.num_stages))])
            fetch(j)

    def step(j, state):
        at = lax.rem(j - first, i32(x.num_stages))
        refill(j + x.num_stages - 1)
        plgpu.barrier_wait(r.full.at[at])
        raw = r.ring.at[at]
        scales = r.scales.at[t.wg]
        unpack.stage_scales(x.slots, raw, scales, t.wg, t.high - j * TOKENS)
        plgpu.commit_smem()
        out = []
        for i in range(x.heads):
            m, total, o = state[i]
            s = _scores(x, r, t, raw, i) * sharp[i]
            key = j * TOKENS + plgpu.broadcasted_iota(i32, s.shape, 0, layout=ACC)
            token = lax.div(plgpu.broadcasted_iota(i32, s.shape, 1, layout=ACC), i32(x.block_g))
            s = jnp.where((key <= t.position + token) & (key < t.high), s, -jnp.inf)
            (top,) = unpack.column_maxima([s], r.room.at[t.wg])
            m_new = jnp.maximum(m, top)
            alpha = jnp.exp2(m - m_new)
            p = jnp.exp2(s - (_across(m_new, s) - _P_BITS))
            total = total * _across(alpha, total) + p
            unpack.store_transposed(r.p.at[t.wg], p.astype(f16), _mosaic.swizzled(128, bytes_per_value=2))
            plgpu.commit_smem()
            new = []
            for piece, part in enumerate(o):
                value = unpack.value_operand(x.slots, raw, scales, t.wg, i, piece)
                new.append(_add_product(part * _across(alpha, part), value, r.p.at[t.wg]))
            out.append((m_new, total, tuple(new)))
        plgpu.barrier_arrive(r.free.at[at])
        return tuple(out)

    def zeros(shape, value=0.0, layout: Any = ACC):
        return plgpu.layout_cast(jnp.full(shape, value, f32), layout)

    size = x.values
    state = tuple(
        (
            zeros((x.rows,), FLOOR, unpack.COLUMN),
            zeros((TOKENS, x.rows)),
            tuple(zeros((size, x.rows)) for _ in range(x.D // size)),
        )
        for _ in range(x.heads)
    )
    state = lax.fori_loop(first, last, step, state)
    for i, (m, total, o) in enumerate(state):
        place = t.slot, t.chunk, t.split, t.wg * x.heads + i
        for piece, part in enumerate(o):
            _mosaic.store(r.o.at[(*place, pl.ds(piece * size, size))], part)
        _mosaic.store(r.sums.at[(*place, 0)], m)
        _mosaic.store(r.sums.at[(*place, 1)], unpack.column_sum(total, r.room.at[t.wg]))


def _across(column, like):
    """A value per column, repeated over the rows of `like`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(column, like.shape, [1]), ACC)


def _scores(x: _Plan, r: Any, t: Any, raw: Any, i: int):
    """Products of keys and queries, float32 [64, rows], of head i of the warpgroup."""
    q = r.q.at[pl.ds((t.wg * x.heads + i) * x.rows, x.rows)]

    def products(multiply):
        squares = []
        for piece in range(x.D // KEYS):
            key, square = unpack.key_operand(x.slots, raw, t.wg, i, piece)
            squares += [] if square is None else [square]
            multiply(key, q.at[:, pl.ds(piece * KEYS, KEYS)])
            if piece and not _mosaic.interpreting():
                plgpu.wgmma_wait(1)  # frees the registers of the piece before
        return squares

    if _mosaic.interpreting():
        parts = []
        squares = products(lambda k, q: parts.append(jnp.dot(k.astype(f32), q[...].astype(f32).T, precision="highest")))
        s = functools.reduce(jnp.add, parts)
    else:

        def accumulate(acc):
            squares = products(lambda k, q: plgpu.wgmma(acc, k, q.T))
            return acc[...], squares

        s, squares = pl.run_scoped(accumulate, _mosaic.ACC((TOKENS, x.rows), f32))
    if x.key_bits == 8:
        return s
    factor = unpack.key_factor(x.slots, raw, t.wg, i, squares)
    return s * plgpu.layout_cast(lax.broadcast_in_dim(factor, s.shape, [0]), ACC)


def _add_product(o, value, p):
    """O + values times P, both transposed."""
    if _mosaic.interpreting():
        return o + jnp.dot(value.astype(f32), p[...].astype(f32).T, precision="highest")
    return pl.run_state(lambda acc: plgpu.wgmma(acc, value, p.T))(_mosaic.ACC.init(o))
