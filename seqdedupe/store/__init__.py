"""The store: the topics and the snapshots of their producers, in one RocksDB directory per sidecar.

Begin with `db`: only this module writes to RocksDB, syncs RocksDB and copies RocksDB. `parts` defines the keys and
encodings of all records, and the record of a topic. `snapshots` and `windows` store a topic's state, and imported data.
`directories` handles the data directory that contains the store.
"""
