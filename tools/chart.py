"""Draw the chart of the README's table of brokers: `python -m tools.chart` writes `docs/internals/brokers.svg`.

Each panel is a row of the table, with a bar for the first figure of each broker. The picture has its own background, so
it can be read on a light and on a dark page. It loads nothing.
"""

import re
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "README.md"
CHART = ROOT / "docs" / "internals" / "brokers.svg"

_PANELS = {
    "durable: messages/s, one a call": "durable, one a call: messages/s (more is better)",
    "durable: one message in flight, p50 / p99 ms": "durable, one in flight: p50 in ms (less is better)",
    "messages/s read back, one by one": "read back, one by one: messages/s (more is better)",
    "server's memory, MB": "memory of the server: MB (less is better)",
}
"""The rows that are drawn: the beginning of the first cell, and the title of the panel."""

_FIRST_BROKER = "seqdedupe"
_FIGURE = re.compile(r"([\d,.]+)([kM]?)(?![^ ])")
_FACTORS = {"": 1, "k": 1_000, "M": 1_000_000}

_STYLE = """
.page { fill: #ffffff } text { fill: #263238 } .bar { fill: #90a4ae } .own { fill: #00796b }
@media (prefers-color-scheme: dark) {
.page { fill: #1e2429 } text { fill: #eceff1 } .bar { fill: #607d8b } .own { fill: #4db6ac }
}
"""
_WIDTH, _PANEL, _ROW, _LABEL, _BAR = 860, 430, 22, 165, 180
"""In pixels: the picture, a panel, the height of a bar's row, the width of a broker's name and of the longest bar."""


class Panel(NamedTuple):
    """The title of a row, and the figure of each broker as the table has it. An empty one is not measured."""

    title: str
    figures: dict[str, str]


def panels(page: str) -> list[Panel]:
    """Return the panels of the table of brokers on this page. Raises ValueError if it lacks the table or a row."""
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in page.splitlines() if line[:1] == "|"]
    heads = [row for row in rows if len(row) > 1 and row[1].startswith(_FIRST_BROKER)]
    found = []
    for row in rows:
        for begin, title in _PANELS.items():
            if heads and row[0].startswith(begin):
                found.append(Panel(title, dict(zip(heads[0][1:], map(_shown, row[1:]), strict=True))))
    if [panel.title for panel in found] != [*_PANELS.values()]:
        raise ValueError(f"the table of brokers lacks a row of {[*_PANELS]}")
    return found


def value(figure: str) -> float:
    """Return the number of a figure such as `1,760k`."""
    found = _FIGURE.match(figure)
    if found is None:
        raise ValueError(f"{figure!r} is no figure")
    return float(found[1].replace(",", "")) * _FACTORS[found[2]]


def chart(page: str) -> str:
    """Return the SVG for the table on this page."""
    drawn = panels(page)
    height = 20 + (len(drawn) + 1) // 2 * _panel_height(drawn[0])
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="t" '
            'font-family="sans-serif" font-size="13">',
            '<title id="t">Bars for each broker; the table has the figures.</title>',
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{_WIDTH}" height="{height}" rx="8"/>',
            *(
                line
                for number, panel in enumerate(drawn)
                for line in _drawn(panel, 20 + number % 2 * _PANEL, 20 + number // 2 * _panel_height(panel))
            ),
            "</svg>\n",
        ]
    )


def _shown(cell: str) -> str:
    """Return the first figure of a cell, empty if there is none."""
    first = re.split(r" [·/] ", cell)[0]
    return first if _FIGURE.match(first) else ""


def _panel_height(panel: Panel) -> int:
    return 50 + len(panel.figures) * _ROW


def _drawn(panel: Panel, left: int, top: int) -> list[str]:
    """Return the elements of a panel."""
    longest = max(value(figure) for figure in panel.figures.values() if figure)
    lines = [f'<text x="{left}" y="{top + 14}" font-weight="bold">{escape(panel.title)}</text>']
    for number, (broker, figure) in enumerate(panel.figures.items()):
        y = top + 28 + number * _ROW
        kind = "own" if broker.startswith(_FIRST_BROKER) else "bar"
        width = max(2, round(_BAR * value(figure) / longest)) if figure else 0
        if width:
            lines.append(f'<rect class="{kind}" x="{left + _LABEL}" y="{y}" width="{width}" height="{_ROW - 6}"/>')
        lines += [
            f'<text x="{left}" y="{y + 12}">{escape(broker)}</text>',
            f'<text x="{left + _LABEL + width + 6}" y="{y + 12}">{escape(figure) or "–"}</text>',
        ]
    return lines


if __name__ == "__main__":
    CHART.write_text(chart(PAGE.read_text()))
