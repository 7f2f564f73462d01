"""The volume of `brain.py`: the MNI152 T1 template with its tissue maps, which ship inside nilearn's wheel.

A process of its own writes two arrays of one volume; every rank then reads its slab of them, and no more::

    python brain_data.py 2 out/mni152-2mm
        t1.npy      float32 [99, 117, 95]   axes: left to right, back to front, bottom to top
        labels.npy  uint8   [99, 117, 95]   0 background, 1 gray matter, 2 white matter

Intensities are standardized over the brain and clipped at 2.5 standard deviations, so that the background is near the
tissues instead of far below them. A label is the most probable of (neither, gray, white): the maps are probabilities, and
no threshold is needed.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

CLIP = 2.5
"""Standard deviations."""


@dataclass(frozen=True)
class Volume:
    """The two arrays in a folder, read where they are asked for: files are memory-mapped."""

    folder: Path

    @property
    def shape(self) -> tuple[int, int, int]:
        """Depth, height and width of the whole volume."""
        x, y, z = np.load(self.folder / "t1.npy", mmap_mode="r").shape
        return x, y, z

    def t1(self, where: tuple[slice, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
        """The intensities of a slab (of depth, height, width) as a sample [1, 1, D, H, W]."""
        return self._read("t1.npy", where).to(dtype)[None, None]

    def labels(self, where: tuple[slice, ...] = ()) -> Tensor:
        """The labels of a slab as int64 [1, D, H, W]."""
        return self._read("labels.npy", where).long()[None]

    def _read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        return torch.from_numpy(np.load(self.folder / name, mmap_mode="r")[where].copy())


def prepare(resolution: int, folder: Path) -> Volume:
    """Write the volume at a resolution [mm], in a process of its own: resampling needs memory that training does not.

    Raises RuntimeError with one line when nilearn is missing or fails.
    """
    if find_spec("nilearn") is None:
        raise RuntimeError("the template comes with nilearn, which is not installed: pip install 'halofx[demo]'")
    command = [sys.executable, __file__, str(resolution), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nilearn could not load the template: {(done.stderr.strip() or '?').splitlines()[-1]}")
    return Volume(folder)


def write(resolution: int, folder: Path) -> None:
    """Load, standardize, label and save the template."""
    warnings.simplefilter("ignore")
    from nilearn import datasets

    def load(image: Any) -> Any:
        return image(resolution=resolution).get_fdata(dtype=np.float32)

    t1, gray, white = map(
        load,
        (datasets.load_mni152_template, datasets.load_mni152_gm_template, datasets.load_mni152_wm_template),
    )
    folder.mkdir(parents=True, exist_ok=True)
    brain = t1[t1 > t1.mean()]
    np.save(folder / "t1.npy", np.clip((t1 - brain.mean()) / brain.std(), -CLIP, CLIP).astype(np.float32))
    np.save(folder / "labels.npy", np.stack([1 - gray - white, gray, white]).argmax(0).astype(np.uint8))


if __name__ == "__main__":
    write(int(sys.argv[1]), Path(sys.argv[2]))
