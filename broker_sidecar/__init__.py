"""The sidecar: the server process around the library."""
