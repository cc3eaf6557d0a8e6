"""Spark over a sidecar's topics: a data source, a sink, a reader job that keeps its position with its output, an audit.

Begin with `source` (called by Spark) or `reader_job` (run by a user). Both plan with `planning`, which asks a sidecar
or a cluster for the topics, in `ranges`. Workers read a range with `range_reader`, as Arrow `message_columns`.
`audit_job` uses `audit_counts` to count the messages that a topic holds twice or not at all. Folders: `job` (rounds,
positions, the task), `stores` (where a job writes), `sink` (into a topic), `cluster` (straight from Pulsar's brokers).
"""
