"""A server for vectors and scores: start, end, exit status."""

from __future__ import annotations

import contextlib
import logging
import socket
from contextlib import nullcontext

from router.api.batches.service import Batches
from router.api.embeddings.state import PooledState
from router.config import RouterConfig, image_labels
from router.errors import ArgumentValidation, BackendError, StartupError
from router.keys.accounts import Accounts
from router.limits import ShardInfo
from router.metrics import PoolingMetrics
from router.pooling.inference import PooledInference, PooledLimits
from router.pooling.scheduler import PooledScheduler
from router.pooling.texts import Prompts, TextTokenizer
from router.request_log import RequestLog
from router.server.pooled_app import create_pooled_app
from router.server.serving import serve_application
from router.server.startup import connected
from router.server.stop import Stop
from router.shards.interface import ShardError
from router.shards.pool import ShardPool
from router.shards.pooling import PooledCapacity
from router.text import model_files
from wire import phases
from wire.cli.pooling_options import Preset
from wire.model_files import read_optional_object
from wire.pooling.files import SentenceFiles, read
from wire.pooling.task import FoundTask, labels

logger = logging.getLogger(__name__)

# Steps of 512 tokens are as fast as longer ones on a CPU, and a new request waits for less.
CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 16384
MAX_CONCURRENT_REQUESTS, MAX_CLIENT_BATCH_SIZE = 512, 2048


async def serve_pooled(
    config: RouterConfig,
    task: FoundTask,
    files: model_files.ModelFiles,
    stop: Stop,
    listener: socket.socket,
    metrics_listener: socket.socket | None,
) -> int:
    """Run the router; return the exit status."""
    fields = read_optional_object(files.folder / "config.json", StartupError)
    sentence = read(files.folder, fields, StartupError)
    _refuse(config, task)
    prompts = _prompts(config, sentence)
    if config.replica_uds_paths:
        raise StartupError("replicas are for models that generate text: leave `--num-replica` out")
    phases.enter(phases.WARM_UP)
    logger.info("Warming up model")
    shards, info = await connected(config, None)
    try:
        if info.task != task.task:
            raise StartupError(f"the shards' task is {info.task}, the router's {task.task}: give both the same --task")
        budget = config.max_batch_tokens or (CPU_STEP_TOKENS if info.device_type == "cpu" else GPU_STEP_TOKENS)
        capacity = await _warm_up(shards, budget, config.max_input_tokens)
        limits = _limits(config, capacity, budget)
        logger.info("serving with %s", limits)
        with contextlib.ExitStack() as resources:
            tokenizer = TextTokenizer.from_file(
                files.tokenizer_json,
                max_length=limits.max_input_tokens,
                num_workers=config.validation_workers,
                lower_case=sentence.lower_case,
                typed=sentence.typed,
                appended=sentence.appended,
                folder=files.folder,
            )
            resources.callback(tokenizer.close)
            metrics = PoolingMetrics(limits.max_input_tokens)
            scheduler = PooledScheduler(
                shards,
                metrics,
                budget=limits.max_batch_tokens,
                max_size=config.max_batch_size,
                max_step_s=config.max_step_seconds,
            )
            inference = PooledInference(scheduler, tokenizer, limits, metrics, model_names=_names(config))
            state = _state(config, task, files, sentence, info, inference, prompts, capacity.pooling)
            batches = Batches.open(config, limits.max_concurrent_requests, metrics, config.front_uds)
            app = create_pooled_app(
                state,
                api_key=config.api_key,
                accounts=Accounts.of_file(config.keys_file, metrics, resources, part=config.limits_of_keys),
                allow_origins=config.cors_allow_origin,
                request_log=RequestLog.of(config, metrics, resources),
                batches=batches,
            )
            try:
                async with nullcontext() if batches is None else batches.running(app):
                    return await serve_application(
                        app, config, inference, scheduler, stop, listener, metrics_listener, metrics
                    )
            finally:
                await scheduler.close()
    finally:
        await shards.close()


def _names(config: RouterConfig) -> tuple[str, ...]:
    """Return the model's names, the first that answers have first."""
    return (*config.served_model_name, config.tokenizer_name)


def _refuse(config: RouterConfig, task: FoundTask) -> None:
    """Options that only generation has. Raises ArgumentValidation."""
    asked = {
        "--lora-root": config.lora_root,
        "--kserve-api": config.kserve_api,
        "--aip-predict-route": config.aip_predict_route,
        "--otlp-endpoint": config.otlp_endpoint,
        "--scheduling-policy": config.scheduling_policy,
    }
    given = next((flag for flag, value in asked.items() if value), None)
    if given is not None:
        raise ArgumentValidation(
            f"`{given}` is for models that generate text; this one's task is {task.task} ({task.reason}): leave it out"
        )


def _prompts(config: RouterConfig, sentence: SentenceFiles) -> Prompts:
    """Return the named prompts, if known."""
    if config.default_prompt is not None:
        return Prompts(sentence.prompts, config.default_prompt)
    name = config.default_prompt_name or sentence.default_prompt_name
    if name is None:
        return Prompts(sentence.prompts)
    if name not in sentence.prompts:
        known = ", ".join(sorted(sentence.prompts)) or "none"
        raise ArgumentValidation(f"`--default-prompt-name` {name}: the model's prompts are: {known}")
    return Prompts(sentence.prompts, sentence.prompts[name])


async def _warm_up(shards: ShardPool, budget: int, longest: int | None) -> PooledCapacity:
    try:
        return await shards.warm_up_pooling(budget, longest)
    except ShardError as error:
        raise BackendError(f"Unable to warmup the Python model shards: {error}") from error


def _limits(config: RouterConfig, capacity: PooledCapacity, budget: int) -> PooledLimits:
    asked = config.max_input_tokens
    if asked is not None and capacity.max_input_tokens < asked:
        logger.warning("--max-input-tokens %d: the model reads %d tokens", asked, capacity.max_input_tokens)
    return PooledLimits(
        max_concurrent_requests=_asked(config.max_concurrent_requests, MAX_CONCURRENT_REQUESTS),
        max_client_batch_size=_asked(config.max_client_batch_size, MAX_CLIENT_BATCH_SIZE),
        max_input_tokens=capacity.max_input_tokens,
        max_batch_tokens=budget,
        max_batch_size=config.max_batch_size,
        max_queue_tokens=config.max_queue_tokens,
        dimensions=capacity.dimensions,
        auto_truncate=config.auto_truncate != "false",
    )


def _asked(value: int, default: int) -> int:
    return default if isinstance(value, Preset) else value


def _state(
    config: RouterConfig,
    task: FoundTask,
    files: model_files.ModelFiles,
    sentence: SentenceFiles,
    info: ShardInfo,
    inference: PooledInference,
    prompts: Prompts,
    pooling: str,
) -> PooledState:
    fields = read_optional_object(files.folder / "config.json", StartupError)
    images = image_labels()
    sizes = fields.get("matryoshka_dimensions")
    return PooledState(
        config=config,
        task=task.task,
        info=info,
        inference=inference,
        prompts=prompts,
        model_id=config.tokenizer_name,
        pooling=pooling,
        is_sparse=pooling == "splade",
        labels={} if task.task == "embed" else labels(fields),
        squashes=sentence.activation != "Identity",
        matryoshka=tuple(size for size in sizes if isinstance(size, int)) if isinstance(sizes, list) else (),
        model_sha=files.sha,
        git_sha=images.git_sha,
        docker_label=images.docker_label,
    )
