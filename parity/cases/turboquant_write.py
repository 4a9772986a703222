"""vLLM's captures of its TurboQuant store kernel in the terms of `jaxattn.turboquant_write`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def preset(capture: "Capture") -> str:
    """Our name of the capture's preset."""
    return str(capture.params["preset"]).removeprefix("turboquant_")


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments: a cache of zeros, as it was before the captured call."""
    x = capture.inputs
    return {
        "key": jnp.asarray(x["k"]),
        "value": jnp.asarray(x["v"]),
        "pages": jnp.zeros(capture.outputs["cache"].shape, jnp.uint8),
        "slots": jnp.asarray(x["slot_mapping"].astype(np.int32)),
        "preset": preset(capture),
    }


def expected(capture: "Capture") -> Arrays:
    """The captured cache."""
    return convention(capture, {"pages": capture.outputs["cache"]})


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """The cache with value codes that are exact ties rounded down.

    `(v - min) (2^b - 1) / (max - min)` is a whole number and a half for about one value in a thousand of bfloat16 data;
    which code vLLM stores there is up to the GPU's approximate division. All other bytes are compared as they are.
    """
    pages, value = outputs["pages"].copy(), capture.inputs["v"].astype(np.float64)
    bits, end = int(capture.params["value_bits"]), pages.shape[-1] - 4
    start = end - value.shape[-1] * bits // 8
    low, high, most = value.min(-1, keepdims=True), value.max(-1, keepdims=True), 2**bits - 1
    twice, width = 2 * (value - low) * most, np.where(high > low, high - low, 1)  # exact: bfloat16 has 8 bits
    below = np.floor(twice / width / 2)
    tie = (high > low) & (twice == (2 * below + 1) * width)
    flat = pages.reshape(-1, *pages.shape[2:])
    slots = capture.inputs["slot_mapping"]
    stream = np.unpackbits(flat[slots][..., start:end], axis=-1, bitorder="little").reshape(*value.shape, bits)
    codes = (stream.astype(np.int64) << np.arange(bits)).sum(-1)
    codes = np.where(tie & (codes == below + 1), codes - 1, codes)
    stream = ((codes[..., None] >> np.arange(bits)) & 1).astype(np.uint8)
    packed = np.packbits(stream.reshape(*value.shape[:-1], -1), axis=-1, bitorder="little")
    flat[slots[:, None], np.arange(value.shape[1]), start:end] = packed
    return outputs | {"pages": pages}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    convention=convention,
    outputs={
        "pages": Output(
            axes=("page", "slot", "head", "byte"),
            slice_rank=3,
            rule="exact",
            contract="exact",
            note="value codes at exact ties are compared rounded down; they depend on an approximate division: "
            "https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-div",
        )
    },
)
