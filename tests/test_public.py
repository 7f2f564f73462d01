"""Public 3D networks, unmodified, equal one device: one of each family here, all of them under the marker ``models``."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from typing import Any

import pytest
import torch

import halofx
from halofx.arguments import parse_mesh
from tests.public import zoo
from tests.public.run import MESHES, MODES, REFUSED, apart
from tests.public.table import DOC, RESULTS, page

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)

FAMILIES = {  # a small network of each family, with the mesh and mode it is checked on
    "monai/BasicUNet": ("depth=2", "train"),
    "monai/UNETR": ("height=2,width=2", "train"),
    "nnunet/PlainConvUNet": ("data=2,depth=2", "train"),
    "torchvision/r3d_18": ("depth=2", "eval"),
    "pytorchvideo/csn_r50": ("depth=3", "eval"),
    "timm_3d/resnet18": ("depth=2", "eval"),
    "smp3d/Unet-resnet18": ("height=2,width=2", "eval"),
    "diffusers/AutoencoderKLWan": ("height=2,width=2", "train"),
    "unet/UNet3D": ("depth=3", "train"),
    "unet3d/UNet3d": ("data=2,depth=2", "train"),
    "highresnet/HighRes3DNet": ("depth=2", "train"),
    "uniformer/Uniformer": ("depth=2", "eval"),
    "video_diffusion_pytorch/Unet3D": ("depth=2", "train"),
    "transformers/VideoMAE": ("data=2,depth=2", "eval"),
}


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def check(name: str, mesh: str, mode: str) -> None:
    zoo.prepare()
    row: dict[str, Any] = apart(name, mesh, mode)
    text = "\n".join([f"{name} on {mesh} in {mode}: {row['status']}: {row['verdict']}", *row.get("details", [])])
    assert row["status"] == "exact" or (row["status"] == "refused" and REFUSED.get(name, "?!") in row["verdict"]), text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not _installed("monai"), reason="not installed: pip install --no-deps -r tests/public/ci.txt")
@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str) -> None:
    check(name, *FAMILIES[name])


AXES = {  # meshes with channels and stages, and the micro-batches
    "channel=2": 1, "channel=4": 1, "channel=2,height=2": 1, "pipe=2": 2, "pipe=3,depth=2": 2, "pipe=2,data=2,depth=2": 2,
    "pipe=2,channel=2": 1, "pipe=2,data=2,channel=2,depth=2": 1, "pipe=2,data=2,channel=2,depth=2,height=2": 1,
}  # fmt: skip


def _monai(name: str) -> tuple[torch.nn.Module, tuple[int, ...]]:
    from monai.networks import nets

    torch.manual_seed(0)
    if name == "UNet":
        return nets.UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=1), (4, 1, 16, 16, 12)
    if name == "SegResNet":
        return nets.SegResNet(3, 8, 1, 2, norm=("GROUP", {"num_groups": 2})), (4, 1, 16, 16, 16)
    return nets.DenseNet121(3, 1, 2, init_features=8, growth_rate=4, block_config=(2, 2, 2, 2)), (4, 1, 32, 32, 32)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not _installed("monai"), reason="not installed: pip install --no-deps -r tests/public/ci.txt")
@pytest.mark.parametrize("name", ["UNet", "SegResNet", "DenseNet121"])
def test_every_axis(name: str) -> None:
    """Stages, channels and mixes, on up to 32 ranks; batch norms keep whole batches, so they train unless micro-batches are 2."""
    model, shape = _monai(name)
    x = torch.randn(shape, dtype=torch.float64)
    for mesh, micro in AXES.items():
        model.train(micro == 1 or name != "DenseNet121")
        checked = halofx.check(model.double(), [x], parse_mesh(mesh), microbatches=micro)
        assert checked.status == "exact" and checked.error < 1e-10, f"{mesh}: {checked.verdict}"


@pytest.mark.models
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", zoo.ZOO)
def test_network(name: str, mesh: str, mode: str) -> None:
    check(name, mesh, mode)


def test_the_page_is_current() -> None:
    """docs/models.md is what tests/public/table.py makes of the recorded results."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    assert page(rows) == DOC.read_text(), "run `python -m tests.public.table` and commit docs/models.md"
    known = {r["name"] for r in rows if r["status"] == "refused" and REFUSED.get(r["name"], "?!") in r["verdict"]}
    wrong = [r["name"] for r in rows if r["status"] != "exact" and r["name"] not in known]
    assert not wrong, f"docs/models.md records {wrong}"
