"""Matrix products of quantized activations and quantized weights: FP8 and INT8, with their scales."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Num

from jaxattn import _checks, _mechanism
from jaxattn._mechanism import Args, Case, Kernel, Mechanism
from jaxattn.quant import fp8, int8
from jaxattn.quant import primitives as p
from pallas_kernels import _mosaic
from pallas_kernels import scaled_matmul as mosaic

_OP = "scaled_matmul"
CODES = ("float8_e4m3fn", "float8_e5m2", "int8")
OUTPUTS = ("bfloat16", "float16", "float32")
E4M3 = CODES[0]


def scaled_matmul(
    a: Num[Array, "N M"],
    b: Num[Array, "F M"],
    a_scale: Float[Array, "..."],
    b_scale: Float[Array, "..."],
    *,
    bias: Float[Array, " F"] | None = None,
    azp: Int32[Array, "..."] | None = None,
    b_sums: Int32[Array, " F"] | None = None,
    block: int | None = None,
    out_dtype: str = "bfloat16",
    implementation: str | None = None,
    config: Any = None,
) -> Float[Array, "N F"]:
    """`o = (a_scale * a) @ (b_scale * b).T + bias` of codes, accumulated in float32 (INT8: exactly, in int32).

    Scales multiply where tensor-core kernels multiply:

        block=None:  o[n, f] = (sum_m a[n, m] b[f, m]) * b_scale[f] * a_scale[n] + bias[f]
        block=g:     o[n, f] = sum_k a_scale[n, k] * b_scale[f // g, k] * (sum_{m in block k} a[n, m] b[f, m]) + bias[f]

    and the result is rounded once. With `azp` the activations are `(a - azp) * a_scale`.

    Args:
        a: activations: float8_e4m3fn, float8_e5m2 or int8 codes.
        b: the weight, one row per output feature; codes of the same kind.
        a_scale: float32, one number or one per row ([N] or [N, 1]); with `block` [N, ceil(M / block)].
        b_scale: float32, one number or one per output feature ([F], [1, F] or [F, 1]); with `block`
            [ceil(F / block), ceil(M / block)].
        bias: any float.
        azp: zero points of int8 activations, one number or one per row; not with `block`.
        b_sums: with `azp`, the sum of each row of `b` (vLLM: azp_adj); None = added up in every call, which reads
            `b` a second time.
        block: size of the scales' blocks (128), None = one scale along M.
        out_dtype: bfloat16, float16 or float32.
        implementation: None (choose), "mosaic" (Hopper) or "reference".
        config: launch configuration of the named kernel.

    Raises:
        TypeError: dtypes; ValueError: shapes or options that do not belong together;
        NotImplementedError: the named implementation cannot run this call.

    Source: vLLM 0.26.0 `cutlass_scaled_mm`, `cutlass_scaled_mm_azp`, `w8a8_triton_block_scaled_mm`; DeepGEMM
    `fp8_gemm_nt`.
    """
    args = prepare(a, b, a_scale, b_scale, bias=bias, azp=azp, b_sums=b_sums, block=block, out_dtype=out_dtype)
    return _mechanism.run(MECHANISM, args, implementation, config)


def prepare(a, b, a_scale, b_scale, *, bias=None, azp=None, b_sums=None, block=None, out_dtype="bfloat16") -> Args:
    """Validate and complete the arguments of `scaled_matmul`; raises as it does."""
    named = {"a": (a, "N M"), "b": (b, "F M")}
    named |= {name: (x, "F") for name, x in (("bias", bias), ("b_sums", b_sums)) if x is not None}
    dims = _checks.check_shapes(_OP, **named)
    N, M, F = dims["N"], dims["M"], dims["F"]
    kind = _checks.check_dtype(_OP, "a", a, (*CODES, _checks.F64), "quantize it first")
    allowed = (kind,) if kind in ("int8", _checks.F64) else CODES[:2]
    _checks.check_dtype(_OP, "b", b, allowed, "quantize both to the same kind")
    for name, x in (("a_scale", a_scale), ("b_scale", b_scale)):
        if not _checks.is_array(x):
            raise TypeError(f"{_OP}: {name} must be an array, got {type(x).__name__}")
        _checks.check_dtype(_OP, name, x, ("float32", _checks.F64))
    if bias is not None:
        _checks.check_dtype(_OP, "bias", bias, _checks.FLOATS)
    if out_dtype not in OUTPUTS:
        raise ValueError(f"{_OP}: out_dtype must be one of {', '.join(OUTPUTS)}, got {out_dtype!r}")
    if azp is not None:
        if kind != "int8" or block is not None:
            raise ValueError(f"{_OP}: azp belongs to int8 codes without block, got {kind} and {block=}; leave it out")
        _checks.check_dtype(_OP, "azp", azp, ("int32",))
    if b_sums is not None:
        if azp is None:
            raise ValueError(f"{_OP}: b_sums are used with azp only, got azp=None; leave them out")
        _checks.check_dtype(_OP, "b_sums", b_sums, ("int32",))
    if block is not None:
        _checks.check_count(_OP, block=block)
        columns = -(-M // block)
        expected = {"a_scale": (N, columns), "b_scale": (-(-F // block), columns)}
        for name, x in (("a_scale", a_scale), ("b_scale", b_scale)):
            if tuple(x.shape) != expected[name]:
                raise ValueError(f"{_OP}: with {block=} {name} must be {expected[name]}, got shape {tuple(x.shape)}")
    else:
        a_scale, b_scale = _vector("a_scale", a_scale, N), _vector("b_scale", b_scale, F)
        azp = None if azp is None else _vector("azp", azp, N)
    return {
        "a": a,
        "b": b,
        "a_scale": a_scale,
        "b_scale": b_scale,
        "bias": bias,
        "azp": azp,
        "b_sums": b_sums,
        "block": None if block is None else int(block),
        "out_dtype": out_dtype,
    }


def _vector(name: str, x: Any, count: int) -> Any:
    """One number as [1], one per row or feature as [count]; shape-dtype structs too."""
    size = int(np.prod(x.shape))
    if size not in (1, count) or sum(n != 1 for n in x.shape) > 1:
        raise ValueError(f"{_OP}: {name} must be one number or a vector of {count}, got shape {tuple(x.shape)}")
    return jax.ShapeDtypeStruct((size,), x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.reshape(size)


def _reference(a, b, a_scale, b_scale, *, bias, azp, b_sums, block, out_dtype):
    """The formula of the docstring; float8 products are exact in float32, INT8 sums are exact in int32."""
    work = a_scale.dtype
    if block is None:
        acc = _product(a, b, work)
        if azp is not None:
            acc = acc - azp[:, None] * (jnp.sum(b, 1, dtype=jnp.int32) if b_sums is None else b_sums)
        o = acc.astype(work) * b_scale * a_scale[:, None]
    else:
        parts_a, parts_b = p.grouped(a, block).swapaxes(0, 1), p.grouped(b, block).swapaxes(0, 1)
        rows = fp8.expand(b_scale, (b.shape[0], b_scale.shape[1] * block), "block", block)[:, ::block]
        o = jnp.zeros((a.shape[0], b.shape[0]), work)
        for kb in range(a_scale.shape[1]):
            acc = _product(parts_a[kb], parts_b[kb], work).astype(work)
            o = o + acc * (a_scale[:, kb, None] * rows[:, kb])
    if bias is not None:
        o = o + bias.astype(work)
    return o if work == jnp.float64 else o.astype(out_dtype)


def _product(a, b, work):
    if a.dtype == jnp.int8:
        return int8.product(a, b)
    return jnp.einsum("nm,fm->nf", a.astype(work), b.astype(work), precision="highest")


def _outputs(**_):
    return ("o",)


def _cost(*, a, b, out_dtype, **_):
    """2 N M F flops; codes read and the result written once."""
    (N, M), F = a.shape, b.shape[0]
    return 2 * N * M * F, (N + F) * M + N * F * jnp.dtype(out_dtype).itemsize


def make_inputs(
    rng: np.random.Generator,
    N: int,
    M: int,
    F: int,
    *,
    codes: str = "float8_e4m3fn",
    scales: str = "token",
    bias: bool = False,
    azp: bool = False,
    sums: bool = False,
    **options,
) -> Args:
    """Random arguments of `scaled_matmul`.

    Args:
        rng: source of randomness.
        N: rows of activations.
        M: input features.
        F: output features.
        codes: dtype of both operands.
        scales: "tensor", "token" (and one per output feature) or "block" (128).
        bias: add one.
        azp: draw zero points.
        sums: add up the rows of the weight beforehand.
        **options: passed on to the op.
    """

    def draw(*shape):
        if codes == "int8":
            return jnp.asarray(rng.integers(-128, 128, shape), "int8")
        return jnp.asarray(rng.standard_normal(shape) * 20, codes)

    def scale(*shape):
        return jnp.asarray(rng.uniform(0.001, 0.01, shape), jnp.float32)

    blocks = -(-M // 128)
    shapes = {"tensor": ((), ()), "token": ((N, 1), (F,)), "block": ((N, blocks), (-(-F // 128), blocks))}[scales]
    args: Args = {"a": draw(N, M), "b": draw(F, M), "a_scale": scale(*shapes[0]), "b_scale": scale(*shapes[1])}
    if bias:
        args["bias"] = jnp.asarray(rng.standard_normal(F), jnp.float32)
    if azp:
        args["azp"] = jnp.asarray(rng.integers(-20, 20, (N, 1)), jnp.int32)
    if sums:
        args["b_sums"] = jnp.sum(args["b"], 1, dtype=jnp.int32)
    return args | ({"block": 128} if scales == "block" else {}) | options


def _case(name: str, N: int, M: int, F: int, *tags: str, **options) -> Case:
    return Case(name=name, make=lambda rng: make_inputs(rng, N, M, F, **options), tags=frozenset(tags or ("smoke",)))


def _struct(codes: str, scales: str, N: int = 64, M: int = 512, F: int = 256, **options) -> Args:
    def array(shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    shapes = {"tensor": ((), ()), "token": ((N, 1), (F,)), "block": ((N, M // 128), (F // 128, M // 128))}[scales]
    args = {"a": array((N, M), codes), "b": array((F, M), codes)}
    args |= {"a_scale": array(shapes[0]), "b_scale": array(shapes[1])}
    return args | ({"block": 128} if scales == "block" else {}) | options


def _large(N: int, codes: str, scales: str, M: int = 7168, F: int = 4096) -> Case:
    """One of the benchmarks, drawn on the device; INT8 with zero points."""
    azp = {}
    if codes == "int8":
        azp = {name: jax.ShapeDtypeStruct((n,), jnp.int32) for name, n in (("azp", N), ("b_sums", F))}

    def shapes():
        return _struct(codes, scales, N, M, F, **azp)

    def draw(key, name, x):
        if x.dtype in (jnp.int8, jnp.int32):
            top = 128 if x.dtype == jnp.int8 else 20
            return jax.random.randint(key, x.shape, -top, top, jnp.int32).astype(x.dtype)
        if name.endswith("scale"):
            return jax.random.uniform(key, x.shape, jnp.float32, 0.001, 0.01)
        return (20 * jax.random.normal(key, x.shape)).astype(x.dtype)

    def make(rng):
        key = jax.random.key(int(rng.integers(2**31)))
        drawn = {
            name: draw(jax.random.fold_in(key, i), name, x) if _checks.is_array(x) else x
            for i, (name, x) in enumerate(shapes().items())
        }
        return drawn | ({"b_sums": jnp.sum(drawn["b"], 1, dtype=jnp.int32)} if azp else {})

    name = f"{'fp8' if azp == {} else 'int8-azp'}-{scales}-N{N}-M{M}-F{F}"
    return Case(name=name, make=make, tags=frozenset({"bench", "eight_bit"}), shapes=shapes)


def _probe(rng: np.random.Generator, **args: Any) -> tuple[Args, np.ndarray]:
    """Eight rows of activations."""
    N = args["a"].shape[0]
    rows = rng.choice(N, min(N, 8), replace=False)
    fewer = {
        name: args[name][rows] for name in ("a", "a_scale", "azp") if args[name] is not None and len(args[name]) == N
    }
    return args | fewer, rows


_CASES = (
    _case("fp8-token-bias", 33, 256, 128, bias=True),
    _case("fp8-tensor-fp32", 5, 200, 64, scales="tensor", out_dtype="float32"),
    _case("fp8-token-bias-fp32", 17, 256, 72, bias=True, out_dtype="float32"),
    _case("fp8-block", 36, 512, 256, scales="block"),
    _case("fp8-block-many-rows", 140, 640, 136, scales="block"),
    _case("fp8-block-one-row-odd-inputs", 1, 208, 72, scales="block"),
    _case("fp8-token-fp16-odd", 131, 400, 136, bias=True, out_dtype="float16"),
    _case("fp8-block-odd-fp32", 7, 200, 130, scales="block", out_dtype="float32"),
    _case("e5m2-fp16", 5, 128, 64, codes="float8_e5m2", out_dtype="float16"),
    _case("int8-token", 33, 256, 128, codes="int8"),
    _case("int8-azp-bias", 33, 256, 128, codes="int8", azp=True, bias=True),
    _case("int8-azp-sums", 33, 256, 128, codes="int8", azp=True, sums=True),
    _case("int8-tensor-azp-many-rows-fp32", 70, 400, 136, codes="int8", scales="tensor", azp=True, out_dtype="float32"),
    _case("int8-block-fp32", 7, 256, 256, codes="int8", scales="block", out_dtype="float32"),
    *(_large(N, *rest) for N in (1, 16, 64, 4096) for rest in ((E4M3, "block"), (E4M3, "token"), ("int8", "token"))),
)

_SUPPORT = (
    *((f"{codes}, scales per {scales}", _struct(codes, scales)) for codes in CODES for scales in ("tensor", "token")),
    *((f"{codes}, scales per block", _struct(codes, "block")) for codes in ("float8_e4m3fn", "int8")),
    ("float8_e4m3fn, float32 out", _struct("float8_e4m3fn", "token", out_dtype="float32")),
    ("float8_e4m3fn, 200 input features", _struct("float8_e4m3fn", "token", M=200)),
    ("float8_e4m3fn, 100 output features", _struct("float8_e4m3fn", "token", F=100)),
    (
        "int8 with zero points",
        _struct("int8", "token", azp=jax.ShapeDtypeStruct((64, 1), jnp.int32)),
    ),
)

MECHANISM = Mechanism(
    name=_OP,
    source="vLLM 0.26.0 csrc/quantization/w8a8/cutlass, fp8_utils.py; https://github.com/deepseek-ai/DeepGEMM",
    op=scaled_matmul,
    prepare=prepare,
    reference=_reference,
    outputs=_outputs,
    kernels={
        "mosaic": Kernel(
            run=mosaic.scaled_matmul,
            why_not=mosaic.why_not,
            why_not_here=_mosaic.why_not_here,
            default_config=mosaic.default_config,
            configs=mosaic.configs,
        )
    },
    cases=_CASES,
    cost=_cost,
    probe=_probe,
    captures=("quant/cutlass_*", "quant/block_fp8_mm_*"),
    support=_SUPPORT,
)
