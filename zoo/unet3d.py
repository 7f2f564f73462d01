"""Three forms of the 3D U-Net, which labels every voxel of a volume.

``UNet3d`` is the padded one of Oyama et al. (IEEE TPDS 2021, arXiv 2007.12856), ``UNet3dCicek`` the
unpadded original of Cicek et al. (MICCAI 2016, arXiv 1606.06650), ``UNet3dMlperf`` the one of MLPerf
training. All return logits. Shapes in brackets are ``[samples, channels, depth, height, width]``.
Modules are numbered by level, 0 being full resolution::

    enc0 ------------------------------------> up0 - head
      pool0                              upconv0
      enc1 --------------------------> up1
        pool1                    upconv1
        enc2 ----------------> up2
          pool2          upconv2
          bottom
"""

import torch
from torch import Tensor, nn

from .fit import crop_to, pad_to


class DoubleConv(nn.Module):
    """Two of [convolution 3^3, BatchNorm, ReLU]: ``[N, ins, D, H, W] -> [N, outs, D', H', W']``.

    With ``padding`` 1 the extents stay; with 0 each shrinks by 4.
    """

    def __init__(self, ins: int, mid: int, outs: int, padding: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(ins, mid, 3, padding=padding, bias=False)
        self.norm1 = nn.BatchNorm3d(mid)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv3d(mid, outs, 3, padding=padding, bias=False)
        self.norm2 = nn.BatchNorm3d(outs)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Apply both convolutions."""
        x = self.relu1(self.norm1(self.conv1(x)))
        x = self.relu2(self.norm2(self.conv2(x)))
        return x


class UNet3d(nn.Module):
    """U-Net of Oyama et al.: ``[N, in_channels, D, H, W] -> [N, classes, D, H, W]``.

    Any size of at least 2^levels works (in training, BatchNorm asks for two voxels at the bottom).
    Where a pool met an odd extent, the upsampled tensor is one plane smaller than its skip and gets
    a plane of zeros (`pad_to`); at even extents nothing is added. The number of parameters does not
    depend on the size.

    Args:
        in_channels: channels of the input volume.
        classes: labels a voxel can have.
        width: channels of the first convolution; the paper's is 32.
        levels: how often the resolution is halved; the paper's is 3.
    """

    padding = 1

    def __init__(self, in_channels: int = 1, classes: int = 3, width: int = 32, levels: int = 3) -> None:
        super().__init__()
        self.levels = levels
        outs = [width * 2 ** (i + 1) for i in range(levels + 1)]
        ins = [in_channels, *outs]
        for i in range(levels):
            self.add_module(f"enc{i}", DoubleConv(ins[i], outs[i] // 2, outs[i], self.padding))
            self.add_module(f"pool{i}", nn.MaxPool3d(2))
        self.bottom = DoubleConv(ins[levels], outs[levels] // 2, outs[levels], self.padding)
        for i in reversed(range(levels)):
            below = outs[i + 1]
            self.add_module(f"upconv{i}", nn.ConvTranspose3d(below, below, 2, stride=2, bias=False))
            self.add_module(f"up{i}", DoubleConv(below + outs[i], outs[i], outs[i], self.padding))
        self.head = nn.Conv3d(outs[0], classes, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute a logit for each class and voxel."""
        skips: list[Tensor] = []
        for i in range(self.levels):
            x = getattr(self, f"enc{i}")(x)
            skips.append(x)
            x = getattr(self, f"pool{i}")(x)
        x = self.bottom(x)
        for i in reversed(range(self.levels)):
            x = getattr(self, f"upconv{i}")(x)
            x = getattr(self, f"up{i}")(self.merge(x, skips.pop()))
        x = self.head(x)
        return x

    def merge(self, x: Tensor, skip: Tensor) -> Tensor:
        """Concatenate the channels of an upsampled tensor and its skip, at the size of the skip."""
        return torch.cat([pad_to(x, skip), skip], dim=1)


class UNet3dCicek(UNet3d):
    """U-Net of Cicek et al.: ``[N, in_channels, D, H, W] -> [N, classes, D', H', W']``, D' < D.

    Convolutions do not pad, and skips are cropped to what arrives from below, so the output is the
    labels of the center only: 132 x 132 x 116 voxels in give 44 x 44 x 28 out.

    The paper's count of parameters, 19,069,955, is of one bias a channel of each 3^3 convolution and
    of the head; here, as in `UNet3d`, each of those convolutions has BatchNorm's scale and shift
    instead, and the head has no bias: 19,072,288.

    Args:
        in_channels: channels of the input volume.
        classes: labels a voxel can have.
        width: channels of the first convolution; the paper's is 32.
        levels: how often the resolution is halved; the paper's is 3.
    """

    padding = 0

    def __init__(self, in_channels: int = 3, classes: int = 3, width: int = 32, levels: int = 3) -> None:
        super().__init__(in_channels, classes, width, levels)

    def merge(self, x: Tensor, skip: Tensor) -> Tensor:
        """Concatenate the channels of an upsampled tensor and the center of its skip."""
        return torch.cat([x, crop_to(skip, x)], dim=1)


class DoubleConvIn(nn.Module):
    """Two of [convolution 3^3, InstanceNorm, ReLU]: ``[N, ins, D, H, W] -> [N, outs, D', H', W']``.

    The first convolution has the given stride: with 2, extents are halved, rounding up.
    """

    def __init__(self, ins: int, outs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(ins, outs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.InstanceNorm3d(outs, affine=True)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv3d(outs, outs, 3, padding=1, bias=False)
        self.norm2 = nn.InstanceNorm3d(outs, affine=True)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Apply both convolutions."""
        x = self.relu1(self.norm1(self.conv1(x)))
        x = self.relu2(self.norm2(self.conv2(x)))
        return x


class UNet3dMlperf(nn.Module):
    """U-Net of MLPerf training (KiTS19): ``[N, in_channels, D, H, W] -> [N, classes, D, H, W]``.

    Strided convolutions instead of pools, InstanceNorm instead of BatchNorm. Level i has
    ``min(2^i, 10) * width`` channels: 32, 64, 128, 256, 320 and, at the bottom, 320. Any size works
    that leaves the bottom more than one voxel, which InstanceNorm asks for in training; an
    upsampled tensor larger than its skip is cropped.

    Args:
        in_channels: channels of the input volume.
        classes: labels a voxel can have.
        width: channels of level 0; the benchmark's is 32.
        levels: how often the resolution is halved; the benchmark's is 5.
    """

    def __init__(self, in_channels: int = 1, classes: int = 3, width: int = 32, levels: int = 5) -> None:
        super().__init__()
        self.levels = levels
        outs = [width * min(2**i, 10) for i in range(levels)]
        self.enc0 = DoubleConvIn(in_channels, outs[0])
        for i in range(1, levels):
            self.add_module(f"enc{i}", DoubleConvIn(outs[i - 1], outs[i], stride=2))
        self.bottom = DoubleConvIn(outs[-1], outs[-1], stride=2)
        for i, below in reversed(list(enumerate([*outs[1:], outs[-1]]))):
            self.add_module(f"upconv{i}", nn.ConvTranspose3d(below, outs[i], 2, stride=2))
            self.add_module(f"up{i}", DoubleConvIn(2 * outs[i], outs[i]))
        self.head = nn.Conv3d(outs[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute a logit for each class and voxel."""
        skips: list[Tensor] = []
        for i in range(self.levels):
            x = getattr(self, f"enc{i}")(x)
            skips.append(x)
        x = self.bottom(x)
        for i in reversed(range(self.levels)):
            x = getattr(self, f"upconv{i}")(x)
            skip = skips.pop()
            x = getattr(self, f"up{i}")(torch.cat([crop_to(x, skip), skip], dim=1))
        x = self.head(x)
        return x
