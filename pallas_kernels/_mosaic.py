"""The one file that knows JAX's private parts: interpreting, instructions, device facts, timing.

Mosaic GPU says of itself that it may change from week to week; whatever a new jax release breaks should break here.
"""

import contextlib
import math
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax._src import config as jax_config
from jax._src import core as jax_core
from jax._src import hardware_utils
from jax._src.lib import cuda_path, cuda_versions
from jax._src.lib.mlir.dialects import nvvm
from jax._src.pallas.mosaic_gpu import core as _core
from jax._src.pallas.mosaic_gpu import lowering as _lowering
from jax._src.pallas.mosaic_gpu import primitives as _primitives
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as _interpreter
from jax._src.state import discharge as _discharge
from jax._src.state import primitives as _state
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.mosaic.gpu import utils as mosaic_gpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _exact

SMEM_BYTES = 232_448
"""Shared memory that one thread block may use on sm_90."""
_CUDA_EXTRAS = (12, 13)
_INSTALL = "install jaxattn[cuda13] (or [cuda12])"
_NEED = "needs an sm_90a GPU (H100, H200)"


# ---------------------------------------------------------------- names that jax's type stubs hide
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
"""Accumulator of wgmma."""
gpu: Any = mosaic_gpu
gpu_utils: Any = mosaic_gpu_utils
arith, ir, llvm, vector = gpu_utils.arith, gpu_utils.ir, gpu_utils.llvm, gpu_utils.vector
"""What inlined device code is written with."""


def swizzled(span_bytes: int, *, bytes_per_value: int, rows: int = 8) -> tuple[Any, ...]:
    """Transforms in shared memory: tiles of 8 rows, as wgmma wants them, by a swizzle span of 32, 64 or 128 bytes."""
    tiling = plgpu.TilingTransform((rows, span_bytes // bytes_per_value))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(span_bytes)  # pyright: ignore[reportAbstractUsage]


def strips(dtype: Any, span_bytes: int) -> Any:
    """Register layout between plain memory and 16-bit `swizzled` tiles: each lane holds 16 bytes of a swizzle span.

    Fits blocks of 64 k columns and 32 k rows (16 k for a span of 32 bytes) of `dtype`, and what they are cast to.
    """
    values = 16 // max(2, jnp.dtype(dtype).itemsize)
    span = span_bytes // 2
    rows = 32 * values // span
    side_by_side = span < 32  # the four warps on 64 columns, else on consecutive rows
    tiling = plgpu.Tiling(((rows, 4 * span) if side_by_side else (4 * rows, span), (rows, span), (values,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-4 if side_by_side else -5,), lane_dims=(-3, -2), vector_dim=-1)


def either(names: Iterable[Any]) -> str:
    """`a, b or c`, for messages."""
    *rest, last = map(str, names)
    return f"{', '.join(rest)} or {last}"


def smem_bytes(scratch: Iterable[Any]) -> int:
    """Shared memory of scratch types: each buffer starts at a multiple of 1024 bytes, one more holds the barriers."""
    buffers = [s for s in scratch if not isinstance(s, plgpu.Barrier | plgpu.ClusterBarrier)]
    return 1024 + sum(-(-math.prod(s.shape) * jnp.dtype(s.dtype).itemsize // 1024) * 1024 for s in buffers)


# ---------------------------------------------------------------- interpreting
@contextlib.contextmanager
def interpret(*, detect_races: bool = True) -> Iterator[None]:
    """Run every Mosaic kernel traced inside on the CPU, simulated; uninitialised memory is NaN.

    Raises:
        RuntimeError: on leaving, if `detect_races` and two threads or copies raced.
    """
    params = plgpu.InterpretGPUParams(
        detect_races=detect_races, out_of_bounds_reads="raise", uninitialized_memory="nan"
    )
    _interpreter.reset_gpu_interpret_mode_state()
    try:
        with plgpu.force_gpu_interpret_mode(params), warnings.catch_warnings():
            # numpy multiplies the NaN of uninitialised or poisoned memory and at times says so
            warnings.filterwarnings("ignore", "invalid value encountered in matmul", RuntimeWarning)
            yield
            jax.effects_barrier()
            if detect_races and _races_found():
                raise RuntimeError("race detected in an interpreted Mosaic kernel; see the log above")
    finally:
        _interpreter.reset_gpu_interpret_mode_state()


def _races_found() -> bool:
    try:
        return bool(_interpreter.get_races().races_found)
    except AssertionError:  # nothing was interpreted
        return False


def interpreting() -> bool:
    """True inside `interpret()`; part of jit's cache key, so a traced function is never reused across the border."""
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


def current_trace() -> Any:
    """The trace that calls are recorded in, an object that can be referenced weakly; None outside of any."""
    now = jax_core.trace_ctx.trace
    return None if now is jax_core.eval_trace else now


def discharged(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` without the references that it makes with `jax.new_ref`: a kernel that writes to them returns them.

    jit does so itself, but not inside `jax.custom_jvp`, where ops run kernels.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    pure = _discharge.discharge_state(closed)
    run: Any = jax.extend.core.jaxpr_as_fun(pure)
    return jax.tree.unflatten(jax.tree.structure(shapes), run(*jax.tree.leaves(args)))


# ---------------------------------------------------------------- device code
def divide(x: jax.Array, y: jax.Array, layout: Any) -> jax.Array:
    """`x / y` in float32, rounded to nearest even; inside a kernel, both in `layout`.

    See `_exact.divide`, for code outside kernels, for what a plain `/` does.
    """
    return pointwise("div.rn.f32", _exact.divide, layout, x, y)


def pointwise(instruction: str, interpreted: Callable[..., jax.Array], layout: Any, *arrays: jax.Array) -> jax.Array:
    """A float32 PTX instruction on each element, with the rounding and the NaN rule that its name says.

    Args:
        instruction: `fma.rn.f32`, say. Unlike `+` and `*` it is never contracted with another one.
        interpreted: the same in jnp.
        layout: of all arrays, in registers.
        *arrays: its operands, of one shape.
    """
    if interpreting():
        return jax.lax.optimization_barrier(interpreted(*jax.lax.optimization_barrier(arrays)))
    out = plgpu.ShapeDtypeStruct(arrays[0].shape, jnp.float32, layout=layout)

    def emit(context, first, *others):
        del context
        return first._pointwise(first._lift_fast_instr(instruction), *others)

    inline: Any = plgpu.inline_mgpu(arg_types=(layout,) * len(arrays), return_type=out)
    if getattr(layout, "layout_cls", layout) is not plgpu.Layout.WG_SPLAT:  # a splat needs no cast, and allows none
        arrays = tuple(plgpu.layout_cast(x, layout) for x in arrays)
    return inline(emit)(*arrays)


def larger(x: jax.Array, y: jax.Array, layout: Any) -> jax.Array:
    """The larger of two numbers of one float type, of a number and NaN the number."""
    if interpreting():
        return jnp.fmax(x, y)
    kind = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[jnp.dtype(x.dtype).name]
    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    def emit(context, a, b):
        del context
        how = a._lift_fast_instr("max.f32") if kind == "f32" else None
        return a._pointwise(how or a._lift_fast_packed_instr(f"max.{kind}x2", f"max.{kind}"), b)

    inline: Any = plgpu.inline_mgpu(arg_types=(layout, layout), return_type=out)
    return inline(emit)(plgpu.layout_cast(x, layout), plgpu.layout_cast(y, layout))


def to_int32(x: jax.Array, layout: Any) -> jax.Array:
    """float32 numbers to the nearest integer, halves to even; NaN becomes 0, and what is too large saturates."""
    if interpreting():
        limit = 2.0**31
        whole = jnp.round(jnp.where(jnp.isnan(x), 0, x))
        return jnp.where(whole >= limit, 2**31 - 1, jnp.where(whole < -limit, -(2**31), whole.astype(jnp.int32)))
    out = plgpu.ShapeDtypeStruct(x.shape, jnp.int32, layout=layout)

    def emit(context, array):
        del context
        i32 = ir.IntegerType.get_signless(32)
        registers = np.empty(array.registers.shape, object)
        for at, register in np.ndenumerate(array.registers):
            [count] = ir.VectorType(register.type).shape
            result = llvm.mlir_undef(ir.VectorType.get((count,), i32))
            for i in range(count):
                whole = llvm.inline_asm(i32, [vector.extract(register, [], [i])], "cvt.rni.s32.f32 $0, $1;", "=r,f")
                result = vector.insert(whole, result, [], [i])
            registers[at] = result
        return type(array)(_registers=registers, _layout=array.layout, _is_signed=True)

    inline: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    return inline(emit)(plgpu.layout_cast(x, layout))


def relabel(x: jax.Array, old: Any, shape: tuple[int, ...], new: Any) -> jax.Array:
    """`x.reshape(shape)` from register layout `old` to `new`, which must put every number where it already is."""
    if interpreting():
        return x.reshape(shape)
    out = plgpu.ShapeDtypeStruct(shape, x.dtype, layout=new)

    def emit(context, array):
        del context
        layout = new.to_mgpu()
        registers = array.registers.reshape(layout.registers_shape(shape))
        return type(array)(_registers=registers, _layout=layout, _is_signed=array.is_signed)

    inline: Any = plgpu.inline_mgpu(arg_types=(old,), return_type=out)
    return inline(emit)(plgpu.layout_cast(x, old))


def pack_nibbles(codes: jax.Array, old: Any, new: Any) -> jax.Array:
    """4-bit int32 codes [N, D] as bytes [N, D / 2], the even index in the low bits.

    Register layout `new` must have half as many neighbouring values in each lane as `old`, and else be the same.
    """
    if interpreting():
        return (codes[:, ::2] | (codes[:, 1::2] << 4)).astype(jnp.uint8)
    shape = (codes.shape[0], codes.shape[1] // 2)
    out = plgpu.ShapeDtypeStruct(shape, jnp.uint8, layout=new)

    def emit(context, array):
        del context
        layout, i32 = new.to_mgpu(), ir.IntegerType.get_signless(32)
        registers = np.empty(array.registers.shape, object)
        for at, register in np.ndenumerate(array.registers):
            [count] = ir.VectorType(register.type).shape
            word = vector.extract(register, [], [count - 1])
            for i in reversed(range(count - 1)):
                word = arith.shli(word, arith.constant(i32, 4))
                word = arith.addi(word, vector.extract(register, [], [i]))
            if count < 8:
                word = arith.trunci(ir.IntegerType.get_signless(4 * count), word)
            registers[at] = gpu_utils.bitcast(word, ir.VectorType.get((count // 2,), ir.IntegerType.get_signless(8)))
        registers = registers.reshape(layout.registers_shape(shape))
        return type(array)(_registers=registers, _layout=layout, _is_signed=False)

    inline: Any = plgpu.inline_mgpu(arg_types=(old,), return_type=out)
    return inline(emit)(plgpu.layout_cast(codes, old))


def butterflies(x: jax.Array, group: int, layout: Any, first: int = 1) -> jax.Array:
    """float32 rows [N, D] times Sylvester's matrix of +-1 in groups of `group`, a power of two; `layout` of `_rows`.

    Sums of distance `first`, twice as much, ... within the values of a lane, between lanes, then between registers.
    """
    if interpreting():
        return _exact.butterflies(x, group, first)
    out = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout)

    def emit(context, array):
        del context
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        registers = array.registers.reshape(array.registers.shape[:2])
        [vec] = ir.VectorType(registers.flat[0].type).shape
        across = array.layout.base_tile_shape[1] // vec
        lane = arith.remui(gpu_utils.thread_idx(), arith.constant(i32, 32))
        result = np.empty_like(registers)
        for i in range(registers.shape[0]):
            values = [[vector.extract(r, [], [v]) for v in range(vec)] for r in registers[i]]
            flat = [value for part in values for value in part]
            distance = first
            while distance < group:
                if distance < vec or distance >= across * vec:
                    step = distance if distance < vec else distance // across  # in `flat`
                    for a in range(len(flat)):
                        if not a & step:
                            low, high = flat[a], flat[a + step]
                            flat[a], flat[a + step] = arith.addf(low, high), arith.subf(low, high)
                else:
                    hop = distance // vec
                    upper = arith.cmpi(
                        arith.CmpIPredicate.ne,
                        arith.andi(lane, arith.constant(i32, hop)),
                        arith.constant(i32, 0),
                    )
                    sign = arith.select(upper, arith.constant(f32, -1.0), arith.constant(f32, 1.0))
                    # a product with +-1 is exact, so this rounds once, like the sum
                    flat = [llvm.intr_fma(value, sign, gpu_utils.shfl_bfly(value, hop)) for value in flat]
                distance *= 2
            for j in range(registers.shape[1]):
                register = llvm.mlir_undef(registers[i, j].type)
                for v in range(vec):
                    register = vector.insert(flat[j * vec + v], register, [], [v])
                result[i, j] = register
        return type(array)(_registers=result.reshape(array.registers.shape), _layout=array.layout, _is_signed=None)

    inline: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    return inline(emit)(plgpu.layout_cast(x, layout))


def swap_pairs(x: jax.Array, layout: Any) -> jax.Array:
    """Neighbours (2i, 2i + 1) of the last axis exchanged; each lane must hold an even number of neighbouring values."""
    return partners(x, 1, layout)


def partners(x: jax.Array, distance: int, layout: Any) -> jax.Array:
    """Numbers i and i ^ distance of the last axis exchanged, in float32 rows of a layout of `_rows`.

    Args:
        x: [N, D], D a multiple of twice the distance.
        distance: a power of two, less than the neighbours in a lane or a multiple of them.
        layout: of `x`.
    """
    if interpreting():
        return x.reshape(*x.shape[:-1], -1, 2, distance)[..., ::-1, :].reshape(x.shape)
    out = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

    def emit(context, array):
        del context
        before = array.registers.reshape(array.registers.shape[:2])
        after = np.empty_like(before)
        [vec] = before.flat[0].type.shape
        across = array.layout.base_tile_shape[1] // vec
        for i, j in np.ndindex(before.shape):
            if distance < vec:
                after[i, j] = vector.shuffle(before[i, j], before[i, j], [v ^ distance for v in range(vec)])
            elif distance < across * vec:
                after[i, j] = llvm.mlir_undef(before[i, j].type)
                for v in range(vec):
                    number = gpu_utils.shfl_bfly(vector.extract(before[i, j], [], [v]), distance // vec)
                    after[i, j] = vector.insert(number, after[i, j], [], [v])
            else:
                after[i, j] = before[i, j ^ distance // (across * vec)]
        return type(array)(
            _registers=after.reshape(array.registers.shape), _layout=array.layout, _is_signed=array.is_signed
        )

    inline: Any = plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
    return inline(emit)(plgpu.layout_cast(x, layout))


def product_sum(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array, layout: Any) -> jax.Array:
    """`a * b + c * d` in float32 with every product rounded: `+` and `*` may be fused, these are not."""
    if interpreting():
        first, second = jax.lax.optimization_barrier((a * b, c * d))
        return first + second
    out = plgpu.ShapeDtypeStruct(a.shape, a.dtype, layout=layout)

    def emit(context, a, b, c, d):
        del context
        multiply = a._lift_fast_instr("mul.rn.f32")
        return a._pointwise(multiply, b)._pointwise(a._lift_fast_instr("add.rn.f32"), c._pointwise(multiply, d))

    inline: Any = plgpu.inline_mgpu(arg_types=(layout,) * 4, return_type=out)
    return inline(emit)(*(plgpu.layout_cast(x, layout) for x in (a, b, c, d)))


_arrive_when_copied = jax.extend.core.Primitive("arrive_when_copied")
_arrive_when_copied.multiple_results = True


def arrive_when_copied(barrier: Any) -> None:
    """Keep a barrier from completing before the `cp.async` copies that this warpgroup started so far have.

    It does not count as an arrival: that comes after it. Compiled only.
    """
    ref, transforms = _state.get_ref_and_transforms(barrier, None, "arrive_when_copied")
    flat, tree = jax.tree.flatten(transforms)
    _arrive_when_copied.bind(ref, *flat, tree=tree)


@_arrive_when_copied.def_effectful_abstract_eval
def _(barrier, *indices, tree):
    del barrier, indices, tree
    return (), {_core._memory_effect}


@_lowering.register_lowering_rule(_arrive_when_copied, mosaic_gpu.LoweringSemantics.Warpgroup)
def _(context, barrier, *indices, tree):
    index = _primitives._get_barrier_base_index(context.avals_in[0], tree.unflatten(indices))
    nvvm.cp_async_mbarrier_arrive((barrier if index is None else barrier[index]).get_ptr())
    return ()


def store(ref: Any, value: jax.Array) -> None:
    """Write all of `ref`, in global memory, in whatever layout `value` has.

    From jax 0.12 on a plain assignment insists on whole 32-byte sectors; before, it took any layout.
    """
    unplanned = getattr(plgpu, "store", None)
    if unplanned is None:
        ref[...] = value
    else:
        unplanned(ref, value, optimized=False)


def store_tile(ref: Any, value: jax.Array, layout: Any) -> None:
    """`ref[...] = value` of 16-bit `swizzled` tiles in shared memory, without the barriers that Pallas adds."""
    if interpreting():
        ref[...] = value
        return

    def emit(context, ref, value):
        del context
        value.store_tiled(ref, swizzle=128)

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzled(128, bytes_per_value=2)), layout))
    inline(emit)(ref, value)


def store_plain(ref: Any, value: jax.Array, layout: Any) -> None:
    """The same for memory that is neither tiled nor swizzled."""
    if interpreting():
        ref[...] = value
        return

    def emit(context, ref, value):
        del context
        value.store_untiled(ref, optimized=False)

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    inline(emit)(ref, value)


# ---------------------------------------------------------------- device facts
def why_not_here() -> str | None:
    """None if Mosaic kernels can run in this process (GPU, interpreted, or being compiled for one), else why not."""
    if interpreting():
        return None
    kind = _abstract_gpu()
    if kind is not None:
        return None if _is_hopper(kind) else _wrong_gpu(kind)
    device = _default_device()
    if device.platform not in ("gpu", "cuda"):
        return _why_no_gpu(device.platform)
    capability = getattr(device, "compute_capability", None)
    if str(capability) != "9.0":
        return _wrong_gpu(f"{device.device_kind} (compute capability {capability})")
    if _cuda_versions() is None:
        return f"needs JAX's CUDA plugin, which is not installed; {_INSTALL}"
    return _why_no_driver() or _why_no_compiler()


def _wrong_gpu(kind: str) -> str:
    return f"{_NEED}, got {kind}; use the reference there"


def _is_hopper(kind: str) -> bool:
    return bool(re.search(r"\b(H100|H200|H800|H20|GH200)\b", kind))


def _abstract_gpu() -> str | None:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None and device.platform == "gpu" else None


def _default_device() -> Any:
    """The `jax.Device` that computations go to."""
    device = jax.config.jax_default_device
    if isinstance(device, str):
        return jax.devices(device)[0]
    return device if device is not None else jax.devices()[0]


def _why_no_gpu(platform: str) -> str:
    """Why JAX runs on `platform`: there is no GPU, or the first thing that keeps JAX from it."""
    start = f"{_NEED}, but this process runs on {platform}"
    if not _nvidia_gpu_visible():
        return f"{start}; on a machine with one, {_INSTALL}"
    if _cuda_versions() is None:
        return f"{start}: the machine has an NVIDIA GPU, but JAX's CUDA plugin is not installed; {_INSTALL}"
    driver = _why_no_driver()
    if driver is not None:
        return f"{start}: {driver}"
    chosen = _jax_platforms()
    if chosen and not {"cuda", "gpu"} & set(chosen.split(",")):
        return f"{start}: JAX was told so (jax_platforms={chosen!r}); unset JAX_PLATFORMS"
    return f"{start}: JAX could not start CUDA and logged why; {_INSTALL}"


def _nvidia_gpu_visible() -> bool:
    return hardware_utils.has_visible_nvidia_gpu()


def _jax_platforms() -> str | None:
    return jax.config.jax_platforms


def _cuda_versions() -> Any:
    """JAX's module of CUDA versions, None without the CUDA plugin."""
    return cuda_versions


def _why_no_compiler() -> str | None:
    if find_ptxas() is None:
        return f"needs ptxas to compile kernels, found none; {_INSTALL}, or put ptxas of CUDA 12.8 or newer on PATH"
    return None


def find_ptxas() -> Path | None:
    """Where ptxas is: JAX's CUDA directory or the usual one, the CUDA wheels beside JAX, or PATH."""
    for root in (Path(cuda_path or "/usr/local/cuda"), *_cuda_wheels()):
        if (root / "bin" / "ptxas").exists():
            return root / "bin" / "ptxas"
    found = shutil.which("ptxas")
    return Path(found) if found else None


def _cuda_wheels() -> list[Path]:
    """Where CUDA 13's and CUDA 12's compiler packages may lie."""
    return [Path(entry) / "nvidia" / name for entry in sys.path for name in ("cu13", "cuda_nvcc")]


def _why_no_driver() -> str | None:
    """The driver must offer the CUDA major version that the plugin was built for."""
    versions = _cuda_versions()
    built, driver = versions.cuda_runtime_build_version() // 1000, versions.cuda_driver_get_version()
    if driver // 1000 >= built:
        return None
    if driver == 0:
        return "no NVIDIA driver was found; install one"
    other = f" or install jaxattn[cuda{driver // 1000}]" if driver // 1000 in _CUDA_EXTRAS else ""
    return (
        f"JAX's CUDA plugin was built for CUDA {built}, but the driver offers only {driver // 1000}."
        f"{driver % 1000 // 10}; update the driver{other}"
    )


def num_sms() -> int:
    """Streaming multiprocessors of the device that is traced for; 132 where nothing tells (H100, H200 SXM)."""
    mesh = jax.sharding.get_abstract_mesh().abstract_device
    if mesh is not None and mesh.num_cores:
        return mesh.num_cores
    return getattr(jax.devices()[0], "core_count", None) or 132


def profiler() -> tuple[Callable[[], None], Callable[[bool], list[tuple[str, float]]]]:
    """CUPTI's `start()` and `stop(True)` -> (kernel, milliseconds); raises RuntimeError where this jax has none."""
    try:
        from jax._src.lib import mosaic_gpu as lib

        cupti: Any = lib._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
        return cupti._cupti_init, cupti._cupti_get_timings
    except (ImportError, AttributeError) as e:
        raise RuntimeError(f"this jax has no CUPTI profiler: {e}; install jaxattn[cuda13] (or [cuda12])") from e
