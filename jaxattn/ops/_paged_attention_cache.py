"""Caches with one scale per token and head, as paged attention reads them: int8, float8 and rotated 4-bit codes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import _checks, _kv_quant
from jaxattn._mechanism import Args, Case
from jaxattn.ops import _paged_attention_cases as cases
from pallas_kernels import _exact

PER_HEAD = ("int8", "float8_e4m3fn", "uint8")


def packed(pages: Any) -> bool:
    """Whether each byte holds two numbers."""
    return _checks.is_array(pages) and _checks.dtype_name(pages) == "uint8"


def check(op: str, q, k_pages, k_scale, v_scale, k_scale_pages=None, v_scale_pages=None) -> None:
    """Check dtypes and combinations; shapes are checked against each other elsewhere.

    Raises:
        TypeError: dtypes; ValueError: one without the other, a scale of the whole tensor beside them, or a packed head
            that does not fit q's.
    """
    if k_scale_pages is None and v_scale_pages is None:
        return
    if k_scale_pages is None or v_scale_pages is None:
        missing = "k_scale_pages" if k_scale_pages is None else "v_scale_pages"
        raise ValueError(f"{op}: k_scale_pages and v_scale_pages belong together, {missing} is missing")
    if k_scale is not None or v_scale is not None:
        raise ValueError(f"{op}: a cache has scale pages or one k_scale and v_scale, got both; leave one out")
    wide = _checks.dtype_name(q) == _checks.F64
    allowed = (*PER_HEAD, _checks.F64) if wide else PER_HEAD  # float64 codes are an upcast float8 cache
    stored = _checks.check_dtype(op, "k_pages", k_pages, allowed, "with scale pages")
    for name, x in (("k_scale_pages", k_scale_pages), ("v_scale_pages", v_scale_pages)):
        _checks.check_dtype(op, name, x, (_checks.F64,) if wide else ("float32",))
    D = q.shape[-1]
    if stored == "uint8" and (D & (D - 1) or D < 2 or 2 * k_pages.shape[-1] != D):
        raise ValueError(
            f"{op}: a uint8 cache holds rotated heads, two numbers in a byte; the head dim must be a power of two and "
            f"the last dimension of k_pages half of it, got {D} (q) and {k_pages.shape[-1]}"
        )


def read(codes, scales):
    """Codes times their scales, in float32 or float64; 4-bit heads stay rotated."""
    if codes.dtype == jnp.uint8:
        return _kv_quant.unpack_int4(codes, scales).astype(scales.dtype)
    return codes.astype(scales.dtype) * scales[..., None]


def attend(plain: Callable[..., Any], *, q, k_pages, v_pages, k_scale_pages, v_scale_pages, scale, return_lse, **args):
    """`plain` attention over the numbers that the codes stand for.

    4-bit heads are attended in the rotated space, where products are D times as large: q is rotated and rounded to its
    dtype, and the result is rotated back before its one rounding.
    """
    k, v = read(k_pages, k_scale_pages), read(v_pages, v_scale_pages)
    if k_pages.dtype != jnp.uint8:
        return plain(q=q, k_pages=k, v_pages=v, scale=scale, return_lse=return_lse, **args)
    D, wide = q.shape[-1], _kv_quant.wide(q)
    turned = _exact.rounded(_kv_quant.rotate(q.astype(wide)), q.dtype).astype(wide)
    o, lse = plain(q=turned, k_pages=k, v_pages=v, scale=scale / D, return_lse=True, **args)
    o = (_kv_quant.rotate(o, inverse=True) / D).astype(q.dtype)
    return (o, lse) if return_lse else o


def launch(kernel: Callable[..., Any], *, q, k_pages, scale, return_lse, **args):
    """`kernel` on prepared arguments; 4-bit heads in the rotated space as in `attend`, which it leaves in float32."""
    if not packed(k_pages):
        return kernel(q=q, k_pages=k_pages, scale=scale, return_lse=return_lse, **args)
    D, f32 = q.shape[-1], jnp.float32
    turn = jnp.asarray(_kv_quant.rotation(D))  # one product: quicker than butterflies, to compile, too
    turned = jnp.matmul(q.astype(f32), turn, precision="highest").astype(q.dtype)
    more = {"scale": scale / D, "return_lse": return_lse, "out_dtype": f32}
    out = kernel(q=turned, k_pages=k_pages, **more, **args)
    o, *lse = out if return_lse else (out,)
    o = (jnp.matmul(o, turn.T, precision="highest") / D).astype(q.dtype)
    return (o, *lse) if return_lse else o


# ---------------------------------------------------------------- test cases and support rows
def make_inputs(rng: np.random.Generator, stored: str, *shape, **options) -> Args:
    """Arguments of `paged_attention` with keys and values in codes of dtype `stored`; scales of dead slots are NaN."""
    args = cases.make_inputs(rng, *shape, **options)
    quantize = jax.jit(_kv_quant.PER_HEAD[stored])
    for side in ("k", "v"):
        pages = args[f"{side}_pages"]
        args[f"{side}_pages"], scales = quantize(pages)
        args[f"{side}_scale_pages"] = jnp.where(jnp.isnan(pages).any(-1), jnp.nan, scales)
    return args


def _case(name: str, stored: str, *shape, **options) -> Case:
    return Case(
        name=name,
        make=lambda rng: make_inputs(rng, stored, *shape, **options),
        tags=frozenset({"smoke"}),
        shapes=lambda: _coded(cases.make_inputs(np.random.default_rng(0), *shape, **options), stored),
    )


_MIXED = ((1, 4), (40, 20))

CASES = (
    _case("int8-per-head", "int8", *_MIXED, dtype="float32", sinks=True, return_lse=True),
    _case("fp8-per-head", "float8_e4m3fn", *_MIXED, dtype="float32", D=128, window=9, return_lse=True),
    _case("int4-per-head", "uint8", *_MIXED, dtype="float32", sinks=True, return_lse=True),
    _case("int4-per-head-bf16", "uint8", (2, 1), (20, 33), D=128),
    _case("int8-per-head-decode", "int8", (1, 2), (70, 20), D=128, sinks=True, return_lse=True),
    _case("fp8-per-head-decode", "float8_e4m3fn", (1, 1), (70, 20), page=64, window=40, return_lse=True),
    _case("int4-per-head-decode", "uint8", (1, 1), (70, 33), table_width=72, sinks=True, return_lse=True),
    _case("int4-per-head-fp16-D256", "uint8", (1, 9), (20, 33), H=2, K=1, D=256, dtype="float16"),
)


def _coded(args: Args, stored: str) -> Args:
    """The arguments with pools as the shapes of those that hold codes."""
    pages = args["k_pages"].shape
    head = pages[3] // 2 if stored == "uint8" else pages[3]
    pool = jax.ShapeDtypeStruct((*pages[:3], head), jnp.dtype(stored))
    scales = jax.ShapeDtypeStruct(pages[:3], jnp.float32)
    return args | {"k_pages": pool, "v_pages": pool, "k_scale_pages": scales, "v_scale_pages": scales}


SUPPORT = tuple(
    (
        f"bfloat16, {x} cache per token and head, D 128, page 64",
        _coded(dict(cases.SUPPORT)["bfloat16, D 128, page 64"], x),
    )
    for x in PER_HEAD
)
