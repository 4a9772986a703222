"""Which configurations of prefill attention the hardware runs, and which is taken."""

import dataclasses
import itertools
from collections.abc import Iterator

from pallas_kernels import _mosaic
from pallas_kernels.attention._plan import ROWS, WARPS, Config, Plan, smem_bytes

BLOCKS = (64, 128, 192)
"""Keys per step that are worth trying everywhere."""
MANY = 256
"""Steps of a thread block, some 400 us, from which on handing out causal tiles one by one is worth its counter."""


def illegal(x: Plan) -> str | None:
    """None if the configuration fits the shapes, else one sentence."""
    c = x.config
    if (x.H // x.K) % c.block_g:
        return f"block_g must divide the {x.H // x.K} query heads of a KV head, got {c.block_g}"
    if c.one_pass:
        return _illegal_pass(x) or _too_large(x)
    if x.page and max(x.page, c.block_kv) % min(x.page, c.block_kv):
        return f"block_kv must divide the page or be a multiple of it, got {c.block_kv} and {x.page}"
    if x.copies % c.pages_at_once:
        return f"pages_at_once must divide the {x.copies} pages of a block, got {c.pages_at_once}"
    if c.by_warps and x.copies % WARPS:
        return f"by_warps needs a multiple of {WARPS} pages of a block, got {x.copies}"
    if c.share_o and x.Dv > x.D:
        return f"share_o needs values no wider than keys, got {x.Dv} and {x.D}"
    wide = 176 if x.D == x.Dv == 128 else 128
    most = 64 if x.Dv == 256 else wide if x.Dv > 64 else 192
    if c.block_kv > most or (c.consumers == 3 and (x.Dv > 64 or c.block_kv > 128)):
        return f"block_kv={c.block_kv} with {c.consumers} consumers does not fit the registers for values of {x.Dv}"
    return _too_large(x)


def _too_large(x: Plan) -> str | None:
    if (used := smem_bytes(x)) > _mosaic.SMEM_BYTES:
        given = f"block_kv={x.config.block_kv}, num_stages={x.config.num_stages}"
        return f"{given} needs {used} bytes of shared memory, more than {_mosaic.SMEM_BYTES}; use smaller values"
    return None


def _illegal_pass(x: Plan) -> str | None:
    if x.window is None or not x.causal or x.softcap is not None:
        return "one_pass needs a causal window and no soft cap"
    if x.page is not None and not x.config.by_warps:
        return "one_pass over pages needs by_warps=True"
    if x.config.consumers == 3 and x.D > 128:
        return f"one_pass with 3 consumers fits the registers for keys of at most 128, got {x.D}"
    keys, values = (144, 64) if x.config.consumers == 3 else (192, 128)
    if x.span > keys or x.Dv > values or x.span_rows > 256:
        return (
            f"one_pass takes {keys} keys of a warpgroup, 256 of a tile and values of {values} with "
            f"{x.config.consumers} consumers, got {x.span}, {x.span_rows} and {x.Dv}; use a larger block_g"
        )
    return None


def default(x: Plan) -> Config:
    """What was fastest on an H200 (2026-12); soft caps, windows of other sizes and D = 64 without one not measured."""
    return next((c for c in _passes(x) if c.consumers > 1 and _fits(x, c)), None) or _blocks(x)


def _fits(x: Plan, config: Config) -> bool:
    return illegal(dataclasses.replace(x, config=config)) is None


def _passes(x: Plan) -> Iterator[Config]:
    """Tiles of one pass, those first that do the most with what they fetch and wait the least for it.

    The more heads of a group a tile holds the fewer tokens it has, and the fewer keys it takes.
    """
    block_g = next(g for g in (8, 4, 2, 1) if x.H // x.K % g == 0)
    for consumers in (3, 2, 1):
        for num_stages in (3, 2, 1):
            for q_stages in (2, 1):
                yield Config(
                    one_pass=True,
                    consumers=consumers,
                    block_g=block_g,
                    num_stages=num_stages,
                    q_stages=q_stages,
                    by_warps=x.page is not None,
                )


def _blocks(x: Plan) -> Config:
    """Several heads of a group in one tile share its keys, and leave fewer masked scores at the diagonal."""
    block_g = next(g for g in (4, 2, 1) if x.H // x.K % g == 0)
    masked = x.window is not None or x.softcap is not None  # short tiles waste less; wider blocks not measured
    if x.Dv > 64:
        wide = x.Dv > 128 or masked
        config = Config(block_g=block_g, block_kv=64 if wide else 128, num_stages=2, share_o=x.D > 128)
    else:
        config = Config(block_g=block_g, block_kv=64 if masked else 128, num_stages=4 if masked else 3)
    x = dataclasses.replace(x, config=config)
    wanted = {}
    if x.window is not None if x.page is None else x.page >= 64:
        wanted = {"q_stages": 2}
    elif x.page is not None and x.copies % WARPS == 0:
        wanted = {"by_warps": True}
    elif x.page is None and x.causal and _steps(x) >= MANY:
        wanted = {"dynamic": True}
    if config.share_o:
        wanted.pop("q_stages", None)
    better = dataclasses.replace(config, **wanted)
    return better if _fits(x, better) else config


def _steps(x: Plan) -> int:
    """Blocks of keys that a thread block takes, about: queries are the last of their sequence."""
    keys = max(0, x.S - x.N // 2) // x.B
    return x.N * x.chunks * keys // (x.block_q * x.config.block_kv * x.num_sms)


def candidates(x: Plan) -> Iterator[Config]:
    """Every configuration that fits the shapes."""
    yield from (config for config in _passes(x) if _fits(x, config))
    for consumers, block_g, block_kv, num_stages, share_o in itertools.product(
        (2, 3, 1), (1, 2, 4, 8, 16), BLOCKS, (2, 3, 4), (False, True)
    ):
        rows = ROWS * consumers
        if rows % block_g or rows // block_g < 8 or (consumers == 3 and block_g > 1):
            continue
        config = Config(consumers=consumers, block_g=block_g, block_kv=block_kv, num_stages=num_stages, share_o=share_o)
        yield from (variant for variant in _variants(x, config) if _fits(x, variant))


def _variants(x: Plan, config: Config) -> Iterator[Config]:
    """The configuration, and what may help where tiles are short, of unequal length, or pages small."""
    yield config
    if x.page is None and x.causal and x.window is None:
        yield dataclasses.replace(config, dynamic=True)
    if (x.window is not None or (x.page or 0) >= 64) and not config.share_o:
        yield dataclasses.replace(config, q_stages=2)
    if x.page is not None and x.page < 64:
        yield dataclasses.replace(config, pages_at_once=2)
        yield dataclasses.replace(config, by_warps=True)
        if x.window is not None and not config.share_o:
            yield dataclasses.replace(config, q_stages=2, by_warps=True)
