"""DeepSeek-V4's step between projections and attention: q's head norm and RoPE, kv's RoPE and cache slot."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxattn import _checks, _latent_cache, _mechanism, _rope
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.ops import latent_cache_write
from jaxattn.ops.rope import check_table
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import qnorm_rope_kv_insert as mosaic

_OP = "qnorm_rope_kv_insert"
FORMATS = ("plain", "v4")


def qnorm_rope_kv_insert(
    q: Float[Array, "N H D"],
    kv: Float[Array, "N D"],
    positions: Int[Array, " N"],
    cos_sin: Float[Array, "P Dr"],
    cache: Array,
    slots: Int[Array, " N"],
    *,
    format: str = "v4",
    page: int | None = None,
    heads: int | None = None,
    eps: float = 1e-6,
    implementation: str | None = None,
    config: Any = None,
) -> tuple[Float[Array, "N heads D"], Array]:
    """`q`, normed per head without a weight and rotated, and the cache with the rotated `kv` rows.

        q' = rope(q / sqrt(mean(q^2) + eps))     per head, float32 throughout, one rounding
        kv' = rope(kv)                            float32, rounded to the dtype of kv, then stored as the format says

    rope turns neighbours of the last Dr numbers by the token's position.

    Args:
        q: heads, bfloat16, float16 or float32 (float64: reference only).
        kv: normed latent, key and value at once, the dtype of `q`.
        positions: int32 or int64 rows of the table; those outside take the nearest row.
        cos_sin: `cos || sin`, any float dtype.
        cache: "plain" [S, page, D] in the dtype of `q`, or "v4" uint8 [S, bytes] as in `latent_cache_write`; donate it
            to write without a copy.
        slots: int32 or int64; a token without a slot (negative, or behind the cache) still gets its q.
        format: of the cache; "v4" needs D 512 and Dr 64.
        page: rows of a page, format "v4" only.
        heads: heads of the result, H at least: those beyond H are zeros (attention kernels take 64 or 128); None = H.
        eps: of the norm.
        implementation: None (choose), "reference" or "mosaic".
        config: launch configuration of the named kernel.

    Returns:
        `q` [N, heads, D] in its dtype and the cache.

    Raises:
        TypeError: dtypes; ValueError: shapes or options; NotImplementedError: the named implementation cannot run this.

    Source: vLLM 0.26.0 csrc `fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu`.
    """
    args = prepare(q, kv, positions, cos_sin, cache, slots, format=format, page=page, heads=heads, eps=eps)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(q, kv, positions, cos_sin, cache, slots, *, format="v4", page=None, heads=None, eps=1e-6) -> Args:
    """Validate and complete the arguments of `qnorm_rope_kv_insert`; raises as it does."""
    if format not in FORMATS:
        raise ValueError(f"{_OP}: format must be one of {', '.join(FORMATS)}, got {format!r}")
    if (page is not None) != (format == "v4"):
        given = "none" if page is None else page
        raise ValueError(f"{_OP}: page belongs to format v4, and only there, got format {format} and page {given}")
    dims = _checks.check_shapes(
        _OP,
        q=(q, "N H D"),
        kv=(kv, "N D"),
        positions=(positions, "N"),
        cos_sin=(cos_sin, "P Dr"),
        cache=(cache, "S bytes" if format == "v4" else "S page D"),
        slots=(slots, "N"),
    )
    dtype = _checks.check_dtype(_OP, "q", q, _checks.FLOATS)
    _checks.check_dtype(_OP, "kv", kv, (dtype,), "q and kv need one dtype; cast one of them")
    for name, x in (("positions", positions), ("slots", slots)):
        _checks.check_dtype(_OP, name, x, ("int32", "int64"))
    check_table(_OP, cos_sin, dims["D"])
    _checks.check_dtype(_OP, "cache", cache, ("uint8",) if format == "v4" else (dtype,), f"format {format}")
    if format == "v4":
        _checks.check_count(_OP, page=page)
        if (dims["D"], dims["Dr"]) != (_latent_cache.LATENT, _latent_cache.ROTARY):
            raise ValueError(f"{_OP}: format v4 stores D, Dr = 512, 64, got {dims['D']}, {dims['Dr']}")
        _latent_cache.check_pages(_OP, cache, "v4", page or 1)
    _checks.check_positive(_OP, eps=eps)
    heads = dims["H"] if heads is None else heads
    if heads < dims["H"]:
        raise ValueError(f"{_OP}: heads must be at least H={dims['H']}, got {heads}")
    return {
        "q": q,
        "kv": kv,
        "positions": positions,
        "cos_sin": cos_sin,
        "cache": cache,
        "slots": slots,
        "format": format,
        "page": None if page is None else int(page),
        "heads": int(heads),
        "eps": float(eps),
    }


def _reference(q, kv, positions, cos_sin, cache, slots, *, format, page, heads, eps):
    """Norm and rotation of q; rotation and insertion of kv."""
    Dr, rows = cos_sin.shape[1], _rope.rows(cos_sin, positions)
    x = p.wide(q)
    kept, part = _rope.split(x * _rope.rms(x, eps), Dr, False)
    out = _rope.join(kept, _rope.rotate(part, rows[:, None]), False).astype(q.dtype)
    out = jnp.pad(out, ((0, 0), (0, heads - q.shape[1]), (0, 0)))
    kept, part = kv[:, :-Dr], _rope.rotate(p.wide(kv[:, -Dr:]), rows).astype(kv.dtype)
    more = {"format": format, "scale": None, "page": page}
    return out, latent_cache_write.MECHANISM.reference(kept, part, cache, slots, **more)


def _cost(*, q, kv, format, heads, **_):
    """`q` and kv read once, q and the rows written."""
    N, _, D = q.shape
    width = jnp.dtype(q.dtype).itemsize
    return 5 * q.size, (q.size + kv.size + N * heads * D) * width + N * (584 if format == "v4" else D * width)


def make_inputs(
    rng: np.random.Generator,
    N: int,
    H: int,
    *,
    D: int = 512,
    Dr: int = 64,
    P: int = 50,
    dtype: str = "bfloat16",
    format: str = "v4",
    page: int = 64,
    pages: int = 2,
    skipped: float = 0.2,
    **options,
) -> Args:
    """Random arguments of `qnorm_rope_kv_insert`: NaN in kv rows without a slot and in rows of the table not used.

    Args:
        rng: source of randomness.
        N: tokens.
        H: heads.
        D: head dim.
        Dr: rotated numbers.
        P: rows of the table.
        dtype: of q and kv.
        format: of the cache.
        page: rows of a page.
        pages: of the cache.
        skipped: part of the tokens without a slot.
        **options: passed on to the op.
    """
    gone = rng.random(N) < skipped
    slots = rng.permutation(pages * page)[:N].astype(np.int32)
    slots[gone] = -1
    q, kv = (rng.standard_normal(s).astype(np.float32) for s in ((N, H, D), (N, D)))
    q[0, 0], kv[gone] = 0, np.nan
    kv[0, : min(D - Dr, 64)] = 0
    positions = rng.integers(0, P, N).astype(np.int32)
    cos_sin = np.array(_rope.table(jnp.asarray(_rope.frequencies(Dr, 10000.0)), jnp.arange(P)))
    cos_sin[np.setdiff1d(np.arange(P), positions)] = np.nan
    if format == "v4":
        cache = jnp.asarray(rng.integers(0, 256, (pages, _latent_cache.v4_page_bytes(page))).astype(np.uint8))
        options["page"] = page
    else:
        cache = jnp.asarray(rng.standard_normal((pages, page, D)), dtype)
    return {
        "q": jnp.asarray(q, dtype),
        "kv": jnp.asarray(kv, dtype),
        "positions": jnp.asarray(positions),
        "cos_sin": jnp.asarray(cos_sin),
        "cache": cache,
        "slots": jnp.asarray(slots),
        "format": format,
        **options,
    }


def _case(name: str, N: int, H: int, *tags: str, shapes: Any = None, **options) -> Case:
    tagged = frozenset(tags or ("smoke",))
    return Case(name=name, make=lambda rng: make_inputs(rng, N, H, **options), tags=tagged, shapes=shapes)


_CASES = (
    _case("N6-H8-v4", 6, 8),
    _case("N5-H4-plain-fp32", 5, 4, dtype="float32", format="plain", page=16),
    _case("N4-H3-v4-padded", 4, 3, heads=8, page=2, pages=4),
    _case("N5-H2-v4-fp32", 5, 2, dtype="float32"),
    _case("N3-H5-D128-plain-fp16", 3, 5, D=128, dtype="float16", format="plain", page=16),
    _case("N130-H64-v4", 130, 64, "full", pages=4),
    _case(
        "N4096-H64-v4",
        4096,
        64,
        "full",
        "bench",
        pages=66,
        P=4096,
        skipped=0.0,
        shapes=lambda: _struct("bfloat16", "v4", N=4096, pages=66),
    ),
)


def _struct(dtype: str, format: str, H: int = 64, D: int = 512, *, N: int = 128, pages: int = 32) -> Args:
    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    args: Args = {"q": array((N, H, D), dtype), "kv": array((N, D), dtype), "positions": array((N,), "int32")}
    args |= {"cos_sin": array((4096, 64), "float32"), "slots": array((N,), "int32"), "format": format}
    if format == "v4":
        return args | {"cache": array((pages, 37440), "uint8"), "page": 64}
    return args | {"cache": array((pages, 64, D), dtype)}


MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 csrc fused_deepseek_v4_qnorm_rope_kv_insert_kernel.cu",
    op=qnorm_rope_kv_insert,
    prepare=prepare,
    reference=_reference,
    outputs=lambda *, format, **_: ("q", "pages" if format == "plain" else "cache"),
    kernels={
        "mosaic": Kernel(
            run=mosaic.qnorm_rope_kv_insert,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    captures=("dsv4/qnorm_rope_kv_insert*",),
    support=tuple(
        (f"{dtype}, {format} cache, H {H}", _struct(dtype, format, H))
        for dtype in ("bfloat16", "float32")
        for format in FORMATS
        for H in (64, 128)
    ),
)
