"""The entry point."""

import logging
import os
import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command of this process. An error is one line on stderr and a status: 1, or 2 for wrong usage."""
    try:
        # A command that fails prints the reason in one line. gRPC prints its own lines about TLS problems, and metadata
        # that is not UTF-8.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        logging.getLogger("grpc").addHandler(logging.NullHandler())
        # Handled here, because the user can interrupt the imports, which take long. An interrupt is no defect.
        from seqdedupe.cli.commands import run
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    sys.exit(run())
