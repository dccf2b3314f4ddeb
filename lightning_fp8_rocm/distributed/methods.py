"""Methods of a unit that gather its parameters as its forward does; and writes into what is gathered, that are lost."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_fp8_rocm.distributed import fsdp
from lightning_fp8_rocm.distributed.units import forward_methods

Undo = Callable[[], None]
"""What takes back a change that was made to modules."""

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""The methods of a LightningModule that a strategy calls instead of its forward."""


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
        with fsdp.no_reshard_after_forward(module), inside(module):
            return call(*args, **kwargs)

    setattr(module, name, keeping_gathered)
    register_fsdp_forward_method(module, name)
    gathering = getattr(module, name)

    def gathered(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with _usable_after_error(module):
            result = gathering(call, *args, **kwargs)
        if not has_graph(result):  # no backward will come to shard it
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
        return generate(result) if inspect.isgeneratorfunction(plain) else result

    setattr(module, name, _bound(method, module))


def _bound(function: Callable[..., Any], module: nn.Module) -> MethodType:
    """A method of ``module`` that calls ``function``: Fabric marks methods alone as further forwards."""

    @wraps(function)
    def method(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    return MethodType(method, module)


def as_forward(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """What FSDP2 may run in place of the forward of a unit: parameters stay gathered until ``call`` has returned.

    Args:
        module: The unit, which ``call`` may itself call.
        call: Computes with its parameters.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _usable_after_error(module), fsdp.no_reshard_after_forward(module), inside(module):
            result = call(*args, **kwargs)
        if torch.is_grad_enabled():
            fsdp.gather_before_backward(module, _tensors_in_objects(result))
        fsdp.follow_gathered(module)
        if written := fsdp.overwritten(module):
            raise _lost_write(module, "forward", written)
        return result

    return forward


def _watch_forward(module: nn.Module) -> None:
    plain = module.forward
    watched = _watched(module, "forward", plain)

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _is_inside(module):
            return plain(*args, **kwargs)
        with _usable_after_error(module), inside(module):
            return watched(*args, **kwargs)

    forward._is_watched = True  # type: ignore[attr-defined]
    module.forward = forward


def _stay_gathered(module: nn.Module, args: Any, output: Any) -> None:
    """After a forward within a method of the same unit: FSDP2 takes that for the end."""
    if _is_inside(module) and not torch.compiler.is_compiling():
        fsdp.stay_in_forward(module)


@contextmanager
def inside(module: nn.Module) -> Iterator[None]:
    """The span of a forward or a method of a unit, whose parameters are gathered."""
    attributes = vars(module)
    attributes["_fp8_inside"] = attributes.get("_fp8_inside", 0) + 1
    try:
        yield
    finally:
        attributes["_fp8_inside"] -= 1
        if not attributes["_fp8_inside"]:
            del attributes["_fp8_inside"]


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


def has_graph(result: Any) -> bool:
    """Whether a backward may come from what a forward or a method returned."""
    leaves = pytree.tree_leaves(result)
    return any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in leaves) or any(
        True for _ in _tensors_in_objects(result)
    )


def _tensors_in_objects(result: Any, depth: int = 4) -> Iterator[Tensor]:
    """Tensors with a graph in attributes, as a ``torch.distributions.Normal`` or a posterior of one's own has them."""
    for leaf in pytree.tree_leaves(result):
        if depth and hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor) and not callable(leaf):
            held = dict(vars(leaf))
            for tensor in pytree.tree_leaves(held):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    yield tensor
            yield from _tensors_in_objects(held, depth - 1)


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
        if torch.is_grad_enabled():
            fsdp.gather_before_backward(module, _tensors_in_objects(result))
        fsdp.follow_gathered(module)
        if written := fsdp.overwritten(module):
            raise _lost_write(module, name, written)
        return result

    return watched


def _lost_write(module: nn.Module, name: str, parameters: Sequence[str]) -> RuntimeError:
    owner = next(cls for cls in type(module).__mro__ if not issubclass(cls, FSDPModule)).__name__
    written = ", ".join(repr(parameter) for parameter in parameters)
    way_out = (
        "write between steps, where `parameters()` are the sharded ones (with a Trainer, in a hook such as"
        " `on_train_batch_end`)"
    )
    if name == "forward":
        way_out += ", compute the new value without writing it, or make it a buffer (`register_buffer`)"
    elif name not in STEPS:
        way_out += f", or give the method a name that starts with `_` (`_{name}`): such methods gather nothing"
    return RuntimeError(
        f"{owner}.{name} writes into {written} while that parameter is gathered from all ranks. What lasts are the"
        f" shards, so the write would be lost: {way_out}."
    )
