"""What every endpoint for vectors and scores needs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from starlette.requests import Request

from router.api.embeddings.convert import sigmoid
from router.api.http.body import LARGE_BODY, BodyType, LargeBodies, read_body
from router.api.http.disconnect import cancel_on_disconnect
from router.config import RouterConfig
from router.generation import parsed_bodies
from router.generation.parsed_bodies import ParsedBodies
from router.limits import ShardInfo
from router.pooling.errors import invalid, wrong_task
from router.pooling.inference import Asked, Computed, PooledInference
from router.pooling.texts import Cut, Direction, Prompts, Text
from router.shards.pooling import Floats
from router.worker.lane import Lanes
from wire.pooling.task import Task


@dataclass(frozen=True, kw_only=True)
class PooledState:
    """The served model, and the router's parts."""

    config: RouterConfig
    task: Task
    info: ShardInfo
    inference: PooledInference
    prompts: Prompts
    model_id: str
    # TEI's name.
    pooling: str = ""
    # Of a classifier or reranker.
    labels: Mapping[int, str] = field(default_factory=dict)
    # Reranker scores are brought between 0 and 1.
    squashes: bool = True
    is_sparse: bool = False
    matryoshka: tuple[int, ...] = ()
    model_sha: str | None = None
    git_sha: str | None = None
    docker_label: str | None = None
    bodies: Lanes = field(default_factory=partial(Lanes, "bodies", large_from=LARGE_BODY))
    parsed_bodies: ParsedBodies = field(default_factory=ParsedBodies)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return names in OpenAI's API, the first for answers."""
        return self.config.served_model_name or (self.model_id,)

    async def read(self, request: Request, body_type: type[BodyType]) -> BodyType:
        """Read and check the body, within `--payload-limit`."""
        large = LargeBodies(self.bodies.large, self.parsed_bodies)
        return await read_body(request, body_type, limit=self.config.payload_limit, large=large)

    async def compute(self, request: Request, asked: Asked) -> Computed:
        """Compute all texts, until the client disconnects."""
        parsed_bodies.release()
        return await cancel_on_disconnect(request.receive, self.inference.compute(asked))

    def cut(self, truncate: bool | None, direction: Direction = "right", at: int | None = None) -> Cut:
        """Decide on long texts; -1: the model's most."""
        limit = None if at == -1 else at
        return Cut(self.inference.limits.auto_truncate if truncate is None else truncate, direction, limit)

    def dimensions(self, asked: int | None) -> int:
        """0: all. Raises PoolingError."""
        if asked is None:
            return 0
        if asked < 1:
            raise invalid("`dimensions` should be positive", param="dimensions")
        if asked > self.inference.limits.dimensions:
            raise invalid(
                "`dimensions` should be smaller than the maximum embedding dimension. "
                f"Given: {asked} of {self.inference.limits.dimensions}",
                param="dimensions",
            )
        return asked

    def pair(self, query: str, text: str, instruction: str | None = None) -> Text:
        """Return a query and text as the model reads them."""
        if instruction is not None:
            raise invalid("this model reads no `instruction`", param="instruction")
        return Text(query, text)

    def relevance(self, scores: Floats) -> np.float32:
        return sigmoid(float(scores[0])) if self.squashes else scores[0]

    def demand_embeddings(self) -> None:
        """Refuse models without dense vectors."""
        if self.task != "embed":
            raise wrong_task("Model is not an embedding model")
        if self.is_sparse:
            raise wrong_task("Model gives sparse vectors: use /embed_sparse")


def state_of(request: Request) -> PooledState:
    state: PooledState = request.app.state.app_state
    return state
