"""`seqdedupe bench`: what it counts, and that it ends in order."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqdedupe.cli.bench_command import Histogram
from seqdedupe.cli.main import main
from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS, Run
from tests.conftest import StartSidecar
from tests.processes import running

PERCENTILES = ("p50_ms", "p95_ms", "p99_ms", "p99_9_ms", "max_ms")
US = 1e-6
STILL_SECONDS = 2.0


def histogram_of(values_us: "np.ndarray[Any, np.dtype[Any]]") -> Histogram:
    histogram = Histogram()
    for part in np.array_split(values_us, 3):
        histogram.record((part + 0.5) * US)
    return histogram


@pytest.mark.parametrize("seed", range(5))
def test_percentiles_are_those_of_the_values_to_three_digits(seed: int) -> None:
    generator = np.random.default_rng(seed)
    values = np.exp(generator.uniform(0, 20, generator.integers(1, 5000))).astype(np.int64)
    histogram = histogram_of(values)
    assert histogram.count == len(values)
    ordered = np.sort(values)
    for percentile in (0.0, 1.0, 50.0, 95.0, 99.0, 99.9, 100.0):
        exact = int(ordered[max(0, int(np.ceil(len(values) * percentile / 100)) - 1)])
        found = histogram.percentile_ms(percentile)
        assert found is not None
        assert exact <= round(found * 1000) <= exact * 1.001
    assert histogram.percentile_ms(100) == values.max() / 1000


@pytest.mark.parametrize("bits", range(1, 36))
def test_each_side_of_a_power_of_two(bits: int) -> None:
    for value in (2**bits - 1, 2**bits, 2**bits + 1):
        assert histogram_of(np.array([value])).percentile_ms(50) == value / 1000


def test_what_is_out_of_range_is_counted_at_its_end() -> None:
    histogram = Histogram()
    histogram.record(np.array([-1.0, 0.0, 1e9]))
    assert (histogram.percentile_ms(1), histogram.count) == (0.0, 3)
    assert histogram.percentile_ms(100) == (2**36 - 1) / 1000


def test_two_histograms_together_are_one_of_all_values() -> None:
    one, other = np.arange(1, 4000), np.arange(100_000, 900_000, 7)
    both, all_at_once = histogram_of(one), histogram_of(np.concatenate((one, other)))
    both.add(histogram_of(other))
    assert list(both.distribution()) == list(all_at_once.distribution())


def test_the_distribution_is_written_as_hdrhistogram_does() -> None:
    """HdrHistogram 2.2.2 writes these lines of the same values (`outputPercentileDistribution`, in ms), but for the
    maximum, which it rounds up to 4.001."""
    assert list(histogram_of(np.array([1000, 2000, 3000, 4000])).distribution()) == [
        "       Value     Percentile TotalCount 1/(1-Percentile)",
        "",
        "       1.000 0.000000000000          1           1.00",
        "       1.000 0.100000000000          1           1.11",
        "       1.000 0.200000000000          1           1.25",
        "       2.000 0.300000000000          2           1.43",
        "       2.000 0.400000000000          2           1.67",
        "       2.000 0.500000000000          2           2.00",
        "       3.001 0.550000000000          3           2.22",
        "       3.001 0.600000000000          3           2.50",
        "       3.001 0.650000000000          3           2.86",
        "       3.001 0.700000000000          3           3.33",
        "       3.001 0.750000000000          3           4.00",
        "       4.001 0.775000000000          4           4.44",
        "       4.001 1.000000000000          4",
        "#[Mean    =        2.501, StdDeviation   =        1.118]",
        "#[Max     =        4.000, Total count    =            4]",
        "#[Buckets =           26, SubBuckets     =         2048]",
    ]
    assert [line[:6] for line in Histogram().distribution() if line][1:] == ["#[Mean", "#[Max ", "#[Buck"]


def results(output: bytes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    *intervals, last = map(json.loads, output.splitlines())
    return [line["interval"] for line in intervals], last["summary"]


def test_all_that_is_sent_is_in_the_topic(run: Run, shared_sidecar: Sidecar, tmp_path: Path) -> None:
    arguments = ("bench", "all", "--messages", "10", "--names", "3", "--size", "7", "--json", "--histogram", "h.hgrm")
    intervals, summary = results(run(*arguments).stdout)
    assert sum(interval["messages"] for interval in intervals) <= summary["messages"] == 10
    assert (summary["without_receipt"], summary["not_sent"], summary["rate"]) == (0, 0, None)
    assert (summary["topic"], summary["producers"], summary["size_bytes"]) == ("persistent://public/default/all", 3, 7)
    found = [summary[name] for name in PERCENTILES]
    assert found == sorted(found)
    assert found[0] > 0
    lines = (tmp_path / "h.hgrm").read_text().splitlines()
    assert lines[0].split() == ["Value", "Percentile", "TotalCount", "1/(1-Percentile)"]
    assert lines[-4].split()[1:] == ["1.000000000000", "10"]
    with Client(shared_sidecar.address) as client:
        found_messages = [(message.producer_name, len(message.payload or b"")) for message in client.reader("all")]
        assert sorted(found_messages) == sorted((f"bench-{number % 3}", 7) for number in range(10))
        # Once more, with other names and IDs that go on.
        text = run("bench", "all", "--messages", "5", "--size", "0").stdout.decode().splitlines()
        assert text[-2] == "5 messages of 0 bytes, 1 producer, to persistent://public/default/all"
        assert all(f" {word} " in text[-1] for word in ("messages/s", "MB/s", "p50", "p95", "p99", "p99.9", "max"))
        assert client.ends("all").last.index == 14


def test_a_rate_is_kept_and_said_to_be_missed(run: Run) -> None:
    began = time.monotonic()
    intervals, summary = results(run("bench", "rate", "--rate", "50", "--seconds", "2", "--json").stdout)
    took_seconds = time.monotonic() - began
    # One at the start; the seconds are rounded, and end with the last receipt.
    assert 20 <= summary["messages"] <= 50 * summary["elapsed_seconds"] + 1.1
    assert 80 <= summary["messages"] + summary["not_sent"] <= 50 * took_seconds + 1
    assert 1 <= len(intervals) <= summary["elapsed_seconds"] + 1
    text = run("bench", "rate", "--rate", "1000000000", "--seconds", "1", "--size", "1").stdout
    assert b"the rate was not reached: " in text


def test_latencies_under_a_rate_count_from_when_a_message_was_due(start_sidecar: StartSidecar) -> None:
    """The sidecar stands still for 2 of 5 seconds. A fifth of all messages was due in the first one, and waited for the
    second: they say so, though only the 32 that a producer has under way could be sent meanwhile. Counted from when
    they were sent, fewer than one in 20 would have waited."""
    sidecar = start_sidecar()
    command = [COMMAND, "bench", "t", "--rate", "400", "--seconds", "5", "--address", sidecar.address, "--json"]
    with running(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        sidecar.signal(signal.SIGSTOP)
        time.sleep(STILL_SECONDS)
        sidecar.signal(signal.SIGCONT)
        _, summary = results(first + process.stdout.read())
        assert process.wait(TIMEOUT_SECONDS) == 0
    assert summary["p95_ms"] >= STILL_SECONDS * 1000 / 2
    assert summary["without_receipt"] == 0


def test_a_sidecar_that_is_killed_is_waited_for(start_sidecar: StartSidecar) -> None:
    sidecar = start_sidecar()
    command = [COMMAND, "bench", "t", "--rate", "100", "--messages", "300", "--address", sidecar.address, "--json"]
    with running(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        sidecar.restart()
        _, summary = results(first + process.stdout.read())
        assert process.wait(TIMEOUT_SECONDS) == 0
    assert (summary["messages"], summary["without_receipt"], summary["not_sent"]) == (300, 0, 0)
    with Client(sidecar.address) as client:
        assert client.ends("t").last.index == 299


def test_ctrl_c_while_no_receipts_come_says_how_many_are_missing(start_sidecar: StartSidecar) -> None:
    sidecar = start_sidecar()
    command = [COMMAND, "bench", "t", "--rate", "100", "--address", sidecar.address]
    with running(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        sidecar.kill()
        while b" 0 messages/s" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        out = process.stdout.read()
        assert process.wait(TIMEOUT_SECONDS) == 130
        assert process.stderr.read() == b""
    assert b"without a receipt: " in out


def test_another_one_of_the_same_names_ends_it(shared_sidecar: Sidecar, environment: dict[str, str]) -> None:
    command = [COMMAND, "bench", "fenced", "--rate", "100", "--names", "3"]
    with running(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        with Client(shared_sidecar.address) as client, client.producer("fenced", "bench-1") as producer:
            producer.send(b"")
        assert b" 3 producers, to persistent://public/default/fenced" in process.stdout.read()
        error = process.stderr.read()
        assert b"[FENCED]" in error
        assert error.count(b"\n") == 1
        assert process.wait(TIMEOUT_SECONDS) == 1


def test_nobody_who_reads_on_is_quiet(environment: dict[str, str]) -> None:
    command = [COMMAND, "bench", "unread", "--rate", "100"]
    with running(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(TIMEOUT_SECONDS) == 141


@pytest.mark.parametrize(
    "flags",
    [
        ("--rate", "0"),
        ("--rate", "nan"),
        ("--rate", "-1"),
        ("--size", "-1"),
        ("--size", str(5 * 2**20 + 1)),
        ("--names", "0"),
        ("--names", "10001"),
        ("--messages", "0"),
        ("--seconds", "0"),
        ("--histogram", "no/such/folder"),
    ],
)
def test_wrong_usage(
    flags: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["seqdedupe", "bench", "t", *flags])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_bad_topics(run: Run) -> None:
    assert b"[INVALID_TOPIC_NAME]" in run("bench", "a b", "--messages", "1", status=1).stderr
    unreachable = run("bench", "t", "--messages", "1", "--json", "--address", "127.0.0.1:1", status=1)
    assert json.loads(unreachable.stderr)["error"]["reason"] == "UNREACHABLE"


def test_ctrl_c_ends_it_with_the_summary(run: Run, environment: dict[str, str], tmp_path: Path) -> None:
    command = [COMMAND, "bench", "stopped", "--rate", "100", "--json", "--histogram", "h"]
    with running(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, summary = results(first + process.stdout.read())
        assert process.wait(TIMEOUT_SECONDS) == 130
        assert process.stderr.read() == b""
    assert summary["messages"] > 0
    assert summary["without_receipt"] == 0
    assert (tmp_path / "h").read_text().startswith("       Value")
    stored = json.loads(run("topics", "show", "stopped", "--json").stdout)["messages"]
    assert stored == summary["messages"]
