"""What it takes beside Pulsar, Kafka, RabbitMQ and NATS: `python -m bench.compare`. See docs/benchmarks.md."""
