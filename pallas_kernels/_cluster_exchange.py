"""Sums that thread blocks of one cluster exchange through each other's shared memory, inside kernels on Mosaic GPU.

A cluster's thread blocks run at the same time by the rules of CUDA, so they may wait for each other whatever else runs
on the GPU. `st.async` writes 16 bytes into another block's shared memory and counts them at an mbarrier there
(PTX ISA, "st.async"), whose owner waits for as many as it expects.

16 tokens are shared out among the blocks, each of which adds up the sums of its own ones and sends what gates are made
of to all. A slot is used again once the block has all gates of the tile before in it, and these come when every block
has sent its sums and read those it was sent: nobody writes what another still reads.

Interpreted, messages lie in global memory and a barrier of the cluster says that they are there.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._inline import WGMMA, arith, bits, ir, llvm, mgpu, utils
from pallas_kernels._inline_mma import TOKENS, address, assembly, one

GATES = 4
"""Numbers of a token that all blocks get."""
MOST = 16
"""Thread blocks of a cluster; more than 8 are not portable, an H100 and an H200 run them."""
_WARPS = 8
_LINE = 16
"""Bytes of a message."""
_PATIENCE = 1 << 22
"""Times that a wait may come back empty-handed, each after about a microsecond."""


def lines(outputs: int) -> int:
    """Messages of a token from one block: four sums each, one with its sum of squares."""
    return outputs // GATES + 1


def slot_words(outputs: int) -> int:
    """float32 numbers of a tile: messages of 16 tokens and senders together, then 16 tokens' gates."""
    return TOKENS * GATES * (lines(outputs) + 1)


def begin(barriers_ref: Any, outputs: int) -> None:
    """Set up `[slots, 2, 2]` 32-bit words as mbarriers of sums and of gates; all threads of the cluster meet here."""
    if _mosaic.interpreting():
        return
    slots, sizes = barriers_ref.shape[0], _bytes(outputs)

    def emit(context, barriers):
        del context
        text = [".reg .pred p;", ".reg .b32 t;", "mov.u32 t, %tid.x;", "setp.ne.u32 p, t, 0;", "@p bra MEET;"]
        for i in range(2 * slots):
            text += [f"mbarrier.init.shared::cta.b64 [$0+{8 * i}], 1;"]
        text += ["fence.mbarrier_init.release.cluster;"]
        for i in range(2 * slots):
            text += [f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0+{8 * i}], {sizes[i % 2]};"]
        text += ["MEET:", *_MEET]
        assembly(text, [], [(address(barriers), "r")], effects=True)

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    inline(emit)(barriers_ref)


def end() -> None:
    """All threads of the cluster meet: no block leaves before the messages to it have come."""
    if _mosaic.interpreting():
        return

    def emit(context):
        del context
        assembly(_MEET, [], [], effects=True)

    inline: Any = plgpu.inline_mgpu()
    inline(emit)()


def send(sums_ref: Any, slot_ref: Any, barriers_ref: Any, members: int, outputs: int) -> None:
    """Add up the warps' sums of a tile and send each token's to the block that has it. For one warpgroup.

    Args:
        sums_ref: float32 [2, 64, O + 4] in shared memory, O a multiple of 8, both warpgroups' `_inline_mma.store`.
        slot_ref: float32 [slot_words] of the tile, the same in all blocks.
        barriers_ref: its [2, 2] of `begin`.
        members: thread blocks of the cluster, a divisor of 16.
        outputs: a multiple of 4, at most O.
    """
    width, count, own = sums_ref.shape[2], lines(outputs), TOKENS // members

    def emit(context, sums, slot, barriers):
        del context
        thread = utils.thread_idx()
        token, line = bits(thread, 3, TOKENS - 1, 0), bits(thread, 0, 7, 0)
        # a line that is not sent is read as the last one
        column = arith.select(_is("ult", line, count - 1), arith.shli(line, _c(4)), _c(4 * (width - GATES)))
        at = arith.addi(arith.addi(address(sums), arith.muli(token, _c(4 * width))), column)
        total = None
        for warp in range(_WARPS):
            text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{4 * width * TOKENS * warp}];"
            found = assembly([text], ["=f"] * 4, [(at, "r")], effects=True)
            total = found if total is None else [arith.addf(x, y) for x, y in zip(total, found, strict=True)]
        assert total is not None
        member = bits(token, own.bit_length() - 1, TOKENS - 1, 0)
        row = arith.addi(arith.muli(bits(token, 0, own - 1, 0), _c(members)), _rank())
        there = arith.addi(arith.muli(row, _c(_LINE * count)), arith.muli(line, _c(_LINE)))
        _send(_is("ult", line, count), arith.addi(address(slot), there), address(barriers), member, total)

    _call(emit, sums_ref, slot_ref, barriers_ref)


def receive(
    slot_ref: Any, barriers_ref: Any, turn, members: int, outputs: int, scale: float, eps: float, rest: Sequence[Any]
) -> None:
    """Add up what the blocks sent of this block's tokens and send all blocks the first four sums over their norm.

    Args:
        slot_ref: as `send` has it.
        barriers_ref: likewise.
        turn: how often the slot was used before.
        members: likewise.
        outputs: likewise.
        scale: makes a mean of a sum of squares.
        eps: added to it.
        rest: () or references [16, O] of sums and [16] of squares in global memory; the first four are not written.
    """
    own, words = TOKENS // members, GATES * lines(outputs)

    def emit(context, slot, barriers, turn, *rest):
        del context
        here, bar = address(slot), address(barriers)
        _wait(bar, turn, _bytes(outputs)[0])
        thread, rank = utils.thread_idx(), _rank()
        warp, lane = bits(thread, 5, 3, 0), bits(thread, 0, 31, 0)
        column = arith.select(_is("ult", lane, outputs), lane, _c(outputs))
        everyone = arith.constant(ir.IntegerType.get_signless(1), 1)
        for some in range(0, own, 4):
            local = arith.addi(warp, _c(some))
            mine = _is("ult", local, own) if own < some + 4 else everyone
            local = arith.select(mine, local, _c(0))
            at = arith.addi(arith.muli(local, _c(4 * words * members)), arith.shli(column, _c(2)))
            at, total = arith.addi(here, at), None
            for member in range(members):
                [x] = assembly([f"ld.shared.f32 $0, [$1+{4 * words * member}];"], ["=f"], [(at, "r")], effects=True)
                total = x if total is None else arith.addf(total, x)
            token = arith.addi(arith.muli(rank, _c(own)), local)
            if rest:
                kept, squares = rest
                inside = arith.andi(mine, arith.andi(_is("uge", lane, GATES), _is("ult", lane, outputs)))
                strides, _ = ir.MemRefType(kept.type).get_strides_and_offset()
                f32 = ir.F32Type.get()
                where = [arith.addi(arith.muli(token, _c(strides[0])), column)]
                _keep(inside, utils.getelementptr(utils.memref_ptr(kept), where, f32), total)
                where = utils.getelementptr(utils.memref_ptr(squares), [token], f32)
                _keep(arith.andi(mine, _is("eq", lane, outputs)), where, total)
            square = _lane(total, outputs)
            text = [f"fma.rn.f32 $0, $1, {_literal(scale)}, {_literal(eps)};", "rsqrt.approx.f32 $0, $0;"]
            [norm] = assembly(text, ["=&f"], [(square, "f")], effects=False)
            total = arith.mulf(total, norm)
            gates = [_lane(total, i) for i in range(GATES)]
            there = arith.addi(arith.shli(token, _c(4)), _c(4 * TOKENS * words))
            sends = arith.andi(mine, _is("ult", lane, members))
            # lanes beyond the members name one that exists
            member = arith.select(sends, lane, _c(0))
            _send(sends, arith.addi(here, there), arith.addi(bar, _c(8)), member, gates)

    _call(emit, slot_ref, barriers_ref, turn, *rest)


def take(slot_ref: Any, barriers_ref: Any, turn, outputs: int, layout: Any) -> list[jax.Array]:
    """The four sums over their norm of each token, float32 [16] each; in `layout` thread t has token t // 8."""

    def emit(context, slot, barriers, turn):
        del context
        bar = arith.addi(address(barriers), _c(8))
        _wait(bar, turn, _bytes(outputs)[1])
        token = arith.shli(bits(utils.thread_idx(), 3, TOKENS - 1, 0), _c(4))
        at = arith.addi(address(slot), token)
        line = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{4 * TOKENS * GATES * lines(outputs)}];"
        found = assembly([line], ["=f"] * 4, [(at, "r")], effects=True)
        return tuple(_everywhere(x, layout.to_mgpu()) for x in found)

    out = (plgpu.ShapeDtypeStruct((TOKENS,), jnp.float32, layout=layout),) * GATES
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), WGMMA), return_type=out)
    return list(inline(emit)(slot_ref, barriers_ref, turn))


def load_rows(ref: Any, rows: Sequence[int], layout: Any) -> list[jax.Array]:
    """Rows of float32 [n, 16] in shared memory, each in `layout`, where thread t must have token t // 8."""
    if _mosaic.interpreting():
        return [ref[i] for i in rows]

    def emit(context, ref):
        del context
        at = arith.addi(address(ref), arith.shli(bits(utils.thread_idx(), 3, TOKENS - 1, 0), _c(2)))
        found = []
        for i in rows:
            found += assembly([f"ld.shared.f32 $0, [$1+{4 * TOKENS * i}];"], ["=f"], [(at, "r")], effects=True)
        return tuple(_everywhere(x, layout.to_mgpu()) for x in found)

    out = (plgpu.ShapeDtypeStruct((TOKENS,), jnp.float32, layout=layout),) * len(rows)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    return list(inline(emit)(ref))


# ---------------------------------------------------------------- instructions
_MEET = ["barrier.cluster.arrive.relaxed;", "barrier.cluster.wait.acquire;"]


def _call(emit, *refs) -> None:
    """For references and, where a number stands, a scalar."""
    kinds = tuple(WGMMA if isinstance(x, jax.Array) else plgpu.RefType() for x in refs)
    inline: Any = plgpu.inline_mgpu(arg_types=kinds)
    inline(emit)(*refs)


def _bytes(outputs: int) -> tuple[int, int]:
    """Of a tile's sums that come to a block, and of its gates."""
    return TOKENS * _LINE * lines(outputs), TOKENS * _LINE


def _c(x: int):
    return utils.c(x, ir.IntegerType.get_signless(32))


def _is(how: str, x, y: int):
    return arith.cmpi(getattr(arith.CmpIPredicate, how), x, _c(y))


def _literal(x: float) -> str:
    return f"0f{np.float32(x).view(np.uint32):08X}"


def _rank():
    """The number of the thread block in its cluster."""
    [rank] = assembly(["mov.u32 $0, %cluster_ctarank;"], ["=r"], [], effects=False)
    return rank


def _lane(x, lane: int):
    """The number of a lane in all lanes."""
    line = f"shfl.sync.idx.b32 $0, $1, {lane}, 0x1f, 0xffffffff;"
    [found] = assembly([line], ["=f"], [(x, "f")], effects=True)
    return found


def _everywhere(x, layout):
    """An array [16] of which each thread has one number."""
    registers = np.empty(layout.registers_shape((TOKENS,)), object)
    for i in np.ndindex(registers.shape):
        registers[i] = one(x)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _keep(predicate, pointer, number) -> None:
    """Store a float32 in global memory."""
    predicate = arith.extui(ir.IntegerType.get_signless(32), predicate)
    where = llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer)
    lines = [".reg .pred p;", "setp.ne.b32 p, $0, 0;", "@p st.global.f32 [$1], $2;"]
    assembly(lines, [], [(predicate, "r"), (where, "l"), (number, "f")], effects=True)


def _send(predicate, where, barrier, member, numbers: list) -> None:
    """16 bytes to another block's shared memory and mbarrier, which lie there as `where` and `barrier` do here."""
    predicate = arith.extui(ir.IntegerType.get_signless(32), predicate)
    text = [".reg .pred p;", ".reg .b32 a, b;", "setp.ne.b32 p, $0, 0;"]
    text += ["mapa.shared::cluster.u32 a, $1, $3;", "mapa.shared::cluster.u32 b, $2, $3;"]
    what = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
    text += [f"@p {what} [a], {{$4, $5, $6, $7}}, [b];"]
    inputs = [(predicate, "r"), (where, "r"), (barrier, "r"), (member, "r"), *((x, "f") for x in numbers)]
    assembly(text, [], inputs, effects=True)


def _wait(barrier, turn, size: int) -> None:
    """Wait for the messages of a turn, then expect `size` bytes more, those of the next."""
    parity = arith.andi(turn.registers.item(), _c(1))
    text = [".reg .pred p;", ".reg .b32 n;", "mov.u32 n, 0;", "LOOK:"]
    text += ["mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;", "@p bra SEEN;"]
    text += ["add.u32 n, n, 1;", f"setp.gt.u32 p, n, {_PATIENCE};", "@p trap;", "bra LOOK;", "SEEN:"]
    text += ["and.b32 n, $2, 127;", "setp.eq.u32 p, n, 0;"]
    text += [f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};"]
    assembly(text, [], [(barrier, "r"), (parity, "r"), (utils.thread_idx(), "r")], effects=True)
