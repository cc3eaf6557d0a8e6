"""Profiles: connection options by name, and what comes before them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from seqdedupe import sidecar_options
from seqdedupe.errors import ConfigurationError
from seqdedupe.testing import Sidecar
from tests.certificates import Authority, guarded_sidecar
from tests.cli.conftest import Run

NOBODY = "127.0.0.1:1"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def shared_sidecar(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Sidecar]:
    with guarded_sidecar(tmp_path_factory.mktemp("cli"), authority) as sidecar:
        yield sidecar


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Without an address; the user's home is a folder of the test's own."""
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("SEQDEDUPE_", "XDG_"))}
    return cleared | {"HOME": str(tmp_path)}


def write(folder: Path, text: str) -> Path:
    file = folder / "seqdedupe" / "profiles.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.fixture
def home(tmp_path: Path, shared_sidecar: Sidecar, authority: Authority) -> Path:
    """A home with two profiles, `here` and `nowhere`."""
    write(
        tmp_path / ".config",
        f"""
[here]
address = "{shared_sidecar.address}"
token_file = "here.token"
tls_ca_file = "{authority.ca_file}"

[nowhere]
address = "{NOBODY}"
token_file = "~/none.token"
""",
    )
    (tmp_path / ".config" / "seqdedupe" / "here.token").write_text(shared_sidecar.token_file.read_text())
    return tmp_path


def test_a_profile_says_where_and_what_to_show(run: Run, home: Path) -> None:
    run("topics", "--profile", "here")
    run("topics", "show", "none", "--profile", "here", status=1)
    run("topics", SEQDEDUPE_PROFILE="here")
    run("topics", "create", "a", SEQDEDUPE_PROFILE="here")
    # The control: without it nobody is found.
    assert b"[UNREACHABLE]" in run("topics", SEQDEDUPE_ADDRESS=NOBODY, status=1).stderr


def test_options_and_environment_come_before_it(run: Run, home: Path, shared_sidecar: Sidecar) -> None:
    said = run("topics", "--profile", "here", "--address", NOBODY, status=1).stderr
    assert NOBODY.encode() in said
    said = run("topics", "--profile", "here", SEQDEDUPE_ADDRESS=NOBODY, status=1).stderr
    assert NOBODY.encode() in said
    assert b"'no'" in run("topics", "--profile", "here", "--token-file", "no", status=1).stderr
    assert b"'no'" in run("topics", "--profile", "here", SEQDEDUPE_TOKEN_FILE="no", status=1).stderr
    assert b"[UNAUTHENTICATED]" in run("topics", "--profile", "here", SEQDEDUPE_TOKEN="wr0ng", status=1).stderr
    # What is empty counts as not said.
    run("topics", "--profile", "here", SEQDEDUPE_ADDRESS="", SEQDEDUPE_TOKEN="", SEQDEDUPE_TOKEN_FILE="")
    # The option chooses, and nothing is left of what the environment chose, also where a group learned first.
    said = run("topics", "show", "never-made", "--profile", "here", SEQDEDUPE_PROFILE="nowhere", status=1).stderr
    assert b"[TOPIC_NOT_FOUND]" in said
    write(home / ".config", (home / ".config/seqdedupe/profiles.toml").read_text() + "\n[bare]\n")
    asked = ("topics", "show", "no-such", "--address", shared_sidecar.address)
    assert b"[TOPIC_NOT_FOUND]" in run(*asked, SEQDEDUPE_PROFILE="here", status=1).stderr
    assert b"[TOPIC_NOT_FOUND]" not in run(*asked, "--profile", "bare", SEQDEDUPE_PROFILE="here", status=1).stderr


def test_the_list_shows_no_secret(run: Run, home: Path, shared_sidecar: Sidecar) -> None:
    token = shared_sidecar.token_file.read_text().strip()
    for options in ((), ("--json",)):
        shown = run("profiles", *options, SEQDEDUPE_PROFILE="here").stdout.decode()
        assert shared_sidecar.address in shown
        assert token not in shown
    listed = json.loads(run("profiles", "--json", SEQDEDUPE_PROFILE="here").stdout)
    assert [(one["name"], one["is_chosen"]) for one in listed] == [("here", True), ("nowhere", False)]
    assert listed[0]["token_file"] == str(home / ".config" / "seqdedupe" / "here.token")
    assert listed[1] == {
        "name": "nowhere",
        "address": NOBODY,
        "token_file": str(home / "none.token"),
        "tls_ca_file": None,
        "tls_certificate_file": None,
        "tls_key_file": None,
        "is_chosen": False,
    }


def test_the_folder_of_configurations_is_that_of_the_user(run: Run, tmp_path: Path) -> None:
    assert run("profiles", "--json").stdout == b"[]\n"
    write(tmp_path / "xdg", '[elsewhere]\naddress = "127.0.0.1:1"\n')
    assert b"elsewhere" in run("profiles", XDG_CONFIG_HOME=str(tmp_path / "xdg")).stdout
    # A relative one is ignored, as the specification says.
    assert b"elsewhere" not in run("profiles", XDG_CONFIG_HOME="xdg").stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a", "cannot be read: "),
        ("[a]\nadress = 'x:1'", "has a key 'adress', which is none of"),
        ("[a]\nadress = 'x:1'", "do you mean address?"),
        ("[a]\ntoken = 's3cr3t'", "has a key 'token', which is none of"),
        ("[a]\naddress = 5", "address of the profile 'a' should be text"),
        ("[a]\naddress = ''", "address of the profile 'a' should be text"),
        ("address = 'x:1'", "address stands outside of a profile"),
        ("[b]", "there is no profile 'a'"),
        ("[aa]", "do you mean aa?"),
        ("[a]\n[b]\nx = 1", "the profile 'b' has a key 'x'"),
        ("#" * (sidecar_options.MAX_PROFILES_BYTES + 1), "cannot be read: "),
    ],
)
def test_a_file_that_is_wrong_says_where(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        sidecar_options.read_profile("a")
    assert said in str(caught.value)
    assert "s3cr3t" not in str(caught.value)
    assert "token_file" in caught.value.hint


def test_an_unknown_profile_ends_the_command(run: Run, home: Path) -> None:
    for options, more in ((("--profile", "her"), {}), ((), {"SEQDEDUPE_PROFILE": "her"})):
        said = run("topics", *options, status=2, **more).stderr
        assert b"there is no profile 'her'" in said
        assert b"do you mean here? [INVALID_CONFIGURATION]" in said
