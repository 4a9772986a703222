"""Balance of expert-parallel ranks before and after load balancing: a table, and a picture with --svg.

Loads come from a file of numbers (one layer a line) or are drawn from a Zipf distribution.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxattn import eplb
from jaxattn.ops.eplb import rank_load

_WIDTH, _BAR, _GAP = 900, 120, 40


def balance(loads: np.ndarray) -> np.ndarray:
    """Mean over maximum of each row: 1 is perfect, 1 / ranks the worst."""
    return loads.mean(-1) / loads.max(-1)


def picture(before: np.ndarray, after: np.ndarray) -> str:
    """Bars of every rank's load of one layer, before and after, as SVG."""
    top, width = max(before.max(), after.max()), _WIDTH / len(before)
    parts = []
    for row, (name, loads) in enumerate((("before", before), ("after", after))):
        base = (row + 1) * (_BAR + _GAP)
        parts.append(
            f'<text x="4" y="{base - _BAR - 8}">{name}: largest {loads.max():.4g}, mean {loads.mean():.4g}</text>'
        )
        for i, x in enumerate(loads):
            high = _BAR * x / top
            parts.append(
                f'<rect x="{i * width:.1f}" y="{base - high:.1f}" width="{0.8 * width:.1f}" height="{high:.1f}"/>'
            )
        mean = base - _BAR * loads.mean() / top
        parts.append(f'<path d="M0 {mean:.1f}H{_WIDTH}" stroke="#c33"/>')
    size = f'viewBox="0 0 {_WIDTH} {2 * (_BAR + _GAP) + 8}"'
    style = 'font-family="sans-serif" font-size="14" fill="#357"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>\n'


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loads", type=Path, help="text file of numbers, one layer a line")
    for name, default in (
        ("layers", 4),
        ("experts", 256),
        ("replicas", 288),
        ("ranks", 32),
        ("groups", 8),
        ("nodes", 4),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--svg", type=Path, help="write a picture of the first layer")
    a = parser.parse_args(arguments)
    if a.loads is not None:
        load = np.loadtxt(a.loads, dtype=np.float32, ndmin=2)
    else:
        rng = np.random.default_rng(0)
        load = np.stack([rng.permutation(1e6 / np.arange(1, a.experts + 1)) for _ in range(a.layers)]).astype(
            np.float32
        )
    experts = load.shape[1]
    sizes = {"num_groups": a.groups, "num_nodes": a.nodes, "num_ranks": a.ranks}
    if a.svg is not None and experts % a.ranks:
        parser.error(f"--svg shows ranks of equally many experts, got {experts} experts and {a.ranks} ranks")
    try:
        placed = np.asarray(eplb(jnp.asarray(load), num_replicas=a.replicas, **sizes))
    except ValueError as e:
        parser.error(str(e))
    before = load.reshape(len(load), a.ranks, experts // a.ranks).sum(-1) if experts % a.ranks == 0 else None
    after = rank_load(load, placed, a.ranks)
    print(f"{'layer':>5} {'balance before':>15} {'after':>8} {'largest rank before':>20} {'after':>10}")
    for i in range(len(load)):
        old = ("-", "-") if before is None else (f"{balance(before)[i]:.3f}", f"{before[i].max():.4g}")
        print(f"{i:5d} {old[0]:>15} {balance(after)[i]:8.3f} {old[1]:>20} {after[i].max():10.4g}")
    if a.svg is not None and before is not None:
        a.svg.write_text(picture(before[0], after[0]), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
