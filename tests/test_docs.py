"""The generated page of the documentation is current, and the README's commands exist."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from halofx.cli import app
from halofx.compiler.table import op_table

ROOT = Path(__file__).parent.parent


def test_the_op_table_is_current() -> None:
    assert (ROOT / "docs" / "ops.md").read_text() == op_table(), "run: python -m halofx ops > docs/ops.md"


def test_links_in_the_documentation_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_show() -> None:
    done = CliRunner().invoke(app, ["show", "unet3d", "--input", "1,1,197,233,189", "--mesh", "depth=2,height=2"])
    assert done.exit_code == 0, done.output
    assert "enc0.conv1.h0:" in done.output and "197@depth" in done.output and "forward flops" in done.output
    done = CliRunner().invoke(
        app, ["show", "unet3d", "-i", "1,1,64,64,64", "-m", "depth=2", "--eval", "--node", "pool0"]
    )
    assert done.exit_code == 0 and "split     d over depth" in done.output


def test_show_takes_a_factory_and_explains_what_is_wrong() -> None:
    for arguments, text in (
        (["show", "torch.nn:Identity", "-i", "1,1,8,8,8", "-m", "depth=2"], ""),
        (["show", "unet4d", "-i", "1,1,8,8,8", "-m", "depth=2"], "unet3d"),
        (["show", "nowhere.at.all:model", "-i", "1,1,8,8,8", "-m", "depth=2"], "cannot import nowhere.at.all"),
        (
            ["show", "torch.nn:Conv3d", "-i", "1,1,8,8,8", "-m", "depth=2"],
            "needs arguments (in_channels, out_channels, kernel_size)",
        ),
        (["show", "unet3d", "-i", "1,one", "-m", "depth=2"], "is not a shape"),
        (["show", "unet3d", "-i", "1,1,8,8,8", "-m", "depth"], "is not axis=size"),
        (["show", "unet3d", "-i", "1,1,8,8,8", "-m", "time=2"], "unknown mesh axis 'time'"),
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == (2 if text else 0), (arguments, done.output)
        assert text in done.output + done.stderr and "Traceback" not in done.output
