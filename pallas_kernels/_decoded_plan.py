"""What is known about one grouped product of `_experts_decoded` when it is compiled."""

import dataclasses
from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels import _decode
from pallas_kernels._decoded_config import Config
from pallas_kernels._gated import Activation
from pallas_kernels._nibbles import FEATURES, GROUP, INPUTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Of a product its arguments, path and tiles."""

    config: Config
    act: Activation | None
    code: _decode.Code
    kind: str
    """Of the scales: "ue8m0", "e4m3" or "value"."""
    group: int
    """Inputs that share a scale."""
    late: bool
    N: int
    """Output features."""
    K: int
    unit: int
    """Rows of a tile start at multiples of this."""
    narrow: Any
    """Of x: what the first product is rounded to."""
    out_dtype: Any
    permuted: bool
    """The result is a second product's operand."""
    encoded: bool
    """It is quantized on the way."""
    row_scales: int
    """Scales of a row in a tile of inputs: 1, 4 or, in 16 bits, 0."""

    @property
    def features(self) -> int:
        """Of a half, for one thread block."""
        return FEATURES * self.config.warpgroups

    @property
    def width(self) -> int:
        """Output features of a tile."""
        return self.features * (1 if self.act else 2)

    @property
    def across(self) -> int:
        """Tiles side by side."""
        return pl.cdiv(self.N, self.width)

    @property
    def steps(self) -> int:
        return pl.cdiv(self.K, self.config.inputs)

    @property
    def parts(self) -> int:
        """Tiles of inputs in a step."""
        return self.config.inputs // INPUTS

    @property
    def piece(self) -> int:
        """Rows that leave together."""
        return self.unit

    @property
    def together(self) -> bool:
        """All rows of a tile leave together, those that hold anything."""
        return self.config.together and self.piece < self.config.tokens and not self.codes

    @property
    def swizzled(self) -> bool:
        """Results lie in shared memory as `_inline.span` says, where transposing them meets fewer banks twice."""
        return self.together and self.out_dtype.itemsize == 2

    @property
    def shared(self) -> int:
        """Features of an encoded result that share a scale."""
        return INPUTS if self.config.codes else GROUP

    @property
    def groups(self) -> int:
        """Such scales of a warpgroup's features."""
        return max(1, FEATURES // self.shared)

    @property
    def codes(self) -> bool:
        """The result is FP8 codes."""
        return self.encoded and self.config.eight

    @property
    def turns(self) -> bool:
        return self.act is not None and self.act.kind == "swigluoai"
