"""What nothing could run with is refused at once, by flag: numbers out of range, texts that no header holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import launcher.config_checks
import model_server.config
import router.config
from launcher.bench.config import BenchConfig
from launcher.chat.config import ChatConfig
from launcher.config import LauncherConfig
from model_server.config import ServeConfig
from router.config import RouterConfig
from wire.cli.options import Option, options_of
from wire.cli.parsing import UsageError, parse

CHECKS: dict[type, Callable[[Any], None]] = {
    LauncherConfig: launcher.config_checks.check,
    RouterConfig: router.config.check,
    ServeConfig: model_server.config.check,
}
NUMBERS = [(kind, one) for kind in CHECKS for one in options_of(kind) if one.item in (int, float)]
NAMES = [f"{kind.__name__} {one.flag}" for kind, one in NUMBERS]

ZERO_MEANS_SOMETHING = {
    "node_rank", "shard_port",
    "cuda_graphs",  # none
    "graceful_termination_timeout",  # at once
    "master_port", "port", "aip_http_port", "prometheus_port",  # a free one, none
    "max_stop_sequences", "max_stop_sequence_bytes", "max_top_n_tokens",  # no request may have any
    "max_waiting_tokens", "waiting_served_ratio",  # do not wait
    "max_images",  # no request may have any
    "image_cache_mib",  # none is kept
    "rank",
    "response_store",  # none is kept
    "speculate",  # off
    "tgi_wiggle_room",
    "watermark_gamma", "watermark_delta",  # favours nothing
}  # fmt: skip
NEGATIVE_MEANS_SOMETHING = {"watermark_delta"}


def outcome(kind: type, one: Option, text: str) -> str:
    """What is said, or `accepted`."""
    positional = ["model"] if kind is ServeConfig else []
    try:
        CHECKS[kind](parse(kind, [f"{one.flag}={text}", *positional], {}))
    except UsageError as error:
        assert f"invalid value '{text}' for '{one.flag} " in str(error)
        return str(error)
    except Exception as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(("kind", "one"), NUMBERS, ids=NAMES)
def test_what_is_no_number_or_a_negative_one_is_refused(kind: type, one: Option) -> None:
    for text in ("nan", "inf", "-inf", "1e400", str(2**64), "-1", "", "x"):
        is_meant = (text == "-1" and one.name in NEGATIVE_MEANS_SOMETHING) or (not text and one.separator)
        is_small = text == str(2**64) and one.item is float and one.maximum is None
        assert (outcome(kind, one, text) == "accepted") == bool(is_meant or is_small), text


@pytest.mark.parametrize(("kind", "one"), NUMBERS, ids=NAMES)
def test_zero_is_refused_where_nothing_could_be_served_with_it(kind: type, one: Option) -> None:
    assert (outcome(kind, one, "0") == "accepted") == (one.name in ZERO_MEANS_SOMETHING)


@pytest.mark.parametrize(("kind", "one"), NUMBERS, ids=NAMES)
def test_numbers_fit_where_they_travel(kind: type, one: Option) -> None:
    """Tokens and batches as 32 bits to the shards, seconds into timers, floats as 32 bits."""
    travels = any(word in one.name for word in ("input", "total_tokens", "prefill", "batch_size", "seconds", "timeout"))
    if one.item is float:
        assert outcome(kind, one, "1e39") != "accepted"
    if travels and one.name != "max_client_batch_size":
        assert outcome(kind, one, str(2**32)) != "accepted"


# What a program of ours puts into a header of HTTP: another one is to be declared so too.
IN_HEADERS = [
    (LauncherConfig, "compute_type"), (LauncherConfig, "api_key"), (LauncherConfig, "cors_allow_origin"),
    (RouterConfig, "compute_type"), (RouterConfig, "api_key"), (RouterConfig, "cors_allow_origin"),
    (BenchConfig, "api_key"), (ChatConfig, "api_key"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), IN_HEADERS)
@pytest.mark.parametrize(
    "text", ["a\r\nx-evil: 1", "a\nb", "\x00", "a\tb", "caf\u00e9", "\u65e5", "\udcff", " k3y", "k3y "]
)
def test_no_text_reaches_a_header_that_cannot_stand_there(kind: type, name: str, text: str) -> None:
    (one,) = (one for one in options_of(kind) if one.name == name)
    with pytest.raises(UsageError) as by_flag:
        parse(kind, [f"{one.flag}={text}"], {})
    assert one.flag in str(by_flag.value) and text not in str(by_flag.value), "it may be a secret"
    if one.env is not None:
        with pytest.raises(UsageError, match=one.env):
            parse(kind, [], {one.env: text})
    parse(kind, [f"{one.flag}=1-nvidia h100 (a, b)"], {})
