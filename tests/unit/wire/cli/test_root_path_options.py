from __future__ import annotations

import pytest

from wire.cli.root_path_options import RootPathOptions, check_root_path


@pytest.mark.parametrize("path", ["llm", "/", "/llm/", "//llm", "/a b", "/ä", "http://host/llm"])
def test_what_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="must be a path as /llm"):
        check_root_path(RootPathOptions(root_path=path), ValueError)


@pytest.mark.parametrize("path", [None, "/llm", "/team-1/llm_2"])
def test_what_is_accepted(path: str | None) -> None:
    check_root_path(RootPathOptions(root_path=path), ValueError)
