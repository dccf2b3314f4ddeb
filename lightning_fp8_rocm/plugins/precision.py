"""What our Precision does, written once for every flavour of Lightning.

What runs the module differs: see ``trainer.py`` and ``fabric.py``.

No Lightning is imported, nor torchao: constructing a plugin is too early for that.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor, nn

from lightning_fp8_rocm import hardware
from lightning_fp8_rocm.distributed.storage import OWN_KEY, plain_name
from lightning_fp8_rocm.distributed.units import has_steps
from lightning_fp8_rocm.float8.recipe import RECIPE_NAMES, FP8Recipe, RecipeName, check_patterns, choice_error
from lightning_fp8_rocm.hardware import FP8Format, Hardware
from lightning_fp8_rocm.plugins.console import log

if TYPE_CHECKING:
    # Annotations of these are quoted: see recipe.py.
    from lightning_fp8_rocm.float8.convert import ConversionReport

OnUnsupported = Literal["error", "bf16", "emulate"]
WeightsDtype = Literal["float32", "bfloat16"]


def check_choice(
    argument: str, value: object, allowed: Sequence[object], hint: str = "", owner: str = "FP8Precision"
) -> None:
    """Refuse a value that is none of ``allowed``; True is not 1 here.

    Raises:
        ValueError: Naming the argument, the value and what is allowed.
    """
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
            check_choice("recipe", recipe, ("auto", *RECIPE_NAMES), also)
        fp16 = " FP8 products need the range of bf16; fp16 would need loss scaling."
        check_choice("weights_dtype", weights_dtype, get_args(WeightsDtype), fp16 if "16" in str(weights_dtype) else "")
        check_choice("compute_dtype", compute_dtype, ("bfloat16",), fp16 if "16" in str(compute_dtype) else "")
        check_choice("skip_small", skip_small, ("auto", True, False))
        check_choice("fp8_format", fp8_format, ("auto", *get_args(FP8Format)))
        check_choice("on_unsupported", on_unsupported, get_args(OnUnsupported))
        self.recipe = recipe
        self.include = check_patterns("FP8Precision", "include", include)
        self.exclude = check_patterns("FP8Precision", "exclude", exclude)
        self.skip_small = skip_small
        self.weights_dtype, self.compute_dtype = weights_dtype, compute_dtype
        self.fp8_format, self.on_unsupported = fp8_format, on_unsupported
        self.report: ConversionReport | None = None
        """What was converted and why the rest was not; None before setup, and where training fell back to bf16."""
        self._undo: list[Callable[[], None]] = []
        self._watches: list[UncalledLayers] = []
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
        # Weakly: with Fabric nothing ends a run, and models come and go.
        converted, own_recipes = weakref.ref(module), WeakKeyDictionary(own)

        def undo() -> None:
            there = converted()
            if there is not None:
                revert(there, keep=dict(own_recipes))

        self._undo.append(undo)
        if report.recipe.row_scaled and not self._compiled_by_strategy(module):
            self._undo.append(_emulate_precision_casts())
        if report != self.report:
            self.report = report
            _show(report, on)
        self._watches.append(UncalledLayers(module, report))

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
            # A bf16 layer takes what the dataloader made; the batch itself stays as it was, targets and all. A
            # LightningModule, whose steps get it, is left out for that.
            for layer in module.modules():
                if (
                    not (layer is module and has_steps(module))
                    and next(layer.parameters(recurse=False), None) is not None
                ):
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
    if not console.is_terminal:
        console = Console(width=200)  # a log has no width, and names of layers are looked for in it
    console.print(report)
    if report.recipe.emulate:
        console.print(
            f"FP8 is emulated on {on.name}: the numerics of {report.recipe.fp8_format} FP8, slower than bf16.",
            highlight=False,
        )


class UncalledLayers:
    """Finds the layers that a report calls FP8 and that the first training step did not call.

    Their weights are read past their forward, or they are not used. In eager mode a layer notes its call. Compiled code
    does not; there, a weight that got a gradient was used, and of a frozen one nothing is known.
    """

    def __init__(self, module: nn.Module, report: "ConversionReport") -> None:
        modules = dict(module.named_modules())
        self._module = weakref.ref(module)
        self._uncalled = {layer.name: weakref.ref(modules[layer.name]) for layer in report.converted}
        self._is_compiled = any(_is_compiled(child) for child in modules.values())
        self._traces_before = self._traces()
        self._any_called = False
        self._steps = 0

    def step_begins(self) -> None:
        """Before the first step, forget what a validation called; before a later one, speak of the first."""
        if self._steps == 0:
            for reference in self._uncalled.values():
                layer = reference()
                if layer is not None:
                    vars(layer).pop("_fp8_called", None)
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
        module = self._module()
        return self._any_called or module is None or any(p.grad is not None for p in module.parameters())

    def _was_called(self, reference: "weakref.ref[nn.Module]") -> bool:
        layer = reference()
        if layer is None:
            return True  # it is gone, and nobody can look at it any more
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
