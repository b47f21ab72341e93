"""Pieces and final texts against the library's own decoding of all ids."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.effort import examples
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from model_server.text.detokenizer import Detokenizer
from model_server.text.tokenizer import Tokenizer

SPECIALS = ["<s>", "</s>", "<|im_end|>"]
PLAIN_ADDED = ["<tool call>", "été", "�"]
# Latin, combining, CJK, right-to-left, joined emoji, all planes, control characters, a true replacement character.
TEXTS = st.text(
    st.one_of(
        st.sampled_from("abc  \n\tß̈éñ中文字אב👩‍👩‍👧‍👦🇩🇪�𝔘𠀀\U000e0041\U0010fffd\x00▁Ġ"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
)


def byte_level() -> Backend:
    """GPT-2's kind: every byte, some merges that cross character borders, added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    merges = []
    for text in ("ab", " a", "é", "中", "👩", "��"):
        symbols = [part for part, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)]
        for left, right in zip("".join(symbols), "".join(symbols)[1:], strict=False):
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append((left, right))
    tokenizer = Backend(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_added(tokenizer)


def byte_fallback(*, strip: bool = True) -> Backend:
    """Llama-2's kind: words with a leading mark, bytes for what is missing."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for token in ("▁", "a", "b", "c", "▁a", "ab", "▁▁", "中", "\n", "é"):
        vocabulary[token] = len(vocabulary)
    tokenizer = Backend(
        models.BPE(
            vocabulary, [("▁", "a"), ("a", "b"), ("▁", "▁")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return with_added(tokenizer)


def word_piece() -> Backend:
    tokenizer = Backend(models.WordPiece({"[UNK]": 0, "hello": 1, "##ing": 2, "wor": 3, "##ld": 4, ",": 5}))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return with_added(tokenizer)


def with_added(tokenizer: Backend) -> Backend:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_ADDED])
    return tokenizer


BYTE_LEVEL = Tokenizer(byte_level())
BYTE_FALLBACK = Tokenizer(byte_fallback())
TOKENIZERS = {
    "byte level": BYTE_LEVEL,
    "byte fallback": BYTE_FALLBACK,
    "byte fallback, no strip": Tokenizer(byte_fallback(strip=False)),
    "word piece": Tokenizer(word_piece()),
}


def pieces(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    subject = Detokenizer(tokenizer, prompt)
    return [subject.append(token_id) for token_id in ids]


def final(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    subject = Detokenizer(tokenizer, prompt)
    for token_id in ids:
        subject.append(token_id)
    return subject.final_text()


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids: invalid bytes, cut characters, special tokens in the middle."""
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30)


def wanted(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """What the library says of prompt and generated ids together, behind what it says of the prompt alone."""
    before = tokenizer.decode(prompt, skip_special_tokens=False)
    return tokenizer.decode([*prompt, *ids], skip_special_tokens=False)[len(before) :]


PROMPT = {
    name: tokenizer.encode("ab a", truncate=0, add_special_tokens=False) for name, tokenizer in TOKENIZERS.items()
}


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "byte fallback, no strip"])
@given(text=TEXTS, prompt=TEXTS)
@settings(max_examples=examples(40, 600), deadline=None)
def test_pieces_of_valid_text_are_the_text(name: str, text: str, prompt: str) -> None:
    tokenizer = TOKENIZERS[name]
    before = tokenizer.encode("ab" + prompt, truncate=0, add_special_tokens=False)
    ids = tokenizer.encode(text, truncate=0, add_special_tokens=False)
    assert "".join(pieces(tokenizer, before, ids)) == wanted(tokenizer, before, ids)


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
@given(text=TEXTS)
@settings(max_examples=examples(25, 400), deadline=None)
def test_every_cut_point(name: str, text: str) -> None:
    """A text cut anywhere: pieces and final text agree, and only the incomplete character at the end is missing."""
    tokenizer = TOKENIZERS[name]
    prompt = PROMPT[name]
    ids = tokenizer.encode("ab" + text, truncate=0, add_special_tokens=False)
    special = {number for number, token_id in enumerate(ids) if token_id in tokenizer.special_ids}
    streamed = pieces(tokenizer, prompt, ids)
    whole = "".join(streamed)
    for cut in range(len(ids) + 1):
        shown = "".join(streamed[:cut])
        assert whole.startswith(shown)
        library = wanted(tokenizer, prompt, ids[:cut])
        if name == "byte level":
            assert library in (shown, shown + "�")
        else:  # the library takes back the whole run of bytes that a character is missing from
            assert library == shown or shown.startswith(library.rstrip("�"))
        if not any(number < cut for number in special):
            assert final(tokenizer, prompt, ids[:cut]) == shown


def unfinished(shown: str) -> tuple[str, str]:
    """What the library makes of a text that is cut off inside a character: one mark, but two for the first two bytes
    of an encoded surrogate (ED A0 to ED BF), which Python's decoder holds back until the third."""
    return shown + "�", shown + "��"


@given(ids=ids_of(BYTE_LEVEL))
@settings(max_examples=examples(75, 1200), deadline=None)
def test_byte_level_pieces_of_any_ids_equal_the_library(ids: list[int]) -> None:
    prompt = PROMPT["byte level"]
    library = wanted(BYTE_LEVEL, prompt, ids)
    shown = "".join(pieces(BYTE_LEVEL, prompt, ids))
    assert library in (shown, *unfinished(shown))
    if library != shown:  # one replacement for the character that is cut off
        completed = [BYTE_LEVEL.decode([*ids, 0], skip_special_tokens=False), "�!"]
        assert completed[0].endswith(completed[1])


@example(ids=[169, 94])  # the first two bytes of an encoded surrogate
@given(ids=ids_of(BYTE_LEVEL))
@settings(max_examples=examples(50, 800), deadline=None)
def test_byte_level_final_text_of_any_ids(ids: list[int]) -> None:
    library = BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    shown = final(BYTE_LEVEL, PROMPT["byte level"], ids)
    assert library in (shown, *unfinished(shown))
    assert not any(special in shown for special in SPECIALS)


@given(ids=ids_of(BYTE_LEVEL))
@settings(max_examples=examples(40, 600), deadline=None)
def test_table_and_context_decoding_agree(ids: list[int]) -> None:
    """The byte table against the general way on the same tokenizer, wherever no character is split over tokens."""
    general = Tokenizer(byte_level())
    general.__dict__["byte_pieces"] = None
    whole = [token_id for token_id in ids if BYTE_LEVEL.byte_pieces[token_id][1] is not None]  # type: ignore[index]
    prompt = PROMPT["byte level"]
    assert pieces(general, prompt, whole) == pieces(BYTE_LEVEL, prompt, whole)
    assert final(general, prompt, whole) == final(BYTE_LEVEL, prompt, whole)


def fallback_reference(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """Runs of byte tokens as UTF-8 with one replacement per invalid byte, everything else as the library."""
    shown, run = "", b""
    before = list(prompt)
    for token_id in [*ids, None]:
        if token_id is not None and token_id in tokenizer.fallback_bytes:
            run += bytes([tokenizer.fallback_bytes[token_id]])
            continue
        shown += replaced(run, at_end=token_id is None)
        run = b""
        if token_id is not None:
            shown += wanted(tokenizer, before, [token_id])
    return shown


def replaced(run: bytes, *, at_end: bool) -> str:
    shown = ""
    while run:
        try:
            return shown + run.decode()
        except UnicodeDecodeError as error:
            tail = run[error.start :]
            # Half of an encoded surrogate counts as unfinished too: what it is shows with its third byte.
            is_surrogate = len(tail) == 2 and tail[0] == 0xED and 0xA0 <= tail[1] <= 0xBF
            if at_end and (is_surrogate or error.reason == "unexpected end of data"):
                return shown + run[: error.start].decode()
            shown += run[: error.start].decode() + "�" * (error.end - error.start)
            run = run[error.end :]
    return shown


@pytest.mark.parametrize("name", ["byte fallback", "byte fallback, no strip"])
@given(data=st.data())
@settings(max_examples=examples(50, 800), deadline=None)
def test_byte_fallback_pieces_of_any_ids(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(tokenizer))
    prompt = PROMPT[name]
    assert "".join(pieces(tokenizer, prompt, ids)) == fallback_reference(tokenizer, prompt, ids)
    plain = [token_id for token_id in ids if token_id not in tokenizer.special_ids]
    assert final(tokenizer, prompt, ids) == fallback_reference(tokenizer, prompt, plain)


@given(data=st.data())
@settings(max_examples=examples(25, 400), deadline=None)
def test_other_decoders_go_by_context(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS["word piece"]
    ids = data.draw(ids_of(tokenizer))
    assert "".join(pieces(tokenizer, [1], ids)) == wanted(tokenizer, [1], ids)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    numbers = {byte: token_id for token_id, byte in tokenizer.fallback_bytes.items()}
    return [numbers[byte] for byte in data]


def test_byte_fallback_emoji_comes_whole() -> None:
    ids = byte_ids(BYTE_FALLBACK, "👩".encode())
    assert pieces(BYTE_FALLBACK, PROMPT["byte fallback"], ids) == ["", "", "", "👩"]


def test_invalid_byte_in_the_middle_is_shown_with_what_follows() -> None:
    prompt = PROMPT["byte fallback"]
    a = BYTE_FALLBACK.encode("ba", truncate=0, add_special_tokens=False)[-1]
    assert pieces(BYTE_FALLBACK, prompt, [*byte_ids(BYTE_FALLBACK, b"\xe4\xbd"), a]) == ["", "", "��a"]
    assert pieces(BYTE_FALLBACK, prompt, [*byte_ids(BYTE_FALLBACK, b"\xff"), a]) == ["�", "a"]


def test_characters_before_an_incomplete_one_stay() -> None:
    """TGI's final text would be empty; the library would replace the whole run."""
    prompt = PROMPT["byte fallback"]
    ids = byte_ids(BYTE_FALLBACK, "你好".encode()[:-1])
    assert pieces(BYTE_FALLBACK, prompt, ids) == ["", "", "你", "", ""]
    assert final(BYTE_FALLBACK, prompt, ids) == "你"


def test_leading_spaces_follow_the_context() -> None:
    tokenizer = BYTE_FALLBACK
    ids = tokenizer.encode("a", truncate=0, add_special_tokens=False)
    start = [tokenizer.vocab_size - len(SPECIALS) - len(PLAIN_ADDED)]
    assert tokenizer.decode(start, skip_special_tokens=False) == "<s>"
    assert pieces(tokenizer, PROMPT["byte fallback"], ids) == [" a"]
    assert pieces(tokenizer, start, ids) == [" a"]
    assert pieces(tokenizer, [], ids) == ["a"]
    # As in TGI the final text starts behind one token without special tokens, hence here at the start of a text.
    assert final(tokenizer, PROMPT["byte fallback"], ids) == " a"
    assert final(tokenizer, start, ids) == "a"


def test_short_and_empty_prompts() -> None:
    for tokenizer in TOKENIZERS.values():
        for prompt in ([], [3], [3, 4]):
            assert "".join(pieces(tokenizer, prompt, [3, 4, 5])) == wanted(tokenizer, prompt, [3, 4, 5])


def test_a_character_opened_by_the_prompt_is_completed() -> None:
    data = "中".encode()
    for tokenizer, ids in (
        (BYTE_LEVEL, [token_of_byte(byte) for byte in data]),
        (BYTE_FALLBACK, byte_ids(BYTE_FALLBACK, data)),
    ):
        assert pieces(tokenizer, ids[:2], ids[2:]) == ["中"]


def token_of_byte(byte: int) -> int:
    assert BYTE_LEVEL.byte_pieces is not None
    return next(token_id for token_id in range(256) if BYTE_LEVEL.byte_pieces[token_id][0] == bytes([byte]))


def test_tokens_without_text_and_unknown_ids() -> None:
    for name in ("byte level", "byte fallback"):
        tokenizer = TOKENIZERS[name]
        a = tokenizer.encode("aba", truncate=0, add_special_tokens=False)[-1]
        assert pieces(tokenizer, PROMPT[name], [a, 10**6, a]) == ["a", "", "a"]


def test_special_tokens_are_literal_in_pieces_and_absent_from_the_final_text() -> None:
    for name in ("byte level", "byte fallback"):
        tokenizer = TOKENIZERS[name]
        ids = tokenizer.encode("ab<|im_end|><tool call>", truncate=0, add_special_tokens=False)
        streamed = "".join(pieces(tokenizer, PROMPT[name], ids))
        assert streamed.lstrip() == "ab<|im_end|><tool call>"
        assert final(tokenizer, PROMPT[name], ids).lstrip() == "ab<tool call>"


def test_long_runs_without_text_stay_cheap() -> None:
    """Each token looks at a few others, whatever was held back before."""
    calls = 0

    class Counting(Tokenizer):
        def decode(self, ids: object, *, skip_special_tokens: bool) -> str:
            nonlocal calls
            calls += 1
            assert len(ids) <= 6  # type: ignore[arg-type]
            return super().decode(ids, skip_special_tokens=skip_special_tokens)  # type: ignore[arg-type]

    tokenizer = Counting(word_piece())
    subject = Detokenizer(tokenizer, [1])
    for _ in range(1000):
        subject.append(10**6)
    assert calls <= 2002
