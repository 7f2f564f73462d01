"""Finding ranks that disagree, before any of them waits for the others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halofx.compiler.errors import RankError
from halofx.runtime.comm import Comm

SAME = "give every rank the same"
PARAMETERS = "the parameters (names, shapes, values)"
REMEDIES = {PARAMETERS: "call torch.manual_seed(0) before building the model, or load one state_dict, on every rank"}
THREADS = (
    "; ranks that are threads share one random generator: build the model before halofx.launch, and copy.deepcopy it"
)


def agree(comm: Comm, facts: Mapping[str, str], error: Exception | None, what: str) -> None:
    """Compare facts with all ranks; every rank must call it at the same point.

    Raises `RankError` on every rank when a fact differs (naming it, and who has which value) or when some rank comes with an
    error of its own; the rank that has it raises that error itself. A fact that only some ranks have is compared among those.
    """
    if comm.size == 1:
        if error is not None:
            raise error
        return
    mine = {"error": f"{type(error).__name__}: {error}"} if error is not None else dict(facts)
    all_facts = [json.loads(b) for b in comm.all_gather_bytes(json.dumps(mine).encode(), what)]
    if error is not None:
        raise error
    failed = [(rank, f["error"]) for rank, f in enumerate(all_facts) if "error" in f]
    if failed:
        rank, text = failed[0]
        raise RankError(f"rank {rank} could not start {what}: {text}")
    for name in {name: None for f in all_facts for name in f}:
        values = {rank: str(f[name]) for rank, f in enumerate(all_facts) if name in f}
        if len(set(values.values())) > 1:
            remedy = REMEDIES.get(name.partition(" at ")[0], SAME)
            if remedy != SAME and comm.name == "threads":
                remedy += THREADS
            raise RankError(f"the ranks disagree on {name} at {what}: {_who(values)}; {remedy}")


def _who(values: Mapping[int, str]) -> str:
    """``ranks 0, 1 have a; rank 2 has b``."""
    found: dict[str, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {'have' if len(ranks) > 1 else 'has'} {value}"
        for value, ranks in found.items()
    )


def digest(*parts: Any) -> str:
    """A short hash of texts."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:12]


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """A short hash of names, shapes, dtypes, requires_grad and values."""
    state = hashlib.sha256()
    for name, tensor in tensors.items():
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}".encode())
        if not tensor.is_meta:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            state.update(flat.view(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return state.hexdigest()[:12]
