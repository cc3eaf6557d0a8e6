"""The core and its formats imported a second time, without numba: the kernels' plain Python functions, as an oracle."""

import importlib
import sys
from types import ModuleType

MODULES = {
    "seqdedupe.format": ("layout", "headers", "records"),
    "seqdedupe.core": (
        "rule",
        "recent",
        "name_table",
        "producers",
        "id_table",
        "id_runs",
        "id_slots",
        "id_window",
    ),
}


def _import_plain() -> dict[str, ModuleType]:
    ours = {name: module for name, module in sys.modules.items() if name.startswith(tuple(MODULES))}
    hidden = {name: sys.modules.get(name) for name in ("numba", "llvmlite")}
    for name in ours:
        del sys.modules[name]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        return {
            name: importlib.import_module(f"{package}.{name}") for package, names in MODULES.items() for name in names
        }
    finally:
        for name in [name for name in sys.modules if name.startswith(tuple(MODULES))]:
            del sys.modules[name]
        sys.modules.update(ours)
        for name, module in hidden.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


PLAIN = _import_plain()
