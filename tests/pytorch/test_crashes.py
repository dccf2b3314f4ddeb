"""Whatever ends a run, and whenever: each checkpoint is there whole or not at all, and every rank says what is wrong.

Ranks are real processes over gloo. This file is also the script that starts them: `serve` imports torch once and forks
every rank of every scenario from there, several scenarios at a time, since most of their time is waiting. The fixture
`crashes` runs it once; each test then looks at what one scenario left.
"""

import contextlib
import gc
import json
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import killed
import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from models import trainer
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_fp8_rocm import FSDP2FP8Strategy
from lightning_fp8_rocm.distributed import publish, storage
from lightning_fp8_rocm.distributed.checkpoint import model_state, optimizer_state
from lightning_fp8_rocm.distributed.saver import Saver
from lightning_fp8_rocm.distributed.storage import open_checkpoint
from lightning_fp8_rocm.distributed.whole import assembled

# ---------------------------------------------------------------------------------------------------------------------
# Saves that are killed: a layer and its optimizer, in which every number says which save it was

OLDER, BEFORE, NEW, NEXT = 3, 4, 5, 6  # generations: two that are there, the one that is killed, one of a later run


class Held(Saver):
    """Writes only once it is let go, so that what is asked for meanwhile surely comes while it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def _write(self, *args: Any) -> None:
        self.go.wait()
        super()._write(*args)


class Tiny:
    def __init__(self, background: bool = False) -> None:
        self.model = nn.Linear(6, 5)  # 5 rows are uneven on 2 ranks
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.saver = Held()
        self.background = background
        if background:
            self.saver.prepare()

    def save(self, path: Path, generation: int, full: bool, then: Callable[[], None] = lambda: None) -> None:
        """All ranks; `then` is called while it is written in the background."""
        for parameter in self.model.parameters():
            parameter.data.fill_(generation)
            self.optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, generation + 0.5)
        state: dict[str, Any] = {"state_dict": model_state(self.model, full=full, copy=self.background)}
        momentum = optimizer_state(self.model, self.optimizer, full=full, copy=self.background)
        state |= {"optimizer_states": [momentum]} if full else {"optimizer_0": momentum}
        rest = {"epoch": generation, "lr_schedulers": [], "pytorch-lightning_version": "2.6"}
        own = {"generation": generation}
        if not self.background:
            self.saver.go.set()
            self.saver.save(path, state, rest, full=full, own=own)
            return
        self.saver.save(path, state, rest, full=full, own=own, background=True)
        for parameter in self.model.parameters():
            parameter.data.fill_(-1)  # training goes on
        then()
        self.saver.go.set()
        self.saver.wait()


def generation_of(path: Path) -> int | None:
    """Of which save a checkpoint is, in all its numbers; None if there is none."""
    found, _ = publish.find(path)
    try:
        storage.check_readable(found)
    except FileNotFoundError:
        return None
    assert publish.verify(found) == []
    checkpoint = assembled(open_checkpoint(found, weights_only=True))
    generation: int = checkpoint["epoch"]
    assert {name: value.shape for name, value in checkpoint["state_dict"].items()} == {"weight": (5, 6), "bias": (5,)}
    assert all(value.eq(generation).all() for value in checkpoint["state_dict"].values())
    momentum = checkpoint["optimizer_states"][0]["state"]
    assert sorted(momentum) == [0, 1]
    assert all(value["momentum_buffer"].eq(generation + 0.5).all() for value in momentum.values())
    ranks = checkpoint[storage.OWN_KEY]["ranks"]
    assert ranks == [{"generation": generation}] * len(ranks)
    return generation


@dataclass(frozen=True)
class Kill:
    """Of one rank, just before one of its calls that change files; `at` counts them from 1, 0 for not at all."""

    form: str
    way: str
    before: str
    victim: int
    at: int = 0
    torn: bool = False
    call: str = ""

    @property
    def folder(self) -> str:
        return f"kill-{self.form}-{self.way}-{self.before}-{self.victim}-{self.at}{'-torn' * self.torn}"

    @property
    def removes(self) -> bool:
        """Whether an older checkpoint is to be removed meanwhile."""
        return self.way == "background" and self.before == "overwrite"


# Of one file only rank 0 writes anything.
WAYS = [
    Kill(form, way, before, victim)
    for form, victims in (("sharded", (0, 1)), ("full", (0,)))
    for way in ("at once", "background")
    for before in ("first", "overwrite")
    for victim in victims
]


def makes_what_was_there(rank: int, folder: Path) -> None:
    for form in ("sharded", "full"):
        tiny = Tiny()
        for name, generation in (("older", OLDER), ("queued", OLDER), ("last", BEFORE)):
            tiny.save(folder / form / f"{name}.ckpt", generation, form == "full")


def is_killed(rank: int, folder: Path, kill: Kill) -> list[str]:
    """Save once; returns this rank's calls if it comes so far."""
    runs = folder / "runs"
    if rank == 0:
        for name in ("older",) if kill.before == "first" else ("older", "last", "queued"):
            there = folder.parent / "templates" / kill.form / f"{name}.ckpt"
            copy = shutil.copytree if there.is_dir() else shutil.copy
            runs.mkdir(exist_ok=True)
            copy(there, runs / there.name)
    tiny = Tiny(kill.way == "background")

    def then() -> None:
        if kill.removes and rank == 0:
            tiny.saver.remove(runs / "queued.ckpt")

    without_syncs()
    killed.install(kill.at if rank == kill.victim else 0, kill.torn)
    tiny.save(runs / "last.ckpt", NEW, kill.form == "full", then)
    return killed.calls()


def without_syncs() -> None:
    """Only processes die here, not the machine: what the kernel was given, it has."""
    os.fsync = lambda descriptor: None  # type: ignore[assignment]


def kills_of(way: Kill, calls: Sequence[str]) -> list[Kill]:
    """One before each call; of the many writes of one file only before the first, and within the middle one.

    The others leave what one of these leaves: the files are smaller than their buffer, which a torn write empties.
    """
    at, found = 1, list[Kill]()
    for name, same in groupby(calls):
        count = len(list(same))
        places = {(0, False), (count // 2, True)} if name == "write" else {(place, False) for place in range(count)}
        found += [replace(way, at=at + place, torn=torn, call=name) for place, torn in sorted(places)]
        at += count
    return found


def looks_and_saves_again(rank: int, folder: Path, kills: list[Kill]) -> dict[str, Any]:
    """A later run, over many folders: what each holds, and what it holds after one more save."""
    without_syncs()
    tiny = Tiny()
    seen: dict[str, Any] = {}
    for kill in kills:
        runs = folder.parent / kill.folder / "runs"
        found: dict[str, Any] = {}
        try:
            found |= {name: generation_of(runs / f"{name}.ckpt") for name in ("older", "last", "queued")}
            stagings = list(runs.glob(".lightning_fp8_rocm.saving-*"))
            if rank == 0:
                for each in stagings:
                    age_if_nobodys(each)
            found["begun"] = len(stagings)
            found["left over"] = len(tiny.saver.look_around([runs]))
        except Exception:
            found["error"] = traceback.format_exc()
        dist.barrier()
        try:
            tiny.save(runs / "last.ckpt", NEXT, kill.form == "full")
            dist.barrier()  # rank 0 removes what is left over last
            found["after"] = {name: generation_of(runs / name) for name in sorted(os.listdir(runs))}
        except Exception:
            found["error after"] = traceback.format_exc()
        seen[kill.folder] = found
        dist.barrier()
    return seen


def age_if_nobodys(staging: Path) -> None:
    """Killed before it was written whose it is, age alone tells that nobody will complete it: as if two hours old."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        json.loads((staging / "owner.json").read_text())
        return
    for each in (*staging.iterdir(), staging):
        os.utime(each, (time.time() - 7200,) * 2)


def saves_beside_another_run(rank: int, folder: Path, first: int, background: bool) -> int:
    """One of two runs with one directory: `last.ckpt` and a checkpoint a step, of which the last two are kept."""
    runs = folder.parent / "shared"
    tiny = Tiny(background)
    (folder.parent / f"ready-{first}-{rank}").touch()
    while len(list(folder.parent.glob("ready-*"))) < 4:
        time.sleep(0.01)
    for step in range(8):
        for name in (f"step={step}.ckpt", "last.ckpt"):
            tiny.saver.go.clear()
            tiny.save(runs / name, first + step, full=False)
        if rank == 0 and step >= 2:
            tiny.saver.remove(runs / f"step={step - 2}.ckpt")
    return first + step


def cannot_write_in_the_background(rank: int, folder: Path) -> str:
    """Rank 1 may not write a file of more than 400 bytes; rank 0 is asked to remove an older checkpoint meanwhile."""
    runs = folder / "runs"
    if rank == 0:
        shutil.copytree(folder.parent / "templates" / "sharded", runs)
    tiny = Tiny(background=True)
    try:
        with file_size_limit(400) if rank == 1 else contextlib.nullcontext():
            tiny.save(runs / "last.ckpt", NEW, False, lambda: rank == 0 and tiny.saver.remove(runs / "queued.ckpt"))
    except RuntimeError as error:
        return str(error)
    return ""


def cannot_pickle_its_own(rank: int, folder: Path) -> str:
    """Rank 1 has something that does not travel, as the state of a dataloader of the user's own may."""
    tiny = Tiny()
    own: dict[str, Any] = {"generation": NEW if rank == 0 else lambda: NEW}
    tiny.saver.go.set()
    state = {"state_dict": model_state(tiny.model, full=False)}
    return said(lambda: tiny.saver.save(folder / "runs" / "last.ckpt", state, {"epoch": NEW}, full=False, own=own))


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """In place of a full disk: `write` fails alike."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---------------------------------------------------------------------------------------------------------------------
# Runs of a real Trainer: its weights are a function of the number of steps

WIDTH = 96  # a rank's shards are 74 KB
LIMIT = 48 << 10  # bytes, less than that, and more than any text


class Line(L.LightningModule):
    """Every batch is the same one, on every rank, so that a step has the same result wherever it is taken."""

    def __init__(self, in_step: Callable[["Line"], None] = lambda module: None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
        self.in_step = in_step

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.in_step(self)
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        item = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))
        return DataLoader([item] * 20000, batch_size=2)


def weights_after(steps: int) -> list[Tensor]:
    """The same training on one process without Lightning."""
    module = Line()
    optimizer = module.configure_optimizers()
    batch = next(iter(module.train_dataloader()))
    for _ in range(steps):
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
    return [weight.detach() for weight in module.parameters()]


def step_of(path: Path) -> int | None:
    """After how many steps a checkpoint was saved, in all its numbers; None if there is none."""
    found, _ = publish.find(path)
    try:
        storage.check_readable(found)
    except FileNotFoundError:
        return None
    assert publish.verify(found) == []
    checkpoint = assembled(open_checkpoint(found, weights_only=True))
    steps: int = checkpoint["global_step"]
    for saved, expected in zip(checkpoint["state_dict"].values(), weights_after(steps), strict=True):
        torch.testing.assert_close(saved, expected)
    assert len(checkpoint["optimizer_states"][0]["state"]) == 2
    assert len(checkpoint[storage.OWN_KEY]["ranks"]) == 2
    return steps


def run(*callbacks: L.Callback, background: bool = True, **flags: Any) -> L.Trainer:
    strategy = FSDP2FP8Strategy(auto_wrap_policy={nn.Linear}, async_checkpoint=background)
    flags = {"enable_checkpointing": bool(callbacks), "max_epochs": -1, **flags}
    return trainer("32-true", strategy=strategy, devices=2, callbacks=list(callbacks), **flags)


def keep(folder: Path, **arguments: Any) -> ModelCheckpoint:
    given = {"save_last": True, "save_top_k": 2, **arguments}
    return ModelCheckpoint(folder / "runs", "{step}", monitor="step", mode="max", every_n_train_steps=1, **given)


def write_slowly(seconds: float) -> None:
    """Each write takes so long, in place of a slow disk."""
    write = publish.CheckedFile.write

    def slow(file: publish.CheckedFile, data: Any) -> int:
        time.sleep(seconds)
        return write(file, data)

    publish.CheckedFile.write = slow  # type: ignore[method-assign]


# ---- killed from outside


def trains_until_it_is_killed(rank: int, folder: Path) -> None:
    run(keep(folder)).fit(Line())


class Progress(L.Callback):
    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.first = trainer.global_step


def resumes(rank: int, folder: Path) -> dict[str, Any]:
    """`ckpt_path="last"`, and three steps more."""
    last = step_of(folder / "runs" / "last.ckpt")
    dist.init_process_group("gloo")
    dist.barrier()  # both have looked
    progress = Progress()
    again = run(keep(folder), progress, max_steps=(last or 0) + 3)
    again.fit(Line(), ckpt_path="last")
    return {"last": last, "first": progress.first, "end": again.global_step}


def kill_at_random(seed: int, ranks: Sequence[int]) -> Callable[["Job"], None]:
    """SIGKILL to some ranks, at a moment between the first save and some saves later."""
    delay = random.Random(seed).uniform(0.3, 2.0)
    since: list[float] = []

    def outside(job: "Job") -> None:
        if not since and (job.folder / "runs" / "last.ckpt").exists():
            since.append(time.monotonic())
        if since and time.monotonic() - since[0] > delay:
            for rank in ranks:
                os.kill(job.pids[rank], signal.SIGKILL)
            job.outside = None

    return outside


# ---- ended while a checkpoint is written


class SavesOnce(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.path)


def is_being_written(folder: Path) -> bool:
    runs = folder / "runs"
    return not (runs / "a.ckpt").exists() and any(runs.glob(".lightning_fp8_rocm.saving-*/checkpoint/__1_0.distcp"))


def saves_slowly(
    rank: int, folder: Path, raises: type[BaseException] | None = None, a_write_s: float = 0.003
) -> dict[str, Any]:
    """A checkpoint after the first step takes a second, and in the third step rank 1 raises, or both get a signal."""
    write_slowly(a_write_s)
    told: dict[str, Any] = {"while": False}

    def in_step(module: Line) -> None:
        if module.global_step != 2:
            return
        while not is_being_written(folder):
            time.sleep(0.01)
        if raises is None:
            # Lightning's handler of SIGTERM broadcasts: it must find both ranks here, not one within a collective.
            told["while"] = is_being_written(folder)
            (folder / f"in_step.{rank}").touch()
            while not (folder / "signalled").exists():
                time.sleep(0.01)
        elif rank == 1:
            told["while"] = is_being_written(folder)
            raise raises("the batch is bad")

    try:
        run(SavesOnce(folder / "runs" / "a.ckpt"), max_steps=100).fit(Line(in_step))
    except BaseException as error:
        told |= {"kind": type(error).__name__, "text": str(error)}
    return told


def signal_all_while_it_is_written(number: int) -> Callable[["Job"], None]:
    def outside(job: "Job") -> None:
        if len(list(job.folder.glob("in_step.*"))) == job.world:
            for pid in job.pids.values():
                os.kill(pid, number)
            (job.folder / "signalled").touch()
            job.outside = None

    return outside


# ---- what cannot be written


class NoRoom(L.Callback):
    """After the first checkpoint is complete, rank 1 has no room for a second one."""

    def __init__(self, first: Path) -> None:
        self.first = first

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step != 1:
            return
        while not self.first.exists():
            time.sleep(0.01)
        if trainer.global_rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))


def fails_in_the_background(rank: int, folder: Path, max_steps: int) -> dict[str, Any]:
    checkpoints = keep(folder, save_last=False, save_top_k=1)
    failing = run(NoRoom(folder / "runs" / "step=1.ckpt"), checkpoints, max_steps=max_steps)
    try:
        failing.fit(Line())
    except Exception as error:
        return {"text": str(error), "step": failing.global_step}
    return {"text": "", "step": failing.global_step}


class Tries(L.Callback):
    """After the second step, what `trainer.save_checkpoint` raises where something cannot be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: dict[str, str] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        runs, rank = self.folder / "runs", trainer.global_rank
        if trainer.global_step == 1:
            trainer.save_checkpoint(runs / "a.ckpt")
        if trainer.global_step != 2:
            return
        for full in (0, 1):
            with file_size_limit(LIMIT) if rank == full else contextlib.nullcontext():
                self.told[f"full on rank {full}"] = said(lambda: trainer.save_checkpoint(runs / "a.ckpt"))
        if rank == 0:
            (runs / "file").write_text("no directory")
        trainer.strategy.barrier()
        self.told["no directory"] = said(lambda: trainer.save_checkpoint(runs / "file" / "deeper" / "a.ckpt"))
        trainer.save_checkpoint(runs / "b.ckpt")


def said(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tries_to_save(rank: int, folder: Path) -> dict[str, str]:
    tries = Tries(folder)
    run(tries, background=False, max_steps=3).fit(Line())
    return tries.told


class TriesInTheBackground(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step < 3:
            trainer.save_checkpoint(self.path)


def saves_below_a_file(rank: int, folder: Path) -> dict[str, Any]:
    if rank == 0:
        (folder / "file").write_text("no directory")
    failing = run(TriesInTheBackground(folder / "file" / "a.ckpt"), max_steps=10)
    try:
        failing.fit(Line())
    except Exception as error:
        return {"text": str(error), "step": failing.global_step}
    return {"text": ""}


# ---- damage


class Code:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")


def flip(file: Path) -> None:
    """As a disk does it: no time says so."""
    written = file.stat().st_mtime
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, (written, written))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def written(path: Path, hours_ago: float) -> None:
    for each in (*path.rglob("*"), path):
        os.utime(each, (time.time() - 3600 * hours_ago,) * 2)


def becomes_a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def becomes_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("no checkpoint")


def with_code_in_metadata(folder: Path, touched: Path) -> None:
    """Among sound metadata, where its reader would not look for it."""
    with open(folder / ".metadata", "rb") as file:
        found = pickle.load(file)
    found.planner_data = {"x": Code(touched)}
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def with_code_instead_of_metadata(folder: Path, touched: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Code(touched)))


def with_code_in_meta(folder: Path, touched: Path) -> None:
    rest = torch.load(folder / "meta.pt", weights_only=True)
    torch.save({**rest, "hyper_parameters": Code(touched)}, folder / "meta.pt")


def with_code_in_a_shard(folder: Path, touched: Path) -> None:
    """As a value that is no tensor, which torch's own reader unpickles."""
    made = folder.parent / "made"
    dcp.save({"callbacks": {"x": Code(touched)}}, storage_writer=FileSystemWriter(made), no_dist=True)
    with open(made / ".metadata", "rb") as file:
        theirs = pickle.load(file)
    (made / "__0_0.distcp").rename(folder / "evil.distcp")
    with open(folder / ".metadata", "rb") as file:
        found = pickle.load(file)
    found.state_dict_metadata |= theirs.state_dict_metadata
    found.planner_data |= theirs.planner_data
    for index, place in theirs.storage_data.items():
        place.relative_path = "evil.distcp"
        found.storage_data[index] = place
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    shutil.rmtree(made)


def with_code_in_place_of_a_tensor(folder: Path, touched: Path) -> None:
    torch.save(Code(touched), folder / "evil.distcp")
    with open(folder / ".metadata", "rb") as file:
        found = pickle.load(file)
    place = found.storage_data[min(found.storage_data, key=str)]
    place.relative_path, place.offset, place.length = "evil.distcp", 0, (folder / "evil.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def with_code_in_a_file(file: Path, touched: Path) -> None:
    checkpoint = torch.load(file, weights_only=True)
    torch.save({**checkpoint, "hyper_parameters": Code(touched)}, file)


def outside_of_the_folder(folder: Path, touched: Path) -> None:
    """A shard that lies elsewhere, of which the metadata says so."""
    (folder / "__0_0.distcp").rename(folder.parent / "elsewhere.distcp")
    with open(folder / ".metadata", "rb") as file:
        found = pickle.load(file)
    for place in found.storage_data.values():
        if place.relative_path == "__0_0.distcp":
            place.relative_path = "../elsewhere.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def of_another_step(file: Path) -> None:
    shutil.copy(file.parents[1] / "other.ckpt" / file.name, file)


@dataclass(frozen=True)
class Damage:
    """`do` is called with `file` of the checkpoint, or with the checkpoint itself."""

    file: str
    do: Callable[[Path], object]
    says: str
    """What follows the path of the file; of the checkpoint if it is not read far enough to be verified."""
    form: str = "sharded"
    verified: bool = True

    def expected(self, bad: Path) -> list[str]:
        if not self.verified:
            return [f"{bad}{self.says}"]
        older = f"The newest older checkpoint beside it that is sound: '{bad.parent}/older.ckpt'"
        return [f"{bad / self.file}{self.says}", older]


DAMAGES = {
    "a missing shard": Damage("__1_0.distcp", Path.unlink, ": is missing"),
    "a truncated shard": Damage("__1_0.distcp", cut, ": has "),
    "a byte in a shard": Damage("__0_0.distcp", flip, ": its crc32 is "),
    "a byte in meta.pt": Damage("meta.pt", flip, ": its crc32 is "),
    "a byte in .metadata": Damage(".metadata", flip, ": its crc32 is "),
    "a byte in manifest.json": Damage("manifest.json", flip, ": is damaged"),
    "a byte in a file": Damage("", flip, ": its record ", "full"),
    "a truncated file": Damage("", cut, "' is damaged", "full", verified=False),
    "a shard of another step": Damage("__1_0.distcp", of_another_step, ": its crc32 is "),
    "meta.pt of another step": Damage("meta.pt", of_another_step, ": "),
    "a directory in place of a shard": Damage("__1_0.distcp", becomes_a_directory, ": "),
    "a directory in place of the manifest": Damage("manifest.json", becomes_a_directory, ": "),
    "a directory in place of .metadata": Damage(
        ".metadata", becomes_a_directory, "' is no complete checkpoint: it lacks ['.metadata']", verified=False
    ),
    "a directory in place of a file": Damage(
        "", becomes_a_directory, "' is no complete checkpoint: it lacks ", "full", verified=False
    ),
    "a file in place of a directory": Damage("", becomes_a_file, "' is damaged", verified=False),
}
# name -> the form, what is done to the checkpoint, the file that is named
WITH_CODE: dict[str, tuple[str, Callable[[Path, Path], object], str]] = {
    "code in .metadata": ("sharded", with_code_in_metadata, "{bad}/.metadata"),
    "code in place of .metadata": ("sharded", with_code_instead_of_metadata, "{bad}/.metadata"),
    "code in meta.pt": ("sharded", with_code_in_meta, "{bad}/meta.pt"),
    "code in place of a tensor": ("sharded", with_code_in_place_of_a_tensor, "{bad}"),
    "code in a shard": ("sharded", with_code_in_a_shard, "{bad}"),
    "a shard outside of the folder": ("sharded", outside_of_the_folder, "{bad}/.metadata"),
    "code in a file": ("full", with_code_in_a_file, "{bad}"),
}
LAYOUTS = ("with the manifest of before", "without a manifest", "as stock torch writes it")


CODE = [f"{name}, {layout}" for name, (form, *_) in WITH_CODE.items() if form == "sharded" for layout in LAYOUTS]
CODE += [name for name, (form, *_) in WITH_CODE.items() if form == "full"]


def infected(bad: Path, name: str, good: dict[str, Path], touched: Path) -> None:
    """A copy of a good checkpoint, with code in it; `name` is one of `CODE`."""
    name, _, layout = name.partition(", ")
    form, infect, _ = WITH_CODE[name]
    if form == "full":
        shutil.copy(good[form], bad)
    elif layout == "as stock torch writes it":
        checkpoint = assembled(open_checkpoint(good[form], weights_only=True))
        state = {"state_dict": checkpoint.pop("state_dict"), "optimizer_0": checkpoint.pop("optimizer_states")[0]}
        dcp.save(state, storage_writer=FileSystemWriter(bad), no_dist=True)
        torch.save(checkpoint, bad / "meta.pt")
    else:
        shutil.copytree(good[form], bad)
    infect(bad, touched)
    if layout == "without a manifest":
        (bad / "manifest.json").unlink(missing_ok=True)


class Unchanged(L.Callback):
    """Whether a run that failed to load has the weights it began with, and an optimizer without state."""

    answer: bool | None = None

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        mine = [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in module.parameters()]
        self.answer = all(map(torch.equal, mine, weights_after(0))) and not trainer.optimizers[0].state


def loads_what_is_damaged(rank: int, folder: Path) -> dict[str, Any]:
    """Each case in a folder of its own, with sound checkpoints beside: one older, one newer."""
    good = {"sharded": folder / "good.ckpt", "full": folder / "good-full.ckpt"}
    for form, path in good.items():
        strategy = FSDP2FP8Strategy(auto_wrap_policy={nn.Linear}, state_dict_type=form)
        first = trainer("32-true", strategy=strategy, devices=2, max_steps=2)
        first.fit(Line())
        first.save_checkpoint(path)
    run(SavesOnce(folder / "other.ckpt"), background=False, max_steps=1).fit(Line())
    told: dict[str, Any] = {}
    for name in ("none", *DAMAGES, *CODE):
        case, bad = folder / name, folder / name / "bad.ckpt"
        if rank == 0:
            for beside, hours_ago in (("older", 3), ("other", 1)):
                shutil.copytree(folder / "other.ckpt", case / f"{beside}.ckpt")
                written(case / f"{beside}.ckpt", hours_ago)
            if name in CODE:
                infected(bad, name, good, case / "touched")
            else:
                damage = DAMAGES.get(name, Damage("", lambda file: None, ""))
                (shutil.copytree if damage.form == "sharded" else shutil.copy)(good[damage.form], bad)
                written(bad, 2)
                damage.do(bad / damage.file)
        dist.barrier()
        unchanged = Unchanged()
        loading = run(unchanged, max_steps=3, enable_checkpointing=False)
        told[name] = {
            "said": said(partial(loading.fit, Line(), ckpt_path=str(bad))),
            "unchanged": unchanged.answer,
            "step": loading.global_step,
        }
        dist.barrier()
    return told


# ---------------------------------------------------------------------------------------------------------------------
# How they are started


@dataclass(eq=False)
class Job:
    """Some ranks that do one thing, in a folder of their own."""

    name: str
    folder: Path
    action: Callable[..., Any]
    """Called with the rank, the folder and `args`; what it returns is told."""
    args: tuple[Any, ...] = ()
    world: int = 2
    outside: Callable[["Job"], None] | None = None
    """Called over and over while the ranks run."""
    then: "Job | None" = None
    """Begins when all ranks have ended."""
    pids: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int | None] = field(default_factory=dict)
    """How each rank ended; None for one that had to be ended."""
    deadline: float = 0.0

    def start(self, port: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + 180
        self.pids = {rank: self._fork(rank, port) for rank in range(self.world)}

    def _fork(self, rank: int, port: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            with open(self.folder / f"said.{self.name}.{rank}", "wb") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            os.environ.update(
                # As torchrun does.
                {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.world), "GROUP_RANK": "0"},
                LOCAL_WORLD_SIZE=str(self.world),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                TORCHELASTIC_RUN_ID="crashes",
            )
            if self.action in OF_SAVER:
                dist.init_process_group("gloo")
            told = self.action(rank, self.folder, *self.args)
            (self.folder / f"told.{self.name}.{rank}").write_text(json.dumps(told))
            code = 0
        except SystemExit as leaves:
            code = int(leaves.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def ended(self) -> bool:
        for rank, pid in self.pids.items():
            if rank in self.codes:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > self.deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self.codes[rank] = None
            elif self.codes:  # a peer has ended: the watcher of a strategy needs 4 s, gloo none
                self.deadline = min(self.deadline, time.monotonic() + 30)
        if len(self.codes) < len(self.pids) and self.outside is not None and not self.codes:
            self.outside(self)
        return len(self.codes) == len(self.pids)


# What begins with a process group; a Trainer makes its own.
OF_SAVER = (
    makes_what_was_there,
    is_killed,
    looks_and_saves_again,
    saves_beside_another_run,
    cannot_write_in_the_background,
    cannot_pickle_its_own,
)


class Server:
    """Runs jobs, the first ones first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: list[Job] = []
        self.all: list[Job] = []
        self.ports: set[int] = set()

    def start(self, *jobs: Job) -> None:
        for job in jobs:
            job.start(self._free_port())
            self.running.append(job)
            self.all.append(job)

    def look(self) -> None:
        for job in list(self.running):
            if job.ended():
                self.running.remove(job)
                if job.then is not None:
                    self.start(job.then)
        time.sleep(0.002)

    def finish(self, jobs: Sequence[Job], at_once: int) -> None:
        """Start these, so many at a time, and wait for them; others go on meanwhile."""
        waiting = list(jobs)
        while any(job in self.running for job in jobs) or waiting:
            while waiting and sum(job in self.running for job in jobs) < at_once:
                self.start(waiting.pop(0))
            self.look()

    def _free_port(self) -> int:
        """Below the ports that the system hands out: the gloo sockets of one run would take the port of another."""
        while True:
            port = random.randrange(15000, 32000)
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                if port not in self.ports:
                    self.ports.add(port)
                    return port


RANDOM_KILLS = {"all ranks": (0, 1), "rank 0": (0,), "rank 1": (1,)}


def runs_of_a_trainer(folder: Path) -> list[Job]:
    def job(action: Callable[..., Any], *args: Any, named: str = "", **more: Any) -> Job:
        name = named or action.__name__
        return Job(name, folder / name, action, args, **more)

    jobs = [job(loads_what_is_damaged)]
    for seed, (name, victims) in enumerate(RANDOM_KILLS.items()):
        named = f"killed at random, {name}"
        killed_run = job(trains_until_it_is_killed, named=named, outside=kill_at_random(seed, victims))
        killed_run.then = Job("resumes", killed_run.folder, resumes)
        jobs.append(killed_run)
    for number in (signal.SIGTERM, signal.SIGINT):
        jobs.append(job(saves_slowly, named=number.name, outside=signal_all_while_it_is_written(number)))
    return [
        *jobs,
        job(saves_slowly, KeyboardInterrupt, named="rank 1 raises KeyboardInterrupt"),
        # Longer than the 4 s after which the watcher ends the others, once it is told.
        job(saves_slowly, ValueError, 0.02, named="rank 1 raises ValueError"),
        job(fails_in_the_background, 10, named="fails before the next save"),
        job(fails_in_the_background, 2, named="fails at the end"),
        job(saves_below_a_file),
        job(tries_to_save),
    ]


def serve(folder: Path) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # else the garbage collector of each child copies all that it looks at
    server = Server(folder)
    templates = Job("templates", folder / "templates", makes_what_was_there)
    server.finish([templates], 1)
    not_killed = [Job("save", folder / way.folder, is_killed, (way,)) for way in WAYS]
    server.finish(not_killed, 6)
    plan: dict[str, list[Kill]] = {}
    for way, job in zip(WAYS, not_killed, strict=True):
        plan[way.folder] = kills_of(way, json.loads((job.folder / f"told.save.{way.victim}").read_text()))
    kills = [kill for of_way in plan.values() for kill in of_way]

    server.start(*runs_of_a_trainer(folder))
    server.finish([Job("save", folder / kill.folder, is_killed, (kill,)) for kill in kills], 8)
    together, *alone = ([kill for number, kill in enumerate(kills) if number % 4 in of] for of in ((0,), (1, 2), (3,)))
    server.finish(
        [
            *(
                Job("looks", folder / f"looks-alone-{number}", looks_and_saves_again, (part,), world=1)
                for number, part in enumerate(alone)
            ),
            Job("looks", folder / "looks-together", looks_and_saves_again, ([*WAYS, *together],)),
            Job("saves", folder / "one", saves_beside_another_run, (100, False)),
            Job("saves", folder / "other", saves_beside_another_run, (200, True)),
            Job("saves", folder / "cannot_write", cannot_write_in_the_background),
            Job("saves", folder / "cannot_pickle", cannot_pickle_its_own),
        ],
        7,
    )
    while server.running:
        server.look()
    ended = {f"{job.folder.name}/{job.name}": [job.codes[rank] for rank in range(job.world)] for job in server.all}
    kills_by_way = {name: [asdict(kill) for kill in of_way] for name, of_way in plan.items()}
    (folder / "ended.json").write_text(json.dumps({"codes": ended, "kills": kills_by_way}))


@dataclass
class Crashes:
    """What all of it left."""

    folder: Path
    ended: dict[str, Any]

    def codes(self, name: str, job: str | None = None) -> list[int | None]:
        return self.ended["codes"][f"{name}/{job or name}"]

    def told(self, name: str, job: str | None = None) -> list[Any]:
        """By rank; None of one that did not come so far."""
        files = [self.folder / name / f"told.{job or name}.{rank}" for rank in range(len(self.codes(name, job)))]
        return [json.loads(file.read_text()) if file.exists() else None for file in files]

    def said(self, name: str, job: str | None = None) -> list[str]:
        return [
            (self.folder / name / f"said.{job or name}.{rank}").read_text()
            for rank in range(len(self.codes(name, job)))
        ]


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> Crashes:
    folder = tmp_path_factory.mktemp("crashes")
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (here, here.parent, here.parents[1])))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    subprocess.run([sys.executable, __file__, "serve", str(folder)], env=environment, check=True, timeout=500)
    return Crashes(folder, json.loads((folder / "ended.json").read_text()))


# ---------------------------------------------------------------------------------------------------------------------
# What they left


def looked(crashes: Crashes) -> dict[str, list[dict[str, Any]]]:
    """What the later runs saw of each killed one, each of their ranks."""
    seen: dict[str, list[dict[str, Any]]] = {}
    for later in ("looks-together", "looks-alone-0", "looks-alone-1"):
        for told in crashes.told(later, "looks"):
            assert told is not None, crashes.said(later, "looks")
            for name, found in told.items():
                seen.setdefault(name, []).append(found)
    return seen


def kills(crashes: Crashes, way: Kill) -> list[Kill]:
    return [Kill(**each) for each in crashes.ended["kills"][way.folder]]


each_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.form}-{way.way}-{way.before}-rank{way.victim}")


@each_way
def test_a_save_that_is_killed_at_any_call_leaves_the_checkpoint_before_or_the_new_one_and_older_ones(crashes, way):
    before = BEFORE if way.before == "overwrite" else None
    seen = []
    for kill in kills(crashes, way):
        codes = crashes.codes(kill.folder, "save")
        assert codes[kill.victim] == -signal.SIGKILL, kill
        assert codes[1 - kill.victim] in (0, 1), f"{kill}: the other rank had to be ended"
        for found in looked(crashes)[kill.folder]:
            assert "error" not in found, f"{kill}: {found['error']}"
            assert found["older"] == OLDER, kill
            assert found["last"] in (before, NEW), kill
            if way.removes:  # what was to be removed stays until the new one is there
                assert found["queued"] == OLDER or (found["queued"] is None and found["last"] == NEW), kill
        seen.append(found["last"])
    assert seen == sorted(seen, key=lambda generation: generation == NEW)  # once new, new
    assert seen[0] == before
    if way.victim == 1:  # which has nothing more to write when all is published
        assert set(seen) == {before}
        return
    assert seen[-1] == NEW
    calls = {kill.call for kill in kills(crashes, way)}
    assert calls >= {"write", "fsync", "mkdir", "unlink", "rmdir", "rename" if way.before == "first" else "exchange"}


@each_way
def test_after_a_kill_at_any_call_the_next_run_saves_and_leaves_nothing_but_checkpoints(crashes, way):
    for kill in kills(crashes, way):
        for found in looked(crashes)[kill.folder]:
            assert "error after" not in found, f"{kill}: {found['error after']}"
            assert found["begun"] <= (1 if way.victim == 0 else 0), kill  # a rank 0 that lives removes it itself
            beside = {"queued.ckpt": OLDER} if found["queued"] else {}
            assert found["after"] == {"last.ckpt": NEXT, "older.ckpt": OLDER, **beside}, kill
        assert looked(crashes)[kill.folder][0]["left over"] == found["begun"], kill  # rank 0 knows all of it


@each_way
def test_a_save_that_is_not_killed_is_there_and_what_was_to_be_removed_is_not(crashes, way):
    """That the tests above see a difference."""
    assert crashes.codes(way.folder, "save") == [0, 0], crashes.said(way.folder, "save")
    for found in looked(crashes)[way.folder]:
        gone = way.removes or way.before == "first"
        assert found["last"] == NEW
        assert found["queued"] == (None if gone else OLDER)
        assert found["begun"] == 0


def test_a_rank_that_outlives_a_killed_one_says_rightly_whether_anything_was_published(crashes):
    wrong = []
    for kill in (kill for way in WAYS for kill in kills(crashes, way)):
        said = crashes.said(kill.folder, "save")[1 - kill.victim]
        if "nothing of it was published" in said and looked(crashes)[kill.folder][0]["last"] == NEW:
            wrong.append(f"rank {kill.victim} killed before its call {kill.at} ({kill.call}): {kill.folder}")
    assert wrong == []


def test_what_was_to_be_removed_stays_if_the_save_in_the_background_fails_and_all_ranks_say_why(crashes):
    runs = crashes.folder / "cannot_write" / "runs"
    one, other = crashes.told("cannot_write", "saves")
    assert one == other
    assert "last.ckpt' could not be written" in one
    assert "rank 1: OSError: [Errno 27] File too large" in one
    assert "/checkpoint/__1_0.distcp'" in one
    generations = {name: generation_of(runs / name) for name in sorted(os.listdir(runs))}
    assert generations == {"last.ckpt": BEFORE, "older.ckpt": OLDER, "queued.ckpt": OLDER}


def test_what_one_rank_cannot_hand_over_is_the_same_error_on_all_ranks(crashes):
    one, other = crashes.told("cannot_pickle", "saves")
    assert "lambda" in one
    assert one == other
    assert os.listdir(crashes.folder / "cannot_pickle" / "runs") == []


def test_two_runs_may_save_to_one_directory_at_the_same_time(crashes):
    for name, end in (("one", 107), ("other", 207)):
        assert crashes.told(name, "saves") == [end, end], crashes.said(name, "saves")
    runs = crashes.folder / "shared"
    generations = {name: generation_of(runs / name) for name in sorted(os.listdir(runs))}
    assert generations.keys() == {"last.ckpt", "step=6.ckpt", "step=7.ckpt"}
    assert generations["last.ckpt"] in (107, 207)
    assert generations["step=6.ckpt"] in (106, 206)
    assert generations["step=7.ckpt"] in (107, 207)


# ---- a Trainer's runs


@pytest.mark.parametrize("victims", RANDOM_KILLS)
def test_a_run_that_is_killed_at_a_random_moment_resumes_from_its_last_checkpoint(crashes, victims):
    name = f"killed at random, {victims}"
    codes = crashes.codes(name)
    assert [codes[rank] for rank in RANDOM_KILLS[victims]] == [-signal.SIGKILL] * len(RANDOM_KILLS[victims])
    assert None not in codes, crashes.said(name)
    one, other = crashes.told(name, "resumes")
    assert one is not None, crashes.said(name, "resumes")
    assert one == other
    assert one["last"] >= 1
    assert one["first"] == one["last"]
    assert one["end"] == one["last"] + 3
    runs = crashes.folder / name / "runs"
    steps = {each: step_of(runs / each) for each in os.listdir(runs)}  # all of them checkpoints
    assert steps["last.ckpt"] == one["end"]


ENDS = {
    "SIGTERM": ["SIGTERMException", "SIGTERMException"],
    "SIGINT": ["SystemExit", "SystemExit"],  # as Lightning ends what is interrupted
    "rank 1 raises ValueError": [None, "ValueError"],
    "rank 1 raises KeyboardInterrupt": [None, "SystemExit"],
}


@pytest.mark.parametrize("name", ENDS)
def test_a_checkpoint_that_is_being_written_when_the_run_is_ended_is_published_whole(crashes, name):
    """A signal finds all ranks in `training_step`; an exception is raised there."""
    told = crashes.told(name)
    assert told[1] is not None, crashes.said(name)
    assert told[1]["while"]  # it was not complete yet
    for each, kind in zip(told, ENDS[name], strict=True):
        assert kind is None or each["kind"] == kind
    assert None not in crashes.codes(name), crashes.said(name)
    runs = crashes.folder / name / "runs"
    assert {each: step_of(runs / each) for each in os.listdir(runs)} == {"a.ckpt": 1}


@pytest.mark.parametrize(("name", "step"), [("fails before the next save", 3), ("fails at the end", 2)])
def test_what_fails_in_the_background_is_raised_on_all_ranks_and_the_checkpoint_before_stays(crashes, name, step):
    """By the save after the third step, where that of the second failed; or at the end of `fit`."""
    one, other = crashes.told(name)
    assert one is not None, crashes.said(name)
    assert one == other
    assert one["step"] == step
    assert "step=2.ckpt' could not be written" in one["text"]
    assert "rank 1: OSError: [Errno 27] File too large" in one["text"]
    assert "/checkpoint/__1_0.distcp'" in one["text"]
    # With `save_top_k=1`, ModelCheckpoint had asked to remove it.
    runs = crashes.folder / name / "runs"
    assert {each: step_of(runs / each) for each in os.listdir(runs)} == {"step=1.ckpt": 1}


def test_where_no_directory_can_be_made_a_save_in_the_background_fails_on_all_ranks_at_the_next_one(crashes):
    one, other = crashes.told("saves_below_a_file")
    assert one is not None, crashes.said("saves_below_a_file")
    assert one == other
    assert one["step"] == 2
    assert "/file/a.ckpt' could not be written" in one["text"]
    assert "File exists: " in one["text"]


def test_what_cannot_be_written_at_once_is_raised_on_all_ranks_and_training_can_go_on(crashes):
    one, other = crashes.told("tries_to_save")
    assert one is not None, crashes.said("tries_to_save")
    assert one == other
    for rank in (0, 1):
        text = one[f"full on rank {rank}"]
        assert "a.ckpt' could not be written" in text
        assert f"rank {rank}: OSError: [Errno 27] File too large" in text
        assert f"/checkpoint/__{rank}_0.distcp'" in text
    assert "NotADirectoryError" in one["no directory"]
    assert "/runs/file" in one["no directory"]
    runs = crashes.folder / "tries_to_save" / "runs"
    assert sorted(os.listdir(runs)) == ["a.ckpt", "b.ckpt", "file"]
    assert [step_of(runs / name) for name in ("a.ckpt", "b.ckpt")] == [1, 2]


# ---- damage


def damaged(crashes: Crashes, name: str) -> tuple[Path, str]:
    """The folder of a case, and what loading it says; the same on all ranks, on which nothing changed."""
    one, other = crashes.told("loads_what_is_damaged")
    assert one is not None, crashes.said("loads_what_is_damaged")
    assert one[name] == other[name]
    assert one[name]["said"] != ""
    assert one[name]["unchanged"]
    assert one[name]["step"] == 0
    return crashes.folder / "loads_what_is_damaged" / name, one[name]["said"]


def test_what_is_not_damaged_loads(crashes):
    for told in crashes.told("loads_what_is_damaged"):
        assert told["none"] == {"said": "", "unchanged": None, "step": 3}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_the_same_error_on_all_ranks_that_names_the_file_and_changes_nothing(crashes, name):
    case, said = damaged(crashes, name)
    for part in DAMAGES[name].expected(case / "bad.ckpt"):
        assert part in said


@pytest.mark.parametrize("name", CODE)
def test_code_in_a_checkpoint_is_not_run_and_the_error_names_the_file(crashes, name):
    case, said = damaged(crashes, name)
    assert WITH_CODE[name.split(", ")[0]][2].format(bad=case / "bad.ckpt") in said
    assert not (case / "touched").exists()


@pytest.mark.parametrize("name", [name for name in CODE if ", " in name])
def test_load_from_checkpoint_of_a_directory_runs_no_code_in_it(crashes, name):
    case = crashes.folder / "loads_what_is_damaged" / name
    with pytest.raises((ValueError, pickle.UnpicklingError)) as caught:
        Line.load_from_checkpoint(case / "bad.ckpt")
    assert WITH_CODE[name.split(", ")[0]][2].format(bad=case / "bad.ckpt") in str(caught.value)
    assert not (case / "touched").exists()


@pytest.mark.parametrize("name", [name for name in DAMAGES if "file" not in name])
def test_load_from_checkpoint_refuses_a_damaged_directory(crashes, name):
    case = crashes.folder / "loads_what_is_damaged" / name
    with pytest.raises(ValueError, match=r"bad\.ckpt") as caught:
        Line.load_from_checkpoint(case / "bad.ckpt")
    assert DAMAGES[name].expected(case / "bad.ckpt")[0] in str(caught.value)


@pytest.mark.parametrize("infect", ["code in .metadata", "code in a shard"])
def test_the_code_would_run_if_torch_read_it_by_itself(crashes, tmp_path, infect):
    """That the tests above can fail."""
    good = {"sharded": crashes.folder / "loads_what_is_damaged" / "good.ckpt"}
    infected(tmp_path / "bad.ckpt", f"{infect}, {LAYOUTS[1]}", good, tmp_path / "touched")
    if infect == "code in .metadata":
        dcp.FileSystemReader(tmp_path / "bad.ckpt").read_metadata()
    else:
        dcp.load({"callbacks": {"x": None}}, checkpoint_id=tmp_path / "bad.ckpt", no_dist=True)
    assert (tmp_path / "touched").exists()


if __name__ == "__main__":
    serve(Path(sys.argv[2]))
