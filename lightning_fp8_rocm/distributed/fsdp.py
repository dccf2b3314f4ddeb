"""The one place that touches private parts of FSDP2; each is listed in docs/upstream.md with a test.

What we touch, and why:

``FSDPModule._get_fsdp_state()._fsdp_param_groups``, ``FSDPParamGroup.fsdp_params``, and of ``FSDPParam``:
``_module_info``, ``_orig_size``, ``shard_mesh``, ``padded_sharded_param_size``, ``param_dtype``, ``sharded_param``,
``device``
    Which parameters a unit gathers together, and on which ranks: there is no public way from a module to its shards.
``DTensor._local_tensor``
    ``to_local()`` makes a new tensor; the shard itself must be marked.
``FSDPParam._init_extensions()``
    A shard is marked after FSDP2 looked for its hooks.
``FSDPParam._unsharded_param``, ``._extensions_data``, ``.all_gather_outputs``
    What was gathered before a shard was marked or unmarked is of another kind than what will be.
``FSDPState._lazy_init()``
    Else a child that a hook calls before the first step makes itself the root, and the first step fails.
``FSDPParamGroup._init_mp_dtypes()``
    FSDP2 reads once which parameters are trained, and callbacks thaw them.
``FSDPState._training_state``
    Whether a unit is within its forward: a method called there is plain.
``FSDPParamGroup.post_forward_mesh_info``
    A forward within a method of the same unit must leave it gathered.
``FSDPParamGroup.is_unsharded``
    Whether a parameter is gathered at the moment.
``FSDPState._mp_policy``
    For what dtype an earlier Trainer sharded a module.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

Param: TypeAlias = Any
"""torch's ``FSDPParam``: one parameter in its sharded and its gathered form."""
Group: TypeAlias = Any
"""torch's ``FSDPParamGroup``: the parameters of a unit, which travel together."""


def units(root: nn.Module) -> dict[str, nn.Module]:
    """The modules below ``root``, and itself, to which ``fully_shard`` was applied, by name, outermost first."""
    return {name: module for name, module in root.named_modules() if _is_unit(module)}


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _state(module: nn.Module) -> Any:
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()


def groups(root: nn.Module) -> Iterator[Group]:
    """The groups of parameters that travel together, each once."""
    seen: set[int] = set()
    for module in units(root).values():
        for group in _state(module)._fsdp_param_groups:
            if id(group) not in seen:
                seen.add(id(group))
                yield group


def mesh_of(root: nn.Module) -> DeviceMesh | None:
    """The mesh of what is sharded already; one model has one."""
    for parameter in root.parameters():
        if isinstance(parameter, DTensor):
            return parameter.device_mesh
    return None


def name_of(param: Param) -> str:
    """The name of a parameter on its module."""
    name: str = param._module_info.param_name
    return name


def gathered_bytes(param: Param) -> tuple[int, Callable[[bool], int]]:
    """Bytes of one gather on each rank, padding and its own part included.

    Returns:
        As FSDP2 gathers by itself; and a function that says it for FP8, with row scales or without.
    """
    ranks = shard_mesh(param).size()
    if ranks == 1:
        return 0, lambda rows: 0
    padded = param.padded_sharded_param_size
    dtype = param.param_dtype or param.sharded_param.dtype

    def in_fp8(row_scaled: bool) -> int:
        return int(ranks * (padded.numel() + (4 * padded[0] if row_scaled else 0)))

    return ranks * padded.numel() * dtype.itemsize, in_fp8


def owner(param: Param) -> nn.Module:
    """The module that a parameter is registered on."""
    module: nn.Module = param._module_info.module
    return module


def full_shape(param: Param) -> torch.Size:
    """The shape of the whole parameter."""
    shape: torch.Size = param._orig_size
    return shape


def shard_mesh(param: Param) -> DeviceMesh:
    """The 1-dimensional mesh over which a parameter is sharded; for HSDP the inner one."""
    mesh: DeviceMesh = param.shard_mesh
    return mesh


def local_shard(param: Param) -> Tensor:
    """This rank's rows."""
    shard: Tensor = param.sharded_param._local_tensor
    return shard


def set_local_shard(param: Param, shard: Tensor) -> None:
    """Put another tensor over the same storage in place of this rank's rows."""
    param.sharded_param._local_tensor = shard


def reset_gathered(param: Param) -> None:
    """Let the next gather make its results anew, for shards that changed their kind."""
    for name in ("_unsharded_param", "_extensions_data"):
        param.__dict__.pop(name, None)
    param.all_gather_outputs = []
    param._init_extensions()


def initialise(root: nn.Module) -> None:
    """Make ``root`` the root of its units, before a child's forward would make the child that. Idempotent."""
    _state(root)._lazy_init()


def reshard(root: nn.Module) -> None:
    """Register the sharded parameters of every unit that still holds gathered ones: what is written then lasts."""
    for module in units(root).values():
        if any(group.is_unsharded for group in _state(module)._fsdp_param_groups):
            assert isinstance(module, FSDPModule)
            module.reshard()


def is_in_forward(module: nn.Module) -> bool:
    """Whether a unit is between the start and the end of its forward, and its parameters are gathered."""
    return bool(_state(module)._training_state == TrainingState.FORWARD)


@contextmanager
def no_reshard_after_forward(module: nn.Module) -> Iterator[None]:
    """A forward of this unit within the span leaves its parameters gathered."""
    of_unit = _state(module)._fsdp_param_groups
    before = [group.post_forward_mesh_info for group in of_unit]
    for group in of_unit:
        group.post_forward_mesh_info = None
    try:
        yield
    finally:
        for group, mesh_info in zip(of_unit, before, strict=True):
            group.post_forward_mesh_info = mesh_info


def sharded_by_gathered(root: nn.Module) -> dict[int, nn.Parameter]:
    """The sharded parameter for the id of each gathered one."""
    found = {}
    for group in groups(root):
        for param in group.fsdp_params:
            if hasattr(param, "_unsharded_param"):
                found[id(param._unsharded_param)] = param.sharded_param
    return found


def follow_frozen(root: nn.Module) -> None:
    """Read again which parameters are trained, and in which dtype their gradients are kept.

    Raises:
        ValueError: If a unit would train parameters of two dtypes, naming them.
    """
    for group in groups(root):
        trained = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
        dtypes = {param.sharded_param.dtype for param in trained}
        if len(dtypes) > 1:
            listed = ", ".join(f"{param._param_fqn} ({param.sharded_param.dtype})" for param in trained)
            raise ValueError(
                "Parameters of different dtypes are trained in one unit, since some were thawed, and FSDP2 reduces one"
                f" dtype: {listed}. Give them one dtype before `fit`, or leave them frozen."
            )
        group._init_mp_dtypes()


def param_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype in which a unit computes; None for the dtype that its parameters have."""
    dtype: torch.dtype | None = _state(module)._mp_policy.param_dtype
    return dtype


def holds_only(module: nn.Module, dtype: torch.dtype | None) -> bool:
    """Whether all floating-point parameters of a module have this dtype, so that casting to it changes nothing."""
    return all(parameter.dtype == dtype for parameter in module.parameters() if parameter.is_floating_point())
