"""The route of partitioned topics, held against what Pulsar's own class answers."""

import re
from pathlib import Path

import pytest

from seqdedupe.names import murmur3_32, partition_of

PROTO = Path(__file__).parent.parent / "proto" / "seqdedupe" / "v1" / "batch.proto"

# `org.apache.pulsar.client.impl.Murmur3Hash32.makeHash` of Pulsar 4.0.8, which masks the sign bit.
OF_TEXTS = {
    "": 0,
    "a": 1009084850,
    "ab": 465557343,
    "abc": 870159354,
    "abcd": 1139631978,
    "abcde": 1755028214,
    "key": 1654417988,
    "order-4711": 1895557592,
    "evt_1NG8Du2eZvKYlo2C": 2132699809,
    "persistent://public/default/t": 1850889519,
    "é": 269551495,
    "日本語": 631534231,
    "0123456789abcdef": 919068895,
    "0123456789abcdefg": 1655531113,
    "producer-1": 2106379902,
    "The quick brown fox jumps over the lazy dog": 776992547,
}
# The same of the bytes 0, 1, 2, ... in every length from 0 on.
OF_LENGTHS = [
    0,
    1364076727,
    1893835456,
    1372901591,
    1958800441,
    1285872843,
    270320386,
    226380052,
    1365366387,
    1742895696,
    1438277371,
    1941654524,
    105818255,
    1626341384,
    2009423533,
    1540789549,
    420836317,
    1273335238,
    624186345,
    1684537293,
    640753732,
    1735504386,
    201426457,
    107465398,
    204165391,
    1952634647,
    2098504405,
    1094297798,
    216175866,
    2036393404,
    1961929646,
    1682074326,
    1254323768,
    1415612026,
    1103211976,
    440592334,
    1384971440,
    826794613,
    1754219225,
    612808564,
    1316187095,
    1874839467,
    1002211505,
    388566903,
    590013720,
    105480596,
    251449483,
    824636290,
    358008230,
    592738210,
    284514547,
    728535689,
    1793935796,
    862330349,
    1648599534,
    913689053,
    1580279849,
    2128624886,
    798886931,
    786013346,
    1237728873,
    1037790377,
    1781867539,
    346870593,
]
# MurmurHash3_x86_32 with its sign bit, as its author's and others' implementations have it.
WITH_SIGN = {b"": 0, b"abc": 0xB3DD93FA, b"hello": 0x248BFA47, b"hello, world": 0x149BBB7F, b"\xff" * 4: 0x76293B50}


@pytest.mark.parametrize(("text", "expected"), OF_TEXTS.items())
def test_pulsars_hash_of_texts(text: str, expected: int) -> None:
    assert murmur3_32(text.encode()) & 0x7FFFFFFF == expected


def test_pulsars_hash_of_every_length() -> None:
    assert [murmur3_32(bytes(range(n))) & 0x7FFFFFFF for n in range(len(OF_LENGTHS))] == OF_LENGTHS


@pytest.mark.parametrize(("data", "expected"), WITH_SIGN.items())
def test_the_hash_is_murmur3(data: bytes, expected: int) -> None:
    assert murmur3_32(data) == expected


def test_the_key_decides_and_without_one_the_producer() -> None:
    assert partition_of(b"abc", b"a", 10) == OF_TEXTS["abc"] % 10
    assert partition_of(None, b"a", 10) == OF_TEXTS["a"] % 10
    # An empty key is a key. Both hashes below have the sign bit, which a plain modulo would count.
    assert partition_of(b"", b"a", 10) == 0
    assert murmur3_32(b"abc") % 10 != OF_TEXTS["abc"] % 10
    assert {partition_of(str(i).encode(), b"p", 7) for i in range(100)} == set(range(7))


def test_the_vectors_that_the_schema_publishes() -> None:
    vectors = re.findall(r'^// +"(.+?)" +([0-9]+) +([0-9]+)$', PROTO.read_text(), re.MULTILINE)
    assert len(vectors) >= 8
    for text, hashed, of_ten in vectors:
        assert int(hashed) == OF_TEXTS[text]
        assert int(of_ten) == partition_of(text.encode(), b"", 10)
