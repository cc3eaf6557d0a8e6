"""Fixtures of the tests over the wire: a sidecar shared by a module's tests, and a topic for each of them."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seqdedupe.testing import Sidecar
from tests.broker_sidecar.calls import Client

DISK_BYTES = 48 * 1024 * 1024


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar that no test may kill."""
    with Sidecar(tmp_path_factory.mktemp("shared")) as sidecar:
        yield sidecar


@pytest.fixture
def client(shared: Sidecar) -> Iterator[Client]:
    """A client of the shared sidecar."""
    client = Client(shared.address)
    yield client
    client.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name for this test alone."""
    return "t" + "".join(c if c.isalnum() and c.isascii() else "-" for c in request.node.name)[:200]


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], None]]:
    """Makes a file or folder that is there read-only, for everybody."""
    places: list[Path] = []

    def mount(place: Path) -> None:
        for flags in (["--bind", str(place)], ["-o", "remount,ro,bind"]):
            done = subprocess.run(["mount", *flags, str(place)], capture_output=True, check=False)
            if done.returncode:
                pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
            places.extend([place] if flags[0] == "--bind" else [])

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Mounts its own small file system at a folder, which it makes."""
    places: list[Path] = []

    def mount(place: Path) -> None:
        place.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
        mounted = subprocess.run(command, capture_output=True, check=False)
        if mounted.returncode:
            pytest.skip(f"no small file system can be made here: {mounted.stderr.decode().strip()}")
        places.append(place)

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)
