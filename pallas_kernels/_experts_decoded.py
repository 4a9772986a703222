"""Experts with weights of four bits on Mosaic GPU (Hopper), decoded in registers; see `jaxattn.ops.experts`.

Two grouped products as in `pallas_kernels.experts`, but transposed: the weight is wgmma's A operand, which may come
from registers, and a tile is 64 features of each warpgroup by `tokens` rows of one expert, gate and up halves in the
same registers. Weights and scales are loaded as checkpoints have them (`_nibbles`): nothing is packed or padded.

Activations are 16-bit numbers (FP8 codes times powers of two are exact in bfloat16), or with `eight` float8_e4m3fn
codes: then an instruction multiplies 32 inputs, and the scales of both sides are applied to its float32 result; with
`codes` 128 inputs, see `_expert_codes`.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _decode, _expert_codes, _expert_rows, _inline, _mosaic, _nibbles, _requantize, _routing
from pallas_kernels._decoded_config import Config, configs, default_config, illegal, why_not
from pallas_kernels._decoded_plan import Plan
from pallas_kernels._gated import Activation
from pallas_kernels._nibbles import FEATURES, INPUTS

PARTS = {1: 80, 2: 80, 3: 48, 4: 32}
"""Registers of a thread for 8-bit products that are under way."""
ALIGNED = 4
"""Lines of at least eight float32 numbers that keep to the 128 bytes that TMA wants in shared memory."""
EARLY = 32
"""Rows of a tile up to which their weights are loaded before its sums are formed."""
COLUMN = plgpu.Layout.WGMMA.reduce(0)
__all__ = ("Config", "configs", "default_config", "experts", "illegal", "stages", "why_not")

f32, i32 = jnp.float32, jnp.int32


# ---------------------------------------------------------------- launch
def experts(**args) -> jax.Array:
    """`jaxattn.experts` of prepared arguments, see `stages`."""
    found = stages(**args)
    return found.tiles.combine(found.y)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """What the products leave behind, by rows of `tiles`."""

    tiles: _routing.Tiles
    a: jax.Array
    """Between the products, as the second one takes it: its inputs are in the order of `_nibbles.permute`."""
    a_scale: jax.Array | None
    """float32 [K / group, rows], with `Config.eight`."""
    y: jax.Array


def stages(
    *,
    config: Config,
    quantize: Callable[[jax.Array], tuple[jax.Array, jax.Array | None]] | None,
    x,
    w13,
    w2,
    weights,
    ids,
    format,
    w13_scale,
    w2_scale,
    w13_zeros,
    w2_zeros,
    w13_scale_2,
    w2_scale_2,
    w13_bias,
    w2_bias,
    act_group,
    ue8m0,
    activation,
    limit,
    alpha,
    beta,
    weight_on,
    expert_map,
    **_,
) -> Stages:
    """Run the products on prepared arguments of `jaxattn.experts`.

    `quantize(rows)` gives activations in the dtype of x, or with `config.eight` codes and scales [K / group, R].

    Raises:
        ValueError: `config` does not fit these arguments.
    """
    M, E, F = x.shape[1], w13.shape[0], w13.shape[1] // 2
    if reason := illegal(config, format=format, act_group=act_group, ue8m0=ue8m0, sizes=(M, F)):
        raise ValueError(f"experts: {reason}")
    which = _routing.local_experts(ids, E, expert_map)
    tiles = _routing.sorted_tiles(which, weights, E, config.tokens // config.block, config.block)
    late, turns = weight_on == "output", activation == "swigluoai"
    act = Activation(kind=activation, limit=limit, alpha=alpha, beta=beta, rounded=late and activation == "silu")
    product = functools.partial(_grouped, config, tiles, format=format, late=late, narrow=x.dtype)
    codes, scale = (x, None) if quantize is None else quantize(x)
    fused = config.fused and ue8m0 and (config.warpgroups == 2 if config.codes else act_group == _requantize.GROUP)
    a, scale = product(
        tiles.rows(_expert_codes.permute(codes) if config.codes else _nibbles.permute(codes)),
        w13.reshape((E, F, 2, M // 2) if turns else (E, 2, F, M // 2)),
        F,
        act=act,
        row_scale=None if scale is None else tiles.scales(scale),
        scale=_by_half(w13_scale, F, turns),
        zeros=_by_half(w13_zeros, F, turns),
        weight_scale=w13_scale_2,
        bias=None if w13_bias is None else _halves(w13_bias.astype(f32), turns),
        weights=None if late else tiles.weights,
        out_dtype=x.dtype if quantize is None or late or fused else f32,
        permuted=quantize is None or (config.codes and not fused),
        encoded=fused,
    )
    if quantize is not None and not fused:
        a, scale = quantize(a)
        a = a if config.codes else _nibbles.permute(a)  # groups of 128 hold what is permuted
    y, _ = product(
        a,
        w2,
        M,
        row_scale=scale,
        scale=w2_scale[:, None],
        zeros=None if w2_zeros is None else w2_zeros[:, None],
        weight_scale=w2_scale_2,
        bias=None if w2_bias is None else w2_bias.astype(f32),
        weights=tiles.weights if late or w2_bias is not None else None,
        out_dtype=x.dtype,
    )
    return Stages(tiles=tiles, a=a, a_scale=scale, y=y)


def _by_half(x, F, turns):
    """Scales or zero points of gates and of ups: [E, 2, N, G]; in turn [E, F, 2, G], or [E, F, 1, G] in one byte."""
    if x is None:
        return None
    E, N, G = x.shape
    return x.reshape((E, F, N // F, G) if turns else (E, 2, N // 2, G))


def _halves(bias, turns):
    """Biases of gates and of ups, [2, E, F]."""
    E, width = bias.shape
    return bias.reshape(E, width // 2, 2).transpose(2, 0, 1) if turns else bias.reshape(E, 2, width // 2).swapaxes(0, 1)


def _grouped(
    config,
    tiles,
    rows,
    w,
    N,
    *,
    format,
    late,
    narrow,
    out_dtype,
    scale,
    row_scale,
    act=None,
    permuted=False,
    encoded=False,
    **arrays,
):
    """Rows of all tiles times their experts' weights, with the epilogue: [tiles.size, N], and scales or None."""
    K = rows.shape[1]
    kind = {"mxfp4": "ue8m0", "nvfp4": "e4m3"}.get(format, "value")
    code = _decode.Code(
        kind="u4" if format == "wna16" else "e2m1",
        dtype=jnp.dtype(narrow),
        scale="value",
        groups=2,
        zeros=arrays["zeros"] is not None,
        lowered=format != "wna16",
    )
    x = Plan(
        config=config,
        act=act,
        code=code,
        kind=kind,
        group=K // scale.shape[-1],
        late=late,
        N=N,
        K=K,
        unit=tiles.unit,
        narrow=jnp.dtype(narrow),
        out_dtype=jnp.dtype(jnp.uint8 if encoded and config.eight else out_dtype),
        permuted=permuted,
        encoded=encoded,
        row_scales=0 if row_scale is None else -(-INPUTS * row_scale.shape[0] // K),
    )
    inputs = {"count": tiles.count, "experts": tiles.experts, "starts": tiles.starts, "filled": tiles.filled}
    inputs |= {"rows": rows, "w": w, "scale": _nibbles.raw(scale)}
    arrays |= {"row_scale": row_scale}
    inputs |= {name: a for name, a in arrays.items() if a is not None}

    out = {"o": jax.ShapeDtypeStruct((tiles.size, N), x.out_dtype)}
    if x.codes:
        out["o_scale"] = jax.ShapeDtypeStruct((N // x.shared, tiles.size), f32)

    def body(*refs, **scratch):
        given = dict(zip((*inputs, *out), refs, strict=True))
        _block(x, SimpleNamespace(**dict.fromkeys(arrays) | given | scratch))

    blocks = min(_mosaic.num_sms(), tiles.experts.shape[0] * x.across)
    found = plgpu.kernel(
        body,
        out_type=list(out.values()),
        scratch_types=_scratch(x),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="decoded_experts_up" if act else "decoded_experts_down",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*inputs.values())
    return (lax.bitcast_convert_type(found[0], _requantize.E4M3), found[1]) if x.codes else (found[0], None)


def _scratch(x: Plan) -> dict[str, Any]:
    c = x.config
    rows = (c.stages, x.parts, c.tokens, INPUTS) if c.eight else (c.stages, x.parts, 2, c.tokens, INPUTS // 2)
    copies = 3 + x.parts if c.eight else 2 + 2 * x.parts
    span = c.inputs // 2
    kind = jnp.dtype(jnp.float8_e4m3fn) if c.eight else x.code.dtype
    scratch = {
        "w_ring": plgpu.SMEM((c.stages, 2, x.features, span), jnp.uint8, transforms=_inline.span(span)),
        "x_ring": plgpu.SMEM(rows, kind, transforms=_inline.span()),
        "tile": plgpu.SMEM(
            (c.warpgroups, c.tokens if x.together else x.piece, FEATURES),
            x.out_dtype,
            transforms=_inline.span() if x.swizzled else (),
        ),
        "full": plgpu.Barrier(num_arrivals=copies + c.staged, num_barriers=c.stages),
        "empty": plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.stages),
    }
    if c.eight:
        scratch["scale_ring"] = plgpu.SMEM((c.stages, x.parts * ALIGNED, c.tokens), f32)
    if c.codes:
        scratch["table_ring"] = plgpu.SMEM((c.stages, x.parts, 2, x.features, 8), i32)
        scratch["power_ring"] = plgpu.SMEM((c.stages, x.parts, 2, x.features), f32)
        if c.overlap > 1:
            scratch["meeting"] = plgpu.Barrier(num_arrivals=1, num_barriers=c.warpgroups)
    elif c.staged:
        scratch["power_ring"] = plgpu.SMEM((c.stages, x.parts, 2, x.features, 4), f32)
    if x.encoded:
        scratch["tops"] = plgpu.SMEM((2, 4 * c.warpgroups, c.tokens) if c.codes else (c.warpgroups, 4, c.tokens), f32)
        if c.codes:
            scratch["together"] = plgpu.Barrier(num_arrivals=c.warpgroups)
    if x.codes:
        scratch["tops_tile"] = plgpu.SMEM((c.warpgroups, ALIGNED, x.piece), f32)
    return scratch


# ---------------------------------------------------------------- device code
def _block(x: Plan, r: Any) -> None:
    """One thread block: the warpgroup that loads and those that multiply."""
    c, blocks, me = x.config, lax.axis_size("block"), lax.axis_index("block")
    warpgroup = lax.axis_index("warpgroup")
    registers = c.registers
    count = _expert_rows.share(r.count[0] * x.across, blocks, me)

    def place(turn):
        """Tile, its features, and the number of its first step."""
        at = me + turn * blocks
        tile = lax.div(at, i32(x.across))
        return tile, at - tile * x.across, turn * x.steps

    @pl.when(warpgroup == c.warpgroups)
    def _():
        if registers:
            plgpu.set_max_registers(registers[0], action="decrease")

        def load(turn, _):
            if x.parts > 1 or c.codes:
                _prefetch_scales(x, r, *place(jnp.minimum(turn + 1, count - 1))[:2])
            _load(x, r, *place(turn))

        lax.fori_loop(0, count, load, None)
        total = count * x.steps
        for i in range(1, c.stages + 1):  # nobody leaves while slots are in use
            pl.when(total >= i)(lambda i=i: plgpu.barrier_wait(r.empty.at[lax.rem(total - i, i32(c.stages))]))

    @pl.when(warpgroup < c.warpgroups)
    def _():
        if registers:
            plgpu.set_max_registers(registers[1], action="increase")
        lax.fori_loop(0, count, lambda turn, _: _multiply(x, r, warpgroup, *place(turn)), None)
        plgpu.wait_smem_to_gmem(0)


def _load(x: Plan, r: Any, tile, across, first) -> None:
    """Fetch one tile's rows and weights, step by step; what lies outside becomes zero."""
    c = x.config
    expert, rows = r.experts[tile], pl.ds(r.starts[tile] * x.unit, c.tokens)

    def weight(half, inputs):
        if x.act is None:
            return r.w.at[expert, pl.ds(across * x.width + half * x.features, x.features), inputs]
        features = pl.ds(across * x.features, x.features)
        return r.w.at[expert, features, half, inputs] if x.turns else r.w.at[expert, half, features, inputs]

    def ahead(k):
        """The scales of a step, as they are, for `c.staged`."""
        if not c.staged:
            return ()
        return tuple(
            _nibbles.load_lines(lines, expert, start, k * x.parts + part, x.features, x.N - FEATURES)
            for part in range(x.parts)
            for lines, start in _halves_of(x, r, across)
        )

    def step(k, words):
        at = first + k
        slot = lax.rem(at, i32(c.stages))
        pl.when(at >= c.stages)(lambda: plgpu.barrier_wait(r.empty.at[slot]))
        full = r.full.at[slot]
        for half in range(2):
            inputs = pl.ds(k * (c.inputs // 2), c.inputs // 2)
            plgpu.copy_gmem_to_smem(weight(half, inputs), r.w_ring.at[slot, half], full)
        for part in range(x.parts):
            at = k * c.inputs + part * INPUTS
            if c.eight:
                plgpu.copy_gmem_to_smem(r.rows.at[rows, pl.ds(at, INPUTS)], r.x_ring.at[slot, part], full)
            for half in () if c.eight else range(2):
                inputs = pl.ds(at + half * (INPUTS // 2), INPUTS // 2)
                plgpu.copy_gmem_to_smem(r.rows.at[rows, inputs], r.x_ring.at[slot, part, half], full)
        if c.eight:
            count = x.parts * x.row_scales
            scales = r.row_scale.at[pl.ds(k * count, count), rows]
            plgpu.copy_gmem_to_smem(scales, r.scale_ring.at[slot, pl.ds(0, count)], full)
        for i, given in enumerate(words):
            which = slot, i // 2, i % 2
            if c.codes:
                _expert_codes.store_tables(r.table_ring.at[which], r.power_ring.at[which], given)
            else:
                _nibbles.store_powers(r.power_ring.at[which], given)
        if c.staged:
            plgpu.barrier_arrive(full)
        return ahead(jnp.minimum(k + 1, x.steps - 1))

    lax.fori_loop(0, x.steps, step, ahead(i32(0)))


def _halves_of(x: Plan, r: Any, across) -> list:
    """Of both halves of a tile where the weights' scales lie, and their first feature."""
    return [(_lines(x, r.scale, i), across * x.width + (0 if x.act else i * x.features)) for i in range(2)]


def _prefetch_scales(x: Plan, r: Any, tile, across) -> None:
    """Fetch a tile's scales to the L2 cache."""
    for lines, start in _halves_of(x, r, across):
        _nibbles.prefetch_lines(lines, r.experts[tile], start, x.features, x.N - FEATURES)


def _multiply(x: Plan, r: Any, warpgroup, tile, across, first) -> None:
    """Two times 64 features of one tile."""
    c, expert = x.config, r.experts[tile]
    column = [across * x.width + (0 if x.act else half * x.features) + warpgroup * FEATURES for half in range(2)]
    inside = [jnp.minimum(at, x.N - FEATURES) for at in column]  # what is outside is not stored
    row, filled = r.starts[tile] * x.unit, r.filled[tile]
    factor = 2.0**-_expert_codes.LIFT if c.codes else 2.0**_nibbles.LIFT8 if c.eight else _nibbles.lifted(x.code)
    if r.weight_scale is not None:
        factor = r.weight_scale[expert] * factor

    def routing():
        if r.weights is None:
            return None
        return plgpu.load(r.weights.at[pl.ds(row, c.tokens)], layout=COLUMN, optimized=False)

    early = c.tokens <= EARLY
    weights = routing() if early else None
    how = _expert_codes.sums if c.codes else _sums8 if c.eight else _sums16
    sums = how(x, r, warpgroup, expert, inside, first)
    weights = weights if early else routing()
    if r.weight_scale is not None or factor != 1:
        sums = tuple(part * factor for part in sums)
    values = _finished(x, r, sums, expert, inside, weights)
    scale: Any = None
    if x.encoded:
        value = values[0].astype(x.narrow).astype(f32) if x.late else values[0]
        scale, inverse = _scales(x, r, warpgroup, value, first)
        values = (value * inverse,) if x.codes else (_requantize.rounded(value, scale, inverse),)
    for at, value in zip(column, values, strict=False):
        if x.together:
            _leave_together(x, r, warpgroup, at, row, value, filled)
        for i in range(0 if x.together else c.tokens // x.piece):
            columns = slice(i * x.piece, (i + 1) * x.piece)
            given = value[:, columns], scale[:, columns] if x.codes else None
            pl.when(i < filled)(lambda at=at, i=i, given=given: _leave(x, r, warpgroup, at, row + i * x.piece, *given))


def _scales(x: Plan, r: Any, warpgroup, value, first) -> tuple[jax.Array, jax.Array]:
    """Of groups, and their inverses; for those of 128 one warpgroup may be a tile ahead of the other, but no more."""
    if not x.config.codes:
        return _requantize.scales(value, r.tops.at[warpgroup])
    tops = r.tops.at[lax.rem(lax.div(first, i32(x.steps)), i32(2))]
    _requantize.leave_tops(value, tops.at[pl.ds(4 * warpgroup, 4)])
    plgpu.barrier_arrive(r.together)
    plgpu.barrier_wait(r.together)
    return _requantize.joint_scales(tops)


def _leave(x: Plan, r: Any, warpgroup, column, row, value, scale) -> None:
    """Write some rows of 64 features; TMA leaves out what lies outside the output."""
    tile, rows = r.tile.at[warpgroup], pl.ds(row, x.piece)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if x.codes:
        _requantize.store_codes(tile, value, x.config.codes)
        _requantize.store_scales(r.tops_tile.at[warpgroup, pl.ds(0, x.groups)], scale)
    else:
        _store(x, tile, value)
    plgpu.commit_smem()

    @pl.when(column < x.N)
    def _():
        plgpu.copy_smem_to_gmem(tile, r.o.at[rows, pl.ds(column, FEATURES)])
        if x.codes:
            groups = pl.ds(lax.div(column, i32(x.shared)), x.groups)
            scales, first = r.tops_tile.at[warpgroup, pl.ds(0, x.groups)], lax.rem(column, i32(x.shared)) == 0
            pl.when(first)(lambda: plgpu.copy_smem_to_gmem(scales, r.o_scale.at[groups, rows]))


def _leave_together(x: Plan, r: Any, warpgroup, column, row, value, filled) -> None:
    """`_leave` of all rows of a tile, with one wait."""
    tile = r.tile.at[warpgroup]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    _store(x, tile, value)
    plgpu.commit_smem()
    for i in range(x.config.tokens // x.piece):

        @pl.when((column < x.N) & (i < filled))
        def _(i=i):
            rows = pl.ds(row + i * x.piece, x.piece)
            plgpu.copy_smem_to_gmem(tile.at[pl.ds(i * x.piece, x.piece)], r.o.at[rows, pl.ds(column, FEATURES)])


def _store(x: Plan, tile, value) -> None:
    if x.permuted and x.config.codes:
        order = _expert_codes.ORDER
    else:
        order = _nibbles.ORDER if x.permuted or x.encoded else _inline.AS_IT_IS
    _inline.store_transposed(tile, value.astype(x.out_dtype), x.swizzled, order)


def _lines(x: Plan, ref, half: int, nibbles: bool = False) -> Any:
    return _nibbles.Lines(ref, half=half if x.act else 0, turns=x.turns, nibbles=nibbles)


def _steps(x: Plan, r: Any, first, ahead, add, whole: bool = False) -> tuple:
    """Sums over all inputs: `ahead(tile)` loads what a tile of inputs needs besides, one before `add` takes it.

    `add` gets the tiles of a step one by one, or all with `whole`, where `ahead` has nothing to do.
    """
    c, last = x.config, x.steps * x.parts - 1
    turns = [(*range(x.parts),)] if whole else [(part,) for part in range(x.parts)]

    def step(k, carry):
        sums, now = carry
        slot = lax.rem(first + k, i32(c.stages))
        for part, tiles in enumerate(turns):
            later = ahead(jnp.minimum(k * x.parts + part + 1, last))
            if part == 0:
                plgpu.barrier_wait(r.full.at[slot])
            sums, now = add(slot, tiles, sums, now), later
        _inline.release_reads()
        plgpu.barrier_arrive(r.empty.at[slot])
        return sums, now

    zero = plgpu.layout_cast(jnp.zeros((FEATURES, c.tokens), f32), _inline.WGMMA)
    return lax.fori_loop(0, x.steps, step, ((zero, zero), ahead(i32(0))))[0]


def _sums16(x: Plan, r: Any, warpgroup, expert, features, first) -> tuple:
    def ahead(k):
        scales = tuple(
            _nibbles.load(_lines(x, r.scale, half), expert, at, k, x.group) for half, at in enumerate(features)
        )
        if r.zeros is None:
            return scales, None
        return scales, tuple(
            _nibbles.load(_lines(x, r.zeros, half, True), expert, at, k, x.group) for half, at in enumerate(features)
        )

    def add(slot, tiles, sums, now):
        (part,) = tiles
        words = [r.w_ring.at[slot, half, pl.ds(warpgroup * FEATURES, FEATURES)] for half in range(2)]
        scales, zeros = now
        return _nibbles.multiply(x.code, x.kind, sums, words, scales, zeros, r.x_ring.at[slot, part], part)

    def start(slot, part, half, sums, now):
        words = r.w_ring.at[slot, half, pl.ds(warpgroup * FEATURES, FEATURES)]
        scales, zeros = now
        zeros = None if zeros is None else zeros[half]
        return _nibbles.start(x.code, x.kind, sums, words, scales[half], zeros, r.x_ring.at[slot, part], part)

    return _steps(x, r, first, ahead, add) if x.config.overlap == 1 else _overlapped(x, r, first, ahead, start)


def _overlapped(x: Plan, r: Any, first, ahead, start) -> tuple:
    """`_steps` by several: one half is decoded while the other one multiplies, and all is waited for at their end."""
    c, groups, last = x.config, 2, x.steps * x.parts - 1

    def release(k):
        _inline.release_reads()
        plgpu.barrier_arrive(r.empty.at[lax.rem(first + k, i32(c.stages))])

    def together(k, carry, count):
        (gate, up), now = carry
        for i, part in [(i, part) for i in range(count) for part in range(x.parts)]:
            later = ahead(jnp.minimum((k + i) * x.parts + part + 1, last))
            slot = lax.rem(first + k + i, i32(c.stages))
            if part == 0:
                plgpu.barrier_wait(r.full.at[slot])
            gate = start(slot, part, 0, _inline.settle(gate, groups) if i + part else gate, now)
            if i + part:
                up = _inline.settle(up, groups)
            if i and part == 0:
                release(k + i - 1)
            up = start(slot, part, 1, up, now)
            now = later
        gate, up = _inline.settle(gate, 0), _inline.settle(up, 0)
        release(k + count - 1)
        return (gate, up), now

    zero = plgpu.layout_cast(jnp.zeros((FEATURES, c.tokens), f32), _inline.WGMMA)
    whole, rest = divmod(x.steps, c.overlap)
    carry = (zero, zero), ahead(i32(0))
    carry = lax.fori_loop(0, whole, lambda n, carry: together(n * c.overlap, carry, c.overlap), carry)
    return (together(i32(whole * c.overlap), carry, rest) if rest else carry)[0]


def _sums8(x: Plan, r: Any, warpgroup, expert, features, first) -> tuple:
    """With `staged` both halves of 32 inputs follow each other and share the scales of rows."""
    c, mine = x.config, pl.ds(warpgroup * FEATURES, FEATURES)

    def ahead(k):
        if c.staged:
            return ()
        return tuple(_nibbles.load_words(_lines(x, r.scale, half), expert, at, k) for half, at in enumerate(features))

    depth = max(2, min(8, 2 * PARTS[c.warpgroups] // c.tokens))
    order = [(i % 2, i // 2) if c.staged else (i // 4, i % 4) for i in range(8)]

    def row(slot, part, s):
        return plgpu.load(r.scale_ring.at[slot, (4 * part + s) * x.row_scales // 4], layout=COLUMN, optimized=False)

    def add(slot, tiles, sums, now):
        sums, todo, started = list(sums), [(tile, *at) for tile in tiles for at in order], []
        rows, powers = {}, {}

        def start(over=None):
            tile, half, s = todo.pop(0)
            if c.staged and (tile, half) not in powers:
                powers[tile, half] = _nibbles.load_powers(r.power_ring.at[slot, tile, half, mine])
            words = r.w_ring.at[slot, half, mine]
            started.append((tile, half, s, _nibbles.start8(words, r.x_ring.at[slot, tile], s, over, tile)))

        for _ in range(depth):
            start()
        while started:
            tile, half, s, part = started.pop(0)
            part = _inline.settle(part, len(started))
            if not (c.staged and (tile, s) in rows):
                rows[tile, s] = row(slot, tile, s)
            scaled = part * lax.broadcast_in_dim(rows[tile, s], part.shape, [1])
            power = powers[tile, half][s] if c.staged else _nibbles.power(now[half], s)
            sums[half] = _inline.add_scaled(sums[half], power, scaled)
            if todo:
                start(part)
        return tuple(sums)

    return _steps(x, r, first, ahead, add, whole=c.staged and c.warpgroups == 2)  # four have too few registers


def _finished(x: Plan, r: Any, sums, expert, features, weights) -> tuple:
    """The epilogue: bias, activation, routing weight; float32, one [64, tokens] for each half or for both."""
    shape = sums[0].shape
    spread = None if weights is None else lax.broadcast_in_dim(weights, shape, [1])

    def part(half):
        value = sums[half]
        if r.bias is None:
            return value
        where = (half, expert) if x.act else (expert,)
        line = plgpu.load(r.bias.at[(*where, pl.ds(features[half], FEATURES))], layout=_inline.ROW, optimized=False)
        bias = lax.broadcast_in_dim(line, shape, [0])
        return value + (bias * spread if spread is not None and not x.late and not x.act else bias)

    if x.act is None:
        parts = part(0), part(1)
        return tuple(value * spread for value in parts) if x.late and spread is not None else parts
    value = x.act(part(0), part(1), x.narrow)
    return (value if spread is None else value * spread,)
