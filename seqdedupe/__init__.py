"""Effectively-once publishing and consumption for any message log.

The client is in `seqdedupe.client`. The top level of this package has the modules that all code may import:
`message_id`, `errors`, `names` and `batch`.
"""

import os

# gRPC installs fork handlers on import. If a process forks while messages are in flight, these handlers crash one child
# in six, even a child that only runs another program, such as Spark's JVM. The handlers are not needed, because a
# forked child may not use the client.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
