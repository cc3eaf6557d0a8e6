"""What is decided about a message, from its versions and those applied: pure."""

import hashlib
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


def name_of(key: str | bytes) -> str:
    """Under which name the tables have a key: no two keys share one. Bytes that are UTF-8 are the same key as that
    text. All others have a hash of theirs as their name, since no text stands for them."""
    if isinstance(key, str):
        return key
    try:
        name = key.decode()
    except UnicodeDecodeError:
        name = ""
    return name if _is_name(name) else "bytes:" + hashlib.sha256(b"seqdedupe inbox key\x00" + key).hexdigest()


def _is_name(text: str) -> bool:
    return 1 <= len(text) <= MAX_KEY_LENGTH and "\x00" not in text


def former_name_of(key: str | bytes) -> str | None:
    """The name that earlier versions gave to bytes that are no text, which several keys may have shared. None for all
    other keys."""
    former = key.decode(errors="replace") if isinstance(key, bytes) else key
    return former if former != name_of(key) and _is_name(former) else None


def checked(found: object) -> dict[str, int]:
    """The versions, if they are some. Raises INVALID_VERSION."""
    if not isinstance(found, Mapping) or not found:
        raise error("INVALID_VERSION", f"the versions are {found!r:.80}: they should be a mapping of keys to numbers")
    versions: dict[str, int] = {}
    for key, version in found.items():
        name = name_of(key) if isinstance(key, str | bytes) and key else ""
        if not _is_name(name):
            what = f"the key {key!r:.80} should be bytes, or text of 1 to {MAX_KEY_LENGTH} characters"
            raise error("INVALID_VERSION", what)
        if name in versions:
            raise error("INVALID_VERSION", f"the key {name!r:.80} has two versions, as text and as bytes")
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MAX_VERSION:
            raise error(
                "INVALID_VERSION",
                f"the version of {name!r:.80} is {version!r:.80}: it should be a number from 0 to {MAX_VERSION}",
            )
        versions[name] = version
    return versions
