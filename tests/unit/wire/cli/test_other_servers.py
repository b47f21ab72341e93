"""A word of another server is refused with the word that stands for it here."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.chat.config import ChatConfig
from launcher.config import LauncherConfig, ServeConfig
from launcher.estimate.config import EstimateConfig
from wire.cli.options import options_of
from wire.cli.other_servers.words import SERVERS, command_hint, option_hint, words_of
from wire.cli.parsing import UsageError, parse

OURS = {opt.flag for opt in options_of(LauncherConfig)}


def refusal(*argv: str, config: type = ServeConfig) -> str:
    with pytest.raises(UsageError) as caught:
        parse(config, argv, {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["--max-model-len", "8k"], "it is vLLM's: use --max-total-tokens"),
        (["--max-model-len=8k"], "it is vLLM's: use --max-total-tokens"),
        (["--tensor-parallel-size", "2"], "it is vLLM's: use --num-shard"),
        (["-tp", "2"], "it is vLLM's: use --num-shard"),
        (["--tp", "2"], "it is SGLang's: use --num-shard"),
        (["-ngl", "99"], "it is llama.cpp's and needs no option here (A model is on GPUs or on CPUs as a whole)"),
        (["-c", "4096"], "it is llama.cpp's: use --max-total-tokens"),
        (["-m", "x.gguf"], "it is llama.cpp's: use --model-id"),
        (["--threads", "8"], "it is llama.cpp's: set the variable OMP_NUM_THREADS"),
        (["--mmproj", "x.gguf"], "it is llama.cpp's and has no option here (Pictures need the safetensors"),
        (["--host", "::"], "it is vLLM's and llama.cpp's: use --hostname"),
    ],
)  # fmt: skip
def test_an_option(argv: list[str], hint: str) -> None:
    assert refusal("m", *argv).startswith(f"unexpected argument '{argv[0].partition('=')[0]}' found; {hint}")


def test_an_option_that_this_program_has_no_answer_to() -> None:
    """`estimate` has no --hostname."""
    assert "--hostname" not in refusal("m", "--host", "::", config=EstimateConfig)


def test_an_option_for_the_server_of_a_chat() -> None:
    message = refusal("demo", "--max-model-len", "4", config=ChatConfig)
    assert message.endswith("it is vLLM's: use --max-total-tokens, behind '--' with <SERVER_OPTIONS>")
    assert refusal("demo", "--num-shard", "2", config=ChatConfig).endswith("hand it on as one of <SERVER_OPTIONS>")


def test_an_option_of_ours_that_is_misspelt() -> None:
    assert refusal("m", "--num-shards", "2").endswith("found; a similar one exists: '--num-shard'")


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["--dtype", "half"], "; half is float16 here"),
        (["--dtype", "BF16"], "; BF16 is bfloat16 here"),
        (["--dtype", "auto"], "; leave --dtype out for auto"),
        (["--kv-cache-dtype", "fp8"], "; fp8 is fp8_e4m3fn here"),
        (["--dtype", "int3"], ", float32"),
    ],
)
def test_a_value(argv: list[str], hint: str) -> None:
    assert refusal("m", *argv).endswith(hint)


def test_a_name_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "launcher.yaml"
    path.write_text("max_model_len: 8192\n")
    message = refusal("m", "--config", str(path))
    assert message.endswith("unknown option 'max_model_len'; it is vLLM's: use --max-total-tokens")


@pytest.mark.parametrize("server", SERVERS)
def test_the_tables_hang_together(server: str) -> None:
    words = words_of(server)
    theirs = [row.word for row in words.options] + [alias for alias, _ in words.aliases]
    assert len(theirs) == len(set(theirs))
    assert {meant for _, meant in words.aliases} <= {row.word for row in words.options}
    assert all((row.ours == "–") <= (row.state in ("none", "always on")) for row in (*words.options, *words.variables))
    for flag, theirs_, ours in words.values:
        choices = next(opt.choices for opt in options_of(LauncherConfig) if opt.flag == flag)
        assert theirs_ not in choices and (not ours or ours in choices)


@pytest.mark.parametrize("server", SERVERS)
def test_each_word_has_its_hint(server: str) -> None:
    for row in words_of(server).options:
        if row.word not in OURS:
            hint = option_hint(row.word, OURS)
            assert words_of(server).title in hint and "`" not in hint, row


def test_a_command() -> None:
    assert command_hint("run") == "launcher chat MODEL, or launcher serve MODEL"
    assert command_hint("serve") is None
