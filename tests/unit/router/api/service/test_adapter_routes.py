"""Adapters that come while the server runs: the two routes, and what requests get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from router_fakes import INFO, Router, message_of
from support.fake_adapter_shards import FakeAdapterShards

from router.config import RouterConfig
from router.errors import StartupError
from router.lora.folders import register_folders
from router.lora.registry import AdapterRegistry
from router.metrics import Metrics
from wire.lora.merged import ADAPTER_CONFIG

MakeRouter = Callable[..., Router]
KEY = {"authorization": "Bearer secret"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("poems", "prose", "not-one"):
        (tmp_path / "root" / name).mkdir(parents=True)
    for name in ("poems", "prose"):
        (tmp_path / "root" / name / "adapter_config.json").write_text("{}")
    (tmp_path / "outside").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "loop").symlink_to("loop")
    return tmp_path / "root"


def router_of(make_router: MakeRouter, root: Path, shards: FakeAdapterShards) -> Router:
    config = RouterConfig(tokenizer_name="some/model", api_key="secret", lora_root=str(root))
    registry = AdapterRegistry(["given"], Metrics(), shards, most_bytes=100)
    info = dataclasses.replace(INFO, adapters=("given",))
    return make_router(config=config, adapters=registry, info=info)


async def test_load_ask_and_unload(make_router: MakeRouter, root: Path) -> None:
    shards = FakeAdapterShards()
    router = router_of(make_router, root, shards)
    answer = await router.post(LOAD, {"lora_name": "verse", "lora_path": "poems"}, **KEY)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'verse' added successfully.")
    cards = (await router.request("GET", "/v1/models", headers=KEY)).json()["data"]
    assert [card["id"] for card in cards] == ["some/model", "given", "verse"] and cards[2]["parent"] == "some/model"
    asked = {"inputs": "Hi", "parameters": {"adapter_id": "verse", "max_new_tokens": 2}}
    assert (await router.post("/generate", asked, **KEY)).status_code == 200
    assert (router.scheduler.last.adapter, router.scheduler.last.namespace) == (1, "verse@1")
    assert shards.loaded == {1: "poems"}
    chat = {"model": "verse", "messages": [{"role": "user", "content": "Hi"}]}
    assert (await router.post("/v1/chat/completions", chat, **KEY)).json()["model"] == "verse"
    assert router.scheduler.last.adapter == 1
    taken = await router.post(LOAD, {"lora_name": "verse", "lora_path": "prose"}, **KEY)
    assert taken.status_code == 400 and "has already been loaded" in message_of(taken)
    body = {"lora_name": "verse", "lora_path": "prose", "load_inplace": True}
    assert (await router.post(LOAD, body, **KEY)).status_code == 200
    assert (await router.post("/generate", asked, **KEY)).status_code == 200
    assert router.scheduler.last.adapter == 2 and shards.loaded == {2: "prose"}
    answer = await router.post(UNLOAD, {"lora_name": "verse"}, **KEY)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'verse' removed successfully.")
    assert (await router.post("/generate", asked, **KEY)).status_code == 422
    await router.inference.adapters.close()
    assert not shards.loaded


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        (LOAD, {"lora_name": "a"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (LOAD, {"lora_name": "some/model", "lora_path": "poems"}, 400, "is a name of the base model"),
        (LOAD, {"lora_name": "tgi", "lora_path": "poems"}, 400, "is a name of the base model"),
        (LOAD, {"lora_name": "../x", "lora_path": "poems"}, 400, "letters, digits and"),
        (LOAD, {"lora_name": "given", "lora_path": "poems", "load_inplace": True}, 400, "has already been loaded"),
        (LOAD, {"lora_name": "a", "lora_path": "../outside"}, 400, "leads out of the server's folder"),
        (LOAD, {"lora_name": "a", "lora_path": "/etc"}, 400, "leads out of the server's folder"),
        (LOAD, {"lora_name": "a", "lora_path": "link"}, 400, "leads out of the server's folder"),
        (LOAD, {"lora_name": "a", "lora_path": "po\0ems"}, 400, "is not a path"),
        (LOAD, {"lora_name": "a", "lora_path": "loop"}, 404, "There is no folder loop"),
        (LOAD, {"lora_name": "a", "lora_path": "nothing"}, 404, "There is no folder nothing"),
        (LOAD, {"lora_name": "a", "lora_path": "prose"}, 400, "LoRA adapter `prose`: it is damaged"),
        (UNLOAD, {}, 400, "'lora_name' needs to be provided"),
        (UNLOAD, {"lora_name": "x"}, 404, "The lora adapter 'x' cannot be found."),
        (UNLOAD, {"lora_name": "given"}, 400, "is of --lora-adapters, and stays"),
    ],
)
async def test_refusals(
    make_router: MakeRouter, root: Path, path: str, body: dict[str, object], status: int, text: str
) -> None:
    shards = FakeAdapterShards()
    shards.refused.add("prose")
    answer = await router_of(make_router, root, shards).post(path, body, **KEY)
    assert answer.status_code == status and text in message_of(answer), answer.text


async def test_shards_that_fail_to_load_an_adapter_are_counted(make_router: MakeRouter, root: Path) -> None:
    shards = FakeAdapterShards()
    router = router_of(make_router, root, shards)
    assert (await router.post(LOAD, {"lora_name": "verse", "lora_path": "poems"}, **KEY)).status_code == 200
    shards.is_down = True
    asked = {"inputs": "Hi", "parameters": {"adapter_id": "verse", "max_new_tokens": 2}}
    answer = await router.post("/generate", asked, **KEY)
    assert answer.status_code == 424 and "the model server cannot be reached" in message_of(answer)
    assert b'tgi_request_failure{err="generation"} 1' in router.metrics.render()
    router.assert_idle()
    shards.is_down = False
    assert (await router.post("/generate", asked, **KEY)).status_code == 200, "the next request tries again"


async def test_they_need_the_key_and_the_root(make_router: MakeRouter, root: Path) -> None:
    body = {"lora_name": "a", "lora_path": "poems"}
    assert (await router_of(make_router, root, FakeAdapterShards()).post(LOAD, body)).status_code == 401
    plain = make_router(config=RouterConfig(tokenizer_name="some/model", api_key="secret"))
    assert [(await plain.post(path, body, **KEY)).status_code for path in (LOAD, UNLOAD)] == [404, 404]


async def test_the_folders_of_the_root_are_registered_at_start(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    shards = FakeAdapterShards()
    registry = AdapterRegistry([], Metrics(), shards, most_bytes=100)
    assert await register_folders(registry, str(root), taken=["some/model"]) == 2
    assert sorted(registry.names) == ["poems", "prose"] and not shards.loaded
    shards.refused.add("prose")
    (root / "not a name").mkdir()
    (root / "not a name" / ADAPTER_CONFIG).touch()
    registry = AdapterRegistry([], Metrics(), shards, most_bytes=100)
    assert await register_folders(registry, str(root), taken=[]) == 1 and list(registry.names) == ["poems"]
    assert (
        await register_folders(AdapterRegistry([], Metrics(), shards, most_bytes=100), str(root), taken=["poems"]) == 0
    )
    warnings = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    for words in ("`prose`: it is damaged", "name `not a name`", "`poems` is a name of the base model"):
        assert any(words in warning for warning in warnings), warnings
    with pytest.raises(StartupError, match="cannot be read: No such file"):
        await register_folders(registry, str(root / "nothing"), taken=[])
