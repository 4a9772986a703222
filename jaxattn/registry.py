"""All mechanisms, as a literal list; adding one is one line here."""

from collections.abc import Callable

from jaxattn import _mechanism
from jaxattn._mechanism import Explanation, Mechanism
from jaxattn.ops import (
    align_block_size,
    attention,
    cache_write,
    cascade_attention,
    combine_partials,
    compressor,
    eplb,
    experts,
    gated_activation,
    grouped_matmul,
    grouped_projection,
    hadamard_transform,
    indexer,
    indexer_q,
    indexer_topk,
    inv_rope_fp8_quant,
    latent_cache_gather,
    latent_cache_write,
    megamoe_staged,
    merge_states,
    mhc_head,
    mhc_post,
    mhc_pre,
    mla,
    mtp,
    paged_attention,
    permute,
    q_kv_rms_norm,
    qnorm_rope_kv_insert,
    quantize_fp8,
    quantize_int8,
    quantize_mx,
    rms_norm_quant,
    rope,
    routed_scaling,
    router,
    scaled_matmul,
    silu_mul_quant,
    softmax_scale,
    sparse_indices,
    sparse_mla,
    turboquant_attention,
    turboquant_write,
    unpermute,
    weight_only_matmul,
    window_cache,
)

MECHANISMS: tuple[Mechanism, ...] = (
    paged_attention.MECHANISM,
    attention.MECHANISM,
    cache_write.MECHANISM,
    merge_states.MECHANISM,
    combine_partials.MECHANISM,
    cascade_attention.MECHANISM,
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
    router.MECHANISM,
    routed_scaling.MECHANISM,
    align_block_size.MECHANISM,
    permute.MECHANISM,
    unpermute.MECHANISM,
    gated_activation.MECHANISM,
    grouped_matmul.MECHANISM,
    experts.MECHANISM,
    megamoe_staged.MECHANISM,
    eplb.MECHANISM,
    rope.MECHANISM,
    mla.MECHANISM,
    sparse_mla.MECHANISM,
    sparse_indices.MECHANISM,
    latent_cache_write.MECHANISM,
    latent_cache_gather.MECHANISM,
    compressor.MECHANISM,
    indexer_q.MECHANISM,
    indexer.MECHANISM,
    indexer_topk.MECHANISM,
    q_kv_rms_norm.MECHANISM,
    qnorm_rope_kv_insert.MECHANISM,
    inv_rope_fp8_quant.MECHANISM,
    grouped_projection.MECHANISM,
    mhc_pre.MECHANISM,
    mhc_post.MECHANISM,
    mhc_head.MECHANISM,
    mtp.MECHANISM,
    turboquant_write.MECHANISM,
    turboquant_attention.MECHANISM,
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
