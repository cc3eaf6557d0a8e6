"""Configuration: where a key may be given, what wins, and one clear line for what cannot be."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from broker_sidecar.config import KEYS, Config, examine, load
from seqdedupe.cli.commands import cli
from seqdedupe.cli.common import DATABASE_VARIABLE
from seqdedupe.client.credentials import VARIABLES
from seqdedupe.errors import ConfigurationError
from seqdedupe.sidecar_options import ADDRESS_VARIABLE, PROFILE_VARIABLE
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.topic.policy import LARGEST, LEAST
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.calls import Client, batch, refused, verdicts

StartSidecar = Callable[..., Sidecar]


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "sidecar.toml"
    file.write_text('data_directory = "a"\nmax_topics = 1\nmax_streams = 1\nallow_auto_topic_creation = false\n')
    environment = {"SEQDEDUPE_MAX_TOPICS": "2", "SEQDEDUPE_MAX_STREAMS": "2", "HOME": "/", "seqdedupe_x": "no key"}
    config = load(file, environment, {"max_topics": "3", "log_level": None})
    assert (config.data_directory, config.max_streams, config.max_topics) == ("a", 2, 3)
    assert config.allow_auto_topic_creation is False
    assert config.log_level == Config().log_level
    assert load(file, environment | {"SEQDEDUPE_ALLOW_AUTO_TOPIC_CREATION": "True"}, {}).allow_auto_topic_creation


def test_what_clients_are_told_is_no_key_of_the_sidecar() -> None:
    environment = dict.fromkeys((ADDRESS_VARIABLE, PROFILE_VARIABLE, DATABASE_VARIABLE, *VARIABLES), "something")
    assert load(None, environment, {"data_directory": "a"}) == load(None, {}, {"data_directory": "a"})


def variables_of(command: click.Command) -> Iterator[str]:
    for option in command.params:
        yield from [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from variables_of(inner)


def test_no_variable_of_a_command_keeps_a_sidecar_from_starting() -> None:
    variables = {name for name in variables_of(cli) if name.startswith("SEQDEDUPE_")}
    assert {ADDRESS_VARIABLE, DATABASE_VARIABLE, "SEQDEDUPE_METRICS_LISTEN"} <= variables
    environment = {name: "127.0.0.1:1" if name.endswith("LISTEN") else "something" for name in variables}
    load(None, environment, {"data_directory": "a"})


TLS = {"tls_certificate_file": "certificate.pem", "tls_key_file": "key.pem"}

BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "no data directory": ("data_directory", {"data_directory": None}),
    "empty data directory": ("data_directory", {"data_directory": ""}),
    "unknown key": ("colour", {"colour": "red"}),
    "not a number": ("max_topics", {"max_topics": "many"}),
    "a fraction": ("max_topics", {"max_topics": "1.5"}),
    "a number for text": ("listen", {"listen": 6660}),
    "a truth for a number": ("max_topics", {"max_topics": True}),
    "a word for a truth": ("allow_insecure_listen", {"allow_insecure_listen": "yes"}),
    "a list": ("max_topics", {"max_topics": [1]}),
    "no topics": ("max_topics", {"max_topics": 0}),
    "no streams": ("max_streams", {"max_streams": 0}),
    "below the least interval": ("deduplication_entries_interval", {"deduplication_entries_interval": 0}),
    "below no limit": ("default_retention_size_in_mb", {"default_retention_size_in_mb": -2}),
    "a timeout below never": (
        "deduplication_producer_inactivity_timeout_minutes",
        {"deduplication_producer_inactivity_timeout_minutes": -1},
    ),
    "a time below 0": ("drain_timeout_seconds", {"drain_timeout_seconds": -1}),
    "unknown level": ("log_level", {"log_level": "loud"}),
    "unknown format": ("log_format", {"log_format": "xml"}),
    "unknown authentication": ("authentication", {"authentication": "password"}),
    "keys of tokens for nobody": ("token_audience", {"token_keys_file": "keys.json"}),
    "an audience without keys": ("token_keys_file", {"token_audience": "seqdedupe"}),
    "a certificate without its key": ("tls_key_file", {"tls_certificate_file": "a.pem"}),
    "a key without its certificate": ("tls_certificate_file", {"tls_key_file": "a.pem"}),
    "lists of revoked ones without authorities": ("tls_client_ca_file", TLS | {"tls_client_crl_file": "revoked.pem"}),
    "authorities of clients without TLS": ("tls_certificate_file", {"tls_client_ca_file": "ca.pem"}),
    "tokens of nobody": (
        "authentication",
        {"authentication": "none", "token_keys_file": "keys.json", "token_audience": "seqdedupe"},
    ),
    "certificates of nobody": ("authentication", TLS | {"authentication": "none", "tls_client_ca_file": "ca.pem"}),
    "TLS on a socket": ("tls_certificate_file", TLS | {"listen": "unix:/run/x.sock"}),
    "rules for nobody": ("authentication", {"authentication": "none", "rules_file": "rules.toml"}),
    "keys of tokens without rules": (
        "rules_file",
        {"authentication": "token", "token_keys_file": "keys.json", "token_audience": "seqdedupe"},
    ),
    "TLS on two sockets": ("tls_certificate_file", TLS | {"listen": "unix:/run/x.sock", "also_listen": "unix:/run/y"}),
    "a door of a broker": ("pulsar_listen", {"pulsar_listen": "127.0.0.1:6651", "log": "broker"}),
    "a door of a shard that is everywhere": (
        "advertised_pulsar_address",
        {"shards": "0-31", "cluster_id": "c", "pulsar_listen": "0.0.0.0:6651", "allow_insecure_listen": True},
    ),
    "a door of workers that is everywhere": (
        "advertised_pulsar_address",
        {"workers": 2, "pulsar_listen": "[::]:6651", "allow_insecure_listen": True},
    ),
    "a door of workers that is everywhere, in short": (
        "advertised_pulsar_address",
        {"workers": 2, "pulsar_listen": "0:6651", "allow_insecure_listen": True},
    ),
    "a door for clients that is everywhere": (
        "advertised_pulsar_address",
        {"pulsar_listen": "127.0.0.1:6651", "advertised_pulsar_address": "[::0]:6651"},
    ),
    "workers that are everywhere, in short": (
        "advertised_address",
        {"workers": 2, "listen": "0:6660", "allow_insecure_listen": True},
    ),
    "doors everywhere among the ports of workers": (
        "pulsar_listen",
        {
            "workers": 10,
            "pulsar_listen": "0:6651",
            "advertised_pulsar_address": "gate:6651",
            "allow_insecure_listen": True,
        },
    ),
    "ports of workers that do not exist": ("pulsar_listen", {"workers": 2, "pulsar_listen": "127.0.0.1:65535"}),
    "workers at ports that do not exist": (
        "advertised_pulsar_address",
        {"workers": 2, "pulsar_listen": "127.0.0.1:7000", "advertised_pulsar_address": "gate:65535"},
    ),
    "doors among the ports of workers, by name": (
        "pulsar_listen",
        {"workers": 10, "listen": "localhost:6660", "pulsar_listen": "127.0.0.1:6651"},
    ),
    "doors among the ports of workers": ("pulsar_listen", {"workers": 10, "pulsar_listen": "127.0.0.1:6651"}),
    "metrics among the doors of workers": (
        "pulsar_listen",
        {"workers": 2, "metrics_listen": "127.0.0.1:6652", "pulsar_listen": "127.0.0.1:6651"},
    ),
    "two ports": ("also_listen", {"also_listen": "127.0.0.1:6661"}),
    "the same socket twice": ("also_listen", {"listen": "unix:/run/x.sock", "also_listen": "unix:/run/x.sock"}),
    "no address as well": ("also_listen", {"also_listen": "6661"}),
    "no port": ("listen", {"listen": "127.0.0.1"}),
    "no host": ("listen", {"listen": ":6660"}),
    "port of letters": ("listen", {"listen": "127.0.0.1:http"}),
    "port of another digit": ("listen", {"listen": "127.0.0.1:²"}),
    "port too high": ("listen", {"listen": "127.0.0.1:65536"}),
    "port below 0": ("listen", {"listen": "127.0.0.1:-1"}),
    "socket without a path": ("listen", {"listen": "unix:"}),
    "permissions that are none": ("socket_mode", {"socket_mode": "rw-------"}),
    "permissions that are not octal": ("socket_mode", {"socket_mode": "680"}),
}


def test_whoever_says_how_long_messages_are_kept_has_chosen() -> None:
    def was_chosen(**keys: object) -> bool:
        return load(None, {}, {"data_directory": "a", **keys}).retention_was_chosen

    assert not was_chosen()
    assert was_chosen(default_retention_size_in_mb=-1)
    assert was_chosen(default_retention_time_in_minutes=60)
    assert load(
        None, {"SEQDEDUPE_DEFAULT_RETENTION_TIME_IN_MINUTES": "-1"}, {"data_directory": "a"}
    ).retention_was_chosen
    assert "retention_was_chosen" not in KEYS


OF_POLICIES = (
    "deduplication_entries_interval",
    "deduplication_snapshot_interval_seconds",
    "default_retention_size_in_mb",
    "default_retention_time_in_minutes",
    "deduplication_producer_inactivity_timeout_minutes",
)


@pytest.mark.parametrize("key", OF_POLICIES)
def test_what_is_too_much_for_a_policy_is_too_much_here(key: str) -> None:
    """The answers about a topic could not say it. The control is the largest that they can."""
    name = key.removeprefix("default_")
    for value in (LEAST[name], LARGEST):
        assert getattr(load(None, {}, {"data_directory": "a", key: value}), key) == value
    for value in (LEAST[name] - 1, LARGEST + 1):
        with pytest.raises(ConfigurationError, match=rf"{key} is {value}: at (least|most) "):
            load(None, {}, {"data_directory": "a", key: value})


@pytest.mark.parametrize("case", BAD)
def test_a_value_that_cannot_be_is_named(case: str) -> None:
    key, changes = BAD[case]
    values = {name: value for name, value in ({"data_directory": "a"} | changes).items() if value is not None}
    with pytest.raises(ConfigurationError) as e:
        load(None, {}, values)
    assert e.value.reason == "INVALID_CONFIGURATION"
    assert e.value.message.startswith(key)
    assert e.value.numbers["key"] == key


@pytest.mark.parametrize(
    "name",
    ["listen", "also_listen", "metrics_listen", "pulsar_listen", "advertised_address", "advertised_pulsar_address"],
)
def test_an_address_that_several_checks_need_is_named_once(name: str) -> None:
    given = {"pulsar_listen": "127.0.0.1:6650"} | {name: "nowhere"}
    _, problems = examine(None, {}, {"data_directory": "a", "workers": 2, **given})
    assert [problem.numbers["key"] for problem in problems] == [name]


@pytest.mark.parametrize(
    "keys",
    [
        {"workers": 9},
        {"shards": "0-31", "cluster_id": "c", "peers": "127.0.0.1:6660,127.0.0.1:6661"},
        {"workers": 20, "listen": "127.0.0.2:6660"},
        {"listen": "unix:/run/x.sock", **TLS},
        {"workers": 9, "allow_insecure_listen": True, "advertised_pulsar_address": "a:6651"},
    ],
)
def test_what_a_door_can_be_with(keys: dict[str, Any]) -> None:
    """The control arms of what `BAD` has of doors."""
    listen = "0.0.0.0:6651" if "advertised_pulsar_address" in keys else "127.0.0.1:6651"
    assert load(None, {}, {"data_directory": "a", "pulsar_listen": listen} | keys).pulsar_listen == listen


@pytest.mark.parametrize("content", ["max_topics = ", "max_topics = 'x'", "[max_topics]\na = 1", "\xff\xfe", None])
def test_a_bad_file_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "sidecar.toml"
    if content is not None:
        file.write_bytes(b'data_directory = "a"\n' + content.encode("latin-1"))
    with pytest.raises(ConfigurationError) as e:
        load(file, {}, {})
    assert e.value.reason == "INVALID_CONFIGURATION"


@pytest.mark.parametrize(
    ("content", "environment", "flags", "said"),
    [
        ("max_topics = 'x'", {}, {}, "max_topics is 'x': a whole number is needed (given by the file {file})"),
        ("max_topics = true", {}, {}, "max_topics is true: a whole number is needed (given by the file {file})"),
        ("listen = 1", {}, {}, "listen is 1: text in quotes is needed (given by the file {file})"),
        (
            "",
            {"SEQDEDUPE_ALLOW_INSECURE_LISTEN": "yes"},
            {},
            "allow_insecure_listen is 'yes': true or false is needed "
            "(given by SEQDEDUPE_ALLOW_INSECURE_LISTEN in the environment)",
        ),
        ("max_topics = 5", {}, {"max_topics": "0"}, "max_topics is 0: at least 1 is needed (given by a flag)"),
        (
            "max_topic = 5",
            {},
            {},
            "max_topic is no key of the configuration: do you mean max_topics? (given by the file {file})",
        ),
        (None, {}, {}, "the configuration file {file} cannot be read: No such file or directory"),
    ],
)
def test_an_error_says_what_is_needed_and_where_it_was_given(
    tmp_path: Path, content: str | None, environment: dict[str, str], flags: dict[str, Any], said: str
) -> None:
    file = tmp_path / "sidecar.toml"
    if content is not None:
        file.write_text(f'data_directory = "a"\n{content}\n')
    with pytest.raises(ConfigurationError) as e:
        load(file, environment, flags)
    assert e.value.message == said.format(file=file)


LOOPBACK = ["127.0.0.1:0", "127.9.9.9:1", "localhost:6660", "[::1]:6660", "unix:/run/x.sock", "unix:x.sock"]
REACHABLE = ["0.0.0.0:6660", "[::]:6660", "10.0.0.1:1", "example.org:6660", "*:6660", "[2001:db8::1]:5"]


@pytest.mark.parametrize("listen", LOOPBACK)
def test_loopback_and_sockets_may_be_listened_on(listen: str) -> None:
    assert load(None, {}, {"data_directory": "a", "listen": listen}).listen == listen


@pytest.mark.parametrize("listen", REACHABLE)
def test_other_addresses_only_if_that_is_wanted(listen: str) -> None:
    flags = {"data_directory": "a", "listen": listen}
    with pytest.raises(ConfigurationError) as e:
        load(None, {}, flags)
    assert e.value.reason == "INSECURE_LISTEN"
    assert "(given by a flag)" in e.value.message
    assert load(None, {}, flags | {"allow_insecure_listen": True}).listen == listen
    flags = {"data_directory": "a", "listen": "unix:/run/x.sock", "also_listen": listen}
    with pytest.raises(ConfigurationError, match="also_listen = ") as e:
        load(None, {}, flags)
    assert e.value.reason == "INSECURE_LISTEN"
    assert load(None, {}, flags | TLS).also_listen == listen


@pytest.mark.parametrize("listen", REACHABLE)
def test_other_addresses_with_tls_where_it_is_asked_who_calls(listen: str) -> None:
    flags = TLS | {"data_directory": "a", "listen": listen}
    assert load(None, {}, flags | {"authentication": "token"}).listen == listen
    with pytest.raises(ConfigurationError, match="callers are not authenticated") as e:
        load(None, {}, flags | {"authentication": "none"})
    assert e.value.reason == "INSECURE_LISTEN"


def test_every_key_has_a_default_of_its_type_and_a_meaning() -> None:
    for item in KEYS.values():
        assert type(item.default) is item.type or type(item.default).__name__ == item.type
        assert item.metadata["about"].endswith(".")


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "broker_sidecar", *arguments]
    others = {name: value for name, value in os.environ.items() if not name.startswith("SEQDEDUPE_")}
    return subprocess.run(
        command, capture_output=True, text=True, env=others | environment, check=False, timeout=LAST_RESORT_SECONDS
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ([], {}, "data_directory is required"),
        (["--data-directory", "a", "--max-topics", "x"], {}, "max_topics is 'x'"),
        (["--data-directory", "a", "--listen", "0.0.0.0:1"], {}, "INSECURE_LISTEN"),
        (["--data-directory", "a", "--config", "/nowhere.toml"], {}, "/nowhere.toml"),
        (["--data-directory", "a"], {"SEQDEDUPE_COLOUR": "red"}, "colour is no key"),
    ],
)
def test_the_process_ends_with_status_2_and_a_clear_line(
    arguments: list[str], environment: dict[str, str], words: str
) -> None:
    ended = run(*arguments, **environment)
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith("seqdedupe: ")
    assert words in line
    assert line.endswith(".")


@pytest.mark.parametrize(
    ("flag", "said"), [("--colour", "--colour"), ("--log-f", "do you mean --log-format?"), ("--conf", "--conf")]
)
def test_an_unknown_flag_ends_with_status_2(flag: str, said: str) -> None:
    """So does an abbreviated one."""
    ended = run("--data-directory", "/nowhere/a", flag, "text")
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


# -- as a process ------------------------------------------------------------------------------------------------


def test_unix_socket_also_after_kill_9(start_sidecar: StartSidecar, tmp_path: Path) -> None:
    """A dead sidecar leaves its socket behind; the next one takes its place."""
    address = f"unix:{tmp_path}/sidecar.sock"
    sidecar = start_sidecar(listen=address)
    client = Client(address)
    epochs = client.epochs("t", "p")
    assert verdicts(client.publish_unary("t", batch([("p", 0)], epochs)), 1) == [1]
    sidecar.restart()
    assert client.rows("t") == [("p", 0)]
    client.close()


@pytest.mark.parametrize(("keys", "expected"), [({}, 0o600), ({"socket_mode": "660"}, 0o660)])
def test_only_the_sidecars_user_may_use_its_socket_and_read_its_files(
    start_sidecar: StartSidecar, tmp_path: Path, keys: dict[str, Any], expected: int
) -> None:
    path = tmp_path / "sidecar.sock"
    before = os.umask(0o022)
    try:
        sidecar = start_sidecar(listen=f"unix:{path}", **keys)
    finally:
        os.umask(before)
    client = Client(f"unix:{path}")
    client.publish_unary("t", batch([("p", 0)], client.epochs("t", "p")))
    client.close()
    assert stat.S_IMODE(path.stat().st_mode) == expected
    written = [sidecar.data, *sidecar.data.rglob("*")]
    assert len(written) > 5
    assert not [entry for entry in written if entry.stat().st_mode & 0o077]


@pytest.mark.parametrize("workers", [1, 2])
def test_another_address_as_well(start_sidecar: StartSidecar, tmp_path: Path, workers: int) -> None:
    """One process listens on a port, several of the tests on Unix sockets; and all of them on more of those."""
    also = f"unix:{tmp_path}/s"
    sidecar = start_sidecar(also_listen=also, workers=workers)
    sockets = [also] if workers == 1 else [f"{also}.{worker}" for worker in range(workers)]
    for address in (*sidecar.address.split(","), *sockets):
        client = Client(address)
        client.admin.GetVersion(admin_pb2.GetVersionRequest())
        client.close()
    assert sidecar.stop() == 0


def test_a_port_that_is_taken_is_named_by_its_key(start_sidecar: StartSidecar, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        sidecar = Sidecar(tmp_path / "a", listen=f"unix:{tmp_path}/s", also_listen=taken)
        sidecar.spawn()
        assert sidecar.wait() == 1
        assert f"also_listen = '{taken}'" in sidecar.errors[-1]


def test_limits_and_an_address_that_is_wanted(start_sidecar: StartSidecar) -> None:
    sidecar = start_sidecar(
        listen="0.0.0.0:0",
        allow_insecure_listen=True,
        allow_auto_topic_creation=False,
        max_topics=2,
        max_streams=2,
        log_level="debug",
    )
    client = Client(f"127.0.0.1:{sidecar.address.rpartition(':')[2]}")
    assert refused(lambda: client.open("t", "p")).reason == "TOPIC_NOT_FOUND"
    for name in ("a", "b"):
        client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=name))
    answer = refused(lambda: client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="c")))
    assert (answer.reason, answer.numbers["max_topics"], answer.retry_delay_ms) == ("TOO_MANY_TOPICS", "2", -1)
    client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(topic="a"))
    client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic="c"))

    epochs = client.epochs("b", "p")
    # Two streams, one of each connection: another of the same one is its second, and a third is too many for all.
    other, third = Client(client.address), Client(client.address)
    streams = [one.stream("b") for one in (client, other)]
    for i, stream in enumerate(streams):
        stream.receipt(batch([("p", i)], epochs))
    for caller, limit in ((client, "1"), (third, "2")):
        for i, stream in enumerate(streams):  # so that none of them is idle
            stream.receipt(batch([("p", i)], epochs))
        answer = refused(lambda caller=caller: caller.rows("b"))  # type: ignore[misc]
        assert (answer.reason, answer.numbers["limit"]) == ("TOO_MANY_STREAMS", limit)
        assert answer.retry_delay_ms > 0
    # Unary calls are not streams, and an ended stream makes room for another.
    assert client.end_index("b") == 2
    streams.pop(0).end()
    assert client.rows("b") == [("p", 0), ("p", 1)]
    for one in (client, other, third):
        one.close()
