"""Which errors pass by themselves, as drivers give them that the other tests do not use. Costs: nothing."""

import pytest
from sqlalchemy.exc import DatabaseError, InterfaceError, OperationalError

from seqdedupe.databases.failures import codes_of, passes_by_itself, told, was_ended

BY_ARGUMENT = [
    ({"S": "ERROR", "C": "40P01", "M": "deadlock detected"}, True),
    ({"S": "FATAL", "C": "57P01", "M": "terminating connection"}, True),
    ({"S": "ERROR", "C": "23505", "M": "duplicate key"}, False),
]


@pytest.mark.parametrize(("fields", "passes"), BY_ARGUMENT)
def test_a_state_among_the_fields_of_the_argument(fields: dict[str, str], passes: bool) -> None:
    """pg8000 has no attribute for it."""
    failure = DatabaseError("SELECT", {}, Exception(fields))
    assert (codes_of(failure), passes_by_itself(failure)) == ((fields["C"], None), passes)


@pytest.mark.parametrize(("number", "passes"), [(1205, True), (1213, True), (1062, False)])
def test_a_number_that_is_an_attribute(number: int, passes: bool) -> None:
    """MariaDB's own driver has the text as the argument, and a state that says less."""
    cause = Exception("Lock wait timeout exceeded")
    cause.errno, cause.sqlstate = number, "HY000"  # type: ignore[attr-defined]
    assert passes_by_itself(OperationalError("SELECT", {}, cause)) is passes


def test_a_driver_that_could_not_connect_has_no_code() -> None:
    assert passes_by_itself(InterfaceError("SELECT", {}, Exception("Can't create a connection to host")))
    assert not passes_by_itself(ValueError("no error of a database"))


def test_a_deadlock_that_took_the_savepoint_along_passes() -> None:
    """What is told then is that there is no savepoint; and where a handler says something of its own, that counts."""
    deadlock = OperationalError("UPDATE", {}, Exception(1213, "Deadlock found"))
    no_savepoint = OperationalError("ROLLBACK TO SAVEPOINT", {}, Exception(1305, "SAVEPOINT does not exist"))
    assert not passes_by_itself(no_savepoint)
    no_savepoint.__context__ = deadlock
    assert passes_by_itself(no_savepoint)
    its_own = ValueError("not booked")
    its_own.__context__ = deadlock
    assert not passes_by_itself(its_own)


def test_a_statement_that_took_too_long_does_not_pass_but_was_ended() -> None:
    cause = Exception("canceling statement due to statement timeout")
    cause.sqlstate = "57014"  # type: ignore[attr-defined]
    for failure in (OperationalError("SELECT", {}, cause), OperationalError("S", {}, Exception(1969, "max_statement"))):
        assert was_ended(failure)
        assert not passes_by_itself(failure)
    assert not was_ended(OperationalError("UPDATE", {}, Exception(1213, "Deadlock found")))


def test_what_the_driver_says_is_one_line() -> None:
    assert told(OperationalError("SELECT", {}, Exception("no\n  such table"))) == "no such table"
