"""Every test is in one tier, and a unit test starts no process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiers, warm

FILES = sorted(path.relative_to(tiers.ROOT).as_posix() for path in (tiers.ROOT / "tests").rglob("test_*.py"))


def test_every_file_of_tests_is_in_one_tier() -> None:
    assert len(FILES) > 300
    assert {tiers.tier_of(file) for file in FILES} == set(tiers.TIERS)


def test_no_entry_names_what_is_gone() -> None:
    names = [
        *tiers.TIER_OF,
        *(name.partition("::")[0] for name in [*tiers.STAYING, *tiers.STARTS_JAVA]),
    ]
    assert [name for name in names if not any(file.startswith(name) for file in FILES)] == []


def test_a_file_in_no_tier_is_an_error() -> None:
    with pytest.raises(LookupError, match="in no tier"):
        tiers.tier_of("elsewhere/test_x.py")


@pytest.mark.parametrize("start", [lambda: subprocess.run(["true"]), lambda: subprocess.run(warm.SIDECAR), os.fork])
def test_a_unit_test_cannot_start_a_process(start: "object") -> None:
    """Neither as usual nor forked from the warm process."""
    with tiers.no_processes("test_x"), pytest.raises(RuntimeError, match="test_x starts a process"):
        start()  # type: ignore[operator]


def test_a_missing_service_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    service = tiers.Service("Nothing", ("no-such-program",), "build it")
    monkeypatch.delenv("TEST_NOTHING", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"^no Nothing \(build it\)$"):
        service.check()
    monkeypatch.setenv("TEST_NOTHING", "required")
    with pytest.raises(pytest.fail.Exception, match="no Nothing"):
        service.check()


SUITE = """
import pytest
from hypothesis import given, settings, strategies as st

from tests import tiers


@pytest.mark.parametrize("case", range(3))
def test_family(case): ...


@pytest.mark.parametrize("examples", [settings().max_examples])
@given(value=st.integers())
def test_property(examples, value): ...


def test_needs(): tiers.Service("Nothing", ("no-such-program",), "build it").check()


def test_needs_too(): tiers.Service("Nothing", ("no-such-program",), "build it").check()
"""


@pytest.mark.parametrize(
    ("options", "passed"),
    [((), "family[0] family[1] property[40]"), (("--campaign",), "family[2] property[1000]")],
)
def test_cases_stay_or_go_to_the_campaign(options: tuple[str, ...], passed: str, tmp_path: Path) -> None:
    """A property is in both, in the campaign with more examples."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(SUITE)
    plugin = (
        "from tests import tiers\nfrom tests.conftest import *\ntiers.STAYING = {'tests/test_x.py::test_family': 2}\n"
    )
    (tmp_path / "suite_plugin.py").write_text(plugin)
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "suite_plugin",
            "-v",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            *options,
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{tiers.ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert sorted(line.partition("::test_")[2].split()[0] for line in ran.stdout.splitlines() if "PASSED" in line) == (
        passed.split()
    )
    if not options:
        assert "skipped 2 tests: no Nothing (build it)" in ran.stdout.splitlines()
