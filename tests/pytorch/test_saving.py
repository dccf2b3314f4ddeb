"""Checkpoints where ranks are not all in the same place, where others use the files, and of what no file can hold."""

import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flavours import LIGHTNING, Lightning
from models import Blocks, batches
from ranks import Ranks
from torch.optim import AdamW

from lightning_fp8_rocm.distributed import publish, storage, whole
from lightning_fp8_rocm.distributed.publish import CheckedFile, Staging


def sharded(pl: Lightning, strategy: Any = None, **flags: Any) -> Any:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = strategy or pl.FSDP2FP8Strategy(compile=False)
    return pl.trainer("32-true", strategy=strategy, devices=world, **{"max_epochs": 1, **flags})


def background(pl: Lightning) -> Any:
    return pl.FSDP2FP8Strategy(compile=False, async_checkpoint=True)


def saving(pl: Lightning, folder: Path, **flags: Any) -> dict[str, Any]:
    return {"callbacks": [pl.callbacks.ModelCheckpoint(folder, save_last=True, **flags)], "enable_checkpointing": True}


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def saved(pl: Lightning, path: Path, module: Any = None) -> Any:
    run = sharded(pl, max_steps=2)
    run.fit(module or pl.module(Blocks)(), batches())
    run.save_checkpoint(path)
    return run


# ---- an exception


class Fails(Blocks):
    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone

    def training_step(self, batch: Any, index: int) -> Any:
        if not self.alone or dist.get_rank() == 1:
            raise ArithmeticError("loss is NaN")
        time.sleep(60)  # as within a collective: nothing but the watcher ends this rank


def fail(pl: Lightning, folder: Path, alone: bool) -> None:
    keep = pl.callbacks.OnExceptionCheckpoint(str(folder))
    sharded(pl, callbacks=[keep], enable_checkpointing=True).fit(pl.module(Fails)(alone), batches())


def all_fail(pl: Lightning, folder: Path) -> str:
    return error_of(lambda: fail(pl, folder, alone=False))


def test_where_all_ranks_raise_a_callback_saves_on_the_exception(pl: Lightning, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, all_fail, pl, tmp_path) == ["ArithmeticError: loss is NaN"] * 2
    assert publish.verify(tmp_path / "on_exception.ckpt") == []
    assert storage.open_checkpoint(tmp_path / "on_exception.ckpt", weights_only=True).optimizers


def test_a_rank_that_raises_alone_ends_the_run_though_a_callback_would_save_on_exceptions(tmp_path: Path) -> None:
    from ranks import _free_port

    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    paths = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    )
    both = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path)],
            env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "PYTHONPATH": paths}
            | {"TORCHELASTIC_RUN_ID": "alone", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    other, alone = (each.communicate(timeout=55)[1] for each in both)
    assert [each.returncode for each in both] == [1, 1]
    assert "ArithmeticError: loss is NaN" in alone
    assert "No checkpoint is saved because of this exception: not all ranks raised one" in alone
    assert "rank 0 ends, because rank 1 raised ArithmeticError: loss is NaN" in other
    assert list(tmp_path.iterdir()) == []


def interrupted(pl: Lightning, path: Path) -> str:
    run = saved(pl, path)
    write = CheckedFile.write

    def interrupt(self: CheckedFile, buffer: Any) -> int:
        if self._path.endswith(".distcp"):
            raise KeyboardInterrupt
        return write(self, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckedFile, "write", interrupt)
        try:
            run.save_checkpoint(path)
        except BaseException as error:
            return type(error).__name__
    return "nothing was raised"


def test_an_interrupt_during_a_save_stays_one_and_leaves_the_checkpoint_that_was_there(
    pl: Lightning, ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(2, interrupted, pl, tmp_path / "a.ckpt") == ["KeyboardInterrupt"] * 2
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]
    assert publish.verify(tmp_path / "a.ckpt") == []


# ---- file systems


def not_shared(pl: Lightning, folder: Path) -> str:
    saved(pl, folder / "before.ckpt")
    first = dist.get_rank() == 0
    made = storage._Writer.__init__

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "_PROPAGATION_S", 0.3)
        if not first:  # its own disk
            patch.setattr(storage._Writer, "__init__", lambda self, path: made(self, folder / "elsewhere" / path.name))
        return error_of(lambda: saved(pl, folder / "after.ckpt"))


@pytest.mark.parametrize("pl", [LIGHTNING], ids=str)
def test_where_a_pretended_host_has_a_disk_of_its_own_nothing_is_published(
    pl: Lightning, ranks: Ranks, tmp_path: Path
) -> None:
    one, other = ranks(2, not_shared, pl, tmp_path)
    assert one == other
    assert "Rank 1 wrote '__1_0.distcp', but host" in one
    assert "must be on a file system that all hosts share" in one
    shutil.rmtree(tmp_path / "elsewhere")
    assert [each.name for each in tmp_path.iterdir()] == ["before.ckpt"]
    assert publish.verify(tmp_path / "before.ckpt") == []


def slow_disk(pl: Lightning, folder: Path) -> bool:
    write = CheckedFile.write
    run = sharded(
        pl, pl.FSDP2FP8Strategy(compile=False, timeout=timedelta(seconds=4), state_dict_type="full"), max_steps=1
    )
    run.fit(pl.module(Blocks)(), batches())
    slept = []

    def slowly(self: CheckedFile, buffer: Any) -> int:
        if "checkpoint" in Path(self._path).name and not slept:
            slept.append(time.sleep(7))
        return write(self, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckedFile, "write", slowly)
        run.save_checkpoint(folder / "slow.ckpt")
    return (folder / "slow.ckpt").is_file()


@pytest.mark.parametrize("pl", [LIGHTNING], ids=str)
def test_a_save_may_take_longer_than_the_timeout_of_the_training(pl: Lightning, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, slow_disk, pl, tmp_path) == [True, True]


def seen_differently(pl: Lightning, folder: Path) -> str:
    path = folder / "a.ckpt"
    saved(pl, path)
    first = dist.get_rank() == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "identity", lambda path: (1 if first else 2,))
        return error_of(lambda: sharded(pl, max_steps=3).fit(pl.module(Blocks)(), batches(), ckpt_path=path))


@pytest.mark.parametrize("pl", [LIGHTNING], ids=str)
def test_ranks_that_pretend_to_see_different_files_under_one_name_load_none(
    pl: Lightning, ranks: Ranks, tmp_path: Path
) -> None:
    one, other = ranks(2, seen_differently, pl, tmp_path)
    assert one == other
    assert "must be the same on all ranks, but is (1,) on rank 0 of 2; (2,) on rank 1 of 2" in one


def replace(path: Path) -> None:
    """As a running training does, with itself."""
    staging = Staging.begin(path)
    shutil.copytree(path, staging.path) if path.is_dir() else shutil.copy(path, staging.path)
    staging.publish()


@pytest.mark.parametrize("pl", [LIGHTNING], ids=str)
@pytest.mark.parametrize("form", ["sharded", "full"])
def test_what_is_replaced_while_it_is_read_is_an_error(
    pl: Lightning, ranks: Ranks, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    ranks(1, replaced_while_it_is_loaded, pl, path, form)
    read = whole.assembled
    monkeypatch.setattr(whole, "assembled", lambda contents: [replace(path), read(contents)][1])
    with pytest.raises(storage.ReplacedError, match=r"last\.ckpt' was replaced by a newer one while it was read. Load"):
        whole.load(path, version="2.6.6")


def replaced_while_it_is_loaded(pl: Lightning, path: Path, form: str) -> None:
    from lightning_fp8_rocm.distributed import checkpoint

    def run() -> Any:
        return sharded(pl, pl.FSDP2FP8Strategy(compile=False, state_dict_type=form), max_steps=2)

    first = run()
    first.fit(pl.module(Blocks)(), batches())
    first.save_checkpoint(path)
    load = checkpoint.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "load", lambda *args, **others: [replace(path), load(*args, **others)][1])
        said = error_of(lambda: run().fit(pl.module(Blocks)(), batches(), ckpt_path=path))
    assert "was replaced by a newer one while it was read" in said


class Begins:
    """At which step training begins."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.step = trainer.global_step


def old_only(pl: Lightning, folder: Path) -> tuple[int, int, bool]:
    """A kill between the two renames of a file system that cannot exchange."""
    path = folder / "last.ckpt"
    sharded(pl, max_steps=2, **saving(pl, folder)).fit(pl.module(Blocks)(), batches(4))
    dist.barrier()
    if dist.get_rank() == 0:
        path.rename(folder / "last.ckpt.old")
    dist.barrier()
    assert pl.module(Blocks).load_from_checkpoint(path).state_dict().keys() == pl.module(Blocks)().state_dict().keys()
    dist.barrier()
    flags, begun = saving(pl, folder), pl.callback(Begins)()
    run = sharded(pl, max_steps=3, max_epochs=3, **{**flags, "callbacks": [begun, *flags["callbacks"]]})
    run.fit(pl.module(Blocks)(), batches(4), ckpt_path="last")
    return run.global_step, begun.step, (folder / "last.ckpt.old").exists()


def test_a_replacement_that_ended_halfway_is_still_the_last_checkpoint(
    pl: Lightning, ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(2, old_only, pl, tmp_path) == [(3, 2, False)] * 2


def test_what_may_still_be_being_replaced_keeps_its_second_name(tmp_path: Path) -> None:
    for name in ("a.ckpt.old", "b.ckpt.old", "notes.old"):
        (tmp_path / name).write_text(name)
    staging = Staging.begin(tmp_path / "b.ckpt")  # of this process, which lives
    assert publish.recover(tmp_path) == [tmp_path / "a.ckpt"]
    assert {each.name for each in tmp_path.iterdir()} == {"a.ckpt", "b.ckpt.old", "notes.old", staging.folder.name}


@pytest.mark.parametrize("name", ["/etc/hostname", "../other.ckpt/meta.pt", ""])
def test_a_manifest_that_names_files_outside_is_damaged(tmp_path: Path, name: str) -> None:
    publish.write_manifest(tmp_path, {name: publish.FileSum(0, 0)})
    (damage,) = publish.verify(tmp_path)
    assert "names files outside of the checkpoint" in str(damage)


def test_a_device_in_place_of_a_shard_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").symlink_to("/dev/zero")
    publish.write_manifest(tmp_path, {"__0_0.distcp": publish.FileSum(0, 0)})
    (damage,) = publish.verify(tmp_path)
    assert "is no ordinary file" in str(damage)


def without_manifest(pl: Lightning, path: Path) -> list[str]:
    saved(pl, path)
    (path / publish.MANIFEST_NAME).unlink()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded(pl, max_steps=3).fit(pl.module(Blocks)(), batches(), ckpt_path=path)
    return [str(each.message) for each in caught]


def test_a_checkpoint_that_has_lost_its_manifest_loads_with_a_warning(
    pl: Lightning, ranks: Ranks, tmp_path: Path
) -> None:
    (said,) = ranks(1, without_manifest, pl, tmp_path / "a.ckpt")
    assert any("has lost its manifest.json: it was loaded without being verified" in each for each in said)


# ---- what is refused


def refusals(pl: Lightning, folder: Path) -> dict[str, str]:
    def fit(strategy: Any = None, **flags: Any) -> str:
        return error_of(lambda: sharded(pl, strategy, max_steps=1, **flags).fit(pl.module(Blocks)(), batches()))

    (folder / "file").write_text("")
    link = {"callbacks": [pl.callbacks.ModelCheckpoint(folder, save_last="link")], "enable_checkpointing": True}
    remote = {"callbacks": [pl.callbacks.ModelCheckpoint("memory://run")], "enable_checkpointing": True}
    return {
        "link": fit(background(pl), **link),
        "remote": fit(**remote),
        "no folder": fit(**saving(pl, folder / "file" / "runs")),
        "io": error_of(
            lambda: pl.Trainer(
                accelerator="cpu",
                devices=1,
                strategy="fsdp2_fp8",
                plugins=[pl.of("plugins.io").AsyncCheckpointIO()],
                fast_dev_run=1,
            ).fit(pl.module(Blocks)(), batches())
        ),
    }


def test_what_cannot_be_saved_to_or_by_is_refused_at_setup(pl: Lightning, ranks: Ranks, tmp_path: Path) -> None:
    (said,) = ranks(1, refusals, pl, tmp_path)
    assert '`ModelCheckpoint(save_last="link")` does not work with' in said["link"]
    assert "Pass `save_last=True`" in said["link"]
    assert "but got 'memory://run'" in said["remote"]
    assert f"Checkpoints are to be saved in '{tmp_path}/file/runs', but '{tmp_path}/file' is no" in said["no folder"]
    assert "AsyncCheckpointIO is a CheckpointIO, and FSDP2FP8Strategy uses none" in said["io"]
    assert "async_checkpoint=True" in said["io"]


class Packed(torch.Tensor):
    """As the 8-bit states of torchao: a class of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def detach(self) -> torch.Tensor:
        return self


class PackedAdamW(AdamW):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            state["packed"] = torch.zeros(3).as_subclass(Packed)
        return loss


class PackedBlocks(Blocks):
    def configure_optimizers(self) -> Any:
        return PackedAdamW(self.parameters(), lr=1e-3)


def packed_states(pl: Lightning, folder: Path) -> tuple[list[str], str]:
    run = sharded(pl, max_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(pl.module(PackedBlocks)(), batches())
    run.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    return [str(each.message) for each in caught], error_of(lambda: run.save_checkpoint(folder / "all.ckpt"))


@pytest.mark.parametrize("pl", [LIGHTNING], ids=str)
def test_states_that_no_checkpoint_can_hold_are_told_of_at_the_first_step_and_refused(
    pl: Lightning, ranks: Ranks, tmp_path: Path
) -> None:
    for said, refused in ranks(2, packed_states, pl, tmp_path):
        assert "PackedAdamW keeps the state 'packed' of" in refused
        assert "a Packed, a tensor of a class of its own" in refused
        if said:
            told = [each for each in said if "saving will fail, unless with `save_weights_only=True`" in each]
            assert len(told) <= 1
    assert [each.name for each in tmp_path.iterdir()] == ["weights.ckpt"]


# ---- in the background


class Extra(Blocks):
    """Has a state that is no tensor and goes on changing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"steps": 0}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen["steps"] += 1
        return super().training_step(batch, index)


class Saves:
    """Saves at every step, and looks whether the save before was complete when the next one is copied."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.before_requeue, self.in_time = folder, [], []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        step = trainer.global_step
        trainer.save_checkpoint(self.folder / f"{step}.ckpt")
        slurm = self.folder / f"hpc_ckpt_{step}.ckpt"
        trainer.save_checkpoint(slurm)
        self.before_requeue.append(slurm.exists())

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.in_time.append(trainer.strategy._saver._thread is None)


def in_background(pl: Lightning, folder: Path) -> tuple[list[bool], list[bool]]:
    saves = pl.callback(Saves)(folder)
    slowly = CheckedFile.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckedFile, "write", lambda self, buffer: [time.sleep(0.0002), slowly(self, buffer)][1])
        sharded(pl, background(pl), max_steps=2, callbacks=[saves]).fit(pl.module(Extra)(), batches(4))
    return saves.before_requeue, saves.in_time


def test_in_the_background_a_checkpoint_is_of_one_moment_and_one_at_a_time(
    pl: Lightning, ranks: Ranks, tmp_path: Path
) -> None:
    for before_requeue, in_time in ranks(2, in_background, pl, tmp_path):
        assert before_requeue == [True] * 2
        assert in_time == [True] * 4
    for step in (1, 2):
        contents = storage.open_checkpoint(tmp_path / f"{step}.ckpt", weights_only=True)
        assert contents.model["_extra_state"] == {"steps": step}
        assert contents.rest["global_step"] == step
        assert publish.verify(tmp_path / f"{step}.ckpt") == []


if __name__ == "__main__":
    fail(LIGHTNING, Path(sys.argv[1]), alone=True)
