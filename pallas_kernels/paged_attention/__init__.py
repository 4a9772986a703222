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
LONG, LEAST_PAGE = 256, 32
"""Query rows a request, on average, and slots of a page from which on `prefill` is the default.

On an H200 it takes as long as FlashAttention 3 there, `tiled` 1.3 times as long. With smaller pages it looks up more of
them than it has time for, and with a window or few rows it was not timed.
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


def _is_long(*, q, k_pages, lengths, window, **_) -> bool:
    return q.shape[0] >= LONG * lengths.shape[0] and k_pages.shape[1] >= LEAST_PAGE and window is None


def configs(**args) -> Iterator[Config]:
    """Every legal configuration of every kernel that can run these arguments."""
    for kernel in _KERNELS:
        if kernel.why_not(**args) is None:
            yield from kernel.configs(**args)
