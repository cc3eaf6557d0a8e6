"""A topic of a Pulsar cluster as the log. `docs/formats-pulsar.md` says what stands in it."""
