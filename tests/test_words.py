"""`tools.words` counts what makes prose hard to read, and only that."""

import pytest

from tools.words import LONG_CELL, LONG_SENTENCE, MAX_CELL_WORDS, MAX_SENTENCE_WORDS, findings


def found(text: str, *, is_page: bool = True) -> list[tuple[int, str]]:
    return [(finding.line, finding.what) for finding in findings(text, is_page=is_page)]


def words(count: int) -> str:
    return " ".join(["word"] * count)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("it fails so often", "so many / so long / so often / so much"),
        ("Whoever asks", "whoever / whatever / whichever"),
        ("x\nthe client is told", "is told / are told"),
        ("made anew", "anew"),
        ("It ends. Of these none is left.", "sentence that begins with Of"),
        ("# Of these", "sentence that begins with Of"),
        ("a thread of its own", "of its own / of one's own"),
    ],
)
def test_a_phrase_is_found_on_its_line(text: str, what: str) -> None:
    assert found(text, is_page=False) == [(text.count("\n") + 1, what)]


def test_what_is_right_does_not_count() -> None:
    assert found("so long as it lasts, so much that it is full. Of course. The end of it.", is_page=False) == []


def test_a_long_sentence_is_found_where_it_begins() -> None:
    half = words(MAX_SENTENCE_WORDS // 2)
    assert found(f"# {words(99)}\n\nShort. {half}\n{half}.\n") == []
    assert found(f"# Title\n\nShort.\n{half}\n{half} more.\n") == [(4, LONG_SENTENCE)]


@pytest.mark.parametrize("bullet", ["- ", "* ", "1. "])
def test_an_item_of_a_list_ends_a_sentence(bullet: str) -> None:
    item = f"{bullet}{words(MAX_SENTENCE_WORDS)}\n"
    assert found(item * 3) == []
    assert found(item + f"  more\n{item}") == [(1, LONG_SENTENCE)]


def test_each_cell_of_a_table_is_counted() -> None:
    cell = words(MAX_CELL_WORDS)
    assert found(f"| a | b |\n|---|---|\n| {cell} | {cell} |\n") == []
    assert found(f"| a | b |\n|---|---|\n| {cell} | {cell} more |\n") == [(3, LONG_CELL)]
    assert found(f"| {cell} \\| more | b |\n") == [(1, LONG_CELL)]


def test_code_and_quotations_of_old_texts_do_not_count() -> None:
    long = words(MAX_SENTENCE_WORDS + 1)
    assert found(f'```text\nanew {long}\n```\n> anew {long}\n\n- *was* "made anew\n{long}"\n') == []
    assert found("```text\n```\nmade anew\n") == [(3, "anew")]
    assert found('x = """\n```\nmade anew\n```\n"""', is_page=False) == [(3, "anew")]
