"""S6: others on the same card in the same minutes, with the same prompts and lengths; each with its configuration.

transformers' `generate_batch` (continuous batching) and `generate` with a static cache; vLLM where it is installed.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.measuring import roofline
from benchmarks.gpu.measuring.environment import ROOT
from benchmarks.gpu.subjects.models import Subject, of_folder, of_shape
from benchmarks.gpu.subjects.serving import model_folder
from benchmarks.gpu.subjects.shapes import Shape, by_size
from benchmarks.gpu.subjects.synthetic import make_transformers

PROMPT, OUTPUT = 256, 256
LEVELS = (32, 64)
# Tried in this order; which one it was is told with the figure.
ATTENTION = ("flash_attention_3", "flash_attention_2", "sdpa", "paged|sdpa", "paged|eager")
TINY_ATTENTION = ("sdpa", "paged|sdpa", "paged|eager")
VLLM_LIMIT_S = 240.0

Prompts = list[list[int]]


def run(context: Context) -> None:
    """Ours first, in this process; then the peers, one after the other."""
    shape = None if context.model is not None else by_size(context.tiny)[1]
    subject = of_folder(context, context.model) if context.model is not None else of_shape(context, shape, "8B")
    prompt, output = (12, 8) if context.tiny else (PROMPT, OUTPUT)
    levels = (2, 3) if context.tiny else LEVELS
    ours = _ours(context, subject, levels, prompt, output)
    _free(context)
    if context.has_time(30):
        _transformers(context, subject, shape, ours, prompt, output)
    else:
        context.skip("transformers", "no time left")
    _free(context)
    if importlib.util.find_spec("vllm") is None:
        context.skip("vLLM", "not installed")
    elif context.has_time(60):
        _vllm(context, subject, shape, ours, prompt, output)
    else:
        context.skip("vLLM", "no time left")


def _prompts(vocab: int, count: int, length: int) -> Prompts:
    """The same for everyone."""
    generator = torch.Generator().manual_seed(1234 + count)
    found: Prompts = torch.randint(2, min(vocab, 30_000), (count, length), generator=generator).tolist()
    return found


def _ours(context: Context, subject: Subject, levels: tuple[int, ...], prompt: int, output: int) -> dict[int, float]:
    """Output tokens/s of the engine, prefill included."""
    tokens = max(levels) * (prompt + output + 64)
    driver = subject.driver(context, tokens, (1, *levels), prompt + output + 64)
    found = {}
    for level in (1, *levels):
        prompts = _prompts(subject.spec.vocab_size, level, prompt)
        rates = []
        for _ in range(3):  # the first one warms up
            driver.engine.clear(None)
            driver.blocks.reset()
            started = time.perf_counter()
            driver.prefill([driver.request(p, output) for p in prompts])
            driver.pace(0, output - 2)
            rates.append(level * output / (time.perf_counter() - started))
        found[level] = statistics.median(rates[1:])
        least = roofline.step_seconds(subject.cost, context.ceilings, level, prompt + output / 2)
        name = f"Tercet, engine, b={level}, {prompt}/{output}"
        context.figure(name, found[level], "tok/s", ratio=found[level] * least / level)
    return found


def _transformers(
    context: Context, subject: Subject, shape: Shape | None, ours: dict[int, float], prompt: int, output: int
) -> None:
    vocab = subject.spec.vocab_size
    for level in sorted(ours)[1:]:
        _try_each(context, subject, shape, f"generate_batch b={level}", lambda model, n=level: _batch(
            context, model, _prompts(vocab, n, prompt), output
        ), ours[level], "peer generate_batch")  # fmt: skip
        _free(context)
    if not context.has_time(25):
        context.skip("transformers generate", "no time left")
        return
    prompts = _prompts(vocab, 1, prompt)
    _try_each(
        context, subject, shape, "generate b=1, static cache" + (", compiled" if context.on_cuda else ""),
        lambda model: _static(context, model, prompts, output), ours[1], None, ("sdpa",),
    )  # fmt: skip


def _try_each(
    context: Context,
    subject: Subject,
    shape: Shape | None,
    name: str,
    measure: Callable[[Any], tuple[float, str]],
    ours: float,
    target: str | None,
    attentions: Iterable[str] = (),
) -> None:
    """The first attention implementation that loads and runs; what the others said is noted."""
    refusals = []
    for attention in attentions or (TINY_ATTENTION if context.tiny else ATTENTION):
        model = None
        try:
            # Its own threads know nothing of this one's inference mode, whose tensors they could not use.
            with torch.inference_mode(False), torch.no_grad():
                model = _load(context, subject, shape, attention)
                rate, configuration = measure(model)
        except Exception as error:  # a library of another version raises what it likes
            refusals.append(f"{attention}: {type(error).__name__}: {str(error).splitlines()[:1]}")
            del model
            _free(context)
            continue
        context.figure(
            f"transformers {name}", rate, "tok/s", peer=ours / rate, target=target,
            detail=f"{attention}; {configuration}",
        )  # fmt: skip
        break
    else:
        context.check(f"transformers {name}", False, "no attention implementation runs")
    if refusals:
        context.note(f"transformers {name}: refused", " | ".join(refusals))


def _load(context: Context, subject: Subject, shape: Shape | None, attention: str) -> Any:
    if shape is not None:
        return make_transformers(shape, context.device, subject.dtype, attn_implementation=attention)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(context.model, dtype=subject.dtype, attn_implementation=attention)
    return model.to(context.device).eval()


def _batch(context: Context, model: Any, prompts: Prompts, output: int) -> tuple[float, str]:
    """Continuous batching with asynchronous batches and CUDA graphs, as its own documentation asks for speed."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    options: dict[str, Any] = {"use_async_batching": context.on_cuda, "use_cuda_graph": context.on_cuda}
    if not context.on_cuda:
        options |= {"num_blocks": 64, "max_batch_tokens": 128}
    generation = GenerationConfig(
        max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=context.on_cuda
    )
    rates = []
    for _ in range(2 if context.tiny else 3):
        answers = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**options),
            progress_bar=False,
        )  # fmt: skip
        tokens = sum(len(a.generated_tokens) for a in answers.values())
        if tokens != len(prompts) * output:
            raise RuntimeError(f"{tokens} tokens instead of {len(prompts) * output}")
        # By its own clock: making the cache and recording graphs, once for each call, are not held against it.
        spans = [a.lifespan for a in answers.values()]
        rates.append(tokens / (max(end for _, end in spans) - min(start for start, _ in spans)))
    return max(rates), ", ".join(f"{k}={v}" for k, v in options.items())


def _static(context: Context, model: Any, prompts: Prompts, output: int) -> tuple[float, str]:
    """One stream; on CUDA transformers compiles the decode step of a static cache by itself."""
    ids = torch.tensor(prompts, device=context.device)
    rates = []
    for _ in range(2 if context.tiny else 4):
        started = time.perf_counter()
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=output, min_new_tokens=output,
            do_sample=False, cache_implementation="static", pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        tokens = found.shape[1] - ids.shape[1]
        rates.append(tokens / (time.perf_counter() - started))
    return max(rates), "best of the runs after compilation"


# Run by vLLM's own process: it takes most of the card, and its engine is a process tree of its own.
_VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
folder, output, batches = sys.argv[1], int(sys.argv[2]), json.load(open(sys.argv[3]))
llm = LLM(model=folder, dtype="bfloat16", max_model_len=4096, gpu_memory_utilization=0.85)
wanted = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
found = {}
for level, prompts in batches.items():
    inputs = [{"prompt_token_ids": p} for p in prompts]
    rates = []
    for _ in range(3):
        started = time.perf_counter()
        answers = llm.generate(inputs, wanted, use_tqdm=False)
        tokens = sum(len(a.outputs[0].token_ids) for a in answers)
        rates.append(tokens / (time.perf_counter() - started))
    found[level] = max(rates)
print("RATES " + json.dumps(found), flush=True)
"""


def _vllm(
    context: Context, subject: Subject, shape: Shape | None, ours: dict[int, float], prompt: int, output: int
) -> None:
    vocab = subject.spec.vocab_size
    with model_folder(context, shape) as folder, tempfile.TemporaryDirectory() as place:
        batches = Path(place) / "prompts.json"
        batches.write_text(json.dumps({level: _prompts(vocab, level, prompt) for level in ours}))
        command = [sys.executable, "-c", _VLLM, str(folder), str(output), str(batches)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=VLLM_LIMIT_S, cwd=ROOT)
        except subprocess.TimeoutExpired:
            context.check("vLLM", False, f"not done within {VLLM_LIMIT_S:.0f} s")
            return
    said = [line for line in ran.stdout.splitlines() if line.startswith("RATES ")]
    if not said:
        context.check("vLLM", False, ran.stderr[-300:])
        return
    for level, rate in json.loads(said[0].removeprefix("RATES ")).items():
        context.figure(f"vLLM b={level}", rate, "tok/s", peer=ours[int(level)] / rate, detail="its defaults, bfloat16")


def _free(context: Context) -> None:
    gc.collect()
    if context.on_cuda:
        torch.cuda.empty_cache()
