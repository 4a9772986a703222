"""Rows of a latent cache, dequantized and gathered into a dense buffer: what sparse prefill attends to."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _latent_cache, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.ops.window_cache import slot_mapping
from pallas_kernels import _mosaic
from pallas_kernels import latent_cache_gather as mosaic

_OP = "latent_cache_gather"
FORMATS = ("plain", "fp8_ds_mla", "v4")


def latent_cache_gather(
    cache: Array,
    page_table: Int32[Array, "B pages"],
    lengths: Int32[Array, " B"],
    gathered: Int32[Array, " B"] | None = None,
    *,
    rows: int,
    format: str = "v4",
    page: int | None = None,
    dtype: str = "bfloat16",
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "B rows D"]:
    """The last `gathered[b]` of the `lengths[b]` tokens of each request as numbers, zeros behind them.

    v4: `bf16(code * 2^(byte - 127))` and the bfloat16 rotary part, exact; fp8_ds_mla: `bf16(code * scale)`.

    Args:
        cache: as `jaxattn.latent_cache_write` leaves it.
        page_table: int32 pages of each request; only those that hold gathered tokens are read.
        lengths: int32 tokens of each request.
        gathered: int32, at most `lengths`; None = all.
        rows: of the result, for each request; more gathered tokens than that are cut off.
        format: "plain" [P, page, D], "fp8_ds_mla" [P, page, 656] or "v4" [P, bytes].
        page: rows of a page, format v4 only.
        dtype: of the result for packed formats; a plain cache keeps its own.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        [B, rows, D]: D 512 for v4, 576 for fp8_ds_mla.

    Raises:
        TypeError: dtypes; ValueError: shapes or options; NotImplementedError: the named implementation cannot run this.

    Source: vLLM 0.26.0 `deepseek_v4/common/ops/cache_utils.py` (dequantize_and_gather_k_cache).
    """
    args = prepare(cache, page_table, lengths, gathered, rows=rows, format=format, page=page, dtype=dtype)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(cache, page_table, lengths, gathered=None, *, rows, format="v4", page=None, dtype="bfloat16") -> Args:
    """Validate and complete the arguments of `latent_cache_gather`; raises as it does."""
    if format not in FORMATS:
        raise ValueError(f"{_OP}: format must be one of {', '.join(FORMATS)}, got {format!r}")
    if (page is not None) != (format == "v4"):
        given = "none" if page is None else page
        raise ValueError(f"{_OP}: page belongs to format v4, and only there, got format {format} and page {given}")
    named = {"cache": (cache, "P bytes" if format == "v4" else "P page row"), "page_table": (page_table, "B pages")}
    named |= {"lengths": (lengths, "B")} | ({} if gathered is None else {"gathered": (gathered, "B")})
    dims = _checks.check_shapes(_OP, **named)
    for name in list(named)[1:]:
        _checks.check_dtype(_OP, name, named[name][0], ("int32",))
    _checks.check_dtype(_OP, "cache", cache, _checks.FLOATS if format == "plain" else ("uint8",), f"format {format}")
    _checks.check_count(_OP, rows=rows, **({} if page is None else {"page": page}))
    if format == "v4":
        _latent_cache.check_pages(_OP, cache, "v4", page or 1)
    elif format == "fp8_ds_mla" and dims["row"] != _latent_cache.DS_MLA_BYTES:
        raise ValueError(f"{_OP}: a row of format fp8_ds_mla has 656 bytes, got a cache {list(cache.shape)}")
    _checks.check_dtype(_OP, "dtype", jax.ShapeDtypeStruct((), jnp.dtype(dtype)), _checks.FLOATS)
    return {
        "cache": cache,
        "page_table": page_table,
        "lengths": lengths,
        "gathered": lengths if gathered is None else gathered,
        "rows": int(rows),
        "format": format,
        "page": None if page is None else int(page),
        "dtype": str(jnp.dtype(dtype).name),
    }


def _reference(cache, page_table, lengths, gathered, *, rows, format, page, dtype):
    """Slots of all positions, then their rows."""
    size = page if format == "v4" else cache.shape[1]
    B, column = lengths.shape[0], jnp.arange(rows, dtype=jnp.int32)
    position = jnp.where(column < gathered[:, None], (lengths - gathered)[:, None] + column, -1)
    request = jnp.repeat(jnp.arange(B, dtype=jnp.int32), rows)
    slots = slot_mapping(page_table, request, position.reshape(-1), page=size)
    values = at_slots(cache, slots, format=format, page=size)
    values = jnp.where((slots >= 0)[:, None], values, 0).astype(cache.dtype if format == "plain" else dtype)
    return values.reshape(B, rows, values.shape[1])


def at_slots(cache: Array, slots: Int32[Array, " N"], *, format: str, page: int | None) -> Float[Array, "N D"]:
    """Numbers of each slot; of any row for slots outside the cache. Only the named rows are dequantized."""
    P, page = cache.shape[0], cache.shape[1] if page is None else page
    number, place = _latent_cache.place_of(slots, P, page)
    number = jnp.minimum(number, P - 1)
    if format == "plain":
        return cache[number, place]
    if format == "fp8_ds_mla":
        return _latent_cache.decode_ds_mla(cache[number, place])
    row, scale = _latent_cache.split_pages(cache, format, page)
    return _latent_cache.decode_v4(row[number, place], scale[number, place])


def make_inputs(
    rng: np.random.Generator,
    lengths: tuple[int, ...],
    *,
    gathered: tuple[int, ...] | None = None,
    page: int = 64,
    format: str = "v4",
    dtype: str = "bfloat16",
    rows: int | None = None,
) -> Args:
    """Random arguments of `latent_cache_gather`; slots that are not read are NaN codes, unused table entries huge.

    Args:
        rng: source of randomness.
        lengths: tokens of each request.
        gathered: tokens to gather, None = all.
        page: rows of a page.
        format: of the cache.
        dtype: of a plain cache, and of the result.
        rows: of the result, None = the longest.
    """
    counts = lengths if gathered is None else gathered
    pages = max(-(-n // page) for n in lengths)
    P = sum(-(-n // page) for n in lengths) + 1
    numbers = iter(rng.permutation(P).tolist())
    table = np.full((len(lengths), pages), 2**31 - 1, np.int64)
    read = np.zeros((P, page), bool)
    for b, (n, c) in enumerate(zip(lengths, counts, strict=True)):
        table[b, : -(-n // page)] = [next(numbers) for _ in range(-(-n // page))]
        where = np.arange(n - c, n)
        read[table[b, where // page], where % page] = True
    width = _latent_cache.LATENT + (0 if format == "v4" else _latent_cache.ROTARY)
    x = jnp.asarray(rng.standard_normal((P * page, width)), jnp.float32)
    if format == "plain":
        cache = jnp.asarray(np.where(read[..., None], x.reshape(P, page, width), np.nan), dtype)
    elif format == "fp8_ds_mla":
        raw = np.array(jax.jit(_latent_cache.encode_ds_mla)(x[:, :512], x[:, 512:])).reshape(P, page, -1)
        raw[~read] = 0x7F
        cache = jnp.asarray(raw)
    else:
        cache = jnp.asarray(packed_v4(x, page, read))
    args: Args = {
        "cache": cache,
        "page_table": jnp.asarray(table.astype(np.int32)),
        "lengths": jnp.asarray(np.array(lengths, np.int32)),
        "gathered": jnp.asarray(np.array(counts, np.int32)),
        "rows": rows or max(counts),
        "format": format,
    }
    return args | ({"page": page} if format == "v4" else {})


def packed_v4(x: Float[Array, "S 512"], page: int, read: np.ndarray) -> np.ndarray:
    """A V4 cache of rows `x`; bytes of slots that are not `read` [P, page], and the padding, are NaN codes."""
    P = read.shape[0]

    @jax.jit
    def pack(x, read):
        cache = jnp.full((P, _latent_cache.v4_page_bytes(page)), 0xFF, jnp.uint8)
        rows, scales = _latent_cache.encode_v4(x[:, : _latent_cache.NOPE], x[:, _latent_cache.NOPE :])
        return _latent_cache.insert(cache, rows, scales, jnp.where(read, jnp.arange(P * page), -1), "v4", page)

    return np.asarray(pack(x, read.reshape(-1)))


def _case(name: str, *sizes, tags: tuple[str, ...] = ("smoke",), **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, *sizes, **options), tags=frozenset(tags))


def _struct(format: str, B: int = 4, rows: int = 512) -> Args:
    def array(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    shape = {"v4": (32, 37440), "fp8_ds_mla": (32, 64, 656), "plain": (32, 64, 576)}[format]
    cache = array(*shape, dtype="bfloat16" if format == "plain" else "uint8")
    args: Args = {"cache": cache, "page_table": array(B, 8), "lengths": array(B), "rows": rows, "format": format}
    return args | ({"page": 64} if format == "v4" else {})


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 vllm/models/deepseek_v4/common/ops/cache_utils.py",
    op=latent_cache_gather,
    prepare=prepare,
    reference=_reference,
    outputs=lambda **_: ("values",),
    kernels={
        "mosaic": Kernel(
            run=mosaic.latent_cache_gather,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=(
        _case("v4-page64", (70, 3), gathered=(6, 3)),
        _case("v4-page2-more-rows", (5, 2, 1), page=2, rows=7),
        _case("fp8-ds-mla-page16", (20, 16), gathered=(5, 3), format="fp8_ds_mla", page=16),
        _case("plain-fp32-page16", (20, 1), gathered=(5, 0), format="plain", page=16, dtype="float32"),
        _case("v4-B4-4096", (4096, 4096, 4096, 4096), tags=("full", "bench")),
    ),
    cost=lambda *, page_table, rows, **_: (0, page_table.shape[0] * rows * (584 + 1024)),
    captures=("dsv4/k_cache_insert_and_gather*",),
    support=tuple((f"{format} cache", _struct(format)) for format in FORMATS),
)
