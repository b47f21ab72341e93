"""A key, and what it has used of its limits."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from router.declared_metrics import KeyRefusal
from router.errors import ForbiddenError, RateLimitError
from router.keys.bucket import Bucket, Clock, spelled_wait
from router.metrics import Metrics
from wire.keys import Key, Scope

_MAX_RETRY_AFTER_S = 120


class Account:
    """A key's use, which a change of its row in the file leaves as it is."""

    def __init__(self, key: Key, metrics: Metrics, clock: Clock = time.monotonic) -> None:
        self.key = key
        self.num_running = 0
        self._metrics = metrics
        self._label = metrics.value_of("key", key.name)
        self._clock = clock
        self._requests = _bucket(None, key.requests_per_minute, clock)
        self._tokens = _bucket(None, key.tokens_per_minute, clock)

    def changed(self, key: Key) -> None:
        """Take over the row of the same name."""
        self.key = key
        self._label = self._metrics.value_of("key", key.name)
        self._requests = _bucket(self._requests, key.requests_per_minute, self._clock)
        self._tokens = _bucket(self._tokens, key.tokens_per_minute, self._clock)

    def check_scope(self, scope: Scope) -> None:
        """Raise ForbiddenError unless the key is for this."""
        if scope not in self.key.scopes:
            self._refused("scope")
            raise ForbiddenError(f"this API key has no scope `{scope}`", code="permission_denied")

    def check_model(self, names: tuple[str, ...]) -> None:
        """Raise ForbiddenError unless the key may use a model with one of these names."""
        models = self.key.models
        if models is not None and models.isdisjoint(names):
            self._refused("model")
            text = f"this API key may not use the model {names[0]}; it may use {', '.join(sorted(models)) or 'none'}"
            raise ForbiddenError(text, param="model", code="model_not_allowed")

    def admit(self, *, is_counted: bool = True) -> None:
        """Admit a request.

        Args:
            is_counted: Among those that run at the same time; `end` follows.

        Raises:
            RateLimitError: A limit is reached.
        """
        key = self.key
        if is_counted and key.concurrent is not None and self.num_running >= key.concurrent:
            self._refused("concurrency")
            text = f"this API key may have {key.concurrent} requests at the same time: wait for an answer"
            raise RateLimitError(text, kind="concurrency", retry_after_s=1)
        if (bucket := self._requests) is not None and (wait_s := bucket.wait_s(1)):
            self._refused("requests")
            raise _limited("requests", bucket, wait_s)
        if (bucket := self._tokens) is not None and (wait_s := bucket.wait_s(0)):
            self._refused("tokens")
            raise _limited("tokens", bucket, wait_s)
        if self._requests is not None:
            self._requests.charge(1)
        self.num_running += is_counted
        self._metrics.count("tgi_key_requests", key=self._label)

    def end(self) -> None:
        self.num_running -= 1

    def prompted(self, num_tokens: int) -> None:
        """Charge a prompt."""
        self._charge("prompt", num_tokens)

    def generated(self, num_tokens: int) -> None:
        """Charge tokens of an answer."""
        self._charge("output", num_tokens)

    def cached(self, num_tokens: int) -> None:
        """Count tokens of a prompt, charged already, that the prefix cache had."""
        self._metrics.count("tgi_key_tokens", num_tokens, key=self._label, kind="cached")

    @property
    def cache_salt(self) -> str:
        """Return what its prompts' KV is apart by; empty: it is shared."""
        return self.key.name if self.key.has_own_cache else ""

    def openai_headers(self) -> Mapping[str, str]:
        """Return what OpenAI's clients read of its limits."""
        return {
            f"x-ratelimit-{what}-{kind}": value
            for kind, bucket in self._buckets
            for what, value in (
                ("limit", str(bucket.per_minute)),
                ("remaining", _left(bucket)),
                ("reset", spelled_wait(bucket.full_in_s)),
            )
        }

    def anthropic_headers(self) -> Mapping[str, str]:
        """Return what Anthropic's clients read of its limits."""
        now = datetime.now(UTC)
        return {
            f"anthropic-ratelimit-{kind}-{what}": value
            for kind, bucket in self._buckets
            for what, value in (
                ("limit", str(bucket.per_minute)),
                ("remaining", _left(bucket)),
                ("reset", f"{now + timedelta(seconds=bucket.full_in_s):%Y-%m-%dT%H:%M:%SZ}"),
            )
        }

    @property
    def _buckets(self) -> list[tuple[str, Bucket]]:
        found = (("requests", self._requests), ("tokens", self._tokens))
        return [(kind, bucket) for kind, bucket in found if bucket is not None]

    def _charge(self, kind: str, num_tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.charge(num_tokens)
        self._metrics.count("tgi_key_tokens", num_tokens, key=self._label, kind=kind)

    def _refused(self, reason: KeyRefusal) -> None:
        self._metrics.count("tgi_key_refused", key=self._label, reason=reason)


def _bucket(old: Bucket | None, per_minute: int | None, clock: Clock) -> Bucket | None:
    if per_minute is None:
        return None
    if old is None:
        return Bucket(per_minute, clock)
    old.changed(per_minute)
    return old


def _left(bucket: Bucket) -> str:
    return str(max(math.floor(bucket.level), 0))


def _limited(kind: str, bucket: Bucket, wait_s: float) -> RateLimitError:
    text = f"this API key is limited to {bucket.per_minute} {kind} per minute: try again in {spelled_wait(wait_s)}"
    return RateLimitError(text, kind=kind, retry_after_s=max(1, min(math.ceil(wait_s), _MAX_RETRY_AFTER_S)))
