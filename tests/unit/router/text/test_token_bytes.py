"""The bytes of tokens, as the library's decoders join them."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from router.text.token_bytes import TokenBytes
from wire.text.token_bytes import byte_level

TEXT = "Zürich 日本 🙂\n a"


def byte_fallback() -> Tokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "▁": 257, "b": 258}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def byte_level_tokenizer() -> Tokenizer:
    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_bytes_of_a_byte_level_vocabulary_are_those_of_the_text() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<é>", special=True)])
    data = TokenBytes(tokenizer)
    assert b"".join(data[number] for number in tokenizer.encode(TEXT).ids) == TEXT.encode()
    assert data[tokenizer.token_to_id("<é>")] == "<é>".encode()


def test_bytes_of_a_vocabulary_with_single_bytes() -> None:
    data = TokenBytes(byte_fallback())
    assert [data[number] for number in (0xE2, 256, 257, 258)] == [b"\xe2", b" a", b" ", b"b"]


@pytest.mark.parametrize("number", [-1, 10_000])
def test_an_id_that_no_token_has(number: int) -> None:
    assert TokenBytes(byte_fallback())[number] == b""


def test_letters_outside_of_the_alphabet_stand_for_themselves() -> None:
    assert byte_level("Ġa") == b" a" and byte_level("日") == "日".encode()
