"""A store for reader jobs that is one JSON file."""
