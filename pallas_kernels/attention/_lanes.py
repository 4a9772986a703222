"""Softmax work by threads and warps: what each holds of its rows, and what a warp may skip."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._mosaic import arith, ir, vector
from pallas_kernels._online_softmax import ACC, across

LANE = 8
"""Columns of a core matrix: every thread holds two of them in each of its rows."""


def folded(s, reduction, interpreted: bool):
    """[rows, LANE]: `reduction`, jnp.max or jnp.sum, over every LANE-th column of s [rows, columns].

    Both columns and both rows of a thread are walked side by side, as four chains that do not wait for each other.
    """
    if interpreted:
        return reduction(s.reshape(s.shape[0], -1, LANE), axis=1)

    def fold(context, s):
        del context
        parts = [s[:, n : n + LANE] for n in range(0, s.shape[1], LANE)]
        out, *parts = parts
        for part in parts:
            out = out.max(part) if reduction is jnp.max else out + part
        return out

    kind = plgpu.ShapeDtypeStruct((s.shape[0], LANE), jnp.float32, layout=ACC)
    inline: Any = plgpu.inline_mgpu(arg_types=(ACC,), return_type=kind)
    return inline(fold)(s)


def rescaled(o, alpha, interpreted: bool):
    """O * alpha, [rows, columns] by [rows]; warps whose rows all have alpha = 1 skip it, which changes no bit."""
    if interpreted:
        return o * across(alpha, o)

    def rescale(context, o, alpha):
        del context
        pred = None
        for register in alpha.registers.flat:
            if isinstance(register.type, ir.VectorType):
                register = vector.extract(register, dynamic_position=[], static_position=[0])
            changed = arith.cmpf(arith.CmpFPredicate.UNE, register, _mosaic.gpu.c(1.0, register.type))
            pred = changed if pred is None else arith.ori(pred, changed)
        mask = _mosaic.gpu.c(0xFFFFFFFF, ir.IntegerType.get_signless(32))
        pred = _mosaic.gpu_utils.nvvm.vote_sync(mask, pred, "any")
        branch = _mosaic.gpu_utils.scf.IfOp(pred, [register.type for register in o.registers.flat], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scaled = o * alpha.broadcast_in_dim(o.shape, (0,), o.layout)
            _mosaic.gpu_utils.scf.yield_(list(scaled.registers.flat))
        with ir.InsertionPoint(branch.else_block):
            _mosaic.gpu_utils.scf.yield_(list(o.registers.flat))
        registers = np.asarray(list(branch.results), dtype=object).reshape(o.registers.shape)
        return _mosaic.gpu.FragmentedArray(_registers=registers, _layout=o.layout, _is_signed=None)

    kind = plgpu.ShapeDtypeStruct(o.shape, jnp.float32, layout=ACC)
    inline: Any = plgpu.inline_mgpu(arg_types=(ACC, ACC.reduce(1)), return_type=kind)
    return inline(rescale)(o, alpha)


def masked(s, bound, interpreted: bool, *, above: bool, within: range | None = None):
    """S [rows, columns] with -inf in columns above, or below, the row's bound, int32 [rows].

    Columns outside `within` must be inside every row's bound.

    Columns are constants of the instructions: numbers of columns in registers, and their sums with the first key, are
    what an array of keys would cost.
    """
    if interpreted:
        column, bound = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=ACC), across(bound, s)
        return jnp.where(column <= bound if above else column >= bound, s, -jnp.inf)

    def mask(context, s, bound):
        del context
        gpu, i32 = _mosaic.gpu, ir.IntegerType.get_signless(32)
        lane = arith.remui(_mosaic.gpu_utils.thread_idx(), gpu.c(4, i32))
        first = arith.muli(lane, gpu.c(2, i32))
        seen = arith.CmpIPredicate.sge if above else arith.CmpIPredicate.sle
        of_row = bound.broadcast_in_dim((s.shape[0], LANE), (0,), s.layout).registers.flat
        bounds = [arith.subi(vector.extract(x, dynamic_position=[], static_position=[0]), first) for x in of_row]
        parts = []
        for n in range(0, s.shape[1], LANE):
            part = s[:, n : n + LANE]
            registers = part.registers.copy()
            inside = within is not None and (n >= within.stop or n + LANE <= within.start)
            for at, limit in enumerate(() if inside else bounds):
                out = registers.flat[at]
                for j in range(2):
                    value = vector.extract(out, dynamic_position=[], static_position=[j])
                    kept = arith.cmpi(seen, limit, gpu.c(n + j, i32))
                    value = arith.select(kept, value, gpu.c(float("-inf"), value.type))
                    out = vector.insert(value, out, dynamic_position=[], static_position=[j])
                registers.flat[at] = out
            parts.append(registers)
        registers = s.registers.copy()
        for n, part in enumerate(parts):
            registers[:, n : n + 1] = part
        return gpu.FragmentedArray(_registers=registers, _layout=s.layout, _is_signed=None)

    kind = plgpu.ShapeDtypeStruct(s.shape, jnp.float32, layout=ACC)
    inline: Any = plgpu.inline_mgpu(arg_types=(ACC, ACC.reduce(1)), return_type=kind)
    return inline(mask)(s, bound)
