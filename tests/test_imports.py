r"""The direction of imports, and the size of files.

         halofx/*.py        public API and command line
        /   |   |   \
       /    |   |   zoo     imports nothing of halofx
   passes   |  runtime
       \    |   /
        compiler

An arrow that is not drawn is an error here, also inside a function or under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: layer -> the layers of halofx that its files may import
MAY_IMPORT = {
    "compiler": {"compiler"},
    "passes": {"passes", "compiler"},
    "runtime": {"runtime", "compiler"},
    "zoo": {"zoo"},
}
FOLDERS = ("halofx", *MAY_IMPORT, "tests", "benchmarks", "examples", "docs")
MAX_LINES = 400
#: files that may have MAX_LINES lines or more, each with its reason; empty on purpose
LONG_FILES: dict[str, str] = {}


def python_files() -> list[PurePosixPath]:
    """The Python files, as paths from the root, each once: the symlinks in halofx/ are not followed."""
    links = {ROOT / "halofx" / layer for layer in MAY_IMPORT}
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted(PurePosixPath(p.relative_to(ROOT).as_posix()) for p in found if links.isdisjoint(p.parents))


def imports(tree: ast.AST) -> Iterator[tuple[int, int, str, tuple[str, ...]]]:
    """Yield (line, level, module, names) of every import statement, however deep it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, 0, alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.level, node.module or "", tuple(a.name for a in node.names)


def targets(module: str, names: tuple[str, ...]) -> list[str]:
    """The parts of halofx that an import takes from: layers, or other names of the facade."""
    parts = module.split(".")
    return [parts[1]] if len(parts) > 1 else list(names) or ["halofx"]


def violations(path: PurePosixPath, source: str) -> list[str]:
    """What the imports of one file break, a line each; `path` is from the repository's root."""
    layer = path.parts[0]
    broken = []
    for line, level, module, names in imports(ast.parse(source, str(path))):
        where = f"{path}:{line}"
        if level >= len(path.parts):
            broken.append(f"{where}: a relative import leaves {layer}/; write halofx.{module or '...'}")
        elif level == 0 and module.split(".")[0] in MAY_IMPORT:
            broken.append(f"{where}: bare import of {module}; write halofx.{module}")
        elif level == 0 and module.split(".")[0] == "halofx" and layer in MAY_IMPORT:
            broken += [
                f"{where}: imports {target} of halofx; {layer}/ may import {sorted(MAY_IMPORT[layer])} only"
                for target in targets(module, names)
                if target not in MAY_IMPORT[layer]
            ]
    return broken


@pytest.mark.parametrize("folder", FOLDERS)
def test_direction_of_imports(folder: str) -> None:
    broken: list[str] = []
    for path in python_files():
        if path.parts[0] == folder:
            broken += violations(path, (ROOT / path).read_text(encoding="utf-8"))
    assert not broken, "\n".join(["", *broken])


@pytest.mark.parametrize(
    ("path", "source", "count"),
    [
        ("compiler/a.py", "from halofx.compiler.mesh import Mesh", 0),
        ("compiler/a.py", "from .mesh import Mesh", 0),
        ("compiler/ops/a.py", "from ..mesh import Mesh", 0),
        ("compiler/a.py", "import torch, compileall", 0),
        ("compiler/a.py", "from halofx.passes.overlap import run", 1),
        ("compiler/a.py", "import halofx.runtime.comm", 1),
        ("compiler/a.py", "def f():\n    from halofx import zoo, compiler", 1),
        ("compiler/a.py", "if TYPE_CHECKING:\n    from halofx.zoo import unet", 1),
        ("compiler/a.py", "import halofx", 1),
        ("compiler/a.py", "from halofx import Mesh", 1),
        ("compiler/a.py", "from compiler.mesh import Mesh", 1),
        ("compiler/a.py", "from ..passes import overlap", 1),
        ("compiler/ops/a.py", "from ... import passes", 1),
        ("passes/a.py", "from halofx.compiler.program import Program", 0),
        ("passes/a.py", "from halofx.runtime import comm", 1),
        ("runtime/comm/a.py", "from halofx.compiler.mesh import Mesh\nfrom .threads import x", 0),
        ("runtime/comm/a.py", "from halofx.passes import overlap", 1),
        ("zoo/a.py", "from halofx.zoo.blocks import Block", 0),
        ("zoo/a.py", "from halofx.compiler.mesh import Mesh", 1),
        ("halofx/__init__.py", "from halofx.runtime.comm import Comm\nfrom halofx.zoo import unet", 0),
        ("halofx/__init__.py", "import runtime.comm", 1),
        ("tests/a.py", "import halofx\nfrom halofx.zoo import unet", 0),
        ("tests/a.py", "from compiler import mesh", 1),
        ("examples/a.py", "import zoo", 1),
    ],
)
def test_the_check_sees(path: str, source: str, count: int) -> None:
    assert len(violations(PurePosixPath(path), source)) == count


def test_every_file_is_short() -> None:
    lines = {str(p): len((ROOT / p).read_text(encoding="utf-8").splitlines()) for p in python_files()}
    long = {path for path, n in lines.items() if n >= MAX_LINES}
    assert long == set(LONG_FILES), {path: lines.get(path) for path in long ^ set(LONG_FILES)}


def test_the_symlinks_of_the_facade_are_relative() -> None:
    links = {p.name: str(p.readlink()) for p in (ROOT / "halofx").iterdir() if p.is_symlink()}
    assert links == {layer: f"../{layer}" for layer in MAY_IMPORT}
