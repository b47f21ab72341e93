"""The models that are served, their states as the launcher says them, and the requests that wait or run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from router.front.errors import LoadingError, ModelFailedError, NotLoadedError, TooManyWaitingError
from router.front.metrics import FrontMetrics
from router.front.upstream import Upstream

State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
STATES: tuple[State, ...] = ("unloaded", "loading", "loaded", "unloading", "failed")

_LONGEST_RETRY_AFTER_S = 120


@dataclass
class Model:
    """One model, and its requests."""

    name: str
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    task: str = "generate"
    preload: bool = False
    state: State = "unloaded"
    since: float = 0.0
    """By the monotonic clock, which the launcher has, too."""
    error: str = ""
    retry_at: float = 0.0
    """When a failed one may be started again."""
    took_s: float = 0.0
    num_loaded: int = 0
    num_failed: int = 0
    socket: str = ""
    upstream: Upstream | None = None
    cards: list[dict[str, Any]] = field(default_factory=list)
    """What its router lists, while it is loaded."""
    is_closed: bool = False
    """It is about to be unloaded: requests wait for its next start."""
    num_active: int = 0
    num_waiting: int = 0
    used_at: float = field(default_factory=time.monotonic)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def is_open(self) -> bool:
        """Whether requests may go to it now."""
        return self.state == "loaded" and not self.is_closed and self.upstream is not None

    @property
    def all_adapters(self) -> tuple[str, ...]:
        """Return the names of its adapters: those of the file, and those that its router lists."""
        listed = [str(card["id"]) for card in self.cards if card.get("parent")]
        return tuple(dict.fromkeys([*self.adapters, *listed]))


class Models:
    """All models, by each of their names."""

    def __init__(self, metrics: FrontMetrics, *, start_timeout_s: float, max_waiting: int, autoload: bool) -> None:
        """Begin with none; the launcher says which there are."""
        self.by_name: dict[str, Model] = {}
        self.is_well = False
        self.is_draining = False
        self.on_use: Callable[[bool], None] = lambda is_urgent: None
        """Called when the numbers of requests have changed."""
        self.on_let_go: Callable[[Model], None] = lambda model: None
        """Called when nothing runs any more on a model that is closed."""
        self._metrics = metrics
        self._start_timeout_s, self._max_waiting, self._autoload = start_timeout_s, max_waiting, autoload
        self._found: dict[str, Model] = {}

    def update(self, told: Mapping[str, Mapping[str, Any]], is_well: bool) -> list[Model]:
        """Take the launcher's states; return the models that have been loaded since."""
        self.is_well = is_well
        loaded = []
        for name, facts in told.items():
            model = self.by_name.get(name)
            if model is None:
                model = self.by_name[name] = Model(name)
                self._metrics.add_values("model", [name])
            before = model.state
            self._metrics.count_starts(
                name, facts["num_loaded"] - model.num_loaded, facts["num_failed"] - model.num_failed, facts["took_s"]
            )
            for key, value in facts.items():
                setattr(model, key, tuple(value) if isinstance(value, list) else value)
            if model.state != before:
                if model.state == "loaded":
                    model.upstream, model.is_closed = Upstream(model.socket), False
                    loaded.append(model)
                elif model.upstream is not None:
                    model.upstream.close()
                    model.upstream = None
                    model.cards = []
            self.tell(model)
        self._index()
        self._metrics.set_states([model.state for model in self.by_name.values()])
        return loaded

    def set_cards(self, model: Model, cards: list[dict[str, Any]]) -> None:
        """Take note of what a model's router lists."""
        model.cards = cards
        self._index()

    def _index(self) -> None:
        models = self.by_name.values()
        self._found = {name: model for model in models for name in model.all_adapters}
        self._found |= {name: model for model in models for name in model.names}

    def find(self, name: str) -> Model | None:
        """Return the model of a name, of an alias, or of an adapter."""
        return self._found.get(name)

    def of_path(self, path: str) -> tuple[Model, str] | None:
        """Return the model that a path begins with, and the rest; names may have slashes."""
        end = len(path)
        while (end := path.rfind("/", 1, end)) > 0:
            model = self._found.get(path[1:end])
            if model is not None:
                return model, path[end:]
        model = self._found.get(path[1:])
        return None if model is None else (model, "/")

    def only_of(self, task: str) -> Model | None:
        """Return the only model with a task, if there is one alone."""
        found = [model for model in self.by_name.values() if model.task == task]
        return found[0] if len(found) == 1 else None

    @property
    def num_active(self) -> int:
        return sum(model.num_active + model.num_waiting for model in self.by_name.values())

    def tell(self, model: Model) -> None:
        """Wake what waits for a change of a model."""
        model.changed.set()
        model.changed = asyncio.Event()

    async def acquire(self, model: Model) -> Upstream:
        """Wait until a model is loaded, and count a request until `release`.

        Raises:
            RouterError: It has failed, or is not loaded in time.
        """
        if not model.is_open:
            await self._until_open(model)
        assert model.upstream is not None
        model.num_active += 1
        if model.num_active == 1:
            self.on_use(False)
        return model.upstream

    def release(self, model: Model) -> None:
        """End a request's use of a model."""
        model.num_active -= 1
        model.used_at = time.monotonic()
        if not model.num_active:
            self.on_use(False)
            if model.is_closed:
                self.on_let_go(model)

    def close(self, model: Model) -> None:
        """Send a model nothing more; requests wait for its next start."""
        model.is_closed = True
        if not model.num_active:
            self.on_let_go(model)

    async def _until_open(self, model: Model) -> None:
        self._check(model)
        if model.num_waiting >= self._max_waiting:
            raise TooManyWaitingError(model.name, self._max_waiting)
        model.num_waiting += 1
        self._metrics.set_waiting(model.name, model.num_waiting)
        self.on_use(model.num_waiting == 1)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not model.is_open:
                    await model.changed.wait()
                    self._check(model)
        except TimeoutError:
            raise LoadingError(model.name, self._retry_after_s(model)) from None
        finally:
            model.num_waiting -= 1
            self._metrics.set_waiting(model.name, model.num_waiting)
            if not model.num_waiting:
                self.on_use(False)

    def _check(self, model: Model) -> None:
        """Raise what a request gets that need not wait."""
        if model.state == "failed" and (left_s := model.retry_at - time.monotonic()) > 0:
            raise ModelFailedError(model.name, model.error, retry_after_s(left_s))
        if not self._autoload and (model.state in ("unloaded", "failed") or model.is_closed):
            raise NotLoadedError(model.name)

    @staticmethod
    def _retry_after_s(model: Model) -> int:
        return retry_after_s(model.took_s or 5.0)


def retry_after_s(seconds: float) -> int:
    """Return the whole seconds of a `Retry-After`."""
    return max(1, min(round(seconds), _LONGEST_RETRY_AFTER_S))
