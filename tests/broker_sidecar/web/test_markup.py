"""Everything that stands in a page as text stays text."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from broker_sidecar.web.pages import HEIGHT, WIDTH, chart, joined, tag
from seqdedupe.figures import merged


class _Reader(HTMLParser):
    """What a browser makes of it."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_an_element() -> None:
    made = tag("td", "a<b", 5, None, tag("a", "x", href="/?a=1&b=2"), class_="name", data_label='"', hidden=False)
    assert made == '<td class="name" data-label="&quot;">a&lt;b5<a href="/?a=1&amp;b=2">x</a></td>'
    assert tag("input", required=True, value="") == '<input required value="">'


@given(st.text("<>&;\"'/=!-a# ü日"))
def test_text_stays_text(text: str) -> None:
    read = _Reader(tag("p", text, title=text))
    assert read.tags == [("p", {"title": text})]
    assert read.text == text


def test_what_turns_the_direction_of_writing_is_shown() -> None:
    assert joined("a\u202eb\x00") == "a\\u202eb\\x00"


def test_a_chart_stays_within_its_frame() -> None:
    drawn = chart([0, 5, 10], 5, "label", "plain")
    assert f"M{WIDTH / 2:.1f} {HEIGHT}.0L{WIDTH * 3 / 4:.1f} 21.0L{WIDTH}.0 2.0" in drawn
    assert "path" not in chart([], 5, "label", "plain")
    assert "path" not in chart([0, 0], 5, "label", "plain")
    assert "path" in chart([3], 5, "label", "plain")


def test_merging_leaves_out_what_is_left_over_at_the_beginning() -> None:
    assert merged([9, 1, 2, 3, 4], 2) == [3, 7]
    assert merged([1], 2) == []
