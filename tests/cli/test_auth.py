"""`seqdedupe auth explain`: which rule decides, from the file alone."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS

RULES = """
[[allow]]
name = "services publish orders"
subjects = ["shop-*"]
actions = ["publish"]
topics = ["orders"]
producers = ["${sub}", "${sub}/*"]

[[allow]]
subjects = ["ann"]
actions = ["observe", "administer"]
topics = ["persistent://public/default/*"]

[[deny]]
subjects = ["shop-9"]
actions = ["publish"]
topics = ["*"]

[[allow]]
subjects = ["billing"]
actions = ["read", "attach"]
topics = ["orders"]
"""


def explain(rules: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command, which asks no sidecar. Denied is no failure: it says nothing on standard error."""
    command = [COMMAND, "auth", "explain", "--rules", rules, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)


@pytest.fixture
def rules(tmp_path: Path) -> str:
    (tmp_path / "rules.toml").write_text(RULES)
    return str(tmp_path / "rules.toml")


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ("--as shop-1 --publish orders --producer shop-1/till", 0, "allowed: services publish orders"),
        ("--as shop-1 --publish orders", 0, "allowed: services publish orders"),
        ("--as shop-1 --publish orders --producer shop-2", 1, "denied: no rule allows it"),
        ("--as shop-9 --publish orders --producer shop-9", 1, "denied: deny 1 (line 14)"),
        ("--as shop-1 --read orders", 1, "denied: no rule allows it"),
        ("--as ann --observe orders-partition-3", 0, "allowed: allow 2 (line 9)"),
        ("--as ann --administer public/default", 0, "allowed: allow 2 (line 9)"),
        ("--as ann --observe *", 1, "denied: no rule allows it"),
        ("--as billing --read orders", 0, "allowed: allow 3 (line 19)"),
        ("--as billing --read orders --cursor billing/2", 0, "allowed: allow 3 (line 19)"),
        ("--as billing --read orders --cursor shop", 1, "denied: no rule allows it"),
        ("--as billing --attach orders", 0, "allowed: allow 3 (line 19)"),
    ],
)
def test_it_names_the_rule_that_decides(rules: str, asked: str, status: int, said: str) -> None:
    done = explain(rules, *asked.split())
    assert (done.returncode, done.stdout.strip(), done.stderr) == (status, said, "")


def test_as_json(rules: str) -> None:
    done = explain(rules, "--as", "shop-9", "--publish", "orders", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == {
        "subject": "shop-9",
        "action": "publish",
        "name": "persistent://public/default/orders",
        "producer_name": None,
        "cursor": None,
        "is_allowed": False,
        "rule": "deny 1 (line 14)",
    }


@pytest.mark.parametrize(
    "asked", ["", "--read a --publish b", "--read a --producer p", "--publish a --cursor c", "--read a/b"]
)
def test_what_cannot_be_asked_is_wrong_usage(rules: str, asked: str) -> None:
    assert explain(rules, "--as", "ann", *asked.split()).returncode == 2


def test_a_file_that_cannot_be_read_is_neither_allowed_nor_denied(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text("[[allow]]\nsubject = []\n")
    done = explain(str(tmp_path / "rules.toml"), "--as", "a", "--read", "t")
    assert done.returncode == 2
    assert "allow 1 (line 1)" in done.stderr
