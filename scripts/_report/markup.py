"""HTML elements that escape everything they are given unless it is already markup."""

from collections.abc import Iterable
from html import escape

VOID = frozenset({"meta", "input", "br", "hr"})
SHAPES = frozenset({"rect", "line", "circle", "path"})


class Markup(str):
    """Text that is already HTML and is inserted as it is."""

    __slots__ = ()


type Child = str | int | Iterable["Child"] | None


def el(tag: str, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """One element; `cls` is the class, `_` in attribute names becomes `-`, None and False leave an attribute out.

    >>> el("td", "a < b", cls="num", data_key=1)
    '<td class="num" data-key="1">a &lt; b</td>'
    """
    parts = [tag]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = "class" if name == "cls" else name.rstrip("_").replace("_", "-")
        parts.append(name if value is True else f'{name}="{escape(_number(value))}"')
    if tag in SHAPES:
        return Markup(f"<{' '.join(parts)} />")
    head = f"<{' '.join(parts)}>"
    return Markup(head if tag in VOID else f"{head}{join(*children)}</{tag}>")


def join(*children: Child) -> Markup:
    """Children one after the other: strings escaped, markup kept, iterables flattened, None dropped."""
    out = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            out.append(child)
        elif isinstance(child, str | int | float):
            out.append(escape(str(child)))
        else:
            out.append(join(*child))
    return Markup("".join(out))


def _number(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
