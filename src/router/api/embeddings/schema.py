"""Bodies and answers of the routes for vectors and scores."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from router.api.embeddings.inputs import InputField, PairField
from router.schemas import base
from router.schemas.base import Items
from router.schemas.other_fields import Family

DirectionField = Annotated[
    Literal["left", "right"],
    BeforeValidator(lambda value: value.lower() if value in ("Left", "Right") else value),
]
_TRUNCATE = "Cut a text that is too long; unset: as the server's `--auto-truncate`."
_DIRECTION = "What is cut off: the end (`right`) or the beginning (`left`)."
_PROMPT = "Name of the model's prompt that is put in front of each text; unset: the model's default, or none."
_DIMENSIONS = "How many numbers of each vector are kept; it is normalized afterwards."


class Body(base.Body):
    """A body of these routes, whose fields of other servers are in their table."""

    family: ClassVar[Family | None] = "embeddings"


class Truncated(Body):
    """What TEI's bodies have in common."""

    truncate: bool | None = Field(None, description=_TRUNCATE, examples=[True])
    truncation_direction: DirectionField = Field("right", description=_DIRECTION, examples=["right"])


class TokensBody(Truncated):
    """TEI's /embed_all and /embed_sparse."""

    inputs: InputField = Field(..., description="Text, token ids, or a list of these.", examples=["What is rain?"])
    prompt_name: str | None = Field(None, description=_PROMPT, examples=["query"])


class EmbedBody(TokensBody):
    """TEI's /embed."""

    normalize: bool = Field(True, description="Divide each vector by its length.", examples=[True])
    dimensions: int | None = Field(None, description=_DIMENSIONS, examples=[256])


class SimilarityInputs(base.Body):
    """A sentence and those that it is compared with."""

    source_sentence: str = Field(..., description="Compared with each of `sentences`.", examples=["What is rain?"])
    sentences: Items[str] = Field(..., description="Sentences.", examples=[["Water that falls"]])


class SimilarityParameters(Truncated):
    """See `EmbedBody`."""

    prompt_name: str | None = Field(None, description=_PROMPT, examples=["query"])


class SimilarityBody(Body):
    """TEI's /similarity."""

    inputs: SimilarityInputs = Field(..., description="The sentences.")
    parameters: SimilarityParameters | None = Field(None, description="How they are read.")


class PredictBody(Truncated):
    """TEI's /predict."""

    inputs: PairField = Field(..., description="Text, pair, or a list of lists of one or two.", examples=["I like it"])
    raw_scores: bool = Field(False, description="The model's numbers as they are.", examples=[False])


class RerankBody(Truncated):
    """TEI's /rerank with `texts`; with `documents` that of Cohere, Jina and vLLM."""

    query: str = Field(..., description="What the texts are ranked by.", examples=["What is rain?"])
    texts: Items[str] | None = Field(None, description="Texts; the answer is TEI's list.", examples=[["Water"]])
    raw_scores: bool = Field(False, description="The model's numbers as they are.", examples=[False])
    return_text: bool = Field(False, description="Give each text back.", examples=[False])
    documents: Items[Any] | None = Field(None, description="Texts; the answer is an object.", examples=[["Water"]])
    model: str | None = Field(None, description="Any name is taken.", examples=["reranker"])
    top_n: int | None = Field(None, ge=1, description="How many of the best are answered.", examples=[3])
    return_documents: bool = Field(False, description="Give each document back.", examples=[False])
    max_tokens_per_doc: int | None = Field(None, ge=1, description="Documents are cut to these.", examples=[512])
    instruction: str | None = Field(None, description="What is looked for, for models that read one.", examples=[""])


class DocumentsBody(Body):
    """/v1/rerank and /v2/rerank of Cohere, Jina and vLLM."""

    query: str = Field(..., description="What the documents are ranked by.", examples=["What is rain?"])
    documents: Items[Any] = Field(..., description='Texts, or objects {"text": ...}.', examples=[["Water"]])
    model: str | None = Field(None, description="Any name is taken.", examples=["reranker"])
    top_n: int | None = Field(None, ge=1, description="How many of the best are answered.", examples=[3])
    return_documents: bool = Field(False, description="Give each document back.", examples=[False])
    max_tokens_per_doc: int | None = Field(None, ge=1, description="Documents are cut to these.", examples=[512])
    instruction: str | None = Field(None, description="What is looked for, for models that read one.", examples=[""])
    user: str | None = Field(None, description="Not looked at.", examples=["someone"])


InputType = Literal["query", "document", "passage", "search_query", "search_document"]


class EmbeddingsBody(Body):
    """OpenAI's /v1/embeddings."""

    input: InputField = Field(..., description="Text, token ids, or a list of these.", examples=["What is rain?"])
    model: str | None = Field(None, description="Any name is taken.", examples=["embedder"])
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="A list of numbers, or the bytes of 32 bit floats, little-endian.", examples=["float"]
    )
    dimensions: int | None = Field(None, description=_DIMENSIONS, examples=[256])
    user: str | None = Field(None, description="Not looked at.", examples=["someone"])
    prompt_name: str | None = Field(None, description=_PROMPT, examples=["query"])
    input_type: InputType | None = Field(
        None, description="The prompt of that name, or of one that means the same.", examples=["query"]
    )
    normalize: bool = Field(True, description="Divide each vector by its length.", examples=[True])
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Texts are cut to as many tokens; -1: to the most that are read.", examples=[256]
    )


class ScoreBody(Body):
    """vLLM's /score."""

    text_1: str | Items[str] = Field(..., description="A text, or as many as `text_2` has.", examples=["What is rain?"])
    text_2: str | Items[str] = Field(..., description="A text, or several.", examples=[["Water that falls"]])
    model: str | None = Field(None, description="Any name is taken.", examples=["reranker"])
    truncate_prompt_tokens: int | None = Field(None, ge=-1, description="Pairs are cut to as many.", examples=[256])


class ClassifyBody(Body):
    """vLLM's /classify."""

    input: str | Items[str] = Field(..., description="A text, or several.", examples=["I like it"])
    model: str | None = Field(None, description="Any name is taken.", examples=["classifier"])
    truncate_prompt_tokens: int | None = Field(None, ge=-1, description="Texts are cut to as many.", examples=[256])


class TokenizeTextsBody(Body):
    """TEI's /tokenize."""

    inputs: str | Items[str] = Field(..., description="A text, or several.", examples=["What is rain?"])
    add_special_tokens: bool = Field(True, description="Those that the model is given too.", examples=[True])
    prompt_name: str | None = Field(None, description=_PROMPT, examples=["query"])


class DecodeBody(Body):
    """TEI's /decode."""

    ids: Items[Any] = Field(..., description="Token ids, or a list of lists of them.", examples=[[101, 102]])
    skip_special_tokens: bool = Field(True, description="Leave special tokens out.", examples=[True])


class SparseValue(BaseModel):
    """A number of a sparse vector that is not 0."""

    index: int
    value: float


class Prediction(BaseModel):
    """A label and how well it fits."""

    score: float
    label: str


class Rank(BaseModel):
    """A text's place in the request, and its score."""

    index: int
    text: str | None = None
    score: float


class SimpleToken(BaseModel):
    """A token of a text; special ones stand for nothing in it."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Embedding(BaseModel):
    """A text's vector; a text of base64 if that was asked for."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """OpenAI's answer."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class RankedDocument(BaseModel):
    """A document's place in the request, and how relevant it is."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class Ranking(BaseModel):
    """Cohere's and Jina's answer, the best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: Usage
    meta: dict[str, Any]


class Score(BaseModel):
    """How relevant one text is for another."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(BaseModel):
    """vLLM's answer."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage


class LabelledText(BaseModel):
    """The likeliest label of a text, and how likely all of them are."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class LabelledList(BaseModel):
    """vLLM's answer."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[LabelledText]
    usage: Usage


class ModelKind(BaseModel):
    """What the model gives: how it pools, or its labels."""

    embedding: dict[str, Any] | None = None
    classifier: dict[str, Any] | None = None
    reranker: dict[str, Any] | None = None


class PooledInfo(BaseModel):
    """TEI's /info, and our version."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: ModelKind
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    tercet_version: str
    task: str
    dimensions: int


class PooledCard(BaseModel):
    """An entry of /v1/models."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int
    task: str


class PooledModels(BaseModel):
    """/v1/models."""

    object: Literal["list"] = "list"
    data: list[PooledCard]
