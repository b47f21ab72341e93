"""Names that no field of a body has: a misspelt one is refused by name on every route, what others send is ignored."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import Router, is_invalid, message_of

from router.api.chat.schema import CalledFunction, ChatBody, FunctionDefinition, ImagePart, ImageUrl, Message
from router.api.completions.schema import CompletionBody
from router.api.platforms.schema import InferBody, InferInput, VertexBody
from router.api.tgi.schema import CompatBody, GenerateParameters
from router.config import RouterConfig
from router.schemas import unknown
from router.schemas.base import Body
from router.schemas.grammar import Grammar
from router.schemas.openai import StreamOptions, TextPart
from router.schemas.unknown import UnknownNames

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"inputs": "x"}
INFER: dict[str, Any] = {
    "id": "1",
    "inputs": [{"name": "a", "shape": [1], "datatype": "BYTES", "data": [120]}],
    "outputs": [{"name": "b"}],
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "paramters": {}}}

# Of OpenAI's chats and completions, and of vLLM, SGLang, llama.cpp, OpenRouter, text-generation-webui and transformers.
OF_OTHERS = """
audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens metadata modalities
n parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_retention reasoning_effort
response_format safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
top_logprobs top_p user verbosity web_search_options best_of echo suffix use_beam_search top_k min_p repetition_penalty
length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids bad_words add_generation_prompt
continue_final_message add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs
mm_processor_kwargs guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
guided_whitespace_pattern structured_outputs structural_tag priority request_id logits_processors
return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs include_reasoning prompt_embeds
regex ebnf no_stop_trim stop_regex separate_reasoning stream_reasoning lora_path session_params custom_logit_processor
return_hidden_states rid top_logprobs_num min_new_tokens n_predict n_keep cache_prompt id_slot mirostat mirostat_tau
dynatemp_range xtc_probability dry_multiplier repeat_penalty repeat_last_n top_n_sigma grammar json_schema samplers
min_keep t_max_predict_ms timings_per_token n_probs tfs_z top_a smoothing_factor temperature_last dynamic_temperature
max_new_tokens truncation_length ban_eos_token custom_token_bans encoder_repetition_penalty repetition_penalty_range
no_repeat_ngram_size penalty_alpha guidance_scale negative_prompt tfs epsilon_cutoff mode character transforms models
route provider reasoning plugins usage timeout api_key extra_body adapter_id decoder_input_details details
return_full_text truncate watermark stop_sequences top_n_tokens max_length min_length num_beams num_return_sequences
pad_token_id eos_token_id use_cache options max_time return_text prefix keep_alive format images system context think
users top_h min_k verbose inputs model messages prompt
"""
OF_OTHERS_INSIDE = """
role content name refusal audio function_call tool_calls tool_call_id annotations reasoning_content reasoning
reasoning_details thinking thinking_blocks prefix partial cache_control id provider_specific_fields images weight
tool_name channel recipient tools status type index text image_url input_audio file video_url url detail uuid strict
parameters arguments description include_usage include_obfuscation continuous_usage_stats value schema json_schema
shape datatype data binary_data context citations
"""


@pytest.mark.parametrize(
    ("path", "body", "misspelt", "meant"),
    [
        *((path, TEXT | {"parameters": {"temprature": 1}}, "temprature", "temperature")
          for path in ("/generate", "/generate_stream", "/", "/tokenize", "/invocations")),
        ("/generate", TEXT | {"parameters": {"maxNewTokens": 1}}, "maxNewTokens", "max_new_tokens"),
        ("/generate", TEXT | {"parameters": {"Temperature": 1}}, "Temperature", "temperature"),
        ("/v1/chat/completions", CHAT | {"MAX_TOKENS": 5}, "MAX_TOKENS", "max_tokens"),
        ("/generate", TEXT | {"paramters": {}}, "paramters", "parameters"),
        ("/generate", {"input": "x"}, "input", "inputs"),
        ("/generate", TEXT | {"parameters": {"grammar": {"type": "regex", "vaule": "a"}}}, "vaule", "value"),
        *((path, CHAT | {"max_token": 5}, "max_token", "max_tokens")
          for path in ("/v1/chat/completions", "/chat_tokenize", "/invocations")),
        ("/v1/chat/completions", {"message": CHAT["messages"]}, "message", "messages"),
        ("/v1/chat/completions", CHAT | {"tempreature": 1}, "tempreature", "temperature"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "contnet": "x"}]}, "contnet", "content"),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "tool_cal_id": "1"}]}, "tool_cal_id", "tool_call_id"),
        ("/v1/chat/completions", CHAT | {"tools": [TOOL]}, "paramters", "parameters"),
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema", "json_shema": {}}},
         "json_shema", "json_schema"),
        ("/v1/chat/completions", CHAT | {"stream_options": {"inclde_usage": True}}, "inclde_usage", "include_usage"),
        ("/v1/completions", {"prompt": "x", "frequence_penalty": 1}, "frequence_penalty", "frequency_penalty"),
        ("/invocations", {"prompt": "x", "best_off": 1}, "best_off", "best_of"),
        ("/vertex", {"instances": [TEXT | {"parameters": {"top-nn-tokens": 1}}]}, "top-nn-tokens", "top_n_tokens"),
        ("/vertex", {"instances": [CHAT | {"max_token": 1}]}, "max_token", "max_tokens"),
        ("/v2/models/m/versions/1/infer", INFER | {"parameters": {"temprature": 1}}, "temprature", "temperature"),
    ],
)  # fmt: skip
async def test_a_misspelt_name_is_refused_with_the_right_one(
    make_router: Callable[..., Router], path: str, body: dict[str, Any], misspelt: str, meant: str
) -> None:
    router = make_router(config=RouterConfig(kserve_api=True))
    answer = await router.post(path, body)
    assert is_invalid(answer)
    expected = f"unknown parameter `{misspelt}`: did you mean `{meant}`?"
    assert message_of(answer).removeprefix("Failed to deserialize the JSON body: ") == expected
    assert answer.json()["error_type"] == "validation"
    assert router.scheduler.submitted == []


def fault(body_type: type[Body], names: list[str]) -> str | None:
    gathered = UnknownNames()
    gathered.found([name for name in names if name not in body_type.known_names], body_type.known_names)
    return gathered.fault


@pytest.mark.parametrize("body_type", [GenerateParameters, ChatBody, CompletionBody, VertexBody])
def test_what_clients_of_other_servers_send_is_no_mistake(body_type: type[Body]) -> None:
    for name in OF_OTHERS.split():
        assert fault(body_type, [name]) is None, name


@pytest.mark.parametrize(
    "body_type",
    [Message, TextPart, ImagePart, ImageUrl, StreamOptions, InferInput, Grammar, CalledFunction, FunctionDefinition,
     CompatBody, InferBody],
)  # fmt: skip
def test_nor_what_they_send_inside(body_type: type[Body]) -> None:
    for name in OF_OTHERS_INSIDE.split():
        assert fault(body_type, [name]) is None, name


def test_no_known_name_is_taken_for_another() -> None:
    for one, other in itertools.permutations((GenerateParameters, ChatBody, CompletionBody), 2):
        for name in other.known_names:
            assert fault(one, [name]) is None, name


async def test_a_null_is_absent_whatever_its_name(router: Router) -> None:
    assert (await router.post("/v1/chat/completions", CHAT | {"temprature": None})).status_code == 200


async def test_other_names_are_logged_once_and_only_if_they_can_be_names(
    router: Router, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown, "_logged", set())
    caplog.set_level(logging.INFO, logger="router.schemas.unknown")
    for _ in range(2):
        answer = await router.post("/v1/chat/completions", CHAT | {"request_id": "a", "banana": 1, "my secret\n": 1})
        assert answer.status_code == 200
    messages = [record.getMessage() for record in caplog.records if record.name == "router.schemas.unknown"]
    assert len(messages) == 1 and "`banana`" in messages[0], "`request_id` is known to change nothing"


async def test_a_parameter_outside_of_parameters_is_ignored_and_its_place_is_named(
    router: Router, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown, "_logged", set())
    caplog.set_level(logging.INFO, logger="router.schemas.unknown")
    for path in ("/generate", "/"):
        assert (await router.post(path, TEXT | {"max_new_tokens": 5})).status_code == 200
    (message,) = [record.getMessage() for record in caplog.records if record.name == "router.schemas.unknown"]
    assert message == (
        "unknown parameter `max_new_tokens` of a request is ignored; its place is in `parameters`; each name "
        "is logged once"
    )


async def test_clients_cannot_make_the_memory_of_names_grow(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: set[str] = set()
    monkeypatch.setattr(unknown, "_logged", logged)
    for start in range(0, 1000, 40):
        body = CHAT | {f"name_{number}": 1 for number in range(start, start + 40)}
        assert (await router.post("/v1/chat/completions", body)).status_code == 200
    assert len(logged) == 256


async def test_names_without_end_are_compared_to_a_limit(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    closest = unknown.closest

    def counted(*args: Any, **kwargs: Any) -> str | None:
        nonlocal compared
        compared += 1
        return closest(*args, **kwargs)

    monkeypatch.setattr(unknown, "closest", counted)
    part = ",".join(f'"name_{number}":1' for number in range(20_000))
    raw = b'{"messages":%s,%s}' % (json.dumps(CHAT["messages"]).encode(), part.encode())
    assert (await router.post("/v1/chat/completions", raw=raw)).status_code == 200
    assert compared == 64
