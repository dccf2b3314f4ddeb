"""Checkpoints of a user's objects under the keys that he gives them: what ``fabric.save`` and ``fabric.load`` do.

:func:`collect` is collective; what it returns, a ``Saver`` writes. :func:`load_objects` is not: see ``checkpoint.py``.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fp8_rocm.distributed import fsdp
from lightning_fp8_rocm.distributed.checkpoint import (
    Loading,
    Naming,
    model_state,
    named_optimizer_state,
    namings,
    shapes_of_strangers,
    split,
    tied_names,
)
from lightning_fp8_rocm.distributed.faults import raise_together, same_on_all_ranks
from lightning_fp8_rocm.distributed.storage import (
    MODEL_KEY,
    MODELS_FACT,
    OPTIMIZERS_FACT,
    OWN_KEY,
    Contents,
    Stored,
    as_stored,
    by_plain_name,
    is_model_state,
    is_optimizer_state,
    listed,
    map_leaves,
    open_checkpoint,
)

Keep = Callable[[str, Any], bool]
"""Whether to save something, by its name and value."""

T = TypeVar("T")
_WAY_OUT = "pass `strict=False`"


@runtime_checkable
class _Stateful(Protocol):
    """As Fabric tells it: schedulers, metrics, dataloaders, modules and optimizers."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


def _of_kind(state: Mapping[str, Any], kind: type[T]) -> dict[str, T]:
    return {key: value for key, value in state.items() if isinstance(value, kind)}


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _namings(key: str, optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> list[Naming]:
    found = namings(optimizer, modules)
    if found:
        return found
    strangers = shapes_of_strangers(optimizer, modules)
    raise ValueError(
        f"{len(strangers)} parameters of the optimizer {key!r} ({type(optimizer).__name__}) are of no module in the"
        f" state (shapes {listed(map(str, strangers))}), and a checkpoint has parameters by name. Pass its model, too,"
        " under a key of its own, both as `fabric.setup` returned them."
    )


def _check_keys(state: Mapping[str, Any]) -> None:
    if OWN_KEY in state:
        raise ValueError(
            f"Expected `state` to have keys of your own, but got {OWN_KEY!r}, under which lightning_fp8_rocm itself"
            " puts something into each checkpoint. Choose another key."
        )


# ---------------------------------------------------------------------------------------------------------------------
# Out


def collect(
    state: Mapping[str, Any], *, full: bool, copy: bool = False, filter: Mapping[str, Keep] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a checkpoint is to hold of some objects, under their keys; collective.

    Args:
        state: Sharded modules; optimizers over their parameters; other things with a ``state_dict``, also modules that
            are not sharded, of which that of rank 0 is saved; plain values.
        full: Whether it will be one file: whole tensors are gathered on rank 0, one after the other.
        copy: Whether tensors must not share memory with modules and optimizers.
        filter: By key, what of a ``state_dict``, or of a dict, to save. It is asked about what would be written:
            DTensors, or if ``full``, on rank 0 alone, whole tensors.

    Returns:
        For ``Saver.save``: the shards, or for one file what rank 0 puts beside the rest; and the rest. Modules and
        optimizers, with parameters by name, are in the former.

    Raises:
        ValueError: A parameter of an optimizer is of no module of ``state``, or has a state that cannot be saved; or a
            key is this package's.
        DistributedError: ``filter`` does not keep the same on all ranks.
    """
    _check_keys(state)
    modules, optimizers = _of_kind(state, nn.Module), _of_kind(state, Optimizer)
    for module in modules.values():
        fsdp.reshard(module)  # after an evaluation the root may still hold gathered parameters
    models = {key: module for key, module in modules.items() if _is_sharded(module)}
    names = {key: _namings(key, optimizer, modules)[0].names for key, optimizer in optimizers.items()}
    others: dict[str, Any] = {}
    with raise_together("asking for the states that go into the checkpoint"):
        for key, value in state.items():
            if key in models or key in optimizers:
                continue
            if isinstance(value, nn.Module):
                others[key] = model_state(value, full=False, copy=copy)
            else:
                others[key] = value.state_dict() if isinstance(value, _Stateful) else value

    shards: dict[str, Any] = {}
    for key, value in state.items():
        if key in models:
            shards[key] = model_state(value, full=full, copy=copy)
        elif key in optimizers:
            shards[key] = named_optimizer_state(value, names[key], full=full, copy=copy)
    of_others, rest = split(others, full=full, copy=copy)
    shards |= of_others
    if filter:
        with raise_together("filtering what goes into the checkpoint"):
            if not full or dist.get_rank() == 0:  # of one file the others have nothing
                shards, rest = _filtered(shards, filter), _filtered(rest, filter)
        if not full:
            kept = {key: list(shards[key]) for key in filter if isinstance(shards.get(key), dict)}
            same_on_all_ranks(zlib.crc32(repr(kept).encode()), "What `filter` keeps, here as a crc32,")
    ties = {
        key: {name: first for name, first in tied_names(module).items() if {name, first} <= shards[key].keys()}
        for key, module in models.items()
    }
    rest[OWN_KEY] = {MODELS_FACT: list(models), OPTIMIZERS_FACT: list(optimizers), "tied": ties}
    return shards, rest


def _filtered(state: Mapping[str, Any], keep: Mapping[str, Keep]) -> dict[str, Any]:
    return {
        key: {name: each for name, each in value.items() if keep[key](name, each)}
        if key in keep and isinstance(value, dict)
        else value
        for key, value in state.items()
    }


# ---------------------------------------------------------------------------------------------------------------------
# In


def load_objects(
    path: str | os.PathLike[str],
    state: MutableMapping[str, Any] | nn.Module | Optimizer,
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Load objects in place, from either form, written on any number of ranks, by Fabric or by a Trainer.

    Not collective: each rank reads its own part. All that can be known to be wrong is raised before anything changes.

    Args:
        path: The checkpoint, as every rank sees it.
        state: As for :func:`collect`. Plain values are replaced in it by those of the checkpoint. Of a Trainer's
            checkpoint a module under any key is the model, and optimizers are its optimizers in their order. A module
            or an optimizer by itself is loaded from a file with nothing but its state, or from a checkpoint of one.
        strict: Whether a key that the checkpoint lacks is an error, or a name that only a module or only its state has.
        weights_only: As for ``torch.load``, for what is not a tensor. None is torch's default, which is True.

    Returns:
        What was not asked for, without the states of models and optimizers; with what this package added. A tensor
        under the name and of the shape of a sharded parameter is a DTensor placed like it.

    Raises:
        KeyError: The checkpoint lacks a key of ``state``.
        ValueError: It does not fit what is in ``state``.
        pickle.UnpicklingError: It holds objects that ``weights_only`` forbids.
        RuntimeError: A shard could not be read.
    """
    contents = open_checkpoint(Path(path), weights_only=weights_only, with_optimizers=not isinstance(state, nn.Module))
    loading = Loading(contents)
    if isinstance(state, nn.Module):
        loading.plan_model(state, _alone(contents, "model"), strict=strict, way_out=_WAY_OUT)
        loading.run()
        return {}
    if isinstance(state, Optimizer):
        loading.plan_optimizer(state, _alone(contents, "optimizer"), [], "the optimizer")
        loading.run()
        return {}

    _check_keys(state)
    found = _found(contents, state)
    missing = [key for key in state if key not in found]
    if strict and missing:
        raise KeyError(
            f"The requested state contains a key {missing[0]!r} that does not exist in the loaded checkpoint"
            f" {str(path)!r}. It has: {listed(_keys(contents))}. To disable strict loading, set `strict=False`."
        )
    there = {key: value for key, value in state.items() if key in found}
    modules, optimizers = _of_kind(there, nn.Module), _of_kind(there, Optimizer)
    for key, module in modules.items():
        saved = _state(contents, key, found[key], "a module")
        loading.plan_model(module, by_plain_name(saved), strict=strict, way_out=_WAY_OUT)
    for key, optimizer in optimizers.items():
        saved = _state(contents, key, found[key], "an optimizer")
        loading.plan_optimizer(optimizer, saved, _namings(key, optimizer, _of_kind(state, nn.Module)), repr(key))
    others = {
        key: loading.plan_rest({key: found[key]}, now={key: value})[key]
        for key, value in there.items()
        if key not in modules and key not in optimizers
    }
    left = loading.plan_rest({key: value for key, value in contents.rest.items() if key not in found})
    loading.run()
    for key, value in others.items():
        if isinstance(state[key], _Stateful):
            state[key].load_state_dict(value)
        else:
            state[key] = value
    return left | _maybe_others(contents, found)


def _alone(contents: Contents, kind: Literal["model", "optimizer"]) -> dict[str, Any]:
    """The state of the one model or optimizer that a file consists of, or that a checkpoint has beside other things."""
    looks_so = is_model_state if kind == "model" else is_optimizer_state
    if not contents.models and looks_so(contents.rest):
        return by_plain_name(contents.rest)
    if kind == "model":
        return contents.model
    if len(contents.optimizers) != 1:
        raise ValueError(
            f"Expected {str(contents.path)!r} to have the state of one optimizer, but it has"
            f" {len(contents.optimizers)}. Found: {listed(_keys(contents))}. `fabric.load` loads each under its key."
        )
    return next(iter(contents.optimizers.values()))


def _found(contents: Contents, state: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint has for each key of ``state``, if anything."""
    parts = (contents.rest, contents.optimizers, contents.models)
    found = {key: part[key] for part in parts for key in state if key in part}
    if not contents.of_trainer:
        return found
    modules = _of_kind(state, nn.Module).keys() - found.keys()
    if len(modules) == 1 and MODEL_KEY not in state:
        found[modules.pop()] = contents.model
    optimizers = [key for key in _of_kind(state, Optimizer) if key not in found]
    if optimizers and contents.optimizers:
        if len(optimizers) != len(contents.optimizers):
            raise ValueError(
                f"The checkpoint {str(contents.path)!r} is of a Trainer and has the states of"
                f" {len(contents.optimizers)} optimizers, which are told by their order, but `state` has"
                f" {len(optimizers)}: {listed(optimizers)}."
                " Pass all of them, in the order of `configure_optimizers`."
            )
        found |= zip(optimizers, contents.optimizers.values(), strict=True)
    return found


def _state(contents: Contents, key: str, saved: Any, kind: str) -> dict[str, Any]:
    """Of a module or optimizer, also if it was saved as a plain value.

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(saved, dict):
        raise ValueError(
            f"Expected {key!r} in the checkpoint {str(contents.path)!r} to be the state of {kind}, as in `state`, but"
            f" it is of type {type(saved).__name__}. Pass what was saved under this key, or another key."
        )
    state: dict[str, Any] = map_leaves(saved, as_stored)
    return state


def _keys(contents: Contents) -> list[str]:
    return [str(key) for key in (*contents.models, *contents.optimizers, *contents.rest) if key != OWN_KEY]


def _maybe_others(contents: Contents, found: Mapping[str, Any]) -> dict[str, Any]:
    """What in one file merely looks like a model: if nobody asked for it as one, it may be anything.

    Its tensors stay mapped, so that nothing is read of what is one.
    """
    if contents.path.is_dir() or contents.of_trainer or MODELS_FACT in contents.facts:
        return {}
    return {
        key: map_leaves(value, lambda leaf: leaf.source if isinstance(leaf, Stored) else leaf)
        for key, value in contents.models.items()
        if key not in found
    }
