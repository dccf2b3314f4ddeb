"""Plain tensors out and in: the checkpoints of a model sharded by ``fully_shard``.

Two forms, both those of Lightning's ``ModelParallelStrategy``. *Sharded*: a directory of
``torch.distributed.checkpoint`` with the loop state in ``meta.pt``. *Full*: one file of ``torch.save``, as a run on a
single device writes it. What is in them has the names of the unconverted model and is made of ordinary tensors, so
either is read without this package.

Writing is collective (:func:`model_state`, :func:`optimizer_state`, :func:`save_sharded`). Reading (:func:`load`) is
not: each rank reads its own part of the files, so what one rank cannot read leaves no other one waiting.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import empty as empty_dtensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8_rocm.distributed import fsdp

META_NAME = "meta.pt"
"""The file beside the shards with all that is neither model nor optimizer; Lightning's name for it."""

_DCP_METADATA_NAME = ".metadata"  # torch's
_OPTIMIZER_PREFIX = "optimizer_"  # Lightning's
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # name parts of torch.compile and of activation checkpointing
_SHOWN = 10

# ---------------------------------------------------------------------------------------------------------------------
# Names


def _plain_name(key: str) -> str:
    """The name of a tensor in the model as the user wrote it.

    >>> _plain_name("net._orig_mod.0._checkpoint_wrapped_module.weight")
    'net.0.weight'
    """
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def _first_names(model: nn.Module) -> dict[str, str]:
    """The name under which a parameter comes first, for each of its names; a tied weight has several."""
    first: dict[nn.Parameter, str] = {}
    return {
        _plain_name(key): first.setdefault(parameter, _plain_name(key))
        for key, parameter in model.named_parameters(remove_duplicate=False)
    }


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _listed(names: Iterable[str]) -> str:
    """A few names of many.

    >>> _listed(["b", "a"])
    'a, b'
    """
    known = sorted(names)
    more = f", ... ({len(known)} in all)" if len(known) > _SHOWN else ""
    return ", ".join(known[:_SHOWN]) + more


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def _map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to all that is not a container of exactly the built-in kinds, containers rebuilt."""
    if isinstance(value, dict):
        return {key: _map_leaves(each, function) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_leaves(each, function) for each in value)
    return function(value)


def _sharded(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Every operation, so also detach, makes an ordinary tensor of a shard whose class marks how it is gathered.
    return value.detach().to("cpu")


def _full(value: Any) -> Any:
    """The whole tensor in memory of the host on rank 0, None elsewhere; collective for sharded tensors."""
    if not isinstance(value, Tensor):
        return value
    tensor = value.detach()
    if isinstance(tensor, DTensor):
        # What is offloaded to the host is gathered on the device, where the collectives of the mesh are.
        device = tensor.device_mesh.device_type
        tensor = (tensor if tensor.device.type == device else tensor.to(device)).full_tensor()  # type: ignore[attr-defined]
    if dist.get_rank() != 0:
        return None
    tensor = tensor.cpu()
    # Gathered uneven shards may be a view of padded memory, all of which torch.save would write.
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.numel() * tensor.itemsize else tensor


# ---------------------------------------------------------------------------------------------------------------------
# Out


@torch.no_grad()
def model_state(model: nn.Module, *, full: bool) -> dict[str, Any]:
    """What ``model.state_dict()`` holds, under the names of the model as the user wrote it.

    Not ``get_model_state_dict`` of torch: that looks up each name as an attribute, which a ``state_dict`` of the user's
    own need not allow.

    Args:
        model: The sharded model.
        full: Whether to gather the whole tensors on rank 0, one after the other.

    Returns:
        Ordinary tensors in memory of the host: DTensors of ordinary shards; if ``full``, whole tensors on rank 0 and
        ``{}`` on the others. They may share memory with the model, where that lies in memory of the host.
    """
    fsdp.reshard(model)  # after an evaluation the root may still hold gathered parameters
    state = {_plain_name(key): value for key, value in model.state_dict().items()}
    if not full:
        return {name: _map_leaves(value, _sharded) for name, value in state.items()}
    first_names = _first_names(model)
    gathered: dict[str, Any] = {}
    for name, value in state.items():
        first = first_names.get(name, name)
        # A tied weight is gathered once, and torch.save writes it once.
        gathered[name] = gathered[first] if first in gathered else _map_leaves(value, _full)
    return gathered if dist.get_rank() == 0 else {}


@torch.no_grad()
def optimizer_state(model: nn.Module, optimizer: Optimizer, *, full: bool) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` holds. The optimizer is only read.

    Torch's ``get_optimizer_state_dict`` takes a step where there is no state yet, after which Adam's step count is off.

    Args:
        model: The sharded model, for the names.
        optimizer: An optimizer over some or all of its parameters.
        full: Whether to gather the whole tensors on rank 0, one after the other.

    Returns:
        If ``full``: on rank 0 what the optimizer of the unsharded model would return, parameters by number, ``{}`` on
        the others. Else parameters by name, and DTensors of ordinary shards.

    Raises:
        ValueError: A parameter of ``optimizer`` is none of ``model``'s, or has a state that is different on each rank
            and says so nowhere.
    """
    fsdp.reshard(model)  # after an evaluation the root may still hold gathered parameters
    state: dict[str, Any] = optimizer.state_dict()
    names = _names_of(optimizer, model)
    for index, parameter in enumerate(_parameters_of(optimizer)):
        for key, value in state["state"].get(index, {}).items():
            if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.numel() > 1:
                _check_says_how_it_is_sharded(optimizer, names[index], key, value)
    if full:
        gathered: dict[str, Any] = _map_leaves(state, _full)
        return gathered if dist.get_rank() == 0 else {}
    named = {names[key] if isinstance(key, int) else key: value for key, value in state["state"].items()}
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    by_name: dict[str, Any] = _map_leaves({**state, "state": named, "param_groups": groups}, _sharded)
    return by_name


def _check_says_how_it_is_sharded(optimizer: Optimizer, name: str, key: object, value: Tensor) -> None:
    if not isinstance(value, DTensor):
        raise ValueError(
            f"{type(optimizer).__name__} keeps the state {key!r} of the sharded parameter {name!r} as a plain tensor of"
            f" shape {tuple(value.shape)}. Nothing tells how the ranks' parts belong together, so it cannot be saved."
            " Use an optimizer that makes its state from the parameter (`torch.zeros_like(parameter)`)."
        )


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _names_of(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """The name of each parameter, in the order in which ``optimizer.state_dict()`` numbers them."""
    names = {id(parameter): _plain_name(key) for key, parameter in model.named_parameters()}
    parameters = _parameters_of(optimizer)
    strangers = [tuple(parameter.shape) for parameter in parameters if id(parameter) not in names]
    if strangers:
        raise ValueError(
            f"{len(strangers)} parameters of {type(optimizer).__name__} are not parameters of {type(model).__name__}"
            f" (shapes {strangers[:_SHOWN]}). Make the optimizer after the model is sharded, of `model.parameters()`."
        )
    return [names[id(parameter)] for parameter in parameters]


def save_sharded(path: str | os.PathLike[str], state: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Write a directory that Lightning's ``ModelParallelStrategy`` reads; collective.

    Args:
        path: The directory, the same on all ranks. A checkpoint that is there is replaced.
        state: ``"state_dict"`` with :func:`model_state`, ``"optimizer_0"``, ``"optimizer_1"``, ... with
            :func:`optimizer_state`, not full.
        metadata: All else; rank 0 writes it.

    Raises:
        RuntimeError: Writing failed on some rank; on all ranks.
    """
    path = Path(path)
    _on_rank_zero(lambda: _clear(path), f"Clearing {str(path)!r} for a checkpoint")
    try:
        save_shards(dict(state), storage_writer=FileSystemWriter(path))
    except CheckpointException as error:  # not an Exception: handlers would let it pass
        raise RuntimeError(f"Writing the shards of {str(path)!r} failed: {error}") from error
    _on_rank_zero(lambda: _write_synced(dict(metadata), path / META_NAME), f"Writing {str(path / META_NAME)!r}")


def _on_rank_zero(action: Callable[[], None], what: str) -> None:
    """Run ``action`` on rank 0; all ranks wait for it and learn whether it failed."""
    failed: list[str | None] = [None]
    cause: Exception | None = None
    if dist.get_rank() == 0:
        try:
            action()
        except Exception as error:
            failed, cause = [f"{type(error).__name__}: {error}"], error
    dist.broadcast_object_list(failed, src=0)
    if failed[0] is not None:
        raise RuntimeError(f"{what} failed on rank 0: {failed[0]}") from cause


def _clear(path: Path) -> None:
    """Make the directory; what an earlier checkpoint left there goes, what says that it is complete first."""
    if path.is_file():
        path.unlink()
    path.mkdir(parents=True, exist_ok=True)
    for old in (path / META_NAME, path / _DCP_METADATA_NAME, *path.glob("__*.distcp")):
        old.unlink(missing_ok=True)


def make_way_for_file(path: str | os.PathLike[str]) -> None:
    """Remove a sharded checkpoint that stands where one file is to be written; on one rank.

    Raises:
        IsADirectoryError: If the directory is no checkpoint.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / META_NAME).is_file():
            raise IsADirectoryError(f"Cannot write the checkpoint {str(path)!r}: a directory of that name is there.")
        shutil.rmtree(path)


def _write_synced(value: object, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------------------------------------------------------------
# In


class _Stored(NamedTuple):
    """A tensor in a checkpoint that is not read yet."""

    shape: torch.Size
    dtype: torch.dtype
    source: str | Tensor  # its key in the directory; the mapped file


class _Contents(NamedTuple):
    """What a checkpoint holds."""

    model: dict[str, Any]
    optimizers: list[dict[str, Any]]
    rest: dict[str, Any]


def check_readable(path: str | os.PathLike[str]) -> None:
    """Check that this rank sees a checkpoint at ``path``. Not collective, and no tensor is read.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: What is there is neither a directory of shards nor a file of ``torch.save``.
    """
    path = Path(path)
    allowed = (
        f"A checkpoint is a directory of shards (with {META_NAME!r} and {_DCP_METADATA_NAME!r} in it) or a file written"
        " by `torch.save`."
    )
    if not path.exists():
        raise FileNotFoundError(
            f"No checkpoint at {str(path)!r} as host {os.uname().nodename!r} sees it. {allowed} It must be on a file"
            " system that all hosts share."
        )
    if path.is_dir():
        lacking = [name for name in (META_NAME, _DCP_METADATA_NAME) if not (path / name).is_file()]
        if lacking:
            raise ValueError(f"The directory {str(path)!r} is no complete checkpoint: it lacks {lacking}. {allowed}")
    elif not zipfile.is_zipfile(path):
        raise ValueError(f"The file {str(path)!r} is damaged, or was not written by `torch.save`. {allowed}")


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Load ``model`` and ``optimizers`` in place, from either form, written on any number of ranks.

    Not collective: each rank reads its own part. All that can be known to be wrong is raised before anything changes.

    Args:
        path: The checkpoint, as every rank sees it.
        model: The sharded model.
        optimizers: In the order in which they were saved. Empty if not fitting: their states are then left unread.
        strict: Whether a name that only the file or only the model has is an error.
        weights_only: As for ``torch.load``, for what is not a tensor. None is torch's default, which is True.

    Returns:
        What the file holds besides the states of model and optimizers.

    Raises:
        FileNotFoundError: See :func:`check_readable`.
        ValueError: The checkpoint does not fit ``model`` or ``optimizers``.
        pickle.UnpicklingError: It holds objects that ``weights_only`` forbids.
        RuntimeError: A shard could not be read.
    """
    path = Path(path)
    check_readable(path)
    fsdp.reshard(model)  # after an evaluation the root may still hold gathered parameters
    is_sharded = path.is_dir()
    contents = _open_sharded(path, weights_only, bool(optimizers)) if is_sharded else _open_full(path, weights_only)

    keys, targets, required = _targets(model)
    _check_fits_model(path, contents.model, targets, required, strict)
    if optimizers:
        _check_number(path, contents, len(optimizers))
    to_read: list[tuple[_Stored, Tensor]] = []
    with torch.no_grad():
        new_states = [
            _plan_optimizer(path, number, saved, optimizer, model, to_read)
            for number, (saved, optimizer) in enumerate(zip(contents.optimizers, optimizers, strict=False))
        ]
        loaded = {
            key: _map_leaves(contents.model[name], partial(_plan_value, target=targets[name], to_read=to_read))
            for name, key in keys.items()
            if name in contents.model
        }
        # From here on things change.
        _read(path, to_read)
        # The tensors are in place; this is for values that are none, and for what the model does on loading. Its
        # strictness was ours above, where it changes nothing.
        model.load_state_dict(loaded, strict=False)
        for optimizer, new_state in zip(optimizers, new_states, strict=True):
            _load_optimizer(optimizer, new_state)
    return contents.rest


def _targets(model: nn.Module) -> tuple[dict[str, str], dict[str, Any], set[str]]:
    """By name: the key for ``model.load_state_dict``, and the value now, which aliases the model if it is a tensor.

    Also what a ``state_dict`` of the user's own leaves out, since a file may have it. Last, the names that a file must
    have.
    """
    own = model.state_dict()
    keys = {_plain_name(key): key for key in own}
    values = {_plain_name(key): value for key, value in own.items()}
    required = set(keys)
    for key, tensor in chain(model.named_parameters(remove_duplicate=False), _persistent_buffers(model)):
        name = _plain_name(key)
        if name not in values:
            keys[name], values[name] = key.replace(f"{_WRAPPERS[1]}.", ""), tensor
    targets = {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
    return keys, targets, required


def _plan_value(leaf: Any, target: Any, to_read: list[tuple[_Stored, Tensor]]) -> Any:
    """What becomes of one value of the model: a tensor is read into its target, another value is itself."""
    if not isinstance(leaf, _Stored):
        return leaf
    if not isinstance(target, Tensor):
        target = torch.empty(leaf.shape, dtype=leaf.dtype)  # inside a module's extra state
    to_read.append((leaf, target))
    return target


# ---- checks


def _check_fits_model(
    path: Path, saved: Mapping[str, Any], targets: Mapping[str, Any], required: set[str], strict: bool
) -> None:
    missing, unexpected = required - saved.keys(), saved.keys() - targets.keys()
    if strict and (missing or unexpected):
        lacks = f" It lacks {_listed(missing)}." if missing else ""
        has = f" It has {_listed(unexpected)}, which the model has not." if unexpected else ""
        raise ValueError(
            f"The checkpoint {str(path)!r} does not fit the model.{lacks}{has} To load what both have, set"
            " `strict_loading = False` on the module."
        )
    wrong = [
        f"{name} (checkpoint {_shape(saved[name])}, model {_shape(targets[name])})"
        for name in saved.keys() & targets.keys()
        if isinstance(targets[name], Tensor) and _shape(saved[name]) != _shape(targets[name])
    ]
    if wrong:
        raise ValueError(
            f"The checkpoint {str(path)!r} has tensors of other shapes than the model: {_listed(wrong)}. Build the"
            " model with the hyper-parameters of the run that saved it."
        )


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor | _Stored) else "no tensor"


def _check_number(path: Path, contents: _Contents, expected: int) -> None:
    found = len(contents.optimizers)
    if not found and "lr_schedulers" not in contents.rest:
        raise ValueError(
            f"The checkpoint {str(path)!r} was saved with `save_weights_only=True`: it has no optimizer states, so"
            " training cannot be resumed from it. Pass it to `trainer.validate` or `trainer.test`, or load only its"
            " weights with `load_state_dict` before `trainer.fit`."
        )
    if found != expected:
        raise ValueError(
            f"The checkpoint {str(path)!r} has the states of {found} optimizers, but `configure_optimizers` returned"
            f" {expected}. Return the optimizers of the run that saved it, in the same order."
        )


# ---- optimizers


def _plan_optimizer(
    path: Path,
    number: int,
    saved: Mapping[str, Any],
    optimizer: Optimizer,
    model: nn.Module,
    to_read: list[tuple[_Stored, Tensor]],
) -> dict[str, Any]:
    """The argument for ``optimizer.load_state_dict``, its tensors placed like the parameters and not read yet."""
    where = f"The state of optimizer {number} ({type(optimizer).__name__}) in the checkpoint {str(path)!r}"
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    saved_groups: list[dict[str, Any]] = saved["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"{where} has {len(saved_groups)} parameter groups, but the optimizer has {len(groups)}. Make the groups of"
            " the run that saved it."
        )
    first_names, names = _first_names(model), _names_of(optimizer, model)
    index_of: dict[Any, int] = {}
    for position, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True)):
        index_of |= _match(f"{where}, group {position},", group["params"], saved_group["params"], names, first_names)

    parameters = _parameters_of(optimizer)
    state: dict[Any, Any] = {}
    for key, values in saved.get("state", {}).items():
        if key not in index_of:  # kept for no parameter; torch keeps it, too
            state[key] = _map_leaves(values, partial(_plan_value, target=None, to_read=to_read))
            continue
        parameter = parameters[index_of[key]]
        state[index_of[key]] = _map_leaves(values, partial(_plan_state, like=parameter, to_read=to_read))

    # A scheduler adds a key to each group (`initial_lr`), a newer torch an argument: what the file lacks stays.
    new_groups = []
    for group, saved_group in zip(groups, saved_groups, strict=True):
        values = {
            key: _map_leaves(value, partial(_plan_state, like=group.get(key), to_read=to_read))
            for key, value in saved_group.items()
        }
        new_groups.append({**group, **values, "params": group["params"]})
    others = {
        key: _map_leaves(value, partial(_plan_value, target=None, to_read=to_read))
        for key, value in saved.items()
        if key not in ("state", "param_groups")
    }
    return {**others, "state": state, "param_groups": new_groups}


def _match(
    where: str, indices: list[int], saved: Sequence[Any], names: Sequence[str], first_names: Mapping[str, str]
) -> dict[Any, int]:
    """Which parameter each entry of a saved group means: by name if it is one, else by position as torch does.

    Lightning numbers the parameters of a full checkpoint through the model, torch through the optimizer: the position
    in the group is the same.
    """
    here = {names[index]: index for index in indices}
    if not all(isinstance(each, str) for each in saved):
        if len(saved) != len(indices):
            raise ValueError(
                f"{where} has {len(saved)} parameters, but the optimizer's group has {len(indices)}:"
                f" {_listed(here)}. Give the optimizer the parameters of the run that saved it (frozen ones count)."
            )
        return dict(zip(saved, indices, strict=True))
    by_name = {each: first_names.get(_plain_name(each), each) for each in saved}
    if set(by_name.values()) != here.keys():
        only_saved, only_here = set(by_name.values()) - here.keys(), here.keys() - set(by_name.values())
        raise ValueError(
            f"{where} is of other parameters than the optimizer's group. Only in the checkpoint: {_listed(only_saved)};"
            f" only in the optimizer: {_listed(only_here)}. Give the optimizer the parameters of the run that saved it."
        )
    return {each: here[name] for each, name in by_name.items()}


def _plan_state(leaf: Any, like: Any, to_read: list[tuple[_Stored, Tensor]]) -> Any:
    """Memory for one stored tensor, placed as the optimizer itself would have placed it beside ``like``."""
    if not isinstance(leaf, _Stored):
        return leaf
    target: Tensor
    if not isinstance(like, Tensor) or not leaf.shape:
        device = like.device if isinstance(like, Tensor) and not like.shape else None
        target = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    elif leaf.shape == like.shape:
        target = torch.empty_like(like, dtype=leaf.dtype, requires_grad=False)
    elif isinstance(like, DTensor):
        # A factor, such as Adafactor's: what `new_zeros` of another shape makes is whole on every rank.
        target = empty_dtensor(
            leaf.shape,
            dtype=leaf.dtype,
            device_mesh=like.device_mesh,
            placements=[Replicate()] * like.device_mesh.ndim,
        ).to(like.device)
    else:
        target = torch.empty(leaf.shape, dtype=leaf.dtype, device=like.device)
    to_read.append((leaf, target))
    return target


def _load_optimizer(optimizer: Optimizer, new_state: dict[str, Any]) -> None:
    optimizer.load_state_dict(new_state)
    # Torch casts a state to the dtype of its parameter: of fp32 moments of a bf16 weight little would be left.
    for index, parameter in enumerate(_parameters_of(optimizer)):
        for key, value in new_state["state"].get(index, {}).items():
            now = optimizer.state[parameter].get(key)
            if key != "step" and isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(now.device)


# ---- files


def _unpickle(path: Path, weights_only: bool | None, *, mmap: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise _not_unpickled(path, weights_only, error) from error


def _not_unpickled(path: Path, weights_only: bool | None, error: BaseException) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(
        f"{str(path)!r} holds objects that `weights_only={weights_only}` does not load (None is torch's default, True)."
        " If you trust its source, pass `weights_only=False`: that runs any code that it contains, so it is never done"
        f" unasked. {error}"
    )


def _open_full(path: Path, weights_only: bool | None) -> _Contents:
    checkpoint = _unpickle(path, weights_only, mmap=True)  # mapped: only what a rank needs is ever read
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), Mapping):
        found = _listed(map(str, checkpoint)) if isinstance(checkpoint, dict) else type(checkpoint).__name__
        raise ValueError(
            f"The file {str(path)!r} is no checkpoint of a Trainer: it has no 'state_dict'. Found: {found}. Weights"
            " alone are loaded with `load_state_dict`."
        )
    model, optimizers = checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", [])
    return _Contents(
        {_plain_name(key): _map_leaves(value, _stored) for key, value in model.items()},
        _map_leaves(optimizers, _stored),
        # Copied out: what stays mapped dies when a later checkpoint overwrites the file.
        _map_leaves(checkpoint, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf),
    )


def _stored(leaf: Any) -> Any:
    return _Stored(leaf.shape, leaf.dtype, leaf) if isinstance(leaf, Tensor) else leaf


def _open_sharded(path: Path, weights_only: bool | None, with_optimizers: bool) -> _Contents:
    metadata = FileSystemReader(path).read_metadata()
    rest: dict[str, Any] = _unpickle(path / META_NAME, weights_only, mmap=False)
    flat: dict[str, Any] = {}
    for key, kind in metadata.state_dict_metadata.items():
        flat[key] = _Stored(kind.size, kind.properties.dtype, key) if isinstance(kind, TensorStorageMetadata) else None
    values = {
        key: None
        for key, value in flat.items()
        if value is None and (with_optimizers or not key.startswith(_OPTIMIZER_PREFIX))
    }
    _read_shards(path, values, weights_only)

    tree: dict[Any, Any] = {}
    for key, value in {**flat, **values}.items():
        *parents, last = (metadata.planner_data or {}).get(key, (key,))
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    if "state_dict" not in tree:
        raise ValueError(
            f"The directory {str(path)!r} is no checkpoint of a Trainer: it has no 'state_dict'. Found:"
            f" {_listed(map(str, tree))}. One of Fabric is loaded with `fabric.load`."
        )
    numbered = sorted(
        (int(key.removeprefix(_OPTIMIZER_PREFIX)), key) for key in tree if key.startswith(_OPTIMIZER_PREFIX)
    )
    return _Contents(
        {_plain_name(key): _with_lists(value) for key, value in tree["state_dict"].items()},
        [_with_lists(tree[key]) for _, key in numbered],
        rest,
    )


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


class _Planner(DefaultLoadPlanner):
    """Reads into a flat dict. Values that are no tensors obey ``weights_only``, too, where torch runs any pickle."""

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__()
        self.weights_only = weights_only

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=self.weights_only)


def _read_shards(path: Path, into: dict[str, Any], weights_only: bool | None = True) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            load_shards(into, storage_reader=FileSystemReader(path), planner=_Planner(weights_only), no_dist=True)
        except CheckpointException as error:  # not an Exception: handlers would let it pass
            for failure, _ in error.failures.values():
                if isinstance(failure, pickle.UnpicklingError):
                    raise _not_unpickled(path, weights_only, failure) from failure
            raise RuntimeError(f"Reading the shards of {str(path)!r} failed: {error}") from error


def _read(path: Path, wanted: Iterable[tuple[_Stored, Tensor]]) -> None:
    by_key: dict[str, Any] = {}
    for stored, target in wanted:
        if isinstance(stored.source, str):
            by_key[stored.source] = target
        else:
            _copy_own_part(stored.source, target)
    if by_key:
        _read_shards(path, by_key)


def _copy_own_part(source: Tensor, target: Tensor) -> None:
    if isinstance(target, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        target = target.to_local()
        if not target.numel():
            return
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            source = source.narrow(dim, offset, size)
    target.copy_(source)
