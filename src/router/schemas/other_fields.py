"""Fields of other servers by family of routes: served under our name, harmless, or refused; others are ignored.

The table checks bodies and makes docs/compatibility.md's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from router.errors import FieldError

Family = Literal["chat", "completions", "responses", "messages", "embeddings"]
# Embeddings: also scores and classes.
FAMILIES: tuple[Family, ...] = get_args(Family)
Place = Literal[
    "chat messages", "chat content", "chat calls", "chat tools", "chat tool_choice", "chat stream_options",
    "chat response_format", "responses input", "responses content", "responses tools", "responses tool_choice",
    "responses reasoning", "responses stream_options", "messages messages", "messages content", "messages tools",
    "messages thinking", "messages output_config",
]  # fmt: skip
PLACES: tuple[Place, ...] = get_args(Place)
"""Objects inside bodies: a family and a field. Blocks and parts are `content`; completions have some of chats."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A field that would change the answer."""

    # Values that ask for nothing, beside null.
    neutral: tuple[object, ...]
    # What to do instead.
    remedy: str

    def is_asked(self, value: object) -> bool:
        return value is not None and not any(_is_same(value, one) for one in self.neutral)


_Row = tuple[str, str, tuple[object, ...], str]
_LEAVE_OUT = "leave it out"
_IN_CHATS = "use /v1/chat/completions"
_IN_MODEL = "name the adapter in `model`"
_BY_BIAS = "use `logit_bias`"
_BY_INCLUDE = "use `message.output_text.logprobs` in `include`, and `top_logprobs`"

_LETTERS: Mapping[Family, str] = {
    "chat": "c", "completions": "t", "responses": "r", "messages": "m", "embeddings": "e",
}  # fmt: skip

# Letters of families, names, neutral values, remedy.
_REFUSED: tuple[_Row, ...] = (
    ("crm", "structural_tag", (), "use `structured_outputs`, or `tools`"),
    ("t", "structural_tag", (), "use `structured_outputs`"),
    ("ctrm", "guided_whitespace_pattern", (), "use a regular expression"),
    ("ctrm", "allowed_token_ids", ([],), "use `logit_bias` or a regular expression"),
    ("ctrm", "bad_words bad_words_ids custom_token_bans suppress_tokens", ([], ""), _BY_BIAS),
    ("ctrm", "skip_special_tokens spaces_between_special_tokens", (True,), "special tokens are left out"),
    ("ctrm", "truncate_prompt_tokens truncation_side truncation_length", (), "use `truncate` of TGI's routes"),
    ("ctrm", "truncate", (), "use TGI's routes"),
    ("ctrm", "return_token_ids return_tokens_as_token_ids return_tokens", (False,),
     "use `details` of /generate, whose tokens have ids"),
    ("ctrm", "details decoder_input_details", (False,), "use /generate"),
    ("ctrm", "prompt_logprobs", (), "use `decoder_input_details` of /generate, or `echo` with `logprobs` of "
     "/v1/completions"),
    ("ctrm", "use_beam_search early_stopping", (False,), _LEAVE_OUT),
    ("ctrm", "length_penalty num_beams num_beam_groups guidance_scale encoder_repetition_penalty tfs tfs_z", (1,),
     _LEAVE_OUT),
    ("ctrm", "chat_template", (), "set CHAT_TEMPLATE for the server"),
    ("tr", "documents", ([],), "put them into the prompt"),
    ("trm", "add_generation_prompt", (True,), "it belongs to a chat"),
    ("trm", "continue_final_message", (False,), "it belongs to a chat"),
    ("ctrm", "modalities", (["text"], []), "answers are text; leave it out"),
    ("ctrm", "audio", (), "answers are text; leave it out"),
    ("crm", "echo return_full_text", (False,), "use `echo` of /v1/completions"),
    ("t", "return_full_text", (False,), "use `echo`"),
    ("c", "best_of", (1,), "use `n`, or /v1/completions"),
    ("rm", "n best_of num_return_sequences", (1,), "use `n` of /v1/chat/completions"),
    ("ct", "num_return_sequences", (1,), "use `n`"),
    ("crm", "add_special_tokens", (False,), "the template sets its model's own"),
    ("crm", "functions", ([],), "use `tools`"),
    ("crm", "function_call", ("none",), "use `tool_choice`"),
    ("ctrm", "web_search_options plugins", ([],), "tools run in the client"),
    ("ctrm", "logits_processors custom_logit_processor", ([],), "the server runs no code of clients"),
    ("ctrm", "vllm_xargs mm_processor_kwargs media_io_kwargs kv_transfer_params session_params lora", ({}, []),
     _LEAVE_OUT),
    ("ctrm", "adapter_id lora_path lora_request", (), _IN_MODEL),
    ("ctrm", "prompt_embeds input_embeds", (), "send text or token ids"),
    ("ctrm", "return_hidden_states post_sampling_probs background", (False,), _LEAVE_OUT),
    ("ctrm", "watermark", (False,), "use TGI's routes"),
    ("ctrm", "mirostat mirostat_mode dry_multiplier xtc_probability dynatemp_range smoothing_factor top_a "
     "penalty_alpha epsilon_cutoff eta_cutoff no_repeat_ngram_size repetition_penalty_range top_h min_k min_keep", (0,),
     "use `temperature`, `top_p`, `top_k` or `min_p`"),
    ("ctrm", "top_n_sigma", (0, -1), "use `temperature`, `top_p`, `top_k` or `min_p`"),
    ("ctrm", "repeat_last_n penalty_last_n", (-1,), "penalties count the whole context; leave it out"),
    ("ctrm", "dynamic_temperature temperature_last", (False,), "use `temperature`"),
    ("ctrm", "samplers sampler_priority", ([], ""), "the order of the filters is fixed; leave it out"),
    ("ctrm", "do_sample", (True,), "use `temperature` 0"),
    ("ctrm", "ban_eos_token", (False,), "use `ignore_eos`"),
    ("ctrm", "min_new_tokens min_length", (0,), "use `min_tokens`"),
    ("ct", "n_probs top_n_tokens top_logprobs_num return_logprob output_scores", (0, False), "use `logprobs`"),
    ("r", "n_probs top_n_tokens top_logprobs_num return_logprob output_scores", (0, False), _BY_INCLUDE),
    ("m", "n_probs top_n_tokens top_logprobs_num return_logprob output_scores", (0, False), _IN_CHATS),
    ("ctrm", "t_max_predict_ms max_time", (0,), "start the server with `--max-request-seconds`"),
    ("ctrm", "options", ({},), "give its fields at the top of the body, under OpenAI's names"),
    ("ctrm", "num_ctx n_ctx max_model_len", (), "start the server with `--max-total-tokens`"),
    ("ctrm", "penalize_newline penalize_nl", (True,), "penalties count every token; leave it out"),
    ("ctrm", "format", ("",), "use `response_format`"),
    ("ctrm", "reasoning_format", ("auto", "deepseek"), "start the server with `--reasoning-parser none`"),
    ("ctrm", "separate_reasoning parse_tool_calls", (True,),
     "start the server with `--reasoning-parser none` or `--tool-call-parser tgi`"),
    ("ctm", "max_new_tokens max_length", (), "use `max_tokens`"),
    ("ctr", "stop_sequences", ([],), "use `stop`"),
    ("t", "thinking_token_budget thinking_budget_tokens thinking_budget reasoning_budget reasoning_effort "
     "max_thinking_tokens enable_thinking think thinking", (), "it belongs to a chat"),
    ("t", "chat_template_kwargs reasoning", ({},), "it belongs to a chat"),
    ("t", "include_reasoning", (True,), "it belongs to a chat"),
    ("t", "tools functions images videos", ([],), _IN_CHATS),
    ("t", "messages", (), _IN_CHATS),
    ("t", "top_logprobs", (0,), "use `logprobs`"),
    ("crm", "suffix", ("",), _LEAVE_OUT),
    ("ctm", "conversation previous_response_id", ("",), "send the whole conversation, or use /v1/responses"),
    ("ctrm", "random_seed", (), "use `seed`"),
    ("ctrm", "safe_prompt prompt_mode", (False, ""), "put the instructions into the prompt"),
    ("r", "conversation", (), "send the whole conversation in `input`"),
    ("r", "prompt", (), "send the text in `instructions` and `input`"),
    ("ctrm", "truncation", ("disabled",), "shorten the prompt"),
    ("ctrm", "max_tool_calls", (), "tools run in the client"),
    ("r", "logprobs", (False,), _BY_INCLUDE),
    ("r", "messages", (), "send the conversation in `input`"),
    ("r", "max_tokens max_completion_tokens max_new_tokens max_length n_predict num_predict", (),
     "use `max_output_tokens`"),
    ("r", "reasoning_effort", (), "use `reasoning.effort`"),
    ("r", "thinking_budget_tokens", (), "use `thinking_token_budget`"),
    ("ctrm", "container mcp_servers", ([], {}, ""), "run the tools in the client"),
    ("r", "context_management", ([],), "shorten the conversation in the client"),
    ("m", "compaction", ({},), "shorten the conversation in the client"),
    ("m", "thread", (), "send the whole conversation"),
    ("m", "fallbacks", ([], "default"), _LEAVE_OUT),
    ("cr", "moderation", (), "check texts in the client"),
    ("r", "access_programs", ({},), _LEAVE_OUT),
    ("r", "image", ({}, {"context_compression": "auto"}, {"context_compression": "disabled"}), _LEAVE_OUT),
    ("m", "stop", ([], ""), "use `stop_sequences`"),
    ("m", "reasoning_effort", (), "use `output_config.effort`"),
    ("m", "thinking_token_budget thinking_budget_tokens thinking_budget reasoning_budget", (),
     "use `thinking.budget_tokens`"),
    ("m", "logprobs", (False,), _IN_CHATS),
    ("m", "top_logprobs", (0,), _IN_CHATS),
    ("m", "input instructions prompt", (), "send the conversation in `messages` and `system`"),
    ("c", "system instructions system_prompt preamble", ("", []), "send them as a message of the role `system`"),
    ("c", "prompt", ("", []), "send the conversation in `messages`"),
    ("t", "system instructions system_prompt preamble", ("", []), "put them into `prompt`"),
    ("r", "system system_prompt preamble", ("", []), "use `instructions`"),
    ("ctm", "text", ({},), "use `response_format`"),
    ("ctr", "output_config output_format", ({},), "use `response_format`"),
    ("m", "output_format", ({},), "use `output_config.format`"),
    ("crm", "raw", (False,), "use /v1/completions"),
    ("crm", "images videos", ([],), "send them as parts of messages"),
    ("crm", "grammar_lazy grammar_triggers preserved_tokens", (False, []),
     "a grammar holds from the first token on; use `tools`"),
    ("t", "grammar_lazy grammar_triggers preserved_tokens", (False, []),
     "a grammar holds from the first token on; leave it out"),
    ("ctrm", "detokenize", (True,), "answers are text; leave it out"),
    ("ctrm", "input_ids", ([],), "send token ids in `prompt` of /v1/completions"),
    ("ctrm", "image_data video_data audio_data", ([], ""), "send images as parts of messages"),
    ("ctrm", "extra_body extra_args sampling_params sampling_parameters parameters generation_config generationConfig",
     ({},), "give its fields at the top of the body, under OpenAI's names"),
    ("ctrm", "custom_params", ({},), "the server runs no code of clients"),
    ("ct", "token_ids_logprob logprob_token_ids", ([],), "use `logprobs`"),
    ("r", "token_ids_logprob logprob_token_ids", ([],), _BY_INCLUDE),
    ("m", "token_ids_logprob logprob_token_ids", ([],), _IN_CHATS),
    ("ctrm", "watermarking", (False,), "use `watermark` of TGI's routes"),
    ("ctrm", "repetition_detection ec_transfer_params images_config", ({},), _LEAVE_OUT),
    ("ctrm", "return_routed_experts use_audio_in_video", (False,), _LEAVE_OUT),
    ("ctrm", "return_prompt_text", (False,), "use /apply-template"),
    ("ctrm", "return_prompt_token_ids", (False,), "use /tokenize"),
    ("ctrm", "return_cached_tokens_details return_meta_info", (False,), "`usage` has what is known; leave it out"),
    ("ctrm", "max_dynamic_patch min_dynamic_patch", (), "the model's own settings hold; leave it out"),
    ("ctrm", "n_indent", (0,), "put it into the instructions"),
    ("ctrm", "response_fields", ([],), "answers are given whole; leave it out"),
    ("c", "task", ("",), "put it into `messages`"),
    ("r", "include_reasoning", (True,), "leave items of reasoning out in the client"),
    ("r", "enable_response_messages", (False,), _LEAVE_OUT),
    ("r", "previous_input_messages previous_response", ([], {}), "send the whole conversation in `input`"),
    ("ctr", "stop_strings stop_str stop_regex", ([], ""), "use `stop`"),
    ("m", "stop_strings stop_str stop_regex", ([], ""), "use `stop_sequences`"),
    ("ctrm", "eos_token_id eos_token_ids", ([],), "use `stop_token_ids`"),
    ("ctrm", "begin_suppress_tokens forced_bos_token_id forced_eos_token_id force_words_ids sequence_bias token_bias",
     ([], {}), _BY_BIAS),
    ("ctrm", "exponential_decay_length_penalty constraints", ([],), _LEAVE_OUT),
    ("ctrm", "encoder_no_repeat_ngram_size diversity_penalty", (0,), _LEAVE_OUT),
    ("ctrm", "negative_prompt negative_prompt_ids cfg_scale", ("", [], 1), _LEAVE_OUT),
    ("ctrm", "token_healing renormalize_logits auto_max_new_tokens", (False,), _LEAVE_OUT),
    ("ctrm", "add_bos_token", (True,), "the tokenizer says whether it is there"),
    ("m", "system_prompt preamble", ("",), "use `system`"),
    ("crm", "chat_history", ([],), "send the whole conversation"),
    ("crm", "prefill response_prefix assistant_prefix", ("",), "let the conversation end with a turn of the assistant"),
    ("t", "prefill response_prefix assistant_prefix", ("",), "put it into `prompt`"),
    ("cr", "max_thinking_tokens", (), "use `thinking_token_budget`"),
    ("m", "max_thinking_tokens", (), "use `thinking.budget_tokens`"),
    ("ctrm", "json_mode", (False,), "use `response_format`"),
    ("ctrm", "candidate_count", (1,), "use `n` of /v1/chat/completions"),
    ("ct", "include", ([],), "use `logprobs`, or /v1/responses"),
    ("m", "include", ([],), "use /v1/responses"),
    ("ct", "context_management", ({}, []), "shorten the conversation in the client"),
    ("t", "tool_choice function_call", ("none", "auto"), _IN_CHATS),
    ("m", "reasoning", ({},), "use `thinking`"),
    ("m", "include_reasoning", (True,), "use `thinking`"),
    ("m", "documents", ([],), "send them as blocks of messages"),
    ("ctrm", "context", ([],), "send the whole prompt"),
    ("ctrm", "template instruction_template instruction_template_str", ("",), "set CHAT_TEMPLATE for the server"),
    ("e", "task", ("",), "use `prompt_name` or `input_type`"),
    ("e", "instruct instruction prompt", ("",), "put it in front of the text"),
    ("e", "late_chunking return_multivector multi_vector return_embeddings", (False,), _LEAVE_OUT),
    ("e", "embedding_type embedding_types output_dtype", ("float", ["float"]), "use `encoding_format`"),
    ("e", "normalized embd_normalize", (True, 2), "use `normalize`"),
    ("e", "truncate", (True,), "use `truncate_prompt_tokens`, or TEI's routes"),
    ("e", "truncation truncation_direction truncation_side", ("right", True), "use TEI's routes"),
    ("e", "truncate_prompt_tokens max_length", (), "use `max_tokens_per_doc`, or `truncate` of TEI's routes"),
    ("e", "max_chunks_per_doc", (1,), "use `max_tokens_per_doc`"),
    ("e", "add_special_tokens", (True,), "send token ids"),
    ("e", "activation use_activation softmax apply_softmax", (True,), "use `raw_scores` of /rerank and /predict"),
    ("e", "parameters", ({},), "use `raw_scores` at the top of the body"),
    ("e", "rank_fields", ([], ["text"]), "give the field's text as `text`"),
    ("e", "images videos", ([],), "texts are read, no pictures; leave it out"),
    ("e", "messages", (), "send the text as `input`"),
    ("e", "dimension", (), "use `dimensions`"),
)  # fmt: skip

_HARMLESS: tuple[tuple[str, str], ...] = (
    ("ctrm", "user safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options request_id rid "
     "user_id trace session_id"),
    ("ct", "metadata"),
    ("ctrm", "cache_prompt id_slot slot_id n_keep timings_per_token return_progress use_cache keep_alive timeout "
     "t_max_prompt_ms guided_decoding_backend stream_reasoning"),
    ("ctrm", "num_keep num_batch num_gpu num_thread main_gpu low_vram use_mmap use_mlock"),
    ("ctrm", "mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers "
     "xtc_threshold dynatemp_exponent smoothing_curve"),
    ("ctm", "store verbosity"),
    ("rm", "prediction"),
    ("t", "parallel_tool_calls"),
    ("m", "stream_options"),
    ("ctrm", "prompt_lookup_num_tokens assistant_early_exit bootstrap_host bootstrap_port bootstrap_room "
     "data_parallel_rank logprob_start_len return_text_in_logprobs"),
    ("ctrm", "custom_labels disagg_prefill_dp_rank n_cache_reuse n_discard ngram_corpus_id return_mm_kwargs "
     "return_token_offsets routed_dp_rank routed_experts_prompt_start routed_experts_start_len stream_interval"),
    ("ctrm", "provider transforms route usage"),
    ("m", "cache_control betas inference_geo speed diagnostics anthropic_version anthropic_beta user_profile_id "
     "workspace_id billing_policy fallback_credit_token"),
    ("r", "client_metadata background_options"),
    ("e", "user metadata request_id rid user_id priority provider timeout cache_salt keep_alive"),
)  # fmt: skip
"""Fields that change no answer here: they name the sender, steer caches and queues of other servers, or say more about
one of the fields above."""

_EVERY_TOOL = "chat tools, responses tools"
_IN_MESSAGES = "chat messages, chat content, messages content, responses content, responses input"

# Places, names, neutral values, remedy.
_REFUSED_KEYS: tuple[tuple[str, str, tuple[object, ...], str], ...] = (
    ("chat stream_options, responses stream_options", "include_obfuscation", (False,),
     "chunks are not padded; leave it out, and use TLS"),
    ("chat messages", "function_call", (), "use `tool_calls`"),
    ("chat messages", "audio", (), "send what was said as `content`"),
    ("chat messages", "prefix partial", (False,), "use `continue_final_message`"),
    ("chat messages", "images", ([],), "send them as parts of `content`"),
    ("chat messages", "thinking", ("",), "use `reasoning_content`"),
    ("chat tool_choice, responses tool_choice", "disable_parallel_tool_use", (False,), "use `parallel_tool_calls`"),
    ("chat tools", "custom", (), "there are functions only; /v1/responses has custom tools"),
    (_EVERY_TOOL, "input_examples", ([],), "write them into `description`"),
    ("chat tools", "defer_loading", (False,), "offer the tool when it is needed"),
    ("chat tools", "allowed_callers", (["direct"],), "the model calls all tools itself; leave it out"),
    ("responses tools", "async", (False,), "send the output in the next request; leave it out"),
    ("responses content", "file_id", (), "send the image in `image_url`"),
    ("responses reasoning", "mode", ("standard",), "use `effort`"),
    ("messages messages", "clear_at", ("never",), "leave the message out when it is over"),
    ("messages messages", "output_config", ({},), "give it at the top of the body"),
    ("messages content", "transformations", ({}, {"oversized_image": "downsize"}),
     "images are made as small as the model needs them; leave it out"),
    ("messages output_config", "task_budget", (), "use `max_tokens`"),
)  # fmt: skip

# Places, names, why they change no answer.
_HARMLESS_KEYS: tuple[tuple[str, str, str], ...] = (
    (f"{_IN_MESSAGES}, chat calls, {_EVERY_TOOL}, messages tools", "cache_control",
     "the prefix cache finds every beginning by itself"),
    ("chat content, responses content", "prompt_cache_breakpoint", "the prefix cache finds every beginning by itself"),
    ("chat messages", "annotations parsed", "they say more about `content`, which the model reads"),
    ("chat messages", "reasoning_details thinking_blocks", "the model reads `reasoning_content`"),
    ("chat messages, chat calls", "id index status phase provider_specific_fields extra_content",
     "notes of the server that wrote the turn"),
    ("chat calls", "parsed_arguments", "the model reads `arguments`"),
    ("chat content", "format uuid", "an image is known by its own bytes"),
    ("chat response_format", "name description strict", "the form is always enforced"),
    ("responses input", "phase caller created_by async name namespace",
     "notes of the server that wrote the item, whose text the model reads"),
    ("responses content", "annotations logprobs", "they say more about `text`, which the model reads"),
    ("responses reasoning", "generate_summary", "reasoning is given whole"),
    ("responses stream_options", "include_usage", "the last event always has the numbers of tokens"),
    ("messages tools", "eager_input_streaming", "arguments are always sent as they are written"),
    ("messages content", "citations", "they say where an earlier text is from, which the model reads"),
    ("messages content", "signature data", "blocks are not signed here"),
    ("messages content", "id tool_use_id is_error server_name caller toolset_name",
     "of earlier calls, which the model reads as their own text"),
    ("messages content", "media_type", "the model reads the text"),
    ("messages thinking", "block_binding", "blocks are not signed here"),
)  # fmt: skip

_SERVED_AS: Mapping[str, str] = {
    "repeat_penalty": "repetition_penalty",
    "typ_p": "typical_p",
    "extra_key": "cache_salt",
    "no_stop_trim": "include_stop_str_in_output",
    "grammar": "guided_grammar",
    "json_schema": "guided_json",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "thinking_budget": "thinking_token_budget",
    "reasoning_budget": "thinking_token_budget",
}
"""Names of llama.cpp, ollama, SGLang, Qwen and other routes, and ours for the same."""
_OFF: Mapping[str, object] = {"typ_p": 1, "grammar": ""}
"""What says the same as to leave the name out."""
_SWITCHES = ("enable_thinking", "think")
"""Of thinking: variables of the chat template."""
_THINKING = "thinking"
"""Anthropic's object for the same, where the body has no field of that name."""
_VARIABLES, _BUDGET, _EFFORT = "chat_template_kwargs", "thinking_token_budget", "reasoning_effort"
_EFFORTS = ("low", "medium", "high")


def _of_family(letter: str) -> dict[str, Refused]:
    return {
        name: Refused(neutral=neutral, remedy=remedy)
        for letters, names, neutral, remedy in _REFUSED
        if letter in letters
        for name in names.split()
    }


def _harmless(letter: str) -> frozenset[str]:
    return frozenset(name for letters, names in _HARMLESS if letter in letters for name in names.split())


def _of_place(place: Place) -> dict[str, Refused]:
    return {
        name: Refused(neutral=neutral, remedy=remedy)
        for places, names, neutral, remedy in _REFUSED_KEYS
        if place in places.split(", ")
        for name in names.split()
    }


def harmless_keys(place: Place) -> dict[str, str]:
    """Why each key changes no answer."""
    return {name: why for places, names, why in _HARMLESS_KEYS if place in places.split(", ") for name in names.split()}


REFUSED: Mapping[Family | Place, Mapping[str, Refused]] = {
    **{family: _of_family(_LETTERS[family]) for family in FAMILIES},
    **{place: _of_place(place) for place in PLACES},
}
HARMLESS: Mapping[Family | Place, frozenset[str]] = {
    **{family: _harmless(_LETTERS[family]) for family in FAMILIES},
    **{place: frozenset(harmless_keys(place)) for place in PLACES},
}


@lru_cache(maxsize=64)
def served_as(known: frozenset[str]) -> dict[str, str]:
    """Map other names to a body's own."""
    names = {theirs: ours for theirs, ours in _SERVED_AS.items() if ours in known and theirs not in known}
    names |= {name: _VARIABLES for name in _SWITCHES if _VARIABLES in known}
    return names | ({_THINKING: _BUDGET} if _BUDGET in known and _THINKING not in known else {})


def refuse_unserved(data: Mapping[str, Any], where: Family | Place, known: frozenset[str]) -> None:
    """Refuse what the table refuses, but `known` fields."""
    for name in data.keys() & REFUSED[where].keys() - known:
        refused = REFUSED[where][name]
        if refused.is_asked(data[name]):
            raise FieldError(f"`{name}` is not served here: {refused.remedy}", param=name, reason="unsupported")


def in_our_words(
    data: dict[str, Any], family: Family, known: frozenset[str], renamed: dict[str, str]
) -> dict[str, Any]:
    """Replace other names; `renamed` learns the client's name of each of ours."""
    others = data.keys() & (served_as(known).keys() - REFUSED[family].keys())
    if not others:
        return data
    found = {name: value for name, value in data.items() if name not in others}
    for name in sorted(others):
        value = data[name]
        if value is None or (name in _OFF and _is_same(value, _OFF[name])):
            continue
        if name in _SERVED_AS:
            _put(found, _SERVED_AS[name], name, value)
            renamed[_SERVED_AS[name]] = name
        elif name == "think" and value in _EFFORTS and _EFFORT in known:
            _put(found, _EFFORT, name, value)
        elif name == _THINKING:
            _think(found, name, *_read_thinking(value))
            renamed[_BUDGET] = name
        else:
            _think(found, name, value, None)
    return found


def _put(data: dict[str, Any], ours: str, theirs: str, value: Any) -> None:
    if data.get(ours) is not None and data[ours] != value:
        text = f"`{ours}` and `{theirs}` are two names of one field: give one of them"
        raise FieldError(text, param=theirs, reason="conflict")
    data[ours] = value


def _read_thinking(value: Any) -> tuple[Any, Any]:
    """Read Anthropic's object: whether, and how many tokens; None: the model decides."""
    kinds = {"enabled": True, "disabled": False, "adaptive": None}
    if not isinstance(value, dict) or value.get("type") not in kinds:
        text = '`thinking` must be {"type": "enabled"}, {"type": "disabled"} or {"type": "adaptive"}'
        raise FieldError(text, param="thinking", reason="invalid_type")
    return kinds[value["type"]], value.get("budget_tokens")


def _think(data: dict[str, Any], name: str, switch: Any, budget: Any) -> None:
    if not isinstance(switch, bool | None):
        raise FieldError(f"`{name}` must be true or false", param=name, reason="invalid_type")
    variables = data.get(_VARIABLES) or {}
    if switch is not None and isinstance(variables, dict):
        data[_VARIABLES] = {"enable_thinking": switch, "thinking": switch, **variables}
    if budget is not None:
        _put(data, _BUDGET, name, budget)


def _is_same(value: object, neutral: object) -> bool:
    """Compare values; 1 is 1.0, but not true."""
    numbers = isinstance(value, int | float) and isinstance(neutral, int | float)
    are_alike = isinstance(value, bool) == isinstance(neutral, bool) if numbers else type(value) is type(neutral)
    return are_alike and value == neutral
