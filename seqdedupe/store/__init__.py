"""The store: topics and the snapshots of their producers, in one RocksDB directory per sidecar.

Begin with `db`: RocksDB is written, made durable and copied only there. `parts` has the keys and encodings of all
records, and the record of a topic. `snapshots` and `windows` have a topic's state, and its import. `directories` is
about the data directory around it.
"""
