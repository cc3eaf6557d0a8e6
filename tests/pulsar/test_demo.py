"""What `make demo-pulsar` does before it begins to read: flights into a broker, through kills and a bad network."""

from pathlib import Path

from demo.__main__ import log_keys
from demo.check import check
from demo.producer import TOPIC
from demo.run import KILL_PRODUCER_AT, KILL_SIDECAR_AT, Run
from seqdedupe.client.blocking import Client

FLIGHTS = 1000


def test_over_a_broker_every_flight_is_there_once(pulsar_home: Path, tmp_path: Path) -> None:
    with log_keys(is_pulsar=True) as keys, Run(tmp_path, FLIGHTS, **keys) as run:
        run.start_sidecar()
        with Client(run.sidecar.address) as client:
            run.publish()
            with client.reader(TOPIC) as reader:
                tallies = check(reader, FLIGHTS)
    assert keys["log"] == "pulsar"
    assert sum(tally.found for tally in tallies.values()) == FLIGHTS
    assert all(tally.missing == tally.doubled == tally.wrong == tally.disordered == 0 for tally in tallies.values())
    assert (run.sidecar_kills, run.producer_kills) == (len(KILL_SIDECAR_AT), len(KILL_PRODUCER_AT))
    assert run.board.total("dup") > 0
