"""The embedded log: one folder of append-only segment files a topic."""
