"""Fixtures, the rule for tests that need a GPU, and the choice of the smoke tests."""

import os
import zlib

import numpy as np
import pytest

from jaxattn.registry import MECHANISMS
from pallas_kernels import _mosaic
from parity import sharing

os.environ.setdefault(
    "NPROC", "16"
)  # XLA's threads: interpreted warpgroups wait for each other, on two they would for ever
sharing.keep_apart(os.environ.get("PYTEST_XDIST_WORKER", ""))


@pytest.fixture
def rng(request):
    """Random numbers that depend on the test's id only."""
    marker = request.node.get_closest_marker("xdist_group")
    name = request.node.nodeid.removesuffix(f"@{marker.args[0]}") if marker else request.node.nodeid
    return np.random.default_rng(zlib.crc32(name.encode()))


@pytest.fixture
def interpret():
    """Mosaic kernels are interpreted with race detection, GPU or not."""
    with _mosaic.interpret():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    sharing.thin(config, items)
    sharing.together(items, [m.name for m in MECHANISMS])
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if needy and (reason := _mosaic.why_not_here()):
        for item in needy:
            item.add_marker(pytest.mark.skip(reason=reason))
    # smoke: what an op promises, the dispatch, and one case of each kernel
    seen = set()
    for item in items:
        if item.path.parent.name == "ops" or item.path.stem == "test_mechanism":
            item.add_marker(pytest.mark.smoke)
        elif item.path.stem == "test_contract" and item.originalname == "test_forward":
            kernel = item.callspec.params["mechanism"].name, item.callspec.params["kernel"]
            if kernel not in seen:
                seen.add(kernel)
                item.add_marker(pytest.mark.smoke)


def pytest_configure(config):
    sharing.compile_plainly(config.option.markexpr)


def pytest_collection_finish():
    sharing.collect_rarely()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    sharing.compile_for(item)
