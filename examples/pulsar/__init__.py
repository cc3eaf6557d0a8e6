"""Reading a Pulsar topic that a sidecar writes, with Pulsar's own client."""
