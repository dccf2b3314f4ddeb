"""When a checkpoint is written: now, or by a thread while training goes on; and what is published when.

A checkpoint is written beside its name and published by rank 0 after all ranks have reported that their part is on
disk. Until then whatever stood under the name stays, and so do older checkpoints that were to be removed.
"""

from __future__ import annotations

import copy
import logging
import pickle
import resource
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_fp8_rocm.distributed import publish, storage
from lightning_fp8_rocm.distributed.faults import agreed, exchange, is_agreed, raise_together, same_on_all_ranks

log = logging.getLogger("lightning_fp8_rocm")
T = TypeVar("T")

# Ranks wait for the slowest disk. That a rank is dead is for the watcher of the run to see, within seconds.
_LONGEST_WRITE = timedelta(days=1)


class Saver:
    """Writes checkpoints, one at a time.

    All methods but ``remove`` are called by all ranks together. What fails on one rank is raised on all, with the same
    text. Gloo serves the thread, on a group of its own: two threads on one group would take each other's messages.
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None  # the default one until `prepare`
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._lock = threading.RLock()  # the handler of a signal may save, too
        self._is_writing = False
        self._to_remove: list[Path] = []
        self._left_overs: list[publish.LeftOver] = []

    def prepare(self) -> None:
        """Make the group in which checkpoints are written; collective, and again after the process group is made anew.

        Also for what is written at once: ranks wait for the slowest disk longer than for a gradient, and what they tell
        each other of it has no place on a GPU.
        """
        _raise_limit_of_open_files()
        try:
            self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
        except RuntimeError as error:
            raise RuntimeError(
                f"The ranks cannot connect over gloo, which writing checkpoints needs: {error}. Each rank opens a"
                f" connection to each of the {dist.get_world_size()} others (`ulimit -n`), over the interface that"
                " GLOO_SOCKET_IFNAME names, or the one that the name of the host belongs to."
            ) from error

    def look_around(self, folders: Iterable[Path]) -> list[publish.LeftOver]:
        """On rank 0, remember what earlier runs began to write in ``folders`` and did not publish; it is returned.

        The next checkpoint that is published into such a folder removes it.
        """
        self._left_overs = (
            [each for folder in sorted(set(folders)) for each in publish.left_overs(folder)] if _is_first(None) else []
        )
        return self._left_overs

    def save(
        self,
        path: Path,
        state: Mapping[str, Any],
        rest: Mapping[str, Any],
        *,
        full: bool,
        own: Mapping[str, Any] | None = None,
        background: bool = False,
    ) -> None:
        """Write and publish a checkpoint; waits for the one before.

        Args:
            path: Its name, the same on all ranks.
            state: See :func:`storage.write_sharded`; for one file, what rank 0 puts beside ``rest``.
            rest: All else that it holds.
            full: Whether it is one file, which rank 0 writes.
            own: What is different on each rank; ``rest["fp8_rocm"]["ranks"]`` becomes the list of them.
            background: Return at once. ``state`` must then share no memory with the model. A failure is raised by the
                next call of ``save`` or :meth:`wait`.

        Raises:
            RuntimeError: The checkpoint, or the one before, could not be written. What stood under its name is intact.
        """
        self.wait()
        if not background:
            self._write(path, state, rest, full, own)
            return
        with raise_together(f"copying what goes into {str(path)!r}"):
            rest, own = copy.deepcopy(dict(rest)), copy.deepcopy(own)

        def work() -> None:
            try:
                self._write(path, state, rest, full, own)
            except Exception as error:
                self._failure = error
            finally:
                self._finish()

        self._is_writing = True
        # Not a daemon: a script that ends without a word still waits for its last checkpoint.
        self._thread = threading.Thread(target=work, name="lightning_fp8_rocm-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            RuntimeError: It could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def remove(self, path: Path) -> None:
        """Remove a checkpoint, on one rank; only after the one that is being written is published.

        If that fails, it is not removed: it may be the last good one.
        """
        with self._lock:
            if self._is_writing:
                self._to_remove.append(path)
                return
        _remove(path)

    def check_sound(self, path: Path) -> None:
        """Check a checkpoint against the crc32 that was written with it; collective: each rank reads a part of it.

        Raises:
            ValueError: It is damaged; on all ranks, with the name of the file and of the newest older checkpoint beside
                it that is sound.
            DistributedError: Ranks see different checkpoints under that name.
        """
        group = self._group
        parts, part = (dist.get_world_size(group), dist.get_rank(group)) if dist.is_initialized() else (1, 0)
        with raise_together(f"verifying {str(path)!r}", group):
            seen, damages = storage.identity(path), publish.verify(path, part=part, parts=parts)
        found = list(dict.fromkeys(str(each) for of_rank in exchange(damages, group) for each in of_rank))
        if not found:
            same_on_all_ranks(seen, f"What is in the checkpoint {str(path)!r}", group)
            return
        hint = ""
        with raise_together(f"looking for a sound checkpoint beside {str(path)!r}", group):
            if part == 0:
                hint = _sound_one_beside(path, found)
        hint = exchange(hint, group)[0]
        raise agreed(ValueError(f"The checkpoint {str(path)!r} is damaged: {'; '.join(found)}. {hint}"))

    # ---- how

    def _finish(self) -> None:
        with self._lock:
            self._is_writing = False
            removing, self._to_remove = self._to_remove, []
        if self._failure is None:
            for path in removing:
                _remove(path)

    def _write(
        self,
        path: Path,
        state: Mapping[str, Any],
        rest: Mapping[str, Any],
        full: bool,
        own: Mapping[str, Any] | None,
    ) -> None:
        group = self._group
        staging: publish.Staging | None = None
        try:
            staging = _on_first(lambda: publish.Staging.begin(path), "making a folder for it", group)
            if own is not None:
                rest = {**rest, storage.OWN_KEY: {**rest.get(storage.OWN_KEY, {}), "ranks": _gather(own, group)}}
            if full:
                _on_first(lambda: storage.write_full(_of(staging).path, {**state, **rest}), "writing", group)
            else:
                folder = exchange("" if staging is None else str(staging.path), group)[0]
                storage.write_sharded(Path(folder), state, rest, group)
            _on_first(lambda: _of(staging).publish(), "publishing", group)
        except BaseException as error:
            if staging is not None:
                _discard(staging)
            if not isinstance(error, Exception):
                raise
            if not is_agreed(error) and dist.is_initialized() and dist.get_world_size(group) > 1:
                # A rank is gone. Whether rank 0 had published, this one cannot know.
                raise RuntimeError(
                    f"The checkpoint {str(path)!r} was being written when a rank failed or ended. Under that name is"
                    f" either this checkpoint or what stood there before, whole. {error}"
                ) from error
            raise agreed(
                RuntimeError(
                    f"The checkpoint {str(path)!r} could not be written, and nothing of it was published; what stood"
                    f" under that name is as it was. {error}"
                )
            ) from error
        if staging is not None:
            self._tidy(path.parent)

    def _tidy(self, folder: Path) -> None:
        # Looked for again: of a process on another host it is certain only after a while that it is dead.
        named = [each for each in self._left_overs if each.folder.parent.absolute() == folder.absolute()]
        for removed in publish.remove_left_overs(dict.fromkeys([*named, *publish.left_overs(folder)])):
            log.info("Removed what an earlier run had left of a checkpoint: %s", removed)
        self._left_overs = [each for each in self._left_overs if each not in named]


def _discard(staging: publish.Staging) -> None:
    try:
        staging.discard()
    except OSError as error:  # what is to be raised is why the checkpoint could not be written
        log.warning("%s could not be removed: %s", staging.folder, error)


def _raise_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * dist.get_world_size() + 1024
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _of(staging: publish.Staging | None) -> publish.Staging:
    assert staging is not None  # of rank 0, which alone comes here
    return staging


def _is_first(group: dist.ProcessGroup | None) -> bool:
    return not dist.is_initialized() or dist.get_rank(group) == 0


def _on_first(action: Callable[[], T], where: str, group: dist.ProcessGroup | None) -> T | None:
    """Run ``action`` on rank 0 alone; all learn whether it failed."""
    with raise_together(where, group):
        return action() if _is_first(group) else None
    return None


def _gather(own: T, group: dist.ProcessGroup | None) -> list[T] | None:
    """What each rank passes, on rank 0."""
    if not dist.is_initialized():
        return [own]
    with raise_together("collecting what each rank saves of its own", group):
        pickled = pickle.dumps(own)  # not by the collective, in which one rank would raise alone
    gathered: list[Any] | None = [None] * dist.get_world_size(group) if _is_first(group) else None
    dist.gather_object(pickled, gathered, group_dst=0, group=group)
    return None if gathered is None else [pickle.loads(each) for each in gathered]


def _remove(path: Path) -> None:
    # Not worth a run: the checkpoint that replaces it is complete.
    try:
        publish.remove(path)
    except OSError as error:
        log.warning("The checkpoint %s could not be removed: %s", path, error)


def _sound_one_beside(path: Path, damages: Sequence[str]) -> str:
    log.warning(
        "The checkpoint %s is damaged (%s). Looking for an older one that is sound ...", path, "; ".join(damages[:3])
    )
    # What damaged it may have been a while later, and changed the time of the directory or of a file.
    written = min(each.lstat().st_mtime for each in (path, *path.rglob("*")))
    sound = publish.newest_sound(path, older_than=written)
    if sound is None:
        return "No older checkpoint beside it is sound."
    return f"The newest older checkpoint beside it that is sound: {str(sound)!r}. Pass that one, if its step will do."
