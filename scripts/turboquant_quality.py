"""Write what TurboQuant's presets cost in accuracy into docs/turboquant_attention.md.

For each preset: relative errors of keys and values, and of the attention output against a bfloat16 cache its cosine and
signal-to-quantization-noise ratio. Inputs are random normal, and the same with a few channels of the keys eight times
as large, as rotary embeddings leave them in real models. Everything is computed in float64 from the stored bytes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.quant import turboquant

PAGE = Path(__file__).resolve().parents[1] / "docs" / "turboquant_attention.md"
BEGIN = "<!-- quality table: written by scripts/turboquant_quality.py -->"
END = "<!-- end of quality table -->"
KEYS, QUERIES, HEADS = 512, 32, 8
OUTLIERS, FACTOR = 4, 8.0


def inputs(D: int, outliers: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [QUERIES, HEADS, D], keys and values [KEYS, HEADS, D], float32 numbers of bfloat16."""
    rng = np.random.default_rng(D)
    q, k, v = (rng.standard_normal((n, HEADS, D)) for n in (QUERIES, KEYS, KEYS))
    if outliers:
        k[..., :OUTLIERS] *= FACTOR
        q[..., :OUTLIERS] /= FACTOR
    q, k, v = (jnp.asarray(x, jnp.bfloat16).astype(jnp.float32) for x in (q, k, v))
    return q, k, v


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Softmax attention of every query over all keys, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    s = np.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)


def row(preset: str, D: int, outliers: bool) -> str:
    """One line of the table."""
    q, k, v = inputs(D, outliers)
    slots = turboquant.quantize(k, v, preset)
    key, value = (np.asarray(x, np.float64) for x in turboquant.dequantize(slots, D, preset))
    errors = [np.linalg.norm(x - np.asarray(y)) / np.linalg.norm(y) for x, y in ((key, k), (value, v))]
    exact, got = attention(q, k, v), attention(q, key, value)
    cosine = (exact * got).sum() / np.linalg.norm(exact) / np.linalg.norm(got)
    noise = 10 * np.log10((exact**2).sum() / ((got - exact) ** 2).sum())
    bytes_ = turboquant.PRESETS[preset].slot_bytes(D)
    kind = "outlier channels" if outliers else "normal"
    numbers = f"{errors[0]:.1%} | {errors[1]:.1%} | {cosine:.4f} | {noise:.1f} dB"
    return f"| {preset} | {D} | {kind} | {bytes_} ({4 * D / bytes_:.2f}x less) | {numbers} |"


def table() -> str:
    """The whole table in Markdown."""
    head = "| preset | D | keys | bytes a slot | key error | value error | output cosine | output SQNR |"
    lines = [head, "| --- " * 8 + "|"]
    for D in (64, 128, 256):
        lines += [row(preset, D, False) for preset in turboquant.PRESETS]
    lines += [row(preset, 128, True) for preset in turboquant.PRESETS]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, page: Path = PAGE) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page is out of date")
    check = parser.parse_args(arguments).check
    text = page.read_text("utf-8")
    before, rest = text.split(BEGIN)
    new = f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}"
    if new == text:
        return 0
    if check:
        print(f"{page.name} is out of date; run python scripts/turboquant_quality.py")
        return 1
    page.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
