"""Licences of all that is installed: those that may be used, and exceptions by name with the reason."""

from collections.abc import Iterator
from importlib.metadata import Distribution, distribution, distributions

import pytest
from packaging.licenses import canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ALLOWED = frozenset(
    {
        "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MIT-0", "MPL-2.0", "PSF-2.0",
        "Zlib", "Apache-2.0 WITH LLVM-exception",
    }
)  # fmt: skip
"""Permissive ones, and MPL-2.0, which asks for something only of who changes its files."""

EXCEPTIONS = {
    "psycopg": "LGPL-3.0-only",
    "psycopg-binary": "LGPL-3.0-only",
    "pymmh3": "Common Public License",
}
"""The first two are used as they are, by who installs the extra `spark`: anybody may put another version in their
place. The third is wanted by the functions of Pulsar's client, for tests alone; nothing of it is shipped."""

_AS_OTHERS_WRITE_IT = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache License 2.0": "Apache-2.0",
    "Apache License v2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "CC0": "CC0-1.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
_NO_LICENCE = ("OSI Approved", "DFSG approved")


def licences_of(found: Distribution) -> str:
    """As an expression; what several classifiers say one may choose from."""
    told = found.metadata
    if expression := told["License-Expression"]:
        return str(expression)
    classified = [line.split(" :: ")[-1] for line in told.get_all("Classifier", []) if line.startswith("License")]
    words = [word for word in classified if word not in _NO_LICENCE] or [(told["License"] or "").split("\n")[0]]
    return " OR ".join(_AS_OTHERS_WRITE_IT.get(word, word) for word in words)


def is_allowed(expression: str) -> bool:
    """Whether one of the alternatives is all allowed. For alternatives within brackets every one has to be."""
    try:
        flat = canonicalize_license_expression(expression).replace("(", "").replace(")", "")
    except ValueError:
        return False
    return any(set(alternative.split(" AND ")) <= ALLOWED for alternative in flat.split(" OR "))


def installed() -> Iterator[tuple[str, str]]:
    for found in distributions():
        if (name := canonicalize_name(found.metadata["Name"])) != "seqdedupe":
            yield name, licences_of(found)


def test_all_licences_are_allowed_or_an_exception_with_a_reason() -> None:
    found = dict(installed())
    assert len(found) > 50
    assert {name: told for name, told in found.items() if not is_allowed(told)} == EXCEPTIONS


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("mit AND Apache-2.0", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only AND MIT", False),
        ("AGPL-3.0-or-later", False),
        ("Apache-2.0 WITH LLVM-exception AND BSD-2-Clause", True),
        ("Nobody's licence", False),
        ("", False),
    ],
)
def test_what_is_allowed(expression: str, allowed: bool) -> None:
    assert is_allowed(expression) is allowed


def wanted_by(name: str, extras: frozenset[str], seen: dict[str, str]) -> None:
    """Adds what this needs here, by name, with its version."""
    for line in distribution(name).requires or ():
        wanted = Requirement(line)
        marked = wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras | {""})
        if marked and canonicalize_name(wanted.name) not in seen:
            seen[canonicalize_name(wanted.name)] = distribution(wanted.name).version
            wanted_by(wanted.name, frozenset(wanted.extras), seen)


def of_service() -> dict[str, str]:
    """What a sidecar as a service needs, as it is installed here: by name the version."""
    seen: dict[str, str] = {}
    wanted_by("seqdedupe", frozenset({"sidecar", "pulsar", "s3", "top"}), seen)
    return seen
