"""Options of the parity tests: which captures besides the shipped ones, and which backend."""

import functools
import os
from pathlib import Path

import pytest

from jaxattn.registry import MECHANISMS
from parity import captures, cases, few, sharing, triangle

os.environ.setdefault(
    "NPROC", "16"
)  # XLA's threads: interpreted warpgroups wait for each other, on two they would for ever
sharing.keep_apart(os.environ.get("PYTEST_XDIST_WORKER", ""))


def pytest_addoption(parser):
    """`--captures DIR` (repeatable) and `--backend`."""
    group = parser.getgroup("parity")
    group.addoption(
        "--captures", action="append", default=[], metavar="DIR", help="more captures, besides the shipped ones"
    )
    group.addoption("--backend", default="auto", choices=triangle.BACKENDS, help="what runs the kernels")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Keeps the share of the cases that was asked for, and a mechanism's tests in one process."""
    sharing.thin(config, items)
    sharing.together(items, [m.name for m in MECHANISMS])


def pytest_configure(config):
    """Sets what compiles, before anything does."""
    sharing.compile_plainly(config.option.markexpr)


def pytest_collection_finish():
    """Makes Python's collector rare."""
    sharing.collect_rarely()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Sets how much the compiler does."""
    sharing.compile_for(item)


def pytest_generate_tests(metafunc):
    """One test per capture, output and comparison; a single failing one if captures are missing or broken."""
    if "edge" not in metafunc.fixturenames:
        return
    try:
        found = triangle.pair(MECHANISMS, load(tuple(metafunc.config.getoption("--captures"))))
        problem = "no capture belongs to any mechanism: nothing was compared"
    except captures.CaptureError as e:
        found, problem = [], str(e)
    pairs = sorted(found, key=lambda p: few.size(p[1]))
    kept = few.first(pairs) if sharing.asked() > 1 else set()
    edges = {
        triangle.label(c, output, comparison): pytest.param(
            (m.name, c.name, output, comparison), marks=pytest.mark.smoke if (m.name, c.name) in kept else ()
        )
        for m, c in pairs
        for output in cases.find(m.name).expected(c)
        for comparison in triangle.COMPARISONS
    }
    edges = edges or {"no-captures": problem}
    metafunc.parametrize("edge", list(edges.values()), ids=list(edges))


@functools.cache
def load(directories: tuple[str, ...]) -> list[captures.Capture]:
    """The shipped captures and those of the directories, read once."""
    return captures.load([captures.SHIPPED, *map(Path, directories)])


@pytest.fixture(scope="session")
def backend(request) -> str:
    """The backend that the option means here."""
    return triangle.resolve(request.config.getoption("--backend"))


@pytest.fixture(scope="session")
def loaded(request) -> list[captures.Capture]:
    """All captures."""
    return load(tuple(request.config.getoption("--captures")))
