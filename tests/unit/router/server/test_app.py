"""What surrounds every route: keys, CORS, request ids."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import Router

from router.config import RouterConfig

MakeRouter = Callable[..., Router]


async def test_the_api_key_guards_every_post(make_router: MakeRouter) -> None:
    router = make_router(config=RouterConfig(api_key="Sesame"))
    for path in (
        "/",
        "/generate",
        "/generate_stream",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/completions",
        "/nothing",
    ):
        for header in (
            {},
            {"authorization": "Bearer sesame"},
            {"authorization": "Sesame"},
            {"authorization": "Basic Sesame"},
        ):
            answer = await router.post(path, {"inputs": "x"}, **header)
            assert answer.status_code == 401, (path, header)
            assert answer.json()["error_type"] == "unauthorized"
    for scheme in ("Bearer", "bearer"):
        assert (await router.post("/generate", {"inputs": "x"}, authorization=f"{scheme} Sesame")).status_code == 200
    for path in ("/", "/health", "/ping", "/info", "/metrics", "/v1/models", "/docs"):
        assert (await router.get(path)).status_code == 200


async def test_no_route_that_takes_a_body_is_open(make_router: MakeRouter) -> None:
    config = RouterConfig(
        api_key="Sesame", kserve_api=True, aip_predict_route="/custom/predict", aip_health_route="/custom/health"
    )
    router = make_router(config=config)
    checked = 0
    routes = list(router.app.routes)
    for route in routes:
        if (included := getattr(route, "original_router", None)) is not None:
            routes.extend(included.routes)
        path = re.sub(r"{.*?}", "x", getattr(route, "path", ""))
        for method in getattr(route, "methods", None) or ():
            if method not in ("GET", "HEAD"):
                checked += 1
                answer = await router.request(method, path, json={"inputs": "x"})
                needs_key = method == "POST" or path.startswith(("/v1/responses/", "/v1/files", "/v1/batches"))
                assert answer.status_code == (401 if needs_key else 404), (method, path)
    assert checked > 10
    for path in ("/debug", "/debug/pprof", "/profile", "/start_profile", "/shutdown", "/v1/load_lora_adapter"):
        assert (await router.get(path)).status_code == 404
        assert (await router.post(path, {}, authorization="Bearer Sesame")).status_code == 404


async def test_the_key_is_compared_in_constant_time(make_router: MakeRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append((given, key))
        return given == key

    monkeypatch.setattr("router.server.authorization.hmac.compare_digest", compare)
    router = make_router(config=RouterConfig(api_key="Sesame"))
    for given in ("Bearer x", "Bearer Sesam", "Basic Sesame", "Bearer Sesame ", "Bearer  Sesame", ""):
        assert (await router.post("/generate", {"inputs": "x"}, authorization=given)).status_code == 401
    assert len(compared) == 6, "always, and whole"


SDK_HEADERS = (
    "authorization,content-type,x-api-key,anthropic-version,anthropic-beta,anthropic-dangerous-direct-browser-access,"
    "x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,x-stainless-retry-count,"
    "x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout,openai-organization,x-my-own"
)
"""What the JavaScript clients of OpenAI and Anthropic send from a page, and a header of the page's own."""


async def preflight(router: Router, origin: str, **headers: str) -> Any:
    asked = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": SDK_HEADERS,
    }
    return await router.request("OPTIONS", "/v1/chat/completions", headers=asked | headers)


async def test_cors(make_router: MakeRouter) -> None:
    answer = await preflight(make_router(), "http://a.example")
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
    allowed = answer.headers["access-control-allow-headers"].lower()
    assert all(name in allowed for name in SDK_HEADERS.split(","))
    router = make_router(config=RouterConfig(cors_allow_origin=("http://a.example",), api_key="k"))
    answer = await preflight(router, "http://a.example")
    assert answer.headers["access-control-allow-origin"] == "http://a.example"
    assert (await preflight(router, "http://b.example")).status_code == 400
    local = {"access-control-request-private-network": "true"}  # Chrome's, of a public page that asks a machine nearby
    answer = await preflight(router, "http://a.example", **local)
    assert answer.status_code == 200 and answer.headers["access-control-allow-private-network"] == "true"
    assert (await preflight(router, "http://b.example", **local)).status_code == 400
    answer = await router.post("/generate", {"inputs": "x"}, origin="http://a.example")
    assert answer.status_code == 401 and answer.headers["access-control-allow-origin"] == "http://a.example"


async def test_request_ids_come_back(router: Router) -> None:
    for path in ("/generate", "/generate_stream", "/nothing"):
        answer = await router.post(path, {"inputs": "x"}, x_request_id="abc-1")
        assert answer.headers["x-request-id"] == "abc-1"
    for bad in ("", "a b", "x" * 129):
        got = (await router.post("/generate", {"inputs": "x"}, x_request_id=bad)).headers["x-request-id"]
        assert got != bad and len(got) == 32
    ids = {(await router.get("/info")).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
