"""What capture refuses: the error says what, where, and a way out; and the model is left as it was."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from halofx.compiler.capture import capture
from halofx.compiler.errors import CompileError
from halofx.compiler.mesh import Mesh
from tests.test_capture_replay import Model


def refused(model: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CompileError) as error:
        capture(model, args, kwargs, Mesh())
    return str(error.value)


def image() -> Tensor:
    return torch.ones(2, 2, 4, 4)


def read_after_write(model: nn.Module, x: Tensor) -> Tensor:
    seen = torch.zeros(3)
    seen[0] = x.sum()
    return x if seen.any() else -x


def listed_after_write(model: nn.Module, x: Tensor) -> Tensor:
    seen = torch.zeros(3)
    seen[0] = x.sum()
    return x * seen.tolist()[0]


DATA_DEPENDENT: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "is_nonzero": lambda m, x: x if x.sum() > 0 else -x,
    "item": lambda m, x: x * x.mean().item(),
    "int": lambda m, x: [x for _ in range(int(x.argmax()))],
    "numpy": lambda m, x: x.detach().numpy(),
    "tolist": lambda m, x: x.tolist(),
    "nonzero": lambda m, x: x.nonzero(),
    "index": lambda m, x: x[x > 0],
    "masked_select": lambda m, x: x.masked_select(x > 0),
    "parameter": lambda m, x: x * m.c.weight.sum().item(),
}


@pytest.mark.parametrize("forward", DATA_DEPENDENT.values(), ids=DATA_DEPENDENT)
def test_values_of_the_input(forward: Callable[..., Any]) -> None:
    message = refused(Model(forward, c=nn.Conv2d(2, 2, 1)), image())
    assert "needs the value of a tensor where only its shape is known" in message
    assert "(at test_capture_errors.py:" in message and "lambda m, x: " in message
    assert "use torch.where" in message


@pytest.mark.parametrize("forward", [read_after_write, listed_after_write])
def test_values_of_the_input_by_way_of_a_constant(forward: Callable[..., Any]) -> None:
    message = refused(Model(forward), image())
    assert "reads the value of a tensor that depends on the input (at test_capture_errors.py:" in message


def test_chance_decides() -> None:
    assert "depends on a random number" in refused(Model(lambda m, x: x if torch.rand(1) < 0.5 else -x), image())
    assert "generator of its own" in refused(
        Model(lambda m, x: x * torch.rand(4, generator=torch.Generator())), image()
    )


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_python(draw: Callable[[], Any]) -> None:
    before = random.getstate()
    model = Model(lambda m, x: x * float(draw()))
    try:
        notes = capture(model, (image(),), {}, Mesh()).notes
    except CompileError as error:
        notes = [str(error)]
    assert "draws random numbers from Python or numpy" in notes[0]  # a note where other threads may have drawn
    assert random.getstate() == before


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.neg_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_custom_autograd_functions_that_are_no_op() -> None:
    model = Model(lambda m, x: InPlace.apply(m.c(x)), c=nn.Conv2d(2, 2, 1))
    assert "the custom autograd Function InPlace changes its input in place" in refused(model, image())
    model = Model(lambda m, x: Noise.apply(m.c(x)), c=nn.Conv2d(2, 2, 1))
    assert "the custom autograd Function Noise draws random numbers" in refused(model, image())


def test_gradient_hooks() -> None:
    hooked = nn.Conv2d(2, 2, 1)
    hooked.register_full_backward_hook(lambda *_: None)
    assert "0 (Conv2d) has backward hooks" in refused(nn.Sequential(hooked), image())
    forward = lambda m, x: m.c(x).register_hook(lambda g: g)  # noqa: E731
    assert "uses register_hook() (at test_capture_errors.py:" in refused(Model(forward, c=nn.Conv2d(2, 2, 1)), image())
    assert "uses backward()" in refused(Model(lambda m, x: m.c(x).sum().backward(), c=nn.Conv2d(2, 2, 1)), image())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_that_are_no_plain_modules() -> None:
    assert "pass its .module instead" in refused(nn.DataParallel(nn.Conv2d(2, 2, 1)), image())
    assert "is a torch.jit.ScriptModule" in refused(torch.jit.script(nn.Conv2d(2, 2, 1)), image())
    assert "a function, not a torch.nn.Module" in refused(lambda x: x, image())
    assert "has no shape yet; run the model once" in refused(nn.LazyConv2d(2, 1), image())


def test_an_error_of_the_model_itself() -> None:
    model = Model(lambda m, x: m.c(x[:, :1]), c=nn.Conv2d(2, 2, 1))
    with pytest.raises(CompileError, match=r"expected input.*to have 2 channels") as error:
        capture(model, (image(),), {}, Mesh())
    assert "(at test_capture_errors.py:" in str(error.value) and "m.c(x[:, :1])" in str(error.value)
    assert isinstance(error.value.__cause__, RuntimeError)
    assert all(type(p) is nn.Parameter for p in model.parameters())


@dataclasses.dataclass
class Out:
    y: Tensor


def test_torch_prints_no_traceback_of_what_is_explained(capfd: pytest.CaptureFixture[str]) -> None:
    text = refused(Model(lambda m, x: x + torch.ones(3)), image())
    assert "the forward fails" in text and "broadcast" in text
    assert "Traceback" not in "".join(capfd.readouterr())


def test_inputs_and_outputs_without_known_structure() -> None:
    assert "an output of the model is a Out that holds tensors" in refused(Model(lambda m, x: Out(x)), image())
    assert "an input of the model is a Out that holds tensors" in refused(Model(lambda m, x: x.y), Out(image()))
    assert "pass torch.from_numpy(array)" in refused(Model(lambda m, x: x), np.ones(3))
    assert "the model returns no tensor but 3" in refused(Model(lambda m, x: 3), image())
    assert "torch.sparse_coo tensor" in refused(Model(lambda m, x: x), image().to_sparse())


def scale_weight(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.c.weight.mul_(2)
    return model.c(x)


def test_writes_to_parameters() -> None:
    conv = nn.Conv2d(2, 2, 1)
    before = conv.weight.detach().clone()
    message = refused(Model(scale_weight, c=conv), image())
    assert "aten.mul_.Tensor writes to the parameter c.weight (at test_capture_errors.py:" in message
    assert "c.weight" in refused(Model(lambda m, x: (m.c.weight.data.clamp_(0, 1), m.c(x))[1], c=conv), image())
    assert "assignment to .data" in refused(Model(lambda m, x: setattr(m.c.weight, "data", x), c=conv), image())
    assert torch.equal(conv.weight, before)


def test_state_outside_of_buffers() -> None:
    model = Model(lambda m, x: (m.plain.add_(1), x * m.plain)[1])
    model.plain = torch.ones(4)
    assert "kept outside of the parameters and buffers" in refused(model, image())
    assert torch.equal(model.plain, torch.ones(4))

    def recurrent(m: nn.Module, x: Tensor) -> Tensor:
        m.hidden = x + m.hidden
        return m.hidden

    model = Model(recurrent)
    model.hidden = torch.zeros(4)
    assert "reads and assigns the attribute hidden" in refused(model, image())
    model = Model(lambda m, x: x * m.weights[0])
    model.weights = [nn.Parameter(torch.ones(4))]
    assert "requires grad is not a parameter of the model" in refused(model, image())
    grows = Model(lambda m, x: (setattr(m, "buf", torch.zeros(3)), x)[1], buf=torch.zeros(2))
    assert "changes the buffer buf from torch.float32[2] to torch.float32[3]" in refused(grows, image())


WRITES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "resize": (lambda y: y.resize_(2, 2), "aten.resize_.default changes a tensor in place"),
    "set": (lambda y: y.set_(y), "aten.set_.source_Tensor changes a tensor in place"),
    "unfold": (lambda y: y.unfold(2, 2, 1).add_(1), "aten.unfold.default shares in a way that cannot be followed"),
    "strided": (lambda y: y[1:].as_strided((2, 2), (1, 1)), "as_strided on a view"),
    "numpy": (lambda y: torch.ones(2).numpy().fill(1), "read-only"),
}


@pytest.mark.parametrize(("write", "message"), WRITES.values(), ids=WRITES)
def test_writes_that_cannot_be_followed(write: Callable[[Tensor], Any], message: str) -> None:
    assert message in refused(Model(lambda m, x: (write(x * 1), x)[1]), image())


def lowered(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model.c(x)


def kept(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return model.c(x)


def test_autocast_inside_the_forward() -> None:
    message = refused(Model(lowered, c=nn.Conv2d(2, 2, 1)), image())
    assert "turns autocast on or off around aten.conv2d.default (at test_capture_errors.py:" in message
    capture(Model(kept, c=nn.Conv2d(2, 2, 1)), (image(),), {}, Mesh())


def test_function_transforms() -> None:
    assert "torch.func transforms" in refused(Model(lambda m, x: torch.func.vmap(torch.sin)(x)), image())
    cond = Model(lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))
    assert "torch.cond and other ops that take functions" in refused(cond, image())
