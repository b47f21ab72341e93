"""Quantized matrices in a transformers model: our products replace linear layers. Imports transformers late."""

# Layers that are stored quantized give way before the weights are loaded, so that transformers reads the rest alone.
# Plain matrices are quantized on load one by one, each before the next is read; where an adapter is merged into them,
# all are read first.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.layers.linear.factory import LinearFactory
from model_server.layers.linear.linear import Linear
from model_server.models.hf.experts import DOWN, UP, AbsentExperts, ExpertPlaces
from model_server.models.model import Model, plain_only
from model_server.quantization.forms import Form
from model_server.quantization.scheme import Scheme
from model_server.weights.leftover import natural_order
from model_server.weights.library_names import Place, StoredNames
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import SafetensorsReader

_METHOD = "tercet"
# Layers that choose experts stay plain, as in the native decoder.
_ROUTERS = ("gate", "router", "shared_expert_gate")


class QuantizedLinear(nn.Module):
    """A linear layer by our products; `weight` is empty, for models that ask its type."""

    weight: Tensor

    def __init__(self, product: Linear, size: tuple[int, int], placement: Placement) -> None:
        """size: outputs, inputs."""
        super().__init__()
        self.out_features, self.in_features = size
        self.bias = None
        self._product = product
        self._dtype = placement.dtype
        empty = torch.empty(0, dtype=placement.dtype, device=placement.device)
        self.register_buffer("weight", empty, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(self._dtype)
        return self._product(rows).view(*x.shape[:-1], self.out_features).to(x.dtype)


class _Absent(nn.Module):
    """Stands for a layer, `stored` in the files, until it is read, with nothing to load."""

    def __init__(self, stored: str, size: tuple[int, int], *, transposed: bool) -> None:
        super().__init__()
        self.stored = stored
        self.size = size
        self.transposed = transposed


@dataclass(frozen=True, slots=True)
class Exchange:
    """Makes the layers of one model, on one device."""

    model: Model
    prefix: str
    reader: SafetensorsReader
    placement: Placement
    _plain: dict[str, tuple[tuple[int, int], bool]] = field(default_factory=dict)  # to quantize: their `_size`
    _quantized: dict[str, Form] = field(default_factory=dict)
    _errors: list[Exception] = field(default_factory=list)

    @classmethod
    def of(cls, model: Model, prefix: str, placement: Placement) -> Exchange:
        """Make an exchange; names may have or lack the prefix."""
        prefix += "."
        reader = SafetensorsReader(
            model.checkpoint.headers, dtype=placement.dtype, device=placement.device, base_prefix=prefix
        )
        return cls(model, prefix, reader, placement)

    @property
    def scheme(self) -> Scheme:
        return self.model.scheme

    def config(self) -> Any:
        """Return a `quantization_config` that leaves out quantized matrices, and quantizes others as they are read."""
        return _config_class()(self)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise what transformers would hide, inside the block."""
        try:
            yield
        except Exception as error:
            if not self._errors:
                raise
            raise self._errors[0] from error

    def prepare(self, model: Any) -> None:
        """Replace layers before weights are read."""
        if self.scheme.quantize is None:
            self._leave_out(model)
        else:
            self._plain.update((name, _size(module)) for name, module in self._to_quantize(model))

    def quantizes(self, tensor: str) -> bool:
        name, _, kind = tensor.rpartition(".")
        return kind == "weight" and name in self._plain

    def convert(self, tensors: Mapping[str, Any], **others: Any) -> dict[str, Tensor]:
        """Return what transformers sets for read tensors: nothing if quantized here."""
        try:
            return {
                name: self._converted(name, read[0] if isinstance(read, list) else read)
                for name, read in tensors.items()
            }
        except Exception as error:
            self._errors.append(error)
            raise

    def _converted(self, tensor: str, read: Tensor) -> Tensor:
        if not self.quantizes(tensor):
            return read
        name = tensor.removesuffix(".weight")
        size, transposed = self._plain[name]
        weight = read.t() if transposed else read
        if weight.shape != size:
            del self._plain[name]  # so that transformers refuses it
            return read
        form = self.scheme.quantized(weight, name)
        if form is None:
            return read
        self._quantized[name] = form
        return read.new_empty(0)

    def fill(self, model: nn.Module) -> None:
        """Put our layers where matrices were quantized or left out."""
        factory = LinearFactory(self.placement.device, self.placement.dtype)
        for name in list(self._quantized):  # each form goes before the next layer packs its own
            self._replace(model, name, self._quantized.pop(name), self._plain[name][0], factory)
        for name, module in list(model.named_modules()):
            if isinstance(module, _Absent):
                _put(model, name, self._linear(module, factory))
            elif isinstance(module, AbsentExperts):
                _put(model, name, module.read(self.reader, self.scheme, factory, self.placement))

    def _linear(self, absent: _Absent, factory: LinearFactory) -> QuantizedLinear:
        num_rows, num_columns = absent.size
        part = Part(absent.stored, ((0, num_rows),), num_rows)
        wanted = MatrixSlice(
            parts=(part,), columns=(0, num_columns), num_columns=num_columns, transposed=absent.transposed
        )
        form = self.scheme.read(self.reader, wanted)
        name, bias = absent.stored + ".bias", None
        if self.reader.has(name):
            if self.reader.shape(name) != (num_rows,):
                raise StartupError(
                    f"weight {name} has shape {list(self.reader.shape(name))}; the config asks for {[num_rows]}"
                )
            bias = self.reader.rows(name, part.rows)
        return QuantizedLinear(factory.make(form, bias), absent.size, self.placement)

    def quantize(self, model: Any) -> None:
        """Quantize a loaded model's matrices one by one."""
        factory = LinearFactory(self.placement.device, self.placement.dtype)
        for name, module in self._to_quantize(model):
            size, transposed = _size(module)
            weight = module.weight.detach()
            form = self.scheme.quantized(weight.t() if transposed else weight, name)
            if form is not None:
                self._replace(model, name, form, size, factory)

    def _to_quantize(self, model: Any) -> list[tuple[str, Any]]:
        """List the linear layers to quantize on load, as the native decoder's."""
        spared = {id(module) for module in (model.get_output_embeddings(), model.get_input_embeddings())}
        return [
            (name, module)
            for name, module in model.named_modules()
            if _is_linear(module) and id(module) not in spared and _is_in_layer(name)
        ]

    def _replace(self, model: Any, name: str, form: Form, size: tuple[int, int], factory: LinearFactory) -> None:
        bias = model.get_submodule(name).bias
        product = factory.make(form, None if bias is None else bias.detach())
        _put(model, name, QuantizedLinear(product, size, self.placement))

    def _leave_out(self, model: nn.Module) -> None:
        """Leave quantized matrices out.

        Raises:
            StartupError: One belongs to an unknown layer, and would be loaded without scales.
        """
        experts: dict[str, dict[str, list[list[str]]]] = {}
        for tensor, places in self._places(StoredNames(model)).items():
            if not any(self.scheme.stores(self.reader, stored) for stored in places):
                continue
            name, _, last = tensor.rpartition(".")
            module, (stored, place) = model.get_submodule(name), next(iter(places.items()))
            if place.conversion is None and _is_linear(module) and last == "weight":
                size, transposed = _size(module)
                _put(model, name, _Absent(stored, size, transposed=transposed))
                continue
            of_each = None if place.conversion is None else ExpertPlaces(places).of_each()
            if of_each is None or last not in (UP, DOWN):
                raise StartupError(
                    f"{self.model.config.model_type} is stored as {self.scheme.method}, and {stored} is no linear "
                    "layer of transformers, nor an expert: only these are served quantized by the transformers runner"
                )
            experts.setdefault(name, {})[last] = of_each
        for name, parts in experts.items():
            _put(model, name, AbsentExperts(name, model.get_submodule(name), parts))

    def _places(self, names: StoredNames) -> dict[str, dict[str, Place]]:
        """Return the stored modules of each tensor."""
        found: dict[str, dict[str, Place]] = {}
        modules = {}
        for tensor in sorted(self.reader.unread, key=natural_order):
            stored = self._module_of(tensor)
            if stored is not None and stored not in modules:
                modules[stored] = place = names.place(stored + ".weight")
                if place is not None:
                    found.setdefault(place.name, {})[stored] = place
        return found

    def _module_of(self, tensor: str) -> str | None:
        """Return the stored module of a tensor."""
        name = tensor
        while name:
            name = name.rpartition(".")[0]
            if name and self.scheme.holds(self.reader, name):
                return name
        return None


def check_quantized(model: Model, num_ranks: int, state: str | None) -> None:
    """Refuse what is not served quantized, such as models with a `state` per request."""
    method, model_type = model.scheme.method, model.config.model_type
    if method is None:
        return
    if state is not None:
        raise plain_only(model_type, method, state, on_load=model.scheme.quantize is not None)
    if model.adapter_folders:
        raise StartupError(
            f"{model_type} is computed by transformers, which takes LoRA adapters with plain weights only, not with "
            f"{method}: leave out --lora-adapters, or merge the adapter into the plain model"
        )
    if num_ranks > 1:
        raise StartupError(
            f"{model_type} is computed by transformers, and served as {method} on one shard only: use --num-shard 1"
        )


def forget_config(config: Any) -> None:
    """Drop quantization from transformers' config, which would act on it."""
    for one in (config, config.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config"):
            if hasattr(one, name):
                delattr(one, name)


@cache
def _config_class() -> Callable[[Exchange], Any]:
    """Register and return our `quantization_config` class."""
    from transformers.quantizers.auto import register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    def config(self: Any, exchange: Exchange) -> None:
        self.quant_method, self.exchange = _METHOD, exchange

    def before(self: Any, model: nn.Module, **others: Any) -> None:
        self.quantization_config.exchange.prepare(model)

    def quantizes(self: Any, model: nn.Module, name: str, **others: Any) -> bool:
        return bool(self.quantization_config.exchange.quantizes(name))

    def element_size(self: Any, model: nn.Module, name: str, tensor: Tensor) -> float:
        """Return bytes, for the memory that transformers claims before reading."""
        return 1 if quantizes(self, model, name) else tensor.element_size()

    def after(self: Any, model: nn.Module, **others: Any) -> nn.Module:
        self.remove_quantization_config(model)
        return model

    quantizer = type(
        "Quantizer",
        (HfQuantizer,),
        {
            "requires_calibration": False,
            "param_needs_quantization": quantizes,
            "param_element_size": element_size,
            "get_quantize_ops": lambda self: self.quantization_config.exchange,
            "_process_model_before_weight_loading": before,
            "_process_model_after_weight_loading": after,
            "is_serializable": lambda self: False,
            "is_trainable": property(lambda self: False),
        },
    )
    register_quantizer(_METHOD)(quantizer)
    # A model keeps a copy of its config; this part has nothing to copy.
    members = {
        "__init__": config,
        "__deepcopy__": lambda self, memo: self,
        "to_dict": lambda self: {"quant_method": _METHOD},
    }
    made: Any = type("Config", (QuantizationConfigMixin,), members)
    return made  # type: ignore[no-any-return]


def _is_linear(module: nn.Module) -> bool:
    """Not subclasses, which may compute something else."""
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, Conv1D)


def _size(module: Any) -> tuple[tuple[int, int], bool]:
    """Return (outputs, inputs), and whether the matrix is [in, out]."""
    first, second = module.weight.shape
    return ((first, second), False) if isinstance(module, nn.Linear) else ((second, first), True)


def _is_in_layer(name: str) -> bool:
    *path, last = name.split(".")
    return last not in _ROUTERS and any(part.isdigit() for part in path)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
