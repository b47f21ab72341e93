"""KServe's routes: answers, refusals, switched on and off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import Router, is_invalid, says

from router.config import RouterConfig

MakeRouter = Callable[..., Router]

INFER = "/v2/models/m/versions/1/infer"


def infer(*texts: bytes, **fields: Any) -> dict[str, Any]:
    inputs = [
        {"name": f"in{i}", "shape": [1, len(text)], "datatype": "BYTES", "data": list(text)}
        for i, text in enumerate(texts)
    ]
    return {"id": "7", "inputs": inputs, "outputs": [{"name": f"out{i}"} for i in range(len(texts))]} | fields


async def test_kserve(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says(f"ß{request.inputs}"), config=RouterConfig(kserve_api=True))
    assert (await router.get("/v2")).json() == {
        "name": "text-generation-inference",
        "version": "3.3.7",
        "extensions": ["health", "models", "metrics"],
    }
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/some/model/versions/3/ready"):
        assert (await router.get(path)).json() == {"live": True}
    for name in ("m", "some/model"):
        got = (await router.get(f"/v2/models/{name}/versions/3")).json()
        assert got == {"name": name, "version": "3", "extensions": ["infer", "ready"]}
    answer = await router.post(INFER, infer("é".encode(), b"b", parameters={"max_new_tokens": 3, "seed": 2}))
    assert answer.status_code == 200, answer.text
    data = [list("ßé".encode()), list("ßb".encode())]
    assert answer.json() == {
        "id": "7",
        "outputs": [
            {"name": f"out{i}", "shape": [1, len(one)], "datatype": "BYTES", "data": one} for i, one in enumerate(data)
        ],
    }
    assert router.scheduler.last.stopping.max_new_tokens == 3 and not router.scheduler.last.sampling.do_sample
    await router.post(INFER, infer(b"a"))
    assert router.scheduler.last.sampling.do_sample, "without parameters, as /generate"
    document = (await router.get("/api-doc/openapi.json")).json()
    assert "/v2" in document["paths"] and "InferBody" in document["components"]["schemas"]
    router.assert_idle()


@pytest.mark.parametrize(
    ("body", "error_type"),
    [
        (infer(b"a", outputs=[]), "length mismatch"),
        (infer(b"\xff"), "utf8"),
        (infer(b""), "validation"),
        (infer(b"a") | {"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": [256]}]}, "validation"),
        (infer(b"a") | {"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}, "validation"),
        ({"id": "7"}, "validation"),
        (infer(b"a", parameters={"temperature": 0.0}), "validation"),
        (infer(*[b"a"] * 5), "batch size exceeded"),
    ],
)
async def test_kserve_refusals(make_router: MakeRouter, body: Any, error_type: str) -> None:
    router = make_router(config=RouterConfig(kserve_api=True))
    answer = await router.post(INFER, body)
    assert is_invalid(answer) and answer.json()["error_type"] == error_type, answer.text
    router.assert_idle()


async def test_kserve_is_off_unless_asked_for_and_asks_for_the_key(make_router: MakeRouter) -> None:
    router = make_router()
    assert (await router.get("/v2")).status_code == 404 and (await router.post(INFER, infer(b"a"))).status_code == 404
    router = make_router(config=RouterConfig(kserve_api=True, api_key="k"))
    assert (await router.get("/v2")).status_code == 200
    assert (await router.post(INFER, infer(b"a"))).status_code == 401
    assert (await router.post(INFER, infer(b"a"), authorization="Bearer k")).status_code == 200
