"""The sidecar's HTTP server, for people and Prometheus: it shows, and changes nothing."""
