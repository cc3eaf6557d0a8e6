"""Which of gRPC's ways to wait for sockets the sidecar uses."""

import os
from importlib.metadata import version

_VARIABLE = "GRPC_EXPERIMENTS"
_THE_OLDER_WAY = "-event_engine_client,-event_engine_listener"

_NEWEST_THAT_KNOWS = (1, 85)
"""A later gRPC may not have these names any more, and says so on standard error, at each start."""


def turn_off() -> None:
    """Has the thread that waits for gRPC's events wait for the sockets itself, instead of for other threads that do.

    That saves a wake-up each way (`python -m bench one_in_flight steady`). What the environment says already stays. It
    has to come before gRPC is imported.
    """
    major, minor = version("grpcio").split(".")[:2]
    if (int(major), int(minor)) <= _NEWEST_THAT_KNOWS:
        os.environ.setdefault(_VARIABLE, _THE_OLDER_WAY)
