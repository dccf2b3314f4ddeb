"""From a converted model to a sharded one: the functions here are in the order in which they run."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_fp8_rocm.distributed import fsdp
from lightning_fp8_rocm.distributed.units import Unit, forward_methods

CheckpointingPolicy = Literal["full", "selective"] | Collection[type[nn.Module] | str]
Undo = Callable[[], None]

DATA_PARALLEL = "data_parallel"
"""The mesh dimension that samplers count: all ranks, for HSDP the flattened mesh."""


# ---------------------------------------------------------------------------------------------------------------------
# The mesh


def make_mesh(device_type: str, world_size: int, sizes: tuple[int, int] | None) -> DeviceMesh:
    """A 1-dimensional mesh over all ranks, or for HSDP one of ``(replicate, shard)`` ranks.

    Raises:
        ValueError: If the sizes do not multiply to the world size.
    """
    if sizes is None:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=(DATA_PARALLEL,))
    replicate, shard = sizes
    if replicate * shard != world_size:
        raise ValueError(
            f"Expected argument `device_mesh` to be (replicate, shard) with replicate * shard = {world_size}, the"
            f" number of processes, but got {sizes}: {replicate} * {shard} = {replicate * shard}. Change `device_mesh`, or"
            " `devices` and `num_nodes`."
        )
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard"))
    mesh._flatten(DATA_PARALLEL)
    return mesh


# ---------------------------------------------------------------------------------------------------------------------
# Materialise


def check_materialisable(root: nn.Module) -> None:
    """Refuse modules with tensors on ``meta`` that nothing can initialise.

    Raises:
        ValueError: Naming the modules and tensors.
    """
    lost = [
        f"{name or 'the root module'} ({type(module).__name__}: {', '.join(tensors)})"
        for name, module in root.named_modules()
        if (tensors := _on_meta(module)) and _initialiser(root, name, module) is None
    ]
    if lost:
        raise ValueError(
            "These modules lie on the `meta` device and cannot initialise themselves: "
            + "; ".join(lost)
            + ". Give them a method `reset_parameters()` that fills their parameters and buffers, or create them"
            " outside `torch.device('meta')`."
        )


def materialise(modules: Collection[nn.Module], root: nn.Module, device: torch.device) -> None:
    """Give storage to what these modules of ``root`` have on ``meta``, tensor by tensor; each initialises itself.

    A tensor that has values keeps them, also where a neighbour in its module is initialised. Ties survive.

    Raises:
        ValueError: If an initialiser left one of its module's tensors unfilled, naming it: a non-persistent buffer that
            only ``__init__`` computed, say.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}
    todo = [(module, tensors) for module in modules if (tensors := _on_meta(module))]
    names = {module: name for name, module in root.named_modules()} if todo else {}
    for module, tensors in todo:
        name = names[module]
        values = {key: tensor for key, tensor in _own_tensors(module).items() if not tensor.is_meta}
        kept = {key: tensor.detach().clone() for key, tensor in values.items()}
        for key in tensors:
            _put(module, key, _filled_with_nonsense(_own_tensors(module)[key], device, made))
        nonsense = {key: (_own_tensors(module)[key], _own_tensors(module)[key]._version) for key in tensors}
        initialise = _initialiser(root, name, module)
        assert initialise is not None
        with torch.no_grad():
            initialise()
            for key, value in kept.items():
                _own_tensors(module)[key].copy_(value)
        unfilled = [key for key, (tensor, version) in nonsense.items() if _is_nonsense(module, key, tensor, version)]
        if unfilled:
            raise ValueError(
                f"{name or 'The root module'} ({type(module).__name__}) was created on the `meta` device, and its"
                f" initialiser did not fill {', '.join(repr(key) for key in unfilled)}: the values would be random."
                " Fill them in `reset_parameters()`, or create the module outside `torch.device('meta')`."
            )


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))


def _on_meta(module: nn.Module) -> list[str]:
    return [key for key, tensor in _own_tensors(module).items() if tensor.is_meta]


def _initialiser(root: nn.Module, name: str, module: nn.Module) -> Callable[[], Any] | None:
    """How ``module`` fills its own tensors: by itself, or by the Hugging Face model that it is part of."""
    for own in ("reset_parameters", "_reset_parameters"):
        if callable(method := getattr(module, own, None)):
            return method  # type: ignore[no-any-return]
    parts = name.split(".") if name else []
    for depth in range(len(parts), -1, -1):
        owner = root.get_submodule(".".join(parts[:depth]))
        if callable(method := getattr(owner, "_init_weights", None)):
            return partial(method, module)
    return None


def _filled_with_nonsense(tensor: Tensor, device: torch.device, made: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    if id(tensor) not in made:
        empty = torch.empty_like(tensor, device=device)
        if empty.is_floating_point() or empty.is_complex():
            empty.detach().fill_(float("nan"))
        is_parameter = isinstance(tensor, nn.Parameter)
        filled = nn.Parameter(empty.detach(), tensor.requires_grad) if is_parameter else empty
        made[id(tensor)] = tensor, filled  # held, so that no other tensor gets its id
    return made[id(tensor)][1]


def _is_nonsense(module: nn.Module, key: str, before: Tensor, version: int) -> bool:
    now = _own_tensors(module)[key]
    if now is not before or now._version != version:
        return False
    local = now.to_local() if isinstance(now, DTensor) else now
    can_tell = (local.is_floating_point() or local.is_complex()) and local.numel() > 0
    return bool(local.detach().isnan().all()) if can_tell else not isinstance(now, DTensor)


def _put(module: nn.Module, key: str, tensor: Tensor) -> None:
    if key in module._parameters:
        module._parameters[key] = tensor  # type: ignore[assignment]
    else:
        module._buffers[key] = tensor


# ---------------------------------------------------------------------------------------------------------------------
# Activation checkpointing


def checkpoint_activations(units: Sequence[Unit], root: nn.Module, policy: CheckpointingPolicy) -> Undo:
    """Recompute the forward of blocks in backward, by a patched ``forward``: names of parameters stay what they are.

    Args:
        units: What is sharded; ``"full"`` and ``"selective"`` act on the blocks among it.
        root: The model.
        policy: ``"full"`` recomputes all; ``"selective"`` keeps every second matrix product, the attention and each
            amax, that scales depend on; classes or class names recompute those modules in full.

    Returns:
        What takes the patches off.

    Raises:
        ValueError: If no module is meant, or a Hugging Face model already checkpoints itself.
    """
    own = [
        name or type(module).__name__
        for name, module in root.named_modules()
        if getattr(module, "gradient_checkpointing", False) is True
    ]
    if own:
        raise ValueError(
            f"`activation_checkpointing_policy={policy!r}` and the model's own gradient checkpointing (on in"
            f" {', '.join(repr(name) for name in own[:3])}{', ...' if len(own) > 3 else ''}) would recompute everything"
            " twice. Use one: call `gradient_checkpointing_disable()` on the model, or leave the argument None."
        )
    if isinstance(policy, str):
        modules = [unit.module for unit in units if unit.kind == "block"]
        hint = "The model has no repeated blocks; name the classes to recompute instead."
    else:
        names = {entry if isinstance(entry, str) else entry.__name__ for entry in policy}
        modules = [
            module
            for module in root.modules()
            if module is not root and any(cls.__name__ in names for cls in type(module).__mro__)
        ]
        hint = f"Classes in the model: {', '.join(sorted({type(m).__name__ for m in root.modules()}))}."
    if not modules:
        raise ValueError(f"`activation_checkpointing_policy={policy!r}` matches no module. {hint}")
    for module in modules:
        _patch_forward(module, selective=policy == "selective")

    def undo() -> None:
        for module in modules:
            original = module.__dict__.pop("_unpatched_forward")
            if original is None:
                del module.forward
            else:
                module.forward = original

    return undo


def _patch_forward(module: nn.Module, *, selective: bool) -> None:
    module.__dict__["_unpatched_forward"] = vars(module).get("forward")
    forward = module.forward
    how: dict[str, Any] = {"use_reentrant": False}
    if selective:
        how["context_fn"] = _selective_contexts

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **how, **kwargs)

    module.forward = recomputed


_AMAX = (torch.ops.aten.max.default, torch.ops.aten.amax.default)
_PRODUCTS = (torch.ops.aten._scaled_mm.default, torch.ops.aten.mm.default)
_KEPT = (
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    *_AMAX,
)


def _selective_contexts() -> Any:
    """Every second product is kept: the choice that torchtitan made, by speed against memory."""
    seen = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _KEPT:
            return CheckpointPolicy.MUST_SAVE
        if op in _PRODUCTS:
            phase = "recompute" if context.is_recompute else "forward"
            seen[phase] += 1
            if seen[phase] % 2 == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------------------------------------------------------------
# Compile


def compile_blocks(units: Sequence[Unit], options: Mapping[str, Any], *, emulate_precision_casts: bool) -> Undo:
    """Compile each block in place: its type, its name and its parameters stay what they are.

    Args:
        units: What is sharded; blocks that hold another unit are not compiled.
        options: Arguments of ``torch.compile``.
        emulate_precision_casts: Let inductor round where eager does, in these blocks alone; scales of rows need it.

    Returns:
        What makes the blocks eager again.
    """
    blocks = [unit.module for unit in units if unit.kind == "block"]
    inner = [block for block in blocks if sum(other in set(block.modules()) for other in blocks) == 1]
    if not inner:
        raise ValueError(
            "`compile` compiles the repeated blocks of a model, and this one has none. Name them in `auto_wrap_policy`,"
            " or pass `compile=False`."
        )
    arguments = dict(options)
    if emulate_precision_casts and arguments.get("backend", "inductor") == "inductor":
        mode = arguments.pop("mode", None)
        of_mode = torch._inductor.list_mode_options(mode) if mode not in (None, "default") else {}
        arguments["options"] = {**of_mode, **(arguments.get("options") or {}), "emulate_precision_casts": True}
    before = [block._compiled_call_impl for block in inner]
    for block in inner:
        block.compile(**arguments)

    def undo() -> None:
        for block, impl in zip(inner, before, strict=True):
            block._compiled_call_impl = impl

    return undo


# ---------------------------------------------------------------------------------------------------------------------
# Shard


@dataclass(frozen=True)
class ShardingPlan:
    """How every unit is sharded.

    Args:
        mesh: 1-dimensional, or ``(replicate, shard)``.
        device: Where the gathered parameters are.
        param_dtype: Of gathered parameters and of the inputs of units; None for the dtype that they have.
        reduce_dtype: Of gradients while they are reduced.
        reshard_after_forward: Whether a unit frees its gathered parameters after forward; None for torch's choice.
        cpu_offload: Whether shards, gradients and optimizer states are kept in the host's memory.
    """

    mesh: DeviceMesh
    device: torch.device
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype
    reshard_after_forward: bool | None = None
    cpu_offload: bool = False

    def arguments(self, unit: Unit) -> dict[str, Any]:
        """What ``fully_shard`` gets for one unit. The root casts nothing: batches reach its steps as they were made."""
        policy = MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype)
        if unit.kind == "root":
            policy = replace(policy, param_dtype=None, cast_forward_inputs=False)
        return self._arguments(policy)

    def arguments_of_norm(self) -> dict[str, Any]:
        """For BatchNorm, whose kernels want weights in the dtype of the running statistics."""
        return self._arguments(MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype, cast_forward_inputs=False))

    def _arguments(self, policy: MixedPrecisionPolicy) -> dict[str, Any]:
        on_gpu = self.device.type == "cuda"
        return {
            "mesh": self.mesh,
            "mp_policy": policy,
            "reshard_after_forward": self.reshard_after_forward,
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if self.cpu_offload else OffloadPolicy(),
        }


def check_sharded_before(units: Sequence[Unit], plan: ShardingPlan) -> None:
    """Refuse a model that an earlier Trainer sharded for another compute dtype.

    Raises:
        ValueError: Naming both.
    """
    for unit in units:
        if not isinstance(unit.module, FSDPModule) or unit.kind == "root":
            continue
        before = fsdp.param_dtype(unit.module)
        if before != plan.param_dtype and not fsdp.holds_only(unit.module, plan.param_dtype):
            raise ValueError(
                f"{unit.name!r} was sharded before, to compute in {before or 'the dtype of its parameters'}, and this"
                f" Trainer's precision computes in {plan.param_dtype or 'the dtype of the parameters'}. FSDP2 cannot"
                " change that: use the precision of then, or load the weights into a new module."
            )


def move_others(root: nn.Module, device: torch.device) -> None:
    """Move what is no parameter or buffer, the states of metrics."""
    for module in root.modules():
        if type(module)._apply is not nn.Module._apply and not isinstance(module, FSDPModule):
            module.to(device)


def shard(units: Sequence[Unit], plan: ShardingPlan) -> None:
    """``fully_shard`` every unit, innermost first, each with the values that rank 0 has.

    A unit is materialised, moved and sharded before the next: no more than one is whole on a device at a time.
    """
    for unit in units:
        if isinstance(unit.module, FSDPModule):
            continue
        own = list(_of_unit(unit.module))
        materialise(own, units[-1].module, plan.device)
        _prepare(own, plan.device)
        for module in own:
            is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module is not unit.module
            if is_norm and next(module.parameters(recurse=False), None) is not None:
                fully_shard(module, **plan.arguments_of_norm())
        fully_shard(unit.module, **plan.arguments(unit))


def _of_unit(module: nn.Module) -> Iterable[nn.Module]:
    """The modules below ``module``, and itself, that belong to no unit inside it."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _of_unit(child)


@torch.no_grad()
def _prepare(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move tensors to the device and give them the values of rank 0, as DDP does; FSDP2 wants them contiguous."""
    seen: set[int] = set()
    for module in modules:
        for key, tensor in _own_tensors(module).items():
            if isinstance(tensor, DTensor) or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            moved = tensor.to(device).contiguous()
            _broadcast(moved)
            if isinstance(tensor, nn.Parameter):
                tensor.data = moved
            else:
                module._buffers[key] = moved


def _broadcast(tensor: Tensor) -> None:
    """From rank 0, as bytes: no backend knows all dtypes."""
    if tensor.numel() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(tensor.detach().view(-1).view(torch.uint8), src=0)


def broadcast_buffers(root: nn.Module) -> None:
    """Give every rank the buffers of rank 0, as DDP does: running statistics are of one rank's batches."""
    for buffer in root.buffers():
        if not isinstance(buffer, DTensor):
            _broadcast(buffer if buffer.is_contiguous() else buffer.contiguous())


def prefetch(units: Sequence[Unit], forward: int | None, backward: int | None) -> None:
    """Gather the parameters of the next ``forward`` blocks, in backward the ``backward`` previous, ahead of need."""
    blocks = [unit.module for unit in units if unit.kind == "block" and isinstance(unit.module, FSDPModule)]
    for place, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        if forward:
            block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + forward])  # type: ignore[arg-type]
        if backward:
            before = blocks[max(0, place - backward) : place]
            block.set_modules_to_backward_prefetch(before[::-1])  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# Methods that gather


def gather_in_methods(module: nn.Module, names: Sequence[str] | None = None) -> Undo:
    """Let the public methods of a unit gather its parameters, as its forward does.

    Called within the unit's own forward, or within one another, they are the plain methods: the parameters are there.

    Args:
        module: A unit.
        names: By default :func:`~lightning_fp8_rocm.distributed.units.forward_methods`.

    Returns:
        What makes them plain again.
    """
    if not isinstance(module, FSDPModule):
        return lambda: None
    before: dict[str, Any] = {}
    for name in forward_methods(module) if names is None else names:
        if callable(getattr(module, name, None)):
            before[name] = vars(module).get(name)
            _gather_in_method(module, name)

    def undo() -> None:
        for name, method in before.items():
            delattr(module, name) if method is None else setattr(module, name, method)

    return undo


def _gather_in_method(module: nn.Module, name: str) -> None:
    plain = getattr(module, name)

    @wraps(plain)
    def keeping_gathered(*args: Any, **kwargs: Any) -> Any:
        # A forward of the unit within the method would leave it sharded for the rest of the method.
        with fsdp.no_reshard_after_forward(module):
            return plain(*args, **kwargs)

    setattr(module, name, keeping_gathered)
    register_fsdp_forward_method(module, name)
    gathering = getattr(module, name)

    @wraps(plain)
    def method(*args: Any, **kwargs: Any) -> Any:
        if fsdp.is_in_forward(module):
            return plain(*args, **kwargs)
        result = gathering(*args, **kwargs)
        if not torch.is_grad_enabled():
            fsdp.reshard(module)
        return _with_sharded_parameters(module, result)

    setattr(module, name, method)


def _with_sharded_parameters(module: nn.Module, result: Any) -> Any:
    """A method may return parameters, to be clipped or counted: the gathered ones are gone by now."""
    leaves, structure = pytree.tree_flatten(result)
    if not any(isinstance(leaf, nn.Parameter) for leaf in leaves):
        return result
    lasting = fsdp.sharded_by_gathered(module)
    return pytree.tree_unflatten([lasting.get(id(leaf), leaf) for leaf in leaves], structure)


STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""The methods of a LightningModule that a strategy calls instead of its forward."""
