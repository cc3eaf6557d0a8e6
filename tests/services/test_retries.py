"""What a service says while it tries again."""

from seqdedupe.errors import error
from seqdedupe.services import REPEAT_SECONDS, Retries


def test_each_reason_is_reported_at_once_and_then_rarely() -> None:
    said: list[str] = []
    now = 0.0
    retries = Retries(said.append, lambda: now)
    away, full = error("UNREACHABLE", "nobody answers"), error("OUTBOX_UNAVAILABLE", "no room")
    retries.works()
    assert said == []
    for second in range(int(2 * REPEAT_SECONDS) + 1):
        now = float(second)
        retries.failed(away)
    assert [one.partition(":")[0] for one in said] == [
        "trying again",
        "trying again (failed 31 times)",
        "trying again (failed 61 times)",
    ]
    assert "nobody answers [UNREACHABLE]" in said[0]
    # Another reason is news, but not each time that two alternate.
    for _ in range(5):
        retries.failed(full)
        retries.failed(away)
    assert "(failed 62 times): no room [OUTBOX_UNAVAILABLE]" in said.pop()
    assert len(said) == 3
    retries.works()
    retries.works()
    assert said[3:] == ["working again (failed 71 times)"]
    retries.failed(away)
    assert said[4:] == [said[0]]
