"""Products of FP8 and INT8 codes with scales on Mosaic GPU (Hopper), see `jaxattn.ops.scaled_matmul`.

Thread blocks stay and walk over tiles of `rows` x `features` outputs. One warpgroup loads blocks of 128 inputs by TMA
into a ring of `stages` slots, two multiply. Each takes its half of the rows; with few rows (`split`) both take the same
64 rows and every other block of inputs, and add up at the end.

Activations [N, groups, M] multiply a block-diagonal weight: features are shared out equally, each to its own inputs.
With `row_tiles` rows are shared out among weights [E, F, M]: a tile's rows have one weight, and it stores no others
(`grouped_matmul`; bfloat16, too, whose sums stay on the tensor cores as INT8's do).
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _inline, _mosaic, _row_tiles, _scaled_results, _scaled_sums
from pallas_kernels._scaled_sums import BLOCK, SCALES, TOGETHER

FEW = 16
"""Rows that are fetched for a tile that has no more, where tiles may be partial."""
STAY = 16
"""Rows above which block scales are `Config.resident` by default: 64 take 0.95 of the time, one takes 1.03."""
SOME = 32
"""Rows up to which products with block scales are `_Plan.free`: 16 gain 6 %, 64 lose 2 %."""
CODES = ("float8_e4m3fn", "float8_e5m2", "int8")
TILES = ((128, 128, 6), (128, 64, 8), (64, 64, 6), (64, 32, 8), (64, 16, 8))
"""Rows, features and stages by default, large tiles first."""

f32, i32 = jnp.float32, jnp.int32


# ---------------------------------------------------------------- configuration and legality
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Shape of a tile and of the ring."""

    rows: int = 128
    """Activation rows of a tile: 64, 128 or, but for FP8 without blocks, 256; 64 means `split`."""
    features: int = 128
    """Output features of a tile: 16, 32, 64 or 128."""
    stages: int = 6
    """Steps in flight; with 64 rows a step is two blocks of inputs."""
    cluster: int = 1
    """Thread blocks side by side that share the activations: 1 or 2, with 64 rows 1."""
    width: int = 8
    """Tiles that are walked side by side before the next row of tiles, for the cache."""
    resident: bool = False
    """With block scales of up to 64 rows: those of `a` stay in shared memory, all of them."""

    def __post_init__(self):
        choices = {"rows": (64, 128, 256), "features": (16, 32, 64, 128), "cluster": (1, 2)}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {_mosaic.either(known)}, got {getattr(self, name)}")
        if not 2 <= self.stages <= 16:
            raise ValueError(f"stages must lie between 2 and 16, got {self.stages}")
        if self.width < 1:
            raise ValueError(f"width must be at least 1, got {self.width}")
        if self.cluster > 1 and self.split:
            raise ValueError(f"rows=64 needs cluster=1, got cluster={self.cluster}")
        if self.resident and not self.split:
            raise ValueError(f"resident needs rows=64, got rows={self.rows}")

    @property
    def split(self) -> bool:
        """Both warpgroups take the same rows."""
        return self.rows == 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """Everything about a call that is known when it is compiled."""

    N: int
    M: int
    F: int
    a_dtype: Any
    b_dtype: Any
    out_dtype: Any
    blocks: bool
    config: Config
    groups: int | None = None
    """Of inputs and features, None = activations are a matrix."""
    tiles: int | None = None
    """Of rows, at most, where each has its own weight; None = one weight."""

    @property
    def together(self) -> int:
        """Features that have the same inputs."""
        return self.F // (self.groups or 1)

    def scale_row(self, feature):
        """Of a feature's block scales."""
        if self.groups is None:
            return lax.div(feature, i32(BLOCK))
        group, inside = lax.div(feature, i32(self.together)), lax.rem(feature, i32(self.together))
        return group * pl.cdiv(self.together, BLOCK) + lax.div(inside, i32(BLOCK))

    @property
    def integer(self) -> bool:
        return self.a_dtype == jnp.int8

    @property
    def running(self) -> bool:
        """Tensor cores add up all inputs."""
        return self.a_dtype in (jnp.int8, jnp.bfloat16, jnp.float16) and not self.blocks

    @property
    def inputs(self) -> int:
        """Inputs of one step's span."""
        return BLOCK // self.a_dtype.itemsize

    @property
    def parts(self) -> int:
        """Blocks of inputs of one step."""
        return 2 if self.config.split else 1

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return pl.cdiv(pl.cdiv(self.M, self.inputs), self.parts)

    @property
    def written(self) -> int:
        """Steps written out in a row; a divisor where steps left over, before the branches of partial tiles, spill."""
        all_fit = self.tiles is None or self.config.split
        return TOGETHER if all_fit else max(n for n in range(1, TOGETHER + 1) if self.steps % n == 0)

    @property
    def early(self) -> bool:
        """Scales are fetched before they are needed, those of the results before the products."""
        return self.config.split and self.tiles is None

    @property
    def free(self) -> bool:
        """Copies are issued without the loading warpgroup meeting before each, and a thread block may end when its
        results have left shared memory, before they are in global memory. 64 rows with block scales lose by it.
        """
        return self.early and not (self.blocks and self.N > SOME)

    @property
    def waves(self) -> int:
        """Groups of 64 rows of one warpgroup."""
        return 1 if self.config.split else self.config.rows // 128

    @property
    def total(self):
        """Dtype of sums over all inputs."""
        return i32 if self.integer and not self.blocks else f32

    @property
    def piece(self) -> int:
        """Columns of the output that go through shared memory together."""
        return min(self.config.features, BLOCK // self.out_dtype.itemsize)

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along rows, at most, and along features, the latter by cluster."""
        rows = pl.cdiv(self.N, self.config.rows) if self.tiles is None else self.tiles
        return rows, pl.cdiv(self.F, self.config.features * self.config.cluster)


def _plan(config: Config, *, a, b, block, out_dtype, **_) -> _Plan:
    return _Plan(
        N=a.shape[0],
        M=a.shape[-1],
        F=b.shape[-2],
        a_dtype=jnp.dtype(a.dtype),
        b_dtype=jnp.dtype(b.dtype),
        out_dtype=jnp.dtype(out_dtype),
        blocks=block is not None,
        config=config,
        groups=a.shape[1] if len(a.shape) == 3 else None,
        tiles=_row_tiles.most(a.shape[0], b.shape[0], config.rows) if len(b.shape) == 3 else None,
    )


def why_not(*, block, **args) -> str | None:
    """None if the kernel can run these arguments, else one sentence; shapes, dtypes and options are enough."""
    x = _plan(Config(), block=block, **args)
    if x.a_dtype.name not in CODES:
        return f"codes must be {_mosaic.either(CODES)}, got {x.a_dtype.name}"
    if not x.integer and x.out_dtype == f32:
        return "FP8 tensor cores keep about 14 bits of a sum, so float32 results of FP8 codes come from the reference"
    if block not in (None, BLOCK):
        return f"block must be {BLOCK}, got {block}"
    if 0 in (x.N, x.M, x.F):
        return f"needs rows, input and output features, got {x.N}, {x.M} and {x.F}"
    if x.M % 16:
        return f"the input features must be a multiple of 16, got {x.M}; pad both operands with zeros"
    if x.F * x.out_dtype.itemsize % 16:
        return f"rows of the output must be multiples of 16 bytes, got {x.F} of {x.out_dtype.name}; pad the weight"
    return None


def default_config(**args) -> Config:
    """The largest tiles of which there are enough for the card; with many rows two blocks share the activations."""
    x = _plan(Config(), **args)
    if x.integer and not x.blocks and x.N > 512:
        return Config(rows=256, stages=4)
    if x.blocks and x.N > 128 and x.together % 256 == 0 and pl.cdiv(x.N, 256) * (x.F // 128) >= 2 * _mosaic.num_sms():
        return Config(rows=256, stages=4, cluster=2)

    def enough(rows, features):
        if x.groups and x.together % features:
            return False
        return (rows == 64 or x.N > 64) and pl.cdiv(x.N, rows) * pl.cdiv(x.F, features) >= _mosaic.num_sms() * 3 // 4

    rows, features, stages = next((tile for tile in TILES if enough(*tile[:2])), TILES[-1])
    cluster = 2 if rows == 128 and x.together % (2 * features) == 0 else 1
    config = Config(rows=rows, features=features, stages=stages, cluster=cluster)
    if x.blocks and config.split and x.N > STAY:
        staying = dataclasses.replace(config, resident=True)
        return staying if _illegal(dataclasses.replace(x, config=staying)) is None else config
    return config


def configs(**args) -> Iterator[Config]:
    """Every configuration that fits shared memory and registers."""
    for rows in (64, 128, 256):
        for features in (16, 32, 64, 128):
            for stages in (4, 6, 8):
                for cluster in (1,) if rows == 64 else (1, 2):
                    config = Config(rows=rows, features=features, stages=stages, cluster=cluster)
                    for resident in (False, True) if config.split else (False,):
                        found = dataclasses.replace(config, resident=resident)
                        if _illegal(_plan(found, **args)) is None:
                            yield found


def _illegal(x: _Plan) -> str | None:
    c = x.config
    if c.rows == 256 and not x.running and not x.blocks:
        return "rows=256 leaves no registers for float32 sums beside products of several steps; use 128"
    if (c.cluster > 1 or x.groups) and x.together % (c.features * c.cluster):
        given = f"features={c.features} and cluster={c.cluster}" if x.groups else f"cluster={c.cluster}"
        return f"{given} needs output features in multiples of {c.features * c.cluster}, got {x.together}"
    if c.resident and not (x.blocks and c.rows >= x.N and x.M <= 256 * BLOCK and x.groups is x.tiles is None):
        return f"resident needs block scales of up to 64 rows and {256 * BLOCK} inputs, got {x.N} and {x.M}"
    if (used := _mosaic.smem_bytes(_scratch(x).values())) > _mosaic.SMEM_BYTES:
        given = f"rows={c.rows}, features={c.features}, stages={c.stages}"
        return f"{given} needs {used} bytes of shared memory, more than {_mosaic.SMEM_BYTES}; use smaller values"
    return None


# ---------------------------------------------------------------- scratch memory
def _scratch(x: _Plan) -> dict[str, Any]:
    """Scratch of one thread block; `other` carries the second warpgroup's sums with `split`."""
    c = x.config
    tiles = _inline.span()
    out = _inline.span(x.piece * x.out_dtype.itemsize)
    writers = 1 if c.split else 2
    scratch = {
        "a_ring": plgpu.SMEM((c.stages, x.parts, c.rows, x.inputs), x.a_dtype, transforms=tiles),
        "b_ring": plgpu.SMEM((c.stages, x.parts, c.features, x.inputs), x.b_dtype, transforms=tiles),
        "tile": plgpu.SMEM((writers, 64, x.piece), x.out_dtype, transforms=out),
        "full": plgpu.Barrier(num_arrivals=2 * x.parts + (x.blocks and not c.resident), num_barriers=c.stages),
        "empty": plgpu.Barrier(num_arrivals=2, num_barriers=c.stages)
        if c.cluster == 1
        else plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=2, num_barriers=c.stages),
    }
    if c.resident:
        scratch |= {"scales": plgpu.SMEM((c.rows, _scale_columns(x)), f32), "scales_there": plgpu.Barrier()}
    elif x.blocks:
        scratch["scale_ring"] = plgpu.SMEM((c.stages, c.rows, SCALES), f32)
    if c.split:
        scratch |= {"other": plgpu.SMEM((64, c.features), x.total)}
        scratch |= {"sent": plgpu.Barrier(), "taken": plgpu.Barrier()}
    return scratch


def _scale_columns(x: _Plan) -> int:
    """Of the scales of `a`, filled up to what TMA copies."""
    return pl.cdiv(pl.cdiv(x.M, BLOCK), SCALES) * SCALES


# ---------------------------------------------------------------- launch
def scaled_matmul(
    *, config: Config, a, b, a_scale, b_scale, bias, azp, b_sums, block, out_dtype, row_tiles=None, name="scaled_matmul"
):
    """Run the kernel on prepared arguments of `jaxattn.scaled_matmul`.

    With `row_tiles`, see `_row_tiles.tables`, the weight is [E, F, M]; only block scales go with it, or none.

    Raises:
        ValueError: `config` does not fit these shapes.
    """
    x = _plan(config, a=a, b=b, block=block, out_dtype=out_dtype)
    if reason := _illegal(x):
        raise ValueError(f"{name}: {reason}")
    inputs = {"a": a, "b": b} | (row_tiles or {})
    if x.blocks and (missing := -a_scale.shape[-1] % SCALES):
        a_scale = jnp.pad(a_scale, [(0, 0)] * (a_scale.ndim - 1) + [(0, missing)])
    if a_scale is not None:
        inputs |= {"a_scale": a_scale, "b_scale": b_scale}
    if azp is not None:
        inputs |= {"azp": azp, "sums": jnp.sum(b, 1, dtype=i32) if b_sums is None else b_sums}
    if bias is not None:
        inputs["bias"] = bias.astype(f32)

    def body(*refs, **scratch):
        given = dict(zip((*inputs, "o"), refs, strict=True))
        _block(x, SimpleNamespace(**dict.fromkeys(("a_scale", "b_scale", "azp", "sums", "bias")) | given | scratch))

    blocks = min(_mosaic.num_sms() // config.cluster, x.grid[0] * x.grid[1])
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((x.N, x.F), x.out_dtype),
        scratch_types=_scratch(x),
        grid=(blocks,),
        grid_names=("block",),
        cluster=(config.cluster,),
        cluster_names=("member",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=x.free),
    )(*inputs.values())


# ---------------------------------------------------------------- device code
def _block(x: _Plan, r: Any) -> None:
    """One thread block: the warpgroup that loads and those that multiply."""
    c, blocks = x.config, lax.axis_size("block")
    rows = x.grid[0] if x.tiles is None else r.count[0]
    me = lax.axis_index("block")
    count = lax.div(rows * x.grid[1] - me + (blocks - 1), i32(blocks))
    warpgroup, member = lax.axis_index("warpgroup"), lax.axis_index("member")

    def place(turn):
        """Where the tile of a turn lies."""
        shape = x.grid if x.tiles is None else (jnp.maximum(rows, 1), x.grid[1])
        m, n = plgpu.planar_snake(me + turn * blocks, shape, 1, c.width)
        feature = (n * c.cluster + member) * c.features
        if x.tiles is None:
            return _row_tiles.Place(m * c.rows, feature)
        m = jnp.minimum(m, x.tiles - 1)  # one turn too many is asked for
        return _row_tiles.Place(r.first[m], feature, r.weight[m], r.end[m])

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        if c.resident:
            how: Any = {"oob_mode": plgpu.OOBFillMode.PROMISE_IN_BOUNDS}
            plgpu.copy_gmem_to_smem(r.a_scale, r.scales.at[pl.ds(0, x.N)], r.scales_there, **how)
        _load(x, r, count, place)
        total = count * x.steps  # no block of a cluster may leave while another still signals to it
        for i in range(1, c.stages + 1):
            pl.when(total >= i)(lambda i=i: plgpu.barrier_wait(r.empty.at[lax.rem(total - i, i32(c.stages))]))

    @pl.when(warpgroup < 2)
    def _():
        plgpu.set_max_registers(240, action="increase")
        if c.resident:
            plgpu.barrier_wait(r.scales_there)

        def tile(turn, weight):
            ahead = None if weight is None else place(turn + 1).weight  # loads from global memory take long
            at = place(turn)._replace(weight=weight)
            factors = functools.partial(_scaled_results.factors, r, x.blocks, x.piece)
            ready = [factors(at.row, feature) for feature in _pieces(x, at.feature)] if x.early else None
            sums = (_scaled_sums.of_blocks if x.blocks else _scaled_sums.plain)(x, r, turn, warpgroup, at)
            at = at if weight is None else place(turn)  # asked once more: registers are scarce until here
            if c.split:
                _add_up(x, r, turn, warpgroup, sums, at, ready)
            else:
                _store(x, r, r.tile.at[warpgroup], sums, at._replace(row=at.row + warpgroup * (c.rows // 2)))
            return ahead

        lax.fori_loop(0, count, tile, place(0).weight)
        plgpu.wait_smem_to_gmem(0, wait_read_only=x.free)
        if x.tiles is not None:
            _row_tiles.clear(r.tile, r.o, r.count[1], warpgroup, me * c.cluster + member, blocks * c.cluster)
        if c.split:
            pl.when((warpgroup == 1) & (count > 0))(lambda: plgpu.barrier_wait(r.taken))


def _load(x: _Plan, r: Any, count, place) -> None:
    """Fetch the blocks of inputs of `count` tiles; what lies outside the operands becomes zero."""
    c = x.config
    share: Any = {"collective_axes": "member"} if c.cluster > 1 else {}
    most = min(c.rows, x.N + -x.N % c.cluster)  # TMA is slow outside; what it leaves alone nobody stores

    def tile(turn, _):
        at = place(turn)
        features = pl.ds(at.feature, c.features)
        group = () if x.groups is None else (lax.div(at.feature, i32(x.together)),)
        few = None if at.end is None or most <= FEW else at.end - at.row <= FEW

        def step(j, _):
            number = turn * x.steps + j
            slot = lax.rem(number, i32(c.stages))
            full = r.full.at[slot]
            pl.when(number >= c.stages)(lambda: plgpu.barrier_wait(r.empty.at[slot]))

            def fetch(rows):
                mine, to = (pl.ds(at.row, rows), *group), pl.ds(0, rows)
                for part in range(x.parts):
                    inputs = pl.ds((j * x.parts + part) * x.inputs, x.inputs)
                    weight = (features, inputs) if at.weight is None else (at.weight, features, inputs)
                    plgpu.copy_gmem_to_smem(r.b.at[weight], r.b_ring.at[slot, part], full)
                    plgpu.copy_gmem_to_smem(r.a.at[(*mine, inputs)], r.a_ring.at[slot, part, to], full, **share)
                if x.blocks and not c.resident:
                    first = lax.div(j * x.parts, i32(SCALES)) * SCALES
                    scales = r.a_scale.at[(*mine, pl.ds(first, SCALES))]
                    plgpu.copy_gmem_to_smem(scales, r.scale_ring.at[slot, to], full)

            if few is None:
                fetch(most)
            else:
                pl.when(few)(lambda: fetch(FEW))
                pl.when(jnp.logical_not(few))(lambda: fetch(most))

        lax.fori_loop(0, x.steps, step, None)

    lax.fori_loop(0, count, tile, None)


def _add_up(x: _Plan, r: Any, turn, warpgroup, sums: tuple, at: _row_tiles.Place, ready: list | None) -> None:
    """The first warpgroup adds the second one's sums to its own and stores."""

    @pl.when(warpgroup == 1)
    def _():
        pl.when(turn > 0)(lambda: plgpu.barrier_wait(r.taken))
        _mosaic.store(r.other, sums[0])
        plgpu.barrier_arrive(r.sent)

    @pl.when(warpgroup == 0)
    def _():
        plgpu.barrier_wait(r.sent)
        both = sums[0] + plgpu.load(r.other, layout=_inline.WGMMA, optimized=False)
        plgpu.barrier_arrive(r.taken)
        _store(x, r, r.tile.at[0], (both,), at, ready)


def _pieces(x: _Plan, feature) -> list:
    """First features of the pieces of a tile."""
    return [feature + column for column in range(0, x.config.features, x.piece)]


def _store(x: _Plan, r: Any, tile: Any, sums: tuple, at: _row_tiles.Place, ready: list | None = None) -> None:
    """Scale, add the bias, round and write; TMA leaves out what lies outside the output."""
    for wave, (i, feature) in itertools.product(range(len(sums)), enumerate(_pieces(x, at.feature))):
        first = at.row + wave * 64
        factors = _scaled_results.factors(r, x.blocks, x.piece, first, feature) if ready is None else ready[i]
        value = _scaled_results.finished(factors, sums[wave][:, i * x.piece : (i + 1) * x.piece])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        tile[...] = value.astype(x.out_dtype)
        plgpu.commit_smem()

        def where(start, count, first=first, feature=feature):
            return r.o.at[pl.ds(first + start, count), pl.ds(feature, x.piece)]

        if at.end is None:
            plgpu.copy_smem_to_gmem(tile, where(0, 64))
        else:
            _row_tiles.send(tile, where, at.end - first)
