"""What users read is as the golden files have it: texts of errors, lines of the log, the help of every command."""

import ast
from difflib import unified_diff

import pytest

from tests.golden.files import FOLDER, NAMES, content
from tests.golden.texts import of_module

SAMPLE = '''
"""A docstring is no text."""

WHY = "nobody has used it"
GONE = "TOPIC_NOT_FOUND", "there is no {name}"


@click.option("--limit", help="In the help alone.")
def check(name: "dict[str, int]", is_new: bool) -> None:
    """Nor is this."""
    logger.warning("topic %s " "goes", name)
    logger.log(level, "topic %s stays", name)
    what = "new" if is_new else f"{name} of old"
    if is_new:
        raise error("RECOVERING", WHY, hint="Wait a while.")
    raise error("TOPIC_EXISTS" if is_new else "DRAINING", f"topic {name!r} is {what}: {1:.0f} s" + f" ago{'s' * 2}")


def say(found: str) -> None:
    why = "it is " + found
    try:
        click.echo("all is well")
        re.compile("a pattern [a-z]")
        query("SELECT name FROM topics")
        lone("word")
    except ValueError:
        raise error(found, why)
'''


@pytest.mark.parametrize("name", NAMES)
def test_what_users_read(name: str) -> None:
    golden = FOLDER / name
    changes = "\n".join(unified_diff(golden.read_text().splitlines(), content(name).splitlines(), n=0, lineterm=""))
    assert not changes, f"{name} differs; if it should, run `python -m tests.golden` and commit it:\n{changes}"


def test_what_a_text_is() -> None:
    assert sorted(of_module(ast.parse(SAMPLE))) == [
        "error DRAINING: topic {} is {}: {} s ago{}",
        "error RECOVERING: nobody has used it",
        "error TOPIC_EXISTS: topic {} is {}: {} s ago{}",
        "error TOPIC_NOT_FOUND: there is no {}",
        "error {}: it is {}",
        "hint: Wait a while.",
        "log warning: topic %s goes",
        "log {}: topic %s stays",
        "text: all is well",
        "text: {} of old",
    ]
