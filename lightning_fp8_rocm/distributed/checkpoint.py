"""Plain tensors out of a model sharded by ``fully_shard`` and its optimizers, and in again.

What goes out has the names of the unconverted model and is made of ordinary tensors (:func:`model_state`,
:func:`optimizer_state`, collective); ``storage.py`` writes and reads it. What comes in (:func:`load`) is not
collective: each rank reads its own part of the files, so what one rank cannot read leaves no other one waiting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from lightning_fp8_rocm.distributed import fsdp
from lightning_fp8_rocm.distributed.storage import (
    Contents,
    Stored,
    is_optimizer_state,
    listed,
    map_leaves,
    open_checkpoint,
    plain_name,
    read,
)
from lightning_fp8_rocm.distributed.whole import numbered

_RECOMPUTED = "_checkpoint_wrapped_module"  # torch's activation checkpointing; its hooks know the names without
_SHOWN = 10

# ---------------------------------------------------------------------------------------------------------------------
# Names


class Naming(NamedTuple):
    """What the parameters of an optimizer are called in a checkpoint."""

    names: list[str]
    """Of each, in the order in which ``optimizer.state_dict()`` numbers them."""
    aliases: dict[str, str]
    """For each name of any parameter of the models, the one under which it comes first; a tied weight has several."""


def namings(optimizer: Optimizer, models: Mapping[str, nn.Module]) -> list[Naming]:
    """What the parameters of ``optimizer`` may be called, the way of saving them first.

    By name in a model that has all of them; by ``KEY.NAME`` if they are spread over several.

    Args:
        optimizer: Over parameters of ``models``.
        models: By key.

    Returns:
        Empty if a parameter is of no model.
    """
    ways = [_naming(optimizer, {"": model}) for model in models.values()]
    if len(models) > 1:
        ways.append(_naming(optimizer, {f"{key}.": model for key, model in models.items()}))
    return [way for way in ways if way is not None]


def _naming(optimizer: Optimizer, models: Mapping[str, nn.Module]) -> Naming | None:
    """By names in ``models``, each after the prefix of its model; None if a parameter is in none of them."""
    first: dict[Tensor, str] = {}
    aliases = {name: first.setdefault(parameter, name) for name, parameter in _named_parameters(models)}
    parameters = _parameters_of(optimizer)
    return Naming([first[each] for each in parameters], aliases) if first.keys() >= set(parameters) else None


def _naming_in(model: nn.Module, optimizer: Optimizer) -> Naming:
    found = namings(optimizer, {"": model})
    if found:
        return found[0]
    strangers = shapes_of_strangers(optimizer, {"": model})
    raise ValueError(
        f"{len(strangers)} parameters of {type(optimizer).__name__} are not parameters of {type(model).__name__}"
        f" (shapes {strangers[:_SHOWN]}). Make the optimizer after the model is sharded, of `model.parameters()`."
    )


def shapes_of_strangers(optimizer: Optimizer, models: Mapping[str, nn.Module]) -> list[tuple[int, ...]]:
    """The shapes of those parameters of ``optimizer`` that are of none of ``models``."""
    known = {parameter for _, parameter in _named_parameters(models)}
    return [tuple(each.shape) for each in _parameters_of(optimizer) if each not in known]


def tied_names(model: nn.Module) -> dict[str, str]:
    """For each further name of a tied weight, the name under which it comes first."""
    return {name: first for name, first in _first_names(model).items() if name != first}


def _first_names(model: nn.Module) -> dict[str, str]:
    """The name under which a parameter comes first, for each of its names; a tied weight has several."""
    first: dict[Tensor, str] = {}
    return {name: first.setdefault(parameter, name) for name, parameter in _named_parameters({"": model})}


def _named_parameters(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for prefix, model in models.items():
        for key, parameter in model.named_parameters(remove_duplicate=False):
            yield prefix + plain_name(key), parameter


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def _sharded(value: Any, copy: bool) -> Any:
    if not isinstance(value, Tensor):
        return deepcopy(value) if copy else value
    # Every operation, so also detach, makes an ordinary tensor of a shard whose class marks how it is gathered.
    tensor = value.detach()
    return tensor.clone() if copy and tensor.device.type == "cpu" else tensor.to("cpu")


def _full(value: Any, copy: bool) -> Any:
    """The whole tensor in memory of the host on rank 0, None elsewhere; collective for sharded tensors."""
    if not isinstance(value, Tensor):
        return deepcopy(value) if copy else value
    tensor = value.detach()
    if isinstance(tensor, DTensor):
        # What is offloaded to the host is gathered on the device, where the collectives of the mesh are.
        device = tensor.device_mesh.device_type
        tensor = (tensor if tensor.device.type == device else tensor.to(device)).full_tensor()  # type: ignore[attr-defined]
    if dist.get_rank() != 0:
        return None
    is_own = tensor.device.type != "cpu"
    tensor = tensor.cpu()
    # Gathered uneven shards may be a view of padded memory, all of which torch.save would write.
    is_padded = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.itemsize
    return tensor.clone() if is_padded or (copy and not is_own) else tensor


# ---------------------------------------------------------------------------------------------------------------------
# Out


@torch.no_grad()
def model_state(model: nn.Module, *, full: bool, copy: bool = False) -> dict[str, Any]:
    """What ``model.state_dict()`` holds, under the names of the model as the user wrote it.

    Not ``get_model_state_dict`` of torch: that looks up each name as an attribute, which a ``state_dict`` of the user's
    own need not allow.

    Args:
        model: The sharded model.
        full: Whether to gather the whole tensors on rank 0, one after the other.
        copy: Whether the tensors must not share memory with the model. Else they may, where that lies in memory of the
            host.

    Returns:
        Ordinary tensors in memory of the host: DTensors of ordinary shards; if ``full``, whole tensors on rank 0 and
        ``{}`` on the others.
    """
    fsdp.reshard(model)  # after an evaluation the root may still hold gathered parameters
    state = {plain_name(key): value for key, value in model.state_dict().items()}
    if not full:
        return {name: map_leaves(value, partial(_sharded, copy=copy)) for name, value in state.items()}
    first_names = _first_names(model)
    gathered: dict[str, Any] = {}
    for name, value in state.items():
        first = first_names.get(name, name)
        # A tied weight is gathered once, and torch.save writes it once.
        gathered[name] = gathered[first] if first in gathered else map_leaves(value, partial(_full, copy=copy))
    return gathered if dist.get_rank() == 0 else {}


@torch.no_grad()
def optimizer_state(model: nn.Module, optimizer: Optimizer, *, full: bool, copy: bool = False) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` holds. The optimizer is only read.

    Torch's ``get_optimizer_state_dict`` takes a step where there is no state yet, after which Adam's step count is off.

    Args:
        model: The sharded model, for the names.
        optimizer: An optimizer over some or all of its parameters.
        full: Whether to gather the whole tensors on rank 0, one after the other.
        copy: See :func:`model_state`.

    Returns:
        If ``full``: on rank 0 what the optimizer of the unsharded model would return, parameters by number, ``{}`` on
        the others. Else parameters by name, and DTensors of ordinary shards.

    Raises:
        ValueError: A parameter of ``optimizer`` is none of ``model``'s, or has a state that is different on each rank
            and says so nowhere.
    """
    fsdp.reshard(model)  # after an evaluation the root may still hold gathered parameters
    state = named_optimizer_state(optimizer, _naming_in(model, optimizer).names, full=full, copy=copy)
    return numbered(state) if full and state else state


@torch.no_grad()
def named_optimizer_state(
    optimizer: Optimizer, names: Sequence[str], *, full: bool, copy: bool = False
) -> dict[str, Any]:
    """As :func:`optimizer_state`, with parameters by name in either form.

    Args:
        optimizer: An optimizer over sharded parameters.
        names: See :attr:`Naming.names`.
        full: See :func:`optimizer_state`.
        copy: See :func:`model_state`.

    Raises:
        ValueError: A parameter has a state that is different on each rank and says so nowhere.
    """
    state: dict[str, Any] = optimizer.state_dict()
    for index, parameter in enumerate(_parameters_of(optimizer)):
        for key, value in state["state"].get(index, {}).items():
            if isinstance(value, Tensor):
                _check_can_be_saved(optimizer, names[index], parameter, key, value)
    named = {names[key] if isinstance(key, int) else key: value for key, value in state["state"].items()}
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    by_name: dict[str, Any] = map_leaves(
        {**state, "state": named, "param_groups": groups}, partial(_full if full else _sharded, copy=copy)
    )
    return {} if full and dist.get_rank() != 0 else by_name


@torch.no_grad()
def split(rest: Mapping[Any, Any], *, full: bool, copy: bool = False) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Take what is sharded out of the rest of a checkpoint: callbacks may keep a DTensor for each parameter.

    Args:
        rest: What a checkpoint holds beside model and optimizers.
        full: Whether to gather the whole tensors on rank 0.
        copy: See :func:`model_state`; for what is sharded.

    Returns:
        The shards, in the dicts in which they were, and ``rest`` without them; if ``full``, nothing and ``rest`` with
        whole tensors, on rank 0, in their place.
    """
    shards, others = {}, {}
    for key, value in rest.items():
        if not isinstance(key, str):  # a key of a shard is a string
            others[key] = map_leaves(value, partial(_on_host, copy=copy))
        elif isinstance(value, DTensor) and not full:
            shards[key] = _sharded(value, copy)
        elif type(value) is dict:
            inner, others[key] = split(value, full=full, copy=copy)
            if inner:
                shards[key] = inner
        else:
            others[key] = map_leaves(value, partial(_on_host, copy=copy))
    return shards, others


def _on_host(leaf: Any, copy: bool) -> Any:
    """A value of callbacks, loops and the like, readable where there is no GPU."""
    if isinstance(leaf, DTensor):
        return _full(leaf, copy)
    return leaf.to("cpu") if isinstance(leaf, Tensor) else leaf


def _check_can_be_saved(optimizer: Optimizer, name: str, parameter: Tensor, key: object, value: Tensor) -> None:
    if is_packed(value):
        raise ValueError(
            f"{type(optimizer).__name__} keeps the state {key!r} of {name!r} as a"
            f" {type(_local_of(value)).__name__}, a tensor of a class of its own, and a checkpoint holds ordinary"
            " tensors only. Use an optimizer with ordinary states, such as `torch.optim.AdamW`, or save without it"
            " (`save_weights_only=True`)."
        )
    if isinstance(parameter, DTensor) and value.numel() > 1 and not isinstance(value, DTensor):
        raise ValueError(
            f"{type(optimizer).__name__} keeps the state {key!r} of the sharded parameter {name!r} as a plain tensor of"
            f" shape {tuple(value.shape)}. Nothing tells how the ranks' parts belong together, so it cannot be saved."
            " Use an optimizer that makes its state from the parameter (`torch.zeros_like(parameter)`)."
        )


def is_packed(value: Any) -> bool:
    """Whether a state is a tensor of a class of its own, as the 8-bit states of torchao and bitsandbytes are."""
    return isinstance(value, Tensor) and type(_local_of(value)) not in (Tensor, nn.Parameter)


def _local_of(value: Tensor) -> Tensor:
    local: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return local.detach()  # of a shard whose class marks how it is gathered an ordinary tensor


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


# ---------------------------------------------------------------------------------------------------------------------
# In


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
        What the file holds besides the states of model and optimizers. A tensor under the name and of the shape of a
        sharded parameter is a DTensor placed like it.

    Raises:
        ValueError: The checkpoint does not fit ``model`` or ``optimizers``.
        pickle.UnpicklingError: It holds objects that ``weights_only`` forbids.
        RuntimeError: A shard could not be read.
    """
    path = Path(path)
    contents = open_checkpoint(path, weights_only=weights_only, with_optimizers=bool(optimizers))
    loading = Loading(contents)
    loading.plan_model(model, contents.model, strict=strict, way_out="set `strict_loading = False` on the module")
    if optimizers:
        _check_number(path, contents, len(optimizers))
        for number, (saved, optimizer) in enumerate(zip(contents.optimizers.values(), optimizers, strict=True)):
            loading.plan_optimizer(optimizer, saved, [_naming_in(model, optimizer)], f"optimizer {number}")
    rest = loading.plan_rest(contents.rest)
    loading.run()
    return rest


class Loading:
    """A load in two halves: what is wrong is raised while it is planned, and nothing changes before :meth:`run`.

    Args:
        contents: Of the checkpoint.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._to_read: list[tuple[Stored, Tensor]] = []
        self._targets: dict[str, Any] = {}
        self._then: list[Callable[[], object]] = []

    def plan_model(self, model: nn.Module, saved: Mapping[str, Any], *, strict: bool, way_out: str) -> None:
        """Plan to load a model, sharded or not.

        Args:
            model: The model, as it is used.
            saved: Its state, by the names of the model as the user wrote it.
            strict: Whether a name that only one of both has is an error.
            way_out: What to do to have none then.

        Raises:
            ValueError: They do not fit.
        """
        fsdp.reshard(model)  # after an evaluation the root may still hold gathered parameters
        keys, targets, required = _targets(model)
        _check_fits_model(self._contents.path, saved, targets, required, strict, way_out)
        loaded = {
            key: map_leaves(saved[name], partial(_plan_value, target=targets[name], to_read=self._to_read))
            for name, key in keys.items()
            if name in saved
        }
        self._targets = targets | self._targets
        # The tensors are in place then; this is for values that are none, and for what the model does on loading. Its
        # strictness was ours above, where it changes nothing.
        self._then.append(lambda: model.load_state_dict(loaded, strict=False))

    @torch.no_grad()
    def plan_optimizer(
        self, optimizer: Optimizer, saved: Mapping[str, Any], names: Sequence[Naming], what: str
    ) -> None:
        """Plan to load an optimizer.

        Args:
            optimizer: The optimizer.
            saved: Its state, its parameters by name or by number.
            names: See :func:`namings`; if empty, a parameter is told by its position, as torch does.
            what: How to call it in an error.

        Raises:
            ValueError: They do not fit.
        """
        where = f"The state of {what} ({type(optimizer).__name__}) in the checkpoint {str(self._contents.path)!r}"
        new_state = _plan_optimizer(where, saved, optimizer, names, self._to_read)
        self._then.append(lambda: _load_optimizer(optimizer, new_state))

    @torch.no_grad()
    def plan_rest(self, rest: Mapping[Any, Any], now: Any = None) -> dict[Any, Any]:
        """Plan to read what is neither; it is in what is returned after :meth:`run`.

        A tensor under the name and of the shape of a parameter of a model that was planned is placed like it.

        Args:
            rest: What is to be read.
            now: What is to be replaced by it; sharded tensors in it count as such parameters.
        """
        likes = {**self._targets, **dict(_sharded_in(now))}
        planned: dict[Any, Any] = _plan_rest(rest, likes, self._to_read)
        return planned

    @torch.no_grad()
    def run(self) -> None:
        """Do it.

        Raises:
            RuntimeError: A shard could not be read.
        """
        read(self._contents.path, self._to_read, self._contents.metadata)
        for each in self._then:
            each()


def _plan_rest(rest: Mapping[Any, Any], targets: Mapping[str, Any], to_read: list[tuple[Stored, Tensor]]) -> Any:
    """Memory for the tensors of callbacks and the like: placed like the parameter of that name, if it is one."""
    planned: dict[Any, Any] = {}
    for key, value in rest.items():
        if type(value) is dict:
            planned[key] = _plan_rest(value, targets, to_read)
            continue
        like = targets.get(key) if isinstance(key, str) else None
        of_parameter = isinstance(value, Stored) and isinstance(like, DTensor) and like.shape == value.shape
        planned[key] = map_leaves(value, partial(_plan_state, like=like if of_parameter else None, to_read=to_read))
    return planned


def _sharded_in(value: Any) -> Iterator[tuple[Any, DTensor]]:
    """All sharded tensors inside of nested dicts, each with its key."""
    for key, each in value.items() if isinstance(value, dict) else ():
        if isinstance(each, DTensor):
            yield key, each
        yield from _sharded_in(each)


def _targets(model: nn.Module) -> tuple[dict[str, str], dict[str, Any], set[str]]:
    """By name: the key for ``model.load_state_dict``, and the value now, which aliases the model if it is a tensor.

    Also what a ``state_dict`` of the user's own leaves out, since a file may have it. Last, the names that a file must
    have.
    """
    own = model.state_dict()
    keys = {plain_name(key): key for key in own}
    values = {plain_name(key): value for key, value in own.items()}
    required = set(keys)
    for key, tensor in chain(model.named_parameters(remove_duplicate=False), _persistent_buffers(model)):
        name = plain_name(key)
        if name not in values:
            keys[name], values[name] = key.replace(f"{_RECOMPUTED}.", ""), tensor
    targets = {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
    return keys, targets, required


def _plan_value(leaf: Any, target: Any, to_read: list[tuple[Stored, Tensor]]) -> Any:
    """What becomes of one value of the model: a tensor is read into its target, another value is itself."""
    if not isinstance(leaf, Stored):
        return leaf
    if not isinstance(target, Tensor):
        target = torch.empty(leaf.shape, dtype=leaf.dtype)  # inside a module's extra state
    to_read.append((leaf, target))
    return target


# ---- checks


def _check_fits_model(
    path: Path, saved: Mapping[str, Any], targets: Mapping[str, Any], required: set[str], strict: bool, way_out: str
) -> None:
    empty = [
        name for name in saved.keys() & targets.keys() if isinstance(targets[name], Tensor) and targets[name].is_meta
    ]
    if empty:
        raise ValueError(
            f"The checkpoint {str(path)!r} cannot be loaded into tensors on the device `meta`, which have no values:"
            f" {listed(empty)}. Set the model up first (`fabric.setup`)."
        )
    missing, unexpected = required - saved.keys(), saved.keys() - targets.keys()
    if strict and (missing or unexpected):
        lacks = f" It lacks {listed(missing)}." if missing else ""
        has = f" It has {listed(unexpected)}, which the model has not." if unexpected else ""
        raise ValueError(
            f"The checkpoint {str(path)!r} does not fit the model.{lacks}{has} To load what both have, {way_out}."
        )
    wrong = [
        f"{name} (checkpoint {_shape(saved[name])}, model {_shape(targets[name])})"
        for name in saved.keys() & targets.keys()
        if isinstance(targets[name], Tensor) and _shape(saved[name]) != _shape(targets[name])
    ]
    if wrong:
        raise ValueError(
            f"The checkpoint {str(path)!r} has tensors of other shapes than the model: {listed(wrong)}. Build the"
            " model with the hyper-parameters of the run that saved it."
        )


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor | Stored) else "no tensor"


def _check_number(path: Path, contents: Contents, expected: int) -> None:
    found = len(contents.optimizers)
    if not found and "lr_schedulers" not in contents.rest:
        raise ValueError(
            f"The checkpoint {str(path)!r} was saved with `save_weights_only=True`, or by Fabric without an optimizer:"
            " it has no optimizer states, so training cannot be resumed from it. Pass it to `trainer.validate` or"
            " `trainer.test`, or load only its weights with `load_state_dict` before `trainer.fit`."
        )
    if found != expected:
        raise ValueError(
            f"The checkpoint {str(path)!r} has the states of {found} optimizers, but `configure_optimizers` returned"
            f" {expected}. Return the optimizers of the run that saved it, in the same order."
        )


# ---- optimizers


def _plan_optimizer(
    where: str,
    saved: Mapping[str, Any],
    optimizer: Optimizer,
    names: Sequence[Naming],
    to_read: list[tuple[Stored, Tensor]],
) -> dict[str, Any]:
    """The argument for ``optimizer.load_state_dict``, its tensors placed like the parameters and not read yet."""
    if not is_optimizer_state(saved):
        raise ValueError(f"{where} is none: it has no 'param_groups'. Save the whole optimizer.")
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    saved_groups: list[dict[str, Any]] = saved["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"{where} has {len(saved_groups)} parameter groups, but the optimizer has {len(groups)}. Make the groups of"
            " the run that saved it."
        )
    saved_names = {plain_name(each) for group in saved_groups for each in group["params"] if isinstance(each, str)}
    naming = next((each for each in names if saved_names <= each.aliases.keys()), names[0] if names else None)
    index_of: dict[Any, int] = {}
    for position, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True)):
        index_of |= _match(f"{where}, group {position},", group["params"], saved_group["params"], naming)

    parameters = _parameters_of(optimizer)
    state: dict[Any, Any] = {}
    for key, values in saved.get("state", {}).items():
        if key not in index_of:  # kept for no parameter; torch keeps it, too
            state[key] = map_leaves(values, partial(_plan_value, target=None, to_read=to_read))
            continue
        parameter = parameters[index_of[key]]
        state[index_of[key]] = map_leaves(values, partial(_plan_state, like=parameter, to_read=to_read))

    # A scheduler adds a key to each group (`initial_lr`), a newer torch an argument: what the file lacks stays.
    new_groups = []
    for group, saved_group in zip(groups, saved_groups, strict=True):
        values = {
            key: map_leaves(value, partial(_plan_state, like=group.get(key), to_read=to_read))
            for key, value in saved_group.items()
        }
        new_groups.append({**group, **values, "params": group["params"]})
    others = {
        key: map_leaves(value, partial(_plan_value, target=None, to_read=to_read))
        for key, value in saved.items()
        if key not in ("state", "param_groups")
    }
    return {**others, "state": state, "param_groups": new_groups}


def _match(where: str, indices: list[int], saved: Sequence[Any], naming: Naming | None) -> dict[Any, int]:
    """Which parameter each entry of a saved group means: by name if it is one, else by position as torch does.

    Lightning numbers the parameters of a full checkpoint through the model, torch through the optimizer: the position
    in the group is the same.
    """
    here = {naming.names[index] if naming else f"number {index}": index for index in indices}
    if naming is None or not all(isinstance(each, str) for each in saved):
        if len(saved) != len(indices):
            raise ValueError(
                f"{where} has {len(saved)} parameters, but the optimizer's group has {len(indices)}:"
                f" {listed(here)}. Give the optimizer the parameters of the run that saved it (frozen ones count)."
            )
        return dict(zip(saved, indices, strict=True))
    by_name = {each: naming.aliases.get(plain_name(each), each) for each in saved}
    if set(by_name.values()) != here.keys():
        only_saved, only_here = set(by_name.values()) - here.keys(), here.keys() - set(by_name.values())
        raise ValueError(
            f"{where} is of other parameters than the optimizer's group. Only in the checkpoint: {listed(only_saved)};"
            f" only in the optimizer: {listed(only_here)}. Give the optimizer the parameters of the run that saved it."
        )
    return {each: here[name] for each, name in by_name.items()}


def _plan_state(leaf: Any, like: Any, to_read: list[tuple[Stored, Tensor]]) -> Any:
    """Memory for one stored tensor, placed as the optimizer itself would have placed it beside ``like``."""
    if not isinstance(leaf, Stored):
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
