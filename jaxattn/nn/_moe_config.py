"""What a mixture-of-experts layer is made of, read from Hugging Face configurations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxattn.ops.experts import Format, Place
from jaxattn.ops.gated_activation import Kind
from jaxattn.ops.router import Scoring

_MODELS = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "gpt_oss", "mixtral", "qwen3_moe")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes and mechanisms of one layer; the defaults are those of a plain softmax mixture."""

    features: int
    """M."""
    experts: int
    """E, routed experts."""
    width: int
    """F of a routed expert."""
    top_k: int
    """A, routed experts of a token."""
    scoring: Scoring = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    kept_groups: int = 1
    correction_bias: bool = False
    """Experts have a bias that selects (`e_score_correction_bias`)."""
    vocab: int | None = None
    """Route by a table of so many token ids instead of by scores."""
    scaling: float = 1.0
    """`routed_scaling_factor`."""
    scaling_on: Literal["weights", "output", None] = "weights"
    """None = on the output, or dividing the shared experts in float16, as vLLM does for V2 and V3."""
    shared_width: int = 0
    """F of all shared experts together, 0 = none."""
    gate_bias: bool = False
    expert_bias: bool = False
    activation: Kind = "silu"
    limit: float | None = None
    format: Format = "none"
    """Of the routed experts' weights."""
    act_group: int | None = None
    ue8m0: bool = True
    """FP8 scales of activations are powers of two, see `jaxattn.experts`."""
    weight_on: Place = "output"

    @classmethod
    def from_hf(cls, config: Any, layer: int = 0, **changes: Any) -> "MoEConfig":
        """The mixture of one layer of a Hugging Face configuration.

        Args:
            config: a mapping (`config.json`) or an object with attributes (`PretrainedConfig`).
            layer: its number; DeepSeek-V4's first layers route by token id.
            **changes: fields to set otherwise, such as `format`.

        Raises:
            ValueError: the model type is unknown, or this layer is dense.
        """
        get = _Reader(config)
        kind = get("model_type")
        if kind not in _MODELS:
            raise ValueError(f"MoEConfig: model_type must be one of {', '.join(_MODELS)}, got {kind!r}")
        found = _deepseek(get, kind, layer) if kind.startswith("deepseek") else _other(get, kind, layer)
        return cls(**(found | changes))


class _Reader:
    """Fields of a mapping or an object."""

    def __init__(self, config: Any):
        self.config = config

    def __call__(self, name: str, *default: Any) -> Any:
        mapping = isinstance(self.config, Mapping)
        value = self.config.get(name) if mapping else getattr(self.config, name, None)
        if value is None and not default:
            raise ValueError(f"MoEConfig: the configuration must have {name!r}; it has none")
        return default[0] if value is None else value


def _deepseek(get: _Reader, kind: str, layer: int) -> dict[str, Any]:
    v4 = kind == "deepseek_v4"
    dense = 0 if v4 else get("first_k_dense_replace", 0)
    if layer < dense or (layer - dense) % get("moe_layer_freq", 1):
        raise ValueError(f"MoEConfig: layer {layer} of this {kind} is dense; the first mixture is layer {dense}")
    method = get("topk_method", "noaux_tc" if kind != "deepseek_v2" else "greedy")
    grouped = not v4 and method != "greedy"
    hashed = v4 and layer < get("num_hash_layers", 0)
    width = get("moe_intermediate_size")
    found: dict[str, Any] = {
        "features": get("hidden_size"),
        "experts": get("n_routed_experts"),
        "width": width,
        "top_k": get("num_experts_per_tok"),
        "scoring": get("scoring_func", {"deepseek_v2": "softmax", "deepseek_v4": "sqrtsoftplus"}.get(kind, "sigmoid")),
        "renormalize": bool(get("norm_topk_prob", kind != "deepseek_v2")),
        "num_groups": get("n_group", 1) if grouped else 1,
        "kept_groups": get("topk_group", 1) if grouped else 1,
        "correction_bias": method == "noaux_tc" and not hashed,
        "vocab": get("vocab_size") if hashed else None,
        "scaling": float(get("routed_scaling_factor", 1.0)),
        "scaling_on": "weights" if kind in ("deepseek_v32", "deepseek_v4") else None,
        "shared_width": width * get("n_shared_experts", 0),
        "limit": get("swiglu_limit", 10.0) if v4 else None,
    }
    if v4:
        fp4 = get("expert_dtype", "fp4") == "fp4"
        quantization = get("quantization_config", {})
        nv = isinstance(quantization, Mapping) and quantization.get("moe_quant_algo") == "NVFP4"
        found |= {"format": ("nvfp4" if nv else "mxfp4") if fp4 else "fp8_block"}
        found |= {"act_group": 32, "weight_on": "activation"} if fp4 else {}
    return found


def _other(get: _Reader, kind: str, layer: int) -> dict[str, Any]:
    oss, qwen = kind == "gpt_oss", kind == "qwen3_moe"
    if qwen and (layer in get("mlp_only_layers", ()) or (layer + 1) % get("decoder_sparse_step", 1)):
        raise ValueError(f"MoEConfig: layer {layer} of this {kind} is dense")
    found: dict[str, Any] = {
        "features": get("hidden_size"),
        "experts": get("num_experts" if qwen else "num_local_experts"),
        "width": get("moe_intermediate_size" if qwen else "intermediate_size"),
        "top_k": get("num_experts_per_tok"),
        "renormalize": bool(get("norm_topk_prob", False)) if qwen else True,
    }
    if oss:
        found |= {"gate_bias": True, "expert_bias": True, "activation": "swigluoai"}
        found |= {"limit": float(get("swiglu_limit", 7.0)), "format": "mxfp4"}
    return found
