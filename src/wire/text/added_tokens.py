"""Tokens that only the files beside a tokenizer.json name: router and shard add them alike, as transformers does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from wire.model_files import NAMED_TOKENS, read_optional_config, read_optional_object, token_text

CONFIG = "tokenizer_config.json"
_BY_ID = "added_tokens_decoder"
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_BY_NAME = ("extra_special_tokens", "model_specific_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_tokens(tokenizer: Tokenizer, folder: Path, error: type[Exception]) -> None:
    """Add tokens that the model's configs name and `tokenizer` lacks, with the next ids; without an embedding they stay
    text.
    """
    settings = tokenizer_settings(folder, read_optional_object(folder / CONFIG, error), error)
    if settings.get("split_special_tokens") is True:
        raise error(f"{folder / CONFIG}: `split_special_tokens` is not served; remove it, or set it to false")
    by_id = settings.get(_BY_ID)
    if by_id is None:
        listed = _legacy(read_optional_object(folder / "added_tokens.json", error), settings)
    else:
        listed = [_token(token, folder, error) for token in _in_order(by_id, folder, error)]
    known = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    wanted = [token for token in listed if repr(token) not in known]
    names = {token.content for token in (*tokenizer.get_added_tokens_decoder().values(), *wanted)}
    listed_by_text = {token.content: token for token in listed}
    special = set(_named(settings))
    for text in (*_named(settings), *_lists(settings)):
        if text not in names:
            names.add(text)
            wanted.append(listed_by_text.get(text, AddedToken(text, special=True)))
    for token in wanted:
        token.special = token.special or token.content in special
    tokenizer.add_tokens(_with_embedding(wanted, tokenizer, _num_embeddings(folder, error)))


def tokenizer_settings(folder: Path, config: Mapping[str, Any], error: type[Exception]) -> dict[str, Any]:
    """Return the settings of tokenizer_config.json, over which special_tokens_map.json wins as in transformers: where
    they do not list the added tokens themselves.
    """
    if config.get(_BY_ID) is not None:
        return dict(config)
    named = read_optional_object(folder / "special_tokens_map.json", error)
    merged = {**config, **named}
    if own := _first_list(config):
        further = named.get(_LISTS[0])
        listed = [*own, *(further if isinstance(further, list) else ())]
        merged |= {name: listed for name in _LISTS if not isinstance(merged.get(name), dict)}
    return merged


def _legacy(by_text: Mapping[str, Any], settings: Mapping[str, Any]) -> list[AddedToken]:
    """added_tokens.json, which only says the ids."""
    special = {*_named(settings), *_lists(settings)}
    in_order = sorted(by_text, key=lambda text: by_text[text] if isinstance(by_text[text], int) else -1)
    return [AddedToken(text, normalized=text not in special, special=text in special) for text in in_order]


def _in_order(by_id: Any, folder: Path, error: type[Exception]) -> list[Any]:
    if not isinstance(by_id, dict) or not all(number.isdecimal() for number in by_id):
        raise error(f"{folder / CONFIG}: `{_BY_ID}` must be an object of tokens by their ids")
    return [by_id[number] for number in sorted(by_id, key=int)]


def _token(said: Any, folder: Path, error: type[Exception]) -> AddedToken:
    content = said.get("content") if isinstance(said, dict) else None
    flags = {name: said[name] for name in _FLAGS if name in said} if isinstance(said, dict) else {}
    if not isinstance(content, str) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise error(f"{folder / CONFIG}: `{_BY_ID}` holds {said!r:.200}, which is not a token")
    return AddedToken(content, **flags)


def _named(settings: Mapping[str, Any]) -> Iterator[str]:
    """Texts of tokens that have a name: those of every tokenizer, and those of its own."""
    own = [name for name in settings if name.endswith("_token") and name not in NAMED_TOKENS]
    for name in (*NAMED_TOKENS, *own):
        if text := token_text(settings.get(name)):
            yield text
    for name in _BY_NAME:
        extra = settings.get(name)
        for value in extra.values() if isinstance(extra, dict) else ():
            if text := token_text(value):
                yield text


def _lists(settings: Mapping[str, Any]) -> Iterator[str]:
    for value in _first_list(settings):
        if text := token_text(value):
            yield text


def _first_list(settings: Mapping[str, Any]) -> list[Any]:
    return next((found for name in _LISTS if isinstance(found := settings.get(name), list) and found), [])


def _with_embedding(wanted: Sequence[AddedToken], tokenizer: Tokenizer, num_embeddings: int | None) -> list[AddedToken]:
    """Return those in the vocabulary, or with ids below the embeddings."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    # As the library numbers them: behind the model's own tokens, or the last that was added.
    next_id = max([tokenizer.get_vocab_size(with_added_tokens=False) - 1, *tokenizer.get_added_tokens_decoder()]) + 1
    kept = []
    for token in wanted:
        is_new = token.content not in vocabulary
        if not is_new or num_embeddings is None or next_id < num_embeddings:
            kept.append(token)
            next_id += is_new
    return kept


def _num_embeddings(folder: Path, error: type[Exception]) -> int | None:
    config = read_optional_config(folder / "config.json", error)
    text = config.get("text_config")
    for place in (text if isinstance(text, dict) else {}, config):
        if type(place.get("vocab_size")) is int:
            return int(place["vocab_size"])
    return None
