"""Gates and weighted sum of hyper-connected streams in one pass over memory, on Mosaic GPU (Hopper).

The sum needs the gates, the gates need a token's whole row, 4 M numbers, and the weights of that row are too large for
one multiprocessor. So M / 256 thread blocks, a cluster, share 16 tokens: each has 256 columns of all four streams, and
its weights in registers for the whole launch. CUDA runs the blocks of a cluster at the same time or not at all, so
their waiting for each other ends whatever else runs on the GPU. They exchange sums through each other's shared memory
(`_cluster_exchange`).

A block has four warpgroups. Two multiply and do nothing else; the third fetches tiles and mixes them when their gates
are known, from shared memory, where they still lie; the fourth adds up what warps and blocks found and, where streams
are updated first, updates them and stores them from there. So no tile's exchange keeps another one's product waiting,
and loads are under way all the time.

A cluster lies in one GPC of the GPU, whose GPCs have different numbers of multiprocessors. Clusters beyond those that
fit would run after the others, which takes twice as long, hence `clusters`. A block that waits too long, which only an
error of this kernel could bring about, stops the launch.
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

from pallas_kernels import _cluster_exchange, _inline, _inline_memory, _inline_mma, _mosaic, mhc_post
from pallas_kernels._inline_mma import SPAN, TOKENS

_COLUMNS = 256
"""Of each stream, for a thread block."""
_STREAMS, _PIECES = 4, _COLUMNS // SPAN
_MULTIPLIERS, _MIXER, _ADDER = 2, 2, 3
_AHEAD = 1
"""Tiles that are updated before the sums of one are sent."""
_REGISTERS = {False: (208, 56, 40), True: (200, 48, 64)}
"""Of those that multiply, mix and add up; together those of four warpgroups at launch. True: streams are updated."""
_WORTH = 8
"""Tiles of a cluster."""
_UNEVEN = 12
"""Multiprocessors that clusters of 8 leave over on an H100, 120 of 132 work: github.com/accel-sim/gpu-app-collection,
pull request 87."""

f32, i32 = jnp.float32, jnp.int32


def clusters(M: int) -> int:
    """Clusters that run at once, not counting on more: 7 of 16 blocks on 132 multiprocessors."""
    return max(1, (_mosaic.num_sms() - _UNEVEN) // (M // _COLUMNS))


def pays(N: int, M: int) -> bool:
    """Whether clusters beat two passes: for the width that was timed, with enough tiles for a load of weights."""
    timed, tiles = M // _COLUMNS == _cluster_exchange.MOST and _mosaic.num_sms() >= 132, N // TOKENS
    return timed and tiles >= _WORTH * clusters(M)


def why_not(M: int, stages: int, updated: bool) -> str | None:
    """None if streams of M numbers can be read once, else one sentence."""
    blocks, most = M // _COLUMNS, 4 if updated else 5
    if blocks > _cluster_exchange.MOST or _cluster_exchange.MOST % blocks:
        legal = ", ".join(str(_COLUMNS * 2**i) for i in range(5))
        return f"once=True needs M to be one of {legal}, got {M}; take once=False"
    if _mosaic.num_sms() < blocks:
        return f"once=True needs M / {_COLUMNS} multiprocessors, got M={M} and {_mosaic.num_sms()}; take once=False"
    if not 2 <= stages <= most:
        where = " where streams are updated first" if updated else ""
        return f"once=True needs 2 to {most} stages{where}, got {stages}"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """What does not change during a launch."""

    N: int
    M: int
    outputs: int
    stages: int
    groups: int
    updated: bool
    eps: float
    rms_eps: float

    @property
    def members(self) -> int:
        """Thread blocks of a cluster."""
        return self.M // _COLUMNS

    @property
    def tiles(self) -> int:
        """Of 16 tokens."""
        return pl.cdiv(self.N, TOKENS)

    @property
    def own(self) -> int:
        """Tokens of a tile whose sums a block adds up."""
        return TOKENS // self.members

    @property
    def told(self) -> int:
        """Interpreted, tiles that messages may be ahead."""
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
    at_once: int | None = None,
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
        at_once: clusters, None as many as `clusters` says.

    Returns:
        bfloat16 [N, M]; with `update` the new streams [N, 4 M]; with O > 4 products `x fn^T` [1, rows, O], whose first
        four columns hold anything, and sums of squares [1, rows]; rows beyond N, a multiple of 32, hold anything.
    """
    (N, width), outputs = x.shape, fn.shape[0]
    M, tiles = width // _STREAMS, pl.cdiv(x.shape[0], TOKENS)
    p = _Plan(
        N=N,
        M=M,
        outputs=outputs,
        stages=stages,
        groups=min(tiles, at_once or clusters(M)),
        updated=update is not None,
        eps=eps,
        rms_eps=rms_eps,
    )
    shape, rows = (N, _STREAMS, M // SPAN, SPAN), pl.cdiv(N, 2 * TOKENS) * 2 * TOKENS
    inputs = {"x": x.reshape(shape), "fn": fn.reshape(outputs, _STREAMS, M)}
    inputs |= {"scale": scale.reshape(-1), "base": base.reshape(-1)}
    results = {"o": jax.ShapeDtypeStruct((N, M // SPAN, SPAN), x.dtype)}
    if update is not None:
        coefficients = jnp.swapaxes(update[1].reshape(-1, p.tiles, TOKENS), 0, 1)
        inputs |= {"y": update[0].reshape(N, M // SPAN, SPAN), "coefficients": coefficients}
        results["new"] = jax.ShapeDtypeStruct(shape, x.dtype)
    if outputs > _STREAMS:
        results["parts"] = jax.ShapeDtypeStruct((1, rows, outputs), f32)
        results["squares"] = jax.ShapeDtypeStruct((1, rows), f32)
    names = (*inputs, *results)
    if _mosaic.interpreting():
        results["messages"] = jax.ShapeDtypeStruct((p.tiles, p.members, TOKENS, outputs + 1), f32)

    def body(*refs, **scratch):
        _block(p, SimpleNamespace(**dict(zip((*names, "messages"), refs, strict=False)), **scratch))

    run = plgpu.kernel(
        body,
        out_type=list(results.values()),
        scratch_types=_scratch(p),
        grid=(p.groups,),
        grid_names=("group",),
        cluster=(p.members,),
        cluster_names=("member",),
        num_threads=_ADDER + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
    )
    found = dict(zip(results, run(*inputs.values()), strict=True))
    found.pop("messages", None)
    o, *rest = found.values()
    if update is not None:
        rest[0] = rest[0].reshape(N, width)
    return o.reshape(N, M), *rest


def _scratch(p: _Plan) -> dict[str, Any]:
    memory, padded = _inline.span(), -(-p.outputs // 8) * 8
    scratch = {
        "ring": plgpu.SMEM((p.stages, _STREAMS, _PIECES, TOKENS, SPAN), jnp.bfloat16, transforms=memory),
        "out": plgpu.SMEM((_PIECES, TOKENS, SPAN), jnp.bfloat16, transforms=memory),
        "sums": plgpu.SMEM((_MULTIPLIERS, 4 * TOKENS, padded + 4), f32),
        "loaded": plgpu.Barrier(num_arrivals=1 + 2 * p.updated, num_barriers=p.stages),
        "there": plgpu.Barrier(num_arrivals=_MULTIPLIERS),
        "read": plgpu.Barrier(),
    }
    if p.updated:
        scratch["y_ring"] = plgpu.SMEM((p.stages, _PIECES, TOKENS, SPAN), jnp.bfloat16, transforms=memory)
        scratch["rows"] = plgpu.SMEM((p.stages, _STREAMS * (_STREAMS + 1), TOKENS), f32)
        scratch["updated"] = plgpu.Barrier(num_barriers=p.stages)
    if _mosaic.interpreting():
        told: Any = {"num_barriers": p.told}
        shared: Any = functools.partial(plgpu.ClusterBarrier, collective_axes=("member",))
        scratch["told"] = (shared if p.members > 1 else plgpu.Barrier)(**told)
    else:
        scratch["mail"] = plgpu.SMEM((p.stages, _cluster_exchange.slot_words(p.outputs)), f32)
        scratch["mail_barriers"] = plgpu.SMEM((p.stages, 2, 2), jnp.int32)
    return scratch


# ---------------------------------------------------------------- device code
def _block(p: _Plan, r: Any) -> None:
    """A thread block: two warpgroups that multiply, one that fetches and mixes, one that adds up and updates."""
    group, member, warpgroup = (lax.axis_index(axis) for axis in ("group", "member", "warpgroup"))
    count = lax.div(p.tiles - 1 - group, i32(p.groups)) + 1
    multiplying, mixing, adding = _REGISTERS[p.updated]

    def tile(i):
        return group + i * p.groups

    if not _mosaic.interpreting():
        _cluster_exchange.begin(r.mail_barriers, p.outputs)

    @pl.when(warpgroup == _MIXER)
    def _():
        plgpu.set_max_registers(mixing, action="decrease")
        _mix(p, r, member, count, tile)
        _cluster_exchange.end()

    @pl.when(warpgroup == _ADDER)
    def _():
        plgpu.set_max_registers(adding, action="decrease")
        _add_up(p, r, member, count, tile)
        _cluster_exchange.end()

    # last: what a later branch needs would take a register here
    @pl.when(warpgroup < _MULTIPLIERS)
    def _():
        plgpu.set_max_registers(multiplying, action="increase")
        _multiply(p, r, member, warpgroup, count)
        _cluster_exchange.end()


def _slot(p: _Plan, i):
    return lax.rem(i, i32(p.stages))


def _multiply(p: _Plan, r: Any, member, half, count) -> None:
    """Products of each tile as it comes, with columns of two streams."""
    weights = _inline_mma.weights(r.fn.at[:, pl.ds(2 * half, 2), pl.ds(member * _COLUMNS, _COLUMNS)])

    def step(i, _):
        slot = _slot(p, i)
        plgpu.barrier_wait((r.updated if p.updated else r.loaded).at[slot])
        sums, squares = _inline_mma.multiply(r.ring.at[slot, pl.ds(2 * half, 2)], weights, p.outputs)
        plgpu.barrier_wait(r.read)
        _inline_mma.store(r.sums.at[half], sums, squares)
        plgpu.barrier_arrive(r.there)

    lax.fori_loop(0, count, step, None)
    plgpu.barrier_wait(r.read)


def _mix(p: _Plan, r: Any, member, count, tile) -> None:
    """Fetch tiles; weighted sums of each when its gates are known."""
    strips, pieces = _mosaic.strips(jnp.bfloat16, 128), pl.ds(member * _PIECES, _PIECES)
    scale, base = r.scale[0], [r.base[i] for i in range(_STREAMS)]

    def tokens(i):
        return pl.ds(tile(i) * TOKENS, TOKENS)

    def fetch(i):
        slot = _slot(p, i)
        there = r.ring.at[slot].transpose((2, 0, 1, 3))
        plgpu.copy_gmem_to_smem(r.x.at[tokens(i), :, pieces], there, r.loaded.at[slot])
        if p.updated:
            there = r.y_ring.at[slot].transpose((1, 0, 2))
            plgpu.copy_gmem_to_smem(r.y.at[tokens(i), pieces], there, r.loaded.at[slot])
            plgpu.copy_gmem_to_smem(r.coefficients.at[tile(i)], r.rows.at[slot], r.loaded.at[slot])

    def step(i, _):
        slot = _slot(p, i)
        u = [x * scale + shift for x, shift in zip(_normed(p, r, member, i, tile, strips.reduce(1)), base, strict=True)]
        gates = [1 / (1 + jnp.exp(-x)) + p.eps for x in u]
        gates = [lax.broadcast_in_dim(gate, (TOKENS, SPAN), [0]) for gate in gates]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last sums are stored
        for piece in range(_PIECES):
            streams = [_inline_memory.load_span(r.ring.at[slot, i, piece], strips) for i in range(_STREAMS)]
            mixed = functools.reduce(
                operator.add, [x.astype(f32) * gate for x, gate in zip(streams, gates, strict=True)]
            )
            _inline_memory.store_span(r.out.at[piece], mixed.astype(jnp.bfloat16), strips)
        # the whole slot is read: others had read, and stored, theirs when they sent what gates are made of
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(r.out.transpose((1, 0, 2)), r.o.at[tokens(i), pieces])
        pl.when(i + p.stages < count)(lambda: fetch(i + p.stages))

    for i in range(p.stages):
        pl.when(i < count)(lambda i=i: fetch(i32(i)))
    lax.fori_loop(0, count, step, None)
    plgpu.wait_smem_to_gmem(0)


def _normed(p: _Plan, r: Any, member, i, tile, layout: Any) -> list[jax.Array]:
    """What the gates of a tile's tokens are made of, [16] each, when all blocks have sent it."""
    if not _mosaic.interpreting():
        slot = _slot(p, i)
        return _cluster_exchange.take(
            r.mail.at[slot], r.mail_barriers.at[slot], lax.div(i, i32(p.stages)), p.outputs, layout
        )
    plgpu.barrier_wait(r.told.at[lax.rem(i, i32(p.told))])
    sums = r.messages[tile(i)].sum(0)
    norm = lax.rsqrt(sums[:, p.outputs] * (1 / (_STREAMS * p.M)) + p.rms_eps)
    if p.outputs > _STREAMS:
        own = r.messages.at[tile(i), :, pl.ds(member * p.own, p.own)][...].sum(0)
        mine = pl.ds(tile(i) * TOKENS + member * p.own, p.own)
        r.parts[0, mine, _STREAMS:] = own[:, _STREAMS : p.outputs]
        r.squares[0, mine] = own[:, p.outputs]
    return [sums[:, j] * norm for j in range(_STREAMS)]


def _add_up(p: _Plan, r: Any, member, count, tile) -> None:
    """Sums of each tile over warps and blocks; before that, where streams are updated, the update of one to come."""
    strips, pieces = _mosaic.strips(jnp.bfloat16, 128), pl.ds(member * _PIECES, _PIECES)

    def update(i):
        slot = _slot(p, i)
        plgpu.barrier_wait(r.loaded.at[slot])
        lax.fori_loop(0, _PIECES, lambda k, _: _update(r, slot, k, strips), None)
        plgpu.commit_smem()
        there = r.new.at[pl.ds(tile(i) * TOKENS, TOKENS), :, pieces]
        plgpu.copy_smem_to_gmem(r.ring.at[slot].transpose((2, 0, 1, 3)), there)
        plgpu.barrier_arrive(r.updated.at[slot])

    def step(i, _):
        slot = _slot(p, i)
        if p.updated:
            ahead = i + _AHEAD < count
            pl.when(ahead)(lambda: update(i + _AHEAD))
            # the new streams of this slot are stored: once gates are known it is filled again
            pl.when(ahead)(lambda: plgpu.wait_smem_to_gmem(_AHEAD, wait_read_only=True))
            pl.when(jnp.logical_not(ahead))(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        plgpu.barrier_wait(r.there)
        if _mosaic.interpreting():
            padded = r.sums.shape[2] - 4
            both = r.sums[:, :, : padded + 1].reshape(-1, TOKENS, padded + 1).sum(0)
            r.messages[tile(i), member] = jnp.concatenate([both[:, : p.outputs], both[:, padded:]], 1)
            plgpu.barrier_arrive(r.read)
            plgpu.barrier_arrive(r.told.at[lax.rem(i, i32(p.told))])
            return
        mail, barriers = r.mail.at[slot], r.mail_barriers.at[slot]
        _cluster_exchange.send(r.sums, mail, barriers, p.members, p.outputs)
        plgpu.barrier_arrive(r.read)
        rest = ()
        if p.outputs > _STREAMS:
            tokens = pl.ds(tile(i) * TOKENS, TOKENS)
            rest = r.parts.at[0, tokens], r.squares.at[0, tokens]
        turn, mean = lax.div(i, i32(p.stages)), 1 / (_STREAMS * p.M)
        _cluster_exchange.receive(mail, barriers, turn, p.members, p.outputs, mean, p.rms_eps, rest)

    plgpu.barrier_arrive(r.read)  # nothing was written yet
    if p.updated:
        lax.fori_loop(0, jnp.minimum(count, _AHEAD), lambda i, _: update(i), None)
    lax.fori_loop(0, count, step, None)
    plgpu.wait_smem_to_gmem(0)


def _update(r: Any, slot, piece, strips) -> None:
    """New streams in place of the old ones, 64 columns of 16 tokens, as `mhc_post` has them."""
    *streams, out = (
        _inline_memory.load_span(ref, strips).astype(f32)
        for ref in (*(r.ring.at[slot, i, piece] for i in range(_STREAMS)), r.y_ring.at[slot, piece])
    )
    for j in range(_STREAMS):
        rows = [i * _STREAMS + j for i in range(_STREAMS)] + [_STREAMS * _STREAMS + j]
        found = _cluster_exchange.load_rows(r.rows.at[slot], rows, strips.reduce(1))
        *matrix, gate = (lax.broadcast_in_dim(x, (TOKENS, SPAN), [0]) for x in found)
        new = mhc_post.mixed(streams, out, matrix, gate).astype(jnp.bfloat16)
        _inline_memory.store_span(r.ring.at[slot, j, piece], new, strips)
