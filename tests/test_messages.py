"""Every user error of the op and of `explain`, on every machine, matched on its filled-in text."""

import inspect
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxattn
from jaxattn import explain, paged_attention
from jaxattn.ops.paged_attention import FP8, check_paging
from pallas_kernels import _mosaic
from pallas_kernels import paged_attention as mosaic

N, H, K, D, PAGE, POOL, B, PAGES = 5, 4, 2, 64, 16, 6, 2, 3


def call(**changes):
    """Arguments of a small legal call, with changes."""
    args = {
        "q": jnp.ones((N, H, D)),
        "k_pages": jnp.ones((POOL, PAGE, K, D)),
        "v_pages": jnp.ones((POOL, PAGE, K, D)),
        "page_table": jnp.array([[5, 2, 0], [1, 3, 4]]),
        "lengths": jnp.array([20, 4]),
        "query_start": jnp.array([0, 1, 5]),
    }
    return args | changes


def exactly(text):
    """The whole message, but for the note that jax appends under a transformation."""
    return rf"^{re.escape(text)}(\n-+\nFor simplicity, JAX .*)?$"


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


WRONG_SHAPES = {
    "q-rank": ({"q": zeros(N, H * D)}, "q must have 3 dimensions [N H D], got shape (5, 256)"),
    "k-rank": ({"k_pages": zeros(96, K, D)}, "k_pages must have 4 dimensions [P page K D], got shape (96, 2, 64)"),
    "v-rank": ({"v_pages": zeros(96, K, D)}, "v_pages must have 4 dimensions [P page K D], got shape (96, 2, 64)"),
    "table-rank": ({"page_table": zeros(6)}, "page_table must have 2 dimensions [B pages], got shape (6,)"),
    "lengths-rank": ({"lengths": zeros(B, 1)}, "lengths must have 1 dimensions [B], got shape (2, 1)"),
    "start-rank": ({"query_start": zeros()}, "query_start must have 1 dimensions [B+1], got shape ()"),
    "sinks-rank": ({"sinks": zeros(1, H)}, "sinks must have 1 dimensions [H], got shape (1, 4)"),
    "k-D": (
        {"k_pages": zeros(POOL, PAGE, K, 32)},
        "k_pages must be [P page K D] with D=64 (from q), got shape (6, 16, 2, 32)",
    ),
    "v-pool": (
        {"v_pages": zeros(5, PAGE, K, D)},
        "v_pages must be [P page K D] with P=6 (from k_pages), got shape (5, 16, 2, 64)",
    ),
    "v-page": (
        {"v_pages": zeros(POOL, 8, K, D)},
        "v_pages must be [P page K D] with page=16 (from k_pages), got shape (6, 8, 2, 64)",
    ),
    "v-heads": (
        {"v_pages": zeros(POOL, PAGE, 1, D)},
        "v_pages must be [P page K D] with K=2 (from k_pages), got shape (6, 16, 1, 64)",
    ),
    "v-D": (
        {"v_pages": zeros(POOL, PAGE, K, 32)},
        "v_pages must be [P page K D] with D=64 (from q), got shape (6, 16, 2, 32)",
    ),
    "lengths-B": ({"lengths": jnp.ones(3, int)}, "lengths must be [B] with B=2 (from page_table), got shape (3,)"),
    "start-B": (
        {"query_start": jnp.array([0, 5])},
        "query_start must be [B+1] with B=2 (from page_table), got shape (2,)",
    ),
    "sinks-H": ({"sinks": zeros(K)}, "sinks must be [H] with H=4 (from q), got shape (2,)"),
    "heads": (
        {"q": zeros(N, 7, D)},
        "query heads must be a multiple of kv heads, got H=7 (q) and K=2 (k_pages)",
    ),
    "fewer-heads-than-kv": (
        {"q": zeros(N, 1, D)},
        "query heads must be a multiple of kv heads, got H=1 (q) and K=2 (k_pages)",
    ),
    "no-heads": (
        {"q": zeros(N, 0, D)},
        "query heads must be a multiple of kv heads, got H=0 (q) and K=2 (k_pages)",
    ),
    "no-kv-heads": (
        {"k_pages": zeros(POOL, PAGE, 0, D), "v_pages": zeros(POOL, PAGE, 0, D)},
        "query heads must be a multiple of kv heads, got H=4 (q) and K=0 (k_pages)",
    ),
    "no-head-dim": (
        {"q": zeros(N, H, 0), "k_pages": zeros(POOL, PAGE, K, 0), "v_pages": zeros(POOL, PAGE, K, 0)},
        "the head dim must be at least 1, got shape (5, 4, 0) (q)",
    ),
    "no-pool": (
        {"k_pages": zeros(0, PAGE, K, D), "v_pages": zeros(0, PAGE, K, D)},
        "the pool needs at least one page of one slot, got shape (0, 16, 2, 64)",
    ),
    "scale-of-a-float-cache": (
        {"k_scale": 0.5},
        "k_scale belongs to a float8_e4m3fn cache, but the cache is float32; leave it out",
    ),
    "v-scale-of-a-float-cache": (
        {"v_scale": jnp.float32(0.5)},
        "v_scale belongs to a float8_e4m3fn cache, but the cache is float32; leave it out",
    ),
    "scale-per-head": (
        {"k_pages": zeros(POOL, PAGE, K, D, dtype=FP8), "v_pages": zeros(POOL, PAGE, K, D, dtype=FP8)}
        | {"k_scale": jnp.ones(K)},
        "k_scale must be one number, got shape (2,)",
    ),
    "negative-v-scale": (
        {"k_pages": zeros(POOL, PAGE, K, D, dtype=FP8), "v_pages": zeros(POOL, PAGE, K, D, dtype=FP8)}
        | {"v_scale": -1.0},
        "v_scale must be positive and finite or None, got -1.0",
    ),
    "scale": ({"scale": 0.0}, "scale must be positive and finite or None, got 0.0"),
    "scale-nan": ({"scale": float("nan")}, "scale must be positive and finite or None, got nan"),
    "softcap": ({"softcap": -3}, "softcap must be positive and finite or None, got -3"),
    "softcap-inf": ({"softcap": float("inf")}, "softcap must be positive and finite or None, got inf"),
    "window": ({"window": 0}, "window must be at least 1, got 0"),
    "window-negative": ({"window": -1}, "window must be at least 1, got -1"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_SHAPES.values(), ids=WRONG_SHAPES)
@pytest.mark.parametrize("implementation", (None, "reference", "mosaic"))
def test_call_that_can_never_be_right(changes, message, implementation):
    with pytest.raises(ValueError, match=exactly(f"paged_attention: {message}")):
        paged_attention(**call(**changes), implementation=implementation)


FP8_POOL = jnp.zeros((POOL, PAGE, K, D), FP8)
WRONG_TYPES = {
    "q-list": ({"q": [[[1.0]]]}, "q must be an array [N H D], got list"),
    "table-list": ({"page_table": [[0]]}, "page_table must be an array [B pages], got list"),
    "sinks-float": ({"sinks": 1.0}, "sinks must be an array [H], got float"),
    "q-int": (
        {"q": zeros(N, H, D, dtype="int32")},
        "q must have dtype bfloat16 or float16 or float32 or float64, got int32",
    ),
    "q-fp8": (
        {"q": zeros(N, H, D, dtype=FP8), "k_pages": FP8_POOL, "v_pages": FP8_POOL},
        "q must have dtype bfloat16 or float16 or float32 or float64, got float8_e4m3fn",
    ),
    "k": (
        {"k_pages": zeros(POOL, PAGE, K, D, dtype="bfloat16")},
        "k_pages must have dtype float32 or float8_e4m3fn, got bfloat16; cast q or the cache",
    ),
    "v": (
        {"v_pages": zeros(POOL, PAGE, K, D, dtype="float16")},
        "v_pages must have dtype float32 or float8_e4m3fn, got float16; cast q or the cache",
    ),
    "fp8-k-alone": (
        {"k_pages": FP8_POOL},
        "k_pages and v_pages must have the same dtype, got float8_e4m3fn and float32",
    ),
    "fp8-v-alone": (
        {"v_pages": FP8_POOL},
        "k_pages and v_pages must have the same dtype, got float32 and float8_e4m3fn",
    ),
    "table": ({"page_table": zeros(B, PAGES)}, "page_table must have dtype int32, got float32"),
    "lengths": ({"lengths": np.ones(B, np.int64)}, "lengths must have dtype int32, got int64"),
    "start": ({"query_start": np.arange(3, dtype=np.uint32)}, "query_start must have dtype int32, got uint32"),
    "sinks": (
        {"sinks": jnp.ones(H, int)},
        "sinks must have dtype bfloat16 or float16 or float32 or float64, got int32",
    ),
    "k-scale": (
        {"k_pages": FP8_POOL, "v_pages": FP8_POOL, "k_scale": jnp.int32(1)},
        "k_scale must have dtype bfloat16 or float16 or float32 or float64, got int32",
    ),
    "scale": ({"scale": "1"}, "scale is compiled in and must be a Python number or None, got str"),
    "softcap": ({"softcap": True}, "softcap is compiled in and must be a Python number or None, got bool"),
    "window": ({"window": 16.0}, "window is compiled in and must be a Python integer, got float"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_wrong_type(changes, message):
    with pytest.raises(TypeError, match=exactly(f"paged_attention: {message}")):
        paged_attention(**call(**changes))


def test_traced_option():
    message = "paged_attention: scale is compiled in and must be a Python number or None, got DynamicJaxprTracer"
    with pytest.raises(TypeError, match=exactly(message)):
        jax.jit(lambda scale: paged_attention(**call(), scale=scale))(0.5)


def test_numpy_numbers_are_numbers():
    options = {"scale": np.float32(0.5), "window": np.int64(3), "softcap": 2}
    assert paged_attention(**call(), **options).shape == (N, H, D)


# ---------------------------------------------------------------- values
WRONG_VALUES = {
    "start-first": (
        {"query_start": jnp.array([1, 2, 5])},
        "query_start must rise from 0 to at most 5 (rows of q), got [1, 2, 5]",
    ),
    "start-falls": (
        {"query_start": jnp.array([0, 4, 3])},
        "query_start must rise from 0 to at most 5 (rows of q), got [0, 4, 3]",
    ),
    "start-beyond-q": (
        {"query_start": jnp.array([0, 1, 6])},
        "query_start must rise from 0 to at most 5 (rows of q), got [0, 1, 6]",
    ),
    "longer-than-table": (
        {"lengths": jnp.array([20, 49])},
        "lengths[1] must lie between the request's 4 query tokens and the table's 3 pages x 16 = 48 slots, got 49",
    ),
    "shorter-than-queries": (
        {"lengths": jnp.array([20, 3])},
        "lengths[1] must lie between the request's 4 query tokens and the table's 3 pages x 16 = 48 slots, got 3",
    ),
    "negative-length": (
        {"lengths": jnp.array([-1, 4])},
        "lengths[0] must lie between the request's 1 query tokens and the table's 3 pages x 16 = 48 slots, got -1",
    ),
    "page-beyond-pool": (
        {"page_table": jnp.array([[5, 6, 0], [1, 3, 4]])},
        "page_table[0, 1] must be a page of the pool, 0 to 5, got 6",
    ),
    "negative-page": (
        {"page_table": jnp.array([[5, 2, 0], [-1, 3, 4]])},
        "page_table[1, 0] must be a page of the pool, 0 to 5, got -1",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_checked_mode(changes, message):
    args = call(**changes)
    with pytest.raises(ValueError, match=exactly(f"paged_attention: {message}")):
        paged_attention(**args, checked=True)
    with pytest.raises(ValueError, match=exactly(f"paged_attention: {message}")):
        check_paging(args["page_table"], args["lengths"], args["query_start"], tokens=N, pool=POOL, page=PAGE)
    assert np.isfinite(paged_attention(**args)).all(), "unchecked: wrong rows, but nothing worse"


def test_checked_mode_passes_what_is_legal():
    unused = call(page_table=jnp.array([[5, 2, 2**31 - 1], [1, -7, 99]]))
    np.testing.assert_array_equal(paged_attention(**unused, checked=True), paged_attention(**unused))


def test_checked_mode_under_jit():
    message = (
        "paged_attention: checked=True reads page_table, lengths and query_start and needs concrete arrays; check them "
        "before jit with jaxattn.ops.paged_attention.check_paging"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        jax.jit(lambda args: paged_attention(**args, checked=True))(call())
    with pytest.raises(ValueError, match=exactly(message)):
        explain("paged_attention", **shapes(), checked=True)


# ---------------------------------------------------------------- implementations
def shapes(**changes):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), call(**changes))


def test_unknown_implementation():
    message = (
        "paged_attention: implementation must be None or one of reference, mosaic, got 'mosiac' "
        "(did you mean 'mosaic'?)"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        paged_attention(**call(), implementation="mosiac")


@pytest.mark.parametrize("op", ("paged_attention", "window_cache"))
def test_a_triton_kernel_that_nobody_wrote(op):
    kernels = "reference, mosaic" if op == "paged_attention" else "reference"
    tokens = {"computed": jnp.arange(2), "new": jnp.arange(2), "window": 4, "page": 2}
    message = (
        f"{op}: implementation='triton' cannot run this call: no Triton kernel is written; leave implementation out or "
        f"name one of {kernels}"
    )
    with pytest.raises(NotImplementedError, match=exactly(message)):
        getattr(jaxattn, op)(**(call() if op == "paged_attention" else tokens), implementation="triton")


@pytest.mark.parametrize("implementation", (None, "reference"))
def test_config_with_the_reference(implementation, monkeypatch):
    monkeypatch.setattr(_mosaic, "_default_device", lambda: A100)
    message = (
        "paged_attention: a config belongs to a kernel, but the reference would run; name the kernel with "
        "implementation= (one of mosaic)"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        paged_attention(**call(), implementation=implementation, config=mosaic.Config())


def test_config_of_another_kind(interpret):
    message = "paged_attention: config of 'mosaic' must be a pallas_kernels.paged_attention._common.Config, got dict"
    with pytest.raises(TypeError, match=exactly(message)):
        paged_attention(**call(), implementation="mosaic", config={"block_kv": 64})


def unsupported(dtype="float32", head_dim=D, page=PAGE):
    pool = zeros(POOL, page, K, head_dim, dtype=dtype)
    return call(q=zeros(N, H, head_dim, dtype=dtype), k_pages=pool, v_pages=pool)


UNSUPPORTED = {
    "head-dim": (unsupported(head_dim=80), "the head dim must be 64, 128 or 256, got 80"),
    "page": (unsupported(page=8), "the page size must be 16, 32, 64 or 128, got 8"),
}


@pytest.mark.parametrize(("args", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_legal_call_that_the_kernel_cannot_run(args, reason):
    """The shape is named before the device: changing machines would not help."""
    message = f"paged_attention: implementation='mosaic' cannot run this call: {reason}"
    with pytest.raises(NotImplementedError, match=exactly(message)):
        paged_attention(**args, implementation="mosaic")
    for on_target in (False, True):
        explanation = explain("paged_attention", on_target=on_target, **args)
        assert (explanation.chosen, explanation.reasons["mosaic"]) == ("reference", reason)
    same = paged_attention(**args, implementation="reference")
    np.testing.assert_array_equal(paged_attention(**args), same)


def test_float64_is_for_the_reference():
    with jax.enable_x64(True):
        args = unsupported("float64")
        args |= {name: x.astype(jnp.int32) for name, x in args.items() if x.dtype == jnp.int64}
        message = (
            "paged_attention: implementation='mosaic' cannot run this call: q must be bfloat16, float16 or float32, "
            "got float64"
        )
        with pytest.raises(NotImplementedError, match=exactly(message)):
            paged_attention(**args, implementation="mosaic")


def test_gradient_through_a_kernel(interpret):
    args = call()
    q = args.pop("q")
    message = "paged_attention: the mosaic kernel is inference only; for gradients use implementation='reference'"
    with pytest.raises(NotImplementedError, match=exactly(message)):
        jax.grad(lambda q: paged_attention(q, **args, implementation="mosaic").sum())(q)


# ---------------------------------------------------------------- machines
A100 = types.SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100-SXM4-80GB")
B200 = types.SimpleNamespace(platform="gpu", compute_capability="10.0", device_kind="NVIDIA B200")
MI300 = types.SimpleNamespace(platform="gpu", compute_capability="gfx942", device_kind="AMD Instinct MI300X")
H200 = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
CPU = types.SimpleNamespace(platform="cpu", device_kind="cpu")
NEED = "needs an sm_90a GPU (H100, H200)"
INSTALL = "install jaxattn[cuda13] (or [cuda12])"


def versions(built=13000, driver=13000):
    return types.SimpleNamespace(cuda_runtime_build_version=lambda: built, cuda_driver_get_version=lambda: driver)


MACHINES = {
    "a100": (A100, {}, f"{NEED}, got NVIDIA A100-SXM4-80GB (compute capability 8.0); use the reference there"),
    "b200": (B200, {}, f"{NEED}, got NVIDIA B200 (compute capability 10.0); use the reference there"),
    "amd": (MI300, {}, f"{NEED}, got AMD Instinct MI300X (compute capability gfx942); use the reference there"),
    "no-gpu": (
        CPU,
        {"_nvidia_gpu_visible": lambda: False},
        f"{NEED}, but this process runs on cpu; on a machine with one, {INSTALL}",
    ),
    "no-plugin": (
        CPU,
        {"_cuda_versions": lambda: None},
        f"{NEED}, but this process runs on cpu: the machine has an NVIDIA GPU, but JAX's CUDA plugin is not "
        f"installed; {INSTALL}",
    ),
    "old-driver": (
        CPU,
        {"_cuda_versions": lambda: versions(driver=12080)},
        f"{NEED}, but this process runs on cpu: JAX's CUDA plugin was built for CUDA 13, but the driver offers only "
        "12.8; update the driver or install jaxattn[cuda12]",
    ),
    "very-old-driver": (
        CPU,
        {"_cuda_versions": lambda: versions(built=12090, driver=11040)},
        f"{NEED}, but this process runs on cpu: JAX's CUDA plugin was built for CUDA 12, but the driver offers only "
        "11.4; update the driver",
    ),
    "no-driver": (
        CPU,
        {"_cuda_versions": lambda: versions(driver=0)},
        f"{NEED}, but this process runs on cpu: no NVIDIA driver was found; install one",
    ),
    "told-to-use-cpu": (
        CPU,
        {"_jax_platforms": lambda: "cpu"},
        f"{NEED}, but this process runs on cpu: JAX was told so (jax_platforms='cpu'); unset JAX_PLATFORMS",
    ),
    "cuda-did-not-start": (
        CPU,
        {},
        f"{NEED}, but this process runs on cpu: JAX could not start CUDA and logged why; {INSTALL}",
    ),
    "h200-old-driver": (
        H200,
        {"_cuda_versions": lambda: versions(driver=12080)},
        "JAX's CUDA plugin was built for CUDA 13, but the driver offers only 12.8; update the driver or install "
        "jaxattn[cuda12]",
    ),
    "h200-no-plugin": (
        H200,
        {"_cuda_versions": lambda: None},
        f"needs JAX's CUDA plugin, which is not installed; {INSTALL}",
    ),
    "h200-no-ptxas": (
        H200,
        {"find_ptxas": lambda: None},
        f"needs ptxas to compile kernels, found none; {INSTALL}, or put ptxas of CUDA 12.8 or newer on PATH",
    ),
}


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a machine: a device, and a GPU, plugin, driver and compiler that are fine unless changed."""

    def pretend(device, changes):
        facts = {
            "_default_device": lambda: device,
            "_nvidia_gpu_visible": lambda: True,
            "_cuda_versions": versions,
            "find_ptxas": lambda: "/usr/local/cuda/bin/ptxas",
            "_jax_platforms": lambda: None,
        } | changes
        for name, fact in facts.items():
            monkeypatch.setattr(_mosaic, name, fact)

    return pretend


@pytest.mark.parametrize(("device", "changes", "reason"), MACHINES.values(), ids=MACHINES)
def test_machine_that_cannot_run_the_kernel(machine, device, changes, reason):
    machine(device, changes)
    explanation = explain(paged_attention, **shapes())
    assert explanation.reasons == {"mosaic": reason, "reference": None}
    assert str(explanation) == f"paged_attention:\n  mosaic     {reason}\n  reference  chosen"
    args = call()
    same = paged_attention(**args, implementation="reference")
    np.testing.assert_array_equal(paged_attention(**args), same)
    message = f"paged_attention: implementation='mosaic' cannot run this call: {reason}"
    with pytest.raises(NotImplementedError, match=exactly(message)):
        paged_attention(**args, implementation="mosaic")


def test_machine_that_can(machine):
    machine(H200, {})
    assert _mosaic.why_not_here() is None
    assert (
        str(explain("paged_attention", **shapes())) == "paged_attention:\n  mosaic     chosen\n  reference  available"
    )


def test_explain_on_target_ignores_this_machine(machine):
    machine(A100, {})
    assert explain("paged_attention", on_target=True, **shapes()).chosen == "mosaic"


@pytest.mark.parametrize(("names", "found"), ((("nvidia", "cu13"), True), (("nvidia", "cublas"), False)))
def test_find_ptxas(monkeypatch, tmp_path, names, found):
    monkeypatch.setattr(_mosaic, "cuda_path", str(tmp_path / "nowhere"))
    monkeypatch.setattr(_mosaic.sys, "path", [str(tmp_path)])
    monkeypatch.setenv("PATH", str(tmp_path))
    ptxas = tmp_path.joinpath(*names, "bin", "ptxas")
    ptxas.parent.mkdir(parents=True)
    ptxas.touch()
    assert _mosaic.find_ptxas() == (ptxas if found else None)


# ---------------------------------------------------------------- explain
@pytest.mark.parametrize(
    ("given", "message"),
    (
        ("paged_atention", "unknown mechanism 'paged_atention' (did you mean 'paged_attention'?); known: "),
        ("qqq", "unknown mechanism 'qqq'; known: "),
        (jnp.ones, "unknown mechanism 'ones'; known: "),
    ),
)
def test_unknown_mechanism(given, message):
    names = ", ".join(m.name for m in jaxattn.MECHANISMS)
    with pytest.raises(ValueError, match=exactly(message + names)):
        explain(given, **shapes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"windw": 3},
            "explain: paged_attention takes q, k_pages, v_pages, page_table, lengths, query_start, sinks, k_scale, "
            "v_scale, k_scale_pages, v_scale_pages, scale, causal, window, softcap, return_lse, checked, got windw "
            "(did you mean 'window'?) as well",
        ),
        (
            {"k_pages": None, "lengths": None},
            "explain: paged_attention needs k_pages, lengths as well; shapes and dtypes are enough",
        ),
    ],
)
def test_explain_names_arguments_that_are_wrong_or_missing(change, message):
    args = {name: x for name, x in (shapes() | change).items() if x is not None}
    with pytest.raises(TypeError, match=exactly(message)):
        explain("paged_attention", **args)


@pytest.mark.parametrize("record", jaxattn.MECHANISMS, ids=lambda m: m.name)
def test_explain_takes_what_the_op_takes(record):
    names = [name for name in inspect.signature(record.op).parameters if name not in ("implementation", "config")]
    assert names == list(inspect.signature(record.prepare).parameters)


def test_explain_validates_like_the_op():
    with pytest.raises(ValueError, match=exactly(f"paged_attention: {WRONG_SHAPES['heads'][1]}")):
        explain("paged_attention", **shapes(**WRONG_SHAPES["heads"][0]))
