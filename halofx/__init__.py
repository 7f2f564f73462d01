"""halofx: a graph compiler that splits 3D CNNs over devices, exactly.

net = halofx.compile(model, halofx.Mesh(data=2, depth=4))      # then torchrun --nproc-per-node 8 train.py
"""

from halofx import zoo
from halofx.api import compile
from halofx.checking.check import Check, check
from halofx.compiler.errors import CompileError, HalofxError, MeshError, RankError
from halofx.compiler.mesh import Mesh
from halofx.compiler.opaque import opaque
from halofx.compiler.rules import rule
from halofx.runtime.comm import current, finalize, init
from halofx.runtime.launch import launch
from halofx.runtime.net import Net
from halofx.training import History, fit

__version__ = "0.1.0"

__all__ = [
    "Check",
    "CompileError",
    "HalofxError",
    "History",
    "Mesh",
    "MeshError",
    "Net",
    "RankError",
    "check",
    "compile",
    "current",
    "finalize",
    "fit",
    "init",
    "launch",
    "opaque",
    "rule",
    "zoo",
]
