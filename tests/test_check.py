"""`halofx.check` and ``python -m halofx check``: exact, the first node that differs, or an explained refusal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import halofx
from halofx.api import build
from halofx.checking.first import Watch
from halofx.cli import app
from halofx.compiler.emit import label_of
from halofx.compiler.index_map import IndexMap
from halofx.compiler.mesh import Mesh
from halofx.compiler.rules import RULES, Spec
from halofx.runtime.launch import launch
from halofx.runtime.observe import run_rank
from tests.models import TinyUNet

X = (1, 1, 8, 8, 8)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _op(name: str, forward: Any, backward: Any) -> Any:
    """A custom op with a rule that claims it is pointwise over all dims."""
    op = torch.library.custom_op(f"halofx_check::{name}", forward, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(lambda x: torch.empty_like(x))
    op.register_autograd(backward)
    return getattr(torch.ops.halofx_check, name).default


center = _op("center", lambda x: x - x.mean(2, keepdim=True), lambda ctx, g: g - g.mean(2, keepdim=True))
"""Wrong: it needs dim 2 whole."""
bent = _op("bent", lambda x: 2 * x, lambda ctx, g: 2 * g + g.mean())
"""Right forward, wrong backward: it sees all of the gradient."""


@pytest.fixture(autouse=True)
def _rules() -> Iterator[None]:
    """Rules of this file do not outlive a test."""
    before = dict(RULES)
    halofx.rule(center, bent)(lambda call: Spec(ins={"x": "n c d h w"}, outs=["n c d h w"]))
    yield
    RULES.clear()
    RULES.update(before)


class Planted(nn.Module):
    """Two convolutions with an op between them."""

    def __init__(self, op: Any = None) -> None:
        super().__init__()
        self.a, self.b, self.op = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 2, 3, padding=1), op

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        return self.b(y if self.op is None else self.op(y))


MESHES = [Mesh(depth=2), Mesh(depth=3), Mesh(height=2, width=2), Mesh(depth=2, height=2, width=2)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("norm", [nn.BatchNorm3d, nn.InstanceNorm3d, lambda c: nn.GroupNorm(2, c)])
@pytest.mark.parametrize("training", [True, False])
def test_a_right_model_is_exact(mesh: Mesh, norm: Any, training: bool) -> None:
    found = halofx.check(TinyUNet(norm).double().train(training), [randn(*X)], mesh)
    assert found.exact and found.error < 1e-12, str(found)
    assert str(found).splitlines()[-1].startswith("exact: 1 output")


def test_the_model_is_left_as_it_was() -> None:
    model = TinyUNet().double()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert halofx.check(model, [randn(*X)], Mesh(depth=2)).exact
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mesh", [Mesh(depth=2), Mesh(data=2, depth=2)], ids=str)
def test_a_wrong_rule_is_found_and_named(mesh: Mesh) -> None:
    found = halofx.check(Planted(center).double(), [randn(2, 1, 8, 8, 8)], mesh)
    assert found.status == "differs" and not found.exact
    assert found.verdict.startswith("first at center") and "self.op(y)" in found.verdict
    assert "test_check.py" in found.details[1] and "d over depth" in found.details[1]
    assert "index [" in found.details[-1]


def test_a_wrong_backward_is_found_and_named() -> None:
    found = halofx.check(Planted(bent).double(), [randn(*X)], Mesh(depth=2))
    assert found.status == "differs" and found.verdict.startswith("first in the backward pass of bent"), str(found)


def test_a_wrong_rule_that_is_not_split_is_right() -> None:
    assert halofx.check(Planted(center).double(), [randn(2, 1, 8, 8, 8)], Mesh(data=2)).exact


@pytest.mark.parametrize("mesh", [*MESHES, Mesh(data=2, depth=2)], ids=str)
def test_every_value_and_gradient_of_a_right_model_is_seen_as_right(mesh: Mesh) -> None:
    """Who looks for the first difference must not see one where there is none, nor look at nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(
        TinyUNet(), nn.Dropout(0.5), nn.Flatten(2), nn.Softmax(1), nn.Unflatten(2, (8, 8, 8)), TinyUNet3()
    )
    model, x = model.double(), randn(2, 1, 8, 8, 8)
    one, program = (build(model, (x,), {}, m, options={}) for m in (Mesh(), mesh))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    cotangents = [randn(2, 3, 8, 8, 8)]
    values, grads = dict[str, Tensor](), dict[str, Tensor]()
    launch(
        lambda _: run_rank(
            one,
            state,
            [x],
            cotangents,
            lambda n, v: values.update({label_of(n): v}),
            lambda n, g: grads.update({label_of(n): g}),
        ),
        1,
    )
    forward = Watch(program, values, 1e-10, {}, lambda layout: not layout.partial)
    backward = Watch(
        program, grads, 1e-10, {}, lambda layout: True, 1e-3 * max(float(g.abs().max()) for g in grads.values())
    )
    launch(lambda _: run_rank(program, state, [x], cotangents, forward.see, backward.see), mesh)
    assert not forward.wrong and not backward.wrong
    assert len(forward.seen) > 20 and len(backward.seen) > 20


class TinyUNet3(TinyUNet):
    """A U-Net that takes three channels."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Conv3d(3, 4, 3, padding=1)


def _bad(name: str, rule: Any) -> Any:
    op = torch.library.custom_op(
        f"halofx_check::{name}", lambda x: 2 * x, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_fake(lambda x: torch.empty_like(x))
    op.register_autograd(lambda ctx, g: 2 * g)
    target = getattr(torch.ops.halofx_check, name).default
    halofx.rule(target)(rule)
    return target


BAD_RULES = {
    "other_name": (lambda call: Spec(ins={"y": "n c d h w"}, outs=["n c d h w"]), "gives no dims to x, but to y"),
    "few_dims": (lambda call: Spec(ins={"x": "n c d h"}, outs=["n c d h w"]), "gives x the dims 'n c d h'"),
    "raises": (lambda call: call["z"], "fails with KeyError: 'z'"),
    "no_spec": (lambda call: {"x": "n c d h w"}, "returns dict; return a Spec"),
    "two_outputs": (
        lambda call: Spec(ins={"x": "n c d h w"}, outs=["n", "c"]),
        "gives dims for 2 outputs; the op has 1",
    ),
    "halo": (
        lambda call: Spec(ins={"x": "n c d h w"}, outs=["n c d h w"], maps={"d": IndexMap(lo=-1, hi=1)}),
        "first at halo, relative error inf",  # nobody takes the halo off again
    ),
}


@pytest.mark.parametrize("name", BAD_RULES)
def test_a_rule_that_does_not_fit_is_named(name: str) -> None:
    rule, text = BAD_RULES[name]
    found = halofx.check(Planted(_bad(name, rule)).double(), [randn(*X)], Mesh(depth=2))
    assert not found.exact and text in found.verdict and "\n" not in found.verdict, str(found)


def test_an_op_without_a_rule_comes_with_the_entry_to_write() -> None:
    op = torch.library.custom_op(
        "halofx_check::mirror", lambda x: x.flip(2), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_fake(lambda x: torch.empty_like(x))
    op.register_autograd(lambda ctx, g: g.flip(2))
    model = Planted(torch.ops.halofx_check.mirror).double()
    found = halofx.check(model, [randn(*X)], Mesh(depth=2))
    text = str(found)
    assert found.exact and found.coverage.share < 1
    assert (
        "@halofx.rule(torch.ops.halofx_check.mirror.default)" in text
        and 'Spec(ins={"x": "n c d h w"}, outs=["n c d h w"])' in text
    )
    assert "no rule for mirror" in text
    refused = halofx.check(model, [randn(*X)], Mesh(depth=2), strict=True)
    assert refused.status == "refused" and "halofx_check.mirror" in refused.verdict


def test_dropout_is_compared_with_one_rank() -> None:
    model = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.Dropout3d(0.3), nn.Conv3d(4, 1, 3, padding=1)).double()
    assert halofx.check(model, [randn(*X)], Mesh(depth=2, width=2)).exact


def test_what_one_device_cannot_reproduce_is_named_and_not_compared() -> None:
    class Gate(nn.Module):
        """The mean of a normalized volume is zero but for rounding; a ReLU of it has a gradient by chance."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.fc = nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.Linear(4, 4)
            nn.init.zeros_(self.fc.bias)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x))
            return y * (1 + F.relu(self.fc(y.mean((2, 3, 4))))).view(1, 4, 1, 1, 1)

    torch.manual_seed(0)
    found = halofx.check(Gate().double(), [randn(1, 1, 16, 16, 16)], Mesh(depth=4))
    assert found.exact, str(found)
    if "not compared" in found.verdict:
        assert "fc." in found.verdict


@pytest.mark.parametrize("name", ["mse_loss", "cross_entropy"])
def test_a_loss_is_compared(name: str) -> None:
    y = torch.randint(0, 3, (1, 8, 8, 8)) if name == "cross_entropy" else randn(1, 3, 8, 8, 8)
    assert halofx.check(TinyUNet().double(), [randn(*X)], Mesh(depth=2), loss=getattr(F, name), targets=[y]).exact


def test_nested_inputs_and_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Conv3d(2, 2, 3, padding=1)

        def forward(self, pair: dict[str, Tensor], scale: float, *, mask: Tensor, mode: str = "sum") -> dict[str, Any]:
            y = self.net(torch.cat([pair["a"], pair["b"]], 1)) * scale * mask
            return {"main": y, "deep": [F.avg_pool3d(y, 2), mode], "loss": y.square().mean()}

    found = halofx.check(
        Two().double(),
        [{"a": randn(*X), "b": randn(*X)}, 0.5],
        Mesh(depth=2, height=2),
        kwargs={"mask": randn(*X), "mode": "x"},
    )
    assert found.exact and "3 outputs" in found.verdict, str(found)


REFUSED = {
    "nan": (lambda m: m.a.weight.data.fill_(float("nan")), "a.weight holds NaN"),
    "meta": (lambda m: m.to("meta"), "meta device"),
    "hook": (lambda m: m.a.register_full_backward_hook(lambda *_: None), "backward hooks"),
    "channels": (
        lambda m: setattr(m, "a", nn.Conv3d(3, 4, 3).double()),
        "expected input[1, 1, 8, 8, 8] to have 3 channels",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    break_it, text = REFUSED[name]
    model = Planted().double()
    break_it(model)
    found = halofx.check(model, [randn(*X)], Mesh(depth=2))
    assert found.status == "refused" and text in found.verdict and "\n" not in found.verdict, str(found)


# -- the command

MINE = """
    import torch
    from torch import nn
    def good(): return nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2), nn.ReLU(), nn.Conv3d(2, 2, 3))
    def with_inputs(): return good(), torch.randn(1, 1, 8, 8, 8)
    def with_keywords(): return Masked(), (torch.randn(1, 1, 8, 8, 8),), {"mask": torch.ones(1, 1, 8, 8, 8)}
    def sized(width, depth=3): return good()
    def words(): return nn.Sequential(nn.Embedding(10, 4))
    def number(): return 3
    def broken(): raise RuntimeError("no weights here")
    class Masked(nn.Module):
        def forward(self, x, mask): return x * mask
    class Branch(nn.Module):
        def forward(self, x): return x if x.sum() > 0 else -x
    net = good()
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"mine_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MINE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["check", *args])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


INPUT = ("--input", "1,1,8,8,8")
COMMANDS = {
    "good": (("good", *INPUT), 0, "exact: 1 output, 7 gradients and 3 buffers of 2 ranks equal one device"),
    "eval": (("good", *INPUT, "--eval"), 0, "(eval, float64)"),
    "float32": (("good", *INPUT, "--dtype", "float32"), 0, "(train, float32)"),
    "module": (("net", *INPUT), 0, "exact: "),
    "class": (("Branch", *INPUT), 2, "branch on shapes"),
    "inputs": (("with_inputs",), 0, "exact: "),
    "keywords": (("with_keywords",), 0, "exact: "),
    "no axis": (("words", "--input", "2,8:int64:10"), 2, "mesh axis depth=2 splits no dim of the inputs"),
    "loss": (("good", *INPUT, "--loss", "cross_entropy"), 0, "exact: 1 output"),
    "target": (("good", *INPUT, "--loss", "mse_loss", "--target", "1,2,6,6,6"), 0, "exact: 1 output"),
    "no input": (("good",), 2, "add --input"),
    "arguments": (("sized", *INPUT), 2, "needs arguments (width)"),
    "number": (("number", *INPUT), 2, "returned int"),
    "broken": (("broken", *INPUT), 2, "fails with RuntimeError: no weights here"),
    "nothing": (("nothing", *INPUT), 2, "has no 'nothing'"),
    "channels": (("good", "--input", "1,4,8,8,8"), 2, "to have 1 channels, but got 4 channels"),
    "dtype": (("good", *INPUT, "--dtype", "int8"), 2, "not a floating dtype"),
    "bad loss": (("good", *INPUT, "--loss", "nonsense"), 2, "neither in torch.nn.functional"),
    "bad input": (("good", "--input", "1,1,8:flat"), 2, "SHAPE[:DTYPE[:HIGH]]"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command(mine: str, name: str) -> None:
    (model, *rest), code, text = COMMANDS[name]
    found, output = run(f"{mine}:{model}", "--mesh", "depth=2", *rest)
    assert found == code and text in output and "Traceback" not in output, output


def test_integers_as_input(mine: str) -> None:
    code, output = run(f"{mine}:words", "--mesh", "data=2", "--input", "2,8:int64:10")
    assert code == 0 and "exact: 1 output and 1 gradient" in output, output


@pytest.mark.parametrize("mesh", ["deep=2", "depth", "depth=0"])
def test_a_mesh_that_does_not_fit(mine: str, mesh: str) -> None:
    code, output = run(f"{mine}:good", "--mesh", mesh, *INPUT)
    assert code == 2 and "Traceback" not in output and output.count("\n") <= 2, output
