"""The example for Kubernetes: what it says fits the configuration, the image and itself."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from broker_sidecar.config import KEYS, Config, environment_of, flag_of, load
from broker_sidecar.security import tokens
from seqdedupe.cli.commands import cli
from seqdedupe.cli.directory_commands import make
from seqdedupe.names import SHARDS, from_text
from tests.deploy.durations import longest_stop_seconds

DEPLOY = Path(__file__).parents[2] / "deploy"

Object = dict[str, Any]


@pytest.fixture(scope="module")
def objects() -> dict[str, Object]:
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


@pytest.fixture(scope="module")
def pod(objects: dict[str, Object]) -> Object:
    spec: Object = objects["StatefulSet"]["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def sidecar(pod: Object) -> Object:
    [container] = pod["containers"]
    found: Object = container
    return found


def environment_in(sidecar: Object) -> dict[str, str]:
    return {one["name"]: one["value"] for one in sidecar["env"]}


def config_of(sidecar: Object, pod_number: int) -> Config:
    """What the sidecar of a pod is reported: by its command, as its shell understands it, and its environment."""
    [script] = sidecar["args"]
    [command] = re.findall(r"^exec (.*)", script.replace("\\\n", " "), re.MULTILINE)
    command = command.replace("$k", str(pod_number))
    command = re.sub(r"\$\(\(([\dk*+ ]+)\)\)", lambda sum_: str(eval(sum_[1], {"k": pod_number})), command)
    name, verb, *words = shlex.split(command)
    assert (name, verb) == ("seqdedupe", "serve")
    by_flag = {flag_of(key): key for key in KEYS}
    flags: dict[str, Any] = {}
    while words:
        key = by_flag[words.pop(0)]
        flags[key] = True if isinstance(KEYS[key].default, bool) else words.pop(0)
    return load(None, environment_in(sidecar), flags)


def test_the_sidecars_are_told_what_they_understand_and_have_all_shards(
    objects: dict[str, Object], sidecar: Object
) -> None:
    count = objects["StatefulSet"]["spec"]["replicas"]
    service = objects["Service"]["metadata"]["name"]
    configs = [config_of(sidecar, number) for number in range(count)]
    assert sorted(shard for config in configs for shard in from_text(config.shards)) == list(range(SHARDS))
    peers = {f"{objects['StatefulSet']['metadata']['name']}-{number}.{service}:6660" for number in range(count)}
    assert [set(config.peers.split(",")) for config in configs] == [peers] * count
    assert {config.advertised_address for config in configs} == peers
    assert len({config.cluster_id for config in configs}) == 1
    assert environment_in(sidecar).keys() <= {environment_of(key) for key in KEYS}


def test_it_is_killed_only_after_it_has_drained(pod: Object, sidecar: Object) -> None:
    longest = longest_stop_seconds(config_of(sidecar, 0).drain_timeout_seconds)
    assert pod["terminationGracePeriodSeconds"] > longest
    assert "lifecycle" not in sidecar


def test_ports_volumes_and_probes_fit_each_other(objects: dict[str, Object], pod: Object, sidecar: Object) -> None:
    config = config_of(sidecar, 0)
    port = int(config.listen.rpartition(":")[2])
    assert [one["containerPort"] for one in sidecar["ports"]] == [port]
    assert [one["port"] for one in objects["Service"]["spec"]["ports"]] == [port]
    # Health of the whole, without a name, says whether it serves: what recovers must not be started again for that.
    assert sidecar["readinessProbe"]["grpc"] == {"port": port}
    assert sidecar["livenessProbe"]["tcpSocket"] == sidecar["startupProbe"]["tcpSocket"] == {"port": port}
    mounts = {one["mountPath"]: one["name"] for one in sidecar["volumeMounts"]}
    [claim] = objects["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert mounts["/data"] == claim["metadata"]["name"]
    assert Path(config.data_directory).is_relative_to("/data")
    assert Path(config.backup_directory).parent == Path("/backups")
    assert set(mounts.values()) == {claim["metadata"]["name"], *(one["name"] for one in pod["volumes"])}


def test_the_backup_is_of_all_sidecars_and_sees_what_they_write(objects: dict[str, Object], sidecar: Object) -> None:
    job = objects["CronJob"]["spec"]
    of_job = job["jobTemplate"]["spec"]["template"]
    [container] = of_job["spec"]["containers"]
    assert (job["suspend"], job["concurrencyPolicy"]) == (True, "Forbid")
    command, *words = container["args"]
    assert (command, words[0]) == ("backup", "make")
    # A command keeps the help option of its first context: that of another parent would be shown from then on.
    parent = click.Context(cli, help_option_names=cli.context_settings["help_option_names"])
    assert make.make_context("make", words[1:], parent).params["keep"] == 7
    environment = environment_in(container)
    assert environment["SEQDEDUPE_ADDRESS"] == config_of(sidecar, 0).peers
    # What lets a client in.
    [rule] = objects["NetworkPolicy"]["spec"]["ingress"]
    assert {"podSelector": {"matchLabels": of_job["metadata"]["labels"]}} in rule["from"]
    volumes = {one["name"]: one for one in of_job["spec"]["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
    claim = objects["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mounts["/backups"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert str(Path(environment["SEQDEDUPE_TOKEN_FILE"]).parent) in mounts
    assert of_job["spec"]["securityContext"] == objects["StatefulSet"]["spec"]["template"]["spec"]["securityContext"]
    assert container["securityContext"] == sidecar["securityContext"]


def test_all_take_the_token_that_they_show_each_other(pod: Object, sidecar: Object, tmp_path: Path) -> None:
    """What comes before the command, as its shell runs it: at a first start, and with another token at a later one."""
    config = config_of(sidecar, 0)
    assert config.authentication == "token"
    shown = Path(config.peer_token_file)
    mounts = {one["mountPath"]: one["name"] for one in sidecar["volumeMounts"]}
    [secret] = [one["secret"] for one in pod["volumes"] if one["name"] == mounts[str(shown.parent)]]
    # Its files are root's, and of the group that the pod has.
    assert (secret["defaultMode"], pod["securityContext"]["fsGroup"]) == (0o440, pod["securityContext"]["runAsGroup"])
    assert (
        f"secret generic {secret['secretName']} --from-literal={shown.name}="
        in (DEPLOY / "kubernetes.yaml").read_text()
    )
    [script] = sidecar["args"]
    before, exec_, _ = script.partition("exec ")
    assert exec_
    before = before.replace("/backups/", f"{tmp_path}/backups/")
    data_directory, peer_token_file = tmp_path / "data" / "seqdedupe", tmp_path / shown.name
    environment = {
        "HOSTNAME": "seqdedupe-0",
        "PATH": os.environ["PATH"],
        environment_of("data_directory"): str(data_directory),
        environment_of("peer_token_file"): str(peer_token_file),
    }
    for token in ("a" * 32, "b" * 32):
        peer_token_file.write_text(token)
        subprocess.run(["sh", "-ec", before], env=environment, check=True)
        assert tokens.read(tokens.path_of(data_directory)) == token.encode()


def test_names_select_each_other(objects: dict[str, Object]) -> None:
    of_set = objects["StatefulSet"]["spec"]
    labels = of_set["template"]["metadata"]["labels"]
    assert of_set["selector"]["matchLabels"] == labels == objects["Service"]["spec"]["selector"]
    assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert of_set["serviceName"] == objects["Service"]["metadata"]["name"]
    assert objects["Service"]["spec"]["clusterIP"] == "None"
    assert objects["Service"]["spec"]["publishNotReadyAddresses"] is True


def test_it_runs_as_the_user_of_the_image_and_may_nothing_more(pod: Object, sidecar: Object) -> None:
    image = (DEPLOY / "Containerfile").read_text()
    user = pod["securityContext"]["runAsUser"]
    assert f"USER {user}:{user}" in image
    assert f"--uid {user} --gid {user}" in image
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert sidecar["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_what_the_image_is_made_of_is_pinned_and_what_it_sets_is_known() -> None:
    image = (DEPLOY / "Containerfile").read_text()
    installs = [line for line in image.replace("\\\n", " ").split("&&") if " install -q" in line]
    assert len(installs) == 3
    for line in installs:
        assert "--require-hashes" in line or "--no-deps --no-index" in line
    assert set(re.findall(r"SEQDEDUPE_\w+", image)) <= {environment_of(key) for key in KEYS}
    assert "SEQDEDUPE_DATA_DIRECTORY=/data" in image
