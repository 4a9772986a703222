"""Products of rows in groups, each with a weight of its own: bfloat16, or FP8 codes with block scales."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.ops import scaled_matmul
from pallas_kernels import _mosaic
from pallas_kernels import grouped_matmul as mosaic

_OP = "grouped_matmul"
BLOCK = 128
"""Inputs, and output features, that share a scale."""
CODES = ("float8_e4m3fn", "float8_e5m2")


def grouped_matmul(
    a: Float[Array, "N M"],
    b: Float[Array, "E F M"],
    offsets: Int32[Array, "E+1"],
    a_scale: Float[Array, "N mblocks"] | None = None,
    b_scale: Float[Array, "E fblocks mblocks"] | None = None,
    *,
    out_dtype: str = "bfloat16",
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "N F"]:
    """`o[n] = b[e] @ a[n]` for rows offsets[e] <= n < offsets[e + 1] of group e; rows of no group are 0.

    Sums are float32, and the result is rounded once. FP8 codes have scales for blocks of 128 inputs, which multiply
    where tensor-core kernels multiply:

        o[n, f] = sum_k a_scale[n, k] * b_scale[e, f // 128, k] * (sum_{m in block k} a[n, m] b[e, f, m])

    Args:
        a: rows in the order of their groups, as `permute` gives them: bfloat16, float16, float32, float64 or codes of
            float8. Rows of no group are not read (more exactly: nothing depends on them).
        b: a weight a group, one row per output feature, of the dtype of `a`. Those of empty groups are not read.
        offsets: int32, where each group begins and the last one ends: 0 = offsets[0] <= ... <= offsets[E] <= N. They
            stay on the device; groups may be empty and begin at any row.
        a_scale: float32 [N, ceil(M / 128)], with float8 only.
        b_scale: float32 [E, ceil(F / 128), ceil(M / 128)], with float8 only.
        out_dtype: bfloat16, float16 or float32.
        implementation: None (choose), "mosaic" (Hopper) or "reference".
        config: launch configuration of the named kernel.

    Returns:
        [N, F] in `out_dtype` (float64 for float64 inputs).

    Raises:
        TypeError: dtypes; ValueError: shapes, or scales that are missing or too many; NotImplementedError: the named
        implementation cannot run this call.

    Source: DeepGEMM `m_grouped_fp8_gemm_nt_contiguous`, whose groups begin at multiples of 128 rows and are named by a
    number per row; PyTorch `torch.nn.functional.grouped_mm`.
    """
    args = prepare(a, b, offsets, a_scale, b_scale, out_dtype=out_dtype)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(a, b, offsets, a_scale=None, b_scale=None, *, out_dtype="bfloat16") -> Args:
    """Validate the arguments of `grouped_matmul`; raises as it does."""
    dims = _checks.check_shapes(_OP, a=(a, "N M"), b=(b, "E F M"), offsets=(offsets, "E+1"))
    kind = _checks.check_dtype(_OP, "a", a, (*CODES, *_checks.FLOATS))
    _checks.check_dtype(_OP, "b", b, CODES if kind in CODES else (kind,), "a and b need one kind; cast one of them")
    _checks.check_dtype(_OP, "offsets", offsets, ("int32",))
    if out_dtype not in scaled_matmul.OUTPUTS:
        raise ValueError(f"{_OP}: out_dtype must be one of {', '.join(scaled_matmul.OUTPUTS)}, got {out_dtype!r}")
    N, M, E, F = (dims[name] for name in ("N", "M", "E", "F"))
    blocks = -(-M // BLOCK)
    scales = {"a_scale": (a_scale, (N, blocks)), "b_scale": (b_scale, (E, -(-F // BLOCK), blocks))}
    given = [name for name, (s, _) in scales.items() if s is not None]
    if len(given) == 1 or (kind in CODES and not given) or (kind not in (*CODES, _checks.F64) and given):
        raise ValueError(
            f"{_OP}: codes of float8 need a_scale and b_scale, other numbers have none, got {kind} with "
            f"{' and '.join(given) or 'no scales'}"
        )
    for name in given:
        s, shape = scales[name]
        _checks.check_dtype(_OP, name, s, ("float32", _checks.F64))
        if tuple(s.shape) != shape:
            raise ValueError(f"{_OP}: {name} must be {shape}, one per block of {BLOCK}, got shape {tuple(s.shape)}")
    return {"a": a, "b": b, "offsets": offsets, "a_scale": a_scale, "b_scale": b_scale, "out_dtype": out_dtype}


def _reference(a, b, offsets, a_scale, b_scale, *, out_dtype):
    """One group after the other, on all rows."""
    row = jnp.arange(a.shape[0], dtype=jnp.int32)[:, None]

    def group(o, one):
        weight, scale, first, end = one
        if a_scale is None:
            wide = jnp.promote_types(a.dtype, jnp.float32)
            product = jnp.einsum("nm,fm->nf", a.astype(wide), weight.astype(wide), precision="highest").astype(o.dtype)
        else:
            product = scaled_matmul.scaled_matmul(
                a, weight, a_scale, scale, block=BLOCK, out_dtype=out_dtype, implementation=_mechanism.REFERENCE
            )
        return jnp.where((row >= first) & (row < end), product, o), None

    zeros = jnp.zeros((a.shape[0], b.shape[1]), a.dtype if a.dtype == jnp.float64 else out_dtype)
    return jax.lax.scan(group, zeros, (b, b_scale, offsets[:-1], offsets[1:]))[0]


def _outputs(**_):
    return ("o",)


def _cost(*, a, b, offsets, out_dtype, **_):
    """2 M F flops a row of a group; those rows, the weights of groups that have rows, and all results once."""
    N, (_, F, M) = a.shape[0], b.shape
    sizes = np.diff(np.asarray(offsets))
    rows, weights = int(sizes.sum()), int((sizes > 0).sum())
    size = jnp.dtype(a.dtype).itemsize
    return 2 * rows * M * F, (rows + weights * F) * M * size + N * F * jnp.dtype(out_dtype).itemsize


def _probe(rng: np.random.Generator, **args: Any) -> tuple[Args, np.ndarray]:
    """Some rows, the first and the last among them, and the weights of their groups."""
    N, offsets = args["a"].shape[0], np.asarray(args["offsets"])
    rows = np.unique([0, *rng.integers(0, N, 6), N - 1])
    bounds = np.searchsorted(rows, offsets)
    used = np.flatnonzero(np.diff(bounds))
    some = {"a": rows, "a_scale": rows, "b": used, "b_scale": used}
    fewer = {name: args[name][at] for name, at in some.items() if args[name] is not None}
    return args | fewer | {"offsets": jnp.asarray([0, *bounds[1:][used]], jnp.int32)}, rows


def make_inputs(
    rng: np.random.Generator, sizes: tuple[int, ...], M: int, F: int, *, dtype: str = CODES[0], rest: int = 0, **options
) -> Args:
    """Random arguments of `grouped_matmul`; what must not be read is NaN.

    Args:
        rng: source of randomness.
        sizes: rows of every group.
        M: inputs.
        F: output features.
        dtype: of rows and weights.
        rest: rows of no group.
        **options: passed on to the op.
    """
    E, used = len(sizes), sum(sizes)
    N, empty = used + rest, np.asarray(sizes) == 0

    def draw(*shape):
        return rng.standard_normal(shape) * (20 if dtype in CODES else 1)

    def scale(*shape):
        return rng.uniform(0.001, 0.01, shape)

    blocks = -(-M // BLOCK)
    drawn: Args = {"a": draw(N, M), "b": draw(E, F, M)}
    if dtype in CODES:
        drawn |= {"a_scale": scale(N, blocks), "b_scale": scale(E, -(-F // BLOCK), blocks)}
    for name, x in drawn.items():
        x[np.arange(N) >= used if name.startswith("a") else empty] = np.nan
        drawn[name] = jnp.asarray(x, jnp.float32 if name.endswith("scale") else dtype)
    return drawn | {"offsets": jnp.asarray(np.concatenate([[0], np.cumsum(sizes)]), jnp.int32)} | options


def _case(name: str, sizes: tuple[int, ...], M: int, F: int, tags: tuple[str, ...] = ("smoke",), **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, sizes, M, F, **options), tags=frozenset(tags))


def _struct(dtype: str, E: int = 8, N: int = 1024, M: int = 512, F: int = 256, **options) -> Args:
    def array(shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    args = {"a": array((N, M), dtype), "b": array((E, F, M), dtype), "offsets": array((E + 1,), "int32")}
    if dtype in CODES:
        args |= {"a_scale": array((N, -(-M // BLOCK))), "b_scale": array((E, -(-F // BLOCK), -(-M // BLOCK)))}
    return args | options


def _large(dtype: str, E: int, rows: int, M: int = 4096, F: int = 4096) -> Case:
    """One of the benchmarks, groups of equal size, drawn on the device."""

    def shapes():
        return _struct(dtype, E, E * rows, M, F)

    def make(rng):
        key = jax.random.key(int(rng.integers(2**31)))
        made = {}
        for i, (name, x) in enumerate(shapes().items()):
            if name.endswith("scale"):
                made[name] = jax.random.uniform(jax.random.fold_in(key, i), x.shape, jnp.float32, 0.001, 0.01)
            elif name != "offsets":
                made[name] = _normal(jax.random.fold_in(key, i), x.shape, dtype)
        return made | {"offsets": jnp.arange(0, E * rows + 1, rows, dtype=jnp.int32)}

    short = "fp8" if dtype in CODES else "bf16"
    tags = frozenset({"bench", "eight_bit"} if dtype in CODES else {"bench"})
    return Case(name=f"{short}-E{E}-R{rows}-M{M}-F{F}", make=make, tags=tags, shapes=shapes)


@jax.jit(static_argnums=(1, 2))
def _normal(key, shape, dtype):
    """Normal numbers, of which FP8 takes those 20 times as large; in one program, which holds no float32."""
    return (jax.random.normal(key, shape) * (20 if dtype in CODES else 1)).astype(dtype)


_CASES = (
    _case("fp8-E4-ragged", (5, 0, 17, 9), 256, 128, rest=3),
    _case("fp8-E3-odd-sizes", (70, 1, 12), 400, 136, rest=70),
    _case("fp8-E2-many-rows-fp16", (150, 61), 256, 256, out_dtype="float16"),
    _case("bf16-E3-ragged", (7, 20, 0), 192, 72, dtype="bfloat16", rest=2),
    _case("bf16-E2-many-rows", (131, 70), 128, 256, dtype="bfloat16"),
    _case("fp8-E2-fp32", (3, 4), 200, 130, out_dtype="float32"),
    _case("fp32-E2", (3, 0, 4), 72, 24, dtype="float32", out_dtype="float32", rest=1),
    _case("fp8-E3-R900", (1201, 0, 1499), 1152, 1024, tags=("full",), rest=300),
    _case("bf16-E3-R900", (1201, 0, 1499), 1088, 1024, tags=("full",), dtype="bfloat16", rest=300),
    _case("fp8-E16-R100", (*range(60, 212, 10), 1), 1024, 1536, tags=("full",), rest=9),
    *(_large(CODES[0], E, rows) for E, rows in ((8, 4096), (32, 256), (32, 8))),
    _large("bfloat16", 8, 4096),
)

_SUPPORT = (
    *((f"{dtype}, {E} groups", _struct(dtype, E)) for dtype in ("bfloat16", CODES[0]) for E in (8, 256)),
    (CODES[1], _struct(CODES[1])),
    ("float32", _struct("float32")),
    ("float8_e4m3fn, float32 out", _struct(CODES[0], out_dtype="float32")),
    ("bfloat16, 100 inputs", _struct("bfloat16", M=100)),
    ("float8_e4m3fn, 100 output features", _struct(CODES[0], F=100)),
)

MECHANISM = Mechanism(
    name=_OP,
    source="https://github.com/deepseek-ai/DeepGEMM; vLLM 0.26.0 vllm/utils/deep_gemm.py",
    op=grouped_matmul,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.grouped_matmul,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    probe=_probe,
    captures=("quant/block_fp8_mm_*",),
    support=_SUPPORT,
)
