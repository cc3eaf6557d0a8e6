"""A real Pulsar broker for whoever wants to try or test something on one: a standalone process with throw-away data."""
