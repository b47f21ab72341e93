"""lm_eval on the served SmolLM2-135M, by completions and by chats, against its own backend on the same weights."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import requests
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tests"))
from general_knowledge import QUESTIONS as KNOWLEDGE  # noqa: E402
from support.published_models import SMOLLM2, dequantized  # noqa: E402
from support.running_server import RunningServer, running_server  # noqa: E402

# The folder is made, a server started, and lm_eval's own backend loaded.
pytestmark = pytest.mark.timeout(500)

CHOICES = (
    ("The capital of France is", "Paris", "London", "a kind of cheese"),
    ("Water freezes at", "zero degrees", "ninety degrees", "noon"),
    ("The opposite of hot is", "cold", "warm", "Tuesday"),
    ("A dog is an", "animal", "island", "integer"),
    ("In Python a function begins with", "def", "fun", "a long apology"),
    ("The sun rises in the", "east", "west", "refrigerator"),
    ("Two plus two is", "four", "five", "22"),
    ("La capitale de l'Italie est", "Rome", "Paris", "naïve café"),
    ("Shakespeare wrote", "Hamlet", "Faust", "北京"),
    ("Monday, Tuesday,", "Wednesday", "Friday", "\tx"),
)
QUESTIONS = (
    "The three primary colours are",
    "1, 2, 3, 5, 8,",
    "Photosynthesis is the process by which",
    "My favourite animal is the",
)
CHATS = ("Name three fruits.", "What is the capital of France?", "Say hello in Spanish.")
PASSAGES = ("The Earth goes around the Sun once a year.", "import numpy as np\n\nx = np.zeros(3)\nprint(x)\n")
PROMPT = "Question: {{question}}\nAnswer:"
ACCURACIES = ("acc,none", "acc_norm,none")
NEW = 16
# Of the natural logarithm of a probability.
NEAR = 1e-3


@pytest.fixture(scope="module")
def folder() -> Path:
    return dequantized(SMOLLM2)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    options = ("--dtype", "float32", "--kv-cache-memory", str(512 * 2**20), "--enable-prefill-logprobs")
    with running_server(folder, *options, command=(os.environ["TERCET_PYTHON"], "-m", "launcher")) as running:
        yield running


@pytest.fixture(scope="module")
def own(folder: Path) -> Any:
    """lm_eval's backend that computes with transformers."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)


def task(folder: Path, name: str, rows: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """A task of lm_eval whose documents lie in a file."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_files": {"test": str(file)}, "cache_dir": str(folder / "cache")}
    return {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **settings}


def choices(folder: Path) -> dict[str, Any]:
    rows = [{"question": question, "choices": options} for question, *options in CHOICES]
    settings = {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": 0}
    return task(folder, "choices", rows, output_type="multiple_choice", **settings)


def passages(folder: Path) -> dict[str, Any]:
    rows = [{"text": text} for text in PASSAGES]
    metrics = [{"metric": "word_perplexity"}]
    settings = {"doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": metrics}
    return task(folder, "passages", rows, output_type="loglikelihood_rolling", **settings)


def questions(folder: Path, name: str, texts: tuple[str, ...]) -> dict[str, Any]:
    rows = [{"question": text, "answer": "none"} for text in texts]
    generation = {"until": ["\n\n"], "max_gen_toks": NEW, "do_sample": False, "temperature": 0.0}
    settings = {"doc_to_text": "{{question}}", "doc_to_target": "{{answer}}", "generation_kwargs": generation}
    return task(folder, name, rows, output_type="generate_until", **settings)


def knowledge(folder: Path) -> dict[str, Any]:
    rows = [{"question": question, "choices": options} for question, *options in KNOWLEDGE]
    settings = {"doc_to_text": PROMPT, "doc_to_choice": "{{choices}}", "doc_to_target": 0}
    settings["metric_list"] = [{"metric": name.partition(",")[0], "aggregation": "mean"} for name in ACCURACIES]
    return task(folder, "knowledge", rows, output_type="multiple_choice", **settings)


def evaluated(model: Any, *tasks: dict[str, Any], is_chat: bool = False, **arguments: Any) -> dict[str, Any]:
    # Without the thousands of tasks that lm_eval brings: each of their files would be read.
    only_these = TaskManager(include_defaults=False)
    made = lm_eval.simple_evaluate(
        model=model,
        tasks=list(tasks),
        task_manager=only_these,
        bootstrap_iters=0,
        apply_chat_template=is_chat,
        **arguments,
    )
    assert made is not None
    return made


def answers(model: Any, *tasks: dict[str, Any], **arguments: Any) -> dict[str, list[Any]]:
    """What the model answered to each document of each task."""
    made = evaluated(model, *tasks, **arguments)
    samples = {name: sorted(rows, key=lambda row: row["doc_id"]) for name, rows in made["samples"].items()}
    return {name: [answer for row in rows for answer in row["filtered_resps"]] for name, rows in samples.items()}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tasks")
    return [choices(folder), passages(folder), questions(folder, "questions", QUESTIONS)]


@pytest.fixture(scope="module")
def wanted(own: Any, tasks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return answers(own, *tasks)


@pytest.mark.parametrize("tokenized", [True, False], ids=["ids", "texts"])
def test_completions(
    server: RunningServer, tasks: list[dict[str, Any]], wanted: dict[str, list[Any]], folder: Path, tokenized: bool
) -> None:
    """Likelihoods of choices and of whole passages, and generated texts, whoever turns texts into ids."""
    served: dict[str, Any] = {
        "base_url": f"{server.url}/v1/completions", "model": "tercet", "tokenizer": str(folder),
        "tokenized_requests": tokenized, "num_concurrent": 4, "max_retries": 1,
    }  # fmt: skip
    found = answers("local-completions", *tasks, model_args=served, batch_size=4 if tokenized else 1)
    assert [len(wanted[name]) for name in ("choices", "passages", "questions")] == [30, 2, 4]
    for (logprob, is_greedy), (right, is_best) in zip(found["choices"], wanted["choices"], strict=True):
        assert logprob == pytest.approx(right, abs=NEAR) and is_greedy == is_best
    assert {is_best for _, is_best in wanted["choices"]} == {True, False}
    assert found["passages"] == pytest.approx(wanted["passages"], abs=NEAR * NEW)
    assert found["questions"] == wanted["questions"]


def test_chats(server: RunningServer, own: Any, tmp_path: Path) -> None:
    chats = questions(tmp_path, "chats", CHATS)
    served = {"base_url": f"{server.url}/v1/chat/completions", "model": "tercet", "num_concurrent": 2, "max_retries": 1}
    found = answers("local-chat-completions", chats, model_args=served, is_chat=True)
    assert found == answers(own, chats, is_chat=True)
    assert all(found["chats"])


def test_accuracy(server: RunningServer, own: Any, folder: Path, tmp_path: Path) -> None:
    """Of forty questions, as lm_eval has it with its own backend."""
    asked = knowledge(tmp_path)
    wanted = evaluated(own, asked)["results"]["knowledge"]
    served = {"base_url": f"{server.url}/v1/completions", "model": "tercet", "tokenizer": str(folder)}
    served["num_concurrent"] = 3
    found = evaluated("local-completions", asked, model_args=served, batch_size=4)["results"]["knowledge"]
    assert {name: found[name] for name in ACCURACIES} == {name: wanted[name] for name in ACCURACIES}
    assert wanted[ACCURACIES[0]] > 0.4  # of four choices: it has understood the questions


@pytest.mark.parametrize("is_ids", [False, True], ids=["texts", "ids"])
def test_scores_of_no_new_token(server: RunningServer, own: Any, folder: Path, is_ids: bool) -> None:
    """`max_tokens: 0` with `echo`: the prompt and its logprobs alone."""
    pairs = [(f"Question: {question}\nAnswer:", f" {right}") for question, right, *_ in KNOWLEDGE[::10]]
    wanted = own.loglikelihood([Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)])
    contexts = [own.tok_encode(context) for context, _ in pairs]
    wholes = [own.tok_encode(context + right) for context, right in pairs]
    prompts = wholes if is_ids else ["".join(pair) for pair in pairs]
    body = {"model": "tercet", "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    answer = requests.post(f"{server.url}/v1/completions", json=body, timeout=100)
    assert answer.status_code == 200, answer.text
    usage, choices = answer.json()["usage"], answer.json()["choices"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(map(len, wholes)), 0)
    for choice, pair, context, whole, (right, is_best) in zip(choices, pairs, contexts, wholes, wanted, strict=True):
        logprobs = choice["logprobs"]
        assert choice["text"] == "".join(pair) and choice["finish_reason"] == "length"
        assert len(logprobs["token_logprobs"]) == len(whole) and logprobs["token_logprobs"][0] is None
        scored = list(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[len(context) :]
        assert sum(logprob for logprob, _ in scored) == pytest.approx(right, abs=NEAR)
        assert all(logprob == max(top.values()) for logprob, top in scored) == is_best
