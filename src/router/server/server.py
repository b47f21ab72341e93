"""From a config to a server: start, end, exit status."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from router.answers.formats.choice import ModelFormat, choose
from router.api.app_state import AppState
from router.api.batches.service import Batches
from router.api.chat.prompt import default_variables
from router.api.response_store import ResponseStore
from router.config import RouterConfig, image_labels, with_image_payload
from router.errors import StartupError
from router.generation.inference import Inference
from router.generation.validation import Validator
from router.grammar.checker import GrammarChecker
from router.images.prompt import ImagePrompts
from router.keys.accounts import Accounts
from router.lora.folders import register_folders
from router.lora.registry import AdapterRegistry
from router.metrics import Metrics
from router.request_log import RequestLog
from router.server.app import create_app
from router.server.images import image_prompts
from router.server.pooled import serve_pooled
from router.server.serving import serve_application
from router.server.sockets import bind, http_listener, warn_without_key
from router.server.startup import Started, connect_replicas
from router.server.stop import Stop, run_until_stopped
from router.shards.pool import ShardPool
from router.template.template import ChatTemplate
from router.text import model_files
from router.text.tokenizer import PromptTokenizer
from wire import phases
from wire.pooling.task import find_task
from wire.text.counting import counted
from wire.text.model_name import short_name
from wire.text.sampling_defaults import AUTO, sampling_defaults
from wire.tracing import Tracing, TracingError

logger = logging.getLogger(__name__)


async def serve(config: RouterConfig) -> int:
    """Run the router; return the exit status."""
    return await run_until_stopped(partial(_serve, config))


async def _serve(config: RouterConfig, stop: Stop) -> int:
    with contextlib.ExitStack() as resources:
        tracing = None
        template_defaults = default_variables(config.default_chat_template_kwargs)
        if config.otlp_endpoint is not None:
            tracing = _tracing(config.otlp_endpoint, config.otlp_service_name)
            resources.callback(tracing.close)
        # Bound now, so that a port in use is found before the model is warm; it listens at the very end.
        listener = resources.enter_context(http_listener(config))
        if config.api_key is None and config.keys_file is None:
            warn_without_key(listener)
        metrics_listener = None
        if config.prometheus_port is not None:
            metrics_listener = resources.enter_context(bind(config.hostname, config.prometheus_port))
        phases.enter(phases.TOKENIZER)
        files = model_files.load(
            config.tokenizer_name,
            revision=config.revision,
            tokenizer_config_path=config.tokenizer_config_path,
            chat_template=config.chat_template,
        )
        task = find_task(files.folder, config.task, StartupError)
        if task.is_pooled:
            return await serve_pooled(config, task, files, stop, listener, metrics_listener)
        defaults = sampling_defaults(
            config.generation_config or AUTO, config.override_generation_config, files.folder, StartupError
        )
        tokenizer = PromptTokenizer.from_file(
            files.tokenizer_json, num_workers=config.validation_workers, folder=files.folder
        )
        resources.callback(tokenizer.close)
        chat_template = ChatTemplate(files.templates, files.named_tokens)
        resources.callback(chat_template.close)
        grammars = None if config.disable_grammar_support else GrammarChecker()
        if grammars is not None:
            resources.callback(grammars.close)
        if not files.templates:
            logger.warning("the model has no chat template: chat requests will be refused")
        model_format = await choose(
            chat_template,
            tokenizer.added_tokens,
            tokenizer.special_tokens,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )
        metrics = Metrics()
        phases.enter(phases.WARM_UP)
        logger.info("Warming up model")
        started = await connect_replicas(
            config,
            metrics,
            max_positions=files.max_positions,
            tokenizer_max_length=files.tokenizer_max_length,
            tracing=tracing,
        )
        try:
            images = await image_prompts(config, files, tokenizer, started.info, metrics)
            if images is not None:
                resources.callback(images.reader.close)
                config = with_image_payload(config)
            adapters = await _adapters(config, metrics, started)
            state = _app_state(
                config, files, tokenizer, chat_template, model_format, grammars, images, metrics, started, adapters
            )
            state = replace(state, template_defaults=template_defaults, sampling_defaults=defaults)
            _tell(defaults)
            batches = Batches.open(config, started.limits.max_concurrent_requests, metrics, config.front_uds)
            app = create_app(
                state,
                api_key=config.api_key,
                accounts=Accounts.of_file(config.keys_file, metrics, resources, part=config.limits_of_keys),
                allow_origins=config.cors_allow_origin,
                tracing=tracing,
                request_log=RequestLog.of(config, metrics, resources),
                batches=batches,
            )
            scheduler = started.scheduler
            async with nullcontext() if batches is None else batches.running(app):
                return await serve_application(
                    app, config, state.inference, scheduler, stop, listener, metrics_listener, metrics
                )
        finally:
            await started.scheduler.close()
            await started.shards.close()


async def _adapters(config: RouterConfig, metrics: Metrics, started: Started) -> AdapterRegistry:
    """Return the shards' adapters, and those of --lora-root."""
    shards = started.shards
    if config.lora_root is None or not isinstance(shards, ShardPool):
        return AdapterRegistry(started.info.adapters, metrics)
    if not started.info.loads_adapters:
        raise StartupError("--lora-root: the shards load no adapters while they serve; start them with it too")
    most_bytes = int(config.lora_host_memory * 2**30)
    registry = AdapterRegistry(started.info.adapters, metrics, shards, most_bytes=most_bytes)
    names = (*config.served_model_name, config.tokenizer_name)
    count = await register_folders(registry, config.lora_root, taken=names)
    logger.info("%s of %s can be asked for", counted(count, "LoRA adapter"), config.lora_root)
    return registry


def _tell(defaults: Mapping[str, float]) -> None:
    said = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    if said:
        logger.info("OpenAI's and Anthropic's routes sample with %s where a request does not say it", said)


def _tracing(endpoint: str, service_name: str) -> Tracing:
    try:
        return Tracing.to_collector(endpoint, service_name)
    except TracingError as error:
        raise StartupError(str(error)) from None


def _app_state(
    config: RouterConfig,
    files: model_files.ModelFiles,
    tokenizer: PromptTokenizer,
    chat_template: ChatTemplate,
    model_format: ModelFormat,
    grammars: GrammarChecker | None,
    images: ImagePrompts | None,
    metrics: Metrics,
    started: Started,
    adapters: AdapterRegistry,
) -> AppState:
    limits = started.limits
    metrics.set_limits(
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        max_step_tokens=started.info.speculate + 1,
    )
    validator = Validator(
        tokenizer,
        limits,
        started.info,
        most_new_tokens=started.scheduler.most_new_tokens,
        grammars=grammars,
        images=images,
        max_stop_bytes=config.max_stop_sequence_bytes,
        adapters=adapters,
    )
    inference = Inference(
        scheduler=started.scheduler,
        validator=validator,
        tokenizer=tokenizer,
        limits=limits,
        metrics=metrics,
        adapters=adapters,
        model_names=(*config.served_model_name, short_name(config.tokenizer_name), config.tokenizer_name),
    )
    labels = image_labels()
    return AppState(
        config=config,
        info=started.info,
        inference=inference,
        chat_template=chat_template,
        model_format=model_format,
        model_id=config.tokenizer_name,
        model_sha=files.sha,
        quantization=files.quantization,
        git_sha=labels.git_sha,
        docker_label=labels.docker_label,
        responses=ResponseStore(config.response_store) if config.response_store else None,
    )
