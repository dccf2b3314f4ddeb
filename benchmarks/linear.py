"""Forward and backward of ``FP8Linear`` beside torchao's ``Float8Linear`` and a bf16 ``nn.Linear``, in one run.

    python benchmarks/linear.py --json benchmarks/linear.json

On a CPU both FP8 layers emulate, so the column against bf16 says what emulation costs and nothing of FP8 hardware. The
contestants take turns, round by round, and each figure is the median of the ratios within a round: a machine whose
speed drifts slows both sides of a ratio.
"""

import argparse
import copy
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_fp8_rocm import convert
from lightning_fp8_rocm.float8.recipe import RECIPE_NAMES

# (M tokens, K in_features, N out_features): an MLP up and down, and a square.
SIZES = {
    "cpu": ((512, 384, 1536), (512, 1536, 384), (1024, 1024, 1024)),
    "cuda": ((8192, 4096, 14336), (8192, 14336, 4096), (8192, 8192, 8192)),
}


@dataclass
class Cell:
    """Medians of the ratios of one size, recipe and mode; under 1 is in favour of ``FP8Linear``.

    Peak memory is what one forward and backward allocates above what is there before, in MB.
    """

    mode: str
    recipe: str
    tokens: int
    in_features: int
    out_features: int
    milliseconds: float
    against_torchao: float
    against_bf16: float
    peak_mb: float
    peak_mb_torchao: float


def contestants(recipe: str, size: tuple[int, int, int], device: str, mode: str) -> dict[str, nn.Module]:
    """The three layers, from one bf16 ``nn.Linear`` with rows of different magnitudes."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    _, in_features, out_features = size
    plain = nn.Sequential(nn.Linear(in_features, out_features, device=device, dtype=torch.bfloat16))
    with torch.no_grad():
        plain[0].weight.mul_(torch.randn(out_features, 1, device=device).exp())
    ours = copy.deepcopy(plain)
    report = convert(ours, recipe, skip_small=False)
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=report.recipe.emulate)
    theirs = convert_to_float8_training(copy.deepcopy(plain), config=config)
    layers = {"ours": ours, "torchao": theirs, "bf16": plain}
    if mode == "compiled":
        for layer in layers.values():
            layer.compile()
    return layers


def step_of(layer: nn.Module, input: Tensor, grad_output: Tensor) -> Callable[[], None]:
    """One forward and backward; gradients are dropped, as before a real step."""

    def step() -> None:
        input.grad = None
        layer.zero_grad(set_to_none=True)
        layer(input).backward(grad_output)

    return step


def seconds(step: Callable[[], None], device: str) -> float:
    """Wall time of one step."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def peak_bytes(step: Callable[[], None], device: str) -> int:
    """Most bytes that the step holds at once, above what is held before it: the least of five profiles.

    The profiler of the CPU sometimes files the release of an old gradient late.
    """
    return min(_peak_bytes_once(step, device) for _ in range(5))


def _peak_bytes_once(step: Callable[[], None], device: str) -> int:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    held = peak = 0
    events = profiled.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def measure(mode: str, recipe: str, size: tuple[int, int, int], device: str, rounds: int) -> Cell:
    """One cell: warm up, take turns, compare."""
    tokens, in_features, out_features = size
    input = torch.randn(tokens, in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad_output = torch.randn(tokens, out_features, device=device, dtype=torch.bfloat16)
    steps = {
        name: step_of(layer, input, grad_output) for name, layer in contestants(recipe, size, device, mode).items()
    }
    for step in steps.values():
        step()
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in sorted(steps, reverse=turn % 2 == 1):  # neither always runs in the other's wake
            times[name].append(seconds(steps[name], device))
    return Cell(
        mode=mode,
        recipe=recipe,
        tokens=tokens,
        in_features=in_features,
        out_features=out_features,
        milliseconds=1e3 * statistics.median(times["ours"]),
        against_torchao=statistics.median(a / b for a, b in zip(times["ours"], times["torchao"], strict=True)),
        against_bf16=statistics.median(a / b for a, b in zip(times["ours"], times["bf16"], strict=True)),
        peak_mb=peak_bytes(steps["ours"], device) / 1e6,
        peak_mb_torchao=peak_bytes(steps["torchao"], device) / 1e6,
    )


def geometric_mean(values: list[float]) -> float:
    """Of positive ratios.

    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    return math.exp(statistics.fmean(math.log(value) for value in values))


def table(cells: list[Cell], device: str) -> Table:
    """The cells for eyes."""
    emulated = "; FP8 emulated, so 'against bf16' is no speed of FP8" if device == "cpu" else ""
    shown = Table(title="FP8Linear, forward and backward", caption=f"time ratios, under 1 is faster{emulated}")
    for column in ("mode", "recipe", "M x K x N", "ms", "against torchao", "against bf16", "peak MB", "torchao's"):
        shown.add_column(column, justify="left" if column in ("mode", "recipe") else "right")
    for cell in cells:
        shown.add_row(
            cell.mode,
            cell.recipe,
            f"{cell.tokens} x {cell.in_features} x {cell.out_features}",
            f"{cell.milliseconds:.2f}",
            f"{cell.against_torchao:.3f}",
            f"{cell.against_bf16:.2f}",
            f"{cell.peak_mb:.1f}",
            f"{cell.peak_mb_torchao:.1f}",
        )
    return shown


def main() -> None:
    """Run all cells, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cells = []
    for mode in arguments.modes:
        for recipe in RECIPE_NAMES:
            torch._dynamo.reset()
            cells += [measure(mode, recipe, size, device, arguments.rounds) for size in SIZES[device]]
    console = Console()
    console.print(table(cells, device))
    means = {
        mode: geometric_mean([cell.against_torchao for cell in cells if cell.mode == mode]) for mode in arguments.modes
    }
    for mode, mean in means.items():
        console.print(f"{mode}: geometric mean against torchao {mean:.3f}", highlight=False)
    if arguments.json:
        name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {platform.machine()}"
        facts = {
            "device": name,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "torchao": version("torchao"),
            "rounds": arguments.rounds,
            "geometric_mean_against_torchao": means,
        }
        arguments.json.write_text(json.dumps({**facts, "cells": [asdict(cell) for cell in cells]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
