"""Every query of the dashboard and of the alerts is PromQL, as Prometheus' own grammar has it."""

from __future__ import annotations

import json
from pathlib import Path

import promql_parser
import pytest
import yaml

VARIABLES = {"$__rate_interval": "1m", "$job": ".*", "$instance": ".*", "$model": ".*"}


def test_the_dashboard(root: Path) -> None:
    panels = json.loads((root / "deploy" / "grafana" / "dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    assert len(queries) > 50
    for query in queries:
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        assert "$" not in query, f"an unknown variable: {query}"
        promql_parser.parse(query)


def test_the_alerts(root: Path) -> None:
    groups = yaml.safe_load((root / "deploy" / "prometheus" / "rules.yml").read_text())["groups"]
    for rule in groups[0]["rules"]:
        promql_parser.parse(rule["expr"])


def test_a_broken_query_would_be_seen() -> None:
    with pytest.raises(ValueError):
        promql_parser.parse("sum by (rate(tgi_request_count[5m]))")
