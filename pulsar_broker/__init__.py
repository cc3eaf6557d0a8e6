"""A real Pulsar broker for trials and tests: a standalone process with throw-away data."""
