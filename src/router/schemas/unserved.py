"""Fields of other servers' OpenAI routes that would change the answer and are not served: refused, never ignored."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from router.schemas.base import Body

_SCHEMA = "use `response_format` of /v1/chat/completions"

# Name: values that ask for nothing (beside null), and what to do instead.
UNSERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "guided_json": ((), _SCHEMA),
    "guided_regex": ((), f'{_SCHEMA} with {{"type": "regex", "value": ...}}'),
    "guided_choice": ((), f"{_SCHEMA} with a schema that has an `enum`"),
    "guided_grammar": ((), "grammars are JSON schemas and regular expressions"),
    "structured_outputs": (({},), _SCHEMA),
    "response_format": (({"type": "text"},), _SCHEMA),
    "functions": (([],), "use `tools`"),
    "function_call": (("none",), "use `tool_choice`"),
    "min_tokens": ((0,), "leave it out"),
    "stop_token_ids": (([],), "use `stop`"),
    "include_stop_str_in_output": ((False,), "the native routes keep stop texts"),
    "allowed_token_ids": (([],), "use `logit_bias` or a regular expression"),
    "bad_words": (([],), "use `logit_bias`"),
    "skip_special_tokens": ((True,), "special tokens are left out"),
    "truncate_prompt_tokens": ((), "use `truncate` of the native routes"),
    "prompt_logprobs": ((), "use `decoder_input_details` of /generate, or `echo` with `logprobs` of /v1/completions"),
    "use_beam_search": ((False,), "leave it out"),
    "length_penalty": ((1, 1.0), "leave it out"),
    "chat_template": ((), "set CHAT_TEMPLATE for the server"),
    "documents": (([],), "put them into the messages"),
    "add_generation_prompt": ((True,), "leave it out; an assistant's last message is continued"),
    "echo": ((False,), "use /v1/completions"),
    "best_of": ((1,), "use `n`, or /v1/completions"),
    "add_special_tokens": ((False,), "the template has those of its model"),
}


class OpenAIBody(Body):
    """A body of an OpenAI route. Fields that change nothing (`user`, `store` and the like) are ignored."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_unserved(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in data.keys() & UNSERVED.keys() - cls.model_fields.keys():
                neutral, remedy = UNSERVED[name]
                if data[name] is not None and not any(_is_same(data[name], value) for value in neutral):
                    raise ValueError(f"`{name}` is not served here: {remedy}")
        return data


def _is_same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral
