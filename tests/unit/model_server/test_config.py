"""What the environment says of chunks and shared prefixes."""

from __future__ import annotations

import pytest

from model_server.config import ServeConfig, threads_are_set
from wire.cli.parsing import parse


@pytest.mark.parametrize(
    ("value", "expected"), [(None, True), ("1", True), ("True", True), ("0", False), ("false", False)]
)
def test_chunks_and_shared_prefixes_can_be_switched_off(value: str | None, expected: bool) -> None:
    environ = {} if value is None else {"PREFILL_CHUNKING": value, "PREFIX_CACHING": value}
    config = parse(ServeConfig, ["demo"], environ)
    assert (config.prefill_chunking, config.prefix_caching) == (expected, expected)


def test_sums_between_gpus_can_be_left_to_nccl() -> None:
    """The launcher's --disable-custom-kernels, as TGI spells it for its shards."""
    assert not parse(ServeConfig, ["demo"], {}).disable_custom_kernels
    assert parse(ServeConfig, ["demo"], {"DISABLE_CUSTOM_KERNELS": "True"}).disable_custom_kernels


def test_what_the_environment_says_beside_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert not threads_are_set()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads_are_set()
