"""A topic of a Pulsar cluster as the log of a topic. `docs/internals/formats-pulsar.md` describes its content.

Begin with `terms`, the rule that decides which entries are valid, and `log`, the log of one topic; `logs` contains all
of them. `writer` is the producer. `content` and `reader` read entries, `places` and `finder` find places, and `entries`
encodes and decodes entries. `topic_owner` determines the owner of a topic, and `policies` checks the topic's policies.
`broker_wire` connects to brokers without Pulsar's client. `wholes` stores the properties of partitioned topics.
"""
