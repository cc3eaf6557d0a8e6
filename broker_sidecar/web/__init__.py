"""The sidecar's HTTP server, for people and Prometheus. It shows state and changes nothing.
`seqdedupe/http_server.py` serves the routes; `pages.py` makes the pages."""
