"""Other sidecars, and the calls and topics that go to them and come from them.

Begin with `peers.py`: the processes among which the shards of topics are divided, and the calls to any other sidecar.
`pulsar_cluster.py` is the Pulsar cluster that holds the logs, if there is one. `departures.py` moves a topic of this
sidecar's own log to another one (`services/arrival_calls.py` receives it).
"""
