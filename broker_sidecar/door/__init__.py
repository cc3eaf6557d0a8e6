"""The door: stock clients of Apache Pulsar use the topics of this sidecar, over Pulsar's binary protocol.

Begin with `door`, which listens. `pulsar_connection` answers a client's commands. `stock_producer` turns the entries of
one producer into frames, and the verdicts into receipts. `consumer_commands` answers the commands of consumers.
`stock_consumer` sends messages to one consumer. `subscriptions` selects the consumer of a shared subscription.
`entry_batches` converts rows, without I/O.
"""
