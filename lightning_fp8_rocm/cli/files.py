"""What the commands share: a source that is sound, a target that is free, tensors in files, and a progress bar."""

import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from lightning_fp8_rocm.distributed import publish
from lightning_fp8_rocm.distributed.storage import Stored, check_readable

_PARTS = 32  # in which a checkpoint is verified, so that the bar moves
_PAGE = 4096  # bytes; a smaller tensor takes no more memory than its file would


def say(text: str) -> None:
    """A line on standard output, never wrapped."""
    Console(highlight=False, markup=False, soft_wrap=True).print(text)


def source(path: str) -> Path:
    """The checkpoint that is to be read.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: It is no checkpoint.
    """
    found, notice = publish.find(publish.local_path(path))
    check_readable(found)
    if notice is not None:
        say(notice)
    return found


def check_sound(path: Path) -> None:
    """Compare a checkpoint with its checksums.

    Raises:
        ValueError: It is damaged.
    """
    damages = damage(path)
    if damages:
        more = f" and {len(damages) - 3} more" if len(damages) > 3 else ""
        raise ValueError(
            f"The checkpoint {str(path)!r} is damaged: {'; '.join(map(str, damages[:3]))}{more}. Use another checkpoint"
            " of the run; `--verify false` reads this one in spite of that."
        )


def damage(path: Path) -> list[publish.Damage]:
    """All that is wrong with the files of a checkpoint."""
    found: dict[publish.Damage, None] = {}
    with progress(f"verifying {path.name}", size_of(path)) as advance:
        for part in range(_PARTS):
            found.update(dict.fromkeys(publish.verify(path, part=part, parts=_PARTS)))
            advance(size_of(path) // _PARTS)
    return list(found)


def size_of(path: Path) -> int:
    """Bytes of a file, or of the files directly in a directory."""
    if path.is_dir():
        return sum(each.stat().st_size for each in path.iterdir() if each.is_file())
    return path.stat().st_size if path.exists() else 0


@contextmanager
def output(path: str, *, beside: Path, overwrite: bool) -> Iterator[publish.Staging]:
    """Where to write what is to be at ``path``: it is there whole when the span ends, or not at all.

    Args:
        path: The name that it will have.
        beside: The source, which must not be replaced.
        overwrite: Whether it may replace what is there.

    Raises:
        FileExistsError: Something is there.
        ValueError: It would replace the source, or lie in it.
    """
    target = publish.local_path(path)
    if target.resolve() == beside.resolve() or beside.resolve() in target.resolve().parents:
        raise ValueError(f"Expected DST to be outside of SRC, but got {str(target)!r} for {str(beside)!r}.")
    if os.path.lexists(target) and not overwrite:
        raise FileExistsError(
            f"{str(target)!r} is there already. Choose another name, or replace it with `--overwrite true`."
        )
    try:
        staging = publish.Staging.begin(target)
    except IsADirectoryError:
        raise
    except OSError as error:
        raise OSError(f"Cannot write {str(target)!r}: {error}") from error
    try:
        yield staging
        staging.publish()
    except OSError as error:
        staging.discard()
        raise OSError(f"Cannot write {str(target)!r}: {error}") from error
    except BaseException:
        staging.discard()
        raise


def make_in(folder: Path) -> Callable[[Stored], Tensor]:
    """Makes tensors in files of ``folder``, so that memory holds no more of a model than the system wants to cache.

    Args:
        folder: On a disk with room for them.
    """
    return lambda stored: tensor_in(folder, stored.shape, stored.dtype)


def tensor_in(folder: Path, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor in a file that is gone when the tensor is.

    Raises:
        OSError: The disk is full.
    """
    size = shape.numel() * dtype.itemsize
    if size < _PAGE:
        return torch.empty(shape, dtype=dtype)
    file = folder / "scratch"
    try:
        with file.open("wb") as stream:
            # Else a full disk would be a bus error when the tensor is written.
            os.posix_fallocate(stream.fileno(), 0, size)
        return torch.from_file(str(file), shared=True, size=shape.numel(), dtype=dtype).view(shape)
    except OSError as error:
        error.filename = str(folder)
        raise
    finally:
        file.unlink(missing_ok=True)


def sync(path: Path) -> publish.FileSum:
    """Bring a file that another library wrote to the disk, and sum it."""
    crc32 = size = 0
    with path.open("rb+") as file:
        while chunk := file.read(4 << 20):
            crc32, size = zlib.crc32(chunk, crc32), size + len(chunk)
        os.fsync(file.fileno())
    return publish.FileSum(size, crc32)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while something takes its time; none where that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda size: bar.advance(task, size)


def human(size: int) -> str:
    """Bytes for people.

    >>> human(999), human(1_234_567), human(5 * 10**9)
    ('999 B', '1.2 MB', '5.0 GB')
    """
    value = float(size)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
