"""The products of a model, by the stored matrices that they are made of: to those something may be added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from model_server.weights.matrix import Part
from model_server.weights.reader import Range

# Behind the name of a module that another one wraps.
INNER = ".base_layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParameter:
    """The matrices of all experts as one parameter of transformers' module."""

    name: str
    num_experts: int
    # Of each expert, as `outputs`.
    inputs: int
    outputs: int
    # It is [experts, inputs, outputs], the opposite of what PEFT expects: its A is B.
    swapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlace:
    """The place of a tensor of the base model's files in an `ExpertParameter`."""

    # Its name behind the module's.
    parameter: str
    # Whose matrix the tensor is; None: it holds all.
    expert: int | None = None
    # Its first output among the parameter's.
    first: int = 0
    # Stored as [.., inputs, outputs].
    transposed: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Products:
    """The modules of a model that take adapters, by the model's names; equal by identity."""

    # Inputs and outputs of each, the head included.
    linear: Mapping[str, tuple[int, int]]
    head: str = ""
    embedding: str = ""
    # (vocabulary, width) of embedding and head; "" where one takes none.
    table: tuple[int, int] = (0, 0)
    # By transformers' module, one or two parameters each.
    experts: Mapping[str, tuple[ExpertParameter, ...]] = field(default_factory=dict)
    # Names of all that belongs to routed experts: single matrices, and parameters of all.
    of_experts: frozenset[str] = frozenset()
    # What transformers calls some modules, by that name.
    other_names: Mapping[str, str] = field(default_factory=dict)
    # What names begin with, and files may leave out.
    base: str = ""

    @cached_property
    def by_short_name(self) -> Mapping[str, str]:
        """Map names without `base` to modules."""
        # Of two parameters of one module, PEFT has one inside the other.
        inner = (name + INNER for name, parameters in self.experts.items() if len(parameters) > 1)
        names = {*self.linear, self.head, self.embedding, *self.experts, *inner} - {""}
        found = {**{name: name for name in names}, **self.other_names}
        return {name.removeprefix(self.base): module for name, module in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """One expert's place in a parameter of all experts."""

    name: str
    expert: int
    # Of its outputs on this rank, then in the order `order`.
    rows: tuple[Range, ...]
    order: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product of the base model."""

    # The rows of stored matrices that it has on this rank, in turn.
    parts: tuple[Part, ...]
    # Of this rank, whose partial sums add up over the ranks; None: all.
    columns: Range | None
    # Reads its rows, [outputs, all inputs] float32.
    weight: Callable[[], Tensor]
    bias: Tensor | None = None
    # This rank adds what is added once.
    adds_bias: bool = True
    # Where the outputs are among those of all experts.
    expert: ExpertRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The embedding or the head."""

    module: str
    size: int
    # Reads the base model's rows of these ids.
    rows: Callable[[Range], Tensor]
    # Copies in adapters may hold the numbers before quantization.
    is_quantized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTable:
    """The head's rows and bias on this rank."""

    table: Table
    rows: Range
    bias: Tensor | None
    # The embedding, if it is the same matrix: new rows are the head's too.
    tied_to: str | None
