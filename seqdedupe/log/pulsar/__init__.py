"""A topic of a Pulsar cluster as the log. `docs/internals/formats-pulsar.md` says what stands in it.

Begin with `terms`, the rule of which entries count, and `log`, one topic's; `logs` has all of them. `writer` is the
producer, `content` with `reader` what is read, `places` and `finder` find where; `entries` are the bytes. `topic_owner`
says who has a topic, `policies` and `entry_limit` what it must be, `wholes` what a partitioned one says of itself.
"""
