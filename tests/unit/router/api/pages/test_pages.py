"""The static pages over HTTP: who gets them, with which headers. tests/clients/browser shows them to a browser."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from router_fakes import Router

import router.api.pages as pages
from router.config import RouterConfig

MakeRouter = Callable[..., Router]

STATIC = Path(pages.__file__).parent / "static"
FIREFOX = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
VENDOR = STATIC / "playground" / "vendor"
FILES = [path for path in STATIC.rglob("*.*") if path.suffix != ".ico" and path.parent != VENDOR]


@pytest.mark.parametrize("accept", [FIREFOX, "text/html", "TEXT/HTML", "text/html;q=0.5", "a/b, text/html; charset=x"])
async def test_a_browser_gets_the_page(router: Router, accept: str) -> None:
    router.scheduler.healthy = False  # the page says so itself
    for method in ("GET", "HEAD"):
        answer = await router.request(method, "/", headers={"accept": accept})
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
        assert "Accept" in answer.headers["vary"]


@pytest.mark.parametrize(
    "accept", ["*/*", "application/json", "", "text/*", "text/html;q=0", "text/htmlx, a;b=text/html"]
)
async def test_everybody_else_gets_tgis_answer(router: Router, accept: str) -> None:
    answer = await router.request("GET", "/", headers={"accept": accept})
    assert (answer.status_code, answer.content) == (200, b"")
    assert "Accept" in answer.headers["vary"]
    router.scheduler.healthy = False
    answer = await router.request("GET", "/", headers={"accept": accept})
    assert answer.status_code == 503 and answer.json()["error_type"] == "healthcheck"


async def test_without_the_playground_browsers_get_tgis_answer(make_router: MakeRouter) -> None:
    router = make_router(config=RouterConfig(no_playground=True))
    answer = await router.request("GET", "/", headers={"accept": FIREFOX})
    assert (answer.status_code, answer.content) == (200, b"")
    assert (await router.get("/playground/app.js")).status_code == 404
    for path in ("/docs", "/docs/docs.js", "/favicon.ico"):
        assert (await router.get(path)).status_code == 200


async def test_pages_allow_their_own_files_only(router: Router) -> None:
    for path in ("/", "/docs"):
        answer = await router.request("GET", path, headers={"accept": FIREFOX})
        policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["base-uri"] == policy["form-action"] == "'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    playground = await router.request("GET", "/", headers={"accept": FIREFOX})
    assert "require-trusted-types-for 'script'" in playground.headers["content-security-policy"]


async def test_every_file_that_a_page_names_is_served(router: Router) -> None:
    for path in ("/", "/docs"):
        page = (await router.request("GET", path, headers={"accept": FIREFOX})).text
        for address in re.findall(r'(?:src|href)="([^"#]+)"', page):
            assert not address.startswith(("/", "http")), f"{address}: a proxy may add a prefix"
            answer = await router.get(f"/{address}")
            assert answer.status_code == 200, address
            if address.endswith((".js", ".css")):
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert answer.headers["content-type"].startswith(("text/javascript", "text/css"))
                again = await router.request("GET", f"/{address}", headers={"if-none-match": answer.headers["etag"]})
                assert again.status_code == 304
    assert (await router.get("/favicon.ico")).content.startswith(b"\0\0\1\0")
    answer = await router.get("/docs/")
    assert (answer.status_code, answer.headers["location"]) == (307, "../docs")


@pytest.mark.parametrize(
    "path",
    ["/playground/nothing.js", "/playground/../pages.py", "/playground/%2e%2e/docs.html", "/docs/%2e%2e/__init__.py"],
)
async def test_nothing_else_is_served(router: Router, path: str) -> None:
    answer = await router.get(path)
    assert answer.status_code == 404 and answer.json()["error_type"] == "not_found"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_sources_need_no_exception_from_the_policy(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=\"", text), "inline script or style"
    assert not re.findall(r"https?://(?!\[)\w", text), "another address"
    assert len(text.splitlines()) <= 400


def test_libraries_are_the_published_files_with_their_licences() -> None:
    listed = json.loads((VENDOR / "vendor.json").read_text())
    for library in listed:
        published = (VENDOR / library["file"]).read_bytes().removesuffix(library.get("appended", "").encode())
        assert hashlib.sha256(published).hexdigest() == library["sha256"], library["file"]
        assert "opyright" in (VENDOR / library["licence_file"]).read_text()
        assert library["licence"] in ("MIT", "BSD-3-Clause")
    named = {library[key] for library in listed for key in ("file", "licence_file")}
    assert {path.name for path in VENDOR.iterdir()} == named | {"vendor.json"}


async def test_modules_import_only_what_is_served(router: Router) -> None:
    imported = re.compile(r'(?:from|import\()\s*"(\./[^"]+)"')
    for path in (STATIC / "playground").glob("*.js"):
        for name in imported.findall(path.read_text()):
            answer = await router.get(f"/playground/{name.removeprefix('./')}")
            assert answer.status_code == 200, f"{path.name} imports {name}"
            assert answer.headers["content-type"].startswith("text/javascript")


async def test_a_server_without_swagger_ui_still_starts(
    make_router: MakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.api.pages.pages.find_spec", lambda name: None)
    router = make_router()
    assert (await router.get("/docs")).status_code == 200
    assert (await router.get("/docs/swagger-ui.css")).status_code == 404
    assert "pip install fastapi-offline" in (await router.get("/docs/docs.js")).text
