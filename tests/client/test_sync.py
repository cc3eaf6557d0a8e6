"""The client for threads says what the one for asyncio says: most of it is made from that, the producer is compared."""

import ast
import inspect
from collections.abc import Mapping

import pytest

from seqdedupe import client
from seqdedupe.client import blocking
from tools.async_to_sync import MADE, for_threads, made


def test_what_is_there_is_what_is_made() -> None:
    """If not: python -m tools.async_to_sync. Its format is ruff's."""
    assert ast.dump(ast.parse(MADE.read_text())) == ast.dump(ast.parse(made()))


def public(of: type) -> Mapping[str, object]:
    return {name: value for name, value in inspect.getmembers(of) if not name.startswith("_")}


def test_the_producers_have_the_same_calls() -> None:
    assert list(public(blocking.Producer)) == list(public(client.Producer))


@pytest.mark.parametrize("name", [name for name, value in public(client.Producer).items() if callable(value)])
def test_the_calls_of_the_producers_say_the_same(name: str) -> None:
    awaited, blocks = getattr(client.Producer, name), getattr(blocking.Producer, name)
    ours, theirs = inspect.signature(blocks), inspect.signature(awaited)
    assert ours.parameters == theirs.parameters
    assert (
        inspect.formatannotation(ours.return_annotation).rpartition(".")[2]
        == (inspect.formatannotation(theirs.return_annotation).rpartition(".")[2])
    )
    assert blocks.__doc__ == for_threads(awaited.__doc__)
