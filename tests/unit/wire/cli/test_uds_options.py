"""A unix socket's path and permissions, before anything listens on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from wire.cli.uds_options import UdsOptions, check_uds


@pytest.mark.parametrize(
    ("config", "certfile", "text"),
    [
        (UdsOptions(uds=Path("/x"), uds_mode="rw"), None, "three octal digits"),
        (UdsOptions(uds=Path("/x"), uds_mode="0800"), None, "three octal digits"),
        (UdsOptions(uds_mode="0660"), None, "is for `--uds`"),
        (UdsOptions(uds=Path("/x")), Path("cert.pem"), "exclude each other"),
        (UdsOptions(uds=Path("/" + "x" * 108)), None, "too long"),
    ],
)
def test_what_is_refused(config: UdsOptions, certfile: Path | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_uds(config, certfile, ValueError)


@pytest.mark.parametrize("mode", ["666", "0660"])
def test_what_is_accepted(mode: str) -> None:
    check_uds(UdsOptions(uds=Path("x"), uds_mode=mode), None, ValueError)
    check_uds(UdsOptions(), Path("cert.pem"), ValueError)
