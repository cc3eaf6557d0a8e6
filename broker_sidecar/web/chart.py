"""Small charts as SVG: what happened in the last minutes, the newest on the right."""

from collections.abc import Sequence

from broker_sidecar.web.markup import Markup, tag

WIDTH = 200
HEIGHT = 40
"""In units of its own: a chart is as large as the page's style says."""

_ROOM = 2
"""Above the highest value, for the line."""


def chart(values: Sequence[int], intervals: int, label: str, kind: str) -> Markup:
    """A line and the area below it. `intervals` are the whole width; `kind` is a class of the style sheet.

    `label` says the same to who does not see it.
    """
    attributes = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "preserveAspectRatio": "none"}
    drawn = _drawn(values, intervals) if any(values) else ()
    ground = tag("line", x1=0, x2=WIDTH, y1=HEIGHT, y2=HEIGHT, class_="ground")
    return tag("svg", ground, *drawn, role="img", aria_label=label, class_=f"chart {kind}", **attributes)


def _drawn(values: Sequence[int], intervals: int) -> tuple[Markup, Markup]:
    highest = max(values)
    step = WIDTH / max(intervals - 1, 1)
    first = WIDTH - step * (len(values) - 1)
    points = [
        f"{first + k * step:.1f} {HEIGHT - value / highest * (HEIGHT - _ROOM):.1f}" for k, value in enumerate(values)
    ]
    line = "M" + "L".join(points)
    area = f"{line}L{WIDTH} {HEIGHT}L{first:.1f} {HEIGHT}Z"
    return tag("path", d=area, class_="area"), tag("path", d=line, class_="line")
