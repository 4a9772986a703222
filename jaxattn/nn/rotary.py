"""Rotary embedding as a module: the table that the attention layers of a model share."""

from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxattn.ops.rope import rope


class RotaryTable(nnx.Module):
    """`rotary` of `Attention` and `PagedAttention`: heads rotated by a table of `jaxattn.ops.rope.rope_table`.

    Layers that are given one such module share its table.
    """

    def __init__(self, table: Float[Array, "P Dr"], *, interleaved: bool = False):
        """Keep the table; pairs are neighbours if `interleaved`, else halves."""
        self.table = nnx.Variable(table)
        self.interleaved = interleaved

    def __call__(self, x: Float[Array, "N H D"], positions: Int32[Array, " N"]) -> Float[Array, "N H D"]:
        """The heads at their tokens' positions."""
        return rope(x, positions, self.table[...], interleaved=self.interleaved)
