"""TurboQuant: keys rotated and quantized to Gaussian centroids, values to uniform steps, both in one packed slot.

A slot holds one token's key and value of one head:

    [ key codes, D * b / 8 bytes | norm, float16 ][ value codes, D * b / 8 bytes | scale, float16 | minimum, float16 ]

little-endian, padded to an even size. Two 4-bit codes share a byte, the even one in the low nibble; eight 3-bit codes
share three bytes, code i from bit 3 i on. The preset "k8v4" has e4m3 keys, unscaled and not rotated, without a norm.

* Keys: `n = |k|`, `y = H k / sqrt(D) / (n + 1e-8)`; the code is the number of midpoints between centroids that are
  `<= y`. A key is read as `n c` or, with norm correction, `n c / |c|`, c the centroids of its codes; it stays rotated.
* Values: `s = max((max - min) * (1 / (2^b - 1)), 1e-8)`, code `floor((v - min) * (1 / s) + 1/2)`; read as
  `code * s + min` with s and min rounded to float16.

Source: vLLM 0.26.0 `layers/quantization/turboquant`, `triton_turboquant_store.py`; https://arxiv.org/abs/2504.19874.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8

from jaxattn.quant import primitives as p
from pallas_kernels import _exact

_ITERATIONS, _INTERVALS, _TOLERANCE = 200, 200, 1e-10
_SPAN = 3.5
"""The solver starts from bin centres on +- this many standard deviations; its edges lie three times as far out."""
EPSILON = 1e-8
"""Added to norms, and the smallest scale of values."""
TINY = 1e-16
"""Added to the squared length of a key's centroids."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """How many bits keys and values have; 8 means e4m3 keys."""

    key_bits: int
    value_bits: int
    norm_correction: bool

    def key_bytes(self, D: int) -> int:
        """Bytes of a key's codes."""
        return D * self.key_bits // 8

    def value_offset(self, D: int) -> int:
        """Where a slot's value codes start."""
        return self.key_bytes(D) + (0 if self.key_bits == 8 else 2)

    def value_bytes(self, D: int) -> int:
        """Bytes of a value's codes."""
        return D * self.value_bits // 8

    def slot_bytes(self, D: int) -> int:
        """Bytes of a slot."""
        used = self.value_offset(D) + self.value_bytes(D) + 4
        return used + used % 2


PRESETS = {
    "k8v4": Preset(key_bits=8, value_bits=4, norm_correction=False),
    "4bit_nc": Preset(key_bits=4, value_bits=4, norm_correction=True),
    "k3v4_nc": Preset(key_bits=3, value_bits=4, norm_correction=True),
    "3bit_nc": Preset(key_bits=3, value_bits=3, norm_correction=True),
}


def find(preset: str, D: int) -> Preset:
    """The preset of that name for heads of D numbers.

    Raises:
        ValueError: there is none, or D is no power of two of at least 8.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if D < 8 or D & (D - 1):
        raise ValueError(f"TurboQuant rotates heads and packs eight codes: D must be a power of two >= 8, got {D}")
    return PRESETS[preset]


# ---------------------------------------------------------------- centroids
@functools.cache
def centroids(D: int, bits: int) -> np.ndarray:
    """The 2^bits quantization levels for N(0, 1/D), float32, rising; exactly antisymmetric.

    Lloyd's iteration as vLLM runs it: bin centres on +-3.5 sigma at first, outer edges at +-10.5 sigma, means by the
    trapezoidal rule on 200 intervals, 200 iterations at most. It has not converged then (a 4-bit level is up to 7e-4
    sigma away), and stored codes depend on where it stopped.
    """
    sigma = math.sqrt(1.0 / D)
    low, high, count = -_SPAN * sigma, _SPAN * sigma, 2**bits
    levels = low + (high - low) * (np.arange(count) + 0.5) / count
    steps = np.arange(_INTERVALS + 1)
    weights = np.where((steps == 0) | (steps == _INTERVALS), 0.5, 1.0)
    for _ in range(_ITERATIONS):
        edges = np.concatenate([[3 * low], (levels[:-1] + levels[1:]) / 2, [3 * high]])
        x = edges[:-1, None] + (np.diff(edges) / _INTERVALS)[:, None] * steps
        density = weights * np.exp(-x * x * (D / 2))
        mass = density.sum(1)
        new = np.where(mass > 0, (x * density).sum(1) / np.where(mass > 0, mass, 1), levels)
        if np.abs(new - levels).max() < _TOLERANCE:
            break
        levels = new
    levels = ((levels - levels[::-1]) / 2).astype(np.float32)
    levels.flags.writeable = False
    return levels


@functools.cache
def midpoints(D: int, bits: int) -> np.ndarray:
    """The averages of neighbouring `centroids`, float32: a value on one belongs to the upper level."""
    levels = centroids(D, bits)
    middle = (levels[:-1] + levels[1:]) / np.float32(2)
    middle.flags.writeable = False
    return middle


# ---------------------------------------------------------------- packing
def pack(codes: Int32[Array, "... D"], bits: int) -> UInt8[Array, "... D*bits/8"]:
    """Codes of 3 or 4 bits as bytes."""
    each = 8 if bits == 3 else 2
    *lead, D = codes.shape
    groups = codes.reshape(*lead, D // each, each).astype(jnp.int32)
    word = (groups << (bits * jnp.arange(each, dtype=jnp.int32))).sum(-1)
    split = [(word >> 8 * i) & 0xFF for i in range(bits * each // 8)]
    return jnp.stack(split, -1).astype(jnp.uint8).reshape(*lead, D * bits // 8)


def unpack(packed: UInt8[Array, "... bytes"], bits: int) -> Int32[Array, "... D"]:
    """The codes that `pack` was given."""
    each = 8 if bits == 3 else 2
    (*lead, count), size = packed.shape, bits * each // 8
    groups = packed.reshape(*lead, count // size, size).astype(jnp.int32)
    word = (groups << (8 * jnp.arange(groups.shape[-1], dtype=jnp.int32))).sum(-1)
    codes = (word[..., None] >> (bits * jnp.arange(each, dtype=jnp.int32))) & (2**bits - 1)
    return codes.reshape(*lead, count * 8 // bits)


def _half_bytes(x: Float[Array, "..."]) -> UInt8[Array, "... 2"]:
    return lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint8)


def _half(packed: UInt8[Array, "... 2"]) -> Float[Array, "..."]:
    return lax.bitcast_convert_type(packed, jnp.float16)


# ---------------------------------------------------------------- slots
def quantize(key: Float[Array, "... D"], value: Float[Array, "... D"], preset: str) -> UInt8[Array, "... slot"]:
    """Slots of keys and values, computed in float32 (float64 for float64).

    Raises:
        ValueError: no such preset, or D is no power of two of at least 8.
    """
    D = key.shape[-1]
    how = find(preset, D)
    if how.key_bits == 8:
        x = p.wide(key)
        codes = jnp.where(jnp.isnan(x), jnp.nan, jnp.clip(x, -448, 448)).astype(jnp.float8_e4m3fn)
        parts = [lax.bitcast_convert_type(codes, jnp.uint8)]
    else:
        codes, norm = key_codes(p.wide(key), how.key_bits)
        parts = [pack(codes, how.key_bits), _half_bytes(norm)]
    codes, scale, low = value_codes(p.wide(value), how.value_bits)
    parts += [pack(codes, how.value_bits), _half_bytes(scale), _half_bytes(low)]
    slot = jnp.concatenate(parts, -1)
    return jnp.pad(slot, [(0, 0)] * (slot.ndim - 1) + [(0, how.slot_bytes(D) - slot.shape[-1])])


def key_codes(key: Float[Array, "... D"], bits: int) -> tuple[Int32[Array, "... D"], Float[Array, "..."]]:
    """Codes and norm of keys that are float32 or float64."""
    norm = _exact.root(_pairwise_sum(_apart(key * key)))
    y = rotate(_exact.divide(key, jnp.broadcast_to((norm + EPSILON)[..., None], key.shape)))
    codes = jnp.zeros(key.shape, jnp.int32)
    for middle in midpoints(key.shape[-1], bits).tolist():
        codes += (y >= middle).astype(jnp.int32)
    return codes, norm


def rotate(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """`H x / sqrt(D)` of the last axis in the dtype of x; neighbours are added first."""
    D, half = x.shape[-1], 1
    y = x
    while half < D:
        pairs = y.reshape(*y.shape[:-1], D // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([a + b, a - b], -2).reshape(x.shape)
        half *= 2
    return y * lax.optimization_barrier(jnp.asarray(D**-0.5, y.dtype))


def value_codes(
    value: Float[Array, "... D"], bits: int
) -> tuple[Int32[Array, "... D"], Float[Array, "..."], Float[Array, "..."]]:
    """Codes, scale and minimum of values that are float32 or float64."""
    most = 2**bits - 1
    low, high = value.min(-1), value.max(-1)
    if value.dtype == jnp.float64:
        scale = (high - low) / most
    else:  # as compiled: a product with the rounded reciprocal
        scale = _apart((high - low) * jnp.float32(1 / most))
    scale = jnp.maximum(scale, EPSILON)
    inverse = _exact.divide(jnp.ones_like(scale), scale)
    steps = _apart(_apart(value - low[..., None]) * inverse[..., None]) + 0.5
    codes = jnp.where(jnp.isnan(steps), 0, jnp.clip(steps, 0, most)).astype(jnp.int32)
    return codes, scale, low


def _apart(x: jax.Array) -> jax.Array:
    """x, rounded before it is used: compilers fuse a product and a sum."""
    return lax.optimization_barrier(x)


def _pairwise_sum(x: Float[Array, "... D"]) -> Float[Array, "..."]:
    """Sum of the last axis, neighbours first: the same bits wherever it runs."""
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


def read_key(
    slots: UInt8[Array, "... slot"], D: int, preset: str, *, dtype: str = "float32", level_dtype: str | None = None
) -> Float[Array, "... D"]:
    """Keys of slots in `dtype` (float32 or float64): as stored for "k8v4", else still rotated.

    Args:
        slots: bytes.
        D: head dim.
        preset: of the slots.
        dtype: to compute in.
        level_dtype: round the centroids to this type first.
    """
    how = find(preset, D)
    codes = slots[..., : how.key_bytes(D)]
    if how.key_bits == 8:
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(dtype)
    levels = jnp.asarray(centroids(D, how.key_bits))
    if level_dtype is not None:
        levels = _exact.rounded(levels, level_dtype)
    c = levels.astype(dtype)[unpack(codes, how.key_bits)]
    norm = _half(slots[..., how.key_bytes(D) : how.key_bytes(D) + 2]).astype(dtype)
    if how.norm_correction:
        norm = norm / jnp.sqrt((c * c).sum(-1) + TINY)
    return norm[..., None] * c


def read_value(
    slots: UInt8[Array, "... slot"], D: int, preset: str, *, dtype: str = "float32"
) -> Float[Array, "... D"]:
    """Values of slots in `dtype`."""
    how = find(preset, D)
    start, end = how.value_offset(D), how.value_offset(D) + how.value_bytes(D)
    codes = unpack(slots[..., start:end], how.value_bits).astype(dtype)
    scale, low = (_half(slots[..., i : i + 2]).astype(dtype)[..., None] for i in (end, end + 2))
    return codes * scale + low


def dequantize(
    slots: UInt8[Array, "... slot"], D: int, preset: str, *, dtype: str = "float32"
) -> tuple[Float[Array, "... D"], Float[Array, "... D"]]:
    """Keys, rotated back, and values; what `quantize` was given, up to the format's error.

    Raises:
        ValueError: no such preset, or the slots have another size.
    """
    how = find(preset, D)
    if slots.shape[-1] != how.slot_bytes(D):
        raise ValueError(f"slots of {preset} with D={D} have {how.slot_bytes(D)} bytes, got {slots.shape[-1]}")
    key = read_key(slots, D, preset, dtype=dtype)
    return key if how.key_bits == 8 else rotate(key), read_value(slots, D, preset, dtype=dtype)


def boundary_layers(layers: int, *, hybrid: bool = False, edge: int = 2) -> tuple[int, ...]:
    """Layers whose cache stays uncompressed: the first and last `edge`, at most all of them; none in hybrid models.

    Without it the 3-bit presets lose tens of points on reasoning benchmarks (vLLM's `get_boundary_skip_layers`).
    """
    edge = 0 if hybrid else min(edge, layers // 2)
    return (*range(edge), *range(layers - edge, layers))
