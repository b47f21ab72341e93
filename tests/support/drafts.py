"""An engine with drafts, and what steps say of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from model_server.batch.results import StepResult
from model_server.engine.engine import Engine
from model_server.features.drafts.report import Drafted
from model_server.features.drafts.speculator import Speculator
from model_server.features.drafts.steps import drafts_by


def use_drafts(engine: Engine, speculator: Speculator) -> None:
    """For batches that begin from now on."""
    engine.maker = drafts_by(speculator)
    engine.steps.watcher = speculator


def speculator_of(engine: Engine) -> Any:
    return engine.steps.watcher


def drafts_in(results: Iterable[StepResult]) -> list[Drafted]:
    """What became of drafts, in each step that looked for some."""
    return [report for one in results for report in one.reports if isinstance(report, Drafted)]
