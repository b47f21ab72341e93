"""Fills a gap between two texts, by the marks that a model of code was trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.api.completions.schema import CompletionBody
from router.errors import SuffixError
from router.text.tokenizer import PromptTokenizer

# Before the text above the gap, before the one below it, before the answer.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
# Mistral's: the text below the gap comes first, and the answer right after the one above it.
_SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")
_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>", "▁<EOT>",
    "<EOT>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
_FILE = "<|file_sep|>"
_REPOSITORY = "<|repo_name|>"
_SNIPPET = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Ids of a model's marks; middle: None where the text below the gap comes first."""

    prefix: int
    suffix: int
    middle: int | None
    # Before a file's name, and before a repository's.
    file: int | None
    repository: int | None
    ends: tuple[int, ...]


def marks_of(added_tokens: Mapping[str, int]) -> Marks | None:
    """Find a model's marks; None: it was not trained with any that are known."""
    names: tuple[str, ...] | None = next((row for row in _MARKS if all(name in added_tokens for name in row)), None)
    if names is None and all(name in added_tokens for name in _SUFFIX_FIRST):
        names = _SUFFIX_FIRST
    if names is None:
        return None
    prefix, suffix, *middle = (added_tokens[name] for name in names)
    ends = {added_tokens[name] for name in _ENDS if name in added_tokens} | {prefix, suffix, *middle}
    return Marks(
        prefix=prefix,
        suffix=suffix,
        middle=middle[0] if middle else None,
        file=added_tokens.get(_FILE),
        repository=added_tokens.get(_REPOSITORY),
        ends=tuple(sorted(ends)),
    )


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Another file, for context."""

    name: str
    text: str


class Infill:
    """Prompts for a model's gaps."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer

    def marks(self) -> Marks:
        """Return the model's marks. Raises SuffixError without any."""
        marks = marks_of(self._tokenizer.added_tokens)
        if marks is None:
            text = "`suffix` is not supported by this model: its tokenizer has no marks for filling a gap"
            raise SuffixError(f"{text}; put both texts into the prompt", param="suffix")
        return marks

    async def filled(self, body: CompletionBody) -> CompletionBody:
        """Return the body with the prompts of its gaps, as ids, so that no text can be read as a mark."""
        assert body.suffix is not None
        marks = self.marks()
        prompts = [
            await self.ids(prompt, body.suffix, begins_with_marks=body.add_special_tokens) for prompt in body.prompt
        ]
        return with_ids(body, prompts, marks)

    async def ids(
        self,
        before: str | list[int],
        after: str,
        *,
        begins_with_marks: bool = True,
        begin: str = "",
        extras: Sequence[Extra] = (),
    ) -> list[int]:
        """Return a prompt's tokens.

        Args:
            begins_with_marks: Whether the tokenizer's own come first.
            begin: Of the answer.
            extras: Files that come before.
        """
        marks = self.marks()
        first = await self._tokenizer.encode("", add_special_tokens=begins_with_marks, truncate=None)
        above = before if isinstance(before, list) else await self._text(before)
        below, begun = await self._text(after), await self._text(begin)
        if marks.middle is None:
            return [*first, *await self._files(marks, extras), marks.suffix, *below, marks.prefix, *above, *begun]
        return [
            *first, *await self._files(marks, extras),
            marks.prefix, *above, marks.suffix, *below, marks.middle, *begun,
        ]  # fmt: skip

    async def _files(self, marks: Marks, extras: Sequence[Extra]) -> list[int]:
        if not extras:
            return []
        if marks.file is None:
            return [id for extra in extras for id in await self._text(_SNIPPET + extra.text)]
        ids = [] if marks.repository is None else [marks.repository, *await self._text("repository\n")]
        for extra in extras:
            ids += [marks.file, *await self._text(f"{extra.name}\n{extra.text}\n")]
        return [*ids, marks.file, *await self._text("file\n")]

    async def _text(self, text: str) -> list[int]:
        if not text:
            return []
        return await self._tokenizer.encode(text, add_special_tokens=False, truncate=None, parse_special=False)


def with_ids(body: CompletionBody, prompts: list[list[int]], marks: Marks) -> CompletionBody:
    """Return the body with these prompts, whose answers end with any mark."""
    stops = list(dict.fromkeys([*body.stop_token_ids, *marks.ends]))
    return body.model_copy(update={"prompt": prompts, "suffix": None, "stop_token_ids": stops})
