"""Every kernel compiles to sm_90a machine code for every case and support row that it accepts, without a GPU.

Interpreting proves the numbers, this proves the lowering: missing rules, too much shared memory and register spills
show only here.
"""

import functools
import importlib.util
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxattn import _checks, _mechanism, registry
from pallas_kernels import _aot, _mosaic

ROOT = Path(__file__).resolve().parents[1]
MAX_SECONDS = 10
"""Processor time for each kernel of a program."""
PROCESSES = 2
PROGRAMS = [
    f"{m.name}/{kernel}/{kind}/{label}"
    for m in registry.MECHANISMS
    for kernel in m.kernels
    for kind, labels in (
        ("case", [c.name for c in m.cases if c.tags & {"smoke", "full"}]),
        ("support", [label for label, _ in m.support]),
    )
    for label in labels
]
FIRST = {tuple(name.split("/")[:2]): name for name in reversed(PROGRAMS)}.values()

pytestmark = [pytest.mark.aot, pytest.mark.xdist_group("aot"), pytest.mark.timeout(3600)]


@functools.cache
def arguments(name):
    """(record, kernel name, prepared arguments with shapes for arrays) of one of PROGRAMS."""
    stem, kernel, kind, label = name.split("/", 3)
    mechanism = registry.find(stem)
    if kind == "case":
        case = next(c for c in mechanism.cases if c.name == label)
        args = case.shapes() if case.shapes else case.make(np.random.default_rng(zlib.crc32(name.encode())))
    else:
        args = dict(mechanism.support)[label]
    prepared = mechanism.prepare(**args)
    return mechanism, kernel, {k: _shape(v) if _checks.is_array(v) else v for k, v in prepared.items()}


def _shape(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def build(name):
    """What `_aot.compile_report` compiles in its own process."""
    mechanism, kernel, args = arguments(name)
    arrays = {k: v for k, v in args.items() if _checks.is_array(v)}
    static = {k: v for k, v in args.items() if k not in arrays}
    return lambda arrays: _mechanism.run(mechanism, arrays | static, kernel), (arrays,)


def refusal(name):
    mechanism, kernel, args = arguments(name)
    return mechanism.kernels[kernel].why_not(**args)


def compile_programs(function, names):
    """Compile in another process, or skip where nothing can compile; on CI something must."""
    if reason := cannot_compile():
        assert "CI" not in os.environ, f"CI must compile the kernels, but this environment {reason}"
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        with ThreadPoolExecutor(PROCESSES) as pool:
            reports = pool.map(
                lambda some: _aot.compile_report(f"test_compile:{function}", some),
                [names[i::PROCESSES] for i in range(PROCESSES)],
            )
        return {record.name: record for report in reports for record in report}


def cannot_compile():
    if not any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13)):
        return "lacks JAX's CUDA plugin; scripts/test.sh installs it, or pip install -r requirements/compile-cuda13.txt"
    return None if _mosaic.find_ptxas() else "lacks ptxas; pip install -r requirements/compile-cuda13.txt"


@pytest.fixture(scope="module")
def compiled(request):
    """The compiler's record of every selected program that its kernel accepts."""
    selected = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    return compile_programs("build", [name for name in PROGRAMS if name in selected and refusal(name) is None])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.smoke if name in FIRST else ()) for name in PROGRAMS]
)
def test_compiles_without_spills(name, compiled):
    if reason := refusal(name):
        pytest.skip(reason)
    record = compiled[name]
    assert record.error is None
    assert record.kernels, "the compiled program holds no Mosaic kernel"
    assert record.spill_bytes == 0
    assert record.seconds < MAX_SECONDS * len(record.kernels)


def test_every_kernel_compiles_something():
    programs = {(m.name, kernel): [] for m in registry.MECHANISMS for kernel in m.kernels}
    for name in PROGRAMS:
        programs[tuple(name.split("/")[:2])].append(name)
    refused = [kernel for kernel, names in programs.items() if all(map(refusal, names))]  # stops at the first accepted
    assert not refused


# ---------------------------------------------------------------- the compiler's report itself
def faulty(name):
    """Small kernels, each with the fault that its name says."""

    def body(x_ref, o_ref, *scratch):
        x = x_ref[...]
        if name == "crash":
            os.abort()
        elif name == "lowering":
            x = jnp.cumsum(x)
        elif name == "memory":
            scratch[0][...] = jnp.zeros(scratch[0].shape, scratch[0].dtype)
        elif name == "spills":
            copies = [x * i for i in range(3)]
            for _ in range(2):
                copies = [sum(copies[i:], copies[0]) * c for i, c in enumerate(copies)]
            x = sum(copies, x)
        o_ref[...] = x

    def call(x):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_types=[plgpu.SMEM((256, 512), jnp.float32)] if name == "memory" else (),
        )(x)

    return call, (jax.ShapeDtypeStruct((128 * 112 if name == "spills" else 1024,), jnp.float32),)


@pytest.fixture(scope="module")
def faults():
    return compile_programs("faulty", ["lowering", "memory", "crash", "spills", "none"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lowering", "NotImplementedError: Unimplemented primitive in Pallas Mosaic GPU lowering: cumsum"),
        ("memory", "exceeds available shared memory: smem_bytes=524288 > max_smem_bytes=232448"),
        ("crash", "the compiler process died: exit code -6"),
    ],
)
def test_report_names_the_error(name, message, faults):
    assert message in faults[name].error


def test_report_counts_spills(faults):
    assert faults["spills"].error is None
    assert faults["spills"].spill_bytes > 0
    assert faults["spills"].registers == 255


def test_report_of_a_sound_kernel_after_a_crash(faults):
    record = faults["none"]
    assert record.error is None
    assert len(record.kernels) == 1
    assert record.spill_bytes == 0
    assert 0 < record.registers < 255
