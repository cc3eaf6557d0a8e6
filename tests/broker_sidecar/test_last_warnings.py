"""What is kept of what was logged."""

import logging
import sys
import threading

import pytest

from broker_sidecar import telemetry
from broker_sidecar.telemetry import KEPT, MAX_MESSAGE_CHARACTERS, LastWarnings


def _logger(kept: LastWarnings) -> logging.Logger:
    logger = logging.Logger("a logger of this test alone")
    logger.addHandler(kept)
    return logger


def test_the_newest_come_first_and_the_oldest_go() -> None:
    kept = LastWarnings()
    logger = _logger(kept)
    for number in range(KEPT + 5):
        logger.warning("number %d", number)
        logger.info("not this")
    found = kept.newest_first()
    assert [one.message for one in found] == [f"number {k}" for k in range(KEPT + 4, 4, -1)]
    assert {one.level for one in found} == {"WARNING"}


def test_what_one_place_logs_pushes_nothing_else_out() -> None:
    kept = LastWarnings()
    logger = _logger(kept)
    for number in range(3):
        logger.error("of an operator %d", number)
    for number in range(10 * KEPT):
        logger.warning("of a client %d", number)
    found = [one.message for one in kept.newest_first()]
    assert found[-3:] == [f"of an operator {k}" for k in (2, 1, 0)]
    assert found[:-3] == [f"of a client {10 * KEPT - 1 - k}" for k in range(KEPT - 3)]


def test_an_exception_is_told_in_a_line() -> None:
    kept = LastWarnings()
    try:
        raise ValueError("why")
    except ValueError as e:
        _logger(kept).error("it failed", exc_info=e)
    [one] = kept.newest_first()
    assert (one.level, one.message) == ("ERROR", "it failed: ValueError: why")


def test_whatever_is_logged_can_be_kept() -> None:
    kept = LastWarnings()
    logger = _logger(kept)
    logger.warning("%s", "x" * (2 * MAX_MESSAGE_CHARACTERS))
    logger.warning("a lone surrogate \ud800")
    surrogate, long = kept.newest_first()
    assert len(long.message) == MAX_MESSAGE_CHARACTERS
    assert surrogate.message == "a lone surrogate ?"


def test_other_threads_may_log_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    # With this many a look is long enough for another thread to have its turn.
    monkeypatch.setattr(telemetry, "KEPT", 1_000_000)
    kept = LastWarnings()
    logger = _logger(kept)
    for _ in range(2_000):
        logger.warning("before")
    has_ended = threading.Event()

    def log() -> None:
        while not has_ended.is_set():
            logger.warning("meanwhile")

    interval_seconds = sys.getswitchinterval()
    thread = threading.Thread(target=log)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(50):
            assert kept.newest_first()[-1].message == "before"
    finally:
        sys.setswitchinterval(interval_seconds)
        has_ended.set()
        thread.join()
