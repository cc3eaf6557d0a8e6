"""What is judged is a name that there can be, no matter who thinks of it: it is remembered, told and written down."""

from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from broker_sidecar.security import rules
from broker_sidecar.security.permissions import Denial, Permissions
from broker_sidecar.security.subject import Subject, set_caller
from seqdedupe.errors import SeqdedupeError

BOB = Subject("bob", "jwt", None, "ipv4:127.0.0.1:1")
FULL = "persistent://public/default/"
RULES = """
[[allow]]
subjects = ["*"]
actions = ["observe"]
topics = ["*"]

[[deny]]
subjects = ["*"]
actions = ["observe"]
topics = ["secret"]
"""


@pytest.fixture
def denials() -> list[Denial]:
    return []


@pytest.fixture
def permissions(tmp_path: Path, denials: list[Denial]) -> Permissions:
    (tmp_path / "rules.toml").write_text(RULES)
    set_caller(BOB)
    return Permissions(rules.read_rules(tmp_path / "rules.toml"), denials.append)


@pytest.mark.parametrize(("service", "reason"), [
    ("", ""),
    ("shards", ""),
    (f"{FULL}open", ""),
    (f"{FULL}secret", "NOT_ALLOWED"),
    ("secret", "NOT_ALLOWED"),
    ("secret-partition-0", "NOT_ALLOWED"),
    ("x" * 1_000_000, "INVALID_TOPIC_NAME"),
    ("no\nname", "INVALID_TOPIC_NAME"),
])  # fmt: skip
def test_health_is_judged_by_the_full_name_of_a_topic(
    permissions: Permissions, denials: list[Denial], service: str, reason: str
) -> None:
    request = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    try:
        permissions.check_call("/grpc.health.v1.Health/Watch", request)
        said = ""
    except SeqdedupeError as e:
        said = e.reason
    assert said == reason
    assert len(denials) == (reason == "NOT_ALLOWED")


async def test_a_producer_name_that_is_none_is_not_told_as_denied(
    permissions: Permissions, denials: list[Denial]
) -> None:
    set_caller(BOB)
    for name in ("x" * 256, ""):
        with pytest.raises(SeqdedupeError, match="INVALID_NAME"):
            await permissions.denied_names(f"{FULL}open", ["p", name])
    assert not denials
    places, _ = await permissions.denied_names(f"{FULL}open", ["p", "x" * 255])
    assert places == [0, 1]
    [denial] = denials
    assert list(denial.producer_names) == ["p", "x" * 255]
