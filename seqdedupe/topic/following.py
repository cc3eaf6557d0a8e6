"""Streams of pages, and what followers share: at the end of a topic all get one page, and they take turns.

A page that goes out costs the event loop the same whether it holds one batch or a hundred. So the more followers there
are, the more is gathered for each.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from weakref import WeakKeyDictionary

from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.contract import LargerRecordError
from seqdedupe.topic.base import State
from seqdedupe.topic.reading import PAGE_BYTES, Page, read_page
from seqdedupe.topic.topic import Topic

TURNS_AT_ONCE = 2
TURN_SECONDS = 0.002
"""So many followers go on in so long, a thousand a second: about a tenth of what the event loop can do.

Alone or in twos they get each commit at once; of a hundred each gets what a tenth of a second brings.
"""

MAX_PAGES = 16
"""Held for those who are about to take them, 16 MiB about; the one not taken for longest goes first."""


class Turns:
    """Lets TURNS_AT_ONCE go on in TURN_SECONDS, in the order in which they came."""

    def __init__(self) -> None:
        self._left = TURNS_AT_ONCE
        # A dict, for its order.
        self._waiting: dict[asyncio.Future[None], None] = {}

    async def take(self) -> None:
        """Returns when it is the caller's turn: at once unless there were many just now."""
        loop = asyncio.get_running_loop()
        if self._left == TURNS_AT_ONCE:
            loop.call_later(TURN_SECONDS, self._go_on)
        if self._left:
            self._left -= 1
            # Whoever published hears of the same commit first.
            await asyncio.sleep(0)
            return
        turn = loop.create_future()
        self._waiting[turn] = None
        try:
            await turn
        finally:
            self._waiting.pop(turn, None)

    def _go_on(self) -> None:
        self._left = TURNS_AT_ONCE
        while self._left and self._waiting:
            turn = next(iter(self._waiting))
            del self._waiting[turn]
            # Whoever is leaving at this moment must not cost the next one its turn.
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if self._left < TURNS_AT_ONCE:
            asyncio.get_running_loop().call_later(TURN_SECONDS, self._go_on)


class Followers:
    """What the followers of all topics of a sidecar share. `encode` makes of a page what goes out."""

    def __init__(self, encode: Callable[[Topic, Page], bytes]) -> None:
        self.turns = Turns()
        self._encode = encode
        self._ends: WeakKeyDictionary[Topic, int] = WeakKeyDictionary()
        """Up to where the newest page of each goes."""
        self._count = itertools.count()
        self._numbers: WeakKeyDictionary[Topic, int] = WeakKeyDictionary()
        """Of the topics. One that was opened again has another one: its log may have been replaced meanwhile."""
        self._pages: OrderedDict[tuple[int, int, int], asyncio.Future[Page | None]] = OrderedDict()

    def end(self, topic: Topic, index: int) -> int:
        """Up to where a follower that has all below `index` reads now, so that all end at the same message."""
        end = self._ends.get(topic, 0)
        if end <= index:
            end = self._ends[topic] = topic.readable_index
        return end

    async def page(self, topic: Topic, from_index: int, stop_index: int, max_bytes: int) -> Page | None:
        """`read_page`, made once for all who ask for the same; None if each has to read for itself.

        That is when it cannot be read, so that each hears why, when whoever was reading it went away, and for a record
        that is larger than pages are. It may be larger than `max_bytes` where another one has more room.
        """
        key = self._numbers.setdefault(topic, next(self._count)), from_index, stop_index
        if (made := self._pages.get(key)) is not None:
            self._pages.move_to_end(key)
            # Whoever is cancelled here must not cancel it for the others.
            return made.result() if made.done() else await asyncio.shield(made)
        made = self._pages[key] = asyncio.get_running_loop().create_future()
        if len(self._pages) > MAX_PAGES:
            self._pages.popitem(last=False)
        page = None
        try:
            size = min(max_bytes, PAGE_BYTES)
            page = self.encoded(topic, await read_page(topic, from_index, stop_index, size, most_bytes=size))
        except (SeqdedupeError, LargerRecordError):
            pass
        finally:
            made.set_result(page)
        return page

    def encoded(self, topic: Topic, page: Page) -> Page:
        """A page as it goes out. What it was read with is not held any more."""
        data = self._encode(topic, page)
        # The records are where its encoding begins: they are held once.
        return Page(memoryview(data)[: len(page.records)], page.next_index, page.skipped, data)


async def _any_room(least_bytes: int) -> int:
    return max(PAGE_BYTES, least_bytes)


async def read_on(
    topic: Topic,
    from_index: int,
    stop_index: int | None,
    room: Callable[[int], Awaitable[int]] = _any_room,
    *,
    skip_damaged: bool = False,
    followers: Followers | None = None,
) -> AsyncIterator[Page]:
    """Pages from an index on: up to `stop_index`, waiting for messages that are not there yet; for ever if None.

    `room` is asked before each how many bytes it may take, and again, for no fewer than a record takes, where that is
    larger. With `followers` they come encoded, and who has read all there was takes turns with the others, and gets the
    pages that they get. Ends early when the topic closes. Raises NOT_OWNER or
    LOG_DAMAGED when no more messages will come from here, and LOG_DAMAGED for what is damaged where it reads unless
    `skip_damaged`.
    """
    here = from_index
    had_all = here >= topic.readable_index
    while stop_index is None or here < stop_index:
        await topic.wait_for_message(here)
        sharing = followers if had_all else None
        if sharing is not None:
            await sharing.turns.take()
            if topic.state is State.DRAINING:
                # Its log may be gone by now.
                return
        end = topic.readable_index if sharing is None else sharing.end(topic, here)
        if stop_index is not None:
            end = min(end, stop_index)
        if end <= here:
            topic.check_may_go_on()
            return
        most_bytes = await room(0)
        page = None if sharing is None else await sharing.page(topic, here, end, most_bytes)
        if page is not None and len(page.records) > most_bytes:
            page = None
        while page is None:
            try:
                max_bytes = min(most_bytes, PAGE_BYTES)
                page = await read_page(topic, here, end, max_bytes, skip_damaged=skip_damaged, most_bytes=most_bytes)
            except LargerRecordError as e:
                most_bytes = e.size
            else:
                break
            most_bytes = await room(most_bytes)
        if followers is not None and not page.encoded:
            page = followers.encoded(topic, page)
        yield page
        here = page.next_index
        had_all = here >= end
        del page  # until there is another one
