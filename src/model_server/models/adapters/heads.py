"""LoRA adapters of the matrix that turns latents into keys and values (`attention.latent`).

It is never multiplied as a whole: with B's rows of a head's keys and values, an absorbed query gets `(plain @ B_key) @
A` more, and a value `(attended @ A^T) @ B_value^T`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.adapters.factors import Factors, pinned
from model_server.adapters.product_slots import SlotSizes
from model_server.adapters.reader import AdapterReader
from model_server.adapters.rows import AdapterRows, CurrentRows
from model_server.attention.latent import HeadSizes
from model_server.models.adapters.linear import Addition
from model_server.weights.products import Product


@dataclass(frozen=True, slots=True)
class _Heads:
    """One adapter's a [rank, latent], b [heads, plain + value, rank]; gain, shift [heads, plain + value] float32."""

    a: Tensor
    b: Tensor
    gain: Tensor | None
    shift: Tensor | None


class AdaptedHeads:
    """What adapters make of keys and values, a `HeadChanges`, in slots of these `sizes` if any."""

    def __init__(
        self,
        product: Product,
        heads: HeadSizes,
        current: CurrentRows,
        slots: SlotSizes | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        affine: bool,
    ) -> None:
        """Prepare a product.

        Args:
            current: The rows of the running step.
            affine: Adapters may have gains and shifts.
        """
        self._product = product
        self._sizes = heads
        self._current = current
        self._on_host: dict[int, Factors] = {}
        self._found: dict[int, _Heads] = {}  # by number; of slots: views of their memory
        self._slots = slots
        self._affine: Tensor | None = None
        if slots is None:
            return
        width, rank = heads.plain + heads.value, slots.rank
        # The slots of a head beside each other: one product for all of them, of which each row keeps its own.
        self._a = torch.zeros(slots.number, rank, heads.latent, dtype=dtype, device=device)
        self._b = torch.zeros(heads.heads, width, slots.number, rank, dtype=dtype, device=device)
        if affine:  # the last one is that of rows without an adapter
            self._affine = torch.zeros(2, slots.number + 1, heads.heads, width, dtype=torch.float32, device=device)
            self._affine[0] = 1.0

    @property
    def rows(self) -> AdapterRows | None:
        return self._current.rows

    def read(self, reader: AdapterReader) -> Addition | None:
        """Read what an adapter adds, for `put`, if anything."""
        factors = reader.product(self._product)
        if factors is None:
            return None
        return Addition(factors if self._slots is None else pinned(factors))

    def put(self, number: int, addition: Addition) -> None:
        assert isinstance(addition.factors, Factors)
        if self._slots is None:
            self._found[number] = self._of(addition.factors)
        else:
            self._on_host[number] = addition.factors

    def remove(self, number: int) -> None:
        if self._slots is None:
            self._found.pop(number, None)
        else:
            self._on_host.pop(number, None)

    def fill(self, slot: int, number: int) -> bool:
        """Copy an adapter into a slot, in the device's order; its steps do not need the host."""
        self._found.pop(slot, None)
        self._a[slot].zero_()
        self._b[:, :, slot].zero_()
        if self._affine is not None:
            self._affine[0, slot] = 1.0
            self._affine[1, slot] = 0.0
        factors = self._on_host.get(number)
        if factors is None:
            return False
        given = self._of(factors)
        rank = len(given.a)
        self._a[slot, :rank].copy_(given.a, non_blocking=True)
        self._b[:, :, slot, :rank].copy_(given.b, non_blocking=True)
        for line, changed in enumerate((given.gain, given.shift)):
            if changed is not None:
                assert self._affine is not None, "the sizes allow for it"
                self._affine[line, slot].copy_(changed, non_blocking=True)
        affine = (None, None) if self._affine is None else (self._affine[0, slot], self._affine[1, slot])
        self._found[slot] = _Heads(self._a[slot], self._b[:, :, slot], *affine)
        return False

    def scaled(self, plain: Tensor, rows: AdapterRows) -> Tensor:
        """Apply the gains of the keys to plain [n, heads, plain] of queries."""
        slots = self._slots_among(rows, len(plain))
        keys = slice(0, self._sizes.plain)
        if slots is not None:
            return plain if self._affine is None else (plain * self._affine[0, slots, :, keys]).to(plain.dtype)
        given = [(index, self._found[n].gain) for n, index in rows.among(len(plain)).groups if n in self._found]
        if all(gain is None for _, gain in given):
            return plain
        plain = plain.clone()
        for index, gain in given:
            if gain is not None:
                plain[index] = (plain[index] * gain[:, keys]).to(plain.dtype)
        return plain

    def absorb(self, plain: Tensor, absorbed: Tensor, rows: AdapterRows) -> None:
        """Add adapters' part for plain [n, heads, plain] to absorbed [n, heads, latent]."""
        slots = self._slots_among(rows, len(plain))
        keys = slice(0, self._sizes.plain)
        if slots is not None:
            inner = torch.bmm(plain.transpose(0, 1), self._b[:, keys].flatten(2))
            absorbed += torch.matmul(self._own(inner, slots), self._a.flatten(0, 1)).transpose(0, 1)
            return
        for number, index in rows.among(len(plain)).groups:
            found = self._found.get(number)
            if found is not None:
                inner = torch.bmm(plain[index].transpose(0, 1), found.b[:, keys])
                absorbed[index] += (inner @ found.a).transpose(0, 1)

    def values(self, attended: Tensor, values: Tensor, rows: AdapterRows) -> Tensor:
        """Change values [n, heads, value] of attended [n, heads, latent]."""
        slots = self._slots_among(rows, len(values))
        own = slice(self._sizes.plain, None)
        if slots is not None:
            inner = self._own(torch.matmul(attended.transpose(0, 1), self._a.flatten(0, 1).t()), slots)
            values += torch.bmm(inner, self._b[:, own].flatten(2).transpose(1, 2)).transpose(0, 1)
            if self._affine is not None:
                gain, shift = self._affine[:, slots, :, own]
                values = (values * gain + shift).to(attended.dtype)
            return values
        for number, index in rows.among(len(values)).groups:
            found = self._found.get(number)
            if found is not None:
                inner = attended[index].transpose(0, 1) @ found.a.t()
                changed = values[index] + torch.bmm(inner, found.b[:, own].transpose(1, 2)).transpose(0, 1)
                values[index] = _adjusted(changed, found, own)
        return values

    def expand(self, number: int, latents: Tensor, heads: slice, keys: Tensor, values: Tensor) -> None:
        """Change keys [n, some heads, plain] and values [n, some heads, value] of latents [n, latent]."""
        found = self._found.get(number)
        if found is None:
            return
        inner = (latents @ found.a.t()).expand(keys.shape[1], -1, -1)
        some = _Heads(
            found.a,
            found.b[heads],
            None if found.gain is None else found.gain[heads],
            None if found.shift is None else found.shift[heads],
        )
        for out, own in ((keys, slice(0, self._sizes.plain)), (values, slice(self._sizes.plain, None))):
            changed = out + torch.bmm(inner, some.b[:, own].transpose(1, 2)).transpose(0, 1)
            out.copy_(_adjusted(changed, some, own))

    def _of(self, factors: Factors) -> _Heads:
        sizes = self._sizes
        shape = sizes.heads, sizes.plain + sizes.value
        (expansion,) = factors.expansions
        gain, shift = (None if t is None else t.view(shape) for t in (factors.gain, factors.shift))
        return _Heads(factors.a, expansion.b.view(*shape, -1), gain, shift)

    def _slots_among(self, rows: AdapterRows, num_rows: int) -> Tensor | None:
        """Return slots known on the device alone; -1: none."""
        return None if self._slots is None else rows.among(num_rows).slots

    def _own(self, inner: Tensor, slots: Tensor) -> Tensor:
        """Zero inner [heads, n, slots * rank] outside of each row's slot."""
        assert self._slots is not None
        number, rank = self._slots.number, self._slots.rank
        is_own = slots[:, None] == torch.arange(number, device=slots.device)
        return torch.where(is_own[:, :, None].expand(-1, -1, rank).flatten(1), inner, 0)


def _adjusted(changed: Tensor, found: _Heads, own: slice) -> Tensor:
    """Apply gains and shifts to changed [n, heads, numbers]."""
    if found.gain is not None:
        changed = changed * found.gain[:, own]
    return changed if found.shift is None else changed + found.shift[:, own]
