"""How a topic's state leaves a sidecar and enters one.

Begin with `stored_records`: all that the store has of a topic, as it goes to another store.
"""
