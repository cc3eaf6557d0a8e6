"""Patterns of names, compared with the plainest matcher that there can be."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.core import name_table as compiled
from seqdedupe.core.name_table import joined
from tests.plain import PLAIN

LETTERS = "ab/*é"

PATTERNS = st.lists(st.sampled_from(["a", "b", "/", "é", "*", "**", "${sub}"]), max_size=8).map("".join)
NAMES = st.text(LETTERS, max_size=10)


def naive(pattern: str, name: str, sub: str) -> bool:
    """Whether it matches, found out by trying everything."""
    if pattern == "*":
        return True
    tokens: list[str] = []
    rest = pattern
    while rest:
        token = next(one for one in ("${sub}", "**", rest[0]) if rest.startswith(one))
        rest = rest.removeprefix(token)
        tokens += [f"={c}" for c in sub] if token == "${sub}" else [token if "*" in token else f"={token}"]

    @lru_cache
    def matches(token: int, at: int) -> bool:
        if token == len(tokens):
            return at == len(name)
        if tokens[token].startswith("="):
            return name[at : at + 1] == tokens[token][1:] and matches(token + 1, at + 1)
        if matches(token + 1, at):
            return True
        return at < len(name) and (tokens[token] == "**" or name[at] != "/") and matches(token, at + 1)

    return matches(0, 0)


@pytest.mark.parametrize("patterns", [compiled, PLAIN["name_table"]], ids=["compiled", "plain"])
@given(pattern=PATTERNS, names=st.lists(NAMES, min_size=1, max_size=5), sub=st.text("ab*/", max_size=3))
def test_it_matches_what_a_naive_matcher_does(patterns: Any, pattern: str, names: list[str], sub: str) -> None:
    one = patterns.Pattern(pattern, {"sub": sub})
    wanted = [naive(pattern, name, sub) for name in names]
    assert [one.matches(name.encode()) for name in names] == wanted
    matched = np.zeros(len(names), np.uint8)
    one.mark(*joined([name.encode() for name in names]), matched)
    assert matched.view(bool).tolist() == wanted
    assert all(
        name.encode().startswith(one.prefix) for name, is_matched in zip(names, wanted, strict=True) if is_matched
    )


@given(pattern=PATTERNS, name=NAMES, sub=st.text("ab*/", max_size=3))
def test_a_match_is_kept_when_a_star_is_put_in(pattern: str, name: str, sub: str) -> None:
    words = {"sub": sub}
    if compiled.Pattern(pattern, words).matches(name.encode()):
        for wider in (pattern + "**", "**" + pattern):
            assert compiled.Pattern(wider, words).matches(name.encode())


def test_a_star_in_what_is_put_in_is_a_star() -> None:
    pattern = compiled.Pattern("${sub}-*", {"sub": "*"})
    assert pattern.matches(b"*-1")
    assert not pattern.matches(b"a-1")


def test_a_star_ends_at_a_slash_and_two_do_not() -> None:
    assert compiled.Pattern("a/*").matches(b"a/b")
    assert not compiled.Pattern("a/*").matches(b"a/b/c")
    assert compiled.Pattern("a/**").matches(b"a/b/c")
    assert compiled.Pattern("*").matches(b"a/b/c")
    assert not compiled.Pattern("*x").matches(b"a/x")


def test_a_hostile_name_takes_no_more_steps_than_both_lengths_multiplied() -> None:
    """A matcher that tries again from each star would take more than the age of the universe here."""
    pattern = compiled.Pattern("**a*" * 60 + "b")
    assert not pattern.matches(b"a" * 255)
