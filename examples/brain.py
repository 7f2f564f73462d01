"""Train a 3D U-Net on a whole brain that no rank holds: `make demo`, about two minutes on two cores.

The volume is the MNI152 T1 template (99 x 117 x 95 voxels at 2 mm, 197 x 233 x 189 at 1 mm) in one piece: no patches, no padding
by hand, odd extents. Each rank reads and keeps its slab of it. The model is plain PyTorch (`brain_train.py`); halofx
compiles it with its loss for the mesh. The first steps are compared with those of one device, then training goes on, and out
come ``brain.png``, ``brain.json`` and the whole listing, ``brain.txt``::

    torchrun --nproc-per-node 2 examples/brain.py
    torchrun --nproc-per-node 4 examples/brain.py --mesh depth=2,height=2
    torchrun --nproc-per-node 2 examples/brain.py --resolution 1 --steps 2

There is one volume, and the network is trained and tested on it. So this shows the machinery, not how well such a network would
label the brain of somebody else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import brain_report as report
import brain_train
import torch
from brain_data import Volume, prepare
from brain_train import (
    CLASSES,
    Record,
    Settings,
    Step,
    Trainer,
    criterion,
    first_steps,
    make_model,
    measured,
    peak_memory,
)
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import halofx
from halofx.cli import parse_mesh

Differences = dict[str, dict[str, float]]
"""By column of the table, and by what is compared."""

PATIENCE = 3600.0
"""Seconds that ranks may wait for each other: rank 0 waits for one device, and machines have other work."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    settings: Settings
    mesh: halofx.Mesh
    resolution: int
    check: bool
    out: Path


@dataclass(frozen=True)
class Job:
    """One run: what is wanted, and this rank's place in it."""

    options: Options
    comm: Any
    console: Console
    volume: Volume

    @property
    def settings(self) -> Settings:
        """What is trained, and how."""
        return self.options.settings

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape of the input."""
        return (1, 1, *self.volume.shape)

    @property
    def checked(self) -> int:
        """How many steps are compared with one device."""
        return min(2, self.settings.steps)

    @property
    def threads(self) -> int:
        """How many threads one device gets: as many as there are ranks, where there are cores for them."""
        return max(2, min(self.options.mesh.size, os.cpu_count() or 1))


def share(comm: Any, value: Any) -> list[Any]:
    """Every rank's value, in rank order; also where ranks wait for each other."""
    return [json.loads(text) for text in comm.all_gather_bytes(json.dumps(value).encode(), "the demo's numbers")]


# the run


def run(job: Job) -> None:
    """Compile, compare with one device, train, predict, tell."""
    started = time.perf_counter()
    model = make_model(job.settings)
    net = compile_net(job, model)
    where = net.input_slices()[2:]
    slabs = share(job.comm, [(s.start, s.stop) for s in where])
    report.head(job.console, job.options.resolution, job.volume.shape, model, job.options.mesh, slabs)
    report.program(job.console, net, job.options.out)
    one = one_device(job) if job.options.check else None

    trainer = Trainer(model, job.settings, lambda: net(x, labels))
    before = peak_memory()
    x, labels = job.volume.t1(where), job.volume.labels(where)  # this rank's slab, all that it keeps
    record, peak = measured(trainer, job.checked)
    differences = compare(job, one, record) if one else {}
    report.check(job.console, differences, job.checked, job.comm.size)
    train(job, trainer)
    memory = {"ranks": share(job.comm, [before, peak]), "one device": one and [one["before"], one["peak"]]}
    seconds = {"ranks": pace(job, trainer), "one device": one and one["seconds"]}
    report.cost(job.console, memory, seconds, job.threads, net.summary().activations)
    guess = predict(job, model, x)
    if guess is not None:
        facts = {"largest relative differences": differences, "memory": memory, "seconds a step": seconds}
        finish(job, trainer, guess, slabs, facts | {"seconds": time.perf_counter() - started})


def compile_net(
    job: Job, model: nn.Module, dtype: torch.dtype = torch.float32, shape: Sequence[int] = ()
) -> halofx.Net:
    """The model and its loss as one program of all ranks."""
    shape = shape or job.shape
    x = torch.empty(*shape, dtype=dtype, device="meta")
    target = torch.empty(1, *shape[2:], dtype=torch.int64, device="meta")
    return halofx.compile(model, job.options.mesh, inputs=[x], loss=criterion, targets=[target])


def train(job: Job, trainer: Trainer) -> None:
    """The steps that are left: with a progress bar, or a line now and then where there is no terminal."""
    done, total = len(trainer.history), job.settings.steps
    if done == total:
        return
    report.title(job.console, "Training")
    if not job.console.is_terminal:
        for step in range(done + 1, total + 1):
            told = describe(trainer.step())
            if step % 5 == 0 or step in (done + 1, total):
                job.console.print(f"step {step:>3} of {total}   {told}")
        return
    columns = (TextColumn("step {task.completed:>3} of {task.total}"), BarColumn(30), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=job.console, disable=job.comm.rank > 0) as bar:
        task = bar.add_task("", total=total, completed=done)
        for _ in range(done, total):
            bar.update(task, advance=1, description=describe(trainer.step()))


def describe(step: Step) -> str:
    """A step in one line."""
    _, gray, white = step.dice
    return f"loss {step.loss:.4f}   Dice gray {gray:.3f}  white {white:.3f}   {step.seconds:.2f} s a step"


def pace(job: Job, trainer: Trainer) -> float:
    """Median seconds of the steps after the first ones, if there are any."""
    return statistics.median(step.seconds for step in trainer.history[job.checked :] or trainer.history)


def predict(job: Job, model: nn.Module, x: Tensor) -> Tensor | None:
    """The labels of the whole volume, on rank 0: the same parameters in eval mode are another program."""
    net = halofx.compile(model.eval(), job.options.mesh, inputs=[job.shape])
    with torch.no_grad():
        labels = net(x).argmax(1)
    whole: Tensor | None = net.gather(labels, dst=0) if job.comm.size > 1 else labels
    return None if whole is None else whole[0]


def finish(job: Job, trainer: Trainer, guess: Tensor, slabs: Any, facts: dict[str, Any]) -> None:
    """Score the prediction; write the numbers and the picture."""
    truth = job.volume.labels()[0]
    scores = brain_train.dice(brain_train.one_hot(guess[None]), brain_train.one_hot(truth[None])).tolist()
    facts["dice"] = dict(zip(CLASSES, scores, strict=True))
    facts |= {"resolution": job.options.resolution, "shape": job.volume.shape, "mesh": str(job.options.mesh)}
    facts |= {"settings": asdict(job.settings), "history": [asdict(step) for step in trainer.history]}
    (job.options.out / "brain.json").write_text(json.dumps(facts, indent=1) + "\n")
    report.picture(job.options.out / "brain.png", job.volume.t1()[0, 0], truth, guess, slabs, facts)
    report.end(job.console, facts, job.options.out)


# the check


def one_device(job: Job) -> dict[str, Any] | None:
    """The first steps of the unmodified model, in a process of its own; None, and a line, when that fails."""
    path, error = job.options.out / "one-device.pt", ""
    if job.comm.rank == 0:
        with job.console.status(f"{job.checked} steps on one device, in a process of its own"):
            error = run_alone(job, path)
        if error:
            job.console.print(f"one device did not finish ({error}), so there is nothing to compare with\n")
    if share(job.comm, error)[0]:
        return None
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def run_alone(job: Job, path: Path) -> str:
    """Run `brain_train.py`; the error in one line, or nothing."""
    settings = json.dumps(asdict(job.settings))
    arguments = [settings, str(job.volume.folder), str(job.checked), str(job.threads), str(path)]
    done = subprocess.run([sys.executable, brain_train.__file__, *arguments], capture_output=True, text=True)
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}, as happens when memory runs out"
    return (done.stderr.strip() or "no reason given").splitlines()[-1] if done.returncode else ""


def compare(job: Job, one: Mapping[str, Any], many: Record) -> Differences:
    """The largest relative differences of the ranks from one device, of one device from itself, and those in float64."""
    return {
        "float32": worst(job, one["record"], many),
        "float32, one device": worst(job, one["record"], one["again"]),
        "float64": worst(job, *small_steps(job)),
    }


def small_steps(job: Job) -> tuple[Record, Record]:
    """The first steps in float64 on every n-th voxel: by one device, which every rank is, and by all ranks."""
    thin = (slice(None, None, max(1, round(8 / job.options.resolution))),) * 3
    x, labels = job.volume.t1(thin, torch.float64), job.volume.labels(thin)
    model, split = make_model(job.settings).double(), make_model(job.settings).double()
    one = first_steps(Trainer(model, job.settings, lambda: criterion(model(x), labels)), job.checked)
    net = compile_net(job, split, torch.float64, x.shape)
    mine, target = net.shard(x), net.shard_target(labels)
    return one, first_steps(Trainer(split, job.settings, lambda: net(mine, target)), job.checked)


def worst(job: Job, one: Record, many: Record) -> dict[str, float]:
    """Relative differences by what is compared, the largest of all ranks."""
    kinds = ("loss", "gradient/1", f"gradient/{job.checked}", "state")
    mine = {kind: brain_train.difference(one, many, f"{kind}/") for kind in kinds}
    everyone = share(job.comm, mine)
    return {kind: max(found[kind] for found in everyone) for kind in mine}


# the command line


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The options; ends the program with a line when they are wrong."""
    default = Settings()
    parser = argparse.ArgumentParser(prog="brain.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mesh", default="depth=2", help="axes and sizes, as depth=2,height=2; one rank: depth=1")
    parser.add_argument("--resolution", type=positive, default=2, help="mm a voxel: 1 is the full volume (default: 2)")
    parser.add_argument("--steps", type=positive, default=default.steps, help=f"of Adam (default: {default.steps})")
    parser.add_argument(
        "--width",
        type=positive,
        default=default.width,
        help=f"channels of the first convolution (default: {default.width})",
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of what is written (default: out)")
    parser.add_argument("--no-check", dest="check", action="store_false", help="do not compare with one device")
    with contextlib.ExitStack() as stack:
        if os.environ.get("RANK", "0") != "0":  # rank 0 says it all
            quiet = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(quiet))
            stack.enter_context(contextlib.redirect_stderr(quiet))
        given = parser.parse_args(arguments)
        try:
            mesh = parse_mesh(given.mesh)
        except (halofx.MeshError, ValueError) as error:
            parser.error(str(error))
    return Options(Settings(given.width, steps=given.steps), mesh, given.resolution, given.check, given.out)


def positive(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdigit() or text == "0":
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def set_up(options: Options, comm: Any) -> Volume:
    """Check the number of ranks and have the volume written, once a machine. Raises RuntimeError with one line."""
    mesh, size = options.mesh, options.mesh.size
    if size != comm.size:
        asked = ",".join(f"{axis}={mesh[axis]}" for axis in mesh.axes)
        raise RuntimeError(
            f"mesh {asked} is of {size} ranks, and here are {comm.size}; start it with: "
            f"torchrun --nproc-per-node {size} examples/brain.py --mesh {asked}"
        )
    folder, error = options.out / f"mni152-{options.resolution}mm", ""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            prepare(options.resolution, folder)
        except RuntimeError as found:
            error = str(found)
    for told in share(comm, error):
        if told:
            raise RuntimeError(told)
    return Volume(folder)


def main() -> int:
    """Run the demo; the exit code."""
    options = parse()
    comm = halofx.init(timeout=PATIENCE)
    if comm.rank:
        warnings.simplefilter("ignore")  # rank 0 shows them
    console = report.console(comm.rank)
    try:
        volume = set_up(options, comm)
        run(Job(options, comm, console, volume))
    except (RuntimeError, halofx.HalofxError) as error:
        if comm.rank == 0:
            print(f"brain.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
