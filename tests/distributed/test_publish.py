"""A checkpoint is there whole or not at all, whenever the process that writes it is killed, and damage is found.

Processes are forked from this one. `os.fsync` is done without where only processes die, not the machine: what the
kernel was given, it has.
"""

import ctypes
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import killed
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from lightning_fp8_rocm.distributed import publish
from lightning_fp8_rocm.distributed.publish import (
    MANIFEST_NAME,
    CheckedFile,
    FileSum,
    LeftOver,
    Staging,
    find,
    left_overs,
    local_path,
    newest_sound,
    remove,
    remove_left_overs,
    verify,
    write_manifest,
)

FILES = ("__0_0.distcp", "meta.pt", ".metadata")


def start(action: Callable[[], object]) -> int:
    """Run `action` in a child; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        action()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(action: Callable[[], object]) -> int:
    return exit_code(start(action))


def write(path: Path, data: bytes) -> FileSum:
    """In two pieces, so that there is a moment between them."""
    with CheckedFile(path) as file:
        file.write(data[: len(data) // 2])
        file.write(data[len(data) // 2 :])
    return file.sum


def data(form: str, generation: int) -> dict[str, bytes] | bytes:
    return (
        {name: f"{name} {generation} ".encode() * 9 for name in FILES}
        if form == "directory"
        else b"%d" % generation * 9
    )


def fill(path: Path, form: str, generation: int) -> None:
    content = data(form, generation)
    if isinstance(content, bytes):
        write(path, content)
        return
    os.mkdir(path)
    write_manifest(path, {name: write(path / name, each) for name, each in content.items()})


def save(target: Path, form: str, generation: int) -> None:
    staging = Staging.begin(target)
    try:
        fill(staging.path, form, generation)
        staging.publish()
    except BaseException:
        staging.discard()
        raise


def content_of(path: Path) -> dict[str, bytes] | bytes | None:
    if path.is_dir():
        assert verify(path) == []
        return {each.name: each.read_bytes() for each in path.iterdir() if each.name != MANIFEST_NAME}
    return path.read_bytes() if path.exists() else None


def stagings(folder: Path) -> list[Path]:
    return sorted(folder.glob(".lightning_fp8_rocm.saving-*"))


def age(folder: Path) -> None:
    """As if nothing in it had changed for two hours."""
    for each in (*folder.rglob("*"), folder):
        os.utime(each, (time.time() - 7200,) * 2, follow_symlinks=False)


def cannot_exchange(one: Path, other: Path) -> None:
    raise OSError(errno.EINVAL, "pretended: as NFS says it")


@pytest.fixture
def no_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(params=["exchange", "exchange pretended missing"])
def exchange(request, monkeypatch) -> bool:
    if request.param != "exchange":
        monkeypatch.setattr(publish, "_exchange", cannot_exchange)
    return request.param == "exchange"


# ---- killed at every call


def kills(folder: Path, prepare: Callable[[], None], action: Callable[[], None]) -> Iterator[str]:
    """Run `action` in children, killed at one call after the other and at none, and yield after each.

    Writes are torn, too.
    """
    told, tell = os.pipe()

    def doomed(at: int, torn: bool) -> None:
        killed.install(at, torn)
        action()
        os.write(tell, json.dumps(killed.calls()).encode())

    def run(at: int, torn: bool) -> int:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        prepare()
        return in_child(lambda: doomed(at, torn))

    assert run(0, False) == 0
    calls = json.loads(os.read(told, 1 << 16))
    for at, name in enumerate(calls, start=1):
        for torn in (False, True) if name == "write" else (False,):
            assert run(at, torn) == -signal.SIGKILL
            yield f"{'torn at' if torn else 'before'} call {at} of {calls}"
    assert run(0, False) == 0
    yield "not killed"
    os.close(told)
    os.close(tell)


def remove_what_lies_about(folder: Path) -> None:
    found = left_overs(folder)
    nobodys = set(stagings(folder)) - {each.folder for each in found}
    for each in nobodys:  # killed before it said whose it is: age alone tells
        assert set(os.listdir(each)) <= {"owner.json"}  # nothing big among it
        owner = each / "owner.json"
        assert not owner.exists() or owner.stat().st_size == 0 or not owner.read_text().endswith("}")
        age(each)
    found = left_overs(folder)
    assert [each.folder for each in found] == stagings(folder)
    assert remove_left_overs(found) == [each.folder for each in found]


@pytest.mark.parametrize("form", ["directory", "file"])
@pytest.mark.parametrize("before", [None, "directory", "file"])
def test_a_save_killed_at_any_call_leaves_the_checkpoint_before_or_the_new_one(
    tmp_path, no_sync, exchange, form, before
):
    folder = tmp_path / "runs"
    target = folder / "last.ckpt"
    previous = None if before is None else data(before, 1)

    def prepare() -> None:
        if before is not None:
            save(target, before, 1)

    seen = []
    for when in kills(folder, prepare, lambda: save(target, form, 2)):
        path, sentence = find(target)
        assert (sentence is None) == (path == target), when
        assert content_of(path) in (previous, data(form, 2)), when
        seen.append(content_of(path))
        save(target, form, 3)
        assert content_of(find(target)[0]) == data(form, 3), when
        remove_what_lies_about(folder)
        rest = set(os.listdir(folder)) - {target.name}
        assert rest <= (set() if exchange else {"last.ckpt.old"}), when
        assert all(content_of(folder / name) == previous for name in rest), when
    assert seen == sorted(seen, key=lambda each: each == data(form, 2))  # once new, new
    assert len(seen) > 10
    assert seen[0] == previous
    assert seen[-1] == data(form, 2)


def test_the_kills_catch_a_save_in_place(tmp_path, no_sync):
    """That the test above can fail."""
    folder = tmp_path / "runs"
    target = folder / "last.ckpt"

    def save_in_place() -> None:
        shutil.rmtree(target)
        fill(target, "directory", 2)

    whole = (data("directory", 1), data("directory", 2))
    states = [
        {each.name: each.read_bytes() for each in target.glob("*") if each.name != MANIFEST_NAME}
        for _ in kills(folder, lambda: save(target, "directory", 1), save_in_place)
    ]
    assert {} in states
    assert any(0 < len(state) < len(FILES) for state in states)
    assert any(len(state) == len(FILES) and state not in whole for state in states)  # torn


@pytest.mark.parametrize("form", ["directory", "file", "link"])
def test_a_removal_killed_at_any_call_leaves_all_or_nothing(tmp_path, no_sync, form):
    folder = tmp_path / "runs"
    target = folder / "a.ckpt"
    outside = tmp_path / "outside"
    fill(outside, "directory", 7)

    def prepare() -> None:
        fill(folder / "a.ckpt.old", "directory", 0)
        target.symlink_to(outside) if form == "link" else save(target, form, 1)

    whole = data("directory", 7) if form == "link" else data(form, 1)
    seen = []
    for when in kills(folder, prepare, lambda: remove(target)):
        assert content_of(find(target)[0]) in (whole, None), when
        seen.append(content_of(find(target)[0]))
        remove(target)
        remove_what_lies_about(folder)
        assert os.listdir(folder) == [], when
    assert seen[0] == whole
    assert seen[-1] is None
    assert content_of(outside) == data("directory", 7)


def test_removing_what_is_not_there_does_nothing(tmp_path):
    remove(tmp_path / "runs" / "a.ckpt")
    remove(tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


def test_on_a_full_disk_pretended_a_checkpoint_can_be_removed(tmp_path, monkeypatch):
    save(tmp_path / "a.ckpt", "directory", 1)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "mkdir", full)
    remove(tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


# ---- what is on the disk before the name is


@pytest.mark.parametrize("before", [None, "directory"])
def test_all_files_and_directories_are_synced_before_the_rename_and_the_parent_after(tmp_path, monkeypatch, before):
    target = tmp_path / "new" / "last.ckpt"
    if before:
        save(target, before, 1)
    synced: list[Path] = []
    real_sync, real_rename, real_exchange = os.fsync, os.rename, publish._exchange

    def sync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_sync(descriptor)

    def renaming(real: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        def rename(one: Path, other: Path) -> None:
            assert {one, one.parent, *one.rglob("*")} <= set(synced)
            synced.clear()
            real(one, other)

        return rename

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", renaming(real_rename))
    monkeypatch.setattr(publish, "_exchange", renaming(real_exchange))
    staging = Staging.begin(target)
    assert before or tmp_path in synced  # the new parent's own name
    fill(staging.path, "directory", 2)
    os.mkdir(staging.path / "deeper")
    write(staging.path / "deeper" / "file", b"content")
    staging.publish()
    assert synced == [target.parent]


def test_a_directory_that_cannot_be_synced_pretended_is_no_error_but_a_disk_that_fails_is(tmp_path, monkeypatch):
    staging = Staging.begin(tmp_path / "a.ckpt")
    fill(staging.path, "file", 1)

    def failing(number: int) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        return sync

    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        staging.publish()
    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    staging.publish()
    assert content_of(tmp_path / "a.ckpt") == data("file", 1)


# ---- names that are taken


def test_what_is_published_without_being_written_is_refused(tmp_path):
    staging = Staging.begin(tmp_path / "a.ckpt")
    with pytest.raises(FileNotFoundError, match="No checkpoint was written there"):
        staging.publish()


def test_a_directory_that_is_no_checkpoint_is_refused_before_anything_is_written(tmp_path, exchange):
    target = tmp_path / "a.ckpt"
    target.mkdir()
    staging = Staging.begin(target)  # an empty one is in nobody's way
    fill(staging.path, "directory", 1)
    (target / "thesis.tex").write_text("years of work")
    with pytest.raises(
        IsADirectoryError, match=r"a\.ckpt': a directory of that name is there, and it is no checkpoint"
    ):
        Staging.begin(target)
    with pytest.raises(IsADirectoryError, match="it is no checkpoint"):
        staging.publish()
    staging.discard()
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert os.listdir(target) == ["thesis.tex"]


@pytest.mark.parametrize("mark", ["meta.pt", ".metadata", MANIFEST_NAME, None])
@pytest.mark.parametrize("form", ["directory", "file"])
def test_a_directory_with_a_part_of_a_checkpoint_or_nothing_in_it_is_replaced(tmp_path, exchange, mark, form):
    target = tmp_path / "a.ckpt"
    target.mkdir()
    if mark is not None:
        (target / mark).touch()
    save(target, form, 1)
    assert content_of(target) == data(form, 1)
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("form", ["directory", "file"])
@pytest.mark.parametrize("pointed_to", ["directory", "file", "no checkpoint", None])
def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path, exchange, form, pointed_to):
    (tmp_path / "runs").mkdir()
    target, other = tmp_path / "runs" / "last.ckpt", tmp_path / "epoch.ckpt"
    if pointed_to == "no checkpoint":
        other.mkdir()
        write(other / "thesis.tex", b"years of work")
    elif pointed_to:
        save(other, pointed_to, 1)
    before = content_of(other)
    target.symlink_to(other)
    save(target, form, 2)
    assert not target.is_symlink()
    assert content_of(target) == data(form, 2)
    assert content_of(other) == before
    assert os.listdir(target.parent) == ["last.ckpt"]


def test_without_renameat2_pretended_in_the_c_library_a_checkpoint_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())
    publish._renameat2.cache_clear()
    try:
        save(tmp_path / "a.ckpt", "directory", 1)
        save(tmp_path / "a.ckpt", "directory", 2)
        assert publish._renameat2() is None
    finally:
        publish._renameat2.cache_clear()
    assert content_of(tmp_path / "a.ckpt") == data("directory", 2)
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_this_file_system_exchanges_names(tmp_path):
    """Else half of this file tests the other way twice."""
    (tmp_path / "one").write_text("1")
    (tmp_path / "other").mkdir()
    publish._exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one").is_dir()
    assert (tmp_path / "other").read_text() == "1"


def test_a_second_rename_that_fails_brings_the_old_checkpoint_back(tmp_path, monkeypatch):
    target = tmp_path / "a.ckpt"
    save(target, "directory", 1)
    staging = Staging.begin(target)
    fill(staging.path, "directory", 2)
    real = os.rename

    def rename(one: Path, other: Path) -> None:
        if one == staging.path:
            raise OSError(errno.EIO, "pretended")
        real(one, other)

    monkeypatch.setattr(publish, "_exchange", cannot_exchange)
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="pretended"):
        staging.publish()
    assert content_of(target) == data("directory", 1)
    assert content_of(staging.path) == data("directory", 2)


def test_what_was_replaced_but_cannot_be_deleted_is_no_failed_save(tmp_path, monkeypatch, caplog):
    target = tmp_path / "a.ckpt"
    save(target, "directory", 1)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EPERM, "pretended")

    monkeypatch.setattr(os, "rmdir", refuse)
    save(target, "directory", 2)
    assert content_of(target) == data("directory", 2)
    assert "a.ckpt is saved, but" in caplog.text


# ---- several processes


@contextmanager
def two_writers(target: Path, form: str) -> Iterator[Callable[[], bool]]:
    """Two processes that publish 50 times each to one name; yields a function that says whether they still do."""
    children = []
    for writer in (1, 2):
        children.append(start(lambda writer=writer: [save(target, form, 1000 * writer + i) for i in range(50)]))
    codes: list[int] = []

    def busy() -> bool:
        for pid in children[len(codes) :]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                return True
            codes.append(os.waitstatus_to_exitcode(status))
        return False

    yield busy
    while busy():
        time.sleep(0.01)
    assert codes == [0, 0]


def read_through(path: Path) -> dict[str, bytes] | bytes:
    """What lies under the name in this moment, even if the name has gone to another checkpoint meanwhile."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if not path.is_dir():
            return os.read(descriptor, 1000)
        content = {}
        for name in FILES:
            file = os.open(name, os.O_RDONLY, dir_fd=descriptor)
            content[name] = os.read(file, 1000)
            os.close(file)
        return content
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("form", ["directory", "file"])
def test_while_two_processes_publish_to_one_name_a_reader_always_finds_a_whole_checkpoint(tmp_path, no_sync, form):
    target = tmp_path / "last.ckpt"
    save(target, form, 0)
    allowed = [data(form, 0), *(data(form, 1000 * writer + i) for writer in (1, 2) for i in range(50))]
    whole = set()
    with two_writers(target, form) as busy:
        while busy():
            assert find(target) == (target, None)
            assert os.path.lexists(target)
            with suppress(FileNotFoundError):  # of a shard, for readers slower than the next save and its cleaning
                content = read_through(target)
                assert content in allowed
                whole.add(allowed.index(content))
    assert len(whole) > 10  # the reader met the writers
    assert content_of(target) in (data(form, 1049), data(form, 2049))
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("form", ["directory", "file"])
def test_two_processes_publish_to_one_name_where_exchange_is_pretended_missing(tmp_path, no_sync, monkeypatch, form):
    monkeypatch.setattr(publish, "_exchange", cannot_exchange)
    target = tmp_path / "last.ckpt"
    with two_writers(target, form):
        pass
    assert content_of(target) in (data(form, 1049), data(form, 2049))
    assert set(os.listdir(tmp_path)) <= {"last.ckpt", "last.ckpt.old"}


def test_the_old_checkpoint_that_another_process_pretended_is_replacing_is_not_taken_for_a_stale_one(
    tmp_path, monkeypatch
):
    target, old = tmp_path / "a.ckpt", tmp_path / "a.ckpt.old"
    save(target, "directory", 1)
    fill(old, "directory", 0)  # stale
    staging = Staging.begin(target)
    fill(staging.path, "directory", 2)
    real, seen = os.rename, []

    def rename(one: Path, other: Path) -> None:
        if not seen:
            shutil.rmtree(old)
            real(target, old)
        else:
            seen.append(content_of(old))
        seen.append(str(one))
        real(one, other)

    monkeypatch.setattr(publish, "_exchange", cannot_exchange)
    monkeypatch.setattr(os, "rename", rename)
    staging.publish()
    retired = seen[2]  # the second rename brings it back
    assert seen[:1] == [str(old)]
    assert Path(retired).parent == staging.folder
    assert seen[3] == data("directory", 1)
    assert content_of(target) == data("directory", 2)
    assert content_of(old) == data("directory", 1)


def test_a_checkpoint_that_another_process_pretended_is_deleting_is_not_taken_for_none(tmp_path, monkeypatch):
    target = tmp_path / "a.ckpt"
    save(target, "directory", 1)
    real = os.listdir

    def listdir(path: object) -> list[str]:
        if isinstance(path, int):
            monkeypatch.setattr(os, "listdir", real)
            save(target, "directory", 2)
            return ["__0_0.distcp"]
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    Staging.begin(target).discard()
    assert content_of(target) == data("directory", 2)


# ---- what is left over


def test_the_save_of_a_process_that_lives_is_not_left_over_and_of_one_that_died_is(tmp_path):
    own = Staging.begin(tmp_path / "own.ckpt")
    told, tell = os.pipe()

    def begin_and_wait() -> None:
        staging = Staging.begin(tmp_path / "childs.ckpt")
        write(staging.path, b"half of it")
        os.write(tell, str(staging.folder).encode())
        signal.pause()

    child = start(begin_and_wait)
    folder = Path(os.read(told, 1000).decode())
    assert left_overs(tmp_path) == []
    age(folder)
    assert left_overs(tmp_path) == []  # however long it thinks

    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert [each.folder for each in left_overs(tmp_path)] == [folder]  # even before its parent fetches its exit code
    exit_code(child)
    (found,) = left_overs(tmp_path)
    assert found.target == "childs.ckpt"
    assert found.owner == f"{os.uname().nodename}, pid {child}"
    assert found.size == len(b"half of it") + (folder / "owner.json").stat().st_size
    assert found.newest == pytest.approx(time.time() - 7200, abs=600)
    assert remove_left_overs([found]) == [folder]
    assert remove_left_overs([found]) == []
    assert stagings(tmp_path) == [own.folder]


def change_owner(folder: Path, **changes: object) -> None:
    owner = json.loads((folder / "owner.json").read_text())
    assert changes.keys() <= owner.keys()
    (folder / "owner.json").write_text(json.dumps({**owner, **changes}))


def test_a_process_that_got_the_number_of_a_dead_one_is_not_taken_for_it(tmp_path):
    folder = Staging.begin(tmp_path / "a.ckpt").folder
    change_owner(folder, started=1)
    assert [each.folder for each in left_overs(tmp_path)] == [folder]


@pytest.mark.parametrize("elsewhere", ["host", "boot", "namespace"])
def test_the_save_of_a_process_elsewhere_is_left_over_when_nothing_changed_for_an_hour(tmp_path, elsewhere):
    folder = Staging.begin(tmp_path / "a.ckpt").folder
    change_owner(folder, **{elsewhere: "another"})
    assert left_overs(tmp_path) == []
    age(folder)
    assert [each.folder for each in left_overs(tmp_path)] == [folder]
    write(folder / "checkpoint", b"it lives after all")
    assert left_overs(tmp_path) == []


@pytest.mark.parametrize("owner", [None, "", '{"host": "a", "pid"', "[]", '{"pid": "many"}'])
def test_a_folder_that_does_not_say_whose_it_is_is_judged_by_its_age(tmp_path, owner):
    folder = Staging.begin(tmp_path / "a.ckpt").folder
    (folder / "owner.json").unlink()
    if owner is not None:
        (folder / "owner.json").write_text(owner)
    assert left_overs(tmp_path) == []
    age(folder)
    ((_, target, _, _, who),) = left_overs(tmp_path)
    assert (target, who) == ("", "an unknown process")


def test_what_changed_since_it_was_found_is_not_removed(tmp_path):
    folder = Staging.begin(tmp_path / "a.ckpt").folder
    change_owner(folder, started=1)
    found = left_overs(tmp_path)
    write(folder / "checkpoint", b"more")
    assert remove_left_overs(found) == []
    assert folder.exists()


def test_nothing_but_folders_of_saves_is_left_over_or_removed(tmp_path):
    save(tmp_path / "a.ckpt", "directory", 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / ".lightning_fp8_rocm.saving-link").symlink_to(outside)
    (tmp_path / ".lightning_fp8_rocm.saving-file").touch()
    age(tmp_path)
    assert left_overs(tmp_path) == left_overs(tmp_path / "nowhere") == left_overs(tmp_path / "a.ckpt" / "meta.pt") == []
    assert remove_left_overs([LeftOver(outside, "", 0.0, 0, "")]) == []
    assert outside.exists()


def test_no_link_in_a_staging_folder_is_followed(tmp_path):
    outside = tmp_path / "outside"
    fill(outside, "directory", 1)
    staging = Staging.begin(tmp_path / "runs" / "a.ckpt")
    staging.path.mkdir()
    (staging.path / "deep").symlink_to(outside)
    (staging.folder / "flat").symlink_to(outside)
    (staging.folder / "file").symlink_to(outside / "meta.pt")
    staging.discard()
    staging.discard()
    assert not staging.folder.exists()
    assert content_of(outside) == data("directory", 1)


def test_lightning_finds_no_name_and_no_number_in_a_staging_folder(tmp_path):
    names = [Staging.begin(tmp_path / "last-epoch=17.ckpt").folder.name for _ in range(20)]
    assert len(set(names)) == 20
    random_parts = "".join(name.removeprefix(".lightning_fp8_rocm.saving-") for name in names)
    assert random_parts.isalpha()
    assert random_parts.islower()
    assert set(random_parts).isdisjoint("aeiouk")  # no "last", no "ckpt"


# ---- what does not go


@pytest.mark.parametrize("form", ["directory", "file"])
def test_a_file_that_the_disk_has_no_room_for_is_named_and_all_is_cleaned_up(tmp_path, form):
    """A limit of the process in place of a full disk: `write` fails alike."""
    target = tmp_path / "a.ckpt"
    save(target, form, 1)

    def too_much() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        staging = Staging.begin(target)
        path = staging.path
        if form == "directory":
            path.mkdir()
            path = path / "__0_0.distcp"
        for size in (1 << 17, 1 << 22):  # found when the buffer is flushed; found at once
            with pytest.raises(OSError, match="File too large") as caught, CheckedFile(path) as file:
                file.write(bytes(size))
            assert caught.value.filename == str(path)
            assert file.closed
        staging.discard()

    assert in_child(too_much) == 0
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert content_of(target) == data(form, 1)


def test_in_a_directory_that_may_not_be_written_a_save_fails_and_the_checkpoint_stays():
    with tempfile.TemporaryDirectory() as name:  # not `tmp_path`: that may be entered by its owner alone
        folder = Path(name)
        save(folder / "a.ckpt", "directory", 1)

        def refused() -> None:
            if os.getuid() == 0:  # who may write everywhere
                os.seteuid(65534)
            with pytest.raises(PermissionError, match=r"\.lightning_fp8_rocm\.saving-"):
                save(folder / "a.ckpt", "directory", 2)
            with pytest.raises(PermissionError, match=r"\.lightning_fp8_rocm\.saving-"):
                remove(folder / "a.ckpt")

        folder.chmod(0o555)
        try:
            assert in_child(refused) == 0
            assert content_of(folder / "a.ckpt") == data("directory", 1)
        finally:
            folder.chmod(0o755)


@pytest.mark.parametrize("url", ["s3://bucket/last.ckpt", "gs://b/x", "memory://x", "file://host/x", "a::s3://b/x"])
def test_a_remote_url_is_refused_and_the_way_out_is_said(url):
    with pytest.raises(ValueError, match="Save to a local directory and copy") as caught:
        local_path(url)
    assert repr(url) in str(caught.value)


def test_a_local_path_stays_as_it_is():
    for path in ("runs/epoch=1://x.ckpt", "/runs/a:b/c.ckpt", "s3/x"):
        assert local_path(path) == Path(path)
        assert local_path(Path(path)) == Path(path)


# ---- files that are summed


def test_a_checked_file_knows_size_and_crc32_of_all_kinds_of_writes(tmp_path):
    pieces = [b"abc", bytearray(b"de"), memoryview(b"fgh"), torch.arange(5, dtype=torch.int16).numpy(), b""]
    with CheckedFile(tmp_path / "file") as file:
        assert [file.write(each) for each in pieces] == [3, 2, 3, 10, 0]
        assert file.tell() == 18
        file.flush()
        assert os.fstat(file.fileno()).st_size == 18
        assert file.writable()
        assert not file.seekable()
        assert not file.readable()
    file.close()
    assert file.closed
    whole = b"".join(bytes(each) for each in pieces)
    assert (tmp_path / "file").read_bytes() == whole
    write(tmp_path / "again", whole)
    assert file.sum == FileSum(18, zipfile.crc32(whole))
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")


def test_a_file_is_synced_when_it_is_closed_once_and_not_after_an_exception(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with CheckedFile(tmp_path / "file") as file:
        file.write(b"abc")
        file.close()
    assert len(synced) == 1
    with pytest.raises(KeyError), CheckedFile(tmp_path / "file") as file:
        raise KeyError
    assert file.closed
    forgotten = CheckedFile(tmp_path / "file")
    del forgotten
    assert len(synced) == 1


def test_a_file_in_no_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        CheckedFile(tmp_path / "nowhere" / "file")


def test_importing_it_imports_no_torch():
    code = "import sys; import lightning_fp8_rocm.distributed.publish; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


# ---- verify


@pytest.fixture
def shards(tmp_path) -> Path:
    """A directory in which two files are of one size."""
    folder = tmp_path / "a.ckpt"
    folder.mkdir()
    (folder / "deeper").mkdir()
    content = {"a": b"1" * 100, "b": b"2" * 100, "deeper/c": b"3" * 30, "empty": b""}
    write_manifest(folder, {name: write(folder / name, each) for name, each in content.items()})
    (folder / "notes.txt").write_text("what else is there is nobody's business")
    assert verify(folder) == []
    return folder


def what(path: Path) -> list[str]:
    return [str(each).removeprefix(str(path)).lstrip("/") for each in verify(path)]


def test_a_missing_file_is_found(shards):
    (shards / "deeper" / "c").unlink()
    assert what(shards) == ["deeper/c: is missing"]


def test_a_truncated_file_is_found(shards):
    os.truncate(shards / "a", 99)
    assert what(shards) == ["a: has 99 bytes, the manifest says 100"]


def test_a_flipped_bit_is_found(shards):
    (shards / "a").write_bytes(b"1" * 50 + b"0" + b"1" * 49)
    crc32 = [f"{zipfile.crc32((shards / 'a').read_bytes()):08x}", f"{zipfile.crc32(b'1' * 100):08x}"]
    assert what(shards) == [f"a: its crc32 is {crc32[0]}, the manifest says {crc32[1]}"]


def test_swapped_files_are_found(shards):
    publish._exchange(shards / "a", shards / "b")
    assert [each.file.name for each in verify(shards)] == ["a", "b"]


def test_a_directory_in_place_of_a_file_is_found(shards):
    (shards / "empty").unlink()
    (shards / "empty").mkdir()
    assert [each.file.name for each in verify(shards)] == ["empty"]


def test_a_file_that_cannot_be_read_pretended_is_found(shards, monkeypatch):
    def fail(file: Path) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(publish, "_crc32_of", fail)
    assert what(shards) == [f"{name}: cannot be read: Input/output error" for name in ("a", "b", "deeper/c", "empty")]


def test_whatever_byte_of_a_manifest_is_changed_is_found(shards):
    manifest = shards / MANIFEST_NAME
    sound = manifest.read_bytes()
    for at in range(len(sound)):
        manifest.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        found = verify(shards)
        assert [each.file for each in found] == [manifest], at
    for length in range(len(sound)):
        manifest.write_bytes(sound[:length])
        assert [each.file for each in verify(shards)] == [manifest], length


def test_a_manifest_of_another_version_is_not_read(shards):
    manifest = shards / MANIFEST_NAME
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    assert what(shards) == ["manifest.json: is of version 2, of which only 1 can be read here"]


def test_of_a_directory_without_a_manifest_nothing_is_said(tmp_path):
    (tmp_path / "meta.pt").touch()
    assert verify(tmp_path) == []


def test_what_is_not_there_is_missing(tmp_path):
    assert what(tmp_path / "a.ckpt") == [": is missing"]


def test_there_is_no_part_beyond_the_last(tmp_path):
    with pytest.raises(ValueError, match="part=2, parts=2"):
        verify(tmp_path, part=2, parts=2)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_the_parts_together_read_every_file_once(shards, monkeypatch, parts):
    read: list[str] = []
    real = publish._crc32_of
    monkeypatch.setattr(publish, "_crc32_of", lambda file: (read.append(file.name), real(file))[1])
    assert [verify(shards, part=part, parts=parts) for part in range(parts)] == [[]] * parts
    assert sorted(read) == ["a", "b", "c", "empty"]


CHECKPOINT = {"state_dict": {"weight": torch.arange(300.0), "bias": torch.ones(3)}, "epoch": 7, "text": "x" * 100}


@pytest.fixture(params=["by its path", "through a CheckedFile"])
def archive(request, tmp_path) -> Path:
    path = tmp_path / "a.ckpt"
    if request.param == "by its path":
        torch.save(CHECKPOINT, path)
    else:
        with CheckedFile(path) as file:
            torch.save(CHECKPOINT, file)
        assert file.sum == FileSum(path.stat().st_size, zipfile.crc32(path.read_bytes()))
    assert verify(path) == []
    return path


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        same(one[key], value)
        if isinstance(value, dict)
        else torch.equal(one[key], value)
        if isinstance(value, torch.Tensor)
        else one[key] == value
        for key, value in other.items()
    )


def test_a_changed_byte_of_a_file_of_torch_is_found_or_changes_nothing(archive):
    """All of the table of contents at the end, of which torch makes more than `zipfile`; here and there before."""
    sound = archive.read_bytes()
    with zipfile.ZipFile(archive) as opened:
        table = opened.start_dir
    harmless = 0
    for at in (*range(0, table, 7), *range(table, len(sound))):
        for bits in (0x01, 0xFF) if at >= table else (0xFF,):
            archive.write_bytes(sound[:at] + bytes([sound[at] ^ bits]) + sound[at + 1 :])
            if verify(archive) == []:
                harmless += 1
                assert same(torch.load(archive, weights_only=True), CHECKPOINT), at
    assert 0 < harmless < len(sound) / 5


def test_a_truncated_file_of_torch_is_found(archive):
    sound = archive.read_bytes()
    for length in range(0, len(sound), 50):
        os.truncate(archive, length)
        (found,) = verify(archive)
        assert "is no archive as `torch.save` writes it, or cut off, or damaged" in found.what
        archive.write_bytes(sound)


def test_a_damaged_tensor_is_named_by_the_part_that_reads_it(archive):
    with zipfile.ZipFile(archive) as opened:
        names = opened.namelist()
    content = bytearray(archive.read_bytes())
    content[content.index(CHECKPOINT["state_dict"]["weight"].numpy().tobytes()) + 400] ^= 1
    archive.write_bytes(content)
    (name,) = (name for name in names if name.endswith("data/0"))
    found = [each.what for part in range(3) for each in verify(archive, part=part, parts=3)]
    assert found == [f"its record {name!r} is damaged: Bad CRC-32 for file {name!r}"]


@pytest.mark.parametrize("parts", [1, 3])
def test_the_parts_together_read_every_record_once(archive, monkeypatch, parts):
    read: list[str] = []
    real = publish._damage_of_record
    monkeypatch.setattr(
        publish, "_damage_of_record", lambda opened, record: (read.append(record.filename), real(opened, record))[1]
    )
    assert [verify(archive, part=part, parts=parts) for part in range(parts)] == [[]] * parts
    with zipfile.ZipFile(archive) as opened:
        assert sorted(read) == sorted(opened.namelist())


def test_a_file_that_torch_wrote_without_sums_is_no_damage(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(CHECKPOINT, tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert verify(tmp_path / "a.ckpt") == []
    os.truncate(tmp_path / "a.ckpt", 1000)
    assert len(verify(tmp_path / "a.ckpt")) == 1


def test_shards_of_torch_are_written_through_checked_files(tmp_path):
    sums: dict[str, FileSum] = {}

    class Checked(FileSystem):
        @contextmanager
        def create_stream(self, path, mode):
            with CheckedFile(path) as file:
                yield file
            sums[Path(path).name] = file.sum

    writer = FileSystemWriter(tmp_path / "a.ckpt")
    writer.fs = Checked()
    dcp.save(CHECKPOINT["state_dict"], storage_writer=writer, no_dist=True)
    assert sums.pop(".metadata.tmp", None) or sums.pop(".metadata", None)
    assert sums.keys() == {each.name for each in (tmp_path / "a.ckpt").glob("__*")}
    write_manifest(tmp_path / "a.ckpt", sums)
    assert verify(tmp_path / "a.ckpt") == []
    loaded = {"weight": torch.zeros(300), "bias": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=tmp_path / "a.ckpt", no_dist=True)
    assert same(loaded, CHECKPOINT["state_dict"])


# ---- find


def test_what_was_replaced_is_found_only_if_nothing_came_in_its_place(tmp_path):
    target, old = tmp_path / "last.ckpt", tmp_path / "last.ckpt.old"
    assert find(target) == (target, None)
    fill(old, "directory", 1)
    path, sentence = find(target)
    assert path == old
    assert "last.ckpt' was being replaced by a process that ended before it was; reading" in sentence
    target.symlink_to(tmp_path / "nowhere")
    assert find(target) == (target, None)


def test_the_newest_sound_checkpoint_beside_is_found(tmp_path):
    now = time.time()

    def put(name: str, form: str, seconds_ago: float) -> Path:
        path = tmp_path / name
        if form == "file":
            torch.save(CHECKPOINT, path)
        else:
            save(path, "directory", 1)
        for each in (path, *path.glob("*"), *path.glob(".*")):
            os.utime(each, (now - seconds_ago,) * 2)
        return path

    first, second = put("first.ckpt", "file", 50), put("second", "directory", 40)
    damaged, last = put("damaged.ckpt", "file", 30), put("last.ckpt", "directory", 20)
    os.truncate(damaged, 1000)
    os.utime(damaged, (now - 30,) * 2)
    put("no_checkpoint.txt", "file", 10)
    (tmp_path / "logs").mkdir()
    fill(Staging.begin(tmp_path / "being-written.ckpt").path, "directory", 1)
    (tmp_path / "link.ckpt").symlink_to(last)
    (tmp_path / "dangling.ckpt").symlink_to(tmp_path / "nowhere")

    reported: list[Path] = []
    assert newest_sound(last, report=reported.append) == second
    assert reported == [damaged, second]
    assert newest_sound(tmp_path / "link.ckpt") == second
    assert newest_sound(tmp_path / "gone.ckpt") == last
    assert newest_sound(last, older_than=now - 40) == first
    assert newest_sound(last, older_than=now - 50) is None
    assert newest_sound(tmp_path / "nowhere" / "a.ckpt") is None
