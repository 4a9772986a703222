"""RMSNorm with FP8 quantization on Mosaic GPU: one pass over memory, see `jaxattn.ops.rms_norm_quant`.

Numbers of long rows wait for the sum of squares, and for the largest magnitude, in their own type if that has 16 bits:
in fewer registers, but for groups, each of which leaves at once. Warps do not wait for each other around stores of such
rows, and with a static scale their weights are loaded only after the sum.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _codes, _frames, _packed_rows
from pallas_kernels import _plans as plans
from pallas_kernels._frames import LINE_VALUES
from pallas_kernels._plans import Plan, Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """`rows`: rows of one warpgroup."""

    rows: int

    def __post_init__(self):
        plans.check_rows(self.rows)


def why_not(*, x, mode, group, **_) -> str | None:
    """None if the kernel can run these arguments, else one sentence."""
    plan = found(x.shape[0], x.shape[1], x.dtype, mode, group)
    return plan if isinstance(plan, str) else None


def default_config(*, x, mode, group, **_) -> Config:
    """Tiles as large as still fill the card, lines one by one."""
    return Config(rows=_plan(x, mode, group).default_rows())


def configs(*, x, mode, group, **_) -> Iterable[Config]:
    """All legal heights."""
    return [Config(rows=r) for r in _plan(x, mode, group).choices()]


def found(N: int, M: int, dtype, mode: str, group: int, most: int | None = LINE_VALUES) -> Plan | str:
    """How rows are cut, or one sentence why they cannot be."""
    groups = group if mode == "group" else None
    return plans.whole_rows(N, plans.columns(M, dtype, groups), dtype, groups, most)


def _plan(x, mode: str, group: int) -> Plan:
    plan = found(x.shape[0], x.shape[1], x.dtype, mode, group)
    assert not isinstance(plan, str), plan
    return plan


def rms_norm_quant(*, config: Config, x, weight, residual, eps, mode, scale, upper_bound, group):
    """Launch; arguments as prepared by `jaxattn.ops.rms_norm_quant`."""
    plan, (N, M), dtype = _plan(x, mode, group), x.shape, x.dtype
    plan.check("rms_norm_quant", config.rows)
    long = plan.line is not None
    packed, late = long and mode != "group" and dtype.itemsize == 2, long and mode == "static"
    wide = [plan.view(plans.widened(a, plan.D)) for a in (x, weight, residual) if a is not None]
    arrays = [wide[0], *wide[2:]]
    number = {"static": scale, "token": upper_bound}.get(mode)
    shared = [wide[1]] + ([] if number is None else [number.astype(jnp.float32).reshape(1)])
    types = finished_types(mode, N, plan.D, plan, dtype)
    if residual is not None:
        types.append(jax.ShapeDtypeStruct(arrays[0].shape, dtype))

    def process(rows: Rows, x_ref, *refs):
        frame, refs = rows.frame, list(refs)
        loaded = rows.load(x_ref)
        added = None if residual is None else rows.load(refs.pop(0))
        w_ref = refs.pop(0)
        w = None if late else rows.load_each(w_ref)
        s_ref = None if number is None else refs.pop(0)
        yield
        z, kept = [_frames.wide(a) for a in loaded], loaded
        if added is not None:
            z = [a + _frames.wide(b) for a, b in zip(z, added, strict=True)]
            stored = [a.astype(dtype) for a in z]
            for k, a in enumerate(stored):
                rows.store(refs[-1], k, a)
            z = [a.astype(jnp.float32) for a in stored] if mode in ("none", "static") else z
            kept = stored if mode in ("none", "static") else None  # sums that are not rounded yet cannot be packed
        r = frame.spread(inverse_root(rows, z, M, eps))
        if packed and kept:
            z = [_frames.wide(_packed_rows.held(a, frame.numbers)) for a in kept]
        w = rows.load_each(w_ref) if w is None else w
        y = [a * r for a in z]
        y = y if mode in ("none", "static") else [_codes.rounded(a, dtype) for a in y]
        y = [a * b for a, b in zip(y, w, strict=True)]
        finish(rows, mode, y, dtype, refs, None if s_ref is None else s_ref[0], packed=packed)

    done = plans.run(plan, process, arrays, types, rows=config.rows, name="rms_norm_quant", shared=shared, free=True)
    out = finished(mode, N, M, done)
    out = out if residual is None else (*out, done[-1].reshape(N, plan.D)[:, :M])
    return out[0] if len(out) == 1 else out


def inverse_root(rows: Rows, z: Sequence[jax.Array], M: int, eps: float) -> jax.Array:
    """`1 / sqrt(mean(z^2) + eps)` of rows of M numbers in pieces."""
    frame = rows.frame
    mean = frame.divide_rows(rows.total([a * a for a in z]), float(M)) + frame.full(eps)
    root = frame.row("sqrt.rn.f32", jnp.sqrt, mean)
    return frame.divide_rows(frame.full(1.0), root)


# ---------------------------------------------------------------- what leaves, for `silu_mul_quant` as well
def finished_types(mode: str, N: int, M: int, plan: Plan, dtype) -> list[jax.ShapeDtypeStruct]:
    """Outputs of `finish`."""
    shape = (N, M) if plan.line is None or plan.line.group is None else (N, M // plan.line.group, plan.line.group)
    types = [jax.ShapeDtypeStruct(shape, dtype if mode == "none" else jnp.float8_e4m3fn)]
    if mode in ("token", "group"):
        types.append(jax.ShapeDtypeStruct(shape[: 1 if mode == "token" else 2], jnp.float32))
    return types


def finish(
    rows: Rows,
    mode: str,
    y: Sequence[jax.Array],
    dtype,
    refs: Sequence[Any],
    number: Any,
    first: Any = 0,
    packed: bool = False,
) -> None:
    """Round `y`, the pieces from `first` on, to `dtype`, quantize them as `mode` says and write them to `refs[0]`.

    If `packed`, they wait for their largest magnitude as `dtype`, of 16 bits.
    """
    frame = rows.frame
    if mode == "none":
        for k, a in enumerate(y):
            rows.store(refs[0], first + k, a)
        return
    y = [a.astype(dtype) for a in y]
    if mode == "group":
        for k, a in enumerate(y):
            s = _codes.token_scale(frame, frame.largest([a]), _codes.LIMITS[_codes.E4M3])
            rows.store(refs[0], first + k, _codes.float8(frame.quotient(_frames.wide(a), s)))
            rows.store(refs[1], first + k, s)
        return
    found, encode = (_codes.fp8_static if mode == "static" else _codes.fp8_token)(frame, y, number)
    y = [_packed_rows.held(a, frame.numbers) for a in y] if packed and mode == "token" else y
    for k, a in enumerate(y):
        rows.store(refs[0], first + k, encode(_frames.wide(a)))
    for s in found:
        rows.store_row(refs[1], s)


def finished(mode: str, N: int, M: int, done: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The op's outputs in their shapes, [N, M] and scales; groups without a number of the rows are cut off."""
    width = done[0].size // N if N else M
    o = done[0].reshape(N, width)[:, :M]
    if mode in ("none", "static"):
        return (o,)
    if mode == "group":
        group = done[0].shape[-1]
        return o, done[1].reshape(N, -1 if N else done[1].shape[-1])[:, : -(-M // group)]
    return o, done[1].reshape(N, 1)
