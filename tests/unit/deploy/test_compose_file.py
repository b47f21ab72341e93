"""The compose files: what they mount exists, who scrapes whom, and that nothing runs with more rights than it needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def test_every_mount_is_a_file_here_or_a_volume() -> None:
    for service in SERVICES.values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).exists(), source
                assert mount.endswith(":ro"), f"{mount}: ours are not theirs to change"
            else:
                assert source in COMPOSE["volumes"], source


def test_images_have_versions() -> None:
    for name, service in SERVICES.items():
        assert re.search(r":(\$\{\w+:-)?[\w.-]+\}?$", service["image"]) and ":latest" not in service["image"], name


@pytest.mark.parametrize("name", SERVICES)
def test_no_rights_and_no_port_to_the_outside(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service and "network_mode" not in service
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_the_server_can_end_in_order() -> None:
    tercet = SERVICES["tercet"]
    assert tercet["read_only"] is True and tercet["shm_size"] == "1gb"
    graceful = 90  # the launcher's default
    assert int(tercet["stop_grace_period"].removesuffix("s")) >= graceful + 15
    assert tercet["environment"]["PORT"] == tercet["ports"][0].split(":")[-1]


def test_prometheus_scrapes_the_server_and_grafana_asks_prometheus() -> None:
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job["static_configs"][0]["targets"] for job in scrape["scrape_configs"]}
    assert jobs["tercet"] == [f"tercet:{SERVICES['tercet']['environment']['PORT']}"]
    mounted = {mount.split(":")[1] for mount in SERVICES["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in scrape["rule_files"]} <= mounted
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "tercet.yml").read_text())["providers"]
    dashboard = next(mount for mount in SERVICES["grafana"]["volumes"] if "dashboard.json" in mount)
    assert dashboard.split(":")[1].startswith(provider["options"]["path"])


def test_gpus_are_for_the_server_alone() -> None:
    gpu = yaml.safe_load((DEPLOY / "compose" / "gpu.yml").read_text())["services"]
    assert list(gpu) == ["tercet"]
    (device,) = gpu["tercet"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
    assert gpu["tercet"]["build"]["dockerfile"] == "docker/Dockerfile"
