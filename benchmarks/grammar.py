"""What a grammar costs its neighbours: `python -m benchmarks.grammar`.

Whole decode steps of one shard, in this process and without the wire, for a batch of 16 sampled requests: none, one and
all of them bound to a JSON schema, and one and all of them with a grammar that waits for the token that opens a tool
call (a sleeping one), which does not come. Two models: the demo model, and a tiny random llama with a vocabulary of
32 000 learnt from Python's standard library, whose forward is so short that the share of the masks is the largest there
is.

Times are CPU times of this process, which other work on the machine hardly changes; the engine runs on one thread here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from model_server.attention.choice import AttentionChoice
from model_server.device import enter, tune
from model_server.distributed.group import connect
from model_server.distributed.layout import Ranks
from model_server.distributed.placement import Placement
from model_server.engine.calls import DecodeCall, PrefillCall
from model_server.engine.engine import Engine, EngineOptions
from model_server.memory.kv_cache import KvCache
from model_server.models.load import load_runner
from model_server.models.model import describe
from model_server.rpc.convert import requests_from
from model_server.sampling.sampler import Sampler
from model_server.text.tokenizer import Tokenizer
from model_server.weights.checkpoint import examine
from wire import demo_model
from wire.v3 import generate_pb2 as pb

CPU = torch.device("cpu")
BATCH = 16
STEPS = 60
PROMPT = "Tell me a story about the people of the town and what they did"
_TEXT = {"type": "string", "minLength": 5}
_PERSON = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "born": {"type": "string", "format": "date"},
        "height": {"type": "number", "minimum": 0, "maximum": 3},
        "trade": {"enum": ["baker", "smith", "teacher", "farmer"]},
        "about": _TEXT,
    },
    "required": ["name", "born", "height", "trade", "about"],
}
SCHEMA = json.dumps({"type": "array", "items": _PERSON, "minItems": 40})


@dataclass(frozen=True)
class Case:
    """How many of the requests have a grammar, and whether it sleeps."""

    number: int
    is_asleep: bool = False

    def __str__(self) -> str:
        return f"{self.number}{' asleep' if self.is_asleep else ''}"


CASES = (Case(0), Case(1), Case(BATCH), Case(1, is_asleep=True), Case(BATCH, is_asleep=True))


def sleeping(trigger: int) -> str:
    """Any text, and behind the token `trigger` the arguments of a call."""
    frame = f"start: any* call?\nany: <[^{trigger}]>\ncall: <[{trigger}]> @tool_0\n"
    grammars = [{"name": "frame", "lark_grammar": frame}, {"name": "tool_0", "json_schema": _PERSON}]
    return json.dumps({"trigger": trigger, "grammars": grammars})


def write_wide_model(path: Path, vocab_size: int = 32_000) -> None:
    """A random llama of four small layers, and a byte-level tokenizer of `vocab_size` entries."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(_library_texts(), trainer)
    backend.save(str(path / "tokenizer.json"))
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)


def _library_texts() -> Iterator[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for file in random.Random(0).sample(files, min(len(files), 120)):
        yield file.read_text(errors="ignore")


def load(model_dir: Path) -> Engine:
    """The engine as a shard would run it here."""
    checkpoint = examine(model_dir)
    tune(CPU, 1, checkpoint.file_bytes)
    torch.set_num_threads(1)
    group = connect(0, 1, CPU, address="localhost", port=0)
    runner = load_runner(
        describe(checkpoint), Placement(CPU, torch.float32, Ranks.of(group)), AttentionChoice(None, CPU)
    )
    block_size = runner.traits.block_size
    options = EngineOptions(device=CPU, block_size=block_size, prompt_logprobs_allowed=False)
    engine = Engine(runner, Tokenizer.load(model_dir), Sampler(runner.vocab_size, CPU), options)
    blocks = 1 + BATCH * -(-(len(PROMPT) + STEPS + 1) // block_size)
    engine.set_cache(KvCache(runner.kv_shapes, blocks, block_size, torch.float32, CPU))
    return engine


def batch_of(case: Case, prompt: list[int], block_size: int, vocab_size: int) -> pb.Batch:
    """16 requests of which the first ones have a grammar."""
    num_blocks = -(-(len(PROMPT) + STEPS + 1) // block_size)
    requests = []
    for number in range(BATCH):
        blocks = np.arange(1 + number * num_blocks, 1 + (number + 1) * num_blocks)
        parameters = pb.NextTokenChooserParameters(
            temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0, do_sample=True, seed=number
        )
        if number < case.number and case.is_asleep:
            parameters.grammar, parameters.grammar_type = sleeping(vocab_size - 1), pb.GRAMMAR_TYPE_LARK
        elif number < case.number:
            parameters.grammar, parameters.grammar_type = SCHEMA, pb.GRAMMAR_TYPE_JSON
        stopping = pb.StoppingCriteriaParameters(max_new_tokens=STEPS, ignore_eos_token=True)
        requests.append(
            pb.Request(
                id=number, input_ids=prompt, parameters=parameters, stopping_parameters=stopping,
                blocks=blocks.tolist(),
            )
        )  # fmt: skip
    return pb.Batch(id=0, requests=requests)


def decode_times(engine: Engine, case: Case) -> list[float]:
    """CPU seconds of each decode step of a batch that runs to its length limit."""
    prompt = engine.tokenizer.encode(PROMPT, truncate=len(PROMPT), add_special_tokens=True)
    requests = requests_from(batch_of(case, prompt, engine.options.block_size, engine.runner.vocab_size))
    engine.compile_grammars(requests)
    result = engine.submit_prefill(PrefillCall(batch_id=0, sequence=0), requests)()
    times = []
    while result.batch is not None:
        started = time.process_time()
        result = engine.submit_decode(DecodeCall(batch_ids=(0,), sequence=1))()
        times.append(time.process_time() - started)
        assert len(result.generations) == BATCH and not any(g.error for g in result.generations)
    return times[:-1]


def measure(name: str, model_dir: Path, repeats: int) -> dict[str, float]:
    """Milliseconds of a step by number of grammars, measured in turn: what slows the machine meets them all."""
    engine = load(model_dir)
    with torch.inference_mode():
        enter(CPU)
        for case in CASES:
            decode_times(engine, case)
        times: dict[Case, list[float]] = {case: [] for case in CASES}  # of each run, the median of its steps
        for _ in range(repeats):
            for case, all_times in times.items():
                all_times.append(statistics.median(decode_times(engine, case)))
    print(f"{name}: vocabulary {engine.runner.vocab_size}, batch of {BATCH}")
    for case, all_times in times.items():
        # Each run is compared with the one without a grammar of its own round: what slows the machine meets both.
        more = statistics.median(one / base for one, base in zip(all_times, times[CASES[0]], strict=True)) - 1
        print(
            f"  {case!s:>9} with a grammar: {1e3 * statistics.median(all_times):7.3f} ms a step, {100 * more:+6.1f} %"
        )
    return {str(case): round(1e3 * statistics.median(all_times), 3) for case, all_times in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the medians to this file too")
    arguments = parser.parse_args()
    repeats = arguments.repeats
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}")
    found = {"demo": measure("demo", demo_model.path(), repeats)}
    with tempfile.TemporaryDirectory(prefix="tercet-grammar-") as folder:
        write_wide_model(Path(folder))
        found["wide"] = measure("wide", Path(folder), repeats)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"unit": "ms of CPU time per decode step", "batch": BATCH} | found) + "\n")


if __name__ == "__main__":
    main()
