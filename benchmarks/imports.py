"""What ``import lightning_fp8_rocm`` costs beside ``import torch`` and ``import lightning``, and what it adds to them.

    python benchmarks/imports.py --json benchmarks/imports.json

Every figure is of a fresh process, in which one import is timed; what comes before it is not. The rows take turns,
round by round, after a round that counts for nothing, so that the files lie in the page cache and are compiled to
bytecode. The figure is the median over rounds.

* CPU time is what the process itself computes, of all its threads: what else runs on the machine hardly counts. The
  time on the wall is beside it.
* Importing this package leaves a finder among those that Python asks for each later import, and teaches a Lightning
  when that is imported. The rows ``after ours`` are those imports; "in ours" is the time on the wall that they spend
  within the finder and the teaching, counted in further processes without garbage collection, which would be begun by
  whoever allocates next and count for that.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

OURS = "import lightning_fp8_rocm"
# Row: what comes before, and what is timed.
ROWS = {
    "lightning_fp8_rocm": ("", OURS),
    "torch": ("", "import torch"),
    "torch, after ours": (OURS, "import torch"),
    "lightning": ("", "import lightning"),
    "lightning, after ours": (OURS, "import lightning"),
    "pytorch_lightning": ("", "import pytorch_lightning"),
    "pytorch_lightning, after ours": (OURS, "import pytorch_lightning"),
}

TIMED = """
import json
import time

{before}
wall, cpu = time.perf_counter(), time.process_time()
{timed}
print(json.dumps([time.process_time() - cpu, time.perf_counter() - wall]))
"""

COUNTED = """
import gc
import json
import time

{before}
from lightning_fp8_rocm import registration

in_ours = 0.0

def counted(function):
    def call(*args, **kwargs):
        global in_ours
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            in_ours += time.perf_counter() - started
    return call

registration._WhenImported.find_spec = counted(registration._WhenImported.find_spec)
registration._teach = counted(registration._teach)
gc.disable()
{timed}
print(json.dumps([in_ours]))
"""


@dataclass
class Row:
    """Medians over the rounds, in milliseconds."""

    imported: str
    cpu_ms: float
    wall_ms: float
    in_ours_ms: float | None


def seconds(code: str, folder: str) -> list[float]:
    """What a process of its own prints of one import."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(rounds: int) -> list[Row]:
    """All rows, in turns."""
    found: dict[str, list[list[float]]] = {name: [] for name in ROWS}
    with tempfile.TemporaryDirectory() as folder:  # where no module lies that an import could find first
        for turn in range(rounds + 1):
            for name in sorted(ROWS, reverse=turn % 2 == 1):  # none always runs in another's wake
                before, timed = ROWS[name]
                codes = [TIMED, COUNTED] if before else [TIMED]
                measured = [seconds(code.format(before=before, timed=timed), folder) for code in codes]
                if turn:
                    found[name].append([value for each in measured for value in each])
    rows = []
    for name, measured in found.items():
        cpu, wall, *in_ours = (1e3 * statistics.median(values) for values in zip(*measured, strict=True))
        rows.append(Row(name, cpu, wall, in_ours[0] if in_ours else None))
    return rows


def table(rows: list[Row]) -> Table:
    """The rows for eyes."""
    shown = Table(title="One import in a fresh process, in milliseconds")
    for column in ("import", "CPU", "wall", "in ours"):
        shown.add_column(column, justify="left" if column == "import" else "right")
    for row in rows:
        in_ours = "" if row.in_ours_ms is None else f"{row.in_ours_ms:.2f}"
        shown.add_row(row.imported, f"{row.cpu_ms:.1f}", f"{row.wall_ms:.1f}", in_ours)
    return shown


def main() -> None:
    """Run all rows, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.rounds)
    Console().print(table(rows))
    if arguments.json:
        facts = {
            "device": f"CPU, {platform.machine()}",
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": version("torch"),
            "lightning": version("lightning"),
            "pytorch_lightning": version("pytorch-lightning"),
            "rounds": arguments.rounds,
        }
        arguments.json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
