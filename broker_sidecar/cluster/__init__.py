"""Other sidecars, and what goes to them and comes from them.

`peers.py`, the processes among which the shards of topics are spread, and the calls to any other sidecar, is where to
begin. `pulsar_cluster.py` is the Pulsar cluster that holds the logs, if it does; `departures.py` gives a topic of this
sidecar's own log to another one (`services/arrival_calls.py` takes it).
"""
