"""How latent attention cuts its work: configurations, what fits the hardware, scratch memory."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _partials

ROWS = 64
"""Rows of a tile: the M of one wgmma."""
PIECE = 64
"""Columns of a 128-byte span of 16-bit values."""
BLOCK = 64
"""Keys per step."""
READERS = 2
"""Warpgroups that multiply weights with values, half of the columns each."""
DTYPES = ("bfloat16", "float16")
FORMATS = ("plain", "fp8", "fp8_ds_mla")
LATENT, SCALED = 512, 128
"""Codes of an `fp8_ds_mla` row, and how many of them share a scale. Bytes: codes | float32 scales | bfloat16 rest."""
SCALES = LATENT // SCALED
SCALE_BYTES = 4 * SCALES
PAGES = (16, 32, 64, 128, 256)
MAX_D = 576
MAX_DV = 512
MAX_COLUMNS = 128
"""ptxas assembles no product whose sums exceed the registers that a thread has at launch."""
TOLD = 4
"""Items that the producer may tell of before the first is forgotten."""
KEPT = 4
"""Blocks whose pages are remembered."""
FIELDS = 32
REGISTERS = 40, 104, 184
"""Of a thread of the producer, of the scorer, and of the two others; 512 in all. With `turns` 176 would spill."""
_LEAST_KEYS = 1024
"""Page tables of so many rows are not worth cutting up."""


# ---------------------------------------------------------------- configuration and legality
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the keys of a batch are shared out among thread blocks; neither option: one thread block a tile."""

    split_pages: int | None = None
    """Pages of a split, boundaries that depend on a key's position alone: bits do not depend on the rest of a batch."""
    num_shares: int | None = None
    """Equal shares that all blocks of keys of the batch, in a row, are cut into."""
    pair: bool = False
    """The two halves of 128 heads run side by side as a cluster, and each fetches half of every block for both: half
    the traffic out of L2."""

    turns: bool = False
    """The values of a block wait for the scores of the next one, so that the tensor cores work on one at a time and a
    softmax runs beside products with values. Refilling a place must not wait as well: it is filled anew in parts, where
    P was, then what either half of the columns' first product has read, then the rest; and the next block is brought
    into L2 before its fetch. Plain caches only."""

    sparing: bool = False
    """Of plain caches: the scorer's warps meet only where some may still have to read what is written over, as they do
    for codes."""

    ahead: int | None = None
    """Codes of the next block are fetched when so many pieces of a block are decoded; None: all, and it is told of."""

    prefetch: bool = False
    """Codes: a block is brought into L2 before its fetch, as `turns` does."""

    def __post_init__(self):
        _partials.check_cut(split_pages=self.split_pages, num_shares=self.num_shares)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything about a call that is known when it is compiled."""

    N: int
    H: int
    D: int
    Dv: int
    B: int
    pool: int
    page: int
    pages: int
    """Columns of the page table."""
    dtype: Any
    format: str
    """Of the cache."""
    scale: float
    causal: bool
    config: Config
    interpreted: bool
    num_sms: int

    @property
    def codes(self) -> bool:
        """The cache holds float8_e4m3fn codes."""
        return self.format != "plain"

    @property
    def looks_ahead(self) -> bool:
        """The next block's pages are looked up as soon as a block's codes are on their way."""
        return self.codes and (self.config.ahead is not None or self.config.prefetch)

    @property
    def packed(self) -> bool:
        """The cache holds rows of bytes: codes, scales and bfloat16 numbers."""
        return self.format == "fp8_ds_mla"

    # ------------------------------------------------ tiles
    @property
    def granule(self) -> int:
        """Rows of q and o that one copy moves: every tile has a multiple of it."""
        return math.gcd(self.H, ROWS)

    @property
    def gap(self) -> int:
        """Numbers of tiles left out between requests, where tiles of a request need not be full."""
        return int(self.H % ROWS > 0)

    @property
    def members(self) -> int:
        """Thread blocks of a cluster. Each has slots, partial sums and notes of its own."""
        return 2 if self.config.pair else 1

    @property
    def rows(self) -> int:
        """Rows of a cluster's tiles."""
        return ROWS * self.members

    @property
    def slots(self) -> int:
        """Tile i of request b, its (token, head) rows from i * rows on, has slot start[b] H // rows + gap b + i."""
        return self.N * self.H // self.rows + self.gap * (self.B + 1)

    @property
    def blocks(self) -> int:
        """Most blocks of keys of a request."""
        return -(-self.pages * self.page // BLOCK)

    @property
    def copies(self) -> int:
        """TMA copies of 64 columns of a block."""
        return max(1, BLOCK // self.page)

    @property
    def held(self) -> int:
        """Pieces of 64 columns of a block's place: the last one, no value, makes room for weights."""
        return self.D // PIECE + int(self.Dv == self.D)

    @property
    def groups(self) -> int:
        """Parts of a block's pieces that scores begin with one by one."""
        pieces = self.D // PIECE
        if self.config.turns:
            return pieces
        return 1 if self.codes else next(n for n in (3, 2, 1) if pieces % n == 0)

    @property
    def columns(self) -> int:
        """Columns of one product of half of the values: its sums must fit the registers at launch."""
        return math.gcd(self.Dv // READERS, MAX_COLUMNS)

    @property
    def chunks(self) -> int:
        """Products of half of the values."""
        return self.Dv // READERS // self.columns

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Pieces of a block in the order of fetching; those of a part become free together."""
        pieces, values, wide = self.D // PIECE, self.Dv // PIECE, self.columns // PIECE
        if not self.config.turns:
            return (tuple(range(pieces)),)
        half = values // READERS
        steps = [
            tuple(w * half + n * wide + i for w in range(READERS) for i in range(wide)) for n in range(self.chunks)
        ]
        return tuple(range(values, pieces)), *steps

    @property
    def fetches(self) -> int:
        """TMA copies of a block: packed rows have scales beside 64 columns of codes each, and the rest."""
        return self.copies * (LATENT // PIECE + 2 if self.packed else self.D // PIECE)

    # ------------------------------------------------ the work
    @property
    def split_blocks(self) -> int:
        """Blocks of keys of a split."""
        return self.blocks if self.config.split_pages is None else self.config.split_pages * self.page // BLOCK

    @property
    def num_splits(self) -> int:
        """Splits that a tile may have."""
        return -(-self.blocks // self.split_blocks)

    @property
    def grid(self) -> int:
        """Clusters."""
        return self.config.num_shares or min(self.num_sms // self.members, self.slots * self.num_splits)

    @property
    def partials(self) -> int:
        """Partial sums that may be kept.

        Split n of a slot keeps its own in slot * num_splits + n; share s has s for the tile that it continues and
        num_shares + s for the last one that it begins.
        """
        if self.config.num_shares is not None:
            return 2 * self.config.num_shares
        return self.slots * self.num_splits if self.num_splits > 1 else 0

    @property
    def entries(self) -> int:
        """Tiles that may have been cut: notes for the kernel that combines them."""
        return self.config.num_shares or self.slots


def make(config: Config, *, q, cache, page_table, scale, value_dim, causal, format, **_) -> Plan:
    """The plan of prepared arguments."""
    (N, H, D), (B, pages) = q.shape, page_table.shape
    return Plan(
        N=N,
        H=H,
        D=D,
        Dv=value_dim,
        B=B,
        pool=cache.shape[0],
        page=cache.shape[1],
        pages=pages,
        dtype=jnp.dtype(q.dtype),
        format=format,
        scale=scale,
        causal=causal,
        config=config,
        interpreted=_mosaic.interpreting(),
        num_sms=_mosaic.num_sms(),
    )


def why_not(**args) -> str | None:
    """None if the kernel can run these arguments, else one sentence; shapes, dtypes and options are enough."""
    x = make(Config(), **args)
    if x.dtype.name not in DTYPES:
        return f"q must be {_mosaic.either(DTYPES)}, got {x.dtype.name}"
    if args["format"] not in FORMATS:
        return f"the cache must have format {_mosaic.either(FORMATS)}, got {args['format']}"
    if x.packed and x.dtype != jnp.bfloat16:
        return f"q must be bfloat16, as rotated keys of format fp8_ds_mla are, got {x.dtype.name}"
    if x.D % PIECE or x.D > MAX_D:
        return f"a row must be a multiple of {PIECE} numbers, at most {MAX_D}, got D={x.D}"
    if x.Dv % (2 * PIECE) or x.Dv > MAX_DV:
        return f"value_dim must be a multiple of {2 * PIECE}, at most {MAX_DV}, got {x.Dv}"
    if x.page not in PAGES:
        return f"the page size must be {_mosaic.either(PAGES)}, got {x.page}"
    if 0 in (x.N, x.H, x.B, x.pages):
        return f"needs a query row, a head, a request and a table column, got {x.N}, {x.H}, {x.B} and {x.pages}"
    if (units := (x.slots + x.B) * x.blocks) >= 2**31:
        return f"the batch may hold {units} blocks of keys, more than a 32-bit number counts"
    return None


def illegal(x: Plan) -> str | None:
    """Why a legal configuration does not fit these shapes."""
    pages = x.config.split_pages
    if pages is not None and pages * x.page % BLOCK:
        return f"a split must be a multiple of {BLOCK} keys, got split_pages={pages} of {x.page}"
    if x.H % x.rows and x.config.pair:
        return f"pair=True needs heads in multiples of {x.rows}, got {x.H}"
    if x.config.ahead is not None and not 0 < x.config.ahead <= x.Dv // PIECE:
        return f"ahead must be 1 to {x.Dv // PIECE}, got {x.config.ahead}"
    if x.codes and x.config.turns:
        return f"turns=True needs a plain cache, whose places are filled anew in parts, got format {x.format}"
    return None


def default(x: Plan) -> Config:
    """What was fastest on an H200 (2026-12): equal shares for all multiprocessors where there is work to share.

    Pairs read a key once for 128 rows and are bound by products, which `turns` puts in order; fewer rows, and codes,
    are bound by what brings the keys, which `turns` delays.
    """
    if x.pages * x.page <= _LEAST_KEYS:
        return Config()
    pair = not x.codes and x.H % (2 * ROWS) == 0
    shares = min(x.num_sms, x.slots * -(-x.blocks // 4))
    return Config(pair=pair, turns=pair, num_shares=max(1, shares // (1 + pair)))


def candidates(x: Plan) -> Iterator[Config]:
    """Configurations to time."""
    for pair, turns in itertools.product((False, True), repeat=2):
        ways: tuple[dict[str, Any], ...]
        ways = {}, {"num_shares": x.num_sms // (1 + pair)}, {"split_pages": 16}, {"split_pages": 64}
        for how in ways:
            config = Config(pair=pair, turns=turns, **how)
            if illegal(dataclasses.replace(x, config=config)) is None:
                yield config


# ---------------------------------------------------------------- scratch memory
def scratch(x: Plan) -> dict[str, Any]:
    """Scratch of one thread block; its shared memory is full to the last kilobyte.

    Tiles are cut in pieces of 64 columns, whose rows of 128 bytes TMA takes from anywhere: with tiles of 8 rows it
    would insist on rows that are multiples of 8. A swizzled piece looks the same in memory either way, so that each
    exists twice: `_rows` for TMA and `_tile` for wgmma. Codes of a block, `k_raw`, arrive in the second half of its
    place, from where they are decoded piece by piece. Of packed rows, whose latent is a piece shorter, codes end where
    the last piece begins: that one's bytes, `k_rest`, arrive where they belong, those of scales, `k_marks`, at the
    front of the place. Results leave through q's memory.
    """
    pieces = x.D // PIECE
    rows, tile = (_mosaic.swizzled(128, bytes_per_value=2, rows=n) for n in (1, 8))

    def memory(shape, transforms):
        return plgpu.SMEM(shape, x.dtype, transforms=transforms)

    kinds = [("q", (1, pieces, ROWS, PIECE)), ("k", (READERS, x.held, BLOCK, PIECE))]
    out: dict[str, Any] = {}
    for name, shape in kinds:
        members = [memory(shape, tile)] if x.interpreted else [memory(shape, rows), memory(shape, tile)]
        if x.codes and name == "k":
            members += _coded(x, x.held)
        out[name] = members[0] if len(members) == 1 else tuple(members) if x.interpreted else plgpu.RefUnion(*members)
    if x.interpreted:  # the interpreter multiplies what is in shared memory only
        out["p_own"] = memory((READERS, ROWS, BLOCK), tile)
    free: Any = {"num_arrivals": READERS, "num_barriers": READERS * len(x.parts)}
    return out | {
        "stats": plgpu.SMEM((1 + READERS, ROWS), jnp.float32),
        "told": plgpu.SMEM((TOLD + KEPT, FIELDS), jnp.int32),
        "told_bar": plgpu.Barrier(num_barriers=TOLD),
        "q_bar": plgpu.Barrier(num_arrivals=ROWS // x.granule * pieces),
        "q_free": plgpu.Barrier(num_arrivals=READERS),
        "k_bar": plgpu.Barrier(num_arrivals=1 if x.codes else x.fetches // x.groups, num_barriers=READERS * x.groups),
        "raw_bar": plgpu.Barrier(num_arrivals=x.fetches, num_barriers=READERS),
        "k_free": plgpu.ClusterBarrier(collective_axes=("member",), **free) if x.config.pair else plgpu.Barrier(**free),
        "p_bar": plgpu.Barrier(num_barriers=READERS),
        "turn_bar": plgpu.Barrier(num_barriers=READERS),
        "sum_bar": plgpu.Barrier(),
    }


def _coded(x: Plan, pieces: int) -> list[Any]:
    """Further views of the blocks' places: what arrives as codes; of packed rows also other bytes.

    656 bytes are no whole number of tiles, so that bytes are swizzled only: in memory that makes no difference.
    """
    raw = READERS, 2 * pieces, BLOCK, PIECE
    if not x.packed:
        return [plgpu.SMEM(raw, jnp.float8_e4m3fn)]
    rest, marks = (READERS, pieces, BLOCK, 2 * PIECE), (READERS, 2 * PIECE // SCALE_BYTES * pieces, BLOCK, SCALE_BYTES)
    _, narrow = _mosaic.swizzled(PIECE, bytes_per_value=1)
    _, wide = _mosaic.swizzled(2 * PIECE, bytes_per_value=1)
    each = (raw, (narrow,)), (rest, (wide,)), (marks, ())
    return [plgpu.SMEM(shape, jnp.uint8, transforms=how) for shape, how in each]
