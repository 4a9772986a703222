"""How quantizers cut a matrix into tiles, lines or blocks, and run the arithmetic of their rows over it."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _frames, _mosaic, _rows
from pallas_kernels._frames import Frame, Line

DTYPES = ("bfloat16", "float16", "float32")
FLAT = 128
"""Row length of a matrix whose rows do not matter."""
BLOCK = 128
TILE_VALUES = 4096
"""Values of a tile by default: 32 a lane."""
_LONGEST_GROUP = 1024

type Coder = Callable[..., tuple[list[jax.Array], Callable[[jax.Array], jax.Array]]]
"""`coder(frame, pieces, *shared numbers)` -> what belongs to each row, and the function that encodes its numbers."""


# ---------------------------------------------------------------- the rows that a process sees
@dataclasses.dataclass(frozen=True)
class Rows:
    """Short rows in one tile, or one long row in several pieces, and how to reach them in memory.

    Matrices are [N, D], or with a plan for groups of a line `Line.view` of them.
    """

    frame: Frame
    first: Any
    """Index of the first row."""
    line: Line | None = None

    @property
    def pieces(self) -> range:
        """Indices of the pieces."""
        return range(len(self.line.starts) if self.line else 1)

    def at(self, ref: Any, piece: Any) -> Any:
        """A piece of a matrix, or with groups of their scales; an index that is traced must not be the last."""
        if self.line is None:
            return ref.at[pl.ds(self.first, self.frame.shape[0])]
        start = self.line.starts[piece] if isinstance(piece, int) else piece * self.line.width
        return self.line.at(ref, self.first, start)

    def load(self, ref: Any, pieces: Iterable[Any] | None = None) -> list[jax.Array]:
        """Some pieces of a matrix, None = all."""
        return [self.frame.load(self.at(ref, k)) for k in (self.pieces if pieces is None else pieces)]

    def load_each(self, ref: Any) -> list[jax.Array]:
        """All pieces of a row [D] that belongs to every row of the matrix, as float32."""
        if self.line is not None:
            return [_frames.wide(self.frame.load(self.line.part(ref, start))) for start in self.line.starts]
        x = plgpu.load(ref, layout=self.frame.numbers.reduce(0), optimized=False).astype(jnp.float32)
        return [lax.broadcast_in_dim(x, self.frame.shape, [1])]

    def store(self, ref: Any, piece: Any, value: jax.Array) -> None:
        """Write a piece of a matrix, or with groups of their scales, cast to the dtype of `ref`."""
        _mosaic.store(self.at(ref, piece), value.astype(ref.dtype))

    def store_row(self, ref: Any, value: jax.Array) -> None:
        """Write what belongs to a row as a whole, to [N]."""
        if self.line is not None:
            ref[self.first] = jnp.max(value)
        else:
            self.store(ref, 0, value)

    def total(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """Sum of each whole row, also over its groups; what lies in two pieces counts once."""
        pieces = list(pieces)
        if self.line is not None and self.line.repeated:
            pieces[-1] = jnp.where(self.line.index() >= self.line.repeated, pieces[-1], 0.0)
        total = pieces[0]
        for x in pieces[1:]:
            total = total + x
        if self.line is None or self.line.group is None:
            return self.frame.reduce(jnp.sum, total)
        return self.frame.full(jnp.sum(self.frame.reduce(jnp.sum, total)))


# ---------------------------------------------------------------- plans
@dataclasses.dataclass(frozen=True)
class Plan:
    """The matrix [N, D] that is cut: rows, groups, or all numbers in rows of `FLAT`."""

    N: int
    D: int
    dtype: Any
    line: Line | None = None
    blocks: bool = False

    @property
    def vec(self) -> int:
        """Values in 16 bytes; in lines, of a piece in a lane."""
        return self.line.vec if self.line else _rows.vector(self.dtype)

    @property
    def least(self) -> int:
        """Rows of the smallest tile."""
        return 1 if self.line or self.blocks else _rows.smallest(self.D, self.vec)

    def view(self, x: jax.Array) -> jax.Array:
        """[..., D] as processes index it."""
        return x if self.line is None else self.line.view(x)

    def default_rows(self) -> int:
        """Tiles up to 4096 values, if they still fill the card; lines and blocks one by one.

        Measured on an H200, 2026-11, FP8 of 16384 x 7168: groups in tiles of 2048, 4096, 8192 values 89, 83, 99 us;
        rows as lines of one, two a warpgroup 88, 130 us.
        """
        return 1 if self.least == 1 else _rows.default_rows(self.N, self.D, self.vec, _mosaic.num_sms(), TILE_VALUES)

    def choices(self) -> Sequence[int]:
        """Legal heights."""
        if self.blocks:
            return (1,)
        if self.line:
            return [r for r in (1, 2, 4, 8) if r == 1 or r * self.D <= _frames.LINE_VALUES]
        return _rows.choices(self.D, self.vec)

    def check(self, op: str, rows: int) -> None:
        """Raise `ValueError` for an illegal height."""
        if rows % self.least:
            raise ValueError(f"{op}: {rows=} must be a multiple of {self.least}, the smallest tile for D={self.D}")
        if self.blocks and rows != 1:
            raise ValueError(f"{op}: {rows=} must be 1 for blocks")


def check_rows(rows: int) -> None:
    """Raise `ValueError` for a height that is never legal."""
    if rows < 1:
        raise ValueError(f"{rows=} must be at least 1")


def why_not(x, granularity: str, group: int) -> str | None:
    """None if `x` can be cut, else one sentence."""
    found = _plan(x, granularity, group)
    return found if isinstance(found, str) else None


def plan(x, granularity: str, group: int) -> Plan:
    """How to cut an `x` that `why_not` does not refuse."""
    found = _plan(x, granularity, group)
    assert not isinstance(found, str), found
    return found


def _plan(x, granularity: str, group: int) -> Plan | str:
    if jnp.dtype(x.dtype).name not in DTYPES:
        return f"x must be {_mosaic.either(DTYPES)}, got {jnp.dtype(x.dtype).name}"
    (N, M), vec = x.shape, _rows.vector(x.dtype)
    if granularity == "block":
        if group != BLOCK:
            return f"blocks must be {BLOCK} x {BLOCK}, got {group} x {group}"
        return Plan(-(-N // BLOCK), BLOCK, x.dtype, blocks=True)
    if granularity == "tensor":
        return Plan(-(-N * M // FLAT), FLAT, x.dtype)
    if granularity == "group":
        if group > _LONGEST_GROUP or not _frames.is_tile(group, vec):
            return f"groups must be a power of two from {vec} to {_LONGEST_GROUP}, got {group}"
        return Plan(N * -(-M // group), group, x.dtype)
    return whole_rows(N, M, x.dtype)


def whole_rows(N: int, M: int, dtype, group: int | None = None, most: int | None = _frames.LINE_VALUES) -> Plan | str:
    """How rows of up to `most` values (None = any) are cut, with a scale for each group or without, or one sentence."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"x must be {_mosaic.either(DTYPES)}, got {jnp.dtype(dtype).name}"
    vec = _rows.vector(dtype)
    if group is None and _frames.is_tile(M, vec):
        return Plan(N, M, dtype)
    found = _frames.line(M, dtype, group)
    if isinstance(found, str):
        return found
    if most is not None and most < M:
        return f"rows must hold at most {most} values, got {M}"
    return Plan(N, M, dtype, found)


def columns(M: int, dtype, group: int | None) -> int:
    """Row length from M on that groups and pieces fill; M if there is none, or without groups."""
    if group is None or jnp.dtype(dtype).name not in DTYPES:
        return M
    whole = range(-(-M // group) * group, M + group + 128 * _rows.vector(dtype), group)
    return next((length for length in whole if not isinstance(_frames.line(length, dtype, group), str)), M)


def widened(x: jax.Array, M: int) -> jax.Array:
    """`x` with zeros behind its last axis up to M: a copy, unless it has as many."""
    return x if x.shape[-1] == M else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, M - x.shape[-1])])


type Process = Callable[..., Iterator[None]]
"""`process(rows, *refs)`, a generator: what it does before its only `yield` (loads) comes first for all rows."""


def run(
    plan: Plan, process: Process, arrays, types, *, rows: int, name: str, shared=(), free: bool = False
) -> Sequence[jax.Array]:
    """Run `process` over the rows of arrays and outputs, as tiles or as lines.

    Args:
        plan: how to cut.
        process: device code.
        arrays: inputs [N, ...].
        types: outputs [N, ...].
        rows: of a tile or of a warpgroup's lines.
        name: of the kernel in profiles.
        shared: further inputs, whole.
        free: see `_frames.launch_lines`.
    """
    line = plan.line
    if line is None:

        def tile(start, rows, *refs):
            for _ in process(Rows(Frame((rows, plan.D), plan.vec, _frames.is_narrow(plan.dtype)), start), *refs):
                pass

        return _frames.launch_tiles(tile, arrays, types, rows=rows, least=plan.least, name=name, shared=shared)

    def lines(indices, *refs):
        running = [process(Rows(line.frame, r, line), *refs) for r in indices]
        for one in running:
            next(one)
        for one in running:
            for _ in one:
                pass

    return _frames.launch_lines(lines, arrays, types, rows=rows, name=name, shared=shared, free=free)


def encode(coder: Coder, count: int = 0) -> Process:
    """The process of a plain quantizer: x, then `count` shared numbers [1], then codes and what belongs to rows."""

    def process(rows: Rows, x_ref, *refs):
        shared, (q_ref, *outs) = refs[:count], refs[count:]
        pieces = rows.load(x_ref)
        yield
        found, code = coder(rows.frame, pieces, *[ref[0] for ref in shared])
        for k, x in enumerate(pieces):
            rows.store(q_ref, k, code(_frames.wide(x)))
        for ref, value in zip(outs, found, strict=True):
            rows.store_row(ref, value)

    return process


def cut(plan: Plan, x: jax.Array, granularity: str) -> jax.Array:
    """`x` [N, M] as the plan's matrix; incomplete groups are filled up with zeros, in a copy."""
    M = x.shape[1]
    if granularity == "group":
        x = jnp.pad(x, ((0, 0), (0, -M % plan.D))) if M % plan.D else x
    elif granularity == "tensor" and x.size % FLAT:
        x = jnp.pad(x.reshape(-1), (0, -x.size % FLAT))
    return x.reshape(plan.N, plan.D)


def uncut(plan: Plan, q: jax.Array, shape: tuple[int, int], granularity: str) -> jax.Array:
    """The codes of `cut` in the shape of `x`."""
    N, M = shape
    if granularity == "group":
        q = q.reshape(N, -(-M // plan.D) * plan.D)
        return q[:, :M] if M % plan.D else q
    return q.reshape(-1)[: N * M].reshape(N, M) if q.size != N * M else q.reshape(N, M)


def run_blocks(x, coder, dtype, name: str):
    """Codes and one float32 scale of each block of 128 x 128, one block a warpgroup.

    `coder(frame, top)` gives the scale and the function that encodes, as for rows.
    """
    N, M = x.shape
    if x.size and (N % BLOCK or M % BLOCK):
        q, s = run_blocks(jnp.pad(x, ((0, -N % BLOCK), (0, -M % BLOCK))), coder, dtype, name)
        return q[:N, :M], s
    grid = (-(-N // BLOCK), -(-M // BLOCK))
    frame = Frame((BLOCK, BLOCK), _rows.vector(x.dtype), _frames.is_narrow(x.dtype))
    types = [jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), jax.ShapeDtypeStruct(grid, jnp.float32)]
    if not x.size:
        return tuple(jnp.zeros(t.shape, t.dtype) for t in types)

    def body(x_ref, q_ref, s_ref):
        i, j = lax.axis_index("row"), lax.axis_index("column")
        where = pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)
        numbers = frame.load(x_ref.at[where])
        s, encode = coder(frame, frame.full(jnp.max(frame.largest([numbers]))))
        _mosaic.store(q_ref.at[where], encode(_frames.wide(numbers)))
        s_ref[i, j] = jnp.max(s)

    body.__name__ = name
    return tuple(plgpu.kernel(body, out_type=types, grid=grid, grid_names=("row", "column"))(x))
