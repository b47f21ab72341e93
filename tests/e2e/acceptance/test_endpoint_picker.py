"""The gauges by which an endpoint picker of the Gateway API Inference Extension chooses a replica."""

from __future__ import annotations

import threading
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.acceptance import generate

# As `engineConfigs` of the picker names them for this server.
WAITING, RUNNING, USAGE, CACHE = (
    "tgi_queue_size", "tgi_batch_current_size", "tgi_kv_cache_usage", "tgi_cache_config_info",
)  # fmt: skip


def scraped(client: httpx.Client) -> dict[str, float]:
    """Value of each gauge, as the picker reads them: the only sample of a family, and two labels of the last one."""
    families = {one.name: one for one in text_string_to_metric_families(client.get("/metrics").text)}
    assert {families[name].type for name in (WAITING, RUNNING, USAGE)} == {"gauge"}
    values = {}
    for name in (WAITING, RUNNING, USAGE):
        (sample,) = families[name].samples
        assert sample.labels == {}
        values[name] = sample.value
    (sample,) = families[CACHE].samples
    values["block_size"] = int(sample.labels["block_size"])
    values["num_gpu_blocks"] = int(sample.labels["num_gpu_blocks"])
    return values


@pytest.mark.long
def test_idle_and_busy(client: httpx.Client) -> None:
    idle = scraped(client)
    assert (idle[WAITING], idle[RUNNING], idle[USAGE]) == (0, 0, 0)
    assert idle["block_size"] * idle["num_gpu_blocks"] > 1000
    asking = threading.Thread(target=generate, args=(client,), kwargs={"max_new_tokens": 1500, "ignore_eos": True})
    asking.start()
    busy = idle
    while asking.is_alive() and not busy[RUNNING]:
        busy = scraped(client)
        time.sleep(0.01)
    asking.join()
    assert busy[RUNNING] == 1 and busy[WAITING] == 0
    assert 0 < busy[USAGE] <= 1
