"""Check the public networks of `zoo` on meshes, each in a process of its own; one JSON line a case.

    python -m tests.public.run results.jsonl [--only monai/UNet ...] [--meshes depth=2 depth=3] [--modes train eval]

Cases that the file already holds are skipped, so that a run may be taken up again.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import halofx
from halofx.arguments import parse_mesh
from halofx.compiler.emit import label_of
from tests.public import zoo

MESHES = ("depth=2", "height=2,width=2", "data=2,depth=2", "depth=3")
MODES = ("train", "eval")
REFUSED = {
    "monai/Generator": "splits no dim of the inputs",  # a latent vector
    "monai/RetinaNet3D-FPN": "torch.isnan(cls_logits).any()",
    "diffusers/AutoencoderKLTemporalDecoder": "splits no dim of the inputs",  # images: there is no depth
    "monai/VarAutoEncoder": "modified by an inplace operation",  # on one device: in eval it writes to what backward needs
    "diffusers/AutoencoderKLHunyuanVideo15": "shape '[2, 2, 2, 2, 32]' is invalid",  # two samples fail on one device too
}
"""Networks that cannot be captured exactly, and words of the refusal."""

LIMIT = 420
"""Seconds after which a case counts as hanging."""


def inputs_of(entry: zoo.Entry, samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a network, with the batch repeated ``samples`` times."""

    def repeat(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == 1:
            return torch.cat([value, *(torch.roll(value, i, -1) for i in range(1, samples))])
        return [repeat(v) for v in value] if isinstance(value, list) else value

    args, kwargs = entry.inputs()
    return tuple(repeat(a) for a in args), {k: repeat(v) for k, v in kwargs.items()}


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """The order of results: networks as in the zoo, then meshes and modes."""
    return list(zoo.ZOO).index(row["name"]), MESHES.index(row["mesh"]), MODES.index(row["mode"])


def double(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return [double(v) for v in value] if isinstance(value, list) else value


def case(name: str, mesh_text: str, mode: str) -> dict[str, Any]:
    """Check one network on one mesh in one mode."""
    entry, mesh, found = zoo.ZOO[name], parse_mesh(mesh_text), dict[str, Any](name=name, mesh=mesh_text, mode=mode)
    try:
        torch.manual_seed(0)
        model = entry.build().train(mode == "train")
        args, kwargs = inputs_of(entry, mesh["data"] if "data" in mesh.axes else 1)
    except Exception as error:
        return found | {"status": "not built", "verdict": f"{type(error).__name__}: {error}"[:300]}
    for dtype in (torch.float64, torch.float32):
        if dtype is torch.float64:
            checked = halofx.check(
                model.double(), [double(a) for a in args], mesh, kwargs={k: double(v) for k, v in kwargs.items()}
            )
        else:
            checked = halofx.check(model.float(), args, mesh, kwargs=kwargs)
        if checked.status != "refused":
            break
    found |= {
        "status": checked.status,
        "verdict": checked.verdict[:600],
        "details": checked.details,
        "error": checked.error,
    }
    found |= {"dtype": str(dtype)[6:], "seconds": checked.seconds}
    if checked.program is not None and checked.summary is not None:
        nodes = list(checked.program.graph.nodes)
        sent = sum(t.bytes for t in checked.summary.forward), sum(t.bytes for t in checked.summary.backward)
        found |= {
            "ops": checked.coverage.ops, "share": checked.coverage.share, "bytes": checked.coverage.bytes,
            "moves": checked.coverage.movements, "sent": sent, "kept": checked.summary.activations, "alone": checked.alone,
            "unruled": {k: len(v) for k, v in checked.coverage.unruled.items()}, "nodes": len(nodes),
            "whole": [(label_of(w.node), w.bytes, w.reason) for w in checked.coverage.whole][:12],
            "notes": checked.program.notes[:6],
        }  # fmt: skip
    return found


def _work(pipe: Connection, name: str, mesh: str, mode: str) -> None:
    os.nice(5)
    try:
        pipe.send(case(name, mesh, mode))
    except BaseException:
        trace = traceback.format_exc().splitlines()
        pipe.send(
            {
                "name": name,
                "mesh": mesh,
                "mode": mode,
                "status": "crash",
                "verdict": trace[-1][:400],
                "details": trace[-12:],
            }
        )


def apart(name: str, mesh: str, mode: str, limit: float = LIMIT) -> dict[str, Any]:
    """`case` in a process of its own, so that a hang or too much memory ends it alone."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_work, args=(theirs, name, mesh, mode))
    start = time.perf_counter()
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = (
            ours.recv() if ours.poll(limit) else {"status": "hang", "verdict": f"no end after {limit} s"}
        )
    except EOFError:
        found = {"status": "crash", "verdict": "the process died"}
    process.kill()
    process.join()
    found = {k: v for k, v in found.items() if k not in ("seconds", "notes", "nodes")}
    return {"name": name, "mesh": mesh, "mode": mode} | found | {"wall": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="*", help="names, or beginnings of names")
    parser.add_argument("--meshes", nargs="*", default=MESHES)
    parser.add_argument("--modes", nargs="*", default=MODES)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    zoo.prepare()
    names = [n for n in zoo.ZOO if not chosen.only or any(n.startswith(o) for o in chosen.only)]
    done = set()
    if chosen.file.exists():
        rows = map(json.loads, chosen.file.read_text().splitlines())
        done = {(row["name"], row["mesh"], row["mode"]) for row in rows}
    for mode in chosen.modes:
        for mesh in chosen.meshes:
            for name in names:
                if (name, mesh, mode) in done:
                    continue
                row = apart(name, mesh, mode)
                with chosen.file.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    f"{row['status']:<9} {name:<44} {mesh:<18} {mode:<6} {row['wall']:6.1f} s  {row['verdict'][:150]}",
                    flush=True,
                )


if __name__ == "__main__":
    sys.exit(main())
