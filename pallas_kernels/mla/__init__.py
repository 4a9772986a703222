"""Latent attention on Mosaic GPU (Hopper): absorbed queries over a paged cache of latents, keys split where it pays."""

import functools
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._online_softmax import LOG2E
from pallas_kernels.mla import _attend, _combine, _plan
from pallas_kernels.mla._plan import READERS, ROWS, Config, Plan, why_not

__all__ = ["Config", "configs", "default_config", "mla", "why_not"]

_OPTIONAL = ("sums", "part_o", "part_sums", "notes", "p_own")
"""References that a kernel may do without."""

f32, i32 = jnp.float32, jnp.int32


def default_config(**args) -> Config:
    """A pure function of shapes, dtypes and options."""
    return _plan.default(_plan.make(Config(), **args))


def configs(**args) -> Iterator[Config]:
    """Configurations to time."""
    return _plan.candidates(_plan.make(Config(), **args))


def mla(*, config: Config, return_lse: bool, **args):
    """Run the kernel on prepared arguments of `jaxattn.mla`, all by name.

    Returns:
        o [N, H, Dv] in q's dtype, and with `return_lse` the natural-log lse [N, H] in float32.

    Raises:
        ValueError: `config` does not fit these shapes.
    """
    x = _plan.make(config, **args)
    if reason := _plan.illegal(x):
        raise ValueError(f"mla: {reason}")
    inputs = {name: args[name] for name in ("q", "cache", "page_table", "lengths", "query_start")}
    if x.codes and not x.packed:
        inputs["cache_scale"] = args["cache_scale"].astype(f32).reshape(1)
    inputs["q"] = inputs["q"].reshape(x.N * x.H, x.D)
    outputs = {"o": jax.ShapeDtypeStruct((x.N * x.H, x.Dv), x.dtype)}
    if return_lse:
        outputs["sums"] = jax.ShapeDtypeStruct((x.members * x.slots, 2, ROWS), f32)
    if x.partials:
        outputs["part_o"] = jax.ShapeDtypeStruct((x.members * x.partials, ROWS, x.Dv), f32)
        outputs["part_sums"] = jax.ShapeDtypeStruct((x.members * x.partials, 2, ROWS), f32)
        outputs["notes"] = jax.ShapeDtypeStruct((x.members * x.entries, len(_combine.NOTES)), i32)

    def body(*refs, **memory):
        given = dict(zip((*inputs, *outputs), refs, strict=True))
        for name in ("q", "k"):
            refs, views = memory.pop(name), ("rows", "tile", "raw", "rest", "marks")
            if x.interpreted:
                refs, views = refs if isinstance(refs, tuple | list) else [refs], views[1:]
            memory |= {f"{name}_{view}": ref for view, ref in zip(views, refs, strict=False)}
            memory.setdefault(f"{name}_rows", memory[f"{name}_tile"])
        _attend.run(x, SimpleNamespace(**dict.fromkeys(_OPTIONAL) | given | memory))

    out = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=_plan.scratch(x),
        grid=(x.grid,),
        grid_names=("cluster",),
        cluster=(x.members,),
        cluster_names=("member",),
        num_threads=READERS + 2,
        thread_name="warpgroup",
        kernel_name="mla",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # row reductions stay within four lanes
        ),
    )(*inputs.values())
    out = dict(zip(outputs, out, strict=True))
    if x.partials:
        out |= _combine.run(x, out)
    o = out["o"].reshape(x.N, x.H, x.Dv)
    return (o, _lse(x, out["sums"], args["query_start"])) if return_lse else o


@functools.partial(jax.jit, static_argnums=0)
def _lse(x: Plan, sums, query_start):
    """Log-sum-exp [N, H] from maximum and sum of the rows of all tiles [members * slots, 2, 64]."""
    token, head = jnp.arange(x.N)[:, None], jnp.arange(x.H)[None]
    start = jnp.clip(query_start, 0, x.N)
    b = jnp.searchsorted(start[1:], token, side="right", method="compare_all")
    inside = (token - start[b]) * x.H + head
    slot = jnp.minimum(start[b] * x.H // x.rows + x.gap * b + inside // x.rows, x.slots - 1)
    slot += inside % x.rows // ROWS * x.slots
    m, total = (sums[slot, i, inside % ROWS] for i in range(2))
    return jnp.where((b < x.B) & (total > 0), m * (1 / LOG2E) + jnp.log(total), -jnp.inf)
