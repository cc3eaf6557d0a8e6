"""The store: topics and the snapshots of their producers, in one RocksDB directory a sidecar.

Begin with `db`, by which alone RocksDB is written to, made durable and copied. `parts` has the keys and forms of all
records, and that of a topic; `snapshots` and `windows` are its state, and what was imported. `directories` is about the
data directory around it.
"""
