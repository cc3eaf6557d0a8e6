"""Effectively-once publishing and consumption for any message log.

The client lives in `seqdedupe.client`; this package's top level has what everybody may import:
`message_id`, `errors`, `names` and `batch`.
"""

import os

# gRPC's fork handlers, which it installs when it is imported, crash one child in six that is forked while messages are
# under way, also one that only runs another program: Spark's JVM is started so. Nothing of ours needs them: a forked
# child may not use the client.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
