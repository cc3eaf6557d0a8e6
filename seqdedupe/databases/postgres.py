"""Connections to PostgreSQL that notice when nobody answers."""

from typing import Any

CONNECTION: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
    "client_encoding": "UTF8",
}
"""What libpq is told, unless a DSN says otherwise: without these a write into a network that swallows all would never
end. Times in seconds, the last one in milliseconds."""
