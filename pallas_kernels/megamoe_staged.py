"""MegaMoE's stages on Mosaic GPU (Hopper): `_experts_decoded` on FP8 codes, and what was quantized on the way.

The first product's epilogue clamps, activates, weighs and quantizes; with `fused=False` the same epilogue leaves
float32 and the quantizer is the reference's, to the same bits. Rows are sorted by expert, so that every slot has one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _decoded_config, _experts_decoded, _nibbles, _requantize
from pallas_kernels._decoded_config import Config

_HOW: dict[str, Any] = {"format": "mxfp4", "act_group": _requantize.GROUP}
FLOOR = 127 + _requantize.LOWEST
"""Scale byte of pairs that take no part."""


def _shapes(x, w13, ids) -> dict[str, Any]:
    return {"x": x, "w13": w13, "ids": ids, **_HOW}


def why_not(*, x, w13, w13_scale, w2_scale, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence; shapes, dtypes and options are enough."""
    more = {"w13_scale": w13_scale, "w2_scale": w2_scale, "w13_zeros": None, "activation": "silu"}
    return _decoded_config.why_not(x=x, w13=w13, **more, **_HOW)


def default_config(*, x, w13, ids, **_) -> Config:
    """Tiles of the rows that experts get on average."""
    return _decoded_config.sorted_config(x.shape[0] * ids.shape[1] / w13.shape[0], eight=True)


def configs(*, x, w13, ids, **_) -> Iterator[Config]:
    """Those of `_experts_decoded` that leave codes behind."""
    for config in _decoded_config.configs(**_shapes(x, w13, ids)):
        if config.eight and not config.codes:
            yield config


def megamoe_staged(
    *,
    config: Config,
    stage: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    x,
    weights,
    ids,
    w13,
    w13_scale,
    w2,
    w2_scale,
    limit,
    expert_map,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Run the kernels on prepared arguments of `jaxattn.megamoe_staged`; `stage(rows)` gives codes and scale bytes.

    Raises:
        ValueError: `config` multiplies 16-bit numbers, and so leaves no codes.
    """
    if not config.eight or config.codes:
        given = f"eight={config.eight} and codes={config.codes}"
        raise ValueError(f"megamoe_staged: the stages need eight=True and codes=False, got {given}")

    def quantize(rows):
        codes, scale = stage(rows)
        return codes, _nibbles.power(scale.astype(jnp.int32), 0).T

    found = _experts_decoded.stages(
        config=config,
        quantize=quantize,
        x=x,
        w13=w13,
        w2=w2,
        weights=weights,
        ids=ids,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        **dict.fromkeys(("w13_zeros", "w2_zeros", "w13_scale_2", "w2_scale_2", "w13_bias", "w2_bias")),
        ue8m0=True,
        activation="silu",
        limit=limit,
        alpha=1.0,
        beta=0.0,
        weight_on="activation",
        expert_map=expert_map,
        **_HOW,
    )
    assert found.a_scale is not None
    at = found.tiles.positions
    here, at = (at >= 0)[..., None], jnp.maximum(at, 0)
    codes = lax.bitcast_convert_type(_nibbles.restore(found.a), jnp.uint8)
    a8 = lax.bitcast_convert_type(jnp.where(here, codes[at], 0).astype(jnp.uint8), _requantize.E4M3)
    exponent = lax.bitcast_convert_type(found.a_scale.T, jnp.int32) >> 23
    a_scale = jnp.where(here, exponent[at], FLOOR).astype(jnp.uint8)
    return found.tiles.combine(found.y), *stage(x), a8, a_scale
