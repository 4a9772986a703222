"""What cache writes promise beyond the contract: bytes, untouched slots, no copy, addresses beyond 32 bits."""

import contextlib
import itertools
import math
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxattn import _kv_quant, cache_write
from jaxattn.ops.cache_write import FP8, MECHANISM, make_inputs
from pallas_kernels import _aot, _exact, _mosaic
from pallas_kernels import cache_write as mosaic

implementations = pytest.mark.parametrize("implementation", ["reference", "mosaic"])
aot = pytest.mark.skipif(_mosaic.find_ptxas() is None, reason="lacks ptxas")


def run(implementation, **args):
    """Outputs as numpy arrays; kernels run on the GPU if there is one, else interpreted."""
    interpreted = implementation == "mosaic" and _mosaic.why_not_here()
    with _mosaic.interpret() if interpreted else contextlib.nullcontext():
        out = jax.block_until_ready(cache_write(**args, implementation=implementation))
    return jax.tree.map(np.asarray, out)


def bits(x):
    return np.asarray(x).view(np.uint8)


def flat(pages):
    return pages.reshape(-1, *pages.shape[2:])


def one_row(values, dtype="float32", **caches):
    """A single token whose head 0 starts with `values`, for a cache of four slots."""
    x = jnp.zeros((1, 1, 128), dtype).at[0, 0, : len(values)].set(jnp.asarray(values, dtype))
    return {"key": x, "value": x, "slots": jnp.array([2])} | caches


def float8_cache():
    return {name: jnp.zeros((2, 2, 1, 128), FP8) for name in ("k_pages", "v_pages")}


# ---------------------------------------------------------------- where bytes go
@implementations
@pytest.mark.parametrize("mode", ["copy", "fp8", "int8_token_head", "fp8_token_head", "int4_token_head"])
def test_named_slots_are_written_and_no_other_byte_changes(implementation, mode, rng):
    args = make_inputs(rng, 9, 8, 128, P=5, page=4, mode=mode, skipped=0.0)
    slots = np.array([3, -1, 19, 20, 0, 7, -7, 11, 12], np.int32)
    named = slots[(slots >= 0) & (slots < 20)]
    gone = jnp.asarray((slots < 0) | (slots >= 20))[:, None, None]
    new = {name: jnp.where(gone, jnp.nan, args[name]) for name in ("key", "value")}
    out = run(implementation, **args | new | {"slots": jnp.asarray(slots)})
    rest = np.setdiff1d(np.arange(20), named)
    names = ("k_pages", "v_pages", "k_scale_pages", "v_scale_pages")
    for name, x in zip(names, out, strict=False):
        np.testing.assert_array_equal(bits(flat(x)[rest]), bits(flat(np.asarray(args[name]))[rest]), err_msg=name)
        assert not np.isnan(flat(x)[named].astype(np.float32)).any(), name


@implementations
@pytest.mark.parametrize("slot", [-1, -(2**31), 4, 2**31 - 1])
def test_slots_outside_the_cache_write_nothing(implementation, slot):
    args = one_row([1.0], **float8_cache()) | {"slots": jnp.array([slot])}
    for x in run(implementation, **args):
        assert not bits(x).any()


@implementations
def test_slots_may_have_64_bits(implementation, rng):
    args = make_inputs(rng, 5, 1, 128, dtype="float32")
    expected = run(implementation, **args)
    with jax.enable_x64(True):
        wide = args | {"slots": jnp.asarray(args["slots"], jnp.int64).at[0].set(2**40)}
        short = args | {"slots": args["slots"].at[0].set(-1)}
        got, expected = run(implementation, **wide), run(implementation, **short)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("tokens", [2, 4])
def test_tokens_of_one_block_give_the_same_bytes(tokens, rng):
    args = make_inputs(rng, 7, 2, 64, mode="fp8")
    for a, b in zip(run("mosaic", **args, config=mosaic.Config(tokens=tokens)), run("reference", **args), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@implementations
def test_a_batch_of_caches_under_vmap(implementation, rng):
    batch = [make_inputs(rng, 5, 2, 64, mode="fp8") for _ in range(2)]
    stacked = {name: jnp.stack([jnp.asarray(args[name]) for args in batch]) for name in batch[0]}
    interpreted = implementation == "mosaic" and _mosaic.why_not_here()
    with _mosaic.interpret() if interpreted else contextlib.nullcontext():
        out = jax.vmap(lambda args: cache_write(**args, implementation=implementation))(stacked)
        out = jax.tree.map(np.asarray, out)
    for i, args in enumerate(batch):
        for x, expected in zip(out, run("reference", **args), strict=True):
            np.testing.assert_array_equal(bits(x[i]), bits(expected))


# ---------------------------------------------------------------- which bytes
@implementations
def test_float8_codes_saturate_and_nan_stays(implementation):
    values = [448.0, 464.0, 465.0, 1e6, -1e6, math.inf, -math.inf, math.nan, -0.0, 2.0**-10, 2.0**-9]
    codes = run(implementation, **one_row(values, **float8_cache()))[0]
    expected = [448, 448, 448, 448, -448, 448, -448, math.nan, -0.0, 0, 2.0**-9]
    expected = np.array(expected, np.float32).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(bits(codes[1, 0, 0, : len(values)]), bits(expected))
    assert bits(codes[1, 0, 0, 7]) == 0x7F


@implementations
def test_bc37_float8_codes_are_rounded_once(implementation):
    codes = run(implementation, **one_row([400.199585, 272.156555, 136.002075], **float8_cache()))[0]
    assert codes[1, 0, 0, :3].astype(np.float32).tolist() == [416, 288, 144]


@implementations
def test_the_quotient_is_rounded_before_the_code(implementation):
    """-0.375 / 0.03 is -12.5 in float32, a tie; times the reciprocal it is -12.500001, another code."""
    scales = {"k_scale": np.float32(0.03), "v_scale": np.float32(0.03)}
    codes = run(implementation, **one_row([-0.375], "bfloat16", **float8_cache(), **scales))[0]
    assert codes[1, 0, 0, 0].astype(np.float32) == -12


def test_division_is_correctly_rounded_where_the_compiler_multiplies(rng):
    x = (rng.standard_normal(20000) * 10.0 ** rng.integers(-6, 6, 20000)).astype(np.float32)
    y = rng.standard_normal(20000).astype(np.float32)
    for divisor in (y, np.float32(0.03), np.float32(448), np.float32(127), np.float32(15)):
        quotients = (
            _exact.divide(jnp.asarray(x), divisor),
            jax.jit(_exact.divide)(x, divisor),
            jax.jit(lambda x, y=divisor: _exact.divide(x, y))(x),
        )
        for got in quotients:
            np.testing.assert_array_equal(bits(got), bits(x / divisor))


@pytest.mark.parametrize("off", [-2, -1, 0, 1, 2])
def test_a_root_is_correctly_rounded_whatever_the_compiler_makes_of_it(off, rng, monkeypatch):
    """`off` units in the last place: on a GPU a root is up to two off. Squares of halfway numbers are hard."""
    halfway = (2.0 * rng.integers(2**23, 2**24, 20000) + 1) * 2.0**-24
    hard = (halfway**2).astype(np.float32)
    powers = np.float32(4.0) ** np.arange(-29, 30, dtype=np.float32)
    x = [np.exp2(rng.uniform(-59, 59, 20000)).astype(np.float32), hard, powers]
    x = np.concatenate([np.nextafter(a, np.float32(to)) if to else a for a in x for to in (None, -math.inf, math.inf)])
    right, plain = np.sqrt(x.astype(np.float64)).astype(np.float32), jnp.sqrt

    def approximate(x):
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(plain(x), jnp.int32) + off, jnp.float32)

    monkeypatch.setattr(jnp, "sqrt", approximate)
    np.testing.assert_array_equal(bits(jax.jit(_exact.root)(x)), bits(right))


def test_roots_of_special_numbers():
    x = np.array([0, -0.0, math.inf, math.nan, -1, 1e38], np.float32)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(_exact.root(jnp.asarray(x)), np.sqrt(x))


def test_division_of_special_numbers():
    x = np.array([0, -0.0, math.inf, -math.inf, math.nan, 1e38], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(_exact.divide(jnp.asarray(x), 0.03), x / np.float32(0.03))


@implementations
@pytest.mark.parametrize(("stored", "limit"), [("int8", 127.0), (FP8, 448.0)])
def test_scales_per_token_and_head(implementation, stored, limit, rng):
    mode = "int8_token_head" if stored == "int8" else "fp8_token_head"
    args = make_inputs(rng, 6, 8, 128, mode=mode, skipped=0.0)
    codes, _, scales, _ = run(implementation, **args)
    x = np.asarray(args["key"]).astype(np.float32)
    amax = np.abs(x).max(-1)
    expected = np.maximum(amax * np.float32(1 / limit), np.float32(1e-6))  # as Triton: no quotient
    slots = np.asarray(args["slots"])
    np.testing.assert_array_equal(flat(scales)[slots], expected)
    assert expected[0, 0] == np.float32(1e-6), "a head of zeros"
    quotient = x * (np.float32(1) / expected)[..., None]
    if stored == "int8":
        wanted = np.trunc(quotient + np.copysign(np.float32(0.5), quotient)).clip(-128, 127).astype(np.int8)
    else:
        wanted = quotient.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(bits(flat(codes)[slots]), bits(wanted))


@pytest.mark.parametrize(
    ("mode", "K", "D", "Dv", "dtype"),
    [
        ("int8_token_head", 1, 64, 64, "float32"),
        ("fp8_token_head", 3, 96, 64, "float16"),
        ("int4_token_head", 4, 128, 32, "bfloat16"),
        ("int4_token_head", 2, 256, 256, "float32"),
        ("int4_token_head", 1, 16, 64, "bfloat16"),
    ],
)
def test_tokens_that_share_a_tile_give_the_same_bytes(mode, K, D, Dv, dtype, rng):
    """13 tokens are no whole number of tiles: the last block starts within the one before."""
    args = make_inputs(rng, 13, K, D, Dv=Dv, dtype=dtype, mode=mode)
    for tokens in (1, 2):
        got = run("mosaic", **args, config=mosaic.Config(tokens=tokens))
        for a, b in zip(got, run("reference", **args), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))


def test_the_kernel_takes_every_mode_and_few_heads():
    plain, few, rotated = per_head(), per_head("int8", 128), per_head("uint8", 32)
    few |= {name: jnp.zeros((3, 2, 128)) for name in ("key", "value")}
    for args in (plain, few, rotated, call()):
        assert mosaic.why_not(**MECHANISM.prepare(**args)) is None


@implementations
def test_int8_rounds_halves_away_from_zero(implementation):
    values = [127.0, 0.5, 1.5, -0.5, -2.5, 2.49]
    caches = {name: jnp.zeros((2, 2, 1, 128), jnp.int8) for name in ("k_pages", "v_pages")}
    caches |= {name: jnp.zeros((2, 2, 1)) for name in ("k_scale_pages", "v_scale_pages")}
    codes, _, scales, _ = run(implementation, **one_row(values, **caches))
    assert scales[1, 0, 0] == 1
    assert codes[1, 0, 0, : len(values)].tolist() == [127, 1, 2, -1, -3, 2]


# ---------------------------------------------------------------- int4
def test_int4_by_hand():
    """Numbers 0 to 15 have scale 1 and zero point 0: codes are the numbers, the even one in the low four bits."""
    codes, scale = _kv_quant.per_head_int4(jnp.arange(16.0))
    assert codes.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert scale == 1
    codes, scale = _kv_quant.per_head_int4(jnp.arange(16.0) - 6)
    assert codes.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert int(jax.lax.bitcast_convert_type(scale, jnp.int32)) & 15 == 6
    np.testing.assert_array_equal(_kv_quant.unpack_int4(codes, scale), np.arange(16) - 6)


def test_int4_codes_come_back_within_half_a_step(rng):
    x = jnp.asarray(rng.standard_normal((50, 128)) + 0.3, jnp.float32)
    codes, scale = _kv_quant.per_head_int4(x)
    back = _kv_quant.unpack_int4(codes, scale)
    # half a step for the code and half for the rounded zero point, at the ends of the range one step
    assert (np.abs(np.asarray(back - x)).max(-1) <= 1.001 * np.asarray(scale)).all()
    assert np.abs(np.asarray(back - x)).mean() <= 0.5 * float(scale.mean())


def test_a_constant_head_has_the_smallest_scale():
    codes, scale = _kv_quant.per_head_int4(jnp.zeros(8))
    assert not codes.any()
    np.testing.assert_array_max_ulp(np.asarray(scale), np.float32(1e-6), 15)


@pytest.mark.parametrize("D", [2, 8, 64, 256])
def test_the_rotation_and_its_inverse_multiply_by_D(D, rng):
    x = jnp.asarray(rng.integers(-50, 50, (3, D)), jnp.float32)
    back = _kv_quant.rotate(_kv_quant.rotate(x), inverse=True)
    np.testing.assert_array_equal(back, D * x)


def test_the_rotation_is_a_product_with_its_matrix(rng):
    """Integers, so that the order of the sums does not matter."""
    x = jnp.asarray(rng.integers(-9, 9, (3, 64)), jnp.float32)
    matrix = _kv_quant.rotation(64)
    np.testing.assert_array_equal(_kv_quant.rotate(x), x @ matrix)
    np.testing.assert_array_equal(_kv_quant.rotate(x, inverse=True), x @ matrix.T)


@pytest.mark.parametrize("D", [2, 4, 16])
def test_the_rotation_is_sylvesters_matrix(D):
    matrix = np.ones((1, 1))
    while len(matrix) < D:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    np.testing.assert_array_equal(_kv_quant.hadamard(jnp.eye(D)), matrix)


@pytest.mark.aot
@aot
def test_a_gpu_keeps_the_last_rounding_of_the_rotation():
    """XLA for GPUs computes with the unrounded number, and with another order of factors, where nothing keeps it."""
    x = jax.ShapeDtypeStruct((4, 2, 128), jnp.bfloat16)
    program = _aot.compile_h200(lambda x: _kv_quant.per_head_int4(_kv_quant.rotate_for_int4(x)), x).as_text()
    constants = re.findall(r"(\S+) = f32\[\] constant\(11\.3137", program)
    assert len(constants) == 1, "the factor sqrt(D) is used once, not joined with the inverse scale"
    (body,) = (part for part in program.split("\n\n") if f"{constants[0]} = f32[] constant" in part)
    (last,) = (line for line in body.splitlines() if "ROOT" in line)
    assert re.search(r"= bf16\[[\d,]+\].* convert\(", last), "what sqrt(D) multiplies is rounded"


def test_the_rotation_keeps_scores(rng):
    """(H s q) . (H s k) = D q . k: what an attention over an int4 cache divides its softmax scale by."""
    q, k = (jnp.asarray(rng.integers(-9, 9, (4, 64)), jnp.float32) for _ in range(2))
    rotated = (_kv_quant.rotate(q) * _kv_quant.rotate(k)).sum(-1)
    np.testing.assert_array_equal(rotated, 64 * (q * k).sum(-1))


def test_the_signs_are_those_of_the_mersenne_twister():
    """PyTorch's generator with seed 0 starts 0.4963, 0.7682, 0.0885, 0.1320: the low 24 bits of the Twister's words."""
    draws = np.random.RandomState(0).randint(0, 2**32, size=4, dtype=np.uint32)
    assert ((draws & 0xFFFFFF) / 2**24).round(4).tolist() == [0.4963, 0.7682, 0.0885, 0.132]
    signs = _kv_quant.signs(128)
    assert set(signs.tolist()) == {-1, 1}
    np.testing.assert_array_equal(signs[:64], _kv_quant.signs(64))


# ---------------------------------------------------------------- in place, and far away
@pytest.mark.aot
@aot
@pytest.mark.parametrize("mode", ["copy", "fp8", "int8_token_head"])
def test_a_donated_cache_is_not_copied(mode, rng):
    args = make_inputs(rng, 5, 8, 128, mode=mode)
    donated = sorted(name for name in args if name.endswith("pages"))
    rest = sorted(set(args) - set(donated))

    def write(*values):
        return cache_write(**dict(zip((*donated, *rest), values, strict=True)), implementation="mosaic")

    values = [jnp.asarray(args[name]) for name in (*donated, *rest)]
    for donate in ((), range(len(donated))):
        program = _aot.compile_h200(write, *values, donate=donate).as_text()
        head = program.splitlines()[0]
        assert program.count(" copy(") == (0 if donate else len(donated))
        assert head.count("may-alias") + head.count("must-alias") == len(donate)


@pytest.mark.aot
@aot
@pytest.mark.parametrize(("dtype", "row"), [(FP8, 1024), ("bfloat16", 2048)])
def test_bc17_the_address_of_a_slot_has_64_bits(dtype, row, tmp_path, monkeypatch):
    """The byte offset of the last slot of this cache needs 34 bits."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    new = jax.ShapeDtypeStruct((3, 8, 128), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((150_000, 64, 8, 128), jnp.dtype(dtype))
    assert 150_000 * 64 * row > 2**33
    slots = jax.ShapeDtypeStruct((3,), jnp.int32)
    _aot.compile_h200(lambda *x: cache_write(*x, implementation="mosaic"), new, new, pages, pages, slots)
    (ptx,) = (p.read_text() for p in tmp_path.glob("*.ptx"))
    shift = int(math.log2(row))
    loaded = re.findall(r"ld\.global\.b32\s+%(rd?\d+), \[%rd\d+\];", ptx)
    wide = [rf"(shl\.b64\s+%rd\d+, %{r}, {shift};|mul\.wide\.u32\s+%rd\d+, %{r}, {row};)" for r in loaded]
    assert any(re.search(pattern, ptx) for pattern in wide), "the slot is not multiplied in 64 bits"
    narrow = [rf"(shl\.b32\s+%r\d+, %{r}, \d+;|mul\.lo\.s32\s+%r\d+, %{r}, )" for r in loaded]
    assert not any(re.search(pattern, ptx) for pattern in narrow), "the slot is multiplied in 32 bits"


@pytest.mark.aot
@aot
def test_slots_whose_bytes_start_anywhere_are_not_copied_by_tma(rng, tmp_path, monkeypatch):
    """TMA reads shared memory from multiples of 128 bytes on; here a token has 64, beside others in one tile."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    args = make_inputs(rng, 7, 2, 64, mode="int4_token_head")
    names = sorted(args)
    _aot.compile_h200(
        lambda *x: cache_write(**dict(zip(names, x, strict=True)), implementation="mosaic"),
        *(args[name] for name in names),
    )
    (ptx,) = (p.read_text() for p in tmp_path.glob("*.ptx"))
    assert "st.global.v4.b32" in ptx
    assert "cp.async.bulk" not in ptx


@pytest.mark.gpu
def test_bc17_the_last_slot_beyond_two_gibibytes():
    pages = -(-(2**31) // (64 * 1024)) + 1
    caches = {name: jnp.zeros((pages, 64, 8, 128), FP8) for name in ("k_pages", "v_pages")}
    x = jnp.arange(8 * 128, dtype=jnp.float32).reshape(1, 8, 128) % 16
    last = pages * 64 - 1
    write = jax.jit(
        lambda caches: cache_write(x, x, **caches, slots=jnp.array([last]), implementation="mosaic"), donate_argnums=0
    )
    k, v = write(caches)
    for cache in (k, v):
        np.testing.assert_array_equal(cache[-1, -1].astype(jnp.float32), x[0])
        assert int((cache != 0).sum(dtype=jnp.int32)) == int((x != 0).sum())


# ---------------------------------------------------------------- errors
def call(**changes):
    new, pages = jnp.zeros((3, 2, 64)), jnp.zeros((2, 4, 2, 64))
    args = {"key": new, "value": new, "k_pages": pages, "v_pages": pages, "slots": jnp.array([0, 5, -1])}
    return args | changes


def per_head(dtype="int8", width=64, **changes):
    pages, scales = jnp.zeros((2, 4, 2, width), dtype), jnp.zeros((2, 4, 2))
    return call(k_pages=pages, v_pages=pages, k_scale_pages=scales, v_scale_pages=scales) | changes


int8_pages = jnp.zeros((2, 4, 2, 64), jnp.int8)
MESSAGES = {
    "slots": (call(slots=jnp.zeros(2, jnp.int32)), ValueError, "slots must be [T] with T=3 (from key), got shape (2,)"),
    "slots-dtype": (call(slots=jnp.zeros(3)), TypeError, "slots must have dtype int32 or int64, got float32"),
    "value-dtype": (
        call(value=jnp.zeros((3, 2, 64), jnp.bfloat16)),
        TypeError,
        "value must have dtype float32, got bfloat16; key and value need one dtype; cast one of them",
    ),
    "cache-dtype": (
        call(k_pages=int8_pages, v_pages=int8_pages),
        TypeError,
        "k_pages must have dtype float32 or float8_e4m3fn, got int8; int8 and uint8 caches need scale pages",
    ),
    "caches-differ": (
        call(v_pages=int8_pages),
        TypeError,
        "v_pages must have dtype float32, got int8; both caches need one dtype",
    ),
    "width": (
        call(v_pages=jnp.zeros((2, 4, 2, 32))),
        ValueError,
        "v_pages must hold Dv=64 numbers a head, got a last dimension of 32",
    ),
    "scale": (
        call(k_scale=0.5),
        ValueError,
        "k_scale and v_scale belong to float8_e4m3fn caches, but the caches are float32",
    ),
    "scale-size": (
        call(k_pages=int8_pages.astype(FP8), v_pages=int8_pages.astype(FP8), k_scale=jnp.ones(2)),
        ValueError,
        "k_scale must be one number, got shape (2,)",
    ),
    "one-scale-page": (
        per_head() | {"v_scale_pages": None},
        ValueError,
        "k_scale_pages and v_scale_pages belong together, v_scale_pages is missing",
    ),
    "scale-pages-dtype": (
        per_head(k_scale_pages=jnp.zeros((2, 4, 2), jnp.float16)),
        TypeError,
        "k_scale_pages must have dtype float32, got float16",
    ),
    "both-scales": (
        per_head(k_scale=0.5),
        ValueError,
        "k_scale and v_scale belong to per-tensor float8_e4m3fn caches; leave them out",
    ),
    "scale-pages-of-a-float-cache": (
        per_head("float32"),
        TypeError,
        "k_pages must have dtype int8 or float8_e4m3fn or uint8, got float32; with scale pages",
    ),
    "int4-width": (
        per_head("uint8"),
        ValueError,
        "k_pages must hold D=64 numbers a head (two in a byte), got a last dimension of 64",
    ),
    "int4-power": (
        per_head("uint8", 24, key=jnp.zeros((3, 2, 48)), value=jnp.zeros((3, 2, 48))),
        ValueError,
        "an int4 cache rotates heads, D must be a power of two, got 48",
    ),
    "checked-range": (
        call(slots=jnp.array([0, 8, -1]), checked=True),
        ValueError,
        "slots[1] must be -1 (skip) or 0 to 7, got 8",
    ),
    "checked-low": (
        call(slots=jnp.array([0, -2, -1]), checked=True),
        ValueError,
        "slots[1] must be -1 (skip) or 0 to 7, got -2",
    ),
    "checked-repeat": (
        call(slots=jnp.array([3, -1, 3]), checked=True),
        ValueError,
        "slots must not repeat, slots[0] and slots[2] are both 3",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages(case):
    args, error, message = MESSAGES[case]
    with pytest.raises(error, match=re.escape(f"cache_write: {message}")):
        cache_write(**args)


def test_checked_mode_accepts_good_slots_and_needs_values():
    cache_write(**call(checked=True))
    with pytest.raises(ValueError, match="checked=True reads the slots and needs a concrete array; call check_slots"):
        jax.jit(lambda args: cache_write(**args, checked=True))(call())


REFUSED = {
    "row": (call(key=jnp.zeros((3, 1, 64)), value=jnp.zeros((3, 1, 64))), "copy"),
    "vector": (
        per_head("int8", 60, key=jnp.zeros((3, 2, 60), jnp.bfloat16), value=jnp.zeros((3, 2, 60), jnp.bfloat16)),
        "int8_token_head",
    ),
    "short": (per_head("uint8", 4, key=jnp.zeros((3, 2, 8)), value=jnp.zeros((3, 2, 8))), "int4_token_head"),
    "tile": (
        per_head("int8", 96, key=jnp.zeros((3, 11, 96)), value=jnp.zeros((3, 11, 96))),
        "int8_token_head",
    ),
}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("row", "a token's keys must be a multiple of 128 numbers, got K=1 heads of 64"),
        ("vector", "one scale a head needs key heads of a multiple of 8 numbers, got 60"),
        ("short", "rotated key heads must hold at least 16 numbers, got 8"),
        ("tile", "a tile of whole tokens would hold 16896 numbers, more than 16384, with K=11 heads of 96 and 96"),
    ],
)
def test_what_the_kernel_cannot_run(case, message):
    args, mode = REFUSED[case]
    args = {name: x for name, x in args.items() if name != "slots"}
    assert mosaic.why_not(**args, mode=mode) == message


def test_an_illegal_configuration_cannot_be_built():
    for tokens in itertools.chain(range(-1, 1), (3, 5)):
        with pytest.raises(ValueError, match=f"tokens={tokens} must be one of 1, 2, 4"):
            mosaic.Config(tokens=tokens)
