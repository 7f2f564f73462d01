"""2D ResNets for small images, by hundreds of layers: what HyPar-Flow (Awan et al., ISC 2020) cuts into partitions.

They are those of the Keras example that it trains: version 1 (He et al., CVPR 2016) with two convolutions a block, version 2
(He et al., ECCV 2016) with bottlenecks that normalize before they convolve. Convolutions have biases. Shapes in brackets are
``[samples, channels, height, width]``.
"""

from torch import Tensor, nn


class BlockV1(nn.Module):
    """Two convolutions 3x3 and a shortcut: ``[N, ins, H, W] -> [N, width, H/s, W/s]``."""

    def __init__(self, ins: int, width: int, stride: int, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(ins, width, 3, stride, 1)
        self.norm1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(ins, width, 1, stride) if project else nn.Identity()
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``relu(convs(x) + shortcut(x))``."""
        y = self.relu1(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        x = self.relu2(y + self.shortcut(x))
        return x


class BlockV2(nn.Module):
    """Norm, ReLU and convolution, for kernels 1, 3 and 1, and a shortcut: ``[N, ins, H, W] -> [N, outs, H/s, W/s]``."""

    def __init__(self, ins: int, width: int, outs: int, stride: int, activated: bool, project: bool) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(ins) if activated else nn.Identity()
        self.relu1 = nn.ReLU() if activated else nn.Identity()
        self.conv1 = nn.Conv2d(ins, width, 1, stride)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1)
        self.norm3 = nn.BatchNorm2d(width)
        self.relu3 = nn.ReLU()
        self.conv3 = nn.Conv2d(width, outs, 1)
        self.shortcut = nn.Conv2d(ins, outs, 1, stride) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``convs(x) + shortcut(x)``."""
        y = self.conv1(self.relu1(self.norm1(x)))
        y = self.conv2(self.relu2(self.norm2(y)))
        y = self.conv3(self.relu3(self.norm3(y)))
        x = y + self.shortcut(x)
        return x


class ResNet2d(nn.Module):
    """ResNet for images: ``[N, in_channels, H, W] -> [N, classes]``.

    Args:
        version: 1 or 2.
        blocks: blocks in each of the three stages; a network has ``6 n + 2`` layers in version 1, ``9 n + 2`` in version 2.
        in_channels: channels of the input.
        classes: labels a sample can have.
        width: channels of the stem; 16 in the papers.
    """

    def __init__(
        self, version: int = 2, blocks: int = 111, in_channels: int = 3, classes: int = 10, width: int = 16
    ) -> None:
        super().__init__()
        if version not in (1, 2):
            raise ValueError(f"version={version} is neither 1 nor 2")
        self.stem = nn.Conv2d(in_channels, width, 3, 1, 1)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        made, ins = list[nn.Module](), width
        for stage in range(3):
            for block in range(blocks):
                first, stride = block == 0, 2 if stage and block == 0 else 1
                if version == 1:
                    outs = width << stage
                    made.append(BlockV1(ins, outs, stride, project=first and stage > 0))
                else:
                    inner = width if stage == 0 else width << (stage + 1)
                    outs = width << (stage + 2)
                    made.append(BlockV2(ins, inner, outs, stride, activated=stage > 0 or not first, project=first))
                ins = outs
        self.blocks = nn.Sequential(*made)
        self.last = nn.Sequential(nn.BatchNorm2d(ins), nn.ReLU()) if version == 2 else nn.Identity()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(ins, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the classes."""
        x = self.relu(self.norm(self.stem(x)))
        x = self.last(self.blocks(x))
        return self.head(self.pool(x).flatten(1))  # type: ignore[no-any-return]


def resnet_110(in_channels: int = 3, classes: int = 10, width: int = 16, blocks: int = 18) -> ResNet2d:
    """Version 1 with 110 layers."""
    return ResNet2d(1, blocks, in_channels, classes, width)


def resnet_1001(in_channels: int = 3, classes: int = 10, width: int = 16, blocks: int = 111) -> ResNet2d:
    """Version 2 with 1,001 layers, 30 million parameters."""
    return ResNet2d(2, blocks, in_channels, classes, width)


def resnet_4997(in_channels: int = 3, classes: int = 10, width: int = 16, blocks: int = 555) -> ResNet2d:
    """Version 2 with 4,997 layers: HyPar-Flow's network of about 5,000."""
    return ResNet2d(2, blocks, in_channels, classes, width)
