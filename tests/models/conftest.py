"""Compiling is most of the time of these tests, and their models are tiny."""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def quick():
    """Programs with few of the compiler's passes."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
