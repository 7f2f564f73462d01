"""Make a tensor as large as another, where a network's way up meets a skip of its way down.

Halving an odd extent and doubling it again misses by one. Both functions return the tensor itself
where the extents agree already, so at sizes that divide evenly they leave no trace in a graph::

    extent 7:   pool 2      7 -> 3   up 6   pad_to:  6 -> 7     | u u u u u u 0 |
                conv k3 s2  7 -> 4   up 8   crop_to: 8 -> 7     | u u u u u u u (u)
"""

import torch.nn.functional as F
from torch import Tensor


def pad_to(x: Tensor, like: Tensor) -> Tensor:
    """Append zeros to dims 2 and up of ``x`` until they have the extents of ``like``.

    Zeros rather than copies of the edge: the next convolution pads with zeros anyway, and on a GPU
    the adjoint of copying an edge adds in no fixed order.
    """
    missing = [want - have for have, want in zip(x.shape[2:], like.shape[2:], strict=True)]
    if not any(missing):
        return x
    # F.pad counts dims from the last one, a (before, after) pair each.
    return F.pad(x, [amount for extent in reversed(missing) for amount in (0, extent)])


def crop_to(x: Tensor, like: Tensor) -> Tensor:
    """Cut the center with the extents of ``like`` out of dims 2 and up of ``x``.

    Of an odd surplus the larger half is cut at the far end.
    """
    for dim in range(2, x.dim()):
        surplus = x.shape[dim] - like.shape[dim]
        if surplus:
            x = x.narrow(dim, surplus // 2, like.shape[dim])
    return x
