"""The encodings of many message IDs, as `MessageId.to_bytes` makes them, in one Arrow column."""

import numpy as np
import pyarrow as pa

from seqdedupe.batch import Int32s, Int64s

_PARTS = [("ledger_tag", "u1"), ("ledger", "<i8"), ("entry_tag", "u1"), ("entry", "<i8"), ("batch_tag", "u1")]
_VARINT_BYTES = 5
_ID = np.dtype([*_PARTS, ("batch", "u1", _VARINT_BYTES)])
"""A whole encoding. A number that is 0 is left out with its tag, and a varint has as few bytes as it needs."""

_LEDGER, _ENTRY, _BATCH = slice(0, 9), slice(9, 18), slice(18, None)

_SHIFTS = 7 * np.arange(_VARINT_BYTES)


def encoded(ledger_ids: Int64s, entry_ids: Int64s, batch_indexes: Int32s) -> pa.Array:
    """Those of so many message IDs."""
    count = len(ledger_ids)
    ids, kept = np.empty(count, _ID), np.ones((count, _ID.itemsize), bool)
    ids["ledger_tag"], ids["entry_tag"], ids["batch_tag"] = 0x09, 0x11, 0x18
    ids["ledger"], ids["entry"] = ledger_ids, entry_ids
    signed = batch_indexes.astype(np.int64)
    zigzag = signed << 1 ^ signed >> 63
    left = zigzag[:, None] >> _SHIFTS
    ids["batch"] = left & 0x7F | np.where(left >> 7, 0x80, 0)
    kept[:, _BATCH][:, 1:] = left > 0
    kept[ledger_ids == 0, _LEDGER] = False
    kept[entry_ids == 0, _ENTRY] = False
    kept[zigzag == 0, _BATCH] = False
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(kept.sum(axis=1), out=offsets[1:])
    data = ids.view(np.uint8)[kept.ravel()]
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
