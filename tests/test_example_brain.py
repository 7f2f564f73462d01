"""The main job, `make demo`, at its smallest: two ranks, 8 mm, two steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nilearn", reason="needs the extra demo")
pytest.importorskip("matplotlib", reason="needs the extra demo")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def brain(*arguments: object, start: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *(start or []), str(ROOT / "examples" / "brain.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=360)


def test_two_ranks(tmp_path: Path) -> None:
    done = brain("--resolution", 8, "--steps", 2, "--width", 4, "--out", tmp_path, start=TORCHRUN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    check_lines(done.stdout)
    check_numbers(json.loads((tmp_path / "brain.json").read_text()))
    check_picture(tmp_path / "brain.png")
    assert (tmp_path / "brain.txt").read_text().startswith("mesh depth=2\n")


def check_lines(text: str) -> None:
    """Every part is there, once: rank 1 is silent."""
    for part in (
        "26 x 30 x 25 voxels in one piece",
        "rank 1 holds [13:26, 0:30, 0:25]",
        "mesh depth=2\n",
        "more lines, all of them in",
        "halo_exchange",
        "gradients of step 1 ",
        "one device  ",
        "rank 1  ",
        "brain.png",
    ):
        assert text.count(part) >= 1, part
    for part in ("26 x 30 x 25", "gradients of step 1 ", "brain.png", "mesh depth=2\n"):
        assert text.count(part) == 1, part


def check_numbers(found: dict[str, object]) -> None:
    """Equal to one device; the rest is there."""
    differences = found["largest relative differences"]
    assert isinstance(differences, dict)
    assert max(differences["float64"].values()) < 1e-9
    assert differences["float32"]["loss"] < 1e-5 and differences["float32"]["gradient/1"] < 1e-3
    assert found["shape"] == [26, 30, 25] and found["mesh"] == "depth=2"
    history, memory = found["history"], found["memory"]
    assert isinstance(history, list) and len(history) == 2 and history[0]["loss"] > 1
    assert isinstance(memory, dict) and all(0 < before <= peak for before, peak in memory["ranks"])


def check_picture(path: Path) -> None:
    """Not blank: many colors, and those of all three layers among them."""
    from matplotlib import image

    pixels = (image.imread(path)[..., :3] * 255).round().astype(int)
    assert pixels.shape[0] > 500 and pixels.shape[1] > 500
    colors = {tuple(color) for color in pixels.reshape(-1, 3)[::7]}
    assert len(colors) > 100


def test_errors_are_one_line(tmp_path: Path) -> None:
    alone = brain("--out", tmp_path)
    assert alone.returncode == 2 and alone.stderr.count("\n") == 1 and not alone.stdout
    assert "mesh depth=2 is of 2 ranks" in alone.stderr
    assert "torchrun --nproc-per-node 2 examples/brain.py --mesh depth=2" in alone.stderr
    wrong = brain("--mesh", "deep=2")
    assert wrong.returncode == 2 and "unknown mesh axis 'deep'" in wrong.stderr and "Traceback" not in wrong.stderr
