"""The picture of the packages of motet and the imports between them, from the current code.

An arrow goes from a package to one that it imports. Layers are those of the import contract in pyproject.toml.
"""

import ast
import re
import tomllib

from motet.core.svg import element, svg_page, text
from pages import ROOT

SOURCE = ROOT / "src/motet"
WIDTH, ROW, BOX_HEIGHT, BOX_WIDTH = 920, 96, 40, 128
GROUND = "core"  # every package stands on it, so it is drawn as wide as the picture
COLORS = ["#3f51b5", "#c2185b", "#00796b", "#e65100", "#5d4037", "#7b1fa2", "#0277bd", "#558b2f", "#455a64", "#ad1457"]


def picture() -> str:
    return _draw(_layers(), _imports())


def _layers() -> list[list[str]]:
    """The packages that exist, top layer first."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    rows = [re.findall(r"\w+", layer) for layer in contract["layers"]]
    return [
        [package for package in row if (SOURCE / package).is_dir()]
        for row in rows
        if any((SOURCE / r).is_dir() for r in row)
    ]


def _imports() -> set[tuple[str, str]]:
    """(importing package, imported package)"""
    pairs: set[tuple[str, str]] = set()
    for path in SOURCE.rglob("*.py"):
        package = path.relative_to(SOURCE).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = name.split(".")
                if parts[0] == "motet" and len(parts) > 1 and parts[1] != package and (SOURCE / parts[1]).is_dir():
                    pairs.add((package, parts[1]))
    return {pair for pair in pairs if (SOURCE / pair[0]).is_dir()}


def _places(rows: list[list[str]]) -> dict[str, tuple[float, float]]:
    """The middle of each box's upper edge. Packages alone on their layer stand aside by turns, so that arrows pass."""
    places = {}
    for level, row in enumerate(rows):
        aside = 0.0 if len(row) > 1 or row == [GROUND] else WIDTH * (0.15 if level % 2 else -0.15)
        for at, package in enumerate(row):
            places[package] = ((at + 1) * WIDTH / (len(row) + 1) + aside, level * ROW)
    return places


def _draw(rows: list[list[str]], edges: set[tuple[str, str]]) -> str:
    places = _places(rows)
    colors = dict(zip(places, COLORS * 3, strict=False))
    body = [_arrow((source, target), places, colors[source]) for source, target in sorted(edges)]
    for package, (x, y) in places.items():
        width = WIDTH - 60 if package == GROUND else BOX_WIDTH
        box = {"x": x - width / 2, "y": y, "width": width, "height": BOX_HEIGHT, "rx": 6}
        body.append(element("rect", "page", **box, stroke=colors[package], stroke_width=2))
        body.append(text((x, y + 25), package, "middle big"))
    return svg_page("The packages of motet and their imports", "", body, width=WIDTH, height=len(rows) * ROW - 40)


def _arrow(edge: tuple[str, str], places: dict[str, tuple[float, float]], color: str) -> str:
    """A curve from the lower edge of one box to the upper edge of the other, leaving and arriving spread out."""
    source, target = edge
    (x0, y0), (x1, y1) = places[source], places[target]
    if target == GROUND:  # it is as wide as the picture: the arrow falls almost straight
        x1 = x0 + 90 * (1 if x0 > WIDTH / 2 else -1) * (y1 - y0 > ROW)
    x0 += max(-50.0, min(50.0, (x1 - x0) / 5))
    end = x1 + max(-56.0, min(56.0, (x0 - x1) / 4))
    top, bottom, bend = y0 + BOX_HEIGHT, y1 - 2, (y1 - y0) / 2.2
    curve = f"M{x0:.0f},{top:.0f} C{x0:.0f},{top + bend:.0f} {end:.0f},{bottom - bend:.0f} {end:.0f},{bottom:.0f}"
    tip = f"M{end - 4:.0f},{bottom - 7:.0f} L{end:.0f},{bottom:.0f} L{end + 4:.0f},{bottom - 7:.0f}"
    look = {"stroke": color, "stroke_width": 1.5, "opacity": "0.55"}
    return element("path", "curve", d=f"{curve} {tip}", hint=f"{source} imports {target}", **look)
