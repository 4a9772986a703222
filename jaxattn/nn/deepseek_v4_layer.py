"""DeepSeek-V4's decoder layer and its multi-token prediction block."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxattn import _checks
from jaxattn.nn._moe_config import MoEConfig
from jaxattn.nn.deepseek_v4 import DeepseekV4Attention, LinearFormat, check_format, linear
from jaxattn.nn.deepseek_v4_cache import V4Batch, V4Cache
from jaxattn.nn.hyper import HyperConnections, HyperHead
from jaxattn.nn.linear import project
from jaxattn.nn.mlp import GatedMLP
from jaxattn.nn.moe import FusedMoE
from jaxattn.nn.quantized_linear import QuantizedLinear
from jaxattn.ops.mtp import mtp
from jaxattn.ops.rms_norm_quant import rms_norm_quant


class DeepseekV4DecoderLayer(nnx.Module):
    """`streams -> hc(norm, attention) -> hc(norm, experts) -> streams`, all layers of V4 have experts.

    Children: `attn_hc`, `attn_norm [M]`, `attn`, `ffn_hc`, `ffn_norm [M]`, `ffn`.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        moe: MoEConfig,
        *,
        ratio: int,
        table: Float[Array, "P 64"] | nnx.Variable,
        streams: int = 4,
        hc_iters: int = 20,
        hc_eps: float = 1e-6,
        eps: float = 1e-6,
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs,
        **attention: Any,
    ):
        """Draw the parameters.

        Args:
            features: M.
            heads: H.
            moe: of the experts; its `features` must be M.
            ratio: of the attention.
            table: of `rope_table`.
            streams: C.
            hc_iters: Sinkhorn steps of the hyper-connections.
            hc_eps: of their gates and sums.
            eps: of the norms.
            dtype: of activations.
            rngs: source of the parameters.
            **attention: further sizes of `DeepseekV4Attention`; its `linear_format` is that of shared experts as well.

        Raises:
            ValueError: the experts have other features.
        """
        if moe.features != features:
            raise ValueError(f"DeepseekV4DecoderLayer: the experts must have features={features}, got {moe.features}")
        self.attn = DeepseekV4Attention(
            features, heads, ratio=ratio, table=table, eps=eps, dtype=dtype, rngs=rngs, **attention
        )
        shared, stored = None, attention.get("linear_format", "none")
        if moe.shared_width:
            how: dict[str, Any] = {"format": None if stored == "none" else stored, "ue8m0": stored != "none"}
            shared = GatedMLP(features, moe.shared_width, limit=moe.limit, dtype=dtype, rngs=rngs, **how)
        self.ffn = FusedMoE(replace(moe, shared_width=0), shared=shared, dtype=dtype, rngs=rngs)
        hyper: dict[str, Any] = {"iters": hc_iters, "eps": hc_eps, "rms_eps": eps, "rngs": rngs}
        self.attn_hc, self.ffn_hc = (HyperConnections(features, streams, **hyper) for _ in range(2))
        self.attn_norm, self.ffn_norm = (nnx.Param(jnp.ones(features, dtype)) for _ in range(2))
        self.eps = eps

    def __call__(
        self,
        streams: Float[Array, "N C M"],
        cache: V4Cache,
        batch: V4Batch,
        tokens: Int32[Array, " N"] | None = None,
    ) -> Float[Array, "N C M"]:
        """The streams after attention and experts; `tokens` are the token ids, for hash-routed layers."""
        x, post, comb = self.attn_hc.pre(streams)
        y = self.attn(rms_norm_quant(x, self.attn_norm[...], eps=self.eps), cache, batch)
        # the update of the streams and the next gates are one pass over memory
        x, post, comb, streams = self.ffn_hc.pre(streams, y=y, post=post, comb=comb)
        return self.ffn_hc.post(streams, self._experts(x, tokens), post, comb)

    def _experts(self, x, tokens):
        x = rms_norm_quant(x, self.ffn_norm[...], eps=self.eps)
        return self.ffn(x) if tokens is None else self.ffn(x, tokens)


class MTPBlock(nnx.Module):
    """One step of multi-token prediction: join embedding and streams, one window-only layer, the head's vector.

    `__call__` returns the streams, which feed the next step, and the normed vector for the language model's head.
    Children: `enorm`, `hnorm`, `e_proj`, `h_proj`, `layer`, `head`, `norm`.
    """

    def __init__(
        self,
        features: int,
        layer: DeepseekV4DecoderLayer,
        *,
        streams: int = 4,
        hc_eps: float = 1e-6,
        eps: float = 1e-6,
        dtype: DTypeLike = jnp.bfloat16,
        linear_format: LinearFormat = "none",
        rngs: nnx.Rngs,
    ):
        """Draw the parameters.

        Args:
            features: M.
            layer: of ratio 1.
            streams: C.
            hc_eps: of the head's gates.
            eps: of the norms.
            dtype: of activations.
            linear_format: of `e_proj` and `h_proj`, as of `DeepseekV4Attention`.
            rngs: source of the parameters.

        Raises:
            ValueError: the layer compresses, or the format.
        """
        _checks.check_count("MTPBlock", features=features, streams=streams)
        if layer.attn.ratio != 1:
            raise ValueError(f"MTPBlock: the layer must be window-only (ratio 1), got ratio {layer.attn.ratio}")
        check_format("MTPBlock", linear_format=linear_format)
        square: dict[str, Any] = {"format": linear_format, "dtype": dtype, "rngs": rngs}

        self.enorm, self.hnorm, self.norm = (nnx.Param(jnp.ones(features, dtype)) for _ in range(3))
        self.e_proj, self.h_proj = (linear(features, features, **square) for _ in range(2))
        self.layer, self.head = layer, HyperHead(features, streams, eps=hc_eps, rms_eps=eps, rngs=rngs)
        self.eps = eps

    def __call__(
        self,
        embedding: Float[Array, "N M"],
        hidden: Float[Array, "N C M"],
        cache: V4Cache,
        batch: V4Batch,
        tokens: Int32[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "N C M"], Float[Array, "N M"]]:
        """Streams for the next step and the vector for the head.

        Args:
            embedding: of the tokens to predict from; not used at position 0.
            hidden: streams of the target model before its head, or those of the step before.
            cache: of this block's layer.
            batch: positions of the tokens.
            tokens: token ids, if the layer is hash-routed.
        """
        streams = self.layer(self._joined(embedding, hidden, batch.positions), cache, batch, tokens)
        return streams, rms_norm_quant(self.head(streams), self.norm[...], eps=self.eps)

    def _joined(self, embedding, hidden, positions) -> Float[Array, "N C M"]:
        """The layer's streams: `jaxattn.mtp`, with quantized projections its parts."""
        norms = self.enorm[...], self.hnorm[...]
        if not isinstance(self.e_proj, QuantizedLinear):
            kernels = self.e_proj.kernel[...], self.h_proj.kernel[...]
            return mtp(embedding, hidden, positions, *norms, *kernels, eps=self.eps)
        N, C, M = hidden.shape
        embedding = jnp.where((positions == 0)[:, None], 0, embedding)
        e = project(self.e_proj, rms_norm_quant(embedding, norms[0], eps=self.eps))
        h = project(self.h_proj, rms_norm_quant(hidden.reshape(N * C, M), norms[1], eps=self.eps))
        return h.reshape(N, C, M) + e[:, None]
