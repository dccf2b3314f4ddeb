"""What a checkpoint is on disk: written and read without a model, an optimizer or Lightning.

Two forms, both those of Lightning's ``ModelParallelStrategy``. *Sharded*: a directory of
``torch.distributed.checkpoint`` with all that is no shard in ``meta.pt``, and a manifest of sizes and crc32. *Full*:
one file of ``torch.save``, which is a zip archive and has its crc32 inside.

A Trainer saves one model, under ``state_dict``, and its optimizers in their order. Fabric saves models and optimizers
under the keys that the user gave them.

Reading (:func:`open_checkpoint`, :func:`read`) is not collective, reads no tensor that is not asked for, and executes
nothing that a file contains.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import time
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from typing_extensions import override

from lightning_fp8_rocm.distributed.faults import agreed, exchange, raise_together
from lightning_fp8_rocm.distributed.publish import (
    MANIFEST_NAME,
    CheckedFile,
    FileSum,
    write_manifest,
)

META_NAME = "meta.pt"
"""The file beside the shards with all that is neither model nor optimizer; Lightning's name for it."""

OWN_KEY = "fp8_rocm"
"""Under which a checkpoint holds what this package adds: plain values, no name of a class."""

DCP_METADATA_NAME = ".metadata"  # torch's
MODEL_KEY = "state_dict"
"""Of the model of a Trainer; Lightning's."""

OPTIMIZERS_KEY = "optimizer_states"
"""Of the list of optimizers in one file of a Trainer; Lightning's."""

MODELS_FACT, OPTIMIZERS_FACT = "models", "optimizers"
"""What a checkpoint of Fabric says under :data:`OWN_KEY`: the keys of its models, and those of its optimizers."""

_FSDP1_MODEL_KEY = "model"  # of the Trainer's FSDPStrategy
VERSION_KEY = "pytorch-lightning_version"
"""In every checkpoint of a Trainer, of either name of Lightning."""
_OPTIMIZER_PREFIX = "optimizer_"  # Lightning's, in shards of a Trainer
_EXTRA_STATE = "_extra_state"  # torch's, of what a module saves that is no tensor
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # what wraps a module without being one
_SHOWN = 10
_PROPAGATION_S = (
    10.0  # what one host wrote, another one sees after some seconds at most: attributes are cached for 3 on NFS
)

# ---------------------------------------------------------------------------------------------------------------------
# Names and leaves


def plain_name(key: str) -> str:
    """The name of a tensor in the model as the user wrote it.

    >>> plain_name("net._orig_mod.0._checkpoint_wrapped_module.weight")
    'net.0.weight'
    """
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def listed(names: Iterable[str]) -> str:
    """A few names of many.

    >>> listed(["b", "a"])
    'a, b'
    """
    known = sorted(names)
    more = f", ... ({len(known)} in all)" if len(known) > _SHOWN else ""
    return ", ".join(known[:_SHOWN]) + more


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to all that is not a container of exactly the built-in kinds, containers rebuilt."""
    if isinstance(value, dict):
        return {key: map_leaves(each, function) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(each, function) for each in value)
    return function(value)


class Stored(NamedTuple):
    """A tensor in a checkpoint that is not read yet."""

    shape: torch.Size
    dtype: torch.dtype
    source: str | Tensor
    """Its key in the directory; or the tensor itself, mapped from the file."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.shape.numel() * self.dtype.itemsize


class ReplacedError(RuntimeError):
    """Another process saved under the name of a checkpoint while this one read it."""


def identity(path: Path) -> tuple[int, ...]:
    """What tells a checkpoint from another one under the same name, on this host and on another.

    Of a directory the crc32 of its list of files; of a file its size and the crc32 of its end, where the list is.
    """
    if path.is_dir():
        manifest = path / MANIFEST_NAME  # small, and has the crc32 of the other one
        return (zlib.crc32((manifest if manifest.is_file() else path / DCP_METADATA_NAME).read_bytes()),)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (1 << 16)))
        return size, zlib.crc32(file.read())


@contextmanager
def unchanged(path: Path) -> Iterator[None]:
    """The span in which a checkpoint is read; it may take minutes, and be replaced by a running training meanwhile.

    Raises:
        ReplacedError: It was: what was read is of two checkpoints. In place of what else that may have led to.
    """
    before = _inode(path)
    try:
        yield
    except Exception as error:
        if _inode(path) != before:
            raise replaced(path) from error
        raise
    if _inode(path) != before:
        raise replaced(path)


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def replaced(path: Path) -> ReplacedError:
    """What to raise where a checkpoint is not any more the one that it was."""
    return ReplacedError(
        f"The checkpoint {str(path)!r} was replaced by a newer one while it was read. Load it again, or one whose name"
        " the running training does not save to again."
    )


class Contents(NamedTuple):
    """What a checkpoint holds; each tensor is a :class:`Stored`."""

    path: Path
    models: dict[str, dict[str, Any]]
    """By key; each by name in the model as the user wrote it. That of a Trainer has the key ``state_dict``."""
    optimizers: dict[str, dict[str, Any]]
    """By key, in the order in which they were saved: what ``optimizer.state_dict()`` returns, but that there may be
    names for numbers. Those of a Trainer have the keys ``optimizer_0``, ``optimizer_1``, ..."""
    rest: dict[str, Any]
    """All else; tensors that were sharded are :class:`Stored`, others are read. Also what is no checkpoint of
    Lightning: weights alone, the state of one optimizer."""
    metadata: metadata.Metadata | None = None
    """The list of shards, for :func:`read`: at a thousand ranks it takes half a minute to read."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What this package added to it."""
        facts: Mapping[str, Any] = self.rest.get(OWN_KEY, {})
        return facts

    @property
    def of_trainer(self) -> bool:
        """Whether a Trainer wrote it, not Fabric."""
        return self.models.keys() == {MODEL_KEY} and MODELS_FACT not in self.facts

    @property
    def model_key(self) -> str:
        """The key of the one model.

        Raises:
            ValueError: There are several, or none.
        """
        if len(self.models) == 1:
            return next(iter(self.models))
        if self.models:
            raise ValueError(
                f"Expected {str(self.path)!r} to be a checkpoint of one model, but it has {len(self.models)}:"
                f" {listed(self.models)}. `fabric.load` loads each under its key."
            )
        raise ValueError(
            f"The checkpoint {str(self.path)!r} has no model. Found: {listed(map(str, self.rest))}. Weights alone are"
            " loaded with `fabric.load_raw` or `load_state_dict`."
        )

    @property
    def model(self) -> dict[str, Any]:
        """The one model.

        Raises:
            ValueError: There are several, or none.
        """
        return self.models[self.model_key]


# ---------------------------------------------------------------------------------------------------------------------
# Out


class _SummingFileSystem(filesystem.FileSystem):
    """The files of ``torch.distributed.checkpoint``, summed as they are written."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    @override
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with CheckedFile(Path(path)) as file:
            yield cast(io.IOBase, file)
        self.sums[Path(path).name] = file.sum

    @override
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _Writer(filesystem.FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        # Each file is fsynced when it is closed. All tensors are on the host: nothing is to be copied ahead from a GPU,
        # for which torch would wake up the first one, whichever is this rank's.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.fs: _SummingFileSystem = _SummingFileSystem()

    @override
    def storage_meta(self) -> metadata.StorageMeta:
        return metadata.StorageMeta(save_id=self.save_id)  # not the path: it is about to be renamed


def write_sharded(
    folder: Path, state: Mapping[str, Any], rest: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Write a directory that Lightning's ``ModelParallelStrategy`` reads; collective. Every file is fsynced.

    Args:
        folder: Where, the same on all ranks. It is made; nothing is there yet.
        state: ``"state_dict"``, ``"optimizer_0"``, ``"optimizer_1"``, ..., or models and optimizers under other keys:
            DTensors, and tensors that are the same on all ranks.
        rest: All else; rank 0 writes it.
        group: Whose ranks write; the default group if None.

    Raises:
        RuntimeError: Writing failed on some rank; on all ranks.
    """
    writer = _Writer(folder)
    files = writer.fs
    try:
        with _without_sums_within():
            save_shards(dict(state), storage_writer=writer, process_group=group)
    except CheckpointException as error:  # not an Exception: handlers would let it pass
        own, _ = error.failures.get(dist.get_rank(group), (None, None))
        if isinstance(own, KeyboardInterrupt):
            raise own from error
        raise agreed(RuntimeError(f"Writing shards failed: {_failures(error)}")) from error
    first = dist.get_rank(group) == 0
    with raise_together(f"writing {META_NAME}", group):
        if first:
            with CheckedFile(folder / META_NAME) as file:
                torch.save(dict(rest), cast(IO[bytes], file))
            files.sums[META_NAME] = file.sum
    sums = exchange(files.sums, group)
    with raise_together(f"writing {MANIFEST_NAME}", group):
        if first:
            _check_arrived(folder, sums)
            write_manifest(folder, {name: each for of_rank in sums for name, each in of_rank.items()})


def _check_arrived(folder: Path, sums: Sequence[Mapping[str, FileSum]]) -> None:
    """Check that this host sees what every rank wrote.

    Raises:
        RuntimeError: A file is not there, or not whole, also some seconds later.
    """
    deadline = time.monotonic() + _PROPAGATION_S
    missing: dict[str, int] = {}
    for rank, of_rank in enumerate(sums):
        for name, each in of_rank.items():
            while not _has_size(folder / name, each.size):
                if time.monotonic() > deadline:
                    missing[name] = rank
                    break
                os.listdir(folder)  # lets a network file system ask its server again
                time.sleep(0.1)
    if missing:
        name, rank = next(iter(missing.items()))
        raise RuntimeError(
            f"Rank {rank} wrote {name!r}, but host {os.uname().nodename!r} does not see it in {str(folder)!r}"
            f" ({len(missing)} such files). A sharded checkpoint must be on a file system that all hosts share: choose"
            ' such a `dirpath`, or `state_dict_type="full"`.'
        )


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


@contextmanager
def _without_sums_within() -> Iterator[None]:
    """The archives that a shard is made of get no crc32 of their own, in this thread: the manifest has one of all."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def write_full(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Write one file as a run on a single device writes it, and fsync it; on one rank."""
    with CheckedFile(path) as file:
        torch.save(dict(checkpoint), cast(IO[bytes], file))


def _failures(error: CheckpointException) -> str:
    """What went wrong on which rank, without the tracebacks that torch would print.

    >>> _failures(CheckpointException("write", {1: (OSError(28, "No space left on device", "/a/__1_0.distcp"), None)}))
    "rank 1: OSError: [Errno 28] No space left on device: '/a/__1_0.distcp'"
    """
    told = {rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()}
    return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(told.items())[:_SHOWN])


# ---------------------------------------------------------------------------------------------------------------------
# In


def check_readable(path: str | os.PathLike[str]) -> None:
    """Check that this rank sees a checkpoint at ``path``. Not collective, and no tensor is read.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: What is there is neither a directory of shards nor a file of ``torch.save``.
    """
    path = Path(path)
    allowed = (
        f"A checkpoint is a directory of shards (with {META_NAME!r} and {DCP_METADATA_NAME!r} in it) or a file written"
        " by `torch.save`."
    )
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(
            f"The checkpoint {str(path)!r} is a link to {os.readlink(path)!r}, and nothing is there: the run ended"
            " before that one was complete, or it was removed. Pass another checkpoint of the same folder."
        )
    if not path.exists():
        raise FileNotFoundError(
            f"No checkpoint at {str(path)!r} as host {os.uname().nodename!r} sees it. {allowed} It must be on a file"
            " system that all hosts share."
        )
    if path.is_dir():
        lacking = [name for name in (META_NAME, DCP_METADATA_NAME) if not (path / name).is_file()]
        if lacking:
            raise ValueError(f"The directory {str(path)!r} is no complete checkpoint: it lacks {lacking}. {allowed}")
    elif not zipfile.is_zipfile(path):
        raise ValueError(f"The file {str(path)!r} is damaged, or was not written by `torch.save`. {allowed}")


def open_checkpoint(path: Path, *, weights_only: bool | None, with_optimizers: bool = True) -> Contents:
    """Read all of a checkpoint but its tensors. Not collective.

    Args:
        path: Of either form, of a Trainer or of Fabric, also of Lightning's own strategies.
        weights_only: As for ``torch.load``, for what is not a tensor. None is torch's default, which is True.
        with_optimizers: Whether to read what of optimizer states is no tensor. Else those values are None.

    Raises:
        ValueError: It is no checkpoint, or its ``.metadata`` holds other things than metadata.
        pickle.UnpicklingError: It holds objects that ``weights_only`` forbids.
        RuntimeError: A shard could not be read.
    """
    return _open_sharded(path, weights_only, with_optimizers) if path.is_dir() else _open_full(path, weights_only)


def read(path: Path, wanted: Iterable[tuple[Stored, Tensor]], found: metadata.Metadata | None = None) -> None:
    """Read stored tensors into memory of their shape; of a DTensor, the part that this rank holds.

    Args:
        path: The checkpoint.
        wanted: What to read, and into what.
        found: Its :attr:`Contents.metadata`; read again if None.

    Raises:
        RuntimeError: A shard could not be read.
    """
    by_key: dict[str, Any] = {}
    for stored, target in wanted:
        if isinstance(stored.source, str):
            by_key[stored.source] = target
        else:
            copy_own_part(stored.source, target)
    if by_key:
        _read_shards(path, by_key, found)


def _unpickle(path: Path, weights_only: bool | None, *, mmap: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise _not_unpickled(path, weights_only, error) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise RuntimeError(f"Reading {str(path)!r} failed: {error}") from error


def _not_unpickled(path: Path, weights_only: bool | None, error: BaseException) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(
        f"{str(path)!r} holds objects that `weights_only={weights_only}` does not load (None is torch's default, True)."
        " If you trust its source, pass `weights_only=False`: that runs any code that it contains, so it is never done"
        f" unasked. {error}"
    )


def _open_full(path: Path, weights_only: bool | None) -> Contents:
    checkpoint = _unpickle(path, weights_only, mmap=True)  # mapped: only what a rank needs is ever read
    if not isinstance(checkpoint, dict):
        raise ValueError(
            f"The file {str(path)!r} is no checkpoint: expected a dict, but it holds a {type(checkpoint).__name__}."
        )
    model_keys, optimizer_keys = _keys_in_file(checkpoint)
    models = {key: checkpoint.pop(key) for key in model_keys}
    optimizers = {key: checkpoint.pop(key) for key in optimizer_keys}
    if MODEL_KEY in models and _recorded_keys(checkpoint) is None:
        numbered = enumerate(checkpoint.pop(OPTIMIZERS_KEY, []))
        optimizers |= {f"{_OPTIMIZER_PREFIX}{number}": state for number, state in numbered}
    return Contents(
        path,
        {key: by_plain_name(map_leaves(state, as_stored)) for key, state in models.items()},
        map_leaves(optimizers, as_stored),
        map_leaves(checkpoint, as_stored),
    )


def _keys_in_file(checkpoint: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Under which keys one file has models, and under which optimizers: as it says itself, else by what they look like.

    >>> _keys_in_file({"net": {"weight": torch.ones(2)}, "adam": {"state": {}, "param_groups": []}, "step": 3})
    (['net'], ['adam'])
    """
    recorded = _recorded_keys(checkpoint)
    if recorded is not None:
        return recorded
    optimizers = [key for key, value in checkpoint.items() if is_optimizer_state(value)]
    if isinstance(checkpoint.get(MODEL_KEY), Mapping):
        return [MODEL_KEY], optimizers
    if is_model_state(checkpoint):  # weights alone, in which a mapping of tensors would be the extra state of a module
        return [], []
    return [key for key, value in checkpoint.items() if is_model_state(value)], optimizers


def _recorded_keys(rest: Mapping[str, Any]) -> tuple[list[str], list[str]] | None:
    facts = rest.get(OWN_KEY, {})
    return (list(facts[MODELS_FACT]), list(facts[OPTIMIZERS_FACT])) if MODELS_FACT in facts else None


def is_optimizer_state(value: Any) -> bool:
    """Whether it is what ``optimizer.state_dict()`` returns, by what it looks like."""
    return isinstance(value, Mapping) and "param_groups" in value


def is_model_state(value: Any) -> bool:
    """Whether it is what ``module.state_dict()`` returns, by what it looks like: tensors by name.

    >>> [is_model_state(each) for each in ({"weight": torch.ones(2), "_extra_state": 1}, {"epoch": 3}, {})]
    [True, False, False]
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    tensors = [each for key, each in value.items() if not key.endswith(_EXTRA_STATE)]
    return bool(tensors) and all(isinstance(each, Stored | Tensor) for each in tensors)


def by_plain_name(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a model by the names of the model as the user wrote it."""
    return {plain_name(key): value for key, value in state.items()}


def as_stored(leaf: Any) -> Any:
    """A tensor in memory, or mapped from a file, as a :class:`Stored`; anything else as it is."""
    return Stored(leaf.shape, leaf.dtype, leaf) if isinstance(leaf, Tensor) else leaf


def _open_sharded(path: Path, weights_only: bool | None, with_optimizers: bool) -> Contents:
    found = read_metadata(path)
    rest: dict[str, Any] = _unpickle(path / META_NAME, weights_only, mmap=False)
    if not isinstance(rest, dict):
        raise ValueError(
            f"The directory {str(path)!r} is no checkpoint: expected a dict in its {META_NAME}, but it holds a"
            f" {type(rest).__name__}."
        )
    paths: dict[str, Any] = {key: (found.planner_data or {}).get(key, (key,)) for key in found.state_dict_metadata}
    model_keys, optimizer_keys = _keys_in_shards(paths.values(), rest)
    flat: dict[str, Any] = {}
    for key, kind in found.state_dict_metadata.items():
        if isinstance(kind, metadata.TensorStorageMetadata):
            flat[key] = Stored(kind.size, kind.properties.dtype, key)
        else:
            flat[key] = None
    values = {
        key: None
        for key, value in flat.items()
        if value is None and (with_optimizers or paths[key][0] not in optimizer_keys)
    }
    if values:
        _read_shards(path, values, found, weights_only)

    tree: dict[Any, Any] = {}
    for key, value in {**flat, **values}.items():
        *parents, last = paths[key]
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    models = {key: by_plain_name(_with_lists(tree.pop(key, {}))) for key in model_keys}
    if models.keys() == {_FSDP1_MODEL_KEY} and VERSION_KEY in rest:
        models = {MODEL_KEY: models[_FSDP1_MODEL_KEY]}
    # An empty dict has no place in shards.
    optimizers = {key: {"state": {}, **_with_lists(tree.pop(key, {}))} for key in optimizer_keys}
    return Contents(path, models, optimizers, _merged(rest, tree), found)


def _keys_in_shards(paths: Iterable[Sequence[Any]], rest: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Under which keys a directory of shards has models, and under which optimizers, in their order.

    >>> _keys_in_shards([("net", "weight"), ("adam", "param_groups"), ("ema", "weight")], {"ema": {}})
    (['net'], ['adam'])
    >>> _keys_in_shards([("optimizer_10", "param_groups"), ("optimizer_2", "param_groups")], {})
    ([], ['optimizer_2', 'optimizer_10'])
    """
    recorded = _recorded_keys(rest)
    if recorded is not None:
        return recorded
    below_top = [(path[0], path[1]) for path in paths if len(path) > 1]
    optimizers = {key for key, below in below_top if below == "param_groups"}
    models = dict.fromkeys(key for key, _ in below_top if key not in optimizers and key not in rest)

    def place(key: str) -> int:
        number = key.removeprefix(_OPTIMIZER_PREFIX)
        return int(number) if number.isdecimal() else 0

    return list(models), sorted(dict.fromkeys(key for key, _ in below_top if key in optimizers), key=place)


def _with_lists(node: Any) -> Any:
    """Levels that are keyed by position become lists again.

    >>> _with_lists({"param_groups": {0: {"lr": 0.1}, 1: {"lr": 0.2}}})
    {'param_groups': [{'lr': 0.1}, {'lr': 0.2}]}
    """
    if not isinstance(node, dict):
        return node
    if node and all(isinstance(key, int) for key in node):
        return [_with_lists(node[key]) for key in sorted(node)]
    return {key: _with_lists(value) for key, value in node.items()}


def _merged(into: dict[Any, Any], tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """Put back what was stored in shards into where it was taken out.

    >>> _merged({"callbacks": {"EMA": {"decay": 0.9}}}, {"callbacks": {"EMA": {"weights": {"a": 1}}}})
    {'callbacks': {'EMA': {'decay': 0.9, 'weights': {'a': 1}}}}
    """
    for key, value in tree.items():
        here = into.get(key)
        into[key] = _merged(here, value) if isinstance(here, dict) and isinstance(value, Mapping) else value
    return into


# ---- shards


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what torch writes into ``.metadata``, and nothing else: where torch itself runs any pickle."""

    _ALLOWED: Mapping[tuple[str, str], Any] = {
        **{
            (metadata.__name__, each.__name__): each
            for each in (
                metadata.Metadata,
                metadata.MetadataIndex,
                metadata.StorageMeta,
                metadata.TensorStorageMetadata,
                metadata.BytesStorageMetadata,
                metadata.ChunkStorageMetadata,
                metadata.TensorProperties,
                metadata._MEM_FORMAT_ENCODING,
            )
        },
        (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
        ("collections", "OrderedDict"): OrderedDict,
        # The path under which it was written, perhaps on another system; it is not used.
        **{("pathlib", name): pathlib.PurePosixPath for name in ("Path", "PosixPath", "PurePosixPath")},
        **{("pathlib", name): pathlib.PureWindowsPath for name in ("WindowsPath", "PureWindowsPath")},
        **{("pathlib._local", name): pathlib.PurePosixPath for name in ("Path", "PosixPath", "PurePosixPath")},
    }

    @override
    def find_class(self, module: str, name: str) -> Any:
        known = self._ALLOWED.get((module, name))
        if known is not None:
            return known
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata of torch does")


def read_metadata(path: Path) -> metadata.Metadata:
    """The ``.metadata`` of a directory of shards. Nothing that it contains is executed.

    Raises:
        ValueError: It is damaged, or holds other things than metadata.
    """
    file = path / DCP_METADATA_NAME
    try:
        with file.open("rb") as stream:
            found = _MetadataUnpickler(stream).load()
        if not isinstance(found, metadata.Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}, no metadata")
        for place in (found.storage_data or {}).values():
            if Path(place.relative_path).name != place.relative_path:
                raise pickle.UnpicklingError(f"it names a file outside of the checkpoint, {place.relative_path!r}")
    except OSError as error:
        raise RuntimeError(f"Reading {str(file)!r} failed: {error}") from error
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(
            f"{str(file)!r} is damaged, or was not written by torch.distributed.checkpoint: {error}. Nothing in it was"
            " run."
        ) from error
    return found


class _Reader(filesystem.FileSystemReader):
    def __init__(self, path: Path, found: metadata.Metadata | None) -> None:
        super().__init__(path)
        self._found = found

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        found = self._found or read_metadata(Path(self.path))
        if found.storage_meta is not None:
            found.storage_meta.load_id = self.load_id
        return found


class _Planner(DefaultLoadPlanner):
    """Reads into a flat dict. Values that are no tensors obey ``weights_only``, too, where torch runs any pickle."""

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__()
        self.weights_only = weights_only

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=self.weights_only)


def _read_shards(
    path: Path, into: dict[str, Any], found: metadata.Metadata | None, weights_only: bool | None = True
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            load_shards(into, storage_reader=_Reader(path, found), planner=_Planner(weights_only), no_dist=True)
        except CheckpointException as error:  # not an Exception: handlers would let it pass
            for failure, _ in error.failures.values():
                if isinstance(failure, pickle.UnpicklingError):
                    raise _not_unpickled(path, weights_only, failure) from failure
            causes = "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
            raise RuntimeError(f"Reading the shards of {str(path)!r} failed: {causes}") from error


def copy_own_part(source: Tensor, target: Tensor) -> None:
    """Copy a whole tensor; into a DTensor, the part that this rank holds of it."""
    if isinstance(target, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        target = target.to_local()
        if not target.numel():
            return
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            source = source.narrow(dim, offset, size)
    target.copy_(source)
