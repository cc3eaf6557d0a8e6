"""Spark jobs for a sidecar's topics: a data source, a sink, a reader job that stores its position together with its
output, and an audit.

Begin with `source` (called by Spark) or `reader_job` (run by a user). Both modules use `planning`, which gets the
topics from a sidecar or a cluster, and divides the topics into `ranges`. Workers read a range with `range_reader`, as
Arrow `message_columns`. The reader job plans its `rounds` from stored positions. Tasks (`range_task`) process the
ranges of a round, each in one transaction of a store. Messages that cannot be written become dead letters. `sink`
writes to a topic. `audit_job` uses `dedupe` to count the messages that a topic contains twice or not at all. Folders:
`stores` (where a job writes), `cluster` (reads directly from Pulsar's brokers).
"""
