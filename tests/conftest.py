"""What holds for every test: one thread an operator, and no `gpu` test without a CUDA device."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the processes of a test inherit it

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what needs a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="not run here: no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
