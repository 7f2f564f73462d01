"""3D ResNets: one vector of logits a volume or video clip.

Blocks and strides are those of torchvision's ``r3d_18`` (Tran et al., CVPR 2018, arXiv 1711.11248)
and, for ResNet-50, of Hara et al. (CVPR 2018, arXiv 1711.09577). Shapes in brackets are
``[samples, channels, depth, height, width]``.
"""

from typing import Literal

from torch import Tensor, nn

Stem = Literal["3x7x7", "7x7x7"]


class BasicBlock(nn.Module):
    """Two convolutions 3^3 and a shortcut: ``[N, ins, D, H, W] -> [N, width, D/s, H/s, W/s]``."""

    expansion = 1

    def __init__(self, ins: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(ins, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm3d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv3d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm3d(width)
        self.shortcut = _shortcut(ins, width, stride)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``relu(convs(x) + shortcut(x))``."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        x = self.relu2(y + self.shortcut(x))
        return x


class Bottleneck(nn.Module):
    """Convolutions 1^3, 3^3, 1^3, a shortcut: ``[N, ins, D, H, W] -> [N, 4 width, D/s, H/s, W/s]``."""

    expansion = 4

    def __init__(self, ins: int, width: int, stride: int) -> None:
        super().__init__()
        outs = width * self.expansion
        self.conv1 = nn.Conv3d(ins, width, 1, bias=False)
        self.bn1 = nn.BatchNorm3d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv3d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm3d(width)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv3d(width, outs, 1, bias=False)
        self.bn3 = nn.BatchNorm3d(outs)
        self.shortcut = _shortcut(ins, outs, stride)
        self.relu3 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``relu(convs(x) + shortcut(x))``."""
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.relu2(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        x = self.relu3(y + self.shortcut(x))
        return x


class ResNet3d(nn.Module):
    """3D ResNet: ``[N, in_channels, D, H, W] -> [N, classes]``.

    Args:
        block: the residual block.
        depths: blocks in each of the layers; layer i has ``2^(i-1) * width`` channels (times the
            block's expansion), and each but the first halves the extents.
        in_channels: channels of the input.
        classes: labels a sample can have.
        width: channels of the stem; 64 in the papers.
        stem: ``"3x7x7"`` is torchvision's, which halves height and width only and suits video;
            ``"7x7x7"`` is MONAI's for volumes, stride 1 and then a max pool that halves all three.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, ...],
        in_channels: int = 1,
        classes: int = 2,
        width: int = 64,
        stem: Stem = "3x7x7",
    ) -> None:
        super().__init__()
        self.stem = _stem(in_channels, width, stem)
        self.depth = len(depths)
        ins = width
        for i, blocks in enumerate(depths):
            inner = width * 2**i
            layer = nn.Sequential()
            for j in range(blocks):
                layer.append(block(ins, inner, stride=2 if i > 0 and j == 0 else 1))
                ins = inner * block.expansion
            self.add_module(f"layer{i + 1}", layer)
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(ins, classes)
        _init(self)

    def forward(self, x: Tensor) -> Tensor:
        """Compute a logit for each class."""
        x = self.stem(x)
        for i in range(1, self.depth + 1):
            x = getattr(self, f"layer{i}")(x)
        x = self.flatten(self.avgpool(x))
        x = self.fc(x)
        return x


def resnet3d_18(in_channels: int = 1, classes: int = 2, width: int = 64, stem: Stem = "3x7x7") -> ResNet3d:
    """Make the 3D ResNet-18, torchvision's ``r3d_18``: ``[N, in_channels, D, H, W] -> [N, classes]``."""
    return ResNet3d(BasicBlock, (2, 2, 2, 2), in_channels, classes, width, stem)


def resnet3d_50(in_channels: int = 1, classes: int = 2, width: int = 64, stem: Stem = "3x7x7") -> ResNet3d:
    """Make the 3D ResNet-50, of bottleneck blocks: ``[N, in_channels, D, H, W] -> [N, classes]``."""
    return ResNet3d(Bottleneck, (3, 4, 6, 3), in_channels, classes, width, stem)


def _stem(ins: int, width: int, kind: Stem) -> nn.Sequential:
    """Make the first layers; raise ValueError for an unknown kind."""
    stem = nn.Sequential()
    if kind == "3x7x7":
        conv = nn.Conv3d(ins, width, (3, 7, 7), stride=(1, 2, 2), padding=(1, 3, 3), bias=False)
    elif kind == "7x7x7":
        conv = nn.Conv3d(ins, width, 7, padding=3, bias=False)
    else:
        raise ValueError(f"unknown stem {kind!r}: use '3x7x7' or '7x7x7'")
    stem.add_module("conv", conv)
    stem.add_module("bn", nn.BatchNorm3d(width))
    stem.add_module("relu", nn.ReLU())
    if kind == "7x7x7":
        stem.add_module("pool", nn.MaxPool3d(3, stride=2, padding=1))
    return stem


def _shortcut(ins: int, outs: int, stride: int) -> nn.Module:
    """Make a projection where the shape changes, and the identity elsewhere."""
    if ins == outs and stride == 1:
        return nn.Identity()
    shortcut = nn.Sequential()
    shortcut.add_module("conv", nn.Conv3d(ins, outs, 1, stride=stride, bias=False))
    shortcut.add_module("bn", nn.BatchNorm3d(outs))
    return shortcut


def _init(net: nn.Module) -> None:
    """Initialize as torchvision does: He normal convolutions, small normal dense weights."""
    for module in net.modules():
        if isinstance(module, nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.01)
            nn.init.zeros_(module.bias)
