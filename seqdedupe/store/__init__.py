"""The store: topics and the snapshots of their producers, in one RocksDB directory a sidecar."""
