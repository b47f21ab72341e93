"""Bodies of refusals and failures, one form for each family of APIs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ErrorBody(BaseModel):
    """A refusal or failure in the form of TGI: `error` is a text for people, `error_type` a word for programs."""

    error: str
    error_type: str


class OpenAIErrorDetail(BaseModel):
    """`param` is the field that is at fault, `code` a word for the fault, where there are some."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """A refusal or failure in the form of OpenAI's API; `error_type` is TGI's word for it."""

    error: OpenAIErrorDetail
    error_type: str


class MessagesErrorDetail(BaseModel):
    type: str
    message: str


class MessagesError(BaseModel):
    """A refusal or failure in the form of Anthropic's API."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str
