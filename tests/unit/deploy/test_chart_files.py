"""The chart as far as it can be judged without Helm; `make check-deploy` renders it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "tercet"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())


def test_the_defaults_follow_the_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)


def leaves(schema: dict[str, Any], path: str = "") -> set[str]:
    found = set()
    for name, part in schema.get("properties", {}).items():
        inner = leaves(part, f"{path}{name}.")
        found |= inner or {f"{path}{name}"}
    return found


def test_every_value_has_a_default_and_a_line_in_the_readme() -> None:
    readme = (CHART / "README.md").read_text()
    for path in leaves(SCHEMA) - {"resources.claims", "global"}:
        value = VALUES
        for name in path.split("."):
            assert name in value, f"{path} has no default"
            value = value[name]
        assert re.search(rf"`{re.escape(path)}`", readme), f"{path} is not in the chart's README"


def test_templates_ask_for_values_that_exist() -> None:
    known = leaves(SCHEMA)
    for template in (CHART / "templates").iterdir():
        for path in re.findall(r"\.Values\.([A-Za-z.]+)", template.read_text()):
            assert any(path == leaf or leaf.startswith(f"{path}.") for leaf in known), f"{template.name}: {path}"
    everything = "".join(template.read_text() for template in (CHART / "templates").iterdir())
    used = set(re.findall(r"(?:\.Values|\$scaling)\.([A-Za-z.]+)", everything))
    for path in known - {"global", "resources.requests", "resources.limits", "resources.claims"}:
        assert path in used or path.removeprefix("autoscaling.") in used, f"{path} changes nothing"


def test_the_app_version_is_the_projects() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    pyproject = (CHART.parents[2] / "pyproject.toml").read_text()
    assert f'version = "{chart["appVersion"]}"' in pyproject


@pytest.mark.parametrize("values", [{"gpu": 1}, {"image": {"tag": "latest", "repository": "x"}}, {"replicas": "two"}])
def test_the_schema_refuses(values: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(VALUES | values, SCHEMA)
