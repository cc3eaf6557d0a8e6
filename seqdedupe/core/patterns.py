"""Patterns of names. `*` matches any bytes but `/`, `**` matches any bytes, and other bytes match themselves.

A match is one pass over the name that tracks all partial matches at once. For any name it takes at most the product of
both lengths.
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
    """Set `matched` to 1 for each name at `spans` that the pattern matches. Return the number of names.

    `gaps[i]` says what may stand before `literal[i]`; the last gap says what may stand after all of it.
    """
    end = literal.shape[0]
    # reached[i]: whether the first i bytes of `literal`, with their gaps, match the bytes of the name so far.
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
    """A compiled pattern. `${word}` is replaced by its text in `words`, in which a `*` matches only itself.

    The pattern `*` alone matches everything.
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
        """The beginning of all names that the pattern matches."""
        self.work = len(literal) + 1
        """The most steps that one byte of a name can take."""

    def matches(self, name: bytes) -> bool:
        """Whether the pattern matches this whole name."""
        if self._is_literal:
            return name == self._literal
        if not name.startswith(self.prefix):
            return False
        matched = np.zeros(1, np.uint8)
        self.mark(*joined([name]), matched)
        return bool(matched[0])

    def mark(self, raw: Bytes, spans: Int64s2, matched: Uint8s) -> None:
        """Set `matched` to 1 for each name at `spans` of a buffer that the pattern matches."""
        mark_matches(raw, spans, *self._columns, matched)


def words_in(text: str) -> list[str]:
    """Return the words of `${word}` in a pattern."""
    return [found["word"] for found in _PARTS.finditer(text) if found["word"]]


def _parts(text: str, words: Mapping[str, str]) -> Iterator[tuple[bytes, bool]]:
    """Yield the parts of a pattern, and whether each is literal. Raises KeyError for an unknown word."""
    for found in _PARTS.finditer(text):
        if found["stars"]:
            yield found["stars"].encode(), False
        else:
            yield (words[found["word"]] if found["word"] else found[0]).encode(errors="surrogatepass"), True
