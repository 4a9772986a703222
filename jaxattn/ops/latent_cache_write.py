"""Writes of latent vectors (MLA) into a paged cache: plain, FP8, V3.2's 656-byte rows, V4's 584 bytes, indexer keys."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxattn import _checks, _latent_cache, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import latent_cache_write as mosaic

_OP = "latent_cache_write"

FORMATS = ("plain", "fp8", "fp8_ds_mla", "v4", "indexer_fp8", "indexer_mxfp4")


def latent_cache_write(
    latent: Float[Array, "N R"],
    rotary: Float[Array, "N Dr"],
    cache: Array,
    slots: Int[Array, " N"],
    *,
    format: str = "plain",
    scale: Float[Array, ""] | float | None = None,
    page: int | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> Array:
    """The cache with token n's `[latent | rotary]` in slot `slots[n]` (page `slot // page`, row `slot % page`).

    | format | cache | stored |
    |---|---|---|
    | plain | [P, page, R + Dr] in the dtype of `latent` | the numbers |
    | fp8 | float8_e4m3fn [P, page, R + Dr] | `e4m3(x / scale)` |
    | fp8_ds_mla | uint8 [P, page, 656], R 512, Dr 64 | 512 codes `e4m3(x / s)`, 4 float32 s, 64 bfloat16 |
    | v4 | uint8 [P, bytes], R 448, Dr 64 | 448 codes `e4m3(x 2^-e)`, 64 bfloat16; 7 bytes `e + 127`, a 0 |
    | indexer_fp8 | uint8 [P, bytes], R + Dr = 128 | 128 codes `e4m3(x 2^-e)`; the float32 `2^e` |
    | indexer_mxfp4 | uint8 [P, bytes], R + Dr = 128 | 64 bytes of two codes, 4 scale bytes, `jaxattn.quant.mx` |

    fp8_ds_mla: `s = amax / 448` of 128 numbers. v4 and indexer_fp8: `e = ceil(log2(max(amax, 1e-4) / 448))` of 64 and
    of all numbers; as with indexer_mxfp4 rows of a page come first, then its scales. A page of v4 has
    `v4_page_bytes(page)` bytes, 37440 for 64 tokens, of the others 132 or 68 a token at least. Conversions round to
    nearest even and saturate at +-448.

    Args:
        latent: normed latent, or V4's first 448 numbers, bfloat16, float16 or float32 (float64: reference only). The
            packed formats round it to bfloat16 first. Rows without a slot are not read. Of an indexer's key the first
            numbers, whichever part is rotated.
        rotary: the rotated part, the dtype of `latent`; the rest of an indexer's key.
        cache: donate it to the enclosing `jax.jit` to write without a copy.
        slots: int32 or int64; negative slots and those behind the cache are skipped, others must not repeat.
        format: see above.
        scale: one number, format fp8 only; None = 1.
        page: rows of a page, formats with pages of bytes only.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        the cache; slots that no token names keep every bit.

    Raises:
        TypeError: dtypes; ValueError: shapes or options; NotImplementedError: the named implementation cannot run this.

    Source: vLLM 0.26.0 csrc/cache_kernels.cu (concat_and_cache_mla), `deepseek_v4/common/ops/cache_utils.py`.
    """
    args = prepare(latent, rotary, cache, slots, format=format, scale=scale, page=page)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(latent, rotary, cache, slots, *, format="plain", scale=None, page=None) -> Args:
    """Validate and complete the arguments of `latent_cache_write`; raises as it does."""
    if format not in FORMATS:
        raise ValueError(f"{_OP}: format must be one of {', '.join(FORMATS)}, got {format!r}")
    paged = format in _latent_cache.PAGED
    if (page is not None) != paged:
        given, known = "none" if page is None else page, " or ".join(_latent_cache.PAGED)
        raise ValueError(f"{_OP}: page belongs to format {known}, got format {format} and page {given}")
    if scale is not None and format != "fp8":
        raise ValueError(f"{_OP}: a scale belongs to format fp8, got format {format}; leave it out")
    layout = "P bytes" if paged else "P page row"
    dims = _checks.check_shapes(
        _OP, latent=(latent, "N R"), rotary=(rotary, "N Dr"), cache=(cache, layout), slots=(slots, "N")
    )
    dtype = _checks.check_dtype(_OP, "latent", latent, _checks.FLOATS)
    _checks.check_dtype(_OP, "rotary", rotary, (dtype,), "latent and rotary need one dtype; cast one of them")
    _checks.check_dtype(_OP, "slots", slots, ("int32", "int64"))
    stored = {"plain": dtype, "fp8": dtype if dtype == _checks.F64 else "float8_e4m3fn"}.get(format, "uint8")
    _checks.check_dtype(_OP, "cache", cache, (stored,), f"format {format}")
    R, Dr = dims["R"], dims["Dr"]
    wanted = {"fp8_ds_mla": (_latent_cache.LATENT, _latent_cache.ROTARY), "v4": (_latent_cache.NOPE, 64)}
    if (R, Dr) != wanted.get(format, (R, Dr)):
        raise ValueError(f"{_OP}: format {format} stores R, Dr = {wanted[format]}, got {R}, {Dr}")
    if paged and format != "v4" and R + Dr != _latent_cache.PAGED[format].width:
        raise ValueError(f"{_OP}: format {format} stores R + Dr = 128 numbers, got {R} + {Dr}")
    if paged:
        _checks.check_count(_OP, page=page)
        _latent_cache.check_pages(_OP, cache, format, page or 1)
    else:
        width = _latent_cache.DS_MLA_BYTES if format == "fp8_ds_mla" else R + Dr
        if dims["row"] != width:
            raise ValueError(f"{_OP}: a row of format {format} has {width} entries, got a cache {list(cache.shape)}")
    return {
        "latent": latent,
        "rotary": rotary,
        "cache": cache,
        "slots": slots,
        "format": format,
        "scale": _checks.number(_OP, "scale", 1.0 if format == "fp8" and scale is None else scale),
        "page": None if page is None else int(page),
    }


def _reference(latent, rotary, cache, slots, *, format, scale, page):
    """Rows of every token, then a scatter that drops the slots outside the cache."""
    if format == "v4":
        rows, scales = _latent_cache.encode_v4(latent, rotary)
        return _latent_cache.insert(cache, rows, scales, slots, "v4", page)
    if format in _latent_cache.PAGED:
        rows, scales = _latent_cache.encode_indexer(jnp.concatenate([latent, rotary], -1), format)
        return _latent_cache.insert(cache, rows, scales, slots, format, page)
    if format == "fp8_ds_mla":
        rows = _latent_cache.encode_ds_mla(latent, rotary)
    else:
        rows = jnp.concatenate([latent, rotary], -1)
        rows = (
            rows
            if format == "plain"
            else p.to_float8(p.divide(p.wide(rows), scale.astype(p.wide(rows).dtype).reshape(())))
        )
    number, place = _latent_cache.place_of(slots, cache.shape[0], cache.shape[1])
    return cache.at[number, place].set(rows.astype(cache.dtype), mode="drop")


def _cost(*, latent, rotary, format, slots, **_):
    """New rows read once, stored rows written once; a division a number."""
    N, width = latent.shape[0], latent.shape[1] + rotary.shape[1]
    size = jnp.dtype(latent.dtype).itemsize
    stored = {"plain": width * size, "fp8": width, "fp8_ds_mla": 656, "v4": 584, "indexer_fp8": 132}.get(format, 68)
    return N * width, N * (width * size + stored + jnp.dtype(slots.dtype).itemsize)


def make_inputs(
    rng: np.random.Generator,
    N: int,
    *,
    P: int = 3,
    page: int = 16,
    format: str = "plain",
    dtype: str = "bfloat16",
    R: int | None = None,
    Dr: int = 64,
    skipped: float = 0.2,
) -> Args:
    """Random arguments of `latent_cache_write`: shuffled slots, old bytes in the cache, NaN in rows without a slot.

    Args:
        rng: source of randomness.
        N: tokens, at most P * page.
        P: pages.
        page: rows of a page.
        format: of the cache.
        dtype: of the new rows.
        R: width of the latent, None = the format's, or 512.
        Dr: width of the rotary part.
        skipped: part of the tokens without a slot.
    """
    R = {"v4": _latent_cache.NOPE, "indexer_fp8": 64, "indexer_mxfp4": 64}.get(format, 512) if R is None else R
    slots = rng.permutation(P * page)[:N].astype(np.int32)
    gone = rng.random(N) < skipped
    slots[gone] = rng.choice(np.array([-1, -7, P * page, 2**31 - 1], np.int32), gone.sum())
    x = rng.standard_normal((N, R + Dr)).astype(np.float32)
    if N > 4:
        x[0, : min(64, R)] = 0
        x[1, : min(128, R)] = 1e-6
        x[2, 0], x[3, :2] = 3e4, (-0.0, 448.0)
    x[gone] = np.nan
    paged = format in _latent_cache.PAGED
    shape = (P, _page_bytes(format, page)) if paged else (P, page, 656 if format == "fp8_ds_mla" else R + Dr)
    old = jnp.asarray(rng.integers(0, 100, shape).astype(np.float32))
    stored = {"plain": dtype, "fp8": "float8_e4m3fn"}.get(format, "uint8")
    args: Args = {
        "latent": jnp.asarray(x[:, :R], dtype),
        "rotary": jnp.asarray(x[:, R:], dtype),
        "cache": old.astype(stored),
        "slots": jnp.asarray(slots),
        "format": format,
    }
    return args | ({"page": page} if paged else {"scale": np.float32(0.02)} if format == "fp8" else {})


def _page_bytes(format: str, page: int) -> int:
    """As V4 has them, for keys rounded up to 32 bytes."""
    if format == "v4":
        return _latent_cache.v4_page_bytes(page)
    return -(-_latent_cache.PAGED[format].least(page) // 32) * 32


def _case(name: str, N: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, **options), tags=frozenset(tags or ("smoke",)))


_CASES = (
    _case("N9-plain", 9),
    _case("N9-plain-fp32", 9, dtype="float32"),
    _case("N9-v4-page64", 9, format="v4", page=64, P=2),
    _case("N9-fp8-ds-mla", 9, format="fp8_ds_mla"),
    _case("N9-fp8", 9, format="fp8"),
    _case("N9-fp8-fp32", 9, format="fp8", dtype="float32", R=128, Dr=32),
    _case("N9-fp8-ds-mla-fp32", 9, format="fp8_ds_mla", dtype="float32"),
    _case("N6-v4-page2-fp32", 6, format="v4", page=2, P=5, dtype="float32"),
    _case("N9-indexer-fp8-page64", 9, format="indexer_fp8", page=64, P=2),
    _case("N6-indexer-fp8-page5-fp32", 6, format="indexer_fp8", page=5, P=3, dtype="float32"),
    _case("N9-indexer-mxfp4-page64", 9, format="indexer_mxfp4", page=64, P=2),
    _case("N6-indexer-mxfp4-page5-fp32", 6, format="indexer_mxfp4", page=5, P=3, dtype="float32"),
    _case("N8192-v4-page64", 8192, "full", "bench", format="v4", page=64, P=130, skipped=0.0),
    _case("N8192-fp8-ds-mla", 8192, "full", "bench", format="fp8_ds_mla", page=64, P=130, skipped=0.0),
)


_PAGED = _latent_cache.PAGED


def _struct(dtype: str, format: str, page: int = 64) -> Args:
    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    R, paged = {"v4": _latent_cache.NOPE, "indexer_fp8": 64, "indexer_mxfp4": 64}.get(format, 512), format in _PAGED
    shape = (32, _page_bytes(format, page)) if paged else (32, page, 656 if format == "fp8_ds_mla" else R + 64)
    stored = {"plain": dtype, "fp8": "float8_e4m3fn"}.get(format, "uint8")
    args = {"latent": array((64, R), dtype), "rotary": array((64, 64), dtype), "cache": array(shape, stored)}
    return args | {"slots": array((64,), "int32"), "format": format} | ({"page": page} if paged else {})


_SUPPORT = tuple(
    (f"{dtype}, {format}", _struct(dtype, format)) for dtype in ("bfloat16", "float32") for format in FORMATS
)

MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 csrc/cache_kernels.cu, vllm/models/deepseek_v4/common/ops/cache_utils.py",
    op=latent_cache_write,
    prepare=prepare,
    reference=_reference,
    outputs=lambda **_: ("cache",),
    kernels={
        "mosaic": Kernel(
            run=mosaic.latent_cache_write,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    captures=("mla/cache_write_*", "dsv4/k_cache_insert_and_gather*"),
    module="jaxattn.nn.latent:LatentCache",
    support=_SUPPORT,
)
