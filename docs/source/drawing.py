"""A small language for drawings: boxes, arrows and labels, written as SVG that follows the light or dark theme."""

from dataclasses import dataclass, field
from html import escape
from typing import Literal

Kind = str  # plain, data, work, limit or accent
Side = Literal["left", "right", "top", "bottom"]

# Fill and stroke of each kind of box, in light and in dark.
_COLOURS: dict[Kind, tuple[tuple[str, str], tuple[str, str]]] = {
    "plain": (("#f6f5f2", "#a8a49a"), ("#24272d", "#5d636e")),
    "data": (("#e4eefb", "#4a82c4"), ("#1b2c44", "#5b93d6")),
    "work": (("#e3f3e6", "#4c9a5e"), ("#1a3423", "#5fb173")),
    "limit": (("#fdf0d9", "#c98a1b"), ("#3b2d12", "#d9a03d")),
    "accent": (("#efe7fa", "#8257c2"), ("#2d2142", "#a27fe0")),
}
_TEXT, _MUTED = ("#1d2024", "#e8e9eb"), ("#63676e", "#a0a6b0")
_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, monospace"


@dataclass(frozen=True, slots=True)
class Box:
    x: float
    y: float
    w: float
    h: float

    def at(self, side: Side, share: float = 0.5) -> tuple[float, float]:
        """A point on a side; share runs from its top or left end."""
        if side in ("left", "right"):
            return (self.x if side == "left" else self.x + self.w, self.y + self.h * share)
        return (self.x + self.w * share, self.y if side == "top" else self.y + self.h)


@dataclass(slots=True)
class Drawing:
    """title is read to people who do not see the drawing, together with the description."""

    width: int
    height: int
    title: str
    description: str
    _parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, w: float, h: float, text: str = "", note: str = "", kind: Kind = "plain") -> Box:
        """A rounded box; text is bold, one line per newline, and note stands below it in smaller letters."""
        if kind not in _COLOURS:
            raise ValueError(f"box: kind is {kind!r}, expected one of {', '.join(_COLOURS)}")
        self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="7"/>')
        lines = [(line, "name") for line in text.split("\n") if line] + [
            (line, "note") for line in note.split("\n") if line
        ]
        heights = [18 if style == "name" else 15.5 for _, style in lines]
        at = y + (h - sum(heights)) / 2
        for (line, style), height in zip(lines, heights, strict=True):
            at += height
            self.label(x + w / 2, at - 4.5, line, style=style)
        return Box(x, y, w, h)

    def label(self, x: float, y: float, text: str, *, style: str = "note", anchor: str = "middle") -> None:
        self._parts.append(f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], text: str = "", dashed: bool = False, above: float = 6) -> None:
        """A line through the points with a head at its last; text stands above the middle of its first part."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        style = "arrow dashed" if dashed else "arrow"
        self._parts.append(f'<path class="{style}" d="{path}" marker-end="url(#head)"/>')
        if text:
            (x0, y0), (x1, y1) = points[0], points[1]
            self.label((x0 + x1) / 2, (y0 + y1) / 2 - above, text)

    def line(self, *points: tuple[float, float], dashed: bool = False) -> None:
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="{"arrow dashed" if dashed else "arrow"}" d="{path}"/>')

    def bar(self, x: float, y: float, w: float, h: float, kind: Kind) -> None:
        """A bar of a chart: no rounding, no border."""
        self._parts.append(f'<rect class="{kind} bar" x="{x:g}" y="{y:g}" width="{w:.1f}" height="{h:g}"/>')

    def svg(self) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" aria-labelledby="title description">',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="description">{escape(self.description)}</desc>',
                f"<style>{_style()}</style>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                'orient="auto-start-reverse"><path class="head" d="M0 0 L8 4 L0 8 Z"/></marker></defs>',
                f'<rect class="paper" width="{self.width}" height="{self.height}" rx="10"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def _style() -> str:
    light, dark = (_theme(index) for index in (0, 1))
    fixed = (
        f"text{{font-family:{_FONT}}}.name{{font-size:13.5px;font-weight:600}}.note{{font-size:12px}}"
        f".title{{font-size:16px;font-weight:650}}.code{{font-family:{_MONO};font-size:12px}}"
        ".plain,.data,.work,.limit,.accent{stroke-width:1.3}.bar{stroke-width:0}"
        ".arrow{fill:none;stroke-width:1.5}.dashed{stroke-dasharray:5 4}"
    )
    return f"{fixed}{light}@media(prefers-color-scheme:dark){{{dark}}}"


def _theme(index: int) -> str:
    boxes = "".join(
        f".{kind}{{fill:{colours[index][0]};stroke:{colours[index][1]}}}.{kind}.bar{{fill:{colours[index][1]}}}"
        for kind, colours in _COLOURS.items()
    )
    paper, line = ("#ffffff", "#15171b")[index], ("#7b7f86", "#8d939d")[index]
    return (
        f".paper{{fill:{paper}}}{boxes}.name,.title,.code{{fill:{_TEXT[index]}}}.note{{fill:{_MUTED[index]}}}"
        f".arrow{{stroke:{line}}}.head{{fill:{line}}}"
    )
