"""S6: others on the same card in the same minutes, with the same prompts and lengths; each with its configuration.

transformers' `generate_batch` (continuous batching) and `generate` with a static cache; vLLM's server where it is
installed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.measuring import roofline
from benchmarks.gpu.measuring.environment import ROOT
from benchmarks.gpu.stages.arrivals import expected, requests
from benchmarks.gpu.subjects.arrivals import send
from benchmarks.gpu.subjects.models import Subject, of_folder, of_shape
from benchmarks.gpu.subjects.serving import free_port, model_folder, running
from benchmarks.gpu.subjects.shapes import Shape, by_size
from benchmarks.gpu.subjects.synthetic import make_transformers
from launcher.bench.apis import Api, OpenAiApi, Sampling, TgiApi
from launcher.bench.results import Cell

PROMPT, OUTPUT = 256, 256
LEVELS = (32, 64)
# Tried in this order; which one it was is told with the figure.
ATTENTION = ("flash_attention_3", "flash_attention_2", "sdpa", "paged|sdpa", "paged|eager")
TINY_ATTENTION = ("sdpa", "paged|sdpa", "paged|eager")
VLLM_LIMIT_S = 240.0
VLLM_SECONDS = 20.0
VLLM_NAME = "model"

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
        _vllm(context, subject, shape)
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
def _vllm(context: Context, subject: Subject, shape: Shape | None) -> None:
    """Server against server: the same requests from the same client, no two prompts alike, no prefix cache on either
    side. Ours first, then vLLM's, each alone on the card."""
    _, rate = expected(context, subject)
    asked = requests(context, shape, rate, VLLM_SECONDS, seed=11)
    first = requests(context, shape, rate, VLLM_SECONDS / 4, seed=12)

    def measured(name: str, url: str, api: Api, peer: Cell | None) -> Cell:
        send(url, first, api)  # kernels are compiled, graphs captured
        cell = send(url, asked, api)
        context.check(f"{name}: every request answered", cell.errors == 0, cell.first_error or "")
        context.figure(
            f"{name}, {len(asked)} arrivals at {rate:.2f}/s", cell.output_tokens_per_s, "tok/s",
            peer=None if peer is None else peer.output_tokens_per_s / cell.output_tokens_per_s,
            detail=f"TTFT p50/p99 {cell.ttft_p50 * 1e3:.0f}/{cell.ttft_p99 * 1e3:.0f} ms, "
            f"ITL p50/p99 {cell.itl_p50 * 1e3:.2f}/{cell.itl_p99 * 1e3:.2f} ms",
        )  # fmt: skip
        return cell

    sampling = Sampling(None, ignore_eos=True)
    with model_folder(context, shape) as folder:
        with running(context, folder, PREFIX_CACHING="0") as server:
            ours = measured("Tercet, server", server.url, TgiApi(sampling), None)
        try:
            with _serving(_vllm_command(folder, port := free_port()), port) as url:
                measured("vLLM, server", url, OpenAiApi(sampling, VLLM_NAME), ours)
        except RuntimeError as error:
            context.check("vLLM, server", False, str(error))


def _vllm_command(folder: Path, port: int) -> list[str]:
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--served-model-name", VLLM_NAME,
        "--dtype", "bfloat16", "--max-model-len", "4096", "--gpu-memory-utilization", "0.85",
        "--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


@contextmanager
def _serving(command: list[str], port: int) -> Iterator[str]:
    """The URL of a server that answers /health; stopped at the end, with all that it has started.

    Raises RuntimeError with its last words if it does not come up within VLLM_LIMIT_S.
    """
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT
        )
        try:
            ends = time.monotonic() + VLLM_LIMIT_S
            while not _healthy(url):
                if process.poll() is not None or time.monotonic() > ends:
                    log.seek(0)
                    raise RuntimeError(f"did not come up: {log.read()[-300:].decode(errors='replace')}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _free(context: Context) -> None:
    gc.collect()
    if context.on_cuda:
        torch.cuda.empty_cache()
