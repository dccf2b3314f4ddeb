"""A checkpoint of either form as the one dict that is in a full file; without ranks or a model."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from lightning_fp8_rocm.distributed.publish import find, local_path, verify
from lightning_fp8_rocm.distributed.storage import (
    MODEL_KEY,
    MODELS_FACT,
    OPTIMIZERS_KEY,
    VERSION_KEY,
    Contents,
    Stored,
    check_readable,
    map_leaves,
    open_checkpoint,
    read,
    unchanged,
)

Make = Callable[[Stored], Tensor]
"""Makes the tensor that a stored one is read into: of its shape, and of its dtype or of one to convert to."""

# Each turn of reading looks through the list of all shards, so there are few, whatever the size of the model.
_TURN, _TURNS = 1 << 30, 64  # bytes at least; turns at most


def in_memory(stored: Stored) -> Tensor:
    """Ordinary memory of the host for a stored tensor."""
    return torch.empty(stored.shape, dtype=stored.dtype)


def assembled(
    contents: Contents, make: Make = in_memory, after: Callable[[int], None] = lambda size: None
) -> dict[str, Any]:
    """Read all tensors of a checkpoint.

    Args:
        contents: Of the checkpoint.
        make: What tensors are read into.
        after: Called with the number of bytes that were read since the last call.

    Returns:
        What is in one file, in ordinary tensors; tied weights are one tensor. Of a Trainer, what
        ``trainer.save_checkpoint`` writes on one device: ``state_dict``; ``optimizer_states`` with parameters by
        number, unless weights alone were saved; the rest. Of Fabric, models and optimizers under their keys, with
        parameters by name as Lightning's ``ModelParallelStrategy`` has them, and the rest.

    Raises:
        RuntimeError: A shard could not be read.
    """
    wanted: list[tuple[Stored, Tensor]] = []

    def planned(leaf: Any) -> Any:
        if not isinstance(leaf, Stored):
            return leaf
        target = make(leaf)
        wanted.append((leaf, target))
        return target

    whole: dict[str, Any] = {}
    for key, model in contents.models.items():
        ties = tied_names(contents, key, make)
        state = {name: map_leaves(value, planned) for name, value in model.items() if name not in ties}
        whole[key] = {name: state[ties.get(name, name)] for name in model}
    if not contents.of_trainer:
        whole |= map_leaves(contents.optimizers, planned)
    # A checkpoint of weights alone has neither; a run without optimizers has an empty list.
    elif contents.optimizers or "lr_schedulers" in contents.rest:
        whole[OPTIMIZERS_KEY] = [map_leaves(numbered(each), planned) for each in contents.optimizers.values()]
    whole |= map_leaves(contents.rest, planned)
    read_in_turns(contents.path, wanted, after, contents.metadata)
    return whole


def load(
    path: str | os.PathLike[str], *, version: str, map_location: Any = None, weights_only: bool | None = None
) -> dict[str, Any]:
    """Verify a checkpoint of either form and read it, where ``load_from_checkpoint`` reads a file of a Trainer.

    Args:
        path: The directory of shards, or the file. Of Fabric, it has one model.
        version: Of Lightning, for a checkpoint of Fabric, which has none.
        map_location: A device for the tensors; anything else leaves them in memory of the host.
        weights_only: As for ``torch.load``, for what is not a tensor. None is torch's default, which is True.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: It is damaged, or no checkpoint, or one of several models.
        pickle.UnpicklingError: It holds objects that ``weights_only`` forbids.
        RuntimeError: A shard could not be read.
    """
    found, notice = find(local_path(path))
    check_readable(found)
    if notice is not None:
        warnings.warn(notice, stacklevel=2)
    with unchanged(found):
        damages = verify(found)
        if damages:
            raise ValueError(f"The checkpoint {str(found)!r} is damaged: {'; '.join(map(str, damages))}.")
        contents = open_checkpoint(found, weights_only=weights_only)
        model_key = contents.model_key  # or an error that names several
        checkpoint = assembled(contents)
    if not contents.of_trainer:
        checkpoint |= {MODEL_KEY: checkpoint.pop(model_key), VERSION_KEY: version}
    if not isinstance(map_location, str | torch.device):
        return checkpoint

    def moved(leaf: Any) -> Any:
        return leaf.to(map_location) if isinstance(leaf, Tensor) else leaf

    on_device: dict[str, Any] = map_leaves(checkpoint, moved)
    return on_device


def read_in_turns(
    path: Path,
    wanted: Sequence[tuple[Stored, Tensor]],
    after: Callable[[int], None] = lambda size: None,
    found: Metadata | None = None,
) -> None:
    """As :func:`storage.read`; calls ``after`` with the bytes read since the last call."""
    limit = max(_TURN, sum(stored.nbytes for stored, _ in wanted) // _TURNS)
    turn: list[tuple[Stored, Tensor]] = []
    size = 0
    for number, each in enumerate(wanted, 1):
        turn.append(each)
        size += each[0].nbytes
        if size >= limit or number == len(wanted):
            read(path, turn, found)
            after(size)
            turn, size = [], 0


def numbered(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer with parameters by number, as ``optimizer.state_dict()`` counts them.

    >>> numbered({"state": {"b": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["a", "b"]}]})
    {'state': {1: {'step': 1}}, 'param_groups': [{'lr': 0.1, 'params': [0, 1]}]}
    """
    groups = optimizer["param_groups"]
    number = {key: index for index, key in enumerate(chain.from_iterable(group["params"] for group in groups))}
    state = {number.get(key, key): value for key, value in optimizer.get("state", {}).items()}
    return {
        **optimizer,
        "state": dict(sorted(state.items(), key=lambda item: (not isinstance(item[0], int), str(item[0]).zfill(12)))),
        "param_groups": [{**group, "params": [number[key] for key in group["params"]]} for group in groups],
    }


# ---------------------------------------------------------------------------------------------------------------------
# Ties


def tied_names(contents: Contents, key: str, make: Make = in_memory) -> dict[str, str]:
    """For each further name of a tied weight, the name under which it comes first in the model with this key.

    A file keeps which names share memory. A directory stores each name by itself; where it does not say what was tied,
    that is told by the values, see :func:`_by_values`.
    """
    recorded = contents.facts.get("tied")
    if recorded is not None:
        return dict(recorded[key] if MODELS_FACT in contents.facts else recorded)
    tensors = {name: leaf for name, leaf in contents.models[key].items() if isinstance(leaf, Stored)}
    first: dict[Any, str] = {}
    ties = {}
    if all(isinstance(leaf.source, Tensor) for leaf in tensors.values()):
        for name, leaf in tensors.items():
            earlier = first.setdefault(_memory(leaf), name)
            if earlier != name:
                ties[name] = earlier
        return ties
    return _by_values(contents, tensors, make)


def _memory(leaf: Stored) -> tuple[Any, ...]:
    tensor = leaf.source
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return (id(leaf),)
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _by_values(contents: Contents, tensors: Mapping[str, Stored], make: Make) -> dict[str, str]:
    """Matrices that have the same values, of which at most one was trained.

    An optimizer knows a tied weight by one name only. Vectors do not count, nor does a matrix of one value throughout:
    norms, biases and adapters start out equal. A copy that is no tie (the teacher of a fresh student) may be taken for
    one, which costs nothing: what is loaded has the values that were saved.
    """
    trained = {
        name
        for optimizer in contents.optimizers.values()
        for group in optimizer["param_groups"]
        for name in group["params"]
    }
    alike: dict[tuple[torch.Size, torch.dtype], list[str]] = defaultdict(list)
    for name, leaf in tensors.items():
        if len(leaf.shape) > 1:
            alike[leaf.shape, leaf.dtype].append(name)
    ties: dict[str, str] = {}
    for names in alike.values():
        if len(names) < 2 or trained.issuperset(names):
            continue
        first: dict[bytes, str] = {}
        for name, digest in _digests(contents, {name: tensors[name] for name in names}, make):
            earlier = first.setdefault(digest, name)
            if earlier != name and not {earlier, name} <= trained:
                ties[name] = earlier
    return ties


def _digests(contents: Contents, tensors: Mapping[str, Stored], make: Make) -> Iterable[tuple[str, bytes]]:
    """Of each tensor's bytes; none for a tensor of one value throughout."""
    wanted = [(stored, make(stored)) for stored in tensors.values()]
    read_in_turns(contents.path, wanted, found=contents.metadata)
    for name, (_, tensor) in zip(tensors, wanted, strict=True):
        values = tensor.contiguous().view(-1)
        if values.numel() and not values.eq(values[0]).all():
            yield name, hashlib.blake2b(values.view(torch.uint8).numpy().data).digest()
