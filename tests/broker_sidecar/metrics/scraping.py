"""Metrics as Prometheus sees them."""

import urllib.request
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar

WAIT_SECONDS = LAST_RESORT_SECONDS
SHORT = "persistent://public/default/"

__all__ = ["Page", "address_of", "metrics_of", "scrape"]


@dataclass(frozen=True)
class Page:
    """What was served."""

    families: list[Metric]

    def values(self, name: str, **labels: str) -> list[float]:
        """For all samples of this name that have these labels."""
        return [
            sample.value
            for family in self.families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def value(self, name: str, **labels: str) -> float:
        """For the only one."""
        [value] = self.values(name, **labels)
        return value

    def sum(self, name: str, **labels: str) -> float:
        return sum(self.values(name, **labels))

    def labels(self, name: str, label: str) -> set[str]:
        """All values of a label."""
        return {
            sample.labels[label]
            for family in self.families
            for sample in family.samples
            if sample.name == name and label in sample.labels
        }

    @property
    def names(self) -> set[str]:
        """For all samples."""
        return {sample.name for family in self.families for sample in family.samples}


def address_of(sidecar: Sidecar) -> str:
    """Where it serves metrics since its last start."""
    return str([line["address"] for line in sidecar.log if line["event"] == "metrics"][-1])


def metrics_of(address: str, accept: str = "") -> str:
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as response:
        return str(response.read(), "utf-8")


def scrape(sidecar: Sidecar, accept: str = "") -> Page:
    """What it shows now, read by Prometheus' own parser."""
    parse = parse_openmetrics if "openmetrics" in accept else parse_text
    return Page(list(parse(metrics_of(address_of(sidecar), accept))))
