"""S16: a server of the large shape under load, without the same load in this process beside it: S5 in two minutes."""

from __future__ import annotations

from benchmarks.gpu.context import Context
from benchmarks.gpu.stages.served import FIRST_PROMPT, OUTPUT, PROMPT, Load, measure_server
from benchmarks.gpu.subjects.models import of_folder, of_shape
from benchmarks.gpu.subjects.shapes import by_size

LEVELS = (1, 64, 256)


def run(context: Context) -> None:
    """The large shape, or the user's model."""
    load = Load((1, 3), 12, 6, 40) if context.tiny else Load(LEVELS, PROMPT, OUTPUT, FIRST_PROMPT)
    if context.model is not None:
        measure_server(context, of_folder(context, context.model), None, load, {})
        return
    large = by_size(context.tiny)[1]
    measure_server(context, of_shape(context, large, "8B"), large, load, {})
