"""Encoder-decoders in batches: `python -m benchmarks.encoder_decoders [--shape t5-small bart-base]`.

Requests with prompts of different lengths, encoded in one step and decoded together, beside the same model one request
after another (the stateful runner) and `generate` of transformers on the padded batch; random weights, float32, greedy.
All three in turns in one process, by its CPU time, without a server. The tokens must be equal. The result goes to
`benchmarks/results/encoder_decoders.json`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.peers.machine import processor
from model_server.attention.choice import AttentionChoice
from model_server.attention.metadata import AttentionMetadata
from model_server.memory.kv_cache import KvCache
from model_server.models.hf.encoder_decoder import ATTENTION_NAMES, EncoderDecoderRunner, register
from model_server.models.hf.stateful import StatefulRunner
from model_server.runner.runner import ModelInputs, RequestState, Runner
from wire.decoder_blocks import positions_between

OUT = Path(__file__).parent / "results" / "encoder_decoders.json"
CPU = torch.device("cpu")
SHAPES = ("t5-small", "bart-base")
LENGTHS = (20, 120)  # of prompts, the least and the most
ROUNDS = 3


@dataclass(frozen=True)
class Result:
    """Tokens for each second of CPU time, the best of the rounds; prompts included."""

    shape: str
    clients: int
    new_tokens: int
    batched: float
    one_by_one: float
    transformers: float


def build(shape: str) -> Any:
    """Make a model with random weights, whose greedy tokens differ."""
    from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    if shape == "t5-small":
        made: Any = T5ForConditionalGeneration(
            T5Config(num_layers=6, d_model=512, d_ff=2048, num_heads=8, vocab_size=32128, decoder_start_token_id=0)
        )
    else:
        made = BartForConditionalGeneration(
            BartConfig(
                encoder_layers=6, decoder_layers=6, d_model=768, encoder_ffn_dim=3072, decoder_ffn_dim=3072,
                encoder_attention_heads=12, decoder_attention_heads=12, vocab_size=50265, forced_eos_token_id=None,
                init_std=0.1,
            )
        )  # fmt: skip
    register()
    made.set_attn_implementation(ATTENTION_NAMES[True])
    return made.eval().requires_grad_(False)


def served(runner: Runner, prompts: Sequence[Tensor], new_tokens: int) -> Tensor:
    """Return the tokens [requests, new_tokens], all prompts in the first step."""
    size, prefix = runner.traits.block_size, runner.traits.prefix_length
    widths = [-(-(len(p) + positions_between(len(p), prefix, size) + new_tokens) // size) for p in prompts]
    tables = torch.zeros(len(prompts), max(widths), dtype=torch.int32)
    taken = 1
    for row, width in enumerate(widths):
        tables[row, :width] = torch.arange(taken, taken + width)
        taken += width
    cache = KvCache(runner.kv_shapes, taken, size, torch.float32, CPU)
    states = tuple([RequestState(len(p)) for p in prompts])
    lengths = [len(p) for p in prompts]
    ids, counts = torch.cat(list(prompts)), lengths
    found: list[Tensor] = []
    for _ in range(new_tokens):
        starts = [length - count for length, count in zip(lengths, counts, strict=True)]
        places = [torch.arange(a, b) for a, b in zip(starts, lengths, strict=True)]
        ends = torch.tensor(counts).cumsum(0)
        metadata = AttentionMetadata(
            slots=torch.cat([tables[i, p // size].long() * size + p % size for i, p in enumerate(places)]),
            block_tables=tables,
            cu_seqlens_q=torch.cat([ends.new_zeros(1), ends]).int(),
            kv_lengths=torch.tensor(lengths, dtype=torch.int32),
            query_lengths_host=tuple(counts),
            kv_lengths_host=tuple(lengths),
        )
        rows = None if metadata.is_decode else ends - 1
        logits = runner.forward(ModelInputs(ids, torch.cat(places), metadata, rows, states), cache)
        ids = logits.argmax(-1)
        found.append(ids)
        counts = [1] * len(prompts)
        lengths = [length + 1 for length in lengths]
    return torch.stack(found, dim=1)


def generated(model: Any, prompts: Sequence[Tensor], new_tokens: int) -> Tensor:
    """Return what transformers generates for the padded batch."""
    longest = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), longest), model.config.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
    tokens: Tensor = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, num_beams=1, eos_token_id=None
    )
    return tokens[:, 1:]


def measure(shape: str, clients: int, new_tokens: int) -> Result:
    model = build(shape)
    one_by_one = StatefulRunner(model, CPU, 1024, ())
    batched = EncoderDecoderRunner(model, AttentionChoice(None, CPU), CPU, 1024, ())
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(*LENGTHS, (clients,), generator=generator).tolist()
    prompts = [torch.randint(5, model.config.vocab_size, (n,), generator=generator) for n in lengths]
    ways: dict[str, Callable[[], Tensor]] = {
        "batched": lambda: served(batched, prompts, new_tokens),
        "one_by_one": lambda: served(one_by_one, prompts, new_tokens),
        "transformers": lambda: generated(model, prompts, new_tokens),
    }
    rates = dict.fromkeys(ways, 0.0)
    expected = None
    for _ in range(ROUNDS):
        for name, way in ways.items():
            started = time.process_time()
            tokens = way()
            rates[name] = max(rates[name], clients * new_tokens / (time.process_time() - started))
            expected = tokens if expected is None else expected
            assert tokens.equal(expected), f"{name} gives other tokens"
    return Result(shape, clients, new_tokens, **{name: round(rate, 1) for name, rate in rates.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        results = [measure(shape, options.clients, options.new_tokens) for shape in options.shape]
    table = Table("model", "batched", "one by one", "transformers, padded", title=f"tokens/s of CPU, {processor()}")
    for one in results:
        numbers = (one.batched, one.one_by_one, one.transformers)
        table.add_row(one.shape, *(f"{number:.0f} ({one.batched / number:.2f}x)" for number in numbers))
    Console(width=120).print(table)
    report = {"processor": processor(), "torch": torch.__version__, "results": [asdict(one) for one in results]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
