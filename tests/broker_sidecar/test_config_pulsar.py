"""Configuration of a sidecar in front of a Pulsar cluster: its table of keys, what cannot be, and secrets."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from broker_sidecar.config import load
from seqdedupe.errors import ConfigurationError
from seqdedupe.testing import LAST_RESORT_SECONDS

GIVEN = {
    "data_directory": "a",
    "log": "pulsar",
    "pulsar.service_url": "pulsar://host:6650",
    "pulsar.admin_url": "http://host:8080",
}
SECRET = "eyJhbGciOiJIUzI1NiJ9.a-secret.signature"


def test_a_table_of_the_file_the_environment_and_flags_name_the_same_keys(tmp_path: Path) -> None:
    file = tmp_path / "sidecar.toml"
    lines = ['data_directory = "a"', 'log = "pulsar"', 'instance_name = "one"', "[pulsar]"]
    lines += ['service_url = "pulsar+ssl://one:6651,two:6651"', 'namespaces = "public/default, a/b"']
    file.write_text("\n".join([*lines, 'entry_format = "packed"', "manage_topic_policies = true"]))
    environment = {"SEQDEDUPE_PULSAR_ADMIN_URL": "https://host", "SEQDEDUPE_PULSAR_TOKEN_FILE": __file__}
    config = load(file, environment, {"pulsar.entry_format": "plain", "advertised_address": "outside:1"})
    assert config.pulsar.service_url == "pulsar+ssl://one:6651,two:6651"
    assert config.pulsar.namespace_names == ["public/default", "a/b"]
    assert (config.pulsar.admin_url, config.pulsar.entry_format) == ("https://host", "plain")
    assert (config.pulsar.manage_topic_policies, config.pulsar.token_file) == (True, __file__)
    assert (config.instance_name, config.advertised_address) == ("one", "outside:1")


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "no service URL": ("pulsar.service_url", {"pulsar.service_url": None}),
    "a service URL of HTTP": ("pulsar.service_url", {"pulsar.service_url": "http://host:8080"}),
    "a service URL with a password": ("pulsar.service_url", {"pulsar.service_url": f"pulsar://me:{SECRET}@host:1"}),
    "no admin URL": ("pulsar.admin_url", {"pulsar.admin_url": None}),
    "an admin URL of Pulsar": ("pulsar.admin_url", {"pulsar.admin_url": "pulsar://host:6650"}),
    "an admin URL with a password": ("pulsar.admin_url", {"pulsar.admin_url": f"http://me:{SECRET}@host:1"}),
    "a port that is none": ("pulsar.admin_url", {"pulsar.admin_url": "http://host:99999"}),
    "a namespace that is none": ("pulsar.namespaces", {"pulsar.namespaces": "default"}),
    "an empty namespace": ("pulsar.namespaces", {"pulsar.namespaces": "public/default,"}),
    "a format that is none": ("pulsar.entry_format", {"pulsar.entry_format": "avro"}),
    "a compression that is none": ("pulsar.compression", {"pulsar.compression": "gzip"}),
    "no truth": ("pulsar.manage_topic_policies", {"pulsar.manage_topic_policies": "perhaps"}),
    "a token file that is not there": ("pulsar.token_file", {"pulsar.token_file": "/nowhere/token"}),
    "certificates that are not there": (
        "pulsar.tls_trust_certs_file_path",
        {"pulsar.tls_trust_certs_file_path": "/nowhere/ca.pem"},
    ),
    "two tokens": (
        "pulsar.oauth2_issuer_url",
        {"pulsar.token_file": __file__, "pulsar.oauth2_issuer_url": "https://issuer"},
    ),
    "an issuer without credentials": (
        "pulsar.oauth2_credentials_file",
        {"pulsar.oauth2_issuer_url": "https://issuer"},
    ),
    "credentials without an issuer": ("pulsar.oauth2_issuer_url", {"pulsar.oauth2_credentials_file": __file__}),
    "a token itself": ("pulsar.token", {"pulsar.token": SECRET}),
    "a token file that is no text": ("pulsar.token_file", {"pulsar.token_file": 3}),
    "a retention of the sidecar's": ("default_retention_size_in_mb", {"default_retention_size_in_mb": 5}),
    "an instance name that is none": ("instance_name", {"instance_name": "a b"}),
    "an address that is none": ("advertised_address", {"advertised_address": "host"}),
    "an address of nobody": ("advertised_address", {"advertised_address": "host:0"}),
    "an address of everybody": ("advertised_address", {"advertised_address": "0.0.0.0:6660"}),
    "an address of everybody, in long": ("advertised_address", {"advertised_address": "[0:0::0]:6660"}),
    "sidecars that have no address": ("peers", {"peers": "*.example.org"}),
    "a standby that is no sidecar of theirs": ("peers", {"peers": "host:1,host:2", "standby": True}),
    "listening everywhere": ("advertised_address", {"listen": "0.0.0.0:6660", "allow_insecure_listen": True}),
}


@pytest.mark.parametrize("case", BAD)
def test_a_value_that_cannot_be_is_named_and_no_secret_is_shown(case: str) -> None:
    load(None, {}, GIVEN)
    key, changes = BAD[case]
    with pytest.raises(ConfigurationError) as e:
        load(None, {}, GIVEN | changes)
    assert e.value.reason == "INVALID_CONFIGURATION"
    assert e.value.message.startswith(f"{key} ")
    assert e.value.numbers["key"] == key
    assert SECRET not in str(e.value) + e.value.hint


def test_without_pulsar_as_the_log_its_keys_do_not_matter() -> None:
    assert load(None, {}, {"data_directory": "a", "pulsar.service_url": "?"}).pulsar.service_url == "?"


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (f'[pulsar]\ntoken = "{SECRET}"', "pulsar.token"),
        (f'[pulsar]\ntokn = "{SECRET}"', "pulsar.tokn"),
        ("[pulsar]\nservice_url = 5", "pulsar.service_url"),
        ("[pulser]\nservice_url = 'pulsar://host:1'", "pulser.service_url"),
        ("pulsar = 5", "pulsar"),
    ],
)
def test_an_error_says_where_a_key_was_given_and_no_secret(tmp_path: Path, content: str, key: str) -> None:
    file = tmp_path / "sidecar.toml"
    file.write_text(f'data_directory = "a"\n{content}\n')
    with pytest.raises(ConfigurationError) as e:
        load(file, {}, {})
    assert e.value.message.startswith(f"{key} ")
    assert e.value.message.endswith(f"(given by the file {file})")
    assert SECRET not in str(e.value) + e.value.hint


def test_a_token_is_no_argument_and_is_not_repeated() -> None:
    """Everybody on a machine can read the arguments of a process."""
    command = [sys.executable, "-m", "broker_sidecar", "--data-directory", "a", f"--pulsar-token={SECRET}"]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=dict(os.environ), check=False, timeout=LAST_RESORT_SECONDS
    )
    assert ended.returncode == 2
    assert "there is no --pulsar-token: do you mean --pulsar-token-file?" in ended.stderr
    assert SECRET not in ended.stdout + ended.stderr
