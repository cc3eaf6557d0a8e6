"""What it takes beside Pulsar, Kafka, RabbitMQ and NATS: `python -m bench.compare`.

docs/internals/benchmarks.md says more.
"""
