"""The bill of materials of a wheel (CycloneDX): what a sidecar is run with, as `requirements.lock` beside this pins it.

It says the same however often it is made: it has no serial number and no time. PEP 770 has its place.
"""

import json
import re
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

LOCK = "deploy/requirements.lock"
PLACE = "sboms/seqdedupe.cdx.json"
"""In a wheel's `.dist-info`."""

_PIN = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>[\w.+!-]+)(?: ; (?P<marker>.+?))? \\?$")
_VIA = re.compile(r"^ +# via (?P<via>.+)$")


def bill(project_file: Path, lock: Path) -> str:
    """The bill, as JSON, of the project with these pins, which say what wants each (`# via`)."""
    project = tomllib.loads(project_file.read_text())["project"]
    root = {
        "type": "application",
        "bom-ref": _url(project["name"], project["version"]),
        "name": project["name"],
        "version": project["version"],
        "licenses": [{"license": {"id": project["license"]}}],
        "purl": _url(project["name"], project["version"]),
    }
    components: list[dict[str, Any]] = []
    named: defaultdict[str, list[str]] = defaultdict(list, {project["name"]: [root["bom-ref"]]})
    wanted_by: dict[str, list[str]] = {}
    for line in lock.read_text().splitlines():
        if pin := _PIN.match(line):
            url = _url(pin["name"], pin["version"])
            component = {"type": "library", "bom-ref": url, "name": pin["name"], "version": pin["version"], "purl": url}
            if pin["marker"]:
                component["properties"] = [{"name": "seqdedupe:only-if", "value": pin["marker"]}]
            components.append(component)
            named[pin["name"]].append(url)
        elif via := _VIA.match(line):
            wanted_by[components[-1]["bom-ref"]] = [word.split(" ")[0] for word in via["via"].split(", ")]
    wants: dict[str, list[str]] = {one["bom-ref"]: [] for one in (root, *components)}
    for url, names in wanted_by.items():
        for name in names:
            for wanting in named.get(name, ()):
                wants[wanting].append(url)
    made = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": components,
        "dependencies": [{"ref": url, "dependsOn": sorted(wanted)} for url, wanted in sorted(wants.items())],
    }
    return json.dumps(made, indent=1) + "\n"


def _url(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"
