"""vLLM's and our torch captures of paged attention in the terms of `jaxattn.paged_attention`."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Explained, Output
from parity.twins import paged_attention as twin

if TYPE_CHECKING:
    from parity.captures import Capture

_UNUSED_PAGE = 2**31 - 1


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments; cache slots and table entries that it promises not to read become NaN and 2^31 - 1.

    vLLM's names: `block_table` = page table, `cu_seqlens_q` = query starts, `seq_lens` = lengths; window 0 and
    softcap 0 mean none.
    """
    x, params = capture.inputs, capture.params
    window = params.get("window") or None
    k, v, table = poisoned(x["k"], x["v"], x["block_table"], x["seq_lens"], x["cu_seqlens_q"], window)
    args: dict[str, Any] = {
        "q": x["q"],
        "k_pages": k,
        "v_pages": v,
        "page_table": table,
        "lengths": x["seq_lens"].astype(np.int32),
        "query_start": x["cu_seqlens_q"].astype(np.int32),
    }
    args |= {name: x[name] for name in ("sinks", "k_scale", "v_scale") if name in x}
    if "k_scale_cache" in x:
        scales = (x[f"{side}_scale_cache"] for side in ("k", "v"))
        args["k_scale_pages"], args["v_scale_pages"], _ = poisoned(
            *scales, x["block_table"], x["seq_lens"], x["cu_seqlens_q"], window
        )
    return {name: jnp.asarray(a) for name, a in args.items()} | {
        "scale": float(params["scale"]),
        "causal": bool(params.get("causal", True)),
        "window": window,
        "softcap": params.get("softcap") or None,
        "return_lse": "lse" in capture.outputs,
    }


def poisoned(k, v, table, lengths, starts, window) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copies of pools and table with NaN in every slot and a huge number in every entry that nobody may read."""
    page, table = k.shape[1], table.astype(np.int32)
    read = np.zeros(k.shape[:2], bool)
    for b, length in enumerate(lengths.tolist()):
        queries = int(starts[b + 1] - starts[b])
        if queries:
            low = max(0, length - queries - window + 1) if window else 0
            slots = np.arange(low, length)
            read[table[b, slots // page], slots % page] = True
        table[b, -(-length // page) :] = _UNUSED_PAGE
    pools = []
    for pool in (k, v):
        pool = np.array(pool)
        pool[~read] = np.iinfo(pool.dtype).max if pool.dtype.kind in "iu" else np.nan
        pools.append(pool)
    return pools[0], pools[1], table


def expected(capture: "Capture") -> Arrays:
    """The captured outputs, `lse` as [N, H]; `lse_layout` of the parameters starts with H where heads come first."""
    out = dict(capture.outputs)
    if "lse" in out and str(capture.params.get("lse_layout", "N H")).strip().upper().startswith("H"):
        out["lse"] = np.ascontiguousarray(out["lse"].T)
    return out


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """Our outputs as the capture counts them: with `lse_includes_sink`, exp(sink) joins the log-sum-exp."""
    if "lse" not in outputs or not capture.params.get("lse_includes_sink") or "sinks" not in capture.inputs:
        return outputs
    lse, sinks = outputs["lse"], capture.inputs["sinks"].astype(np.float64)
    with np.errstate(invalid="ignore"):  # a NaN stays one, for the judge
        return outputs | {"lse": np.logaddexp(lse.astype(np.float64), sinks).astype(lse.dtype)}


def explain(capture: "Capture", args: dict[str, Any]) -> Explained | None:
    """What other people's attention rounds more coarsely than the op."""
    kernel, dtype = str(capture.params.get("kernel", "")), capture.inputs["q"].dtype
    host = {name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in args.items()}
    wide, half = twin.run(host, True), dtype.itemsize == 2
    if kernel == _GPT_OSS and half:
        host["sinks"] = host["sinks"].astype(dtype)
        switches = twin.Switches(round_scores=dtype, round_shifted=dtype, early_division=True)
        output, note = "o", f"scores, their shift by the maximum and the probabilities are rounded: {_MODELS}"
    elif kernel == _GEMMA2 and half:
        switches = twin.Switches(round_scores=dtype, early_division=True)
        output, note = "o", f"scores are rounded after each step, and so are the probabilities: {_MODELS}"
    elif kernel == _TORCH_CPU and half:
        switches = twin.Switches(exp=twin.vector_exp)
        output, note = "lse", f"whole vectors of keys go through an approximate exponential: {_TORCH_SOURCE}"
    elif capture.params.get("kv_cache_dtype") == "int4_token_head":
        switches = twin.Switches(hadacore=True, operand=twin.tf32)
        output, note = "o", f"the result is rounded, rotated in 16 bits and rounded, products are TF32: {_INT4_SOURCE}"
    elif kernel == "flash_attention_3" and args["softcap"]:
        switches = twin.Switches(round_tanh=np.float16)  # eleven bits, the documented error of tanh.approx.f32
        output, note = "lse", f"the soft cap takes the hardware's approximate tanh: {FA3_SOURCE}"
    elif kernel == "triton_unified_attention" and dtype == np.float32:
        switches = twin.Switches(operand=twin.tf32)
        output, note = "o", f"products are TF32, Triton's default for float32: {_TRITON_DOT}"
    else:
        return None
    rounded = twin.run(host, False, switches)
    return Explained(note=note, rounded={output: rounded[output]}, wide={output: wide[output]})


_GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss.eager_attention_forward"
_GEMMA2 = "transformers.models.gemma2.modeling_gemma2.eager_attention_forward"
_TORCH_CPU = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"
_MODELS = "https://github.com/huggingface/transformers/tree/main/src/transformers/models (eager_attention_forward)"
_TORCH_SOURCE = "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cpu/FlashAttentionKernel.cpp"
_INT4_SOURCE = "https://github.com/vllm-project/vllm/blob/v0.26.0/vllm/v1/attention/ops/int4_per_token_head.py"
FA3_SOURCE = "https://github.com/Dao-AILab/flash-attention/blob/main/hopper/utils.h (apply_softcap)"
_TRITON_DOT = "https://triton-lang.org/main/python-api/generated/triton.language.dot.html"

ADAPTER = Adapter(
    arguments=arguments,
    explain=explain,
    expected=expected,
    convention=convention,
    outputs={
        "o": Output(axes=("token", "head", "dim"), slice_rank=2, rule="default", contract="contract"),
        "lse": Output(
            axes=("token", "head"),
            slice_rank=2,
            rule="lse",
            contract="contract_lse",
            note="FA3 (https://github.com/vllm-project/flash-attention) folds the sink into its LSE, "
            "FlashMLA (https://github.com/deepseek-ai/FlashMLA) and we do not; see `convention`",
        ),
    },
)
