"""Frames: how a warpgroup holds numbers that share a scale, straight from global memory, without shared memory.

A *tile* is a block of short rows, each in neighbouring lanes; its scales are a vector. A *line* is one long row in
pieces of `128 * vec` values; its scale is one number. A line that no whole number of pieces fills ends with a piece
that overlaps the one before: what lies in both is computed and written twice, with the same bits, by one warpgroup.
The same holds for the last tile of a matrix.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _exact, _mosaic, _rows

_LANES = 128
_TINY = 2.0**-126
_VALUES = 32
"""Most values of a row in one lane of a tile; longer rows are lines."""
_AMAX_GROUPS = 8
"""Warpgroups a multiprocessor that look for the largest number of a tensor."""
LINE_VALUES = 16384
"""Most values of a warpgroup in lines: 128 a lane."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """Layouts of numbers [rows, D] (a tile) or [width] (a piece of a line), and of what a row of them shares."""

    shape: tuple[int, ...]
    vec: int
    narrow: bool
    """The numbers have at most 11 significant bits: they were bfloat16 or float16."""

    @property
    def is_tile(self) -> bool:
        """Rows are shared by lanes, not by the warpgroup."""
        return len(self.shape) == 2

    @property
    def numbers(self) -> Any:
        """Layout of the numbers."""
        if self.is_tile:
            return _rows.layout(self.shape[1], self.vec)
        return plgpu.Layout.WG_STRIDED(self.shape, self.vec)

    @property
    def shared(self) -> Any:
        """Layout of one number for each row: [rows] of a tile, [width] equal ones of a line."""
        return self.numbers.reduce(1) if self.is_tile else plgpu.Layout.WG_SPLAT(self.shape)

    def load(self, ref: Any) -> jax.Array:
        """All of `ref`."""
        return plgpu.load(ref, layout=self.numbers, optimized=False)

    def full(self, value: Any) -> jax.Array:
        """One number, a scalar or a constant, for each row."""
        shape = self.shape[:1]
        value = jnp.asarray(value, jnp.float32)
        value = lax.broadcast_in_dim(value, shape, [])
        return plgpu.layout_cast(value, self.shared) if self.is_tile else value

    def spread(self, x: jax.Array) -> jax.Array:
        """A number of each row, for each of its numbers."""
        if self.is_tile:
            return lax.broadcast_in_dim(x, self.shape, [0])
        return plgpu.layout_cast(x, self.numbers)

    def reduce(self, how: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        """`how` (jnp.max, jnp.min or jnp.sum) over each row."""
        return how(x, axis=1) if self.is_tile else self.full(how(x))

    def row(self, instruction: str, interpreted: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        """An instruction on numbers of rows, see `_mosaic.pointwise`."""
        return _mosaic.pointwise(instruction, interpreted, self.shared, *arrays)

    def each(self, instruction: str, interpreted: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        """An instruction on every number."""
        return _mosaic.pointwise(instruction, interpreted, self.numbers, *arrays)

    def divide_rows(self, x: jax.Array, y: Any) -> jax.Array:
        """`x / y` of numbers of rows, correctly rounded; `y` may be a constant."""
        return self.row("div.rn.f32", _exact.divide, x, y if isinstance(y, jax.Array) else self.full(y))

    def divide(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """`x / y` of every number by its row's, correctly rounded, whatever the numbers."""
        return self.each("div.rn.f32", _exact.divide, x, self.spread(y))

    def over_constant(self, x: jax.Array, y: float) -> jax.Array:
        """`x / y` of numbers of rows, correctly rounded for x that are infinite, or from 2^-100 times y on.

        By Markstein's theorem: see `quotient`. Lanes repeat what belongs to their row, and a tile has many rows.
        """
        if _mosaic.interpreting() or not self.is_tile:
            return self.divide_rows(x, y)
        r, y_rows = self.full(1 / np.float32(y)), self.full(y)
        q = self.row("mul.rn.f32", jnp.multiply, x, r)
        for _ in range(2):
            rest = self.row("fma.rn.f32", _fma, q, y_rows, -x)
            q = self.row("fma.rn.f32", _fma, rest, -r, q)
        return jnp.where(x < math.inf, q, x)

    def inverse(self, y: jax.Array, scales_of_maxima: bool = False) -> jax.Array:
        """`1 / y` of numbers of rows, correctly rounded.

        Args:
            y: of normal size, as is 1 / y.
            scales_of_maxima: y are 16-bit numbers, or constants, over 127 or the limit of a float8. Then one Newton
                step from the approximate reciprocal is enough: it misses only y with a mantissa of nothing but ones.
        """
        if _mosaic.interpreting() or not (self.is_tile and self.narrow and scales_of_maxima):
            return self.divide_rows(self.full(1.0), y)
        r = self.row("rcp.approx.ftz.f32", lambda x: 1 / x, y)
        return self.row("fma.rn.f32", _fma, self.row("fma.rn.f32", _fma, -y, r, self.full(1.0)), r, r)

    def quotient(self, x: jax.Array, y: jax.Array, scales_of_maxima: bool = True) -> jax.Array:
        """`x / y`, whose rounding to a code of at most 8 bits is that of the correctly rounded quotient.

        r = 1 / y, rounded to nearest, gives x r to 1.5 units in the last place; a step with the exact remainder gives a
        number that lies within 2^-22 units of the quotient before it is rounded. For 16-bit x that is enough: no
        quotient of one by a float32 comes that close to half a unit beside a border between two codes, but for
        two that round correctly (tests/quant/test_kernels.py finds all). Otherwise a second step rounds correctly, by
        Markstein's theorem (IBM J. Res. Dev. 34, 1990). Remainders are negated, which keeps the sign of zero.

        Args:
            x: float32; quotients must not overflow.
            y: of rows; below 2^-126, or infinite, the quotient is 0.
            scales_of_maxima: as for `inverse`.
        """
        usable = (y < math.inf) & (y >= _TINY)
        if _mosaic.interpreting():
            return jnp.where(self.spread(usable), _exact.divide(x, self.spread(jnp.where(usable, y, 1.0))), x * 0.0)
        y = jnp.where(usable, y, 1.0)
        r, y = self.spread(jnp.where(usable, self.inverse(y, scales_of_maxima), 0.0)), self.spread(y)
        q, minus_x, minus_r = self.each("mul.rn.f32", jnp.multiply, x, r), -x, -r
        for _ in range(1 if self.narrow else 2):
            rest = self.each("fma.rn.f32", _fma, q, y, minus_x)
            q = self.each("fma.rn.f32", _fma, rest, minus_r, q)
        return q

    def largest(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """Largest magnitude of each row over its pieces, float32; NaN does not count. 16-bit pieces go two by two."""
        top = plgpu.layout_cast(jnp.zeros(self.shape, pieces[0].dtype), self.numbers)
        for x in pieces:
            top = _mosaic.larger(top, jnp.abs(x), self.numbers)
        if self.is_tile:
            return jnp.max(top, axis=1).astype(jnp.float32)
        return self.reduce(jnp.max, wide(top))


def wide(x: jax.Array) -> jax.Array:
    """float32."""
    return x.astype(jnp.float32)


def is_narrow(dtype: Any) -> bool:
    """True for 16-bit floats."""
    return jnp.dtype(dtype).itemsize == 2


def _fma(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    return x * y + z


# ---------------------------------------------------------------- tiles
def is_tile(D: int, vec: int) -> bool:
    """True if rows of D values are better held by some lanes than by a warpgroup."""
    return D % vec == 0 and D // _rows.lanes(D, vec) <= _VALUES


def launch_tiles(
    process: Callable[..., None],
    arrays: Sequence[jax.Array],
    out_type: Sequence[jax.ShapeDtypeStruct],
    *,
    rows: int,
    least: int,
    name: str,
    shared: Sequence[jax.Array] = (),
    parts: int = 1,
) -> Sequence[jax.Array]:
    """Run `process(start, rows, *refs)` for tiles that cover the leading dimension N of arrays and outputs.

    Args:
        process: device code; reads and writes rows `start` to `start + rows` of its refs.
        arrays: inputs [N, ...].
        out_type: outputs [N * parts, ...].
        rows: of a tile, a multiple of `least`.
        least: rows of the smallest tile.
        name: of the kernel in profiles.
        shared: further inputs, whole.
        parts: rows of an output for each row of an input.
    """
    N = arrays[0].shape[0]
    if not N:
        return [jnp.zeros(t.shape, t.dtype) for t in out_type]
    if least > N:
        padded = [jnp.pad(x, [(0, least - N)] + [(0, 0)] * (x.ndim - 1)) for x in arrays]
        types = [jax.ShapeDtypeStruct((least * parts, *t.shape[1:]), t.dtype) for t in out_type]
        done = launch_tiles(process, padded, types, rows=least, least=least, name=name, shared=shared, parts=parts)
        return [x[: N * parts] for x in done]
    full, rest = divmod(N, rows)
    whole, sliver = rest - rest % least, rest % least
    tiles = full + bool(whole)

    def body(*refs):
        i = lax.axis_index("tile")
        if full:
            pl.when(i < full)(lambda: process(i * rows, rows, *refs))
        if whole:
            pl.when(i == full)(lambda: process(full * rows, whole, *refs))
        if sliver:
            pl.when(i == tiles - 1)(lambda: process(N - least, least, *refs))

    body.__name__ = name
    call = plgpu.kernel(body, out_type=list(out_type), grid=(tiles,), grid_names=("tile",))
    return call(*arrays, *shared)


def largest(
    x: jax.Array, vec: int, name: str, change: Callable[[Frame, jax.Array], jax.Array] | None = None
) -> jax.Array:
    """Largest magnitude of a matrix [N, D] of short rows, float32 []; NaN does not count, and no number gives 0.

    `change(frame, numbers)` may rotate the numbers first.
    """
    N, D = x.shape
    least = _rows.smallest(D, vec)
    if not N:
        return jnp.zeros((), jnp.float32)
    if least > N:
        return largest(jnp.pad(x, ((0, least - N), (0, 0))), vec, name, change)
    rows = max(r for r in _rows.choices(D, vec) if r <= N)
    tiles = -(-N // rows)
    groups = min(tiles, _AMAX_GROUPS * _mosaic.num_sms())
    frame = Frame((rows, D), vec, is_narrow(x.dtype))

    def body(x_ref, top_ref):
        me = lax.axis_index("group")

        def step(i, top):
            start = jnp.minimum((me + i * groups) * rows, N - rows)
            numbers = frame.load(x_ref.at[pl.ds(start, rows)])
            numbers = numbers if change is None else change(frame, numbers)
            return _mosaic.larger(top, jnp.abs(numbers), frame.numbers)

        top = plgpu.layout_cast(jnp.zeros(frame.shape, x.dtype), frame.numbers)
        top = lax.fori_loop(0, lax.div(tiles - me + (groups - 1), groups), step, top)
        top_ref[me] = jnp.max(frame.reduce(jnp.max, wide(top)))

    body.__name__ = name
    out = jax.ShapeDtypeStruct((groups,), jnp.float32)
    return jnp.max(plgpu.kernel(body, out_type=out, grid=(groups,), grid_names=("group",))(x))


# ---------------------------------------------------------------- lines
@dataclasses.dataclass(frozen=True)
class Line:
    """A row of M values in pieces of `128 * vec`; with `group`, a piece is a tile of groups."""

    M: int
    vec: int
    narrow: bool
    group: int | None = None

    @property
    def width(self) -> int:
        """Values of a piece."""
        return _LANES * self.vec

    @property
    def frame(self) -> Frame:
        """Layouts of a piece."""
        shape = (self.width,) if self.group is None else (self.width // self.group, self.group)
        return Frame(shape, self.vec, self.narrow)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where the pieces begin; the last one may overlap the one before."""
        return (*range(0, self.M - self.width, self.width), self.M - self.width)

    @property
    def repeated(self) -> int:
        """Values of the last piece that the one before holds too."""
        return -self.M % self.width

    def view(self, x: jax.Array) -> jax.Array:
        """[..., M] as the kernel indexes it."""
        return x if self.group is None else x.reshape(*x.shape[:-1], x.shape[-1] // self.group, self.group)

    def at(self, ref: Any, row: Any, start: Any) -> Any:
        """A piece of a row of `view(x)`, or of groups' scales [N, M / group]."""
        return self.part(ref.at[row], start)

    def part(self, ref: Any, start: Any) -> Any:
        """The same of one row."""
        unit = self.group or 1
        return ref.at[pl.ds(start // unit, self.width // unit)]

    def index(self) -> jax.Array:
        """Position of each value within its piece, int32."""
        frame, unit = self.frame, self.group or 1

        def iota(axis):
            return plgpu.broadcasted_iota(jnp.int32, frame.shape, axis, layout=frame.numbers)

        return iota(0) * unit + iota(1) if frame.is_tile else iota(0)


def line(M: int, dtype: Any, group: int | None = None) -> Line | str:
    """The widest pieces that fit into rows of M values, or one sentence why there are none."""
    most = _rows.vector(dtype)
    if group is not None and (M % group or group & (group - 1)):
        return f"groups must be a power of two that divides the row length, got groups of {group} and rows of {M}"
    vec = most
    while vec >= 1:
        fits = _LANES * vec <= M and M % vec == 0
        if fits and (group is None or (group % vec == 0 and (_LANES * vec) % group == 0 and _fits(group, vec))):
            return Line(M, vec, is_narrow(dtype), group)
        vec //= 2
    what = f"rows must hold at least {_LANES} values"
    if group is not None:
        least = min(_LANES * v for v in (most, most // 2, 1) if v and (_LANES * v) % group == 0 and _fits(group, v))
        what = f"rows must hold at least {least} values in groups of {group}"
    return f"{what}, got {M}"


def _fits(group: int, vec: int) -> bool:
    """True if pieces of 128 * vec values are whole smallest tiles of groups."""
    return group % vec == 0 and _LANES * vec // group % _rows.smallest(group, vec) == 0


def launch_lines(
    process: Callable[..., None],
    arrays: Sequence[jax.Array],
    out_type: Sequence[jax.ShapeDtypeStruct],
    *,
    rows: int,
    name: str,
    shared: Sequence[jax.Array] = (),
    free: bool = False,
) -> Sequence[jax.Array]:
    """Run `process(rows of one warpgroup, *refs)` over the leading dimension N of arrays and outputs.

    `process` gets a list of `rows` row indices; in the last warpgroup the last row may come more than once. If `free`,
    no thread reads what another one wrote, and warps do not wait for each other around their stores.
    """
    N = arrays[0].shape[0]
    if not N:
        return [jnp.zeros(t.shape, t.dtype) for t in out_type]

    def body(*refs):
        first = lax.axis_index("line") * rows
        process([jnp.minimum(first + j, N - 1) if N % rows and j else first + j for j in range(rows)], *refs)

    body.__name__ = name
    params = plgpu.CompilerParams(unsafe_no_auto_barriers=free)
    grid = {"grid": (-(-N // rows),), "grid_names": ("line",)}
    call = plgpu.kernel(body, out_type=list(out_type), compiler_params=params, **grid)
    return call(*arrays, *shared)
