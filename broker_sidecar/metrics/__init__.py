"""What the sidecar counts and measures, and how Prometheus is shown it."""
