"""Arrays that grow: large ones keep their pages."""

import numpy as np
import pytest

from seqdedupe.core import name_table
from seqdedupe.core.name_table import MAPPED_BYTES, Growing

LARGE = MAPPED_BYTES // 8
ROW = np.dtype([("idle", np.uint8), ("stream", np.int32)])


class Copies:
    """Counts the arrays that are made, to be copied to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = Growing._new

        def new(table: Growing, rows: int) -> np.ndarray:
            self.count += 1
            return original(table, rows)

        monkeypatch.setattr(Growing, "_new", new)


def filled(rows: int) -> Growing:
    table = Growing(rows, (), np.int64)
    table.rows[:] = np.arange(len(table.rows))
    return table


@pytest.mark.parametrize("rows", [1, 100, LARGE - 1, LARGE, 2 * LARGE])
def test_what_is_there_stays_and_the_rest_is_zero(rows: int) -> None:
    table = filled(rows)
    for more in (rows + 1, 2 * rows, LARGE, 5 * LARGE):
        before = len(table.rows)
        table.reserve(more)
        assert len(table.rows) >= max(more, before)
        assert (table.rows[:rows] == np.arange(rows)).all()
        assert not table.rows[rows:].any()
    for fewer in (LARGE + 7, 10, 0):
        table.shrink(fewer)
        assert table.rows.tolist() == [*range(min(rows, fewer)), *[0] * (fewer - rows)]
    table.reserve(3)
    assert not table.rows.any()


def test_the_memory_of_a_row_goes_and_others_are_as_they_were() -> None:
    table = Growing(MAPPED_BYTES // 5000, (15001,), np.uint8)
    for at, row in enumerate(range(1, len(table.rows) - 1, 7)):
        table.rows[row - 1 : row + 2] = at + 1
        table.release(row)
        assert not table.rows[row, 4096:-4096].any()
        assert (table.rows[[row - 1, row + 1]] == at + 1).all()


def test_of_rows_of_several_numbers_and_kinds() -> None:
    table, pairs = Growing(10, (6,), np.int64), Growing(10, (), ROW)
    for rows in (LARGE, 3 * LARGE):
        table.reserve(rows)
        pairs.reserve(rows)
        table.rows[rows - 1] = range(6)
        pairs.rows["stream"][rows - 1] = 7
    assert table.rows[LARGE - 1].tolist() == list(range(6))
    assert pairs.rows[LARGE - 1].tolist() == (0, 7)


def test_a_large_one_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    table = filled(LARGE)
    copies = Copies(monkeypatch)
    for rows in range(LARGE, 4 * LARGE, LARGE // 16):
        table.reserve(rows)
    assert copies.count == 0
    assert (table.rows[:LARGE] == np.arange(LARGE)).all()


def test_one_of_which_a_view_is_kept_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control arm. The view goes on as it was."""
    table = filled(LARGE)
    copies = Copies(monkeypatch)
    view = table.rows[5:7]
    table.reserve(2 * LARGE)
    assert copies.count == 1
    assert (table.rows[:LARGE] == np.arange(LARGE)).all()
    assert view.tolist() == [5, 6]


def test_without_memory_it_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    table = filled(LARGE)
    monkeypatch.setattr(name_table, "_mapped", lambda size_bytes: (_ for _ in ()).throw(MemoryError))
    view = table.rows[:1]
    with pytest.raises(MemoryError):
        table.reserve(2 * LARGE)
    assert table.rows.tolist() == list(range(LARGE))
    del view
    table.reserve(2 * LARGE)
    assert table.rows[:LARGE].tolist() == list(range(LARGE))
