"""Writes of new keys and values into a paged cache, as they are or quantised."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from jaxattn import _checks, _kv_quant, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from pallas_kernels import _exact, _mosaic
from pallas_kernels import cache_write as mosaic

_OP = "cache_write"
FP8 = "float8_e4m3fn"
_PER_HEAD = {"int8": "int8_token_head", FP8: "fp8_token_head", "uint8": "int4_token_head"}

type Pages = Num[Array, "P page K D"]
type ScalePages = Float[Array, "P page K"]
type Caches = tuple[Pages, Pages] | tuple[Pages, Pages, ScalePages, ScalePages]


def cache_write(
    key: Float[Array, "T K D"],
    value: Float[Array, "T K Dv"],
    k_pages: Pages,
    v_pages: Num[Array, "P page K Dv"],
    slots: Int[Array, " T"],
    *,
    k_scale: Float[Array, ""] | float | None = None,
    v_scale: Float[Array, ""] | float | None = None,
    k_scale_pages: ScalePages | None = None,
    v_scale_pages: ScalePages | None = None,
    checked: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Caches:
    r"""The caches with token t's keys and values in slot `slots[t]` (page `slots[t] // page`, row `slots[t] % page`).

    The dtype of the caches and the scale arguments say what is stored:

    | caches | scales | stored |
    |---|---|---|
    | dtype of `key` | none | the numbers themselves |
    | float8_e4m3fn | `k_scale`, `v_scale` (None = 1) | `e4m3(x / scale)` |
    | float8_e4m3fn | `*_scale_pages` | `s = max(amax * (1 / 448), 1e-6)` per token and head, `e4m3(x * (1 / s))` |
    | int8 | `*_scale_pages` | `s = max(amax * (1 / 127), 1e-6)`, `x * (1 / s)` rounded half away from zero |
    | uint8 [P, page, K, D/2] | `*_scale_pages` | rotated heads, 4 bits a number; `jaxattn._kv_quant.per_head_int4` |

    Conversions to e4m3 round to nearest even and saturate at +-448; NaN becomes 0x7f.

    Args:
        key: new keys, bfloat16, float16 or float32 (float64: reference only). Rows without a slot are not read.
        value: new values, the dtype of `key`; their head dim may differ.
        k_pages: key cache. To write without a copy, donate it to the enclosing `jax.jit`; undonated it is copied first.
        v_pages: value cache, the dtype of `k_pages`.
        slots: int32 or int64. A negative slot, or one behind the cache, is skipped: nothing is written for it. Other
            slots must not repeat; what a repeated slot holds afterwards is one of its tokens or a mixture of them.
        k_scale: one number, per-tensor float8 only.
        v_scale: the same for values.
        k_scale_pages: float32 scales of the key cache.
        v_scale_pages: float32 scales of the value cache.
        checked: read `slots` and raise if one is below -1, behind the cache or repeated; needs a concrete array.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `(k_pages, v_pages)`, with scale pages `(k_pages, v_pages, k_scale_pages, v_scale_pages)`; slots that no token
        names keep every bit.

    Raises:
        TypeError: dtypes; ValueError: shapes, options, or slots in checked mode;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `reshape_and_cache_flash` (csrc/cache_kernels.cu), `triton_reshape_and_cache_flash.py` and
    `int4_per_token_head.py`.
    """
    args = prepare(
        key,
        value,
        k_pages,
        v_pages,
        slots,
        k_scale=k_scale,
        v_scale=v_scale,
        k_scale_pages=k_scale_pages,
        v_scale_pages=v_scale_pages,
        checked=checked,
    )
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(
    key,
    value,
    k_pages,
    v_pages,
    slots,
    *,
    k_scale=None,
    v_scale=None,
    k_scale_pages=None,
    v_scale_pages=None,
    checked=False,
) -> Args:
    """Validate and complete the arguments of `cache_write`; raises as it does."""
    named: dict[str, tuple[Any, str]] = {
        "key": (key, "T K D"),
        "value": (value, "T K Dv"),
        "k_pages": (k_pages, "P page K C"),
        "v_pages": (v_pages, "P page K Cv"),
        "slots": (slots, "T"),
    }
    if k_scale_pages is not None or v_scale_pages is not None:
        if k_scale_pages is None or v_scale_pages is None:
            missing = "k_scale_pages" if k_scale_pages is None else "v_scale_pages"
            raise ValueError(f"{_OP}: k_scale_pages and v_scale_pages belong together, {missing} is missing")
        named |= {"k_scale_pages": (k_scale_pages, "P page K"), "v_scale_pages": (v_scale_pages, "P page K")}
    dims = _checks.check_shapes(_OP, **named)
    mode = _mode(key, value, k_pages, v_pages, k_scale_pages, v_scale_pages, k_scale, v_scale)
    _checks.check_dtype(_OP, "slots", slots, ("int32", "int64"))
    for head, stored in (("D", "C"), ("Dv", "Cv")):
        D, C = dims[head], dims[stored]
        if mode == "int4_token_head" and (D & (D - 1) or D < 2):
            raise ValueError(f"{_OP}: an int4 cache rotates heads, {head} must be a power of two, got {D}")
        if (D // 2 if mode == "int4_token_head" else D) != C:
            packed = " (two in a byte)" if mode == "int4_token_head" else ""
            raise ValueError(
                f"{_OP}: {'k' if head == 'D' else 'v'}_pages must hold {head}={D} numbers a head{packed}, got a last "
                f"dimension of {C}"
            )
    if checked:
        check_slots(slots, dims["P"] * dims["page"])
    fp8 = mode == "fp8"
    return {
        "key": key,
        "value": value,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "slots": slots,
        "k_scale": _checks.number(_OP, "k_scale", 1.0 if fp8 and k_scale is None else k_scale),
        "v_scale": _checks.number(_OP, "v_scale", 1.0 if fp8 and v_scale is None else v_scale),
        "k_scale_pages": k_scale_pages,
        "v_scale_pages": v_scale_pages,
        "mode": mode,
    }


def _mode(key, value, k_pages, v_pages, k_scale_pages, v_scale_pages, k_scale, v_scale) -> str:
    dtype = _checks.check_dtype(_OP, "key", key, _checks.FLOATS)
    _checks.check_dtype(_OP, "value", value, (dtype,), "key and value need one dtype; cast one of them")
    stored = _checks.dtype_name(k_pages)
    _checks.check_dtype(_OP, "v_pages", v_pages, (stored,), "both caches need one dtype")
    scaled = k_scale is not None or v_scale is not None
    if k_scale_pages is not None:
        for name, x in (("k_scale_pages", k_scale_pages), ("v_scale_pages", v_scale_pages)):
            _checks.check_dtype(_OP, name, x, (_checks.F64,) if dtype == _checks.F64 else ("float32",))
        if scaled:
            raise ValueError(f"{_OP}: k_scale and v_scale belong to per-tensor {FP8} caches; leave them out")
        # float64 codes are an upcast float8 cache: the truth of such a case
        allowed = (*_PER_HEAD, _checks.F64) if dtype == _checks.F64 else tuple(_PER_HEAD)
        _checks.check_dtype(_OP, "k_pages", k_pages, allowed, "with scale pages")
        return _PER_HEAD.get(stored, "fp8_token_head")
    _checks.check_dtype(_OP, "k_pages", k_pages, (dtype, FP8), "int8 and uint8 caches need scale pages")
    if stored == FP8 or (dtype == _checks.F64 and scaled):
        return "fp8"
    if scaled:
        raise ValueError(f"{_OP}: k_scale and v_scale belong to {FP8} caches, but the caches are {stored}")
    return "copy"


def check_slots(slots: Int[Array, " T"], capacity: int) -> None:
    """Raise `ValueError` unless every slot is -1 or a slot of the cache, each named once.

    Args:
        slots: int32 or int64 [T].
        capacity: slots of the cache.

    Raises:
        ValueError: with the first token at fault, or if the values cannot be read (under jit).
    """
    if not _checks.is_concrete(slots):
        raise ValueError(f"{_OP}: checked=True reads the slots and needs a concrete array; call check_slots before jit")
    seen: dict[int, int] = {}
    for t, slot in enumerate(np.asarray(slots).tolist()):
        if not -1 <= slot < capacity:
            raise ValueError(f"{_OP}: slots[{t}] must be -1 (skip) or 0 to {capacity - 1}, got {slot}")
        if slot in seen:
            raise ValueError(f"{_OP}: slots must not repeat, slots[{seen[slot]}] and slots[{t}] are both {slot}")
        if slot >= 0:
            seen[slot] = t


def _reference(key, value, k_pages, v_pages, slots, *, k_scale, v_scale, k_scale_pages, v_scale_pages, mode):
    """Codes of every token, then a scatter that drops the slots outside the cache."""
    S = k_pages.shape[0] * k_pages.shape[1]
    where = jnp.where((slots >= 0) & (slots < S), slots, S)

    def put(pages, rows):
        flat = pages.reshape(S, *pages.shape[2:])
        return flat.at[where].set(rows.astype(pages.dtype), mode="drop").reshape(pages.shape)

    if mode == "copy":
        return put(k_pages, key), put(v_pages, value)
    if mode == "fp8":
        wide = _kv_quant.wide(key)
        return tuple(
            put(pages, _kv_quant.fp8(_exact.divide(x.astype(wide), scale.astype(wide).reshape(()))))
            for pages, x, scale in ((k_pages, key, k_scale), (v_pages, value, v_scale))
        )
    quantize = {
        "fp8_token_head": _kv_quant.per_head_fp8,
        "int8_token_head": _kv_quant.per_head_int8,
        "int4_token_head": lambda x: _kv_quant.per_head_int4(_kv_quant.rotate_for_int4(x)),
    }[mode]
    (k_codes, k_scales), (v_codes, v_scales) = quantize(key), quantize(value)
    return (
        put(k_pages, k_codes),
        put(v_pages, v_codes),
        put(k_scale_pages, k_scales),
        put(v_scale_pages, v_scales),
    )


def _launch(*, key, value, mode, **args):
    """The kernel, with the signs of a rotation: those of shorter heads are their beginning."""
    if mode == "int4_token_head":
        args["signs"] = jnp.asarray(_kv_quant.signs(max(key.shape[-1], value.shape[-1])), jnp.float32)
    return mosaic.cache_write(key=key, value=value, mode=mode, **args)


def _outputs(*, mode, **_):
    scales = ("k_scale_pages", "v_scale_pages") if mode.endswith("token_head") else ()
    return ("k_pages", "v_pages", *scales)


def _cost(*, key, value, k_pages, k_scale_pages, slots, **_):
    """New rows read once, their codes and scales written once; a division or product for each number."""
    T, K, _ = key.shape
    numbers = key.size + value.size
    stored = 0.5 if k_pages.dtype == jnp.uint8 else jnp.dtype(k_pages.dtype).itemsize
    scales = 0 if k_scale_pages is None else 8 * T * K
    moved = numbers * (jnp.dtype(key.dtype).itemsize + stored) + scales + T * jnp.dtype(slots.dtype).itemsize
    return numbers, int(moved)


def make_inputs(
    rng: np.random.Generator,
    T: int,
    K: int,
    D: int,
    *,
    Dv: int | None = None,
    P: int = 4,
    page: int = 16,
    dtype: str = "bfloat16",
    mode: str = "copy",
    skipped: float = 0.2,
    outliers: bool = True,
    **options,
) -> Args:
    """Random arguments of `cache_write`: shuffled slots, random bytes in the caches, NaN in rows without a slot.

    Args:
        rng: source of randomness.
        T: tokens, at most P * page.
        K: kv heads.
        D: head dim of keys.
        Dv: head dim of values, None = D.
        P: pages.
        page: slots per page.
        dtype: of keys and values.
        mode: "copy", "fp8", "fp8_token_head", "int8_token_head" or "int4_token_head".
        skipped: part of the tokens without a slot (-1, -7, or behind the cache).
        outliers: put zeros, a huge number and a head of zeros into the rows.
        **options: passed on to the op.
    """
    Dv, S = D if Dv is None else Dv, P * page
    slots = rng.permutation(S)[:T].astype(np.int32)
    gone = rng.random(T) < skipped
    slots[gone] = rng.choice(np.array([-1, -7, S, 2**31 - 1], np.int32), gone.sum())
    stored = {"copy": dtype, "int8_token_head": "int8", "int4_token_head": "uint8"}.get(mode, FP8)
    args: Args = {"slots": jnp.asarray(slots)}
    for name, pages, dim in (("key", "k_pages", D), ("value", "v_pages", Dv)):
        x = rng.standard_normal((T, K, dim)).astype(np.float32)
        if outliers:
            x[0, 0] = 0
            x[-1, -1, :2] = 3e4, -0.0
        x[gone] = np.nan
        width = dim // 2 if stored == "uint8" else dim
        old = rng.integers(-100, 100, (P, page, K, width))
        args |= {name: jnp.asarray(x, dtype), pages: jnp.asarray(old.astype(np.float32), "float32").astype(stored)}
        if mode.endswith("token_head"):
            args[f"{pages[0]}_scale_pages"] = jnp.asarray(rng.random((P, page, K)), jnp.float32)
        if mode == "fp8":
            args[f"{pages[0]}_scale"] = np.float32(rng.uniform(0.01, 0.05))
    return args | options


def _case(name: str, T: int, K: int, D: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, T, K, D, **options), tags=frozenset(tags or ("smoke",)))


_CASES = (
    _case("T9-K2-D64-bf16", 9, 2, 64),
    _case("T5-K8-D128-bf16-page64", 5, 8, 128, page=64, P=2),
    _case("T7-K4-D192-Dv128-fp16", 7, 4, 192, Dv=128, dtype="float16"),
    _case("T6-K1-D128-fp32", 6, 1, 128, dtype="float32"),
    _case("T9-K2-D64-bf16-to-fp8", 9, 2, 64, mode="fp8"),
    _case("T5-K8-D128-fp32-to-fp8", 5, 8, 128, dtype="float32", mode="fp8"),
    _case("T6-K8-D128-int8-per-head", 6, 8, 128, mode="int8_token_head"),
    _case("T5-K2-D128-int8-per-head", 5, 2, 128, mode="int8_token_head"),
    _case("T6-K8-D128-fp8-per-head", 6, 8, 128, mode="fp8_token_head"),
    _case("T5-K1-D256-fp32-fp8-per-head", 5, 1, 256, dtype="float32", mode="fp8_token_head"),
    _case("T7-K2-D64-int4-per-head", 7, 2, 64, mode="int4_token_head"),
    _case("T5-K8-D128-fp32-int4-per-head", 5, 8, 128, dtype="float32", mode="int4_token_head"),
    _case("T6-K8-D128-int4-per-head", 6, 8, 128, mode="int4_token_head"),
    _case("T9-K2-D64-int8-per-head", 9, 2, 64, mode="int8_token_head"),
    _case("T3-K3-D96-Dv64-fp16-fp8-per-head", 3, 3, 96, Dv=64, dtype="float16", mode="fp8_token_head"),
    _case("T1000-K8-D128-bf16", 1000, 8, 128, "full", P=80, page=16),
    _case("T8192-K8-D128-bf16", 8192, 8, 128, "full", "bench", P=520, page=16, skipped=0.0, outliers=False),
    _case("T8192-K8-D128-fp8", 8192, 8, 128, "full", "bench", P=520, mode="fp8", skipped=0.0, outliers=False),
    _case("T8192-K8-D128-int8-per-head", 8192, 8, 128, "full", "bench", P=520, mode="int8_token_head", skipped=0.0),
    _case("T8192-K8-D128-fp8-per-head", 8192, 8, 128, "full", "bench", P=520, mode="fp8_token_head", skipped=0.0),
    _case("T8192-K8-D128-int4-per-head", 8192, 8, 128, "full", "bench", P=520, mode="int4_token_head", skipped=0.0),
)


def _struct(dtype: str, K: int, D: int, stored: str, per_head: bool = False) -> Args:
    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    new = array((64, K, D), dtype)
    pages = array((128, 64, K, D // 2 if stored == "uint8" else D), stored)
    args = {"key": new, "value": new, "k_pages": pages, "v_pages": pages, "slots": array((64,), "int32")}
    scales = array((128, 64, K), "float32")
    return args | ({"k_scale_pages": scales, "v_scale_pages": scales} if per_head else {})


_SUPPORT = (
    *(
        (f"{dtype}, K {K}, D {D}, {stored} cache", _struct(dtype, K, D, dtype if stored == "same" else stored))
        for dtype in ("bfloat16", "float16", "float32")
        for K, D in ((8, 128), (1, 64))
        for stored in ("same", FP8)
    ),
    *(
        (f"bfloat16, K {K}, D {D}, {stored} per token and head", _struct("bfloat16", K, D, stored, per_head=True))
        for K, D in ((8, 128), (2, 128), (2, 64))
        for stored in ("int8", FP8, "uint8")
    ),
)

MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 csrc/cache_kernels.cu, vllm/v1/attention/ops/triton_reshape_and_cache_flash.py",
    op=cache_write,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=_launch,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    module="jaxattn.nn.cache:PagedKVCache",
    captures=("attention/cache_write_*", "kv_cache/cache_write_*"),
    support=_SUPPORT,
)
