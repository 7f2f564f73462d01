"""V-Net of Milletari et al. (3DV 2016, arXiv 1606.04797): residual segmentation of volumes.

Shapes in brackets are ``[samples, channels, depth, height, width]``. Modules are numbered by level,
0 being full resolution; channels are for ``width`` 16::

    enc0  16 ----------------------------------------------> up0  32 - head
      down1                                              upconv0
      enc1  32 ------------------------------------> up1  64
        down2                                    upconv1
        enc2  64 --------------------------> up2 128
          down3                          upconv2
          enc3 128 ----------------> up3 256
            down4                upconv3
            enc4 256 -----------
"""

import torch
from torch import Tensor, nn

from .fit import pad_to


class ConvAct(nn.Module):
    """A convolution, transposed or not, BatchNorm if asked for, and a PReLU a channel."""

    def __init__(self, conv: nn.Conv3d | nn.ConvTranspose3d, batchnorm: bool) -> None:
        super().__init__()
        self.conv = conv
        self.norm = nn.BatchNorm3d(conv.out_channels) if batchnorm else nn.Identity()
        self.act = nn.PReLU(conv.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, normalize, activate."""
        x = self.act(self.norm(self.conv(x)))
        return x


class Residual(nn.Module):
    """Convolutions 5^3 whose last output the input is added to: ``[N, C, D, H, W]`` to the same.

    The input may have one channel where the output has ``width``: it is added to each.
    """

    def __init__(self, ins: int, width: int, convs: int, batchnorm: bool) -> None:
        super().__init__()
        self.convs = convs
        for i in range(1, convs + 1):
            conv = nn.Conv3d(ins if i == 1 else width, width, 5, padding=2, bias=not batchnorm)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"norm{i}", nn.BatchNorm3d(width) if batchnorm else nn.Identity())
            self.add_module(f"act{i}", nn.PReLU(width))

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``act(convs(x) + x)``."""
        start = x
        for i in range(1, self.convs + 1):
            x = getattr(self, f"conv{i}")(x)
            x = getattr(self, f"norm{i}")(x)
            if i == self.convs:
                x = x + start
            x = getattr(self, f"act{i}")(x)
        return x


class VNet(nn.Module):
    """V-Net: ``[N, in_channels, D, H, W] -> [N, classes, D, H, W]``, logits.

    Level i has ``2^i * width`` channels and ``min(i + 1, 3)`` convolutions; up from the bottom, the
    upsampled tensor has as many channels as its skip. Any size of at least 2^levels works: an
    upsampled tensor smaller than its skip gets a plane of zeros.

    Args:
        in_channels: channels of the input volume; ``width`` is a multiple of it.
        classes: labels a voxel can have.
        width: channels of level 0; the paper's is 16.
        levels: how often the resolution is halved; the paper's is 4.
        batchnorm: BatchNorm after each convolution, as most implementations have; the paper's
            network has none.

    Raises:
        ValueError: ``width`` is not a multiple of ``in_channels``.
    """

    def __init__(
        self,
        in_channels: int = 1,
        classes: int = 2,
        width: int = 16,
        levels: int = 4,
        batchnorm: bool = False,
    ) -> None:
        super().__init__()
        if width % in_channels:
            raise ValueError(f"VNet adds its input to {width} channels: not a multiple of in_channels={in_channels}")
        self.levels = levels
        # The first residual repeats the input; one channel broadcasts and needs no copy.
        self.repeats = width // in_channels if in_channels > 1 else 1
        first = in_channels * self.repeats
        outs = [width * 2**i for i in range(levels + 1)]
        self.enc0 = Residual(first, width, 1, batchnorm)
        for i in range(1, levels + 1):
            down = nn.Conv3d(outs[i - 1], outs[i], 2, stride=2, bias=not batchnorm)
            self.add_module(f"down{i}", ConvAct(down, batchnorm))
            self.add_module(f"enc{i}", Residual(outs[i], outs[i], min(i + 1, 3), batchnorm))
        for i in reversed(range(levels)):
            below = outs[levels] if i == levels - 1 else 2 * outs[i + 1]
            up = nn.ConvTranspose3d(below, outs[i], 2, stride=2, bias=not batchnorm)
            self.add_module(f"upconv{i}", ConvAct(up, batchnorm))
            self.add_module(f"up{i}", Residual(2 * outs[i], 2 * outs[i], min(i + 1, 3), batchnorm))
        self.head = nn.Conv3d(2 * width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute a logit for each class and voxel."""
        if self.repeats > 1:
            x = x.repeat(1, self.repeats, 1, 1, 1)
        x = self.enc0(x)
        skips: list[Tensor] = []
        for i in range(1, self.levels + 1):
            skips.append(x)
            x = getattr(self, f"down{i}")(x)
            x = getattr(self, f"enc{i}")(x)
        for i in reversed(range(self.levels)):
            x = getattr(self, f"upconv{i}")(x)
            skip = skips.pop()
            x = getattr(self, f"up{i}")(torch.cat([pad_to(x, skip), skip], dim=1))
        x = self.head(x)
        return x
