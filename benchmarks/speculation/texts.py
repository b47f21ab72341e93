"""The kinds of text that are asked for, each by a body that every server answers with the same tokens.

Models of random weights quote nothing. At a temperature beyond all scores, though, what is drawn follows from the seed
alone, whatever the prompt is: so an answer is known before its prompt is written, and the prompt can hold an edited
copy of it. To the server it is a file that the answer repeats with small edits.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
TOKENS = 160
# One token in so many is another one, missing, or there twice in the edited copy.
EVERY = 20
SCHEMA = {
    "type": "object",
    "properties": {
        name: {"enum": [f"the first choice of {name}", f"another choice of {name}"]}
        for name in ("colour", "material", "destination", "occupation")
    },
    "required": ["colour", "material", "destination", "occupation"],
}
# Capitals and digits are tokens of their own in the benchmark's vocabulary: a text of them has the tokens it came from.
SYMBOLS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
PARAMETERS: dict[str, dict[str, Any]] = {
    "repeats itself": {"ignore_eos": True},
    "JSON under a schema": {"grammar": {"type": "json", "value": SCHEMA}},
    "drawn": {"ignore_eos": True, "do_sample": True, "temperature": 1.0},
}
KINDS = (*PARAMETERS, "edited file", "edited file, foretold")
_SEED_ALONE = {"temperature": 1e6, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request."""

    path: str
    body: dict[str, Any]

    def send(self, url: str) -> dict[str, Any]:
        """The answer of the server at `url`."""
        request = urllib.request.Request(
            url + self.path, json.dumps(self.body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def tokens_from(self, url: str) -> int:
        """How many tokens that server's answer has."""
        answer = self.send(url)
        counted = answer["details"]["generated_tokens"] if "details" in answer else answer["usage"]["completion_tokens"]
        return int(counted)


@dataclass(slots=True)
class Texts:
    """plain: the URL of a server that drafts nothing, which says what edited texts are; it is asked for each once.
    num_ids: so many ids are texts for the tokenizer; of the others, which a model of random weights draws too, a prompt
    may have none."""

    plain: str
    num_ids: int
    tokens: int = TOKENS
    _known: dict[tuple[str, int], Any] = field(default_factory=dict)

    def ask(self, kind: str, number: int, *, drafts: bool) -> Asked:
        """number: each makes another text. drafts: the server that is asked does."""
        if kind == "edited file":
            return self._edited(number)
        if kind == "edited file, foretold":
            return self._foretold(number, drafts=drafts)
        return self._generate(number, PARAMETERS[kind] | ({"seed": number} if kind == "drawn" else {}))

    def _generate(self, number: int, parameters: dict[str, Any]) -> Asked:
        parameters = {"max_new_tokens": self.tokens, "details": True} | parameters
        return Asked("/generate", {"inputs": f"Text number {number}: ", "parameters": parameters})

    def _edited(self, number: int) -> Asked:
        """Its prompt is the edited copy of the answer."""
        if ("ids", number) not in self._known:
            asked = self._generate(number, _SEED_ALONE | {"do_sample": True, "seed": number})
            drawn = [token["id"] for token in asked.send(self.plain)["details"]["tokens"]]
            self._known["ids", number] = [one for one in drawn if one < self.num_ids]
        ids = self._known["ids", number]
        return self._completion({"prompt": edited(ids, sorted(set(ids)), number), "seed": number})

    def _foretold(self, number: int, *, drafts: bool) -> Asked:
        """Its prediction is, of a text of capitals and digits. A server that drafts nothing refuses that field."""
        body = {"prompt": f"Text number {number}: ", "guided_regex": f"[A-Z0-9]{{{self.tokens}}}", "seed": number}
        if ("text", number) not in self._known:
            answer = self._completion(body).send(self.plain)
            self._known["text", number] = answer["choices"][0]["text"]
        content = "".join(edited(self._known["text", number], SYMBOLS, number))
        prediction = {"prediction": {"type": "content", "content": content}} if drafts else {}
        return self._completion(body | prediction)

    def _completion(self, body: dict[str, Any]) -> Asked:
        return Asked("/v1/completions", {"model": "tgi", "max_tokens": self.tokens} | _SEED_ALONE | body)


def edited(text: Sequence[T], others: Sequence[T], seed: int) -> list[T]:
    """`text` with one in `EVERY` of its parts replaced by one of `others`, left out or doubled, by turns; the same for
    the same seed."""
    dice = random.Random(seed)
    found: list[T] = []
    for place, part in enumerate(text):
        turn, rest = divmod(place + 1, EVERY)
        if rest:
            found.append(part)
        else:
            found += [[dice.choice(others)], [], [part, part]][turn % 3]
    return found
