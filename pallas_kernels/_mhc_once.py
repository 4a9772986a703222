"""Gates and weighted sum of hyper-connected streams in one pass over memory, on Mosaic GPU (Hopper).

The sum needs the gates, the gates need a token's whole row, 4 M numbers, and the weights of that row are too large for
one multiprocessor. So M / 256 thread blocks share 16 tokens: each has 256 columns of all four streams, and its weights
in registers of two warpgroups for the whole launch. They multiply, the blocks exchange sums by way of the L2 cache, and
a third warpgroup of each, when the messages are there, mixes the streams that still lie in shared memory and fetches
the next tile in their place. Several tiles are under way in a block, so that it waits neither for memory nor for
messages. Where streams are updated first, the third warpgroup does that too, in shared memory, and stores them from
there.

All thread blocks must run at the same time: no more are launched than there are multiprocessors. That is not enough on
a GPU that others use: two such launches on two streams could each hold some multiprocessors and wait for ever, until
the patience of `_exchange` ends. So this is an option and no default; `_mhc_cluster` may be one.
"""

import dataclasses
import functools
import operator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _exchange, _inline, _inline_memory, _inline_mma, _mosaic, mhc_post
from pallas_kernels._inline_mma import SPAN, TOKENS

COLUMNS = 256
"""Of each stream, for a thread block."""
_STREAMS, _PIECES = 4, COLUMNS // SPAN
_MULTIPLIERS = 2
_AHEAD = 2
"""Tiles that are updated before the sum of one."""
_MULTIPLYING, _MIXING = 216, 72
"""Registers; together those of three warpgroups at launch."""

f32, i32 = jnp.float32, jnp.int32


def why_not(M: int, stages: int, updated: bool) -> str | None:
    """None if streams of M numbers can be read once, else one sentence."""
    blocks, most = _mosaic.num_sms(), 5 if updated else 6
    if blocks * COLUMNS < M:
        return f"once=True needs M / {COLUMNS} multiprocessors, got M={M} and {blocks}; take once=False"
    if stages > most or (updated and stages <= _AHEAD):
        between = f"{_AHEAD + 1} to {most}" if updated else f"2 to {most}"
        return f"once=True needs {between} stages{' where streams are updated first' if updated else ''}, got {stages}"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """What does not change during a launch."""

    N: int
    M: int
    outputs: int
    stages: int
    updated: bool
    eps: float
    rms_eps: float

    @property
    def members(self) -> int:
        """Thread blocks that share a tile."""
        return self.M // COLUMNS

    @property
    def tiles(self) -> int:
        """Of 16 tokens."""
        return pl.cdiv(self.N, TOKENS)

    @property
    def groups(self) -> int:
        """Of thread blocks."""
        return min(self.tiles, _mosaic.num_sms() // self.members)

    @property
    def told(self) -> int:
        """Tiles that messages may be ahead: those of one block, `stages` before another's, that of the next."""
        return 2 * self.stages + 2


def launch(
    name: str,
    stages: int,
    x: jax.Array,
    fn: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    eps: float,
    rms_eps: float,
    update: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Weighted sums [N, M]; where there are more outputs than gates also what is left to make of them.

    Args:
        name: of the kernel.
        stages: tiles in shared memory.
        x: bfloat16 streams [N, 4 M].
        fn: float32 [O, 4 M], O = 4, or a multiple of 8 of which the first 4 are gates.
        scale: float32; the first is that of the gates.
        base: float32, the first four likewise.
        eps: added to gates.
        rms_eps: added to the mean of squares.
        update: bfloat16 y [N, M] and float32 coefficients [20, N rounded up to 16], the matrix row by row before the
            gates: streams are first updated as by `mhc_post`.

    Returns:
        bfloat16 [N, M]; with `update` the new streams [N, 4 M]; with O > 4 parts of `x fn^T` [M / 256, rows, O], whose
        first four columns hold anything, and of the sums of squares [M / 256, rows]; rows beyond N, a multiple of 32,
        hold anything.
    """
    (N, width), outputs = x.shape, fn.shape[0]
    M = width // _STREAMS
    p = _Plan(N=N, M=M, outputs=outputs, stages=stages, updated=update is not None, eps=eps, rms_eps=rms_eps)
    shape, rows = (N, _STREAMS, M // SPAN, SPAN), pl.cdiv(N, 2 * TOKENS) * 2 * TOKENS
    inputs = {"x": x.reshape(shape), "fn": fn.reshape(outputs, _STREAMS, M)}
    inputs |= {"scale": scale.reshape(-1), "base": base.reshape(-1)}
    results = {"o": jax.ShapeDtypeStruct((N, M // SPAN, SPAN), x.dtype)}
    if update is not None:
        coefficients = jnp.swapaxes(update[1].reshape(-1, p.tiles, TOKENS), 0, 1)
        inputs |= {"y": update[0].reshape(N, M // SPAN, SPAN), "coefficients": coefficients}
        results["new"] = jax.ShapeDtypeStruct(shape, x.dtype)
    if outputs > _STREAMS:
        results["parts"] = jax.ShapeDtypeStruct((p.members, rows, outputs), f32)
        results["squares"] = jax.ShapeDtypeStruct((p.members, rows), f32)

    def body(*refs, **scratch):
        names = ("messages", *inputs, *results)
        _block(p, SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch))

    together = _mosaic.interpreting()  # a cluster there: the interpreter runs no other thread blocks at the same time
    clusters: Any = {"cluster": (p.members,), "cluster_names": ("member",)} if together else {}
    run = plgpu.kernel(
        body,
        out_type=list(results.values()),
        scratch_types=_scratch(p),
        grid=(p.groups,) if together else (p.groups, p.members),
        grid_names=("group",) if together else ("group", "member"),
        num_threads=_MULTIPLIERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        **clusters,
    )

    def with_messages(*inputs):
        return run(jax.new_ref(jnp.zeros((p.tiles, p.members, TOKENS, _exchange.WORDS), f32)), *inputs)

    # vmap would launch more thread blocks than run at the same time
    @jax.custom_batching.sequential_vmap
    def one_launch(inputs):
        return _mosaic.discharged(with_messages, *inputs)

    o, *rest = one_launch(list(inputs.values()))
    if update is not None:
        rest[0] = rest[0].reshape(N, width)
    return o.reshape(N, M), *rest


def _scratch(p: _Plan) -> dict[str, Any]:
    memory, padded = _inline.span(), -(-p.outputs // 8) * 8
    scratch = {
        "ring": plgpu.SMEM((p.stages, _STREAMS, _PIECES, TOKENS, SPAN), jnp.bfloat16, transforms=memory),
        "out": plgpu.SMEM((_PIECES, TOKENS, SPAN), jnp.bfloat16, transforms=memory),
        "sums": plgpu.SMEM((_MULTIPLIERS, 4 * TOKENS, padded), f32),
        "sums_of_squares": plgpu.SMEM((_MULTIPLIERS, 4 * TOKENS), f32),
        "loaded": plgpu.Barrier(num_arrivals=1 + p.updated, num_barriers=p.stages),
        "there": plgpu.Barrier(num_arrivals=_MULTIPLIERS),
        "read": plgpu.Barrier(num_arrivals=_MULTIPLIERS),
    }
    if p.updated:
        scratch["y_ring"] = plgpu.SMEM((p.stages, _PIECES, TOKENS, SPAN), jnp.bfloat16, transforms=memory)
        scratch["updated"] = plgpu.Barrier(num_barriers=p.stages)
    if _mosaic.interpreting():
        told: Any = {"num_arrivals": _MULTIPLIERS, "num_barriers": p.told}
        shared: Any = functools.partial(plgpu.ClusterBarrier, collective_axes=("member",))
        scratch["told"] = (shared if p.members > 1 else plgpu.Barrier)(**told)
    return scratch


# ---------------------------------------------------------------- device code
def _block(p: _Plan, r: Any) -> None:
    """A thread block: two warpgroups that multiply and one that fetches and mixes."""
    group, member, warpgroup = (lax.axis_index(axis) for axis in ("group", "member", "warpgroup"))
    count = lax.div(p.tiles - 1 - group, i32(p.groups)) + 1

    def tile(i):
        return group + i * p.groups

    @pl.when(warpgroup < _MULTIPLIERS)
    def _():
        plgpu.set_max_registers(_MULTIPLYING, action="increase")
        _multiply(p, r, member, warpgroup, count, tile)

    @pl.when(warpgroup == _MULTIPLIERS)
    def _():
        plgpu.set_max_registers(_MIXING, action="decrease")
        _mix(p, r, member, count, tile)


def _multiply(p: _Plan, r: Any, member, half, count, tile) -> None:
    """Products of each tile as it comes, with columns of two streams."""
    weights = _inline_mma.weights(r.fn.at[:, pl.ds(2 * half, 2), pl.ds(member * COLUMNS, COLUMNS)])
    here, squares_here = r.sums.at[half], r.sums_of_squares.at[half]

    def step(i, _):
        slot = lax.rem(i, i32(p.stages))
        plgpu.barrier_wait((r.updated if p.updated else r.loaded).at[slot])
        sums, squares = _inline_mma.multiply(r.ring.at[slot, pl.ds(2 * half, 2)], weights, p.outputs)
        pl.when(i > 0)(lambda: plgpu.barrier_wait(r.read))
        _mosaic.store_plain(here, sums, plgpu.Layout.WGMMA)
        _mosaic.store_plain(squares_here, squares, _inline.ROW)
        plgpu.barrier_arrive(r.there)
        plgpu.barrier_wait(r.there)
        rest = ()
        if p.outputs > _STREAMS:
            tokens = pl.ds(tile(i) * TOKENS, TOKENS)
            rest = r.parts.at[member, tokens], r.squares.at[member, tokens]
        _exchange.publish(half, r.sums, r.sums_of_squares, r.messages.at[tile(i), member], rest)
        plgpu.barrier_arrive(r.read)
        if _mosaic.interpreting():
            plgpu.barrier_arrive(r.told.at[lax.rem(i, i32(p.told))])

    lax.fori_loop(0, count, step, None)
    plgpu.barrier_wait(r.read)


def _mix(p: _Plan, r: Any, member, count, tile) -> None:
    """Weighted sums of each tile when its gates are known; before that its update, a few tiles earlier."""
    strips, pieces = _mosaic.strips(jnp.bfloat16, 128), pl.ds(member * _PIECES, _PIECES)

    def tokens(i):
        return pl.ds(tile(i) * TOKENS, TOKENS)

    def ask(i):
        # registers do not do for more beside an update
        return _exchange.ask(r.messages.at[tile(i)], 16 if p.updated else p.members)

    def fetch(i):
        slot = lax.rem(i, i32(p.stages))
        there = r.ring.at[slot].transpose((2, 0, 1, 3))
        plgpu.copy_gmem_to_smem(r.x.at[tokens(i), :, pieces], there, r.loaded.at[slot])
        if p.updated:
            there = r.y_ring.at[slot].transpose((1, 0, 2))
            plgpu.copy_gmem_to_smem(r.y.at[tokens(i), pieces], there, r.loaded.at[slot])

    def update(i):
        slot = lax.rem(i, i32(p.stages))
        plgpu.barrier_wait(r.loaded.at[slot])
        lax.fori_loop(0, _PIECES, lambda k, _: _update(r, slot, k, tile(i), strips), None)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(r.ring.at[slot].transpose((2, 0, 1, 3)), r.new.at[tokens(i), :, pieces])
        plgpu.barrier_arrive(r.updated.at[slot])

    def step(i, asked):
        slot = lax.rem(i, i32(p.stages))
        if _mosaic.interpreting():
            plgpu.barrier_wait(r.told.at[lax.rem(i, i32(p.told))])
        *u, squares = _exchange.take(r.messages.at[tile(i)], asked, strips.reduce(1))
        norm = lax.rsqrt(squares * (1 / (_STREAMS * p.M)) + p.rms_eps)
        u = [x * norm * r.scale[0] + r.base[i] for i, x in enumerate(u)]
        gates = [1 / (1 + jnp.exp(-x)) + p.eps for x in u]
        if p.updated:
            pl.when(i + _AHEAD < count)(lambda: update(i + _AHEAD))
        asked = ask(jnp.minimum(i + 1, count - 1))  # comes while this tile is mixed
        gates = [lax.broadcast_in_dim(gate, (TOKENS, SPAN), [0]) for gate in gates]
        # the last sums are stored, and the streams of this slot; what was just updated need not be
        if p.updated:
            just = i + _AHEAD < count
            pl.when(just)(lambda: plgpu.wait_smem_to_gmem(1, wait_read_only=True))
            pl.when(jnp.logical_not(just))(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for piece in range(_PIECES):
            streams = [_inline_memory.load_span(r.ring.at[slot, i, piece], strips) for i in range(_STREAMS)]
            mixed = functools.reduce(
                operator.add, [x.astype(f32) * gate for x, gate in zip(streams, gates, strict=True)]
            )
            _inline_memory.store_span(r.out.at[piece], mixed.astype(jnp.bfloat16), strips)
        plgpu.commit_smem()  # the whole slot is read, by the multipliers before they sent
        plgpu.copy_smem_to_gmem(r.out.transpose((1, 0, 2)), r.o.at[tokens(i), pieces])
        pl.when(i + p.stages < count)(lambda: fetch(i + p.stages))
        return asked

    for i in range(p.stages):
        pl.when(i < count)(lambda i=i: fetch(i32(i)))
    if p.updated:
        lax.fori_loop(0, jnp.minimum(count, _AHEAD), lambda i, _: update(i), None)
    lax.fori_loop(0, count, step, ask(0))
    plgpu.wait_smem_to_gmem(0)


def _update(r: Any, slot, piece, tile, strips) -> None:
    """New streams in place of the old ones, 64 columns of 16 tokens, as `mhc_post` has them."""
    *streams, out = (
        _inline_memory.load_span(ref, strips).astype(f32)
        for ref in (*(r.ring.at[slot, i, piece] for i in range(_STREAMS)), r.y_ring.at[slot, piece])
    )
    for j in range(_STREAMS):
        rows = [i * _STREAMS + j for i in range(_STREAMS)] + [_STREAMS * _STREAMS + j]
        found = _exchange.load_rows(r.coefficients.at[tile], rows, strips.reduce(1))
        *matrix, gate = (lax.broadcast_in_dim(x, (TOKENS, SPAN), [0]) for x in found)
        new = mhc_post.mixed(streams, out, matrix, gate).astype(jnp.bfloat16)
        _inline_memory.store_span(r.ring.at[slot, j, piece], new, strips)
