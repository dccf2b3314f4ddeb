"""Saving and loading under ``FSDP2FP8Strategy`` beside Lightning's own ``ModelParallelStrategy``.

    python benchmarks/checkpoint.py --json benchmarks/checkpoint.json

Two gloo processes on one CPU. Both sides train the same transformer in fp32 with AdamW, in a Trainer, from the same
initial values on the same batches, so that what they save is equal bit for bit; that is checked, and so is that each
loads what it saved. A fit loads the checkpoint of the fit before it, takes one step and saves. The sides take turns,
fit by fit, in the same processes. Every save is to a new name; the older checkpoint is deleted while nothing is timed.

* A save lasts from a barrier to the return of ``trainer.save_checkpoint``, a load from a barrier to the return of the
  strategy's ``load_checkpoint``, as ``trainer.fit(ckpt_path=...)`` calls it: the rank that takes longer counts. Ours
  takes and writes the checksums, and compares them before it loads.
* The figure is the median of the ratios of one of ours to the mean of theirs before and after it: a machine whose speed
  drifts slows both.
* Ours brings every file to the disk before it returns. Theirs does so with shards (torch does), but not with the one
  file of the form ``full``: that may still be in the page cache when it returns. So a save is also compared with theirs
  and an ``fsync`` of all its files after it.
* A load from disk is one of files that the kernel was told to drop from its cache (``posix_fadvise``; they are on the
  disk by then), as after a restart; one from the cache is the harder case for checksums.
* In the background: how long ``save_checkpoint`` keeps training, with ``async_checkpoint=True``. What the thread
  takes from the steps that follow is not in it.
* Memory: each side runs alone in two fresh processes, with a mapping of its own for each larger block, so that it is
  what is in use and no history of the heap. The peak is above what is resident before the model is built, the growth
  above what is when the save or load begins; pages of the file that are mapped count. Of a save in the background the
  peak lasts until it is written. Loads are from the cache.
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from convergence import ByteTransformer
from fsdp import RANKS, _forget_peak, _resident, on_ranks
from lightning.pytorch.strategies import ModelParallelStrategy
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_fp8_rocm import FSDP2FP8Strategy

FORMS = ("sharded", "full")
SIDES = ("theirs", "ours", "background")
HEADS = 8


class Size(NamedTuple):
    """Of the transformer."""

    width: int
    depth: int


class Ours(L.LightningModule):
    """What a user of the strategy writes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = ByteTransformer(size.width, size.depth, HEADS)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        """One batch."""
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Two tensors of state a parameter, and a count."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Theirs(Ours):
    """What a user of Lightning's strategy adds."""

    def configure_model(self) -> None:
        """By block; ours finds these units by itself."""
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)


def module_of(side: str, size: Size) -> Ours:
    """The same on every rank and side."""
    torch.manual_seed(0)
    return Theirs(size) if side == "theirs" else Ours(size)


def strategy_of(side: str, form: str) -> Any:
    """As a user makes it."""
    if side == "theirs":
        return ModelParallelStrategy(
            data_parallel_size=RANKS, tensor_parallel_size=1, save_distributed_checkpoint=form == "sharded"
        )
    return FSDP2FP8Strategy(compile=False, state_dict_type=form, async_checkpoint=side == "background")  # type: ignore[arg-type]


def batches() -> DataLoader[Tensor]:
    """Few tokens, others on each rank: what is not timed is to be short."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return DataLoader([torch.randint(0, 256, (2, 17), generator=generator)] * 1000, batch_size=None)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# What the ranks do


@dataclass
class Use:
    """Of one save or load on one rank; bytes are of resident memory."""

    seconds: float = 0.0
    at_begin: int = 0
    at_peak: int = 0


@contextmanager
def watched() -> Iterator[Use]:
    """Begins on all ranks together, ends on each by itself."""
    use = Use()
    dist.barrier()
    _forget_peak()
    use.at_begin = _resident("VmRSS")
    since = time.perf_counter()
    yield use
    use.seconds = time.perf_counter() - since
    use.at_peak = _resident("VmHWM")


class Saves(L.Callback):
    """After the first step of a fit."""

    def __init__(self, path: Path, fsyncs: bool) -> None:
        self.path, self.fsyncs = path, fsyncs
        self.use, self.fsync_seconds = Use(), 0.0
        self.at_begin, self.at_save = 0, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What was loaded."""
        self.at_begin = digest(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """What will be loaded."""
        self.at_save = digest(trainer)
        with watched() as self.use:
            trainer.save_checkpoint(self.path)
        if self.fsyncs:  # at once: the kernel has begun to write
            since = time.perf_counter()
            _on_files(self.path, os.fsync)
            self.fsync_seconds = time.perf_counter() - since


def digest(trainer: L.Trainer) -> int:
    """The crc32 of all that this rank holds of the model and the state of its optimizer."""
    (optimizer,) = trainer.strategy.optimizers
    crc32 = 0
    for _, parameter in trainer.lightning_module.named_parameters():
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        for value in (parameter.detach(), *(state[key] for key in sorted(state))):
            local = value.to_local() if isinstance(value, DTensor) else value
            crc32 = zlib.crc32(local.detach().contiguous().numpy(), crc32)
    return crc32


@dataclass
class Fit:
    """On one rank. ``fsync_seconds`` is what it takes after a save of theirs to have all of it on the disk."""

    load: Use
    save: Use
    fsync_seconds: float
    at_begin: int
    at_save: int


def fit(side: str, form: str, size: Size, steps: int, origin: Path | None, to: Path, forget: bool = False) -> Fit:
    """Load ``origin``, train until ``steps`` are done, save to ``to``; delete ``origin``."""
    gc.collect()
    if forget and origin is not None:
        _on_files(origin, lambda file: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED))
    module, strategy, saves = module_of(side, size), strategy_of(side, form), Saves(to, fsyncs=side == "theirs")
    loading, load = Use(), strategy.load_checkpoint

    def watched_load(*args: Any, **kwargs: Any) -> Any:
        nonlocal loading
        with watched() as loading:
            return load(*args, **kwargs)

    strategy.load_checkpoint = watched_load
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        precision="32-true",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[saves],
    )
    trainer.fit(module, batches(), ckpt_path=origin)
    if side == "background":
        saves.use.at_peak = _resident("VmHWM")
    found = Fit(loading, saves.use, saves.fsync_seconds, saves.at_begin, saves.at_save)
    if origin is not None and dist.get_rank() == 0:
        shutil.rmtree(origin) if origin.is_dir() else origin.unlink()
        os.sync()  # the next fit is not to wait for what this one left to be written
    dist.barrier()
    return found


def _on_files(checkpoint: Path, action: Callable[[int], None]) -> None:
    """On each file of a checkpoint, by rank 0."""
    if dist.get_rank() == 0:
        for path in checkpoint.iterdir() if checkpoint.is_dir() else [checkpoint]:
            file = os.open(path, os.O_RDONLY)
            action(file)
            os.close(file)
    dist.barrier()


def take_turns(form: str, size: Size, rounds: int, folder: Path, forget: bool) -> dict[str, list[Fit]]:
    """The fits of each side; of theirs one more: each of ours lies between two of theirs."""
    fits: dict[str, list[Fit]] = {side: [] for side in SIDES}
    for number in range(rounds + 2):
        for side in SIDES if number <= rounds else ("theirs",):
            origin = _name(folder, side, number) if number else None
            fits[side].append(fit(side, form, size, number + 1, origin, _name(folder, side, number + 1), forget))
    return {side: of_side[1:] for side, of_side in fits.items()}  # the first has nothing to load, and imports modules


def _name(folder: Path, side: str, number: int) -> Path:
    return folder / f"{side}-{number}.ckpt"


def use_alone(side: str, form: str, size: Size, folder: Path) -> tuple[int, Fit]:
    """What is resident before the model is built, and a fit."""
    glibc = ctypes.CDLL(None)
    glibc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    glibc.mallopt(-1, 0)  # M_TRIM_THRESHOLD
    first, second, third = (_name(folder, side, number) for number in range(3))
    # Code that is imported on the way is not what is measured, on either side.
    fit(side, form, Size(64, 1), 1, None, first)
    fit(side, form, Size(64, 1), 2, first, second)
    fit(side, form, size, 1, None, first)
    gc.collect()
    before = _resident("VmRSS")
    return before, fit(side, form, size, 2, first, third)


# ---------------------------------------------------------------------------------------------------------------------
# The table


@dataclass
class Row:
    """One operation in one form. Ratios under 1 are in favour of ours; memory is of the rank that has more, in MB.

    Attributes:
        against_stock_least: The least of the ratios whose median is ``against_stock``; ``most`` the greatest.
        seconds_stock_fsynced: Theirs and an ``fsync`` of all its files; None of a load.
        against_own: To the save of ours that is not in the background; None of others.
    """

    form: str
    operation: str
    seconds: float
    seconds_stock: float
    against_stock: float
    against_stock_least: float
    against_stock_most: float
    seconds_stock_fsynced: float | None
    against_stock_fsynced: float | None
    against_own: float | None
    peak_mb: float
    peak_mb_stock: float
    peak_against_stock: float
    growth_mb: float
    growth_mb_stock: float


Turns = list[dict[str, list[Fit]]]
"""By rank."""
Memory = dict[str, list[tuple[int, Fit]]]
"""By side and rank."""


def measure(form: str, size: Size, rounds: int, parent: Path) -> list[Row]:
    """The rows of one form.

    Raises:
        RuntimeError: The two sides did not train the same, or one loaded what it had not saved.
    """
    turns: dict[bool, Turns] = {}
    for forget in (True, False):
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            turns[forget] = on_ranks(take_turns, form, size, rounds, Path(folder), forget)
        check_equal(turns[forget])
    memory: Memory = {}
    for side in SIDES:
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            memory[side] = on_ranks(use_alone, side, form, size, Path(folder))
    both = [turns[True], turns[False]]
    return [
        row(form, "save", "ours", _save, both, memory),
        row(form, "save, background", "background", _save, both, memory),
        row(form, "load, disk", "ours", _load, both[:1], memory),
        row(form, "load, cache", "ours", _load, both[1:], memory),
    ]


def _save(fit: Fit) -> Use:
    return fit.save


def _load(fit: Fit) -> Use:
    return fit.load


def check_equal(turns: Turns) -> None:
    """That the sides computed and kept the same."""
    for rank, of_rank in enumerate(turns):
        theirs = of_rank["theirs"]
        for side, fits in of_rank.items():
            kept = all(before.at_save == after.at_begin for before, after in pairwise(fits))
            same = all(one.at_save == other.at_save for one, other in zip(fits, theirs, strict=False))
            if not (kept and same):
                raise RuntimeError(
                    f"rank {rank}, {side}: "
                    + ("" if kept else "what was loaded is not what was saved. ")
                    + ("" if same else "the weights and the optimizer's state differ from those of theirs. ")
                    + "The two sides do not do the same, so there is nothing to compare."
                )


def row(form: str, operation: str, side: str, kind: Callable[[Fit], Use], turns: list[Turns], memory: Memory) -> Row:
    """One row, of all the turns."""
    ours: list[float] = []
    theirs: list[float] = []
    ratios: list[float] = []
    ratios_fsynced: list[float] = []
    against_own: list[float] = []
    fsynced: list[float] = []
    for each in turns:
        of_ours, of_theirs, own = (slowest(each, name, kind) for name in (side, "theirs", "ours"))
        to_disk = [seconds + slow.fsync_seconds for seconds, slow in zip(of_theirs, each[0]["theirs"], strict=True)]
        ours, theirs, fsynced = ours + of_ours, theirs + of_theirs, fsynced + to_disk
        ratios += against_neighbours(of_ours, of_theirs)
        ratios_fsynced += against_neighbours(of_ours, to_disk)
        against_own += [one / other for one, other in zip(of_ours, own, strict=True)]
    saves, in_background = kind is _save, side == "background"
    uses = {each: [(before, kind(fit)) for before, fit in memory[each]] for each in (side, "theirs")}
    peak = {each: max(use.at_peak - before for before, use in found) / 1e6 for each, found in uses.items()}
    growth = {each: max(use.at_peak - use.at_begin for _, use in found) / 1e6 for each, found in uses.items()}
    return Row(
        form=form,
        operation=operation,
        seconds=statistics.median(ours),
        seconds_stock=statistics.median(theirs),
        against_stock=statistics.median(ratios),
        against_stock_least=min(ratios),
        against_stock_most=max(ratios),
        seconds_stock_fsynced=statistics.median(fsynced) if saves else None,
        against_stock_fsynced=statistics.median(ratios_fsynced) if saves else None,
        against_own=statistics.median(against_own) if in_background else None,
        peak_mb=peak[side],
        peak_mb_stock=peak["theirs"],
        peak_against_stock=peak[side] / peak["theirs"],
        growth_mb=growth[side],
        growth_mb_stock=growth["theirs"],
    )


def slowest(turns: Turns, side: str, kind: Callable[[Fit], Use]) -> list[float]:
    """Seconds of each fit, on the rank that takes longer."""
    return [max(kind(fit).seconds for fit in ranks) for ranks in zip(*(each[side] for each in turns), strict=True)]


def against_neighbours(ours: list[float], theirs: list[float]) -> list[float]:
    """Each of ours to the mean of theirs before and after it.

    >>> against_neighbours([2.0, 3.0], [1.0, 3.0, 1.0])
    [1.0, 1.5]
    """
    return [one / ((before + after) / 2) for one, (before, after) in zip(ours, pairwise(theirs), strict=True)]


def tables(rows: list[Row]) -> list[Table]:
    """The rows for eyes: times, memory."""
    times = Table(
        title=f"Seconds on {RANKS} ranks: ours / Lightning's ModelParallelStrategy",
        caption="Ratios under 1 favour ours. + fsync: to theirs until it is on the disk. / own: to ours in the front",
    )
    memory = Table(title="MB of the rank that has more", caption="Growth: from where the operation begins")
    for shown, columns in (
        (times, ("form", "", "s", "theirs", "ratio", "least..most", "/ (theirs + fsync)", "/ own")),
        (memory, ("form", "", "peak", "theirs", "ratio", "growth", "theirs")),
    ):
        for index, column in enumerate(columns):
            shown.add_column(column, justify="right" if index > 1 else "left")
    for each in rows:
        times.add_row(
            each.form,
            each.operation,
            f"{each.seconds:.2f}",
            f"{each.seconds_stock:.2f}",
            f"{each.against_stock:.2f}",
            f"{each.against_stock_least:.2f}..{each.against_stock_most:.2f}",
            "" if each.against_stock_fsynced is None else f"{each.against_stock_fsynced:.2f}",
            "" if each.against_own is None else f"{each.against_own:.2f}",
        )
        memory.add_row(
            each.form,
            each.operation,
            f"{each.peak_mb:.0f}",
            f"{each.peak_mb_stock:.0f}",
            f"{each.peak_against_stock:.2f}",
            f"{each.growth_mb:.0f}",
            f"{each.growth_mb_stock:.0f}",
        )
    return [times, memory]


def file_system_of(folder: Path) -> str:
    """Its name, as the kernel mounted it."""
    device = os.stat(folder).st_dev
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == f"{os.major(device)}:{os.minor(device)}":
            return source.split()[0]
    return "unknown"


def main() -> None:
    """Run all rows, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="on the disk to which checkpoints are saved")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    size = Size(arguments.width, arguments.depth)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    rows = [
        each for form in arguments.forms for each in measure(form, size, arguments.rounds, arguments.folder.absolute())
    ]
    for shown in tables(rows):
        Console().print(shown)
    if arguments.json:
        parameters = sum(each.numel() for each in module_of("ours", size).parameters())
        facts = {
            "device": f"CPU, {platform.machine()}",
            "cores": os.cpu_count(),
            "file_system": file_system_of(arguments.folder),
            "ranks": RANKS,
            "threads_of_each_rank": 1,
            "torch": torch.__version__,
            "lightning": version("lightning"),
            "rounds": arguments.rounds,
            "model": {**size._asdict(), "parameters_mb": 4 * parameters / 1e6, "optimizer_mb": 8 * parameters / 1e6},
        }
        arguments.json.write_text(json.dumps({**facts, "rows": [asdict(each) for each in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
