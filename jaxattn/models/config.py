"""Reading of Hugging Face configurations: required fields, options that change the mathematics, rotation, formats."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn.ops.rope import rope_table
from jaxattn.ops.softmax_scale import softmax_scale

_REQUIRED: Any = object()
_ROPE = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
_ROPE += ("mscale", "mscale_all_dim", "truncate", "partial_rotary_factor", "finetuned", "attention_factor")
_QUANTIZATION = ("quant_method", "fmt", "scale_fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert")
_QUANTIZATION += ("dequantize",)


class Fields:
    """The fields of a configuration, checked as they are read; absent and null are the same."""

    def __init__(self, op: str, config: Mapping[str, Any]):
        """Over a `config.json`; `op` stands in messages."""
        self.op, self.config = op, config

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value, or the default.

        Raises:
            ValueError: there is neither.
        """
        value = self.config.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ValueError(f"{self.op}: the configuration must have {name!r}; it has none")
            return default
        return value

    def count(self, name: str, default: Any = _REQUIRED) -> Any:
        """A positive integer, or the default.

        Raises:
            ValueError: it is none.
        """
        value = self.get(name, default)
        if value is not default and (type(value) is not int or value < 1):
            raise ValueError(f"{self.op}: {name!r} must be a positive integer, got {value!r}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """A number as a float, or the default.

        Raises:
            ValueError: it is none.
        """
        value = self.get(name, default)
        if value is default:
            return value
        if type(value) not in (int, float):
            raise ValueError(f"{self.op}: {name!r} must be a number, got {value!r}")
        return float(value)

    def only(self, name: str, *allowed: Any) -> None:
        """Raise `ValueError` unless the field is absent or has one of these values."""
        value = self.get(name, None)
        if value is not None and value not in allowed:
            raise ValueError(f"{self.op}: {name!r} must be {' or '.join(map(repr, allowed))}, got {value!r}")

    def part(self, name: str, known: tuple[str, ...]) -> "Fields | None":
        """The fields of a nested table, or None.

        Raises:
            ValueError: it is no table, or has a field that is not known: such fields always matter.
        """
        value = self.get(name, None)
        if not value:
            return None
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.op}: {name!r} must be a table, got {value!r}")
        odd = sorted(set(value) - set(known))
        if odd:
            raise ValueError(f"{self.op}: {name!r} knows {', '.join(known)}, got {', '.join(odd)} as well")
        return Fields(f"{self.op}: {name}", value)

    def stops(self) -> tuple[int, ...]:
        """`eos_token_id`, one number, several or none."""
        value = self.get("eos_token_id", ())
        return (value,) if isinstance(value, int) else tuple(value)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding of a model; YaRN if `factor` is not 1."""

    dim: int
    length: int
    theta: float = 10000.0
    factor: float = 1.0
    original: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float | None = None
    """None = cos and sin carry YaRN's whole magnitude, and the softmax scale none of it."""
    truncate: bool = True

    @classmethod
    def from_hf(cls, fields: Fields, dim: int) -> "Rope":
        """Of `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta`.

        Raises:
            ValueError: a type other than default and yarn, or an option that is not known.
        """
        length = fields.count("max_position_embeddings")
        name = "rope_parameters" if fields.get("rope_parameters", None) else "rope_scaling"
        own = fields.part(name, _ROPE)
        theta = fields.number("rope_theta", 10000.0)
        if own is None:
            return cls(dim=dim, length=length, theta=theta)
        theta = own.number("rope_theta", theta)
        kind = own.get("rope_type", own.get("type", "default"))
        if kind not in ("default", "yarn"):
            raise ValueError(f"{own.op}: the type must be 'default' or 'yarn', got {kind!r}")
        own.only("partial_rotary_factor", 1.0)
        if own.get("attention_factor", None) is not None:
            raise ValueError(f"{own.op}: 'attention_factor' is not supported; leave it out")
        if kind == "default":
            return cls(dim=dim, length=length, theta=theta)
        if bool(own.get("mscale", 0)) != bool(own.get("mscale_all_dim", 0)):
            raise ValueError(f"{own.op}: 'mscale' and 'mscale_all_dim' must both be given or both be absent")
        return cls(
            dim=dim,
            length=length,
            theta=theta,
            factor=own.number("factor"),
            original=own.count("original_max_position_embeddings", length),
            beta_fast=own.number("beta_fast", 32.0),
            beta_slow=own.number("beta_slow", 1.0),
            mscale=own.number("mscale", 1.0) or 1.0,
            mscale_all_dim=own.number("mscale_all_dim", None) or None,
            truncate=bool(own.get("truncate", True)),
        )

    def table(self, dtype: DTypeLike = jnp.bfloat16) -> Float[Array, "length dim"]:
        """Cosines and sines of every position for a model of `dtype`: float64 for float64, else float32."""
        return rope_table(
            self.dim,
            self.length,
            base=self.theta,
            factor=self.factor,
            original=self.original,
            mscale=self.mscale,
            mscale_all_dim=self.mscale_all_dim,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            truncate=self.truncate,
            dtype=jnp.promote_types(dtype, jnp.float32),
        )

    def softmax_scale(self, head_dim: int) -> float:
        """`head_dim^-1/2`, sharpened by YaRN if the configuration gives `mscale_all_dim`."""
        return softmax_scale(head_dim, yarn_factor=self.factor, mscale_all_dim=self.mscale_all_dim or 0.0)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How a checkpoint stores its large weights."""

    method: Literal["none", "fp8_block", "mxfp4"] = "none"
    ue8m0: bool = False
    """fp8_block: scales, of activations too, are powers of two."""
    keep: tuple[str, ...] = ()
    """Names, or parts of names, of modules that are stored in the model's dtype."""

    @classmethod
    def from_hf(cls, fields: Fields) -> "Quantization":
        """Of `quantization_config`.

        Raises:
            ValueError: a method, block size or scheme that no module here has.
        """
        own = fields.part("quantization_config", _QUANTIZATION)
        if own is None:
            return cls()
        own.only("quant_method", "fp8", "mxfp4")
        keep = tuple(own.get("modules_to_not_convert", ()))
        if own.get("quant_method") == "mxfp4":
            return cls(method="mxfp4", keep=keep)
        own.only("fmt", "e4m3")
        own.only("scale_fmt", "ue8m0", "float")
        own.only("activation_scheme", "dynamic")
        own.only("weight_block_size", [128, 128], (128, 128))
        return cls(method="fp8_block", ue8m0=own.get("scale_fmt", "") == "ue8m0", keep=keep)
