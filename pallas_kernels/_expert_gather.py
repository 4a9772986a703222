"""Rows of tokens that the first product of experts fetches itself, without a copy in the order of experts.

TMA of Hopper takes rows that lie one behind the other. Here the threads of the warpgroup that loads copy 16 bytes each
(`cp.async`), eight threads a row, and tell those that multiply once a step has arrived, `LATER` steps later.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _expert_rows, _inline, _mosaic

ir, arith, llvm, vector, utils = _inline.ir, _inline.arith, _inline.llvm, _inline.vector, _inline.utils

THREADS = 128
LATER = 2
"""Steps that are fetched before one is waited for."""
_CHUNKS = 8
"""Of 16 bytes, in a row of a step."""

i32 = jnp.int32


def _layout(count: int) -> Any:
    return plgpu.Layout.WG_STRIDED((THREADS * count,), 1)


def _kind(count: int) -> Any:
    return plgpu.ShapeDtypeStruct((THREADS * count,), jnp.int32, layout=_layout(count))


def load(x: Any, r: Any, place: Any, count: Any) -> None:
    """Fetch rows and weights of all tiles of a thread block.

    Args:
        x: plan of the product.
        r: its references.
        place: of a turn the tile, which of the tiles side by side, and the number of its first step.
        count: turns.
    """
    c, total = x.config, count * x.steps
    if c.stages <= LATER:
        raise ValueError(f"gather needs more than {LATER} stages, got {c.stages}")

    def arrived(at):
        plgpu.commit_smem()
        plgpu.barrier_arrive(r.full.at[lax.rem(at, i32(c.stages))])

    def found(turn):
        tile, _, _ = place(jnp.clip(turn, 0, jnp.maximum(count - 1, 0)))
        row = jnp.minimum(_expert_rows.first_row(x, r, tile), r.source.shape[0] - x.loaded)  # if there is no tile
        return tokens(r.source, row, x.loaded)

    def turn(number, mine):
        tile, across, first = place(number)
        expert, ahead = r.experts[tile], found(number + 1)

        def step(k, _):
            at = first + k
            slot = lax.rem(at, i32(c.stages))
            pl.when(at >= c.stages)(lambda: plgpu.barrier_wait(r.empty.at[slot]))
            for half in range(2):
                weight = _expert_rows.weight(x, r, expert, across, half, pl.ds(k * x.inputs, x.inputs))
                plgpu.copy_gmem_to_smem(weight, r.b_ring.at[slot, 0, pl.ds(half * c.half, c.half)], r.full.at[slot])
            scales = (r.scale_ring.at[slot, 0], r.row_scale) if x.blocks else None
            fetch(r.a_ring.at[slot, 0], r.rows, mine, k, scales, x.span)
            wait(LATER)
            pl.when(at >= LATER)(lambda: arrived(at - LATER))

        lax.fori_loop(0, x.steps, step, None)
        return ahead

    lax.fori_loop(0, count, turn, found(i32(0)))
    for i in range(LATER, 0, -1):
        wait(i - 1)
        pl.when(total >= i)(lambda i=i: arrived(total - i))


def tokens(source: Any, row: Any, rows: int) -> jax.Array:
    """Which tokens a thread fetches: of the rows t / 8 + 16 i of a tile, and of row t (of which `rows` count).

    Args:
        source: int32, token of every row, in global memory.
        row: the tile's first.
        rows: of a tile, 64 or 128.

    Returns:
        int32 [128 (rows / 16 + 1)], number i of thread t at 128 i + t.
    """
    count = rows // 16 + 1
    if _mosaic.interpreting():
        given = source[pl.ds(row, rows)]
        thread = jnp.arange(THREADS)
        parts = [given[thread // _CHUNKS + 16 * i] for i in range(count - 1)]
        return jnp.concatenate([*parts, given[thread % rows]])

    def emit(context, source, row):
        del context
        row, thread = row.registers.item(), _thread()
        own = [arith.addi(_inline.bits(thread, 3, 15, 0), _const(16 * i)) for i in range(count - 1)]
        own.append(_inline.bits(thread, 0, rows - 1, 0))
        pointer, kind = utils.memref_ptr(source), ir.IntegerType.get_signless(32)
        found = [llvm.load(kind, utils.getelementptr(pointer, [arith.addi(row, at)], kind)) for at in own]
        return _inline.words(found, _layout(count), (THREADS * count,))

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _inline.WGMMA), return_type=_kind(count))
    return inline(emit)(source, jnp.asarray(row, jnp.int32))


def fetch(out: Any, rows: Any, mine: jax.Array, k: Any, scales: tuple[Any, Any] | None, transforms: Any) -> None:
    """Begin to copy 128 bytes of each of a tile's rows, and their scales: one group of copies.

    Args:
        out: [rows, 128 bytes] in shared memory, rows of 128 bytes swizzled as usual.
        rows: [T, K] in global memory.
        mine: of `tokens`.
        k: which 128 bytes.
        scales: float32 [rows] in shared memory, [K / 128, T] in global memory.
        transforms: of `out`.
    """
    count = out.shape[0]
    if _mosaic.interpreting():
        token = mine.reshape(-1, THREADS)
        order = token[:-1, ::_CHUNKS].reshape(-1)
        out[...] = rows[:, pl.ds(k * out.shape[1], out.shape[1])][order]
        if scales is not None:
            scales[0][...] = scales[1][k][token[-1, :count]]
        return
    bytes_of_row = rows.shape[1] * jnp.dtype(rows.dtype).itemsize
    some = scales is not None

    def emit(context, out, rows, mine, k, *scales):
        del context
        k, thread = k.registers.item(), _thread()
        zero = llvm.ConstantOp(_i32(), ir.IntegerAttr.get(_i32(), 0)).result
        token = [llvm.extractelement(x, zero) for x in mine.registers.flat]
        chunk, line = _inline.bits(thread, 0, 7, 0), _inline.bits(thread, 3, 15, 0)
        inputs = arith.addi(arith.shli(k, _const(7)), arith.shli(chunk, _const(4)))
        swizzled = arith.shli(arith.xori(chunk, _inline.bits(line, 0, 7, 0)), _const(4))
        to = arith.addi(_shared(out), arith.addi(arith.shli(line, _const(7)), swizzled))
        for i, row in enumerate(token[:-1]):
            at = _global(rows, arith.addi(arith.muli(row, _const(bytes_of_row)), inputs))
            _asm("cp.async.cg.shared.global [$0], [$1], 16;", "r,l", [arith.addi(to, _const(2048 * i)), at])
        if some:
            ring, all_scales = scales
            place = arith.muli(arith.addi(arith.muli(k, _const(all_scales.type.shape[1])), token[-1]), _const(4))
            to = arith.addi(_shared(ring), arith.shli(_inline.bits(thread, 0, count - 1, 0), _const(2)))
            _asm("cp.async.ca.shared.global [$0], [$1], 4;", "r,l", [to, _global(all_scales, place)])
        _asm("cp.async.commit_group;", "", [])

    refs = (plgpu.RefType(transforms), plgpu.RefType())
    types = (*refs, _layout(count // 16 + 1), _inline.WGMMA, *((plgpu.RefType(),) * 2 if some else ()))
    inline: Any = plgpu.inline_mgpu(arg_types=types)
    inline(emit)(out, rows, mine, jnp.asarray(k, jnp.int32), *(scales or ()))


def wait(pending: int) -> None:
    """Wait until no more than so many groups of the thread's copies are under way."""
    if _mosaic.interpreting():
        return

    def emit(context):
        del context
        _asm(f"cp.async.wait_group {pending};", "", [])

    inline: Any = plgpu.inline_mgpu(arg_types=())
    inline(emit)()


def _i32():
    return ir.IntegerType.get_signless(32)


def _const(x: int):
    return utils.c(x, _i32())


def _thread():
    """Of the warpgroup; opaque, for what it shares with those that multiply would take their registers."""
    asm = "mov.b32 $0, $1;"
    thread = llvm.inline_asm(_i32(), [utils.thread_idx()], asm, "=r,r", asm_dialect=0, has_side_effects=True)
    return _inline.bits(thread, 0, THREADS - 1, 0)


def _shared(ref):
    """32-bit address in shared memory."""
    return arith.trunci(_i32(), llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref)))


def _global(ref, offset):
    """Address of a byte in global memory."""
    wide = ir.IntegerType.get_signless(64)
    return arith.addi(llvm.ptrtoint(wide, utils.memref_ptr(ref)), arith.extui(wide, offset))


def _asm(text: str, letters: str, inputs: list) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), inputs, text, letters, asm_dialect=0, has_side_effects=True)
