"""`python -m tests.broker_sidecar.security.flooding ADDRESS METHOD CONNECTIONS CALLS` keeps calls without a token open
until its standard input ends. It writes how many connections the other side has ended, whenever that has changed."""

import select
import sys

from tests.broker_sidecar.security.hostile_calls import flood

_told = -1


def is_over(_calls: int, connections: int) -> bool:
    global _told
    if connections != _told:
        _told = connections
        print(connections, flush=True)
    # Anyone who computes without a pause takes the processor from the others, which is not what is tested.
    return bool(select.select([sys.stdin], [], [], 0.002)[0])


if __name__ == "__main__":
    flood(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), is_over)
