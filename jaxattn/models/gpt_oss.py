"""gpt-oss: sinks, windows in every other layer, YaRN, experts in MXFP4 with biases and a clamped SwiGLU.

Source: https://arxiv.org/abs/2508.10925; transformers 5.24 `gpt_oss`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxattn import _checks
from jaxattn.models._causal import DTYPES, PAGE, CausalModel, Decoder, DecoderLayer, check_model_type
from jaxattn.models.checkpoint import Piece, Rules, whole
from jaxattn.models.config import Fields, Quantization, Rope
from jaxattn.nn import FusedMoE, MoEConfig, PagedAttention, PagedKVCache, RotaryTable
from jaxattn.quant import mx

_OP = "GptOssConfig"
_WINDOW, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class GptOssConfig:
    """Sizes and mechanisms of a model."""

    vocab_size: int
    features: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Of every layer, None = all positions are visible."""
    moe: MoEConfig
    rope: Rope
    use_bias: bool
    eps: float
    stops: tuple[int, ...]

    @property
    def max_positions(self) -> int:
        """Rows of the rotary table."""
        return self.rope.length

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "GptOssConfig":
        """Of a `config.json`.

        Raises:
            ValueError: another architecture, a missing field, or an option that the model does not have.
        """
        fields = Fields(_OP, config)
        check_model_type(_OP, config, "gpt_oss")
        fields.only("hidden_act", "silu")
        fields.only("tie_word_embeddings", False)
        fields.only("swiglu_alpha", 1.702)
        quantization = Quantization.from_hf(fields)
        if quantization.method == "fp8_block":
            raise ValueError(f"{_OP}: 'quant_method' must be 'mxfp4', got 'fp8'")
        heads, layers = fields.count("num_attention_heads"), fields.count("num_hidden_layers")
        kinds = fields.get("layer_types", [(_WINDOW, _FULL)[i % 2] for i in range(layers)])
        if len(kinds) != layers or not set(kinds) <= {_WINDOW, _FULL}:
            raise ValueError(f"{_OP}: 'layer_types' must name {_WINDOW} or {_FULL} for {layers} layers, got {kinds}")
        window = fields.count("sliding_window") if _WINDOW in kinds else None
        features = fields.count("hidden_size")
        head_dim = fields.count("head_dim", features // heads)
        return cls(
            vocab_size=fields.count("vocab_size"),
            features=features,
            heads=heads,
            kv_heads=fields.count("num_key_value_heads", heads),
            head_dim=head_dim,
            windows=tuple(window if kind == _WINDOW else None for kind in kinds),
            moe=MoEConfig.from_hf(config, format=quantization.method),
            rope=Rope.from_hf(fields, head_dim),
            use_bias=bool(fields.get("attention_bias", True)),
            eps=fields.number("rms_norm_eps", 1e-5),
            stops=fields.stops(),
        )


class GptOssForCausalLM(CausalModel):
    """gpt-oss: `model.embed_tokens`, `model.layers[i]`, `model.norm`, `lm_head` as in its checkpoints.

    A layer has `input_layernorm`, `self_attn` (`PagedAttention`), `post_attention_layernorm` and `mlp`, a `FusedMoE`
    with `mlp.router.weight` as `gate`, `mlp.experts.gate_up_proj_blocks` as `w13`, `..._scales` as `w13_scale` and
    `..._bias` as `w13_bias`, `down_proj` alike as `w2`. All layers share one `rotary`.
    """

    Config = GptOssConfig

    def __init__(self, config: GptOssConfig, *, dtype: DTypeLike = "bfloat16", rngs: nnx.Rngs):
        """Draw the parameters.

        Raises:
            TypeError: dtype.
        """
        c = config
        _checks.check_dtype(type(self).__name__, "dtype", jax.ShapeDtypeStruct((), dtype), DTYPES)
        rotary = RotaryTable(c.rope.table(dtype))
        scale = c.rope.softmax_scale(c.head_dim)

        def layer(window: int | None) -> DecoderLayer:
            attention = PagedAttention(
                c.features,
                c.heads,
                c.kv_heads,
                c.head_dim,
                use_bias=c.use_bias,
                sinks=True,
                rotary=rotary,
                scale=scale,
                window=window,
                dtype=dtype,
                rngs=rngs,
            )
            return DecoderLayer(c.features, attention, FusedMoE(c.moe, dtype=dtype, rngs=rngs), eps=c.eps, dtype=dtype)

        layers = [layer(window) for window in c.windows]
        decoder = Decoder(c.vocab_size, c.features, layers, eps=c.eps, dtype=dtype, rngs=rngs)
        super().__init__(c, decoder, features=c.features, dtype=dtype, rngs=rngs)

    def layer_cache(self, pages: int) -> PagedKVCache:
        """Keys and values of one layer."""
        c = self.config
        return PagedKVCache(pages, PAGE, c.kv_heads, c.head_dim, self.dtype)

    @classmethod
    def rules(cls, config: GptOssConfig) -> Rules:
        """Experts are stored stacked."""
        del config
        return {FusedMoE: experts_rule}


def experts_rule(layer: FusedMoE) -> dict[str, tuple[Piece, ...]]:
    """Pieces of gpt-oss' mixture: blocks [E, N, K/32, 16] and scales of MXFP4, or plain matrices [E, K, N]."""
    found = {"gate": whole("router.weight", layer.gate), "gate_bias": whole("router.bias", layer.gate_bias)}
    for part, name in (("w13", "experts.gate_up_proj"), ("w2", "experts.down_proj")):
        found[f"{part}_bias"] = whole(f"{name}_bias", getattr(layer, f"{part}_bias"))
        E, N, K = getattr(layer, part).shape
        if layer.config.format == "mxfp4":
            shape = (E, N, 2 * K // mx.GROUP, mx.GROUP // 2)
            found[part] = (Piece(name=f"{name}_blocks", shape=shape, convert=_joined),)
            found[f"{part}_scale"] = whole(f"{name}_scales", getattr(layer, f"{part}_scale"))
        else:
            found[part] = (Piece(name=name, shape=(E, K, N), convert=lambda x: x.transpose(0, 2, 1)),)
    return found


def _joined(blocks: np.ndarray) -> np.ndarray:
    return blocks.reshape(*blocks.shape[:2], -1)
