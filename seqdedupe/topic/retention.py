"""Retention of one topic: drops what snapshots cover, once the end of the log states what of it is still in force."""

import asyncio
from collections.abc import Callable

from seqdedupe.core.producers import Producers
from seqdedupe.log.contract import Log
from seqdedupe.topic import control
from seqdedupe.topic.control import Change
from seqdedupe.topic.flight import Flight
from seqdedupe.topic.policy import Policy


class Retention:
    """What retention does between a snapshot and the log's own `trim`.

    `policy` gives the policy in force and from which index on the log states it (-1: not known). `append_change` hands
    a control record to the log; what it returns is done when that is in force.
    """

    def __init__(
        self,
        log: Log,
        producers: Producers,
        flight: Flight,
        policy: Callable[[], tuple[Policy, int]],
        append_change: Callable[[Change], "asyncio.Future[None]"],
    ) -> None:
        self._log = log
        self._producers = producers
        self._flight = flight
        self._policy = policy
        self._append_change = append_change

    async def trim(self, covered_index: int) -> None:
        """Drops what may be dropped below this index. Raises why not: then the next snapshot is time enough."""
        first = await self._log.may_trim_to(covered_index)
        if first > self._log.first_index:
            await self._state_again(first)
            await self._log.trim(first)

    async def _state_again(self, first_index: int) -> None:
        """What is in force and stated only below this index is written again: the log alone must tell all of it.

        The policy always is, and with it the term: the markers go too, and no term must ever come twice.
        """
        await self._no_change_in_flight()
        policy, stated = self._policy()
        if stated < first_index:
            await self._append_change(policy)
        parts = control.stated_again(self._producers, first_index)
        while True:
            await self._no_change_in_flight()
            if (part := next(parts, None)) is None:
                return
            await self._append_change(part)

    async def _no_change_in_flight(self) -> None:
        """Waits while something is on its way that what is in force now would take back, written after it."""
        while self._flight.replaces_something():
            await self._flight.all_of_now()
