"""What a topic holds twice, out of order or not at all: the counting, without Spark, which `audit_job` runs on it.

`sequence_ids` is for topics of producers with sequence IDs, `deduplication_ids` for those of deduplication IDs.
"""
