"""The path of a Unix socket is one sidecar's, until it ends, no matter what others do there."""

import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from broker_sidecar.connections import SocketPath
from seqdedupe.address import SidecarAddress
from seqdedupe.client.blocking import Client
from seqdedupe.errors import EXIT_FAILED, ConfigurationError
from seqdedupe.testing import Sidecar


@pytest.fixture
def path() -> Iterator[Path]:
    """Short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="seqdedupe-") as folder:
        yield Path(folder, "socket")


def publish(address: str, *payloads: bytes) -> None:
    with Client(address) as client, client.producer("t", "p") as producer:
        for payload in payloads:
            producer.send(payload).result()


def payloads(address: str) -> list[bytes]:
    with Client(address) as client, client.reader("t") as reader:
        return [bytes(message.payload or b"") for message in reader]


def listening(path: Path) -> socket.socket:
    """A socket of another program."""
    other = socket.socket(socket.AF_UNIX)
    other.bind(str(path))
    other.listen()
    return other


def test_a_second_sidecar_does_not_take_the_socket(tmp_path: Path, path: Path) -> None:
    with Sidecar(tmp_path / "a", listen=f"unix:{path}", socket_mode="0660") as first:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        publish(first.address, b"1")
        for name in ("b", "c"):
            second = Sidecar(tmp_path / name, listen=f"unix:{path}")
            second.spawn()
            try:
                assert second.wait() == EXIT_FAILED
            finally:
                second.kill()
            [line] = second.errors
            assert f"listen = 'unix:{path}': cannot listen there, because process {first.pid} does" in line
        publish(first.address, b"2")
        first.restart()
        assert payloads(first.address) == [b"1", b"2"]
        assert first.stop() == 0
        assert os.listdir(path.parent) == []


def test_two_that_start_at_once(path: Path) -> None:
    """Neither listens yet."""
    first = SocketPath(SidecarAddress(path=str(path)), 0o600, "listen")
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()} on .* does"):
        SocketPath(SidecarAddress(path=str(path)), 0o600, "listen")
    first.close()
    first.close()
    SocketPath(SidecarAddress(path=str(path)), 0o600, "listen").close()
    assert os.listdir(path.parent) == []


def removed(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    """By what a program leaves that was killed."""
    path.unlink()
    listening(path).close()


def removed_with_its_lock(path: Path) -> None:
    for one in list(path.parent.iterdir()):
        one.unlink()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_path_that_is_lost_is_listened_at_again(tmp_path: Path, workers: int, path: Path) -> None:
    keys: dict[str, object] = {"listen": f"unix:{path}"} if workers == 1 else {}
    sidecar = Sidecar(tmp_path, workers=workers)
    sidecar.keys |= keys
    with sidecar:
        where = [Path(address.removeprefix("unix:")) for address in sidecar.address.split(",")]
        with Client(sidecar.address) as client, client.producer("t", "p") as producer:
            producer.send(b"0").result()
            steps: list[Callable[[Path], None]] = [removed, replaced, removed_with_its_lock]
            for number, lose in enumerate(steps, 1):
                said = len(again(sidecar))
                for one in where if lose is not removed_with_its_lock else where[:1]:
                    lose(one)
                wait(sidecar, partial(has_said, sidecar, said + len(where)))
                # Over the connection that it has.
                producer.send(b"%d" % number).result()
                assert len(payloads(sidecar.address)) == number + 1
        assert sidecar.stop() == 0
        assert not any(one.exists() for one in where)


def wait(sidecar: Sidecar, until: Callable[[], object]) -> None:
    while not until():
        sidecar.check_running()
        time.sleep(0.05)


def unreached(sidecar: Sidecar) -> list[str]:
    return [entry["event"] for entry in sidecar.log if "the sidecar cannot listen there again" in entry["event"]]


def has_said(sidecar: Sidecar, count: int) -> bool:
    return len(again(sidecar)) >= count


def again(sidecar: Sidecar) -> list[str]:
    return [entry["event"] for entry in sidecar.log if "the sidecar listens there again" in entry["event"]]


def test_what_another_program_has_put_there_stays(tmp_path: Path, path: Path) -> None:
    with Sidecar(tmp_path, listen=f"unix:{path}") as sidecar:
        publish(sidecar.address, b"1")
        path.unlink()
        other = listening(path)
        wait(sidecar, lambda: unreached(sidecar))
        assert f"process {os.getpid()} does" in unreached(sidecar)[0]
        other.close()
        wait(sidecar, lambda: again(sidecar))
        assert payloads(sidecar.address) == [b"1"]
        path.unlink()
        with listening(path) as other:
            assert sidecar.stop() == 0
            assert path.is_socket()
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(str(path))


def test_two_of_one_folder_that_begin_at_once_in_processes_of_one_number(path: Path) -> None:
    """As in two containers. gRPC removes the socket that it finds where it is to listen."""
    sockets: dict[str, socket.socket] = {}

    def listen(name: str, address: SidecarAddress) -> int:
        Path(address.path).unlink(missing_ok=True)
        sockets[name] = listening(Path(address.path))
        sockets[name].setblocking(False)
        return 1

    one, other = (
        SocketPath(SidecarAddress(path=str(path.with_name(name))), 0o600, "listen") for name in ("one", "other")
    )

    def listen_both(address: SidecarAddress) -> int:
        listen("one", address)
        other.listen(lambda address: listen("other", address))
        return 1

    one.listen(listen_both)
    for name in ("one", "other"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path.with_name(name)))
            sockets[name].accept()[0].close()
    for owned in (one, other):
        owned.close()
    for made in sockets.values():
        made.close()
