"""Dashboard, alerts, scaling and scrape configuration: every query names a metric, label and value of the router."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.declared_metrics import DECLARED as ONE_MODEL
from router.front.metrics import FRONT
from router.metrics import Metrics

DECLARED = ONE_MODEL | FRONT

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
# What TGI's own dashboard asks for: it must find it here too.
OF_TGIS_DASHBOARD = [
    *(f"tgi_request_{name}" for name in (
        "count", "success", "failure", "duration", "queue_duration", "mean_time_per_token_duration",
        "generated_tokens", "input_length", "skipped_tokens",
    )),
    *(f"tgi_batch_{name}_duration" for name in ("inference", "forward", "decode", "filter", "concat")),
    "tgi_batch_concat", "tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens",
]  # fmt: skip


def queries() -> Iterator[tuple[str, str]]:
    """Where each query stands, and its text."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield f"${variable['name']}", variable["query"]["query"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]
    for path in sorted((DEPLOY / "helm").rglob("templates/*.yaml")):
        for line in path.read_text().splitlines():
            if "tgi_" in line:
                yield path.name, line


def family(series: str) -> tuple[str, str]:
    """The metric that a series belongs to, and its suffix."""
    if series in DECLARED:
        return series, ""
    name, _, suffix = series.rpartition("_")
    return name, suffix


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_metrics_labels_and_values_of_a_query_exist(where: str, query: str) -> None:
    found = re.findall(r"\b(tgi_\w+)(?:\{([^}]*)\})?", query)
    assert found or "up{" in query, "asks for nothing of ours"
    for series, selector in found:
        name, suffix = family(series)
        assert name in DECLARED, f"{series} is no metric"
        is_histogram = DECLARED[name].kind == "histogram"
        assert (suffix in ("bucket", "sum", "count")) == is_histogram, f"{series}: {DECLARED[name].kind}"
        for label, operator, value in re.findall(r'(\w+)(=~|=|!=|!~)"([^"]*)"', selector):
            if label in ("job", "instance", "model"):  # the front adds `model`
                continue
            declared = dict(DECLARED[name].labels)
            assert label in declared, f"{series} has no label {label}"
            values = value.split("|") if "~" in operator else [value]
            assert set(values) <= set(declared[label]), f"{series}: {label} is never {value}"
    for grouping in re.findall(r"\bby \(([^)]*)\)", query):
        for label in re.split(r",\s*", grouping):
            known = {"job", "instance", "le", "model"} | {
                one for name, _ in found for one, _ in DECLARED[family(name)[0]].labels
            }
            assert label in known, f"no series has the label {label}"


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_counters_are_read_as_rates_and_gauges_are_not(where: str, query: str) -> None:
    ranged = set(re.findall(r"(tgi_\w+)(?:\{[^}]*\})?\[", query))
    for series in re.findall(r"\btgi_\w+", query):
        kind = DECLARED[family(series)[0]].kind
        if where.startswith("$"):
            continue
        if kind == "gauge":
            assert not re.search(rf"\b(rate|increase|resets)\({series}\b", query)
        else:
            assert series in ranged, f"{series} only grows: its value says nothing"


def test_every_legend_names_a_label_that_the_query_keeps() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"\bby \([^)]*\b{label}\b", target["expr"]), (panel["title"], label)


def test_the_dashboard_has_what_grafana_asks_for() -> None:
    assert DASHBOARD["uid"] and DASHBOARD["title"] and DASHBOARD["schemaVersion"] >= 36 and "id" not in DASHBOARD
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "job", "instance", "model"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        assert {"id", "type", "title", "gridPos"} <= panel.keys()
        if panel["type"] == "row":
            continue
        assert panel["datasource"]["uid"] == "${datasource}", "works with any data source"
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references)
        assert {"defaults", "overrides"} <= panel["fieldConfig"].keys()


def test_panels_lie_beside_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken.get((x, y))}"
                taken[x, y] = panel["title"]


@functools.cache
def rendered() -> str:
    """The metrics of a server that nobody has asked yet."""
    return Metrics().render().decode()


def test_the_dashboard_covers_the_metrics() -> None:
    asked = {family(name)[0] for _, query in queries() for name in re.findall(r"\btgi_\w+", query)}
    left_out = {
        "tgi_lora_slot_loads",  # of GPUs only
        "tgi_request_inference_duration",  # the whole request less queue and validation
        "tgi_cache_config_info",  # for endpoint pickers
        "tgi_lora_requests_info",
        "tgi_batch_inference_success",  # an alert has it; the difference is on the dashboard as failures
    }
    assert set(DECLARED) - asked <= left_out


def test_every_alert_says_what_and_how_bad() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names) and all(name.startswith("Tercet") for name in names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]


@pytest.mark.parametrize(
    ("where", "query"), [*queries(), *(("TGI's own dashboard", name) for name in OF_TGIS_DASHBOARD)]
)
def test_what_a_query_asks_for_is_there_before_the_first_request(where: str, query: str) -> None:
    text = rendered()
    for series in re.findall(r"\btgi_\w+", query):
        if family(series)[0] in FRONT.keys() - ONE_MODEL.keys():  # with the names of the models
            continue
        name = f"{series}_bucket" if series in DECLARED and DECLARED[series].kind == "histogram" else series
        assert re.search(rf"^{name}[{{ ]", text, re.MULTILINE), f"{where}: {series}"
