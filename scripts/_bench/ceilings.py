"""What the card reaches in this very run: the rate of a plain copy and of plain matrix products."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from scripts._bench import timing
from scripts._bench.peers import _torch


@dataclass(frozen=True)
class Ceilings:
    """Measured rates."""

    copy: float
    """Bytes a second, read and written: the best element-wise pass over arrays of two sizes and dtypes, by XLA and,
    where it is loaded, by PyTorch.
    """
    matmul: float
    """Operations a second of XLA's bfloat16 product of 8192 x 8192 matrices."""
    matmul8: float
    """The same in float8_e4m3fn with bfloat16 results."""

    def floor_us(self, flops: int, moved: int, eight_bit: bool) -> float:
        """Microseconds that no kernel can beat: bytes at the rate of a copy, products at that of a product."""
        return 1e6 * max(moved / self.copy, flops / (self.matmul8 if eight_bit else self.matmul))


def measure(timer: timing.Timer, size: int = 8192, numbers: int = 2**29) -> Ceilings:
    """Measure them; the arguments are for tests."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    a8 = a.astype(jnp.float8_e4m3fn)

    def product(a, b):
        return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)

    copied, moved = {}, {}
    for n in (numbers, numbers // 4):
        for dtype in (jnp.bfloat16, jnp.float32):
            name, count = f"{n} {jnp.dtype(dtype).name}", 2 * n // jnp.dtype(dtype).itemsize
            copied[name], moved[name] = contestant(jax.jit(lambda x: -x), jnp.ones(count, dtype)), 4 * n
        if (call := _torch.negation(n)) is not None:
            copied[f"{n} torch"], moved[f"{n} torch"] = (call, lambda: timing.wait_for(None)), 4 * n
    products = {name: contestant(jax.jit(product), y, y) for name, y in (("matmul", a), ("matmul8", a8))}
    times = timing.compare({**copied, **products}, timer, rounds=3)
    flops = 2 * size**3
    return Ceilings(
        copy=max(moved[name] / (times[name].median * 1e-6) for name in copied),
        matmul=flops / (times["matmul"].median * 1e-6),
        matmul8=flops / (times["matmul8"].median * 1e-6),
    )


def contestant(function: Any, *args: Any) -> tuple[Any, Any]:
    """(launch, wait) of a jitted function on fixed arguments."""
    last: list[Any] = [None]

    def launch():
        last[0] = function(*args)

    return launch, lambda: timing.wait_for(last[0])
