"""SiLU and product on Mosaic GPU: the kernel of `silu_mul_quant` without codes, see `jaxattn.ops.gated_activation`."""

import dataclasses
from collections.abc import Iterable

from pallas_kernels import silu_mul_quant as silu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(silu.Config):
    """As that of `silu_mul_quant`."""


def why_not(*, x, kind, alpha, beta, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    if kind != "silu":
        return f"the kernel takes gates and values side by side, kind 'silu', got {kind!r}"
    if (alpha, beta) != (1.0, 0.0):
        return f"alpha and beta must be 1 and 0, got {alpha} and {beta}"
    return silu.why_not(x=x, mode="none", group=None) if x.shape[1] else "there are no values"


def default_config(*, x, **_) -> Config:
    """As `silu_mul_quant` has it."""
    return Config(rows=silu.default_config(x=x, mode="none", group=None).rows)


def configs(*, x, **_) -> Iterable[Config]:
    """All legal heights."""
    return [Config(**dataclasses.asdict(c)) for c in silu.configs(x=x, mode="none", group=None)]


def gated_activation(*, config: Config, x, kind, limit, alpha, beta):
    """Launch; arguments as prepared by `jaxattn.ops.gated_activation`."""
    del kind, alpha, beta
    options = {"mode": "none", "scale": None, "upper_bound": None, "group": None}
    return silu.silu_mul_quant(config=config, x=x, limit=limit, **options)
