"""FlashMLA's sparse captures in the terms of `jaxattn.sparse_mla`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from parity.cases import Adapter, Arrays, Explained, Output
from parity.mutations import on_host
from parity.twins import sparse_mla as twin

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments; rows that no list names are NaN (plain) or bytes of NaN codes (packed)."""
    x, params = capture.inputs, capture.params
    names = {"indices": "indices", "counts": "topk_length", "sinks": "sinks"}
    names |= {"extra_indices": "extra_indices", "extra_counts": "extra_topk_length"}
    args = {ours: x[theirs] for ours, theirs in names.items() if theirs in x}
    args = {name: a[:, 0] if name.endswith("indices") else a for name, a in args.items()}
    more: dict[str, Any] = {"scale": float(params["scale"]), "value_dim": 512, "return_lse": True}
    if "kv" in x:
        read = _listed(args["indices"], args.get("counts"), len(x["kv"]))
        cache = np.array(x["kv"][:, 0])
        cache[~read] = np.nan
        args |= {"q": x["q"], "cache": cache}
    else:
        page = int(params["page"])
        more |= {"format": "v4", "page": page}
        args |= {"q": x["q"][:, 0]}
        for prefix in ("", "extra_"):
            if f"{prefix}cache" in x:
                args[f"{prefix}cache"] = _poisoned(x[f"{prefix}cache"], args, prefix, page)
    return {name: jnp.asarray(a) for name, a in args.items()} | more


def _listed(indices: np.ndarray, counts: np.ndarray | None, rows: int) -> np.ndarray:
    valid = (indices >= 0) & (indices < rows)
    if counts is not None:
        valid &= np.arange(indices.shape[1]) < counts[:, None]
    read = np.zeros(rows, bool)
    read[indices[valid]] = True
    return read


def _poisoned(cache: np.ndarray, args: dict[str, Any], prefix: str, page: int) -> np.ndarray:
    read = _listed(args[f"{prefix}indices"], args.get(f"{prefix}counts"), len(cache) * page)
    cache = np.array(cache)
    for slot in np.flatnonzero(~read):
        row = slot % page
        cache[slot // page, row * 576 : (row + 1) * 576] = 0xFF
        cache[slot // page, page * 576 + row * 8 : page * 576 + (row + 1) * 8] = 0xFF
    return cache


def expected(capture: "Capture") -> Arrays:
    """Outputs as [N, H, ...]; FlashMLA marks an empty row by lse = +inf."""
    out = dict(capture.outputs)
    if "kv" not in capture.inputs:
        return {"o": out["o"][:, 0], "lse": out["lse"][..., 0]}
    return out


def convention(capture: "Capture", outputs: Arrays) -> Arrays:
    """Our log-sum-exp with +inf where no entry is valid."""
    del capture
    lse = outputs["lse"]
    return outputs | {"lse": np.where(np.isneginf(lse), np.inf, lse).astype(lse.dtype)}


def explain(capture: "Capture", args: dict[str, Any]) -> Explained:
    """Scores of 512 or 576 products pass through the tensor cores' sums, which cut off."""
    host = on_host(args)
    rounded, wide = twin.run(host, False, twin.Switches(tensor_core=True)), twin.run(host, True)
    names = ("lse", "max_logits")
    return Explained(
        note="tensor cores add 16 products at a time and cut the sum off: https://arxiv.org/abs/2403.00232",
        rounded=convention(capture, {name: rounded[name] for name in names}),
        wide=convention(capture, {name: wide[name] for name in names}),
    )


_NOTE = (
    "FlashMLA (https://github.com/deepseek-ai/FlashMLA) gives lse = +inf for an empty row, we -inf; see `convention`"
)

ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    explain=explain,
    convention=convention,
    outputs={
        "o": Output(axes=("token", "head", "dim"), slice_rank=2, rule="default", contract="contract"),
        "lse": Output(axes=("token", "head"), slice_rank=2, rule="lse", contract="contract_lse_latent", note=_NOTE),
        "max_logits": Output(axes=("token", "head"), slice_rank=2, rule="lse", contract="contract_lse_latent"),
    },
)
