"""Which sidecars a client was told of: those that it tries, where else one may send it, and what it shows them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import grpc.aio

from seqdedupe.address import SidecarAddress
from seqdedupe.client.connection import new_channel
from seqdedupe.client.credentials import NO_CREDENTIALS, Credentials
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.rendezvous import in_order

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

    def new_channel(self, address: SidecarAddress, *, is_brief: bool = False) -> grpc.aio.Channel:
        """A channel to one of them, with a connection of its own. See `connection.new_channel`."""
        return new_channel(address, self.credentials, is_one=self.is_one, is_brief=is_brief)

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
