"""Sparse latent attention on Hopper, see `jaxattn.ops.sparse_mla`: every token attends to its own list of rows.

A tile is one token and 64 query heads, which share all rows. Thread blocks stay and take tile after tile. In each of
them one warpgroup gathers blocks of `block_kv` rows into a ring of `stages` slots (`_gather_rows`). Two have half of
the columns of the output each, whose 64 x 512 numbers fill their registers: the first also computes scores and the
online softmax, and hands P to the second one, which adds its P V while the first goes on with the next block.

A row is key and value at once: its slot is free again half by half, when both products of its columns are done. The
output leaves through the last slot of its tile.

`splits` cuts the lists at fixed places among thread blocks, for small batches. Every part is normalised and the parts
are combined by their log-sum-exps; the sink belongs to the first.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import combine_partials as combine
from pallas_kernels._online_softmax import FLOOR, LOG2E
from pallas_kernels.sparse_mla import _blocks as blocks
from pallas_kernels.sparse_mla._plan import Config, Plan, illegal, plan, scratch

f32 = jnp.float32


def sparse_mla(*, config: Config, return_lse: bool, **args):
    """Run the kernel on prepared arguments of `jaxattn.sparse_mla`, all by name.

    Returns:
        o [N, H, value_dim] in q's dtype, and with `return_lse` lse and max_logits [N, H] in float32.

    Raises:
        ValueError: `config` does not fit these shapes.
    """
    x = plan(config, **args)
    if reason := illegal(x):
        raise ValueError(f"sparse_mla: {reason}")
    if not x.N or not sum(x.blocks):
        nothing = jnp.full((x.N, x.H), -jnp.inf, f32)
        o = jnp.zeros((x.N, x.H, x.Dv), x.dtype)
        return (o, nothing, nothing) if return_lse else o
    first = ("cache", "indices", "counts")
    names = first if len(x.lists) == 1 else (*first, *(f"extra_{name}" for name in first))
    inputs = {"q": args["q"]} | {name: args[name] for name in names if args[name] is not None}
    if args["sinks"] is not None:
        inputs["sinks"] = jnp.clip(args["sinks"].astype(f32) * LOG2E, FLOOR, -FLOOR)
    lead = () if config.splits == 1 else (config.splits,)
    outputs = {"o": jax.ShapeDtypeStruct((*lead, x.N, x.H, x.Dv), f32 if lead else x.dtype)}
    sums = (("lse", "top") if return_lse else ()) + (("weight",) if lead else ())
    outputs |= {name: jax.ShapeDtypeStruct((*lead, x.N, x.H), f32) for name in sums}

    def body(*refs, **memory):
        given = dict(zip((*inputs, *outputs), refs, strict=True))
        blocks.run(x, SimpleNamespace(**dict.fromkeys(blocks.OPTIONAL) | given | memory))

    body.__name__ = "sparse_mla"
    out = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=scratch(x),
        grid=(x.grid,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="sparse_mla",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # row reductions stay within four lanes
        ),
    )(*inputs.values())
    out = dict(zip(outputs, out, strict=True))
    if lead:
        out = _combined(x, out)
    return tuple(out[name] for name in ("o", "lse", "top")) if return_lse else out["o"]


def _combined(x: Plan, out: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The parts of all splits as one result."""
    parts = {"o": out["o"], "lse": out["weight"], "base": "e", "return_corrected": False}
    o, *_ = combine.combine_partials(config=combine.default_config(**parts), **parts, dtype=x.dtype)
    done = {"o": o}
    if "lse" in out:
        done |= {"top": jnp.max(out["top"], 0), "lse": jax.nn.logsumexp(out["lse"], 0)}
    return done
