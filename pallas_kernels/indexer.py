"""Logits of the lightning indexer on Hopper, see `jaxattn.ops.indexer`: keys are rows of wgmma, heads are columns.

A tile is as many tokens as have 128 heads together, and all 64-key blocks that one of them sees. Thread blocks stay and
take tile after tile. One warpgroup fetches q, weights and keys by TMA into a ring of `stages` slots, each a block for
every one of `consumers` others: 64 x 128 scores, rectified, weighted and summed over the heads of a token in registers.
Some sum while others keep the tensor cores busy. Where logits are asked for, TMA writes those outside of ranges.

With keys in pages of 64 a tile is one token and `chunk` blocks of its request.

FP8 tensor cores keep about 14 bits of a sum, as in DeepGEMM; sums over heads are float32. MXFP4 keys travel as they are
and become bfloat16 in registers, exactly; XLA decodes the queries, see `_mxfp4_scores`. Blocks that a tile does not see
are skipped, and hold anything unless logits are asked for. Another kernel chooses the best, `indexer_topk`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _inline, _inline_memory, _mosaic, _mxfp4_scores

KEYS = 64
"""Keys of a block: the M of one wgmma."""
COLUMNS = 128
"""Heads of a tile, of all its tokens, where keys are not paged."""
WIDTH = 128
"""Numbers of a key: a swizzle span of 8-bit codes."""
HEADS = (16, 32, 64, 128)
TOLD = 4
"""Tiles that the producer may tell of before the first is forgotten."""
REGISTERS = {2: (40, 232), 3: (32, 160)}
"""Registers of a thread of the producer and of a consumer, by the number of consumers."""
FILL = 4
"""Blocks outside of ranges that one copy fills."""
COLUMN = plgpu.Layout.WGMMA.reduce(0)

f32, i32 = jnp.float32, jnp.int32


# ---------------------------------------------------------------- configuration and legality
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How blocks of keys are shared out."""

    consumers: int = 3
    """Warpgroups that multiply."""
    stages: int = 4
    """Slots of keys in flight, each with a block for every consumer."""
    chunk: int = 32
    """Paged: blocks of keys of a tile."""

    def __post_init__(self):
        if self.consumers not in REGISTERS:
            raise ValueError(f"consumers must be {_mosaic.either(REGISTERS)}, got {self.consumers}")
        if not 2 <= self.stages <= 8:
            raise ValueError(f"stages must lie between 2 and 8, got {self.stages}")
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """Everything about a call that is known when it is compiled."""

    N: int
    H: int
    S: int
    pool: int | None
    """Pages of the cache; None: keys are not paged."""
    B: int
    dtype: Any
    """Of codes: float8_e4m3fn, or uint8 for MXFP4."""
    fill: bool
    """Logits outside of ranges become -inf."""
    config: Config
    interpreted: bool
    num_sms: int

    @property
    def fp4(self) -> bool:
        """MXFP4."""
        return self.dtype == jnp.uint8

    @property
    def row(self) -> int:
        """Bytes of a key."""
        return _mxfp4_scores.BYTES if self.fp4 else WIDTH

    @property
    def scale_rows(self) -> int:
        """Rows of a page behind the codes that hold the scales."""
        return KEYS * 4 // self.row

    @property
    def group(self) -> int:
        """Keys of a slot."""
        return KEYS * self.config.consumers

    @property
    def reach(self) -> int:
        """Keys up to the end of the last slot, wherever the first begins."""
        return self.blocks * KEYS + self.group - KEYS

    @property
    def tokens(self) -> int:
        """Of a tile."""
        return COLUMNS // self.H if self.pool is None else 1

    @property
    def columns(self) -> int:
        """Heads of a tile."""
        return self.tokens * self.H

    @property
    def chunk(self) -> int:
        """Blocks of keys of a tile."""
        return self.blocks if self.pool is None else min(self.blocks, self.config.chunk)

    @property
    def chunks(self) -> int:
        """Tiles of a token."""
        return pl.cdiv(self.blocks, self.chunk)

    @property
    def tiles(self) -> int:
        """Of the whole call."""
        return pl.cdiv(self.N, self.tokens) * self.chunks

    @property
    def blocks(self) -> int:
        """Of all keys."""
        return pl.cdiv(self.S, KEYS)

    @property
    def grid(self) -> int:
        """Thread blocks."""
        return min(self.num_sms, self.tiles)


def _plan(config: Config, fill: bool, *, q, k, page_table, **_) -> _Plan:
    return _Plan(
        N=q.shape[0],
        H=q.shape[1],
        S=k.shape[0] if page_table is None else page_table.shape[1] * KEYS,
        pool=None if page_table is None else k.shape[0],
        B=0 if page_table is None else page_table.shape[0],
        dtype=jnp.dtype(q.dtype),
        fill=fill,
        config=config,
        interpreted=_mosaic.interpreting(),
        num_sms=_mosaic.num_sms(),
    )


def why_not(*, q, k, page, page_table, format, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence; shapes and dtypes are enough."""
    dtype, (_, H, D) = jnp.dtype(q.dtype).name, q.shape
    fp4 = dtype == "uint8"
    row = _mxfp4_scores.BYTES if fp4 else WIDTH
    if page is not None and format not in ("indexer_fp8", "indexer_mxfp4"):
        return f"a paged cache must be of format indexer_fp8 or indexer_mxfp4, got {format}"
    if page is not None and format == "indexer_mxfp4" and not fp4:
        return f"q must be MXFP4 codes (uint8) as a cache of format indexer_mxfp4 is, got {dtype}"
    if dtype not in ("float8_e4m3fn", "uint8"):
        return f"q and k must be float8_e4m3fn or uint8 (MXFP4), got {dtype}"
    D = 2 * D if fp4 else D
    if D != WIDTH:
        return f"keys must be {WIDTH} wide, got D={D}"
    if H not in HEADS:
        return f"the heads must be {_mosaic.either(HEADS)}, got H={H}"
    if page is None and not k.shape[0]:
        return "needs at least one key, got S=0"
    if page is not None and page != KEYS:
        return f"pages must hold {KEYS} entries, got {page}"
    if page is not None and not page_table.shape[1]:
        return "needs at least one page per request, got a page table without columns"
    if page is not None and k.shape[1] % row:
        return f"pages must be multiples of {row} bytes, got {k.shape[1]}"
    return None


def default_config(**_) -> Config:
    """Three consumers, twelve blocks of 8 KB in flight."""
    return Config()


def configs(*, page, **_) -> Iterator[Config]:
    """Every configuration worth timing."""
    chunks = (16, 32, 64) if page is not None else (32,)
    for consumers, stages, chunk in itertools.product(REGISTERS, (3, 4, 6), chunks):
        yield Config(consumers=consumers, stages=stages, chunk=chunk)


# ---------------------------------------------------------------- launch
def indexer(
    *,
    config: Config,
    select: Callable[..., jax.Array],
    q,
    weights,
    q_scale,
    k,
    k_scale,
    starts,
    ends,
    topk: int | None,
    page_table,
    requests,
    page: int | None,
    format: str,
    return_logits: bool,
):
    """Run the kernel on prepared arguments of `jaxattn.indexer`; `select(logits, starts, ends, topk)` chooses.

    Raises:
        ValueError: `config` does not fit shared memory.
    """
    del page, format
    x = _plan(config, return_logits, q=q, k=k, page_table=page_table)
    if (used := _mosaic.smem_bytes(_scratch(x).values())) > _mosaic.SMEM_BYTES:
        given = f"consumers={config.consumers}, stages={config.stages}"
        raise ValueError(
            f"indexer: {given} needs {used} bytes of shared memory, more than {_mosaic.SMEM_BYTES}; use fewer"
        )
    inputs = {"weights": weights, "starts": starts, "ends": ends}
    logits = jnp.zeros((x.N, x.S), f32)
    q = q.reshape(-1, q.shape[2])
    if x.fp4 and x.N:
        q = _mxfp4_scores.queries(q, q_scale.reshape(-1, _mxfp4_scores.SCALES))
    if x.N and page_table is None:
        k_scale = lax.bitcast_convert_type(k_scale, i32) if x.fp4 else k_scale
        logits = _logits(x, q, inputs, {"k": k, "k_scale": jnp.pad(k_scale, (0, x.reach - x.S))})
    elif x.N:
        # bytes stay bytes, because XLA would copy the cache to call them something else
        tables = {"page_table": page_table, "requests": jnp.clip(requests, 0, x.B - 1)}
        logits = _logits(x, q, inputs, {"k": k.reshape(x.pool, -1, x.row)} | tables)
    if topk is None:
        return logits
    indices = select(logits, starts, ends, topk)
    return (indices, logits) if return_logits else indices


def _scratch(x: _Plan) -> dict[str, Any]:
    """Scratch of one thread block."""
    c, tile = x.config, _inline.span()
    keys = x.dtype if x.pool is None else jnp.uint8
    fill = {"nothing": FILL * KEYS, "nothing_1": KEYS} if x.fill else {}
    return {
        "q_tile": plgpu.SMEM((2, 2, x.columns, _mxfp4_scores.HALF), jnp.bfloat16, transforms=tile)
        if x.fp4
        else plgpu.SMEM((2, x.columns, WIDTH), x.dtype, transforms=tile),
        "weight": plgpu.SMEM((2, x.columns), f32),
        "k_tile": plgpu.SMEM((c.stages, x.group, x.row), keys, transforms=() if x.fp4 else tile),
        "scale": plgpu.SMEM((c.stages, x.group), i32 if x.fp4 else f32)
        if x.pool is None
        else plgpu.SMEM((c.stages, x.scale_rows * c.consumers, x.row), keys),
        "tile": plgpu.SMEM((TOLD, 2 + 2 * x.tokens), i32),
        "told": plgpu.Barrier(num_barriers=TOLD),
        "q_full": plgpu.Barrier(num_arrivals=3 if x.fp4 else 2, num_barriers=2),
        "q_free": plgpu.Barrier(num_arrivals=c.consumers, num_barriers=2),
        "full": plgpu.Barrier(num_arrivals=2 if x.pool is None else 2 * c.consumers, num_barriers=c.stages),
        "free": plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.stages),
    } | {name: plgpu.SMEM((x.tokens, columns), f32) for name, columns in fill.items()}


def _logits(x: _Plan, q, by_token: dict[str, Any], keys: dict[str, Any]):
    """Logits [N, S]; without `fill` numbers outside a token's range are anything."""
    missing = -x.N % x.tokens
    inputs = {name: jnp.pad(a, ((0, missing), *[(0, 0)] * (a.ndim - 1))) for name, a in by_token.items()}
    inputs |= {"q": q, "weights": inputs["weights"].reshape(-1)} | keys
    rows, columns = x.N + missing, x.blocks * KEYS

    def body(*refs, **scratch):
        _block(x, SimpleNamespace(**dict(zip((*inputs, "o"), refs, strict=True)) | scratch))

    body.__name__ = "indexer"
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, columns), f32),
        scratch_types=_scratch(x),
        grid=(x.grid,),
        grid_names=("cta",),
        num_threads=x.config.consumers + 1,
        thread_name="warpgroup",
        kernel_name="indexer",
    )(*inputs.values())
    return out if (rows, columns) == (x.N, x.S) else out[: x.N, : x.S]


# ---------------------------------------------------------------- device code
def _block(x: _Plan, r: Any) -> None:
    """One thread block: a producer and its consumers, each over the same tiles."""
    warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
    turns, rest = divmod(x.tiles, x.grid)  # an odd turn is walked backwards, see `_place`
    count = turns + (cta < rest if turns % 2 == 0 else cta >= x.grid - rest).astype(i32)
    producing, consuming = REGISTERS[x.config.consumers]

    @pl.when(warpgroup == x.config.consumers)
    def _():
        plgpu.set_max_registers(producing, action="decrease")
        if x.fill:
            nothing = plgpu.layout_cast(jnp.full((KEYS,), -jnp.inf, f32), _inline.ROW)
            for ref, n in itertools.product((r.nothing, r.nothing_1), range(x.tokens)):
                for column in range(0, ref.shape[1], KEYS):
                    _mosaic.store(ref.at[n, pl.ds(column, KEYS)], nothing)
            plgpu.commit_smem()
        steps = lax.fori_loop(0, count, lambda turn, steps: _produce(x, r, turn, steps), i32(0))
        if x.fill:
            plgpu.wait_smem_to_gmem(0)
        if x.interpreted:  # the interpreter wants to see every barrier complete
            for n in range(2):
                pl.when(n < count)(lambda n=n: plgpu.barrier_wait(r.q_free.at[n]))
            for n in range(x.config.stages):
                pl.when(n < steps)(lambda n=n: plgpu.barrier_wait(r.free.at[n]))

    @pl.when(warpgroup < x.config.consumers)
    def _():
        plgpu.set_max_registers(consuming, action="increase")
        lax.fori_loop(0, count, lambda turn, steps: _consume(x, r, warpgroup, turn, steps), i32(0))


def _produce(x: _Plan, r: Any, turn, steps):
    """Find the keys that a tile sees, tell the consumers, and fetch; returns the slots so far."""
    at, told = turn & 1, turn & (TOLD - 1)
    token0, block0 = _place(x, turn)
    bounds = [(r.starts[token0 + n], jnp.minimum(r.ends[token0 + n], x.S)) for n in range(x.tokens)]
    low, high = i32(x.S), i32(0)
    for start, end in bounds:
        some = start < end
        low = jnp.minimum(low, jnp.where(some, jnp.maximum(start, 0), x.S))
        high = jnp.maximum(high, jnp.where(some, end, 0))
    first = jnp.maximum(lax.div(low, i32(KEYS)), block0)
    blocks = jnp.maximum(jnp.minimum(lax.div(high + (KEYS - 1), i32(KEYS)), block0 + x.chunk) - first, 0)
    pl.when(turn >= 2)(lambda: plgpu.barrier_wait(r.q_free.at[at]))
    for i, value in enumerate((first, blocks, *(x for pair in bounds for x in pair))):
        r.tile[told, i] = value
    plgpu.barrier_arrive(r.told.at[told])
    rows = pl.ds(token0 * x.H, x.columns)
    if x.fp4:
        for half in range(2):
            plgpu.copy_gmem_to_smem(r.q.at[half, rows], r.q_tile.at[at, half], r.q_full.at[at])
    else:
        plgpu.copy_gmem_to_smem(r.q.at[rows], r.q_tile.at[at], r.q_full.at[at])
    plgpu.copy_gmem_to_smem(r.weights.at[rows], r.weight.at[at], r.q_full.at[at])

    slots = _slots(x, blocks)

    @pl.loop(0, slots)
    def _(i):
        step, block = steps + i, first + i * x.config.consumers
        slot = lax.rem(step, i32(x.config.stages))
        full = r.full.at[slot]
        pl.when(step >= x.config.stages)(lambda: plgpu.barrier_wait(r.free.at[slot]))
        if x.pool is None:
            keys = pl.ds(block * KEYS, x.group)
            plgpu.copy_gmem_to_smem(r.k.at[keys], r.k_tile.at[slot], full)
            plgpu.copy_gmem_to_smem(r.k_scale.at[keys], r.scale.at[slot], full)
            return
        for n in range(x.config.consumers):
            entry = jnp.minimum(block + n, first + blocks - 1)  # pages behind the last may be anything
            number = jnp.clip(r.page_table[r.requests[token0], entry], 0, x.pool - 1)
            for rows, to in ((pl.ds(0, KEYS), r.k_tile), (pl.ds(KEYS, x.scale_rows), r.scale)):
                place = to.at[slot, pl.ds(n * rows.size, rows.size)]
                plgpu.copy_gmem_to_smem(r.k.at[number, rows], place, full)

    if x.fill:
        last = jnp.minimum(block0 + x.chunk, x.blocks)
        _fill(x, r, token0, block0, jnp.minimum(first, last))
        _fill(x, r, token0, first + blocks, last)
    return steps + slots


def _fill(x: _Plan, r: Any, token0, begin, end) -> None:
    """Blocks `begin` to `end` of a tile's logits become -inf."""
    count = jnp.maximum(end - begin, 0)
    some = lax.div(count, i32(FILL))

    def copy(source, block):
        to = r.o.at[pl.ds(token0, x.tokens), pl.ds(block * KEYS, source.shape[1])]
        plgpu.copy_smem_to_gmem(source, to)

    pl.loop(0, some)(lambda i: copy(r.nothing, begin + i * FILL))
    pl.loop(some * FILL, count)(lambda i: copy(r.nothing_1, begin + i))


def _slots(x: _Plan, blocks):
    """Slots that so many blocks take."""
    return lax.div(blocks + (x.config.consumers - 1), i32(x.config.consumers))


def _consume(x: _Plan, r: Any, me, turn, steps):
    """The blocks of a tile that are this warpgroup's; returns the slots so far."""
    consumers, stages = x.config.consumers, x.config.stages
    at, told = turn & 1, turn & (TOLD - 1)
    plgpu.barrier_wait(r.told.at[told])
    first, blocks = r.tile[told, 0], r.tile[told, 1]
    token0 = _place(x, turn)[0]
    plgpu.barrier_wait(r.q_full.at[at])
    weights = [
        plgpu.load(r.weight.at[at, pl.ds(n * x.H, x.H)], layout=COLUMN, optimized=False) for n in range(x.tokens)
    ]
    slots = _slots(x, blocks)

    def block(b, slot):
        own = pl.ds(me * KEYS, KEYS)
        scales = r.scale.at[slot, own if x.pool is None else pl.ds(me * x.scale_rows, x.scale_rows)]
        scale = None
        if x.fp4:
            scores = _mxfp4_scores.start(r.k_tile.at[slot, own], scales, r.q_tile.at[at])
        else:
            scores = _inline.settle(_inline.start(r.k_tile.at[slot, own], r.q_tile.at[at]), 0)
            if x.pool is None:
                scale = plgpu.load(scales, layout=_inline.ROW, optimized=False)
            else:
                scale = _inline_memory.load_bytes(scales)
        _inline.release_reads()
        plgpu.barrier_arrive(r.free.at[slot])
        scores = _inline.settle(scores, 0) if x.fp4 else scores
        key0 = (first + b) * KEYS
        key = key0 + plgpu.broadcasted_iota(i32, (KEYS,), 0, layout=_inline.ROW)
        for n in range(x.tokens):
            start, end = r.tile[told, 2 + 2 * n], r.tile[told, 3 + 2 * n]
            value = _inline.relu_dot(scores[:, n * x.H : (n + 1) * x.H], weights[n], keep_nan=x.fp4)
            value = value if scale is None else value * scale
            value = jnp.where((key >= start) & (key < end), value, -jnp.inf)
            _inline_memory.store_row(r.o.at[token0 + n, pl.ds(key0, KEYS)], value)

    @pl.loop(0, slots)
    def _(i):
        b, slot = i * consumers + me, lax.rem(steps + i, i32(stages))
        plgpu.barrier_wait(r.full.at[slot])
        pl.when(b < blocks)(lambda: block(b, slot))
        pl.when(b >= blocks)(lambda: plgpu.barrier_arrive(r.free.at[slot]))

    _inline.release_reads()
    plgpu.barrier_arrive(r.q_free.at[at])
    return steps + slots


def _place(x: _Plan, turn):
    """First token and first block of a thread block's tile.

    The last tokens, who see most keys, come first, and turns go to and fro, so that shares are equal.
    """
    cta = lax.axis_index("cta")
    place = jnp.where(turn & 1 == 0, cta, x.grid - 1 - cta)
    number = x.tiles - 1 - (turn * x.grid + place)
    return lax.div(number, i32(x.chunks)) * x.tokens, lax.rem(number, i32(x.chunks)) * x.chunk
