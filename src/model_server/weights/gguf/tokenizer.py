"""tokenizer.json and its config from GGUF metadata: byte pairs with named patterns (`gpt2`), or scored pieces
(`llama`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from model_server.errors import StartupError

_KEY = "tokenizer.ggml."
# Kinds of tokens, as sentencepiece has them.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_WHOLE = (_UNKNOWN, _CONTROL, _BYTE)
"""Kinds that are not merged of other pieces."""
_LONGEST_PIECE = 512
"""Ways to make a piece of two others are as many as it has characters, and each of these is a text of its own."""

# Words, numbers and signs, each with what may precede it; line ends; spaces.
_BEFORE_NUMBERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_AFTER_NUMBERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _BEFORE_NUMBERS + r"\p{N}{1,3}" + _AFTER_NUMBERS
_QWEN2 = _BEFORE_NUMBERS + r"\p{N}" + _AFTER_NUMBERS
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}"
    r"\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By the names of `tokenizer.ggml.pre`; None: the pattern of GPT-2, which is the library's own.
_PATTERNS: Mapping[str, str | None] = {
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "smaug-bpe": _LLAMA3, "qwen2": _QWEN2,
    "lfm2": _LLAMA3, "falcon-h1": _LLAMA3, "dbrx": _LLAMA3, "deepseek-r1-qwen": _QWEN2, "qwen35": _QWEN35,
    "tekken": _TEKKEN, "pixtral": _TEKKEN, "gpt-2": None, "mpt": None, "olmo": None, "phi-2": None,
}  # fmt: skip
_PATTERN_OF = {"qwen2": "qwen2", "qwen3": "qwen2"}
"""Of architectures that have one pattern only, for files that do not name it."""
_DIGITS_FIRST = ("smollm",)
"""Each digit is a word of its own; else as GPT-2's."""
_NORMALISED = ("qwen2", "qwen35", "deepseek-r1-qwen")
_ADDS_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken", "pixtral", "lfm2", "falcon-h1")
"""Where a file does not say whether texts begin with a token of their own."""
_WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken", "pixtral", "lfm2", "falcon-h1")
"""A word that is a token is not divided, whatever the merges say."""


def tokenizer_of(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Make the tokenizer, if its kind and pattern are served."""
    kind = metadata.get(_KEY + "model")
    tokens = _list(metadata, "tokens", str, path)
    if kind == "gpt2":
        tokenizer = _byte_pairs(metadata, tokens, path)
    elif kind == "llama":
        tokenizer = _pieces(metadata, tokens, path)
    else:
        raise StartupError(f"{path} has a tokenizer of the kind {kind!r:.80}; served are 'gpt2' and 'llama'")
    _add_special(tokenizer, metadata, tokens)
    _add_ends(tokenizer, metadata, tokens, kind)
    return tokenizer


def tokenizer_config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The named tokens and the chat template."""
    tokens = metadata.get(_KEY + "tokens")
    found: dict[str, Any] = {}
    for name, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        text = _token(metadata, theirs, tokens if isinstance(tokens, list) else [])
        if text is not None:
            found[f"{name}_token"] = text
    template = metadata.get("tokenizer.chat_template")
    return {**found, "chat_template": template} if isinstance(template, str) else found


def _byte_pairs(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> Tokenizer:
    pre = metadata.get(_KEY + "pre", _PATTERN_OF.get(metadata.get("general.architecture", "")))
    if pre is None:
        raise StartupError(
            f"{path} lacks the metadata `{_KEY}pre`, which says how texts are divided into words: write it again with "
            "a newer converter of llama.cpp"
        )
    if pre not in _PATTERNS and pre not in _DIGITS_FIRST:
        served = ", ".join((*_PATTERNS, *_DIGITS_FIRST))
        raise StartupError(f"{path} divides words by the pattern {pre!r:.80}, which is not served; served are {served}")
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "merges", str, path)]
    vocabulary = _vocabulary(tokens, _kinds(metadata, len(tokens)))
    if any(len(pair) != 2 or any(part not in vocabulary for part in (*pair, "".join(pair))) for pair in merges):
        raise StartupError(f"{path} merges tokens that its vocabulary lacks")
    pairs: list[Any] = merges
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre in _WHOLE_FIRST))
    if pre in _NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    pattern = _PATTERNS.get(pre)
    if pattern is not None:
        first: Any = pre_tokenizers.Split(Regex(pattern), "isolated")
        parts = [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        parts = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        if pre in _DIGITS_FIRST:
            parts.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> Tokenizer:
    scores = _list(metadata, "scores", float, path)
    if len(scores) != len(tokens):
        raise StartupError(f"{path} has {len(tokens)} tokens and {len(scores)} scores")
    kinds = _kinds(metadata, len(tokens))
    vocabulary = _vocabulary(tokens, kinds)
    unknown = _token(metadata, "unknown", tokens)
    longest = max((len(piece) for piece, number in vocabulary.items() if kinds[number] not in _WHOLE), default=0)
    if longest > _LONGEST_PIECE:
        raise StartupError(f"{path} has a piece of {longest} characters; pieces of up to {_LONGEST_PIECE} are served")
    merges: list[Any] = _merges(vocabulary, scores, kinds)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True, ignore_merges=False)
    )
    prefixed = bool(metadata.get(_KEY + "add_space_prefix", True))
    replaced = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replaced]) if prefixed else replaced
    decoding: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        decoding.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Return pairs that make a piece, the best first, as sentencepiece."""
    merges = []
    for piece, number in vocabulary.items():
        if kinds[number] in _WHOLE:
            continue
        pairs = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        known = [(vocabulary[a], vocabulary[b], a, b) for a, b in pairs if a in vocabulary and b in vocabulary]
        merges += [(-scores[number], number, first, second, a, b) for first, second, a, b in sorted(known)]
    merges.sort(key=lambda merge: merge[:4])
    return [merge[4:] for merge in merges]


def _add_special(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    kinds = _kinds(metadata, len(tokens))
    numbered = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, _ in numbered])
    own = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in own])


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], kind: str) -> None:
    """What texts begin and end with."""
    pre = metadata.get(_KEY + "pre")
    wants_bos = metadata.get(_KEY + "add_bos_token", kind == "llama" or pre in _ADDS_BOS)
    wants_eos = metadata.get(_KEY + "add_eos_token", False)
    bos, eos = (_token(metadata, name, tokens) for name in ("bos", "eos"))
    before = [bos] if wants_bos and bos is not None else []
    after = [eos] if wants_eos and eos is not None else []
    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)] if kind == "gpt2" else []
    if before or after:
        numbers = [(token, tokenizer.token_to_id(token)) for token in {*before, *after}]
        template = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{t}:1" for t in after)],
            special_tokens=numbers,
        )
        steps.append(template)
    if steps:
        tokenizer.post_processor = processors.Sequence(steps)


def _vocabulary(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Map the first of equal tokens, without texts that the converter made up."""
    found: dict[str, int] = {}
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind != _UNUSED or token != f"[PAD{number}]":
            found.setdefault(token, number)
    return found


def _kinds(metadata: Mapping[str, Any], count: int) -> list[int]:
    kinds = metadata.get(_KEY + "token_type")
    return kinds if isinstance(kinds, list) and len(kinds) == count else [1] * count


def _token(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> str | None:
    number = metadata.get(f"{_KEY}{name}_token_id")
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None


def _list(metadata: Mapping[str, Any], name: str, kind: type, path: Path) -> list[Any]:
    found = metadata.get(_KEY + name)
    if not isinstance(found, list) or not found or not all(isinstance(one, kind) for one in found):
        raise StartupError(f"{path} has no usable `{_KEY}{name}`")
    return found
