"""Pages of a topic's producers, from one to the next by an opaque number, while names come and are forgotten."""

import secrets
from weakref import WeakKeyDictionary

from seqdedupe.core.producers import Producers
from seqdedupe.errors import error

_NUMBER_BITS = 32
_MASK = 2**31 - 1

Page = list[tuple[int, bytes]]
"""Numbers and names."""


class Listing:
    """Gives each page the place of the next one: the producer number, and of which numbering that is.

    Numbers change when names of forgotten producers are freed, when a topic is opened again, and with the process.
    """

    def __init__(self) -> None:
        self._numberings: WeakKeyDictionary[Producers, int] = WeakKeyDictionary()

    def page(self, producers: Producers, place: int, count: int) -> tuple[Page, int]:
        """So many names from a place on (0: the first one), those of forgotten producers left out; and the next place,
        0 at the end. A place of another numbering is that of the first name: none is ever left out.

        Raises INVALID_REQUEST.
        """
        if place < 0:
            raise error("INVALID_REQUEST", f"offset is {place}: it should be 0, or the next_offset of a page")
        numbering = self._numberings.setdefault(producers, secrets.randbelow(_MASK)) + producers.generation & _MASK
        first = place & 2**_NUMBER_BITS - 1 if place >> _NUMBER_BITS == numbering else 0
        names = producers.names_from(first, count) if first < len(producers) else []
        page = [(number, name) for number, name in enumerate(names, first) if producers.is_known(number)]
        after = first + len(names)
        return page, numbering << _NUMBER_BITS | after if after < len(producers) else 0
