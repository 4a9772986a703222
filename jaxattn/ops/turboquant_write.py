"""Writes of new keys and values into a packed TurboQuant cache."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Kernel, Mechanism
from jaxattn.ops._turboquant_cases import WRITE_CASES, WRITE_SUPPORT, check_preset
from jaxattn.ops.cache_write import check_slots
from jaxattn.quant import turboquant
from pallas_kernels import _mosaic
from pallas_kernels import turboquant_write as mosaic

_OP = "turboquant_write"


def turboquant_write(
    key: Float[Array, "T K D"],
    value: Float[Array, "T K D"],
    pages: UInt8[Array, "P page K slot"],
    slots: Int[Array, " T"],
    *,
    preset: str,
    checked: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> UInt8[Array, "P page K slot"]:
    """The cache with token t's quantized key and value in slot `slots[t]`; formats: `jaxattn.quant.turboquant`.

    Computed in float32 (float64: reference only, whose bytes then come from float64).

    Args:
        key: new keys after rotary embedding, bfloat16, float16 or float32. Rows without a slot are not read.
        value: new values, the dtype of `key`.
        pages: packed cache; `slot` is `jaxattn.quant.turboquant.PRESETS[preset].slot_bytes(D)`. To write without a
            copy, donate it to the enclosing `jax.jit`.
        slots: int32 or int64. A negative slot, or one behind the cache, is skipped. Other slots must not repeat.
        preset: "k8v4", "4bit_nc", "k3v4_nc" or "3bit_nc".
        checked: read `slots` and raise if one is below -1, behind the cache or repeated; needs a concrete array.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        The cache; slots that no token names keep every bit. A key or value with a number that is not finite is stored
        with a norm or scale that is not finite, and reads as such; e4m3 keys saturate at +-448 and keep NaN.

    Raises:
        TypeError: dtypes; ValueError: shapes, preset, or slots in checked mode;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `triton_turboquant_store.py`.
    """
    args = prepare(key, value, pages, slots, preset=preset, checked=checked)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(key, value, pages, slots, *, preset, checked=False) -> Args:
    """Validate and complete the arguments of `turboquant_write`; raises as it does."""
    dims = _checks.check_shapes(
        _OP, key=(key, "T K D"), value=(value, "T K D"), pages=(pages, "P page K slot"), slots=(slots, "T")
    )
    how = check_preset(_OP, preset, dims["D"], dims["slot"])
    dtype = _checks.check_dtype(_OP, "key", key, _checks.FLOATS)
    _checks.check_dtype(_OP, "value", value, (dtype,), "key and value need one dtype; cast one of them")
    _checks.check_dtype(_OP, "pages", pages, ("uint8",))
    _checks.check_dtype(_OP, "slots", slots, ("int32", "int64"))
    if checked:
        check_slots(slots, dims["P"] * dims["page"])
    bounds = () if how.key_bits == 8 else tuple(turboquant.midpoints(dims["D"], how.key_bits).tolist())
    return {
        "key": key,
        "value": value,
        "pages": pages,
        "slots": slots,
        "preset": preset,
        "key_bits": how.key_bits,
        "value_bits": how.value_bits,
        "midpoints": bounds,
    }


def _reference(key, value, pages, slots, *, preset, **_):
    """Slots of every token, then a scatter that drops those outside the cache."""
    S = pages.shape[0] * pages.shape[1]
    where = jnp.where((slots >= 0) & (slots < S), slots, S)
    packed = turboquant.quantize(key, value, preset)
    flat = pages.reshape(S, *pages.shape[2:])
    return flat.at[where].set(packed, mode="drop").reshape(pages.shape)


def _outputs(**_):
    return ("pages",)


def _cost(*, key, value, pages, slots, **_):
    """log2(D) additions a number for the rotation and a few more; rows read once, slots written once."""
    T, K, D = key.shape
    moved = (key.size + value.size) * jnp.dtype(key.dtype).itemsize + T * K * pages.shape[-1]
    return key.size * (D.bit_length() + 16), moved + T * jnp.dtype(slots.dtype).itemsize


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 vllm/v1/attention/ops/triton_turboquant_store.py; https://arxiv.org/abs/2504.19874",
    op=turboquant_write,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.turboquant_write,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=WRITE_CASES,
    cost=_cost,
    module="jaxattn.nn.turboquant_cache:TurboQuantKVCache",
    captures=("turboquant/*",),
    support=WRITE_SUPPORT,
)
