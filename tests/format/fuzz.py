"""Mutated batches and records through the compiled kernels and the plain ones, which must agree.

    python -m tests.kernels tests.format.fuzz KIND --cases N --seed S [--planted BUG]

KIND is `batches` or `records`. The compiled kernels get their bytes right before and right after pages that nobody may
touch, so a read out of bounds kills the process. Prints each block of cases before it begins: `--first BLOCK` goes on
there. Exits with 1 at the first case about which the two do not agree. A planted bug must be found.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import google_crc32c
import numpy as np

from seqdedupe.core import recent, rule
from seqdedupe.format import layout, records
from seqdedupe.format.headers import (
    BATCH_TAG,
    CONTROL_TAG,
    SECRET_BYTES,
    header,
    key_of,
    marker_record,
    ownership_of,
    siphash,
)
from seqdedupe.format.jit import Bytes, Int64s, Uint8s, kernel, load32
from seqdedupe.format.layout import BASE_INDEX, COLUMNS_END, PLACES, PRODUCERS, ROWS
from seqdedupe.message_id import MessageIds
from tests.format.guarded import Guarded
from tests.format.mutations import FIELDS, SEEDS, mutated, spoilt
from tests.plain import PLAIN

BLOCK = 1000
GUARDED_PAGES = 4
JUDGED_EVERY = 8
"""For this many batches that are canonical one goes through the rule too."""
INCARNATION = 77
TOKEN = b"0123456789abcdef"
OWNERSHIP = ownership_of(TOKEN)
KEY = key_of(b"a secret, sixteen"[:SECRET_BYTES])
RING = 65_536

Layout = Callable[[Any, int, int, Any], int]
_memory = Guarded(GUARDED_PAGES)


class Disagreement(Exception):
    """Compiled and plain kernels do not say the same."""


def agree(what: str, data: bytes, compiled: object, plain: object) -> None:
    if compiled != plain:
        raise Disagreement(f"{what} of {data.hex()}: compiled {compiled}, plain {plain}")


# -- batches ---------------------------------------------------------------------------------------------------------


def batch_case(random: Random, compiled_layout: Layout, seen: Counter[int]) -> None:
    """One batch, whose layout must be the same."""
    data = mutated(random)
    plain_places = [0] * PLACES
    why = PLAIN["layout"].layout(data, 0, len(data), plain_places)
    seen[why] += 1
    for place in (_memory.at_the_end, _memory.at_the_start):
        places = np.zeros(PLACES, np.int64)
        view = place(data)
        answer = compiled_layout(view, 0, len(data), places)
        agree("layout", data, (answer, places.tolist()), (why, plain_places))
        if why == layout.CANONICAL and places[PRODUCERS]:
            judged = judge(rule, recent, view, places)
            if seen[why] % JUDGED_EVERY == 0:
                compiled = [part.tolist() for part in judged]
                plain = [part.tolist() for part in judge(PLAIN["rule"], PLAIN["recent"], view, places)]
                agree("the rule", data, compiled, plain)
        if why == layout.CANONICAL and places[PRODUCERS] <= 1 and seen[why] % JUDGED_EVERY == 0:
            marks = np.array([random.randrange(2) for _ in range(places[ROWS])], np.uint8)
            marks[random.randrange(len(marks))] = 1
            out, plain_out = np.empty(len(data), np.uint8), bytearray(len(data))
            taken = out[: layout.take(view, places, marks, 1, out)].tobytes()
            plain_taken = bytes(plain_out[: PLAIN["layout"].take(data, plain_places, marks, 1, plain_out)])
            agree("the rows taken", data, taken, plain_taken)


_ring = np.zeros((RING, recent.COLUMNS), np.int64)


def judge(its_rule: Any, its_recent: Any, view: Uint8s, places: Int64s) -> list[np.ndarray]:
    """All that is decided about a canonical batch whose producers have some numbers; valid until the next call."""
    producers = int(places[PRODUCERS])
    rows = np.arange(producers)
    numbers = np.full((producers, rule.NUMBERS), 1, np.int64)
    numbers[:, rule.PUSHED] = 3
    numbers[:, rule.NEWEST] = -1
    reasons, verdicts = np.zeros(producers, np.uint8), np.zeros(int(places[ROWS]), np.uint8)
    places[BASE_INDEX] = 9
    said = [
        its_rule.refusal(view, places, rows, numbers, False, False, reasons),
        its_rule.refusal(view, places, rows, numbers, False, True, reasons),
        its_rule.decide_batch(view, places, rows, numbers, True, verdicts),
        its_recent.persist(view, places, rows, numbers, np.zeros(producers, np.uint8), _ring, 0),
    ]
    table = places.reshape(1, -1).copy()
    names, first = np.zeros((producers, 2), np.int64), np.zeros(1, np.int64)
    said.append(its_recent.name_places(view, table, 1, names, first))
    return [np.array(said), reasons, verdicts, numbers, names, _ring[: len(verdicts)]]


class Plain(bytes):
    """Bytes that say how many they are as an array does: the plain kernels take numbers from them in half the time."""

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)


def plain_crc32c(before: int, raw: bytes, start: int, end: int) -> int:
    """By another implementation than the kernel."""
    return int(google_crc32c.extend(before, raw[start:end]))


def plain_siphash(raw: bytes, start: int, end: int, key: Int64s) -> int:
    return siphash(np.frombuffer(raw, np.uint8), start, end, key)


# These take the plain kernels ten times as long as all the rest of a record, and have their own tests.
PLAIN["records"].crc32c = plain_crc32c  # type: ignore[attr-defined]
PLAIN["records"].siphash = plain_siphash  # type: ignore[attr-defined]


# -- records ---------------------------------------------------------------------------------------------------------


def record(body: bytes, at: int, base_index: int, **fields: int) -> bytes:
    """A stored record whose checksums and tag are right, no matter what its body and the given fields of its header
    are."""
    values = {"body_tag": BATCH_TAG, "rows": 0, "column_bytes": len(body), "synced_offset": 0, "ownership": OWNERSHIP}
    made = header(
        body, incarnation=INCARNATION, file_offset=at, base_index=base_index, publish_time_ms=1, key=KEY,
        **values | fields,
    )  # fmt: skip
    return made + body


def marker(at: int, next_index: int) -> bytes:
    return marker_record(
        3, TOKEN, incarnation=INCARNATION, file_offset=at, next_index=next_index, publish_time_ms=1, synced_offset=0,
        key=KEY,
    )  # fmt: skip


_WHOLE = [b"".join([part for tag, length, value, _ in fields for part in (tag, length, value)]) for fields in FIELDS]
_COLUMN_BYTES = []
for _body in _WHOLE:
    _places = np.zeros(PLACES, np.int64)
    layout.layout(np.frombuffer(_body, np.uint8), 0, len(_body), _places)
    _COLUMN_BYTES.append(int(_places[COLUMNS_END]))


def segment(random: Random) -> bytes:
    """Records one after the other, of which one is not as it should be."""
    parts: list[bytes] = []
    at = index = 0
    count = random.randrange(1, 4)
    bad = random.randrange(count)
    for k in range(count):
        which = random.randrange(len(SEEDS))
        body, rows, here, base, after = _WHOLE[which], len(SEEDS[which]), at, index, b""
        fields = {"rows": rows, "column_bytes": _COLUMN_BYTES[which]}
        if k == bad:
            match random.randrange(9):
                case 0 | 1:
                    body = mutated(random)
                    fields["column_bytes"] = min(fields["column_bytes"], len(body))
                case 2:
                    fields["rows"] += random.choice((-1, 1))
                case 3:
                    fields["column_bytes"] = max(min(fields["column_bytes"] + random.choice((-1, 1)), len(body)), 0)
                case 4:
                    here, base = max(at + random.choice((-1, 0, 1)), 0), max(index + random.choice((-1, 0, 1)), 0)
                case 5:
                    parts.append(random.choice((marker(at, index), record(body, at, index, body_tag=CONTROL_TAG))))
                    at = here = at + len(parts[-1])
                case 6:
                    fields["ownership"] = OWNERSHIP + 1
                case 7:
                    fields["synced_offset"] = at + random.choice((0, 1))
                case 8:
                    after = MessageIds.of([(rows, 7, random.randrange(3), random.choice((-1, 0)))]).encode()
                    fields["after_body_bytes"] = len(after) + random.choice((0, 0, -1, 1))
        parts.append(record(body, here, base, **fields) + after)
        at += len(parts[-1])
        index += rows
    data = b"".join(parts)
    return spoilt(random, data) if random.random() < 0.4 else data


def record_case(random: Random, _: Layout, seen: Counter[int]) -> None:
    """Some records, of which the scan must find the same, and stop at the same for the same reason."""
    data = segment(random)
    next_index = random.choice((0, -1))
    looked_for = random.randrange(len(data) + 1)
    said = []
    for its, place in ((records, _memory.at_the_end), (records, _memory.at_the_start), (PLAIN["records"], Plain)):
        table, result = records.new_table(4), records.new_result()
        view = place(data)
        why = its.scan(view, INCARNATION, 0, next_index, KEY, table, result)
        count = int(result[0])
        bad = its.first_bad_payload(view, table, count)
        found = its.find_header(place(data[looked_for:]), INCARNATION, looked_for, 0, KEY)
        said.append((why, result.tolist(), table[:count].tolist(), bad, found))
    agree("scan", data, said[0], said[2])
    agree("scan", data, said[1], said[2])
    seen[said[0][0]] += 1


# -- planted bugs ----------------------------------------------------------------------------------------------------


@kernel()
def reads_past_the_end(raw: Bytes, begin: int, end: int, places: Int64s) -> int:
    """The four bytes from three before the end on."""
    why = layout.layout(raw, begin, end, places)
    return why if why != layout.CANONICAL or load32(raw, end - 3) != 0x7FEDCBA9 else layout.NO_ROWS


@kernel()
def reads_before_the_start(raw: Bytes, begin: int, end: int, places: Int64s) -> int:
    """The byte before the first one."""
    why = layout.layout(raw, begin, end, places)
    return why if why != layout.CANONICAL or load32(raw, begin - 1) != 0x7FEDCBA9 else layout.NO_ROWS


@kernel()
def takes_an_id_twice(raw: Bytes, begin: int, end: int, places: Int64s) -> int:
    """An ID that is not above the one before it."""
    why = layout.layout(raw, begin, end, places)
    return layout.CANONICAL if why == layout.NOT_ASCENDING else why


PLANTED: dict[str, Layout] = {f.__name__: f for f in (reads_past_the_end, reads_before_the_start, takes_an_id_twice)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("kind", choices=["batches", "records"])
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="block")
    parser.add_argument("--planted", choices=sorted(PLANTED))
    given = parser.parse_args()
    case = batch_case if given.kind == "batches" else record_case
    compiled = PLANTED[given.planted] if given.planted else layout.layout
    seen: Counter[int] = Counter()
    for block in range(given.first, given.first + -(-given.cases // BLOCK)):
        print("block", block, flush=True)
        random = Random(given.seed << 32 | block)
        for number in range(BLOCK):
            try:
                case(random, compiled, seen)
            except Disagreement as e:
                print(f"seed {given.seed}, block {block}, case {number}: {e}")
                return 1
    print("seen", *(f"{why}={count}" for why, count in sorted(seen.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
