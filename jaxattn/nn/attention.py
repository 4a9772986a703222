"""Attention layers: projections, cache update and one call of the op."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxattn import _checks
from jaxattn.nn.cache import PagedBatch, PagedKVCache
from jaxattn.nn.linear import dtype_of, make_linear
from jaxattn.nn.turboquant_cache import TurboQuantKVCache

type Rotary = Callable[[Float[Array, "N heads D"], Int32[Array, " N"]], Float[Array, "N heads D"]]


class PagedAttention(nnx.Module):
    """Causal self-attention of packed requests over a paged cache: project, write the cache, attend, project back.

    Parameters are named as in Hugging Face checkpoints and transposed: `q_proj.kernel [M, H*D]`, `k_proj.kernel` and
    `v_proj.kernel [M, K*D]`, `o_proj.kernel [H*D, M]` are `weight.T`, biases are `bias`, `sinks [H]` is `sinks`.
    Projections accumulate in float32 (float64 for float64), bias included, and round once to the parameters' dtype.

    Example:
        y = nnx.jit(PagedAttention.__call__, donate_argnums=(0, 2))(attention, x, cache, batch)

    updates the cache in place. (The layer is donated because `nnx.jit` hands all of its arguments' state back, and
    would otherwise copy the parameters.)
    """

    def __init__(
        self,
        features: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        use_bias: bool = False,
        sinks: bool = False,
        rotary: Rotary | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        dtype: DTypeLike = jnp.bfloat16,
        precision: Any = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Draw the parameters (sinks and biases start at zero).

        Args:
            features: M.
            heads: H, a multiple of K.
            kv_heads: K.
            head_dim: D.
            use_bias: give all four projections a bias, as gpt-oss has.
            sinks: learn one logit per head for the softmax denominator, in float32.
            rotary: `rotary(x [N, heads, D], positions [N])` -> x rotated, same shape and dtype; applied to q and k.
            scale: softmax scale, None = D**-0.5.
            window: visible positions, the token itself included; None = all.
            softcap: bound of the scores.
            dtype: of parameters, inputs and outputs: bfloat16, float16, float32 or float64.
            precision: of the projections' products; None = float32 in full, unless `jax.default_matmul_precision` is
                set.
            implementation: handed to `attend` of the cache.
            rngs: source of the parameters.

        Raises:
            TypeError: dtype; ValueError: sizes or options that can never be right.
        """
        op = "PagedAttention"
        _checks.check_count(op, features=features, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        _checks.check_positive(op, scale=scale, softcap=softcap)
        if window is not None:
            _checks.check_count(op, window=window)
        if heads % kv_heads:
            raise ValueError(f"{op}: heads must be a multiple of kv_heads, got heads={heads} and kv_heads={kv_heads}")
        _checks.check_dtype(op, "dtype", jax.ShapeDtypeStruct((), dtype), _checks.FLOATS)

        def linear(inputs, outputs):
            return make_linear(inputs, outputs, use_bias=use_bias, dtype=dtype, precision=precision, rngs=rngs)

        self.q_proj = linear(features, heads * head_dim)
        self.k_proj = linear(features, kv_heads * head_dim)
        self.v_proj = linear(features, kv_heads * head_dim)
        self.o_proj = linear(heads * head_dim, features)
        self.sinks = nnx.Param(jnp.zeros(heads, jnp.float32)) if sinks else nnx.data(None)
        self.features, self.heads, self.kv_heads, self.head_dim = features, heads, kv_heads, head_dim
        self.rotary = rotary
        self.scale, self.window, self.softcap = scale, window, softcap
        self.implementation = implementation

    def __call__(
        self, x: Float[Array, "N M"], cache: PagedKVCache | TurboQuantKVCache, batch: PagedBatch
    ) -> Float[Array, "N M"]:
        """Attention output of every packed token; `cache` is updated with their keys and values first.

        Rows of padding (slot -1 in `batch`) are neither read into the cache nor attended; their output is `o_proj` of
        zeros.

        Raises:
            TypeError: x, the cache or what `rotary` returned is not in the parameters' dtype;
            ValueError: x, cache and batch disagree in a size; NotImplementedError: as `jaxattn.paged_attention`.
        """
        op = "PagedAttention"
        dtype = dtype_of(self.q_proj)
        if not _checks.is_array(x) or x.ndim != 2 or x.shape[1] != self.features:
            given = f"shape {tuple(x.shape)}" if _checks.is_array(x) else type(x).__name__
            raise ValueError(f"{op}: x must be packed tokens [N M] with M={self.features}, got {given}")
        _checks.check_dtype(op, "x", x, (dtype,), "cast it to the layer's dtype")
        if cache.heads != (self.kv_heads, self.head_dim):
            raise ValueError(
                f"{op}: the cache must hold K={self.kv_heads} heads of D={self.head_dim}, got K={cache.heads[0]} and "
                f"D={cache.heads[1]}"
            )
        _checks.check_shapes(op, x=(x, "N M"), slots=(batch.slots, "N"), positions=(batch.positions, "N"))

        def project(linear, heads):
            return linear(x).astype(dtype).reshape(x.shape[0], heads, self.head_dim)

        q, k, v = (
            project(self.q_proj, self.heads),
            project(self.k_proj, self.kv_heads),
            project(self.v_proj, self.kv_heads),
        )
        if self.rotary is not None:
            q, k = (self._rotate(name, y, batch.positions) for name, y in (("q", q), ("k", k)))
        cache.update(k, v, batch.slots)
        o = cache.attend(
            q,
            k,
            v,
            batch,
            sinks=None if self.sinks is None else self.sinks[...],
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            implementation=self.implementation,
        )
        return self.o_proj(o.reshape(x.shape[0], self.heads * self.head_dim)).astype(dtype)

    def _rotate(self, name, y, positions):
        assert self.rotary is not None
        rotated = self.rotary(y, positions)
        if rotated.shape != y.shape or rotated.dtype != y.dtype:
            raise ValueError(
                f"PagedAttention: rotary must keep the shape and dtype of {name}, {y.dtype.name}{list(y.shape)}, got "
                f"{rotated.dtype.name}{list(rotated.shape)}"
            )
        return rotated
