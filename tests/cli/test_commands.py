"""The commands as processes against a real sidecar."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from seqdedupe.cli.common import naming_near
from seqdedupe.cli.main import main
from seqdedupe.cli.topic_commands import _print_topic, _print_topics
from seqdedupe.client.blocking import Client
from seqdedupe.client.connection import HINT_OF_GONE
from seqdedupe.command import json_text, print_table, printable, tell_waiting
from seqdedupe.errors import NotFoundError, error
from seqdedupe.names import topic_name
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS, Run, lines
from tests.processes import running
from tests.warm import cold

RECORDS = 20_000
NOBODY = "127.0.0.1:1"
"""An address where no sidecar is."""


def test_reading_from_places(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(lines(5))
    run("publish", "a", "--topic", "places", "--producer", "p")
    run("publish", "a", "--topic", "elsewhere", "--producer", "p")
    message_id = json.loads(run("read", "places", "--from", "2", "--limit", "1", "--json").stdout)["message_id"]
    assert run("read", "places", "--from", message_id, "--limit", "1").stdout == b"record 3\n"
    incarnation = message_id.partition(":")[0]
    for position in (f"{incarnation}/{message_id}@2", f"{incarnation}@2"):
        assert run("read", "places", "--from", position, "--limit", "1").stdout == b"record 3\n"
    assert run("read", "places", "--from", "latest").stdout == b""
    assert run("read", "places", "--from", "5").stdout == b""
    for follow in ((), ("--follow",)):
        error = run("read", "places", "--from", "6", *follow, status=1).stderr
        assert b"index 6 is after the end of" in error
        assert b"whose next message gets index 5 [POSITION_AFTER_END] Start at an index up to 5, or at " in error
    later = f"{incarnation}:9"
    error = run("read", "places", "--from", later, status=1).stderr
    assert f"/{later}@9 is after the end of".encode() in error
    assert b"[POSITION_AFTER_END] The topic has lost its last messages" in error
    assert b"[POSITION_OF_ANOTHER_INCARNATION]" in run("read", "elsewhere", "--from", message_id, status=1).stderr


def test_following_ends_quietly_at_ctrl_c(run: Run, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "a").write_bytes(b"1\n")
    (tmp_path / "b").write_bytes(b"2\n")
    run("publish", "a", "--topic", "followed", "--producer", "a")
    command = [COMMAND, "read", "followed", "--follow"]
    with running(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"1\n"
        run("publish", "b", "--topic", "followed", "--producer", "b")
        assert process.stdout.readline() == b"2\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_SECONDS) == 130
        assert process.stderr.read().strip() == b""


def test_ctrl_c_during_the_imports_ends_it_quietly(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    # What a shell without job control starts in the background ignores SIGINT, and so do its children.
    command = ["env", "--default-signal=INT", COMMAND, "version"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=TIMEOUT_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("as_json", [False, True])
def test_reading_says_once_that_the_sidecar_is_lost(tmp_path: Path, as_json: bool) -> None:
    with Sidecar(tmp_path) as sidecar:
        with Client(sidecar.address) as client, client.producer("t", "p") as producer:
            producer.send(b"1")
        command = [COMMAND, "read", "t", "--follow", "--address", sidecar.address, *["--json"] * as_json]
        with running(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline()
            sidecar.kill()
            said = process.stderr.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_SECONDS) == 130
            assert process.stderr.read().strip() == b""
    if as_json:
        waiting = json.loads(said)["waiting"]
        assert (waiting["topic"], waiting["reason"]) == ("persistent://public/default/t", "UNREACHABLE")
    else:
        assert said.startswith(b"seqdedupe: waiting: ")
        assert sidecar.address.encode() in said


def test_with_follow_a_sidecar_that_is_not_up_yet_is_waited_for(tmp_path: Path) -> None:
    """As by a program of the user; without `--follow` it is an error at once."""
    with Sidecar(tmp_path) as sidecar:
        with Client(sidecar.address) as client, client.producer("t", "p") as producer:
            producer.send(b"1")
        sidecar.kill()
        command = [COMMAND, "read", "t", "--follow", "--address", sidecar.address]
        with running(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            said = process.stderr.readline()
            assert said.startswith(b"seqdedupe: waiting: ")
            assert b"[UNREACHABLE]" in said
            sidecar.start()
            assert process.stdout.readline() == b"1\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_command_waits_on_where_nobody_reads_what_for(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    """It is said on the client's event loop: what ended there would end the producer with it."""
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        tell_waiting("t", as_json, error("UNREACHABLE", "gone"))  # type: ignore[arg-type]
        with pytest.raises(BrokenPipeError):
            stderr.close()


def test_a_broken_pipe_is_quiet(run: Run, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "a").write_bytes(lines(RECORDS))
    run("publish", "a", "--topic", "pipe", "--producer", "p")
    command = [COMMAND, "read", "pipe"]
    with running(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"record 0\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(TIMEOUT_SECONDS) == 141


def test_a_standard_output_that_cannot_be_written_is_said_to_be_that(
    run: Run, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "a").write_bytes(b"1\n")
    run("publish", "a", "--topic", "full", "--producer", "p")
    for arguments in (("read", "full"), ("topics",), ("topics", "show", "full", "--json")):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                [COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, env=environment, timeout=TIMEOUT_SECONDS
            )
        assert done.returncode == 1
        assert done.stderr.count(b"\n") == 1
        assert b"standard output cannot be written: No space left on device" in done.stderr
        assert b"STANDARD_OUTPUT_FAILED" in done.stderr


def test_a_standard_output_that_is_closed_is_said_to_be_that(run: Run, environment: dict[str, str]) -> None:
    run("topics", "create", "closed")
    for arguments in ("read closed", "topics"):
        shell = ["sh", "-c", f"{COMMAND} {arguments} >&-"]
        done = subprocess.run(shell, stderr=subprocess.PIPE, env=environment, timeout=TIMEOUT_SECONDS)
        assert done.returncode == 1
        assert b"standard output is closed [STANDARD_OUTPUT_FAILED]" in done.stderr


def test_topics_are_made_shown_set_and_deleted(run: Run) -> None:
    def state(*arguments: str) -> tuple[str, bool]:
        topic = json.loads(run("topics", *arguments, "--json").stdout)
        return topic["name"], topic["deduplication_enabled"]

    name = "persistent://public/default/t:1"
    assert state("create", "t:1", "--no-deduplication") == (name, False)
    assert state("show", name) == (name, False)
    assert name in [topic["name"] for topic in json.loads(run("topics", "--json").stdout)]
    assert b"[TOPIC_EXISTS]" in run("topics", "create", "t:1", status=1).stderr
    assert json.loads(run("topics", "delete", "t:1", "--json").stdout) == {"deleted": name}
    for gone in (("topics", "delete", "t:1"), ("read", "t:1")):
        assert run(*gone, status=1).stderr.count(b"[TOPIC_NOT_FOUND]") == 1


def test_a_schema_is_for_topics_of_pulsars(run: Run, tmp_path: Path) -> None:
    (tmp_path / "order.json").write_text('{"type": "STRING", "schema": ""}')
    refused = run("topics", "create", "typed", "--schema", str(tmp_path / "order.json"), status=1).stderr
    assert b"schema can be set only on a sidecar with log = 'pulsar'" in refused
    refused = run("topics", "create", "typed", "--take-over", status=1).stderr
    assert b"take_over can be set only on a sidecar with log = 'pulsar'" in refused
    assert b"[TOPIC_NOT_FOUND]" in run("topics", "show", "typed", status=1).stderr


def test_policies_of_topics_and_namespaces(run: Run) -> None:
    def policy(*arguments: str) -> tuple[dict[str, object], dict[str, object]]:
        state = json.loads(run("policy", *arguments, "--json").stdout)
        return {name: value for name, value in state["set"].items() if value is not None}, state["applied"]

    topic = "persistent://shop/orders/t"
    run("topics", "create", topic)
    assert policy("get", topic)[0] == {}
    policy("set", "shop/orders", "--gap", "reject", "--retention-size-in-mb", "7")
    is_set, applied = policy("get", topic)
    assert (is_set, applied["gap"], applied["retention_size_in_mb"]) == ({}, "REJECT", 7)
    is_set, applied = policy("set", topic, "--gap", "ALLOW", "--no-deduplication")
    assert is_set == {"gap": "ALLOW", "deduplication_enabled": False}
    assert (applied["gap"], applied["retention_size_in_mb"]) == ("ALLOW", 7)
    assert policy("remove", topic, "gap")[0] == {"deduplication_enabled": False}
    assert policy("remove", topic)[0] == {}
    assert policy("remove", "shop/orders")[0] == {}
    shown = run("policy", "get", topic).stdout.decode().splitlines()
    assert shown[0].split() == ["POLICY", "SET", "APPLIED"]
    assert ["gap", "-", "ALLOW"] in [line.split() for line in shown]
    assert b"[INVALID_REQUEST]" in run("policy", "set", topic, "--retention-size-in-mb=-2", status=1).stderr
    for name in (topic, "shop/orders"):
        refused = run("policy", "set", name, "--overlap", "pulsar", status=1).stderr
        assert b"overlap has an effect only on topics on a broker's own log" in refused
    assert b"[TOPIC_NOT_FOUND]" in run("policy", "get", "nobody", status=1).stderr


def test_of_a_damaged_topic_nothing_is_shown_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    damaged = admin_pb2.Topic(name="t", state=admin_pb2.TOPIC_STATE_DAMAGED, why="its log is damaged")
    _print_topic(damaged, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    unknown = {"deduplication_enabled", "messages", "first_index", "last", "snapshot_index", "term", "producers"}
    unknown |= {"log_bytes", "partition_of", "entry_format", "deduplication_mode", "deduplication_route", "window"}
    assert {name for name, value in shown.items() if value is None} == unknown
    _print_topic(damaged, as_json=False)
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    names = ("deduplication", "messages", "last", "snapshot", "producers", "log")
    assert [lines[name] for name in names] == ["?"] * len(names)


def test_standby_is_said_to_be_what_the_sidecar_is_that_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody who reads the list is to think that such a topic is served by none."""
    serving = admin_pb2.Topic(name="a", state=admin_pb2.TOPIC_STATE_SERVING)
    _print_topics([serving])
    assert "STANDBY" not in capsys.readouterr().out
    _print_topics([serving, admin_pb2.Topic(name="b", state=admin_pb2.TOPIC_STATE_STANDBY)])
    assert capsys.readouterr().out.splitlines()[-1].startswith("STANDBY: ")


def test_a_column_of_numbers_stands_to_the_right_where_one_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("TOPIC", "MESSAGES"), [("a", 12_345), ("b", None), ("c", 7)])
    assert capsys.readouterr().out.splitlines() == [
        "TOPIC  MESSAGES",
        "a        12,345",
        "b             ?",
        "c             7",
    ]


def test_versions(run: Run) -> None:
    version = json.loads(run("version", "--json").stdout)
    assert version["sidecar"] == version["command"] == run("--version").stdout.decode().strip()


@pytest.mark.parametrize("command", [("read", "t"), ("publish", "a", "--topic", "t", "--producer", "p")])
def test_without_a_sidecar_it_says_so_at_once(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "a").write_bytes(b"1\n")
    error = run(*command, "--address", NOBODY, status=1).stderr
    assert b"[UNREACHABLE] Nothing listens there: is the sidecar running" in error
    assert NOBODY.encode() in error


@pytest.mark.parametrize(
    "arguments",
    [
        ("nix",),
        ("publish",),
        ("publish", "a", "--topic", "t"),
        ("publish", "a", "--topic", "t", "--producer", "p", "--format", "xml"),
        ("topics", "show"),
        ("policy", "set", "t"),
        ("policy", "set", "t", "--gap", "maybe"),
        ("policy", "remove", "t", "nix"),
        ("topics", "--address", "127.0.0.1:1", "show", "t"),
        ("publish", "-", "--topic", "t", "--producer", "p", "--follow"),
        ("publish", "a", "--topic", "t", "--producer", "p", "--follow", "--final"),
        ("read", "t", "--limit", "0"),
        *(
            ("read", "t", f"--from={place}")
            for place in (
                "x",
                "-1",
                "1:",
                "1:x",
                "1/2",
                "1:2:3",
                f"1/1:2:{2**40}@2",
                str(2**63),
                f"1:{2**63}",
                "9" * 5000,
            )
        ),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["seqdedupe", *arguments])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert error.endswith("--help.\n")


@pytest.mark.parametrize(("topic", "producer"), [("bad name", "p"), ("t", "")])
def test_bad_names(run: Run, tmp_path: Path, topic: str, producer: str) -> None:
    (tmp_path / "a").write_bytes(b"1\n")
    error = run("publish", "a", "--topic", topic, "--producer", producer, status=1).stderr
    assert b"[INVALID_TOPIC_NAME]" in error or b"[INVALID_NAME]" in error


def test_serve_without_its_packages_names_the_extra(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rocksdict.py").write_text("raise ModuleNotFoundError('not here', name='rocksdict')\n")
    serve = ("serve", "--data-directory", "data", "--listen", "127.0.0.1:0")
    error = run(*serve, status=2, PYTHONPATH=str(tmp_path)).stderr
    assert b"needs rocksdict" in error
    assert b"pip install 'PATH[sidecar]'" in error


def test_serve_serves(tmp_path: Path, environment: dict[str, str]) -> None:
    command = [COMMAND, "serve", "--data-directory", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
    with running(command, env=environment, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        address = next(e["address"] for e in map(json.loads, process.stderr) if e["event"] == "serving")
        known = environment | {"SEQDEDUPE_TOKEN_FILE": str(tmp_path / "data" / "token")}
        listing = [COMMAND, "topics", "--address", address]
        subprocess.run(listing, env=known, check=True, timeout=TIMEOUT_SECONDS)
        assert subprocess.run(listing, env=environment, timeout=TIMEOUT_SECONDS).returncode != 0  # without the token
        process.terminate()
        process.stderr.read()
        assert process.wait(TIMEOUT_SECONDS) == 0


EVIL = "\x1b]0;title\x07\x9b31mred\u202e\n"
ESCAPED = r"\x1b]0;title\x07\x9b31mred\u202e\n"


def test_what_a_terminal_may_act_on_is_shown_as_escapes() -> None:
    assert printable(EVIL) == ESCAPED
    assert printable("tab\tand naïve ✓ 👩‍🚀") == "tab\tand naïve ✓ 👩‍🚀"
    assert json.loads(json_text([EVIL, "\ud800", "naïve"])) == [EVIL, "\ud800", "naïve"]
    assert printable(json_text([EVIL, "naïve"])) == json_text([EVIL, "naïve"])


def on_terminal(*arguments: str, environment: dict[str, str]) -> bytes:
    """What the command writes to a terminal."""
    ours, theirs = pty.openpty()
    # A warm process has imported more, and what that writes to a terminal at its end is not the command's.
    with cold(), running([COMMAND, *arguments], env=environment, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                written += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
        process.wait(TIMEOUT_SECONDS)
    os.close(ours)
    return written


def test_names_and_payloads_do_nothing_to_a_terminal(
    run: Run, shared_sidecar: Sidecar, environment: dict[str, str]
) -> None:
    with Client(shared_sidecar.address) as client, client.producer("evil", "p\u202e") as producer:
        producer.send(EVIL.encode() + b"\xff", properties={EVIL: EVIL})
    shown = on_terminal("read", "evil", environment=environment)
    assert shown == ESCAPED.encode() + b"\\xff\r\n"
    commands = (("read", "evil", "--json"), ("producers", "evil"), ("producers", "evil", "--json"), ("topics",))
    for command in commands:
        shown = on_terminal(*command, environment=environment)
        assert not any(bad in shown.decode() for bad in "\x1b\x07\x9b\u202e"), shown
    # Elsewhere a payload comes as it is, and JSON says the same everywhere.
    assert run("read", "evil").stdout == EVIL.encode() + b"\xff\n"
    message = json.loads(run("read", "evil", "--json").stdout)
    assert message["properties"] == {EVIL: EVIL}
    assert message["producer_name"] == "p\u202e"


def test_a_mistyped_topic_is_told_what_may_be_meant(run: Run) -> None:
    run("topics", "create", "departures")
    pipe = ("pipe", "depatures", "boarding", "--function", "json:dumps", "--name", "p")
    commands = (("read", "depatures"), ("topics", "show", "persistent://public/default/depatures"), pipe)
    for command in (*commands, ("topics", "delete", "depatures")):
        assert run(*command, status=1).stderr.endswith(b"[TOPIC_NOT_FOUND] Do you mean departures?\n")
    # Nobody who reads, moves or deletes is told how to create one.
    said = b"[TOPIC_NOT_FOUND] Check the name: `seqdedupe topics` lists the topics.\n"
    assert run("topics", "move", "zzzzzzzz", "--to", "h:1", status=1).stderr.endswith(said)
    for short, other in (("k", "k2"), ("arrivals", "arrangers")):
        run("topics", "create", short)
        assert b"Do you mean" not in run("read", other, status=1).stderr


def test_no_topic_is_meant_that_has_the_same_name() -> None:
    """Where one of several sidecars behind one address does not know it, and the next one lists it."""
    listed = SimpleNamespace(admin=SimpleNamespace(topics=lambda: [SimpleNamespace(name=topic_name("departures"))]))
    for hint in (None, HINT_OF_GONE):
        with pytest.raises(NotFoundError) as caught, naming_near(listed, "departures"):  # type: ignore[arg-type]
            raise error("TOPIC_NOT_FOUND", "there is no topic departures", hint=hint)
        assert "several sidecars" in caught.value.hint
        assert "Do you mean" not in caught.value.hint
        assert hint in (None, caught.value.hint)


def test_errors_are_json_where_json_is_asked_for(run: Run) -> None:
    for arguments, status, reason in (
        (("read", "unknown-topic", "--json"), 1, "TOPIC_NOT_FOUND"),
        (("topics", "--json", "--address", NOBODY), 1, "UNREACHABLE"),
        (("topics", "--json", "--address", "nowhere"), 1, "INVALID_ADDRESS"),
        (("topics", "--json", "--nix"), 2, "WRONG_USAGE"),
    ):
        error = json.loads(run(*arguments, status=status).stderr)["error"]
        assert error["reason"] == reason
        assert error["message"]
        assert error["hint"]


def test_a_producer_is_reset_to_none(run: Run, tmp_path: Path) -> None:
    """The -1 that stands for it is no option."""
    file = tmp_path / "lines.txt"
    file.write_text("one\n")
    publish = ("publish", str(file), "--topic", "reset-to-none", "--producer", "p")
    run(*publish)
    run("reset-producer", "reset-to-none", "p", "-1")
    # It has sent something: only that counts no more. A name that nobody has used learns the same.
    for name in ("p", "mistyped"):
        said = run("message-state", "reset-to-none", name, "0").stdout
        assert b"no sequence ID of it counts in this topic: persisted -1, pushed -1" in said
    assert b"1 NotDup" in run(*publish).stdout
    assert b"'x' is not a whole number." in run("message-state", "reset-to-none", "p", "x", status=2).stderr
    assert b"-1 is not in the range" in run("message-state", "reset-to-none", "p", "-1", status=2).stderr


def test_what_is_no_file_to_import_is_refused(run: Run, tmp_path: Path) -> None:
    run("topics", "create", "imports")
    file = tmp_path / "any.csv"
    file.write_text("a,b\n")
    refused = run("import", "imports", str(file), status=1).stderr
    assert b"any.csv: it is neither a snapshot" in refused
    assert b"[INVALID_SOURCE]" in refused
    assert b"`seqdedupe export`" in refused
    nowhere = tmp_path / "nowhere" / "file"
    told = run("export", "imports", str(nowhere), status=1).stderr
    said = "No such file or directory [OS_ERROR] Is that its name, and is its folder there?\n"
    assert told.endswith(said.encode())
    missing = tmp_path / "missing"
    assert run("import", "imports", str(missing), status=1).stderr == f"seqdedupe: {missing}: {said}".encode()


def test_a_topic_is_moved_to_another_sidecar_that_is_named(run: Run, shared_sidecar: Sidecar) -> None:
    run("topics", "create", "stays")
    nowhere = run("topics", "move", "stays", status=1).stderr
    assert b"the request names no sidecar [INVALID_ADDRESS] Name one: `--to ADDRESS`" in nowhere
    elsewhere = run("topics", "move", "stays", "--to", "127.0.0.1:1", status=1).stderr
    assert b"'127.0.0.1:1' is none of the sidecars that topics may be moved to [INVALID_ADDRESS]" in elsewhere
    here = run("topics", "move", "stays", "--to", shared_sidecar.address).stdout
    assert here == f"persistent://public/default/stays is served by the sidecar at {shared_sidecar.address}\n".encode()
    assert b"SERVING" in run("topics", "show", "stays").stdout
    assert b"All topics of this sidecar are its own" in run("sidecars", status=1).stderr


def test_a_flag_of_the_sidecar_that_is_mistyped_is_one_line(run: Run) -> None:
    said = run("serve", "--data-directori", "d", status=2).stderr
    assert (
        said == b"seqdedupe: there is no --data-directori: do you mean --data-directory? See seqdedupe serve --help.\n"
    )
