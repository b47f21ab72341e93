"""JSON of answers: compact UTF-8, null for non-finite numbers, shortest float32."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response


def dumps(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)
