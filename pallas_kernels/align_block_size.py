"""Pairs sorted by expert in whole blocks on Mosaic GPU: a counting sort, see `jaxattn.ops.align_block_size`.

The launches are in `_counting.sort_pairs`.
"""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels import _counting, _mosaic, _routing

_PAIRS, _CHUNKS = (32, 64, 128), (384, 512, 1024, 2048)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a thread block's work."""

    pairs: int = 64
    """Of one thread block: 32, 64 or 128."""
    chunk: int = 512
    """Pairs that are counted together: 384 (of 32 or 64 and 128), 512, 1024 or 2048."""

    def __post_init__(self):
        for name, known in (("pairs", _PAIRS), ("chunk", _CHUNKS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {_mosaic.either(known)}, got {getattr(self, name)}")


def why_not(*, topk_ids, **_) -> str | None:
    """None: the kernel can run any arguments."""
    del topk_ids


def default_config(*, topk_ids, **_) -> Config:
    """Many pairs have longer chunks, whose counts every thread block reads."""
    pairs = topk_ids.size
    return Config(pairs=64 if pairs >= 1 << 14 else 32, chunk=_counting.default_chunk(pairs))


def configs(*, topk_ids, **_) -> Iterator[Config]:
    """Every configuration."""
    del topk_ids
    return (Config(pairs=pairs, chunk=chunk) for pairs in _PAIRS for chunk in _CHUNKS)


def align_block_size(*, config: Config, topk_ids, block_size, num_experts, expert_map):
    """Launch; arguments as prepared by `jaxattn.ops.align_block_size`."""
    pairs = topk_ids.size
    rows = _routing.capacity(pairs, block_size, num_experts)
    if not pairs:
        return jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32), jnp.zeros(1, jnp.int32)
    if expert_map is not None:
        topk_ids = _routing.local_experts(topk_ids, num_experts, expert_map)
    sort = _counting.Sort(
        pairs=pairs,
        num_experts=num_experts,
        part=config.pairs,
        chunk=_counting.chunk(config.pairs, min(config.chunk, pairs)),
        block=block_size,
    )
    return tuple(_counting.sort_pairs(sort, topk_ids, rows)[:3])
