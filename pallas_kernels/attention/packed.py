"""Attention of packed sequences on Mosaic GPU (Hopper); the device code is that of `_flash`."""

from collections.abc import Iterator

import jax.numpy as jnp

from pallas_kernels import _mosaic
from pallas_kernels.attention import _choice, _flash, _plan
from pallas_kernels.attention._plan import DTYPES, HEAD_DIMS, Config, Plan

i32 = jnp.int32


def _make(config: Config, *, q, k, v, query_start, scale, causal, window, softcap, **_) -> Plan:
    (H, D), (K, Dv) = q.shape[-2:], v.shape[-2:]
    packed = query_start is not None
    return Plan(
        N=q.shape[0] if packed else q.shape[0] * q.shape[1],
        H=H,
        K=K,
        D=D,
        Dv=Dv,
        B=query_start.shape[0] - 1 if packed else q.shape[0],
        S=k.shape[0] if packed else k.shape[0] * k.shape[1],
        dtype=jnp.dtype(q.dtype),
        scale=scale,
        causal=causal,
        window=None if window is None else min(window, _plan.FAR),
        softcap=softcap,
        config=config,
        q_rows=q.shape[0] if packed else q.shape[0] * q.shape[1],
        interpreted=_mosaic.interpreting(),
        num_sms=_mosaic.num_sms(),
    )


def why_not(**args) -> str | None:
    """None if the kernel can run these arguments, else one sentence; shapes, dtypes and options are enough."""
    q, v = args["q"], args["v"]
    dtype, D, Dv = jnp.dtype(q.dtype).name, q.shape[-1], v.shape[-1]
    if dtype not in DTYPES:
        return f"q must be {_mosaic.either(DTYPES)}, got {dtype}"
    for name, dim in (("D", D), ("Dv", Dv)):
        if dim not in HEAD_DIMS:
            return f"the head dim {name} must be {_mosaic.either(HEAD_DIMS)}, got {dim}"
    x = _make(Config(), **args)
    if 0 in (x.N, x.B, x.S):
        return f"needs a query row, a key row and a sequence, got N={x.N}, S={x.S} and B={x.B}"
    return None


def default_config(**args) -> Config:
    """Measured on an H200, see docs/attention.md."""
    return _choice.default(_make(Config(), **args))


def configs(**args) -> Iterator[Config]:
    """Every configuration that fits shared memory and registers."""
    return _choice.candidates(_make(Config(), **args))


def attention(*, config: Config, return_lse: bool, **args):
    """Run the kernel on prepared arguments of `jaxattn.attention`, all by name.

    Returns:
        o in q's dtype, and with `return_lse` the natural-log lse in float32.

    Raises:
        ValueError: `config` does not fit these shapes.
    """
    x = _make(config, **args)
    if reason := _choice.illegal(x):
        raise ValueError(f"attention: {reason}")
    q, k, v, query_start, key_start = (args[name] for name in ("q", "k", "v", "query_start", "key_start"))
    rows = q.shape[:-2]
    if query_start is None:
        query_start, key_start = (jnp.arange(x.B + 1, dtype=i32) * a.shape[1] for a in (q, k))
        q, k, v = (a.reshape(-1, *a.shape[2:]) for a in (q, k, v))
    inputs = {"q": q, "k": k, "v": v, "query_start": query_start, "key_start": key_start}
    if args["sinks"] is not None:
        inputs["sinks"] = _flash.sink_rows(x, args["sinks"])
    o, lse = _flash.launch(x, inputs, return_lse, "attention")
    o = o.reshape(*rows, *o.shape[1:])
    return o if lse is None else (o, lse.reshape(*rows, -1))
