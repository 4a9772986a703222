"""All mechanisms, as a literal list; adding one is one line here."""

from collections.abc import Callable

from jaxattn import _mechanism
from jaxattn._mechanism import Explanation, Mechanism
from jaxattn.ops import (
    cache_write,
    combine_partials,
    hadamard_transform,
    merge_states,
    paged_attention,
    quantize_fp8,
    quantize_int8,
    quantize_mx,
    rms_norm_quant,
    scaled_matmul,
    silu_mul_quant,
    softmax_scale,
    weight_only_matmul,
    window_cache,
)

MECHANISMS: tuple[Mechanism, ...] = (
    paged_attention.MECHANISM,
    cache_write.MECHANISM,
    merge_states.MECHANISM,
    combine_partials.MECHANISM,
    window_cache.MECHANISM,
    softmax_scale.MECHANISM,
    quantize_fp8.MECHANISM,
    quantize_int8.MECHANISM,
    quantize_mx.MECHANISM,
    hadamard_transform.MECHANISM,
    rms_norm_quant.MECHANISM,
    silu_mul_quant.MECHANISM,
    scaled_matmul.MECHANISM,
    weight_only_matmul.MECHANISM,
)


def find(mechanism: str | Mechanism | Callable) -> Mechanism:
    """The record of a mechanism given by name, by its op, or as itself.

    Raises:
        ValueError: no such mechanism; the message names the nearest match.
    """
    for m in MECHANISMS:
        if mechanism is m or mechanism is m.op or mechanism == m.name:
            return m
    names = [m.name for m in MECHANISMS]
    given = mechanism if isinstance(mechanism, str) else getattr(mechanism, "__name__", mechanism)
    raise ValueError(f"unknown mechanism {given!r}{_mechanism._nearest(str(given), names)}; known: {', '.join(names)}")


def explain(mechanism: str | Mechanism | Callable, /, *, on_target: bool = False, **shapes) -> Explanation:
    """Say which implementation of `mechanism` a call with these arguments would take and why not the others.

    Arrays may be `jax.ShapeDtypeStruct`; `on_target=True` answers for a machine with a supported GPU.

    >>> print(explain("paged_attention", q=q, ...))         # doctest: +SKIP
    paged_attention:
      mosaic     needs an sm_90a GPU (H100, H200), but this process runs on cpu; ...
      reference  chosen
    """
    return _mechanism.explain(find(mechanism), on_target=on_target, **shapes)
