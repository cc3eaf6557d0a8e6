"""Effectively-once publishing and consumption for any message log.

The client is in `seqdedupe.client`. The top level of this package has the modules that all code may import:
`message_id`, `errors`, `names` and `batch`.
"""

import os

# gRPC installs fork handlers on import. They crash one child in six that is forked while messages are under way, also a
# child that only runs another program, as Spark starts its JVM. We do not need them: a forked child may not use the
# client.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
