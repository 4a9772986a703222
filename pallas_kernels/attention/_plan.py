"""How prefill attention cuts its work: configurations, and the shapes and scratch memory that follow."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic

ROWS = 64
"""Rows of a warpgroup: the M of one wgmma."""
PIECE = 64
"""Columns of a 128-byte span of 16-bit values."""
DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 192, 256)
L2_BYTES = 32 << 20
"""Keys and values that tiles running at the same time may spread over, to find them in the 50 MB of L2."""
TOLD = 4
"""Tiles that the producer may tell of before the first is forgotten."""
CHUNK = 16
"""Rows of a page that a tile of one pass copies together."""
WARPS = 4
"""Warps of a warpgroup."""
FAR = 2**30
"""Any window beyond is none."""


# ---------------------------------------------------------------- configuration and legality
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How tiles are cut and walked over."""

    consumers: int = 2
    """Warpgroups that compute, 64 rows each."""
    block_g: int = 1
    """Query heads of a tile."""
    block_kv: int = 128
    """Keys per step, a multiple of 16."""
    num_stages: int = 2
    """Steps whose keys and values may be on their way at once."""
    share_o: bool = False
    """The output leaves through q's memory, which saves shared memory; the next q waits for it."""
    q_stages: int = 1
    """Tiles whose q may be there at once; with 2 tiles need not wait for their q."""
    pages_at_once: int = 1
    """Pages whose copies the producer issues in a row, without a loop: their numbers are looked up together."""
    by_warps: bool = False
    """Each warp of the producer issues the copies of every fourth page of a block; interpreted they do not."""
    dynamic: bool = False
    """Thread blocks take the next tile when they are ready for it instead of every so many; interpreted they do not."""
    one_pass: bool = False
    """Causal windows that fit one block: no loop over keys, see `_span`; `block_kv` means nothing then."""
    slack: int = 8
    """How far, in powers of two, scores may exceed what the softmax subtracts before o is rescaled; 0 subtracts the
    running maximum."""

    def __post_init__(self):
        if self.consumers not in (1, 2, 3):
            raise ValueError(f"consumers must be 1, 2 or 3, got {self.consumers}")
        if self.block_kv not in range(64, 193, 16):
            raise ValueError(f"block_kv must be a multiple of 16 from 64 to 192, got {self.block_kv}")
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must lie between 1 and 8, got {self.num_stages}")
        if self.q_stages not in (1, 2):
            raise ValueError(f"q_stages must be 1 or 2, got {self.q_stages}")
        if self.share_o and self.q_stages > 1:
            raise ValueError("share_o=True leaves room for one q; use q_stages=1")
        if self.pages_at_once not in (1, 2, 4):
            raise ValueError(f"pages_at_once must be 1, 2 or 4, got {self.pages_at_once}")
        if not 0 <= self.slack <= 8:
            raise ValueError(f"slack must lie between 0 and 8, got {self.slack}")
        rows = ROWS * self.consumers
        if self.one_pass:
            if self.block_g not in (1, 2, 4, 8):
                raise ValueError(f"block_g must be 1, 2, 4 or 8 with one_pass, got {self.block_g}")
            if self.share_o:
                raise ValueError("share_o=True is not for one_pass; use share_o=False")
        elif (
            self.block_g < 1 or rows % self.block_g or (self.block_q % ROWS and ROWS % self.block_q) or self.block_q < 8
        ):
            raise ValueError(
                f"block_g must cut the tile's {rows} rows in parts of 8, 16, 32 or a multiple of 64, got {self.block_g}"
            )

    @property
    def block_q(self) -> int:
        """Tokens of a tile."""
        return ROWS * self.consumers // self.block_g


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything about a call that is known when it is compiled."""

    N: int
    H: int
    K: int
    D: int
    Dv: int
    B: int
    S: int
    """Rows of packed keys, or slots of a row of the page table."""
    dtype: Any
    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    config: Config
    page: int | None = None
    """Slots of a page, None if keys are packed."""
    pool: int = 0
    """Pages of the pool."""
    q_rows: int
    """Rows of q: those of the output start over after as many."""
    interpreted: bool
    num_sms: int

    @property
    def block_q(self) -> int:
        return self.config.block_q

    @property
    def piece_q(self) -> int:
        """Tokens of one head that lie together in a warpgroup's rows."""
        return min(ROWS, self.block_q)

    @property
    def part_q(self) -> int:
        """Tokens of a warpgroup of a tile of one pass."""
        return ROWS // self.config.block_g

    @property
    def span(self) -> int:
        """Keys that a warpgroup takes in one pass: the last is that of its last token."""
        return 0 if self.window is None else -(-(self.window - 1 + self.part_q) // CHUNK) * CHUNK

    @property
    def span_rows(self) -> int:
        """Keys of a tile of one pass, whole chunks: a warpgroup's begin `part_q` behind those of the one before."""
        return self.span + -(-(self.config.consumers - 1) * self.part_q // CHUNK) * CHUNK

    @property
    def lead(self) -> int:
        """Rows in front of a tile's keys, for those of a page that it begins with."""
        return CHUNK if self.page else 0

    @property
    def chunks(self) -> int:
        """Groups of heads that make a tile."""
        return self.H // self.config.block_g

    @property
    def slots(self) -> int:
        """Tile i of request b takes slot query_start[b] // block_q + b + i: enough for any split of N tokens."""
        return self.N // self.block_q + self.B + 1

    @property
    def dense(self) -> bool:
        """Tiles are counted before the launch: else many slots may stay empty, and the others be shared unequally."""
        return self.page is not None and self.B > 1 and 16 * self.block_q * self.B > self.N

    @property
    def together(self) -> int:
        """Chunks whose tiles run side by side: as many as have their keys in L2, a divisor of all."""
        head = 2 * (self.D + self.Dv) * max(1, self.S if self.page else self.S // self.B)
        most = max(1, L2_BYTES // head) * (self.chunks // self.K)
        return max(n for n in range(1, self.chunks + 1) if self.chunks % n == 0 and n <= most)

    @property
    def copies(self) -> int:
        """TMA copies of a block of keys."""
        if self.config.one_pass:  # keys may begin anywhere in a chunk
            return self.span_rows // CHUNK + 1 if self.page else 1
        return max(1, self.config.block_kv // self.page) if self.page else 1

    @property
    def overlap(self) -> bool:
        """P V runs beside the next softmax; registers do not suffice for it if o is wide."""
        return self.Dv <= 128

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer and of a consumer; which ptxas gets by on without spills is chance."""
        wide = self.Dv > 64 and self.config.block_kv > 128
        return {1: (40, 240), 2: (40, 232) if wide else (56, 224), 3: (32, 160)}[self.config.consumers]

    @property
    def by_warps(self) -> bool:
        return self.config.by_warps and not self.interpreted

    @property
    def dynamic(self) -> bool:
        """Tiles are counted in global memory, as they are taken; the interpreter has no atomics."""
        return self.config.dynamic and not self.interpreted

    @property
    def grid(self) -> int:
        """Thread blocks."""
        return min(self.num_sms, self.slots * self.chunks)


# ---------------------------------------------------------------- scratch memory
def scratch(x: Plan) -> dict[str, Any]:
    """Scratch of one thread block.

    Tiles are cut in pieces of 64 columns, whose rows of 128 bytes TMA takes from anywhere: with tiles of 8 rows it
    would insist on rows that are multiples of 8. A swizzled piece looks the same in memory either way, so that each
    exists
    twice: `_rows` for TMA and `_tile` for wgmma.
    """
    c = x.config
    if c.one_pass:
        return _scratch_of_pass(x)
    shapes = {
        "q": (c.q_stages * c.consumers, x.D // PIECE, ROWS, PIECE),
        "k": (c.num_stages, x.D // PIECE, c.block_kv, PIECE),
        "v": (c.num_stages, x.Dv // PIECE, c.block_kv, PIECE),
    }
    rows, tile = (_mosaic.swizzled(128, bytes_per_value=2, rows=n) for n in (1, 8))

    def memory(shape, transforms):
        return plgpu.SMEM(shape, x.dtype, transforms=transforms)

    out: dict[str, Any] = {
        name: memory(shape, tile) if x.interpreted else plgpu.RefUnion(memory(shape, rows), memory(shape, tile))
        for name, shape in shapes.items()
    }
    if not c.share_o:
        out["o_rows"] = memory((c.consumers, x.Dv // PIECE, ROWS, PIECE), rows)
    if x.interpreted:  # the interpreter multiplies what is in shared memory only
        span = 128 if c.block_kv % 64 == 0 else 32
        p_tile = _mosaic.swizzled(span, bytes_per_value=2)
        out["p_tile"] = memory((c.consumers, ROWS, c.block_kv), p_tile)
    released = plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.num_stages)
    out |= {
        "tile": plgpu.SMEM((TOLD, 32), jnp.int32),
        "told": plgpu.Barrier(num_barriers=TOLD),
        "q_bar": plgpu.Barrier(num_arrivals=ROWS // x.piece_q * (x.D // PIECE), num_barriers=c.q_stages * c.consumers),
        "q_free": plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.q_stages),
        "k_bar": plgpu.Barrier(num_arrivals=x.copies * (x.D // PIECE), num_barriers=c.num_stages),
        "v_bar": plgpu.Barrier(num_arrivals=x.copies * (x.Dv // PIECE), num_barriers=c.num_stages),
        "raw_bar": plgpu.Barrier(num_arrivals=x.copies * (x.Dv // PIECE), num_barriers=c.num_stages),
        "k_free": released,
        "v_free": released,
    }
    if x.page is not None:
        out["numbers"] = plgpu.SMEM((2, x.copies), jnp.int32)
    if c.dynamic:
        out["next_tile"] = plgpu.SMEM((1,), jnp.int32)
    return out


def _scratch_of_pass(x: Plan) -> dict[str, Any]:
    """That of tiles of one pass: rows of q and o are token by token, each with its heads, so that TMA takes all."""
    c = x.config
    rows, tile = (_mosaic.swizzled(128, bytes_per_value=2, rows=n) for n in (1, 8))

    def memory(shape, as_rows):
        as_tile = plgpu.SMEM(shape, x.dtype, transforms=tile)
        return as_tile if x.interpreted else plgpu.RefUnion(plgpu.SMEM(as_rows, x.dtype, transforms=rows), as_tile)

    def keys(D):
        shape = c.num_stages, D // PIECE, x.span_rows + 2 * x.lead, PIECE
        return memory(shape, shape)

    q, o = (c.q_stages, x.D // PIECE), (c.consumers, x.Dv // PIECE)
    arrivals = x.copies * (x.D // PIECE), x.copies * (x.Dv // PIECE)
    released = plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.num_stages)
    out: dict[str, Any] = {
        "q": memory((*q, ROWS * c.consumers, PIECE), (*q, x.block_q, c.block_g, PIECE)),
        "o": memory((*o, ROWS, PIECE), (*o, x.part_q, c.block_g, PIECE)),
        "k": keys(x.D),
        "v": keys(x.Dv),
        "tile": plgpu.SMEM((TOLD, 32), jnp.int32),
        "told": plgpu.Barrier(num_barriers=TOLD),
        "q_bar": plgpu.Barrier(
            num_arrivals=x.D // PIECE * (x.block_q if x.interpreted else 1), num_barriers=c.q_stages
        ),
        "q_free": plgpu.Barrier(num_arrivals=c.consumers, num_barriers=c.q_stages),
        "k_bar": plgpu.Barrier(num_arrivals=arrivals[0], num_barriers=c.num_stages),
        "v_bar": plgpu.Barrier(num_arrivals=arrivals[1], num_barriers=c.num_stages),
        "raw_bar": plgpu.Barrier(num_arrivals=arrivals[1]),
        "k_free": released,
        "v_free": released,
    }
    if x.interpreted:
        p_tile = _mosaic.swizzled(32, bytes_per_value=2)
        out["p_tile"] = plgpu.SMEM((c.consumers, ROWS, x.span), x.dtype, transforms=p_tile)
    if c.dynamic:
        out["next_tile"] = plgpu.SMEM((1,), jnp.int32)
    return out


def smem_bytes(x: Plan) -> int:
    """Shared memory of a thread block on the device."""
    plain = scratch(dataclasses.replace(x, interpreted=True))  # without unions
    del plain["p_tile"]
    return _mosaic.smem_bytes(plain.values())
