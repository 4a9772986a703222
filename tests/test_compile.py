"""Every kernel compiles to sm_90a machine code for every case and support row that it accepts, without a GPU.

Interpreting proves the numbers, this proves the lowering: missing rules, too much shared memory and register spills
show only here.
"""

import os
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxattn import _checks, _mechanism, registry
from pallas_kernels import _mosaic

ROOT = Path(__file__).resolve().parents[1]
MAX_SECONDS = 10
PROGRAMS = [
    f"{m.name}/{kernel}/{kind}/{label}"
    for m in registry.MECHANISMS
    for kernel in m.kernels
    for kind, labels in (("case", [c.name for c in m.cases]), ("support", [label for label, _ in m.support]))
    for label in labels
]
FIRST = {tuple(name.split("/")[:2]): name for name in reversed(PROGRAMS)}.values()

pytestmark = [pytest.mark.aot, pytest.mark.xdist_group("aot")]


def arguments(name):
    """(record, kernel name, prepared arguments with shapes for arrays) of one of PROGRAMS."""
    stem, kernel, kind, label = name.split("/", 3)
    mechanism = registry.find(stem)
    if kind == "case":
        case = next(c for c in mechanism.cases if c.name == label)
        args = case.make(np.random.default_rng(zlib.crc32(name.encode())))
    else:
        args = dict(mechanism.support)[label]
    prepared = mechanism.prepare(**args)
    return mechanism, kernel, {k: _shape(v) if _checks.is_array(v) else v for k, v in prepared.items()}


def _shape(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def build(name):
    """What `_mosaic.compile_report` compiles in its own process."""
    mechanism, kernel, args = arguments(name)
    arrays = {k: v for k, v in args.items() if _checks.is_array(v)}
    static = {k: v for k, v in args.items() if k not in arrays}
    return lambda arrays: _mechanism.run(mechanism, arrays | static, kernel), (arrays,)


def refusal(name):
    mechanism, kernel, args = arguments(name)
    return mechanism.kernels[kernel].why_not(**args)


@pytest.fixture(scope="module")
def compiled(request):
    """The compiler's record of every selected program that its kernel accepts."""
    if reason := _mosaic._why_no_compiler():
        assert "CI" not in os.environ, f"CI must compile the kernels, but this environment {reason}"
        pytest.skip(reason)
    selected = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name in PROGRAMS if name in selected and refusal(name) is None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        return {record.name: record for record in _mosaic.compile_report("test_compile:build", names)}


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
    assert record.seconds < MAX_SECONDS


def test_every_kernel_compiles_something():
    accepted = {tuple(name.split("/")[:2]) for name in PROGRAMS if refusal(name) is None}
    assert accepted == {(m.name, kernel) for m in registry.MECHANISMS for kernel in m.kernels}
