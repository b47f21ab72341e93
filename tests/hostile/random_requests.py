"""Random requests of a route of the OpenAPI document."""

from __future__ import annotations

import time
from typing import Any

import hypothesis
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.effort import examples

__all__ = ["GenerationMode", "fuzzed", "schemathesis"]

ANSWER_LIMIT_S = 60.0
SECONDS_PER_ROUTE = examples(1, 20)
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance,
]  # fmt: skip


def fuzzed(operation: Any, mode: GenerationMode) -> set[int]:
    """The statuses that seeded requests of one route were answered with: a few, more until one that is wanted."""
    statuses: set[int] = set()
    wanted = {200} if mode is GenerationMode.POSITIVE else {400, 422}
    until = time.monotonic() + SECONDS_PER_ROUTE
    few = examples(2 if mode is GenerationMode.POSITIVE else 5, 10) if operation.method == "post" else 2
    left = [few]

    @hypothesis.seed(20)
    @hypothesis.settings(
        max_examples=max(20, 4 * few), deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        left[0] -= 1
        if statuses & wanted and (left[0] < 0 or time.monotonic() > until):
            return
        response = case.call(timeout=ANSWER_LIMIT_S)
        statuses.add(response.status_code)
        is_stream = response.headers.get("content-type", [""])[0].startswith("text/event-stream")
        case.validate_response(response, checks=CHECKS[:2] if is_stream else CHECKS)

    run()
    return statuses
