"""How sparse latent attention cuts its work: configurations, what fits the hardware, scratch memory."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._gather_rows import PIECE

HEADS = 64
"""Query heads of a tile: the M of one wgmma."""
DTYPES = ("bfloat16", "float16")
FORMATS = ("plain", "v4")

f32 = jnp.float32


# ---------------------------------------------------------------- configuration and legality
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How lists are cut and walked over."""

    block_kv: int = 64
    """Rows per step."""
    stages: int = 2
    """Steps whose rows may be in shared memory at once."""
    splits: int = 1
    """Thread blocks that share the list of a tile."""

    def __post_init__(self):
        if self.block_kv not in (32, 64):
            raise ValueError(f"block_kv must be 32 or 64, got {self.block_kv}")
        if not 2 <= self.stages <= 8:
            raise ValueError(f"stages must lie between 2 and 8, got {self.stages}")
        if not 1 <= self.splits <= 16:
            raise ValueError(f"splits must lie between 1 and 16, got {self.splits}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything about a call that is known when it is compiled."""

    N: int
    H: int
    D: int
    Dv: int
    dtype: Any
    format: str
    scale: float
    lists: tuple[tuple[int, int, int, int], ...]
    """Of each cache its rows, bytes of a row or page, rows of a page, and entries of its lists."""
    config: Config
    interpreted: bool
    num_sms: int

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of the lists of each cache."""
        return tuple(-(-width // self.config.block_kv) for *_, width in self.lists)

    @property
    def per_split(self) -> int:
        """Blocks of a split."""
        return -(-sum(self.blocks) // self.config.splits)

    @property
    def chunks(self) -> int:
        """Tiles that the heads of a token take."""
        return self.H // HEADS

    @property
    def tiles(self) -> int:
        """Of the whole call."""
        return self.N * self.chunks * self.config.splits

    @property
    def grid(self) -> int:
        """Thread blocks."""
        return min(self.num_sms, self.tiles)

    @property
    def pieces(self) -> int:
        """Pieces of a row."""
        return self.D // PIECE

    @property
    def half(self) -> int:
        """Pieces of the values that one warpgroup multiplies."""
        return self.Dv // (2 * PIECE)

    @property
    def slots_p(self) -> int:
        """Blocks of P in shared memory at once."""
        return 2 if self.D <= 512 else 1

    @property
    def notes(self) -> int:
        """Rows of float32 in shared memory: factors of the output for each block of P and at the end, and masks."""
        return self.slots_p + 1 + self.config.stages

    @property
    def staged(self) -> bool:
        """The output does not leave through a slot: it has more rows, or is float32."""
        return self.config.block_kv < HEADS or self.config.splits > 1


def plan(config: Config, *, q, cache, indices, extra_cache, extra_indices, scale, value_dim, format, **args) -> Plan:
    lists = []
    for x, listed, page in (
        (cache, indices, args["page"]),
        (extra_cache, extra_indices, args["extra_page"]),
    ):
        if x is not None and (listed.shape[1] or not lists):
            rows = x.shape[0] * (page or 1)
            lists.append((rows, x.shape[1] * jnp.dtype(x.dtype).itemsize, page or 1, listed.shape[1]))
    N, H, D = q.shape
    return Plan(
        N=N,
        H=H,
        D=D,
        Dv=value_dim,
        dtype=jnp.dtype(q.dtype),
        format=format,
        scale=scale,
        lists=tuple(lists),
        config=config,
        interpreted=_mosaic.interpreting(),
        num_sms=_mosaic.num_sms(),
    )


def why_not(**args) -> str | None:
    """None if the kernel can run these arguments, else one sentence; shapes, dtypes and options are enough."""
    x = plan(Config(), **args)
    if x.format not in FORMATS:
        return f"format must be {_mosaic.either(FORMATS)}, got {x.format}"
    known = DTYPES if x.format == "plain" else DTYPES[:1]
    if x.dtype.name not in known:
        return f"q must be {_mosaic.either(known)}, got {x.dtype.name}"
    if x.H % HEADS or not x.H:
        return f"the query heads must be a multiple of {HEADS}, got H={x.H}"
    if x.D % PIECE or x.D > 576:
        return f"rows must be multiples of {PIECE} up to 576 wide, got D={x.D}"
    if x.Dv not in (128, 256, 512):
        return f"value_dim must be 128, 256 or 512, got {x.Dv}"
    for _, stride, *_ in x.lists:
        if x.format == "v4" and stride % 16:
            return f"pages must be multiples of 16 bytes, got {stride}"
    if max(rows for rows, *_ in x.lists) >= 2**31:
        return f"caches must have less than 2**31 rows, got {max(rows for rows, *_ in x.lists)}"
    return None


def default_config(**args) -> Config:
    """Blocks of 64 rows; lists of small batches are split until the card is full, but not below four blocks."""
    x = plan(Config(), **args)
    tiles, blocks = max(1, x.tiles), sum(x.blocks)
    splits = max(n for n in range(1, 17) if n == 1 or (n * tiles <= x.num_sms and blocks // n >= 4))
    return Config(splits=splits)


def configs(**args) -> Iterator[Config]:
    """Every configuration that fits; lists are split only as long as thread blocks have no more than two tiles."""
    tiles = max(1, plan(Config(), **args).tiles)
    splits_worth_timing = [n for n in range(1, 17) if n == 1 or n * tiles <= 2 * _mosaic.num_sms()]
    for block_kv in (64, 32):
        for stages in (2, 3, 4):
            for splits in splits_worth_timing:
                config = Config(block_kv=block_kv, stages=stages, splits=splits)
                if illegal(plan(config, **args)) is None:
                    yield config


def illegal(x: Plan) -> str | None:
    c = x.config
    if c.splits > max(1, sum(x.blocks)):
        return f"splits={c.splits} is more than the {sum(x.blocks)} blocks of the lists; use fewer"
    if (used := _mosaic.smem_bytes(scratch(x).values())) > _mosaic.SMEM_BYTES:
        given = f"block_kv={c.block_kv}, stages={c.stages}"
        return f"{given} needs {used} bytes of shared memory, more than {_mosaic.SMEM_BYTES}; use smaller values"
    return None


# ---------------------------------------------------------------- scratch memory
def scratch(x: Plan) -> dict[str, Any]:
    """Scratch of one thread block; `free` has a barrier for each half of each slot."""
    c = x.config
    tile = _mosaic.swizzled(128, bytes_per_value=2)
    block = _mosaic.swizzled(2 * c.block_kv, bytes_per_value=2)
    out = {
        "q_tile": plgpu.SMEM((x.pieces, HEADS, PIECE), x.dtype, transforms=tile),
        "kv": plgpu.SMEM((c.stages, x.pieces, c.block_kv, PIECE), x.dtype, transforms=tile),
        "p": plgpu.SMEM((x.slots_p, HEADS, c.block_kv), x.dtype, transforms=block),
        "notes": plgpu.SMEM((x.notes, HEADS), f32),
        "q_full": plgpu.Barrier(num_arrivals=x.pieces),
        "q_free": plgpu.Barrier(),
        "full": plgpu.Barrier(num_barriers=c.stages),
        "free": plgpu.Barrier(num_barriers=2 * c.stages),
        "p_full": plgpu.Barrier(num_barriers=x.slots_p),
        "p_free": plgpu.Barrier(num_barriers=x.slots_p),
        "end_full": plgpu.Barrier(),
        "end_free": plgpu.Barrier(),
    }
    if x.staged and x.config.splits == 1:
        out["stage"] = plgpu.SMEM((2, HEADS, PIECE), x.dtype, transforms=tile)
    return out
