"""Any database that SQLAlchemy speaks: where they differ. Needs the extra `services` or `spark`."""
