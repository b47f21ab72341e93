"""Bodies of the cloud platforms' routes: Vertex AI and KServe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, RootModel, Tag, model_validator

from router.api.chat.schema import ChatBody, ChatChunk, ChatCompletion
from router.api.completions.schema import Completion, CompletionChunk
from router.api.tgi.schema import NO_PARAMETERS, GenerateBody, GenerateParameters, GenerateResponse, StreamEvent
from router.errors import FieldError
from router.schemas.base import Body, Items


class VertexChat(ChatBody):
    """A chat as an instance."""

    request_format: Literal["chatCompletions"] | None = Field(
        default=None,
        alias="@requestFormat",
        description="`chatCompletions`: the prediction is a chat completion, else its text.",
        examples=["chatCompletions"],
    )


def _kind(instance: Any) -> str:
    """Tell the kind, trying `/generate`'s body first, as TGI."""
    has_inputs = isinstance(instance, GenerateBody) or (isinstance(instance, dict) and "inputs" in instance)
    return "generate" if has_inputs else "chat"


Instance = Annotated[
    Annotated[GenerateBody, Tag("generate")] | Annotated[VertexChat, Tag("chat")], Discriminator(_kind)
]  # fmt: skip


class VertexBody(Body):
    """A batch. A chat's `stream` and a text's `details` have no place in the answer and are ignored."""

    instances: Items[Instance] = Field(
        description="Bodies of `/generate` and chats, answered side by side; not more than the server takes requests.",
        examples=[[{"inputs": "The capital of France is", "parameters": {"max_new_tokens": 8}}]],
        json_schema_extra={"minItems": 1},
    )

    @model_validator(mode="before")
    @classmethod
    def _no_shared_parameters(cls, data: Any) -> Any:
        """Refuse what Vertex has for all instances; TGI ignores it."""
        if isinstance(data, dict) and data.get("parameters"):
            text = "`parameters` is not served here: give each instance its own"
            raise FieldError(text, param="parameters", reason="unsupported")
        return data


class SagemakerResponse(RootModel[list[GenerateResponse] | ChatCompletion | Completion]):
    """An answer of `/invocations`."""


class SagemakerStreamResponse(RootModel[StreamEvent | ChatChunk | CompletionChunk]):
    """An event of `/invocations`; those of chats and completions end with `data: [DONE]`."""


class VertexResponse(BaseModel):
    predictions: list[str | ChatCompletion]


class InferInput(Body):
    """A text as the bytes of its UTF-8 form."""

    name: str = Field(description="Has no effect.", examples=["input"])
    shape: Items[int] = Field(description="Has no effect.", examples=[[1]])
    datatype: str = Field(description="Without influence; `data` are bytes.", examples=["BYTES"])
    data: Items[Annotated[int, Field(ge=0, le=255)]] = Field(
        description="The bytes of the text in UTF-8.", examples=[[72, 101, 108, 108, 111]]
    )


class InferOutputName(Body):
    """What an output is to be called."""

    name: str = Field(description="The name.", examples=["output"])


class InferBody(Body):
    """One generation for each input, named by the output at the same place."""

    id: str = Field(description="Comes back in the answer.", examples=["1"])
    inputs: Items[InferInput] = Field(
        description="The prompts.",
        examples=[[{"name": "input", "shape": [1], "datatype": "BYTES", "data": [72, 101, 108, 108, 111]}]],
    )
    outputs: Items[InferOutputName] = Field(
        description="As many names as there are inputs.", examples=[[{"name": "output"}]]
    )
    parameters: GenerateParameters = Field(
        default=NO_PARAMETERS, description="Of every prompt.", examples=[{"max_new_tokens": 20}]
    )


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
