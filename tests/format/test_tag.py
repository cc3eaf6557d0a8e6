"""SipHash-2-4 against the vectors of its authors, compiled and plain."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqdedupe.format import headers
from tests.plain import PLAIN

KEY = headers.key_of(bytes(range(16)))

# `vectors_sip64` of the reference implementation: of 00 01 02 … with the key 00 01 … 0f. The paper's is 15
VECTORS = {
    0: "310e0edd47db6f72",
    1: "fd67dc93c539f874",
    7: "37d1018bf50002ab",
    8: "6224939a79f5f593",
    15: "e545be4961ca29a1",
    63: "724506eb4c328a95",
}


@pytest.mark.parametrize(("size", "expected"), VECTORS.items())
@pytest.mark.parametrize("siphash", [headers.siphash, PLAIN["headers"].siphash])
def test_the_vectors_of_its_authors(size: int, expected: str, siphash: object) -> None:
    raw = np.frombuffer(b"before" + bytes(range(size)) + b"after", np.uint8)
    found = siphash(raw, 6, 6 + size, KEY)  # type: ignore[operator]
    assert (found % 2**64).to_bytes(8, "little").hex() == expected


@given(st.binary(max_size=100), st.binary(min_size=16, max_size=16))
def test_compiled_and_plain_are_one(raw: bytes, secret: bytes) -> None:
    view, key = np.frombuffer(raw, np.uint8), headers.key_of(secret)
    assert headers.siphash(view, 0, len(raw), key) == PLAIN["headers"].siphash(view, 0, len(raw), key)
