"""Capture leaves the model and the process as they were, costs little, and may be called from many threads."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from halofx import passes
from halofx.compiler.capture import capture
from halofx.compiler.mesh import Mesh
from halofx.compiler.ops import resize
from tests.test_capture_replay import Model, UNet, assert_same, block, check_graph, randn, replay, state_of


def test_the_model_is_untouched() -> None:
    model = nn.Sequential(UNet(), nn.LSTM(4, 4), Model(lambda m, x: x[0].sum((2, 3))))
    model[0].head.weight.requires_grad_(False)
    model[0].enc.eval()
    calls: list[int] = []
    model[0].register_forward_pre_hook(lambda *_: calls.append(1))
    tensors = {k: (id(v), v.detach().clone(), v.requires_grad) for k, v in state_of(model, None).items()}
    attributes = {name: dict(vars(m)) for name, m in model.named_modules()}
    flat, torch_random = list(model[1]._flat_weights), torch.get_rng_state()

    broken = Model(lambda m, x: model(x).no_such_attribute, inner=model)
    with pytest.raises(Exception, match="no_such_attribute"):
        capture(broken, (torch.ones(1, 1, 4, 4, 4),), {}, Mesh())

    assert {name: dict(vars(m)) for name, m in model.named_modules()} == attributes
    assert torch.equal(torch.get_rng_state(), torch_random) and model[1]._flat_weights == flat
    for key, value in state_of(model, None).items():
        identity, old, requires_grad = tensors[key]
        assert id(value) == identity and value.requires_grad == requires_grad and torch.equal(value, old)
    assert calls == [1] and torch.is_grad_enabled() and torch.backends.mha.get_fastpath_enabled()


def test_a_frozen_configuration_is_left_alone() -> None:
    class Frozen(dict):  # as the configurations of diffusers
        def _refuse(self, *_: object, **__: object) -> None:
            raise TypeError("frozen")

        clear = update = __setitem__ = _refuse  # type: ignore[assignment]

    model = UNet()
    model.config = Frozen(width=4)
    capture(model, (torch.ones(1, 1, 4, 4, 4),), {}, Mesh())
    assert model.config == {"width": 4}


def test_the_grad_mode_outside_does_not_matter() -> None:
    model, x = block(1, 2).double(), randn(1, 1, 4, 4, 4)
    texts = [str(capture(model, (x,), {}, Mesh()).graph)]
    with torch.no_grad():
        texts.append(str(capture(model, (x,), {}, Mesh()).graph))
    with torch.inference_mode():
        texts.append(str(capture(model, (x,), {}, Mesh()).graph))
    assert len(set(texts)) == 1 and "detach" not in texts[0]


def test_inputs_may_be_real_meta_or_fake() -> None:
    model = UNet()
    with FakeTensorMode():
        fake = torch.empty(1, 1, 4, 4, 4)
    inputs = [torch.ones(1, 1, 4, 4, 4), torch.ones(1, 1, 4, 4, 4, device="meta"), fake]
    programs = [capture(model, (x,), {}, Mesh()) for x in inputs]
    assert len({str(p.graph) for p in programs}) == 1
    vals = [n.meta["val"] for n in programs[1].graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert all(isinstance(v, FakeTensor) and v.device.type == "cpu" for v in vals)
    assert len({id(v.fake_mode) for v in vals}) == 1


class Wide(nn.Module):
    """Three levels, as large as one likes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(block(c, w) for c, w in [(1, width), (width, 2 * width), (2 * width, 4 * width)])
        self.up = nn.ModuleList(nn.ConvTranspose3d(w, w // 2, 2, 2) for w in (4 * width, 2 * width))
        self.join = nn.ModuleList(block(w, w // 2) for w in (4 * width, 2 * width))
        self.pool = nn.MaxPool3d(2)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down[:-1]:
            skips.append(level(x))
            x = self.pool(skips[-1])
        x = self.down[-1](x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), skips.pop()], 1))
        return x


def test_a_volume_of_512_on_the_meta_device_is_fast() -> None:
    with torch.device("meta"):
        model, x = Wide(32), torch.empty(1, 1, 512, 512, 512)
    capture(model, (x,), {}, Mesh())  # imports
    start = time.thread_time()
    program = capture(model, (x,), {}, Mesh())
    assert time.thread_time() - start < 2
    assert program.outputs()[0].meta["val"].shape == (1, 32, 512, 512, 512)


def test_a_long_chain_is_no_recursion() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y, mask = x * 1, torch.zeros(4)
        for i in range(400):
            y += 1
            mask[i % 4] += 1
        return y + mask

    start = time.thread_time()
    check_graph(capture(Model(forward), (randn(4),), {}, Mesh()))
    assert time.thread_time() - start < 15


def test_threads_capture_at_once() -> None:
    models = [UNet() for _ in range(8)]
    texts: list[str] = [""] * 8

    def work(rank: int) -> None:
        program = capture(models[rank], (torch.ones(1, 1, 4, 4, 4),), {}, Mesh())
        texts[rank] = "\n".join(
            f"{n.format_node()} {n.meta.get('label')} {n.meta.get('source')}" for n in program.graph.nodes
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(texts)) == 1 and "enc.0" in texts[0]


def test_passes_of_one_thread_leave_the_capture_of_another_alone() -> None:
    """Torch keeps the stack of pre-dispatch modes once a process: who empties it, if only for a moment, stops a capture."""
    x = torch.ones(1, 1, 4, 4, 4)
    resizes = [nn.Upsample(scale_factor=3, mode=mode) for mode in ("nearest", "nearest-exact", "trilinear")]
    other = capture(nn.Sequential(nn.Conv3d(1, 1, 3), nn.BatchNorm3d(1), *resizes), (x,), {}, Mesh(depth=2))
    resize.nearest.cache_clear()
    popped: list[str] = []

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch._ops, "unset_mode_pre_dispatch", lambda *_, **__: popped.append("popped"))
            thread = threading.Thread(target=lambda: passes.run(other))
            thread.start()
            thread.join()
        return F.interpolate(x, scale_factor=2)

    program = capture(Model(forward), (x,), {}, Mesh())
    assert [str(n.target) for n in program.graph.nodes if n.op == "call_function"] == ["aten.upsample_nearest3d.vec"]
    assert not popped and "home" in str(other.outputs()[0].meta)


def test_autocast_around_the_capture_is_kept() -> None:
    model, x = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1)), torch.randn(2, 2, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        program = capture(model, (x,), {}, Mesh())
        got, _ = replay(program, state_of(model, None), [x])
        assert_same(got.detach(), model(x).detach())
    assert program.outputs()[0].meta["val"].dtype == torch.bfloat16
    assert program.options["autocast"] == {"cpu": torch.bfloat16}


def test_compiled_parts_run_as_they_are_written() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), torch.compile(nn.Conv2d(2, 2, 1)))
    model[0].compile()
    program = capture(model, (torch.ones(1, 2, 4, 4),), {}, Mesh())
    assert [str(n.target) for n in program.graph.nodes if n.op == "call_function"] == ["aten.conv2d.default"] * 2
