"""How a Delta table holds the positions of jobs: what stands in its properties, and what in application transactions.

RESTORE takes rows and properties back to an older version, and leaves transactions as they are. So every commit of a
job says in one more transaction up to which version of the table it was looked for a RESTORE: one that comes later
makes the positions of the version that it brought back those that count.
"""

from collections.abc import Iterable
from urllib.parse import quote

from deltalake import DeltaTable, Transaction

from seqdedupe.errors import error
from seqdedupe.message_id import MessageId, Position
from seqdedupe_spark.stores.contract import FORMAT_VERSION, Stored, check_format

_NO_MESSAGE = MessageId(-1, -1)
"""For no message ID: at a topic's start, or because it is not known. The ledgers of messages are not negative."""

_PROPERTY = "seqdedupe."

_FORMAT = "seqdedupe_format_version"
"""The property of the table that says how the others are to be read."""


def properties(job: str, positions: dict[str, Stored]) -> dict[str, str]:
    """The properties of a table in which a job has these positions, the job's own among them."""
    known = {
        _of_topic(job, topic): f"{stored.epoch} {stored.position.incarnation}" for topic, stored in positions.items()
    }
    return {**known, _of_job(job): "begun", _FORMAT: str(FORMAT_VERSION)}


def job_transaction(job: str, checked: int) -> Transaction:
    """What goes with the properties: the job has begun, and the table is checked up to that version."""
    return Transaction(quote(job, safe=""), checked)


def transactions(job: str, topic: str, position: Position, checked: int) -> list[Transaction]:
    """A position, and up to which version the table is checked."""
    # Versions are signed numbers.
    ownership = position.ownership - 2**64 if position.ownership >= 2**63 else position.ownership
    numbers = (position.index, *(position.message_id or _NO_MESSAGE), ownership, checked)
    names = _applications(job, topic, position.incarnation)
    return [Transaction(name, number) for name, number in zip(names, numbers, strict=True)]


def checked_version(found: DeltaTable, job: str, topics: Iterable[str]) -> int | None:
    """Up to which version the job's commits have checked the table, as far as these topics say; None: it has not begun,
    or what it wrote says nothing."""
    said = [found.transaction_version(quote(job, safe=""))]
    for topic in topics:
        if (value := found.metadata().configuration.get(_of_topic(job, topic))) is not None:
            *_, name = _applications(job, topic, int(value.split()[1]))
            said.append(found.transaction_version(name))
    return max((version for version in said if version is not None), default=None)


def topics_of(found: DeltaTable, job: str) -> list[str]:
    """The topics that have a position."""
    prefix = _of_topic(job, "")
    return [name[len(prefix) :] for name in found.metadata().configuration if name.startswith(prefix)]


def check_not_replaced(found: DeltaTable, job: str, stands: DeltaTable) -> None:
    """Raises OUTPUT_MISSING if the job had positions in the table that `stands`, and `found` was put in its place:
    properties are lost then, and transactions are not."""
    if _of_job(job) in found.metadata().configuration:
        return
    if _of_job(job) in stands.metadata().configuration or stands.transaction_version(quote(job, safe="")) is not None:
        what = f"the Delta table {found.table_uri} was replaced by another since job {job!r} wrote to it"
        hint = (
            "RESTORE the version before that, and start the job again; to lay a table out anew, overwrite its rows "
            "instead of replacing it. For what stands there now give the job another name: it begins anew."
        )
        raise error("OUTPUT_MISSING", f"{what}, and its positions are lost", hint=hint)


def stored_in(found: DeltaTable, job: str, topic: str) -> Stored | None:
    """The position that stands in this version, whatever was restored. Raises INVALID_OUTPUT or NEWER_FORMAT."""
    names = found.metadata().configuration
    value = names.get(_of_topic(job, topic))
    if value is None:
        return None
    check_format(int(names.get(_FORMAT, "1")), f"the Delta table {found.table_uri}")
    epoch, incarnation = map(int, value.split())
    *numbers, ownership = map(found.transaction_version, _applications(job, topic, incarnation)[:-1])
    whole = [number for number in numbers if number is not None]
    if len(whole) != 1 + len(_NO_MESSAGE):
        raise error("INVALID_OUTPUT", f"the Delta table {found.table_uri} has lost the position of {topic}")
    message_id = None if MessageId(*whole[1:]) == _NO_MESSAGE else MessageId(*whole[1:])
    # Positions that were stored when they had no ownership have none here either.
    return Stored(Position(incarnation, message_id, whole[0], (ownership or 0) % 2**64), epoch)


def _of_job(job: str) -> str:
    return _PROPERTY + quote(job, safe="")


def _of_topic(job: str, topic: str) -> str:
    return f"{_of_job(job)}/{topic}"


def _applications(job: str, topic: str, incarnation: int) -> list[str]:
    """The application IDs whose versions are a position: index, ledger, entry, batch index, ownership; and the version
    up to which the table is checked."""
    name = f"{quote(job, safe='')}/{topic}/{incarnation}"
    return [name, *(f"{name}/{part}" for part in ("ledger", "entry", "batch", "ownership", "checked"))]
