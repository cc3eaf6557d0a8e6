"""No command prints the password of a URL that was given in place of something else."""

import json
import subprocess
from pathlib import Path

import pytest

from seqdedupe.command import without_passwords
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS

URL = "s3://KEY:SEC/RET@bucket/x"


@pytest.mark.parametrize(
    "words",
    [
        ("verify", URL),
        ("restore", URL, "data"),
        ("restore", "backup", URL),
        ("restore", "--from", URL, "data"),
        ("backup", "list", URL),
        ("backup", "night", "--to", URL),
        ("doctor", URL),
        ("topics", URL),
        ("topics", "--address", URL),
        ("topics", "--token-file", URL),
        ("publish", URL, "--topic", "t", "--producer", "p"),
        ("import", "t", URL),
        ("config", "check", URL),
        ("token", "keys", URL, "keys.json"),
        ("auth", "explain", "--rules", URL, "--as", "x", "--publish", "t"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_url_in_a_wrong_place_is_printed_without_its_password(
    tmp_path: Path, words: tuple[str, ...], more: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [COMMAND, *words, *more], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert done.returncode
    assert "RET" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not more or "error" in json.loads(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("words", [("verify", "s3://bucket/x"), ("restore", "s3://bucket/x", "data")])
def test_a_backup_in_an_object_store_is_not_taken_for_a_folder(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [COMMAND, *words], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    assert done.returncode == 2
    assert "Give a folder, not a URL." in done.stderr
    assert "restore --from" in done.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("'s3:/KEY:SECRET@b' is not there", "'s3:/KEY:***@b' is not there"),
        ("postgresql://user:p@ss@host/database", "postgresql://user:***@host/database"),
        ("postgresql://user@host/database", "postgresql://user@host/database"),
        ("persistent://public/default/t and host:6660", "persistent://public/default/t and host:6660"),
        ("http://host:6660/x", "http://host:6660/x"),
    ],
)
def test_only_passwords_are_hidden(text: str, shown: str) -> None:
    assert without_passwords(text) == shown
