"""The zoo's models are the networks of their papers: parameters, flops, shapes, gradients."""

import functools
import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from halofx import zoo

# Keywords that make every model small, with the input that goes with them.
TINY: dict[str, tuple[tuple[int, ...], dict[str, object]]] = {
    "cosmoflow": (
        (2, 4, 16, 16, 16),
        {"channels": (2, 3, 2, 4, 3, 4, 4), "hidden": (6, 5), "batchnorm": True},
    ),
    "cosmoflow-mlperf": ((2, 4, 16, 16, 16), {"channels": (2, 3, 4), "hidden": (6, 5)}),
    "unet3d": ((1, 2, 12, 13, 15), {"width": 2, "levels": 2}),
    "unet3d-cicek": ((1, 3, 44, 45, 46), {"width": 1, "levels": 2}),
    "unet3d-mlperf": ((1, 1, 17, 16, 15), {"width": 2, "levels": 3}),
    "vnet": ((1, 2, 9, 8, 11), {"width": 2, "levels": 2, "batchnorm": True}),
    "resnet3d-18": ((2, 1, 8, 17, 16), {"width": 2, "classes": 5}),
    "resnet3d-50": ((2, 3, 17, 16, 18), {"width": 2, "classes": 5, "stem": "7x7x7"}),
    "resnet-110": ((2, 3, 9, 8), {"width": 2, "blocks": 2, "classes": 5}),
    "resnet-1001": ((2, 3, 9, 8), {"width": 2, "blocks": 2, "classes": 5}),
    "resnet-4997": ((2, 3, 9, 8), {"width": 2, "blocks": 1, "classes": 5}),
    "vgg-16": ((2, 3, 8, 8), {"channels": (2, 0, 3, 3, 0), "hidden": 4, "classes": 5}),
}


def on_meta(name: str, shape: tuple[int, ...], **kwargs: object) -> tuple[nn.Module, Tensor]:
    """Build a model and an input for it that take no memory."""
    with torch.device("meta"):
        return zoo.build(name, shape, **kwargs).eval(), torch.empty(shape)


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def conv_flops(net: nn.Module, x: Tensor) -> int:
    """Count the flops of the convolutions, transposed ones included, of one forward pass."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(x)
    return int(counter.get_flop_counts()["Global"][torch.ops.aten.convolution])


def cube(channels: int, extent: int) -> tuple[int, int, int, int, int]:
    return (1, channels, extent, extent, extent)


# --- the numbers of the papers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "kwargs", "expected"),
    [
        ("cosmoflow", cube(4, 64), {}, 9_437_636),
        ("cosmoflow", cube(4, 128), {}, 9_437_636),
        ("cosmoflow", cube(4, 256), {}, 9_437_636),
        ("cosmoflow", cube(4, 512), {}, 9_437_636),
        ("cosmoflow", cube(4, 512), {"batchnorm": True}, 9_439_652),
        ("vgg-16", (1, 3, 32, 32), {}, 33_638_218),
        ("cosmoflow-mlperf", cube(4, 128), {}, 8_907_556),
        ("unet3d", cube(1, 256), {}, 19_070_560),
        ("unet3d-mlperf", cube(1, 128), {}, 31_190_243),
        ("resnet3d-18", (1, 3, 16, 112, 112), {"classes": 400}, 33_371_472),  # torchvision's r3d_18
    ],
)
def test_parameters(name: str, shape: tuple[int, ...], kwargs: dict[str, object], expected: int) -> None:
    net, _ = on_meta(name, shape, **kwargs)
    assert parameters(net) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("resnet-110", 1_742_762), ("resnet-1001", 30_539_498), ("resnet-4997", 152_600_426)]
)
def test_parameters_of_keras(name: str, expected: int) -> None:
    """HyPar-Flow counts as Keras does: running statistics are parameters too."""
    net, _ = on_meta(name, (1, 3, 32, 32))
    statistics = sum(b.numel() for key, b in net.named_buffers() if "running" in key)
    assert parameters(net) + statistics == expected


def test_parameters_cicek() -> None:
    """The paper counts 19,069,955, with one bias where there is BatchNorm's scale and shift here."""
    net, _ = on_meta("unet3d-cicek", (1, 3, 132, 132, 116))
    norms = sum(m.num_features for m in net.modules() if isinstance(m, nn.BatchNorm3d))
    head_bias = 3
    assert parameters(net) - 2 * norms + norms + head_bias == 19_069_955


@pytest.mark.parametrize(
    ("name", "shape", "unit", "expected"),
    [
        ("cosmoflow", cube(4, 128), 1e9, "18.52"),
        ("cosmoflow", cube(4, 256), 1e9, "147.93"),
        ("cosmoflow", cube(4, 512), 1e9, "1183.4"),
        ("cosmoflow-mlperf", cube(4, 128), 1e9, "68.85"),
        ("unet3d", cube(1, 64), 1e12, "0.489"),
        ("unet3d", cube(1, 128), 1e12, "3.91"),
        ("unet3d", cube(1, 256), 1e12, "31.26"),
        ("unet3d-mlperf", cube(1, 128), 1e9, "954.6"),
    ],
)
def test_forward_flops(name: str, shape: tuple[int, ...], unit: float, expected: str) -> None:
    flops = conv_flops(*on_meta(name, shape)) / unit
    decimals = len(expected.partition(".")[2])
    assert f"{flops:.{decimals}f}" == expected


@pytest.mark.parametrize(("extent", "expected"), [(128, "55.55"), (256, "443.8"), (512, "3550.3")])
def test_cosmoflow_training_flops(extent: int, expected: str) -> None:
    """Forward, gradient of the input and gradient of the weights cost the same."""
    flops = 3 * conv_flops(*on_meta("cosmoflow", cube(4, extent))) / 1e9
    decimals = len(expected.partition(".")[2])
    assert f"{flops:.{decimals}f}" == expected


# --- shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "kwargs", "expected"),
    [
        ("cosmoflow", cube(4, 512), {}, (1, 4)),
        ("cosmoflow", cube(1, 64), {"outputs": 2}, (1, 2)),
        ("cosmoflow-mlperf", cube(4, 256), {}, (1, 4)),
        ("unet3d", cube(1, 256), {}, (1, 3, 256, 256, 256)),
        ("unet3d", (1, 1, 99, 117, 95), {}, (1, 3, 99, 117, 95)),
        ("unet3d", (1, 1, 197, 233, 189), {"levels": 5, "width": 4}, (1, 3, 197, 233, 189)),
        ("unet3d-cicek", (1, 3, 132, 132, 116), {}, (1, 3, 44, 44, 28)),
        ("unet3d-mlperf", (1, 1, 99, 117, 95), {"classes": 2}, (1, 2, 99, 117, 95)),
        ("vnet", (1, 1, 64, 128, 128), {}, (1, 2, 64, 128, 128)),
        ("vnet", (1, 4, 99, 117, 95), {"classes": 5}, (1, 5, 99, 117, 95)),
        ("resnet3d-18", (2, 1, 99, 117, 95), {"stem": "7x7x7"}, (2, 2)),
        ("resnet3d-50", (2, 3, 16, 112, 112), {"classes": 400}, (2, 400)),
    ],
)
def test_output_shape(name: str, shape: tuple[int, ...], kwargs: dict[str, object], expected: tuple[int, ...]) -> None:
    net, x = on_meta(name, shape, **kwargs)
    assert net(x).shape == expected


@pytest.mark.parametrize("extent", [3, 4, 5, 8, 9, 31, 64, 99, 128, 129, 511, 512])
def test_cosmoflow_flattens_two_cubed(extent: int) -> None:
    net, x = on_meta("cosmoflow", cube(4, extent), channels=(1,) * 7, hidden=(2, 2))
    assert net(x).shape == (1, 4)


@pytest.mark.parametrize("shape", [(8, 8, 8), (9, 8, 11), (11, 13, 15), (4, 5, 6), (7, 7, 7)])
def test_unet3d_keeps_any_size(shape: tuple[int, ...]) -> None:
    net = zoo.UNet3d(width=2, levels=2).eval()  # in training, BatchNorm wants two voxels at the bottom
    assert net(torch.randn(1, 1, *shape)).shape == (1, 3, *shape)


def test_fitting_returns_the_tensor_itself_at_even_sizes() -> None:
    x = torch.randn(1, 2, 4, 6, 8)
    assert zoo.fit.pad_to(x, torch.empty(1, 5, 4, 6, 8)) is x
    assert zoo.fit.crop_to(x, torch.empty(1, 5, 4, 6, 8)) is x


def test_pad_to_appends_zeros_in_the_right_dims() -> None:
    x = torch.randn(1, 2, 4, 6, 8)
    padded = zoo.fit.pad_to(x, torch.empty(1, 1, 5, 6, 9))
    assert padded.shape == (1, 2, 5, 6, 9)
    assert torch.equal(padded[:, :, :4, :, :8], x)
    assert padded.count_nonzero() == x.count_nonzero()


def test_crop_to_keeps_the_center() -> None:
    x = torch.randn(1, 2, 9, 6, 8)
    assert torch.equal(zoo.fit.crop_to(x, torch.empty(1, 1, 4, 6, 7)), x[:, :, 2:6, :, :7])


# --- running them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.MODELS)
def test_tiny_model_trains(name: str) -> None:
    """Every parameter gets a finite gradient, and so does the input."""
    shape, kwargs = TINY[name]
    torch.manual_seed(0)
    net = zoo.build(name, shape, **kwargs)
    x = torch.rand(shape, requires_grad=True)
    net(x).square().sum().backward()
    for key, tensor in [("input", x), *net.named_parameters()]:
        assert tensor.grad is not None, key
        assert torch.isfinite(tensor.grad).all(), key


def test_default_batchnorm_free_models_train() -> None:
    for net in (zoo.CosmoFlow(8, channels=(2,) * 7, hidden=(3, 3)), zoo.VNet(width=2, levels=1)):
        names = [key for key, _ in net.named_parameters() if "norm" in key]
        x = torch.rand(1, 4 if isinstance(net, zoo.CosmoFlow) else 1, 8, 8, 8)
        net(x).sum().backward()
        assert not names
        assert all(p.grad is not None for p in net.parameters())


def test_vnet_repeats_its_input() -> None:
    """The first residual adds channel c modulo the input's channels to channel c."""
    net = zoo.VNet(in_channels=2, width=4, levels=1)
    seen: list[Tensor] = []
    net.enc0.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.randn(1, 2, 4, 4, 4)
    net(x)
    assert torch.equal(seen[0], torch.cat([x, x], dim=1))


def test_cosmoflow_init() -> None:
    net = zoo.CosmoFlow(16)
    assert net.get_parameter("conv7.weight").abs().max() <= (6 / (27 * 512)) ** 0.5
    assert net.get_parameter("fc2.bias").unique().tolist() == [pytest.approx(0.1)]
    drops = [m.p for m in net.modules() if isinstance(m, nn.Dropout)]
    assert drops == [pytest.approx(0.2)] * 3


def test_cosmoflow_mlperf_takes_logarithms() -> None:
    torch.manual_seed(0)
    net = zoo.CosmoFlowMlperf(8, channels=(2, 2), hidden=(3, 3)).eval()
    bare = zoo.CosmoFlowMlperf(8, channels=(2, 2), hidden=(3, 3), log_input=False).eval()
    bare.load_state_dict(net.state_dict())
    x = torch.rand(2, 4, 8, 8, 8) * 100
    assert torch.equal(net(x), bare(torch.log1p(x)))
    assert net(x).abs().max() <= 1.2


# --- the registry ----------------------------------------------------------------------------------


def test_build_derives_from_the_shape_and_keywords_win() -> None:
    def in_channels(key: str, name: str, shape: tuple[int, ...] | None, **kwargs: object) -> int:
        with torch.device("meta"):
            return zoo.build(name, shape, **kwargs).get_parameter(key).shape[1]

    assert in_channels("conv1.weight", "cosmoflow", cube(3, 64)) == 3
    assert in_channels("enc0.conv1.weight", "unet3d", cube(3, 64)) == 3
    assert in_channels("enc0.conv1.weight", "unet3d", cube(3, 64), in_channels=2) == 2
    assert in_channels("enc0.conv1.weight", "vnet", None) == 1
    # Width 64 leaves 2^3 voxels of 512 channels to flatten.
    assert in_channels("fc1.weight", "cosmoflow-mlperf", cube(4, 64)) == 512 * 2**3


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("unet3D-cicek", "unet3d-cicek"),
        ("cosmo-flow", "cosmoflow"),
        ("resnet18", "resnet3d-18"),
        ("v-net", "vnet"),
    ],
)
def test_unknown_name_suggests_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"unknown model '{wrong}': did you mean '{near}'"):
        zoo.build(wrong)


def test_unknown_name_unlike_any() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'xyzzy'\. The zoo has cosmoflow, "):
        zoo.build("xyzzy")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (functools.partial(zoo.build, "unet3d", (1, 8, 8, 8)), "input_shape is"),
        (functools.partial(zoo.build, "cosmoflow", (1, 4, 64, 64, 32)), "takes cubes, not"),
        (functools.partial(zoo.CosmoFlow, 1024), "3 to 512, not 1024"),
        (functools.partial(zoo.CosmoFlow, channels=(1, 2)), "7 convolutions"),
        (functools.partial(zoo.CosmoFlowMlperf, 16), "an input_width of 32, not 16"),
        (functools.partial(zoo.VNet, in_channels=3), "multiple of in_channels=3"),
        (functools.partial(zoo.build, "resnet3d-18", stem="3x3x3"), "unknown stem '3x3x3'"),
    ],
)
def test_wrong_arguments(make: functools.partial[nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", zoo.MODELS)
def test_every_argument_has_a_default_and_a_doc(name: str) -> None:
    make = zoo.MODELS[name]
    arguments = inspect.signature(make).parameters.values()
    assert all(a.default is not inspect.Parameter.empty for a in arguments)
    assert make.__doc__
