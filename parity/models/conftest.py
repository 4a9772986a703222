"""Compiling is most of the time of these tests, and their models are tiny."""

import pytest

from parity import sharing


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Programs with few of the compiler's passes."""
    with sharing.quick_compiles():
        yield
