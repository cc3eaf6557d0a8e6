"""The documents say what the code does: reasons of errors, keys of the configuration."""

import ast
import pickle
import re
import tomllib
import traceback
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from bench.__main__ import FIGURES
from broker_sidecar import __main__ as main
from broker_sidecar.config import KEYS, flag_of, load, table
from seqdedupe.errors import NEVER, REASONS, error
from seqdedupe.v1 import admin_pb2, batch_pb2, publish_pb2, read_pb2

ROOT = Path(__file__).parent.parent
ERRORS = ROOT / "docs" / "reference" / "errors.md"
CONFIGURATION = ROOT / "docs" / "reference" / "configuration.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    path
    for package in ("seqdedupe", "broker_sidecar", "spark")
    for path in sorted((ROOT / package).rglob("*.py"))
    if "v1" not in path.parts
]


def rows_of(page: Path) -> dict[str, list[str]]:
    """The rows of a page's tables whose first cell is one word of code, by that word."""
    rows = {}
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        word = re.fullmatch(r"\|? ?`([\w.]+)`", cells[0])
        if line.startswith("|") and word:
            assert word[1] not in rows, f"{word[1]} has two rows"
            rows[word[1]] = cells[1:]
    return rows


def words_in(path: Path) -> Iterator[tuple[str, bool]]:
    """Every string of a source that may be a reason, and whether it is the first argument of `error()`."""
    tree = ast.parse(path.read_text())
    given = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("error", "damaged") and isinstance(node.args[0], ast.Constant):
                given.add(id(node.args[0]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[A-Z_]{3,}", node.value):
            yield node.value, id(node) in given


def used() -> dict[str, bool]:
    """The reasons that are used outside the table itself."""
    found: dict[str, bool] = {}
    for path in SOURCES:
        if path.name != "errors.py":
            for word, is_given in words_in(path):
                found[word] = found.get(word, False) or is_given
    return found


def codes_of_sections() -> dict[str, str]:
    """The codes of reasons whose table has no column for them: a sentence above it has the code and its exceptions."""
    codes: dict[str, str] = {}
    for section in ERRORS.read_text().split("\n## "):
        if "| reason | cause |" in section:
            [code] = re.findall(r"The\s+code\s+is\s+`(\w+)`", section)
            codes |= dict.fromkeys(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE), code)
            codes |= {reason: other for other, reason in re.findall(r"`([A-Z_]+)`\s+for\s+`(\w+)`", section)}
    return codes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_holds_two_versions_of_itself(page: Path) -> None:
    """What a merge could not decide stands between such lines, and no other tool looks at pages."""
    assert not re.findall(r"^(?:<{7}|>{7}|\|{7})(?: .*)?$", page.read_text(), re.MULTILINE)


def test_every_reason_has_its_row_with_code_and_retry() -> None:
    rows = rows_of(ERRORS)
    assert rows.keys() == REASONS.keys()
    codes = codes_of_sections()
    for reason, cells in rows.items():
        code, cause, cure, *retry = [codes[reason], *cells] if reason in codes else cells
        known = REASONS[reason]
        assert code == known.code, reason
        assert hasattr(grpc.StatusCode, code)
        expected = "no" if known.retry_delay_ms == NEVER else f"{known.retry_delay_ms} ms"
        # A table without the column is one of errors that no other attempt cures.
        assert (retry or ["no"]) == [expected if known.retry_delay_ms else "at once"], reason
        assert cause.endswith((".", ".)"))
        assert cure.endswith((".", ".)", "?"))


def test_every_reason_is_used_and_every_one_used_is_in_the_table() -> None:
    found = used()
    assert not REASONS.keys() - found.keys(), "in the table, but nowhere used"
    assert not {word for word, is_given in found.items() if is_given} - REASONS.keys(), "used, but not in the table"


def test_the_schema_names_only_reasons_that_exist() -> None:
    """A word in capitals in the comments of the schema is a reason or a value of an enum."""
    values = {
        value.name
        for module in (admin_pb2, batch_pb2, publish_pb2, read_pb2)
        for enum in module.DESCRIPTOR.enum_types_by_name.values()
        for value in enum.values
    }
    short = {value.removeprefix("VERDICT_") for value in values}
    for path in sorted((ROOT / "proto").rglob("*.proto")):
        words = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", path.read_text()))
        assert words - {"P", "N"} <= REASONS.keys() | values | short, path


def test_hints_and_codes_are_what_the_answers_need() -> None:
    for reason, known in REASONS.items():
        assert known.hint.endswith((".", "?")), reason
        # A gRPC status that says "never again" must not come with a delay, and the other way round.
        assert (known.code == "UNAVAILABLE") <= (known.retry_delay_ms >= 0), reason


def test_a_traceback_says_what_to_do() -> None:
    """Also that of an error which comes from another process."""
    failure = error("UNAUTHENTICATED", "the call shows no token")
    for one in (failure, pickle.loads(pickle.dumps(failure))):
        assert traceback.format_exception_only(one)[1:] == [failure.hint + "\n"]


def test_the_page_has_the_table_of_keys() -> None:
    assert table() in CONFIGURATION.read_text()
    assert rows_of(CONFIGURATION).keys() >= KEYS.keys()


def test_the_example_file_is_valid_and_every_key_is_a_flag(tmp_path: Path) -> None:
    [example] = re.findall(r"```toml\n(.*?)```", CONFIGURATION.read_text(), re.DOTALL)
    file = tmp_path / "sidecar.toml"
    file.write_text(example)
    config = load(file, {}, {})
    assert {key: getattr(config, key) for key in tomllib.loads(example)} == tomllib.loads(example)
    page = CONFIGURATION.read_text()
    [shell] = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    words = shell.split()
    environment = dict(word.split("=", 1) for word in words if "=" in word)
    flags = dict(pairwise(words))
    changed = load(file, environment, {"listen": flags["--listen"]})
    assert (changed.log_level, changed.listen) == ("debug", "127.0.0.1:6660")
    assert changed.allow_auto_topic_creation is False


def test_help_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main.main(["--help"])
    assert e.value.code == 0
    printed = capsys.readouterr().out
    for name in KEYS:
        assert f"{flag_of(name)} " in printed


def test_each_figure_in_the_table_of_benchmarks_is_one() -> None:
    rows = rows_of(ROOT / "docs" / "internals" / "benchmarks.md")
    assert "publish" in rows
    assert not set(rows) - set(FIGURES)
