"""Experts of a mixture on Mosaic GPU (Hopper): two grouped products with fused epilogues, see `jaxattn.ops.experts`.

A grouped product multiplies tiles of rows, each of one expert, with that expert's weight. Thread blocks stay and walk
over (tile of rows, tile of features); how many tiles there are and whose they are is read from global memory, so
routings never recompile and nothing waits for the host. One warpgroup loads pieces of 128 bytes of inputs by TMA into a
ring, one or two multiply 64 rows each.

The first product takes gate and up rows of the same features side by side, so that both halves of an activation lie in
the same registers; the second one's epilogue multiplies with the routing weights.

Two paths, chosen from shapes alone (`default_config`):

few tokens   every expert that is hit multiplies *all* tokens, which costs nothing beside reading its weights: no
             sorting, no copies. A row's results for experts that it did not choose are never read.
many tokens  rows are copied in the order of their experts, each expert filled up to 8 rows; a tile has up to 128.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _expert_rows, _expert_sums, _inline, _mosaic, _routing
from pallas_kernels._gated import Activation

SPAN = 128
"""Bytes of one step's inputs, and of the columns that are stored together: a swizzle span."""
BLOCK = 128
"""Inputs that share a scale in blocks."""
ROWS = 64
"""Rows of one warpgroup."""
MOST_SHARED = 64
"""Tokens up to which experts multiply all of them."""
DTYPES = ("bfloat16", "float16")
FP8 = ("fp8_tensor", "fp8_block")
UNIT = 8
"""Rows to a multiple of which each expert is filled up."""
DECODED = ("wna16", "mxfp4", "nvfp4")
"""Formats whose weights the caller hands over in the dtype of x."""
REGISTERS = (40, 232)
"""Of a thread that loads and of one that multiplies, where two warpgroups do."""
LOWEST = -33
"""Exponent of the least scale of a block of activations: that of `fp8_block`."""


f32, i32 = jnp.float32, jnp.int32
WGMMA, ROW, COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


# ---------------------------------------------------------------- configuration and legality
_KNOWN = {"multipliers": (1, 2), "half": (64, 128)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Path, shape of a tile and of the ring."""

    shared: bool = False
    """Every expert multiplies all tokens; at most `MOST_SHARED` of them."""
    multipliers: int = 2
    """Warpgroups that multiply, 64 rows each: 1 or 2."""
    half: int = 128
    """Half of the features of a tile: 64 or 128."""
    stages: int = 4
    """Steps in flight."""
    encode: bool = False
    """The first product's epilogue quantizes its results: `half=128` of blocks with scales that are powers of two."""

    def __post_init__(self):
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {_mosaic.either(known)}, got {getattr(self, name)}")
        if not 2 <= self.stages <= 12:
            raise ValueError(f"stages must lie between 2 and 12, got {self.stages}")
        if self.shared and self.multipliers > 1:
            raise ValueError(f"shared rows need one warpgroup that multiplies, got multipliers={self.multipliers}")


def why_not(*, x, w13, format, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence; shapes, dtypes and options are enough."""
    dtype = jnp.dtype(x.dtype).name
    if dtype not in DTYPES:
        return f"x must be {_mosaic.either(DTYPES)}, got {dtype}; tensor cores round float32 to TF32"
    if format in ("mxfp4", "nvfp4") and dtype != "bfloat16":
        return f"scales of {format} weights may leave the range of float16; use bfloat16"
    M, F = x.shape[1], w13.shape[1] // 2
    multiple = 64 if format in ("none", *DECODED) else 128
    if M % multiple or F % multiple:
        return f"M and F must be multiples of {multiple}, got M={M} and F={F}; pad the weights with zeros"
    if not x.shape[0]:
        return "there are no tokens"
    return None


def default_config(*, x, w13, ids, format, ue8m0=True, **_) -> Config:
    """Few tokens: share them, with narrow tiles and a long ring; else the tile that moves least."""
    (T, M), (E, F) = x.shape, (w13.shape[0], w13.shape[1] // 2)
    fits = F % 128 == 0 and M % 256 == 0
    wide = 128 if fits and format not in FP8 else 64
    if T <= MOST_SHARED:
        return Config(shared=True, multipliers=1, half=64, stages=8)
    if T * ids.shape[1] <= 64 * E:  # fewer than 64 rows an expert: the second warpgroup would idle
        return Config(multipliers=1, half=wide, stages=5 if wide == 128 else 8)
    if fits and format == "fp8_block":
        return Config(half=128, stages=4, encode=ue8m0)
    return Config(half=wide, stages=3 if wide == 128 else 5)


def configs(*, x, w13, ids, format, ue8m0=True, **_) -> Iterator[Config]:
    """Every configuration that fits the shapes and shared memory."""
    (T, M), F = x.shape, w13.shape[1] // 2
    shapes = itertools.product((64, 128), (1, 2), (3, 4, 5, 6, 8), (False, True), (False, True))
    for half, multipliers, stages, shared, encode in shapes:
        if shared and multipliers > 1:
            continue
        config = Config(shared=shared, multipliers=multipliers, half=half, stages=stages, encode=encode)
        if _illegal(config, T, M, F, format, ue8m0) is None:
            yield config


def _smem_bytes(c: Config) -> int:
    """Shared memory of one thread block, barriers included (generously)."""
    ring = c.stages * ((c.multipliers * ROWS + 2 * c.half) * SPAN + c.multipliers * ROWS * 4)
    return ring + 2 * c.multipliers * ROWS * SPAN + 1024


def _illegal(c: Config, T: int, M: int, F: int, format: str, ue8m0: bool = True) -> str | None:
    if c.encode and (c.half < BLOCK or format != "fp8_block" or not ue8m0):
        return (
            f"encode=True needs half={BLOCK} and format='fp8_block' with ue8m0=True, got half={c.half} and {format!r}"
        )
    if c.half > 64 and (F % c.half or M % (2 * c.half)):
        return f"half={c.half} needs F in multiples of {c.half} and M of {2 * c.half}, got F={F} and M={M}"
    if c.shared and T > MOST_SHARED:
        return f"shared rows are for at most {MOST_SHARED} tokens, got T={T}"
    if (used := _smem_bytes(c)) > _mosaic.SMEM_BYTES:
        given = f"multipliers={c.multipliers}, half={c.half}, stages={c.stages}"
        return f"{given} needs {used} bytes of shared memory, more than {_mosaic.SMEM_BYTES}; use fewer stages"
    return None


# ---------------------------------------------------------------- launch
def experts(
    *,
    config: Config,
    quantize: Callable[[jax.Array], tuple[jax.Array, jax.Array | None]],
    x,
    w13,
    w2,
    weights,
    ids,
    format,
    w13_scale,
    w2_scale,
    w13_bias,
    w2_bias,
    activation,
    limit,
    alpha,
    beta,
    weight_on,
    expert_map,
    keep_wide=False,
    ue8m0=False,
    **_,
):
    """Run the kernels on prepared arguments of `jaxattn.experts`.

    `quantize(rows)` gives codes and scales as the format wants them: one number, [1, R], [K / 128, R], or none;
    `keep_wide` leaves what lies between the products in float32, `ue8m0` tells that scales are powers of two.

    Raises:
        ValueError: `config` does not fit these shapes.
    """
    (T, M), E, F = x.shape, w13.shape[0], w13.shape[1] // 2
    if reason := _illegal(config, T, M, F, format, ue8m0):
        raise ValueError(f"experts: {reason}")
    which = _routing.local_experts(ids, E, expert_map)
    if config.shared:
        tiles = _routing.shared_tiles(which, weights, E)
    else:
        tiles = _routing.sorted_tiles(which, weights, E, config.multipliers * ROWS // UNIT, UNIT)
    late = weight_on == "output"
    act = Activation(kind=activation, limit=limit, alpha=alpha, beta=beta, rounded=late and activation == "silu")
    pairs, encode = activation == "swigluoai", config.encode
    bare = config.shared and format == "fp8_block" and tiles.unit == T
    product = functools.partial(_grouped, config, tiles, format=format, late=late, narrow=x.dtype)
    codes, scale = quantize(x)
    a, encoded = product(
        tiles.rows(codes),
        w13.reshape((E, F, 2, M) if pairs else (E, 2, F, M)),
        F,
        act=act,
        row_scale=scale if bare else _row_scale(format, scale, tiles.scales),
        weight_scale=_weight_scale(format, w13_scale, scale, pairs),
        bias=None if w13_bias is None else _halves(w13_bias.astype(f32), pairs),
        weights=None if late else tiles.weights,
        out_dtype=jnp.float8_e4m3fn if encode else f32 if keep_wide else x.dtype,
    )
    codes, scale = a, encoded
    if not encode:
        codes, scale = quantize(a if format != "fp8_tensor" else jnp.where(tiles.real[:, None], a, 0))
    y, _ = product(
        codes,
        w2,
        M,
        row_scale=_row_scale(format, scale, lambda s: s if encode else jnp.pad(s, ((0, 0), (0, ROWS)))),
        weight_scale=_weight_scale(format, w2_scale, scale, None),
        bias=None if w2_bias is None else w2_bias.astype(f32),
        weights=tiles.weights if late or w2_bias is not None else None,
        out_dtype=x.dtype,
    )
    return tiles.combine(y)


def _row_scale(format, scale, spread):
    """Scales of rows, [K / 128, rows] or [rows], and some more; None where there are none."""
    if format == "fp8_block":
        return spread(scale)
    return spread(scale)[0] if format == "int8" else None


def _weight_scale(format, scale, row_scale, pairs):
    """Scales of weights: [E, N / 128, K / 128], one a feature in the order of biases, one an expert, or none."""
    if format == "int8":
        return scale[..., 0] if pairs is None else _halves(scale[..., 0], pairs)
    return scale * row_scale if format == "fp8_tensor" else scale


def _halves(bias, pairs):
    """Biases of gates and of ups, [2, E, F]."""
    E, width = bias.shape
    return bias.reshape(E, width // 2, 2).transpose(2, 0, 1) if pairs else bias.reshape(E, 2, width // 2).swapaxes(0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """Everything about one grouped product that is known when it is compiled."""

    config: Config
    act: Activation | None
    format: str
    late: bool
    N: int
    """Output features."""
    K: int
    unit: int
    """Rows of a tile start at multiples of this."""
    dtype: Any
    """Of rows and weights."""
    narrow: Any
    """Of x: what the first product is rounded to."""
    out_dtype: Any
    tiled: bool
    """Scales of rows lie tile by tile."""

    @property
    def encoded(self) -> bool:
        """The results are codes, with scales beside them."""
        return self.config.encode and self.act is not None

    @property
    def width(self) -> int:
        """Output features of a tile."""
        return self.config.half * (1 if self.act else 2)

    @property
    def buffers(self) -> int:
        """Pieces of a warpgroup that are on their way out."""
        return 1 if self.encoded else 2

    @property
    def piece(self) -> int:
        """Columns that are stored together."""
        return SPAN // self.out_dtype.itemsize

    @property
    def across(self) -> int:
        """Tiles side by side."""
        return pl.cdiv(self.N, self.width)

    @property
    def inputs(self) -> int:
        """Inputs of a step, one swizzle span of them."""
        return SPAN // self.dtype.itemsize

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return pl.cdiv(self.K, self.inputs)

    @property
    def loaded(self) -> int:
        """Rows that are fetched for a tile."""
        return self.unit if self.config.shared else self.config.multipliers * ROWS

    @property
    def stored(self) -> int:
        """Rows that are stored together."""
        return min(self.unit, ROWS)

    @property
    def span(self) -> tuple[Any, ...]:
        """Transforms of rows and weights in shared memory."""
        wide = self.format in FP8 and self.config.half == BLOCK
        return _inline.span() if wide else _mosaic.swizzled(SPAN, bytes_per_value=self.dtype.itemsize)

    @property
    def blocks(self) -> bool:
        """Rows and features have a scale for each block of inputs."""
        return self.format == "fp8_block"

    @property
    def turns(self) -> bool:
        """Gates and ups lie in turn."""
        return self.act is not None and self.act.kind == "swigluoai"


def _grouped(config, tiles, rows, w, N, *, format, late, narrow, out_dtype, act=None, **arrays):
    """Rows of all tiles times their experts' weights, with the epilogue; [tiles.size, N], and scales or None."""
    x = _Plan(
        config=config,
        act=act,
        format=format,
        late=late,
        N=N,
        K=rows.shape[1],
        unit=tiles.unit,
        dtype=jnp.dtype(rows.dtype),
        narrow=jnp.dtype(narrow),
        out_dtype=jnp.dtype(out_dtype),
        tiled=config.encode and act is None,
    )
    inputs = {"count": tiles.count, "experts": tiles.experts}
    if not config.shared:
        inputs |= {"starts": tiles.starts, "filled": tiles.filled}
    inputs |= {"rows": rows, "w": w} | {name: a for name, a in arrays.items() if a is not None}

    outputs = {"o": jax.ShapeDtypeStruct((tiles.size, N), out_dtype)}
    if x.encoded:
        outputs["o_scale"] = jax.ShapeDtypeStruct((N // BLOCK, tiles.experts.shape[0] * x.loaded), f32)

    def body(*refs, **scratch):
        given = dict(zip((*inputs, *outputs), refs, strict=True))
        _block(x, SimpleNamespace(**dict.fromkeys(arrays) | given | scratch))

    blocks = min(_mosaic.num_sms(), tiles.experts.shape[0] * x.across)
    out = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=_scratch(x),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=config.multipliers + 1,
        thread_name="warpgroup",
        kernel_name="experts_up" if act else "experts_down",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*inputs.values())
    return out[0], out[1] if x.encoded else None


def _scratch(x: _Plan) -> dict[str, Any]:
    c, rows = x.config, x.config.multipliers * ROWS
    scratch = {
        "a_ring": plgpu.SMEM((c.stages, rows, x.inputs), x.dtype, transforms=x.span),
        "b_ring": plgpu.SMEM((c.stages, 2 * c.half, x.inputs), x.dtype, transforms=x.span),
        "pieces": plgpu.SMEM(
            (c.multipliers, x.buffers, ROWS, x.piece),
            x.out_dtype,
            transforms=_mosaic.swizzled(SPAN, bytes_per_value=x.out_dtype.itemsize),
        ),
        "full": plgpu.Barrier(num_arrivals=3 + x.blocks, num_barriers=c.stages),
        "empty": plgpu.Barrier(num_arrivals=c.multipliers, num_barriers=c.stages),
    }
    if x.encoded:
        scratch["tops"] = plgpu.SMEM((c.multipliers, ROWS), f32)
    return scratch | ({"scale_ring": plgpu.SMEM((c.stages, rows), f32)} if x.blocks else {})


# ---------------------------------------------------------------- device code
def _block(x: _Plan, r: Any) -> None:
    """One thread block: the warpgroup that loads and those that multiply."""
    c, warpgroup = x.config, lax.axis_index("warpgroup")

    def turns():
        """How many tiles are this block's and which; whoever needs that finds it out, in registers of its own."""
        me, blocks = lax.axis_index("block"), lax.axis_size("block")

        def place(turn):
            """Tile, its features, and the number of its first step."""
            at = me + turn * blocks
            tile = lax.div(at, i32(x.across))
            return tile, at - tile * x.across, turn * x.steps

        return _expert_rows.share(r.count[0] * x.across, blocks, me), place

    @pl.when(warpgroup == c.multipliers)
    def _():
        count, place = turns()
        if c.multipliers > 1:
            plgpu.set_max_registers(REGISTERS[0], action="decrease")
        lax.fori_loop(0, count, lambda turn, _: _expert_rows.load(x, r, *place(turn)), None)
        total = count * x.steps
        for i in range(1, c.stages + 1):  # nobody leaves while slots are in use
            pl.when(total >= i)(lambda i=i: plgpu.barrier_wait(r.empty.at[lax.rem(total - i, i32(c.stages))]))

    @pl.when(warpgroup < c.multipliers)
    def _():
        count, place = turns()
        if c.multipliers > 1:
            plgpu.set_max_registers(REGISTERS[1], action="increase")

        def tile(turn, _):
            tile, across, first = place(turn)
            if c.shared:
                _multiply(x, r, warpgroup, tile, across, first)
                return
            some = warpgroup * (ROWS // x.unit) < r.filled[tile]
            pl.when(some)(lambda: _multiply(x, r, warpgroup, tile, across, first))
            if c.multipliers > 1:
                pl.when(jnp.logical_not(some))(lambda: _expert_rows.skip(x, r, first))

        lax.fori_loop(0, count, tile, None)
        plgpu.wait_smem_to_gmem(0)


def _multiply(x: _Plan, r: Any, warpgroup, tile, across, first) -> None:
    """64 rows of one tile."""
    expert = r.experts[tile]
    sums = _expert_sums.sums(x, r, warpgroup, expert, across, first)
    if x.format in ("none", "fp8_tensor") and r.weight_scale is not None:
        sums = tuple(part * r.weight_scale[expert] for part in sums)
    if x.format == "int8":
        row = _expert_rows.input_row(x, r, tile) + warpgroup * ROWS
        scale = plgpu.load(r.row_scale.at[pl.ds(row, ROWS)], layout=ROW, optimized=False)
        sums = tuple(part.astype(f32) * lax.broadcast_in_dim(scale, part.shape, [0]) for part in sums)
    row = _expert_rows.first_row(x, r, tile) + warpgroup * ROWS
    weights = None
    if r.weights is not None:
        weights = plgpu.load(r.weights.at[pl.ds(row, ROWS)], layout=ROW, optimized=False)
    for i, column in enumerate(range(0, x.width, x.piece)):
        value = _finished(x, r, sums, column, expert, across, weights)
        scale = None
        if x.encoded:
            value = value.astype(x.narrow).astype(f32) if x.late else value
            value, scale = _expert_sums.encoded(value, LOWEST)
        piece = r.pieces.at[warpgroup, i % x.buffers]
        # what is not stored does not count
        plgpu.wait_smem_to_gmem(0 if x.buffers == 1 or x.N % x.width else 1, wait_read_only=True)
        piece[...] = value.astype(x.out_dtype)
        if scale is not None:
            r.tops[warpgroup] = scale
        plgpu.commit_smem()
        at = across * x.width + column
        pl.when(at < x.N)(lambda at=at, piece=piece: _store(x, r, warpgroup, piece, tile, row, at))


def _store(x: _Plan, r: Any, warpgroup, piece, tile, row, at) -> None:
    """Send one piece, and the scales of its rows, on its way: the rows of this expert only."""

    def send(start: int, count: int):
        where = r.o.at[pl.ds(row + start, count), pl.ds(at, x.piece)]
        plgpu.copy_smem_to_gmem(piece.at[pl.ds(start, count)], where, commit_group=False)

    blocks = 1 if x.config.shared else ROWS // x.unit
    if blocks == 1:
        send(0, x.stored)
    else:
        mine = r.filled[tile] - warpgroup * blocks
        pl.when(mine >= blocks)(lambda: send(0, ROWS))
        for i in range(blocks - 1):
            pl.when((mine < blocks) & (mine > i))(lambda i=i: send(i * x.unit, x.unit))
    if x.encoded:
        count = x.stored if x.config.shared else ROWS
        rows = pl.ds(tile * x.loaded + warpgroup * ROWS, count)
        where = r.o_scale.at[lax.div(at, i32(BLOCK)), rows]
        plgpu.copy_smem_to_gmem(r.tops.at[warpgroup, pl.ds(0, count)], where, commit_group=False)
    plgpu.commit_smem_to_gmem_group()


def _finished(x: _Plan, r: Any, sums, column: int, expert, across, weights):
    """The epilogue of some columns: bias, activation, routing weight; float32."""
    at, half = across * x.width + column, x.config.half

    def line(ref, which):
        where = (which, expert) if x.act else (expert,)
        inside = jnp.minimum(at, x.N - x.piece)  # what is outside is not stored
        values = plgpu.load(ref.at[(*where, pl.ds(inside, x.piece))], layout=COLUMN, optimized=False)
        return lax.broadcast_in_dim(values, (ROWS, x.piece), [1])

    def part(which, start):
        value = sums[which][:, start : start + x.piece]
        if x.format == "int8":
            value = value * line(r.weight_scale, which)
        if r.bias is None:
            return value
        bias = line(r.bias, which)
        return value + (bias * spread if spread is not None and not x.late and not x.act else bias)

    spread = None if weights is None else lax.broadcast_in_dim(weights, (ROWS, x.piece), [0])
    if x.act is None:
        value = part(column // half, column % half)
        return value * spread if x.late and spread is not None else value
    value = x.act(part(0, column), part(1, column), x.narrow)
    return value if spread is None else value * spread
