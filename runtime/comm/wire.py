"""Reductions of any dtype, from the few that all backends reduce alike: float32, float64, int32, int64, uint8.

gloo has no int16, MPI no bfloat16, and neither says what the maximum with a NaN is; torch does (NaN), and the
distributed run must equal it. So a tensor travels in another form where needed, and is taken back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_NATIVE = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)
_WIDER = {
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True)
class Wire:
    """A tensor on its way: `buffer`, contiguous, is reduced with `op`, then `finish` is called."""

    target: Tensor
    buffer: Tensor
    op: str
    decode: Callable[[Tensor], Tensor] | None = None

    def finish(self) -> None:
        """Write the reduced buffer into the tensor; nothing to do where they share memory."""
        if self.decode is not None:
            self.target.copy_(self.decode(self.buffer))


def to_wire(tensor: Tensor, op: str) -> Wire:
    """The form in which a contiguous tensor is reduced.

    Raises:
        TypeError: the dtype has no exact form (uint64).
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bool:
        # As numbers, 256 true values would add up to zero in a byte; "or" is the maximum.
        return Wire(tensor, tensor.to(torch.uint8), "min" if op == "min" else "max", _same)
    wide = widened(tensor)
    if wide.dtype not in _NATIVE:
        raise TypeError(f"all_reduce: {tensor.dtype} has no exact reduction; convert the tensor to torch.int64")
    if wide.is_floating_point() and op != "sum":
        decode = _from_ordered32 if wide.dtype == torch.float32 else _from_ordered64
        return Wire(tensor, _to_ordered(wide, op), op, decode)
    return Wire(tensor, wide, op, None if wide is tensor else _same)


def widened(tensor: Tensor) -> Tensor:
    """A copy in the dtype in which its sums are formed; the tensor itself where that is its own."""
    if tensor.is_floating_point() and tensor.itemsize < 4:
        return tensor.to(torch.float32)
    return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))


def reduce_in_order(parts: Sequence[Tensor], op: str) -> Tensor:
    """The reduction of same-shaped tensors, first to last, in the dtype of `widened`; a new tensor."""
    total = _COMBINE[op](widened(parts[0]), widened(parts[1]))
    for part in parts[2:]:
        total = _COMBINE[op](total, widened(part))
    return total


def _same(buffer: Tensor) -> Tensor:
    return buffer


def _to_ordered(x: Tensor, op: str) -> Tensor:
    """Integers that compare as the floats do, NaN on the winning side.

    Read as an integer, a float >= 0 is ordered already; of a negative one all bits but the sign are flipped,
    because its magnitude grows downwards. The two ends of the integers decode to NaN.
    """
    kind = torch.int32 if x.dtype == torch.float32 else torch.int64
    ends = torch.iinfo(kind)
    ordered = _flip_negative(x.contiguous().view(kind))
    return ordered.masked_fill_(x.isnan(), ends.max if op == "max" else ends.min)


def _flip_negative(bits: Tensor) -> Tensor:
    ends = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (ends.bits - 1)) & ends.max)


def _from_ordered32(ordered: Tensor) -> Tensor:
    return _flip_negative(ordered).view(torch.float32)


def _from_ordered64(ordered: Tensor) -> Tensor:
    return _flip_negative(ordered).view(torch.float64)
