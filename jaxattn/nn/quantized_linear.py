"""Linear layers with quantized weights, and the conversion of a model's linear layers."""

import dataclasses
import fnmatch
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxattn import _checks
from jaxattn._mechanism import _nearest
from jaxattn.nn._linear_formats import FORMATS, WIDTHS, WITH_GROUPS, Options, Tensor
from jaxattn.quant import tiles

_OP = "QuantizedLinear"


class QuantizedParam(nnx.Variable):
    """A stored tensor of a quantized weight; gradients and optimizers that ask for `nnx.Param` leave it alone."""


class QuantizedLinear(nnx.Module):
    """`y = x @ W.T + bias` with the weight W [F, M] stored, and multiplied, in one of the formats of checkpoints.

    The layer's attributes are the checkpoint's tensors, under their names and with their bytes, see
    docs/quantized_linear.md. Activations stay as they are or are quantized on the way, as the format says.

    Example:
        layer = QuantizedLinear(4096, 1024, format="awq", group=128, dtype=jnp.float16)
        layer.load({"qweight": ..., "qzeros": ..., "scales": ...})
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        format: str,
        group: int = 128,
        bits: int = 4,
        ue8m0: bool = False,
        use_bias: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        implementation: str | None = None,
    ):
        """A layer whose weight is zero, to be filled by `load`; `from_linear` makes one from a `nnx.Linear`.

        Args:
            in_features: M.
            out_features: F.
            format: one of `FORMATS`.
            group: input features that share a scale, for gptq, gptq_v2, awq, marlin and wna16.
            bits: width of codes, for gptq (2, 3, 4, 8), marlin and wna16 (4, 8).
            ue8m0: fp8_block: scales are powers of two.
            use_bias: add one, in `dtype`.
            dtype: of inputs and outputs, and of the scales of gptq, awq, marlin and wna16: bfloat16, float16 or
                float32.
            implementation: handed to the ops.

        Raises:
            TypeError: dtype; ValueError: an unknown format, or sizes that the format cannot store.
        """
        _checks.check_count(_OP, in_features=in_features, out_features=out_features, group=group, bits=bits)
        _checks.check_dtype(_OP, "dtype", jax.ShapeDtypeStruct((), dtype), _checks.FLOATS[:3])
        if format not in FORMATS:
            raise ValueError(
                f"{_OP}: format must be one of {', '.join(FORMATS)}, got {format!r}{_nearest(format, FORMATS)}"
            )
        self.format = format
        self.options = Options(
            inputs=in_features,
            outputs=out_features,
            dtype=jnp.dtype(dtype).name,
            group=group,
            bits=bits,
            ue8m0=ue8m0,
            implementation=implementation,
        )
        check_sizes(_OP, format, self.options)
        self.tile_bits: int | None = None
        for name, tensor in self.tensors.items():
            empty = jnp.zeros(tensor.shape, tensor.dtype) if tensor.required else None
            setattr(self, name, nnx.data(None) if empty is None else QuantizedParam(empty))
        self.bias = nnx.Param(jnp.zeros(out_features, dtype)) if use_bias else nnx.data(None)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What the format stores: name -> shape, dtype, and whether it must be there."""
        return FORMATS[self.format].tensors(self.options)

    def load(self, tensors: Mapping[str, Any], prefix: str = "") -> None:
        """Take the tensors of a checkpoint as they are.

        Args:
            tensors: name -> array. Scales in another float type are cast to the layer's; vectors of one number may
                stand for numbers, [F] for [F, 1], and a weight of bitsandbytes may be a column.
            prefix: of this layer's names, with its dot; other names are not looked at.

        Raises:
            KeyError: a tensor is missing, or one has a name that the format does not know;
            ValueError: a shape, or a codebook or size of blocks of bitsandbytes that the format does not have;
            TypeError: a dtype.
        """
        given = {n[len(prefix) :]: x for n, x in tensors.items() if n.startswith(prefix)}
        given = FORMATS[self.format].read(given)
        known = self.tensors
        takes = [*known, *([] if self.bias is None else ["bias"])]
        missing = [n for n, t in known.items() if t.required and n not in given]
        missing += ["bias"] if self.bias is not None and "bias" not in given else []
        if missing:
            raise KeyError(
                f"{_OP}: format {self.format!r} needs {', '.join(takes)}, but {', '.join(missing)} of prefix "
                f"{prefix!r} is missing; there are {', '.join(sorted(given)) or 'none'}"
            )
        unknown = sorted(set(given) - set(takes))
        if unknown:
            hint = "; make the layer with use_bias=True" if unknown == ["bias"] else ""
            raise KeyError(
                f"{_OP}: format {self.format!r} takes {', '.join(takes)}, got {', '.join(unknown)} as well{hint}"
            )
        found = {name: _fitted(self.format, name, t, given[name]) for name, t in known.items() if name in given}
        if "g_idx" in found and _consecutive(found["g_idx"], self.options.group):
            del found["g_idx"]  # kernels take it as an act-order
        found |= FORMATS[self.format].derive(found)
        self._store(found)
        self.tile_bits = None
        if self.bias is not None:
            bias = Tensor((self.options.outputs,), self.options.dtype)
            self.bias[...] = _fitted(self.format, "bias", bias, given["bias"])

    @classmethod
    def from_linear(cls, linear: nnx.Linear, *, format: str, dtype: DTypeLike | None = None, **options: Any):
        """The layer of a `nnx.Linear`, its kernel rounded to nearest; `jaxattn.quant.calibrate` has smaller errors.

        Args:
            linear: kernel [M, F].
            format: as for the layer.
            dtype: of inputs and outputs; None = that of the kernel.
            **options: group, bits, ue8m0 and implementation of the layer.

        Raises:
            TypeError, ValueError: as the layer; ValueError: the kernel is not finite.
        """
        kernel = jnp.asarray(linear.kernel[...])
        layer = cls(
            *kernel.shape,
            format=format,
            use_bias=linear.bias is not None,
            dtype=kernel.dtype if dtype is None else dtype,
            **options,
        )
        if _checks.is_concrete(kernel) and not bool(jnp.isfinite(kernel).all()):
            raise ValueError(f"{_OP}: the kernel holds NaN or infinite numbers, which no code stands for")
        made = FORMATS[format].quantize(kernel.astype(layer.options.dtype).T, layer.options)
        layer.load(made | ({} if linear.bias is None else {"bias": linear.bias[...]}))
        return layer

    def pack_tiles(self) -> None:
        """Put the weight into the layout that the kernel of `weight_only_matmul` loads, once, in place.

        A checkpoint's tensors are packed anew in every call, which takes longer than a product with few tokens.
        Afterwards the attributes hold tiles; `load` takes a checkpoint's tensors as before. Numbers stay what they are,
        but for float32 scales of blocks (nf4, fp4), see `jaxattn.quant.tiles`.

        Raises:
            ValueError: the format quantizes activations, or the sizes or the dtype have no tiles.
        """
        packs = FORMATS[self.format].packs
        if packs is None:
            raise ValueError(
                f"{_OP}: format {self.format!r} quantizes activations; its kernels load a checkpoint's tensors as they "
                "are, so leave them"
            )
        if self.tile_bits is not None:
            return
        format, names = packs
        options, stored = self.options, self._arrays()
        given = {argument: stored[name] for argument, name in names.items()}
        try:
            made = tiles.pack(**given, format=format, M=options.inputs, dtype=options.dtype, bits=options.bits)
        except ValueError as e:
            raise ValueError(f"{_OP}: {e}") from e
        self._store({name: made[argument] for argument, name in names.items() if argument in made})
        self.tile_bits = made["bits"]

    def _arrays(self) -> dict[str, Array | None]:
        """The tensors that are there, None for the others."""
        stored = {name: getattr(self, name) for name in self.tensors}
        return {name: None if v is None else v[...] for name, v in stored.items()}

    def _store(self, arrays: Mapping[str, Array]) -> None:
        for name in self.tensors:
            setattr(self, name, QuantizedParam(arrays[name]) if name in arrays else nnx.data(None))

    @property
    def _layout(self) -> Options:
        """The options that the stored arrays answer to."""
        tiled = self.tile_bits is not None
        return dataclasses.replace(self.options, bits=self.tile_bits, tiled=True) if tiled else self.options

    def matrix(self, dtype: DTypeLike | None = None) -> Float[Array, "M F"]:
        """W transposed, as numbers: what stored codes stand for, input features first.

        Args:
            dtype: of the result; None = the layer's.
        """
        wanted = self.options.dtype if dtype is None else jnp.dtype(dtype).name
        return FORMATS[self.format].matrix(self._arrays(), self._layout, wanted)

    def __call__(self, x: Float[Array, "*B M"]) -> Float[Array, "*B F"]:
        """The product, in the layer's dtype.

        Raises:
            TypeError: x is not in the layer's dtype; ValueError: its last dimension is not M;
            NotImplementedError: as the ops.
        """
        options = self.options
        if not _checks.is_array(x) or x.ndim < 1 or x.shape[-1] != options.inputs:
            given = f"shape {tuple(x.shape)}" if _checks.is_array(x) else type(x).__name__
            raise ValueError(f"{_OP}: x must have {options.inputs} numbers along its last axis, got {given}")
        _checks.check_dtype(_OP, "x", x, (options.dtype,), "cast it to the layer's dtype")
        rows = x.reshape(math.prod(x.shape[:-1]), options.inputs)
        y = FORMATS[self.format].apply(rows, self._arrays(), self._layout)
        if self.bias is not None:
            y = y + self.bias[...]
        return y.astype(options.dtype).reshape(*x.shape[:-1], options.outputs)


def quantize_module(model: nnx.Module, rules: Mapping[str, str | Mapping[str, Any] | None]) -> dict[str, str]:
    """Replace a model's `nnx.Linear` layers by `QuantizedLinear`, in place.

    Args:
        model: any NNX module.
        rules: glob pattern of paths -> format, options of `QuantizedLinear.from_linear` with "format" among them, or
            None to leave the layers as they are. A path joins attributes and indices with dots,
            `layers.0.attention.q_proj`; `*` also matches dots. The first pattern that matches decides; layers that
            none matches stay.

    Returns:
        Path -> format of the layers that were replaced.

    Raises:
        TypeError: the model is no module; ValueError: a rule that matches no linear layer, or one that `from_linear`
        refuses, with the layer's path. The model is then unchanged.
    """
    op = "quantize_module"
    if not isinstance(model, nnx.Module):
        raise TypeError(f"{op}: model must be a nnx.Module, got {type(model).__name__}")
    if isinstance(model, nnx.Linear):
        raise TypeError(f"{op}: model is itself a linear layer; use QuantizedLinear.from_linear")
    linears = {
        ".".join(map(str, path)): module
        for path, module in sorted(nnx.iter_modules(model), key=lambda item: tuple(map(str, item[0])))
        if isinstance(module, nnx.Linear)
    }
    unused, new, formats = set(rules), {}, {}
    for path, linear in linears.items():
        matching = [pattern for pattern in rules if fnmatch.fnmatchcase(path, pattern)]
        unused -= set(matching)
        rule = rules[matching[0]] if matching else None
        if rule is None:
            continue
        options = {"format": rule} if isinstance(rule, str) else dict(rule)
        if "format" not in options:
            raise ValueError(
                f"{op}: the rule {matching[0]!r} must name a format, got {', '.join(options) or 'nothing'}"
            )
        try:
            new[id(linear)] = QuantizedLinear.from_linear(linear, **options)
        except (TypeError, ValueError) as e:
            raise type(e)(f"{op}: {path}: {e}") from e
        formats[path] = options["format"]
    if unused:
        raise ValueError(
            f"{op}: the rule {sorted(unused)[0]!r} matches no linear layer; there are {_some(list(linears))}"
        )
    _replace(model, new)
    return formats


def pack_module(model: nnx.Module) -> dict[str, str | None]:
    """Let every `QuantizedLinear` of a model whose weight alone is quantized take its kernel's layout, in place.

    Returns:
        Path -> None where the layer is packed, else one sentence that says why it stays as it was.
    """
    found: dict[str, str | None] = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, QuantizedLinear) and FORMATS[module.format].packs is not None:
            try:
                module.pack_tiles()
                found[".".join(map(str, path))] = None
            except ValueError as e:
                found[".".join(map(str, path))] = str(e)
    return dict(sorted(found.items()))


def check_sizes(op: str, format: str, options: Options) -> None:
    """Raise `ValueError` for sizes or options that a format cannot store."""
    if options.bits not in WIDTHS.get(format, (options.bits,)):
        raise ValueError(f"{op}: bits of {format} must be {' or '.join(map(str, WIDTHS[format]))}, got {options.bits}")
    kind = FORMATS[format]
    for what, size, multiple in (
        ("in_features", options.inputs, kind.multiple_inputs(options)),
        ("out_features", options.outputs, kind.multiple_outputs(options)),
    ):
        if size % multiple:
            why = f" (group={options.group})" if format in WITH_GROUPS and multiple == options.group else ""
            raise ValueError(f"{op}: {what} of format {format!r} must be a multiple of {multiple}{why}, got {size}")
    if options.inputs * options.bits % 32 and format in ("gptq", "gptq_v2"):
        raise ValueError(f"{op}: in_features of format {format!r} must fill words of 32 bits, got {options.inputs}")


def _fitted(format: str, name: str, tensor: Tensor, x: Any) -> Array:
    """A checkpoint's tensor in the layer's shape and dtype."""
    if not _checks.is_array(x):
        raise TypeError(f"{_OP}: {name} of format {format!r} must be an array, got {type(x).__name__}")
    shape = tuple(x.shape)
    same_vector = math.prod(shape) == math.prod(tensor.shape) and sum(n != 1 for n in shape) <= 1
    if shape != tensor.shape and not (same_vector and sum(n != 1 for n in tensor.shape) <= 1):
        raise ValueError(f"{_OP}: {name} of format {format!r} must have shape {tensor.shape}, got {shape}")
    given, wanted = _checks.dtype_name(x), tensor.dtype
    castable = given in _checks.FLOATS and wanted in _checks.FLOATS
    castable |= wanted == "int32" and given in ("int8", "int16", "int64", "uint8") and not tensor.shape
    if given != wanted and not castable:
        raise TypeError(f"{_OP}: {name} of format {format!r} must have dtype {wanted}, got {given}")
    return jnp.asarray(x).reshape(tensor.shape).astype(wanted)


def _consecutive(g_idx: Array, group: int) -> bool:
    """True if the groups of input features are known, and in order."""
    return _checks.is_concrete(g_idx) and bool((np.asarray(g_idx) == np.arange(g_idx.size) // group).all())


def _replace(model: nnx.Module, new: Mapping[int, nnx.Module]) -> None:
    """Put the new modules where the old ones are, everywhere in the graph."""
    for _, module in list(nnx.iter_modules(model)):
        for name, value in list(vars(module).items()):
            if id(value) in new:
                setattr(module, name, new[id(value)])


def _some(paths: list[str], most: int = 8) -> str:
    return ", ".join(paths[:most]) + (f" and {len(paths) - most} more" if len(paths) > most else "") or "none"
