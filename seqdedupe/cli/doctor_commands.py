"""`doctor` looks at a data directory while no sidecar runs on it, and salvages what can be read."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import click

from seqdedupe.cli.common import as_json_option
from seqdedupe.command import FAILED, WRONG_USAGE, echo, needing, print_json, printable, say_failure
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.wording import counted

if TYPE_CHECKING:
    from seqdedupe.doctor.findings import Findings, Missing, TopicFindings
    from seqdedupe.doctor.salvage import Salvage
    from seqdedupe.log.embedded.inspection import Damage

SHOWN = 20
"""The number of places of damage and of missing IDs that are printed per topic; `--json` has all."""


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--salvage",
    "to",
    type=click.Path(path_type=Path),
    metavar="NEW_DIRECTORY",
    help="Write the readable data to a new data directory, with a report of the missing data.",
)
@as_json_option
def doctor(directory: Path, to: Path | None, as_json: bool) -> int:
    """Check every byte of a data directory, and change nothing in it. No sidecar may be running on it.

    Exit status 0: all is whole; 1: something is damaged; 2: the check was not possible.
    """
    try:
        return _run(directory, to, as_json)
    except SeqdedupeError as e:
        say_failure("seqdedupe", e, as_json=as_json)
    except OSError as e:
        say_failure("seqdedupe", error("LOG_UNREADABLE", str(e)), as_json=as_json)
    return WRONG_USAGE


def prepare() -> None:
    """Prepare the imports that look at a data directory. Raises INVALID_CONFIGURATION if that is not possible."""
    # Log lines from opening a store are about the copy.
    logging.getLogger("seqdedupe").addHandler(logging.NullHandler())
    with needing("checking a data directory needs", "sidecar"):
        from broker_sidecar import kernels

        kernels.prepare()
        import seqdedupe.doctor.examine  # noqa: F401 (all that it needs is there)


def _run(directory: Path, to: Path | None, as_json: bool) -> int:
    prepare()
    from seqdedupe.doctor.examine import examine
    from seqdedupe.doctor.salvage import salvage
    from seqdedupe.locks import kept_unused
    from seqdedupe.store.directories import parts_of

    with kept_unused(directory):
        parts = parts_of(directory)
        if parts != [directory]:
            return _run_on_workers(directory, [examine(part) for part in parts] if to is None else None, as_json)
        if to is None:
            findings = examine(directory)
            print_json(findings.to_json()) if as_json else print_findings(findings)
        else:
            made = salvage(directory, to)
            findings = made.findings
            print_json(made.to_json()) if as_json else _print_salvage(made, to)
        return 0 if findings.is_whole else FAILED


def _run_on_workers(directory: Path, each: "list[Findings] | None", as_json: bool) -> int:
    if each is None:
        why = f"{directory} has several workers: each one is salvaged separately"
        raise error("INVALID_CONFIGURATION", why, hint=f"Give {directory}/worker-0, and then the others.")
    is_whole = all(findings.is_whole for findings in each)
    if as_json:
        workers = [findings.to_json() for findings in each]
        print_json({"directory": str(directory), "whole": is_whole, "workers": workers})
        return 0 if is_whole else FAILED
    for findings in each:
        print_findings(findings)
    _say(f"{directory}, {counted(len(each), 'worker')}, is " + ("whole" if is_whole else "NOT WHOLE"))
    return 0 if is_whole else FAILED


def print_findings(findings: "Findings") -> None:
    """Print the findings for a person."""
    for topic in findings.topics:
        _print_topic(topic)
    _say(f"store: {findings.store.value}" + (f": {findings.store_why}" if findings.store_why else ""))
    if findings.journal_why:
        _say(f"journal: {findings.journal_why}")
    for cure in findings.cures:
        _say(f"what to do: {cure}")
    _say(f"{findings.directory} is " + ("whole" if findings.is_whole else "NOT WHOLE"))


def _print_topic(topic: "TopicFindings") -> None:
    _say(f"{topic.name}: " + ("whole" if topic.is_whole else "NOT WHOLE"))
    indexes = f", indexes {topic.first_index} to {topic.next_index - 1}" if topic.messages else ""
    _say(
        f"  {counted(topic.messages, 'message')} can be read{indexes}, {counted(topic.producers, 'producer')}, "
        f"{topic.log_bytes:,} bytes"
    )
    for damage in topic.damage[:SHOWN]:
        _say(f"  damage: {damage.file}, byte {damage.offset}: {damage.what}; it concerns {_indexes(damage)}")
    _say_more(len(topic.damage), "places of damage")
    for missing in topic.missing[:SHOWN]:
        _say(f"  missing: {_missing(missing)}")
    _say_more(len(topic.missing), "producers' missing messages")
    if topic.imported_ids:
        why = f", NOT there: {topic.imported_why}" if topic.imported_why else ""
        _say(f"  {counted(topic.imported_ids, 'imported deduplication ID')}{why}")
    for why in topic.disagreements:
        _say(f"  wrong: {why}")
    if (torn := topic.torn_end) is not None:
        _say(
            f"  no damage: {torn.file} has a torn end of {torn.size_bytes:,} bytes "
            f"(about {counted(torn.records, 'record')}) from byte {torn.offset} on. "
            "No client has a receipt for it; the next start removes it"
        )
    for note in topic.notes:
        _say(f"  no damage: {note}")
    for cure in dict.fromkeys(topic.cures):
        _say(f"  what to do: {cure}")


def _say_more(count: int, what: str) -> None:
    if count > SHOWN:
        _say(f"  … and {count - SHOWN:,} more {what}: --json has all")


def _indexes(damage: "Damage") -> str:
    first, following = damage.first_index, damage.next_index
    if following is None:
        return f"index {first} and an unknown number after it"
    if following == first:
        return f"no message (a marker or a control record before index {first})"
    return f"{counted(following - first, 'message')}, indexes {first} to {following - 1}"


def _missing(missing: "Missing") -> str:
    ids = f"producer {missing.producer!r}, sequence IDs {missing.first_sequence_id} to {missing.last_sequence_id}"
    if missing.messages is not None:
        return f"{ids}, {counted(missing.messages, 'message')}"
    if missing.is_perhaps_trimmed:
        return f"{ids}, as far as they were used and retention had not dropped them"
    return f"{ids}, as far as they were used"


def _print_salvage(made: "Salvage", to: Path) -> None:
    print_findings(made.findings)
    for topic in made.topics:
        how = "copied" if topic.is_copied else f"written again, incarnation {topic.record.incarnation}"
        _say(f"{topic.record.name}: {how}")
        for kept in topic.kept[:SHOWN] if not topic.is_copied else ():
            new = f"{kept.new_first_index} to {kept.new_first_index + kept.last_index - kept.first_index}"
            _say(f"  indexes {kept.first_index} to {kept.last_index} are {new} now")
        if not topic.is_copied:
            _say_more(len(topic.kept), "stretches")
    for name in made.left_out:
        _say(f"{name}: LEFT OUT")
    _say(f"{to} is ready; its file salvage.json says what is missing")


def _say(line: str) -> None:
    echo(printable(line))
