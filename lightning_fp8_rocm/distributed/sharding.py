"""From a converted model to a sharded one: the functions here are in the order in which they run."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_fp8_rocm.distributed import fsdp
from lightning_fp8_rocm.distributed.materialise import materialise, own_tensors, put
from lightning_fp8_rocm.distributed.methods import Undo, inside
from lightning_fp8_rocm.distributed.units import Unit, is_of

CheckpointingPolicy = Literal["full", "selective"] | Collection[type[nn.Module] | str]

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
            f" number of processes, but got {sizes}: {replicate} * {shard} = {replicate * shard}. Change"
            " `device_mesh`, or `devices` and `num_nodes`."
        )
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("replicate", "shard"))
    mesh._flatten(DATA_PARALLEL)
    return mesh


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
    modules = _inner_blocks(units) if isinstance(policy, str) else _of_classes(root, policy)
    if not modules:
        raise ValueError(
            f"`activation_checkpointing_policy={policy!r}` matches no module. The model has no repeated blocks; name"
            " the classes to recompute instead."
        )
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


def _inner_blocks(units: Sequence[Unit]) -> list[nn.Module]:
    """The blocks that hold no other block."""
    blocks = [unit.module for unit in units if unit.kind == "block"]
    return [block for block in blocks if sum(other in set(block.modules()) for other in blocks) == 1]


def _of_classes(root: nn.Module, wanted: Collection[type[nn.Module] | str]) -> list[nn.Module]:
    """The modules below ``root`` of these classes, or of classes of these names; each entry must match one."""
    chosen: dict[nn.Module, None] = {}
    below = [module for module in root.modules() if module is not root]
    for entry in wanted:
        found = [module for module in below if is_of(module, entry)]
        if not found:
            name = entry if isinstance(entry, str) else entry.__name__
            raise ValueError(
                f"The entry {name!r} in `activation_checkpointing_policy` matches no module. Classes in the model:"
                f" {', '.join(sorted({type(module).__name__ for module in root.modules()}))}."
            )
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _patch_forward(module: nn.Module, *, selective: bool) -> None:
    module.__dict__["_unpatched_forward"] = vars(module).get("forward")
    forward = module.forward
    how: dict[str, Any] = {"use_reentrant": False}

    def within(*args: Any, **kwargs: Any) -> Any:
        with inside(module):  # in backward, where FSDP2 does not say that this is the unit's forward
            return forward(*args, **kwargs)

    if selective:
        how["context_fn"] = _selective_contexts

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward if torch.compiler.is_compiling() else within, *args, **how, **kwargs)

    module.forward = recomputed


_AMAX = (torch.ops.aten.max.default, torch.ops.aten.amax.default)
_PRODUCTS = (torch.ops.aten._scaled_mm.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
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
    inner = _inner_blocks(units)
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
        casts_root: Whether the root computes in ``param_dtype``, too. One whose steps are called does not: they get
            batches as they were made.
    """

    mesh: DeviceMesh
    device: torch.device
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype
    reshard_after_forward: bool | None = None
    cpu_offload: bool = False
    casts_root: bool = False

    def arguments(self, module: nn.Module, *, casts: bool, casts_inputs: bool = True) -> dict[str, Any]:
        """What ``fully_shard`` gets for one module.

        Args:
            module: A unit, or BatchNorm within one: the kernels of a norm with running statistics want its weights in
                the dtype of those, and its input as it is.
            casts: Whether the module computes in ``param_dtype``.
            casts_inputs: Whether, then, all its inputs are cast. Else :func:`cast_inputs_of_layers` casts within it.
        """
        if casts and not isinstance(module, _NormBase):
            policy = MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype, cast_forward_inputs=casts_inputs)
        else:
            policy = MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype, cast_forward_inputs=False)
        on_gpu = self.device.type == "cuda"
        return {
            "mesh": self.mesh,
            "mp_policy": policy,
            "reshard_after_forward": self.reshard_after_forward,
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if self.cpu_offload else OffloadPolicy(),
        }


def _keeping_dtype(root: nn.Module, plan: ShardingPlan) -> set[nn.Module]:
    """What computes as it was written: metrics, and a root that the plan says it of."""
    metrics = [
        module
        for module in root.modules()
        if any(cls.__module__.startswith("torchmetrics.") for cls in type(module).__mro__)
    ]
    return {below for metric in metrics for below in metric.modules()} | (set() if plan.casts_root else {root})


def check_sharded_before(units: Sequence[Unit], plan: ShardingPlan) -> None:
    """Refuse a model that an earlier Trainer sharded for another compute dtype.

    Raises:
        ValueError: Naming both.
    """
    exempt = _keeping_dtype(units[-1].module, plan)
    for unit in units:
        if not isinstance(unit.module, FSDPModule) or isinstance(unit.module, _NormBase) or unit.module in exempt:
            continue
        before = fsdp.param_dtype(unit.module)
        if before != plan.param_dtype and not fsdp.holds_only(unit.module, plan.param_dtype):
            raise ValueError(
                f"{unit.name!r} was sharded before, to compute in {before or 'the dtype of its parameters'}, and this"
                f" Trainer's precision computes in {plan.param_dtype or 'the dtype of the parameters'}. FSDP2 cannot"
                " change that: use the precision of then, or load the weights into a new module. If you shard it in"
                f" `configure_model`, pass `mp_policy=MixedPrecisionPolicy(param_dtype={plan.param_dtype})`."
            )


def move_others(root: nn.Module, device: torch.device) -> None:
    """Move what is no parameter or buffer, the states of metrics; shards stay where they are, also offloaded ones."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, DTensor) else tensor.to(device)

    for module in root.modules():
        classes = [cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule)]
        if next(cls for cls in classes if "_apply" in vars(cls)) is not nn.Module:
            module._apply(moved)  # type: ignore[no-untyped-call]


def shard(units: Sequence[Unit], plan: ShardingPlan) -> None:
    """``fully_shard`` every unit, innermost first, each with the values that rank 0 has.

    A unit is materialised, moved and sharded before the next: no more than one is whole on a device at a time. What was
    sharded before keeps its shards, and is materialised where it is on ``meta``.
    """
    root = units[-1].module
    fsdp.reshard(root)
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    as_written = _keeping_dtype(root, plan)
    for unit in units:
        own = list(_of_unit(unit.module))
        materialise(own, root, plan.device)
        _prepare(own, plan.device, moved)
        if isinstance(unit.module, FSDPModule):
            continue
        for module in own:
            is_norm = isinstance(module, _NormBase) and module is not unit.module
            if is_norm and next(module.parameters(recurse=False), None) is not None:
                fully_shard(module, **plan.arguments(module, casts=False))
        # A whole model may get targets or time steps, which `param_dtype` cannot hold; a block or a layer does not.
        casts_inputs = unit.kind == "block" or not _has_layers(unit.module)
        casts = unit.module not in as_written
        fully_shard(unit.module, **plan.arguments(unit.module, casts=casts, casts_inputs=casts_inputs))


def _has_layers(module: nn.Module) -> bool:
    return any(next(child.parameters(), None) is not None for child in module.children())


def cast_inputs_of_layers(root: nn.Module) -> Undo:
    """Let the layers of a unit that casts no inputs of its own cast theirs, to the dtype of their gathered weights.

    Returns:
        What takes the hooks off.
    """
    handles = []
    for unit in fsdp.units(root).values():
        dtype = fsdp.casts_within(unit)
        if dtype is None:
            continue
        for layer in _of_unit(unit):
            if not _has_layers(layer) and next(layer.parameters(recurse=False), None) is not None:
                handles.append(layer.register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _cast_inputs(dtype: torch.dtype, layer: nn.Module, args: Any, kwargs: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))


def _of_unit(module: nn.Module) -> Iterable[nn.Module]:
    """The modules below ``module``, and itself, that belong to no unit inside it."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _of_unit(child)


@torch.no_grad()
def _prepare(modules: Iterable[nn.Module], device: torch.device, moved: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Move tensors to the device and give them the values of rank 0, as DDP does.

    Args:
        modules: Those of one unit.
        device: Where they compute.
        moved: What was moved before, by id: a buffer may be registered on several modules.
    """
    for module in modules:
        for key, tensor in own_tensors(module).items():
            if isinstance(tensor, DTensor):
                continue
            if id(tensor) not in moved:
                there = tensor.to(device)
                _broadcast(there)
                if isinstance(tensor, nn.Parameter):
                    tensor.data = there
                    there = tensor
                moved[id(tensor)] = tensor, there  # held, so that no other tensor gets its id
                moved[id(there)] = there, there
            put(module, key, moved[id(tensor)][1])


def _broadcast(tensor: Tensor) -> None:
    """From rank 0, as bytes: no backend knows all dtypes."""
    if not tensor.numel() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    sent = tensor.detach().contiguous()
    dist.broadcast(sent.view(-1).view(torch.uint8), src=0)
    if sent.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(sent)


def broadcast_buffers(root: nn.Module) -> None:
    """Give every rank the buffers of rank 0, as DDP does: running statistics are of one rank's batches."""
    for buffer in root.buffers():
        if not isinstance(buffer, DTensor):
            _broadcast(buffer)


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
