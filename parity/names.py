"""Which module of a PyTorch model is which of a Flax model: a TOML file, drafted from both trees, edited by the user.

logits = "logits"                      # the root's output that end-to-end metrics are of

[modules]                              # golden module = module of the Flax model; * stands for one number
"model.layers.*.self_attn" = "layers.*.attn"

[arrays."model.layers.*.self_attn"]    # only where names, order and shapes do not say it
"in.hidden_states" = "x"
"out.y_1" = { ours = "y_2", axes = [0, 2, 1, 3] }    # ours, transposed so, is the golden array
"""

import difflib
import itertools
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parity import metrics

_ALIKE = {
    "embed": ("embed_tokens", "embedder", "embedding", "wte", "tok_embeddings", "embeddings"),
    "head": ("lm_head", "output", "unembed", "logits"),
    "attn": ("self_attn", "attention", "self_attention"),
    "mlp": ("feed_forward", "ffn", "ff"),
    "attn norm": ("input_layernorm", "attn_norm", "attention_norm", "ln_1", "norm1", "input_norm"),
    "mlp norm": ("post_attention_layernorm", "mlp_norm", "ffn_norm", "ln_2", "norm2", "post_attention_norm"),
    "q": ("q_proj", "wq", "query"),
    "k": ("k_proj", "wk", "key"),
    "v": ("v_proj", "wv", "value"),
    "o": ("o_proj", "wo", "out", "out_proj", "attn_out"),
    "gate": ("gate_proj", "w1", "wi_0"),
    "up": ("up_proj", "w3", "wi_1"),
    "down": ("down_proj", "w2", "wo_mlp"),
    "norm": ("final_norm", "ln_f", "norm_f"),
    "router": ("gate_logits",),
}
_CANONICAL = {name: key for key, names in _ALIKE.items() for name in (key, *names)}
_ENOUGH = 2.5  # score of a pair that is worth proposing: equal parameters, or a name and a place that fit


class NamesError(ValueError):
    """A names file that does not fit the two models; the message says where."""


@dataclass(frozen=True)
class Module:
    """What the draft knows of a module."""

    path: str
    parameters: tuple[tuple[int, ...], ...] | None
    """Shapes of its own parameters, None = unknown."""
    outputs: tuple[tuple[int, ...], ...]
    order: float
    """Place among the calls, 0 to 1."""


@dataclass(frozen=True)
class Names:
    """The content of a names file."""

    modules: dict[str, str]
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    logits: str | None = None

    def ours(self, golden: str) -> str | None:
        """Path of the Flax module for a golden path, None if there is no counterpart."""
        if golden in self.modules:
            return self.modules[golden]
        pattern, numbers = template(golden)
        return fill(self.modules[pattern], numbers) if pattern in self.modules else None

    def override(self, golden: str, array: str) -> tuple[str, tuple[int, ...] | None] | None:
        """Our name and the axes for `in.name` or `out.name` of a golden module, if the file gives them."""
        table = self.arrays.get(golden) or self.arrays.get(template(golden)[0]) or {}
        if array not in table:
            return None
        value = table[array]
        if isinstance(value, str):
            return value, None
        return value["ours"], tuple(value["axes"]) if "axes" in value else None


def template(path: str) -> tuple[str, tuple[str, ...]]:
    """A path with its numbers replaced by `*`, and the numbers."""
    parts = path.split(".")
    return ".".join("*" if p.isdigit() else p for p in parts), tuple(p for p in parts if p.isdigit())


def fill(pattern: str, numbers: Sequence[str]) -> str:
    """A pattern with each `*` replaced by the next number."""
    rest = iter(numbers)
    return ".".join(next(rest, "*") if p == "*" else p for p in pattern.split("."))


def read(path: Path) -> Names:
    """The names in a file.

    Raises:
        NamesError: it is missing, no TOML, or holds a table or value of another kind.
    """
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except OSError as e:
        raise NamesError(f"{path}: a names file is required, and it cannot be read: {e.strerror}") from e
    except tomllib.TOMLDecodeError as e:
        raise NamesError(f"{path}: a names file must be TOML: {e}") from e
    for key in data:
        if key not in ("modules", "arrays", "logits"):
            near = difflib.get_close_matches(key, ("modules", "arrays", "logits"), 1, 0)
            raise NamesError(f"{path}: unknown entry {key!r}; did you mean {near[0]!r}?")
    modules, arrays = data.get("modules", {}), data.get("arrays", {})
    for golden, ours in modules.items():
        if not isinstance(ours, str) or ours.split(".").count("*") != golden.split(".").count("*"):
            raise NamesError(f"{path}: [modules] {golden!r} must name a module with as many *, found {ours!r}")
    for golden, table in arrays.items():
        for name, value in table.items():
            kind = name.partition(".")[0]
            good = isinstance(value, str) or (isinstance(value, dict) and "ours" in value and set(value) <= _SPEC)
            if kind not in ("in", "out") or not good:
                raise NamesError(
                    f'{path}: [arrays."{golden}"] {name!r} must read "in.name" or "out.name" = "ours" or '
                    f"{{ ours = ..., axes = [...] }}, found {value!r}"
                )
    return Names(modules, arrays, data.get("logits"))


_SPEC = {"ours", "axes"}


def check(names: Names, golden: Iterable[str], ours: Iterable[str], where: str) -> dict[str, str]:
    """Golden path -> our path, for every golden module with a counterpart.

    Raises:
        NamesError: an entry matches no golden module, or leads to a module that the Flax model does not have.
    """
    golden, ours = list(golden), list(ours)
    known = {*golden, *(template(p)[0] for p in golden)}
    for entry in [*names.modules, *names.arrays]:
        if entry not in known:
            raise NamesError(f"{where}: no golden module is called {entry!r}{_nearest(entry, known)}")
    pairs = {g: o for g in golden if (o := names.ours(g)) is not None}
    for g, o in pairs.items():
        if o not in ours:
            raise NamesError(f"{where}: {g!r} leads to {o!r}, which the Flax model does not call{_nearest(o, ours)}")
    if not pairs:
        raise NamesError(f"{where}: at least one pair of modules is required in [modules], found none")
    return pairs


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1, 0)
    return f"; did you mean {near[0]!r}?" if near else ""


# ---------------------------------------------------------------- the draft
def draft(golden: Sequence[Module], ours: Sequence[Module], outputs: Sequence[str]) -> str:
    """A names file for two models, with what has no counterpart in comments.

    Args:
        golden: modules that were called on the golden side, in any order.
        ours: the same of the Flax model.
        outputs: names of the golden root's outputs.
    """
    groups = [_groups(golden), _groups(ours)]
    scored = []
    for g, o in itertools.product(*groups):
        if {template(m.path)[1] for m in groups[0][g]} == {template(m.path)[1] for m in groups[1][o]}:
            score = _score(groups[0][g][0], groups[1][o][0])
            if score is not None and score >= _ENOUGH:
                scored.append((score, g, o))
    pairs: dict[str, str] = {"": ""}
    doubts: dict[str, str] = {}
    for score, g, o in sorted(scored, key=lambda s: -s[0]):
        if g in pairs or o in pairs.values():
            if pairs.get(g) not in (None, o) and o not in pairs.values():
                doubts.setdefault(g, f"{o!r}, score {score:.1f}")
        elif all(_inside(g, a) == _inside(o, b) and _inside(a, g) == _inside(b, o) for a, b in pairs.items()):
            pairs[g] = o
    used = set(pairs.values())
    doubts = {g: text for g, text in doubts.items() if text.split("'")[1] not in used}
    logits = "logits" if "logits" in outputs else outputs[0] if len(outputs) == 1 else None
    lines = ["# golden module = module of the Flax model; * stands for one number. A draft: correct what is wrong."]
    lines += [f'logits = "{logits}"  # the output that end-to-end metrics are of', ""] if logits else [""]
    lines.append("[modules]")
    for g in groups[0]:
        if g in pairs:
            note = f"  # or {doubts[g]}" if g in doubts else ""
            lines.append(f'"{g}" = "{pairs[g]}"{note}')
    for title, names in (
        ("golden modules without a counterpart", [g for g in groups[0] if g not in pairs]),
        ("modules of the Flax model without a counterpart", [o for o in groups[1] if o not in used]),
    ):
        lines += ["", f"# {title}:"] * bool(names) + [f'# "{n}"' for n in names]
    return "\n".join(lines) + "\n"


def _groups(modules: Sequence[Module]) -> dict[str, list[Module]]:
    out: dict[str, list[Module]] = {}
    for m in sorted(modules, key=lambda m: m.order):
        out.setdefault(template(m.path)[0], []).append(m)
    return out


def _inside(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(other + "."))


def _score(g: Module, o: Module) -> float | None:
    """How well two modules fit; None if they cannot be each other's counterpart."""
    sizes = {math.prod(s) for s in g.outputs}
    if not sizes & {math.prod(s) for s in o.outputs}:
        return None
    name = _similar(g.path, o.path) + (g.path == o.path)
    equal = False
    if g.parameters is not None and o.parameters is not None:
        mine, theirs = (sorted(math.prod(s) for s in parameters) for parameters in (g.parameters, o.parameters))
        if mine != theirs and name < 1:  # modules with like names may hold what is a child's on the other side
            return None
        equal = mine == theirs and bool(mine)
    return 2 * equal + 2 * name + (1 - abs(g.order - o.order))


def _similar(a: str, b: str) -> float:
    last = [_CANONICAL.get(p.rpartition(".")[2], p.rpartition(".")[2]) for p in (a, b)]
    return 1.0 if last[0] == last[1] else difflib.SequenceMatcher(a=last[0], b=last[1]).ratio()


# ---------------------------------------------------------------- arrays of one pair of modules
@dataclass(frozen=True)
class Layout:
    """How our array becomes the golden one."""

    ours: str
    axes: tuple[int, ...] | None
    shape: tuple[int, ...]

    def golden(self, x: np.ndarray) -> np.ndarray:
        """Our array in the golden layout."""
        return (x if self.axes is None else x.transpose(self.axes)).reshape(self.shape)

    def back(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A golden array in our layout, which has this shape."""
        if self.axes is None:
            return x.reshape(shape)
        return x.reshape([shape[a] for a in self.axes]).transpose(np.argsort(self.axes))


def match(
    golden: Mapping[str, np.ndarray], ours: Mapping[str, Any], names: Names, path: str, kind: str
) -> dict[str, Layout]:
    """Golden array name -> layout, for each array of a call with a counterpart in ours.

    The names file decides; then equal names; then the order. Shapes must be the same but for ones, merged or split
    neighbours, or one possible transposition; both are floating or neither.
    """
    out: dict[str, Layout] = {}
    for name, x in golden.items():
        given = names.override(path, f"{kind}.{name}")
        if given is None:
            continue
        if given[0] not in ours:
            raise NamesError(f"{path or 'root'}: {kind}.{name} leads to {given[0]!r}; there is {', '.join(ours)}")
        if math.prod(ours[given[0]].shape) != x.size:
            raise NamesError(
                f"{path or 'root'}: {kind}.{name} {x.shape} and ours {given[0]!r} {ours[given[0]].shape} must have as "
                "many elements"
            )
        out[name] = Layout(given[0], given[1], x.shape)
    for same in (True, False):
        for name, x in golden.items():
            for other, y in ours.items():
                taken = name in out or any(layout.ours == other for layout in out.values())
                if taken or (same and name != other) or metrics.is_float(x.dtype) != metrics.is_float(y.dtype):
                    continue
                if regrouped(x.shape, y.shape):
                    out[name] = Layout(other, None, x.shape)
                elif (axes := transposition(x.shape, y.shape)) is not None:
                    out[name] = Layout(other, axes, x.shape)
    return out


def regrouped(a: Sequence[int], b: Sequence[int]) -> bool:
    """True if two shapes differ by ones and by neighbours that are merged on one side."""
    x, y = ([n for n in s if n != 1] for s in (a, b))
    while x and y:
        m, n = x.pop(0), y.pop(0)
        parts = [1, 1]
        while m != n:
            side, rest = (0, x) if m < n else (1, y)
            if not rest:
                return False
            parts[side] += 1
            m, n = (m * x.pop(0), n) if side == 0 else (m, n * y.pop(0))
        if min(parts) > 1:
            return False
    return not x and not y


def transposition(golden: Sequence[int], ours: Sequence[int]) -> tuple[int, ...] | None:
    """The only order of our axes that gives the golden shape, None if there is none or more than one."""
    if sorted(golden) != sorted(ours) or len(set(ours)) != len(ours):
        return None
    return tuple(list(ours).index(n) for n in golden)
