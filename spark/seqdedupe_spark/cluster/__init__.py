"""Reading straight from Pulsar's brokers what a sidecar has written there, without the sidecar."""
