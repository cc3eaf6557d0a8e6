"""Something of a user's own program, given on a command line as MODULE:NAME."""

import importlib
import os
import sys
from typing import Any

import click


class PythonObject(click.ParamType[Any]):
    """It is imported, also from the current directory."""

    name = "object"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        module, _, name = str(value).partition(":")
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as e:
            raise click.BadParameter(f"{value} cannot be imported: {e}", ctx, param) from e
