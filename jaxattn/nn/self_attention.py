"""Self-attention of whole sequences, without a cache: projections around one call of the op."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxattn import _checks
from jaxattn.nn.attention import Rotary
from jaxattn.nn.linear import dtype_of, make_linear
from jaxattn.ops.attention import attention

_OP = "Attention"


class Attention(nnx.Module):
    """Self-attention within each sequence of a batch or of packed tokens: project, attend, project back.

    Parameters are named as in Hugging Face checkpoints and transposed: `q_proj.kernel [M, H*D]`, `k_proj.kernel [M,
    K*D]`, `v_proj.kernel [M, K*Dv]`, `o_proj.kernel [H*Dv, M]` are `weight.T`, biases are `bias`, `sinks [H]` is
    `sinks`. Projections accumulate in float32 (float64 for float64), bias included, and round once to the parameters'
    dtype.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        use_bias: bool = False,
        sinks: bool = False,
        rotary: Rotary | None = None,
        scale: float | None = None,
        causal: bool = True,
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
            value_dim: Dv, None = D.
            use_bias: give all four projections a bias.
            sinks: learn one logit per head for the softmax denominator, in float32.
            rotary: `rotary(x [N, heads, D], positions [N])` -> x rotated, same shape and dtype; applied to q and k.
            scale: softmax scale, None = D**-0.5.
            causal: hide later tokens.
            window: visible positions, the token itself included; None = all.
            softcap: bound of the scores.
            dtype: of parameters, inputs and outputs: bfloat16, float16, float32 or float64.
            precision: of the projections' products; None = float32 in full, unless `jax.default_matmul_precision` is
                set.
            implementation: handed to `jaxattn.attention`.
            rngs: source of the parameters.

        Raises:
            TypeError: dtype; ValueError: sizes or options that can never be right.
        """
        value_dim = head_dim if value_dim is None else value_dim
        _checks.check_count(
            _OP, features=features, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim
        )
        _checks.check_positive(_OP, scale=scale, softcap=softcap)
        if window is not None:
            _checks.check_count(_OP, window=window)
        if heads % kv_heads:
            raise ValueError(f"{_OP}: heads must be a multiple of kv_heads, got heads={heads} and kv_heads={kv_heads}")
        _checks.check_dtype(_OP, "dtype", jax.ShapeDtypeStruct((), dtype), _checks.FLOATS)

        def linear(inputs, outputs):
            return make_linear(inputs, outputs, use_bias=use_bias, dtype=dtype, precision=precision, rngs=rngs)

        self.q_proj = linear(features, heads * head_dim)
        self.k_proj = linear(features, kv_heads * head_dim)
        self.v_proj = linear(features, kv_heads * value_dim)
        self.o_proj = linear(heads * value_dim, features)
        self.sinks = nnx.Param(jnp.zeros(heads, jnp.float32)) if sinks else nnx.data(None)
        self.features, self.heads, self.kv_heads = features, heads, kv_heads
        self.rotary, self.causal = rotary, causal
        self.scale, self.window, self.softcap = scale, window, softcap
        self.implementation = implementation

    def __call__(
        self,
        x: Float[Array, "B T M"] | Float[Array, "N M"],
        query_start: Int32[Array, " B+1"] | None = None,
    ) -> Float[Array, "B T M"] | Float[Array, "N M"]:
        """Attention output of every token.

        Args:
            x: a batch [B T M], or packed sequences [N M].
            query_start: where each packed sequence starts, and the end of the last one; rows behind it are padding,
                whose output is `o_proj` of zeros. Absent for a batch.

        Raises:
            TypeError: x is not in the parameters' dtype; ValueError: its shape, or what `rotary` returned;
            NotImplementedError: as `jaxattn.attention`.
        """
        dtype = dtype_of(self.q_proj)
        rank = 3 if query_start is None else 2
        if not _checks.is_array(x) or x.ndim != rank or x.shape[-1] != self.features:
            given = f"shape {tuple(x.shape)}" if _checks.is_array(x) else type(x).__name__
            wanted = "a batch [B T M]" if rank == 3 else "packed tokens [N M]"
            raise ValueError(f"{_OP}: x must be {wanted} with M={self.features}, got {given}")
        _checks.check_dtype(_OP, "x", x, (dtype,), "cast it to the layer's dtype")

        def project(linear, heads):
            return linear(x).astype(dtype).reshape(*x.shape[:-1], heads, -1)

        q, k = project(self.q_proj, self.heads), project(self.k_proj, self.kv_heads)
        v = project(self.v_proj, self.kv_heads)
        if self.rotary is not None:
            positions = _positions(x, query_start)
            q, k = (self._rotate(name, y, positions) for name, y in (("q", q), ("k", k)))
        o = attention(
            q,
            k,
            v,
            query_start,
            sinks=None if self.sinks is None else self.sinks[...],
            scale=self.scale,
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            implementation=self.implementation,
        )
        assert not isinstance(o, tuple)
        return self.o_proj(o.reshape(*x.shape[:-1], -1)).astype(dtype)

    def _rotate(self, name, y, positions):
        assert self.rotary is not None
        rotated = self.rotary(y.reshape(-1, *y.shape[-2:]), positions)
        packed = positions.size, *y.shape[-2:]
        if rotated.shape != packed or rotated.dtype != y.dtype:
            raise ValueError(
                f"{_OP}: rotary must keep the shape and dtype of {name}, {y.dtype.name}{list(packed)}, got "
                f"{rotated.dtype.name}{list(rotated.shape)}"
            )
        return rotated.reshape(y.shape)


def _positions(x, query_start):
    """Position of each row within its sequence [N]."""
    if query_start is None:
        return jnp.tile(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[0])
    row = jnp.arange(x.shape[0], dtype=jnp.int32)
    b = jnp.searchsorted(query_start[1:], row, side="right", method="compare_all")
    return row - query_start[jnp.minimum(b, query_start.size - 2)]
