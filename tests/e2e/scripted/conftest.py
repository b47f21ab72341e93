"""One model that answers what a test says, for all files here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.format_tokens import ENDS, TOKENS
from support.scripted_model import ScriptedModel
from support.scripted_server import ScriptedServer


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("scripted")
    model = ScriptedModel(folder / "model", TOKENS, ends=ENDS)
    with ScriptedServer(model, folder, max_step_prefill_tokens=1024) as server:
        yield server
