"""vLLM's captures of rotary embeddings in the terms of `jaxattn.rope`."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import _rope, rope_magnitude
from parity.cases import Adapter, Arrays, Output

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """Q's heads and k as one more head; the table is the capture's rows, rounded to the dtype of q as vLLM's op is fed.

    The capture's float32 rows are used because a float32 angle at position 60000 has no exact value to agree on.
    """
    x, rows = capture.inputs, capture.outputs["cos_sin_rows"]
    N, Dr = rows.shape
    heads = np.concatenate([x["q"].reshape(N, -1, Dr), x["k"].reshape(N, -1, Dr)], 1)
    return {
        "x": jnp.asarray(heads),
        "positions": jnp.arange(N, dtype=jnp.int32),
        "cos_sin": jnp.asarray(rows).astype(heads.dtype),
        "interleaved": not capture.params["is_neox"],
    }


def expected(capture: "Capture") -> Arrays:
    """The heads of q and k, and the table's rows."""
    out = capture.outputs
    N, Dr = out["cos_sin_rows"].shape
    heads = [out[name].reshape(N, -1, Dr) for name in ("q", "k")]
    return {"o": np.concatenate(heads, 1), "cos_sin": out["cos_sin_rows"]}


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """Our rotated heads, and our own table at the capture's positions, in float64 beside a float64 output.

    vLLM's frequencies come from CUDA's powf: no rebuild has their bits, so both tables are held against exact angles.
    """
    params, wide = capture.params, outputs["o"].dtype == np.float64
    inverse = _rope.frequencies(
        capture.outputs["cos_sin_rows"].shape[1],
        params["base"],
        factor=params["scaling_factor"],
        original=params["original_max_position"],
        beta_fast=params["beta_fast"],
        beta_slow=params["beta_slow"],
        dtype=np.float64 if wide else np.float32,
    )
    magnitude = rope_magnitude(
        params["scaling_factor"], mscale=params["mscale"], mscale_all_dim=params["mscale_all_dim"]
    )
    with jax.enable_x64(wide):
        where = jnp.asarray(capture.inputs["positions"].astype(np.int32))
        rows = _rope.table(jnp.asarray(inverse), where, magnitude)
        return outputs | {"cos_sin": np.asarray(rows)}


ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    convention=convention,
    outputs={
        "o": Output(axes=("token", "head", "dim"), slice_rank=2, rule="exact", contract="contract"),
        "cos_sin": Output(axes=("token", "dim"), slice_rank=1, rule="default", contract="contract"),
    },
)
