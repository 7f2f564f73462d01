"""What `brain.py` tells: on the terminal, by rank 0 alone, and as a picture."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import brain_picture
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

import halofx

Slabs = Sequence[Sequence[Sequence[int]]]
"""For every rank and dim (depth, height, width) the first index and the one after the last."""

HEAD, TAIL = 12, 9
"""Lines of the listing that are shown."""


def console(rank: int) -> Console:
    """The terminal of rank 0; the other ranks are silent. Where there is no terminal, lines are longer."""
    width = None if sys.stdout.isatty() else 120
    return Console(quiet=rank > 0, width=width, highlight=False)


def title(out: Console, text: str) -> None:
    """Begin a part."""
    out.print()
    out.rule(f"[bold]{text}[/bold]", align="left", style="dim")


def head(
    out: Console, resolution: int, shape: Sequence[int], model: nn.Module, mesh: halofx.Mesh, slabs: Slabs
) -> None:
    """What is trained on what, and who holds which part."""
    size = sum(p.numel() for p in model.parameters())
    title(out, "A 3D U-Net on a whole brain, split over ranks by halofx")
    table = grid()
    table.add_row("volume", f"MNI152 T1 template at {resolution} mm, {times(shape)} voxels in one piece")
    table.add_row("labels", "background, gray matter, white matter: the most probable in the template's tissue maps")
    table.add_row("model", f"halofx.zoo.{type(model).__name__}, {size:,} parameters, which knows of no mesh")
    table.add_row("mesh", f"{mesh}: {ranks(len(slabs))}")
    for rank, slab in enumerate(slabs[:4]):
        held = ", ".join(f"{a}:{b}" for a, b in slab)
        table.add_row("", f"rank {rank} holds [{held}]")
    if len(slabs) > 4:
        table.add_row("", f"... {len(slabs) - 4} more ranks")
    out.print(table)


def program(out: Console, net: halofx.Net, folder: Path) -> None:
    """The listing, shortened, and what it sends."""
    title(out, "The program of all ranks: whole shapes, @axis where a dim is split")
    listing = net.listing()
    (folder / "brain.txt").write_text(f"{listing}\n\n{net.summary()}\n")
    lines = listing.splitlines()
    if len(lines) > HEAD + TAIL + 1:
        hidden = f"... {len(lines) - HEAD - TAIL} more lines, all of them in {folder / 'brain.txt'}"
        lines = [*lines[:HEAD], hidden, *lines[-TAIL:]]
    for line in lines:
        verbatim(out, line, "dim" if line.startswith("...") else "")
    out.print()
    for line in str(net.summary()).splitlines():
        verbatim(out, line)


def check(out: Console, differences: Mapping[str, Mapping[str, float]], steps: int, size: int) -> None:
    """The differences from one device, if there are any to show."""
    if not differences:
        return
    title(out, f"The first {steps} steps beside those of the unmodified model on one device")
    table = Table("largest relative difference", box=None, pad_edge=False, header_style="dim", padding=(0, 2))
    columns = {
        "float32": f"float32\n{ranks(size)}\nto one device",
        "float32, one device": "float32\none device, 1 thread\nto more threads",
        "float64": f"float64, smaller volume\n{ranks(size)}\nto one device",
    }
    for name in columns.values():
        table.add_column(name, justify="right")
    names = {
        "loss": "loss of every step",
        "gradient/1": "gradients of step 1",
        f"gradient/{steps}": f"gradients of step {steps}",
        "state": f"parameters and running statistics after step {steps}",
    }
    for kind, name in names.items():
        table.add_row(name, *(f"{differences[column][kind]:.0e}" for column in columns))
    out.print(table)
    out.print(
        "[dim]Sums of float32 depend on their order, on one device too: the second column is one device beside itself. In "
        "float64 the order hardly shows, and nothing else is left: the program is the same function.[/dim]"
    )


def cost(out: Console, memory: Mapping[str, Any], seconds: Mapping[str, Any], threads: int, forecast: int) -> None:
    """Memory and time of one device and of each rank."""
    title(out, "Memory and time")
    rows = [(f"rank {rank}", found, seconds["ranks"]) for rank, found in enumerate(memory["ranks"])]
    if memory["one device"]:
        rows.insert(0, ("one device", memory["one device"], seconds["one device"]))
    table = Table("peak memory of a process", box=None, pad_edge=False, header_style="dim")
    for name in ("Python and PyTorch", "training", "in all", "time a step"):
        table.add_column(name, justify="right")
    for name, (before, peak), pace in rows:
        table.add_row(name, *(mebibytes(n) for n in (before, peak - before, peak)), f"{pace:.2f} s")
    out.print(table)
    alone = f" One device had {threads} threads, each rank one." if len(rows) > 1 and rows[0][0] == "one device" else ""
    out.print(
        f"[dim]Resident memory before the first step, what training adds to it, and the sum. For what is kept from forward to "
        f"backward halofx forecasts {mebibytes(forecast)} a rank.{alone}[/dim]"
    )


def end(out: Console, facts: Mapping[str, Any], folder: Path) -> None:
    """The result, and where it is."""
    title(out, "Result")
    gray, white = facts["dice"]["gray matter"], facts["dice"]["white matter"]
    table = grid()
    table.add_row("Dice", f"[bold]{gray:.3f}[/bold] gray matter, [bold]{white:.3f}[/bold] white matter")
    table.add_row("", "of the volume trained on: this shows the machinery, not how well it labels another brain")
    for name, what in (("brain.png", "the picture"), ("brain.json", "the numbers"), ("brain.txt", "the whole listing")):
        table.add_row(what, str(folder / name))
    table.add_row("time", f"{facts['seconds']:.0f} s")
    out.print(table)


def picture(path: Path, t1: Tensor, truth: Tensor, guess: Tensor, slabs: Slabs, facts: Mapping[str, Any]) -> None:
    """Draw the result."""
    gray, white = facts["dice"]["gray matter"], facts["dice"]["white matter"]
    size, steps = len(slabs), facts["settings"]["steps"]
    first = f"One brain on {ranks(size)} (mesh {facts['mesh']}): Dice {gray:.3f} gray, {white:.3f} white matter"
    second = (
        f"MNI152 T1 at {facts['resolution']} mm, {times(facts['shape'])} voxels in one piece; 3D U-Net after {steps} steps "
        "on this one volume, so this shows the machinery, not generalization"
    )
    cuts = [sorted({slab[dim][0] for slab in slabs} - {0}) for dim in range(3)]
    brain_picture.draw(path, t1.numpy(), truth.numpy(), guess.numpy(), cuts, first, second)


def verbatim(out: Console, line: str, style: str = "") -> None:
    """One line, cut where the terminal ends."""
    out.print(Text(line, style), no_wrap=True, overflow="ellipsis", crop=True)


def grid() -> Table:
    """Names and values without lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    return table


def times(shape: Sequence[int]) -> str:
    """``99 x 117 x 95``."""
    return " x ".join(map(str, shape))


def ranks(count: int) -> str:
    """``2 ranks``."""
    return "1 rank" if count == 1 else f"{count} ranks"


def mebibytes(size: int) -> str:
    """``1,234 MiB``."""
    return f"{size / 2**20:,.0f} MiB"
