"""A generation as a client asked for it, before any check: what the routes hand to validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from router.generation.api_rules import TGI, ApiRules
from router.grammar.checker import AskedGrammar
from router.images.asked import AskedImage
from router.images.prompt import SharedPrompt
from router.request import AnswerKind, SamplingParameters
from router.schemas.parameters import CommonParameters

# A grammar has a form of its own in each body, and is compiled before it becomes a parameter.
_BY_NAME = frozenset(one.name for one in fields(SamplingParameters)) - {"grammar", "grammar_kind"}


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """A generation as asked for; None is "not given".

    `sampling`: unchecked, what was not given has its default; `given`: the names of those that were.
    `input_ids`: the prompt instead of `inputs`, which is then empty. It cannot be combined with `truncate`.
    `images`: of a rendered chat, in the order of its placeholders; None: `inputs` may have markers.
    `image_prompt`: shared by the copies of a request, which differ in other fields only.
    `api`: the rules of the API that it came by.
    """

    api: ApiRules = TGI
    inputs: str = ""
    input_ids: tuple[int, ...] | None = None
    add_special_tokens: bool = True
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
    prediction: str = ""  # what the answer will probably be
    images: tuple[AskedImage, ...] | None = None
    image_prompt: SharedPrompt = field(default_factory=SharedPrompt, compare=False, repr=False)

    @property
    def text(self) -> str:
        """The prompt as the model reads it, once its images have been read; `inputs` is what the client asked with."""
        prompt = self.image_prompt.prompt
        return self.inputs if prompt is None else prompt.text

    @classmethod
    def of(cls, body: CommonParameters, sampling: Mapping[str, Any] | None = None, **others: Any) -> GenerateRequest:
        """What bodies have in common, sampling parameters by name and `ignore_eos`; and `others`, fields of this class.

        `sampling`: parameters that `body` has under another name or in another form; None is "not given".
        """
        asked = {name: getattr(body, name) for name in body.model_fields_set & _BY_NAME}
        if sampling is not None:
            asked |= sampling
        given = {name: value for name, value in asked.items() if value is not None}
        return cls(sampling=SamplingParameters(**given), given=frozenset(given), ignore_eos=body.ignore_eos, **others)
