"""Several models by name or in a file: names, options of each, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config import LauncherConfig, ServeConfig
from launcher.errors import ArgumentValidation
from launcher.groups.models_file import ModelEntry, read_models
from launcher.pool_config import check_pool, seconds_of
from wire.cli.parsing import UsageError, parse


def models_of(*argv: str) -> list[ModelEntry]:
    return read_models(parse(ServeConfig, argv, {}))


def of_file(folder: Path, text: str, *argv: str) -> list[ModelEntry]:
    path = folder / "models.yaml"
    path.write_text(text)
    return models_of("--models", str(path), *argv)


def test_models_by_name() -> None:
    entries = models_of("demo", "org/name", "/models/x.gguf", "--keep-alive", "30m", "--max-batch-size", "7")
    assert [entry.name for entry in entries] == ["demo", "org/name", "x"]
    assert [entry.config.model_id for entry in entries] == ["demo", "org/name", "/models/x.gguf"]
    assert {(entry.keep_alive_s, entry.config.max_batch_size, entry.preload) for entry in entries} == {(1800, 7, False)}
    assert entries[0].config.served_model_name == ["demo"]


def test_a_file(tmp_path: Path) -> None:
    chat, embed = of_file(
        tmp_path,
        "defaults: {keep_alive: 30m, max_batch_size: 4}\n"
        "models:\n"
        "  chat: {model_id: demo, preload: true, keep_alive: -1, aliases: [gpt-4o], memory: 1.5}\n"
        "  org/embed: {model_id: BAAI/bge-m3, max-batch-size: 8, memory: 500MiB, adapters: [a, b]}\n",
        "--request-log", str(tmp_path / "log.jsonl"), "--api-key", "k", "--max-total-tokens", "2k",
    )  # fmt: skip
    assert (chat.names, chat.preload, chat.keep_alive_s, chat.memory) == (("chat", "gpt-4o"), True, None, 3 << 29)
    assert (embed.names, embed.keep_alive_s, embed.memory) == (("org/embed", "a", "b"), 1800, 500 << 20)
    assert (chat.config.max_batch_size, embed.config.max_batch_size) == (4, 8)
    assert chat.config.max_total_tokens == embed.config.max_total_tokens == 2048
    assert chat.config.served_model_name == ["chat", "gpt-4o"]
    assert chat.config.api_key == "k"
    assert [entry.config.request_log for entry in (chat, embed)] == [
        tmp_path / "log.chat.jsonl", tmp_path / "log.org--embed.jsonl"
    ]  # fmt: skip
    assert chat.config.models is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "takes"),
        ("models: []", "`models`"),
        ("models: {}", "names no model"),
        ("modles: {a: {model_id: demo}}", "`models:`"),
        ("models: {a: {revision: x}}", "no `model_id`"),
        ("models: {a: demo}", "model_id: demo"),
        ("models: {a: {model_id: demo, prelaod: true}}", "'preload'"),
        ("models: {a: {model_id: demo, port: 80}}", "'port' is of all models"),
        ("models: {a: {model_id: demo, api_key: x}}", "'api_key' is of all models"),
        ("models: {a: {model_id: demo, ssl_certfile: x}}", "'ssl_certfile' is of all models"),
        ("models: {a: {model_id: demo, keep_alive: soon}}", "keep_alive of a"),
        ("models: {a: {model_id: demo, memory: much}}", "`memory` of a"),
        ("models: {a: {model_id: demo, memory: 0}}", "must be > 0"),
        ("models: {a: {model_id: demo, max_batch_size: few}}", "line 1"),
        ("models: {a: {model_id: demo}, b: {model_id: demo, aliases: [a]}}", "two models have the name a"),
        ("models: {a: {model_id: demo, num_replica: 2}}", "several models have one replica each"),
        ("models: {a b: {model_id: demo}}", "no name of a model"),
        ("models: {a: {model_id: demo}, a: {model_id: demo}}", "given again"),
        ("models: [", "not YAML"),
    ],
)
def test_a_file_that_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ArgumentValidation) as caught:
        of_file(tmp_path, text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("demo", "demo"), "two models have the name demo"),
        (("demo", "org/x", "--revision", "main"), "`--revision` is of one model"),
        (("demo", "org/x", "--lora-adapters", "a=b"), "`--lora-adapters` is of one model"),
        (("demo", "org/x", "--num-replica", "2"), "several models have one replica each"),
        (("demo", "org/x", "--default-model", "y"), "`--default-model` y is none of demo, org/x"),
        (("demo", "--models", "x.yaml"), "exclude each other"),
        (("--models", "/nowhere.yaml"), "/nowhere.yaml"),
    ],
)
def test_a_command_line_that_is_refused(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(ArgumentValidation) as caught:
        models_of(*argv)
    assert words in str(caught.value)


def test_a_model_is_required() -> None:
    with pytest.raises(UsageError, match=r"<MODEL> .*, or --models FILE"):
        parse(ServeConfig, [], {})


def test_options_of_several_models_are_refused_for_one() -> None:
    with pytest.raises(ArgumentValidation, match="`--max-loaded-models` is for several models"):
        check_pool(LauncherConfig(max_loaded_models=2))
    check_pool(LauncherConfig(max_loaded_models=2), num_models=2)
    check_pool(LauncherConfig(max_loaded_models=2, keep_alive="5m"))
    with pytest.raises(ArgumentValidation, match="`--keep-alive` -2"):
        check_pool(LauncherConfig(keep_alive="-2"))


@pytest.mark.parametrize(
    ("text", "seconds"), [("-1", None), (None, None), ("0", 0), ("90", 90), ("1.5m", 90), ("2h", 7200), ("5s", 5)]
)
def test_times(text: str | None, seconds: float | None) -> None:
    assert seconds_of(text, "--keep-alive") == seconds
