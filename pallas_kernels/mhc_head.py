"""The end of hyper-connections on Mosaic GPU: the launches of `pallas_kernels.mhc_pre` without its matrices."""

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mhc_once
from pallas_kernels import mhc_pre as first

_ROWS = 8
"""Weights of a tensor core product: fewer are filled up with zeros."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(first.Config):
    """As that of `mhc_pre`."""


def why_not(*, residual, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    return first.why_not(residual=residual, y=None)


def default_config(**args) -> Config:
    """As `mhc_pre` has it."""
    return Config(**dataclasses.asdict(first.default_config(**args)))


def configs(**args) -> Iterable[Config]:
    """All legal configurations."""
    return [Config(**dataclasses.asdict(c)) for c in first.configs(**args)]


def mhc_head(*, config: Config, residual, fn, scale, base, eps, rms_eps):
    """Launch; arguments as prepared by `jaxattn.ops.mhc_head`."""
    N, C, M = residual.shape
    first.check("mhc_head", config, C, M)
    if not N:
        return jnp.zeros((0, M), residual.dtype)
    flat = residual.reshape(N, C * M)
    if config.once:
        args = flat, fn, scale, base, eps, rms_eps
        [h] = _mhc_once.launch("mhc_head_once", config.stages, *args, at_once=config.clusters)
        return h
    weights = first.split_weights(jnp.pad(fn, ((0, _ROWS - C), (0, 0))))
    parts, squares = first.products(config, flat, weights)
    count, mixing = first.mixers(N, C, M, C * M // config.splits)

    def body(x_ref, parts_ref, squares_ref, scale_ref, base_ref, o_ref):
        of_gates = parts_ref, squares_ref, scale_ref, base_ref
        mixing(lax.axis_index("block"), x_ref, o_ref, of_gates, eps, rms_eps)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((N, M), residual.dtype),
        grid=(count,),
        grid_names=("block",),
        kernel_name="mhc_head",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),  # no thread reads what it writes
    )(
        flat,
        parts.reshape(*parts.shape[:2], _ROWS // C, C),
        squares,
        scale.astype(jnp.float32).reshape(1),
        base.reshape(1, C),
    )
