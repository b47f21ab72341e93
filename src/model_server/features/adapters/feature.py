"""LoRA adapters of requests, a `batch.feature.ModelFeature`: each row of a step gets its own, or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Rows

import numpy as np

from model_server.adapters.rows import BASE, adapter_rows
from model_server.adapters.slot_table import SlotTable
from model_server.batch.feature import Admission, ModelFeature
from model_server.batch.growth import Failure
from model_server.batch.sequence import Attachment, Sequence
from model_server.errors import RequestError
from model_server.features.adapters.residents import Residence, Residents
from model_server.memory.transfer import Staging
from model_server.runner.runner import ModelInputs


@dataclasses.dataclass(frozen=True, slots=True)
class AskedAdapter:
    """The adapter that a request names: of the model's own the name, of later ones the load id."""

    adapter: str | int

    @property
    def refusal(self) -> str:
        if isinstance(self.adapter, int):
            return f"no adapter is loaded under {self.adapter}"
        return f"no adapter {self.adapter[:100]!r} is loaded"


@dataclasses.dataclass(frozen=True, slots=True)
class SlotUse:
    """Copies of adapters into slots so far, and slots that hold one."""

    loads: int
    held: int


class RowAdapter(Attachment):
    """The adapter of a sequence."""

    __slots__ = ("number", "residence")

    def __init__(self, number: int, residence: Residence | None) -> None:
        self.number = number  # or its slot
        self.residence = residence  # while this refers to it, the number stays that adapter's


class Adapters(ModelFeature):
    """The adapters of one model."""

    name = "adapters"

    def __init__(
        self, names: tuple[str, ...], slots: SlotTable | None = None, residents: Residents | None = None
    ) -> None:
        self._numbers: dict[str | int, int] = {name: number for number, name in enumerate(names)}  # the model's own
        self._slots = slots  # of the device; None: rows use numbers
        self.residents = residents  # that come while serving, if any may

    @property
    def remedy(self) -> str:
        slots = self._slots
        return "" if slots is None else f"`--lora-slots` (there are {slots.num_slots}) or `--lora-max-rank`"

    def start(self, longest: int) -> int:
        if self.residents is not None:
            self.residents.clear()  # another router begins with load ids of its own
        return 0

    def admit(self, admission: Admission) -> None:
        """Find the adapter, and copy it into a slot if need be."""
        asked = admission.read(AskedAdapter)
        if admission.request.is_trial and self._slots is not None:
            # Whatever is in it: products of adapters are computed, and their kernels compiled.
            admission.attachments.append(RowAdapter(0, None))
        elif asked is not None:
            admission.attachments.append(self._found(asked, admission))

    def prepare(self, sequences: Rows[Sequence]) -> tuple[list[Failure], object]:
        return [], None if self._slots is None else SlotUse(self._slots.num_loads, self._slots.num_held)

    def extend(
        self, inputs: ModelInputs, sequences: Rows[Sequence], counts: Rows[int], staging: Staging
    ) -> ModelInputs:
        numbers = np.fromiter(map(_number_of, sequences), np.int64, len(sequences))
        if (numbers == BASE).all():
            return inputs
        logit_rows, attention = inputs.logit_rows_host, inputs.attention
        if logit_rows is not None:  # of prompts, whose keys they may change
            attention = dataclasses.replace(attention, adapters=tuple(numbers.tolist()))
        rows = adapter_rows(np.repeat(numbers, counts), logit_rows, inputs.input_ids.device)
        return dataclasses.replace(inputs, attention=attention, adapters=rows)

    def _found(self, asked: AskedAdapter, admission: Admission) -> RowAdapter:
        request_id, residence = admission.request.id, None
        if isinstance(asked.adapter, int) and self.residents is not None:
            residence = self.residents.find(asked.adapter)
        number = self._numbers.get(asked.adapter) if residence is None else residence.number
        if number is None:
            raise RequestError(f"request {request_id}: {asked.refusal}")
        if self._slots is None:
            return RowAdapter(number, residence)
        slot = self._slots.acquire(number, lambda: set(map(_number_of, admission.running())))
        if slot is None:
            raise RequestError(
                f"request {request_id}: rows that run have other adapters in all {self._slots.num_slots} slots; raise "
                "--lora-slots"
            )
        return RowAdapter(slot, residence)


def _number_of(sequence: Sequence) -> int:
    for attached in sequence.attachments:
        if isinstance(attached, RowAdapter):
            return attached.number
    return BASE
