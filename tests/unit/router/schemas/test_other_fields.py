"""Fields of other servers on each family of routes: every row of the table, over HTTP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from router_fakes import Router, is_invalid, message_of

from docs.generate.field_tables import BODIES, text_of
from router.api.chat.schema import ChatBody
from router.api.completions.schema import CompletionBody
from router.api.embeddings.schema import DocumentsBody, EmbedBody, EmbeddingsBody, PredictBody, ScoreBody
from router.api.responses.schema import ResponsesBody
from router.schemas.base import Body
from router.schemas.other_fields import HARMLESS, REFUSED, Family, served_as
from router.schemas.unknown import UnknownNames

HI = [{"role": "user", "content": "Hi"}]
ROUTES: dict[Family, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HI}),
    "completions": ("/v1/completions", {"prompt": "Hi"}),
    "responses": ("/v1/responses", {"input": "Hi"}),
    "messages": ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": HI}),
}
TEXTS: list[tuple[type[Body], dict[str, Any]]] = [
    (EmbeddingsBody, {"input": "Hi"}),
    (EmbedBody, {"inputs": "Hi"}),
    (DocumentsBody, {"query": "Hi", "documents": ["Hello"]}),
    (ScoreBody, {"text_1": "Hi", "text_2": "Hello"}),
    (PredictBody, {"inputs": "Hi"}),
]


@pytest.mark.parametrize("family", ROUTES)
async def test_what_would_change_the_answer_is_refused_by_name(router: Router, family: Family) -> None:
    path, body = ROUTES[family]
    for name, refused in REFUSED[family].items():
        assert name not in BODIES[family][0].model_fields, f"{name} is served"
        for value in ("x", 7.5, {"a": 1}):
            answer = await router.post(path, body | {name: value})
            assert is_invalid(answer), (name, answer.text)
            said = f"`{name}` is not served here: {refused.remedy}"
            assert message_of(answer).endswith(said) and answer.json()["error"].get("param", name) == name, answer.text
    assert router.scheduler.submitted == []


@pytest.mark.parametrize("family", ROUTES)
async def test_values_that_ask_for_nothing_and_harmless_fields_are_taken(router: Router, family: Family) -> None:
    path, body = ROUTES[family]
    for refused in REFUSED[family].values():
        assert not any(map(refused.is_asked, (None, *refused.neutral)))
    quiet = {name: refused.neutral[0] for name, refused in REFUSED[family].items() if refused.neutral}
    answer = await router.post(
        path, body | quiet | dict.fromkeys(HARMLESS[family] - BODIES[family][0].known_names, "x")
    )
    assert answer.status_code == 200, answer.text


def test_no_field_is_in_two_states() -> None:
    for family, bodies in BODIES.items():
        for body in bodies:
            assert not REFUSED[family].keys() & served_as(body.field_names).keys(), family
        assert not HARMLESS[family] & REFUSED[family].keys(), family


NAMED = re.compile(r"(?<!role )`(\w+)[^`]*`(?!(?: (?:with|and) `[^`]+`)* of )")
"""A field of the same route in a remedy, unlike `echo` of another route or the role `system`."""


def test_no_remedy_names_a_field_that_is_refused_on_the_same_route() -> None:
    for family, bodies in BODIES.items():
        served = frozenset().union(*(body.field_names for body in bodies))
        for name, refused in REFUSED[family].items():
            named = set(NAMED.findall(refused.remedy))
            assert not named & (REFUSED[family].keys() - served), (family, name, refused.remedy)


def test_what_asks_for_nothing_is_each_fields_own() -> None:
    neutral = {"encoder_no_repeat_ngram_size": 0, "diversity_penalty": 0, "num_beam_groups": 1}
    for name, value in neutral.items():
        assert not REFUSED["chat"][name].is_asked(value) and REFUSED["chat"][name].is_asked(1 - value), name


@pytest.mark.parametrize(("body", "given"), TEXTS, ids=lambda value: getattr(value, "__name__", ""))
def test_texts_have_their_own_fields(body: type[Body], given: dict[str, Any]) -> None:
    refused = {name: row for name, row in REFUSED["embeddings"].items() if name not in body.model_fields}
    for name, row in refused.items():
        with pytest.raises(ValidationError, match=re.escape(f"`{name}` is not served here: {row.remedy}")):
            body.model_validate(given | {name: "x"}, context=UnknownNames())
    quiet = {name: row.neutral[0] for name, row in refused.items() if row.neutral}
    names = UnknownNames()
    body.model_validate(given | quiet | {"metadata": {"a": 1}}, context=names)
    assert names.fault is None


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("chat", {"repeat_penalty": 1.25}, {"repetition_penalty": 1.25}),
        ("responses", {"repeat_penalty": 1.25}, {"repetition_penalty": 1.25}),
        ("chat", {"typ_p": 0.5}, {"typical_p": 0.5}),
        ("completions", {"typ_p": 1}, {"typical_p": 1.0}),
        ("responses", {"seed": 7, "top_k": 3, "min_p": 0.25}, {"seed": 7, "top_k": 3, "min_p": 0.25}),
        ("responses", {"logit_bias": {"5": 2}, "min_tokens": 2}, {"logit_bias": ((5, 2.0),), "min_tokens": 2}),
        ("messages", {"seed": 7, "repetition_penalty": 1.5}, {"seed": 7, "repetition_penalty": 1.5}),
        ("messages", {"presence_penalty": 1, "frequency_penalty": 0.5},
         {"presence_penalty": 1.0, "absolute_frequency_penalty": 0.5}),
    ],
)  # fmt: skip
async def test_parameters_are_served_on_every_family(
    router: Router, family: Family, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    path, body = ROUTES[family]
    answer = await router.post(path, body | fields)
    assert answer.status_code == 200, answer.text
    sampling = router.scheduler.last.sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


@pytest.mark.parametrize("family", ROUTES)
async def test_the_salt_of_another_server_is_one_of_ours(router: Router, family: Family) -> None:
    path, body = ROUTES[family]
    answer = await router.post(path, body | {"extra_key": "tenant"})
    assert answer.status_code == 200, answer.text
    assert router.scheduler.last.cache_salt.endswith("tenant")


@pytest.mark.parametrize("family", ["chat", "responses", "messages"])
@pytest.mark.parametrize(
    "form",
    [
        {"guided_json": {"type": "object"}}, {"structured_outputs": {"json": {"type": "object"}}},
        {"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}},
        {"grammar": 'root ::= "yes" | "no"'}, {"guided_choice": ["a", "b"]},
    ],
)  # fmt: skip
async def test_forms_of_the_answer_are_served(router: Router, family: Family, form: dict[str, Any]) -> None:
    path, body = ROUTES[family]
    answer = await router.post(path, body | form)
    assert answer.status_code == 200, answer.text
    assert router.scheduler.last.sampling.grammar_kind != "none"


async def test_lengths_and_stops_under_other_names(router: Router) -> None:
    for family in ("chat", "completions", "messages"):
        path, body = ROUTES[family]
        others = {name: value for name, value in body.items() if name != "max_tokens"}
        for name in ("n_predict", "num_predict", "max_completion_tokens", "max_output_tokens"):
            assert (await router.post(path, others | {name: 3})).status_code == 200
            assert router.scheduler.last.stopping.max_new_tokens == 3
    path, body = ROUTES["responses"]
    assert (await router.post(path, body | {"stop": ["END"], "ignore_eos": True})).status_code == 200
    stopping = router.scheduler.last.stopping
    assert stopping.stop_sequences == ("END",) and stopping.ignore_eos_token


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("chat", {"repeat_penalty": 1.5, "repetition_penalty": 1.25}),
        ("chat", {"max_tokens": 5, "n_predict": 6}),
        ("responses", {"response_format": {"type": "json_object"}, "text": {"format": {"type": "json_object"}}}),
        ("messages", {"response_format": {"type": "json_object"},
                      "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}),
    ],
)  # fmt: skip
async def test_two_values_for_one_field(router: Router, family: Family, fields: dict[str, Any]) -> None:
    path, body = ROUTES[family]
    answer = await router.post(path, body | fields)
    assert is_invalid(answer) and "two names of one field" in message_of(answer), answer.text


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("chat", {"repeat_penalty": 0}, "`repeat_penalty` must be"),
        ("chat", {"repeat_penalty": "x"}, "repeat_penalty: Input should be"),
        ("completions", {"n_predict": 0}, "`n_predict` must be > 0"),
        ("chat", {"num_predict": -2}, "num_predict: Input should be"),
        ("messages", {"repeat_penalty": -1}, "`repeat_penalty` must be"),
        ("completions", {"num_predict": 1024, "prompt": "ab " * 800}, "and `num_predict` asks for 1024"),
        ("chat", {"thinking_budget": -2}, "thinking_budget: Input should be"),
        ("chat", {"reasoning_budget": 5, "thinking_budget_tokens": 6}, "`reasoning_budget` is given twice"),
        ("chat", {"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking: Input should be"),
    ],
)
async def test_faults_are_told_under_the_clients_names(
    router: Router, family: Family, fields: dict[str, Any], said: str
) -> None:
    path, body = ROUTES[family]
    answer = await router.post(path, body | fields)
    assert is_invalid(answer) and said in message_of(answer), answer.text
    given = {name for name in fields if name in said}
    assert answer.json()["error"].get("param", *given) in {*given, "prompt"}, answer.text


@pytest.mark.parametrize(
    "form",
    [
        {"grammar": "x ::="}, {"guided_grammar": "x ::="}, {"ebnf": "x ::="}, {"regex": "("}, {"guided_regex": "("},
        {"guided_json": {"type": 5}}, {"structured_outputs": {"regex": "("}},
    ],
)  # fmt: skip
async def test_faults_of_grammars_name_their_field(router: Router, form: dict[str, Any]) -> None:
    for family in ("chat", "completions", "responses"):
        path, body = ROUTES[family]
        answer = await router.post(path, body | form)
        assert is_invalid(answer) and answer.json()["error"]["param"] == next(iter(form)), (family, answer.text)


def test_budgets_of_thinking_under_other_names() -> None:
    for name in ("thinking_budget", "reasoning_budget", "thinking_budget_tokens", "thinking_token_budget"):
        assert ChatBody.model_validate({"messages": HI, name: 5}).thinking_budget == 5
    for name in ("thinking_budget", "reasoning_budget"):
        assert ResponsesBody.model_validate({"input": "Hi", name: 5}).thinking_token_budget == 5


SWITCHES = "{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}"


@pytest.mark.parametrize(
    ("family", "fields", "prompt"),
    [
        ("chat", {"enable_thinking": False}, "False False "),
        ("chat", {"think": True}, "True True "),
        ("chat", {"think": "low"}, "  low"),
        ("chat", {"thinking": {"type": "disabled"}}, "False False "),
        ("chat", {"thinking": {"type": "adaptive"}}, "  "),
        ("chat", {"enable_thinking": False, "chat_template_kwargs": {"thinking": 3}}, "False 3 "),
        ("responses", {"enable_thinking": False}, "False False "),
        ("responses", {"chat_template_kwargs": {"thinking": 1}}, " 1 "),
        ("messages", {"chat_template_kwargs": {"thinking": 1}}, " 1 "),
        ("messages", {"think": False}, "False False "),
    ],
)
async def test_switches_of_thinking(make_router: Any, family: Family, fields: dict[str, Any], prompt: str) -> None:
    router = make_router(templates={"default": SWITCHES + "."})
    path, body = ROUTES[family]
    answer = await router.post(path, body | fields)
    assert answer.status_code == 200, answer.text
    assert router.scheduler.last.inputs == prompt + "."


async def test_switches_of_another_type_are_refused(router: Router) -> None:
    path, body = ROUTES["chat"]
    for fields in ({"enable_thinking": "no"}, {"think": 3}, {"thinking": True}, {"thinking": {"type": "maybe"}}):
        answer = await router.post(path, body | fields)
        assert is_invalid(answer) and f"`{next(iter(fields))}` must be" in message_of(answer), answer.text


def test_the_document_has_the_table() -> None:
    text = Path("docs/compatibility.md").read_text()
    found = re.search(r"<!-- fields -->\n(.*?)\n<!-- end of fields -->", text, re.DOTALL)
    assert found is not None and found[1] == text_of(), "run `python -m docs.generate`"


OF_OTHER_SERVERS: list[tuple[type[Body], str]] = [
    (ChatBody, "add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template "
     "chat_template_kwargs continue_final_message documents ec_transfer_params echo ignore_eos include_reasoning "
     "include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids media_io_kwargs min_p min_tokens "
     "mm_processor_kwargs priority prompt_logprobs reasoning_effort repetition_detection repetition_penalty request_id "
     "return_mm_kwargs return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids "
     "routed_experts_prompt_start session_id skip_special_tokens spaces_between_special_tokens stop_token_ids "
     "stream_interval structured_outputs thinking_token_budget top_k truncate_prompt_tokens truncation_side "
     "use_beam_search vllm_xargs watermarking"),
    (CompletionBody, "add_special_tokens cache_salt ec_transfer_params logprob_token_ids prompt_embeds "
     "repetition_detection response_format return_mm_kwargs return_token_ids return_token_offsets "
     "routed_experts_prompt_start stream_interval structured_outputs thinking_token_budget watermarking"),
    (ResponsesBody, "cache_salt enable_response_messages ignore_eos include_stop_str_in_output logit_bias "
     "mm_processor_kwargs previous_input_messages previous_response priority prompt_cache_key repetition_penalty "
     "request_id seed skip_special_tokens stop structured_outputs top_k vllm_xargs"),
    (ChatBody, "bootstrap_host bootstrap_port bootstrap_room custom_logit_processor custom_params data_parallel_rank "
     "disagg_prefill_dp_rank ebnf extra_key images_config input_ids lora_path max_dynamic_patch min_dynamic_patch "
     "ngram_corpus_id no_stop_trim regex return_cached_tokens_details return_hidden_states return_meta_info "
     "return_prompt_token_ids return_routed_experts rid routed_dp_rank routed_experts_start_len separate_reasoning "
     "session_params stop_regex stream_reasoning task use_audio_in_video"),
    (CompletionBody, "best_of custom_labels images_config json_schema ngram_corpus_id return_cached_tokens_details "
     "return_routed_experts routed_dp_rank session_params stop_regex"),
    (CompletionBody, "cache_prompt dry_multiplier id_slot min_keep mirostat n_cache_reuse n_discard n_indent n_keep "
     "n_predict n_probs post_sampling_probs repeat_last_n repeat_penalty response_fields return_tokens samplers "
     "t_max_predict_ms timings_per_token top_n_sigma typical_p xtc_probability"),
]  # fmt: skip
"""What vLLM, SGLang and llama.cpp have beside OpenAI's."""


def test_every_field_of_other_servers_is_decided() -> None:
    for body, names in OF_OTHER_SERVERS:
        assert set(names.split()) <= body.known_names | body.harmless_names, body
