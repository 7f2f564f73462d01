"""VGG-16 (Simonyan and Zisserman, ICLR 2015, configuration D), for images ``[samples, channels, height, width]`` of any size."""

from collections.abc import Sequence

from torch import Tensor, nn

CHANNELS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Channels of the convolutions; 0 is a max pool."""


class Vgg16(nn.Module):
    """VGG: ``[N, in_channels, W, W] -> [N, classes]``.

    Args:
        in_channels: channels of the input.
        input_width: height and width of the input; each pool halves it while there is something to halve.
        classes: labels a sample can have.
        channels: as `CHANNELS`.
        hidden: width of the two hidden linear layers, 4,096 in the paper.
        dropout: probability of dropping a hidden value.
    """

    def __init__(
        self, in_channels: int = 3, input_width: int = 32, classes: int = 10, channels: Sequence[int] = CHANNELS,
        hidden: int = 4096, dropout: float = 0.5,
    ) -> None:  # fmt: skip
        super().__init__()
        made, ins, width = list[nn.Module](), in_channels, input_width
        for outs in channels:
            if outs:
                made += [nn.Conv2d(ins, outs, 3, padding=1), nn.ReLU()]
                ins = outs
            elif width > 1:
                made.append(nn.MaxPool2d(2))
                width //= 2
        self.features = nn.Sequential(*made)
        self.classifier = nn.Sequential(
            nn.Linear(ins * width * width, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Dropout(dropout), nn.Linear(hidden, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the classes."""
        return self.classifier(self.features(x).flatten(1))  # type: ignore[no-any-return]
