"""What endpoints ask for: permits, validation, queueing, results; neither HTTP nor gRPC."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from router.errors import BatchSizeError, GenerationError, OverloadedError, UnhealthyError
from router.generation import parsed_bodies
from router.generation.asked import GenerateRequest
from router.generation.collect import GenerationResult, collect, collect_all, start_all
from router.generation.permits import HeldPermits, PermitPool
from router.generation.preparing import Preparing
from router.generation.running import Running
from router.generation.validation import Validator
from router.images.prompt import ImagePrompts
from router.limits import ServingLimits
from router.lora.registry import MOST_LOADED, AdapterRegistry
from router.metrics import Metrics
from router.request import salt_of
from router.scheduling.loop import Scheduler
from router.scheduling.replicas.replicas import Replicas
from router.text.tokenizer import PromptTokenizer
from router.tracing import entered

logger = logging.getLogger(__name__)

_MAX_RETRY_AFTER_S = 120
_MAX_SHOWN = 1000  # characters of a prompt, and those at level debug only


class Inference:
    """What endpoints may ask of the router."""

    def __init__(
        self,
        *,
        scheduler: Scheduler | Replicas,
        validator: Validator,
        tokenizer: PromptTokenizer,
        limits: ServingLimits,
        metrics: Metrics,
        adapters: AdapterRegistry,
        model_names: tuple[str, ...] = (),
    ) -> None:
        """Take the router's parts, and all names of the model, for keys that may use some models only."""
        self.adapters = adapters
        self._model_names = model_names
        self.limits = limits
        self.metrics = metrics
        self.tokenizer = tokenizer
        self.validator = validator
        self.permit_pool = PermitPool(limits.max_concurrent_requests)
        self.is_draining = False
        self._preparing = Preparing()
        self._scheduler = scheduler
        metrics.follow("tgi_lora_requests_info", self._adapters_in_use)
        metrics.follow_keys("tgi_key_queue_size", lambda: scheduler.queued_by_key)

    def take_permits(self, number: int = 1, *, request_id: str = "") -> HeldPermits:
        """Take permits for `number` generations, or none.

        Raises:
            OverloadedError: None are free; BatchSizeError beyond all; UnhealthyError while draining.
        """
        if self.is_draining:
            raise UnhealthyError
        if number > self.permit_pool.limit:
            limit = self.permit_pool.limit  # waiting would not help: no 429
            text = f"the server runs up to {limit} generations at once. Given: {number}"
            raise BatchSizeError(text, given=number, limit=limit)
        if not self.permit_pool.acquire(number):
            wait_s = self._scheduler.estimated_wait_s
            raise OverloadedError(max(1, min(math.ceil(wait_s), _MAX_RETRY_AFTER_S)))
        return HeldPermits(self.permit_pool, number, request_id, entered())

    def end(self) -> None:
        """Fail requests in preparation: no scheduler is left."""
        self.is_draining = True
        self._preparing.end()

    async def start(self, request: GenerateRequest, permits: HeldPermits) -> Running:
        """Validate and queue, taking over one permit."""
        asked = permits.request_span
        account = None if asked is None else asked.account
        if account is not None:
            account.check_model(self._model_names if request.adapter_id is None else (request.adapter_id,))
            request = replace(request, max_total_tokens=account.key.max_total_tokens)
        validation = self._preparing.of(self.validator.validate(request))
        valid = await (validation if asked is None else asked.around_validation(validation))
        parsed_bodies.release()
        if asked is not None and asked.gen_ai is not None:
            asked.gen_ai.asked(
                valid,
                operation=request.api.operation,
                model=request.adapter_id or next(iter(self._model_names), ""),
                given=request.given,
                max_new_tokens=request.max_new_tokens,
                num_choices=permits.number,
            )
        logger.debug("Input: %s", valid.inputs[:_MAX_SHOWN], extra={"request_id": permits.request_id})
        if account is not None:
            key = account.key
            valid = replace(
                valid,
                key=key.name,
                weight=key.weight,
                priority=max(valid.priority, key.priority),
                cache_salt=salt_of(account.cache_salt, request.cache_salt),
            )
            account.prompted(valid.input_length)
        if asked is not None and asked.is_of_batch:
            valid = replace(valid, priority=valid.priority + 1)  # after requests whose clients wait
        if request.adapter_id is None:
            return Running(valid, self._scheduler.submit(valid), self.metrics, permits)
        self.metrics.count("tgi_lora_requests", adapter=self.metrics.value_of("adapter", request.adapter_id))
        try:
            use = await self._preparing.of(self.adapters.use(request.adapter_id))
        except GenerationError as error:
            self.metrics.count("tgi_request_failure", err="generation")
            logger.error("%s", error, extra={"request_id": permits.request_id} if asked is None else asked.log_fields())
            raise
        try:
            valid = replace(valid, adapter=use.load_id)
            return Running(valid, self._scheduler.submit(valid), self.metrics, permits, use)
        except BaseException:
            use.release()
            raise

    @property
    def images(self) -> ImagePrompts | None:
        """Return what reads images, if anything."""
        return self.validator.images

    async def prompt_of(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with its `text`, holding a permit while images are prepared."""
        with self.take_permits() if await self.validator.names_images(request) else nullcontext():
            return await self._preparing.of(self.validator.with_images(request))

    async def generate(self, request: GenerateRequest, permits: HeldPermits) -> GenerationResult:
        """Run one generation; cancelling ends it."""
        return await collect(await self.start(request, permits))

    async def start_many(self, requests: Sequence[GenerateRequest], permits: HeldPermits) -> list[Running]:
        """Queues all or none."""
        return await start_all(partial(self.start, request, permits) for request in requests)

    async def generate_many(self, requests: Sequence[GenerateRequest], permits: HeldPermits) -> list[GenerationResult]:
        """Run several in order; the first failure ends all."""
        if len(requests) == 1:
            return [await self.generate(requests[0], permits)]
        return await collect_all(await self.start_many(requests, permits))

    async def generate_best_of(self, request: GenerateRequest, permits: HeldPermits) -> GenerationResult:
        """Run `best_of` with own seeds; return the best mean logprob first."""
        generations = await self.generate_many([request] * (request.best_of or 1), permits)
        best = max(range(len(generations)), key=lambda index: mean_logprob(generations[index]))
        return replace(generations[best], best_of_sequences=generations[:best] + generations[best + 1 :])

    def _adapters_in_use(self) -> dict[str, str | int] | None:
        """Return labels in vLLM's words, if there are adapters."""
        if not self.adapters.names:
            return None
        running, queued = self._scheduler.adapters_in_use
        return {
            "max_lora": self._scheduler.most_adapters or MOST_LOADED,
            "running_lora_adapters": ",".join(sorted(running)),
            "waiting_lora_adapters": ",".join(sorted(queued | self.adapters.loading)),
        }

    async def is_healthy(self) -> bool:
        return not self.is_draining and await self._scheduler.check_health()


def mean_logprob(generation: GenerationResult) -> float:
    """Return the text's mean logprob; NaN is impossible."""
    logprobs = [token.logprob for token in generation.tokens]
    mean = sum(map(float, logprobs)) / len(logprobs)
    return -math.inf if math.isnan(mean) else mean
