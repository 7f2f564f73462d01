"""Names, source lines, nested inputs and outputs, constants and notes of a captured program."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from halofx.compiler.capture import capture
from halofx.compiler.mesh import Mesh
from halofx.compiler.program import Program
from halofx.compiler.trees import NONE, flatten, rebuild
from tests.test_capture_replay import Model, UNet, check, randn


def ops(program: Program) -> dict[str, fx.Node]:
    """The computed nodes by label."""
    return {n.meta["label"]: n for n in program.graph.nodes if n.op == "call_function"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.ModuleDict({"conv": nn.Conv3d(1, 1, 3, padding=1, padding_mode="circular")})
        self.act = nn.ReLU(inplace=True)
        self.tail = nn.Sequential(nn.Conv3d(2, 1, 1), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.enc["conv"](x))
        z = self.act(self.enc["conv"](y))
        w = torch.cat([y, z], 1) + 1
        return self.tail(w)[:, :, 1:]


def test_labels_follow_the_modules() -> None:
    program = check(Net(), randn(1, 1, 4, 4, 4))
    assert list(ops(program)) == [
        "enc.conv.pad",
        "enc.conv",
        "act",
        "enc.conv.pad_1",
        "enc.conv_1",
        "act_1",
        "cat",
        "add",
        "tail.0",
        "slice",
    ]
    assert [n.meta["label"] for n in program.placeholders("state")][:2] == ["enc.conv.weight", "enc.conv.bias"]


def test_node_names_are_readable_code() -> None:
    program = check(Net(), randn(1, 1, 4, 4, 4))
    code = fx.GraphModule(program.constants, program.graph).code
    assert "enc_conv_1 = torch.ops.aten.conv3d.default(enc_conv_pad_1, enc_conv_weight, enc_conv_bias" in code
    assert "def forward(self, enc_conv_weight, enc_conv_bias, tail_0_weight, tail_0_bias, x):" in code


def test_source_is_the_innermost_line_of_the_user() -> None:
    nodes = ops(check(Net(), randn(1, 1, 4, 4, 4)))
    source = nodes["enc.conv.pad"].meta["source"]
    assert source.startswith("test_capture_labels.py:") and source.endswith(': y = self.act(self.enc["conv"](x))')
    assert nodes["cat"].meta["source"].endswith(": w = torch.cat([y, z], 1) + 1")
    alone = capture(nn.Conv3d(1, 1, 1), (torch.ones(1, 1, 2, 2, 2),), {}, Mesh())
    assert [n.meta["source"] for n in alone.graph.nodes if n.op == "call_function"] == [None]


def test_labels_of_norms_tuples_and_losses() -> None:
    program = check(UNet(), randn(2, 1, 4, 4, 4), loss=nn.MSELoss(), targets=(randn(2, 3, 4, 4, 4),))
    assert {"enc.1", "enc.1.batch_norm_train", "enc.1.new_mean", "enc.1.add", "loss"} <= set(ops(program))
    program = check(nn.Sequential(nn.LSTM(3, 2), Model(lambda m, x: x[0])), randn(4, 1, 3))
    assert {"0", "0.lstm"} <= set(ops(program))
    program = check(
        nn.Conv1d(1, 2, 1), randn(2, 1, 3), loss=lambda y, t: F.l1_loss(y, t).sqrt(), targets=(randn(2, 2, 3),)
    )
    assert list(ops(program)) == ["conv1d", "loss.l1_loss", "loss.sqrt"]


def names(program: Program) -> list[str]:
    return [n.meta["input"] for n in program.placeholders("input")]


class Nested(nn.Module):
    def forward(self, batch: Any, y: Tensor | None = None, *rest: Tensor, mask: Tensor, flag: bool) -> Any:
        image = batch["image"][0]
        first = image * (2 if flag else 3) + y + mask + sum(rest)
        return {"first": (first, None, 3, [y]), "image": image, "twice": (first, first), "range": torch.arange(3)}


def test_nested_inputs_and_outputs() -> None:
    x = randn(2)
    batch = {"image": [x, None], "name": "a"}
    program = check(Nested(), batch, randn(2), randn(2), randn(2), mask=randn(2), flag=True)
    assert names(program) == ["batch.image.0", "y", "rest.0", "rest.1", "mask"]
    assert program.in_leaves == (None, NONE, "a", None, None, None, None, True)
    assert program.out_leaves == (None, NONE, 3, None, None, None, None, None)
    assert [n.meta["label"] for n in program.graph.nodes if n.op == "get_attr"] == ["const"]


def test_named_tuples_and_targets() -> None:
    Pair = collections.namedtuple("Pair", "a b")
    program = check(Model(lambda m, p: Pair(p.b, p.a * 2)), Pair(randn(2), randn(2)))
    assert names(program) == ["args.0.a", "args.0.b"]
    loss = lambda y, t, w: ((y - t["mask"]) * w).sum()  # noqa: E731
    program = check(nn.Linear(2, 2), randn(3, 2), loss=loss, targets=({"mask": randn(3, 2)}, randn(2)))
    assert names(program) == ["input", "target.0.mask", "target.1"]
    program = check(nn.Linear(2, 2), randn(3, 2), loss=F.mse_loss, targets=(randn(3, 2),))
    assert names(program) == ["input", "target"]
    assert rebuild(program.target_spec, program.target_leaves, ["t"]) == ("t",)


def test_trees_come_back() -> None:
    tree = {"a": [torch.ones(1), None], "b": (3, torch.zeros(2))}
    spec, leaves, tensors = flatten(tree, "input")
    assert [path for path, _ in tensors] == [("a", "0"), ("b", "1")]
    assert rebuild(spec, leaves, [t for _, t in tensors]) == tree


def test_python_branches_on_constants() -> None:
    def forward(model: nn.Module, x: Tensor) -> Any:
        sizes = torch.tensor([1, 0, 2, 1])
        if sizes.sum() > 3 and int(sizes[0]) == 1 and sizes.numpy()[2] == 2:
            x = F.pad(x, sizes.tolist()) * float(sizes[2])
        for i in torch.nonzero(sizes).flatten():
            x = x + i
        window = torch.zeros(4, 4)
        window[1:, 2] = 1.0
        window[window > 0] = 0.5
        return x, window, x[:, :, sizes], x * model.plain + model.table["k"] + torch.from_numpy(np.arange(5.0))

    model = Model(forward)
    model.plain, model.table = randn(5), {"k": randn(5)}
    program = check(model, randn(1, 2, 4, 4))
    assert not any(str(n.target).startswith("aten.item") for n in program.graph.nodes)


def test_large_constants_stay_ops_and_take_no_memory() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        grid = torch.stack(torch.meshgrid(*[torch.arange(300)] * 3, indexing="ij"))  # 650 MB, were it real
        return x + torch.zeros(1, 1, 300, 300, 300)[..., :4, 0, 0].to(x) + grid[0, :4, 0, 0]

    program = capture(Model(forward), (randn(1, 2, 4),), {}, Mesh())
    assert "aten.zeros.default" in {str(n.target) for n in program.graph.nodes}
    assert sum(c.numel() for c in program.constants.values()) < 1000


def test_old_style_tensors() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        zeros = torch.Tensor(2, 1, 4).zero_().double()
        return torch.autograd.Variable(torch.cat([x.data, zeros], 1)) * model.c(x)

    program = check(Model(forward, c=nn.Conv1d(2, 3, 1)), randn(2, 2, 4))
    assert "aten.detach.default" in {str(n.target) for n in program.graph.nodes}


def test_assigned_attributes_are_noted_and_restored() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        model.last, model.calls = x * 2, model.calls + 1
        model.history.append(x)
        return x + 1

    model = Model(forward)
    model.last, model.calls, model.history = None, 0, []
    program = check(model, randn(3))
    assert (model.last, model.calls, model.history) == (None, 0, [])
    assert [note.split(";")[0] for note in program.notes] == [
        "the forward assigns the attribute last",
        "the forward assigns the attribute calls",
    ]


def test_forward_hooks_run() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    assert "mul" in {label.rpartition(".")[2] for label in ops(check(model, randn(3, 2)))}
