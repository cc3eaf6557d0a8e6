"""Calls to other sidecars, and topics that move between this sidecar and other sidecars.

Begin with `peers.py`: the processes among which the shards of topics are divided, and the calls to any other sidecar.
`pulsar_cluster.py` is the Pulsar cluster that stores the logs, if there is one. `departures.py` moves a topic of this
sidecar's own log to another sidecar (`services/arrival_calls.py` receives the topic).
"""
