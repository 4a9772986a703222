"""Products of 16-bit activations and weights of 4 or 8 bits on Mosaic GPU, see `jaxattn.ops.weight_only_matmul`.

The weight is wgmma's A operand, decoded in registers (`_decode`), the activations are B in shared memory: a tile is 64
features by `tokens` activation rows, computed transposed. One warpgroup loads tiles of 128 inputs by TMA into a ring of
`stages` slots. The others multiply: with `split` all take the same 64 features and every n-th tile of inputs and add up
at the end, in order; without, each has 64 features of its own.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _decode, _inline, _mosaic
from pallas_kernels._decode import FEATURES, HALF, INPUTS

TOKENS = (8, 16, 32, 64, 128, 256)
LATE = 16
"""Activation rows up to which scales of whole tiles multiply sums; there are as many of these as weights with 128."""
WAYS = ((1, True, 1), (2, False, 1), (2, True, 1), (2, True, 2), (4, True, 1), (4, True, 2))
"""Configurations to try: warpgroups, split, deep."""
REGISTERS = {1: 240, 2: 240, 3: 160, 4: 112}
"""Registers of a thread that multiplies, given the warpgroups that do."""
GROUPS = 2
"""Groups of instructions that `_decode.start` starts."""
PIECE = 64
"""Activation rows that leave together."""
DTYPES = ("bfloat16", "float16")

f32, i32 = jnp.float32, jnp.int32


# ---------------------------------------------------------------- configuration and legality
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Shape of a tile and of the ring."""

    tokens: int = 256
    """Activation rows of a tile: 8, 16, 32, 64, 128 or 256."""
    warpgroups: int = 2
    """Warpgroups that multiply: 1 to 4."""
    split: bool = False
    """They share 64 features and take different inputs."""
    deep: int = 1
    """Tiles of 128 inputs that a warpgroup takes from one slot: 1 or 2, one decoded while the other multiplies."""
    stages: int = 4
    """Slots of the ring."""
    cluster: int = 1
    """Thread blocks along the features that share the activations: 1 or 2."""
    boxed: bool = False
    """One copy for all activations of a slot; rows behind the last one are copied too, as zeros."""
    width: int = 8
    """Tiles that are walked side by side before the next row of tiles, for the cache."""
    together: int = 1
    """Slots whose products are written out in a row: a tile is decoded while the one before it multiplies."""

    def __post_init__(self):
        choices = {"tokens": TOKENS, "warpgroups": (1, 2, 3, 4), "deep": (1, 2), "cluster": (1, 2)}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {_mosaic.either(known)}, got {getattr(self, name)}")
        if not 2 <= self.stages <= 16:
            raise ValueError(f"stages must lie between 2 and 16, got {self.stages}")
        if self.boxed and self.cluster > 1:
            raise ValueError(f"boxed activations belong to one thread block, got cluster={self.cluster}")
        for name in ("width", "together"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """Everything about a call that is known when it is compiled."""

    N: int
    M: int
    F: int
    code: _decode.Code
    config: Config
    interpreted: bool

    @property
    def parts(self) -> int:
        """Tiles of inputs of one slot."""
        return self.config.deep * (self.config.warpgroups if self.config.split else 1)

    @property
    def columns(self) -> int:
        """Tiles of features of one thread block."""
        return 1 if self.config.split else self.config.warpgroups

    @property
    def steps(self) -> int:
        """Slots of a tile."""
        return pl.cdiv(pl.cdiv(self.M, INPUTS), self.parts)

    @property
    def bulk(self) -> bool:
        """The weight of a slot is one piece of memory and comes as such, without a descriptor that must come first."""
        return self.columns == 1 and pl.cdiv(self.M, INPUTS) % self.parts == 0

    @property
    def piece(self) -> int:
        return 16 if (self.config.tokens, self.config.stages) == (256, 3) else min(self.config.tokens, PIECE)

    @property
    def late(self) -> bool:
        """Scales of whole tiles multiply float32 sums of a tile, not the weight, which then is not rounded."""
        return (self.code.scale, self.code.groups) == ("value", 1) and self.config.tokens <= LATE

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles along activation rows and along features, the latter by cluster."""
        c = self.config
        return pl.cdiv(self.N, c.tokens), pl.cdiv(self.F, FEATURES * self.columns * c.cluster)


def _plan(config: Config, *, x, w, code, **_) -> _Plan:
    return _Plan(
        N=x.shape[0],
        M=x.shape[1],
        F=w.shape[0] * FEATURES,
        code=dataclasses.replace(code, in_place=(code.kind, code.dtype) == ("u4", jnp.float16)),
        config=config,
        interpreted=_mosaic.interpreting(),
    )


def default_config(*, N: int, M: int, F: int, bits: int, code: _decode.Code | None = None) -> Config:
    """Few rows: warpgroups split the inputs; many: each has its own features. Without `code` it fits all of `bits`.

    Up to 128 rows of 4 bits one warpgroup multiplies, for slots of half the size: the loader is further ahead.
    """
    tokens = next((t for t in TOKENS if t >= N), TOKENS[-1])
    cluster = 2 if N > 64 and F % (4 * FEATURES) == 0 else 1
    warpgroups = 4 if tokens <= 32 else 2
    ways = [(2, 4), (2, 3)] if tokens <= 16 else []
    common: dict[str, Any] = {"tokens": tokens, "warpgroups": warpgroups, "split": tokens <= 128, "cluster": cluster}
    fine = code is not None and code.kind == "e2m1"  # many scales
    common["boxed"] = ((tokens <= 8 and fine) or 8 < tokens <= 64) and M % HALF == 0
    found = [Config(**common, deep=deep, stages=stages) for deep, stages in [*ways, (1, 4), (1, 3), (1, 2)]]
    if tokens == 128 and bits == 4:
        found.insert(0, dataclasses.replace(Config(**common), warpgroups=1, stages=5, together=4))
    plans = [_widest(config, N, M, F, bits) for config in found]
    if code is not None:
        plans = [dataclasses.replace(plan, code=code) for plan in plans]
    plan = next(plan for plan in plans if why_not_config(plan) is None)
    return dataclasses.replace(plan.config, together=2) if tokens == 8 and plan.late else plan.config


def configs(*, N: int, M: int, F: int, bits: int, code: _decode.Code | None = None) -> Iterator[Config]:
    """Every configuration that fits registers and shared memory; without `code` it fits all of `bits`."""

    def fits(config):
        plan = _widest(config, N, M, F, bits)
        return why_not_config(plan if code is None else dataclasses.replace(plan, code=code)) is None

    for tokens, (warpgroups, split, deep) in itertools.product(TOKENS, WAYS):
        for stages, cluster in itertools.product((2, 3, 4, 5, 6, 8), (1, 2)):
            config = Config(
                tokens=tokens, warpgroups=warpgroups, split=split, deep=deep, stages=stages, cluster=cluster
            )
            found = [config]
            if deep == 1 or tokens == TOKENS[0]:
                found.append(dataclasses.replace(config, together=stages - 1 if deep == 1 else 2))
            if split and cluster == 1 and N <= tokens < 2 * max(N, TOKENS[0]):  # those whose slots few rows fill
                found.append(dataclasses.replace(config, boxed=True))
            yield from filter(fits, found)


def _widest(config: Config, N: int, M: int, F: int, bits: int) -> _Plan:
    """The plan that needs most memory."""
    kind = "e4m3" if bits == 8 else "u4"
    code = _decode.Code(kind=kind, dtype=jnp.dtype(jnp.bfloat16), scale="pair", groups=4, zeros=True)
    return _Plan(N=N, M=M, F=F, code=code, config=config, interpreted=False)


def why_not_config(x: _Plan) -> str | None:
    """None if the configuration fits, else one sentence."""
    c = x.config
    if c.warpgroups > 2 and c.tokens > 64:
        return f"{c.warpgroups} warpgroups have registers for 64 activation rows, got tokens={c.tokens}"
    if c.boxed and (x.M % HALF or (c.tokens < x.N and x.N % c.tokens)):
        need = f"input features in multiples of {HALF} and up to {c.tokens} rows or a multiple"
        return f"boxed needs {need}, got {x.M} and {x.N}"
    if c.cluster > 1 and x.F % (multiple := FEATURES * x.columns * c.cluster):
        return f"cluster={c.cluster} needs output features in multiples of {multiple}, got {x.F}"
    scratch = _scratch(dataclasses.replace(x, interpreted=False))
    if (used := _mosaic.smem_bytes(scratch.values())) > _mosaic.SMEM_BYTES:
        given = f"tokens={c.tokens}, warpgroups={c.warpgroups}, deep={c.deep}, stages={c.stages}"
        return f"{given} needs {used} bytes of shared memory, more than {_mosaic.SMEM_BYTES}; use smaller values"
    return None


# ---------------------------------------------------------------- scratch memory
def _scratch(x: _Plan) -> dict[str, Any]:
    """Scratch of one thread block; `other` carries sums between warpgroups, `spare` exists interpreted only."""
    c, code = x.config, x.code
    lanes = code.scale_count // FEATURES
    copies = 1 + (1 if c.boxed else 2 * x.parts) + (code.scale is not None) + code.zeros
    scratch = {
        "w_ring": plgpu.SMEM((c.stages, x.columns, x.parts, code.words // 256, 256), i32),
        "tile": plgpu.SMEM((x.columns, x.piece, FEATURES), code.dtype),
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=c.stages),
        "empty": plgpu.Barrier(num_arrivals=c.warpgroups, num_barriers=c.stages)
        if c.cluster == 1
        else plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=c.warpgroups, num_barriers=c.stages),
    }
    if c.boxed:
        shape = c.stages, c.tokens, x.parts * INPUTS
        scratch["x_ring"] = plgpu.SMEM(shape, code.dtype, transforms=_inline.spans(c.tokens))
    else:
        shape = c.stages, 2 * x.parts, c.tokens, HALF
        scratch["x_ring"] = plgpu.SMEM(shape, code.dtype, transforms=_inline.span())
    if code.scale is not None:
        scratch["s_ring"] = plgpu.SMEM((c.stages, x.columns, x.parts, lanes, FEATURES), code.dtype)
    if code.zeros:
        scratch["z_ring"] = plgpu.SMEM((c.stages, x.columns, x.parts, code.groups, FEATURES), code.dtype)
    if c.split and c.warpgroups > 1:
        scratch["other"] = plgpu.SMEM((c.warpgroups - 1, FEATURES, c.tokens), f32)
        scratch |= {"sent": plgpu.Barrier(num_arrivals=c.warpgroups - 1), "taken": plgpu.Barrier()}
    if x.interpreted:
        scratch["spare"] = plgpu.SMEM((c.warpgroups, 2, FEATURES, HALF), code.dtype, transforms=_inline.span())
    return scratch


# ---------------------------------------------------------------- launch
def product(*, config: Config, code: _decode.Code, x, w, scales, zeros, channel, factor) -> jax.Array:
    """`x @ W` [N, F] in the dtype of x, of a weight in tiles.

    Args:
        config: of the launch.
        code: how the weight is stored.
        x: [N, M].
        w: int32 [F / 64, ceil(M / 128), words].
        scales: [F / 64, ceil(M / 128), numbers of a tile] or None.
        zeros: likewise.
        channel: float32 [F] or None: multiplied at the end.
        factor: float32 [1] or None, likewise.

    Raises:
        ValueError: `config` does not fit these shapes.
    """
    plan = _plan(config, x=x, w=w, code=code)
    if reason := why_not_config(plan):
        raise ValueError(f"weight_only_matmul: {reason}")
    inputs = {"x": x, "w": w.reshape(*w.shape[:2], -1, 256)}
    given = {"scales": scales, "zeros": zeros}
    inputs |= {name: v.reshape(*v.shape[:2], -1, FEATURES) for name, v in given.items() if v is not None}
    inputs |= {name: v for name, v in (("channel", channel), ("factor", factor)) if v is not None}

    def body(*refs, **scratch):
        names = dict(zip((*inputs, "o"), refs, strict=True))
        optional = dict.fromkeys(("scales", "zeros", "channel", "factor", "s_ring", "z_ring", "spare"))
        _block(plan, SimpleNamespace(**optional | names | scratch))

    blocks = min(_mosaic.num_sms() // config.cluster, plan.grid[0] * plan.grid[1])
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((plan.N, plan.F), x.dtype),
        scratch_types=_scratch(plan),
        grid=(blocks,),
        grid_names=("block",),
        cluster=(config.cluster,),
        cluster_names=("member",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="weight_only_matmul",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(*inputs.values())


# ---------------------------------------------------------------- device code
def _block(x: _Plan, r: Any) -> None:
    """One thread block: the warpgroup that loads and those that multiply."""
    c, blocks = x.config, lax.axis_size("block")
    me = lax.axis_index("block")
    count = lax.div(x.grid[0] * x.grid[1] - me + (blocks - 1), i32(blocks))
    warpgroup, member = lax.axis_index("warpgroup"), lax.axis_index("member")

    def origin(turn):
        """First activation row and first tile of features of this thread block."""
        m, n = plgpu.planar_snake(me + turn * blocks, x.grid, 0, c.width)
        return m * c.tokens, (n * c.cluster + member) * x.columns

    @pl.when(warpgroup == c.warpgroups)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        lax.fori_loop(0, count, lambda turn, _: _load(x, r, turn, *origin(turn)), None)
        total = count * x.steps  # no block of a cluster may leave while another still signals to it
        for i in range(1, c.stages + 1):
            pl.when(total >= i)(lambda i=i: plgpu.barrier_wait(r.empty.at[lax.rem(total - i, i32(c.stages))]))

    @pl.when(warpgroup < c.warpgroups)
    def _():
        plgpu.set_max_registers(REGISTERS[c.warpgroups], action="increase")

        def tile(turn, _):
            token, column = origin(turn)
            sums = _sum(x, r, turn, warpgroup)
            if c.split and c.warpgroups > 1:
                _add_up(x, r, turn, warpgroup, sums, token, column)
            elif c.split:
                _store(x, r, r.tile.at[0], sums, token, column)
            else:
                _store(x, r, r.tile.at[warpgroup], sums, token, column + warpgroup)

        lax.fori_loop(0, count, tile, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if c.split and c.warpgroups > 1:
            pl.when(warpgroup > 0)(lambda: plgpu.barrier_wait(r.taken))


def _load(x: _Plan, r: Any, turn, token, column) -> None:
    """Fetch one tile's weight and activations; what lies outside becomes zero."""
    c = x.config
    share: Any = {"collective_axes": "member"} if c.cluster > 1 else {}
    rows = min(c.tokens, x.N + -x.N % c.cluster)  # TMA is slow outside; what it leaves alone nobody stores
    columns = pl.ds(column, x.columns)
    how: Any = {"oob_mode": plgpu.OOBFillMode.PROMISE_IN_BOUNDS} if x.bulk else {}

    def step(j, _):
        at = turn * x.steps + j
        slot = lax.rem(at, i32(c.stages))
        pl.when(at >= c.stages)(lambda: plgpu.barrier_wait(r.empty.at[slot]))
        full = r.full.at[slot]
        for source, ring in ((r.w, r.w_ring), (r.scales, r.s_ring), (r.zeros, r.z_ring)):
            if source is not None:
                tiles = pl.ds(j * x.parts, x.parts)
                plgpu.copy_gmem_to_smem(source.at[columns, tiles], ring.at[slot], full, **how)
        if c.boxed:
            inputs = pl.ds(j * x.parts * INPUTS, x.parts * INPUTS)
            plgpu.copy_gmem_to_smem(r.x.at[pl.ds(token, c.tokens), inputs], r.x_ring.at[slot], full, **share)
            return
        for i in range(2 * x.parts):
            inputs = pl.ds(j * x.parts * INPUTS + i * HALF, HALF)
            to = r.x_ring.at[slot, i, pl.ds(0, rows)]
            plgpu.copy_gmem_to_smem(r.x.at[pl.ds(token, rows), inputs], to, full, **share)

    lax.fori_loop(0, x.steps, step, None)


def _sum(x: _Plan, r: Any, turn, warpgroup):
    """Sums of one warpgroup: float32 [64, tokens]."""
    c = x.config
    column, part = (0, warpgroup) if c.split else (warpgroup, 0)
    spare = None if r.spare is None else r.spare.at[warpgroup]

    def tile(slot, i):
        at = part * c.deep + i
        w, s, z = (None if ring is None else ring.at[slot, column, at] for ring in (r.w_ring, r.s_ring, r.z_ring))
        y = r.x_ring.at[slot, :, pl.ds(at * INPUTS, INPUTS)] if c.boxed else r.x_ring.at[slot, pl.ds(2 * at, 2)]
        return w, s, z, y

    def release(slot):
        _inline.release_reads()
        plgpu.barrier_arrive(r.empty.at[slot])

    def multiply(first, count, sums):
        """The tiles of `count` slots, each started before the one before it is waited for."""
        slots = [lax.rem(turn * x.steps + first + n, i32(c.stages)) for n in range(count)]
        last, waiting, over = (count - 1, c.deep - 1), None, None
        for at in itertools.product(range(count), range(c.deep)):
            slot = slots[at[0]]
            if at[1] == 0:
                plgpu.barrier_wait(r.full.at[slot])
            w, s, z, y = tile(slot, at[1])
            if x.late:
                scale = _decode.row_scales(x.code, s)
                product = _decode.start(x.code, None, (w, None, z, y), spare, c.boxed, over)
                if waiting is not None:
                    sums, over = add(sums, waiting, GROUPS)
                waiting = scale, product
            else:
                sums = _decode.start(x.code, sums, (w, s, z, y), spare, c.boxed)
            if at == last:
                sums = add(sums, waiting, 0)[0] if x.late else _inline.settle(sums, 0)
            elif at[0] and at[1] == 0 and not x.late:
                plgpu.wgmma_wait(GROUPS)
            if at[0] and at[1] == 0:  # the tile before was the last of its slot
                release(slots[at[0] - 1])
        release(slots[-1])
        return sums

    def add(sums, waiting, pending):
        scale, product = waiting
        product = _inline.settle(product, pending)
        return _inline.add_scaled(sums, scale, product), product

    zero = plgpu.layout_cast(jnp.zeros((FEATURES, c.tokens), f32), _inline.WGMMA)
    whole, rest = divmod(x.steps, c.together)
    sums = lax.fori_loop(0, whole, lambda n, sums: multiply(n * c.together, c.together, sums), zero)
    return multiply(whole * c.together, rest, sums) if rest else sums


def _add_up(x: _Plan, r: Any, turn, warpgroup, sums, token, column) -> None:
    """The first warpgroup adds the others' sums to its own, in order, and stores."""

    @pl.when(warpgroup > 0)
    def _():
        pl.when(turn > 0)(lambda: plgpu.barrier_wait(r.taken))
        _mosaic.store(r.other.at[warpgroup - 1], sums)
        plgpu.barrier_arrive(r.sent)

    @pl.when(warpgroup == 0)
    def _():
        plgpu.barrier_wait(r.sent)
        whole = sums
        for i in range(x.config.warpgroups - 1):
            whole = whole + plgpu.load(r.other.at[i], layout=_inline.WGMMA, optimized=False)
        plgpu.barrier_arrive(r.taken)
        _store(x, r, r.tile.at[0], whole, token, column)


def _store(x: _Plan, r: Any, tile: Any, sums, token, column) -> None:
    """Scale, round and write, transposed; TMA leaves out the rows outside the output."""
    feature = column * FEATURES
    if r.channel is not None:
        scale = plgpu.load(r.channel.at[pl.ds(feature, FEATURES)], layout=_inline.ROW, optimized=False)
        sums = sums * lax.broadcast_in_dim(scale, sums.shape, [0])
    if r.factor is not None:
        sums = sums * r.factor[0]
    for first in range(0, x.config.tokens, x.piece):
        value = sums[:, first : first + x.piece].astype(x.code.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _inline.store_transposed(tile, value)
        plgpu.commit_smem()

        @pl.when(token + first < x.N)
        def _(first=first):
            rows = pl.ds(token + first, x.piece)
            plgpu.copy_smem_to_gmem(tile, r.o.at[rows, pl.ds(feature, FEATURES)])
