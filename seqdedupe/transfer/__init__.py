"""How a topic's state leaves a sidecar and enters one, and how all that a data directory has does.

Begin with `stored_records`: all that the store has of a topic, as it goes to another store. `state_messages` is what a
topic says of its producers, and a snapshot that comes, `imports` what is imported into a topic that nobody has used;
`backup` is about copies of a data directory.
"""
