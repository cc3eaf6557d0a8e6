"""The differences between the databases that SQLAlchemy supports. Needs the extra `services` or `spark`."""
