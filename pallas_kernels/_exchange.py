"""Sums that thread blocks exchange while they run, by way of the L2 cache, inside kernels on Mosaic GPU.

A message is 16 bytes, three float32 numbers and a mark that is not 0. PTX has atomic accesses of 16 bytes (`.b128`), so
whoever sees the mark has the numbers: no fence, no counter, one trip to the cache. The memory must be zero at the start
of the launch, and all thread blocks must run at the same time. Who waits for seconds stops the launch with an error.

Interpreted, thread blocks are a cluster and a barrier of theirs takes the place of marks.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._inline import arith, bits, ir, llvm, mgpu, utils
from pallas_kernels._inline_mma import TOKENS, address, assembly, integers, one

SENT = 5
"""Numbers of a token: four products and a sum of squares."""
WORDS = 8
"""Words of two messages."""
_MARK = 0x3F800000
"""1.0, so that the interpreter reads the same."""
_LANES = 8
"""Lanes of a token's receivers."""
_PATIENCE = 1 << 22
"""Looks at memory, each about a microsecond."""
_WARPS = 8
_STREAMS = 4


def publish(half, sums_ref: Any, squares_ref: Any, messages_ref: Any, rest: Sequence[Any]) -> None:
    """Add up the warps' sums of 8 tokens, send the first four and the squares, keep the others.

    Args:
        half: this warpgroup, 0 or 1, which has tokens from 8 half on.
        sums_ref: float32 [2, 64, O] in shared memory, O a multiple of 8, both warpgroups' `_inline_mma.multiply`.
        squares_ref: [2, 64].
        messages_ref: [16, 8] in global memory.
        rest: () or references [16, O] of sums and [16] of squares in global memory; the first four are not written.
    """
    outputs = sums_ref.shape[2]
    if _mosaic.interpreting():
        _publish_plainly(half, sums_ref, squares_ref, messages_ref, rest)
        return

    def emit(context, sums, squares, messages, *rest):
        del context
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()

        def number(x):
            return utils.c(x, i32)

        thread = utils.thread_idx()
        token, lane = bits(thread, 4, 15, 0), bits(thread, 0, 15, 0)  # both warpgroups: tokens 0 to 15
        first, second = (arith.cmpi(arith.CmpIPredicate.eq, lane, number(i)) for i in range(2))
        column = arith.select(second, number(3), arith.shli(lane, number(1)))
        inside = arith.cmpi(arith.CmpIPredicate.ult, column, number(outputs))
        column = arith.select(inside, column, number(0))
        row = arith.addi(address(sums), arith.muli(token, number(4 * outputs)))
        step = number(4 * outputs * TOKENS)
        at = arith.addi(row, arith.shli(column, number(2)))
        of_squares = arith.addi(address(squares), arith.shli(token, number(2)))
        places = [
            (at, step),
            (
                arith.select(second, of_squares, arith.addi(at, number(4))),
                arith.select(second, number(4 * TOKENS), step),
            ),
            (arith.addi(row, number(8)), step),
        ]
        found = []
        for place, step in places:
            total = None
            for _ in range(_WARPS):
                [x] = assembly(["ld.shared.f32 $0, [$1];"], ["=f"], [(place, "r")], effects=True)
                total = x if total is None else arith.addf(total, x)
                place = arith.addi(place, step)
            found.append(total)
        sends = arith.ori(first, second)
        last = arith.select(first, found[2], arith.constant(f32, 0.0))
        where = utils.getelementptr(
            utils.memref_ptr(messages),
            [arith.addi(arith.muli(token, number(WORDS)), arith.select(second, number(WORDS // 2), number(0)))],
            f32,
        )
        _store(sends, where, [found[0], found[1], last])
        if rest:
            kept, total = rest
            keeps = arith.andi(inside, arith.xori(sends, arith.constant(ir.IntegerType.get_signless(1), 1)))
            strides, _ = ir.MemRefType(kept.type).get_strides_and_offset()
            at = arith.addi(arith.muli(token, number(strides[0])), column)
            where = utils.getelementptr(utils.memref_ptr(kept), [at], f32)
            keep(keeps, "v2.f32 [$1], {$2, $3}", where, [(found[0], "f"), (found[1], "f")])
            where = utils.getelementptr(utils.memref_ptr(total), [token], f32)
            keep(second, "f32 [$1], $2", where, [(found[1], "f")])

    plain = plgpu.RefType()
    inline: Any = plgpu.inline_mgpu(arg_types=(plain,) * (3 + len(rest)))
    inline(emit)(sums_ref, squares_ref, messages_ref, *rest)


def _publish_plainly(half, sums_ref, squares_ref, messages_ref, rest):
    tokens = pl.ds(half * (TOKENS // 2), TOKENS // 2)

    def total(ref):
        parts = [ref[i, pl.ds(w * TOKENS + half * (TOKENS // 2), TOKENS // 2)] for i in range(2) for w in range(4)]
        return sum(parts[1:], parts[0])

    sums, squares = total(sums_ref), total(squares_ref)
    mark, zero = jnp.ones_like(squares), jnp.zeros_like(squares)
    words = [sums[:, 0], sums[:, 1], sums[:, 2], mark, sums[:, 3], squares, zero, mark]
    messages_ref[tokens] = jnp.stack(words, 1)
    if rest:
        kept_ref, total_ref = rest
        kept_ref[tokens, _STREAMS:] = sums[:, _STREAMS:]
        total_ref[tokens] = squares


def ask(messages_ref: Any, most: int) -> jax.Array:
    """Begin to read messages, `[senders, 16, 8]` in global memory; an opaque array of registers for `take`.

    `most` senders, rounded up to 8, 8 registers for every 8 of them; `take` reads the others.
    """
    if _mosaic.interpreting():
        return jnp.zeros((), jnp.int32)
    turns = min(_turns(messages_ref), -(-most // _LANES))
    layout = plgpu.Layout.WG_STRIDED((128 * WORDS * turns,), 1)

    def emit(context, messages):
        del context
        return integers(_look(_places(messages, range(turns))), layout)

    out = plgpu.ShapeDtypeStruct((128 * WORDS * turns,), jnp.int32, layout=layout)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    return inline(emit)(messages_ref)


def take(messages_ref: Any, asked: jax.Array, layout: Any) -> list[jax.Array]:
    """The five sums of all senders, float32 [16] each, when the messages are there; the same bits in every block.

    Args:
        messages_ref: as `ask` had them.
        asked: what it returned.
        layout: of the results; thread t must have token t // 8.
    """
    if _mosaic.interpreting():
        words = messages_ref[...].sum(0)
        return [words[:, i] for i in (0, 1, 2, 4, 5)]
    senders, turns = messages_ref.shape[0], _turns(messages_ref)

    def emit(context, messages, asked):
        del context
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        words = [llvm.extractelement(x, utils.c(0, i32)) for x in asked.registers.flat]
        first = len(words) // WORDS
        lane = bits(utils.thread_idx(), 0, _LANES - 1, 0)
        sums = [arith.constant(f32, 0.0)] * SENT
        for some in (range(first), range(first, turns)):
            if not some:
                continue
            places = _places(messages, some)
            if some.start:
                words = [
                    x for at in places for x in assembly(_read(0, 0, 8), ["=&r"] * WORDS, [(at, "l")], effects=True)
                ]
            words = _wait(words, places)
            for i, turn in enumerate(some):
                mine = arith.addi(lane, utils.c(turn * _LANES, i32))
                sends = arith.cmpi(arith.CmpIPredicate.ult, mine, utils.c(senders, i32))
                for at, word in enumerate((0, 1, 2, 4, 5)):
                    x = utils.bitcast(words[i * WORDS + word], f32)
                    if (turn + 1) * _LANES > senders:
                        x = arith.select(sends, x, arith.constant(f32, 0.0))
                    sums[at] = arith.addf(sums[at], x)
        for distance in (4, 2, 1):
            sums = [arith.addf(x, utils.shfl_bfly(x, distance)) for x in sums]
        return tuple(everywhere(x, layout.to_mgpu()) for x in sums)

    out = (plgpu.ShapeDtypeStruct((TOKENS,), jnp.float32, layout=layout),) * SENT
    given = plgpu.Layout.WG_STRIDED(asked.shape, 1)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), given), return_type=out)
    return list(inline(emit)(messages_ref, asked))


def load_rows(ref: Any, rows: Sequence[int], layout: Any) -> list[jax.Array]:
    """Rows of float32 [n, 16] in global memory, each in `layout`, where thread t must have token t // 8.

    They are loaded where this stands. Mosaic's loads of what does not change are moved in front of a loop, for all of
    which they take registers.
    """
    if _mosaic.interpreting():
        return [ref[i] for i in rows]

    def emit(context, ref):
        del context
        f32 = ir.F32Type.get()
        [thread] = assembly(["mov.u32 $0, %tid.x;"], ["=r"], [], effects=True)  # else the address is moved as well
        where, _ = _place(utils.getelementptr(utils.memref_ptr(ref), [bits(thread, 3, TOKENS - 1, 0)], f32))
        found = []
        for i in rows:
            line = f"ld.global.f32 $0, [$1 + {4 * TOKENS * i}];"
            found += assembly([line], ["=f"], [(where, "l")], effects=True)
        return tuple(everywhere(x, layout.to_mgpu()) for x in found)

    out = (plgpu.ShapeDtypeStruct((TOKENS,), jnp.float32, layout=layout),) * len(rows)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    return list(inline(emit)(ref))


# ---------------------------------------------------------------- instructions
def everywhere(x, layout):
    """An array [16] of which each thread has one number."""
    registers = np.empty(layout.registers_shape((TOKENS,)), object)
    for i in np.ndindex(registers.shape):
        registers[i] = one(x)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _turns(messages_ref) -> int:
    return -(-messages_ref.shape[0] // _LANES)


def _places(messages, turns: range) -> list:
    """Addresses of the thread's messages: of sender 8 turn + lane, or of another one where there is none."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    senders = ir.MemRefType(messages.type).shape[0]
    strides, _ = ir.MemRefType(messages.type).get_strides_and_offset()
    thread, pointer = utils.thread_idx(), utils.memref_ptr(messages)
    token, lane = bits(thread, 3, TOKENS - 1, 0), bits(thread, 0, _LANES - 1, 0)
    places = []
    for turn in turns:
        sender = arith.addi(lane, utils.c(turn * _LANES, i32))
        sends = arith.cmpi(arith.CmpIPredicate.ult, sender, utils.c(senders, i32))
        sender = arith.select(sends, sender, utils.c(0, i32))
        at = arith.addi(arith.muli(sender, utils.c(strides[0], i32)), arith.muli(token, utils.c(strides[1], i32)))
        where = utils.getelementptr(pointer, [at], f32)
        places.append(llvm.ptrtoint(ir.IntegerType.get_signless(64), where))
    return places


def _read(first: int, place: int, offset: int) -> list[str]:
    """Two messages at address $offset+place into registers from $first on."""
    lines = [".reg .b128 q;", ".reg .b64 l, h;"]
    for i in range(2):
        a, b, c, d = (f"${first + 4 * i + word}" for word in range(4))
        lines += [f"ld.relaxed.gpu.global.b128 q, [${offset + place} + {16 * i}];", "mov.b128 {l, h}, q;"]
        lines += [f"mov.b64 {{{a}, {b}}}, l;", f"mov.b64 {{{c}, {d}}}, h;"]
    return lines


def _look(places: list) -> list:
    """The words at some addresses, marked or not."""
    return [x for at in places for x in assembly(_read(0, 0, WORDS), ["=&r"] * WORDS, [(at, "l")], effects=True)]


def _wait(words: list, places: list) -> list:
    """The words when all messages are marked: as they are, or read again until they are."""
    count = len(words)
    lines = [".reg .pred p;", ".reg .b32 f, n;", "mov.u32 n, 0;", "LOOK:", f"mov.b32 f, {_MARK};"]
    lines += [f"and.b32 f, f, ${i};" for i in range(3, count, 4)]
    lines += ["setp.ne.b32 p, f, 0;", "@p bra SEEN;", "add.u32 n, n, 1;", f"setp.gt.u32 p, n, {_PATIENCE};", "@p trap;"]
    for i in range(len(places)):
        lines += ["{", *_read(i * WORDS, i, count), "}"]
    lines += ["bra LOOK;", "SEEN:"]
    return assembly(lines, ["=&r"] * count, [(x, "l") for x in places], tied=words, effects=True)


def _store(predicate, pointer, numbers: list) -> None:
    """Send a message."""
    lines = [".reg .pred p;", ".reg .b128 q;", ".reg .b64 l, h;", ".reg .b32 a, b, c;", "setp.ne.b32 p, $0, 0;"]
    lines += ["mov.b32 a, $2;", "mov.b32 b, $3;", "mov.b32 c, $4;"]
    lines += ["mov.b64 l, {a, b};", f"mov.b64 h, {{c, {_MARK}}};", "mov.b128 q, {l, h};"]
    lines += ["@p st.relaxed.gpu.global.b128 [$1], q;"]
    assembly(lines, [], [_flag(predicate), _place(pointer), *((x, "f") for x in numbers)], effects=True)


def keep(predicate, what: str, pointer, values: list) -> None:
    lines = [".reg .pred p;", "setp.ne.b32 p, $0, 0;", f"@p st.global.{what};"]
    assembly(lines, [], [_flag(predicate), _place(pointer), *values], effects=True)


def _flag(predicate):
    return arith.extui(ir.IntegerType.get_signless(32), predicate), "r"


def _place(pointer):
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer), "l"
