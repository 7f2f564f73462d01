"""Captured programs, run on one device, equal the model: outputs, gradients and buffers, bit for bit in float64.

`check` is the oracle for all capture tests: it captures a model, runs the graph's generated code on real tensors and
compares with a copy of the model run eagerly; and it checks what every captured graph promises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations as parametrizations
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from halofx.compiler.capture import capture
from halofx.compiler.mesh import Mesh
from halofx.compiler.program import Program
from halofx.compiler.trees import rebuild

LISTS_OF_VIEWS = [
    "split",
    "chunk",
    "unbind",
    "tensor_split",
    "hsplit",
    "vsplit",
    "dsplit",
    "meshgrid",
    "broadcast_tensors",
]


def randn(*shape: int) -> Tensor:
    """A random double tensor."""
    return torch.randn(*shape, dtype=torch.float64)


class Model(nn.Module):
    """A module whose forward is ``function(self, ...)``, with the given submodules, parameters and buffers."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def replay(program: Program, state: dict[str, Tensor], inputs: list[Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Run the graph on real tensors: the output tree and the new values of the buffers."""
    module = fx.GraphModule(program.constants, program.graph)
    values = [state[n.meta["state"]] for n in program.placeholders("state")]
    outputs, updates = module(*values, *inputs)
    tree = rebuild(program.out_spec, program.out_leaves, outputs)
    return tree, dict(zip(program.updates, updates, strict=True))


def state_of(model: nn.Module, loss: object) -> dict[str, Tensor]:
    """Parameters and buffers by the keys that a program uses."""
    state = dict([*model.named_buffers(), *model.named_parameters()])
    if isinstance(loss, nn.Module):
        state |= {f"loss.{k}": v for k, v in [*loss.named_buffers(), *loss.named_parameters()]}
    return state


def check(
    model: nn.Module,
    *args: Any,
    loss: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    grad: bool = True,
    exact: bool = True,
    **kwargs: Any,
) -> Program:
    """Capture a model in double precision and compare the replay with eager; returns the program."""
    model = model.double()
    loss = loss.double() if isinstance(loss, nn.Module) else loss
    before = copy.deepcopy((state_of(model, loss), torch.get_rng_state()))
    program = capture(model, args, kwargs, Mesh(), loss=loss, targets=targets)
    assert_same((state_of(model, loss), torch.get_rng_state()), before)
    check_graph(program)
    eager_model, eager_loss = copy.deepcopy((model, loss))
    (a, k, t), leaves = fresh((args, kwargs, targets), grad)
    torch.manual_seed(3)
    want = eager_model(*a, **k)
    want = eager_loss(want, *t) if eager_loss is not None else want
    _, mine = fresh((args, kwargs, targets), grad)
    torch.manual_seed(3)
    got, updates = replay(program, state_of(model, loss), mine)
    compare = assert_same if exact else torch.testing.assert_close
    compare(pytree.tree_map(detached, got), pytree.tree_map(detached, want))
    old = before[0]
    after = {k: v for k, v in state_of(eager_model, eager_loss).items() if not isinstance(v, nn.Parameter)}
    compare({k: updates.get(k, old[k]) for k in after}, {k: detached(v) for k, v in after.items()})
    assert not any(v.requires_grad for v in updates.values())
    if grad:
        parameters = {k: v for k, v in state_of(model, loss).items() if isinstance(v, nn.Parameter)}
        eager = {k: v for k, v in state_of(eager_model, eager_loss).items() if isinstance(v, nn.Parameter)}
        compare(gradients(got, mine, parameters), gradients(want, leaves, eager))
    return program


def fresh(tree: Any, grad: bool) -> tuple[Any, list[Tensor]]:
    """A copy of a tree of inputs whose float tensors require grad (through a leaf, so that they may be written to)."""
    leaves: list[Tensor] = []

    def one(x: Tensor) -> Tensor:
        leaf = x.detach().clone().requires_grad_(grad and x.is_floating_point())
        leaves.append(leaf)
        return leaf.clone() if leaf.requires_grad else leaf

    return pytree.tree_map_only(Tensor, one, tree), leaves


def gradients(output: Any, inputs: list[Tensor], parameters: dict[str, Tensor]) -> list[Tensor]:
    """Gradients of a fixed random combination of all outputs, for the inputs and every parameter; none is zero."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for y in pytree.tree_leaves(output):
        if isinstance(y, Tensor):
            weights = torch.rand(y.shape, generator=generator, dtype=torch.float64)
            total = total + (y * weights).sum() if y.requires_grad else total
    wanted = [t for t in [*inputs, *parameters.values()] if t.requires_grad]
    for t in wanted:
        t.grad = None
    if total.requires_grad:
        total.backward()
    return [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in wanted]


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def assert_same(got: Any, want: Any) -> None:
    """Equal bit for bit, in the same tree."""
    flat, spec = pytree.tree_flatten(got)
    flat_want, want_spec = pytree.tree_flatten(want)
    assert spec == want_spec
    for a, b in zip(flat, flat_want, strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        else:
            assert a == b or a is b


def check_graph(program: Program) -> None:
    """What the docstring of `Program` promises of every graph."""
    graph = program.graph
    graph.lint()
    labels = [n.meta["label"] for n in graph.nodes if n.op != "output"]
    assert len(set(labels)) == len(labels)
    assert {n.op for n in graph.nodes} <= {"placeholder", "get_attr", "call_function", "output"}
    order = ["state" if "state" in n.meta else "input" for n in graph.nodes if n.op == "placeholder"]
    assert order == sorted(order, reverse=True)
    for node in graph.nodes:
        assert node.name.isidentifier()
        if node.op == "get_attr":
            assert program.constants[node.target].shape == node.meta["val"].shape
        if node.op == "call_function":
            check_op(node)


def check_op(node: fx.Node) -> None:
    if not isinstance(node.target, torch._ops.OpOverload):
        assert node.target.__module__ in ("_operator", "halofx.compiler.functional")
        return
    assert not node.target._schema.is_mutable, node.target
    assert node.target._schema.name.partition("::")[2] not in LISTS_OF_VIEWS
    positional = [a for a in node.target._schema.arguments if not a.kwarg_only]
    assert len(node.args) == len(positional), node.format_node()
    with torch.no_grad(), node.meta["val"].fake_mode if isinstance(node.meta["val"], Tensor) else torch.no_grad():
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        again = node.target(*args, **kwargs)
    assert kinds(again) == kinds(node.meta["val"]), node.format_node()


def kinds(value: Any) -> list[Any]:
    return [(t.shape, t.dtype) for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


# -- networks


def block(channels: int, out: int) -> nn.Sequential:
    conv = nn.Conv3d(channels, out, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm3d(out), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Two levels with a skip connection, batch norm and in-place ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.deep, self.dec = block(1, 2), block(2, 4), block(4, 2)
        self.pool, self.up = nn.MaxPool3d(2), nn.ConvTranspose3d(4, 2, 2, stride=2)
        self.head = nn.Conv3d(2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.enc(x)
        x = self.up(self.deep(self.pool(skip)))
        return self.head(self.dec(torch.cat([x, skip], 1)))


def test_unet_in_both_modes() -> None:
    assert len(check(UNet(), randn(2, 1, 4, 4, 4)).updates) == 9
    assert check(UNet().eval(), randn(2, 1, 4, 4, 4)).updates == ()


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(2),
        nn.BatchNorm2d(2, momentum=None),
        nn.BatchNorm2d(2, momentum=0.0, affine=False),
        nn.BatchNorm2d(2, track_running_stats=False),
        nn.InstanceNorm2d(2, track_running_stats=True, affine=True),
        nn.InstanceNorm2d(2, track_running_stats=True, momentum=None),
        nn.InstanceNorm2d(2),
        nn.GroupNorm(1, 2),
        nn.LayerNorm(4),
    ],
    ids=str,
)
def test_norms(norm: nn.Module) -> None:
    x = randn(3, 2, 4, 4)
    check(norm.train(), x)
    check(norm.eval(), x)
    twice = check(nn.Sequential(norm, nn.Conv2d(2, 2, 1), norm).train(), x)
    assert not any(
        "aten.batch_norm" in str(n.target) and n.args[3] is not None and n.args[5] for n in twice.graph.nodes
    )


def test_sync_batch_norm_is_batch_norm() -> None:
    check(nn.SyncBatchNorm(2), randn(3, 2, 4, 4))


def test_dropout_draws_in_training_and_is_gone_in_eval() -> None:
    check(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Dropout3d(0.5), nn.Dropout(0.3, inplace=True)), randn(2, 2, 4, 4))
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Dropout(0.5), nn.ReLU(inplace=True)).eval()
    assert len(check(model, randn(2, 2, 4, 4)).graph.nodes) == 6


def test_shared_and_unused_parameters() -> None:
    model = Model(lambda m, x: m.b(m.a(x).relu()) + m.b(x), a=nn.Linear(3, 3), b=nn.Linear(3, 3), c=nn.Linear(3, 3))
    model.b.weight = model.a.weight
    program = check(model, randn(2, 3))
    assert [n.meta["state"] for n in program.placeholders("state")] == ["a.weight", "a.bias", "b.bias"]


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(use_reentrant: bool) -> None:
    model = Model(lambda m, x: checkpoint(m.a, m.b(x), use_reentrant=use_reentrant), a=block(2, 2), b=block(2, 2))
    check(model, randn(2, 2, 4, 4, 4))
    check(
        Model(lambda m, x: checkpoint_sequential(m.a, 2, x, use_reentrant=use_reentrant), a=block(2, 2)),
        randn(2, 2, 4, 4, 4),
    )


def test_parametrizations() -> None:
    x = randn(2, 2, 4, 4)
    assert len(check(parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)), x).updates) == 2
    check(parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)).eval(), x)
    check(parametrizations.weight_norm(nn.Conv2d(2, 3, 3)), x)
    check(parametrizations.orthogonal(nn.Linear(4, 4)), x, exact=False)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_weight_norm_leaves_the_attribute() -> None:
    model = nn.utils.weight_norm(nn.Conv2d(2, 3, 3).double())
    weight = model.weight
    check_graph(capture(model, (randn(2, 2, 4, 4),), {}, Mesh()))
    assert model.weight is weight


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_padding_modes(mode: str) -> None:
    check(nn.Conv3d(1, 2, 3, padding=1, padding_mode=mode), randn(1, 1, 4, 4, 4))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_padding_by_name() -> None:
    check(nn.Conv3d(1, 2, (3, 2, 1), padding="same"), randn(1, 1, 4, 4, 4))
    check(nn.Conv3d(1, 2, (3, 2, 1), padding="valid"), randn(1, 1, 4, 4, 4))


def test_recurrent() -> None:
    check(nn.LSTM(3, 4, 2, batch_first=True), randn(2, 5, 3))
    check(nn.GRU(3, 4, bidirectional=True).eval(), randn(5, 2, 3))
    check(nn.LSTMCell(3, 4), randn(2, 3))


def test_attention_hides_no_op() -> None:
    x = randn(2, 3, 4)
    check(nn.MultiheadAttention(4, 2, batch_first=True), x, x, x)
    check(nn.MultiheadAttention(4, 2).eval(), x, x, x, need_weights=False)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    check(layer, x)
    program = check(layer.eval(), x)
    assert "linear1" in {n.meta.get("label") for n in program.graph.nodes}
    assert torch.backends.mha.get_fastpath_enabled()


def test_einsum_and_resize() -> None:
    check(Model(lambda m, x, y: torch.einsum("nchw,nkhw->nck", x, y)), randn(2, 3, 2, 2), randn(2, 4, 2, 2))
    check(nn.Upsample(scale_factor=2, mode="trilinear"), randn(1, 2, 3, 3, 3))


def dice(prediction: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    p = prediction.softmax(1)
    one_hot = F.one_hot(target, 3).movedim(-1, 1).to(p)
    return 1 - ((2 * (p * one_hot).sum((2, 3)) + 1) / ((p + one_hot).sum((2, 3)) + 1) * weight).mean()


def test_losses() -> None:
    x, labels, image = randn(2, 2, 4, 4), torch.randint(0, 3, (2, 4, 4)), randn(2, 3, 4, 4)
    head = nn.Conv2d(2, 3, 1)
    program = check(head, x, loss=nn.CrossEntropyLoss(weight=torch.rand(3), ignore_index=1), targets=(labels,))
    assert "loss.weight" in [n.meta["state"] for n in program.placeholders("state")]
    check(head, x, loss=nn.CrossEntropyLoss(label_smoothing=0.1), targets=(labels,))
    check(head, x, loss=F.mse_loss, targets=(image,))
    check(head, x, loss=dice, targets=(labels, randn(3)))
    learned = Model(lambda m, y, t: (m.scale * (y - t)).square().mean(), scale=nn.Parameter(torch.ones(1)))
    check(head, x, loss=learned, targets=(image,))


def test_loss_that_reads_the_parameters_of_the_model() -> None:
    head = nn.Conv2d(2, 3, 1)
    program = capture(head, (torch.ones(1, 2, 3, 3),), {}, Mesh(), loss=lambda y: y.sum() + head.weight.square().sum())
    assert [n.meta["state"] for n in program.placeholders("state")] == ["weight", "bias"]
    assert not program.constants


def test_random_ops() -> None:
    def forward(model: nn.Module, x: Tensor) -> Any:
        filled = (x * 1).bernoulli_(0.3), torch.empty_like(x).uniform_(), torch.zeros_like(x).normal_(0, 0.1)
        made = torch.rand_like(x), torch.randn(4, device=x.device).to(x), torch.bernoulli(x.sigmoid())
        kept = (0.7 + torch.rand((2, 1, 1, 1), dtype=x.dtype)).floor_()  # as in drop path
        return filled, made, x.div(0.7) * kept, x[:, torch.randperm(4)], torch.zeros(4).random_(0, 3)

    check(Model(forward), randn(2, 4, 4, 4))


def test_scripted_function_and_gradient_inside() -> None:
    scripted = torch.jit.script(relu_twice)
    check(Model(lambda m, x: scripted(m.c(x)), c=nn.Conv2d(4, 5, 1)), randn(2, 4, 4, 4))

    def force(model: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model.c(x).square().sum(), x, create_graph=True)[0]

    check(Model(force, c=nn.Conv2d(4, 5, 1)), randn(2, 4, 4, 4), exact=False)


def relu_twice(x: Tensor) -> Tensor:
    return x.relu() * 2
