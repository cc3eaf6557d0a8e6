"""Which sidecar is asked: the one place that decides it, without any I/O.

Begin with `Sidecars`, those that a client was given, and `Route`, which one of them is asked now. `WaitingNotice` tells
the user that none answers.
"""

import asyncio
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Self

from seqdedupe.address import SidecarAddress
from seqdedupe.client.credentials import NO_CREDENTIALS, Credentials
from seqdedupe.errors import SeqdedupeError, UnavailableError, error

# -- In which order the sidecars of a topic are tried: a hash, so that all clients and sidecars find the same order.


def in_order(topic: str, addresses: Iterable[str]) -> list[str]:
    """The addresses in the order in which they are tried for the topic with this full name.

    The weight of an address is the first 8 bytes, as an unsigned big-endian number, of the SHA-256 of the topic's
    name, a line feed and the address, in UTF-8. The highest comes first. So topics spread evenly, and an address more,
    or less, moves no topic between the others.
    """
    return sorted(addresses, key=lambda address: sha256(f"{topic}\n{address}".encode()).digest()[:8], reverse=True)


# -- Which sidecars a client was told of: those that it tries, where else one may send it, and what it shows them.

Addresses = str | Sequence[str]
"""Addresses and domains: in one text, separated by commas, or one by one."""

_DOMAIN = "*."
_LABEL = r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*")
"""A host's name, and nothing in which gRPC would see more than that."""


@dataclass(frozen=True, slots=True)
class Sidecars:
    """The sidecars in front of one log. `str()` gives back what `parse` takes."""

    addresses: tuple[SidecarAddress, ...]
    """At least one, each once."""

    domains: tuple[str, ...] = ()
    """A sidecar may send a client to the hosts in these as well, on any port."""

    credentials: Credentials = NO_CREDENTIALS
    """What they are shown: they, and nobody else."""

    @classmethod
    def parse(cls, given: Addresses, credentials: Credentials = NO_CREDENTIALS) -> Self:
        """Reads addresses, and domains as `*.example.org`. One that is there twice counts once.

        In a sequence a comma is part of an address, as of a socket's path. Raises INVALID_ADDRESS.
        """
        texts = [text.strip() for text in given.split(",")] if isinstance(given, str) else list(given)
        addresses = tuple(SidecarAddress.parse(text) for text in texts if not text.startswith(_DOMAIN))
        domains = tuple(_domain(text) for text in texts if text.startswith(_DOMAIN))
        if not addresses:
            raise error("INVALID_ADDRESS", f"{given!r} has no sidecar's address: a client has to begin with one")
        return cls(tuple(dict.fromkeys(addresses)), tuple(dict.fromkeys(domains)), credentials)

    def __str__(self) -> str:
        return ",".join([*map(str, self.addresses), *(_DOMAIN + domain for domain in self.domains)])

    @property
    def is_one(self) -> bool:
        """Whether there is nowhere else to go."""
        return len(self.addresses) == 1 and not self.domains

    def in_order(self, topic: str) -> tuple[SidecarAddress, ...]:
        """The addresses in the order in which they are tried for a topic (its full name), or, if it is empty, for what
        is no topic's."""
        if not topic or len(self.addresses) == 1:
            return self.addresses
        by_text = {str(address): address for address in self.addresses}
        return tuple(by_text[text] for text in in_order(topic, by_text))

    def allowed(self, text: str) -> SidecarAddress | None:
        """The address, if a client may be sent there: it is listed, or a host in one of the domains. Else None."""
        try:
            address = SidecarAddress.parse(text)
        except SeqdedupeError:
            return None
        if address in self.addresses:
            return address
        # A host such as `elsewhere.org#.example.org` ends like the domain, and gRPC would connect to the first part.
        is_host = _HOST.fullmatch(address.host) is not None
        return address if is_host and any(address.host.endswith("." + domain) for domain in self.domains) else None


def _domain(text: str) -> str:
    domain = text.removeprefix(_DOMAIN).lower()
    # One that ends in a number would be part of an IP address.
    if not _HOST.fullmatch(domain) or domain.rpartition(".")[2].isdecimal():
        raise error("INVALID_ADDRESS", f"{text!r} is not a domain: it should be as *.example.org, without a port")
    return domain


# -- Who waits for the sidecar says so, once each time.

OnWaiting = Callable[[UnavailableError], None]

SAY_WAITING_SECONDS = 1.0


_log = logging.getLogger("seqdedupe")


def logged(on_waiting: OnWaiting) -> OnWaiting:
    """The same, where no event loop calls it: what it raises is logged, and ends nobody's work."""

    def call(why: UnavailableError) -> None:
        try:
            on_waiting(why)
        except Exception:  # noqa: BLE001 (whatever it is, it is logged)
            _log.exception("on_waiting has failed when it was told: %s", why)

    return call


class WaitingNotice:
    """Calls `on_waiting`, on the event loop, once each time that something has waited for SAY_WAITING_SECONDS.

    What it raises ends nobody's work: the loop's exception handler is given it, which logs it.
    """

    def __init__(self, on_waiting: OnWaiting | None) -> None:
        self._on_waiting = on_waiting
        self._since: float | None = None

    def waits(self, why: UnavailableError) -> None:
        """It waits, or waits on."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._since is None:
            self._since = now
        if self._on_waiting is not None and now - self._since >= SAY_WAITING_SECONDS:
            self._since = math.inf  # said
            loop.call_soon(self._on_waiting, why)

    def goes_on(self) -> None:
        """What it waited for is there."""
        self._since = None


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
