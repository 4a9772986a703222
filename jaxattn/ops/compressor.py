"""The compressor of DeepSeek-V4: streams of tokens become one cache entry per 4 or 128 tokens."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _latent_cache, _mechanism, _rope
from jaxattn._mechanism import Args, Kernel, Mechanism
from jaxattn.ops import _compressor_cases as cases
from jaxattn.ops.rope import check_table
from jaxattn.ops.window_cache import slot_mapping
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import compressor as mosaic

_OP = "compressor"
FORMATS = ("plain", "v4", "indexer_fp8", "indexer_mxfp4")


def compressor(
    kv: Float[Array, "N W"],
    score: Float[Array, "N W"],
    ape: Float[Array, "ratio W"],
    weight: Float[Array, " D"],
    positions: Int32[Array, " N"],
    request: Int32[Array, " N"],
    cos_sin: Float[Array, "rows Dr"],
    state: Float[Array, "SP spage 2W"],
    state_table: Int32[Array, "B spages"],
    cache: Array,
    cache_slots: Int32[Array, " N"],
    *,
    format: str = "v4",
    page: int | None = None,
    eps: float = 1e-6,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[Array, Float[Array, "SP spage 2W"]]:
    r"""The cache with an entry for every window of `ratio` tokens that ends in this step, and the tokens' state.

    Each token leaves `[kv | score + ape[p % ratio]]` in the state. A token with `(p + 1) % ratio == 0` reads rows of
    the last `ratio` positions (W = D), or of the last `2 ratio` (W = 2 D, overlapping windows: the older half's columns
    [:D], the newer half's [D:]); rows before position 0 have no weight. Per channel

        c = sum_i softmax_i(score_i) kv_i,    n = c / sqrt(mean(c^2) + eps) * weight

    and the last `Dr` numbers of n are rotated by position `p - ratio + 1`, all in float32. Entry `p // ratio` is stored
    in slot `cache_slots` of that token, rounded as the format says:

    | format | cache | stored |
    |---|---|---|
    | plain | [P, page, D], any float dtype | the numbers in that dtype |
    | v4 | uint8 [P, bytes], D 512, Dr 64 | as `latent_cache_write`; the rotation starts from unrounded numbers |
    | indexer_fp8 | uint8 [P, bytes], D 128 | bfloat16, then 128 codes, one float32 scale (as v4 has) |
    | indexer_mxfp4 | uint8 [P, bytes], D 128 | bfloat16, then `quant.mx`: 4 bits, UE8M0 bytes of 32 |

    Args:
        kv: float32 (float64: reference only), of the projection that keeps its accumulator.
        score: the same.
        ape: float32; `ratio` rows.
        weight: of the norm, any float dtype.
        positions: int32 of each token in its request; negative = padding, which does nothing.
        request: int32 row of `state_table`.
        cos_sin: of the compressed base frequency.
        state: float32 pages of token states; donate it and `cache` to write without a copy.
        state_table: int32; pages that hold none of the last positions of a window are not read and may be negative.
        cache: see above.
        cache_slots: int32, read for tokens that end a window; negative = do not store.
        format: of the cache.
        page: entries per page of the packed formats: 256 // ratio.
        eps: of the norm.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `cache` and `state`; what this step does not name keeps every bit.

    Raises:
        TypeError: dtypes; ValueError: shapes or options; NotImplementedError: the named implementation cannot run this.

    Source: DeepSeek-V4; vLLM 0.26.0 `models/deepseek_v4/compressor.py`, `common/ops/fused_compress_quant_cache.py`.
    """
    args = prepare(
        kv,
        score,
        ape,
        weight,
        positions,
        request,
        cos_sin,
        state,
        state_table,
        cache,
        cache_slots,
        format=format,
        page=page,
        eps=eps,
    )
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(
    kv,
    score,
    ape,
    weight,
    positions,
    request,
    cos_sin,
    state,
    state_table,
    cache,
    cache_slots,
    *,
    format="v4",
    page=None,
    eps=1e-6,
) -> Args:
    """Validate and complete the arguments of `compressor`; raises as it does."""
    if format not in FORMATS:
        raise ValueError(f"{_OP}: format must be one of {', '.join(FORMATS)}, got {format!r}")
    if (page is None) != (format == "plain"):
        given = "none" if page is None else page
        raise ValueError(f"{_OP}: page belongs to packed formats, and only there, got format {format} and page {given}")
    dims = _checks.check_shapes(
        _OP,
        kv=(kv, "N W"),
        score=(score, "N W"),
        ape=(ape, "ratio W"),
        weight=(weight, "D"),
        positions=(positions, "N"),
        request=(request, "N"),
        cos_sin=(cos_sin, "rows Dr"),
        state=(state, "SP spage width"),
        state_table=(state_table, "B spages"),
        cache=(cache, "P page D" if format == "plain" else "P bytes"),
        cache_slots=(cache_slots, "N"),
    )
    W, D = dims["W"], dims["D"]
    if W not in (D, 2 * D) or dims["width"] != 2 * W or not dims["ratio"]:
        raise ValueError(
            f"{_OP}: kv must be [N, D] or, for overlapping windows, [N, 2 D], state [SP, spage, 2 W], ape [ratio, W], "
            f"with D={D} from weight; got W={W}, state {list(state.shape)}, ape {list(ape.shape)}"
        )
    dtype = _checks.check_dtype(_OP, "kv", kv, ("float32", _checks.F64))
    for name, x in (("score", score), ("ape", ape), ("state", state)):
        _checks.check_dtype(_OP, name, x, (dtype,))
    _checks.check_dtype(_OP, "weight", weight, _checks.FLOATS)
    integers = {"positions": positions, "request": request, "state_table": state_table, "cache_slots": cache_slots}
    for name, x in integers.items():
        _checks.check_dtype(_OP, name, x, ("int32",))
    check_table(_OP, cos_sin, D)
    _checks.check_dtype(_OP, "cache", cache, _checks.FLOATS if format == "plain" else ("uint8",), f"format {format}")
    _checks.check_positive(_OP, eps=eps)
    if format != "plain":
        _checks.check_count(_OP, page=page)
        if (D, dims["Dr"]) != (_latent_cache.PAGED[format].width, _latent_cache.ROTARY):
            raise ValueError(
                f"{_OP}: format {format} stores D, Dr = {_latent_cache.PAGED[format].width}, 64, got {D}, {dims['Dr']}"
            )
        _latent_cache.check_pages(_OP, cache, format, page or 1)
    return {
        "kv": kv,
        "score": score,
        "ape": ape,
        "weight": weight,
        **integers,
        "cos_sin": cos_sin,
        "state": state,
        "cache": cache,
        "format": format,
        "page": None if page is None else int(page),
        "eps": float(eps),
    }


def _reference(
    kv, score, ape, weight, positions, request, cos_sin, state, state_table, cache, cache_slots, *, format, page, eps
):
    """Write the state, read the windows that end here, store their entries."""
    ratio, W = ape.shape
    D, (SP, spage, _) = weight.shape[0], state.shape
    live = positions >= 0
    slots = slot_mapping(state_table, request, positions, page=spage)
    number, place = _latent_cache.place_of(slots, SP, spage)
    rows = jnp.concatenate([kv, score + ape[jnp.where(live, positions % ratio, 0)]], -1)
    state = state.at[number, place].set(rows, mode="drop")

    # a request ends one window in `ratio` tokens, and one more: only those are read for
    ends = live & ((positions + 1) % ratio == 0) & (cache_slots >= 0)
    N = len(kv)
    size = min(N, N // ratio + state_table.shape[0])
    token = jnp.nonzero(ends, size=size, fill_value=N)[0] if N else jnp.zeros(0, jnp.int32)
    last, entry = (jnp.pad(x, (0, 1), constant_values=-1)[token] for x in (positions, cache_slots))
    owner = jnp.pad(request, (0, 1))[token]
    count = W // D * ratio
    where = last[:, None] + jnp.arange(count, dtype=jnp.int32) - (count - 1)
    slots = slot_mapping(state_table, jnp.repeat(owner, count), where.reshape(-1), page=spage)
    number, place = _latent_cache.place_of(slots, SP, spage)
    window = state[jnp.minimum(number, SP - 1), place].reshape(-1, count, 2, W)
    there = (slots >= 0).reshape(-1, count, 1)
    values, scores = jnp.where(there, window[:, :, 0], 0), jnp.where(there, window[:, :, 1], -jnp.inf)
    if W > D:  # the older half of the window has the first columns
        values, scores = (jnp.concatenate([x[:, :ratio, :D], x[:, ratio:, D:]], 1) for x in (values, scores))
    top = jnp.max(scores, 1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    mixed = _pairwise(weights * values) / jnp.maximum(_pairwise(weights), p.TINY)
    squares = _pairwise((mixed * mixed).T)[:, None]
    normed = mixed * lax.rsqrt(p.divide(squares, float(D)) + eps) * weight.astype(mixed.dtype)
    kept, part = _rope.split(normed, cos_sin.shape[1], False)
    part = _rope.rotate(part, _rope.rows(cos_sin, last - (ratio - 1)))
    return store(cache, kept, part, entry, format, page), state


def _pairwise(x):
    """Sum over the axis before the last ([..., K, D] -> [..., D]; [K, D] -> [D]) in an order that no batch changes."""
    while x.shape[-2] > 1:
        rows = x.shape[-2]
        half = x[..., : rows // 2, :] + x[..., rows // 2 : rows // 2 * 2, :]
        x = jnp.concatenate([half, x[..., rows // 2 * 2 :, :]], -2) if rows % 2 else half
    return x[..., 0, :]


def store(cache, kept, part, slots, format, page):
    """The cache with the entries `[kept | part]` in their slots."""
    if format == "plain":
        number, place = _latent_cache.place_of(slots, cache.shape[0], cache.shape[1])
        return cache.at[number, place].set(jnp.concatenate([kept, part], -1).astype(cache.dtype), mode="drop")
    if format == "v4":
        rows, scales = _latent_cache.encode_v4(kept, part)
    else:
        rows, scales = _latent_cache.encode_indexer(jnp.concatenate([kept, part], -1), format)
    return _latent_cache.insert(cache, rows, scales, slots, format, page)


def _cost(*, kv, ape, weight, format, **_):
    """States written and read once, entries written."""
    (N, W), (ratio, _), D = kv.shape, ape.shape, weight.shape[0]
    entry = {"plain": 2 * D, "v4": 584, "indexer_fp8": 132, "indexer_mxfp4": 68}[format]
    return 8 * N * W, N * (4 * 4 * W + 8 * W * (W // D)) + N // ratio * entry


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 vllm/models/deepseek_v4/compressor.py, common/ops/fused_compress_quant_cache.py",
    op=compressor,
    prepare=prepare,
    reference=_reference,
    outputs=lambda *, format, **_: ("entries" if format == "plain" else "cache", "state"),
    kernels={
        "mosaic": Kernel(
            run=mosaic.compressor,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=cases.CASES,
    cost=_cost,
    captures=("dsv4/compress_*",),
    module="jaxattn.nn.deepseek_v4:DeepseekV4Attention",
    support=cases.SUPPORT,
)
