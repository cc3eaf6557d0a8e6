"""Spark over a sidecar's topics: a data source, a sink, a reader job that keeps its position with its output, an audit.

Begin with `source` (what Spark calls) or `reader_job` (what a user runs). Both plan with `planning`, which asks a
sidecar or a cluster what there is, in `ranges`; workers read a range with `range_reader`, as Arrow `message_columns`.
`audit_job` counts with `audit_counts` what a topic holds twice or not at all. Folders: `job` (rounds, positions, the
task), `stores` (where a job writes), `sink` (into a topic), `cluster` (straight from Pulsar's brokers).
"""
