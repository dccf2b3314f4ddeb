"""The random number generators of a rank, as plain values that ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of Python's, numpy's, torch's and the device's generator.

    Args:
        device: Of this rank.

    Returns:
        By name: ``python``, ``torch``; ``numpy`` if it was imported; ``cuda`` if ``device`` is a GPU (ROCm, too).
    """
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": {"version": version, "state": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        if kind == "MT19937":  # the only one that the global generator has, unless the user put another in its place
            states["numpy"] = {
                "state": torch.tensor(keys.tolist(), dtype=torch.int64),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(cached),
            }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Put the generators back; one that ``states`` lacks, or that is not used here, is left alone."""
    python = states["python"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy as np

        saved = states["numpy"]
        keys = np.array(saved["state"].tolist(), dtype=np.uint32)
        np.random.set_state(("MT19937", keys, saved["position"], saved["has_gauss"], saved["gauss"]))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
