"""What our Precision and Strategy do, written once for every flavour of Lightning. This module imports none of them.

The concrete classes (``pytorch/``, ``fabric/``) add what differs: who runs the module, where, and which hook calls
what. Nor is torchao imported: constructing a plugin is too early for that.
"""

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor, nn

from lightning_fp8_rocm import hardware
from lightning_fp8_rocm.distributed import fsdp, methods, sharding, units
from lightning_fp8_rocm.distributed.faults import raise_together, same_on_all_ranks
from lightning_fp8_rocm.distributed.materialise import check_materialisable
from lightning_fp8_rocm.distributed.storage import OWN_KEY, plain_name
from lightning_fp8_rocm.distributed.units import AutoWrapPolicy
from lightning_fp8_rocm.float8.recipe import RECIPE_NAMES, FP8Recipe, RecipeName, check_patterns, choice_error
from lightning_fp8_rocm.hardware import FP8Format, Hardware

if TYPE_CHECKING:
    # Annotations of these are quoted: see recipe.py.
    from lightning_fp8_rocm.distributed.all_gather import FP8AllGather
    from lightning_fp8_rocm.float8.convert import ConversionReport

log = logging.getLogger("lightning_fp8_rocm")
if log.level == logging.NOTSET:
    log.setLevel(logging.INFO)  # the conversion table shows unless the user turns this logger down

OnUnsupported = Literal["error", "bf16", "emulate"]
WeightsDtype = Literal["float32", "bfloat16"]


def _check(
    argument: str, value: object, allowed: Sequence[object], hint: str = "", owner: str = "FP8Precision"
) -> None:
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in allowed):
        raise choice_error(owner, argument, value, allowed, hint)


class FP8PrecisionMixin:
    """FP8 matrix products for any module; everything else in bf16.

    Constructing it asks no device and imports no torchao: a launcher may still fork, and set environment variables.

    Args:
        recipe: How the operands are scaled: ``"tensorwise"`` (one scale a tensor; what ``"auto"`` means),
            ``"rowwise"`` (one a row), ``"rowwise_with_gw_hp"`` (as ``rowwise``, the weight's gradient in bf16), an
            ``FP8Recipe``, or a torchao ``Float8LinearConfig``.
        include: Patterns (``fnmatch``) of fully-qualified layer names to convert, on top of the safe defaults. A layer
            whose full name stands here is converted also if it is the output head or small.
        exclude: Patterns of layer names to leave in bf16.
        skip_small: Leave out layers that are too small to gain speed. ``"auto"``: unless FP8 is emulated.
        weights_dtype: Of the master weights, which the optimizer updates. ``"float32"`` keeps trainable weights in fp32
            and runs the step under autocast; ``"bfloat16"`` casts the module, as ``bf16-true`` does.
        compute_dtype: Of all that is not FP8; ``"bfloat16"`` is the only one.
        fp8_format: ``"ocp"`` (MI350, RDNA4, NVIDIA) or ``"fnuz"`` (MI300). ``"auto"`` is what the hardware multiplies;
            another one is emulated.
        on_unsupported: What to do on a GPU without FP8: raise an ``"error"``, train in ``"bf16"``, or ``"emulate"``. A
            CPU always emulates.
    """

    # A property of Lightning's Precision that loggers and `trainer.precision` show.
    precision: Any = "fp8-rocm"

    def __init__(
        self,
        recipe: RecipeName | Literal["auto"] | FP8Recipe | Any = "auto",
        include: list[str] | None = None,
        exclude: list[str] | None = None,
        skip_small: Literal["auto"] | bool = "auto",
        weights_dtype: WeightsDtype = "float32",
        compute_dtype: Literal["bfloat16"] = "bfloat16",
        fp8_format: Literal["auto"] | FP8Format = "auto",
        on_unsupported: OnUnsupported = "error",
    ) -> None:
        # torchao's config is known by where its class comes from: importing torchao to ask is too early here.
        if not isinstance(recipe, FP8Recipe) and not type(recipe).__module__.startswith("torchao."):
            also = " An `FP8Recipe` or a torchao `Float8LinearConfig` is taken as well."
            _check("recipe", recipe, ("auto", *RECIPE_NAMES), also)
        fp16 = " FP8 products need the range of bf16; fp16 would need loss scaling."
        _check("weights_dtype", weights_dtype, get_args(WeightsDtype), fp16 if "16" in str(weights_dtype) else "")
        _check("compute_dtype", compute_dtype, ("bfloat16",), fp16 if "16" in str(compute_dtype) else "")
        _check("skip_small", skip_small, ("auto", True, False))
        _check("fp8_format", fp8_format, ("auto", *get_args(FP8Format)))
        _check("on_unsupported", on_unsupported, get_args(OnUnsupported))
        self.recipe = recipe
        self.include = check_patterns("FP8Precision", "include", include)
        self.exclude = check_patterns("FP8Precision", "exclude", exclude)
        self.skip_small = skip_small
        self.weights_dtype, self.compute_dtype = weights_dtype, compute_dtype
        self.fp8_format, self.on_unsupported = fp8_format, on_unsupported
        self.report: ConversionReport | None = None
        """What was converted and why the rest was not; None before setup, and where training fell back to bf16."""
        self._undo: list[Callable[[], None]] = []
        self._watches: list[_UncalledLayers] = []
        self._device_type = "cpu"

    # ---- what a flavour says

    def _devices_of(self, module: nn.Module) -> list[torch.device]:
        """The devices of this host that the run uses, the one that will hold ``module`` first."""
        raise NotImplementedError

    def _compiled_by_strategy(self, module: nn.Module) -> bool:
        """Whether our strategy compiles the layers of ``module``, with the options that the recipe needs."""
        return False

    # ---- hooks of Lightning's Precision, in the order of a run

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the linear layers of ``module`` in place; called by the strategy, before it moves the module."""
        devices = self._devices_of(module)
        self._device_type = devices[0].type
        found = [hardware.of_device(device) for device in devices]
        for caution in dict.fromkeys(each.caution for each in found if each.caution):
            rank_zero_warn(caution)
        fp8_format = self._format_on(found)
        if fp8_format is not None:
            self._convert_layers(module, fp8_format, devices[0], found[0])
        self._cast_weights(module)  # last: bad arguments are refused before a weight is rounded
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast to bf16 around a step where the masters are fp32; nothing where the module itself is bf16."""
        if self.weights_dtype == "bfloat16":
            return nullcontext()
        # Its cache of cast weights knows neither of an optimizer that steps within the step (manual optimization) nor
        # of a cast made under `no_grad`, which it would hand to a forward that is to train the weight.
        return torch.autocast(self._device_type, dtype=torch.bfloat16, cache_enabled=not torch.is_grad_enabled())

    def facts(self) -> dict[str, Any]:
        """What a checkpoint says of FP8, in plain values: recipe, format and the names of the layers."""
        if self.report is None:
            return {}
        recipe = self.report.recipe
        layers = [plain_name(layer.name) for layer in self.report.converted]
        return {"fp8": {"recipe": str(recipe.name), "format": str(recipe.fp8_format), "layers": layers}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put :meth:`facts` into a checkpoint, also of Lightning's own strategies."""
        facts = self.facts()
        if facts:
            checkpoint[OWN_KEY] = {**checkpoint.get(OWN_KEY, {}), **facts}

    def teardown(self) -> None:
        """Give every layer the class that it had before: a second Trainer over the module runs what it says."""
        for watch in self._watches:
            watch.speak()
        self._watches.clear()
        while self._undo:
            self._undo.pop()()

    # ---- how

    def _convert_layers(
        self, module: nn.Module, fp8_format: FP8Format | Literal["auto"], device: torch.device, on: Hardware
    ) -> None:
        from lightning_fp8_rocm.float8.convert import convert, revert
        from lightning_fp8_rocm.float8.linear import FP8Linear

        # The user converted these himself.
        own: dict[nn.Module, FP8Recipe] = {
            layer: layer.fp8_recipe for layer in module.modules() if isinstance(layer, FP8Linear)
        }
        report = convert(
            module,
            self.recipe,
            include=self.include,
            exclude=self.exclude,
            skip_small=self.skip_small,
            fp8_format=fp8_format,
            device=device,
        )
        self._undo.append(lambda: revert(module, keep=own))
        if report.recipe.row_scaled and not self._compiled_by_strategy(module):
            self._undo.append(_emulate_precision_casts())
        if report != self.report:
            self.report = report
            _show(report, on)
        self._watches.append(_UncalledLayers(module, report))

    def _format_on(self, found: list[Hardware]) -> FP8Format | Literal["auto"] | None:
        """The format to ask of ``convert``; None to train in bf16 instead, as the user chose."""
        native = hardware.shared_format(found)
        if native is not None or found[0] == hardware.CPU:
            return self.fp8_format
        if self.on_unsupported == "error":
            raise RuntimeError(found[0].no_fp8_reason())
        if self.on_unsupported == "bf16":
            rank_zero_warn(
                f"{found[0].name} ({found[0].arch}) has no FP8 matrix products: this run is in bf16, as"
                ' `on_unsupported="bf16"` says.'
            )
            return None
        return "ocp" if self.fp8_format == "auto" else self.fp8_format

    def _cast_weights(self, module: nn.Module) -> None:
        if self.weights_dtype == "bfloat16":
            module.to(torch.bfloat16)
            # A bf16 layer takes what the dataloader made; the batch itself stays as it was, targets and all. The module
            # that the steps belong to is left out for that.
            for layer in module.modules():
                if layer is not module and next(layer.parameters(recurse=False), None) is not None:
                    handle = layer.register_forward_pre_hook(_cast_floats_to_bf16, with_kwargs=True)
                    self._undo.append(handle.remove)
            return
        module._apply(_to_master)  # type: ignore[no-untyped-call]


def _to_master(tensor: Tensor) -> Tensor:
    """A trainable parameter in fp32. Frozen ones are no masters: an upcast would double the memory of a LoRA base."""
    is_narrow = tensor.dtype in (torch.bfloat16, torch.float16)
    return (
        tensor.to(torch.float32) if is_narrow and isinstance(tensor, nn.Parameter) and tensor.requires_grad else tensor
    )


def _cast_floats_to_bf16(layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return tuple(_to_bf16(arg) for arg in args), {name: _to_bf16(arg) for name, arg in kwargs.items()}


def _to_bf16(value: Any) -> Any:
    is_wider = isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float16)
    return value.to(torch.bfloat16) if is_wider else value


def _emulate_precision_casts() -> Callable[[], None]:
    """Let inductor round where eager does, which row scales need (docs/upstream.md); returns what undoes it.

    With one scale a tensor the difference is of the same kind and smaller, and the fusions of the default are kept.
    """
    import torch._inductor.config as inductor

    before = inductor.emulate_precision_casts
    inductor.emulate_precision_casts = True

    def undo() -> None:
        inductor.emulate_precision_casts = before

    return undo


@rank_zero_only
def _show(report: "ConversionReport", on: Hardware) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    from rich.console import Console

    console = Console()
    console.print(report)
    if report.recipe.emulate:
        console.print(
            f"FP8 is emulated on {on.name}: the numerics of {report.recipe.fp8_format} FP8, slower than bf16.",
            highlight=False,
        )


class _UncalledLayers:
    """Finds the layers that a report calls FP8 and that the first training step did not call.

    Their weights are read past their forward, or they are not used. In eager mode a layer notes its call. Compiled code
    does not; there, a weight that got a gradient was used, and of a frozen one nothing is known.
    """

    def __init__(self, module: nn.Module, report: "ConversionReport") -> None:
        modules = dict(module.named_modules())
        self._module = module
        self._uncalled = {layer.name: modules[layer.name] for layer in report.converted}
        self._is_compiled = any(_is_compiled(child) for child in modules.values())
        self._traces_before = self._traces()
        self._any_called = False
        self._steps = 0

    def step_begins(self) -> None:
        """Before the first step, forget what a validation called; before a later one, speak of the first."""
        if self._steps == 0:
            for layer in self._uncalled.values():
                layer.__dict__.pop("_fp8_called", None)
        elif self._uncalled and self._did_something():
            self.speak()

    def step_ended(self) -> None:
        """Count a step that came through."""
        self._steps += 1

    def note(self) -> None:
        """Strike off the layers that were called."""
        before = len(self._uncalled)
        self._uncalled = {name: layer for name, layer in self._uncalled.items() if not self._was_called(layer)}
        self._any_called |= len(self._uncalled) < before

    def speak(self) -> None:
        """Warn once, if a step was made; then never again."""
        if self._steps == 0:
            return
        self.note()
        names, self._uncalled = ", ".join(repr(name) for name in self._uncalled), {}
        if names:
            rank_zero_warn(
                f"The report calls FP8 what the first step did not call: {names}. Either the step does not use these"
                " layers, or something reads their weight past their forward (`F.linear(x, layer.weight)`), and that"
                " product is not FP8. Name them in `exclude` if that is meant."
            )

    def _did_something(self) -> bool:
        """Whether a step trained this module: a step may skip its batch, or belong to another network."""
        self.note()
        return self._any_called or any(p.grad is not None for p in self._module.parameters())

    def _was_called(self, layer: nn.Module) -> bool:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        in_compiled_code = self._is_compiled or self._traces() > self._traces_before
        return bool(vars(layer).get("_fp8_called")) or (
            in_compiled_code and (weight.grad is not None or not weight.requires_grad)
        )

    @staticmethod
    def _traces() -> int:
        from lightning_fp8_rocm.float8.linear import FP8Linear

        return FP8Linear.traces


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was asked for this module: in place, wrapped, or by Lightning."""
    wrapped = type(module).__name__ == "OptimizedModule" or getattr(module, "_compiler_ctx", None) is not None
    return wrapped or module._compiled_call_impl is not None


# ---------------------------------------------------------------------------------------------------------------------
# The strategy

_STRATEGY = "FSDP2FP8Strategy"
_FSDP1 = {
    "accelerator": "`Trainer(accelerator=...)`",
    "parallel_devices": "`Trainer(devices=...)`",
    "cluster_environment": "`Trainer(plugins=[...])`",
    "checkpoint_io": "nothing: checkpoints are written by torch.distributed.checkpoint",
    "precision_plugin": "`Trainer(precision=...)` or `Trainer(plugins=[FP8Precision(...)])`",
    "mixed_precision": "`Trainer(precision=...)`, and `reduce_dtype` for the dtype in which gradients are reduced",
    "activation_checkpointing": "`activation_checkpointing_policy`",
    "sharding_strategy": "`reshard_after_forward=True` (FULL_SHARD), `reshard_after_forward=False` (SHARD_GRAD_OP),"
    " `device_mesh=(replicate, shard)` (HYBRID_SHARD), or `strategy='ddp'` (NO_SHARD)",
    "limit_all_gathers": "nothing: FSDP2 always limits them",
    "use_orig_params": "nothing: FSDP2 always keeps the original parameters",
    "sync_module_states": "nothing: every rank starts with the values of rank 0",
    "param_init_fn": "a method `reset_parameters()` on modules that are built on the `meta` device",
    "ignored_modules": "nothing: a parameter outside FSDP2 would diverge; freeze it instead",
    "ignored_states": "nothing: a parameter outside FSDP2 would diverge; freeze it instead",
    "ignored_params": "nothing: a parameter outside FSDP2 would diverge; freeze it instead",
    "ignored_parameters": "nothing: a parameter outside FSDP2 would diverge; freeze it instead",
    "device_id": "`Trainer(accelerator=..., devices=...)`",
    "process_group": "`device_mesh`",
    "mesh": "`device_mesh`",
    "dp_mesh_dims": "`device_mesh`",
    "mp_policy": "`Trainer(precision=...)`, and `reduce_dtype` for the dtype in which gradients are reduced",
    "offload_policy": "`cpu_offload`",
    "shard_placement_fn": "nothing: the rows of a weight lie whole on one rank, which row scales need",
    "use_fp8_all_gather": "`fp8_all_gather`",
    "save_distributed_checkpoint": "`state_dict_type`",
    "data_parallel_size": "`device_mesh=(replicate, shard)`",
    "tensor_parallel_size": "nothing: tensor parallelism is not supported",
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

ReduceDtype = Literal["float32", "bfloat16"]
GradientSync = Literal["last", "every"]
StateDictType = Literal["sharded", "full"]


@dataclass(frozen=True)
class ShardingReport:
    """What :class:`FSDP2StrategyMixin` made of a model.

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


class FSDP2StrategyMixin:
    """FSDP2 for any module, with the weights of FP8 layers gathered in FP8.

    The precision is the Trainer's: ``"fp8-rocm"`` for FP8, ``"bf16-mixed"``, ``"bf16-true"`` or ``"32-true"`` for the
    same sharding without it. Constructing it asks no device and imports no torchao.

    Args:
        auto_wrap_policy: Which modules are gathered and freed together. ``"auto"``: the blocks of a model
            (``_no_split_modules`` of a Hugging Face model, else the entries of each repeated ``ModuleList``); a
            collection of classes or class names; or a function from a module to a bool. Direct children of the
            module that hold further parameters are units besides.
        activation_checkpointing_policy: What is recomputed in backward. ``"full"``: the blocks; ``"selective"``: the
            blocks, but for every second matrix product, attention and the amaxes; or classes or class names.
        fp8_all_gather: Whether the weights of FP8 layers travel in FP8. ``"auto"``: where the recipe allows;
            ``True``: an error where it does not.
        device_mesh: ``(replicate, shard)``: each ``shard`` ranks hold one copy of the model (HSDP). None: all ranks
            together hold one.
        reshard_after_forward: Whether gathered parameters are freed between forward and backward. None is torch's own
            choice: all but the outermost unit's.
        reduce_dtype: In which gradients are summed over ranks.
        cpu_offload: Keep shards, gradients and optimizer states in the host's memory.
        compile: Compile each block with ``torch.compile``. ``"auto"``: on GPUs; or the arguments of ``torch.compile``.
        gradient_sync: Under ``accumulate_grad_batches``, reduce gradients at the ``"last"`` batch alone (keeps whole
            gradients until then), or at ``"every"`` one (keeps shards).
        forward_prefetch: How many blocks ahead parameters are gathered in forward; None is torch's own.
        backward_prefetch: The same in backward.
        find_unused_parameters: For models whose ranks use different parameters of a unit (experts): reduce zeros for
            those without a gradient. Optimizers then see a zero gradient, not None, for what no rank used. Without it,
            such a model is an error, which is looked for in the first steps and every 100.
        state_dict_type: ``"sharded"``: a checkpoint is a directory to which each rank writes its part. ``"full"``: one
            file, as on one device.
        async_checkpoint: Whether training goes on while a checkpoint is written. It waits only until its copy in memory
            of the host is made; the next checkpoint, the end of training and an exception wait for the writing.
        process_group_backend: ``"nccl"`` (RCCL) on GPUs and ``"gloo"`` on CPUs by default.
        timeout: After which a collective that a rank does not join is an error.

    Raises:
        TypeError: For an argument that FSDP2 does not have, naming what to use instead.
        ValueError: For a value that is not allowed.
    """

    def __init__(
        self,
        auto_wrap_policy: AutoWrapPolicy,
        activation_checkpointing_policy: Any,
        fp8_all_gather: Literal["auto"] | bool,
        device_mesh: tuple[int, int] | None,
        reshard_after_forward: bool | None,
        reduce_dtype: ReduceDtype,
        cpu_offload: bool,
        compile: Literal["auto"] | bool | dict[str, Any],
        gradient_sync: GradientSync,
        forward_prefetch: int | None,
        backward_prefetch: int | None,
        find_unused_parameters: bool,
        state_dict_type: StateDictType,
        async_checkpoint: bool,
        others: Mapping[str, Any],
    ) -> None:
        known = [name for name in inspect.signature(type(self)).parameters if name != "others"]
        for name in others:
            raise TypeError(
                f"{_STRATEGY} has no argument `{name}`. Use {_FSDP1[name]} instead."
                if name in _FSDP1
                else f"{_STRATEGY} got an unexpected argument `{name}`. It has {', '.join(map(repr, known))}."
            )
        _check_policies(auto_wrap_policy, activation_checkpointing_policy)
        check = _for_strategy
        check("fp8_all_gather", fp8_all_gather, ("auto", True, False))
        smaller = isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool)
        hint = " Resharding to a smaller group of ranks does not work with weights gathered in FP8." if smaller else ""
        check("reshard_after_forward", reshard_after_forward, (None, True, False), hint)
        check("reduce_dtype", reduce_dtype, get_args(ReduceDtype))
        check("cpu_offload", cpu_offload, (True, False))
        if not isinstance(compile, dict):
            check(
                "compile", compile, ("auto", True, False), " A dict of arguments of `torch.compile` is taken as well."
            )
        check("gradient_sync", gradient_sync, get_args(GradientSync))
        check("find_unused_parameters", find_unused_parameters, (True, False))
        check("state_dict_type", state_dict_type, get_args(StateDictType))
        check("async_checkpoint", async_checkpoint, (True, False))
        for name, depth in (("forward_prefetch", forward_prefetch), ("backward_prefetch", backward_prefetch)):
            if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 0):
                raise ValueError(
                    f"Expected argument `{name}` of {_STRATEGY} to be None or a number of blocks >= 0,"
                    f" but got {depth!r}."
                )
        self.auto_wrap_policy = auto_wrap_policy
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.fp8_all_gather = fp8_all_gather
        self.mesh_sizes = _check_mesh(device_mesh)
        self.reshard_after_forward, self.reduce_dtype, self.cpu_offload = (
            reshard_after_forward,
            reduce_dtype,
            cpu_offload,
        )
        self.compile, self.gradient_sync = compile, gradient_sync
        self.forward_prefetch, self.backward_prefetch = forward_prefetch, backward_prefetch
        self.find_unused_parameters = find_unused_parameters
        self.state_dict_type, self.async_checkpoint = state_dict_type, async_checkpoint
        self.report: ShardingReport | None = None
        """Units and bytes; None before setup."""
        self._mesh: Any = None
        self._gathers: FP8AllGather | None = None
        self._undo: list[Callable[[], None]] = []
        self._trainable: tuple[bool, ...] = ()
        self._units: list[nn.Module] = []
        self._groups: list[fsdp.Group] = []
        self._backwards, self._reduces = 0, True

    # ---- setup

    def compiles_on(self, device: torch.device) -> bool:
        """Whether blocks are compiled there."""
        return device.type == "cuda" if self.compile == "auto" else self.compile is not False

    def shard_module(
        self,
        root: nn.Module,
        convert: Callable[[nn.Module], nn.Module],
        *,
        device: torch.device,
        param_dtype: torch.dtype | None,
        manual_optimization: bool,
    ) -> nn.Module:
        """Convert, materialise, checkpoint, compile and shard ``root``, in that order.

        What has been sharded before, by an earlier stage or by the user, is left as it is.
        """
        from lightning_fp8_rocm.float8.linear import FP8Linear

        with raise_together("the setup of the model"):
            root = convert(root)
            planned = units.plan_units(root, self.auto_wrap_policy)
            units.check_parameters(root, planned, manual_optimization=manual_optimization)
            check_materialisable(root)
            plan = sharding.ShardingPlan(
                mesh=fsdp.mesh_of(root) or self._mesh,
                device=device,
                param_dtype=param_dtype,
                reduce_dtype=_DTYPES[self.reduce_dtype],
                reshard_after_forward=self.reshard_after_forward,
                cpu_offload=self.cpu_offload,
            )
            sharding.check_sharded_before(planned, plan)
        recipes = {layer.fp8_recipe for layer in root.modules() if isinstance(layer, FP8Linear)}
        same_on_all_ranks(sorted(recipe.describe() for recipe in recipes), "the FP8 recipe and format")
        with raise_together("the setup of the model"):
            if self.activation_checkpointing_policy is not None:
                self._undo.append(sharding.checkpoint_activations(planned, root, self.activation_checkpointing_policy))
            blocks = [unit for unit in planned if unit.kind == "block"]
            if self.compiles_on(device) and (blocks or self.compile != "auto"):
                options = self.compile if isinstance(self.compile, dict) else {}
                rows = any(recipe.row_scaled for recipe in recipes)
                self._undo.append(sharding.compile_blocks(planned, options, emulate_precision_casts=rows))
        sharding.shard(planned, plan)
        sharding.move_others(root, device)
        self._undo.append(sharding.cast_inputs_of_layers(root))
        if self.forward_prefetch is not None or self.backward_prefetch is not None:
            sharding.prefetch(planned, self.forward_prefetch, self.backward_prefetch)
        fsdp.reduce_unused(root, self.find_unused_parameters)
        fsdp.initialise(root)
        self._units, self._groups = list(fsdp.units(root).values()), list(fsdp.groups(root))
        with raise_together("the setup of the model"):
            self._mark(root, recipes)
        self.report = self._describe(root)
        return root

    def activate_methods(self, root: nn.Module, *, manual_optimization: bool) -> None:
        """Let methods gather parameters, from now until :meth:`release`; during setup they are what the user wrote."""
        for module in fsdp.units(root).values():
            if module._compiled_call_impl is not None:
                continue  # its methods are traced within its forward
            self._undo.append(methods.gather_in_methods(module))
            self._undo.append(module.register_forward_pre_hook(self._before_forward, prepend=True).remove)
        # Under manual optimization the root owns nothing that a training step could read. Were the step a forward of
        # it, units would be gathered without waiting for the optimizer that stepped within it.
        steps = [name for name in methods.STEPS if not manual_optimization or name != "training_step"]
        self._undo.append(methods.gather_in_methods(root, steps))

    def release(self) -> None:
        """Undo all but the sharding, which lasts: another Trainer over the module does what that one says."""
        if self._gathers is not None:
            self._gathers.unmark()
            self._gathers = None
        while self._undo:
            self._undo.pop()()
        self._units, self._groups = [], []

    def _mark(self, root: nn.Module, recipes: "set[FP8Recipe]") -> None:
        from lightning_fp8_rocm.distributed.all_gather import FP8AllGather

        if self.fp8_all_gather is False or not recipes:
            return
        self._gathers = FP8AllGather(root)
        refused = {name: why for name, why in self._gathers.in_bf16.items() if "nothing is gathered" not in why}
        if self.fp8_all_gather is True and refused:
            listed = "; ".join(f"{name!r}: {why}" for name, why in refused.items())
            raise ValueError(
                f"`fp8_all_gather=True`, but these weights cannot travel in FP8: {listed}. Choose another recipe, or"
                " `fp8_all_gather='auto'` to gather those in bf16."
            )

    def _describe(self, root: nn.Module) -> ShardingReport:
        in_fp8 = set(self._gathers.names) if self._gathers is not None else set()
        owners = {id(module): name for name, module in root.named_modules()}
        moved = in_bf16 = 0
        for group in fsdp.groups(root):
            for param in group.fsdp_params:
                usual, fp8 = fsdp.gathered_bytes(param)
                in_bf16 += usual
                is_fp8 = owners.get(id(fsdp.owner(param))) in in_fp8 and fsdp.name_of(param) == "weight"
                moved += fp8(self._gathers.is_row_scaled) if is_fp8 and self._gathers is not None else usual
        mesh = fsdp.mesh_of(root)
        return ShardingReport(
            units=tuple(name or "(root)" for name in reversed(fsdp.units(root))),
            ranks=tuple(mesh.shape) if mesh is not None else (1,),
            fp8_weights=len(in_fp8),
            gathered_bytes=moved,
            bf16_bytes=in_bf16,
            in_bf16=dict(self._gathers.in_bf16) if self._gathers is not None else {},
        )

    # ---- while a stage runs

    @contextmanager
    def step_of(self, root: nn.Module, *, weights_change: bool, trains: bool) -> Iterator[None]:
        """The span of one step: everything is sharded when it begins, and scales are fresh."""
        # A forward without a backward leaves the outermost unit gathered, with the weights of then.
        fsdp.reshard_units(self._units)
        if trains:
            self._follow_frozen(root)
        gathers = self._gathers
        with nullcontext() if gathers is None else gathers.step(weights_change=weights_change):
            yield

    def after_optimizer_step(self) -> None:
        """Nothing that was gathered or cast before counts any more."""
        fsdp.reshard_units(self._units)
        if self._gathers is not None:
            self._gathers.forget()

    @contextmanager
    def without_gradient_sync(self, root: Any) -> Iterator[None]:
        """Backward passes within it add to whole gradients, which are reduced after it."""
        if self.gradient_sync == "every":
            yield
            return
        root.set_requires_gradient_sync(False)
        self._reduces = False
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)
            self._reduces = True

    def after_backward(self, root: nn.Module) -> None:
        """Refuse gradients of different parameters, which FSDP2 adds up; asked now and then, for it waits for the GPU.

        Raises:
            RuntimeError: On every rank, naming the parameters.
        """
        if self.find_unused_parameters or not self._reduces:
            return
        self._backwards += 1
        if self._backwards % 100 == 0 or self._backwards & (self._backwards - 1) == 0:
            names = fsdp.unequal_gradients(root)
            if names:
                raise RuntimeError(
                    "Some ranks have a gradient for these parameters and others have not:"
                    f" {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}. FSDP2 would add up gradients of"
                    " different parameters. Use all parameters of a unit on every rank, or pass"
                    f" `{_STRATEGY}(find_unused_parameters=True)`."
                )

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        """A hook of the user may call a unit at any time, also after the marks were dropped."""
        if self._gathers is not None and not self._gathers.is_stepping:  # a step has marked all
            self._gathers.mark()

    def _follow_frozen(self, root: nn.Module) -> None:
        """FSDP2 reads once which parameters are trained; callbacks freeze and thaw them."""
        now = tuple(param.sharded_param.requires_grad for group in self._groups for param in group.fsdp_params)
        if self._trainable and now != self._trainable:
            fsdp.follow_frozen(root)
        self._trainable = now


def _for_strategy(argument: str, value: object, allowed: Sequence[object], hint: str = "") -> None:
    _check(argument, value, allowed, hint, owner=_STRATEGY)


def _check_policies(auto_wrap: object, checkpointing: object) -> None:
    def are_classes(value: object) -> bool:
        return (
            isinstance(value, set | frozenset | list | tuple)
            and len(value) > 0
            and all(
                isinstance(entry, str) or (isinstance(entry, type) and issubclass(entry, nn.Module)) for entry in value
            )
        )

    is_function = callable(auto_wrap) and not isinstance(auto_wrap, type | nn.Module)
    if auto_wrap != "auto" and not are_classes(auto_wrap) and not is_function:
        raise TypeError(
            f"Expected argument `auto_wrap_policy` of {_STRATEGY} to be 'auto', a set of module classes or class names,"
            f" or a function that takes a module and returns a bool, but got {auto_wrap!r}."
        )
    if checkpointing not in (None, "full", "selective") and not are_classes(checkpointing):
        raise TypeError(
            f"Expected argument `activation_checkpointing_policy` of {_STRATEGY} to be None, 'full', 'selective', or a"
            f" set of module classes or class names, but got {checkpointing!r}."
        )


def _check_mesh(sizes: object) -> tuple[int, int] | None:
    if sizes is None:
        return None
    if (
        not isinstance(sizes, tuple | list)
        or len(sizes) != 2
        or not all(type(size) is int and size > 0 for size in sizes)
    ):
        raise ValueError(
            f"Expected argument `device_mesh` of {_STRATEGY} to be None or a pair (replicate, shard) of numbers of"
            f" ranks, but got {sizes!r}."
        )
    return sizes[0], sizes[1]


def check_process_group(backend: object, timeout: object) -> None:
    """Refuse what `init_process_group` would only refuse on every rank, after the launch."""
    if backend is not None and (not isinstance(backend, str) or not backend):
        raise TypeError(
            f"Expected argument `process_group_backend` of {_STRATEGY} to be None or the name of a backend ('nccl',"
            f" 'gloo', 'cpu:gloo,cuda:nccl'), but got {backend!r}."
        )
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(
            f"Expected argument `timeout` of {_STRATEGY} to be None or a `datetime.timedelta`, but got {timeout!r}."
        )


def set_environment(on: Hardware) -> dict[str, str]:
    """Set what AMD advises for ``on``, where the user has not; before the process group starts.

    Returns:
        The variables that were set.
    """
    made = {name: value for name, value in on.environment().items() if name not in os.environ}
    os.environ.update(made)
    if made:
        shown = " ".join(f"{name}={value}" for name, value in made.items())
        say(f"Environment for {on.name} ({on.arch}), where it was not set: {shown}")
    return made


@rank_zero_only
def say(line: str) -> None:
    """One line on rank 0, unless the user turned this package's logger down."""
    if log.isEnabledFor(logging.INFO):
        from rich.console import Console

        Console().print(line, highlight=False, soft_wrap=True)
