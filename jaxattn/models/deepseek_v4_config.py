"""What a DeepSeek-V4 model is made of, read from its `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from jaxattn.models.config import Fields, Quantization, Rope
from jaxattn.nn.deepseek_v4 import LinearFormat
from jaxattn.nn.moe import MoEConfig

_OP = "DeepseekV4Config"
_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_YARN = ("type", "rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "rope_theta")
_YARN += ("mscale", "mscale_all_dim", "partial_rotary_factor", "attention_factor")
_HEAD, _ROTARY = 512, 64


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config:
    """Sizes, formats and rotations; heads have 512 numbers, the last 64 rotated."""

    vocab_size: int
    features: int
    heads: int
    ratios: tuple[int, ...]
    """Of every layer: 1 (window only), 4 or 128 tokens per compressed entry."""
    mtp_blocks: int
    moe: tuple[MoEConfig, ...]
    """Of every layer, then of every MTP block."""
    window: int
    q_rank: int
    groups: int
    o_rank: int
    index_heads: int
    index_dim: int
    index_topk: int
    window_rope: Rope
    """Of window-only layers."""
    rope: Rope
    """Of layers that compress."""
    streams: int = 4
    hc_iters: int = 20
    hc_eps: float = 1e-6
    eps: float = 1e-6
    stops: tuple[int, ...] = ()
    linear_format: LinearFormat = "none"
    output_format: LinearFormat = "none"
    cache_format: Literal["v4", "plain"] = "v4"
    index_format: Literal["indexer_fp8", "indexer_mxfp4"] | None = None
    """Of the indexer's keys, None = FP8, plain beside plain caches."""
    chunk: int = 512
    """Rows of a step at most: caches keep what so many rows can read."""

    @property
    def max_positions(self) -> int:
        """Tokens of a request, prompt included."""
        return self.rope.length

    @property
    def attention(self) -> dict[str, Any]:
        """Further arguments of `DeepseekV4Attention`."""
        names = ("q_rank", "groups", "o_rank", "window", "index_heads", "index_dim", "index_topk")
        return {name: getattr(self, name) for name in (*names, "linear_format", "output_format")}

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        *,
        max_positions: int | None = None,
        yarn_on_window: bool = False,
        mtp: bool = True,
        **changes: Any,
    ) -> Self:
        """Of a `config.json`, DeepSeek's or one that transformers wrote.

        Args:
            config: its fields.
            max_positions: rows of the tables of rotations; None = all positions of the model.
            yarn_on_window: stretch the rotation of window-only layers as well, as vLLM does; DeepSeek and transformers
                do not.
            mtp: make the blocks of multi-token prediction.
            **changes: fields to set otherwise.

        Raises:
            ValueError: a field is missing, or has a value that no module here has.
        """
        fields = Fields(_OP, config)
        fields.only("model_type", "deepseek_v4")
        fields.only("head_dim", _HEAD)
        fields.only("qk_rope_head_dim", _ROTARY)
        fields.only("num_key_value_heads", 1)
        fields.only("hidden_act", "silu")
        fields.only("index_head_dim", 128)
        fields.only("compress_rates", {kind: ratio for kind, ratio in _RATIOS.items() if ratio})
        for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
            fields.only(name, False)
        layers = fields.count("num_hidden_layers")
        blocks = fields.get("num_nextn_predict_layers", 0) if mtp else 0
        quantization = Quantization.from_hf(_without_experts(fields))
        linear = "fp8_block" if quantization.method == "fp8_block" else "none"
        window_rope, rope = _ropes(fields, max_positions, yarn_on_window)
        found: dict[str, Any] = {
            "vocab_size": fields.count("vocab_size"),
            "features": fields.count("hidden_size"),
            "heads": fields.count("num_attention_heads"),
            "ratios": _ratios(fields, layers),
            "mtp_blocks": blocks,
            "moe": tuple(_moe(fields, i, linear) for i in range(layers + blocks)),
            "window": fields.count("sliding_window"),
            "q_rank": fields.count("q_lora_rank"),
            "groups": fields.count("o_groups"),
            "o_rank": fields.count("o_lora_rank"),
            "index_heads": fields.count("index_n_heads"),
            "index_dim": fields.count("index_head_dim"),
            "index_topk": fields.count("index_topk"),
            "window_rope": window_rope,
            "rope": rope,
            "streams": fields.count("hc_mult"),
            "hc_iters": fields.count("hc_sinkhorn_iters"),
            "hc_eps": fields.number("hc_eps"),
            "eps": fields.number("rms_norm_eps"),
            "stops": fields.stops(),
            "linear_format": linear,
            "output_format": linear,
        }
        return cls(**found | changes)


def _without_experts(fields: Fields) -> Fields:
    """The configuration without what `quantization_config` says of experts, which `MoEConfig` reads."""
    own = fields.get("quantization_config", {})
    kept = {k: v for k, v in own.items() if k not in ("expert_dtype", "moe_quant_algo")}
    return Fields(fields.op, {**fields.config, "quantization_config": kept})


def _ratios(fields: Fields, layers: int) -> tuple[int, ...]:
    stated = fields.get("compress_ratios", None)
    if stated is None:
        types = fields.get("layer_types")
        odd = sorted(set(types) - set(_RATIOS))
        if odd:
            raise ValueError(f"{_OP}: 'layer_types' must be of {', '.join(_RATIOS)}, got {', '.join(odd)}")
        stated = [_RATIOS[kind] for kind in types]
    if len(stated) < layers or set(stated[:layers]) - {0, 1, 4, 128}:
        raise ValueError(
            f"{_OP}: every one of the {layers} layers must have a ratio of 0, 1, 4 or 128, got {list(stated)}"
        )
    return tuple(max(1, ratio) for ratio in stated[:layers])


def _ropes(fields: Fields, length: int | None, yarn_on_window: bool) -> tuple[Rope, Rope]:
    """Rotations of window-only layers and of those that compress."""
    nested = fields.get("rope_parameters", {})
    if "compress" in nested:
        own = Fields(f"{_OP}: rope_parameters", nested).part("compress", _YARN)
        main = Fields(f"{_OP}: rope_parameters", nested).part("main", _YARN)
        theta = main.number("rope_theta") if main is not None else fields.number("rope_theta")
        assert own is not None
    else:
        own = fields.part("rope_scaling", _YARN) or Fields(_OP, {})
        theta = fields.number("rope_theta")
    own.only("attention_factor", 1.0)
    kind = own.get("rope_type", own.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ValueError(f"{own.op}: the type must be 'default' or 'yarn', got {kind!r}")
    longest = fields.count("max_position_embeddings")
    if length is not None and not 1 <= length <= longest:
        raise ValueError(f"{_OP}: max_positions must be 1 to {longest}, got {length}")
    plain = Rope(dim=_ROTARY, length=length or longest, theta=theta, mscale=0.0, mscale_all_dim=0.0)
    stretched = plain
    if kind == "yarn":
        stretched = replace(
            plain,
            factor=own.number("factor"),
            original=own.count("original_max_position_embeddings"),
            beta_fast=own.number("beta_fast", 32.0),
            beta_slow=own.number("beta_slow", 1.0),
        )
    base = own.number("rope_theta", None) or fields.number("compress_rope_theta")
    return stretched if yarn_on_window else plain, replace(stretched, theta=base)


def _moe(fields: Fields, layer: int, linear: LinearFormat) -> MoEConfig:
    """The experts of a layer; those of an unquantized checkpoint are plain."""
    kinds, stated = fields.get("mlp_layer_types", None), {}
    if kinds is not None:
        hashed = kinds.count("hash_moe")
        if kinds != ["hash_moe"] * hashed + ["moe"] * (len(kinds) - hashed):
            raise ValueError(f"{_OP}: 'mlp_layer_types' must be 'hash_moe' first, then 'moe', got {kinds}")
        stated["num_hash_layers"] = hashed
    own = fields.get("quantization_config", {})
    stated |= {name: own[name] for name in ("expert_dtype",) if name in own}
    plain = {"format": "none", "act_group": None, "weight_on": "output"} if linear == "none" else {}
    return MoEConfig.from_hf({**fields.config, **stated}, layer, **plain)
