"""The mixture-of-experts layer: gate, router, routed and shared experts, scaling, load statistics."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _products
from jaxattn.nn._moe_config import MoEConfig
from jaxattn.ops import _expert_formats as formats
from jaxattn.ops import routed_scaling as scaling
from jaxattn.ops.eplb import expert_load
from jaxattn.ops.experts import experts
from jaxattn.ops.gated_activation import gated_activation
from jaxattn.ops.router import gate_logits, router

_OP = "FusedMoE"


class ExpertLoad(nnx.Variable):
    """Pairs that each expert got since the counts were last set to zero, int32 [E]."""


class Frozen(nnx.Variable):
    """Codes, scales and tables: state that no optimizer touches."""


class FusedMoE(nnx.Module):
    """`o = shared(x) + f * sum of routed experts`, configured by a `MoEConfig` or a Hugging Face configuration.

    Parameters are stacked over experts and otherwise as in checkpoints: `gate [E, M]` and `gate_bias [E]`,
    `correction_bias [E]` (float32), `table [V, A]` (tid2eid), `w13 [E, 2F, M]` (gate rows, then up rows; gpt-oss in
    turn), `w2 [E, M, F]`, what their format adds (`w13_scale` and so on, see `jaxattn.experts`), biases, and of shared
    experts `shared_w13 [2Fs, M]`, `shared_w2 [M, Fs]`, or a module of their own, `shared_experts`. Decode and prefill
    take their own path inside `jaxattn.experts`, chosen from the number of tokens alone.

    Example:
        layer = FusedMoE.from_hf(json.load(open("config.json")), layer=3, rngs=nnx.Rngs(0))
        y = layer(x)
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        track_load: bool = False,
        shared: nnx.Module | None = None,
        gate_dtype: DTypeLike | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Draw the parameters (biases start at zero, a table spreads token ids evenly).

        Args:
            config: sizes and mechanisms.
            dtype: of activations and unquantized parameters.
            track_load: count the pairs of each expert in `load`.
            shared: the shared experts as a module, `[T M]` to `[T M]`, such as `GatedMLP`; instead of `shared_width`.
            gate_dtype: of the gate's matrix, float32 as some checkpoints have it; None = that of activations.
            implementation: handed to `jaxattn.experts`.
            rngs: source of the parameters.

        Raises:
            TypeError, ValueError: as the ops for sizes and options that can never be right.
        """
        c = config
        sizes = {"features": c.features, "experts": c.experts, "width": c.width, "top_k": c.top_k}
        _checks.check_count(_OP, **sizes)
        name = _checks.check_dtype(_OP, "dtype", jax.ShapeDtypeStruct((), dtype), _checks.FLOATS)
        if shared is not None and c.shared_width:
            raise ValueError(f"{_OP}: shared experts are a module or a width, got both; set shared_width=0")
        has_shared = bool(c.shared_width) or shared is not None
        place: scaling.Placement = c.scaling_on or scaling.default_placement(dtype, has_shared)
        scaling.check(_OP, c.scaling, place)
        E, M, F = c.experts, c.features, c.width

        def draw(*shape):
            return jax.random.normal(rngs.params(), shape, jnp.float32) * shape[-1] ** -0.5

        self.gate = nnx.Param(draw(E, M).astype(gate_dtype or dtype))
        self.gate_bias = nnx.Param(jnp.zeros(E, dtype)) if c.gate_bias else nnx.data(None)
        self.correction_bias = Frozen(jnp.zeros(E, jnp.float32)) if c.correction_bias else nnx.data(None)
        table = None if c.vocab is None else (jnp.arange(c.vocab)[:, None] * c.top_k + jnp.arange(c.top_k)) % E
        self.table = nnx.data(None) if table is None else Frozen(table.astype(jnp.int32))
        kind = nnx.Param if c.format == "none" else Frozen
        self.w13: Any
        self.w2: Any
        for part, N, K in (("w13", 2 * F, M), ("w2", M, F)):
            given = formats.quantize_weight(draw(E, N, K), c.format, name)
            for suffix in ("w", "scale", "zeros", "scale_2"):
                value = kind(given[suffix]) if suffix in given else nnx.data(None)
                setattr(self, part if suffix == "w" else f"{part}_{suffix}", value)
            setattr(self, f"{part}_bias", nnx.Param(jnp.zeros((E, N), dtype)) if c.expert_bias else nnx.data(None))
        wide = c.shared_width
        self.shared_w13 = nnx.Param(draw(2 * wide, M).astype(dtype)) if wide else nnx.data(None)
        self.shared_w2 = nnx.Param(draw(M, wide).astype(dtype)) if wide else nnx.data(None)
        self.shared_experts = nnx.data(None) if shared is None else shared
        self.load = ExpertLoad(jnp.zeros(E, jnp.int32)) if track_load else nnx.data(None)
        self.placement: scaling.Placement = place
        self.dtype = None if gate_dtype is None else name
        self.config, self.implementation = c, implementation

    @classmethod
    def from_hf(
        cls, config: Any, layer: int = 0, *, changes: dict[str, Any] | None = None, **options: Any
    ) -> "FusedMoE":
        """The mixture of one layer of a Hugging Face configuration (V2, V3, V4, gpt-oss, Qwen3-MoE, Mixtral).

        Args:
            config: a mapping or a `PretrainedConfig`.
            layer: its number.
            changes: fields of `MoEConfig` to set otherwise.
            **options: of the constructor.

        Raises:
            ValueError: the model type is unknown or the layer is dense.
        """
        return cls(MoEConfig.from_hf(config, layer, **(changes or {})), **options)

    def route(
        self, x: Float[Array, "T M"], tokens: Int32[Array, " T"] | None = None
    ) -> tuple[Float[Array, "T A"], Int32[Array, "T A"]]:
        """Weights and ids of every token; `tokens` are the token ids, which hash routing needs.

        Raises:
            ValueError: token ids are missing or not wanted.
        """
        c = self.config
        if (self.table is None) != (tokens is None):
            needs = "needs the token ids; pass tokens" if tokens is None else "knows no token ids; leave tokens out"
            raise ValueError(f"{_OP}: this layer {needs}")
        return router(
            gate_logits(x, self.gate[...], None if self.gate_bias is None else self.gate_bias[...]),
            top_k=c.top_k,
            scoring=c.scoring,
            renormalize=c.renormalize,
            scaling=c.scaling if self.placement == "weights" else 1.0,
            bias=None if self.correction_bias is None else self.correction_bias[...].astype(_logits_dtype(x)),
            num_groups=c.num_groups,
            kept_groups=c.kept_groups,
            tokens=tokens,
            table=None if self.table is None else self.table[...],
        )

    def __call__(
        self, x: Float[Array, "T M"], tokens: Int32[Array, " T"] | None = None, *, valid: Int32[Array, ""] | None = None
    ) -> Float[Array, "T M"]:
        """The mixture of every token.

        Args:
            x: in the layer's dtype.
            tokens: token ids, for layers that route by them.
            valid: tokens from here on are padding: they reach no routed expert and do not count as load.

        Raises:
            TypeError: dtype of x; ValueError: its shape, or token ids; NotImplementedError: as `jaxattn.experts`.
        """
        c, dtype = self.config, self.dtype or self.gate.dtype
        if not _checks.is_array(x) or x.ndim != 2 or x.shape[1] != c.features:
            given = f"shape {tuple(x.shape)}" if _checks.is_array(x) else type(x).__name__
            raise ValueError(f"{_OP}: x must be tokens [T M] with M={c.features}, got {given}")
        _checks.check_dtype(_OP, "x", x, (jnp.dtype(dtype).name,), "cast it to the layer's dtype")
        weights, ids = self.route(x, tokens)
        if valid is not None:
            ids = jnp.where(jnp.arange(x.shape[0])[:, None] < valid, ids, -1)
        if self.load is not None:
            self.load[...] += expert_load(ids, c.experts)
        parts = ("scale", "zeros", "scale_2", "bias")
        stored = {f"{w}_{part}": getattr(self, f"{w}_{part}") for w in ("w13", "w2") for part in parts}
        extra: dict[str, Any] = {name: None if value is None else value[...] for name, value in stored.items()}
        routed = experts(
            x,
            self.w13[...],
            self.w2[...],
            weights,
            ids,
            format=c.format,
            act_group=c.act_group,
            ue8m0=c.ue8m0,
            activation=c.activation,
            limit=c.limit,
            weight_on=c.weight_on,
            implementation=self.implementation,
            **extra,
        )
        shared = self._shared(x) if self.shared_experts is None else self.shared_experts(x)
        return scaling.routed_scaling(routed, shared, factor=c.scaling, placement=self.placement)

    def _shared(self, x):
        """The shared experts, if any: one dense SwiGLU with the clamp of the routed ones."""
        if self.shared_w13 is None or self.shared_w2 is None:
            return None
        h = _products.einsum("tm,fm->tf", x, self.shared_w13[...]).astype(x.dtype)
        a = gated_activation(h, limit=self.config.limit)
        return _products.einsum("tf,mf->tm", a, self.shared_w2[...]).astype(x.dtype)


def _logits_dtype(x):
    return jnp.promote_types(x.dtype, jnp.float32)
