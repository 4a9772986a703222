"""Products of tensor cores that are only begun: several in flight, with the left operand in registers.

Pallas' own `wgmma` waits where a register operand is made ready; attention kernels cannot afford that.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import gpu, nvvm

_wgmma = importlib.import_module("jax.experimental.mosaic.gpu.wgmma")  # the package has a function of this name


def products(q: Any, k: Any, v: Any, o: jax.Array, p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Start `s = q k^T` and, behind it, `o += p v`; wgmma groups 1 and 2, both in flight: wait before reading either.

    Operands in shared memory are pieces of 64 columns, each a swizzled tile: q [D/64, 64, 64], k [D/64, keys, 64],
    v [Dv/64, keys, 64]. o [64, Dv] and p [64, keys] are registers. All registers are made ready before the first
    product, because ptxas runs products one by one if an operand of the second is moved after the first was issued.
    """
    tile = plgpu.RefType(_mosaic.swizzled(128, bytes_per_value=2))
    acc = plgpu.Layout.WGMMA
    keys = p.shape[1]
    types = [plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=acc) for shape in ((o.shape[0], keys), o.shape)]

    def issue(context, q, k, v, o, p):
        del context
        zero = gpu.FragmentedArray.splat(gpu.c(0.0, o.mlir_dtype), (o.shape[0], keys), o.layout)
        p = _wgmma.wgmma_fence(p)
        s, o = (_wgmma.WGMMAAccumulator.from_registers(x) for x in (zero, o))
        q, k, v = (gpu.memref_slice(x, (slice(None), slice(None), 0)) for x in (q, k, v))
        q = gpu.memref_transpose(q, (1, 0, 2, 3))
        k, v = gpu.memref_transpose(k, (0, 1, 3, 2)), gpu.memref_transpose(v, (1, 0, 2, 3))
        s = _wgmma.wgmma(s, q, k)
        nvvm.wgmma_commit_group_sync_aligned()
        o = _add_product(o, p, v, o._value.shape[1])
        nvvm.wgmma_commit_group_sync_aligned()
        return s.value, o.value

    inline: Any = plgpu.inline_mgpu(arg_types=(tile, tile, tile, acc, acc), return_type=types)
    return tuple(inline(issue)(q, k, v, o, p))


def add_product(v: Any, o: jax.Array, p: jax.Array, columns: int | None = None) -> jax.Array:
    """Start `o += p v`, operands as in `products`: one wgmma group, in flight.

    An instruction computes `columns` columns, all by default; its sums must fit the registers that ptxas allows for a
    thread of the whole kernel.
    """
    tile = plgpu.RefType(_mosaic.swizzled(128, bytes_per_value=2))
    acc = plgpu.Layout.WGMMA

    def issue(context, v, o, p):
        del context
        v = gpu.memref_slice(v, (slice(None), slice(None), 0))
        v = gpu.memref_transpose(v, (1, 0, 2, 3))
        p, o = _wgmma.wgmma_fence(p), _wgmma.WGMMAAccumulator.from_registers(o)
        o = _add_product(o, p, v, columns or o._value.shape[1])
        nvvm.wgmma_commit_group_sync_aligned()
        return o.value

    kind = plgpu.ShapeDtypeStruct(o.shape, jnp.float32, layout=acc)
    inline: Any = plgpu.inline_mgpu(arg_types=(tile, acc, acc), return_type=kind)
    return inline(issue)(v, o, p)


def add_products(v: Any, o: tuple[jax.Array, ...], p: jax.Array) -> tuple[jax.Array, ...]:
    """Start `o += p v` for side by side chunks of o, operands as in `products`: a wgmma group each, all in flight."""
    tile = plgpu.RefType(_mosaic.swizzled(128, bytes_per_value=2))
    acc = plgpu.Layout.WGMMA

    def issue(context, v, p, *o):
        del context
        p, sums = _wgmma.wgmma_fence(p), []
        for n, chunk in enumerate([_wgmma.WGMMAAccumulator.from_registers(chunk) for chunk in o]):
            wide = chunk._value.shape[1] // 64
            part = gpu.memref_slice(v, (slice(n * wide, (n + 1) * wide), slice(None), 0))
            sums.append(_add_product(chunk, p, gpu.memref_transpose(part, (1, 0, 2, 3)), 64 * wide))
            nvvm.wgmma_commit_group_sync_aligned()
        return tuple(chunk.value for chunk in sums)

    kinds = tuple(plgpu.ShapeDtypeStruct(chunk.shape, jnp.float32, layout=acc) for chunk in o)
    inline: Any = plgpu.inline_mgpu(arg_types=(tile, acc, *(acc,) * len(o)), return_type=kinds)
    return tuple(inline(issue)(v, p, *o))


def _add_product(acc: Any, a: Any, b: Any, columns: int) -> Any:
    """`acc += a b` with `a` in registers that are ready; `mosaic_gpu.wgmma` without its fence."""
    rows, total = acc._value.shape
    descriptor: Any = mma_utils.create_descriptor(
        b, swizzle=128, large_tile=(64, 64), group_size=(64, columns), logical_k_major=True
    )
    (base, strides), (group, step), fastest = descriptor
    registers = acc._value.registers.copy()
    width, step = (64, step) if a.shape[1] % 64 == 0 else (16, strides[1][0])
    for i in range(a.shape[1] // width):
        for n in range(total // columns):
            part = slice(n * columns // 8, (n + 1) * columns // 8)
            registers[:, part] = _wgmma.wgmma_m64(
                registers[:, part],
                a[:rows, i * width : (i + 1) * width],
                _wgmma._llvm_add(base, gpu.c(mma_utils.encode_addr(i * step + n * group), base.type)),
                swizzle=2 * width,  # of a, in a manner of speaking: that of b is in its descriptor
                n=columns,
                a_element_type=a.mlir_dtype,
                b_element_type=a.mlir_dtype,
                b_transpose=fastest != mma_utils.Dim.K,
                b_k_stride=strides[1][0],
                a_transpose=None,
                a_k_stride=None,
            )
    value = gpu.FragmentedArray(_registers=registers, _layout=acc._value.layout, _is_signed=None)
    return _wgmma.WGMMAAccumulator(_value=value, _original_layout=acc._original_layout, _sync=False)
