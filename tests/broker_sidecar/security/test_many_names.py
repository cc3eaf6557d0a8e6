"""An Open of as many names as there may be is done in many short steps, whether they are allowed or not."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from broker_sidecar.security import permissions as permissions_module
from broker_sidecar.security import rules
from broker_sidecar.security.audit import Trail
from broker_sidecar.security.permissions import MAX_NAMES_TOLD, Denial, Permissions
from broker_sidecar.security.rules import Granted
from broker_sidecar.security.subject import OPERATOR, Subject, set_caller
from broker_sidecar.services import publish_service
from broker_sidecar.services.publish_service import PublishService
from broker_sidecar.streams import Streams
from seqdedupe.errors import AccessDeniedError, SeqdedupeError
from seqdedupe.limits import MAX_OPEN_NAMES
from seqdedupe.store.db import Store
from seqdedupe.topic import operations
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.lives import PublishedTopics
from seqdedupe.topic.topic import Topic
from seqdedupe.v1 import publish_pb2
from tests.topic.logs import MemoryLogs

T = TypeVar("T")

RULES = """
[[allow]]
subjects = ["mallory"]
actions = ["create"]
topics = ["*"]

[[allow]]
subjects = ["mallory"]
actions = ["publish"]
topics = ["*"]
producers = ["${sub}", "${sub}/*", "m*/a*/b*/c*"]
"""

SHARE = """
[[share]]
subjects = ["mallory"]
producer_names = 8_000
"""

MALLORY = Subject("mallory", "jwt", None, "ipv4:127.0.0.1:1")
ALL = Subject(OPERATOR, "token", None, "ipv4:127.0.0.1:1")
MOST_OF_ALL = 1 / 4
"""For the time that a call takes, in one step."""

OTHERS = [f"n{k:06d}" for k in range(MAX_OPEN_NAMES)]
ONE_ITS = ["mallory", *OTHERS[1:]]
ITS = [f"mallory/{k:06d}" for k in range(MAX_OPEN_NAMES)]


class Served:
    """The service, in this process, on a log in memory."""

    def __init__(self, store: Store, file: rules.RulesFile) -> None:
        self.denials: list[Denial] = []
        permissions = Permissions(file, self.denials.append)
        self.topics: Topics[Topic] = Topics(
            store,
            lambda told: PublishedTopics(store, MemoryLogs({}), on_state=told),
            max_topics=10,
            allow_auto_topic_creation=True,
            on_state=lambda name, state: None,
        )
        self._service = PublishService(self.topics, Streams(10, permissions), permissions, Trail(None))

    async def open(
        self, caller: Subject, names: list[str], epochs: list[int] | None = None
    ) -> publish_pb2.OpenResponse:
        set_caller(caller)
        return await self._service.open(
            publish_pb2.OpenRequest(topic="orders", producer_names=names, epochs=epochs or [])
        )


@pytest.fixture
async def served(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    (tmp_path / "rules.toml").write_text(RULES + getattr(request, "param", ""))
    store = Store.open(tmp_path / "store")
    served = Served(store, rules.read_rules(tmp_path / "rules.toml"))
    await served.topics.open_all()
    await served.open(ALL, ["p"])
    yield served
    await served.topics.drain()
    store.close()


async def share_of_longest_step(work: Awaitable[T]) -> float:
    """What part of the time that it takes the event loop stands still at most."""
    longest, began = 0.0, time.perf_counter()
    doing = asyncio.ensure_future(work)
    last = began
    while not doing.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    doing.result()
    return longest / (last - began)


async def least_share(served: Served, caller: Subject, names: list[str], *, resume: bool = False) -> float:
    """For several tries: others use the machine too."""
    epochs = list((await served.open(caller, names)).epochs) if resume else None
    return min([await share_of_longest_step(served.open(caller, names, epochs)) for _ in range(7)])


@pytest.mark.parametrize("resume", [False, True], ids=["new", "resumed"])
@pytest.mark.parametrize(("caller", "names"), [(ALL, OTHERS), (MALLORY, ITS)], ids=["all allowed", "by its rules"])
async def test_others_are_served_while_many_names_are_opened(
    served: Served, caller: Subject, names: list[str], resume: bool
) -> None:
    assert await least_share(served, caller, names, resume=resume) < MOST_OF_ALL


async def test_others_are_served_while_many_names_are_denied(served: Served) -> None:
    assert await least_share(served, MALLORY, ONE_ITS) < MOST_OF_ALL


async def test_without_steps_others_would_wait(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    for module in (publish_service, operations):
        monkeypatch.setattr(module, "NAMES_A_STEP", MAX_OPEN_NAMES)
    monkeypatch.setattr(permissions_module, "_NAMES_AT_ONCE", MAX_OPEN_NAMES)
    monkeypatch.setattr(rules, "_WORK_AT_ONCE", 10**9)
    assert await least_share(served, ALL, OTHERS) > MOST_OF_ALL


async def test_of_many_names_that_are_denied_one_error_is_made(served: Served) -> None:
    opened = await served.open(MALLORY, ONE_ITS)
    assert opened.epochs[0] > 0
    assert set(opened.epochs[1:]) == {0}
    assert [refusal.index for refusal in opened.refusals] == list(range(1, MAX_OPEN_NAMES))
    assert {(refusal.reason, refusal.message) for refusal in opened.refusals} == {
        ("NOT_ALLOWED", "the caller may not publish as this producer")
    }
    # Short enough for a client that takes 4 MiB a message.
    assert opened.ByteSize() < 4 * 1024 * 1024
    [denial] = served.denials
    assert list(denial.producer_names) == ONE_ITS[1:]
    with pytest.raises(AccessDeniedError) as caught:
        await served.open(MALLORY, OTHERS)
    assert len(served.denials) == 2
    for k, name in enumerate(OTHERS[:40]):
        assert (repr(name) in caught.value.message) == (k < MAX_NAMES_TOLD)
    assert f"and {MAX_OPEN_NAMES - MAX_NAMES_TOLD:,} others" in caught.value.message
    # As much as a status may have, though names are long.
    with pytest.raises(AccessDeniedError) as caught:
        await served.open(MALLORY, [f"{k:03}".ljust(255, "€")[:85] for k in range(40)])
    assert len(caught.value.message.encode()) < 2048


async def test_a_name_that_cannot_be_is_refused_before_any_is_opened(served: Served) -> None:
    topic = served.topics.get("orders")
    before = len(topic.producers)
    for bad in ("a\nb", "", OTHERS[0]):
        names = [*OTHERS[:-1], bad]
        for caller in (ALL, MALLORY):
            with pytest.raises(Exception, match=r"INVALID_NAME|NOT_ALLOWED"):
                await served.open(caller, names)
    assert len(topic.producers) == before


@pytest.mark.parametrize("served", [SHARE], indirect=True)
async def test_opens_that_come_together_are_no_more_names_than_a_share(served: Served) -> None:
    opens = [served.open(MALLORY, ITS[first : first + 5_000]) for first in (0, 5_000)]
    answers = await asyncio.gather(*opens, return_exceptions=True)
    failed = [answer for answer in answers if isinstance(answer, SeqdedupeError)]
    assert [e.reason for e in failed] in (["SHARE_EXCEEDED"], ["SHARE_EXCEEDED"] * 2)
    assert 3_000 <= served.topics.get("orders").producers.known_count() - 1 <= 8_000
    # Alone, a call with too many opens nothing.
    known = served.topics.get("orders").producers.known_count()
    with pytest.raises(SeqdedupeError, match="SHARE_EXCEEDED"):
        await served.open(MALLORY, [f"{name}x" for name in ITS])
    assert served.topics.get("orders").producers.known_count() == known


@pytest.mark.parametrize("served", [SHARE], indirect=True)
async def test_a_topics_names_are_judged_some_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a topic has already, for a caller whose share counts its own."""
    for first in "ab":
        await served.open(ALL, [f"{first}{name}" for name in OTHERS])
    judged = []
    really = Granted.are_allowed

    def are_allowed(self: Granted, raw: Any, spans: Any) -> Any:
        judged.append(len(spans))
        return really(self, raw, spans)

    monkeypatch.setattr(Granted, "are_allowed", are_allowed)
    await served.open(MALLORY, ITS[:1])
    assert sum(judged) > 2 * MAX_OPEN_NAMES
    assert max(judged) <= MAX_OPEN_NAMES / 10


async def test_a_later_open_of_a_name_wins_over_one_that_is_under_way(served: Served) -> None:
    """Parts of a call are opened one after the other: anyone who comes between them is newer only where it came
    later."""
    many = asyncio.ensure_future(served.open(ALL, OTHERS))
    await asyncio.sleep(0)
    early, late = OTHERS[0], OTHERS[-1]
    one = await served.open(ALL, [early, late])
    epochs = dict(zip(OTHERS, (await many).epochs, strict=True))
    resumed = await served.open(ALL, [early, late], [epochs[early], epochs[late]])
    again = await served.open(ALL, [early, late], list(one.epochs))
    # For each name one of the two sessions is fenced, never both and never none.
    fenced = {(k, refusal.index) for k, answer in enumerate((resumed, again)) for refusal in answer.refusals}
    assert sorted(index for _, index in fenced) == [0, 1]


@pytest.fixture(autouse=True)
def caller_of_nobody() -> None:
    set_caller(Subject("", "nobody", None, ""))
