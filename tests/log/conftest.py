"""Lets the suite, which is no test file of its own, say what was compared when a test fails."""

import pytest

pytest.register_assert_rewrite("tests.log.conformance")
