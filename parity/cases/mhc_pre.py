"""vLLM's captures of hyper-connections in the terms of `jaxattn.mhc_pre`."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from parity.cases import Adapter, Arrays, Explained, Output
from parity.mutations import on_host
from parity.twins import mhc_pre as twin

if TYPE_CHECKING:
    from parity.captures import Capture


def arguments(capture: "Capture") -> dict[str, Any]:
    """The op's arguments; vLLM names the epsilons apart and gives all of them one value."""
    x, params = capture.inputs, capture.params
    assert params["pre_eps"] == params["sinkhorn_eps"]
    return {name: jnp.asarray(x[name]) for name in ("residual", "fn", "scale", "base")} | {
        "iters": int(params["iters"]),
        "post_mult": float(params["post_mult"]),
        "eps": float(params["pre_eps"]),
        "rms_eps": float(params["rms_eps"]),
    }


def expected(capture: "Capture") -> Arrays:
    """The coefficients, `post` without its last dimension of 1, and the layer's input."""
    out = capture.outputs
    return {"layer_input": out["layer_input"], "post": out["post"][..., 0], "comb": out["comb"]}


def explain(capture: "Capture", args: dict[str, Any]) -> Explained:
    """VLLM's torch form hands the product to cuBLAS, whose float32 sums run over more than a thousand products."""
    del capture
    host = on_host(args)
    rounded, wide = twin.run(host, False, twin.Switches(run=_RUN)), twin.run(host, True)
    names = ("post", "comb")
    return Explained(
        note=f"cuBLAS adds runs of {_RUN} or more products one by one in float32; here blocks of 128 are summed first",
        rounded={name: rounded[name] for name in names},
        wide={name: wide[name] for name in names},
    )


_RUN = 1024

ADAPTER = Adapter(
    arguments=arguments,
    expected=expected,
    explain=explain,
    outputs={
        "layer_input": Output(axes=("token", "channel"), slice_rank=1, rule="default", contract="contract"),
        "post": Output(axes=("token", "stream"), slice_rank=0, rule="default", contract="contract"),
        "comb": Output(axes=("token", "source", "destination"), slice_rank=1, rule="default", contract="contract"),
        "new_residual": Output(axes=("token", "stream", "channel"), slice_rank=2, rule="default", contract="contract"),
    },
)
