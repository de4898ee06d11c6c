"""A picture of the choices: bars of how many requests of each scenario missed the engine that would have reused most."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

COLOURS = ("#767676", "#B0B0B0", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#56B4E9")
WIDTH, LEFT, BAR, GAP, TOP = 960, 330, 11, 14, 64
FULL = WIDTH - LEFT - 130


def text(x: float, y: float, content: str, anchor: str = "start", size: int = 11) -> str:
    """A line of text."""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-family="sans-serif" font-size="{size}">{escape(content)}</text>'


def bar(y: float, colour: str, row: dict[str, Any]) -> list[str]:
    """The bar of a row, and what it says."""
    if "tally" not in row:
        return [text(LEFT + 4, y + BAR - 2, str(row["not_played"]), size=9)]
    tally = row["tally"]
    length = FULL * tally["missed"] / max(tally["requests"], 1)
    drawn = f'<rect x="{LEFT}" y="{y:.0f}" width="{max(length, 1):.1f}" height="{BAR - 1}" fill="{colour}"/>'
    return [drawn, text(LEFT + length + 5, y + BAR - 2, f"{tally['missed']} of {tally['requests']}", size=9)]


def plot(rows: list[dict[str, Any]], titles: dict[str, str], about: dict[str, Any]) -> str:
    """The picture as SVG."""
    ways = [way for way in titles if any(row["way"] == way for row in rows)]
    colours = dict(zip(titles, COLOURS, strict=False))
    parts = [text(10, 18, f"Requests that missed the engine which would have reused most (seed {about['seed']}, {about['date']})", size=13)]
    for number, way in enumerate(ways):
        x, line = 10 + (number % 4) * 235, 36 + (number // 4) * 16
        parts += [f'<rect x="{x}" y="{line - 9}" width="10" height="10" fill="{colours[way]}"/>', text(x + 15, line, titles[way])]
    y = float(TOP)
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        own = sorted((row for row in rows if row["scenario"] == scenario), key=lambda row: ways.index(row["way"]))
        parts.append(text(LEFT - 10, y + BAR * len(own) / 2 + 4, scenario, "end"))
        for row in own:
            parts += bar(y, colours[row["way"]], row)
            y += BAR
        y += GAP
    size = f'width="{WIDTH}" height="{y:.0f}" viewBox="0 0 {WIDTH} {y:.0f}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f'<rect width="{WIDTH}" height="{y:.0f}" fill="#FFFFFF"/>', *parts, "</svg>"]) + "\n"
