"""What is Fabric's own of our Precision and Strategy: which of its hooks calls what.

Fabric's loop is the user's, and ends without a word. So here the exit of the process is the end of a run.
No Lightning is imported. What is private there and is called here, besides what ``strategy.py`` calls:
``_SubprocessScriptLauncher``. The supported versions of Lightning have it.
"""

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_fp8_rocm.distributed import objects, publish, sharding, storage
from lightning_fp8_rocm.distributed.faults import raise_together
from lightning_fp8_rocm.distributed.model import ShardedModel, SteppedModule, check_not_compiled
from lightning_fp8_rocm.distributed.random_states import random_states, set_random_states
from lightning_fp8_rocm.distributed.storage import plain_name
from lightning_fp8_rocm.distributed.units import class_name, has_steps
from lightning_fp8_rocm.plugins.console import say
from lightning_fp8_rocm.plugins.flavour import Flavour
from lightning_fp8_rocm.plugins.precision import FP8PrecisionMixin
from lightning_fp8_rocm.plugins.strategy import FSDP2StrategyMixin

if TYPE_CHECKING:
    # What a concrete class adds; one flavour stands for both.
    from lightning.fabric.plugins import CheckpointIO
    from lightning.fabric.plugins.precision import Precision
    from lightning.fabric.strategies.parallel import ParallelStrategy
    from lightning.fabric.strategies.strategy import Strategy
else:
    Precision = ParallelStrategy = object


class FabricPrecisionMixin(FP8PrecisionMixin, Precision):  # noqa: D101, the mixin's
    __doc__ = FP8PrecisionMixin.__doc__
    _flavour: Flavour

    connector: Any = None
    """Fabric's, which knows the strategy; registration sets it. None where the plugin is used without Fabric."""
    waits_for_strategy = True
    """Our strategy converts as a part of its setup, where what one rank raises is raised on all; it says when."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        waits = self.waits_for_strategy and isinstance(self._strategy(), FSDP2StrategyMixin)
        return module if waits else super().convert_module(module)

    @override
    def _devices_of(self, module: nn.Module) -> list[torch.device]:
        strategy = self._strategy()
        if strategy is None:
            if not torch.cuda.is_available():
                return [torch.device("cpu")]
            return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        strategies = self._flavour.of_fabric("strategies")
        if not isinstance(strategy, strategies.SingleDeviceStrategy | strategies.DDPStrategy | FSDP2StrategyMixin):
            raise TypeError(
                f'`Fabric(precision="fp8-rocm")` does not work with {type(strategy).__name__}, which shards or copies'
                " the model in a way that FP8 layers were not tried with. Use strategy 'auto', 'ddp' or 'fsdp2_fp8'."
            )
        others = getattr(strategy, "parallel_devices", None) or []
        return [strategy.root_device, *(device for device in others if device != strategy.root_device)]

    @override
    def _compiled_by_strategy(self, module: nn.Module) -> bool:
        strategy = self._strategy()
        return isinstance(strategy, FSDP2StrategyMixin) and strategy.compiles_on(strategy.root_device)

    def facts_of(self, modules: Mapping[str, nn.Module]) -> dict[str, Any]:
        """What a checkpoint says of FP8: as :meth:`facts`, of the modules that are saved under these keys."""
        from lightning_fp8_rocm.float8.linear import FP8Linear

        facts = self.facts()
        if facts:
            facts["fp8"]["layers"] = [
                plain_name(name if len(modules) == 1 else f"{key}.{name}")
                for key, module in modules.items()
                for name, layer in module.named_modules()
                if isinstance(layer, FP8Linear)
            ]
        return facts

    @override
    def convert_output(self, data: Any) -> Any:
        # As Fabric's own mixed precision: the loss that follows is computed in the default dtype.
        default = torch.get_default_dtype()
        return apply_to_collection(data, Tensor, lambda t: t.to(default) if t.is_floating_point() else t)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        for watch in self._watches:
            watch.step_ended()
            watch.note()
            watch.step_begins()
        return result

    def _strategy(self) -> "Strategy | None":
        strategy: Strategy | None = getattr(self.connector, "strategy", None)
        return strategy


_OWNERS = "_fp8_rocm_models"
"""Of an optimizer that was set up: the models that it trains, looked for once and not at each step."""
_IN_USE: "WeakKeyDictionary[nn.Module, FabricStrategyMixin]" = WeakKeyDictionary()
"""Which strategy holds a model that was set up."""


class FabricStrategyMixin(FSDP2StrategyMixin, ParallelStrategy):  # noqa: D101, the mixin's
    __doc__ = FSDP2StrategyMixin.__doc__

    _entry = "Fabric"
    _mesh_exists = "from `fabric.launch()` on"
    _saving_weights_alone = "unless the optimizer is left out of `fabric.save`"

    _plugin: Any = None
    _ends_well = True
    _forget_the_end: Callable[[], None] | None = None

    @cached_property
    def _set_up(self) -> "list[weakref.ref[ShardedModel]]":
        return []

    @property
    def _models(self) -> list[ShardedModel]:
        """What was set up and is not gone, in the order of setup: what ranks do together they do in one order."""
        return [model for model in (reference() for reference in self._set_up) if model is not None]

    # ---- who and where

    @property
    @override
    def precision(self) -> Precision:
        plain: Precision = self._flavour.of_fabric("plugins.precision").Precision()
        return self._plugin if self._plugin is not None else plain

    @precision.setter
    @override
    def precision(self, precision: Precision | None) -> None:
        # Not kept where Fabric looks whether a strategy "carries a precision": a second Fabric may have another one.
        if precision is not None:
            self.param_dtype_of(precision, self._flavour.of_fabric("plugins.precision"))
            self._plugin = precision

    @property
    @override
    def checkpoint_io(self) -> "CheckpointIO":
        raise NotImplementedError(f"{type(self).__name__} uses no CheckpointIO.")

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: "CheckpointIO") -> None:
        raise ValueError(
            f"The plugin {type(io).__name__} is a CheckpointIO, and {type(self).__name__} uses none: checkpoints are"
            " written by torch.distributed.checkpoint. Remove it from `Fabric(plugins=...)`. To write in the"
            f" background, pass `{type(self).__name__}(async_checkpoint=True)`."
        )

    @property
    def _num_nodes(self) -> int:
        return self.num_nodes

    @_num_nodes.setter
    def _num_nodes(self, num_nodes: int) -> None:  # the name under which Fabric sets it
        self.num_nodes = num_nodes

    def _set_world_ranks(self) -> None:  # the name under which Fabric calls it
        self.set_world_ranks()

    # ---- hooks in the order of a run

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            launchers = self._flavour.of_fabric("strategies.launchers")
            self._launcher = launchers._SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        goes_on = self._forget_the_end is not None and self._is_connected()
        if goes_on and self._mesh is not None and not self._mesh_is_of_another_group():
            return  # `fabric.launch()`, or a cell of a notebook, a second time
        self.check_device()
        super().setup_environment()
        self.connect_ranks()
        self._backward_sync_control = _GradientSync(self)  # type: ignore[assignment]
        self._tell_others_of_the_end()

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        # Materialisation happens in `setup_module`.
        stack = ExitStack()
        stack.enter_context(torch.device("meta") if empty_init else nullcontext())
        stack.enter_context(self.precision.module_init_context())
        return stack

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: each unit was moved before it was sharded."""

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Set up a model, and give each optimizer the sharded parameters for those that it has, found by name.

        Raises:
            ValueError: An optimizer has state already, or a parameter that is not the model's; before sharding.
        """
        names: list[list[list[str | None]]] = []
        with raise_together("`fabric.setup`"):
            names = [self._names_by_group(optimizer, module) for optimizer in optimizers]
        stepped = self.setup_module(module)
        sharded = dict(module.named_parameters(remove_duplicate=False))
        for optimizer, of_optimizer in zip(optimizers, names, strict=True):
            for group, of_group in zip(optimizer.param_groups, of_optimizer, strict=True):
                # In place: LBFGS keeps the list.
                group["params"][:] = [
                    own if name is None else sharded[name] for own, name in zip(group["params"], of_group, strict=True)
                ]
        return stepped, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        with raise_together("`fabric.setup`"):
            check_not_compiled(module)
            self._check_not_in_use(module)
        model, precision = self.new_model(module), self.precision
        try:
            self.shard_module(
                model,
                self._convert,
                param_dtype=self.param_dtype_of(precision, self._flavour.of_fabric("plugins.precision")),
                steps_are_called=has_steps(module),
            )
        except BaseException:
            model.release()
            raise
        _IN_USE[module] = self
        self._set_up.append(weakref.ref(model))
        line, _ = self.facts_of_setup(precision.precision, getattr(precision, "report", None))
        say(line)
        model.activate_methods(manual_optimization=False)
        return SteppedModule(model)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Take an optimizer over parameters of models that were set up.

        Raises:
            ValueError: A parameter is none of those.
        """
        with raise_together("`fabric.setup_optimizers`"):
            known = self._known_parameters()
            strangers = [
                tuple(parameter.shape)
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter not in known
            ]
            if strangers:
                raise ValueError(
                    f"{len(strangers)} parameters of {type(optimizer).__name__} are of no model that was set up (shapes"
                    f" {strangers[:8]}). Sharding replaces the parameters of a model: make the optimizer after"
                    " `fabric.setup_module(model)`, or pass both to `fabric.setup(model, optimizer)`. A parameter"
                    " outside of a model would be trained on each rank by itself: register it on the module."
                )
        owners = self._models_of(optimizer)
        kind = type(optimizer)
        optimizer.__class__ = _dropping_all_gradients(kind, owners)
        if owners:
            owners[0].undo.append(lambda: setattr(optimizer, "__class__", kind))

        def after_step(optimizer: Optimizer, *_: Any) -> None:
            for model in owners:
                model.after_optimizer_step()
            self._look_at_states(optimizer)

        optimizer.register_step_post_hook(after_step)
        return optimizer

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        closure = kwargs.get("closure")
        if closure is None:
            self._check_gradients(optimizer)
            return super().optimizer_step(optimizer, **kwargs)

        def checked() -> Any:
            loss = closure()
            self._check_gradients(optimizer)
            return loss

        return super().optimizer_step(optimizer, **{**kwargs, "closure": checked})

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm over the gradients of all ranks, which is returned as an ordinary tensor."""
        self._check_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @override
    def teardown(self) -> None:
        """End the run: Fabric itself does that never; the end of the process does.

        Models keep their shards. Layers and methods are again what the user wrote, so that another Fabric may set the
        models up.
        """
        self._wait_for_the_last_checkpoint()
        self._end(sys.exception())  # of a `try` whose `finally` calls this
        if self._forget_the_end is not None:
            self._forget_the_end()
            self._forget_the_end = None
        for model in self._models:
            model.release()
            _IN_USE.pop(model.root, None)
        self._set_up.clear()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision.teardown()
        self.accelerator.teardown()

    # ---- collectives

    @override
    def all_reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        return self._reduced(tensor, group, reduce_op)

    # ---- checkpoints

    def wait_for_checkpoint(self) -> None:
        """With ``async_checkpoint=True``: wait until the last checkpoint is on disk, under its name.

        Raises:
            RuntimeError: It could not be written; on all ranks.
        """
        self._saver.wait()

    @override
    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        if storage_options is not None:
            raise TypeError(
                f"`{type(self).__name__}.save_checkpoint(..., storage_options=...)` is not supported: checkpoints are"
                " written by torch.distributed.checkpoint, not by a `CheckpointIO`. Leave `storage_options` out."
            )
        if not isinstance(state, Mapping):
            given = _without_wrapper(state)
            name = class_name(given) if isinstance(given, nn.Module) else type(given).__name__
            raise TypeError(
                f'Expected argument `state` of `fabric.save` to be a dict, such as {{"model": model}}, but got {name}.'
            )
        place = publish.local_path(self.broadcast(os.fspath(path)))  # all write to one place
        state = _without_wrappers(state)
        self._saver.wait()  # before there are two copies on the host
        for model in self._models:  # of other modules, rank 0's are saved
            if any(each is model.root for each in state.values()):
                sharding.broadcast_buffers(model.root)
        shards, rest = objects.collect(state, full=self._saves_one_file, copy=self.async_checkpoint, filter=filter)
        resumes = any(isinstance(each, Optimizer) for each in state.values())
        loaders = {key: each.state_dict() for key, each in _loaders(state).items()} if resumes else {}
        own = rest[storage.OWN_KEY]
        models = {key: state[key] for key in own[storage.MODELS_FACT]}
        precision = self.precision
        facts = precision.facts_of(models) if isinstance(precision, FabricPrecisionMixin) else {}
        rest[storage.OWN_KEY] = {**own, **self._versions(), **facts}
        self._saver.save(
            place,
            shards,
            rest,
            full=self._saves_one_file,
            own={"random": random_states(self.root_device), "dataloaders": loaders} if resumes else None,
            background=self.async_checkpoint,
        )

    @override
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if state is None:
            raise ValueError(
                f"`fabric.load({str(path)!r})` without a state would read the whole checkpoint on every rank. Pass what"
                ' to load: `fabric.load(path, {"model": model})`; `{}` loads what is neither model nor optimizer. All'
                " of it in one file: `lightning-fp8-rocm checkpoint consolidate`."
            )
        self._saver.wait()
        place = publish.local_path(self.broadcast(os.fspath(path)))
        wanted = _without_wrappers(state) if isinstance(state, Mapping) else _without_wrapper(state)
        with self.verified(place) as found:
            rest = objects.load_objects(found, wanted, strict=strict, weights_only=weights_only)
        if isinstance(state, MutableMapping):
            for key, value in wanted.items():
                if not isinstance(value, nn.Module | Optimizer):
                    state[key] = value
        own = rest.pop(storage.OWN_KEY, None)
        self.warn_unless_verified(found, own)
        if isinstance(wanted, Mapping) and any(isinstance(each, Optimizer) for each in wanted.values()):
            part = self.own_part_of(own or {})
            if part is not None:
                for key, loader in _loaders(wanted).items():  # of which the rest has the state of rank 0
                    if key in (part["dataloaders"] or {}):
                        loader.load_state_dict(part["dataloaders"][key])
                set_random_states(part["random"], self.root_device)
        return rest

    # ---- how

    def _models_of(self, optimizer: Optimizer) -> list[ShardedModel]:
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        return [model for model in self._models if not own.isdisjoint(model.root.parameters())]

    def _known_parameters(self) -> set[nn.Parameter]:
        for model in self._models:
            model.reshard()
        return {parameter for model in self._models for parameter in model.root.parameters()}

    def _check_gradients(self, optimizer: Optimizer) -> None:
        for model in getattr(optimizer, _OWNERS, ()):
            model.check_reduced(optimizer)
            model.after_backward()

    def _convert(self, module: nn.Module) -> nn.Module:
        precision = self.precision
        if not isinstance(precision, FabricPrecisionMixin):
            return module  # Fabric has done it
        precision.waits_for_strategy = False
        try:
            return precision.convert_module(module)
        finally:
            precision.waits_for_strategy = True

    def _check_not_in_use(self, module: nn.Module) -> None:
        if module in _IN_USE:
            raise RuntimeError(
                f"This {class_name(module)} was set up before, and is sharded. Use what that setup returned; for"
                " another Fabric, first call `fabric.strategy.teardown()` of the one that set it up."
            )
        for name, child in module.named_modules():
            for other in self._models:
                if other.holds(child):
                    raise RuntimeError(
                        f"{name!r} of this {class_name(module)} is a part of {class_name(other.root)}, too, which was"
                        " set up before and gathers it. Set up one module that holds both, and mark the methods that"
                        " are used (`mark_forward_method`)."
                    )

    def _names_by_group(self, optimizer: Optimizer, module: nn.Module) -> list[list[str | None]]:
        """The name in ``module`` of each parameter; None for one of a model that was set up before.

        Raises:
            ValueError: The optimizer has state, or a parameter is neither.
        """
        if any(optimizer.state.values()):
            raise ValueError(
                f"{type(optimizer).__name__} has state already: it took steps, or a checkpoint was loaded into it."
                " Sharding replaces the parameters that the state belongs to. Pass a new optimizer to"
                " `fabric.setup(model, optimizer)`, and load its state afterwards:"
                ' `fabric.load(path, {"model": model, "optimizer": optimizer})`.'
            )
        names = {parameter: name for name, parameter in module.named_parameters()}
        known = self._known_parameters()
        found = [[names.get(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        strangers = [
            tuple(parameter.shape)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter not in names and parameter not in known
        ]
        if strangers:
            raise ValueError(
                f"{len(strangers)} parameters of {type(optimizer).__name__} are not parameters of"
                f" {class_name(module)} (shapes {strangers[:8]}), nor of a model that was set up before. Pass the"
                " model that the optimizer was made for. A parameter outside of a model would be trained on each rank"
                " by itself: register it on the module."
            )
        return found

    def _tell_others_of_the_end(self) -> None:
        """An exception that ends this process is told to the other ranks; an end without one is a goodbye."""
        if self._forget_the_end is not None:
            return
        hook, leave = sys.excepthook, sys.exit

        def tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            self._wait_for_the_last_checkpoint()  # before the others learn of it, who would end in the middle of it
            self._ends_well = False
            self._watcher.announce(error)
            hook(kind, error, traceback)

        def leave_alone(status: Any = None, /) -> NoReturn:
            if status not in (None, 0):
                self._ends_well = False
            leave(status)

        def say_goodbye() -> None:
            self._wait_for_the_last_checkpoint()
            if self._ends_well:
                self._end(getattr(sys, "last_value", None))  # where something else has taken the place of `tell`

        def forget() -> None:
            atexit.unregister(say_goodbye)
            if sys.excepthook is tell:
                sys.excepthook = hook
            if sys.exit is leave_alone:
                sys.exit = leave

        sys.excepthook, sys.exit = tell, leave_alone
        atexit.register(say_goodbye)
        self._forget_the_end = forget

    def _end(self, error: BaseException | None) -> None:
        """Tell the others that this rank is done, and of what has ended it."""
        if error is not None:
            self._watcher.announce(error)
        # One that is interrupted leaves alone: without a goodbye, the watchers of the others end them.
        if not isinstance(error, KeyboardInterrupt | SystemExit):
            self._watcher.stop()


def _dropping_all_gradients(kind: type[Optimizer], owners: list[ShardedModel]) -> type[Optimizer]:
    """The class of an optimizer whose ``zero_grad`` also throws away what `no_backward_sync` has kept, as under DDP."""

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        kind.zero_grad(self, set_to_none)
        own = {parameter for group in self.param_groups for parameter in group["params"]}
        for model in owners:
            model.drop_unreduced(own)

    return type(
        kind.__name__,
        (kind,),
        {"zero_grad": zero_grad, _OWNERS: owners, "__module__": kind.__module__, "__doc__": kind.__doc__},
    )


class _GradientSync:
    """What ``fabric.no_backward_sync`` asks."""

    def __init__(self, strategy: FabricStrategyMixin) -> None:
        self._strategy = strategy

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Backward passes within it add to whole gradients, unless ``enabled`` is False."""
        root = _without_wrapper(module)
        model = next(each for each in self._strategy._models if each.root is root)
        with model.without_gradient_sync() if enabled else nullcontext():
            yield


def _loaders(state: Mapping[str, Any]) -> dict[str, Any]:
    """Dataloaders that save where they are, each rank its own."""
    return {key: each for key, each in state.items() if isinstance(each, DataLoader) and hasattr(each, "state_dict")}


def _without_wrapper(value: Any) -> Any:
    return value.module if isinstance(value, SteppedModule) else value


def _without_wrappers(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _without_wrapper(value) for key, value in state.items()}
