"""The sidecar's HTTP pages for people. They show state and change nothing. `seqdedupe/http_server.py` serves the
routes, also those for Prometheus. `pages.py` builds the pages."""
