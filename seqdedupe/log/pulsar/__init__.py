"""A topic of a Pulsar cluster as the log. `docs/internals/formats-pulsar.md` describes its content.

Begin with `terms`, the rule which entries count, and `log`, the log of one topic; `logs` has all of them. `writer` is
the producer. `content` with `reader` reads, `places` and `finder` find places, and `entries` are the bytes.
`topic_owner` says who has a topic, `policies` and `entry_limit` what a topic must be. `wholes` holds the properties of
partitioned topics.
"""
