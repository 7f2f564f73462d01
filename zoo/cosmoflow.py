"""CosmoFlow: cosmological parameters from the dark matter in a cube of the universe.

Two networks: the one of Oyama et al., "The Case for Strong Scaling in Deep Learning" (IEEE TPDS
2021, arXiv 2007.12856), and the MLPerf HPC benchmark's. Shapes in brackets are
``[samples, channels, depth, height, width]``.
"""

import torch
from torch import Tensor, nn


class CosmoFlow(nn.Module):
    """CosmoFlow of Oyama et al.: ``[N, in_channels, W, W, W] -> [N, outputs]``.

    Seven convolutions 3^3, of which the fourth has stride 2. Average pools follow the first so many
    of them that 2^3 voxels are left to flatten::

        input width    32    64   128   256   512
        pools after   1-3   1-4   1-5   1-6   1-7      (the paper has 128, 256 and 512)

    so the number of parameters does not depend on ``input_width``. Odd widths work too: every
    halving rounds up.

    Args:
        input_width: voxels along an edge of the input cube, 3 to 512.
        in_channels: channels of the input (the paper's four are redshifts).
        channels: output channels of the seven convolutions.
        batchnorm: put a BatchNorm between each convolution and its activation.
        hidden: features of the two hidden dense layers.
        dropout: probability of a zero in front of each dense layer.
        outputs: cosmological parameters to predict.

    Raises:
        ValueError: ``input_width`` or the length of ``channels`` is out of range.
    """

    def __init__(
        self,
        input_width: int = 128,
        in_channels: int = 4,
        channels: tuple[int, ...] = (16, 32, 64, 128, 256, 256, 256),
        batchnorm: bool = False,
        hidden: tuple[int, int] = (2048, 256),
        dropout: float = 0.2,
        outputs: int = 4,
    ) -> None:
        super().__init__()
        if len(channels) != 7:
            raise ValueError(f"CosmoFlow has 7 convolutions, but channels={channels} names {len(channels)}")
        if not 3 <= input_width <= 512:
            raise ValueError(f"CosmoFlow takes an input_width of 3 to 512, not {input_width}")
        # Halvings, rounding up, that leave 2 of the width; the stride of conv4 is one of them.
        self.pools = (input_width - 1).bit_length() - 2
        widths = (in_channels, *channels)
        for i in range(1, 8):
            stride = 2 if i == 4 else 1
            conv = nn.Conv3d(widths[i - 1], widths[i], 3, stride=stride, padding=1, bias=False)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"norm{i}", nn.BatchNorm3d(widths[i]) if batchnorm else nn.Identity())
            self.add_module(f"act{i}", nn.LeakyReLU(0.01))
            if i <= self.pools:
                self.add_module(f"pool{i}", nn.AvgPool3d(3, stride=2, padding=1))
        self.flatten = nn.Flatten()
        features = (channels[-1] * 2**3, *hidden, outputs)
        for i in range(1, 4):
            self.add_module(f"drop{i}", nn.Dropout(dropout))
            self.add_module(f"fc{i}", nn.Linear(features[i - 1], features[i]))
            self.add_module(f"fc{i}_act", nn.LeakyReLU(0.01) if i < 3 else nn.Identity())
        _init_glorot(self, dense_bias=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Predict the (normalized) parameters: ``[N, in_channels, W, W, W] -> [N, outputs]``."""
        for i in range(1, 8):
            for part in ("conv", "norm", "act"):
                x = getattr(self, f"{part}{i}")(x)
            if i <= self.pools:
                x = getattr(self, f"pool{i}")(x)
        x = self.flatten(x)
        for i in range(1, 4):
            x = getattr(self, f"drop{i}")(x)
            x = getattr(self, f"fc{i}")(x)
            x = getattr(self, f"fc{i}_act")(x)
        return x


class CosmoFlowMlperf(nn.Module):
    """CosmoFlow of MLPerf HPC: ``[N, in_channels, W, W, W] -> [N, outputs]`` within +-1.2.

    Per entry of ``channels``: convolution 3^3, LeakyReLU 0.3, max pool 2. The first dense layer
    sees all voxels that are left, 4^3 of 128^3, so its size grows with ``input_width``.

    The input is counts of particles, and the network starts with ``log(1 + x)``: inputs at or below
    -1 have no logarithm, so random test data must be non-negative (or ``log_input`` False).

    Args:
        input_width: voxels along an edge of the input cube.
        in_channels: channels of the input.
        channels: output channels of the convolutions.
        hidden: features of the two hidden dense layers.
        dropout: probability of a zero after each hidden dense layer.
        outputs: cosmological parameters to predict.
        log_input: take the logarithm here; False where the data come as logarithms.

    Raises:
        ValueError: ``input_width`` is too small for so many pools.
    """

    def __init__(
        self,
        input_width: int = 128,
        in_channels: int = 4,
        channels: tuple[int, ...] = (32, 64, 128, 256, 512),
        hidden: tuple[int, int] = (128, 64),
        dropout: float = 0.5,
        outputs: int = 4,
        log_input: bool = True,
    ) -> None:
        super().__init__()
        left = input_width // 2 ** len(channels)
        if left < 1:
            raise ValueError(f"{len(channels)} pools need an input_width of {2 ** len(channels)}, not {input_width}")
        self.log_input = log_input
        self.convs = len(channels)
        widths = (in_channels, *channels)
        for i in range(1, self.convs + 1):
            self.add_module(f"conv{i}", nn.Conv3d(widths[i - 1], widths[i], 3, padding=1))
            self.add_module(f"act{i}", nn.LeakyReLU(0.3))
            self.add_module(f"pool{i}", nn.MaxPool3d(2))
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(channels[-1] * left**3, hidden[0])
        self.fc1_act = nn.LeakyReLU(0.3)
        self.drop1 = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden[0], hidden[1])
        self.fc2_act = nn.LeakyReLU(0.3)
        self.drop2 = nn.Dropout(dropout)
        self.fc3 = nn.Linear(hidden[1], outputs)
        _init_glorot(self, dense_bias=0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Predict the (normalized) parameters: ``[N, in_channels, W, W, W] -> [N, outputs]``."""
        if self.log_input:
            x = torch.log1p(x)
        for i in range(1, self.convs + 1):
            for part in ("conv", "act", "pool"):
                x = getattr(self, f"{part}{i}")(x)
        x = self.flatten(x)
        x = self.drop1(self.fc1_act(self.fc1(x)))
        x = self.drop2(self.fc2_act(self.fc2(x)))
        # The parameters are scaled to -1..1: tanh bounds the guess, 1.2 keeps its ends reachable.
        return 1.2 * torch.tanh(self.fc3(x))


def _init_glorot(net: nn.Module, dense_bias: float) -> None:
    """Glorot uniform weights, zero biases of convolutions, and one value for those of dense layers."""
    for module in net.modules():
        if isinstance(module, nn.Conv3d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.constant_(module.bias, dense_bias if isinstance(module, nn.Linear) else 0.0)
