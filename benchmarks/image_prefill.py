"""What images cost in a shard: `python -m benchmarks.image_prefill [--model llava gemma3]`.

Vision models with random weights: a text model of 135M parameters' shape (gemma3: of about that size) behind a tower of
CLIP-base's. In turns in one process, without a server: the prefill of a prompt with an image, that of the same prompt
once the image is encoded, transformers' own tower on another image, and the prefill of as many tokens of text. `fresh`
is the first over the sum of the last two, `again` the second over the last. `text` is what is left of the tokens per
second of a batch of text without images on the vision model, beside its text model alone. All are medians of the ratios
of turns, or of steps in turns, which a busy machine moves least. The result goes to
`benchmarks/results/image_prefill.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine.steps import CPU, clock_of, dtype_of, loaded
from benchmarks.peers.machine import processor
from model_server.batch.sequence import NewRequest, number_blocks
from model_server.engine.calls import DecodeCall, PrefillCall
from model_server.engine.engine import Engine, EngineOptions
from model_server.features.images.encoder import ImageEncoder
from model_server.features.images.families import FAMILIES
from model_server.features.images.feature import Images
from model_server.features.images.image import AskedImages, Feature, Image, ImagePlace
from model_server.features.images.tower import load_tower
from model_server.memory.kv_cache import KvCache
from model_server.models.hf.loading import quiet
from model_server.runner.runner import Runner
from model_server.sampling.parameters import SamplingParameters, StoppingParameters
from model_server.sampling.sampler import Sampler
from model_server.text.tokenizer import Tokenizer
from wire import demo_model

OUT = Path(__file__).parent / "results" / "image_prefill.json"
FOLDER = Path(__file__).parent / "out" / "images"
BLOCK, TEXT_TOKENS, BATCH, STEPS = 16, 24, 4, 40
IMAGE_TOKEN, VOCAB = 31000, 32000

_TEXT = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
         "intermediate_size": 1536, "head_dim": 64, "vocab_size": VOCAB, "max_position_embeddings": 4096}  # fmt: skip
_TOWER = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
          "patch_size": 14}  # fmt: skip
# Type -> text model, tower, fields of the whole, pixels a side, rows of an image.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int, int]] = {
    "llava": (
        {"model_type": "llama"}, {"model_type": "clip_vision_model", "image_size": 336},
        {"image_token_index": IMAGE_TOKEN}, 336, 576,
    ),
    "gemma3": (
        {"model_type": "gemma3_text", "sliding_window": 512, "num_hidden_layers": 26},
        {"model_type": "siglip_vision_model", "image_size": 448, "vision_use_head": False},
        {"image_token_id": IMAGE_TOKEN, "mm_tokens_per_image": 256}, 448, 256,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Medians of milliseconds, and of ratios of turns."""

    model: str
    dtype: str
    tokens: int
    image_ms: float
    again_ms: float
    tower_ms: float
    text_ms: float
    fresh: float
    again: float
    text: float


def checkpoint(name: str) -> Path:
    """The folder of the model, made at the first call."""
    folder = FOLDER / name
    if not (folder / "model.safetensors").exists():
        from transformers import AutoConfig, AutoModelForImageTextToText

        text, tower, fields, _, _ = MODELS[name]
        config = AutoConfig.for_model(name, text_config=_TEXT | text, vision_config=_TOWER | tower, **fields)
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).bfloat16().save_pretrained(folder)
    return folder


class Bench:
    """An engine on a model, and requests to it: one batch at a time, over the same blocks."""

    def __init__(self, name: str, runner: Runner, encoder: ImageEncoder | None, dtype: torch.dtype) -> None:
        options = EngineOptions(device=CPU, block_size=BLOCK, prompt_logprobs_allowed=False)
        tokenizer = Tokenizer.load(demo_model.path())
        features = () if encoder is None else (Images(encoder, runner.vocab_size),)
        self.engine = Engine(runner, tokenizer, Sampler(runner.vocab_size, CPU), options, features=features)
        self.engine.set_cache(KvCache(runner.kv_shapes, 256, BLOCK, dtype, CPU))
        *_, self._side, self._rows = MODELS[name]
        self._dtype = str(dtype).removeprefix("torch.")
        self._numbers = itertools.count()

    def image(self) -> Image:
        """Another one each time."""
        number = next(self._numbers)
        pixels = torch.randn(1, 3, self._side, self._side, generator=torch.Generator().manual_seed(number))
        data = pixels.to(getattr(torch, self._dtype)).view(torch.uint8).numpy().tobytes()
        feature = Feature(self._dtype, tuple(pixels.shape), data)
        return Image(hashlib.sha256(str(number).encode()).digest(), {"pixel_values": feature}, self._rows)

    def prefill(self, image: Image | None, rows: int = 1, new_tokens: int = 1) -> None:
        """Prompts of as many tokens, whether an image stands for most of them or text."""
        ids = [7 + i % 200 for i in range(TEXT_TOKENS + (self._rows if rows == 1 else 0))]
        asked: tuple[AskedImages, ...] = ()
        if image is not None:
            ids[4 : 4 + self._rows] = [IMAGE_TOKEN] * self._rows
            asked = (AskedImages((ImagePlace(image.key, 4, self._rows, image),)),)
        numbered = number_blocks([len(ids) + new_tokens] * rows, BLOCK)
        requests = [
            NewRequest(
                id=i, input_ids=tuple(ids), sampling=SamplingParameters(),
                stopping=StoppingParameters(max_new_tokens=new_tokens, ignore_eos_token=True), prefill_logprobs=False,
                top_n_tokens=0, blocks=blocks, cache_len=0, chunk_len=None, asked=asked,
            )
            for i, blocks in enumerate(numbered)
        ]  # fmt: skip
        self.engine.clear(None)
        self.engine.submit_prefill(PrefillCall(batch_id=0, sequence=0), requests)()

    def decode(self, number: int) -> None:
        """A step of the batch of text that was prefilled."""
        self.engine.submit_decode(DecodeCall(batch_ids=(0,), sequence=number))()


def measure(name: str, args: argparse.Namespace) -> Result:
    clock, dtype = clock_of(cpu_time=args.cpu_time), dtype_of(args.dtype)
    folder = checkpoint(name)
    with loaded(str(folder), args.dtype, one_thread=args.cpu_time) as runner:
        encoder = ImageEncoder(load_tower(folder, name, FAMILIES[name], CPU, dtype), 10_000)
        seeing, reading = Bench(name, runner, encoder, dtype), Bench(name, runner, None, dtype)
        turns = [_turn(seeing, encoder, clock) for _ in range(args.turns + 1)][1:]  # the first warms up
        text_kept = _text_kept(seeing, reading, args.turns, clock)
    image, again, tower, text = zip(*turns, strict=True)
    middle = statistics.median
    return Result(
        name, args.dtype, TEXT_TOKENS + MODELS[name][4], middle(image), middle(again), middle(tower), middle(text),
        fresh=middle(i / (e + t) for i, e, t in zip(image, tower, text, strict=True)),
        again=middle(a / t for a, t in zip(again, text, strict=True)),
        text=text_kept,
    )  # fmt: skip


def _turn(bench: Bench, encoder: ImageEncoder, clock: Callable[[], float]) -> tuple[float, ...]:
    image, other = bench.image(), bench.image()
    return (
        _timed(lambda: bench.prefill(image), clock),
        _timed(lambda: bench.prefill(image), clock),
        _timed(lambda: encoder.tower.encode(other), clock),
        _timed(lambda: bench.prefill(None), clock),
    )


def _text_kept(seeing: Bench, reading: Bench, turns: int, clock: Callable[[], float]) -> float:
    """Steps of both in turns, each time the other one first."""
    ratios = []
    for _ in range(turns):
        for bench in (seeing, reading):
            bench.prefill(None, BATCH, STEPS + 2)
        for number in range(1, STEPS + 1):
            times = {}
            for bench in (seeing, reading) if number % 2 else (reading, seeing):
                times[bench] = _timed(partial(bench.decode, number), clock)
            ratios.append(times[reading] / times[seeing])
    return statistics.median(ratios)


def _timed(run: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    run()
    return (clock() - began) * 1000


def _table(results: list[Result]) -> Table:
    table = Table(title=f"{processor()}; {torch.get_num_threads()} threads")
    for column in ("model", "tokens", "image, ms", "again, ms", "tower, ms", "text, ms", "fresh", "again", "text kept"):
        table.add_column(column, justify="right")
    for r in results:
        times = (f"{one:.0f}" for one in (r.image_ms, r.again_ms, r.tower_ms, r.text_ms))
        table.add_row(r.model, str(r.tokens), *times, f"{r.fresh:.3f}", f"{r.again:.3f}", f"{r.text:.3f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--cpu-time", action="store_true", help="one thread, CPU time: on a machine that is not quiet")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    quiet()
    results = [measure(name, args) for name in args.model]
    Console(width=110).print(_table(results))
    report = {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "time": "cpu" if args.cpu_time else "wall",
        "models": [asdict(one) for one in results],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
