"""Packed and contiguous attention in numpy: the twin of paged attention over pages of one key."""

from typing import Any

import numpy as np

from parity.twins import paged_attention

type Args = dict[str, Any]
type Arrays = dict[str, np.ndarray]


def paged(args: Args) -> Args:
    """The same call in the terms of `jaxattn.paged_attention`; values are padded to the width of the keys."""
    args = dict(args)
    q, k, v = (args.pop(name) for name in ("q", "k", "v"))
    starts = [args.pop(name, None) for name in ("query_start", "key_start")]
    if starts[0] is None:
        starts = [np.arange(len(x) + 1) * x.shape[1] for x in (q, k)]
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    query_start = np.asarray(starts[0], np.int32)
    key_start = query_start if starts[1] is None else np.asarray(starts[1], np.int32)
    v = np.pad(v, ((0, 0), (0, 0), (0, k.shape[2] - v.shape[2])))
    lengths = np.diff(key_start)
    return args | {
        "q": q,
        "k_pages": k[:, None],
        "v_pages": v[:, None],
        "page_table": key_start[:-1, None] + np.arange(lengths.max(initial=0), dtype=np.int32),
        "lengths": lengths,
        "query_start": query_start,
    }


def packed(args: Args, out: Arrays) -> Arrays:
    """Outputs of that call in the shapes of this one."""
    rows, width = args["q"].shape[:-2], args["v"].shape[-1]
    return {name: (x[..., :width] if name == "o" else x).reshape(*rows, *x.shape[1:-1], -1) for name, x in out.items()}


def run(args: Args, wide: bool, on: paged_attention.Switches = paged_attention.NONE) -> Arrays:
    """`o` and, with `return_lse`, `lse`, from the op's arguments as numpy arrays; float64 throughout if `wide`."""
    return packed(args, paged_attention.run(paged(args), wide, on))
