"""The process of an instance, and how it ends: at once, so that what is not acknowledged comes again in order."""

import logging
import os
import sys
from typing import Any

logger = logging.getLogger("seqdedupe.functions")

FAILED = 1


class InstanceProcess:
    """This process, which Pulsar's runtime starts again when it ends.

    Neither SystemExit nor an exception ends an instance: the runtime catches what `process` raises, and goes on without
    the message.
    """

    @property
    def is_stopping(self) -> bool:
        """Whether the runtime was told to end (SIGTERM); while `process` runs it does not."""
        main: Any = sys.modules.get("__main__")
        return getattr(main, "to_run", True) is False

    def end(self, why: str, *, failed: bool) -> None:
        """Does not return."""
        logger.log(logging.CRITICAL if failed else logging.INFO, "the instance ends: %s", why)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED if failed else 0)
