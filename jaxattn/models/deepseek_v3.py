"""DeepSeek-V3, V3.2 and V2: latent attention, dense first layers, routed and shared experts.

Differences by configuration: V2 routes with a softmax, the largest score of a group and no bias, V3 with sigmoids, the
two largest and a bias that selects; V2-Lite projects its queries at once; V3.2 is V3 with an indexer in every layer.
The norms of the latents have an epsilon of 1e-6 whatever the configuration says, as in DeepSeek's own code.

Source: https://arxiv.org/abs/2412.19437; https://arxiv.org/abs/2405.04434; transformers 5.24 `deepseek_v3`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from jaxattn import _checks
from jaxattn.models._causal import DTYPES, PAGE, CausalModel, Decoder, DecoderLayer, check_model_type
from jaxattn.models.checkpoint import Checkpoint, Piece, Rules, whole
from jaxattn.models.config import Fields, Quantization, Rope
from jaxattn.nn import DeepseekV32Attention, FusedMoE, GatedMLP, LatentCache, MLAttention, MoEConfig, V32Cache

_OP = "DeepseekV3Config"
_BLOCK = 128
_UNQUANTIZED = ("lm_head", "gate", "embed_tokens")


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """The indexer of V3.2."""

    heads: int
    dim: int
    topk: int
    interleaved: bool
    """Its rotated pairs are neighbours, else halves."""


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config:
    """Sizes and mechanisms of a model."""

    vocab_size: int
    features: int
    heads: int
    width: int
    """F of dense layers."""
    moe: tuple[MoEConfig | None, ...]
    """Of every layer, None = dense."""
    shared_width: int
    """F of all shared experts together, 0 = none."""
    rope: Rope
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    value_dim: int
    interleaved: bool
    use_bias: bool
    eps: float
    stops: tuple[int, ...]
    quantization: Quantization
    extra_layers: int
    """Multi-token prediction layers behind the last one, which are not built."""
    index: IndexConfig | None = None
    """V3.2 only."""

    @property
    def max_positions(self) -> int:
        """Rows of the rotary table."""
        return self.rope.length

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DeepseekV3Config":
        """Of a `config.json`.

        Raises:
            ValueError: another architecture, a missing field, or an option that the model does not have.
        """
        fields = Fields(_OP, config)
        kind = check_model_type(_OP, config, "deepseek_v3", "deepseek_v32", "deepseek_v2")
        v3 = kind != "deepseek_v2"
        index = _index(fields) if kind == "deepseek_v32" else None
        fields.only("hidden_act", "silu")
        fields.only("scoring_func", "sigmoid" if v3 else "softmax")
        fields.only("topk_method", *(("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")))
        fields.only("tie_word_embeddings", False)
        fields.only("mlp_bias", False)
        fields.only("moe_layer_freq", 1)
        if not v3:
            fields.only("norm_topk_prob", False)
        heads = fields.count("num_attention_heads")
        fields.only("num_key_value_heads", heads)
        quantization = Quantization.from_hf(fields)
        fields_of_moe: dict[str, Any] = {"shared_width": 0}
        if quantization.method == "mxfp4":
            raise ValueError(f"{_OP}: 'quant_method' must be 'fp8', got 'mxfp4'")
        odd = [name for name in quantization.keep if name.rpartition(".")[2] not in _UNQUANTIZED]
        if odd:
            raise ValueError(f"{_OP}: modules_to_not_convert may name {', '.join(_UNQUANTIZED)}, got {', '.join(odd)}")
        width = fields.get("moe_intermediate_size", 0)
        if quantization.method == "fp8_block":
            if width % _BLOCK:
                raise ValueError(
                    f"{_OP}: FP8 experts need a moe_intermediate_size of a multiple of {_BLOCK}, got {width}"
                )
            fields_of_moe |= {"format": "fp8_block", "ue8m0": quantization.ue8m0}
        layers = fields.count("num_hidden_layers")
        dense = fields.get("first_k_dense_replace", 0)
        return cls(
            vocab_size=fields.count("vocab_size"),
            features=fields.count("hidden_size"),
            heads=heads,
            width=fields.count("intermediate_size"),
            moe=tuple(None if i < dense else MoEConfig.from_hf(config, i, **fields_of_moe) for i in range(layers)),
            shared_width=fields.get("n_shared_experts", 0) * width,
            rope=Rope.from_hf(fields, fields.count("qk_rope_head_dim")),
            q_rank=fields.count("q_lora_rank", None),
            kv_rank=fields.count("kv_lora_rank"),
            nope_dim=fields.count("qk_nope_head_dim"),
            value_dim=fields.count("v_head_dim"),
            interleaved=bool(fields.get("rope_interleave", True)),
            use_bias=bool(fields.get("attention_bias", False)),
            eps=fields.number("rms_norm_eps", 1e-6),
            stops=fields.stops(),
            quantization=quantization,
            extra_layers=fields.get("num_nextn_predict_layers", 0),
            index=index,
        )


def _index(fields: Fields) -> IndexConfig:
    """V3.2's own fields.

    Raises:
        ValueError: one is missing, or is no positive integer.
    """
    fields.count("q_lora_rank")  # the indexer's queries come from it
    return IndexConfig(
        heads=fields.count("index_n_heads"),
        dim=fields.count("index_head_dim"),
        topk=fields.count("index_topk"),
        interleaved=bool(fields.get("indexer_rope_interleave", False)),
    )


class DeepseekV3ForCausalLM(CausalModel):
    """DeepSeek-V3, V3.2 or V2: `model.embed_tokens`, `model.layers[i]`, `model.norm`, `lm_head` as in its checkpoints.

    A layer has `input_layernorm`, `self_attn` (`MLAttention`, for V3.2 `DeepseekV32Attention`),
    `post_attention_layernorm` and `mlp`: a `GatedMLP`, or a `FusedMoE` that stacks the checkpoint's `mlp.experts.*` in
    `w13` and `w2`, with `mlp.gate.weight` as `gate`.

    Example:
        model = DeepseekV3ForCausalLM.from_pretrained(folder)
        generate(model, prompts, max_new_tokens=64)
    """

    Config = DeepseekV3Config

    def __init__(
        self,
        config: DeepseekV3Config,
        *,
        dtype: DTypeLike = "bfloat16",
        gate_dtype: DTypeLike | None = None,
        rngs: nnx.Rngs,
    ):
        """Draw the parameters; those of an FP8 checkpoint are zero until they are loaded.

        Args:
            config: sizes and mechanisms.
            dtype: of activations and of parameters that are not quantized.
            gate_dtype: of the routers' matrices, None = `dtype`.
            rngs: source of the parameters.

        Raises:
            TypeError: dtype.
        """
        c = config
        _checks.check_dtype(type(self).__name__, "dtype", jax.ShapeDtypeStruct((), dtype), DTYPES)
        table = nnx.Variable(c.rope.table(dtype))
        fp8 = "fp8_block" if c.quantization.method == "fp8_block" else None
        how: dict[str, Any] = {"format": fp8, "ue8m0": c.quantization.ue8m0, "dtype": dtype, "rngs": rngs}

        index: dict[str, Any] = {}
        if c.index is not None:
            index = {"index_heads": c.index.heads, "index_dim": c.index.dim, "index_topk": c.index.topk}
            index["index_interleaved"] = c.index.interleaved
        kind: Any = MLAttention if c.index is None else DeepseekV32Attention

        def layer(moe: MoEConfig | None) -> DecoderLayer:
            attention = kind(
                c.features,
                c.heads,
                table=table,
                scale=c.rope.softmax_scale(c.nope_dim + c.rope.dim),
                q_rank=c.q_rank,
                kv_rank=c.kv_rank,
                nope_dim=c.nope_dim,
                value_dim=c.value_dim,
                interleaved=c.interleaved,
                use_bias=c.use_bias,
                **index,
                **how,
            )
            if moe is None:
                mlp: nnx.Module = GatedMLP(c.features, c.width, **how)
            else:
                shared = GatedMLP(c.features, c.shared_width, **how) if c.shared_width else None
                mlp = FusedMoE(moe, shared=shared, gate_dtype=gate_dtype, dtype=dtype, rngs=rngs)
            return DecoderLayer(c.features, attention, mlp, eps=c.eps, dtype=dtype)

        layers = [layer(moe) for moe in c.moe]
        decoder = Decoder(c.vocab_size, c.features, layers, eps=c.eps, dtype=dtype, rngs=rngs)
        super().__init__(c, decoder, features=c.features, dtype=dtype, rngs=rngs)

    def layer_cache(self, pages: int) -> LatentCache | V32Cache:
        """Latents of one layer, and keys of an indexer: FP8 in bfloat16 models, plain in wider ones."""
        c = self.config
        sizes: dict[str, Any] = {"dtype": self.dtype, "kv_rank": c.kv_rank, "rope_dim": c.rope.dim}
        if c.index is None:
            return LatentCache(pages, PAGE, **sizes)
        packed = self.dtype == "bfloat16" and c.index.dim == 128
        keys: dict[str, Any] = {"index_format": "indexer_fp8" if packed else "plain", "index_dim": c.index.dim}
        return V32Cache(pages, PAGE, format="plain", **keys, **sizes)

    @classmethod
    def options(cls, checkpoint: Checkpoint) -> dict[str, Any]:
        """Transformers saves the routers' matrices in float32; DeepSeek, in bfloat16."""
        stored = {t.dtype for name, t in checkpoint.tensors.items() if name.endswith(".mlp.gate.weight")}
        return {"gate_dtype": "float32"} if stored == {"float32"} else {}

    @classmethod
    def rules(cls, config: DeepseekV3Config) -> Rules:
        """Experts are stored one by one."""
        del config
        return {FusedMoE: stacked_experts}

    @classmethod
    def ignored(cls, config: DeepseekV3Config) -> tuple[str, ...]:
        """Layers of multi-token prediction."""
        first = len(config.moe)
        extra = tuple(f"model.layers.{first + i}.*" for i in range(config.extra_layers))
        return (*super().ignored(config), *extra)


def stacked_experts(layer: FusedMoE) -> dict[str, tuple[Piece, ...]]:
    """Pieces of a `FusedMoE` whose experts are stored one by one, as `experts.{e}.gate_proj.weight` and so on."""
    c = layer.config
    E, M, F = c.experts, c.features, c.width
    found = {"gate": whole("gate.weight", layer.gate)}
    if layer.correction_bias is not None:
        found["correction_bias"] = whole("gate.e_score_correction_bias", layer.correction_bias)

    def stack(suffix: str, rows: int, columns: int, *names: str) -> tuple[Piece, ...]:
        return tuple(
            Piece(
                name=f"experts.{e}.{name}.{suffix}",
                shape=(rows, columns),
                at=(e, slice(i * rows, (i + 1) * rows)),
            )
            for e in range(E)
            for i, name in enumerate(names)
        )

    found["w13"] = stack("weight", F, M, "gate_proj", "up_proj")
    found["w2"] = stack("weight", M, F, "down_proj")
    if c.format == "fp8_block":
        blocks = -(-M // _BLOCK), -(-F // _BLOCK)
        found["w13_scale"] = stack("weight_scale_inv", blocks[1], blocks[0], "gate_proj", "up_proj")
        found["w2_scale"] = stack("weight_scale_inv", *blocks, "down_proj")
    return found
