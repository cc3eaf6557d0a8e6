"""A function whose module lacks something."""

import no_such_package  # type: ignore[import-not-found]  # noqa: F401
