"""A payload that poses as a record, three power cuts: the sidecar starts, and nobody else's message is gone."""

from pathlib import Path
from typing import Any

from seqdedupe.format import headers
from seqdedupe.format.headers import NO_KEY
from seqdedupe.format.journal import SECTOR_BYTES
from seqdedupe.testing import Sidecar
from tests.broker_sidecar.calls import Client, batch


def posing(message_at: int, incarnation: int, epochs: dict[str, int], index: int) -> bytes:
    """A batch that will stand at this offset of the file, whose payload ends with a record in every way but the tag.

    It says that all up to its own place had been synced.
    """
    body = batch([("victim", 10_000)], {"victim": 1}).SerializeToString()
    size = headers.HEADER_BYTES + len(body)
    carrier = batch([("attacker", index)], epochs, {"attacker": -1}, payloads=[bytes(600 + size)]).SerializeToString()
    place = message_at + headers.HEADER_BYTES + len(carrier) - size
    header = headers.header(
        body,
        headers.BATCH_TAG,
        rows=1,
        column_bytes=len(body),
        incarnation=incarnation,
        file_offset=place,
        base_index=index + 1,
        publish_time_ms=1,
        synced_offset=place,
        ownership=0,
        key=NO_KEY,
    )
    return carrier[:-size] + header + body


def test_a_payload_that_poses_as_a_record(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"deduplication_entries_interval": 1_000_000, "deduplication_snapshot_interval_seconds": 0}
    with Sidecar(tmp_path, **keys) as sidecar:
        for kill in range(3):
            client = Client(sidecar.address)
            epochs = client.epochs("t", "victim", "attacker")
            incarnation = client.topic("t").incarnation
            (segment,) = (sidecar.data / "logs" / str(incarnation)).glob("*.log")
            assert client.publish_unary("t", batch([("victim", kill)], epochs)).first_index == kill
            at = segment.stat().st_size
            assert client.publish_unary("t", posing(at, incarnation, epochs, kill + 1)).first_index == kill + 1
            client.close()
            sidecar.kill()
            # A sector of what was written last did not get to the disk.
            with segment.open("r+b") as file:
                file.seek(at)
                file.write(bytes(SECTOR_BYTES - at % SECTOR_BYTES))
            sidecar.start()
        client = Client(sidecar.address)
        assert client.rows("t") == [("victim", kill) for kill in range(3)]
        client.close()
