"""Elements of HTML and SVG as text; whatever is not Markup is escaped, so a run's name cannot become an element."""

from collections.abc import Iterable, Mapping
from html import escape

VOID = frozenset({"meta", "br"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, attributes: Mapping[str, object] | None = None, *children: str) -> Markup:
    """One element; children that are plain text are escaped, and so are all attribute values."""
    opening = "".join(f' {key}="{escape(shown(value))}"' for key, value in (attributes or {}).items())
    if name in VOID:
        return Markup(f"<{name}{opening}>")
    return Markup(f"<{name}{opening}>{joined(children)}</{name}>")


def joined(children: Iterable[str]) -> Markup:
    """Children one after the other, escaped where they are plain text."""
    return Markup("".join(c if isinstance(c, Markup) else escape(c) for c in children))


def shown(value: object) -> str:
    """An attribute's value; coordinates with one decimal, which is finer than a screen."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def table(head: Iterable[str], rows: Iterable[Iterable[str]], first_is_name: bool = True) -> Markup:
    """A table in a box that scrolls by itself on a narrow screen."""
    heading = tag("tr", None, *(tag("th", {"scope": "col"}, cell) for cell in head))
    body = [tag("tr", None, *_cells(row, first_is_name)) for row in rows]
    inner = tag("table", None, tag("thead", None, heading), tag("tbody", None, *body))
    return tag("div", {"class": "scroll"}, inner)


def _cells(row: Iterable[str], first_is_name: bool) -> Iterable[Markup]:
    for index, cell in enumerate(row):
        yield tag("th", {"scope": "row"}, cell) if first_is_name and index == 0 else tag("td", None, cell)
