"""What every released version has left on a disk is opened by this one: all is there, and the verdicts are right."""

from pathlib import Path

import pytest

from seqdedupe.client.blocking import Client
from seqdedupe.doctor.examine import examine
from seqdedupe.testing import Sidecar
from tests.broker_sidecar import calls
from tests.broker_sidecar.calls import DUP, NOT_DUP, batch, verdicts
from tests.data.make_release import RELEASES, described, unpack

EVERY = sorted(path.stem for path in RELEASES.glob("*.json"))


@pytest.mark.parametrize("release", EVERY)
def test_a_start_on_what_a_release_has_left(tmp_path: Path, release: str) -> None:
    said = unpack(release, tmp_path / "data")
    if said.get("refused"):
        with pytest.raises(RuntimeError, match=said["refused"]):
            Sidecar(tmp_path).start()
        return
    assert examine(tmp_path / "data").is_whole
    with Sidecar(tmp_path) as sidecar, Client(sidecar.address) as client:
        for _ in range(2):
            assert described(client) == said
            assert sidecar.stop() == 0
            sidecar.start()
        plain = calls.Client(sidecar.address)
        for name, topic in said["topics"].items():
            for producer, persisted in topic["producers"].items():
                epochs = plain.epochs(name, producer)
                assert plain.producer(name, producer)[1] == persisted
                if persisted < 0:
                    continue
                rows = [(producer, persisted), (producer, persisted + 1)]
                answer = plain.publish_unary(name, batch(rows, epochs, {producer: -1}))
                assert verdicts(answer, 2) == [DUP, NOT_DUP], (name, producer)
        plain.close()
