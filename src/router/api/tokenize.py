"""`/tokenize`: how the model cuts a text into tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from router.api.body import read_body
from router.api.json_out import JsonResponse
from router.api.openapi import documented
from router.api.served import served_of
from router.errors import ValidationError
from router.schemas.generate import TokenizeBody, TokenSpan

routes = APIRouter(tags=["Tokenization"])


@routes.post("/tokenize", **documented(TokenizeBody, list[TokenSpan]))
async def tokenize(request: Request) -> Response:
    """The tokens of `inputs`, special tokens included, with byte offsets. The parameters are ignored."""
    served = served_of(request)
    body = await read_body(request, TokenizeBody, limit=served.config.payload_limit)
    if not body.inputs:
        raise ValidationError("`inputs` cannot be empty")
    try:
        spans = await served.inference.tokenizer.spans(body.inputs, add_special_tokens=True)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ValidationError(f"tokenizer error: {error}") from None
    return JsonResponse([{"id": span.id, "text": span.text, "start": span.start, "stop": span.stop} for span in spans])
