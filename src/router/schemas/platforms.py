"""Bodies of the cloud platforms' routes: Vertex AI and KServe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from router.schemas.base import Body
from router.schemas.chat import ChatBody
from router.schemas.generate import NO_PARAMETERS, GenerateBody, GenerateParameters


def _kind(instance: Any) -> str:
    """As TGI, which tries a native body first."""
    is_native = isinstance(instance, GenerateBody) or (isinstance(instance, dict) and "inputs" in instance)
    return "generate" if is_native else "chat"


Instance = Annotated[
    Annotated[GenerateBody, Tag("generate")] | Annotated[ChatBody, Tag("chat")], Discriminator(_kind)
]  # fmt: skip


class VertexBody(Body):
    """A batch. A chat's `stream` and a text's `details` have no place in the answer and are ignored."""

    instances: list[Instance]


class VertexResponse(BaseModel):
    predictions: list[str]


class InferInput(Body):
    """A text as the bytes of its UTF-8 form."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Annotated[int, Field(ge=0, le=255)]]


class InferOutputName(Body):
    name: str


class InferBody(Body):
    """One generation for each input, named by the output at the same place."""

    id: str
    inputs: list[InferInput]
    outputs: list[InferOutputName]
    parameters: GenerateParameters = NO_PARAMETERS


class InferOutput(BaseModel):
    name: str
    shape: list[int]
    datatype: Literal["BYTES"] = "BYTES"
    data: list[int]


class InferResponse(BaseModel):
    id: str
    outputs: list[InferOutput]


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


class Live(BaseModel):
    live: bool
