"""Scores of MXFP4 keys and queries on bfloat16 tensor cores: keys are decoded in registers and multiplied from there.

A key is 64 bytes of two E2M1 codes each and four UE8M0 bytes, each for 32 numbers. A number is `code * 2^(byte - 127)`,
two significant bits in a power of two, so bfloat16 holds it, subnormals included, wherever float32 does; float32
accumulators hold products. A thread needs 32 of the 128 numbers of two keys, in any order as long as queries have the
same. It takes a group, 16 bytes in a row under one scale:

    number 32 c + 8 j + i + 4 e of a key stands at input 8 (4 j + i) + 2 c + e:  lane c of four, word j, nibble i + 4 e
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _decode, _inline, _mosaic

WIDTH, GROUP, HALF = 128, 32, _decode.HALF
BYTES, SCALES = WIDTH // 2, WIDTH // GROUP
"""Of a key's codes and of its scales."""
_CODE = _decode.Code(kind="e2m1", dtype=jnp.dtype(jnp.bfloat16))


def numbers(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """float32 [..., 128] of uint8 [..., 64] and [..., 4]; scale 255 is NaN, and where denormals are flushed 0 is 0."""
    nibbles = jnp.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], SCALES, GROUP).astype(jnp.int32)
    exponent, half = (nibbles >> 1) & 3, nibbles & 1
    size = jnp.where(exponent > 0, ((exponent + 126) << 23) | (half << 22), half * (126 << 23))
    size = lax.bitcast_convert_type(size, jnp.float32)
    byte = scales.astype(jnp.int32)[..., None]
    power = lax.bitcast_convert_type(jnp.maximum(byte << 23, 1 << 22) | (((byte + 1) >> 8) << 22), jnp.float32)
    return (jnp.where(nibbles & 8, -size, size) * power).reshape(*codes.shape[:-1], WIDTH)


def turned(x: jax.Array) -> jax.Array:
    """Numbers [..., 128] in the order of the inputs."""
    parts = x.reshape(*x.shape[:-1], SCALES, 4, 2, 4)  # c j e i
    return jnp.moveaxis(parts, (-3, -1, -4, -2), (-4, -3, -2, -1)).reshape(x.shape)  # j i c e


def queries(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """bfloat16 [2, rows, 64], exact: what `start` takes, of uint8 [rows, 64] and [rows, 4]."""
    x = turned(numbers(codes, scales)).astype(jnp.bfloat16)
    return jnp.moveaxis(x.reshape(len(x), 2, HALF), 1, 0)


def start(keys: Any, scales: Any, q: Any) -> jax.Array:
    """Start the scores float32 [64, n] of 64 keys; `_inline.settle` waits for them, memory of keys is free at once.

    Args:
        keys: uint8 [64, 64] in plain shared memory.
        scales: their 256 bytes, uint8 [4, 64] or int32 [64], plain.
        q: bfloat16 [2, n, 64] of `queries`, memory as `_inline.span` says.
    """
    n = q.shape[1]
    if _mosaic.interpreting():
        raw = scales[...]
        raw = raw.reshape(-1, SCALES) if raw.dtype == jnp.uint8 else lax.bitcast_convert_type(raw, jnp.uint8)
        k, wide = turned(numbers(keys[...], raw)), jnp.concatenate([q[0], q[1]], 1).astype(jnp.float32)
        return jnp.dot(k, wide.T, precision="highest")

    def emit(context, keys, scales, q):
        del context
        return _inline.array(_Emitter(_CODE).scores(keys, scales, q, n), n, jnp.float32)

    out = plgpu.ShapeDtypeStruct((_inline._M, n), jnp.float32, layout=_inline.WGMMA)
    types = (plgpu.RefType(), plgpu.RefType(), plgpu.RefType(_inline.span()))
    inline: Any = plgpu.inline_mgpu(arg_types=types, return_type=out)
    return inline(emit)(keys, scales, q)


class _Emitter(_decode._Emitter):
    """Writes the instructions of `start`."""

    def power(self, scales, offset):
        """`2^(byte - 127)` twice: 0 is the subnormal 2^-127, 255 NaN."""
        pointer, none = _inline.utils.memref_ptr(scales), _inline.llvm.GEPNoWrapFlags.none
        small = _inline.ir.IntegerType.get_signless(8)
        at = _inline.llvm.getelementptr(pointer.type, pointer, [offset], [-(2**31)], small, none)
        byte = _inline.arith.extui(self.i32, _inline.llvm.load(small, at, alignment=1))
        top = self.right(self.right(_inline.arith.addi(byte, self.const(1)), 8), -6)
        bits = _inline.arith.ori(_inline.arith.maxsi(self.right(byte, -7), self.const(1 << 6)), top)
        return self.numbers(_inline.arith.ori(bits, self.right(bits, -16)))

    def scores(self, keys, scales, q, n: int) -> list:
        """Eight instructions over 16 inputs each; the first overwrites the sums."""
        add, mul = _inline.arith.addi, _inline.arith.muli
        thread = _inline.utils.thread_idx()
        row, lane = add(_inline.bits(thread, 5, 3, 4), _inline.bits(thread, 2, 7, 0)), self.masked(thread, 3)
        found: list = [[None, None] for _ in range(WIDTH // 8)]
        for h in range(2):
            mine = add(row, self.const(8 * h))
            scale = self.power(scales, add(mul(mine, self.const(SCALES)), lane))
            words = self.load(keys, add(mul(mine, self.const(BYTES)), mul(lane, self.const(16))), 16)
            for j, word in enumerate(words):
                for i in range(4):
                    v = _inline.arith.mulf(self.decoded(word, i, None), scale)
                    found[4 * j + i][h] = self.bits(v)
        bases = [_inline.descriptor(_inline.utils.memref_slice(q, half), n, HALF) for half in range(2)]
        count, (_, step) = n // 2, bases[0]
        acc = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
        lines = [".reg .pred p;", ".reg .b64 db;", "setp.ne.b32 p, 0, 0;", "wgmma.fence.sync.aligned;"]
        for k in range(8):
            a = "{" + ", ".join(f"${count + 4 * k + i}" for i in range(4)) + "}"
            lines += [f"add.s64 db, ${count + 32 + k // 4}, {step * (k % 4)};"]
            lines += [f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {acc}, {a}, db, p, 1, 1, 0;"]
            lines += ["setp.eq.b32 p, 0, 0;"] if k == 0 else []
        lines += ["wgmma.commit_group.sync.aligned;"]
        flat = [found[2 * k + column][h] for k in range(8) for column in range(2) for h in range(2)]
        given = [*((x, "r") for x in flat), *((base, "l") for base, _ in bases)]
        return _inline.assembly(lines, [], count, given, jnp.float32)
