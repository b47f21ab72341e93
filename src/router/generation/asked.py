"""A generation as a client asked for it, unchecked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from router.generation.api_rules import TGI, ApiRules
from router.grammar.checker import AskedGrammar
from router.images.asked import AskedImage
from router.images.prompt import SharedPrompt
from router.request import AnswerKind, SamplingParameters
from router.schemas.parameters import ORDINARY, AskedPriority, CommonParameters

# A grammar has a form of its own in each body, and is compiled before it becomes a parameter.
_BY_NAME = frozenset(one.name for one in fields(SamplingParameters)) - {"grammar", "grammar_kind"}


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """A generation as asked for; None: not given."""

    # The rules of its API.
    api: ApiRules = TGI
    inputs: str = ""
    # A chat's end from the first answer to its last user message on, within `inputs`; None: unknown.
    answered: str | None = None
    # Instead of `inputs`, without `truncate`.
    input_ids: tuple[int, ...] | None = None
    add_special_tokens: bool = True
    # Unchecked, with defaults; `given`: the names that were.
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    given: frozenset[str] = frozenset()
    greedy: bool = False  # always the likeliest token, whatever else is given
    best_of: int | None = None
    max_new_tokens: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    truncate: int | None = None
    decoder_input_details: bool = False
    top_n_tokens: int | None = None
    grammar: AskedGrammar | None = None
    answer: AnswerKind = "text"
    adapter_id: str | None = None
    priority: AskedPriority = ORDINARY
    cache_salt: str | None = None
    # Prompt and answer together, below the server's limit; None: only that.
    max_total_tokens: int | None = None
    prediction: str = ""  # what the answer will probably be
    # Of a chat's placeholders; None: `inputs` may have markers.
    images: tuple[AskedImage, ...] | None = None
    # Shared by a request's copies.
    image_prompt: SharedPrompt = field(default_factory=SharedPrompt, compare=False, repr=False)

    @property
    def text(self) -> str:
        """Return the prompt as the model reads it, once images are read."""
        prompt = self.image_prompt.prompt
        return self.inputs if prompt is None else prompt.text

    @classmethod
    def of(cls, body: CommonParameters, sampling: Mapping[str, Any] | None = None, **others: Any) -> GenerateRequest:
        """Copy common fields of a body, and `others`.

        Args:
            sampling: Parameters under other names or forms.
        """
        asked = {name: getattr(body, name) for name in body.model_fields_set & _BY_NAME}
        if sampling is not None:
            asked |= sampling
        given = {name: value for name, value in asked.items() if value is not None}
        others |= {"ignore_eos": body.ignore_eos, "priority": body.asked_priority, "cache_salt": body.cache_salt}
        return cls(sampling=SamplingParameters(**given), given=frozenset(given), **others)
