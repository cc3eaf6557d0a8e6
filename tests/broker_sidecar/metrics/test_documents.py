"""Alerts, dashboard, the page of metrics and the runbook speak of what a real sidecar shows, and leave nothing out.

What the alerts' expressions come to is in `alerts_test.yml`, which Prometheus' own tool runs where it is installed.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from broker_sidecar.rpc import NOT_OF_SIDECARS
from seqdedupe.client import Client as AsyncClient
from seqdedupe.errors import REASONS, error
from seqdedupe.services.activity import Lag
from seqdedupe.services.metrics import ServiceMetrics
from seqdedupe.services.pipe import Pipe
from seqdedupe.testing import Sidecar
from tests.broker_sidecar.calls import Client, batch
from tests.broker_sidecar.metrics.scraping import Page, metrics_of, scrape
from tests.broker_sidecar.security.issuing import issue, of_server, revoke
from tests.broker_sidecar.security.showing import bearer, unary
from tests.broker_sidecar.security.signing import AUDIENCE, Issuer, write_keys
from tests.broker_sidecar.security.test_certificates import VERSION, channel_to, tls_keys
from tests.test_docs import rows_of

ROOT = Path(__file__).parents[3]
ALERTS = ROOT / "deploy" / "prometheus" / "seqdedupe-alerts.yml"
ALERTS_TEST = Path(__file__).with_name("alerts_test.yml")
PROMETHEUS = ROOT / "deploy" / "prometheus" / "prometheus.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "seqdedupe.json"
METRICS = ROOT / "docs" / "reference" / "metrics.md"
RUNBOOK = ROOT / "docs" / "guides" / "runbook.md"

OF_PROMETHEUS = {"up"}
"""Metrics that Prometheus makes itself."""
FUNCTIONS = {
    "avg_over_time", "deriv",
    "rate", "increase", "changes", "histogram_quantile", "sum", "max", "min", "topk", "by", "ignoring", "or",
    "and", "on", "absent", "last_over_time", "time", "clamp_max", "label_values",
}  # fmt: skip
OF_OTHERS = ("errors.py", "command.py", "testing.py")
"""For the files of the library itself: what is in them is not the sidecar's."""
LABELS_OF_PROMETHEUS = {"instance", "job"}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """For a sidecar that has done something of everything, and of a service."""
    backups = tmp_path_factory.mktemp("backups")
    folder = tmp_path_factory.mktemp("metrics")
    port = "127.0.0.1:0"
    with Sidecar(folder, metrics_listen=port, pulsar_listen=port, backup_directory=backups) as sidecar:
        client = Client(sidecar.address)
        epochs = client.epochs("t", "a")
        client.stream("t").receipt(batch([("a", 0)], epochs))
        client.close()
        pipe = Pipe(AsyncClient(sidecar.address), "t", "out", lambda _: None, name="copy")
        pipe.activity.runs()
        pipe.activity.see(Lag(1, 0))
        pipe.activity.waits(error("UNREACHABLE", "gone"))
        with ServiceMetrics("127.0.0.1:0", pipe) as served:
            services = list(text_string_to_metric_families(metrics_of(served.address)))
        page = scrape(sidecar)
    credentials = _with_credentials(tmp_path_factory.mktemp("credentials"))
    return Page(_merged([*services, *page.families, *credentials.families]))


def _with_credentials(folder: Path) -> Page:
    """The page of a sidecar with TLS and signed tokens, one of which was shown."""
    authority, of_clients = trustme.CA(), trustme.CA()
    keys = tls_keys(folder, of_server(authority))
    of_clients.cert_pem.write_to_path(str(folder / "clients.pem"))
    client = issue(of_clients, names=["shop.example"])
    (folder / "revoked.pem").write_bytes(revoke(of_clients))
    keys |= {"tls_client_ca_file": folder / "clients.pem", "tls_client_crl_file": folder / "revoked.pem"}
    issuer = Issuer("one")
    keys |= {"token_keys_file": write_keys(folder / "keys.json", [issuer.jwk()]), "token_audience": AUDIENCE}
    rules = folder / "rules.toml"
    rules.write_text("")
    keys |= {"authentication": "token", "rules_file": rules, "metrics_listen": "127.0.0.1:0"}
    with Sidecar(folder, **keys) as sidecar, channel_to(sidecar, client, authority) as channel:
        with pytest.raises(grpc.RpcError):
            unary(channel, VERSION)(b"\xff", metadata=bearer(issuer.token()))
        return scrape(sidecar)


def _merged(families: list[Metric]) -> list[Metric]:
    """One of each name, with the samples of all."""
    found: dict[str, Metric] = {}
    for family in families:
        found.setdefault(family.name, family).samples.extend(family.samples if family.name in found else [])
    return list(found.values())


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def recorded() -> dict[str, str]:
    """What the rules record under their own names, by name."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["record"]: rule["expr"] for group in groups for rule in group["rules"] if "record" in rule}


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
    *(pytest.param(expression, id=name) for name, expression in recorded().items()),
    *(pytest.param(expression, id=f"panel{k}") for k, expression in enumerate(PANELS)),
]


def names_in(expression: str) -> set[str]:
    """The metrics that an expression names."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|ignoring|on) ?\([^)]*\)", " ", expression)
    bare = re.sub(r"label_values\((\w+), \w+\)", r"\1", bare)
    return set(re.findall(r"[a-z_][\w:]*", bare)) - FUNCTIONS


def wrong_in(expression: str, page: Page) -> list[str]:
    """What an expression speaks of, and the page does not show."""
    wrong = [name for name in names_in(expression) if name not in page.names | OF_PROMETHEUS | recorded().keys()]
    for name, selectors in re.findall(r"([a-z_]\w*)\{([^}]*)\}", expression):
        for label, operator, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', selectors):
            if label in LABELS_OF_PROMETHEUS:
                continue
            known = page.labels(name, label)
            if not known or (operator == "=" and label != "grpc_code" and value not in known):
                wrong.append(f"{name} {label} {value}")
    for labels in re.findall(r"\b(?:by|on) ?\(([^)]*)\)", expression):
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
        "seqdedupe_topics and on (no_such) seqdedupe_topics",
        "no:such == 0",
        'seqdedupe_topics{no_such=~".*"}',
    ],
)
def test_what_there_is_not_is_noticed(expression: str, page: Page) -> None:
    assert wrong_in(expression, page)


def test_the_name_of_the_job_stands_in_one_place_of_the_alerts() -> None:
    sidecars, services = yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]
    named = re.findall(r"job *=~? *\"([^\"]*)\"", ALERTS.read_text())
    assert named == [sidecars["job_name"]] != [services["job_name"]]


def test_refusals_have_series_of_what_a_sidecar_can_raise_and_of_nothing_else(page: Page) -> None:
    """As its source says: what a client, a command, a service or a job raises, no sidecar reports."""
    rooms = ("core", "format", "log", "store", "topic", "transfer", "backup")
    files = [path for room in rooms for path in (ROOT / "seqdedupe" / room).rglob("*.py")]
    files += (ROOT / "broker_sidecar").rglob("*.py")
    files += {*(ROOT / "seqdedupe").glob("*.py")} - {ROOT / "seqdedupe" / name for name in OF_OTHERS}
    said: set[str] = set()
    for path in files:
        if path != ROOT / "broker_sidecar" / "rpc.py":
            said |= set(re.findall(r'"([A-Z][A-Z_]+)"', path.read_text()))
    rpc = (ROOT / "broker_sidecar" / "rpc.py").read_text()
    said |= set(re.findall(r'error\(\s*"([A-Z][A-Z_]+)"', rpc))
    assert REASONS.keys() - said == NOT_OF_SIDECARS
    assert page.labels("seqdedupe_refusals_total", "reason") == REASONS.keys() - NOT_OF_SIDECARS


def test_every_metric_of_ours_is_in_the_dashboard(page: Page) -> None:
    shown = " ".join(PANELS)
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in page.names if name.startswith("seqdedupe_")}
    assert {name for name in families if name not in shown} == set()


def test_the_page_of_metrics_is_about_these(page: Page) -> None:
    rows = rows_of(METRICS)
    text = METRICS.read_text()
    found = {}
    histograms = set()
    of_topics = set()
    for family in page.families:
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert family.type == "counter" or not name.endswith("_total"), name
        if family.type == "histogram":
            histograms.add(name)
        if name.startswith(("process_", "grpc_server_")):  # Well known: the page names them and their labels in text.
            assert all(f"`{word}`" in text for word in (name, *labels)), name
            continue
        written = ", ".join(f"`{label}`" for label in sorted(labels))
        found[name] = [*([written] if labels and labels != {"topic"} else []), family.documentation]
        if labels == {"topic"}:
            of_topics.add(name)
    assert rows == found
    [of_topics_text] = re.findall(r"^These metrics have the label `topic`:\n(.*?)^These metrics", text, re.S | re.M)
    assert set(re.findall(r"^\| `(\w+)`", of_topics_text, re.MULTILINE)) == of_topics
    [listed] = re.findall(r"Histograms are (.*?)\. All other metrics are", text, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == histograms


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


def test_the_reasons_in_the_runbook_are_reasons() -> None:
    """All others have their cause and cure in `docs/reference/errors.md` alone, where the runbook sends the reader."""
    told, _, others = RUNBOOK.read_text().partition("### What clients settle")
    rows = rows_of(RUNBOOK)
    named = re.findall(r"`([A-Z][A-Z_]+)`", others)
    assert len(named) == len(set(named))
    assert rows.keys() | set(named) <= REASONS.keys()
    assert "(../reference/errors.md)" in others
    assert not rows.keys() & set(named)
    assert "## Reasons" in told
    for reason, cells in rows.items():
        assert len(cells) == 2, reason
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


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here (Debian's package prometheus)")
def test_alerts_fire_when_they_are_to(tmp_path: Path) -> None:
    """And only then: the file has the silence of each, too. A rule that is broken is noticed."""
    tests = tmp_path / ALERTS_TEST.name
    shutil.copy(ALERTS_TEST, tests)
    command = ["promtool", "test", "rules", str(tests)]
    for breaks, works in ((("< 7 * 86400", "< 0"), False), (("absent(", "("), False), (("", ""), True)):
        (tmp_path / ALERTS.name).write_text(ALERTS.read_text().replace(*breaks))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is works, done.stdout + done.stderr
