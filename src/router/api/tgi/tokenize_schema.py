"""Bodies of the routes between texts and tokens: TGI's, vLLM's and llama.cpp's."""

from __future__ import annotations

from pydantic import BaseModel, Field, RootModel

from router.api.chat.schema import ChatBody
from router.api.tgi.schema import GenerateParameters, Inputs
from router.schemas.base import Body, Items, UInt32
from router.schemas.parameters import Model


class TokenizeBody(Body):
    """Takes a generate body; the parameters have no influence on the answer."""

    inputs: Inputs
    parameters: GenerateParameters | None = Field(
        default=None, description="Without influence on the answer.", examples=[{"max_new_tokens": 20}]
    )


class TokenizePromptBody(Body):
    """vLLM's body of a text."""

    prompt: str = Field(description="The text.", examples=["The capital of France is"])
    add_special_tokens: bool = Field(
        default=True, description="Put the model's special tokens around the text.", examples=[False]
    )
    return_token_strs: bool = Field(
        default=False, description="Also list the tokens as the vocabulary writes them.", examples=[True]
    )
    model: Model = None


class TokenizeChatBody(ChatBody):
    """vLLM's body of a chat. What only sampling needs is ignored."""

    add_special_tokens: bool = Field(
        default=False, description="Put special tokens around those that the template writes.", examples=[True]
    )
    return_token_strs: bool = Field(
        default=False, description="Also list the tokens as the vocabulary writes them.", examples=[True]
    )


class TokenizeContentBody(Body):
    """llama.cpp's body."""

    content: str = Field(description="The text.", examples=["The capital of France is"])
    add_special: bool = Field(
        default=False, description="Put the model's special tokens around the text.", examples=[True]
    )
    parse_special: bool = Field(
        default=True,
        description="Read special tokens that the text names as such; otherwise they are text.",
        examples=[False],
    )
    with_pieces: bool = Field(default=False, description="List the tokens with their texts.", examples=[True])


class DetokenizeBody(Body):
    """vLLM's and llama.cpp's body."""

    tokens: Items[UInt32] = Field(description="Ids of tokens in the vocabulary.", examples=[[5, 6]])
    model: Model = None


class TokenSpan(BaseModel):
    """A token of `/tokenize`; `start` and `stop` are byte offsets into the UTF-8 text."""

    id: int
    text: str
    start: int
    stop: int


class TokenizeResponse(RootModel[list[TokenSpan]]):
    """An answer of `/tokenize` to `inputs`."""


class ChatTokenizeResponse(BaseModel):
    tokenize_response: list[TokenSpan]
    templated_text: str


class TokenIds(BaseModel):
    """vLLM's answer. `token_strs` are there if `return_token_strs` asks for them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenPiece(BaseModel):
    """A token of llama.cpp's answer; `piece` is a list of bytes where these are only part of a character."""

    id: int
    piece: str | list[int]


class TokenPieces(BaseModel):
    """llama.cpp's answer: ids, or objects if `with_pieces` asks for them."""

    tokens: list[int] | list[TokenPiece]


class DetokenizeResponse(BaseModel):
    """The text, special tokens included, under vLLM's and llama.cpp's names."""

    prompt: str
    content: str


class TemplateResponse(BaseModel):
    prompt: str
