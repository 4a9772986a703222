"""Captures of PyTorch's and transformers' own attention code on the CPU: a second, independent producer.

    python scripts/capture_torch.py OUT [--family attention] [--only GLOB] [--seed 0]

Each request's keys and values are gathered from their pages into contiguous arrays, masks are transformers' own, and
the foreign function runs on each request alone. Three producers: `sdpa` is torch's fused CPU kernel with the LSE that
it returns, `gptoss` and `gemma2` are the eager attention of those models (sinks, soft cap) with torch.logsumexp over
the same scores in float32. Needs the `torch` extra; runs on Python 3.11 or later.
"""

import sys
from types import SimpleNamespace

import _capture
import ml_dtypes
import numpy as np
from _capture import CaseData, Machine, Paged, Recipes

try:
    import torch
    import transformers
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import masking_utils
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gpt_oss import modeling_gpt_oss
except ImportError as e:
    sys.exit(f"capture_torch needs PyTorch and transformers ({e}); install them with: pip install '.[torch]'")

TORCH = Recipes("torch")
SDPA = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"
GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss.eager_attention_forward"
GEMMA2 = "transformers.models.gemma2.modeling_gemma2.eager_attention_forward"


def machine() -> Machine:
    """The torch and the processor at hand."""
    torch.set_num_threads(1)  # more threads sum in another order
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return Machine(versions, f"CPU, {torch.backends.cpu.get_cpu_capability()}", "none")


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor with the array's bits."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """An array with the tensor's bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


def mask(paged: Paged, b: int) -> torch.Tensor:
    """Visible pairs `[T, S]` of request b, from transformers' mask functions; keys start at `paged.first_key(b)`."""
    rule = masking_utils.causal_mask_function if paged.causal else masking_utils.bidirectional_mask_function
    if paged.window and paged.causal:
        rule = masking_utils.sliding_window_causal_mask_function(paged.window)
    elif paged.window:
        # its window counts the distance to either side, ours the positions with the token itself
        rule = masking_utils.sliding_window_bidirectional_mask_function(paged.window - 1)
    n = paged.lengths[b]
    query = torch.arange(n - paged.queries[b], n)[:, None]
    key = torch.arange(paged.first_key(b), n)[None]
    return rule(0, 0, query, key) & torch.ones(query.shape[0], key.shape[1], dtype=torch.bool)


def contiguous(pool: torch.Tensor, table: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Slots start..stop of one request as `[1, K, S, D]`."""
    slots = torch.arange(start, stop)
    page = pool.shape[1]
    return pool[table[slots // page].long(), slots % page].transpose(0, 1)[None]


def per_request(paged: Paged, rng: np.random.Generator, attend, kernel: str, **params) -> CaseData:
    """Run `attend(q [1,H,T,D], k, v [1,K,S,D], bias [1,1,T,S], sinks) -> o [T,H,D], lse [T,H]` on each request."""
    arrays = paged.inputs(rng)
    t = {name: to_torch(array) for name, array in arrays.items()}
    o, lse = torch.full_like(t["q"], torch.nan), torch.full(t["q"].shape[:2], torch.nan)
    for b, (start, stop) in enumerate(zip(t["cu_seqlens_q"][:-1], t["cu_seqlens_q"][1:], strict=True)):
        if start == stop:
            continue
        k, v = (contiguous(t[x], t["block_table"][b], paged.first_key(b), paged.lengths[b]) for x in ("k", "v"))
        bias = torch.zeros(1, 1, stop - start, k.shape[2]).masked_fill(~mask(paged, b), -torch.inf)
        q = t["q"][start:stop].transpose(0, 1)[None]
        o[start:stop], lse[start:stop] = attend(q, k, v, bias, t.get("sinks"))
    params = paged.params(kernel, lse_includes_sink=False, lse_layout="TH", **params)
    return CaseData(params, arrays, {"o": to_numpy(o), "lse": to_numpy(lse)})


def repeat(x: torch.Tensor, heads: int) -> torch.Tensor:
    """KV heads repeated for the query heads that share them."""
    return modeling_gpt_oss.repeat_kv(x, heads // x.shape[1])


def scores_lse(q, k, bias, scale, softcap=0.0):
    """torch.logsumexp of the scores in float32, `[T, H]`."""
    scores = torch.matmul(q.float(), repeat(k, q.shape[1]).float().transpose(2, 3)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.logsumexp(scores + bias, dim=-1)[0].T


def sdpa(paged: Paged):
    """scaled_dot_product_attention with its fused CPU kernel; the same kernel's LSE."""

    def attend(q, k, v, bias, sinks):
        k, v, bias = repeat(k, q.shape[1]), repeat(v, q.shape[1]), bias.to(q.dtype)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=paged.scale)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        again, lse = fused(q, k, v, attn_mask=bias, scale=paged.scale)
        if not torch.equal(o, again):
            raise RuntimeError("scaled_dot_product_attention did not run its fused CPU kernel")
        return o[0].transpose(0, 1), lse[0].T

    return lambda rng: per_request(paged, rng, attend, SDPA)


def gptoss(paged: Paged):
    """gpt-oss's eager attention: one more logit per head."""

    def attend(q, k, v, bias, sinks):
        module = SimpleNamespace(num_key_value_groups=paged.H // paged.K, sinks=sinks.to(q.dtype), training=False)
        o, _ = modeling_gpt_oss.eager_attention_forward(module, q, k, v, bias.to(q.dtype), paged.scale)
        return o[0], scores_lse(q, k, bias, paged.scale)

    return lambda rng: per_request(paged, rng, attend, GPT_OSS, lse_kernel="torch.logsumexp")


def gemma2(paged: Paged):
    """Gemma 2's eager attention: soft cap."""

    def attend(q, k, v, bias, sinks):
        module = SimpleNamespace(num_key_value_groups=paged.H // paged.K, training=False)
        o, _ = modeling_gemma2.eager_attention_forward(
            module, q, k, v, bias.to(q.dtype), scaling=paged.scale, softcap=paged.softcap or None
        )
        return o[0], scores_lse(q, k, bias, paged.scale, paged.softcap)

    return lambda rng: per_request(paged, rng, attend, GEMMA2, lse_kernel="torch.logsumexp")


def attention(name: str, make, *shape, **options) -> None:
    """Add `attention/paged_NAME`."""
    TORCH.add("attention", f"paged_{make.__name__}_{name}")(make(Paged(*shape, **options)))


F32 = {"dtype": "float32"}
SINKS = (-np.inf, 0.0, 0.5, 4.0)  # +inf is not defined there: inf - inf
attention("decode_gqa4", sdpa, (1, 1), (17, 30), gain=2.0)
attention("prefill_gqa6_f32", sdpa, (1, 2), (17, 2), H=6, gain=2.0, spare_pages=0, **F32)
attention("window3_gqa7", sdpa, (7, 1), (15, 9), H=7, window=3, gain=2.0)
attention("window9_f32", sdpa, (1, 3), (9, 14), H=2, window=9, gain=2.0, spare_pages=0, **F32)
attention("noncausal_f32", sdpa, (2, 4), (15, 4), H=2, causal=False, gain=2.0, spare_pages=0, **F32)
attention("noncausal_window4", sdpa, (3, 9), (12, 17), H=2, causal=False, window=4, gain=2.0)
attention("empty_requests", sdpa, (0, 1, 0, 2), (0, 18, 5, 2), spare_pages=0)
attention("head128_gqa1", sdpa, (2,), (12,), H=2, K=2, D=128, spare_pages=0)
attention("head256", sdpa, (2,), (14,), H=2, D=256, spare_pages=0)
attention("page32", sdpa, (1, 3), (33, 20), page=32, gain=2.0, spare_pages=0)
attention("sinks_f32", gptoss, (1, 3), (12, 16), sinks=SINKS, gain=2.0, **F32)
attention("sinks_window5_gqa7_f32", gptoss, (3, 1), (14, 6), H=7, window=5, sinks=SINKS, spare_pages=0, **F32)
attention("sinks", gptoss, (1, 5), (17, 16), sinks=SINKS)
attention("softcap2_f32", gemma2, (1, 3), (7, 12), softcap=2.0, gain=4.0, spare_pages=0, **F32)
attention("softcap5_window6", gemma2, (5, 1), (12, 15), H=6, softcap=5.0, window=6, gain=4.0)

if __name__ == "__main__":
    sys.exit(_capture.main(TORCH, "scripts/capture_torch.py", machine))
