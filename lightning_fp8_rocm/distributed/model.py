"""One model from its sharding to its release: how its methods gather, the span of a step, and what comes after one."""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_fp8_rocm.distributed import fsdp, methods

if TYPE_CHECKING:
    # Annotations of these are quoted: see recipe.py.
    from lightning_fp8_rocm.distributed.all_gather import FP8AllGather
    from lightning_fp8_rocm.float8.recipe import FP8Recipe

GradientSync = Literal["last", "every"]


@dataclass(frozen=True)
class ShardingReport:
    """What sharding made of a model.

    Args:
        units: Names of the modules that are gathered together, innermost first.
        ranks: Sizes of the mesh.
        fp8_weights: How many weights travel in FP8.
        gathered_bytes: What a rank receives, its own part included, when every unit is gathered once.
        bf16_bytes: The same if all of it travelled in the compute dtype.
        in_bf16: FP8 layers whose weight travels in bf16, each with the reason.
    """

    units: tuple[str, ...]
    ranks: tuple[int, ...]
    fp8_weights: int
    gathered_bytes: int
    bf16_bytes: int
    in_bf16: Mapping[str, str]

    def __str__(self) -> str:
        ranks = " x ".join(str(size) for size in self.ranks)
        if self.gathered_bytes == 0:
            return f"FSDP2: {len(self.units)} units on {ranks} rank{'s' * (ranks != '1')}, nothing to gather."
        text = (
            f"FSDP2: {len(self.units)} units on {ranks} ranks; gathering every weight once moves"
            f" {_bytes(self.gathered_bytes)}"
        )
        if self.fp8_weights:
            text += f", {self.fp8_weights} weights in FP8 (all in bf16: {_bytes(self.bf16_bytes)})"
        return text + "."


def _bytes(count: int) -> str:
    """Bytes for a person, in powers of ten.

    >>> _bytes(980), _bytes(123_400), _bytes(16_060_000_000)
    ('980 B', '123.4 kB', '16.1 GB')
    """
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return f"{count} B"


class ShardedModel:
    """A model that ``fully_shard`` was applied to.

    Args:
        root: The model.
        gradient_sync: See the strategy.
        find_unused_parameters: See the strategy.
    """

    def __init__(self, root: nn.Module, *, gradient_sync: GradientSync, find_unused_parameters: bool) -> None:
        self.root = root
        self.undo: list[Callable[[], None]] = []
        """What :meth:`release` calls, the last first."""
        self._gradient_sync, self._find_unused_parameters = gradient_sync, find_unused_parameters
        self._gathers: FP8AllGather | None = None
        self._trainable: tuple[bool, ...] = ()
        self._units: list[nn.Module] = []
        self._groups: list[fsdp.Group] = []
        self._backwards, self._reduces = 0, True

    # ---- setup, in this order

    def begin(self) -> None:
        """Once all is sharded: make it the root of its units, before a child's forward would make the child that."""
        fsdp.reduce_unused(self.root, self._find_unused_parameters)
        fsdp.initialise(self.root)
        self._units, self._groups = list(fsdp.units(self.root).values()), list(fsdp.groups(self.root))

    def mark(self, fp8_all_gather: Literal["auto"] | bool, recipes: "set[FP8Recipe]") -> None:
        """Let the weights of FP8 layers travel in FP8, where that is possible.

        Raises:
            ValueError: ``fp8_all_gather`` is True, and some cannot.
        """
        from lightning_fp8_rocm.distributed.all_gather import FP8AllGather

        if fp8_all_gather is False or not recipes:
            return
        self._gathers = FP8AllGather(self.root)
        refused = {name: why for name, why in self._gathers.in_bf16.items() if "nothing is gathered" not in why}
        if fp8_all_gather is True and refused:
            listed = "; ".join(f"{name!r}: {why}" for name, why in refused.items())
            raise ValueError(
                f"`fp8_all_gather=True`, but these weights cannot travel in FP8: {listed}. Choose another recipe, or"
                " `fp8_all_gather='auto'` to gather those in bf16."
            )

    def describe(self) -> ShardingReport:
        """Units and bytes."""
        in_fp8 = set(self._gathers.names) if self._gathers is not None else set()
        owners = {id(module): name for name, module in self.root.named_modules()}
        moved = in_bf16 = 0
        for group in fsdp.groups(self.root):
            for param in group.fsdp_params:
                usual, fp8 = fsdp.gathered_bytes(param)
                in_bf16 += usual
                is_fp8 = owners.get(id(fsdp.owner(param))) in in_fp8 and fsdp.name_of(param) == "weight"
                moved += fp8(self._gathers.is_row_scaled) if is_fp8 and self._gathers is not None else usual
        mesh = fsdp.mesh_of(self.root)
        return ShardingReport(
            units=tuple(name or "(root)" for name in reversed(fsdp.units(self.root))),
            ranks=tuple(mesh.shape) if mesh is not None else (1,),
            fp8_weights=len(in_fp8),
            gathered_bytes=moved,
            bf16_bytes=in_bf16,
            in_bf16=dict(self._gathers.in_bf16) if self._gathers is not None else {},
        )

    def activate_methods(self, *, manual_optimization: bool) -> None:
        """Let methods gather parameters, from now until :meth:`release`; during setup they are what the user wrote."""
        for module in fsdp.units(self.root).values():
            if module._compiled_call_impl is not None:
                continue  # its methods are traced within its forward
            self.undo.append(methods.gather_in_methods(module))
            self.undo.append(module.register_forward_pre_hook(self._before_forward, prepend=True).remove)
        # Under manual optimization the root owns nothing that a training step could read. Were the step a forward of
        # it, units would be gathered without waiting for the optimizer that stepped within it.
        steps = [name for name in methods.STEPS if not manual_optimization or name != "training_step"]
        self.undo.append(methods.gather_in_methods(self.root, steps))

    def release(self) -> None:
        """Undo all but the sharding, which lasts: another Trainer over the module does what that one says."""
        if self._gathers is not None:
            self._gathers.unmark()
            self._gathers = None
        while self.undo:
            self.undo.pop()()
        self._units, self._groups = [], []

    # ---- while a stage runs

    @contextmanager
    def step(self, *, weights_change: bool, trains: bool) -> Iterator[None]:
        """The span of one step: everything is sharded when it begins, and scales are fresh."""
        # A forward without a backward leaves the outermost unit gathered, with the weights of then.
        fsdp.reshard_units(self._units)
        if trains:
            self._follow_frozen()
        gathers = self._gathers
        with nullcontext() if gathers is None else gathers.step(weights_change=weights_change):
            yield

    def reshard(self) -> None:
        """Let ``parameters()`` be the sharded ones, also after a forward without a backward."""
        fsdp.reshard_units(self._units)

    def holds(self, module: nn.Module) -> bool:
        """Whether ``module`` is one of its units."""
        return module in self._units

    def after_optimizer_step(self) -> None:
        """Nothing that was gathered or cast before counts any more."""
        fsdp.reshard_units(self._units)
        if self._gathers is not None:
            self._gathers.forget()

    @contextmanager
    def without_gradient_sync(self) -> Iterator[None]:
        """Backward passes within it add to whole gradients, which are reduced after it."""
        if self._gradient_sync == "every":
            yield
            return
        before = self._reduces  # within another such span it stays as that one says
        self._set_gradient_sync(False)
        try:
            yield
        finally:
            self._set_gradient_sync(before)

    def after_backward(self) -> None:
        """Refuse gradients of different parameters, which FSDP2 adds up; asked now and then, for it waits for the GPU.

        Raises:
            RuntimeError: On every rank, naming the parameters.
        """
        if self._find_unused_parameters or not self._reduces:
            return
        self._backwards += 1
        if self._backwards % 100 == 0 or self._backwards & (self._backwards - 1) == 0:
            names = fsdp.unequal_gradients(self.root)
            if names:
                raise RuntimeError(
                    "Some ranks have a gradient for these parameters and others have not:"
                    f" {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}. FSDP2 would add up gradients of"
                    " different parameters. Use all parameters of a unit on every rank, or pass"
                    " `FSDP2FP8Strategy(find_unused_parameters=True)`."
                )

    def check_reduced(self, optimizer: Optimizer) -> None:
        """Refuse a step without the gradients of backward passes in :meth:`without_gradient_sync`.

        Raises:
            RuntimeError: The last backward before it was one of those; naming the parameters.
        """
        waiting = fsdp.unreduced_gradients(self._groups)
        names = [
            waiting[parameter]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter in waiting
        ]
        if names:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() was called while gradients of {', '.join(names[:8])}"
                f"{', ...' if len(names) > 8 else ''} were not reduced over the ranks: the last backward before it ran"
                " within `no_backward_sync`. Leave that context, or pass `enabled=False`, for the last batch of a step."
            )

    def drop_unreduced(self, parameters: Collection[nn.Parameter]) -> None:
        """Throw away gradients of these parameters that wait to be reduced."""
        fsdp.drop_unreduced_gradients(self._groups, parameters)

    def _set_gradient_sync(self, reduces: bool) -> None:
        assert isinstance(self.root, FSDPModule)
        self.root.set_requires_gradient_sync(reduces)
        self._reduces = reduces

    def _before_forward(self, module: nn.Module, args: object) -> None:
        """A hook of the user may call a unit at any time, also after the marks were dropped."""
        if self._gathers is not None and not self._gathers.is_stepping:  # a step has marked all
            self._gathers.mark()

    def _follow_frozen(self) -> None:
        """FSDP2 reads once which parameters are trained; callbacks freeze and thaw them."""
        now = tuple(param.sharded_param.requires_grad for group in self._groups for param in group.fsdp_params)
        if self._trainable and now != self._trainable:
            fsdp.follow_frozen(self.root)
        self._trainable = now


class SteppedModule(nn.Module):
    """A sharded model, each call of which is one step: everything is sharded when it begins, and scales are fresh.

    Args:
        model: What is known of the sharded model.
    """

    def __init__(self, model: ShardedModel) -> None:
        super().__init__()
        self.module = model.root
        self._model = model
        self._forward = model.root.forward
        self._was_called = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Raises:
            RuntimeError: Fabric has compiled it as a whole, as the user had compiled what he set up.
        """
        if not self._was_called:
            self._was_called = True
            # Fabric unwraps what the user has compiled and compiles what the strategy returns, telling nobody.
            if any(isinstance(each, dict) and each.get("_orig_mod") is self for each in gc.get_referrers(self)):
                raise _compiled_as_a_whole()
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled():  # in which FSDP2 would make tensors that cannot be trained afterwards
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            stack.enter_context(self._model.step(weights_change=False, trains=torch.is_grad_enabled()))
            result = self._call(*args, **kwargs)
        if not methods.has_graph(result):  # no backward will come to shard it
            self._model.reshard()
        return result

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        module, method = self.module, self.module.forward
        if "_redirection_through_forward" not in getattr(method, "__qualname__", ""):
            return module(*args, **kwargs)
        # Fabric has put a method there that the user marked as a forward; it puts the forward back when it is run.
        module.forward = marked = methods.as_forward(module, method)
        try:
            return module(*args, **kwargs)
        finally:
            if module.forward is marked:  # it did not come to that
                module.forward = self._forward


def check_not_compiled(module: nn.Module) -> None:
    """Refuse a module that ``torch.compile`` made of a whole model.

    Raises:
        RuntimeError: Saying what to do instead.
    """
    if isinstance(module, torch._dynamo.OptimizedModule):
        raise _compiled_as_a_whole()


def _compiled_as_a_whole() -> RuntimeError:
    return RuntimeError(
        "The model is compiled as a whole (`torch.compile(model)`), which does not work with weights that are gathered"
        " unit by unit. Set it up without that: the strategy compiles each block by itself on GPUs, and anywhere with"
        " `FSDP2FP8Strategy(compile=True)`."
    )
