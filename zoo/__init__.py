"""Models as plain ``nn.Module``, unaware of meshes: `build` makes one by name.

>>> net = build("unet3d", (1, 1, 32, 32, 32), width=4)
>>> net.enc0.conv1.weight.shape
torch.Size([4, 1, 3, 3, 3])
>>> build("unet")
Traceback (most recent call last):
ValueError: unknown model 'unet': did you mean 'unet3d'? The zoo has cosmoflow, ...
"""

import difflib
import inspect
from collections.abc import Callable, Sequence

from torch import nn

from .cosmoflow import CosmoFlow, CosmoFlowMlperf
from .resnet2d import ResNet2d, resnet_110, resnet_1001, resnet_4997
from .resnet3d import ResNet3d, resnet3d_18, resnet3d_50
from .unet3d import UNet3d, UNet3dCicek, UNet3dMlperf
from .vgg import Vgg16
from .vnet import VNet

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cosmoflow": CosmoFlow,
    "cosmoflow-mlperf": CosmoFlowMlperf,
    "unet3d": UNet3d,
    "unet3d-cicek": UNet3dCicek,
    "unet3d-mlperf": UNet3dMlperf,
    "vnet": VNet,
    "resnet3d-18": resnet3d_18,
    "resnet3d-50": resnet3d_50,
    "resnet-110": resnet_110,
    "resnet-1001": resnet_1001,
    "resnet-4997": resnet_4997,
    "vgg-16": Vgg16,
}

IMAGES = ("resnet-110", "resnet-1001", "resnet-4997", "vgg-16")
"""The models that take images, without depth."""

__all__ = [
    "IMAGES",
    "MODELS",
    "CosmoFlow",
    "CosmoFlowMlperf",
    "ResNet2d",
    "ResNet3d",
    "UNet3d",
    "UNet3dCicek",
    "UNet3dMlperf",
    "VNet",
    "Vgg16",
    "build",
    "resnet3d_18",
    "resnet3d_50",
    "resnet_110",
    "resnet_1001",
    "resnet_4997",
]


def build(name: str, input_shape: Sequence[int] | None = None, **kwargs: object) -> nn.Module:
    """Build the model called ``name`` in `MODELS`.

    Args:
        name: a key of `MODELS`.
        input_shape: ``(samples, channels, depth, height, width)`` of the inputs to come (no depth for `IMAGES`). Sets
            ``in_channels`` and, where the model has it, ``input_width``, unless ``kwargs`` do.
        kwargs: passed to the model.

    Raises:
        ValueError: no such model, another number of extents, or not a cube where the model takes only cubes.
    """
    make = MODELS.get(name)
    if make is None:
        raise ValueError(f"unknown model {name!r}{_nearest(name)} The zoo has {', '.join(MODELS)}")
    derived = {} if input_shape is None else _from_shape(name, make, input_shape)
    return make(**{**derived, **kwargs})


def _from_shape(name: str, make: Callable[..., nn.Module], shape: Sequence[int]) -> dict[str, object]:
    """Name the arguments of ``make`` that the input's shape determines."""
    space = ("height", "width") if name in IMAGES else ("depth", "height", "width")
    if len(shape) != 2 + len(space):
        raise ValueError(f"input_shape is (samples, channels, {', '.join(space)}), not {tuple(shape)}")
    derived: dict[str, object] = {"in_channels": shape[1]}
    if "input_width" in inspect.signature(make).parameters:
        if len(set(shape[2:])) > 1:
            raise ValueError(f"{name} takes cubes, not {tuple(shape[2:])}: crop or resample the input to a cube")
        derived["input_width"] = shape[2]
    return derived


def _nearest(name: str) -> str:
    """Suggest the known name most like ``name``, as the middle of a sentence."""
    near = difflib.get_close_matches(name.lower(), MODELS, n=1, cutoff=0.4)
    return f": did you mean {near[0]!r}?" if near else "."
