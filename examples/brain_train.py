"""What `brain.py` trains, in plain PyTorch: nothing here knows of meshes or ranks.

Run as a program it is the yardstick: the first steps of the training on one device, in a process of its own, so that its
memory can be measured. `brain.py` starts it; its results go to a file::

    python brain_train.py SETTINGS FOLDER THREADS one.pt
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from brain_data import Volume
from torch import Tensor, nn

from halofx import zoo

CLASSES = ("background", "gray matter", "white matter")

EPS = 1e-5
"""Of Adam, above what rounding makes of a gradient of zero: with less, Adam takes full steps along the rounding."""

Forward = Callable[[], tuple[Tensor, Tensor]]
"""Makes the loss and the Dice score of every class."""

Record = dict[str, Tensor]
"""What the first steps left: ``loss/1``, ``gradient/1/head.weight``, ..., and in the end ``state/head.weight``, ..."""


@dataclass(frozen=True)
class Settings:
    """Everything that the numbers depend on."""

    width: int = 4
    levels: int = 3
    steps: int = 28
    rate: float = 0.06
    seed: int = 0


def make_model(settings: Settings) -> nn.Module:
    """The zoo's U-Net with three classes; every rank makes the same one."""
    torch.manual_seed(settings.seed)
    model = zoo.UNet3d(in_channels=1, classes=len(CLASSES), width=settings.width, levels=settings.levels)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm3d):
            module.momentum = 0.3  # few steps: running statistics have to keep up
    return model


def criterion(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy plus soft Dice loss, and the Dice score of each class to watch.

    dice[c] = 2 sum(p[c] q[c]) / sum(p[c] + q[c]) over all voxels: p are probabilities in the loss and the most probable class in
    the score, q the truth.
    """
    truth = one_hot(labels)
    soft = dice(logits.softmax(1), truth)
    score = dice(one_hot(logits.argmax(1)), truth)
    return F.cross_entropy(logits, labels) + 1 - soft.mean(), score


def one_hot(labels: Tensor) -> Tensor:
    """[N, D, H, W] -> bool [N, classes, D, H, W]."""
    return torch.stack([labels == c for c in range(len(CLASSES))], dim=1)


def dice(p: Tensor, q: Tensor) -> Tensor:
    """The overlap of two maps [N, classes, D, H, W] by class."""
    voxels = (0, 2, 3, 4)
    return 2 * (p * q).sum(voxels) / (p.sum(voxels) + q.sum(voxels)).clamp(min=1)


@dataclass(frozen=True)
class Step:
    """What one step showed: loss and Dice scores before it, seconds that it took."""

    loss: float
    dice: list[float]
    seconds: float


class Trainer:
    """Adam with a rate that rises and falls once. Steps are few, so its moments are averages over few."""

    def __init__(self, model: nn.Module, settings: Settings, forward: Forward) -> None:
        self.model, self.forward = model, forward
        self.optimizer = torch.optim.Adam(model.parameters(), lr=settings.rate, betas=(0.8, 0.9), eps=EPS)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, settings.rate, total_steps=settings.steps + 1
        )
        self.history: list[Step] = []

    def step(self) -> Step:
        """One step of the optimizer."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss, scores = self.forward()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.history.append(Step(loss.item(), scores.tolist(), time.perf_counter() - start))
        return self.history[-1]


def first_steps(trainer: Trainer, count: int) -> Record:
    """Make ``count`` steps and keep their losses and gradients, and the state after them."""
    record: Record = {}
    for step in range(1, count + 1):
        record[f"loss/{step}"] = torch.tensor(trainer.step().loss, dtype=torch.float64)
        for name, p in trainer.model.named_parameters():
            assert p.grad is not None
            record[f"gradient/{step}/{name}"] = p.grad.clone()
    record.update({f"state/{name}": value.clone() for name, value in trainer.model.state_dict().items()})
    return record


def difference(one: Record, many: Record, prefix: str) -> float:
    """The largest relative difference, in norm, of the tensors whose names begin with ``prefix``."""
    pairs = [(one[name].double(), many[name].double()) for name in one if name.startswith(prefix)]
    return max(float((b - a).norm() / a.norm().clamp(min=1e-300)) for a, b in pairs)


def peak_memory() -> int:
    """The most memory that this process has held so far [bytes].

    On Linux not getrusage: there a new process starts with the peak of the one that started it.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def return_freed_memory(at_once: bool) -> None:
    """Have glibc give large arrays back to the system when they are freed, or keep what it can, which is faster.

    In between, as it is by default, arrays below 32 MiB, which are a rank's but not one device's, stay in a heap with holes,
    and the peak that is measured says more about the holes than about the arrays.
    """
    trim_threshold, map_threshold = -1, -3
    with suppress(OSError, AttributeError):
        glibc = ctypes.CDLL("libc.so.6")
        glibc.mallopt(map_threshold, (1 if at_once else 32) << 20)
        glibc.mallopt(trim_threshold, (1 if at_once else 1024) << 20)


def measured(trainer: Trainer, count: int) -> tuple[Record, int]:
    """The first steps: their record, and the peak memory of the process [bytes]."""
    return_freed_memory(at_once=True)
    record, peak = first_steps(trainer, count), peak_memory()
    return_freed_memory(at_once=False)
    return record, peak


def one_device(settings: Settings, folder: Path, count: int, threads: int) -> dict[str, object]:
    """The first steps of the unmodified model on one device.

    Returns their ``record``, memory ``before`` them and at its ``peak``, and the ``seconds`` of one more step. For scale the
    record ``again`` is of the same steps on one thread: no more than another order of the same sums.
    """
    torch.set_num_threads(threads)
    model = make_model(settings)
    trainer = Trainer(model, settings, lambda: criterion(model(x), labels))
    before = peak_memory()
    volume = Volume(folder)
    x, labels = volume.t1(), volume.labels()
    record, peak = measured(trainer, count)
    seconds = trainer.step().seconds
    torch.set_num_threads(1)
    other = make_model(settings)
    again = first_steps(Trainer(other, settings, lambda: criterion(other(x), labels)), count)
    return {"record": record, "again": again, "seconds": seconds, "before": before, "peak": peak}


if __name__ == "__main__":
    chosen = Settings(**json.loads(sys.argv[1]))
    torch.save(one_device(chosen, Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])), sys.argv[5])
