"""A shop of two services, each with a database of its own, and messages between them: each takes effect once."""
