"""vLLM's captures of FlashAttention-3 on packed sequences in the terms of `jaxattn.attention`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Explained, paged_attention
from parity.mutations import on_host
from parity.twins import attention as twin
from parity.twins.paged_attention import Switches

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments; keys and values that it promises not to read become NaN.

    vLLM's names: `cu_seqlens_q` = query starts, `cu_seqlens_k` = key starts; window 0 and softcap 0 mean none.
    """
    x, params = capture.inputs, capture.params
    causal, window = bool(params.get("causal", True)), params.get("window") or None
    starts = {"query_start": x["cu_seqlens_q"], "key_start": x["cu_seqlens_k"]}
    k, v = poisoned(x["k"], x["v"], x["cu_seqlens_q"], x["cu_seqlens_k"], causal, window)
    arrays = {"q": x["q"], "k": k, "v": v} | {name: start.astype(np.int32) for name, start in starts.items()}
    arrays |= {"sinks": x["sinks"]} if "sinks" in x else {}
    return {name: jnp.asarray(a) for name, a in arrays.items()} | {
        "scale": float(params["scale"]),
        "causal": causal,
        "window": window,
        "softcap": params.get("softcap") or None,
        "return_lse": "lse" in capture.outputs,
    }


def poisoned(k, v, query_start, key_start, causal, window) -> tuple[np.ndarray, np.ndarray]:
    """Copies of keys and values with NaN in every row that no query sees."""
    read = np.zeros(k.shape[0], bool)
    for b, (T, S) in enumerate(zip(np.diff(query_start), np.diff(key_start), strict=True)):
        if T:
            low = max(0, S - T - window + 1) if window else 0
            high = min(S, S - 1 + window) if window and not causal else S
            read[key_start[b] + low : key_start[b] + high] = True
    k, v = np.array(k), np.array(v)
    k[~read], v[~read] = np.nan, np.nan
    return k, v


def expected(capture: "Capture") -> Arrays:
    """The captured outputs, FlashAttention's lse [H, N] as [N, H]."""
    out = dict(capture.outputs)
    if "lse" in out:
        out["lse"] = np.ascontiguousarray(out["lse"].T)
    return out


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """Our outputs as FlashAttention counts them: exp(sink) joins the log-sum-exp."""
    if "lse" not in outputs or "sinks" not in capture.inputs:
        return outputs
    lse, sinks = outputs["lse"], capture.inputs["sinks"].astype(np.float64)
    with np.errstate(invalid="ignore"):  # a NaN stays one, for the judge
        return outputs | {"lse": np.logaddexp(lse.astype(np.float64), sinks).astype(lse.dtype)}


def explain(capture: "Capture", args: dict[str, Any]) -> Explained | None:
    """FlashAttention 3's soft cap."""
    del capture
    if not args["softcap"]:
        return None
    host = on_host(args)
    rounded = twin.run(host, False, Switches(round_tanh=np.float16))  # the documented error of tanh.approx.f32
    note = f"the soft cap takes the hardware's approximate tanh: {paged_attention.FA3_SOURCE}"
    return Explained(note=note, rounded={"lse": rounded["lse"]}, wide={"lse": twin.run(host, True)["lse"]})


ADAPTER = Adapter(
    arguments=arguments,
    explain=explain,
    expected=expected,
    convention=convention,
    outputs=paged_attention.ADAPTER.outputs,
)
