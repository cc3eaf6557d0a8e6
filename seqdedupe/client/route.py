"""Decides which sidecar the client asks. No other module makes this decision. This module does no I/O.

Begin with `Sidecars`, the sidecars given to a client, and `Route`, which contains the sidecar to ask now.
`WaitingNotice` notifies the user if no sidecar answers.
"""

import asyncio
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from time import monotonic
from typing import NamedTuple, Self

from seqdedupe.address import SidecarAddress
from seqdedupe.client.credentials import NO_CREDENTIALS, Credentials
from seqdedupe.errors import SeqdedupeError, UnavailableError, error

# -- The order in which a topic's sidecars are tried. A hash gives it, so that all clients and sidecars agree.


def in_order(topic: str, addresses: Iterable[str]) -> list[str]:
    """Return the addresses in the order in which the client tries them for the topic with this full name.

    The weight of an address is computed from the SHA-256 of the topic's name, a line feed and the address, in UTF-8:
    the weight is the first 8 bytes of the hash, as an unsigned big-endian number. The address with the highest weight
    comes first. So topics are spread evenly. If an address is added or removed, no topic moves between the other
    addresses.
    """
    return sorted(addresses, key=lambda address: sha256(f"{topic}\n{address}".encode()).digest()[:8], reverse=True)


# -- The sidecars given to a client: the addresses it tries, the domains it may be redirected to, and its credentials.

Addresses = str | Sequence[str]
"""Addresses and domains: one text in which they are separated by commas, or a sequence."""

_DOMAIN = "*."
_LABEL = r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
"""A plain host name, without characters that have a special meaning for gRPC. Compiled at the first use."""


class Sidecars(NamedTuple):
    """The sidecars in front of one log. `str()` returns a text that `parse` reads."""

    addresses: tuple[SidecarAddress, ...]
    """The addresses: at least one, without duplicates."""

    domains: tuple[str, ...] = ()
    """Further domains: a sidecar may redirect a client to any host in them, on any port."""

    credentials: Credentials = NO_CREDENTIALS
    """The credentials that the client presents to these sidecars, and to no other server."""

    @classmethod
    def parse(cls, given: Addresses, credentials: Credentials = NO_CREDENTIALS) -> Self:
        """Parse addresses, and domains like `*.example.org`. Duplicates are removed.

        If `given` is a sequence, a comma in an item is part of the address, for example of a socket's path. Raises
        INVALID_ADDRESS.
        """
        texts = [text.strip() for text in given.split(",")] if isinstance(given, str) else list(given)
        addresses = tuple(SidecarAddress.parse(text) for text in texts if not text.startswith(_DOMAIN))
        domains = tuple(_domain(text) for text in texts if text.startswith(_DOMAIN))
        if not addresses:
            raise error(
                "INVALID_ADDRESS", f"{given!r} contains no sidecar's address: a client needs at least one address"
            )
        return cls(tuple(dict.fromkeys(addresses)), tuple(dict.fromkeys(domains)), credentials)

    def __str__(self) -> str:
        return ",".join([*map(str, self.addresses), *(_DOMAIN + domain for domain in self.domains)])

    @property
    def is_one(self) -> bool:
        """Whether the client knows only one sidecar, and no domain."""
        return len(self.addresses) == 1 and not self.domains

    def in_order(self, topic: str) -> tuple[SidecarAddress, ...]:
        """Return the addresses in the order in which the client tries them for a topic (full name). With an empty name,
        return the order for a call without a topic."""
        if not topic or len(self.addresses) == 1:
            return self.addresses
        by_text = {str(address): address for address in self.addresses}
        return tuple(by_text[text] for text in in_order(topic, by_text))

    def allowed(self, text: str) -> SidecarAddress | None:
        """Return the address if a client may be redirected to it: the address is in the list, or its host is in one of
        the domains. Otherwise return None."""
        try:
            address = SidecarAddress.parse(text)
        except SeqdedupeError:
            return None
        if address in self.addresses:
            return address
        # A host such as `elsewhere.org#.example.org` ends with the domain, but gRPC would connect to the first part.
        is_host = re.fullmatch(_HOST, address.host) is not None
        return address if is_host and any(address.host.endswith("." + domain) for domain in self.domains) else None


def _domain(text: str) -> str:
    domain = text.removeprefix(_DOMAIN).lower()
    # A domain that ends in a number would be part of an IP address.
    if not re.fullmatch(_HOST, domain) or domain.rpartition(".")[2].isdecimal():
        raise error("INVALID_ADDRESS", f"{text!r} is not a domain: it should be like *.example.org, without a port")
    return domain


# -- The notice that a caller waits for the sidecar, once for each wait.

OnWaiting = Callable[[UnavailableError], None]

SAY_WAITING_SECONDS = 1.0


_log = logging.getLogger("seqdedupe")


def logged(on_waiting: OnWaiting) -> OnWaiting:
    """Wrap a callback that is not called by an event loop. The callback's errors are logged, and do not end the
    caller's work."""

    def call(why: UnavailableError) -> None:
        try:
            on_waiting(why)
        except Exception:  # noqa: BLE001 (any failure is logged)
            _log.exception("on_waiting failed when it was called with: %s", why)

    return call


class WaitingNotice:
    """Calls `on_waiting`, on the event loop, once for each wait that has lasted for SAY_WAITING_SECONDS.

    Errors of the callback do not end the client's work: the event loop's exception handler logs them.
    """

    def __init__(self, on_waiting: OnWaiting | None) -> None:
        self._on_waiting = on_waiting
        self._since: float | None = None

    def waits(self, why: UnavailableError) -> None:
        """Record that the wait begins, or continues."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._since is None:
            self._since = now
        if self._on_waiting is not None and now - self._since >= SAY_WAITING_SECONDS:
            self._since = math.inf  # the callback was already called for this wait
            loop.call_soon(self._on_waiting, why)

    def goes_on(self) -> None:
        """Record that the wait is over."""
        self._since = None


logger = logging.getLogger("seqdedupe.client")

MAX_REDIRECTS = 5
"""The maximum number of redirects followed in a round. After that the client asks the next sidecar in the list."""

MAX_RETURNS = 5
"""The maximum number of times, until a success, that the client asks a sidecar again after a pause because another
sidecar names it as the owner. The topic is moving between these two sidecars. Asking sidecars that are not involved
could take long, or get no answer."""

OWNER_ADDRESS = "owner_address"
"""The key of the owner's address in NOT_OWNER's numbers. The key may be missing, or its value empty."""

_LEADS_ELSEWHERE = {"NOT_OWNER", "DRAINING", "UNREACHABLE", "TLS_FAILED", "NOT_A_SIDECAR", "OUTCOME_UNKNOWN"}
"""The reasons after which the client asks another sidecar. When all other sidecars were asked, the client asks the same
sidecar again, after a pause."""

LONGEST_REFUSAL_SECONDS = 10.0
"""After errors of `_MAY_LAST` for this time without a success, the client asks every other sidecar once before it waits
for the same sidecar again. A recovery usually takes less time. Asking other sidecars during each recovery would move
topics: a sidecar that is asked for a topic without an owner becomes the owner."""

LONGEST_GAP_SECONDS = 60.0
"""After this time without such an error, the time begins anew: the client was idle. Attempts follow each other
sooner."""

_MAY_LAST = {"RECOVERING", "LOG_REFUSED", "LOG_UNREADABLE", "STORE_UNAVAILABLE", "TOO_MANY_STREAMS"}
"""The reasons for which the client waits, although another sidecar may serve the topic. Other reasons for which the
client waits come from the topic's owner, which is busy, or from the client."""

_IS_DOUBTED = {"TOPIC_NOT_FOUND", "NO_STATE"}
"""The reasons that may be true only for this sidecar, not for the topic."""

_IS_SURE = "shard"
"""A key in TOPIC_NOT_FOUND's numbers. With this key, the answer comes from the only sidecar that could have the
topic."""

_PASSES = {"NOT_OWNER", "DRAINING"}
"""The reasons that a sidecar returns while a topic moves to another sidecar."""


class Route:
    """The sidecars that may own a topic, and the sidecar to ask now (`address`).

    The client asks the sidecars in the topic's order, each once in a round. If a sidecar names the owner, the client
    asks the owner before the next sidecar in the list. After a round the client waits. Then it begins again with the
    first sidecar, or with a sidecar that was already asked but has been named as the owner. While a sidecar recovers,
    the client waits for this sidecar. After LONGEST_REFUSAL_SECONDS, a round follows, and the client waits there again.
    """

    def __init__(self, sidecars: Sidecars, topic: str = "", *, first: SidecarAddress | None = None) -> None:
        """Begin with `first`, the sidecar where the topic was last found. Without a topic, use the order of the
        list."""
        self._sidecars = sidecars
        self._topic = topic
        self._order = sidecars.in_order(topic)
        self.address = first or self._order[0]
        self._asked: set[SidecarAddress] = set()  # the sidecars asked in this round
        self._said: dict[SidecarAddress, UnavailableError] = {}  # the last error of each sidecar, the latest at the end
        self._unknown_to: set[SidecarAddress] = set()  # since the last success
        self._newest = self.address  # the sidecar with the highest term so far
        self._older: set[SidecarAddress] = set()  # the sidecars with a lower term, since the last answer of `_newest`
        self._redirects = 0
        self._returns = 0  # since the last success
        self._refused_since: float | None = None  # the first error of _MAY_LAST since the last success, or a gap
        self._refused_at = 0.0  # the last such error
        self._waited_at: SidecarAddress | None = None  # the sidecar whose errors lasted, in a round that this began
        self._is_over = False  # whether the round is over
        self._ignored = ""

    @property
    def is_one(self) -> bool:
        """Whether the client knows no other sidecar."""
        return self._sidecars.is_one

    def moves_on(self, why: UnavailableError) -> bool:
        """Handle an error of the sidecar at `address`. Return true if `address` is now another sidecar, which the
        caller must ask at once. Otherwise the caller must wait first."""
        if self._is_over:
            self._begin_round()
        self._asked.add(self.address)
        self._said.pop(self.address, None)
        self._said[self.address] = why
        if self.has_lasted(why):
            self._waited_at = self._waited_at or self.address
        elif why.reason not in _LEADS_ELSEWHERE:
            self._is_over = True
            return False
        owner = self._owner(why)
        if owner is not None and self._comes_back_to(owner):
            self._is_over = True
            self.address = owner
            return False
        following = self._following(owner)
        self._is_over = following is None
        self.address = following or self._waited_at or self._order[0]
        return not self._is_over

    def has_lasted(self, why: SeqdedupeError) -> bool:
        """Return whether the client has waited long enough at `address` because of this error, of a call or a frame.
        Then the next step is to ask other sidecars: `moves_on` does so. The time begins with the first such error."""
        if why.reason not in _MAY_LAST or self.is_one:
            return False
        now = monotonic()
        if self._refused_since is None or now - self._refused_at > LONGEST_GAP_SECONDS:
            self._refused_since = now
        self._refused_at = now
        return now - self._refused_since >= LONGEST_REFUSAL_SECONDS

    def doubted(self, e: SeqdedupeError) -> SeqdedupeError:
        """Convert an error of the sidecar at `address`. If a sidecar does not know the topic, the topic may still be
        moving to this sidecar. A sidecar without the topic's state may get the state from the owner. So these errors
        become NOT_OWNER until all listed sidecars have returned such an error. The error of a sidecar that owns the
        topic's shard is final and is not converted."""
        if e.reason not in _IS_DOUBTED or self.is_one or _IS_SURE in e.numbers:
            return e
        self._unknown_to.add(self.address)
        return e if self._unknown_to.issuperset(self._order) else error("NOT_OWNER", e.message)

    def check_term(self, term: int, highest: int) -> bool:
        """Record the term in an answer of the sidecar at `address`; `highest` is the highest term of earlier answers.

        Return whether the topic's history was replaced: all listed sidecars, and the sidecar that had the highest term,
        answer with a lower term. If only some do, the sidecar at `address` is a former owner: raises NOT_OWNER, which
        names the sidecar with the highest term. That sidecar may be in a domain, and not in the list.
        """
        if term >= highest:
            self._newest = self.address
            self._older.clear()
            return False
        self._older.add(self.address)
        if self._older.issuperset({*self._order, self._newest}):
            return True
        raise self._former_owner(term, highest)

    def believed(self, why: SeqdedupeError, term: int, highest: int) -> SeqdedupeError:
        """Convert the refusal of a frame, which has come with this term. A sidecar that does not know the topic is
        doubted, see `doubted`. If a former owner refuses a frame for good, the error becomes NOT_OWNER: the sidecar
        with the highest term decides. A sidecar without the topic's state answers with the term 0."""
        is_final = not isinstance(why, UnavailableError)
        if is_final and 0 < term < highest and self.address != self._newest:
            return self._former_owner(term, highest)
        return self.doubted(why)

    def _former_owner(self, term: int, highest: int) -> SeqdedupeError:
        what = f"the sidecar at {self.address} answers with term {term}, lower than {highest} before"
        return error("NOT_OWNER", what, owner_address=str(self._newest))

    def goes_well(self) -> None:
        """Record a successful call to the sidecar at `address`. After the next error, all sidecars may be asked
        again."""
        self._refused_since = None
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
        if self._waited_at is not None:
            self._waited_at = self._refused_since = None

    @property
    def passes(self) -> bool:
        """Whether a sidecar asked in this round has returned an error that is likely to pass soon."""
        passing = {"RECOVERING"} if self.is_one else _PASSES | {"RECOVERING"}
        return any(self._said[address].reason in passing for address in self._asked)

    def told(self) -> UnavailableError:
        """Return one error that contains the messages of all sidecars asked since the last success. The reason of the
        error is the reason of the last sidecar."""
        last = list(self._said.values())[-1]
        if len(self._said) == 1:
            return last
        by_address = ((str(address), why.message) for address, why in self._said.items())
        whole = "; ".join(said if address in said else f"{address}: {said}" for address, said in by_address)
        return type(last)(last.reason, whole, last.hint, last.retry_delay_ms, last.numbers)

    def _comes_back_to(self, owner: SidecarAddress) -> bool:
        """Return whether the topic seems to be moving to this sidecar, which was already asked in this round."""
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
        """Return the owner that a sidecar has named, if the client may connect to that address. The restriction is
        needed because the client sends its credentials to that address."""
        named = why.numbers.get(OWNER_ADDRESS, "") if why.reason == "NOT_OWNER" else ""
        owner = self._sidecars.allowed(named) if named else None
        if named and owner is None and named != self._ignored:
            self._ignored = named
            logger.warning(
                "topic %s: its owner is %.200r, says %s. The client does not go there: %s neither lists it nor has its "
                "domain",
                self._topic,
                named,
                self.address,
                self._sidecars,
            )
        return owner
