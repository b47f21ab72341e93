"""Counts with a suffix."""

from __future__ import annotations

import pytest
from support.option_configs import Config

from wire.cli.parsing import UsageError, parse
from wire.cli.sizes import Unit, count_of


@pytest.mark.parametrize(
    ("text", "unit", "count"),
    [
        ("8k", "tokens", 8192),
        ("8K", "tokens", 8192),
        ("8 k", "tokens", 8192),
        ("8Ki", "tokens", 8192),
        ("1.5k", "tokens", 1536),
        ("1M", "tokens", 2**20),
        ("8k", "bytes", 8192),
        ("2kB", "bytes", 2000),
        ("2KB", "bytes", 2000),
        ("2KiB", "bytes", 2048),
        ("1.5GiB", "bytes", 3 << 29),
        ("1.5GB", "bytes", 1_500_000_000),
        ("1TiB", "bytes", 2**40),
        ("0.1MB", "bytes", 100_000),
    ],
)
def test_suffixes(text: str, unit: Unit, count: int) -> None:
    assert count_of(text, unit) == count


@pytest.mark.parametrize("unit", ["tokens", "bytes"])
@pytest.mark.parametrize(
    "text", ["", "k", "8x", "8kk", "-8k", "+8k", "8k ", "1e3k", "1.k", ".5k", "1.0001k", "\u0663k", "8Kib/s"]
)
def test_what_is_no_size(text: str, unit: Unit) -> None:
    with pytest.raises(ValueError, match=f"expected a whole number of {unit}"):
        count_of(text, unit)


def test_tokens_have_no_bytes() -> None:
    with pytest.raises(ValueError, match="8192 or 8k"):
        count_of("8kB", "tokens")


def test_as_options() -> None:
    config = parse(Config, ["--tokens", "4k", "--size=1GiB"], {})
    assert (config.tokens, config.size) == (4096, 2**30)
    assert parse(Config, [], {"TOKENS": "4k"}).tokens == 4096
    with pytest.raises(UsageError, match=r"'2TiB' for '--size <SIZE>': 2199023255552 is not in 0..=1099511627776"):
        parse(Config, ["--size", "2TiB"], {})
    with pytest.raises(UsageError, match="0 is not in"):
        parse(Config, ["--tokens", "0k"], {})
    with pytest.raises(UsageError, match=r"'8k' for '--port <PORT>': expected a whole number$"):
        parse(Config, ["--port", "8k"], {})
