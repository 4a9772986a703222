"""Paged attention of a ragged batch on Mosaic GPU (Hopper): decode and chunked prefill in one launch.

A thread block computes one tile of 64 rows: `block_q` consecutive tokens of one request times `block_g` query heads
that share a KV head. It walks over the blocks of `block_kv` keys that some row may see, fetched page by page by TMA
into a ring of `num_stages` slots, with an online softmax in base 2 between two wgmma products.

Products accumulate in float32. bfloat16 and float16 operands stay as they are, P is rounded to the dtype of q. Codes of
a float8_e4m3fn cache times the scale are rounded to q's dtype on their way into wgmma's tiles; codes with a scale per
token and head become bfloat16 (`_per_head`), and a float16 q or P two bfloat16 terms. float32 operands are
split in three bfloat16 terms and the six largest of nine products are added, smallest first: what is dropped is about
2**-24 of a product, with wgmma's truncating accumulation within a block about 2**-20; it is not TF32.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels import _online_softmax as softmax
from pallas_kernels._online_softmax import ACC, FLOOR, LOG2E, PRODUCTS, ROW
from pallas_kernels.paged_attention import _common as common
from pallas_kernels.paged_attention import _per_head as per_head
from pallas_kernels.paged_attention._common import FP8, HEAD_DIMS, PAGES, PIECE, ROWS

BLOCKS = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float16", "float32")
OPTIONAL = (*per_head.OPTIONAL, "k_scale", "v_scale", "sinks", "sums", "tiles", "p_tile")
"""References that a kernel may do without."""

f32, i32 = jnp.float32, jnp.int32


# ---------------------------------------------------------------- configuration and legality
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(common.Config):
    """How a tile walks over its keys."""

    block_kv: int = 64
    """Keys per step."""
    num_stages: int = 2
    """Steps whose keys and values may be on their way at once."""

    def __post_init__(self):
        if self.block_kv not in BLOCKS:
            raise ValueError(f"block_kv must be {_mosaic.either(BLOCKS)}, got {self.block_kv}")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must lie between 1 and 8, got {self.num_stages}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """Everything about a call that is known when it is compiled."""

    N: int
    H: int
    D: int
    K: int
    B: int
    pool: int
    page: int
    pages: int
    dtype: Any
    out_dtype: Any
    cache_dtype: Any
    per_head: bool
    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    block_kv: int
    num_stages: int
    interpreted: bool

    @property
    def block_g(self) -> int:
        """Heads of a tile: the largest divisor of the group that fits."""
        group = self.H // self.K
        return max(g for g in range(1, min(group, ROWS) + 1) if group % g == 0)

    @property
    def block_q(self) -> int:
        """Tokens of a tile."""
        return ROWS // self.block_g

    @property
    def token_major(self) -> bool:
        """Row is token * block_g + head, else head * block_q + token: the order that needs fewer TMA copies."""
        return self.block_q <= self.block_g

    @property
    def grid(self) -> tuple[int, int, int]:
        """Parts of the columns, chunks of the heads, slots for tiles.

        Tile i of request b takes slot query_start[b] // block_q + b + i: enough for any split of N tokens.
        """
        return self.D // self.columns, self.H // self.block_g, self.N // self.block_q + self.B + 1

    @property
    def terms(self) -> int:
        """16-bit terms that an operand is split into for wgmma."""
        if self.dtype.itemsize == 4:
            return 3
        return 2 if self.per_head and self.dtype.name == "float16" else 1

    @property
    def cache_terms(self) -> int:
        """Terms of keys and values."""
        return 1 if self.per_head else self.terms

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Terms of q or P and of the cache whose products are added, smallest first."""
        if self.cache_terms == 1:
            return tuple((a, 0) for a in reversed(range(self.terms)))
        return PRODUCTS

    @property
    def operand(self):
        """Dtype that wgmma multiplies."""
        return jnp.dtype(jnp.bfloat16) if self.terms > 1 or self.per_head else self.dtype

    @property
    def restage(self) -> bool:
        """The cache is not what wgmma reads: convert each block."""
        return self.per_head or self.cache_dtype != self.operand

    @property
    def columns(self) -> int:
        """Columns of V and o of a thread block; with conversions 256 do not fit its registers."""
        return min(self.D, 128) if self.restage else self.D

    @property
    def row_piece(self) -> int:
        """Columns of one buffer of rows; compiled, loads from a second swizzle span of 128 bytes are wrong (0.11.2)."""
        return self.columns if self.columns > 128 else PIECE

    @property
    def out_chunk(self) -> int:
        """Columns of o per accumulator; float32 needs a second one of the same size."""
        return 64 if self.terms == 3 else self.columns

    def row_of(self, token, head):
        """Row of a token, counted from the tile's first, and a head of the op."""
        head = head % self.block_g
        return token * self.block_g + head if self.token_major else head * self.block_q + token

    @property
    def rows_dtype(self):
        """Dtype of rows of q and o on their way."""
        return self.out_dtype if self.out_dtype.itemsize > self.dtype.itemsize else self.dtype

    @property
    def swizzle(self) -> int:
        """Bytes of a swizzle span of every tile; wgmma steps through the keys of P and V by as much."""
        return min(128, 2 * self.block_kv)


def _plan(config: Config, **args) -> _Plan:
    return _Plan(**common.facts(config, **args))


def why_not(**args) -> str | None:
    """None if the kernel can run these arguments, else one sentence; shapes, dtypes and options are enough."""
    x = _plan(Config(), **args)
    if x.dtype.name not in DTYPES:
        return f"q must be {_mosaic.either(DTYPES)}, got {x.dtype.name}"
    if x.per_head:
        if reason := per_head.why_not(x):
            return reason
    elif x.cache_dtype.name not in (x.dtype.name, FP8):
        return f"the cache must be {_mosaic.either((x.dtype.name, FP8))}, got {x.cache_dtype.name}"
    if x.D not in HEAD_DIMS:
        return f"the head dim must be {_mosaic.either(HEAD_DIMS)}, got {x.D}"
    if x.page not in PAGES:
        return f"the page size must be {_mosaic.either(PAGES)}, got {x.page}"
    if 0 in (x.N, x.B, x.pages):
        return f"needs a query row, a request and a table column, got N={x.N}, B={x.B} and {x.pages} columns"
    return None


def default_config(**args) -> Config:
    """Two steps in flight, sized to leave room for several thread blocks per multiprocessor; not tuned."""
    x = _plan(Config(), **args)
    wide = x.D == 256
    if x.cache_terms == 1:
        return Config(block_kv=32 if wide or x.terms > 1 else 64)
    return Config(block_kv=16 if wide else 32)


def configs(**args) -> Iterator[Config]:
    """Every configuration that fits shared memory and registers."""
    for block_kv in BLOCKS:
        for num_stages in (2, 3, 4):
            config = Config(block_kv=block_kv, num_stages=num_stages)
            if _illegal(_plan(config, **args)) is None:
                yield config


def _illegal(x: _Plan) -> str | None:
    if x.block_kv == 16 and (x.cache_terms, x.D) != (3, 256):
        return f"block_kv=16 is for float32 with head dim 256 only, got {x.dtype.name} with {x.D}; use 32 or more"
    most = 32 if x.terms > 1 else 64 if x.restage or x.D == 256 else 128  # beyond these ptxas spills registers
    if x.block_kv > most:
        return f"block_kv must be at most {most} for {x.dtype.name} on {x.cache_dtype.name} of {x.D}, got {x.block_kv}"
    if (used := _mosaic.smem_bytes(_scratch(x).values())) > _mosaic.SMEM_BYTES:
        given = f"block_kv={x.block_kv}, num_stages={x.num_stages}"
        return f"{given} needs {used} bytes of shared memory, more than {_mosaic.SMEM_BYTES}; use smaller values"
    return None


# ---------------------------------------------------------------- scratch memory
def _scratch(x: _Plan) -> dict[str, Any]:
    """Scratch of one thread block.

    `rows` takes q's rows as TMA brings them, and the output on its way back; wgmma reads `q_tile`. The rings hold
    tiles for wgmma, or raw values that go through `tiles` when they are needed. `p_tile` exists interpreted only.
    """
    swizzled = _mosaic.swizzled(x.swizzle, bytes_per_value=2)

    def ring(columns):
        shape = x.num_stages, x.block_kv, columns * per_head.width(x) // x.D
        return plgpu.SMEM(shape, x.cache_dtype, transforms=() if x.restage else swizzled)

    copies = (1 + x.per_head) * max(1, x.block_kv // x.page)
    arrivals = plgpu.Barrier(num_arrivals=copies, num_barriers=x.num_stages)
    # named, or Mosaic looks for them long; wider rows stay plain
    spans = _mosaic.swizzled(128, bytes_per_value=x.rows_dtype.itemsize, rows=1) if x.row_piece == PIECE else ()
    scratch = {
        "rows": plgpu.SMEM((x.columns // x.row_piece, ROWS, x.row_piece), x.rows_dtype, transforms=spans),
        "q_tile": plgpu.SMEM((x.terms, ROWS, x.D), x.operand, transforms=swizzled),
        "k_ring": ring(x.D),
        "v_ring": ring(x.columns),
        "rows_bar": plgpu.Barrier(num_arrivals=min(x.block_q, x.block_g) * (x.columns // x.row_piece)),
        "k_bar": arrivals,
        "v_bar": arrivals,
    }
    if x.restage:
        scratch["tiles"] = plgpu.SMEM((x.cache_terms, x.block_kv, x.D), x.operand, transforms=swizzled)
    scratch |= per_head.scratch(x)
    if x.interpreted:
        scratch["p_tile"] = plgpu.SMEM((x.terms, ROWS, x.block_kv), x.operand)
    return scratch


# ---------------------------------------------------------------- launch
def paged_attention(*, config: Config, return_lse: bool, **args):
    """Run the kernel on prepared arguments of `jaxattn.paged_attention`, all by name.

    Returns:
        o [N, H, D] in q's dtype, and with `return_lse` the natural-log lse [N, H] in float32.

    Raises:
        ValueError: `config` does not fit these shapes.
    """
    x = _plan(config, **args)
    if reason := _illegal(x):
        raise ValueError(f"paged_attention: {reason}")
    inputs = {name: args[name] for name in ("q", "k_pages", "v_pages", "page_table", "lengths", "query_start")}
    scales = {name: args[name] for name in ("k_scale", "v_scale") if args[name] is not None}
    inputs |= {name: scale.astype(f32).reshape(1) for name, scale in scales.items()}
    inputs |= per_head.inputs(x, args)
    inputs["q"] = args["q"].astype(x.rows_dtype)
    if args["sinks"] is not None:
        inputs["sinks"] = _sink_rows(x, args["sinks"])
    outputs = {"o": jax.ShapeDtypeStruct((x.N, x.H, x.D), x.rows_dtype)}
    if return_lse:
        outputs["sums"] = jax.ShapeDtypeStruct((x.grid[2], x.grid[1], 2, ROWS), f32)

    def body(*refs, **scratch):
        given = dict(zip((*inputs, *outputs), refs, strict=True))
        _block(x, SimpleNamespace(**dict.fromkeys(OPTIONAL) | given | scratch))

    o, *sums = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=_scratch(x),
        grid=x.grid,
        grid_names=("part", "chunk", "slot"),
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=x.terms == 1 and x.softcap is None,  # the approximate tanh has 11 bits
            reduction_scratch_bytes=0,  # row reductions stay within four lanes
        ),
    )(*inputs.values())
    return (o, common.lse(x, sums[0], args["query_start"])) if return_lse else o


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tile:
    """What a thread block computes, as scalars on the device.

    `count` tokens (at most block_q) from row `token0` of q on, the first at `position` among the request's `length`
    keys, with the heads from `head0` on and the columns of V and o from `column0` on.
    """

    part: Any
    chunk: Any
    slot: Any
    request: Any
    length: Any
    token0: Any
    count: Any
    position: Any
    head0: Any
    column0: Any


def _row_token(x: _Plan, row):
    """Token of a row, counted from the tile's first; rows that hold no pair get some number."""
    return lax.div(row, i32(x.block_g)) if x.token_major else lax.rem(row, i32(x.block_q))


def _sink_rows(x: _Plan, sinks):
    """Sinks [H] in base 2 as each tile's rows need them: float32 [chunks, ROWS]."""
    row = jnp.arange(ROWS)
    head = row % x.block_g if x.token_major else jnp.minimum(row // x.block_q, x.block_g - 1)
    sinks = jnp.clip(sinks.astype(f32) * LOG2E, FLOOR, -FLOOR)
    return sinks.reshape(-1, x.block_g)[:, head]


# ---------------------------------------------------------------- device code
def _block(x: _Plan, r: Any) -> None:
    """One thread block: find the tile's request, attend, store."""
    part, chunk, slot = (lax.axis_index(name) for name in ("part", "chunk", "slot"))

    def start_of(b):
        return jnp.clip(r.query_start[b], 0, x.N)

    def halve(_, bounds):
        low, high = bounds
        middle = lax.div(low + high + 1, i32(2))
        inside = lax.div(start_of(middle), i32(x.block_q)) + middle <= slot
        return jnp.where(inside, middle, low), jnp.where(inside, high, middle - 1)

    b, _ = lax.fori_loop(0, x.B.bit_length(), halve, (i32(0), i32(x.B)))
    request = jnp.minimum(b, x.B - 1)
    real = b < x.B  # b == B: the padding behind the last request, rows without keys
    start = start_of(b)
    end = jnp.where(real, start_of(request + 1), x.N)
    length = jnp.where(real, jnp.clip(r.lengths[request], 0, x.pages * x.page), 0)
    skipped = (slot - lax.div(start, i32(x.block_q)) - b) * x.block_q
    tile = _Tile(
        part=part,
        chunk=chunk,
        slot=slot,
        request=request,
        length=length,
        token0=start + skipped,
        count=jnp.minimum(end - start - skipped, x.block_q),
        position=length - (end - start) + skipped,
        head0=chunk * x.block_g,
        column0=part * x.columns,
    )
    pl.when(tile.count > 0)(lambda: _attend(x, r, tile))


def _attend(x: _Plan, r: Any, t: _Tile) -> None:
    """Online softmax over the tile's keys, sink, output."""
    block_kv, num_stages = x.block_kv, x.num_stages
    mask = {"causal": x.causal, "window": x.window, "length": t.length}
    low, high, full_low, full_high = common.key_range(position=t.position, count=t.count, **mask)
    first = lax.div(low, i32(block_kv))
    last = jnp.where(high > low, lax.div(high + (block_kv - 1), i32(block_kv)), first)
    full_first = jnp.clip(lax.div(full_low + (block_kv - 1), i32(block_kv)), first, last)
    full_last = jnp.clip(lax.div(full_high, i32(block_kv)), full_first, last)
    kv_head = lax.div(t.head0, i32(x.H // x.K))
    first_page, last_page = lax.div(low, i32(x.page)), lax.div(jnp.maximum(high - 1, 0), i32(x.page))

    def page_numbers(j):
        """Pages of block j; of the pages outside the visible range the nearest one inside is read again."""
        base = lax.div(j * block_kv, i32(x.page))
        return [
            jnp.clip(r.page_table[t.request, jnp.clip(base + i, first_page, last_page)], 0, x.pool - 1)
            for i in range(max(1, block_kv // x.page))
        ]

    def fetch(pool, ring, bars, columns, j, pages):
        to = lax.rem(j - first, i32(num_stages))
        rows = min(x.page, block_kv)
        offset = lax.rem(j * block_kv, i32(x.page)) if block_kv < x.page else 0
        for i, number in enumerate(pages):
            place = pl.ds(i * rows, rows)
            source = pool.at[number, pl.ds(offset, rows), kv_head, columns]
            plgpu.copy_gmem_to_smem(source, ring.at[to, place], bars.at[to])
            if x.per_head:
                per_head.fetch(x, r, ring, (number, offset), (to, i * rows), rows, bars.at[to])

    packed = x.D // per_head.width(x)
    fetch_k = functools.partial(fetch, r.k_pages, r.k_ring, r.k_bar, pl.ds(0, x.D // packed))
    fetch_v = functools.partial(
        fetch, r.v_pages, r.v_ring, r.v_bar, pl.ds(lax.div(t.column0, i32(packed)), x.columns // packed)
    )

    def prefetch(j, pages):
        fetch_k(j, pages)
        fetch_v(j, pages)

    for i in range(num_stages):
        pl.when(first + i < last)(lambda j=first + i: prefetch(j, page_numbers(j)))
    _load_q(x, r, t)

    k_scale, v_scale = (None if scale is None else scale[0] for scale in (r.k_scale, r.v_scale))
    token = _row_token(x, plgpu.broadcasted_iota(i32, (ROWS, block_kv), 0, layout=ACC))
    column = plgpu.broadcasted_iota(i32, (ROWS, block_kv), 1, layout=ACC)
    sharp = (x.scale if x.softcap is None else x.softcap) * LOG2E

    def step(j, state, masked):
        at = lax.rem(j - first, i32(num_stages))
        more = j + num_stages < last
        ahead = page_numbers(jnp.minimum(j + num_stages, last - 1))
        plgpu.barrier_wait(r.k_bar.at[at])
        scales = per_head.columns(x, r.k_scales.at[at], kv_head) if x.per_head else None
        k = _operand(x, r, r.k_ring.at[at], k_scale, None, (r.k_scales, at, kv_head))
        s = _scores(x, r, k)
        s = s if scales is None else s * per_head.down(scales, s)
        pl.when(more)(lambda: fetch_k(j + num_stages, ahead))
        if x.softcap is not None:
            s = jnp.tanh(s * (x.scale / x.softcap))
        if masked:
            seen = common.visible(position=t.position + token, key=j * block_kv + column, **mask)
            s = jnp.where(seen, s, -jnp.inf)
        (m, total, o), p = softmax.update(state, s, sharp)
        plgpu.barrier_wait(r.v_bar.at[at])
        hole = (j * block_kv, low, high) if masked else None
        if x.per_head:
            p = p * per_head.down(per_head.columns(x, r.v_scales.at[at], kv_head, hole), p)
        v = _operand(x, r, r.v_ring.at[at], v_scale, hole, (r.v_scales, at, kv_head))
        o = _add_product(x, r, o, p, v)
        pl.when(more)(lambda: fetch_v(j + num_stages, ahead))
        return m, total, o

    masked, plain = (functools.partial(step, masked=masked) for masked in (True, False))
    state = softmax.start(ROWS, (x.out_chunk,) * (x.columns // x.out_chunk))
    if x.window is not None:
        state = lax.fori_loop(first, full_first, masked, state)
    state = lax.fori_loop(full_first, full_last, plain, state)
    state = lax.fori_loop(full_last, last, masked, state)

    if r.sums is not None:

        @pl.when(t.part == 0)
        def _():
            r.sums[t.slot, t.chunk, 0], r.sums[t.slot, t.chunk, 1] = state[:2]

    if r.sinks is not None:
        state = softmax.with_sink(state, plgpu.load(r.sinks.at[t.chunk], layout=ROW, optimized=False))
    _store(x, r, softmax.output(state), t)


def _load_q(x: _Plan, r: Any, t: _Tile) -> None:
    """Bring the tile's rows of q into shared memory as wgmma reads them, split in terms."""
    width = x.row_piece
    for column in range(0, x.D, x.columns):
        for n in range(x.columns // width):
            rows, columns = r.rows.at[n], pl.ds(column + n * width, width)
            copies, size = sorted((x.block_q, x.block_g))
            for i in range(copies):
                at = pl.ds(t.token0, x.block_q), t.head0 + i
                if x.token_major:
                    at = jnp.minimum(t.token0 + i, x.N - 1), pl.ds(t.head0, x.block_g)
                plgpu.copy_gmem_to_smem(r.q.at[*at, columns], rows.at[pl.ds(i * size, size)], r.rows_bar)
        plgpu.barrier_wait(r.rows_bar)
        for piece in range(0, x.columns, PIECE):
            rows = r.rows.at[piece // width]
            if width > PIECE:
                rows = rows.at[:, pl.ds(piece % width, PIECE)]
            value = plgpu.load(rows, layout=_mosaic.strips(x.rows_dtype, x.swizzle), optimized=x.swizzle == 128)
            value = value.astype(f32) if x.terms == 2 else value
            for i, term in enumerate(softmax.split(value, x.terms, x.operand)):
                r.q_tile[i, :, pl.ds(column + piece, PIECE)] = term
        plgpu.commit_smem()


def _operand(x: _Plan, r: Any, raw, scale, bounds, per_token) -> Callable[[Any], Any]:
    """Term -> tile of a block for wgmma, converted if need be.

    `bounds` (block start, low, high) names the keys that some row sees; the others are made zero, because a product
    with P = 0 would let their NaN through. `per_token` says where the scales of the block's tokens lie.
    """
    (rows, columns), layout = raw.shape, _mosaic.strips(raw.dtype, x.swizzle)
    pieces = [pl.ds(column, PIECE) for column in range(0, columns, PIECE)]

    def cleared(value):
        if bounds is None:
            return value
        start, low, high = bounds
        row = plgpu.broadcasted_iota(i32, value.shape, 0, layout=layout)
        return jnp.where((row >= low - start) & (row < high - start), value, jnp.zeros_like(value))

    if x.per_head:
        for column, value in per_head.pieces(x, raw, per_token, layout, x.swizzle // 2):
            r.tiles[0, :, pl.ds(column, PIECE)] = cleared(value)
    elif x.restage:
        for piece in pieces:
            value = plgpu.load(raw.at[:, piece], layout=layout).astype(f32)
            if scale is not None:
                value = value * scale
            for i, term in enumerate(softmax.split(cleared(value.astype(x.dtype)), x.terms, x.operand)):
                r.tiles[i, :, piece] = term
    if x.restage:
        plgpu.commit_smem()
        return lambda i: r.tiles.at[i]
    if bounds is not None:
        start, low, high = bounds

        @pl.when((start < low) | (start + rows > high))
        def _():
            for piece in pieces:
                raw[:, piece] = cleared(plgpu.load(raw.at[:, piece], layout=layout))
            plgpu.commit_smem()

    return lambda _: raw


def _scores(x: _Plan, r: Any, k: Callable[[Any], Any]):
    """Unscaled scores, float32 [ROWS, block_kv]."""

    def product(acc):
        if x.terms == 1:
            plgpu.wgmma(acc, r.q_tile.at[0], k(0).T)
        else:  # a loop: unrolled, the addresses of all operands would wait in registers

            @pl.loop(0, len(x.products))
            def _(n):
                a, b = (softmax.lookup(terms, n) for terms in zip(*x.products, strict=True))
                plgpu.wgmma(acc, r.q_tile.at[a], k(b).T)

        return acc[...]

    return pl.run_scoped(product, _mosaic.ACC((ROWS, x.block_kv), f32))


def _add_product(x: _Plan, r: Any, o: tuple, p, v: Callable[[Any], Any]) -> tuple:
    """Each chunk of o plus P times its columns of V."""
    terms = softmax.split(p, x.terms, x.operand)
    if x.interpreted:  # the interpreter multiplies what is in shared memory only
        for i, term in enumerate(terms):
            r.p_tile[i] = term
        plgpu.commit_smem()
        terms = [r.p_tile.at[i] for i in range(x.terms)]

    def product(acc, columns):
        for a, b in x.products if x.terms > 1 else ((0, 0),):
            plgpu.wgmma(acc, terms[a], v(b).at[:, columns])

    def fresh(acc, columns):
        product(acc, columns)
        return acc[...]

    out = []
    for i, chunk in enumerate(o):
        columns = pl.ds(i * x.out_chunk, x.out_chunk)
        if x.interpreted or x.terms == 3:  # a sum per block: wgmma truncates, this addition rounds
            chunk = chunk + pl.run_scoped(functools.partial(fresh, columns=columns), _mosaic.ACC(chunk.shape, f32))
        else:
            chunk = pl.run_state(functools.partial(product, columns=columns))(_mosaic.ACC.init(chunk))
        out.append(chunk)
    return tuple(out)


def _store(x: _Plan, r: Any, o: tuple, t: _Tile) -> None:
    """Write the rows of the tile's tokens; what follows them belongs to the next request."""
    width = x.row_piece
    for i, chunk in enumerate(o):
        for column in range(0, x.out_chunk, width):
            r.rows[(i * x.out_chunk + column) // width] = chunk[:, column : column + width].astype(x.rows_dtype)
    plgpu.commit_smem()

    def copy(row, rows, tokens, heads):
        for n in range(x.columns // width):
            target = r.o.at[tokens, heads, pl.ds(t.column0 + n * width, width)]
            plgpu.copy_smem_to_gmem(r.rows.at[n, pl.ds(row, rows)], target)

    def token(i):
        copy(i * x.block_g, x.block_g, t.token0 + i, pl.ds(t.head0, x.block_g))

    def tokens(i, size):
        for h in range(x.block_g):
            copy(h * x.block_q + i, size, pl.ds(t.token0 + i, size), t.head0 + h)

    if x.token_major:
        for i in range(x.block_q):
            pl.when(i < t.count)(functools.partial(token, i))
    else:
        full = t.count == x.block_q
        pl.when(full)(lambda: tokens(0, x.block_q))
        lax.fori_loop(0, jnp.where(full, 0, t.count), lambda i, _: tokens(i, 1), None)
    plgpu.wait_smem_to_gmem(0)
