"""Bodies of the routes that describe the server or administer it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from router.schemas.base import Body


class Info(BaseModel):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
    model_dtype: str
    model_device_type: str
    waiting_served_ratio: float
    max_batch_total_tokens: int
    max_waiting_tokens: int
    max_batch_size: int | None
    tercet_version: str
    kv_cache_dtype: str
    quantize: str | None
    speculate: int
    speculator: str | None
    tool_call_parser: str
    reasoning_parser: str
    quantization: str | None
    has_chat_template: bool
    reads_images: bool
    sampling_defaults: dict[str, int | float]


class Version(BaseModel):
    version: str
    tgi_version: str


class PropsSettings(BaseModel):
    """`params` are the sampling defaults of OpenAI's routes, in llama.cpp's words."""

    n_ctx: int
    params: dict[str, int | float]


class PropsModalities(BaseModel):
    vision: bool
    audio: bool


class Props(BaseModel):
    """What llama.cpp's clients ask before their first request. A slot is a request that may run or wait."""

    default_generation_settings: PropsSettings
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    modalities: PropsModalities
    build_info: str


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str | None = None
    parent: str | None = None
    sampling_defaults: dict[str, int | float]


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class MessagesModel(BaseModel):
    """A model in the form of Anthropic's API, for requests with the header `anthropic-version`."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str


class MessagesModelList(BaseModel):
    data: list[MessagesModel]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False


class LoadAdapterBody(Body):
    """vLLM's body of /v1/load_lora_adapter."""

    lora_name: str | None = Field(None, description="Name under which requests ask for it.", examples=["poems"])
    lora_path: str | None = Field(None, description="Its folder, from `--lora-root` on.", examples=["poems-v2"])
    load_inplace: bool = Field(False, description="Replace the adapter of that name.", examples=[True])


class UnloadAdapterBody(Body):
    """vLLM's body of /v1/unload_lora_adapter."""

    lora_name: str | None = Field(None, description="Name under which it was loaded.", examples=["poems"])
