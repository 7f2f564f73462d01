"""The functions that lowering puts into a graph. They say what moves; the runtime binds each to its autograd operator.

==============  ====================================================  =======================================
function        forward                                               backward
==============  ====================================================  =======================================
redistribute    have-intervals -> need-indices                        the same pieces back, adding
all_reduce      addends -> whole                                      identity
reduce_scatter  addends -> each its block of the sum                  all-gather: the movement run the right way round
transfer        a value of one pipeline stage in another              the cotangent back, adding
vary            a whole value used by shards: identity                all-reduce
vary_all        `vary` of many parameters in one bucket               one all-reduce, overlapped
==============  ====================================================  =======================================
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from halofx.compiler.redistribution import Redistribution

REDUCTIONS = ("sum", "max", "min", "moments")
"""How addends are combined: ``moments`` merges (count, mean, M2) in rows 0, 1, 2 of dim 0, the others are elementwise.
``max`` and ``min`` have no gradient: rules use them on detached values."""


def redistribute(x: Tensor, move: Redistribution) -> Tensor:
    """``x`` as the movement leaves it."""
    raise NotImplementedError("bound by the runtime")


def all_reduce(x: Tensor, axes: Sequence[str], reduce: str = "sum") -> Tensor:
    """The combination of the addends that the ranks along ``axes`` hold."""
    raise NotImplementedError("bound by the runtime")


def reduce_scatter(x: Tensor, move: Redistribution) -> Tensor:
    """The adjoint of a movement as a step forward: what ranks have of ``move``'s result is added up in ``move``'s blocks."""
    raise NotImplementedError("bound by the runtime")


def transfer(x: Tensor, source: int, target: int) -> Tensor:
    """``x`` of stage ``source`` in stage ``target``, shard by shard."""
    raise NotImplementedError("bound by the runtime")


def vary(x: Tensor, axes: Sequence[str]) -> Tensor:
    """``x``; the cotangent is summed over the ranks along ``axes``."""
    raise NotImplementedError("bound by the runtime")


def vary_all(xs: Sequence[Tensor], axes: Sequence[str]) -> list[Tensor]:
    """``xs``; their cotangents are summed over the ranks along ``axes`` in one message."""
    raise NotImplementedError("bound by the runtime")


COLLECTIVES = (redistribute, all_reduce, reduce_scatter, transfer, vary, vary_all)
