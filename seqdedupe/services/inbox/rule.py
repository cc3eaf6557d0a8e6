"""What is decided about a message, from its versions and those applied: pure."""

from collections.abc import Mapping
from enum import Enum
from typing import Literal, NamedTuple

from seqdedupe.errors import error

Order = Literal["contiguous", "latest"]

MAX_VERSION = 2**63 - 1
MAX_KEY_LENGTH = 255

Versions = Mapping[str, int]
"""By key: the version of it that a message is, or the last one applied."""


class Verdict(Enum):
    APPLY = "apply"
    DROP = "drop"
    PARK = "park"


class Decision(NamedTuple):
    """With PARK: a key, and the version of it that has to be applied before."""

    verdict: Verdict
    key: str = ""
    version: int = 0


def decide(order: Order, wanted: Versions, applied: Versions) -> Decision:
    """A message that is not above what was applied is dropped. One that is above is applied, with "contiguous" only
    when the version before it was, of every key; until then it waits, for the first key for which that is not so.

    Raises INVALID_VERSION for one that is above for some keys and not for others: two messages claim one version.
    """
    passed = [key for key in sorted(wanted) if wanted[key] <= applied[key]]
    if len(passed) == len(wanted):
        return Decision(Verdict.DROP)
    if passed:
        rest = sorted(set(wanted).difference(passed))
        raise error(
            "INVALID_VERSION",
            f"version {wanted[passed[0]]} of {passed[0]!r} was applied already ({applied[passed[0]]} is the last one), "
            f"and version {wanted[rest[0]]} of {rest[0]!r} was not: they should come in one message",
        )
    if order == "contiguous":
        for key in sorted(wanted):
            if wanted[key] - 1 != applied[key]:
                return Decision(Verdict.PARK, key, wanted[key] - 1)
    return Decision(Verdict.APPLY)


def checked(found: object) -> dict[str, int]:
    """The versions, if they are some. Raises INVALID_VERSION."""
    if not isinstance(found, Mapping) or not found:
        raise error("INVALID_VERSION", f"the versions are {found!r:.80}: they should be a mapping of keys to numbers")
    versions: dict[str, int] = {}
    for key, version in found.items():
        name = key.decode(errors="replace") if isinstance(key, bytes) else key
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_KEY_LENGTH or "\x00" in name:
            raise error("INVALID_VERSION", f"the key {key!r:.80} should be text of 1 to {MAX_KEY_LENGTH} characters")
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MAX_VERSION:
            raise error(
                "INVALID_VERSION",
                f"the version of {name!r:.80} is {version!r:.80}: it should be a number from 0 to {MAX_VERSION}",
            )
        versions[name] = version
    return versions
