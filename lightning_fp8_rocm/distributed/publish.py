"""A checkpoint appears under its name whole or not at all, and damage is found before it is read.

:class:`Staging` is where a checkpoint is written: a folder beside its name, from which one rename brings it there.
:func:`verify` compares what is on disk with the sums that :class:`CheckedFile` took while it was written.
:func:`left_overs` finds what killed processes left behind.

Files only: no torch, no ranks. One process, the first rank, calls :meth:`Staging.begin` and :meth:`Staging.publish`.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import io
import json
import logging
import os
import re
import secrets
import shutil
import stat
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from typing_extensions import Buffer, override

log = logging.getLogger("lightning_fp8_rocm")

MANIFEST_NAME = "manifest.json"
"""The file in a directory of shards that says how long each other file is, and its crc32."""

_MANIFEST_VERSION = 1
_SHARDED_MARKS = ("meta.pt", ".metadata")  # Lightning's and torch's; a directory of shards has both
_FILE_SUFFIX = ".ckpt"  # Lightning's
_OWNER_NAME = "owner.json"
_PREFIX = ".lightning_fp8_rocm.saving-"
# Lightning looks for names and numbers ("last", "ckpt_17") in what lies beside checkpoints: no word comes of these.
_LETTERS = "bcdfghjmnqrvwxz"
_BUFFER = 1 << 20  # bytes; torch.save writes many pieces of some 20
_CHUNK = 4 << 20  # bytes
_U32 = (1 << 32) - 1
# So often another process may take the name, or let it go, between our look at it and our rename.
_TRIES = 100
# Of a process on another machine we cannot know whether it lives. One that does writes: a checkpoint is gathered in
# memory first, and an hour is far more than any process group waits for a rank that hangs.
_SILENT_S = 3600.0

# ---------------------------------------------------------------------------------------------------------------------
# Names


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path on a mounted file system that ``path`` names.

    >>> local_path("file:///runs/last.ckpt")
    PosixPath('/runs/last.ckpt')
    >>> local_path("runs/last.ckpt")
    PosixPath('runs/last.ckpt')

    Raises:
        ValueError: ``path`` is the URL of a remote file system.
    """
    text = os.fspath(path)
    if text.startswith("file:///"):
        return Path(text.removeprefix("file://"))
    if re.match(r"[A-Za-z][A-Za-z0-9+.:-]*://", text):
        raise ValueError(
            f"Expected the path of a checkpoint on a mounted file system (`/...`, `file:///...`), but got {text!r}."
            " A remote one has no rename that brings a checkpoint there whole or not at all. Save to a local directory"
            " and copy the checkpoint from there when it is complete."
        )
    return Path(text)


def _old(target: Path) -> Path:
    """Where the checkpoint ``target`` is for a moment while it is replaced, on file systems that cannot exchange."""
    return target.with_name(target.name + ".old")


# ---------------------------------------------------------------------------------------------------------------------
# Files that are summed


class FileSum(NamedTuple):
    """What a file has to be like.

    Attributes:
        size: In bytes.
        crc32: Of all its bytes; against damage, not against malice.
    """

    size: int
    crc32: int


class CheckedFile(io.BufferedIOBase):
    """A new file, written from its beginning to its end, and summed on the way.

    For ``torch.save`` and the streams of ``torch.distributed.checkpoint``. :meth:`close`, or the end of a ``with``,
    brings it to the disk; a ``with`` that an exception ends only closes it.

    Args:
        path: Where; what is there is overwritten.

    Raises:
        OSError: Naming the file, from any method: the disk is full, say.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._file = open(path, "wb", buffering=_BUFFER)  # noqa: SIM115
        self._size = self._crc32 = 0

    @property
    def sum(self) -> FileSum:
        """Of what was written so far."""
        return FileSum(self._size, self._crc32)

    @override
    def write(self, buffer: Buffer, /) -> int:
        # Called for every few bytes of a zip archive, so there is no more in it than that.
        try:
            size = self._file.write(buffer)  # past the file's own buffer, and uncopied, if it is longer than that
        except OSError as error:
            error.filename = self._path
            raise
        self._crc32 = zlib.crc32(buffer, self._crc32)
        self._size += size
        return size

    @override
    def tell(self) -> int:
        return self._size

    @override
    def flush(self) -> None:
        with self._named():
            self._file.flush()

    @override
    def fileno(self) -> int:
        return self._file.fileno()

    @override
    def writable(self) -> bool:
        return True

    @override
    def close(self) -> None:
        if self.closed:
            return
        with self._named():
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
            finally:
                self._file.close()

    @property
    @override
    def closed(self) -> bool:
        return self._file.closed

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(OSError):
            self._file.close()

    @override
    def __del__(self) -> None:
        """Not ``close``, as of other files: the garbage collector must not wait for a disk."""

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = self._path
            raise


# ---------------------------------------------------------------------------------------------------------------------
# Out: whole or not at all


@dataclass(frozen=True)
class Staging:
    """A checkpoint that is being written; see :meth:`begin`.

    Attributes:
        target: The name that it will have.
        folder: Beside it, with nothing in it but what belongs to this save.
    """

    target: Path
    folder: Path

    @property
    def path(self) -> Path:
        """Where to write it: as one file, or as a directory. Not there yet."""
        return self.folder / "checkpoint"

    @classmethod
    def begin(cls, target: Path) -> Staging:
        """Make the folder in which a checkpoint is written, and that of ``target`` if need be.

        Raises:
            IsADirectoryError: ``target`` is a directory with files in it that is no checkpoint.
            OSError: The folder cannot be made.
        """
        _check_replaceable(target)
        return cls._beside(target)

    @classmethod
    def _beside(cls, target: Path) -> Staging:
        target = target.absolute()
        _make_directory(target.parent)
        while True:
            folder = target.parent / (_PREFIX + "".join(secrets.choice(_LETTERS) for _ in range(16)))
            with suppress(FileExistsError):
                os.mkdir(folder)
                break
        staging = cls(target, folder)
        try:
            with CheckedFile(folder / _OWNER_NAME) as file:
                owner = {**_Process.current()._asdict(), "target": target.name, "time": time.time()}
                file.write(json.dumps(owner, indent=1).encode())
        except BaseException:
            staging.discard()
            raise
        return staging

    def publish(self) -> None:
        """Bring what is at :attr:`path` to the name :attr:`target`, in place of the checkpoint there, and clean up.

        The files in it must be on the disk already, as those of :class:`CheckedFile` are. A symbolic link is replaced
        itself; what it points to stays. Of several processes that publish one name, the last one's checkpoint stays.

        Raises:
            FileNotFoundError: Nothing is at :attr:`path`.
            IsADirectoryError: :attr:`target` is a directory with files in it that is no checkpoint.
            OSError: The rename failed. The old checkpoint is where it was, the new one still at :attr:`path`.
        """
        if not os.path.lexists(self.path):
            raise FileNotFoundError(errno.ENOENT, "No checkpoint was written there, so none is published", self.path)
        for directory, _, _ in os.walk(self.path):
            _sync(Path(directory))
        _sync(self.folder)
        for left in reversed(range(_TRIES)):
            _check_replaceable(self.target)
            try:
                self._rename()
                break
            except OSError as error:
                # Between a look at the name and the rename another process took it, or let it go.
                if left == 0 or error.errno not in _LOST_RACE:
                    raise
        # From here on the checkpoint is there: nothing that the caller wants has failed.
        try:
            _sync(self.target.parent)
            self.discard()
        except OSError as error:
            log.warning("The checkpoint %s is saved, but cleaning up in %s failed: %s", self.target, self.folder, error)

    def discard(self) -> None:
        """Remove the folder and what is in it; what is gone already is no error."""
        _delete_staging(self.folder)

    def _rename(self) -> None:
        if not os.path.lexists(self.target):
            os.rename(self.path, self.target)
            return
        try:
            _exchange(self.path, self.target)
        except OSError as error:
            if error.errno not in _CANNOT_EXCHANGE:
                raise
            if _is_directory(self.path) or _is_directory(self.target):
                self._rename_twice()
            else:
                os.replace(self.path, self.target)

    def _rename_twice(self) -> None:
        old = _old(self.target)
        self._retire(old)
        os.rename(self.target, old)
        try:
            os.rename(self.path, self.target)
        except BaseException:  # Ctrl-C, too: for this moment nothing has the name
            if not os.path.lexists(self.target):
                os.rename(old, self.target)
            raise
        _sync(self.target.parent)
        self._retire(old)

    def _retire(self, old: Path) -> None:
        """Take a ``.old`` away into the folder, unless it is all that there is under the name."""
        if not os.path.lexists(self.target):
            return
        retired = self.folder / f"retired-{secrets.token_hex(4)}"
        with suppress(FileNotFoundError):
            os.rename(old, retired)
            # Did another process begin to replace the checkpoint in this moment, then this is the one that it replaces.
            if not os.path.lexists(self.target):
                os.rename(retired, old)


_LOST_RACE = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def remove(path: Path) -> None:
    """Delete the file, the directory or the symbolic link ``path``, and its ``.old``: it is there whole, or not there.

    Raises:
        OSError: It cannot be deleted.
    """
    old = _old(path)
    if not os.path.lexists(path) and not os.path.lexists(old):
        return
    try:
        staging = Staging._beside(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # A full disk has no room for a folder, and this makes room. What says that it is complete goes first.
        for each in (old, path):
            for mark in (*_SHARDED_MARKS, MANIFEST_NAME):
                if _is_directory(each):
                    _delete(each / mark)
            _delete(each)
        return
    # First the one that would be found in place of the other.
    for each, to in ((old, staging.folder / "retired"), (path, staging.path)):
        with suppress(FileNotFoundError):
            os.rename(each, to)
    _sync(staging.target.parent)
    staging.discard()


def _check_replaceable(target: Path) -> None:
    try:
        descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # a file, a link, nothing; or one that may not be read, which the rename will tell
        return
    try:
        names = os.listdir(descriptor)
        if not names or not {*_SHARDED_MARKS, MANIFEST_NAME}.isdisjoint(names):
            return
        with suppress(FileNotFoundError):
            # Else it was a checkpoint that another process replaced and is deleting now.
            if os.path.samestat(os.fstat(descriptor), os.lstat(target)):
                raise IsADirectoryError(
                    f"Cannot write the checkpoint {str(target)!r}: a directory of that name is there, and it is no"
                    f" checkpoint, since it has none of {[*_SHARDED_MARKS, MANIFEST_NAME]}. Choose another name, or"
                    " move the directory away."
                )
    finally:
        os.close(descriptor)


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc has it since 2.28


def _exchange(one: Path, other: Path) -> None:
    """Let the two names change places, in one moment.

    Raises:
        OSError: One of :data:`_CANNOT_EXCHANGE` if the C library, the kernel or the file system cannot.
    """
    at_working_directory, flag_exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of linux/fcntl.h and linux/fs.h
    renameat2 = _renameat2()
    if renameat2 is None:
        raise OSError(errno.ENOSYS, "The C library has no renameat2", str(one), None, str(other))
    if renameat2(at_working_directory, os.fsencode(one), at_working_directory, os.fsencode(other), flag_exchange) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one), None, str(other))


def _make_directory(path: Path) -> None:
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        _sync(each.parent)


def _sync(directory: Path) -> None:
    """Bring the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems know no such thing
            raise
    finally:
        os.close(descriptor)


def _is_directory(path: Path) -> bool:
    """Whether it is one itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _delete(path: Path) -> None:
    """Delete a file, a link or a directory with all in it; no link in it is followed. None there is no error."""
    for left in reversed(range(_TRIES)):
        try:
            if _is_directory(path):
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            return
        except FileNotFoundError:  # another process deletes it, too
            if left == 0:
                raise


def _delete_staging(folder: Path) -> None:
    with suppress(FileNotFoundError):
        # The owner last: as long as anything is left, it says whose that is.
        for name in sorted(os.listdir(folder), key=lambda name: name == _OWNER_NAME):
            _delete(folder / name)
    _delete(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Sums


def write_manifest(folder: Path, sums: Mapping[str, FileSum]) -> None:
    """Write the file with which :func:`verify` compares the others, and bring it to the disk.

    Args:
        folder: Of the checkpoint.
        sums: Of each file, under its name relative to ``folder``, with ``/`` between directories.
    """
    files = {name: {"size": each.size, "crc32": _hex(each.crc32)} for name, each in sorted(sums.items())}
    manifest = {"version": _MANIFEST_VERSION, "files": files, "crc32": _hex(_crc32_of_files(files))}
    with CheckedFile(folder / MANIFEST_NAME) as file:
        file.write(json.dumps(manifest, indent=1).encode())


def _crc32_of_files(files: object) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True, separators=(",", ":")).encode())


def _hex(crc32: int) -> str:
    """As `crc32` and `gzip -lv` print it.

    >>> _hex(255)
    '000000ff'
    """
    return f"{crc32:08x}"


class Damage(NamedTuple):
    """What is wrong with a file of a checkpoint.

    Attributes:
        file: Its path.
        what: The rest of the sentence that begins with it.
    """

    file: Path
    what: str

    @override
    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def verify(path: Path, *, part: int = 0, parts: int = 1) -> list[Damage]:
    """Read a checkpoint and compare it with the sums that were taken when it was written.

    A directory is compared with its manifest, if it has one: Lightning's own have none, of which nothing can be said.
    A file of ``torch.save`` has a sum of each tensor in itself, unless torch was told not to compute them.

    Args:
        path: The checkpoint.
        part: Which share of the reading to do, from 0; so several ranks read everything once, together.
        parts: How many shares there are.

    Returns:
        What is wrong in this share; every share has what can be seen without reading (missing files, wrong sizes).

    Raises:
        ValueError: There is no such part.
    """
    if not 0 <= part < parts:
        raise ValueError(f"Expected argument `part` to be in [0, `parts`), but got part={part}, parts={parts}.")
    try:
        return _verify_directory(path, part, parts) if path.is_dir() else _verify_archive(path, part, parts)
    except OSError as error:
        return [Damage(path, _unreadable(error))]


def _unreadable(error: OSError) -> str:
    return "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror or error}"


def _verify_directory(folder: Path, part: int, parts: int) -> list[Damage]:
    manifest = folder / MANIFEST_NAME
    try:
        sums = _sums_in(manifest.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        return [Damage(manifest, _unreadable(error))]
    except ValueError as error:
        return [Damage(manifest, str(error))]
    mine = _share({name: each.size for name, each in sums.items()}, part, parts)
    found: list[Damage] = []
    for name, said in sums.items():
        file = folder / name
        try:
            status = file.lstat()
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                found.append(Damage(file, "is no ordinary file"))
            elif size != said.size:
                found.append(Damage(file, f"has {size} bytes, the manifest says {said.size}"))
            elif name in mine and (crc32 := _crc32_of(file)) != said.crc32:
                found.append(Damage(file, f"its crc32 is {_hex(crc32)}, the manifest says {_hex(said.crc32)}"))
        except OSError as error:
            found.append(Damage(file, _unreadable(error)))
    return found


def _sums_in(manifest: bytes) -> dict[str, FileSum]:
    try:
        content = json.loads(manifest)
        version, files, crc32 = content["version"], content["files"], content["crc32"]
        if crc32 != _hex(_crc32_of_files(files)):
            raise ValueError(f"its list of files does not have the crc32 {crc32} that stands beside it")
        sums = {str(name): FileSum(int(each["size"]), int(each["crc32"], 16)) for name, each in files.items()}
        outside = [name for name in sums if not name or Path(name).is_absolute() or ".." in Path(name).parts]
        if outside:
            raise ValueError(f"it names files outside of the checkpoint, {outside[:3]}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is damaged: {type(error).__name__}: {error}") from error
    if version != _MANIFEST_VERSION:
        raise ValueError(f"is of version {version!r}, of which only {_MANIFEST_VERSION} can be read here")
    return sums


def _crc32_of(file: Path) -> int:
    crc32 = 0
    with open(file, "rb", buffering=0) as opened:
        while chunk := opened.read(_CHUNK):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def _share(sizes: Mapping[str, int], part: int, parts: int) -> set[str]:
    """The names that fall into one part of several whose sums of sizes are about the same.

    >>> [sorted(_share({"a": 4, "b": 3, "c": 2, "d": 2}, part, 2)) for part in (0, 1)]
    [['a', 'd'], ['b', 'c']]
    """
    loads, mine = [0] * parts, set()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        loads[least] += sizes[name]
        if least == part:
            mine.add(name)
    return mine


def _verify_archive(path: Path, part: int, parts: int) -> list[Damage]:
    os.stat(path)
    try:
        with zipfile.ZipFile(path) as archive:
            _check_table(path, archive)
            records = {str(record.header_offset): record for record in archive.infolist()}
            # `torch.serialization.set_crc32_options(False)` leaves 0 everywhere.
            if not any(record.CRC for record in records.values()):
                return []
            mine = _share({at: record.file_size for at, record in records.items()}, part, parts)
            return [
                Damage(path, what)
                for at, record in records.items()
                if at in mine and (what := _damage_of_record(archive, record))
            ]
    except OSError:
        raise
    except Exception as error:  # of many kinds: whatever a damaged table of contents leads `zipfile` into
        return [Damage(path, f"is no archive as `torch.save` writes it, or cut off, or damaged: {error}")]


def _check_table(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse what ``zipfile`` overlooks in the table of contents, and torch reads otherwise, in part without a word.

    No sum covers the table, but most of it follows from the rest (section 4.3 of PKWARE's APPNOTE.TXT).

    Raises:
        zipfile.BadZipFile: It contradicts itself.
    """
    with open(path, "rb") as file:
        file.seek(archive.start_dir)
        table = file.read()
    end, count = 0, len(archive.infolist())
    for record in archive.infolist():
        end += 46 + sum(struct.unpack_from("<3H", table, end + 28))  # the entry; its name, its extra field, its comment
        if (
            record.flag_bits & ~0x808  # but a sum behind the data, and a name in UTF-8
            or record.external_attr & 0x10  # a directory of DOS, of which torch reads nothing into a tensor
            or record.volume != 0
            or (record.compress_type == zipfile.ZIP_STORED and record.compress_size != record.file_size)
        ):
            raise zipfile.BadZipFile(f"the entry of {record.filename!r} in the table of contents contradicts itself")
    expected = struct.pack(
        "<4s4H2LH", b"PK\5\6", 0, 0, *[min(count, 0xFFFF)] * 2, min(end, _U32), min(archive.start_dir, _U32), 0
    )
    if table[end : end + 4] == b"PK\6\6":  # the same in 64 bits, which torch always writes, and where that is
        versions = table[end + 12 : end + 16]
        expected = (
            struct.pack("<4sQ4s2L4Q", b"PK\6\6", 44, versions, 0, 0, count, count, end, archive.start_dir)
            + struct.pack("<4sLQL", b"PK\6\7", 0, archive.start_dir + end, 1)
            + expected
        )
    if table[end:] != expected:
        raise zipfile.BadZipFile("the end of the table of contents contradicts the table")


def _damage_of_record(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> str | None:
    try:
        with archive.open(record) as opened:
            while opened.read(_CHUNK):
                pass
    except OSError as error:
        return f"its record {record.filename!r} cannot be read: {error.strerror or error}"
    except Exception as error:  # as above
        return f"its record {record.filename!r} is damaged: {error or type(error).__name__}"
    return None


# ---------------------------------------------------------------------------------------------------------------------
# In


def find(path: Path) -> tuple[Path, str | None]:
    """Where to read the checkpoint ``path``.

    Returns:
        The path, and a sentence for the user if it is not ``path``. It need not exist.
    """
    old = _old(path)
    if os.path.lexists(path) or not os.path.lexists(old) or os.path.lexists(path):  # again: it may have come meanwhile
        return path, None
    return old, (
        f"{str(path)!r} was being replaced by a process that ended before it was; reading {str(old)!r}, the checkpoint"
        " that was to be replaced."
    )


def recover(folder: Path) -> list[Path]:
    """Give each ``NAME.old`` in ``folder`` its name back, whose replacement ended halfway; any process may call it.

    Lightning itself looks for names alone, where :func:`find` knows better. One whose replacement may still go on is
    left alone.

    Returns:
        The checkpoints that have their names again.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    begun = [_owner_of(folder / name) for name in names if name.startswith(_PREFIX)]
    busy = {target for owner, target in begun if owner is not None and owner.lives() is not False}
    recovered = []
    for name in names:
        target = folder / name.removesuffix(".old")
        if name.endswith(f"{_FILE_SUFFIX}.old") and target.name not in busy and not os.path.lexists(target):
            with suppress(OSError):  # another rank does the same
                os.rename(folder / name, target)
                recovered.append(target)
    return recovered


def newest_sound(
    beside: Path, older_than: float | None = None, report: Callable[[Path], None] | None = None
) -> Path | None:
    """The newest checkpoint in the same directory in which :func:`verify` finds no damage.

    Args:
        beside: The checkpoint that cannot be read; neither it nor what it is a link to is taken.
        older_than: A time in seconds since the epoch; only what was written before it is taken.
        report: Called with each checkpoint before it is read, which may take minutes.

    Returns:
        Its path, None if there is none.
    """
    given = {beside.absolute(), beside.resolve()}
    dated: list[tuple[float, Path]] = []
    with suppress(FileNotFoundError):
        for each in beside.absolute().parent.iterdir():
            written = None if each in given or each.resolve() in given else _written(each)
            if written is not None and (older_than is None or written < older_than):
                dated.append((written, each))
    for _, each in sorted(dated, reverse=True):
        if report is not None:
            report(each)
        if not verify(each):
            return each
    return None


def _written(path: Path) -> float | None:
    """When the checkpoint was written, None if it is none, or a link to one: that has a name of its own."""
    if path.is_symlink() or path.name.startswith(_PREFIX):
        return None
    with suppress(OSError):
        if path.is_dir():
            return max((path / name).stat().st_mtime for name in _SHARDED_MARKS)
        if path.suffix == _FILE_SUFFIX:
            return path.stat().st_mtime
    return None


# ---------------------------------------------------------------------------------------------------------------------
# What killed processes left


class _Process(NamedTuple):
    """A process, so that no other one is ever taken for it."""

    host: str
    boot: str
    namespace: str  # containers on one machine number their processes each from 1, under one boot id
    pid: int
    started: int  # clock ticks after boot: numbers are used again

    @classmethod
    def current(cls) -> Self:
        pid = os.getpid()
        _, started = _state_of(pid) or ("", 0)
        boot, namespace = "", ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = os.readlink("/proc/self/ns/pid")
        return cls(os.uname().nodename, boot, namespace, pid, started)

    def lives(self) -> bool | None:
        """None if nothing here can tell: it ran on another machine, or before this one was booted."""
        if self[:3] != self.current()[:3]:
            return None
        state = _state_of(self.pid)
        if state is None:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
            except PermissionError:
                pass
            return True  # it is there, where the system hides /proc of other users
        return state[0] not in "ZX" and state[1] == self.started  # a zombie waits for nothing but its parent


def _state_of(pid: int) -> tuple[str, int] | None:
    """The state letter and the start time of a process, in clock ticks after boot; None if it does not show."""
    try:
        # After the name, which may hold anything; proc_pid_stat(5) counts from 1, and state is its field 3.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0], int(fields[22 - 3])
    except (OSError, IndexError):
        return None


class LeftOver(NamedTuple):
    """A save that nobody will complete.

    Attributes:
        folder: With what was written of it.
        target: The name that the checkpoint was to have, in the directory of ``folder``; "" if unknown.
        newest: When the last file in it was changed, in seconds since the epoch.
        size: Of all its files, in bytes.
        owner: Who began it: ``"host, pid 123"``.
    """

    folder: Path
    target: str
    newest: float
    size: int
    owner: str


def left_overs(folder: Path) -> list[LeftOver]:
    """The saves in ``folder`` that nobody will complete, since the process that began them does not live any more.

    Of one on another machine, in another container or before a reboot that cannot be known: its save counts once
    nothing in it has changed for an hour. So does one that does not say who began it.
    """
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [found for name in names if (found := _left_over(folder / name)) is not None]


def remove_left_overs(found: Iterable[LeftOver]) -> list[Path]:
    """Delete saves that :func:`left_overs` found, each if it still is just as it was found.

    Returns:
        The folders that are gone. One that cannot be deleted is not among them.
    """
    removed = []
    for each in found:
        if _left_over(each.folder) == each:
            with suppress(OSError):
                _delete_staging(each.folder)
                removed.append(each.folder)
    return removed


def _left_over(folder: Path) -> LeftOver | None:
    if not folder.name.startswith(_PREFIX) or not _is_directory(folder):
        return None
    owner, target = _owner_of(folder)
    lives = None if owner is None else owner.lives()
    if lives:
        return None
    newest, size = 0.0, 0
    for directory, _, names in os.walk(folder):
        for each in (directory, *(os.path.join(directory, name) for name in names)):
            with suppress(FileNotFoundError):
                status = os.lstat(each)
                newest = max(newest, status.st_mtime)
                size += status.st_size if stat.S_ISREG(status.st_mode) else 0
    if lives is None and time.time() - newest < _SILENT_S:
        return None
    return LeftOver(
        folder, target, newest, size, f"{owner.host}, pid {owner.pid}" if owner is not None else "an unknown process"
    )


def _owner_of(folder: Path) -> tuple[_Process | None, str]:
    try:
        owner: dict[str, Any] = json.loads((folder / _OWNER_NAME).read_bytes())
        process = _Process(
            str(owner["host"]), str(owner["boot"]), str(owner["namespace"]), int(owner["pid"]), int(owner["started"])
        )
        return process, str(owner["target"])
    except (OSError, ValueError, KeyError, TypeError):  # killed before it was written
        return None, ""
