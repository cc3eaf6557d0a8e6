"""The door: stock producers of Apache Pulsar publish to the topics of this sidecar, over Pulsar's binary protocol.

Begin with `door`, which listens. `pulsar_connection` answers a client's commands. `stock_producer` turns the entries of
one producer into frames, and the verdicts into receipts. `entry_batches` converts rows, without I/O.
"""
