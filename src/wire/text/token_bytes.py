"""The bytes that a token adds to a text, as decoders of byte-level vocabularies join them."""

from __future__ import annotations


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (`encoder.py:bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def byte_level(token: str) -> bytes:
    """Return bytes as the library's ByteLevel decoder; other tokens are UTF-8."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()
