"""Numbers for torch's operators on the stand-in card: each is also queued, on the same stream, as the CPU's operator
over the same memory. torch's own call goes its usual way: allocation, launches, events, graphs.

Not the card's: rounding and the order of sums are the CPU's, attention of torch's own is computed in float32, random
numbers of the device are others. Operators that wait for the host (nonzero, masks as indices) run at once.
"""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from stand_in import queued, symmetric
from stand_in.places import Place, on_cpu, places, tensors_in

aten = torch.ops.aten

computed: collections.Counter[str] = collections.Counter()  # operators by name

_LIBC = ctypes.CDLL(None)
_MADV_REMOVE = 9
_PAGE = 4096
_BIG_BYTES = 1 << 28  # zeroed by giving pages back instead of writing them

# Their result's shape or value is needed on the host: they wait for the device.
_DATA_DEPENDENT = {
    "nonzero", "masked_select", "unique2", "_unique2", "unique_consecutive", "equal", "unique_dim",
    "repeat_interleave.Tensor", "is_nonzero", "_assert_async",
}  # fmt: skip
_FRESH = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
# Nothing to compute: memory, views and questions.
_NOT_COMPUTED = _FRESH | {
    "resize_", "set_", "detach", "detach_", "alias", "_local_scalar_dense", "record_stream", "pin_memory", "is_pinned",
    "_pin_memory", "item", "lift_fresh", "is_same_size", "_has_compatible_shallow_copy_type",
}  # fmt: skip
_ZEROS = {"zeros", "zero_", "zeros_like", "new_zeros"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention")
_NOT_DECOMPOSED = {aten.item.default, aten.is_nonzero.default, aten.record_stream.default}


class Emulation(TorchDispatchMode):
    """Queues the numbers beside each operator. In force for one thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _NOT_DECOMPOSED and _is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        namespace, _, name = func._schema.name.partition("::")
        inputs = tensors_in((args, kwargs))
        reads_card = any(x.is_cuda for x in inputs)
        if reads_card and _needs_host(func, name, args):
            return _run_at_once(func, name, args, kwargs)
        if reads_card and name in ("_local_scalar_dense", "item"):
            queued.waits[f"item at {queued.site()}"] += 1
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        if not reads_card and not any(x.is_cuda for x in outputs):
            return result
        if name in _FRESH:
            queued.spoil(outputs[0])
        if name in _NOT_COMPUTED or name.startswith("sym_"):
            return result
        computed[name] += 1
        if namespace == "symm_mem":
            symmetric.compute(name, args, kwargs, result)
        elif name in ("copy_", "_to_copy") and _queue_transfer(name, args, kwargs, result):
            pass
        elif name in _ZEROS and outputs[0].nbytes > _BIG_BYTES:
            _give_pages_back(outputs[0])
        else:
            _queue_numbers(func, name, args, kwargs, inputs, outputs)
        return result


def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _needs_host(func: Any, name: str, args: Any) -> bool:
    if name in _DATA_DEPENDENT or f"{name}.{func._overloadname}" in _DATA_DEPENDENT:
        return True
    if not name.startswith("index") or name.startswith(("index_select", "index_copy", "index_add", "index_fill")):
        return False
    return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1:2]))


def _run_at_once(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    queued.waits[f"{name} at {queued.site()}"] += 1
    queued.wait_for_stream()
    with torch._C._DisableTorchDispatch():
        result = func(*on_cpu(places(args)), **on_cpu(places(kwargs)))
    if name == "index_put_":
        return args[0]
    return tree_map(lambda x: x.cuda() if isinstance(x, Tensor) else x, result)


# ---- Between host and device


def _queue_transfer(name: str, args: Any, kwargs: Any, result: Tensor) -> bool:
    """False: the copy stays on one side."""
    source, target = (args[1], args[0]) if name == "copy_" else (args[0], result)
    if source.is_cuda == target.is_cuda:
        return False
    waits_for_it = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
    (_download if source.is_cuda else _upload)(source, target, waits_for_it)
    return True


def _is_plain_copy(source: Tensor, target: Tensor) -> bool:
    """Whether torch's own cudaMemcpyAsync does all of it."""
    same = source.dtype == target.dtype and source.numel() == target.numel()
    return same and source.is_contiguous() and target.is_contiguous()


def _upload(source: Tensor, target: Tensor, waits_for_it: bool) -> None:
    if waits_for_it:
        queued.waits[f"upload of {source.numel()} pinned={source.is_pinned()} at {queued.site()}"] += 1
    elif not source.is_pinned():
        queued.waits[f"pageable upload of {source.numel()} at {queued.site()}"] += 1
    if not _is_plain_copy(source, target):
        held, place = source.clone(), Place(target)
        queued.enqueue(lambda: _copy(held, place))


def _copy(source: Tensor, target: Place) -> None:
    target.tensor().copy_(source)


def _download(source: Tensor, target: Tensor, waits_for_it: bool) -> None:
    if waits_for_it:
        queued.waits[f"download of {source.numel()} at {queued.site()}"] += 1
    if _is_plain_copy(source, target):
        return
    queued.waits[f"download with conversion at {queued.site()}"] += 1
    queued.wait_for_stream()
    with torch._C._DisableTorchDispatch():
        target.copy_(Place(source).tensor())


# ---- On the device


def _give_pages_back(tensor: Tensor) -> None:
    """Memory that nothing has written is zero."""
    start = (tensor.data_ptr() + _PAGE - 1) & ~(_PAGE - 1)
    size = (tensor.nbytes - 2 * _PAGE) & ~(_PAGE - 1)
    _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_REMOVE)


def _queue_numbers(func: Any, name: str, args: Any, kwargs: Any, inputs: Any, outputs: Any) -> None:
    storages = {x.untyped_storage().data_ptr() for x in inputs if x.is_cuda and x.untyped_storage().nbytes()}
    fresh = [x.is_cuda and x.untyped_storage().data_ptr() not in storages for x in outputs]
    targets = [Place(x) if is_fresh else None for x, is_fresh in zip(outputs, fresh, strict=True)]
    if not func._schema.is_mutable and not any(targets):
        return  # a view
    named = {key: value for key, value in kwargs.items() if key not in ("pin_memory", "non_blocking")}
    if "device" in named:
        named["device"] = torch.device("cpu")
    given, named = tree_map(_held, places(args)), tree_map(_held, places(named))
    if any(part in name for part in _ATTENTION):
        queued.enqueue(_attention(func, given, named, targets[0]))
        return
    compute = _product(name, args, kwargs) or _OWN.get(name, func)

    def run() -> None:
        results = tensors_in(compute(*on_cpu(given), **on_cpu(named)))
        for target, value in zip(targets, results, strict=False):
            if target is not None:
                target.tensor().copy_(value)

    queued.enqueue(run)


def _held(value: Any) -> Any:
    """Tensors of the host are read when the call is made, as single numbers are."""
    if isinstance(value, torch.Generator):
        return torch.Generator()
    return value.clone() if isinstance(value, Tensor) else value


def _product(name: str, args: Any, kwargs: Any) -> Callable[..., Any] | None:
    """A product with a type of its result, which the CPU does not have; None: this is none."""
    wanted = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)), None)
    if name not in _PRODUCTS or wanted is None:
        return None
    plain = getattr(aten, name)

    def compute(*given: Any, **named: Any) -> Any:
        rest = {key: value for key, value in named.items() if key not in ("out_dtype", "out")}
        result = plain(*[x.to(wanted) for x in given if isinstance(x, Tensor)], **rest)
        return named["out"].copy_(result) if "out" in named else result

    return compute


def _attention(func: Any, given: Any, named: Any, target: Place | None) -> Callable[[], None]:
    """In float32 by torch's composite. Arguments come by position as well as by name."""
    names = [argument.name for argument in func._schema.arguments]
    bound = dict(zip(names, given, strict=False)) | named
    rest = {key: value for key, value in bound.items() if key in ("scale", "is_causal", "enable_gqa")}
    mask = bound.get("attn_bias", bound.get("attn_mask"))

    def run() -> None:
        query, key, value = (place.tensor().float() for place in given[:3])
        attend = torch.nn.functional.scaled_dot_product_attention
        result = attend(query, key, value, attn_mask=on_cpu(mask), **rest)
        if target is not None:
            target.tensor().copy_(result)

    return run


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor | None = None, *rest: Any, **named: Any) -> Tensor:
    """[rows, n] x [groups, n, m], rows of a group being those up to its end in `offs`."""
    assert left.dim() == 2 and right.dim() == 3 and offs is not None
    result = left.new_zeros(left.shape[0], right.shape[2])
    begin = 0
    for group, end in enumerate(offs.tolist()):
        result[begin:end] = (left[begin:end].float() @ right[group].float()).to(left.dtype)
        begin = end
    return result


# What the CPU's torch has not, or only in other forms.
_OWN: dict[str, Callable[..., Any]] = {"_grouped_mm": _grouped_mm}
