"""From a converted model to a sharded one: the functions here are in the order in which they run."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from inspect import isgeneratorfunction
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
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from typing_extensions import override

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
            f" number of processes, but got {sizes}: {replicate} * {shard} = {replicate * shard}. Change"
            " `device_mesh`, or `devices` and `num_nodes`."
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

    A tensor that has values keeps them, also where a neighbour in its module is initialised, or a module above it whose
    initialiser reaches down. Ties survive.

    Raises:
        ValueError: If an initialiser left one of its module's tensors unfilled, or a part of it, naming it: a
            non-persistent buffer that only ``__init__`` computed, say.
    """
    # Innermost first, as they were built: a module may change what its children chose.
    todo = [(module, tensors) for module in modules if (tensors := _on_meta(module))][::-1]
    names = {module: name for name, module in root.named_modules()} if todo else {}
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module, tensors in todo:
        for key in tensors:
            _put(module, key, _filled_with_nonsense(_own_tensors(module)[key], device, made))
    ours = {id(tensor) for _, tensor in made.values()}
    for module, _ in todo:
        kept = [
            (below, key, tensor, tensor.detach().clone())
            for below in module.modules()
            for key, tensor in _own_tensors(below).items()
            if not tensor.is_meta and id(tensor) not in ours
        ]
        initialise = _initialiser(root, names[module], module)
        assert initialise is not None
        with torch.no_grad():
            initialise()
            for below, key, tensor, value in kept:
                tensor.copy_(value)
                _put(below, key, tensor)
    for module, tensors in todo:
        unfilled = [key for key in tensors if _holds_nonsense(_own_tensors(module)[key])]
        if unfilled:
            raise ValueError(
                f"{names[module] or 'The root module'} ({type(module).__name__}) was created on the `meta` device, and"
                f" its initialiser did not fill {', '.join(repr(key) for key in unfilled)}: the values would be random."
                " Fill them in `reset_parameters()`, or create the module outside `torch.device('meta')`."
            )


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))


def _on_meta(module: nn.Module) -> list[str]:
    return [key for key, tensor in _own_tensors(module).items() if tensor.is_meta]


def _initialiser(root: nn.Module, name: str, module: nn.Module) -> Callable[[], Any] | None:
    """How ``module`` fills its own tensors: as where it is built, by itself, then by the model that it is part of.

    ``_init_weights(module)`` is what Hugging Face models and many others call that second step.
    """
    found: list[Callable[[], Any]] = []
    for own in ("reset_parameters", "_reset_parameters"):
        if callable(method := getattr(module, own, None)):
            found.append(method)
            break
    parts = name.split(".") if name else []
    for depth in range(len(parts), -1, -1):
        owner = root.get_submodule(".".join(parts[:depth]))
        if callable(method := getattr(owner, "_init_weights", None)):
            found.append(partial(method, module))
            break
    return partial(_call_all, found) if found else None


def _call_all(functions: Sequence[Callable[[], Any]]) -> None:
    for function in functions:
        function()


def _filled_with_nonsense(tensor: Tensor, device: torch.device, made: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
    if id(tensor) not in made:
        empty = torch.empty_like(tensor, device=device, requires_grad=False)
        _as_storable(empty).fill_(_nonsense(empty.dtype))
        is_parameter = isinstance(tensor, nn.Parameter)
        filled = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        made[id(tensor)] = tensor, filled  # held, so that no other tensor gets its id
    return made[id(tensor)][1]


def _nonsense(dtype: torch.dtype) -> float | int:
    """What no initialiser writes: NaN, or the byte 0xA5 repeated.

    >>> _nonsense(torch.bfloat16), _nonsense(torch.uint8), hex(_nonsense(torch.int32) % 2**32)
    (nan, 165, '0xa5a5a5a5')
    """
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    signed = dtype.is_signed and dtype != torch.bool
    return int.from_bytes(bytes([0xA5]) * dtype.itemsize, "little", signed=signed)


def _as_storable(tensor: Tensor) -> Tensor:
    """The local tensor, of a dtype that can hold nonsense: bool is one byte."""
    local = tensor.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    return local.view(torch.uint8) if local.dtype == torch.bool else local


def _holds_nonsense(tensor: Tensor) -> bool:
    """Whether a part of it was not filled; of a tensor of small integers, whether nothing was."""
    local = _as_storable(tensor)
    if local.numel() == 0:
        return False
    if local.is_floating_point() or local.is_complex():
        return bool(local.isnan().any())
    stale = local == _nonsense(local.dtype)
    is_narrow = local.element_size() == 1 and tensor.dtype != torch.bool
    return bool(stale.all() if is_narrow else stale.any())


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
        found = [
            module
            for module in below
            if (isinstance(module, entry) if isinstance(entry, type) else entry in _class_names(module))
        ]
        if not found:
            name = entry if isinstance(entry, str) else entry.__name__
            raise ValueError(
                f"The entry {name!r} in `activation_checkpointing_policy` matches no module. Classes in the model:"
                f" {', '.join(sorted({type(module).__name__ for module in root.modules()}))}."
            )
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _class_names(module: nn.Module) -> set[str]:
    return {cls.__name__ for cls in type(module).__mro__}


def _patch_forward(module: nn.Module, *, selective: bool) -> None:
    module.__dict__["_unpatched_forward"] = vars(module).get("forward")
    forward = module.forward
    how: dict[str, Any] = {"use_reentrant": False}

    def within(*args: Any, **kwargs: Any) -> Any:
        with _inside(module):  # in backward, where FSDP2 does not say that this is the unit's forward
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
    """

    mesh: DeviceMesh
    device: torch.device
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype
    reshard_after_forward: bool | None = None
    cpu_offload: bool = False

    def arguments(self, module: nn.Module, *, casts: bool) -> dict[str, Any]:
        """What ``fully_shard`` gets for one module.

        Args:
            module: A unit, or BatchNorm within one: the kernels of a norm with running statistics want its weights in
                the dtype of those, and its input as it is.
            casts: Whether the module computes in ``param_dtype``.
        """
        if casts and not isinstance(module, _NormBase):
            policy = MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype)
        else:
            policy = MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype, cast_forward_inputs=False)
        return self._arguments(policy)

    def _arguments(self, policy: MixedPrecisionPolicy) -> dict[str, Any]:
        on_gpu = self.device.type == "cuda"
        return {
            "mesh": self.mesh,
            "mp_policy": policy,
            "reshard_after_forward": self.reshard_after_forward,
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if self.cpu_offload else OffloadPolicy(),
        }


def _keeping_dtype(root: nn.Module) -> set[nn.Module]:
    """What computes as it was written: the root, whose steps get batches as they were made, and metrics."""
    metrics = [
        module
        for module in root.modules()
        if any(cls.__module__.startswith("torchmetrics.") for cls in type(module).__mro__)
    ]
    return {root} | {below for metric in metrics for below in metric.modules()}


def check_sharded_before(units: Sequence[Unit], plan: ShardingPlan) -> None:
    """Refuse a model that an earlier Trainer sharded for another compute dtype.

    Raises:
        ValueError: Naming both.
    """
    exempt = _keeping_dtype(units[-1].module)
    for unit in units:
        if not isinstance(unit.module, FSDPModule) or isinstance(unit.module, _NormBase) or unit.module in exempt:
            continue
        before = fsdp.param_dtype(unit.module)
        if before != plan.param_dtype and not fsdp.holds_only(unit.module, plan.param_dtype):
            raise ValueError(
                f"{unit.name!r} was sharded before, to compute in {before or 'the dtype of its parameters'}, and this"
                f" Trainer's precision computes in {plan.param_dtype or 'the dtype of the parameters'}. FSDP2 cannot"
                " change that: use the precision of then, or load the weights into a new module."
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
    as_written = _keeping_dtype(root)
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
        fully_shard(unit.module, **plan.arguments(unit.module, casts=unit.module not in as_written))


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
        for key, tensor in _own_tensors(module).items():
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
            _put(module, key, moved[id(tensor)][1])


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


# ---------------------------------------------------------------------------------------------------------------------
# Methods that gather


def gather_in_methods(module: nn.Module, names: Sequence[str] | None = None) -> Undo:
    """Let the public methods of a unit gather its parameters, as its forward does.

    Called within the unit's own forward, or within one another, they are the plain methods: the parameters are there.
    What forward or a method writes into the unit's own parameters would be lost, and is an error: every write that the
    first call makes, later those that a tensor counts itself.

    Args:
        module: A unit.
        names: By default :func:`~lightning_fp8_rocm.distributed.units.forward_methods`.

    Returns:
        What makes them plain again.
    """
    if not isinstance(module, FSDPModule):
        return lambda: None
    chosen = forward_methods(module) if names is None else [n for n in names if callable(getattr(module, n, None))]
    before = {name: vars(module).get(name) for name in [*chosen, "forward"]}
    for name in chosen:
        _gather_in_method(module, name)
    hooks = []
    if hasattr(module.forward, "_is_watched"):
        del before["forward"]
    else:
        _watch_forward(module)
        hooks.append(module.register_forward_hook(_stay_gathered))

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for name, method in before.items():
            vars(module).pop(name, None) if method is None else setattr(module, name, method)

    return undo


def _gather_in_method(module: nn.Module, name: str) -> None:
    plain = getattr(module, name)
    watched = _watched(module, name, plain)

    @wraps(plain)
    def keeping_gathered(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # A forward of the unit within the method would leave it sharded for the rest of the method.
        with fsdp.no_reshard_after_forward(module), _inside(module):
            return call(*args, **kwargs)

    setattr(module, name, keeping_gathered)
    register_fsdp_forward_method(module, name)
    gathering = getattr(module, name)

    def gathered(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with _usable_after_error(module):
            result = gathering(call, *args, **kwargs)
        if not _has_graph(result):  # no backward will come to shard it
            fsdp.reshard(module)
        return _with_sharded_parameters(module, result)

    def generate(generator: Iterator[Any]) -> Iterator[Any]:
        end = object()
        resume = _watched(module, name, lambda: next(generator, end))
        while (item := gathered(resume)) is not end:
            yield item

    @wraps(plain)
    def method(*args: Any, **kwargs: Any) -> Any:
        # The second is for hooks of the unit, that run between FSDP2's.
        if torch.compiler.is_compiling() or _is_inside(module) or fsdp.is_in_forward(module):
            return plain(*args, **kwargs)
        result = gathered(watched, *args, **kwargs)
        return generate(result) if isgeneratorfunction(plain) else result

    setattr(module, name, method)


def _watch_forward(module: nn.Module) -> None:
    plain = module.forward
    watched = _watched(module, "forward", plain)

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _is_inside(module):
            return plain(*args, **kwargs)
        with _usable_after_error(module), _inside(module):
            return watched(*args, **kwargs)

    forward._is_watched = True  # type: ignore[attr-defined]
    module.forward = forward


def _stay_gathered(module: nn.Module, args: Any, output: Any) -> None:
    """After a forward within a method of the same unit: FSDP2 takes that for the end."""
    if _is_inside(module) and not torch.compiler.is_compiling():
        fsdp.stay_in_forward(module)


@contextmanager
def _inside(module: nn.Module) -> Iterator[None]:
    """The span of a forward or a method of a unit, whose parameters are gathered."""
    inside = vars(module)
    inside["_fp8_inside"] = inside.get("_fp8_inside", 0) + 1
    try:
        yield
    finally:
        inside["_fp8_inside"] -= 1
        if not inside["_fp8_inside"]:
            del inside["_fp8_inside"]


def _is_inside(module: nn.Module) -> bool:
    return "_fp8_inside" in vars(module)


@contextmanager
def _usable_after_error(module: nn.Module) -> Iterator[None]:
    try:
        yield
    except Exception:
        if torch._C._current_graph_task_id() == -1:  # in backward, checkpointing stops a recomputation by an exception
            fsdp.leave_forward(module)
        raise


def _has_graph(result: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in pytree.tree_leaves(result))


def _with_sharded_parameters(module: nn.Module, result: Any) -> Any:
    """A method may return parameters, to be clipped or counted: the gathered ones are gone by now."""
    leaves, structure = pytree.tree_flatten(result)
    if not any(isinstance(leaf, nn.Parameter) for leaf in leaves):
        return result
    lasting = fsdp.sharded_by_gathered(module)
    return pytree.tree_unflatten([lasting.get(id(leaf), leaf) for leaf in leaves], structure)


# ---------------------------------------------------------------------------------------------------------------------
# Writes that would be lost


class _WriteWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to write into what a unit has gathered of its own parameters, also through ``.data`` or a view."""

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._module, self._name = module, name

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True  # else a compiled function within is skipped, now and forever

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | (kwargs or {})
            written = [
                given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
            ]
            for leaf in pytree.tree_leaves(written):
                parameter = fsdp.gathered_name(self._module, leaf) if isinstance(leaf, Tensor) else None
                if parameter is not None:
                    raise _lost_write(self._module, self._name, [parameter])
        return func(*args, **(kwargs or {}))


def _watched(module: nn.Module, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """``plain``, whose first call is watched op by op; later, tensors tell by their version.

    Whether parameters are trained may change within: that lasts.
    """
    is_first = True

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        watches, is_first = is_first and fsdp.owns_parameters(module), False
        with _WriteWatch(module, name) if watches else nullcontext():
            result = plain(*args, **kwargs)
        fsdp.follow_gathered(module)
        if written := fsdp.overwritten(module):
            raise _lost_write(module, name, written)
        return result

    return watched


def _lost_write(module: nn.Module, name: str, parameters: Sequence[str]) -> RuntimeError:
    owner = next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule)).__name__
    written = ", ".join(repr(parameter) for parameter in parameters)
    way_out = "write in a hook of the LightningModule (`on_train_batch_end`), where `parameters()` are the sharded ones"
    if name == "forward":
        way_out += ", compute the new value without writing it, or make it a buffer (`register_buffer`)"
    elif name not in STEPS:
        way_out += f", or give the method a name that starts with `_` (`_{name}`): such methods gather nothing"
    return RuntimeError(
        f"{owner}.{name} writes into {written} while that parameter is gathered from all ranks. What lasts are the"
        f" shards, so the write would be lost: {way_out}."
    )


STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""The methods of a LightningModule that a strategy calls instead of its forward."""
