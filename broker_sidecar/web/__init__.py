"""The sidecar's HTTP server, for people and Prometheus: it shows, and changes nothing. `http_server.py` serves what it
is given; `pages.py` makes the pages."""
