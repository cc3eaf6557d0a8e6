"""Alerts, dashboard, the page of metrics and the runbook speak of what a real sidecar shows, and leave nothing out."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from seqdedupe.client import Client as AsyncClient
from seqdedupe.errors import REASONS, error
from seqdedupe.services.activity import Lag
from seqdedupe.services.metrics import ServiceMetrics
from seqdedupe.services.pipe import Pipe
from seqdedupe.testing import Sidecar
from tests.broker_sidecar.calls import Client, batch
from tests.broker_sidecar.metrics.scraping import Page, metrics_of, scrape
from tests.test_docs import rows_of

ROOT = Path(__file__).parents[3]
ALERTS = ROOT / "deploy" / "prometheus" / "seqdedupe-alerts.yml"
PROMETHEUS = ROOT / "deploy" / "prometheus" / "prometheus.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "seqdedupe.json"
METRICS = ROOT / "docs" / "reference" / "metrics.md"
RUNBOOK = ROOT / "docs" / "guides" / "runbook.md"

OF_PROMETHEUS = {"up"}
"""Metrics that Prometheus makes itself."""
FUNCTIONS = {
    "rate", "increase", "changes", "deriv", "histogram_quantile", "sum", "max", "min", "topk", "by", "ignoring", "or",
    "and",
    "label_values",
}  # fmt: skip
LABELS_OF_PROMETHEUS = {"instance", "job"}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Of a sidecar that has done something of everything, and of a service."""
    with Sidecar(tmp_path_factory.mktemp("metrics"), metrics_listen="127.0.0.1:0") as sidecar:
        client = Client(sidecar.address)
        epochs = client.epochs("t", "a")
        client.stream("t").receipt(batch([("a", 0)], epochs))
        client.close()
        pipe = Pipe(AsyncClient(sidecar.address), "t", "out", lambda _: None, name="copy")
        pipe.activity.runs()
        pipe.activity.see(Lag(1, 0))
        pipe.activity.waits(error("UNREACHABLE", "gone"))
        with ServiceMetrics("127.0.0.1:0", pipe) as served:
            services = text_string_to_metric_families(metrics_of(served.address))
            yield Page([*services, *scrape(sidecar).families])


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def expressions_in(panels: Any) -> Iterator[str]:
    """All that a dashboard asks Prometheus for."""
    if isinstance(panels, dict):
        yield from (panels[key] for key in ("expr", "definition") if key in panels)
        panels = list(panels.values())
    if isinstance(panels, list):
        for item in panels:
            yield from expressions_in(item)


PANELS = list(expressions_in(json.loads(DASHBOARD.read_text())))
ALL = [
    *(pytest.param(rule["expr"], id=name) for name, rule in alerts().items()),
    *(pytest.param(expression, id=f"panel{k}") for k, expression in enumerate(PANELS)),
]


def names_in(expression: str) -> set[str]:
    """The metrics that an expression names."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|ignoring) ?\([^)]*\)", " ", expression)
    bare = re.sub(r"label_values\((\w+), \w+\)", r"\1", bare)
    return set(re.findall(r"[a-z_]\w*", bare)) - FUNCTIONS


def wrong_in(expression: str, page: Page) -> list[str]:
    """What an expression speaks of, and the page does not show."""
    wrong = [name for name in names_in(expression) if name not in page.names | OF_PROMETHEUS]
    for name, selectors in re.findall(r"([a-z_]\w*)\{([^}]*)\}", expression):
        for label, operator, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', selectors):
            if label in LABELS_OF_PROMETHEUS:
                continue
            known = page.labels(name, label)
            if not known or (operator == "=" and label != "grpc_code" and value not in known):
                wrong.append(f"{name} {label} {value}")
    for labels in re.findall(r"\bby ?\(([^)]*)\)", expression):
        wanted = set(labels.split(", ")) - LABELS_OF_PROMETHEUS
        wrong += [label for label in wanted if not any(page.labels(name, label) for name in names_in(expression))]
    return wrong


@pytest.mark.parametrize("expression", ALL)
def test_an_expression_speaks_of_what_there_is(expression: str, page: Page) -> None:
    assert names_in(expression)
    assert not wrong_in(expression, page)


@pytest.mark.parametrize(
    "expression",
    [
        "seqdedupe_no_such > 0",
        'seqdedupe_topics{state="no_such"} > 0',
        "sum by (no_such) (seqdedupe_topics)",
        'seqdedupe_topics{no_such=~".*"}',
    ],
)
def test_what_there_is_not_is_noticed(expression: str, page: Page) -> None:
    assert wrong_in(expression, page)


def test_every_metric_of_ours_is_in_the_dashboard(page: Page) -> None:
    shown = " ".join(PANELS)
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in page.names if name.startswith("seqdedupe_")}
    assert {name for name in families if name not in shown} == set()


def test_the_page_of_metrics_is_about_these(page: Page) -> None:
    rows = rows_of(METRICS)
    found = {}
    for family in page.families:
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = [family.type, ", ".join(f"`{label}`" for label in sorted(labels)) or "–", family.documentation]
    assert rows == found


def test_alerts_and_their_sections() -> None:
    rules = alerts()
    sections = re.split(r"^### ", RUNBOOK.read_text().partition("## Alerts")[2].partition("## Reasons")[0], flags=re.M)
    told = {section.split("\n", 1)[0]: section for section in sections[1:]}
    assert list(told) != []
    assert told.keys() == rules.keys()
    for name, rule in rules.items():
        assert rule["annotations"]["runbook"] == f"docs/guides/runbook.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")
        for word in ("**Means:**", "**Look:**", "**Do:**"):
            assert word in told[name], name


def test_the_runbook_knows_every_reason() -> None:
    told, _, others = RUNBOOK.read_text().partition("### What is the caller's own")
    rows = rows_of(RUNBOOK)
    named = re.findall(r"`([A-Z][A-Z_]+)`", others)
    assert len(named) == len(set(named))
    assert rows.keys() | set(named) == REASONS.keys()
    assert not rows.keys() & set(named)
    assert "## Reasons" in told
    for reason, cells in rows.items():
        assert len(cells) == 3, reason
        assert all(cell.rstrip(" |").endswith((".", ".)", "?", "?)")) for cell in cells), reason


def test_the_runbook_names_metrics_that_there_are(page: Page) -> None:
    named = set(re.findall(r"\b((?:seqdedupe|grpc_server)_\w+)", RUNBOOK.read_text()))
    known = {re.sub("_(bucket|sum|count)$", "", name) for name in page.names} | page.names
    assert named <= known | {name.removesuffix("_total") for name in known}


def test_prometheus_takes_the_files() -> None:
    """Where its own tool is: the expressions above are looked at in any case."""
    assert yaml.safe_load(PROMETHEUS.read_text())["rule_files"] == [ALERTS.name]
    if tool := shutil.which("promtool"):
        subprocess.run([tool, "check", "rules", ALERTS], check=True)
        subprocess.run([tool, "check", "config", PROMETHEUS], check=True)
