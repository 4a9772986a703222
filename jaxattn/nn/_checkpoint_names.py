"""How other tools name and pack the tensors of a quantized linear layer, turned into the names and layouts used here.

Each function takes the tensors under one layer's prefix and returns those that `_linear_formats.FORMATS` knows; what it
does not know it leaves for `QuantizedLinear.load` to refuse.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.quant import nf4
from jaxattn.quant import primitives as p

type Given = dict[str, Any]


def packed(given: Given) -> Given:
    """Read compressed-tensors' MXFP4 and NVFP4: `weight_packed`, and a `weight_global_scale` that divides."""
    found = dict(given)
    if "weight_packed" in found:
        found["weight"] = found.pop("weight_packed")
    if "weight_global_scale" in found:
        scale = jnp.asarray(found.pop("weight_global_scale"), jnp.float32)
        found["weight_scale_2"] = p.inverse(scale.reshape(()))
    return found


def packed_words(given: Given) -> Given:
    """Read compressed-tensors' integers (pack-quantized): the same bits in words of 32, zero points packed along rows.

    weight_packed      int32 [F, M * bits / 32]     low bits first, which are the bytes of a row in order
    weight_zero_point  int32 [F * bits / 32, G]     low bits: the first of the rows
    weight_shape       [2]                          F and M, which the layer knows
    """
    found = dict(given)
    if "weight_packed" in found:
        words = jnp.asarray(found.pop("weight_packed"))
        found["weight"] = _bytes(words).reshape(words.shape[0], -1)
        found.pop("weight_shape", None)
    zeros = found.get("weight_zero_point")
    if zeros is not None and zeros.dtype == jnp.int32:
        found["weight_zero_point"] = _bytes(jnp.asarray(zeros)).swapaxes(1, 2).reshape(-1, zeros.shape[1])
    return found


def bitsandbytes(given: Given, format: nf4.Format) -> Given:
    """Read bitsandbytes' `weight.absmax`; where absmax was quantized, too, its codes become numbers again.

        weight.quant_state.bitsandbytes__nf4   uint8, JSON: blocksize, nested_blocksize, nested_offset, ...
        weight.quant_map                       float32 [16], the codebook
        weight.nested_absmax                   float32 [ceil(B / 256)]
        weight.nested_quant_map                float32 [256]

    Raises:
        KeyError: absmax are codes, and what turns them into numbers is missing;
        ValueError: another codebook or another size of blocks than this format's.
    """
    found = dict(given)
    state = found.pop(f"weight.quant_state.bitsandbytes__{format}", None)
    facts = {} if state is None else json.loads(bytes(np.asarray(state, np.uint8)))
    for name, size in (("blocksize", nf4.BLOCK), ("nested_blocksize", nf4.NESTED_BLOCK)):
        if facts.get(name, size) != size:
            raise ValueError(f"QuantizedLinear: {name} of format {format!r} must be {size}, got {facts[name]}")
    book = found.pop("weight.quant_map", None)
    if book is not None and not np.array_equal(np.asarray(book), nf4.codebook(format)):
        raise ValueError(f"QuantizedLinear: weight.quant_map is not the codebook of format {format!r}")
    if "weight.absmax" not in found:
        return found
    absmax = found.pop("weight.absmax")
    nested = {name: found.pop(f"weight.{name}", None) for name in ("nested_absmax", "nested_quant_map")}
    if absmax.dtype == jnp.uint8:
        offset = facts.get("nested_offset")
        if offset is None or any(x is None for x in nested.values()):
            raise KeyError(
                f"QuantizedLinear: weight.absmax of format {format!r} holds codes, which need weight.nested_absmax, "
                f"weight.nested_quant_map and weight.quant_state.bitsandbytes__{format}"
            )
        codes = nf4.Nested(
            jnp.asarray(absmax).reshape(-1),
            jnp.asarray(nested["nested_absmax"]).reshape(-1),
            jnp.asarray(offset, jnp.float32),
            jnp.asarray(nested["nested_quant_map"]),
        )
        absmax = nf4.dequantize_absmax(codes)
    return found | {"absmax": absmax}


def _bytes(words: jax.Array) -> jax.Array:
    """[A, B] int32 as [A, B, 4] uint8, low bits first."""
    return jax.lax.bitcast_convert_type(words, jnp.uint8)
