"""Run in each process of a server (FAKE_CARD_ALSO): steps look so cheap that drafts pay. The interpreter takes seconds
for a step, and more for a larger one.
"""

import importlib.abc
import importlib.util
import os
import sys

MODULE = "model_server.features.drafts.costs"
MOST_ROWS = 4


class _AfterImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            load(module)
            _make_cheap(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _make_cheap(costs):  # type: ignore[no-untyped-def]
    measure, costs._MOST_ROWS, costs._REPEATS, costs._KEYS = costs.step_costs, MOST_ROWS, 1, 32

    def step_costs(runner, *rest):  # type: ignore[no-untyped-def]
        measure(runner, *rest)  # what it runs is part of a start
        # The model's own steps, with which drafts are checked, and a drafter's.
        is_model = type(runner).__name__ in ("DraftedRunner", "GraphedRunner")
        return [(1, 1e-3), (128, 2e-3)] if is_model else [(1, 1e-6), (128, 2e-6)]

    costs.step_costs = step_costs


if os.environ.get("RANK"):
    sys.meta_path.insert(0, _AfterImport())
