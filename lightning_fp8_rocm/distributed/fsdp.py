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
``FSDPParam._unsharded_param``, ``._extensions_data``, ``.all_gather_outputs``, ``._param_fqn``
    What was gathered before a shard was marked or unmarked is of another kind than what will be; a write into what is
    gathered is found by its memory, and named.
``FSDPState._lazy_init()``
    Else a child that a hook calls before the first step makes itself the root, and the first step fails.
``FSDPParamGroup._init_mp_dtypes()``
    FSDP2 reads once which parameters are trained, and callbacks thaw them.
``FSDPState._training_state``, ``FSDPParamGroup._training_state``, ``FSDPState._state_ctx.iter_forward_root``
    Whether a unit is within its forward: a method called there is plain. A forward within a method ends the method for
    FSDP2; an exception leaves it in the middle.
``FSDPParamGroup.post_forward_mesh_info``
    A forward within a method of the same unit must leave it gathered; and whether backward gathers it again.
``FSDPParam.unsharded_accumulated_grad``
    Whether gradients wait to be reduced, where an optimizer is about to step without them.
``FSDPParamGroup.is_unsharded``
    Whether a parameter is gathered at the moment.
``FSDPParamGroup._all_gather_result``, ``.device_handle``
    What was gathered ahead for a unit that was then not called: its next forward would take the weights of then.
``FSDPState._pre_backward()``
    FSDP2 looks for the tensors that start a unit's backward in containers alone, not in objects.
``FSDPState._mp_policy``
    For what dtype an earlier Trainer sharded a module.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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


def is_gathered_in_backward(group: Group) -> bool:
    """Whether a unit frees its parameters after forward, so that its backward gathers them again; the root does not."""
    return group.post_forward_mesh_info is not None


def initialise(root: nn.Module) -> None:
    """Make ``root`` the root of its units, before a child's forward would make the child that. Idempotent."""
    _state(root)._lazy_init()


def reshard(root: nn.Module) -> None:
    """Register the sharded parameters of every unit that still holds gathered ones: what is written then lasts."""
    reshard_units(units(root).values())


def reshard_units(modules: Iterable[nn.Module]) -> None:
    """As :func:`reshard`, for units that are known: to find them in a large model takes as long as a small step."""
    for module in modules:
        of_unit = _state(module)._fsdp_param_groups
        for group in of_unit:
            _drop_prefetched(group)
        if any(group.is_unsharded for group in of_unit):
            assert isinstance(module, FSDPModule)
            module.reshard()


def _drop_prefetched(group: Group) -> None:
    """Forget a gather that was begun ahead of a forward that never came, once it is over, as FSDP2 does in backward."""
    pending = group._all_gather_result
    if pending is None:
        return
    if pending.all_gather_event is not None:
        group.device_handle.current_stream().wait_event(pending.all_gather_event)
    if isinstance(pending.all_gather_work, dist.Work):
        pending.all_gather_work.wait()
    group._all_gather_result = None


def gather_before_backward(module: nn.Module, tensors: Iterable[Tensor]) -> None:
    """Gather a unit when a gradient reaches one of ``tensors``, as FSDP2 does for those it finds in an output."""
    state = _state(module)
    if state._training_state != TrainingState.PRE_BACKWARD:  # else backward computes them again, and it is gathered
        for tensor in tensors:
            tensor.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]


def is_in_forward(module: nn.Module) -> bool:
    """Whether a unit is between the start and the end of its forward, and its parameters are gathered."""
    return bool(_state(module)._training_state == TrainingState.FORWARD)


def stay_in_forward(module: nn.Module) -> None:
    """After a forward of this unit within a method of it: the method is not over."""
    state = _state(module)
    if state._training_state == TrainingState.IDLE:
        state._training_state = TrainingState.FORWARD
        for group in state._fsdp_param_groups:
            group._training_state = TrainingState.FORWARD


def leave_forward(root: nn.Module) -> None:
    """Shard what an exception left gathered in the middle of a forward of ``root``, so that the next one can begin."""
    for module in units(root).values():
        state = _state(module)
        state._training_state = TrainingState.IDLE
        if state._state_ctx.iter_forward_root is state:
            state._state_ctx.iter_forward_root = None
        for group in state._fsdp_param_groups:
            written = [param for param in group.fsdp_params if _is_overwritten(param)]
            group._training_state = TrainingState.IDLE
            _drop_prefetched(group)
            group.reshard()
            for param in written:
                reset_gathered(param)


def owns_parameters(module: nn.Module) -> bool:
    """Whether a unit gathers parameters of its own."""
    return bool(_state(module)._fsdp_param_groups)


def follow_gathered(module: nn.Module) -> None:
    """Freeze and thaw the shards of a unit as what is gathered was."""
    for param, _ in _gathered(module):
        if param._unsharded_param.requires_grad != param.sharded_param.requires_grad:
            param.sharded_param.requires_grad_(param._unsharded_param.requires_grad)


def gathered_name(module: nn.Module, tensor: Tensor) -> str | None:
    """Which parameter of a unit ``tensor`` shares memory with, as it is gathered at the moment."""
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # of a DTensor also its mesh
        names = [gathered_name(module, part) for part in inner if isinstance(part, Tensor)]
        return next((name for name in names if name is not None), None)
    if tensor.layout != torch.strided:
        return None
    storage = tensor.untyped_storage()._cdata
    return next((param._param_fqn for param, storages in _gathered(module) if storage in storages), None)


def overwritten(module: nn.Module) -> list[str]:
    """Parameters of a unit whose gathered copy was written, or put into other memory, since FSDP2 made it.

    FSDP2 itself fills the copy without counting that as a write.
    """
    return [param._param_fqn for param, _ in _gathered(module) if _is_overwritten(param)]


def _is_overwritten(param: Param) -> bool:
    copy = param.__dict__.get("_unsharded_param")
    if copy is None or copy.is_inference():
        return False
    return bool(copy._version) or (type(copy) is nn.Parameter and copy.untyped_storage()._cdata not in _storages(param))


def _storages(param: Param) -> set[int]:
    return {output.untyped_storage()._cdata for output in param.all_gather_outputs}


def _gathered(module: nn.Module) -> Iterator[tuple[Param, set[int]]]:
    for group in _state(module)._fsdp_param_groups:
        if group.is_unsharded:  # else FSDP2 may be filling it
            for param in group.fsdp_params:
                yield param, _storages(param)


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
                f" dtype: {listed}. Give them one dtype before training, or leave them frozen."
            )
        group._init_mp_dtypes()


def param_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype in which a unit computes; None for the dtype that its parameters have."""
    dtype: torch.dtype | None = _state(module)._mp_policy.param_dtype
    return dtype


def casts_within(module: nn.Module) -> torch.dtype | None:
    """The dtype in which a unit computes that leaves its inputs as they are; None for other units."""
    policy = _state(module)._mp_policy
    dtype: torch.dtype | None = None if policy.cast_forward_inputs else policy.param_dtype
    return dtype


def holds_only(module: nn.Module, dtype: torch.dtype | None) -> bool:
    """Whether all floating-point parameters of a module have this dtype, so that casting to it changes nothing."""
    return all(parameter.dtype == dtype for parameter in module.parameters() if parameter.is_floating_point())


def reduce_unused(root: nn.Module, enabled: bool) -> None:
    """Whether parameters without a gradient count as a gradient of zero while the others of their unit are reduced."""
    assert isinstance(root, FSDPModule)
    root.set_reduce_scatter_unused_params(enabled)


def unreduced_gradients(of_groups: Iterable[Group]) -> dict[nn.Parameter, str]:
    """The sharded parameters, with their names, whose whole gradients wait on this rank for a backward that reduces."""
    return {
        param.sharded_param: param._param_fqn or name_of(param)
        for group in of_groups
        for param in group.fsdp_params
        if param.unsharded_accumulated_grad is not None
        or (hasattr(param, "_unsharded_param") and param._unsharded_param.grad is not None)
    }


def drop_unreduced_gradients(of_groups: Iterable[Group], parameters: Collection[nn.Parameter]) -> None:
    """Throw away what :func:`unreduced_gradients` finds of these sharded parameters."""
    for group in of_groups:
        for param in group.fsdp_params:
            if param.sharded_param in parameters:
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None


@torch.no_grad()
def unequal_gradients(root: nn.Module) -> list[str]:
    """Names of the parameters that have a gradient on some ranks only; the same on all ranks.

    One small all-reduce.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    trained = [(name, parameter) for name, parameter in root.named_parameters() if parameter.requires_grad]
    has = torch.tensor([parameter.grad is not None for _, parameter in trained], dtype=torch.int32)
    device = next(groups(root)).device
    somewhere = torch.stack([has, 1 - has]).to(device)
    dist.all_reduce(somewhere, dist.ReduceOp.MAX)
    return [name for (name, _), both in zip(trained, somewhere.all(dim=0).tolist(), strict=True) if both]
