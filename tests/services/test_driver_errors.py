"""Which errors pass by themselves, as drivers give them that the other tests do not use. Costs: nothing."""

import pytest
from sqlalchemy.exc import DatabaseError, InterfaceError, OperationalError

from seqdedupe.services.consumer.database import codes_of, passes_by_itself

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
