"""Paged attention on Mosaic GPU (Hopper): the type of the configuration chooses the kernel."""

from collections.abc import Iterator

from pallas_kernels import _mosaic
from pallas_kernels.paged_attention import decode, prefill, tiled
from pallas_kernels.paged_attention._common import FP8, HEAD_DIMS, PAGES, Config

__all__ = [
    "FP8",
    "HEAD_DIMS",
    "PAGES",
    "Config",
    "configs",
    "decode",
    "default_config",
    "paged_attention",
    "prefill",
    "tiled",
    "why_not",
]

_KERNELS = (decode, tiled, prefill)
"""`tiled` runs whatever any of them can."""
LONG = 256
"""Query rows a request, on average, from which on `prefill` is the default.

On an H200 `tiled` takes 1.4 times as long there, with pages of 16 slots as with pages of 64, and with a window of 128.
With fewer rows `prefill` was not timed.
"""


def paged_attention(*, config: Config, **args):
    """Run the kernel that `config` belongs to on prepared arguments of `jaxattn.paged_attention`, all by name.

    Returns:
        o [N, H, D] in q's dtype, and with `return_lse` the natural-log lse [N, H] in float32.

    Raises:
        ValueError: `config` does not fit these arguments.
        TypeError: it belongs to no kernel.
    """
    kernel = next((k for k in _KERNELS if isinstance(config, k.Config)), None)
    if kernel is None:
        known = _mosaic.either(f"{k.__name__}.Config" for k in _KERNELS)
        raise TypeError(f"paged_attention: config must be a {known}, got {type(config).__module__}.Config")
    if reason := kernel.why_not(**args):
        raise ValueError(f"paged_attention: {kernel.Config.__module__}.Config cannot be used here: {reason}")
    return kernel.paged_attention(config=config, **args)


def why_not(**args) -> str | None:
    """None if some kernel can run these arguments, else one sentence; shapes, dtypes and options are enough."""
    return tiled.why_not(**args)


def default_config(**args) -> Config:
    """Of the first kernel that can run these arguments, a pure function of shapes, dtypes and options."""
    order = (prefill, *_KERNELS) if _is_long(**args) else _KERNELS
    kernel = next((k for k in order if k.why_not(**args) is None), tiled)
    return kernel.default_config(**args)


def _is_long(*, q, lengths, **_) -> bool:
    return q.shape[0] >= LONG * lengths.shape[0]


def configs(**args) -> Iterator[Config]:
    """Every legal configuration of every kernel that can run these arguments."""
    for kernel in _KERNELS:
        if kernel.why_not(**args) is None:
            yield from kernel.configs(**args)
