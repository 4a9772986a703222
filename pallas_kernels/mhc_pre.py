"""Gates and layer input of hyper-connections on Mosaic GPU (Hopper), see `jaxattn.ops.mhc_pre`.

Two launches. `products` multiplies streams and weights on tensor cores and adds up squares: bfloat16 times a float32
weight is exact as three bfloat16 products, and the sums of every 64 columns are added to float32 registers, because
tensor cores cut off where registers round. Columns are split among thread blocks. `_finish` adds the parts up, computes
the four input gates and mixes the streams, the last streams first, of which the L2 cache still holds some; a few blocks
more compute output gates and matrices, a row of one in each lane. It takes few registers, so that many thread blocks of
a multiprocessor wait for memory at once: a block has some columns of a token, loaded before their gates are known and
those first that the products read last, and warps do not wait for each other around their stores.

Where the streams are updated first, `_updated_products` takes the place of `products`: a step is the same 64 columns
of all streams and of the layer's output, whose mixture is rounded in shared memory, from where it is both multiplied
and stored. The streams before the update are read once, and nothing waits for a launch of `mhc_post`. It keeps 108 KB
of a step in shared memory, so that loads, mixing and products wait for each other: `apart`, which launches `mhc_post`
and `products` one after the other, is faster although it reads the new streams once more.

With `once` the kernel of `_mhc_once` makes the layer's input in one pass, and `_finish_matrices` the rest.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _inline, _inline_memory, _mhc_once, _mosaic
from pallas_kernels import mhc_post as update

_STREAMS, _OUTPUTS = 4, 24
_TERMS = 3
"""bfloat16 numbers that add up to a float32."""
_DEPTH = 64
"""Columns of a step, one swizzle span."""
_WAVE = 64
"""Rows of a product."""
_ROWS, _SPLITS = (64, 128), (1, 2, 4, 8, 16)
_TOKENS = 32
"""Matrices of a thread block: a lane has a row of one."""
_EARLY = 2
"""Pieces of a token's streams that are loaded before their turn."""
_UPDATED: dict[str, Any] = {"rows": 64, "stages": 2}
"""What fits into shared memory where the streams are updated first: a step has 108 KB."""

f32 = jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Shape of the products.

    `rows` tokens of a thread block, `splits` of the columns among thread blocks, `stages` steps in shared memory;
    where the streams are updated first, 64 rows and 2 stages, and each stream's columns are split. With `once` streams
    are read once, as `_mhc_once` does it, by `clusters` of thread blocks or as many as surely find room: `stages` tiles
    of 16 tokens in shared memory, rows and splits do not matter.
    With `apart` streams are updated by the kernel of `mhc_post`, and the rest is as without an update.
    """

    rows: int = 128
    splits: int = 8
    stages: int = 4
    once: bool = False
    clusters: int | None = None
    apart: bool = False

    def __post_init__(self):
        for name, legal in (("rows", _ROWS), ("splits", _SPLITS)):
            if getattr(self, name) not in legal:
                raise ValueError(f"{name} must be {_mosaic.either(legal)}, got {getattr(self, name)}")
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2, got {self.stages}")
        if self.clusters is not None and (self.clusters < 1 or not self.once):
            raise ValueError(f"clusters must be at least 1 and needs once=True, got {self.clusters}")


def why_not(*, residual, y, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    _, C, M = residual.shape
    if jnp.dtype(residual.dtype) != jnp.bfloat16:
        return f"streams must be bfloat16, whose products are exact, got {jnp.dtype(residual.dtype).name}"
    if C != _STREAMS:
        return f"the number of streams must be {_STREAMS}, got {C}"
    if M % 256:
        return f"the streams' width must be a multiple of 256, got {M}"
    return None


def _legal(config: Config, C: int, M: int, updated: bool = False) -> bool:
    updated = updated and not config.apart
    if config.once:
        return _mhc_once.why_not(M, config.stages, updated) is None
    steps, rest = divmod(M if updated else C * M, config.splits * _DEPTH)
    fits = not updated or all(getattr(config, name) == value for name, value in _UPDATED.items())
    return fits and not rest and steps >= config.stages


def check(op: str, config: Config, C: int, M: int, updated: bool = False) -> None:
    """Raise `ValueError` if the configuration does not fit C streams of M numbers, which may be updated first."""
    updated = updated and not config.apart
    if config.once:
        why_not = _mhc_once.why_not(M, config.stages, updated)
        if why_not is not None:
            raise ValueError(f"{op}: {why_not}")
    if not _legal(config, C, M, updated):
        what = f"{op}: splits={config.splits}, stages={config.stages} are not legal for {C} streams of {M}"
        rows = f" that are updated first, with rows={config.rows}; take rows=64, stages=2, at most {M // 128} splits"
        raise ValueError(what + rows if updated else what)


def default_config(*, residual, y=None, **_) -> Config:
    """Clusters that read streams once, for many tokens of 4096 numbers; else two passes.

    The fewest splits that give nearly every multiprocessor a thread block; streams are updated apart.

    H200, 4096 tokens: streams of 4096 take 80.7 us with 4 splits, 81.0 with 8; of 7168 134.9 and 139.3. The first
    launch with an update takes 131.8 us, apart 75.1 and 44.5; of 64 tokens 17.6 and less than 10 (in a whole model).
    """
    N, C, M = residual.shape
    if C == _STREAMS and _mhc_once.pays(N, M):
        return Config(once=True, stages=5 if y is None else 4)
    shape: dict[str, Any] = {"rows": 128 if N > 64 else 64, "apart": y is not None}
    legal = [c for c in (Config(splits=s, **shape) for s in _SPLITS) if _legal(c, C, M, y is not None)]
    enough = [c for c in legal if -(-N // c.rows) * c.splits >= 0.9 * _mosaic.num_sms()]
    return enough[0] if enough else legal[-1]


def configs(*, residual, y=None, **_) -> Iterable[Config]:
    """All legal configurations."""
    _, C, M = residual.shape
    every = [Config(rows=r, splits=s, stages=n) for r in _ROWS for s in _SPLITS for n in (2, 3, 4, 6)]
    every = [c for c in every if c.stages * c.rows <= 512]
    every += [Config(once=True, stages=n) for n in (3, 4, 5)]
    every += [dataclasses.replace(c, apart=True) for c in every if y is not None]
    return [c for c in every if _legal(c, C, M, y is not None)]


def mhc_pre(*, config: Config, residual, fn, scale, base, y, post, comb, iters, post_mult, eps, rms_eps):
    """Launch; arguments as prepared by `jaxattn.ops.mhc_pre`."""
    N, C, M = residual.shape
    check("mhc_pre", config, C, M, y is not None)
    if not N:
        empty = jnp.zeros((0, M), residual.dtype), jnp.zeros((0, C)), jnp.zeros((0, C, C))
        return empty if y is None else (*empty, residual)
    numbers = {"iters": iters, "post_mult": post_mult, "eps": eps, "rms_eps": rms_eps}
    if config.apart and y is not None:
        how = update.default_config(residual=residual)
        streams = update.mhc_post(config=how, residual=residual, y=y, post=post, comb=comb)
        given = {"fn": fn, "scale": scale, "base": base, "y": None, "post": None, "comb": None}
        return *mhc_pre(config=config, residual=streams, **given, **numbers), streams
    flat, numbers = residual.reshape(N, C * M), numbers | {"C": C}
    if config.once:
        given: Any = {} if y is None else {"update": (y, _by_coefficient(post, comb, N - N % -_mhc_once.TOKENS))}
        given |= {"at_once": config.clusters}
        args = flat, fn, scale, base, eps, rms_eps
        x, *new, parts, squares = _mhc_once.launch("mhc_once", config.stages, *args, **given)
        new = [streams.reshape(N, C, M) for streams in new]
        return x, *_finish_matrices(N, M, parts, squares, scale, base, **numbers), *new
    weights = split_weights(fn)
    if y is None:
        parts, squares = products(config, flat, weights)
        return _finish(flat, parts, squares, scale, base, span=C * M // config.splits, **numbers)
    streams, parts, squares = _updated_products(config, flat, y, post, comb, weights)
    out = _finish(streams, parts, squares, scale, base, span=M // config.splits, **numbers)
    return *out, streams.reshape(N, C, M)


# ---------------------------------------------------------------- products
def split_weights(fn: jax.Array) -> jax.Array:
    """bfloat16 [3 O, W] whose rows O apart add up to those of float32 `fn` [O, W], the largest part first.

    W is a multiple of 256.
    """
    outputs, width = fn.shape
    columns = next(c for c in (1024, 512, 256) if width % c == 0)
    kind = plgpu.Layout.WG_STRIDED((columns,), columns // 128 if columns < 512 else 4)

    def body(fn_ref, o_ref):
        row, here = lax.axis_index("row"), pl.ds(lax.axis_index("part") * columns, columns)
        rest = plgpu.load(fn_ref.at[row, here], layout=kind, optimized=False)
        for i in range(_TERMS):
            part = rest.astype(jnp.bfloat16)
            _mosaic.store(o_ref.at[i * outputs + row, here], part)
            rest = rest - part.astype(f32)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((_TERMS * outputs, width), jnp.bfloat16),
        grid=(outputs, width // columns),
        grid_names=("row", "part"),
        kernel_name="mhc_split",
    )(fn)


def products(config: Config, x: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Parts of `x fn^T` [splits, rows, O] and of the sums of squares [splits, rows]; rows beyond N hold anything.

    Args:
        config: shape.
        x: bfloat16 [N, W].
        weights: `split_weights` of float32 [O, W], O a multiple of 8.
    """
    (N, W), outputs = x.shape, weights.shape[0] // _TERMS
    rows, steps, tiles = config.rows, W // (config.splits * _DEPTH), -(-N // config.rows)
    strips, memory = _mosaic.strips(jnp.bfloat16, 128), _inline.span()
    waves = [pl.ds(start, _WAVE) for start in range(0, rows, _WAVE)]

    def body(x_ref, fn_ref, parts_ref, squares_ref):
        tile, split = lax.axis_index("tile"), lax.axis_index("split")

        def step(_, x_smem, fn_smem, carry):
            sums, before = carry

            found = [_inline.start(x_smem.at[wave], fn_smem) for wave in waves]
            numbers = _inline_memory.load_span(x_smem, strips).astype(f32)
            squares = before + numbers * numbers
            found = [_inline.settle(x, len(waves) - 1 - i) for i, x in enumerate(found)]
            plgpu.commit_smem()  # all warps have read before the next copy is told to overwrite
            return [_add_terms(*both) for both in zip(sums, found, strict=True)], squares

        where = split * steps
        pipeline = plgpu.emit_pipeline(
            step,
            grid=(steps,),
            in_specs=[
                plgpu.BlockSpec((rows, _DEPTH), lambda k: (tile, where + k), transforms=memory),
                plgpu.BlockSpec((_TERMS * outputs, _DEPTH), lambda k: (0, where + k), transforms=memory),
            ],
            max_concurrent_steps=config.stages,
            init_carry=(
                [plgpu.layout_cast(jnp.zeros((_WAVE, outputs), f32), plgpu.Layout.WGMMA)] * len(waves),
                plgpu.layout_cast(jnp.zeros((rows, _DEPTH), f32), strips),
            ),
        )
        sums, squares = pipeline(x_ref, fn_ref)
        for i, found in enumerate(sums):
            _mosaic.store(parts_ref.at[split, pl.ds(tile * rows + i * _WAVE, _WAVE)], found)
        _mosaic.store(squares_ref.at[split, pl.ds(tile * rows, rows)], jnp.sum(squares, axis=1))

    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((config.splits, tiles * rows, outputs), f32),
            jax.ShapeDtypeStruct((config.splits, tiles * rows), f32),
        ],
        grid=(tiles, config.splits),
        grid_names=("tile", "split"),
        kernel_name="mhc_products",
    )(x, weights)


def _add_terms(sums: jax.Array, found: jax.Array) -> jax.Array:
    """Sums [rows, O] and the products [rows, 3 O] with the parts of weights, the smallest first."""
    outputs = sums.shape[1]
    for i in reversed(range(_TERMS)):
        sums = sums + found[:, i * outputs : (i + 1) * outputs]
    return sums


def _by_coefficient(post: jax.Array, comb: jax.Array, rows: int) -> jax.Array:
    """[C C + C, rows], comb before post: the coefficients of some tokens are one load each."""
    N, C, _ = comb.shape
    gates = jnp.concatenate([comb.reshape(N, C * C), post], 1).T
    return jnp.pad(gates, ((0, 0), (0, rows - N)))


def _updated_products(config: Config, x, y, post, comb, weights) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Streams [N, C M] after `mhc_post`, and what `products` makes of them: one pass over memory."""
    (N, M), outputs, rows = y.shape, weights.shape[0] // _TERMS, config.rows
    C, tiles = x.shape[1] // M, -(-N // rows)
    steps, few = M // (config.splits * _DEPTH), 16
    strips, memory = _mosaic.strips(jnp.bfloat16, 128), _inline.span()

    def body(r_ref, y_ref, fn_ref, gates_ref, o_ref, parts_ref, squares_ref, o_smem):
        tile, split = lax.axis_index("tile"), lax.axis_index("split")

        def updated(part, inputs, outs):
            """Update 16 tokens; returns the sums of squares over streams."""
            at, tokens = pl.ds(part * few, few), pl.ds(tile * rows + part * few, few)

            def load(ref):
                return _inline_memory.load_span(ref.at[at], strips).astype(f32)

            def gate(i):
                values = plgpu.load(gates_ref.at[i, tokens], layout=strips.reduce(1), optimized=False)
                return lax.broadcast_in_dim(values, (few, _DEPTH), [0])

            *streams, out = map(load, inputs)
            squares = 0.0
            for j, ref in enumerate(outs):
                mixed = update.mixed(streams, out, [gate(i * C + j) for i in range(C)], gate(C * C + j))
                mixed = mixed.astype(jnp.bfloat16)
                _inline_memory.store_span(ref.at[at], mixed, strips)
                squares = squares + mixed.astype(f32) * mixed.astype(f32)
            return jnp.sum(squares, axis=1)

        def step(index, *refs):
            inputs, fns, (sums, before), [k] = refs[: C + 1], refs[C + 1 : -1], refs[-1], index
            outs = [o_smem.at[k & 1, i] for i in range(C)]
            plgpu.wait_smem_to_gmem(C, wait_read_only=True)  # of the step before the last
            squares = [x + updated(part, inputs, outs) for part, x in enumerate(before)]
            plgpu.commit_smem()
            for i, numbers in enumerate(outs):
                there = o_ref.at[pl.ds(tile * rows, rows), pl.ds((first(i) + k) * _DEPTH, _DEPTH)]
                plgpu.copy_smem_to_gmem(numbers, there)

            for numbers, weights in zip(outs, fns, strict=True):
                sums = _add_terms(sums, _inline.settle(_inline.start(numbers, weights), 0))
            plgpu.commit_smem()  # all warps have read before the next copy is told to overwrite
            return sums, squares

        def first(stream):
            """The first block of columns."""
            return stream * (M // _DEPTH) + split * steps

        def columns(height, row, stream):
            return plgpu.BlockSpec((height, _DEPTH), lambda k: (row, first(stream) + k), transforms=memory)

        pipeline = plgpu.emit_pipeline(
            step,
            grid=(steps,),
            in_specs=[
                *(columns(rows, tile, i) for i in range(C)),
                columns(rows, tile, 0),
                *(columns(_TERMS * outputs, 0, i) for i in range(C)),
            ],
            max_concurrent_steps=config.stages,
            init_carry=(
                plgpu.layout_cast(jnp.zeros((rows, outputs), f32), plgpu.Layout.WGMMA),
                [plgpu.layout_cast(jnp.zeros(few, f32), strips.reduce(1))] * (rows // few),
            ),
        )
        sums, squares = pipeline(*[r_ref] * C, y_ref, *[fn_ref] * C)
        _mosaic.store(parts_ref.at[split, pl.ds(tile * rows, rows)], sums)
        for part, x in enumerate(squares):
            _mosaic.store(squares_ref.at[split, pl.ds(tile * rows + part * few, few)], x)
        plgpu.wait_smem_to_gmem(0)

    streams, parts, squares = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((config.splits, tiles * rows, outputs), f32),
            jax.ShapeDtypeStruct((config.splits, tiles * rows), f32),
        ],
        grid=(tiles, config.splits),
        grid_names=("tile", "split"),
        scratch_types=[plgpu.SMEM((2, C, rows, _DEPTH), x.dtype, transforms=memory)],
        kernel_name="mhc_updated_products",
    )(x, y, weights, _by_coefficient(post, comb, tiles * rows))
    return streams, parts, squares


# ---------------------------------------------------------------- gates, matrices, the layer's input
def _token_lanes() -> Any:
    """[32, 4, 4]: a row of a token in each lane."""
    tiling = plgpu.Tiling(((_TOKENS, _STREAMS, _STREAMS), (8, _STREAMS, _STREAMS)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-6,), lane_dims=(-3, -2), vector_dim=-1)


def _finish(x, parts, squares, scale, base, *, C, span, eps, rms_eps, **numbers) -> tuple[jax.Array, ...]:
    """Layer input, output gates and matrices of the streams [N, C M]."""
    N, M = x.shape[0], x.shape[1] // C
    gates, blocks, matrices = _matrices(parts, N, C, M, eps=eps, rms_eps=rms_eps, **numbers)
    count, mixing = mixers(N, C, M, span)

    def body(x_ref, parts_ref, squares_ref, scale_ref, base_ref, o_ref, post_ref, comb_ref):
        index, given = lax.axis_index("block"), (parts_ref, squares_ref, scale_ref, base_ref)

        @pl.when(index < blocks)
        def _():
            matrices(index, *given, post_ref, comb_ref)

        @pl.when(index >= blocks)
        def _():
            mixing(index - blocks, x_ref, o_ref, given, eps, rms_eps)

    x, post, comb = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((N, M), x.dtype), *gates],
        grid=(blocks + count,),
        grid_names=("block",),
        kernel_name="mhc_finish",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),  # no thread reads what it writes
    )(x, _by_kind(parts, C), squares, scale, base.reshape(-1, C))
    return x, post[:N], comb[:N]


def _finish_matrices(N, M, parts, squares, scale, base, *, C, **numbers) -> tuple[jax.Array, ...]:
    """Output gates and matrices alone."""
    gates, blocks, matrices = _matrices(parts, N, C, M, unrolled=True, **numbers)

    def body(*refs):
        matrices(lax.axis_index("block"), *refs)

    post, comb = plgpu.kernel(
        body,
        out_type=gates,
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="mhc_matrices",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),  # no thread reads what it writes
    )(_by_kind(parts, C), squares, scale, base.reshape(-1, C))
    return post[:N], comb[:N]


def _by_kind(parts: jax.Array, C: int) -> jax.Array:
    """Parts [splits, rows, O] as [splits, rows, O / C, C]: of input gates, of output gates, of rows of matrices."""
    splits, rows, outputs = parts.shape
    return parts.reshape(splits, rows, outputs // C, C)


def _matrices(
    parts, N, C, M, *, iters, post_mult, eps, rms_eps, unrolled=False
) -> tuple[list[Any], int, Callable[..., None]]:
    """Types of output gates and matrices, how many thread blocks make them, and what block `index` does.

    `do(index, parts, squares, scale, base, post, comb)` of references; parts as `_by_kind`, base [O / C, C].
    """
    (splits, padded, _), tokens = parts.shape, _TOKENS
    blocks = -(-N // tokens)
    assert blocks * tokens <= padded
    gates = [jax.ShapeDtypeStruct((blocks * tokens, *one), f32) for one in ((C,), (C, C))]
    lanes, shape = _token_lanes(), (tokens, C, C)
    row, one = lanes.reduce(1), lanes.reduce(2).reduce(1)

    def load(ref, kind):
        return plgpu.load(ref, layout=kind, optimized=False)

    def total(pick, kind):
        if unrolled:  # all loads are under way at once
            return functools.reduce(operator.add, [load(pick(i), kind) for i in range(splits)])
        return lax.fori_loop(1, splits, lambda i, found: found + load(pick(i), kind), load(pick(0), kind))

    def divided(a, axis, smallest):
        """`a` over its sums along an axis."""
        return a * lax.broadcast_in_dim(_inverse(jnp.sum(a, axis) + smallest, lanes.reduce(axis)), shape, [0, 3 - axis])

    def matrices(block, parts_ref, squares_ref, scale_ref, base_ref, post_ref, comb_ref):
        at = pl.ds(block * tokens, tokens)
        mean = total(lambda i: squares_ref.at[i, at], one)
        mean = _mosaic.divide(mean, jnp.full_like(mean, C * M), one) + rms_eps
        root = _mosaic.pointwise("sqrt.rn.f32", jnp.sqrt, one, mean)
        norm = _mosaic.divide(jnp.full_like(root, 1.0), root, one)
        u = total(lambda i: parts_ref.at[i, at, 1], row) * lax.broadcast_in_dim(norm, shape[:2], [0])
        u = u * scale_ref[1] + lax.broadcast_in_dim(load(base_ref.at[1], row.reduce(0)), u.shape, [1])
        _mosaic.store(post_ref.at[at], _mosaic.divide(jnp.full_like(u, 1.0), 1 + jnp.exp(-u), row) * post_mult)
        a = total(lambda i: parts_ref.at[i, at, pl.ds(2, C)], lanes) * lax.broadcast_in_dim(norm, shape, [0])
        bias = load(base_ref.at[pl.ds(2, C)], lanes.reduce(0))
        a = a * scale_ref[2] + lax.broadcast_in_dim(bias, shape, [1, 2])
        a = jnp.exp(a - lax.broadcast_in_dim(jnp.max(a, 2), shape, [0, 1]))
        a = divided(divided(a, 2, 0.0) + eps, 1, eps)
        a = lax.fori_loop(0, iters - 1, lambda _, a: divided(divided(a, 2, eps), 1, eps), a)
        _mosaic.store(comb_ref.at[at], a)

    return gates, blocks, matrices


def _inverse(x: jax.Array, layout: Any) -> jax.Array:
    """`1 / x` within one unit in the last place, for x far from the ends of float32's range.

    An exact division branches, so that those of a matrix follow each other; this is four instructions.
    """

    def fma(*args):
        return _mosaic.pointwise("fma.rn.f32", lambda a, b, c: a * b + c, layout, *args)

    first = _mosaic.pointwise("rcp.approx.ftz.f32", lambda x: 1 / x, layout, x)
    return fma(first, fma(-x, first, jnp.full_like(x, 1.0)), first)


def mixers(N: int, C: int, M: int, span: int) -> tuple[int, Callable[..., None]]:
    """How many thread blocks mix, and what block `index` does: `do(index, x, o, references of gates, eps, rms_eps)`.

    x is [N, C M], o [N, M]. `span` are the columns of a split, the last of which the products read last. The references
    are parts [splits, rows, O / C, C] of products, [splits, rows] of squares, scale and base [O / C, C].
    """
    columns = next(c for c in (1024, 512, 256) if M % c == 0)
    kind = update.layout(columns, 2)
    # a block's columns have one distance from the end of a split
    span = min(span, M)
    span = span if span % columns == 0 and M % span == 0 else M
    levels, starts = span // columns, range(0, M, span)

    def mix(index, x_ref, o_ref, of_gates, eps, rms_eps):
        parts_ref, squares_ref, scale_ref, base_ref = of_gates
        turn, index = (lax.div(index, jnp.int32(N)), lax.rem(index, jnp.int32(N))) if levels > 1 else (0, index)
        token, level = N - 1 - index, levels - 1 - turn

        def load(start):
            here = [pl.ds(i * M + start + level * columns, columns) for i in range(C)]
            return [plgpu.load(x_ref.at[token, columns], layout=kind, optimized=False) for columns in here]

        early = [load(start) for start in starts[:_EARLY]]
        gates = _input_gates(C, M, token, parts_ref, squares_ref, scale_ref, base_ref, eps, rms_eps)
        for i, start in enumerate(starts):
            early += [load(later) for later in starts[i + _EARLY : i + _EARLY + 1]]
            out = early[i][0].astype(f32) * gates[0]
            for x, gate in zip(early[i][1:], gates[1:], strict=True):
                out += x.astype(f32) * gate
            _mosaic.store(o_ref.at[token, pl.ds(start + level * columns, columns)], out.astype(o_ref.dtype))

    return N * levels, mix


def _input_gates(C, M, token, parts_ref, squares_ref, scale_ref, base_ref, eps, rms_eps) -> list:
    """The input gates of a token, scalars; all parts are loaded before any is added."""

    def part(i):
        return [squares_ref[i, token], *(parts_ref[i, token, 0, stream] for stream in range(C))]

    parts = map(part, range(squares_ref.shape[0]))
    squares, *u = (functools.reduce(operator.add, x) for x in zip(*parts, strict=True))
    norm = lax.rsqrt(squares * (1 / (C * M)) + rms_eps)
    return [1 / (1 + jnp.exp(-(x * norm * scale_ref[0] + base_ref[0, i]))) + eps for i, x in enumerate(u)]
