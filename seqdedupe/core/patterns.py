"""Patterns of names: bytes that stand for themselves, `*` for any but a `/`, `**` for any at all.

A pattern is matched in one pass over the name, all its beginnings at once: whatever name somebody thinks of, it takes
no longer than the lengths of both, multiplied.
"""

import re
from collections.abc import Iterator, Mapping

import numpy as np

from seqdedupe.core.name_table import joined
from seqdedupe.format.jit import Bytes, Int64s2, Uint8s, kernel

_SLASH = ord("/")
_WITHIN = 1
_OVER = 2
_PARTS = re.compile(r"\$\{(?P<word>\w+)\}|(?P<stars>\*+)|[^*]", re.DOTALL)


@kernel()
def mark_matches(raw: Bytes, spans: Int64s2, literal: Bytes, gaps: Bytes, matched: Uint8s) -> int:
    """Sets `matched` to 1 for each of the names at these places that the pattern matches. Returns how many names.

    `gaps[i]` says what may stand before `literal[i]`, and the last one what may stand after all of it.
    """
    end = literal.shape[0]
    # Whether what came so far is matched by the first so many bytes of `literal`, and what stands between them.
    reached = np.zeros(end + 1, np.uint8)
    for k in range(spans.shape[0]):
        reached[:] = 0
        reached[0] = 1
        lowest = highest = 0
        for at in range(spans[k, 0], spans[k, 1]):
            byte = raw[at]
            first, last = end + 1, -1
            for i in range(min(highest + 1, end), lowest - 1, -1):
                stays = reached[i] != 0 and (gaps[i] == _OVER or (gaps[i] == _WITHIN and byte != _SLASH))
                goes_on = i > 0 and reached[i - 1] != 0 and literal[i - 1] == byte
                reached[i] = stays or goes_on
                if reached[i] != 0:
                    first, last = i, max(last, i)
            lowest, highest = first, last
            if last < 0:
                break
        if reached[end] != 0:
            matched[k] = 1
    return int(spans.shape[0])


class Pattern:
    """A pattern, compiled. `words` are put in for `${word}`, and stand for themselves: a `*` in one is a `*`.

    A pattern that is nothing but `*` matches everything.
    """

    def __init__(self, text: str, words: Mapping[str, str] | None = None) -> None:
        literal, gaps = bytearray(), [0]
        for part, is_literal in _parts("**" if text == "*" else text, words or {}):
            if is_literal:
                literal += part
                gaps += [0] * len(part)
            else:
                gaps[-1] = max(gaps[-1], _WITHIN if len(part) == 1 else _OVER)
        self._literal = bytes(literal)
        self._is_literal = not any(gaps)
        self._columns = np.frombuffer(bytes(literal) + b"\0", np.uint8)[:-1], np.array(gaps, np.uint8)
        self.prefix = self._literal[: next((i for i, gap in enumerate(gaps) if gap), len(literal))]
        """What all names that it matches begin with."""
        self.work = len(literal) + 1
        """How much each byte of a name may take, at most."""

    def matches(self, name: bytes) -> bool:
        """Whether it matches all of this name."""
        if self._is_literal:
            return name == self._literal
        if not name.startswith(self.prefix):
            return False
        matched = np.zeros(1, np.uint8)
        self.mark(*joined([name]), matched)
        return bool(matched[0])

    def mark(self, raw: Bytes, spans: Int64s2, matched: Uint8s) -> None:
        """Sets `matched` to 1 for those of the names at these places of a buffer that it matches."""
        mark_matches(raw, spans, *self._columns, matched)


def words_in(text: str) -> list[str]:
    """The words for which something is put in."""
    return [found["word"] for found in _PARTS.finditer(text) if found["word"]]


def _parts(text: str, words: Mapping[str, str]) -> Iterator[tuple[bytes, bool]]:
    """What a pattern consists of, and whether that stands for itself. Raises KeyError for a word that is not there."""
    for found in _PARTS.finditer(text):
        if found["stars"]:
            yield found["stars"].encode(), False
        else:
            yield (words[found["word"]] if found["word"] else found[0]).encode(errors="surrogatepass"), True
