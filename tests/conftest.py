"""Fixtures and the rule for tests that need a GPU."""

import zlib

import numpy as np
import pytest

from pallas_kernels import _mosaic


@pytest.fixture
def rng(request):
    """Random numbers that depend on the test's id only."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def interpret():
    """Mosaic kernels are interpreted with race detection, GPU or not."""
    with _mosaic.interpret():
        yield


def pytest_collection_modifyitems(items):
    needy = [item for item in items if item.get_closest_marker("gpu")]
    if needy and (reason := _mosaic.why_not_here()):
        for item in needy:
            item.add_marker(pytest.mark.skip(reason=reason))
