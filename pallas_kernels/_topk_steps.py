"""Steps of a thread block that chooses from a row (`_topk_counted`), each with its plain form for the interpreter.

A range is read in vectors of four entries, 16 bytes, from the one that its start lies in on. Byte j of the mask belongs
to vector j: its low half are the bits of what is chosen, its high half of what lies in the interval. Blocks of one
cluster share a row: each counts and marks a piece of the range, and sees the others' counts. All threads leave a step
together, and what one wrote to shared memory the others see. Interpreted, one warpgroup does all the work.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic, _words

CANDIDATES = 256
"""Most numbers that find their rank among each other."""
NUMBERS = 64
"""Words that threads tell each other: totals of 32 warps, then what a step found."""
_FOUND = 32
LEAST = 111 << 23
"""2^-16, below which numbers of a sign fall into one interval of the first round, as from 2^16 on."""
_OCTAVES = 32
_MAGNITUDE, _INFINITE, _LOWEST = 2**31 - 1, 0x7F800000, -(2**31)

i32 = jnp.int32


def width(bins: int) -> int:
    """Keys of an interval of the first round."""
    return (_OCTAVES << 23) // (bins // 2)


def keys(x: jax.Array) -> jax.Array:
    """Integers in the order of floats, denormals included: NaN as -inf, both zeros alike."""
    bits = lax.bitcast_convert_type(x, i32)
    size = bits & _MAGNITUDE
    bits = jnp.where(size > _INFINITE, _INFINITE + _LOWEST, jnp.where(size == 0, 0, bits))
    return bits ^ ((bits >> 31) & _MAGNITUDE)


# ---------------------------------------------------------------- steps
def count_numbers(block: Any) -> tuple[Any, Any, Any]:
    """(interval of the first round that holds the `topk`-th largest, numbers above it, numbers in it)."""
    if _mosaic.interpreting():
        k, visible = _row(block)
        size = jnp.where(k < 0, ~k, k)
        place = (jnp.clip(size, LEAST, LEAST + (_OCTAVES << 23) - 1) - LEAST) // width(block.bins)
        half = block.bins // 2
        return _found(block, jnp.where(k < 0, half - 1 - place, half + place), visible, block.topk)
    _run(
        block,
        _clear(block) + _numbers_counted(block) + _found_text(block),
        [block.x, block.counts, block.numbers],
        block.topk,
    )
    return _told(block)


def count_keys(block: Any, low: Any, high: Any, shift: Any, wanted: Any) -> tuple[Any, Any, Any]:
    """The same for the `wanted`-th largest of keys in low..high, in intervals of 2^shift keys."""
    if _mosaic.interpreting():
        k, visible = _row(block)
        return _found(block, (k - low) >> shift, visible & (k >= low) & (k <= high), wanted)
    text = _clear(block) + _keys_counted(block) + _found_text(block)
    _run(block, text, [block.x, block.counts, block.numbers], wanted, low, high, shift)
    return _told(block)


def mark(block: Any, low: Any, high: Any) -> None:
    """Set the mask: what has a key above `high` is chosen, what is neither above nor below `low` in the interval."""
    if _mosaic.interpreting():
        k, visible = _row(block)
        chosen, inside = visible & (k > high), visible & (k >= low) & (k <= high)
        block.mask[...] = _packed(block, chosen, 0) | _packed(block, inside, 4)
        return
    _run(block, _marked(block), [block.x, block.mask, block.numbers], low, high)


def settle(block: Any, wanted: Any, needed: Any) -> None:
    """If `needed`, choose the `wanted` largest numbers in the interval, at most `CANDIDATES`, the lowest of equals."""
    if _mosaic.interpreting():
        k, _ = _row(block)
        inside = _unpacked(block, block.mask[...], 4)
        order = jnp.argsort(jnp.where(inside, ~k, 2**31 - 1), stable=True)
        best = jnp.zeros_like(inside).at[order].set(jnp.arange(len(order)) < wanted) & inside
        block.mask[...] = block.mask[...] | jnp.where(needed, _packed(block, best, 0), 0)
        return
    args = [block.x, block.mask, block.near, block.numbers]
    _run(block, _settled(block), args, wanted, needed.astype(i32))


def write(block: Any, tied: Any) -> None:
    """Write the chosen entries' numbers in order, before that choose the first `tied` in the interval."""
    if _mosaic.interpreting():
        chosen, inside = (_unpacked(block, block.mask[...], bit) for bit in (0, 4))
        chosen = chosen | (inside & (jnp.cumsum(inside.astype(i32)) <= tied))
        [at] = jnp.nonzero(chosen, size=block.topk, fill_value=0)
        block.out[block.n] = at.astype(i32) - block.start
        return
    _run(block, _written(block), [block.out, block.mask, block.counts, block.numbers], tied)


def write_all(block: Any) -> None:
    """Write the numbers of all entries, and -1 behind them."""
    if _mosaic.interpreting():
        at = jnp.arange(block.topk, dtype=i32)
        block.out[block.n] = jnp.where(at < block.length, at, -1)
        return
    _run(block, _written_all(block), [block.out])


# ---------------------------------------------------------------- plain forms
def _row(block: Any) -> tuple[jax.Array, jax.Array]:
    """(keys, which of them count)."""
    x = block.x[block.n]
    entry = jnp.arange(len(x), dtype=i32)
    return keys(x), (entry >= block.start) & (entry < block.start + block.length)


def _found(block: Any, number: jax.Array, counted: jax.Array, wanted: Any) -> tuple[Any, Any, Any]:
    counts = jnp.zeros(block.bins, i32).at[jnp.where(counted, number, block.bins)].add(1, mode="drop")
    from_here = jnp.cumsum(counts[::-1])[::-1]
    found = jnp.sum((from_here >= wanted).astype(i32)) - 1
    return found, from_here[found] - counts[found], counts[found]


def _packed(block: Any, flags: jax.Array, bit: int) -> jax.Array:
    """Words of the mask, from the vector of the range's start on."""
    first = block.start // 4 * 4
    size = 16 * block.mask.shape[0]
    flags = jnp.pad(flags, (0, size)).astype(i32)
    flags = lax.dynamic_slice(flags, (first,), (size,)).reshape(-1, 4, 4)
    place = 8 * jnp.arange(4)[:, None] + jnp.arange(4) + bit
    return jnp.sum(flags << place, (1, 2), dtype=i32)


def _unpacked(block: Any, words: jax.Array, bit: int) -> jax.Array:
    """Flags of a row's entries."""
    place = 8 * jnp.arange(4)[:, None] + jnp.arange(4) + bit
    flags = ((words[:, None, None] >> place) & 1).reshape(-1)
    size = block.x.shape[1]
    at = jnp.arange(size) - block.start // 4 * 4
    return jnp.where((at >= 0) & (at < len(flags)), flags[jnp.clip(at, 0, len(flags) - 1)], 0) == 1


# ---------------------------------------------------------------- device code
def _told(block: Any) -> tuple[Any, Any, Any]:
    number, above, inside = (block.numbers[_FOUND + i] for i in range(3))
    return number, above, inside


def _run(block: Any, text: str, refs: list[Any], *numbers: Any) -> None:
    """Instructions on addresses `<a0>`, `<a1>` ... of references and words `<n0>` ..., after row, start and length.

    `<row>` is the address of the row's first vector in the first reference, which lies in global memory.
    """
    splat = plgpu.Layout.WG_SPLAT
    row_bytes = 4 * refs[0].shape[1]
    given = [jnp.asarray(x, i32) for x in (block.n, block.start, block.length, *numbers)]
    gpu_utils, ir = _mosaic.gpu_utils, _mosaic.ir

    def emit(context, refs, numbers):
        del context
        i64 = ir.IntegerType.get_signless(64)
        addresses = []
        for i, ref in enumerate(refs):
            address = _mosaic.llvm.ptrtoint(i64, gpu_utils.memref_ptr(ref))
            if i:
                address = _mosaic.arith.trunci(ir.IntegerType.get_signless(32), address)
            addresses.append(address)
        names = [f"a{i}" for i in range(len(refs))] + ["n", "start", "length"]
        names += [f"n{i}" for i in range(len(numbers) - 3)]
        code = assembled(text, names, row_bytes, block)
        values = [*addresses, *(_words.scalar(x).value for x in numbers)]
        gpu_utils.inline_ptx(code, *values, has_side_effects=True, convergent=True)

    kinds = ([plgpu.RefType()] * len(refs), [splat] * len(given))
    inline: Any = plgpu.inline_mgpu(arg_types=kinds)
    inline(emit)(refs, given)


def assembled(text: str, names: list[str], row_bytes: int, block: Any) -> str:
    """The instructions with operands for names, registers that every step may use, and a barrier at the end.

    %t, %warp, %lane: the thread; %base, %vectors: first vector of the block's piece of the range and how many; %skip:
    vectors of the range in front of them; %dx: the address of the row.
    """
    parts = block.pieces
    text = f"""
        mov.u32 %t, <tid>.x; shr.u32 %warp, %t, 5; and.b32 %lane, %t, 31;
        shr.u32 %base, <start>, 2; add.s32 %vectors, <start>, <length>; add.s32 %vectors, %vectors, 3;
        shr.u32 %vectors, %vectors, 2; sub.s32 %vectors, %vectors, %base;
        mov.u32 %piece, {"0" if parts == 1 else "<piece>"}; mov.b32 %skip, 0;
        {
        ""
        if parts == 1
        else f'''
        add.s32 %size, %vectors, {4 * parts - 1}; shr.u32 %size, %size, {(4 * parts).bit_length() - 1};
        shl.b32 %size, %size, 2; mul.lo.s32 %skip, %size, %piece; add.s32 %base, %base, %skip;
        sub.s32 %vectors, %vectors, %skip; max.s32 %vectors, %vectors, 0; min.s32 %vectors, %vectors, %size;
        '''
    }
        cvt.s64.s32 %dn, <n>; mul.lo.s64 %dn, %dn, {row_bytes}; add.s64 %dx, <a0>, %dn;
        {text}
        {_sync(block)}
        """.replace("%piece", "%cta")
    kinds = {"p": "pred", "f": "f32", "d": "b64"}
    registers = sorted(set(re.findall(r"%([a-z]\w*)", text)))
    declared = "".join(f".reg .{kinds.get(x[0], 'b32')} %{x}; " for x in registers)
    text = re.sub(r"%([a-z]\w*)", r"r_\1", declared + text)
    for name, value in [("tid", "%tid"), ("piece", "%cluster_ctarank"), *((x, f"${i}") for i, x in enumerate(names))]:
        text = text.replace(f"<{name}>", value)
    return "{ " + " ".join(text.split()) + " }"


def _sync(block: Any) -> str:
    """Wait for all threads of all blocks that share the row."""
    return "bar.sync 0;" if block.pieces == 1 else "barrier.cluster.arrive; barrier.cluster.wait;"


def _clear(block: Any) -> str:
    """Counts to 0."""
    each = min(4, block.bins // block.threads)
    stored = {1: "b32 [%c+<far>], %z", 2: "v2.b32 [%c+<far>], {%z, %z}", 4: "v4.b32 [%c+<far>], {%z, %z, %z, %z}"}[each]
    far = range(0, 4 * block.bins, 4 * each * block.threads)
    stores = "".join(f"st.shared.{stored.replace('<far>', str(x))};" for x in far)
    return f"mov.b32 %z, 0; mad.lo.s32 %c, %t, {4 * each}, <a1>; {stores} bar.sync 0;"


def _vectors(block: Any, each: str, name: str, missing: str = "", end: str = "%vectors") -> str:
    """Go over the range: `each` with entries in %f0..3, vector number %j, and %pe where some lie outside the range.

    `missing` is done for what has no vector in front of `end`, a multiple of 4.
    """
    loads, uses = "", ""
    for u in range(block.loads):
        far = 16 * block.threads * u
        loads += f"""
            add.s32 %j, %i, {block.threads * u}; setp.lt.s32 %pu{u}, %j, %vectors;
            @%pu{u} ld.global.nc.v4.f32 {{%f{u}x0, %f{u}x1, %f{u}x2, %f{u}x3}}, [%da+{far}];
            """
        own = re.sub(r"%f([0-3])\b", rf"%f{u}x\1", each).replace("#", f"{name}{u}")
        uses += f"""
            add.s32 %j, %i, {block.threads * u};
            @!%pu{u} bra {name}_none{u};
            setp.eq.s32 %pe, %j, 0; setp.eq.s32 %pb, %j, %last; or.pred %pe, %pe, %pb;
            {own}
            {name}_none{u}:
            {missing.replace("#", f"{name}{u}").replace("<present>", f"%pu{u}")}
            """
    return f"""
        mov.u32 %i, %t; add.s32 %last, %vectors, -1; add.s32 %j, %base, %t;
        mul.wide.s32 %da, %j, 16; add.s64 %da, %da, %dx;
        setp.ge.s32 %pl, %i, {end}; @%pl bra {name}_done;
        {name}_more:
        {loads} {uses}
        add.s32 %i, %i, {block.loads * block.threads}; add.s64 %da, %da, {16 * block.loads * block.threads};
        setp.lt.s32 %pl, %i, {end}; @%pl bra {name}_more;
        {name}_done:
        """


def _key(c: int) -> str:
    """A number's key in %k: zeros to one zero, NaN to -inf, then as whole numbers."""
    return f"""
        add.rn.f32 %fy, %f{c}, 0f00000000; max.f32 %fy, %fy, 0fFF800000; mov.b32 %k, %fy; shr.s32 %s, %k, 31;
        and.b32 %s, %s, 0x7FFFFFFF; xor.b32 %k, %k, %s;
        """


def _inside(c: int) -> str:
    """%po where entry c of vector %j lies outside of the range."""
    return f"""
        add.s32 %e, %j, %base; shl.b32 %e, %e, 2; add.s32 %e, %e, {c}; sub.s32 %e, %e, <start>;
        setp.ge.u32 %po, %e, <length>;
        """


def _numbers_counted(block: Any) -> str:
    """Sizes are cut off on both sides as floats, whose largest rule also says that NaN is as the lowest number."""
    shift = width(block.bins).bit_length() - 1
    top, least = LEAST + (_OCTAVES << 23) - 1, LEAST
    each = ""
    for c in range(4):
        each += f"""
            add.rn.f32 %fy, %f{c}, 0f00000000; max.f32 %fy, %fy, 0f{top | 1 << 31:08X}; min.f32 %fy, %fy, 0f{top:08X};
            mov.b32 %s, %fy; shr.s32 %s, %s, 31; abs.f32 %fy, %fy; max.f32 %fy, %fy, 0f{least:08X}; mov.b32 %k, %fy;
            sub.s32 %k, %k, {least}; shr.u32 %k, %k, {shift - 2}; xor.b32 %k, %k, %s; and.b32 %k, %k, -4;
            add.s32 %k{c}, %k, %middle;
            """
    edge = "".join(f"{_inside(c)} @%po mov.b32 %k{c}, %trash;" for c in range(4))
    each += f"@!%pe bra #_inner; {edge} #_inner: "
    each += "".join(f"red.shared.add.u32 [%k{c}], 1;" for c in range(4))
    middle = f"add.s32 %middle, <a1>, {2 * block.bins}; add.s32 %trash, <a2>, {4 * (NUMBERS - 1)};"
    return middle + _vectors(block, each, "count") + _sync(block)


def _keys_counted(block: Any) -> str:
    each = ""
    for c in range(4):
        each += f"""
            {_key(c)} sub.s32 %k, %k, <n1>; setp.le.u32 %pk{c}, %k, %spread; shr.u32 %k, %k, <n3>;
            mad.lo.s32 %k{c}, %k, 4, <a1>;
            """
    edge = "".join(f"{_inside(c)} not.pred %po, %po; and.pred %pk{c}, %pk{c}, %po;" for c in range(4))
    each += f"@!%pe bra #_inner; {edge} #_inner: "
    each += "".join(f"@%pk{c} red.shared.add.u32 [%k{c}], 1;" for c in range(4))
    return "sub.s32 %spread, <n2>, <n1>;" + _vectors(block, each, "count") + _sync(block)


def _found_text(block: Any) -> str:
    """The interval of the <n0>-th largest: warps share the counts, and the one whose part holds it looks closer."""
    each = min(4, block.bins // block.threads)
    chunks = block.bins // block.threads // each
    warps = block.threads // 32
    load, close = "", ""
    names = [f"%c{v}" for v in range(each)]
    kind = "b32" if each == 1 else f"v{each}.b32"

    def vector(names):
        return names[0] if each == 1 else "{" + ", ".join(names) + "}"

    def counts(q):
        """%c0..: counts of all blocks."""
        far = 4 * 32 * each * q
        if block.pieces == 1:
            return f"ld.shared.{kind} {vector(names)}, [%at+{far}];"
        text = ""
        for r in range(block.pieces):
            into = names if r == 0 else [f"%e{v}" for v in range(each)]
            text += f"mapa.shared::cluster.u32 %r, %at, {r}; ld.shared::cluster.{kind} {vector(into)}, [%r+{far}];"
            text += "".join(f"add.s32 {x}, {x}, {y};" for x, y in zip(names, into, strict=True) if r)
        return text

    for q in range(chunks):
        load += f"{counts(q)} mov.b32 %q{q}, %c0;"
        load += "".join(f"add.s32 %q{q}, %q{q}, %c{v};" for v in range(1, each))
        load += f"add.s32 %v, %v, %q{q};"
    scan = "".join(
        f"shfl.sync.down.b32 %u|%pv, %s, {d}, 31, 0xffffffff; @%pv add.s32 %s, %s, %u;" for d in (1, 2, 4, 8, 16)
    )
    for q in reversed(range(chunks)):
        inner = ""
        for v in reversed(range(each)):
            inner += f"""
                add.s32 %u, %w, %c{v}; setp.lt.s32 %pa, %w, <n0>; setp.ge.s32 %pb, %u, <n0>;
                and.pred %pa, %pa, %pb;
                @%pa add.s32 %b, %number, {32 * each * q + v};
                @%pa st.shared.b32 [<a2>+{4 * _FOUND}], %b;
                @%pa st.shared.b32 [<a2>+{4 * _FOUND + 4}], %w;
                @%pa st.shared.b32 [<a2>+{4 * _FOUND + 8}], %c{v};
                mov.b32 %w, %u;
                """
        close += f"""
            {counts(q)} mov.b32 %s, %q{q}; {scan}
            sub.s32 %w, %s, %q{q}; add.s32 %w, %w, %above; {inner}
            shfl.sync.idx.b32 %s, %s, 0, 31, 0xffffffff; add.s32 %above, %above, %s;
            setp.ge.s32 %pa, %above, <n0>; @%pa bra find_done;
            """
    return f"""
        mul.lo.s32 %number, %warp, {block.bins // warps}; mad.lo.s32 %number, %lane, {each}, %number;
        mad.lo.s32 %at, %number, 4, <a1>; mov.b32 %v, 0; {load}
        redux.sync.add.s32 %v, %v, 0xffffffff;
        mad.lo.s32 %total, %warp, 4, <a2>; setp.eq.s32 %pa, %lane, 0; @%pa st.shared.b32 [%total], %v;
        bar.sync 0;
        mov.b32 %u, 0; setp.gt.s32 %pa, %lane, %warp; setp.lt.s32 %pb, %lane, {warps}; and.pred %pa, %pa, %pb;
        mad.lo.s32 %total, %lane, 4, <a2>; @%pa ld.shared.b32 %u, [%total];
        redux.sync.add.s32 %above, %u, 0xffffffff;
        setp.ge.s32 %pa, %above, <n0>; add.s32 %v, %v, %above; setp.lt.s32 %pb, %v, <n0>; or.pred %pa, %pa, %pb;
        @%pa bra find_done;
        {close}
        find_done:
        """


def _marked(block: Any) -> str:
    """Floats are compared: a key of -1, which none has, would be -0; all are above what is below -inf, NaN included."""
    each = "mov.b32 %m, 0;"
    for c in range(4):
        each += f"""
            setp.gt.or.f32 %pa, %f{c}, %fhigh, %pabove; @%pa or.b32 %m, %m, {1 << c};
            setp.ge.or.f32 %pb, %f{c}, %flow, %pwithin; @%pb or.b32 %m, %m, {16 << c};
            """
    each += "shl.b32 %b, %m, 4; and.b32 %b, %b, 0xF0; xor.b32 %m, %m, %b;"
    edge = "".join(f"{_inside(c)} @%po and.b32 %m, %m, {0xFF ^ (0x11 << c)};" for c in range(4))
    each += f"@!%pe bra #_inner; {edge} #_inner: add.s32 %b, <a1>, %j; st.shared.u8 [%b], %m; bra #_next;"
    # up to a whole word, bytes without a vector are 0; a thread that had one is beyond this
    missing = """
        setp.ge.s32 %pb, %j, %whole; @%pb bra #_next;
        add.s32 %b, <a1>, %j; mov.b32 %m, 0; st.shared.u8 [%b], %m;
        #_next:
        """
    bounds = ""
    for number, bound, all_are, other in (("<n1>", "%fhigh", "%pabove", -2), ("<n0>", "%flow", "%pwithin", 0)):
        below = "lt" if bound == "%fhigh" else "le"
        bounds += f"""
            mov.b32 %k, {number}; setp.{below}.s32 {all_are}, %k, {~_INFINITE};
            setp.eq.s32 %pa, %k, -1; @%pa mov.b32 %k, {other};
            shr.s32 %s, %k, 31; and.b32 %s, %s, 0x7FFFFFFF; xor.b32 %k, %k, %s; mov.b32 {bound}, %k;
            """
    start = f"""
        {bounds} add.s32 %whole, %vectors, 3; and.b32 %whole, %whole, -4;
        setp.eq.s32 %pa, %t, 0; mov.b32 %m, 0; @%pa st.shared.b32 [<a2>+{4 * _FOUND + 12}], %m;
        """
    return start + _vectors(block, each, "mark", missing, "%whole")


def _settled(block: Any) -> str:
    counter, others = f"[<a3>+{4 * _FOUND + 12}]", ""
    for r in range(block.pieces):
        here, space = "mov.b32 %b, <a2>; mov.b32 %y, %many;", "shared"
        if block.pieces > 1:
            here = f"mapa.shared::cluster.u32 %b, <a3>, {r}; ld.shared::cluster.b32 %y, [%b+{4 * _FOUND + 12}];"
            here += f"min.s32 %y, %y, {CANDIDATES}; mapa.shared::cluster.u32 %b, <a2>, {r};"
            space = "shared::cluster"
        others += f"""
            {here} mad.lo.s32 %y, %y, 8, %b;
            settle_others{r}:
            setp.ge.s32 %pa, %b, %y; @%pa bra settle_ranked{r};
            ld.{space}.v2.b32 {{%x, %s}}, [%b]; add.s32 %b, %b, 8;
            setp.eq.s32 %pa, %x, %k; setp.lt.s32 %pb, %s, %e; and.pred %pa, %pa, %pb;
            setp.gt.s32 %pb, %x, %k; or.pred %pa, %pa, %pb; @%pa add.s32 %rank, %rank, 1;
            bra settle_others{r};
            settle_ranked{r}:
            """
    return f"""
        setp.eq.s32 %pa, <n1>, 0; @%pa bra settle_done;
        add.s32 %words, %vectors, 3; shr.u32 %words, %words, 2;
        mov.u32 %i, %t;
        settle_words:
        setp.ge.s32 %pa, %i, %words; @%pa bra settle_collected;
        mad.lo.s32 %b, %i, 4, <a1>; ld.shared.b32 %x, [%b]; and.b32 %x, %x, 0xF0F0F0F0;
        settle_bits:
        setp.eq.s32 %pa, %x, 0; @%pa bra settle_word_done;
        brev.b32 %b, %x; clz.b32 %b, %b; add.s32 %y, %x, -1; and.b32 %x, %x, %y;
        shr.u32 %e, %b, 3; and.b32 %b, %b, 3; mad.lo.s32 %e, %e, 4, %b; mad.lo.s32 %e, %i, 16, %e;
        mad.lo.s32 %b, %base, 4, %e; mul.wide.s32 %da, %b, 4; add.s64 %da, %da, %dx;
        ld.global.nc.f32 %f0, [%da];
        {_key(0)}
        atom.shared.add.u32 %b, {counter}, 1;
        setp.ge.s32 %pa, %b, {CANDIDATES}; @%pa bra settle_bits;
        mad.lo.s32 %b, %b, 8, <a2>; mad.lo.s32 %e, %skip, 4, %e; st.shared.v2.b32 [%b], {{%k, %e}};
        bra settle_bits;
        settle_word_done:
        add.s32 %i, %i, {block.threads}; bra settle_words;
        settle_collected:
        {_sync(block)}
        ld.shared.b32 %many, {counter}; min.s32 %many, %many, {CANDIDATES};
        mov.u32 %i, %t;
        settle_own:
        setp.ge.s32 %pa, %i, %many; @%pa bra settle_done;
        mad.lo.s32 %b, %i, 8, <a2>; ld.shared.v2.b32 {{%k, %e}}, [%b];
        mov.b32 %rank, 0;
        {others}
        setp.ge.s32 %pa, %rank, <n0>; @%pa bra settle_next;
        mad.lo.s32 %e, %skip, -4, %e;
        shr.u32 %b, %e, 4; mad.lo.s32 %b, %b, 4, <a1>;
        shl.b32 %x, %e, 1; and.b32 %x, %x, 24; and.b32 %y, %e, 3; add.s32 %x, %x, %y;
        mov.b32 %y, 1; shl.b32 %x, %y, %x; red.shared.or.b32 [%b], %x;
        settle_next:
        add.s32 %i, %i, {block.threads}; bra settle_own;
        settle_done:
        """


def _scan(block: Any, name: str) -> str:
    """%before: the sum of %v of all threads in front; %ahead: of all blocks in front; %here: of the block."""
    warps = block.threads // 32
    steps = "".join(
        f"shfl.sync.up.b32 %u|%pv, %s, {d}, 0, 0xffffffff; @%pv add.s32 %s, %s, %u;" for d in (1, 2, 4, 8, 16)
    )
    text = f"""
        {name}: mov.b32 %s, %v; {steps} sub.s32 %before, %s, %v;
        mad.lo.s32 %total, %warp, 4, <a3>; setp.eq.s32 %pa, %lane, 31; @%pa st.shared.b32 [%total], %s;
        bar.sync 0;
        mov.b32 %u, 0; setp.lt.s32 %pa, %lane, %warp; setp.lt.s32 %pb, %lane, {warps}; and.pred %pa, %pa, %pb;
        mad.lo.s32 %total, %lane, 4, <a3>; @%pa ld.shared.b32 %u, [%total];
        redux.sync.add.s32 %u, %u, 0xffffffff; add.s32 %before, %before, %u;
        """
    if block.pieces == 1:
        return text
    return f"""
        {text}
        mov.b32 %u, 0; setp.lt.s32 %pb, %lane, {warps}; @%pb ld.shared.b32 %u, [%total];
        redux.sync.add.s32 %here, %u, 0xffffffff;
        setp.eq.s32 %pa, %t, 0; @%pa st.shared.b32 [<a3>+{4 * _FOUND + 16}], %here;
        {_sync(block)}
        mov.b32 %u, 0; setp.lt.s32 %pa, %lane, %cta; min.s32 %b, %lane, {block.pieces - 1};
        mapa.shared::cluster.u32 %r, <a3>, %b; @%pa ld.shared::cluster.b32 %u, [%r+{4 * _FOUND + 16}];
        redux.sync.add.s32 %ahead, %u, 0xffffffff; add.s32 %before, %before, %ahead;
        """


def _words_of_thread(name: str, each: str) -> str:
    return f"""
        mov.b32 %i, %own;
        {name}_words: setp.ge.s32 %pa, %i, %to; @%pa bra {name}_done;
        mad.lo.s32 %a, %i, 4, <a1>; ld.shared.b32 %x, [%a]; {each}
        add.s32 %i, %i, 1; bra {name}_words;
        {name}_done:
        """


def _written(block: Any) -> str:
    population = "popc.b32 %b, %x; add.s32 %v, %v, %b;"
    tie = """
        shr.u32 %y, %x, 4; and.b32 %y, %y, 0x0F0F0F0F;
        tie_bits: setp.eq.s32 %pa, %y, 0; setp.le.s32 %pb, %left, 0; or.pred %pa, %pa, %pb; @%pa bra tie_word;
        neg.s32 %b, %y; and.b32 %b, %b, %y; or.b32 %x, %x, %b; xor.b32 %y, %y, %b; add.s32 %left, %left, -1;
        bra tie_bits;
        tie_word: st.shared.b32 [%a], %x;
        """
    spread = f"""
        and.b32 %x, %x, 0x0F0F0F0F;
        spread_bits: setp.eq.s32 %pa, %x, 0; @%pa bra spread_word;
        brev.b32 %b, %x; clz.b32 %b, %b; add.s32 %y, %x, -1; and.b32 %x, %x, %y;
        shr.u32 %e, %b, 3; and.b32 %b, %b, 3; mad.lo.s32 %e, %e, 4, %b; mad.lo.s32 %e, %i, 16, %e;
        add.s32 %e, %e, %offset;
        setp.lt.s32 %pa, %before, {block.topk}; mad.lo.s32 %b, %before, 4, <a2>;
        @%pa st.shared.b32 [%b], %e; add.s32 %before, %before, 1; bra spread_bits;
        spread_word:
        """
    return f"""
        add.s32 %words, %vectors, 3; shr.u32 %words, %words, 2;
        add.s32 %each, %words, {block.threads - 1}; shr.u32 %each, %each, {block.threads.bit_length() - 1};
        mul.lo.s32 %own, %t, %each; add.s32 %to, %own, %each; min.s32 %to, %to, %words;
        shl.b32 %offset, %base, 2; sub.s32 %offset, %offset, <start>;
        setp.le.s32 %pa, <n0>, 0; @%pa bra no_ties;
        mov.b32 %v, 0;
        {_words_of_thread("equal", "and.b32 %x, %x, 0xF0F0F0F0;" + population)}
        {_scan(block, "equal_scan")}
        sub.s32 %left, <n0>, %before;
        {_words_of_thread("tie", tie)}
        {_sync(block)}
        no_ties: mov.b32 %v, 0;
        {_words_of_thread("chosen", "and.b32 %x, %x, 0x0F0F0F0F;" + population)}
        {_scan(block, "chosen_scan")}
        {"" if block.pieces > 1 else f"mov.b32 %ahead, 0; mov.b32 %here, {block.topk};"}
        sub.s32 %before, %before, %ahead;
        {_words_of_thread("spread", spread)}
        bar.sync 0;
        add.s32 %i, %t, %ahead; mul.wide.s32 %da, %i, 4; add.s64 %da, %da, %dx; mad.lo.s32 %a, %t, 4, <a2>;
        mov.u32 %i, %t;
        copy_more: setp.ge.s32 %pa, %i, %here; @%pa bra copy_done;
        ld.shared.b32 %e, [%a]; st.global.b32 [%da], %e;
        add.s32 %i, %i, {block.threads}; add.s32 %a, %a, {4 * block.threads}; add.s64 %da, %da, {4 * block.threads};
        bra copy_more;
        copy_done:
        """


def _written_all(block: Any) -> str:
    step = block.threads * block.pieces
    return f"""
        mad.lo.s32 %i, %cta, {block.threads}, %t; mul.wide.s32 %da, %i, 4; add.s64 %da, %da, %dx;
        all_more: setp.ge.s32 %pa, %i, {block.topk}; @%pa bra all_done;
        setp.lt.s32 %pb, %i, <length>; selp.b32 %e, %i, -1, %pb; st.global.b32 [%da], %e;
        add.s32 %i, %i, {step}; add.s64 %da, %da, {4 * step};
        bra all_more;
        all_done:
        """
