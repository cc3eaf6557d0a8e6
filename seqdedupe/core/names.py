"""The names of a topic's producers, by name and by number, in a table that never grows as a whole.

A dict of ten million names doubles in half a second. So names are dealt to many small dicts by their hash, and as names
come one dict after the other is split in two (linear hashing): whoever adds a name waits for one split at most.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

NAMES_A_PART = 1024
"""On the average. The largest has about twice as many, and is split in some hundred microseconds."""

NAMES_A_PAGE = 4096


class Names:
    """Names, each with its number: its place in the order in which they came."""

    def __init__(self) -> None:
        self._loaded: dict[bytes, int] = {}
        """Those that came at once. Nothing is added to it: it is made much sooner than many dicts, and never grows."""
        self._parts: list[dict[bytes, int]] = [{}]
        self._undivided = 1
        """So many parts there were when the parts were last split all: a power of two."""
        # Full pages are tuples: the garbage collector does not look into them again and again.
        self._pages: list[Sequence[bytes]] = []
        self._newest: list[bytes] = []

    @classmethod
    def of(cls, names: list[bytes]) -> "Names":
        """These names, which are different, in this order: quicker than one after the other."""
        self = cls()
        self._take(names)
        return self

    def _take(self, names: list[bytes]) -> None:
        """These are all names from now on."""
        whole = len(names) // NAMES_A_PAGE * NAMES_A_PAGE
        self._pages = [tuple(names[first : first + NAMES_A_PAGE]) for first in range(0, whole, NAMES_A_PAGE)]
        self._newest = names[whole:]
        self._loaded = dict(zip(names, range(len(names)), strict=True))
        self._parts, self._undivided = [{}], 1

    def __len__(self) -> int:
        return len(self._pages) * NAMES_A_PAGE + len(self._newest)

    def __contains__(self, name: bytes) -> bool:
        return self.number(name) is not None

    def number(self, name: bytes) -> int | None:
        """The name's number, None if it never came."""
        if (loaded := self._loaded.get(name)) is not None:
            return loaded
        part = hash(name) & 2 * self._undivided - 1
        if part >= len(self._parts):
            part -= self._undivided
        return self._parts[part].get(name)

    def numbers(self, names: list[bytes]) -> list[int]:
        """Their numbers, -1 for those that never came."""
        parts, count, half = self._parts, len(self._parts), self._undivided
        bits = 2 * half - 1
        loaded = self._loaded.get
        return [
            number
            if (number := loaded(name, -1)) >= 0
            else parts[part if (part := hash(name) & bits) < count else part - half].get(name, -1)
            for name in names
        ]

    def add_all(self, names: list[bytes]) -> list[int]:
        """Their numbers, new ones for names that are new."""
        if len(names) > max(len(self), NAMES_A_PART):
            self._take(list(dict.fromkeys(chain(self.some(0, len(self)), names))))
            return self.numbers(names)
        numbers: list[int] = []
        for first in range(0, len(names), NAMES_A_PART):
            numbers += self._add_some(names[first : first + NAMES_A_PART])
            while len(self) - len(self._loaded) > len(self._parts) * NAMES_A_PART:
                self._split()
        return numbers

    def _add_some(self, names: list[bytes]) -> list[int]:
        parts, count, half = self._parts, len(self._parts), self._undivided
        bits = 2 * half - 1
        numbers, newest, new = [], self._newest, len(self)
        loaded = self._loaded.get
        for name in names:
            number = loaded(name, -1)
            if number < 0:
                part = hash(name) & bits
                number = parts[part if part < count else part - half].setdefault(name, new)
            numbers.append(number)
            if number == new:
                newest.append(name)
                new += 1
        while len(newest) >= NAMES_A_PAGE:
            self._pages.append(tuple(newest[:NAMES_A_PAGE]))
            del newest[:NAMES_A_PAGE]
        return numbers

    def _split(self) -> None:
        """Deals the next part's names to itself and to a new part."""
        bit = self._undivided
        splits = len(self._parts) - bit
        names = self._parts[splits]
        self._parts[splits] = {name: number for name, number in names.items() if not hash(name) & bit}
        self._parts.append({name: number for name, number in names.items() if hash(name) & bit})
        if len(self._parts) == 2 * bit:
            self._undivided = 2 * bit

    def some(self, first: int, count: int) -> list[bytes]:
        """The names from this number on, at most `count`."""
        end = min(first + count, len(self))
        names: list[bytes] = []
        while first < end:
            page, at = divmod(first, NAMES_A_PAGE)
            names += self._page(page)[at : at + end - first]
            first = (page + 1) * NAMES_A_PAGE
        return names

    def names(self, numbers: list[int]) -> list[bytes]:
        """The names with these numbers."""
        return [self._page(number // NAMES_A_PAGE)[number % NAMES_A_PAGE] for number in numbers]

    def _page(self, page: int) -> Sequence[bytes]:
        return self._pages[page] if page < len(self._pages) else self._newest

    def clear(self) -> Iterator[None]:
        """Gives all of it back, a part and what it has of the pages at each step."""
        while self._loaded or self._parts:
            if self._loaded:
                for _ in range(min(NAMES_A_PART, len(self._loaded))):
                    self._loaded.popitem()
            else:
                self._parts.pop()
            if self._pages:
                self._pages.pop()
            yield
        self._parts, self._undivided = [{}], 1
        self._pages, self._newest = [], []
