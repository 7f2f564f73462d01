"""The picture of `brain.py`: intensities, truth, prediction and error in three planes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

INK, PAPER = "#e8e8e8", "#101216"
GRAY, WHITE, WRONG = "#4fb3a5", "#f2c14e", "#f25f5c"


@dataclass(frozen=True)
class Plane:
    """A cut through a volume [left-right, back-front, bottom-top] at index ``at`` of dim ``dim``."""

    name: str
    dim: int
    at: int

    def cut(self, volume: Any) -> Any:
        """The cut as an image: rows from bottom to top, or from back to front."""
        return volume.take(self.at, self.dim).T

    def lines(self, cuts: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
        """Where ranks meet in this image: ``("x" or "y", position)``."""
        across, up = (d for d in range(3) if d != self.dim)
        return [("x", c) for c in cuts[across]] + [("y", c) for c in cuts[up]]


def planes_of(shape: tuple[int, ...]) -> list[Plane]:
    """One plane of each kind; the sagittal one is off the gap between the hemispheres."""
    return [
        Plane("axial", 2, round(shape[2] * 0.5)),
        Plane("coronal", 1, round(shape[1] * 0.48)),
        Plane("sagittal", 0, round(shape[0] * 0.36)),
    ]


def draw(path: Path, t1: Any, truth: Any, guess: Any, cuts: Sequence[Sequence[int]], title: str, note: str) -> None:
    """Write the picture.

    Args:
        path: a PNG file.
        t1: intensities [D, H, W].
        truth: labels [D, H, W].
        guess: predicted labels [D, H, W].
        cuts: for each dim the indices at which ranks meet.
        title: the first line.
        note: a smaller second line.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    planes = planes_of(t1.shape)
    heights = [plane.cut(t1).shape[0] for plane in planes]
    margins = {"top": 0.87, "bottom": 0.07, "left": 0.04, "right": 0.985, "hspace": 0.04, "wspace": 0.03}
    grid = {"height_ratios": heights, **margins}
    figure, axes = pyplot.subplots(3, 4, figsize=(12, 9.4), facecolor=PAPER, gridspec_kw=grid)
    columns = {"T1": None, "truth": colored(truth), "prediction": colored(guess), "error": wrong(truth, guess)}
    for row, plane in zip(axes, planes, strict=True):
        row[0].set_ylabel(f"{plane.name}, plane {plane.at}", color=INK, fontsize=11)
        for panel, layer in zip(row, columns.values(), strict=True):
            show(panel, plane, t1, layer, cuts)
    for panel, name in zip(axes[0], columns, strict=True):
        panel.set_title(name, color=INK, fontsize=13)
    figure.suptitle(title, color=INK, fontsize=15, y=0.975)
    figure.text(0.5, 0.925, note, color=INK, alpha=0.75, fontsize=10.5, ha="center")
    legend(figure, any(cuts))
    figure.savefig(path, dpi=110, facecolor=PAPER)
    pyplot.close(figure)


def show(panel: Any, plane: Plane, t1: Any, layer: Any, cuts: Sequence[Sequence[int]]) -> None:
    """One image: intensities, dimmed under a layer of color [D, H, W, 4], and dashed lines where ranks meet."""
    low, high = np.percentile(t1, (1, 99.8))
    top = high if layer is None else high + 0.8 * (high - low)
    panel.imshow(plane.cut(t1), cmap="gray", vmin=low, vmax=top, origin="lower", interpolation="bilinear")
    if layer is not None:
        image = layer.take(plane.at, plane.dim).transpose(1, 0, 2)
        panel.imshow(image, origin="lower", interpolation="nearest")
    for axis, position in plane.lines(cuts):
        line = panel.axvline if axis == "x" else panel.axhline
        line(position - 0.5, color=INK, linewidth=0.9, linestyle=(0, (4, 4)), alpha=0.7)
    panel.set(xticks=[], yticks=[], facecolor="black")
    panel.spines[:].set_visible(False)


def colored(labels: Any) -> Any:
    """Gray and white matter in their colors, the background transparent: [D, H, W, 4]."""
    from matplotlib.colors import to_rgba

    palette = np.array([(0, 0, 0, 0), to_rgba(GRAY, 0.85), to_rgba(WHITE, 0.85)], dtype=np.float32)
    return palette[labels]


def wrong(truth: Any, guess: Any) -> Any:
    """The voxels with another label in a signal color: [D, H, W, 4]."""
    from matplotlib.colors import to_rgba

    palette = np.array([(0, 0, 0, 0), to_rgba(WRONG, 1)], dtype=np.float32)
    return palette[(truth != guess).astype(np.uint8)]


def legend(figure: Any, cut: bool) -> None:
    """The meaning of colors and lines, below."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks: list[Any] = [Patch(color=GRAY), Patch(color=WHITE), Patch(color=WRONG)]
    names = ["gray matter", "white matter", "wrong label"]
    if cut:
        marks.append(Line2D([], [], color=INK, linestyle=(0, (4, 4)), linewidth=0.9))
        names.append("where two ranks meet")
    figure.legend(
        marks,
        names,
        loc="lower center",
        ncol=4,
        frameon=False,
        labelcolor=INK,
        fontsize=11,
        bbox_to_anchor=(0.5, 0.008),
    )
