"""Which entries are a sidecar's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_sidecar.door.own_entries import is_own, rows_in
from seqdedupe.pulsar_wire.frames import WireEntry
from seqdedupe.pulsar_wire.pulsar_api_pb2 import BrokerEntryMetadata
from tests.broker_sidecar.door.own_entry_contents import OTHERS, OWN, content_of


@pytest.mark.parametrize("entry", OWN.values(), ids=list(OWN))
def test_markers_and_control_records_are_own(entry: WireEntry) -> None:
    assert is_own(content_of(entry))
    raw = BrokerEntryMetadata(broker_timestamp=1, index=7).SerializeToString()
    assert is_own(memoryview(b"\x0e\x02" + len(raw).to_bytes(4, "big") + raw + bytes(content_of(entry))))


@pytest.mark.parametrize("entry", OTHERS.values(), ids=list(OTHERS))
def test_messages_are_not_own(entry: WireEntry) -> None:
    """No matter which properties their producer sets."""
    assert not is_own(content_of(entry))


@pytest.mark.parametrize("entry", OWN.values(), ids=list(OWN))
def test_a_broken_entry_is_not_own(entry: WireEntry) -> None:
    content = bytes(content_of(entry))
    for at in range(len(content)):
        assert not is_own(memoryview(content[:at]))
        if at >= 2:
            changed = bytearray(content)
            changed[at] ^= 1
            assert not is_own(memoryview(changed))


@given(st.sampled_from([*OWN, *OTHERS]), st.data())
def test_bytes_of_any_kind_are_decoded_or_are_not_own(name: str, data: st.DataObject) -> None:
    """Also with a valid checksum."""
    entry = (OWN | OTHERS)[name]
    metadata = bytearray(entry.metadata)
    for _ in range(data.draw(st.integers(1, 3))):
        metadata[data.draw(st.integers(0, len(metadata) - 1))] = data.draw(st.integers(0, 255))
    payload = data.draw(st.sampled_from([bytes(entry.payload), b"", b"\xff" * 9]))
    changed = content_of(WireEntry(bytes(metadata), payload))
    is_own(changed)
    assert rows_in(changed)[0] >= 1
