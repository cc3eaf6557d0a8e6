"""Reading straight from Pulsar's brokers, without the sidecar: what one has written there, and what none has."""
