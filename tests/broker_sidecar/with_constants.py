"""A sidecar with other constants: what takes seconds or a thousand clients is tested with less; and planted bugs."""

import importlib
import json
import os
import resource
import sys

from broker_sidecar import kernels
from broker_sidecar.__main__ import main

VARIABLE = "WITH_CONSTANTS"
"""In the environment, as JSON: `{"module.NAME": value}`."""

FILES = "WITH_FILES"
"""In the environment: the soft and the hard limit of open files."""

MODULE = __name__ if __name__ != "__main__" else "tests.broker_sidecar.with_constants"


def environment(**constants: object) -> dict[str, str]:
    """For `Sidecar(module=MODULE, environment=...)`; the names are those of `broker_sidecar`, with `__` for the dot, or
    whole paths that begin with `seqdedupe`."""
    paths = {name.replace("__", "."): value for name, value in constants.items()}
    whole = {k if k.startswith("seqdedupe.") else f"broker_sidecar.{k}": value for k, value in paths.items()}
    return {VARIABLE: json.dumps(whole)}


def replace() -> None:
    """Replaces what the environment says."""
    for path, value in json.loads(os.environ.get(VARIABLE, "{}")).items():
        module, _, name = path.rpartition(".")
        if not hasattr(importlib.import_module(module), name):
            raise AttributeError(path)
        setattr(importlib.import_module(module), name, value)


if __name__ == "__main__":
    if FILES in os.environ:
        soft, hard = os.environ[FILES].split()
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), int(hard)))
    kernels.prepare()
    replace()
    sys.exit(main())
