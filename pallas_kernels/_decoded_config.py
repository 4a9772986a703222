"""Which tiles `_experts_decoded` multiplies, and what it can multiply at all."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels import _mosaic, _nibbles
from pallas_kernels._nibbles import FEATURES, INPUTS

FORMATS = ("wna16", "mxfp4", "nvfp4")
FEW_TOKENS = 64
"""Tokens up to which FP8 codes are multiplied as such."""
FEW = 2
"""Rows of an expert, on average, that tiles of eight are for."""
LIGHT = 32
"""Rows of a tile up to which reading its weight takes longer than multiplying: four warpgroups with whole lines."""
REGISTERS = {2: (40, 232), 3: (40, 152), 4: (24, 112)}
"""Registers of a thread that loads and of one that multiplies, given the warpgroups that do; together no more than
those that a thread block starts with, 168, 128 or 96 each, or it would wait for ever."""
STAGED = {2: (72, 216), 4: (32, 112)}
"""The same where the warpgroup that loads decodes scales."""
MOST, MOST_EIGHT = 128, 64
"""Rows of a tile: two halves of 64 features need a register for each, 8-bit parts as many again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Shape of a tile and of the ring."""

    tokens: int = 64
    """Rows of a tile: a multiple of 8."""
    block: int = 8
    """Rows to a multiple of which each expert is filled up, and that leave together: 8, 16, 32 or 64."""
    warpgroups: int = 2
    """Warpgroups that multiply, each 2 x 64 features: 1 to 4."""
    stages: int = 6
    """Steps in flight."""
    inputs: int = 128
    """Of a step: 128, or 256, whose 128 bytes of a weight's row are a whole line of the L2 cache; then whoever loads
    also fetches the scales of the next tile's weights to that cache."""
    eight: bool = False
    """Multiply FP8 codes as such."""
    staged: bool = False
    """The warpgroup that loads decodes the weights' scales as well, once for all; with `eight`, 2 or 4 `warpgroups`."""
    overlap: int = 1
    """Steps that overlap, without `eight`: one is decoded while the one before multiplies. With `codes` 2: 128
    inputs of 64 features are decoded while those before multiply, within a step."""
    together: bool = False
    """All rows of a tile leave together, with one wait, rather than `block` by `block`; they need shared memory."""
    fused: bool = True
    """Quantize between the products in the first one's epilogue, if groups are of 32 with powers of two; those of 128
    that `codes` has with two `warpgroups`."""

    encoder: bool = False
    """Quantize x by a kernel of its own rather than by XLA; with `eight`, if groups are of 32 with powers of two."""
    codes: bool = False
    """With `staged`, for many tokens: the powers of a feature's 128 inputs go into its codes, beside the largest of
    them (`_expert_codes`). Activations are quantized in groups of 128, even if those of 32 are asked for: see
    docs/experts.md for what that changes, which is next to nothing."""

    def __post_init__(self):
        choices = {"block": (8, 16, 32, 64), "warpgroups": (1, 2, 3, 4), "inputs": (128, 256), "overlap": (1, 2, 4)}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {_mosaic.either(known)}, got {getattr(self, name)}")
        most = MOST_EIGHT if self.eight and not self.codes else MOST
        if self.tokens % 8 or not 8 <= self.tokens <= most:
            raise ValueError(f"tokens must be a multiple of 8 up to {most}, got {self.tokens}")
        if self.tokens % self.block:
            raise ValueError(f"tokens must be a multiple of block={self.block}, got {self.tokens}")
        if not 2 <= self.stages <= 16:
            raise ValueError(f"stages must lie between 2 and 16, got {self.stages}")
        if self.overlap > (2 if self.codes else 1) and self.eight:
            raise ValueError(f"overlap={self.overlap} is for products without eight; with codes it may be 2")
        if self.encoder and not self.eight:
            raise ValueError("encoder is for products with eight")
        if self.staged and (not self.eight or self.warpgroups % 2):
            given = f"eight={self.eight} and warpgroups={self.warpgroups}"
            raise ValueError(f"staged needs eight and 2 or 4 warpgroups, got {given}")
        if self.codes and not self.staged:
            raise ValueError("codes needs staged=True, got staged=False")

    @property
    def registers(self) -> tuple[int, int] | None:
        """Of a thread that loads and of one that multiplies, None = as they are."""
        return (STAGED if self.staged and not self.codes else REGISTERS).get(self.warpgroups)


def why_not(*, x, w13, format, w13_scale, w2_scale, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence; shapes, dtypes and options are enough."""
    dtype = jnp.dtype(x.dtype).name
    if format not in FORMATS:
        return f"only weights of four bits are decoded ({_mosaic.either(FORMATS)}), got {format}"
    allowed = ("bfloat16", "float16") if format == "wna16" else ("bfloat16",)
    if dtype not in allowed:
        return f"x must be {' or '.join(allowed)} with {format} weights, got {dtype}"
    (T, M), F = x.shape, w13.shape[1] // 2
    if M % 64 or F % 64:
        return f"M and F must be multiples of 64, got M={M} and F={F}; pad the weights with zeros"
    for name, K, scale in (("w13", M, w13_scale), ("w2", F, w2_scale)):
        group = K // scale.shape[-1]
        if group % _nibbles.RUN:
            return f"scales of {name} must belong to multiples of {_nibbles.RUN} inputs, got groups of {group}"
        if scale.size * jnp.dtype(scale.dtype).itemsize >= 2**31:
            return f"scales of {name} must take less than 2 GiB, got shape {tuple(scale.shape)}"
    return None if T else "there are no tokens"


def _eights(*, format, act_group, **_) -> bool:
    """Scales of both sides belong to multiples of 32 inputs."""
    return format == "mxfp4" and act_group is not None


def default_config(*, x, w13, ids, format, act_group, w13_bias=None, **_) -> Config:
    """FP8 codes as such for few tokens, else the tile that multiplies the fewest rows, in 16 bits."""
    T, mean = x.shape[0], x.shape[0] * ids.shape[1] / w13.shape[0]
    if T <= FEW_TOKENS and _eights(format=format, act_group=act_group):
        if mean <= FEW:
            return Config(tokens=8, eight=True, staged=True, encoder=True, warpgroups=2, inputs=256, stages=4)
        return sorted_config(mean, eight=True)
    whole = x.shape[1] % 256 == 0 and w13.shape[1] % 512 == 0
    return sorted_config(mean, whole=whole, biased=w13_bias is not None)


def sorted_config(mean: float, eight: bool = False, whole: bool = True, biased: bool = False) -> Config:
    """The tile that multiplies the fewest rows, for experts that get `mean` rows each.

    `whole`: inputs of both products come in multiples of 256. Registers do not suffice to overlap steps of more than
    112 rows, with biases of 80.
    """
    tokens = min(best_rows(mean), MOST_EIGHT if eight else MOST)
    if eight:  # tiles between these spill registers
        return next(_fitting(tokens=next(t for t in (8, 16, 32, 64) if t >= tokens), warpgroups=2, eight=True))
    block = 16 if tokens % 16 == 0 else 8
    if tokens <= LIGHT and whole:
        return Config(tokens=tokens, block=block, warpgroups=4, inputs=256, stages=2)
    overlaps = 64 <= tokens <= (80 if biased else 112)
    how = {"overlap": 4, "together": True} if overlaps else {}
    return next(_fitting(tokens=tokens, block=block, warpgroups=2, **how))


def configs(*, x, w13, ids, format, act_group, **more) -> Iterator[Config]:
    """Configurations to try."""
    default = default_config(x=x, w13=w13, ids=ids, format=format, act_group=act_group, **more)
    yield dataclasses.replace(default, fused=False)
    mean = x.shape[0] * ids.shape[1] / w13.shape[0]
    fits = x.shape[1] % 256 == 0 and w13.shape[1] % 256 == 0 and more.get("ue8m0", True)
    if _eights(format=format, act_group=act_group) and fits:
        how = {"block": 16, "warpgroups": 2, "eight": True, "staged": True, "codes": True, "encoder": True}
        for tokens, stages in itertools.product((64, 96, 112), (2, 3, 4, 5)):
            for inputs, together in itertools.product((128, 256), (False, True)):
                yield from _legal(tokens=tokens, stages=stages, inputs=inputs, together=together, **how)
    for eight in (False, True) if _eights(format=format, act_group=act_group) else (False,):
        most = MOST_EIGHT if eight else MOST
        best = min(best_rows(mean), most)
        for tokens in sorted({best, most // 2, most * 7 // 8, most} if best > LIGHT else {best}):
            block = 16 if tokens % 16 == 0 else 8
            for stages, inputs in itertools.product((2, 3, 4, 5, 6, 8), (128, 256)):
                how = {"tokens": tokens, "block": block, "eight": eight, "stages": stages, "inputs": inputs}
                if tokens <= LIGHT:
                    for warpgroups, staged in itertools.product((2, 4), {False, eight}):
                        yield from _legal(**how, warpgroups=warpgroups, staged=staged, encoder=staged)
                    continue
                yield from _legal(**how, warpgroups=2)
                if not eight:
                    for overlap, together in itertools.product((2, 4), (False, True)):
                        yield from _legal(**how, warpgroups=2, overlap=overlap, together=together)


def _legal(**options) -> Iterator[Config]:
    config = Config(**options)
    if smem_bytes(config) <= _mosaic.SMEM_BYTES:
        yield config


def _fitting(**options) -> Iterator[Config]:
    """With as many stages as fit, 8 at most."""
    for stages in range(8, 1, -1):
        yield from _legal(stages=stages, **options)


def best_rows(mean: float) -> int:
    """Rows of a tile that cost least, if experts get Poisson many of them.

    Decoding a tile's weight takes the time of multiplying 64 rows, which hides it, and starting and storing one
    that of 16; derived, not measured. Up to `FEW` rows on average, eight hold nearly every expert's.
    """
    if mean <= FEW:
        return 8
    p, chances = math.exp(-mean), []
    if not p:
        return MOST
    while sum(chances) < 1 - 1e-6 and len(chances) < 4096:
        chances.append(p)
        p *= mean / len(chances)

    def cost(rows):
        tiles = sum(chance * -(-count // rows) for count, chance in enumerate(chances))
        return tiles * (max(rows, 64) + 16) + rows / 1024

    return min(range(16, MOST + 1, 8), key=cost)


def _leaving(c: Config) -> int:
    """Bytes of a feature's rows on their way out: float32 at most, but for all rows of a tile with `together`."""
    return max(4 * c.block, 2 * c.tokens) if c.together else 4 * c.block


def smem_bytes(c: Config) -> int:
    """Shared memory of one thread block, barriers included (generously)."""
    x = c.tokens * INPUTS * (1 if c.eight else 2) + (c.tokens * 16 if c.eight else 0)
    out = c.warpgroups * (_leaving(c) * FEATURES + c.tokens * (40 if c.codes else 24))
    w = c.warpgroups * 2 * FEATURES * (INPUTS // 2 + (36 if c.codes else 16 if c.staged else 0))
    return c.stages * (w + x) * (c.inputs // INPUTS) + out + 2048


def illegal(c: Config, **args) -> str | None:
    """None if the configuration fits, else one sentence; args: format, act_group and, with `codes`, ue8m0 and sizes."""
    if c.eight and not _eights(**args):
        return f"eight needs mxfp4 weights and act_group, got {args['format']} and {args['act_group']}"
    if c.codes and not args["ue8m0"]:
        return "codes needs ue8m0=True, got False"
    if c.codes and any(size % INPUTS for size in args["sizes"]):
        M, F = args["sizes"]
        return f"codes needs M and F in multiples of {INPUTS}, got M={M} and F={F}"
    if (used := smem_bytes(c)) > _mosaic.SMEM_BYTES:
        given = f"tokens={c.tokens}, warpgroups={c.warpgroups}, stages={c.stages}"
        given += f" of inputs={c.inputs}"
        return f"{given} needs {used} bytes of shared memory, more than {_mosaic.SMEM_BYTES}; use fewer stages"
    return None
