"""The bound on the number of tokens: never above the truth, and none where a tokenizer may lose parts of a text."""

from __future__ import annotations

import random
import unicodedata
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from router.text.token_bound import token_bound
from router.text.tokenizer import PromptTokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(source: Tokenizer, *, normalizer: Any = None, pre_tokenizer: Any = None) -> Tokenizer:
    changed = Tokenizer.from_str(source.to_str())
    if normalizer is not None:
        changed.normalizer = normalizer
    if pre_tokenizer is not None:
        changed.pre_tokenizer = pre_tokenizer
    return changed


def sentencepiece(*, byte_fallback: bool = True, tokens: list[str] = BYTES) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(["<unk>", *tokens, "▁", "a", "▁a"])}
    merges = [("▁", "a")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.ByteFallback()
    return made


@pytest.mark.parametrize(
    "normalizer",
    [None, *(getattr(normalizers, form)() for form in ("NFC", "NFD", "NFKC", "NFKD")), normalizers.Lowercase(),
     normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Prepend("x")])],
)  # fmt: skip
def test_a_text_has_no_fewer_tokens_than_the_bound(tokenizer: Tokenizer, normalizer: Any) -> None:
    changed = byte_level(tokenizer, normalizer=normalizer)
    bound = token_bound(changed)
    assert bound is not None
    source = random.Random(5)
    pieces = ["the quick ", "dog", "\N{KELVIN SIGN}", "\U0001fbf9", "\u0dd9\u0dcf\u0dca", "각", " ", "é", "日", "🙂"]
    texts = ["".join(source.choices(pieces, k=source.randrange(1, 60))) for _ in range(300)]
    texts += [piece * 50 for piece in pieces] + [unicodedata.normalize("NFD", piece * 50) for piece in pieces]
    for text in texts:
        count = len(changed.encode(text, add_special_tokens=False).ids)
        assert bound.fewest_tokens(text) <= max(count, 1), text


@pytest.mark.long
def test_no_character_shrinks_more_than_the_bound_says(tokenizer: Tokenizer) -> None:
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        bound = token_bound(byte_level(tokenizer, normalizer=getattr(normalizers, form)()))
        assert bound is not None
        for number in (*range(0xD800), *range(0xE000, 0x110000)):
            whole = unicodedata.normalize(form, chr(number))
            assert whole, "nothing disappears"
            assert len(chr(number).encode()) * 3 <= bound.shrinks * len(whole.encode())


def test_the_longest_token_counts_in_bytes(tokenizer: Tokenizer) -> None:
    bound = token_bound(tokenizer)
    assert bound is not None and bound.most_bytes == max(map(len, tokenizer.get_vocab()))
    longer = byte_level(tokenizer)
    longer.add_special_tokens(["日" * 20])
    bound = token_bound(longer)
    assert bound is not None and bound.most_bytes == 60


def test_sentencepiece_with_all_bytes_has_a_bound() -> None:
    made = sentencepiece()
    bound = token_bound(made)
    assert bound is not None
    for text in ("a a a a", "日本" * 9, " " * 50):
        assert 0 < bound.fewest_tokens(text) <= len(made.encode(text).ids)


@pytest.mark.parametrize(
    "lossy",
    [
        lambda tokenizer: sentencepiece(byte_fallback=False),
        lambda tokenizer: sentencepiece(tokens=BYTES[1:]),
        lambda tokenizer: Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
        lambda tokenizer: Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        lambda tokenizer: Tokenizer(models.Unigram([("<unk>", 0.0)], unk_id=0)),
        *(
            lambda tokenizer, one=one: byte_level(tokenizer, normalizer=one)
            for one in (
                normalizers.Strip(), normalizers.StripAccents(), normalizers.Nmt(), normalizers.BertNormalizer(),
                normalizers.Replace(Regex(" +"), " "), normalizers.Replace("  ", " "),
                normalizers.Sequence([normalizers.NFC(), normalizers.Replace("x", "")]),
            )
        ),
        *(
            lambda tokenizer, one=one: byte_level(
                tokenizer, pre_tokenizer=pre_tokenizers.Sequence([one, pre_tokenizers.ByteLevel()])
            )
            for one in (
                pre_tokenizers.Whitespace(), pre_tokenizers.WhitespaceSplit(), pre_tokenizers.BertPreTokenizer(),
                pre_tokenizers.CharDelimiterSplit("x"), pre_tokenizers.Split(" ", "removed"),
                pre_tokenizers.Punctuation("removed"),
            )
        ),
    ],
)  # fmt: skip
def test_what_may_lose_text_has_no_bound(tokenizer: Tokenizer, lossy: Any) -> None:
    assert token_bound(lossy(tokenizer)) is None


def test_a_token_that_takes_blanks_with_it_has_no_bound(tokenizer: Tokenizer) -> None:
    changed = byte_level(tokenizer)
    changed.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert token_bound(changed) is None
    prompts = PromptTokenizer(changed, num_workers=1)
    assert prompts.fewest_tokens(" " * 10_000) == 0, "the prompt is cut first"
    prompts.close()


def test_splitting_without_removing_keeps_the_bound(tokenizer: Tokenizer) -> None:
    split = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()
    ])  # fmt: skip
    assert token_bound(byte_level(tokenizer, pre_tokenizer=split)) is not None
