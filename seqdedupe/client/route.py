"""Which sidecar is asked: the one place that decides it, without any I/O."""

import logging

from seqdedupe.address import SidecarAddress
from seqdedupe.client.sidecars import Sidecars
from seqdedupe.errors import SeqdedupeError, UnavailableError, error

logger = logging.getLogger("seqdedupe.client")

MAX_REDIRECTS = 5
"""So often in a round a sidecar is believed that names the owner; then it is the turn of the next one in the list."""

MAX_RETURNS = 5
"""So often, until it goes well, one that was asked just now is asked again after a pause since another one names it: a
topic moves between them. Those that have nothing to do with it may take long to answer, or not answer at all."""

OWNER_ADDRESS = "owner_address"
"""The number of NOT_OWNER that says where the owner can be reached. It may be missing, or empty."""

_LEADS_ELSEWHERE = {"NOT_OWNER", "DRAINING", "UNREACHABLE", "TLS_FAILED", "NOT_A_SIDECAR", "OUTCOME_UNKNOWN"}
"""With these another sidecar is asked; with all others the same one again, later."""

_IS_DOUBTED = {"TOPIC_NOT_FOUND", "NO_STATE"}
"""What says more of the sidecar than of the topic."""

_IS_SURE = "shard"
"""A number of TOPIC_NOT_FOUND: said by the only one that could have it."""

_PASSES = {"NOT_OWNER", "DRAINING"}
"""What sidecars say while a topic moves from one to another."""


class Route:
    """The sidecars of a topic, and which one is asked now (`address`).

    They are asked in the topic's order, each once in a round, and whoever one of them names as the owner before the
    next in the list. After a round one waits, and begins again with the first; or with the one that was asked already
    and is named as the owner all the same.
    """

    def __init__(self, sidecars: Sidecars, topic: str = "", *, first: SidecarAddress | None = None) -> None:
        """`first` is where the topic was found last. Without a topic the order is that of the list."""
        self._sidecars = sidecars
        self._topic = topic
        self._order = sidecars.in_order(topic)
        self.address = first or self._order[0]
        self._asked: set[SidecarAddress] = set()  # in this round
        self._said: dict[SidecarAddress, UnavailableError] = {}  # last, the latest at the end
        self._unknown_to: set[SidecarAddress] = set()  # since it last went well
        self._redirects = 0
        self._returns = 0  # since it last went well
        self._is_over = False  # the round
        self._ignored = ""

    @property
    def is_one(self) -> bool:
        """Whether there is nowhere else to go."""
        return self._sidecars.is_one

    def moves_on(self, why: UnavailableError) -> bool:
        """Takes what came of asking `address`. True: that is another one now, to be asked at once; else wait first."""
        if self._is_over:
            self._begin_round()
        self._asked.add(self.address)
        self._said.pop(self.address, None)
        self._said[self.address] = why
        if why.reason not in _LEADS_ELSEWHERE:
            self._is_over = True
            return False
        owner = self._owner(why)
        if owner is not None and self._comes_back_to(owner):
            self._is_over = True
            self.address = owner
            return False
        following = self._following(owner)
        self._is_over = following is None
        self.address = following or self._order[0]
        return not self._is_over

    def doubted(self, e: SeqdedupeError) -> SeqdedupeError:
        """What an error of `address` comes to: one that knows no such topic need not have heard of it yet, and one that
        has no state of it may get it from the owner. So it counts as NOT_OWNER until all in the list have said so; but
        one that has the topic's shard knows."""
        if e.reason not in _IS_DOUBTED or self.is_one or _IS_SURE in e.numbers:
            return e
        self._unknown_to.add(self.address)
        return e if self._unknown_to.issuperset(self._order) else error("NOT_OWNER", e.message)

    def goes_well(self) -> None:
        """It does with `address`; if that changes, all may be asked."""
        if self._said or self._unknown_to:
            self._said.clear()
            self._unknown_to.clear()
            self._returns = 0
            self._begin_round()

    def _begin_round(self) -> None:
        self._said = {address: why for address, why in self._said.items() if address in self._order}
        self._asked.clear()
        self._redirects = 0
        self._is_over = False

    @property
    def passes(self) -> bool:
        """Whether one of those that were asked in this round has said what is otherwise in a moment."""
        return not self.is_one and any(self._said[address].reason in _PASSES for address in self._asked)

    def told(self) -> UnavailableError:
        """What each of those that were asked since it last went well has said, with the reason of the last one."""
        last = list(self._said.values())[-1]
        if len(self._said) == 1:
            return last
        by_address = ((str(address), why.message) for address, why in self._said.items())
        whole = "; ".join(said if address in said else f"{address}: {said}" for address, said in by_address)
        return type(last)(last.reason, whole, last.hint, last.retry_delay_ms, last.numbers)

    def _comes_back_to(self, owner: SidecarAddress) -> bool:
        """Whether a topic seems to be on its way to this sidecar, which has answered in this round."""
        if owner == self.address or owner not in self._asked or self._said[owner].reason not in _PASSES:
            return False
        self._returns += 1
        return self._returns <= MAX_RETURNS

    def _following(self, owner: SidecarAddress | None) -> SidecarAddress | None:
        if owner is not None and owner not in self._asked and self._redirects < MAX_REDIRECTS:
            self._redirects += 1
            return owner
        return next((address for address in self._order if address not in self._asked), None)

    def _owner(self, why: UnavailableError) -> SidecarAddress | None:
        """Whom a sidecar has named, if a client may be sent there: its credentials would come along."""
        named = why.numbers.get(OWNER_ADDRESS, "") if why.reason == "NOT_OWNER" else ""
        owner = self._sidecars.allowed(named) if named else None
        if named and owner is None and named != self._ignored:
            self._ignored = named
            logger.warning(
                "topic %s: its owner is %.200r, says %s: not gone to, since %s neither lists it nor has its domain",
                self._topic,
                named,
                self.address,
                self._sidecars,
            )
        return owner
