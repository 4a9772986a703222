"""Paged attention of few query tokens per request on Mosaic GPU (Hopper), split over the keys.

A tile is up to `block_q` consecutive tokens of one request times `block_g` query heads that share a KV head: the rows
of one wgmma, most of them unused in decode. Its keys are walked over in blocks of `block_kv`, fetched page by page by
TMA into a ring. Three ways to share out the work, all of them pure functions of shapes and options:

* `split_pages=n`: one thread block for every n pages of a tile. Boundaries depend on the position of a key alone, so
  that a row's bits do not depend on the rest of the batch.
* `num_shares=n`: all blocks of keys of the batch in a row, cut in n equal shares, one thread block each for every chunk
  of heads: no ragged batch leaves a multiprocessor idle, and all heads of a page are read at the same time, as they lie
  in memory. Results repeat to the bit, but depend on the lengths of the whole batch.
* neither: one thread block a tile.

Tiles that were cut leave unnormalised partial sums in float32, which a second kernel adds up in order.

The scales of a float8_e4m3fn cache are folded into the scores and the output, and its codes are multiplied exactly:
values in float16, which holds every code, with P scaled by 2**15 to stay in range; keys as they are with a bfloat16 q
split in two float8 terms, which holds it to 2**-17 of the row's largest value, or in float16 with a float16 q. q is
scaled by a power of two per row to fit. Codes with a scale per token and head become bfloat16 (`_per_head`).
"""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _partials
from pallas_kernels.paged_attention import _common as common
from pallas_kernels.paged_attention import _decode_blocks as blocks
from pallas_kernels.paged_attention import _decode_combine as combine
from pallas_kernels.paged_attention import _decode_joined as joined
from pallas_kernels.paged_attention import _decode_once as once
from pallas_kernels.paged_attention import _decode_swapped as swapped
from pallas_kernels.paged_attention import _per_head as per_head
from pallas_kernels.paged_attention._common import FP8, HEAD_DIMS, PAGES, ROWS

BLOCKS = (32, 64, 128)
DTYPES = ("bfloat16", "float16")
MAX_TOKENS = 8
"""Query tokens per request, on average, that count as decoding."""
_SM_SMEM = 233_472
"""Shared memory of a multiprocessor; each thread block takes 1024 bytes more than it asks for."""

_FEW_ROWS = 16
"""Rows of a tile up to which keys are the rows of wgmma by default."""

f32, i32 = jnp.float32, jnp.int32


# ---------------------------------------------------------------- configuration and legality
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(common.Config):
    """How the keys of a batch are shared out, and how a thread block walks over its share."""

    block_kv: int = 64
    """Keys per step."""
    num_stages: int = 3
    """Steps whose keys and values may be on their way at once."""
    split_pages: int | None = None
    """Pages of a split; results do not depend on the rest of the batch."""
    num_shares: int | None = None
    """Thread blocks of each chunk of heads, among which the whole batch is shared out equally."""
    snap: bool = False
    """Shares end where tiles end if that makes them hardly longer, as with requests of one length: nothing is cut."""
    swapped: bool = False
    """Keys are the rows of wgmma and the tile's rows its columns, see `_decode_swapped`."""
    at_once: bool = False
    """All keys that a tile may see are fetched before the first product, see `_decode_once`: for short windows."""

    def __post_init__(self):
        if self.block_kv not in BLOCKS:
            raise ValueError(f"block_kv must be {_mosaic.either(BLOCKS)}, got {self.block_kv}")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must lie between 1 and 8, got {self.num_stages}")
        _partials.check_cut(split_pages=self.split_pages, num_shares=self.num_shares)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
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
    split_pages: int | None
    num_shares: int | None
    snap: bool
    swapped: bool
    at_once: bool
    interpreted: bool
    joined: Any = None

    # ------------------------------------------------ the rows of a tile
    @property
    def block_g(self) -> int:
        """Heads of a tile: the largest divisor of the group whose slab fits."""
        group = self.H // self.K
        return max(g for g in range(1, min(group, ROWS) + 1) if group % g == 0 and self._slab(g) <= ROWS)

    def _slab(self, g: int) -> int:
        offsets = (g * chunk % 8 for chunk in range(self.H // g))
        return -(-(max(offsets) + g) // 8) * 8

    @property
    def slab(self) -> int:
        """Rows of one token: its heads from the multiple of 8 below the tile's first one on."""
        return self._slab(self.block_g)

    @property
    def block_q(self) -> int:
        """Tokens of a tile: the power of two above what a request has on average, if so many fit."""
        mean = -(-self.N // max(1, self.B))
        return min(ROWS // self.slab, 1 << (mean - 1).bit_length())

    @property
    def rows(self) -> int:
        """Rows of a tile that tokens have."""
        return self.block_q * self.slab

    @property
    def chunks(self) -> int:
        """Tiles that the heads of a token take."""
        return self.H // self.block_g

    def row_of(self, token, head):
        """Row of a token, counted from the tile's first, and a head of the op."""
        return token * self.slab + head // self.block_g * self.block_g % 8 + head % self.block_g

    # ------------------------------------------------ the work
    @property
    def slots(self) -> int:
        """Numbers of tiles, of one chunk of heads; some stay empty.

        With one token a tile it is the token. Else the first tile of request b has slot b, the padding counts as
        request B, and tile i > 0 has slot B + i + query_start[b] // block_q.
        """
        return self.N if self.block_q == 1 else self.B + 1 + (self.N - 1) // self.block_q

    @property
    def sum_slots(self) -> int:
        """Tile i of request b keeps its sums in slot query_start[b] // block_q + b + i."""
        return self.N // self.block_q + self.B + 2

    @property
    def split_blocks(self) -> int:
        """Blocks of keys of a split."""
        return (self.split_pages or 0) * self.page // self.block_kv

    @property
    def num_splits(self) -> int:
        """Splits that a tile may have; 1: no partial sums."""
        if self.split_pages is None:
            return 1
        most = -(-self.pages // self.split_pages)
        if self.window is not None:
            seen = self.window * (1 if self.causal else 2) + self.block_q - 1
            most = min(most, -(-seen // (self.split_pages * self.page)) + 1)
        return most

    @property
    def grid(self) -> dict[str, int]:
        """Names and sizes of the grid's axes; the last runs fastest."""
        if self.num_shares is not None:
            return {"share": self.num_shares, "chunk": self.chunks}
        return {"slot": self.slots, "split": self.num_splits, "chunk": self.chunks}

    @property
    def partials(self) -> int:
        """Partial sums that may be kept, for each chunk of heads.

        Split n of a slot keeps its own in slot * num_splits + n; share s has s for the tile that it continues and
        num_shares + s for the last one that it begins.
        """
        if self.num_shares is not None:
            return 2 * self.num_shares
        return self.slots * self.num_splits if self.num_splits > 1 else 0

    @property
    def entries(self) -> int:
        """Tiles that may have been cut, for each chunk of heads: notes for the kernel that combines them."""
        return self.num_shares or self.partials // self.num_splits

    @property
    def units(self) -> int:
        """Most blocks of keys of a whole batch."""
        return (self.N // self.block_q + self.B + 1) * -(-self.pages * self.page // self.block_kv)

    # ------------------------------------------------ operands
    @property
    def restage(self) -> bool:
        """The cache holds codes: convert each block."""
        return self.per_head or self.cache_dtype.name == FP8

    @property
    def code_keys(self) -> bool:
        """Scores are products of codes.

        Their sums keep 14 bits: less than float16 wants, and less than scales per token and head promise, which leave
        keys exact where one scale rounds them to bfloat16.
        """
        return self.cache_dtype.name == FP8 and self.dtype.name == "bfloat16" and not self.per_head

    @property
    def lifted(self) -> bool:
        """P is multiplied in float16, raised to fit."""
        return self.restage and not self.per_head

    @property
    def fitted(self) -> bool:
        """Rows of q are scaled to fit a narrower type."""
        return self.lifted or self.code_keys

    @property
    def operand(self):
        """Dtype that wgmma multiplies, `code_keys` apart."""
        return jnp.dtype(jnp.float16) if self.lifted else self.dtype

    @property
    def out_piece(self) -> int:
        """Columns of a swizzle span of o."""
        return 128 // self.out_dtype.itemsize

    @property
    def swizzle(self) -> int:
        """Bytes of a swizzle span of 16-bit tiles; wgmma steps through the keys of P and V by as much."""
        return min(128, 2 * self.block_kv)


def _plan(config: Config, **args) -> Plan:
    return Plan(**common.facts(config, **args), joined=args.get("joined"))


def why_not(**args) -> str | None:
    """None if the kernel can run these arguments, else one sentence; shapes, dtypes and options are enough."""
    x = _plan(Config(), **args)
    if x.dtype.name not in DTYPES:
        return f"q must be {_mosaic.either(DTYPES)} to decode, got {x.dtype.name}"
    if x.per_head:
        if reason := per_head.why_not(x):
            return reason
        if x.dtype.name != "bfloat16":
            return f"q must be bfloat16 to decode a cache with scale pages, got {x.dtype.name}"
    elif x.cache_dtype.name not in (x.dtype.name, FP8):
        return f"the cache must be {_mosaic.either((x.dtype.name, FP8))}, got {x.cache_dtype.name}"
    if x.D not in HEAD_DIMS:
        return f"the head dim must be {_mosaic.either(HEAD_DIMS)}, got {x.D}"
    if x.restage and x.D > 128:
        return f"the head dim of {x.cache_dtype.name} caches must be at most 128 to decode, got {x.D}"
    if x.page not in PAGES:
        return f"the page size must be {_mosaic.either(PAGES)}, got {x.page}"
    if 0 in (x.N, x.B, x.pages):
        return f"needs a query row, a request and a table column, got N={x.N}, B={x.B} and {x.pages} columns"
    if x.N > MAX_TOKENS * x.B:
        return f"at most {MAX_TOKENS} query rows a request count as decoding, got N={x.N} and B={x.B}"
    if x.units >= 2**31:
        return f"the batch may hold {x.units} blocks of keys, more than a 32-bit number counts"
    return None


def _pays_swapped(x: Plan) -> bool:
    """Whether keys become the rows of wgmma by default: for tiles of few rows, as measured; with 32 it is the same."""
    return x.D <= 128 and x.rows <= _FEW_ROWS


def default_config(**args) -> Config:
    """One thread block a tile where there is little to split, else equal shares for all that the GPU holds at once.

    Measured on an H200 in one process with FlashAttention-3, times of kernels: 32 requests of 8192 keys, 32/8 heads of
    128, two stages of 64 keys in shares 246 us, three 249, one block a tile 240 (FA3 244); lengths from an eighth to
    all 156, 158, 177 (FA3 178). 64 requests of 1 to 512 keys, one block a tile: two stages 25, three 26, in shares 32
    (FA3 31). With keys as the rows of wgmma the first take 244, 64 requests of 4096 keys with heads of 64 142 instead
    of 147 (FA3 143), with a window of 128 9.1 instead of 12.4 and with all keys at once 7.6. Shares for three thread
    blocks a multiprocessor instead of two take 146 with heads of 64. Caches of codes, four stages: float8 137 (three
    the same), with scales per token and head 199 (int8), 191 (float8) and 208 (4 bits), three stages 3% more.
    """
    x = _plan(Config(), **args)
    config = Config(
        block_kv=32 if x.D == 256 else 64,
        num_stages=4 if x.D == 64 or x.restage else 2,
        swapped=_pays_swapped(x),
    )
    keys = x.pages * x.page
    if x.window is not None:
        together = dataclasses.replace(config, num_stages=min(once.blocks(x), 8), at_once=True)
        plan = _plan(together, **args)
        if illegal(plan) is None and 2 * (_smem(plan) + 1024) <= _SM_SMEM:
            return together
    if x.window is not None or keys <= 1024:
        least = -(-min(keys, x.window or keys) // config.block_kv) + 1
        return dataclasses.replace(config, num_stages=min(3 if x.D == 64 else 2, least))
    x = _plan(config, **args)
    resident = min(2, _SM_SMEM // (_smem(x) + 1024)) * _mosaic.num_sms()
    most = x.slots * -(-keys // (4 * config.block_kv))
    return dataclasses.replace(config, num_shares=max(1, min(resident // x.chunks, most)))


def configs(**args) -> Iterator[Config]:
    """Every legal configuration of a small choice of splits."""
    x = _plan(Config(), **args)
    shares = [max(1, n * _mosaic.num_sms() // x.chunks) for n in (1, 2, 3, 4)]
    ways: list[dict[str, Any]] = [{}, {"split_pages": 8}, {"split_pages": 32}, *({"num_shares": n} for n in shares)]
    together = Config(num_stages=min(once.blocks(x), 8), swapped=True, at_once=True)
    found = [
        Config(block_kv=block_kv, num_stages=num_stages, swapped=swap, **how)
        for block_kv in BLOCKS
        for num_stages in (2, 3, 4, 6)
        for how in ways
        for swap in (False, True)
    ]
    found += [dataclasses.replace(c, snap=True) for c in found if c.num_shares is not None]
    for config in dict.fromkeys([*found, together, default_config(**args)]):
        if illegal(_plan(config, **args)) is None:
            yield config


def illegal(x: Plan) -> str | None:
    """Why a legal configuration does not fit these shapes."""
    if x.restage and x.block_kv < 64:
        return f"block_kv must be at least 64 for {x.cache_dtype.name} caches, got {x.block_kv}"
    if x.swapped and (x.block_kv != swapped.KEYS or x.D > 128):
        given = f"block_kv={x.block_kv} and head dim {x.D}"
        return f"swapped needs block_kv={swapped.KEYS} and a head dim of at most 128, got {given}"
    if (x.at_once and (reason := once.illegal(x))) or (reason := joined.illegal(x)):
        return reason
    if x.per_head and x.block_kv > 64:
        return f"block_kv must be at most 64 for a cache with scale pages, got {x.block_kv}"
    if x.D == 256 and x.block_kv > 64:
        return f"block_kv must be at most 64 for head dim 256, got {x.block_kv}"
    if x.split_pages is not None and x.split_pages * x.page % x.block_kv:
        given = f"split_pages={x.split_pages} of {x.page}"
        return f"a split must be a multiple of block_kv={x.block_kv} keys, got {given}"
    if x.num_shares is not None and x.window is not None:
        return f"num_shares={x.num_shares} is for calls without a window; leave it out or use split_pages"
    if x.snap and x.num_shares is None:
        return "snap is for shares; leave it out or use num_shares"
    if (used := _smem(x)) > _mosaic.SMEM_BYTES:
        given = f"block_kv={x.block_kv}, num_stages={x.num_stages}"
        return f"{given} needs {used} bytes of shared memory, more than {_mosaic.SMEM_BYTES}; use smaller values"
    return None


# ---------------------------------------------------------------- scratch memory
def _scratch(x: Plan) -> dict[str, tuple[tuple[Any, ...], ...]]:
    """Scratch of a thread block: name -> members of a union, each a tuple of buffers.

    Blocks of keys and values arrive in `ring`, where results leave from, too: `rows` in q's dtype, `sums` in float32.
    wgmma reads `q_tile`. Codes go through `tile`. `p_tile` exists interpreted only.
    """
    lead = (1,)  # see `_decode_blocks._own`
    swizzled = _mosaic.swizzled(x.swizzle, bytes_per_value=2)

    def tile(rows, transforms, dtype=x.operand):
        return plgpu.SMEM((*lead, rows, x.D), dtype, transforms=transforms)

    def staged(dtype):
        width = 128 // jnp.dtype(dtype).itemsize
        spans = _mosaic.swizzled(128, bytes_per_value=jnp.dtype(dtype).itemsize, rows=1)
        return plgpu.SMEM((*lead, x.D // width, ROWS, width), dtype, transforms=spans)

    def ring(transforms):
        return plgpu.SMEM((*lead, x.num_stages, x.block_kv, per_head.width(x)), x.cache_dtype, transforms=transforms)

    codes = _mosaic.swizzled(min(128, x.D), bytes_per_value=1)
    k_ring = ring(codes if x.code_keys else () if x.restage else swizzled)
    q_rows = x.rows if x.swapped and not x.fitted else ROWS
    q_tile = (
        plgpu.SMEM((*lead, 2, ROWS, x.D), x.cache_dtype, transforms=codes) if x.code_keys else tile(q_rows, swizzled)
    )
    scratch = {
        "q_tile": ((q_tile,), *([(tile(ROWS, swizzled, x.dtype),)] if x.fitted else [])),
        "ring": ((k_ring, ring(() if x.restage else swizzled)), (staged(x.out_dtype),)),
    }
    more = per_head.scratch(x, *lead) | joined.scratch(x, *lead)
    scratch |= {name: ((memory,),) for name, memory in more.items()}
    if x.partials:
        scratch["ring"] += ((staged(f32),),)
    if x.restage:
        scratch["tile"] = ((tile(x.block_kv, swizzled),),)
    if x.swapped:
        scratch |= {name: ((memory,),) for name, memory in swapped.scratch(x, *lead).items()}
    elif x.interpreted:
        scratch["p_tile"] = ((plgpu.SMEM((*lead, ROWS, x.block_kv), x.operand),),)
    return scratch


def _union(*members: tuple[Any, ...]) -> Any:
    """Members in the same place; single buffers, and single members, as they are."""
    groups = [buffers if len(buffers) > 1 else next(iter(buffers)) for buffers in members]
    return plgpu.RefUnion(*groups) if len(groups) > 1 else groups[0]


def _smem(x: Plan) -> int:
    """Bytes of shared memory of a thread block."""
    return 512 + sum(
        max(_mosaic.smem_bytes(members) - 1024 for members in union)
        for union in _scratch(dataclasses.replace(x, interpreted=False)).values()
    )


# ---------------------------------------------------------------- launch
def paged_attention(*, config: Config, return_lse: bool, **args):
    """Run the kernel on prepared arguments of `jaxattn.paged_attention`, all by name.

    With one more, `joined`, requests begin with shared prefixes whose partial results, `prefix_o` and `prefix_lse`,
    become part of the output; `own` says whose, see `_decode_joined.Joined`.

    Returns:
        o [N, H, D] in q's dtype, and with `return_lse` the natural-log lse [N, H] in float32.

    Raises:
        ValueError: `config` does not fit these shapes.
    """
    x = _plan(config, **args)
    if reason := illegal(x):
        raise ValueError(f"paged_attention: {reason}")
    inputs = {name: args[name] for name in ("q", "k_pages", "v_pages", "page_table", "lengths", "query_start")}
    if x.H > 8:
        inputs["q"] = jnp.pad(args["q"], ((0, 0), (0, -x.H % 8), (0, 0)))  # TMA fetches whole slabs of heads
    scales = {name: args[name] for name in ("k_scale", "v_scale") if args[name] is not None}
    inputs |= {name: scale.astype(f32).reshape(1) for name, scale in scales.items()}
    inputs |= per_head.inputs(x, args)
    if x.joined is not None:
        inputs |= {name: args[name] for name in ("own", "prefix_o", "prefix_lse")}
    if args["sinks"] is not None:
        inputs["sinks"] = args["sinks"]
    outputs = {"o": jax.ShapeDtypeStruct((x.N, x.H, x.D), x.out_dtype)}
    if return_lse:
        outputs["sums"] = jax.ShapeDtypeStruct((x.sum_slots, x.chunks, 2, ROWS), f32)
    if x.partials:
        outputs["part_o"] = jax.ShapeDtypeStruct((x.chunks, x.partials, x.rows, x.D), f32)
        outputs["part_sums"] = jax.ShapeDtypeStruct((x.chunks, x.partials, 2, ROWS), f32)
        outputs["notes"] = jax.ShapeDtypeStruct((x.chunks, x.entries, len(combine.NOTES)), i32)

    def body(*refs, **scratch):
        given = dict(zip((*inputs, *outputs), refs, strict=True))
        shared = {name: refs for name, refs in scratch.items() if not name.endswith("_bar")}
        blocks.run(x, SimpleNamespace(**dict.fromkeys(blocks.OPTIONAL) | given | scratch), shared)

    body.__name__ = "paged_decode"
    copies = (1 + x.per_head) * max(1, x.block_kv // x.page)
    bars = plgpu.Barrier(num_arrivals=copies, num_barriers=x.num_stages)
    q_bar = plgpu.Barrier(num_arrivals=x.block_q)
    more = {} if x.joined is None else {"prefix_bar": plgpu.Barrier(num_arrivals=joined.copies(x))}
    scratch = {name: _union(*members) for name, members in _scratch(x).items()}
    out = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=scratch | more | {"q_bar": q_bar, "k_bar": bars, "v_bar": bars},
        grid=tuple(x.grid.values()),
        grid_names=tuple(x.grid),
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(
            approx_math=x.softcap is None,  # the approximate tanh has 11 bits
            reduction_scratch_bytes=0,  # row reductions stay within four lanes
        ),
    )(*inputs.values())
    out = dict(zip(outputs, out, strict=True))
    if x.partials:
        out |= combine.run(x, out, inputs.get("sinks"))
    return (out["o"], common.lse(x, out["sums"], args["query_start"])) if return_lse else out["o"]
