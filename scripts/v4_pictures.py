"""Draw the data flow of a DeepSeek-V4 layer into docs/images: which op gets what, with the shapes that it really has.

Shapes and dtypes are those of the modules, traced (nothing is computed) in V4-Flash's proportions; where boxes stand is
written here.
"""

import argparse
import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jaxattn.nn import DeepseekV4DecoderLayer, FusedMoE, V4Batch, V4Cache, deepseek_v4, deepseek_v4_layer  # noqa: E402
from jaxattn.nn import hyper as hyper_connections  # noqa: E402
from scripts._bench.v4 import config  # noqa: E402

FOLDER = "docs/images"
DTYPES = {"bfloat16": "bf16", "float32": "f32", "float8_e4m3fn": "e4m3", "uint8": "u8", "int32": "i32"}
N, B, WINDOW, ENTRIES, STATES, TABLE = 7, 3, 11, 13, 17, 1009
"""Tokens, requests, pages of the three kinds, pages of a request: numbers that no size of the model is."""
LETTERS = {N: "N", B: "B", WINDOW: "P", ENTRIES: "P", STATES: "P"}
OPS = ("compressor", "grouped_projection", "indexer", "indexer_q", "inv_rope_fp8_quant", "q_kv_rms_norm", "project")
OPS += ("qnorm_rope_kv_insert", "entry_slots", "window_slots", "all_entries", "sparse_mla")

type Point = tuple[float, float]


# ---------------------------------------------------------------- shapes
@dataclass
class Calls:
    """What each op of one layer was given and gave: `name -> (arguments, results)` as text."""

    given: dict[str, list[str]] = field(default_factory=dict)
    gave: dict[str, list[str]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    """Linear layers by identity."""

    def watch(self, name: str, op: Any) -> Any:
        """`op`, which also notes its calls; projections and compressors under the name of their module."""

        @functools.wraps(op)
        def call(*args, **options):
            out = op(*args, **options)
            key = name
            if name == "project":
                key = self.names[id(args[0])]
            elif name == "compressor":
                key = "indexer.compressor" if args[0].shape[1] == 256 else "compressor"
            self.given[key] = [text(x) for x in args if hasattr(x, "shape")]
            self.gave[key] = [text(x) for x in jax.tree.leaves(out)]
            return out

        return call


def text(x: Any) -> str:
    """Shape and dtype of an array: "[N, 512] bf16"."""
    sizes = ", ".join(LETTERS.get(n, str(n)) for n in x.shape)
    return f"[{sizes}] {DTYPES[jnp.dtype(x.dtype).name]}"


def trace(ratio: int) -> Calls:
    """The calls of one decoder layer with FP8 linears and packed caches; its experts are left out."""
    c, calls = config("flash", (ratio,), 512, 65536), Calls()

    def make():
        layer = DeepseekV4DecoderLayer(
            c.features, c.heads, c.moe[0], ratio=ratio, table=jnp.zeros((64, 64)), rngs=nnx.Rngs(0), **c.attention
        )
        return layer, V4Cache(ratio, window_pages=WINDOW, entry_pages=ENTRIES, state_pages=STATES)

    graph, state = nnx.split(nnx.eval_shape(make))
    sizes = ((B,), (B + 1,), (B, 19), (B, TABLE), (B, 23), (N,), (N,))
    arrays: list[Any] = [jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes]
    batch = V4Batch(*arrays)

    def call(state, streams, batch):
        layer, cache = nnx.merge(graph, state)
        calls.names |= {id(node): ".".join(map(str, path[1:])) for path, node in nnx.iter_graph(layer)}
        return layer(streams, cache, batch)

    with contextlib.ExitStack() as stack:
        watched = [(deepseek_v4, OPS), (deepseek_v4_layer, ("rms_norm_quant",))]
        for module, ops in (*watched, (hyper_connections, ("mhc_pre", "mhc_post"))):
            for op in ops:
                stack.enter_context(mock.patch.object(module, op, calls.watch(op, getattr(module, op))))
        stack.enter_context(mock.patch.object(FusedMoE, "__call__", lambda self, x, tokens=None: x))
        jax.eval_shape(call, state, jax.ShapeDtypeStruct((N, c.streams, c.features), jnp.bfloat16), batch)
    return calls


# ---------------------------------------------------------------- drawing
STYLE = """
text { font: 12px ui-sans-serif, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1f2328 }
.t { font-weight: 600; font-size: 13px; text-anchor: middle }
.s { font-size: 11px; text-anchor: middle; fill: #57606a }
.l { font: 11px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }
.note { font-size: 12px }
.h { font-weight: 600; font-size: 13px }
.all { fill: #f6f8fa; stroke: #57606a } .main { fill: #dafbe1; stroke: #1a7f37 }
.index { fill: #ddf4ff; stroke: #0969da } .dense { fill: #fff1e5; stroke: #bc4c00 }
.cache { fill: #fff8c5; stroke: #9a6700; stroke-dasharray: 4 2 }
.zone { fill-opacity: .35; stroke-opacity: .5; stroke-dasharray: 1 3 }
.a { fill: none; stroke: #57606a; stroke-width: 1.3; marker-end: url(#head) }
""".strip()


@dataclass(frozen=True)
class Box:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float

    def top(self, at: float = 0.5) -> Point:
        """A point of the upper edge, `at` from 0 to 1."""
        return self.x + at * self.width, self.y

    def bottom(self, at: float = 0.5) -> Point:
        """A point of the lower edge."""
        return self.x + at * self.width, self.y + self.height

    @property
    def right(self) -> Point:
        """Middle of the right edge."""
        return self.x + self.width, self.y + self.height / 2

    @property
    def left(self) -> Point:
        """Middle of the left edge."""
        return self.x, self.y + self.height / 2


class Drawing:
    """SVG elements, in order."""

    def __init__(self, width: int, height: int, title: str):
        """An empty page."""
        self.size, self.title, self.parts = (width, height), title, []

    def box(self, x: float, y: float, width: float, kind: str, title: str, *lines: str) -> Box:
        """A box of an op, module or cache, its title above smaller lines."""
        made = Box(x, y, width, 28 + 14 * len(lines))
        self.rect(made, kind)
        self.text(made.x + width / 2, y + 18, title, "t")
        for i, line in enumerate(lines):
            self.text(made.x + width / 2, y + 33 + 14 * i, line, "s")
        return made

    def rect(self, box: Box, kind: str) -> None:
        """A rectangle in the colours of a kind of layer."""
        place = f'x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"'
        self.parts.append(f'<rect class="{kind}" {place} rx="6"/>')

    def text(self, x: float, y: float, words: str, kind: str) -> None:
        """One line of text."""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>')

    def arrow(self, *points: Point, label: Sequence[str] = (), at: Point | None = None) -> None:
        """A line through points, its label at the right of the middle of the first piece, or `at` a place."""
        self.parts.append(f'<polyline class="a" points="{" ".join(f"{x:g},{y:g}" for x, y in points)}"/>')
        (x0, y0), (x1, y1) = points[:2]
        x, y = at or ((x0 + x1) / 2 + 7, (y0 + y1) / 2 + 4 - 7 * (len(label) - 1))
        for i, line in enumerate(label):
            self.text(x, y + 14 * i, line, "l")

    def svg(self) -> str:
        """The file."""
        (width, height), head = self.size, "M0 0 8 4 0 8z"
        marker = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                f'<defs>{marker}<path d="{head}" fill="#57606a"/></marker></defs>',
                f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def draw_layer(calls: Calls) -> str:
    """The decoder layer: two times hyper-connections around one half."""
    d = Drawing(640, 800, "Data flow of a DeepSeek-V4 decoder layer")
    streams, (x, post, comb) = calls.gave["mhc_post"][0], calls.gave["mhc_pre"][:3]

    def box(y: float, title: str, *lines: str) -> Box:
        return d.box(40, y, 300, "all", title, *lines)

    first = box(70, "mhc_pre", "attn_hc: gates, Sinkhorn, sum of the streams")
    norm = box(170, "rms_norm_quant", "attn_norm")
    attention = box(258, "DeepseekV4Attention", "attn: the other picture", "reads V4Batch, updates V4Cache")
    middle = box(
        372, "mhc_pre", "ffn_hc, in one pass over the streams:", "R' = combᵀ R + post y, then as above with R'"
    )
    other_norm = box(486, "rms_norm_quant", "ffn_norm")
    experts = box(574, "FusedMoE", "ffn: router, experts, shared GatedMLP", "tokens [N] i32 for hash-routed layers")
    last = box(688, "mhc_post", "ffn_hc: combᵀ R' + post y")
    order = (first, norm, attention, middle, other_norm, experts, last)
    d.arrow((190, 24), first.top(), label=[f"R = streams {streams}"])
    for name, above, below in zip(("x", "x, normed", "y") * 2, order[:-1], order[1:], strict=True):
        d.arrow(above.bottom(), below.top(), label=[f"{name} {x}"])
    d.arrow(last.bottom(), (190, 780), label=[f"streams {streams}"])
    for name, (x0, y0), (x1, y1) in (
        ("R", first.right, (middle.right[0], middle.right[1] - 9)),
        ("R'", (middle.right[0], middle.right[1] + 9), last.right),
    ):
        label = [f"{name} {streams}", f"post {post}", f"comb {comb}"]
        d.arrow((x0, y0), (440, y0), (440, y1), (x1, y1), label=label, at=(448, (y0 + y1) / 2 - 12))
    return d.svg()


def draw_attention(c4: Calls, c128: Calls) -> str:
    """The attention of all three kinds of layers."""
    d = Drawing(1190, 1120, "Data flow of DeepSeek-V4's attention: window-only, C4A and C128A layers")
    legend = {"all": "every layer; window-only layers have no more", "main": "C4A and C128A", "index": "C4A"}
    at = 24.0
    for kind, words in (legend | {"dense": "C128A", "cache": "caches (V4Cache)"}).items():
        d.rect(Box(at, 14, 22, 16), kind)
        d.text(at + 29, 27, words, "note")
        at += 60 + 7 * len(words)
    d.rect(Box(444, 122, 462, 612), "index zone")
    d.text(456, 142, "Indexer", "h")
    d.rect(Box(918, 122, 252, 330), "main zone")
    d.text(974, 142, "Compressor", "h")

    state, entries = c4.gave["compressor"][1], c4.gave["compressor"][0]
    few, fewer = c128.gave["compressor"][1], c128.gave["compressor"][0]
    x = d.box(24, 46, 1142, "all", f"x {c4.given['wq_a'][0]}", "normed; V4Batch: positions, requests and page tables")
    # window rows and queries
    wkv = d.box(24, 158, 170, "all", "wkv", "4096 → 512, FP8")
    wq_a = d.box(216, 158, 200, "all", "wq_a", "4096 → 1024, FP8")
    norm = d.box(24, 262, 392, "all", "q_kv_rms_norm", "q_norm, kv_norm")
    wq_b = d.box(216, 366, 200, "all", "wq_b", "1024 → 64 x 512, FP8")
    insert = d.box(24, 470, 392, "all", "qnorm_rope_kv_insert", "norm of heads; RoPE of the last 64; rows → FP8")
    rows = c4.gave["qnorm_rope_kv_insert"][1]
    window = d.box(24, 574, 170, "cache", "cache.window", rows, "64 rows of 584 bytes a page")
    slots = d.box(24, 690, 132, "all", "window_slots", "of p - 127 to p")
    # the indexer
    heads = d.box(456, 366, 112, "index", "wq_b", "1024 → 64 x 128")
    weights = d.box(578, 366, 112, "index", "weights_proj", "4096 → 64")
    codes = d.box(456, 470, 234, "index", "indexer_q", "RoPE; FP8, its scales into the weights")
    small = d.box(706, 158, 188, "index", "compressor.wkv, wgate", "4096 → 256 each")
    keys = d.box(706, 262, 188, "index", "compressor", f"index.state {c4.gave['indexer.compressor'][1]}")
    pages = c4.gave["indexer.compressor"][0]
    kept = d.box(706, 366, 188, "cache", "cache.index.entries", pages, "64 keys of 132 bytes a page")
    logits = d.box(
        456, 578, 438, "index", "indexer: logits", "Σ w relu(q · k), keys read in their pages by entry_table"
    )
    best = d.box(456, 682, 438, "index", "indexer: indexer_topk", "exact; ties to the lowest entry; -1 behind the last")
    # entries
    wide = d.box(930, 158, 228, "main", "compressor.wkv, wgate", "4096 → 1024 each (C128A 512)")
    made = d.box(930, 262, 228, "main", "compressor", f"main.state {state}", f"C128A {few}")
    main = d.box(930, 376, 228, "cache", "cache.main.entries", f"{entries}, 64 a page", f"C128A {fewer}, 2 a page")
    every = d.box(930, 682, 150, "dense", "all_entries", "0 to (p + 1) // 128 - 1")
    placed = d.box(456, 796, 624, "main", "entry_slots", "entry → slot by entry_table; -1 stays -1")
    # attention and output
    what = "one softmax over window and entries, with attn_sink [64] f32; packed rows dequantized on the way"
    attend = d.box(24, 900, 1142, "all", "sparse_mla", what)
    back = d.box(24, 1022, 240, "all", "inv_rope_fp8_quant", "RoPE back; FP8 with a scale per 128")
    group = d.box(474, 1022, 200, "all", "grouped_projection", "wo_a, FP8: 8 x (4096 → 1024)")
    out = d.box(850, 1022, 150, "all", "wo_b", "8192 → 4096, FP8")

    def down(a: Box, b: Box, at: float, *label: str, y: float | None = None) -> None:
        place = None if y is None else (at + 7, y)
        d.arrow((at, a.y + a.height), (at, b.y), label=label, at=place)

    latent, q_latent = c4.gave["q_kv_rms_norm"][1], c4.gave["q_kv_rms_norm"][0]
    for to, column in ((wkv, 109), (wq_a, 290), (weights, 634), (small, 730), (wide, 955)):
        down(x, to, column)
    down(wkv, norm, 109, *c4.gave["wkv"])
    down(wq_a, norm, 290, *c4.gave["wq_a"])
    down(norm, insert, 109, f"kv {latent}", y=340)
    down(norm, wq_b, 290, f"q {q_latent}")
    d.arrow(norm.right, (470, norm.right[1]), (470, heads.y), label=[f"q {q_latent}"], at=(477, 330))
    down(wq_b, insert, 290, c4.given["qnorm_rope_kv_insert"][0])
    down(insert, window, 109)
    down(insert, attend, 290, f"q {c4.gave['qnorm_rope_kv_insert'][0]}")
    down(window, attend, 175, "pages", y=762)
    seen, count = c4.gave["window_slots"]
    down(slots, attend, 40, f"slots {seen}", f"counts {count}", y=826)
    down(heads, codes, 470, c4.given["indexer_q"][0])
    down(weights, codes, 634, c4.gave["indexer.weights_proj"][0])
    down(codes, logits, 530, f"q {c4.gave['indexer_q'][0]}", f"w {c4.gave['indexer_q'][1]}")
    down(small, keys, 730, f"kv, score {c4.given['indexer.compressor'][0]}")
    down(keys, kept, 730)
    down(kept, logits, 800, "pages")
    down(logits, best, 675, "[N, S] f32")
    down(best, placed, 675, f"entries {c4.gave['indexer'][0]}")
    down(wide, made, 955, f"kv, score {c4.given['compressor'][0]}", f"C128A {c128.given['compressor'][0]}")
    down(made, main, 955)
    down(main, attend, 1125, "pages")
    down(every, placed, 1005, _by_length(c128.gave["all_entries"][0]))
    dense = _by_length(c128.gave["entry_slots"][0])
    down(
        placed, attend, 768, f"slots {c4.gave['entry_slots'][0]} (C128A {dense})", f"counts {c4.gave['entry_slots'][1]}"
    )
    down(attend, back, 144, f"o {c4.gave['sparse_mla'][0]}")
    codes_out, scale = c4.gave["inv_rope_fp8_quant"]
    d.arrow(back.right, group.left, label=[f"codes {codes_out}", f"scale {scale}"], at=(274, 1022))
    d.arrow(group.right, out.left, label=c4.gave["grouped_projection"], at=(690, 1036))
    d.arrow(out.right, (1166, out.right[1]), label=[f"y {c4.gave['wo_b'][0]}"], at=(1012, 1036))
    words = "N tokens of a step, P pages of a cache, S entries (of ratio 4) that a row of the page table holds, "
    d.text(24, 1100, words + "E = S / 32, up to a multiple of 128. Sizes are V4-Flash's.", "note")
    return d.svg()


def _by_length(label: str) -> str:
    """The list of all entries, whose length is that of the page table."""
    return label.replace("2048", "E")


def pictures() -> Iterator[tuple[str, str]]:
    """(path, content) of every picture."""
    c4, c128 = trace(4), trace(128)
    yield f"{FOLDER}/v4_layer.svg", draw_layer(c4)
    yield f"{FOLDER}/v4_attention.svg", draw_attention(c4, c128)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a picture is out of date")
    check, stale = parser.parse_args(arguments).check, []
    for name, new in pictures():
        path = root / name
        if not path.exists() or path.read_text("utf-8") != new:
            stale.append(name)
            if not check:
                path.write_text(new, "utf-8")
    if stale:
        print(("out of date, run scripts/v4_pictures.py: " if check else "written: ") + ", ".join(stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
