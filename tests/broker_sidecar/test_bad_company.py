"""A small share of the campaign next to clients that misuse a sidecar."""

from pathlib import Path

from tests.broker_sidecar.bad_company import Company

SECONDS = 6.0


def test_whoever_behaves_gets_through(tmp_path: Path) -> None:
    company = Company(tmp_path, seed=1)
    assert company.run(SECONDS)
    assert not company.failures
