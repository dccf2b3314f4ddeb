"""Values for what was built on the ``meta`` device: tensor by tensor, each module by its own initialiser."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


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
            put(module, key, _filled_with_nonsense(own_tensors(module)[key], device, made))
    ours = {id(tensor) for _, tensor in made.values()}
    for module, _ in todo:
        kept = [
            (below, key, tensor, tensor.detach().clone())
            for below in module.modules()
            for key, tensor in own_tensors(below).items()
            if not tensor.is_meta and id(tensor) not in ours
        ]
        initialise = _initialiser(root, names[module], module)
        assert initialise is not None
        with torch.no_grad():
            initialise()
            for below, key, tensor, value in kept:
                tensor.copy_(value)
                put(below, key, tensor)
    for module, tensors in todo:
        unfilled = [key for key in tensors if _holds_nonsense(own_tensors(module)[key])]
        if unfilled:
            raise ValueError(
                f"{names[module] or 'The root module'} ({type(module).__name__}) was created on the `meta` device, and"
                f" its initialiser did not fill {', '.join(repr(key) for key in unfilled)}: the values would be random."
                " Fill them in `reset_parameters()`, or create the module outside `torch.device('meta')`."
            )


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers that lie on ``module`` itself, by name."""
    return dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))


def _on_meta(module: nn.Module) -> list[str]:
    return [key for key, tensor in own_tensors(module).items() if tensor.is_meta]


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


def put(module: nn.Module, key: str, tensor: Tensor) -> None:
    """Register ``tensor`` in place of the parameter or buffer of that name."""
    if key in module._parameters:
        module._parameters[key] = tensor  # type: ignore[assignment]
    else:
        module._buffers[key] = tensor
