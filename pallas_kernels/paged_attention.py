"""Paged attention of a ragged batch on Mosaic GPU (Hopper): decode and chunked prefill in one launch.

A thread block computes one tile of 64 rows: `block_q` consecutive tokens of one request times `block_g` query heads
that share a KV head. It walks over the blocks of `block_kv` keys that some row may see, fetched page by page by TMA
into a ring of `num_stages` slots, with an online softmax in base 2 between two wgmma products.

Precision of the products, accumulated in float32 throughout:

* bfloat16, float16: operands as they are, P rounded to the dtype of q.
* float8_e4m3fn cache: codes are multiplied with the scale in float32, rounded to q's dtype and stored again in shared
  memory, where wgmma reads them.
* float32: every operand is split in three bfloat16 terms and the six largest of the nine products are added, smallest
  first; what is dropped is about 2**-24 of a product. Together with wgmma's truncating accumulation within a block
  this is about 2**-20, not TF32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic

ROWS = 64
"""Rows of a tile: the M of one wgmma."""
LOG2E = math.log2(math.e)
FLOOR = -1e30
"""Start of the running maximum: finite, so that masked scores of -inf never meet another infinity."""
PAGES = (16, 32, 64, 128)
HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")
FP8 = "float8_e4m3fn"
SPLIT = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))
"""Products of the three bfloat16 terms of two float32 operands that are kept, smallest first."""
MAX_ACCUMULATORS = 176
"""Registers of a thread that accumulators and P may take; more spills."""
PIECE = 64
"""Columns that go through registers together on their way to a tile; a whole block would spill."""
_FAR = 2**30

ACC = plgpu.Layout.WGMMA
ROW = ACC.reduce(1)

f32, i32 = jnp.float32, jnp.int32


# ---------------------------------------------------------------- configuration and legality
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a tile walks over its keys."""

    block_kv: int = 64
    """Keys per step."""
    num_stages: int = 2
    """Steps whose keys and values may be on their way at once."""

    def __post_init__(self):
        if self.block_kv not in (16, 32, 64, 128):
            raise ValueError(f"block_kv must be 16, 32, 64 or 128, got {self.block_kv}")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must lie between 1 and 8, got {self.num_stages}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Problem:
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
    cache_dtype: Any
    scale: float
    causal: bool
    window: int | None
    softcap: float | None

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
        return 3 if self.dtype.itemsize == 4 else 1

    @property
    def operand(self):
        """Dtype that wgmma multiplies."""
        return jnp.dtype(jnp.bfloat16) if self.terms == 3 else self.dtype

    @property
    def restage(self) -> bool:
        """The cache is not what wgmma reads: convert each block."""
        return self.cache_dtype != self.operand

    @property
    def columns(self) -> int:
        """Columns of V and o of a thread block; 256 in float32 do not fit its registers beside a second accumulator."""
        return min(self.D, 128) if self.terms == 3 else self.D

    @property
    def out_chunk(self) -> int:
        """Columns of o per accumulator; float32 needs a second one of the same size."""
        return min(self.D, 64) if self.terms == 3 else self.D


def _problem(*, q, k_pages, page_table, scale, causal, window, softcap, **_) -> _Problem:
    (N, H, D), (pool, page, K, _), (B, pages) = q.shape, k_pages.shape, page_table.shape
    return _Problem(
        N=N,
        H=H,
        D=D,
        K=K,
        B=B,
        pool=pool,
        page=page,
        pages=pages,
        dtype=jnp.dtype(q.dtype),
        cache_dtype=jnp.dtype(k_pages.dtype),
        scale=scale,
        causal=causal,
        window=None if window is None else min(window, _FAR),
        softcap=softcap,
    )


def why_not(**args) -> str | None:
    """None if the kernel can run these arguments, else one sentence; shapes, dtypes and options are enough."""
    x = _problem(**args)
    if x.dtype.name not in DTYPES:
        return f"q must be {_either(DTYPES)}, got {x.dtype.name}"
    if x.cache_dtype.name not in (x.dtype.name, FP8):
        return f"the cache must be {_either((x.dtype.name, FP8))}, got {x.cache_dtype.name}"
    if x.D not in HEAD_DIMS:
        return f"the head dim must be {_either(HEAD_DIMS)}, got {x.D}"
    if x.page not in PAGES:
        return f"the page size must be {_either(PAGES)}, got {x.page}"
    if 0 in (x.N, x.B, x.pages):
        return f"needs a query row, a request and a table column, got N={x.N}, B={x.B} and {x.pages} columns"
    return None


def _either(names) -> str:
    *rest, last = map(str, names)
    return f"{', '.join(rest)} or {last}"


def default_config(**args) -> Config:
    """Two steps in flight, sized to leave room for several thread blocks per multiprocessor; not tuned."""
    x = _problem(**args)
    return Config(block_kv=64 if x.terms == 1 else {64: 32, 128: 32, 256: 16}[x.D], num_stages=2)


def configs(**args) -> Iterator[Config]:
    """Every configuration whose scratch fits into shared memory and whose accumulators fit into registers."""
    x = _problem(**args)
    for block_kv in (16, 32, 64, 128):
        for num_stages in (2, 3, 4):
            config = Config(block_kv=block_kv, num_stages=num_stages)
            if _illegal(x, config) is None:
                yield config


def _illegal(x: _Problem, config: Config) -> str | None:
    if config.block_kv == 16 and (x.terms, x.D) != (3, 256):
        return f"{config} is for float32 with head dim 256 only; use a block_kv of 32 or more"
    used = _smem_bytes(_scratch(x, config))
    if used > _mosaic.SMEM_BYTES:
        return f"{config} needs {used} bytes of shared memory, more than {_mosaic.SMEM_BYTES}; use smaller blocks"
    spread = config.block_kv if x.terms == 1 else 2 * config.block_kv + x.out_chunk
    used = ROWS * (x.columns + spread) // 128
    if used > MAX_ACCUMULATORS:
        return f"{config} needs {used} registers for accumulators, more than {MAX_ACCUMULATORS}; use a smaller block_kv"
    return None


# ---------------------------------------------------------------- scratch memory
def _scratch(x: _Problem, config: Config, *, interpreted: bool = False) -> dict[str, Any]:
    """Scratch of one thread block.

    `rows` takes q's rows as TMA brings them, and the output on its way back; `q` is what wgmma reads. `k` and `v` are
    rings of wgmma tiles, or of raw values that go through `tiles` when they are needed. `p` exists interpreted only.
    """
    swizzled = _mosaic.swizzled(_swizzle(config), bytes_per_value=2)

    def ring(columns):
        shape = config.num_stages, config.block_kv, columns
        return plgpu.SMEM(shape, x.cache_dtype, transforms=() if x.restage else swizzled)

    arrivals = plgpu.Barrier(num_arrivals=max(1, config.block_kv // x.page), num_barriers=config.num_stages)
    scratch = {
        "rows": plgpu.SMEM((ROWS, x.columns), x.dtype),
        "q_tile": plgpu.SMEM((x.terms, ROWS, x.D), x.operand, transforms=swizzled),
        "k_ring": ring(x.D),
        "v_ring": ring(x.columns),
        "rows_bar": plgpu.Barrier(num_arrivals=min(x.block_q, x.block_g)),
        "k_bar": arrivals,
        "v_bar": arrivals,
    }
    if x.restage:
        scratch["tiles"] = plgpu.SMEM((x.terms, config.block_kv, x.D), x.operand, transforms=swizzled)
    if interpreted:
        scratch["p_tile"] = plgpu.SMEM((x.terms, ROWS, config.block_kv), x.operand)
    return scratch


def _swizzle(config: Config) -> int:
    """Bytes of a swizzle span of every tile; wgmma steps through the keys of P and V by as much."""
    return min(128, 2 * config.block_kv)


def _smem_bytes(scratch: dict[str, Any]) -> int:
    """Shared memory of a scratch: every buffer starts at a multiple of 1024 bytes, one more holds the barriers."""
    buffers = [s for s in scratch.values() if not isinstance(s, plgpu.Barrier)]
    return 1024 + sum(-(-math.prod(s.shape) * jnp.dtype(s.dtype).itemsize // 1024) * 1024 for s in buffers)


# ---------------------------------------------------------------- launch
def paged_attention(*, config: Config, return_lse: bool, **args):
    """Run the kernel on prepared arguments of `jaxattn.paged_attention`, all by name.

    Returns:
        o [N, H, D] in q's dtype, and with `return_lse` the natural-log lse [N, H] in float32.

    Raises:
        ValueError: `config` does not fit these shapes.
    """
    x = _problem(**args)
    reason = _illegal(x, config)
    if reason is not None:
        raise ValueError(f"paged_attention: {reason}")
    inputs = {name: args[name] for name in ("q", "k_pages", "v_pages", "page_table", "lengths", "query_start")}
    inputs |= {
        name: jnp.asarray(args[name], f32).reshape(1)
        for name in ("k_scale", "v_scale")
        if args[name] is not None and x.restage
    }
    if args["sinks"] is not None:
        inputs["sinks"] = _sink_rows(x, args["sinks"])
    outputs = {"o": jax.ShapeDtypeStruct((x.N, x.H, x.D), x.dtype)}
    if return_lse:
        outputs["lse"] = jax.ShapeDtypeStruct((x.grid[2], x.grid[1], ROWS), f32)
    interpreted = _mosaic.interpreting()

    def body(*refs, **scratch):
        _block(x, config, interpreted, _Refs({**dict(zip((*inputs, *outputs), refs, strict=True)), **scratch}))

    o, *lse = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=_scratch(x, config, interpreted=interpreted),
        grid=x.grid,
        grid_names=("part", "chunk", "slot"),
        kernel_name="paged_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=x.terms == 1 and x.softcap is None,  # the approximate tanh has 11 bits
            reduction_scratch_bytes=0,  # row reductions stay within four lanes
        ),
    )(*inputs.values())
    return (o, _lse_by_token(x, lse[0], args["query_start"])) if return_lse else o


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tile:
    """What a thread block computes, as scalars on the device."""

    part: Any
    chunk: Any
    slot: Any
    request: Any
    length: Any
    """Keys of the request."""
    token0: Any
    """Row of q of the first token."""
    count: Any
    """Tokens; at most block_q."""
    position: Any
    """Position of the first token among the keys."""
    head0: Any
    column0: Any
    """First column of V and o."""


class _Refs:
    """References of a kernel by name; optional ones are None."""

    def __init__(self, refs: dict[str, Any]):
        self._refs = refs

    def __getattr__(self, name: str) -> Any:
        return self._refs.get(name)


def _row_token(x: _Problem, row):
    """Token of a row, counted from the tile's first; rows that hold no pair get some number."""
    return lax.div(row, i32(x.block_g)) if x.token_major else lax.rem(row, i32(x.block_q))


def _row_of(x: _Problem, token, head):
    """Row of a token and head, both counted from the tile's first."""
    return token * x.block_g + head if x.token_major else head * x.block_q + token


def _sink_rows(x: _Problem, sinks):
    """Sinks [H] in base 2 as each tile's rows need them: float32 [chunks, ROWS]."""
    row = jnp.arange(ROWS)
    head = row % x.block_g if x.token_major else jnp.minimum(row // x.block_q, x.block_g - 1)
    sinks = jnp.clip(sinks.astype(f32) * LOG2E, FLOOR, -FLOOR)
    return sinks.reshape(-1, x.block_g)[:, head]


def _lse_by_token(x: _Problem, tiles, query_start):
    """Row values [slots, chunks, ROWS] of all tiles as [N, H]; -inf for rows of no request."""
    token, head = jnp.arange(x.N)[:, None], jnp.arange(x.H)[None]
    start = jnp.clip(query_start, 0, x.N)
    b = jnp.clip(jnp.searchsorted(start, token, side="right") - 1, 0, x.B)
    first = start[b]
    slot = first // x.block_q + b + (token - first) // x.block_q
    row = _row_of(x, (token - first) % x.block_q, head % x.block_g)
    return jnp.where(b < x.B, tiles[slot, head // x.block_g, row], -jnp.inf)


# ---------------------------------------------------------------- device code
def _block(x: _Problem, config: Config, interpreted: bool, r: _Refs) -> None:
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
    pl.when(tile.count > 0)(lambda: _attend(x, config, interpreted, r, tile))


def _attend(x: _Problem, config: Config, interpreted: bool, r: _Refs, t: _Tile) -> None:
    """Online softmax over the tile's keys, sink, output."""
    block_kv, num_stages = config.block_kv, config.num_stages
    low, high, full_low, full_high = _range(x, t)
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

    def fetch(pool, ring, bars, j, pages, columns):
        to = lax.rem(j - first, i32(num_stages))
        rows = min(x.page, block_kv)
        offset = lax.rem(j * block_kv, i32(x.page)) if block_kv < x.page else 0
        for i, number in enumerate(pages):
            plgpu.copy_gmem_to_smem(
                pool.at[number, pl.ds(offset, rows), kv_head, columns], ring.at[to, pl.ds(i * rows, rows)], bars.at[to]
            )

    def fetch_k(j, pages):
        fetch(r.k_pages, r.k_ring, r.k_bar, j, pages, pl.ds(0, x.D))

    def fetch_v(j, pages):
        fetch(r.v_pages, r.v_ring, r.v_bar, j, pages, pl.ds(t.column0, x.columns))

    def prefetch(j):
        pages = page_numbers(j)
        fetch_k(j, pages)
        fetch_v(j, pages)

    for i in range(num_stages):
        pl.when(first + i < last)(functools.partial(prefetch, first + i))
    _load_q(x, config, r, t)

    token = _row_token(x, plgpu.broadcasted_iota(i32, (ROWS, block_kv), 0, layout=ACC))
    column = plgpu.broadcasted_iota(i32, (ROWS, block_kv), 1, layout=ACC)
    sharp = (x.scale if x.softcap is None else x.softcap) * LOG2E

    def step(j, carry, masked):
        m, total, o = carry
        at = lax.rem(j - first, i32(num_stages))
        more = j + num_stages < last
        ahead = page_numbers(jnp.minimum(j + num_stages, last - 1))
        plgpu.barrier_wait(r.k_bar.at[at])
        k = _operand(x, config, r, r.k_ring.at[at], r.k_scale, None)
        s = _scores(x, r, k, block_kv)
        pl.when(more)(lambda: fetch_k(j + num_stages, ahead))
        if x.softcap is not None:
            s = jnp.tanh(s * (x.scale / x.softcap))
        if masked:
            s = jnp.where(_visible(x, t.position + token, j * block_kv + column, t.length), s, -jnp.inf)
        m_new = jnp.maximum(m, jnp.max(s, axis=1) * sharp)
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s * sharp - _across(m_new, s))
        total = total * alpha + jnp.sum(p, axis=1)
        o = tuple(c * _across(alpha, c) for c in o)
        plgpu.barrier_wait(r.v_bar.at[at])
        v = _operand(x, config, r, r.v_ring.at[at], r.v_scale, (j * block_kv, low, high) if masked else None)
        o = _add_product(x, r, o, p, v, interpreted)
        pl.when(more)(lambda: fetch_v(j + num_stages, ahead))
        return m_new, total, o

    carry = (
        plgpu.layout_cast(jnp.full((ROWS,), FLOOR, f32), ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), f32), ROW),
        tuple(plgpu.layout_cast(jnp.zeros((ROWS, x.out_chunk), f32), ACC) for _ in range(x.columns // x.out_chunk)),
    )
    if x.window is not None:
        carry = lax.fori_loop(first, full_first, functools.partial(step, masked=True), carry)
    carry = lax.fori_loop(
        full_first if x.window is not None else first, full_last, functools.partial(step, masked=False), carry
    )
    m, total, o = lax.fori_loop(full_last, last, functools.partial(step, masked=True), carry)

    if r.lse is not None:
        natural = jnp.where(total > 0, m * (1 / LOG2E) + jnp.log(total), -jnp.inf)

        @pl.when(t.part == 0)
        def _():
            r.lse[t.slot, t.chunk] = natural

    if r.sinks is not None:
        sink = plgpu.load(r.sinks.at[t.chunk], layout=ROW, optimized=False)
        m_new = jnp.maximum(m, sink)
        alpha = jnp.exp2(m - m_new)
        total = total * alpha + jnp.exp2(sink - m_new)
        o = tuple(c * _across(alpha, c) for c in o)
    inverse = 1 / jnp.where(total > 0, total, 1.0)
    o = tuple(c * _across(inverse, c) for c in o)
    _store(x, r, o, t)


def _across(row, like):
    """A value per row, repeated over the columns of `like`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(row, like.shape, [0]), ACC)


def _range(x: _Problem, t: _Tile):
    """Keys [low, high) that some row sees, and a range [full_low, full_high) that every row sees."""
    position, length, final = t.position, t.length, t.position + t.count - 1
    low, full_low, high, full_high = i32(0), i32(0), length, length
    if x.window is not None:
        low = jnp.maximum(position - (x.window - 1), 0)
        full_low = jnp.maximum(final - (x.window - 1), 0)
    if x.causal:
        high, full_high = jnp.minimum(final + 1, length), jnp.minimum(position + 1, length)
    elif x.window is not None:
        high, full_high = jnp.minimum(final + x.window, length), jnp.minimum(position + x.window, length)
    return low, jnp.maximum(high, 0), full_low, jnp.maximum(full_high, 0)


def _visible(x: _Problem, position, key, length):
    """Pairs of a query position and a key that attend."""
    visible = key < length
    if x.causal:
        visible &= key <= position
    if x.window is not None:
        visible &= position - key < x.window
        if not x.causal:
            visible &= key - position < x.window
    return visible


def _load_q(x: _Problem, config: Config, r: _Refs, t: _Tile) -> None:
    """Bring the tile's rows of q into shared memory as wgmma reads them, split in terms."""
    for column in range(0, x.D, x.columns):
        columns = pl.ds(column, x.columns)
        if x.token_major:
            for i in range(x.block_q):
                source = r.q.at[jnp.minimum(t.token0 + i, x.N - 1), pl.ds(t.head0, x.block_g), columns]
                plgpu.copy_gmem_to_smem(source, r.rows.at[pl.ds(i * x.block_g, x.block_g)], r.rows_bar)
        else:
            for i in range(x.block_g):
                source = r.q.at[pl.ds(t.token0, x.block_q), t.head0 + i, columns]
                plgpu.copy_gmem_to_smem(source, r.rows.at[pl.ds(i * x.block_q, x.block_q)], r.rows_bar)
        plgpu.barrier_wait(r.rows_bar)
        for piece in range(0, x.columns, PIECE):
            value = plgpu.load(r.rows.at[:, pl.ds(piece, PIECE)], layout=_strips(x.dtype, config))
            for i, term in enumerate(_split(x, value)):
                r.q_tile[i, :, pl.ds(column + piece, PIECE)] = term
        plgpu.commit_smem()


def _split(x: _Problem, value) -> list:
    """16-bit terms whose sum is the value."""
    terms = []
    for _ in range(x.terms - 1):
        term = value.astype(x.operand)
        terms.append(term)
        value = value - term.astype(f32)
    return [*terms, value.astype(x.operand)]


def _strips(dtype, config: Config):
    """Registers of a block between plain memory and a swizzled tile: 16 bytes of a swizzle span per lane."""
    values = 16 // max(2, jnp.dtype(dtype).itemsize)
    span = _swizzle(config) // 2
    rows = 32 * values // span
    side_by_side = span < 32  # four warps on 64 columns, else on consecutive rows
    block = (rows, 4 * span) if side_by_side else (4 * rows, span)
    tiling = plgpu.Tiling((block, (rows, span), (values,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4 if side_by_side else -5,), lane_dims=(-3, -2), vector_dim=-1)


def _operand(x: _Problem, config: Config, r: _Refs, raw, scale, bounds) -> Callable[[int], Any]:
    """Term -> tile of a block for wgmma, converted if need be.

    `bounds` (block start, low, high) names the keys that some row sees; the others are made zero, because a product
    with P = 0 would let their NaN through.
    """
    (rows, columns), layout = raw.shape, _strips(raw.dtype, config)
    pieces = [pl.ds(column, PIECE) for column in range(0, columns, PIECE)]

    def cleared(value):
        if bounds is None:
            return value
        start, low, high = bounds
        row = plgpu.broadcasted_iota(i32, value.shape, 0, layout=layout)
        return jnp.where((row >= low - start) & (row < high - start), value, jnp.zeros_like(value))

    if x.restage:
        for piece in pieces:
            value = plgpu.load(raw.at[:, piece], layout=layout).astype(f32)
            if scale is not None:
                value = value * scale[0]
            for i, term in enumerate(_split(x, cleared(value.astype(x.dtype)))):
                r.tiles[i, :, piece] = term
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


def _scores(x: _Problem, r: _Refs, k: Callable[[int], Any], block_kv: int):
    """Unscaled scores, float32 [ROWS, block_kv]."""

    def product(acc):
        if x.terms == 1:
            plgpu.wgmma(acc, r.q_tile.at[0], k(0).T)
        else:  # a loop: unrolled, the addresses of all operands would wait in registers

            @pl.loop(0, len(SPLIT))
            def _(n):
                a, b = (_lookup([pair[i] for pair in SPLIT], n) for i in range(2))
                plgpu.wgmma(acc, r.q_tile.at[a], k(b).T)

        return acc[...]

    return pl.run_scoped(product, _mosaic.ACC((ROWS, block_kv), f32))


def _lookup(digits: list[int], n):
    """digits[n] for an index known on the device only; every digit is less than 4."""
    return lax.shift_right_logical(i32(sum(d << 2 * i for i, d in enumerate(digits))), 2 * n) & 3


def _add_product(x: _Problem, r: _Refs, o: tuple, p, v: Callable[[int], Any], interpreted: bool) -> tuple:
    """Each chunk of o plus P times its columns of V."""
    terms = _split(x, p)
    if interpreted:  # the interpreter multiplies what is in shared memory only
        for i, term in enumerate(terms):
            r.p_tile[i] = term
        plgpu.commit_smem()
        terms = [r.p_tile.at[i] for i in range(x.terms)]

    def product(acc, columns):
        for a, b in SPLIT if x.terms == 3 else ((0, 0),):
            plgpu.wgmma(acc, terms[a], v(b).at[:, columns])

    def fresh(acc, columns):
        product(acc, columns)
        return acc[...]

    out = []
    for i, chunk in enumerate(o):
        columns = pl.ds(i * x.out_chunk, x.out_chunk)
        if interpreted or x.terms == 3:  # a sum per block: wgmma truncates, this addition rounds
            chunk = chunk + pl.run_scoped(functools.partial(fresh, columns=columns), _mosaic.ACC(chunk.shape, f32))
        else:
            chunk = pl.run_state(functools.partial(product, columns=columns))(_mosaic.ACC.init(chunk))
        out.append(chunk)
    return tuple(out)


def _store(x: _Problem, r: _Refs, o: tuple, t: _Tile) -> None:
    """Write the rows of the tile's tokens; what follows them belongs to the next request."""
    for i, chunk in enumerate(o):
        r.rows[:, pl.ds(i * x.out_chunk, x.out_chunk)] = chunk.astype(x.dtype)
    plgpu.commit_smem()

    def copy(row, rows, tokens, heads):
        target = r.o.at[tokens, heads, pl.ds(t.column0, x.columns)]
        plgpu.copy_smem_to_gmem(r.rows.at[pl.ds(row, rows)], target)

    def token(i):
        copy(i * x.block_g, x.block_g, t.token0 + i, pl.ds(t.head0, x.block_g))

    def tokens(i, size):
        for h in range(x.block_g):
            copy(h * x.block_q + i, size, pl.ds(t.token0 + i, size), t.head0 + h)

    if x.token_major:
        for i in range(x.block_q):
            pl.when(i < t.count)(functools.partial(token, i))
    else:
        pl.when(t.count == x.block_q)(lambda: tokens(0, x.block_q))
        pl.when(t.count < x.block_q)(lambda: pl.loop(0, t.count)(lambda i: tokens(i, 1)))
    plgpu.wait_smem_to_gmem(0)
