"""A sidecar with a planted bug: who moves a cursor looks at what is in force, not at what is on its way to the log."""

import sys

from broker_sidecar import kernels

MODULE = "tests.broker_sidecar.planted_cursor"

if __name__ == "__main__":
    kernels.prepare()

    from broker_sidecar.__main__ import main
    from seqdedupe.topic.topic import Topic

    Topic.newest_policy = property(lambda self: self.policy)  # type: ignore[assignment, method-assign]
    sys.exit(main())
