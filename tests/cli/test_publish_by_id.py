"""`publish`, `topics` and `read` for a topic of deduplication IDs. About 15 s, one sidecar and a process a command."""

import json
from pathlib import Path

from tests.cli.conftest import Run


def test_a_file_is_published_once_by_its_ids(run: Run, tmp_path: Path) -> None:
    assert b"by deduplication ID" in run("topics", "create", "t", "--deduplication-mode", "deduplication-id").stdout
    (tmp_path / "a.jsonl").write_text("".join(f'{{"event": {{"id": "e{k % 40}"}}, "k": {k}}}\n' for k in range(50)))
    publish = ("publish", "a.jsonl", "--topic", "t", "--deduplication-id-path", "event.id")
    assert run(*publish).stdout == b"50 records read: 40 NotDup, 10 Dup\n"
    again = json.loads(run(*publish, "--json").stdout)
    assert (again["read"], again["not_dup"], again["dup"]) == (50, 0, 50)
    (tmp_path / "b.csv").write_text("id,v\ne1,x\nnew,y\n")
    csv = ("publish", "b.csv", "--topic", "t", "--deduplication-id-column", "id", "--json")
    assert json.loads(run(*csv).stdout)["not_dup"] == 1
    shown = json.loads(run("topics", "show", "t", "--json").stdout)
    assert shown["deduplication_mode"] == "deduplication-id"
    assert (shown["window"]["messages"], shown["window"]["forgotten"]) == (41, 0)
    found = [json.loads(line) for line in run("read", "t", "--json").stdout.splitlines()]
    assert [one["deduplication_id"] for one in found] == [f"e{k}" for k in range(40)] + ["new"]
    assert {(one["producer_name"], one["sequence_id"]) for one in found} == {(None, None)}
    assert run("read", "t", "--where", "deduplication_id=new").stdout == b"new,y\n"


def test_into_partitions(run: Run, tmp_path: Path) -> None:
    by_id = ("--deduplication-mode", "deduplication-id", "--deduplication-route", "id")
    assert b"partitions by id" in run("topics", "create", "p", "--partitions", "3", *by_id).stdout
    (tmp_path / "p.csv").write_text("id,v\n" + "".join(f"e{k % 40},{k % 40}\n" for k in range(50)))
    publish = ("publish", "p.csv", "--topic", "p", "--deduplication-id-column", "id")
    assert run(*publish).stdout == b"50 records read: 40 NotDup, 10 Dup\n"
    shown = json.loads(run("topics", "show", "p", "--json").stdout)
    assert (shown["deduplication_route"], shown["window"]["messages"]) == ("id", 40)
    found = [json.loads(line) for line in run("read", "p", "--json").stdout.splitlines()]
    assert {one["deduplication_id"] for one in found} == {f"e{k}" for k in range(40)}
    assert {one["partition"] for one in found} == {0, 1, 2}


def test_what_cannot_be_is_refused(run: Run, tmp_path: Path) -> None:
    run("topics", "create", "u", "--deduplication-mode", "deduplication-id", "--json")
    (tmp_path / "a.csv").write_text("id,v\na,x\n,y\n")
    by_id = ("publish", "a.csv", "--topic", "u", "--deduplication-id-column", "id")
    with_producer = ("publish", "a.csv", "--topic", "u", "--producer", "p")
    wrong = run(*with_producer, status=1).stderr
    assert b"is a topic of deduplication IDs [INVALID_REQUEST] Give --deduplication-id-column" in wrong
    run("topics", "create", "s", "--json")
    (tmp_path / "good.csv").write_text("id,v\na,x\n")
    wrong = run("publish", "good.csv", "--topic", "s", "--deduplication-id-column", "id", status=1).stderr
    assert b"s is a topic of sequence IDs [INVALID_BATCH] Give --producer" in wrong
    assert b"INVALID_DEDUPLICATION_ID" in run(*by_id, status=1).stderr
    assert b"1 NotDup" not in run("read", "u").stdout
    assert run("read", "u").stdout == b"a,x\n"
