"""The chart of brokers shows the figures of the README's table, and loads nothing."""

import re
from xml.etree import ElementTree

import pytest

from tools.chart import CHART, PAGE, chart, panels, value


def test_the_chart_is_that_of_the_table() -> None:
    assert CHART.read_text() == chart(PAGE.read_text()), "run `python -m tools.chart` and commit it"


def test_another_figure_makes_another_chart() -> None:
    page = PAGE.read_text()
    assert "| 1.33M · 1.0 |" in page
    assert chart(page.replace("| 1.33M · 1.0 |", "| 1.34M · 1.0 |")) != chart(page)


def test_each_broker_has_a_name_in_each_panel_and_a_figure_or_a_dash() -> None:
    drawn = panels(PAGE.read_text())
    texts = [text.text for text in ElementTree.fromstring(CHART.read_text()).iter("{http://www.w3.org/2000/svg}text")]
    for panel in drawn:
        at = texts.index(panel.title) + 1
        told = texts[at : at + 2 * len(panel.figures)]
        assert told == [text for pair in panel.figures.items() for text in (pair[0], pair[1] or "–")]
    assert [bool(figure) for figure in drawn[0].figures.values()] == [True, True, True, False, True]


def test_nothing_is_loaded() -> None:
    text = CHART.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.findall(r"//|url\(|@import|href|src=|<script|<image", text)


@pytest.mark.parametrize(("figure", "number"), [("0.54", 0.54), ("1.33M", 1_330_000), ("1,760k", 1_760_000)])
def test_value(figure: str, number: float) -> None:
    assert value(figure) == number


def test_a_table_without_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks a row"):
        panels("| | seqdedupe | Kafka |\n|---|---|---|\n| server's memory, MB | 245 | 570 |\n")
    with pytest.raises(ValueError, match="is no figure"):
        value("no")
