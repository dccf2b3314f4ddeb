"""Which linear layers become FP8, and why the others do not; and back.

Choosing is apart from changing: :func:`survey` reads, :func:`convert` changes classes, :func:`revert` undoes that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lightning_fp8_rocm import hardware
from lightning_fp8_rocm.float8.linear import FP8Linear
from lightning_fp8_rocm.float8.quantize import ALIGNMENT
from lightning_fp8_rocm.float8.recipe import FP8Recipe, RecipeName, check_patterns, resolve_recipe
from lightning_fp8_rocm.hardware import FP8Format
from lightning_fp8_rocm.versions import check_installed

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from torchao.float8 import Float8LinearConfig

SkipSmall = Literal["auto"] | bool

_ENCODER_FAST_PATH: tuple[tuple[type[nn.Module], str, object], ...] = (
    # In eval the layer reads its children's weights past their forward, in one fused kernel, and the encoder makes a
    # nested tensor of a padded batch, which no FP8 product takes. Each asks a flag first that nothing else reads.
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)


@dataclass(frozen=True)
class LayerReport:
    """What became of one weight matrix.

    Args:
        name: Fully-qualified name of the module.
        kind: Class of the module, as the user wrote it.
        out_features: N.
        in_features: K.
        reason: Why it is not FP8; None if it is.
        pattern: The name with each index into a list of modules replaced by ``*``.
    """

    name: str
    kind: str
    out_features: int
    in_features: int
    reason: str | None = None
    pattern: str = ""

    @property
    def is_fp8(self) -> bool:
        """Whether its products run in FP8."""
        return self.reason is None

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one token in the forward: ``N * K``."""
        return self.out_features * self.in_features


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` did, weight matrix by weight matrix.

    Args:
        recipe: The recipe with its format decided.
        layers: One entry for each 2-dimensional weight outside embeddings, in the order of registration.
        uncounted: Names of modules whose weights are not a matrix used once a token (convolutions, fused experts); they
            are outside :attr:`fp8_share`.
    """

    recipe: FP8Recipe
    layers: tuple[LayerReport, ...]
    uncounted: tuple[str, ...] = field(default=())

    @property
    def converted(self) -> list[LayerReport]:
        """The layers that run in FP8."""
        return [layer for layer in self.layers if layer.is_fp8]

    @property
    def left_out(self) -> list[LayerReport]:
        """The layers that do not, each with its reason."""
        return [layer for layer in self.layers if not layer.is_fp8]

    @property
    def fp8_share(self) -> float:
        """Share of the weights' multiply-adds that is FP8, 0 to 1: each layer once a token, attention not counted."""
        total = sum(layer.multiply_adds for layer in self.layers)
        return sum(layer.multiply_adds for layer in self.converted) / total if total else 0.0

    @property
    def fp8_percent(self) -> str:
        """That share for a person, rounded down: what is not all of it is never called 100 %."""
        return _percent(self.fp8_share)

    def title(self) -> str:
        """Recipe and format in a line."""
        emulated = ", emulated" if self.recipe.emulate else ""
        return f"FP8 conversion: recipe {self.recipe.name}, format {self.recipe.fp8_format}{emulated}"

    def caption(self) -> str:
        """What the share means, in one or two sentences."""
        text = (
            f"{len(self.converted)} of {len(self.layers)} weight matrices and {self.fp8_percent} of the"
            " weights' multiply-adds run in FP8 (each layer counted once a token; attention products not counted)."
        )
        if self.uncounted:
            shown, more = ", ".join(self.uncounted[:3]), ", ..." if len(self.uncounted) > 3 else ""
            text += f" Not counted either: {len(self.uncounted)} modules without a plain matrix ({shown}{more})."
        return text

    def table(self) -> Table:
        """The layers as a ``rich`` table; those that differ only in an index share a row."""
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("layer", overflow="fold")
        table.add_column("count", justify="right", no_wrap=True)
        table.add_column("out x in", justify="right", no_wrap=True)
        table.add_column("FP8", min_width=20)
        for name, layers in _grouped(self.layers):
            first = layers[0]
            shape = f"{first.out_features} x {first.in_features}"
            verdict = "[green]yes[/]" if first.is_fp8 else f"[yellow]no[/]: {escape(first.reason or '')}"
            table.add_row(escape(name), str(len(layers)), shape, verdict)
        return table

    def __rich__(self) -> Group:
        """Title, table and what the share means, for ``rich.print(report)``."""
        from rich.console import Group
        from rich.text import Text

        return Group(Text(self.title(), style="bold"), self.table(), Text(self.caption()))

    def __str__(self) -> str:
        return f"{self.title()}\n{self.caption()}"


def _percent(share: float) -> str:
    """Rounded down: what is not all of it is never called 100 %.

    >>> _percent(0.99996), _percent(1.0)
    ('99.9 %', '100.0 %')
    """
    return f"{math.floor(1000 * share) / 10:.1f} %"


def _grouped(layers: Iterable[LayerReport]) -> list[tuple[str, list[LayerReport]]]:
    groups: dict[tuple[str, int, int, str | None], list[LayerReport]] = {}
    for layer in layers:
        key = (layer.pattern or layer.name, layer.out_features, layer.in_features, layer.reason)
        groups.setdefault(key, []).append(layer)
    return [(key[0] if len(group) > 1 else group[0].name or "(root)", group) for key, group in groups.items()]


def _describe(name: str) -> str:
    return repr(name) if name else "the root module"


# ---------------------------------------------------------------------------------------------------------------------
# Choosing


def _matrices(module: nn.Module) -> Iterator[tuple[int, int]]:
    """``(N, K)`` of each weight matrix that ``module`` itself holds, LazyLinears and embeddings aside."""
    if isinstance(module, nn.Linear):
        yield module.out_features, module.in_features
        return
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return
    transposed = type(module).__name__ == "Conv1D"  # transformers': weight is (in, out)
    for name, parameter in module.named_parameters(recurse=False):
        if _is_initialised(parameter) and parameter.dim() == 2 and parameter.is_floating_point() and "weight" in name:
            rows, columns = parameter.shape
            yield (columns, rows) if transposed else (rows, columns)


def _is_initialised(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, nn.UninitializedParameter)


def _holds_uncounted_weights(module: nn.Module) -> bool:
    return not isinstance(module, nn.Linear) and any(
        _is_initialised(parameter) and parameter.dim() > 2 and parameter.is_floating_point()
        for parameter in module.parameters(recurse=False)
    )


def _is_block_list(module: nn.Module) -> bool:
    """Whether ``module`` is a list of at least two blocks of one class with linear layers below them."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
        return False
    first = module[0]
    return all(type(block) is type(first) for block in module) and any(
        isinstance(below, nn.Linear) for below in first.modules() if below is not first
    )


def output_heads(module: nn.Module) -> set[nn.Module]:
    """The layers that turn the last hidden state into the output, where quality suffers most from FP8.

    What ``get_output_embeddings()`` names, for each Hugging Face model inside; else, in a model with repeated blocks,
    the last linear layer registered after them. A model without blocks has none.

    >>> trunk = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))
    >>> head = nn.Linear(16, 32)
    >>> output_heads(nn.ModuleDict({"trunk": trunk, "head": head})) == {head}
    True
    """
    named: set[nn.Module] = set()
    for child in module.modules():
        ask = getattr(child, "get_output_embeddings", None)
        if callable(ask):
            try:
                head = ask()
            except (NotImplementedError, AttributeError):  # transformers: a model that has no such notion
                continue
            if isinstance(head, nn.Module):
                named.add(head)
    if named:
        return named
    last_head: nn.Module | None = None
    in_blocks: set[nn.Module] = set()
    seen_blocks = False
    for child in module.modules():
        if _is_block_list(child):
            seen_blocks, last_head = True, None
            in_blocks.update(child.modules())
        elif seen_blocks and child not in in_blocks and isinstance(child, nn.Linear):
            last_head = child
    return {last_head} if last_head is not None else set()


def _is_metric(module: nn.Module) -> bool:
    """Whether it is a ``torchmetrics.Metric``, by name: that one measures, in a precision of its own."""
    return any(base.__module__.startswith("torchmetrics.") for base in type(module).__mro__)


def _shared_weights(module: nn.Module) -> dict[int, list[str]]:
    """Names of the modules that share each parameter, by the parameter's id, where more than one does."""
    owners: dict[int, list[str]] = {}
    for name, child in module.named_modules():
        for parameter in child.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return {key: names for key, names in owners.items() if len(names) > 1}


def too_small(recipe: FP8Recipe, out_features: int, in_features: int) -> bool:
    """Whether the casts of a layer cost more than FP8 gains, by torchao's tables.

    Those were measured on an NVIDIA H100; not measured on AMD hardware. A recipe with row scales follows the table of
    ``rowwise``. Source: ``torchao.float8.float8_linear_utils``.
    """
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    with torch.device("meta"):
        layer = nn.Linear(in_features, out_features, bias=False)
    return not _auto_filter_for_recipe("rowwise" if recipe.row_scaled else "tensorwise", [])(layer, "")


def _is_sharded_class(cls: type) -> bool:
    """Whether ``fully_shard`` made it: ``(FSDPLinear, FSDPModule, Linear)``. By name, for this room knows no FSDP."""
    return len(cls.__mro__) > 2 and cls.__mro__[1].__name__ == "FSDPModule"


def _own_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user wrote, also where the module itself is sharded.

    >>> _own_class(nn.Linear(16, 16)).__name__
    'Linear'
    """
    return type(module).__mro__[2] if _is_sharded_class(type(module)) else type(module)


def _why_never(layer: nn.Linear) -> str | None:
    """Why this layer cannot be FP8, whatever the user asks; None if it can."""
    kind = _own_class(layer)
    if kind.__name__ == "NonDynamicallyQuantizableLinear":
        return "MultiheadAttention reads its weight past its forward"
    if kind is not nn.Linear and kind is not FP8Linear:
        return f"a subclass of nn.Linear ({kind.__name__}) has its own forward or weight"
    if "forward" in vars(layer):
        return "its forward is replaced on the instance"
    if layer._parameters.get("weight") is None:
        return "its weight is computed by a hook (weight_norm, spectral_norm, pruning)"
    if layer.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its weight is {str(layer.weight.dtype).removeprefix('torch.')}"
    bad = [
        f"{name} {size}"
        for name, size in (("out_features", layer.out_features), ("in_features", layer.in_features))
        if size % ALIGNMENT or size == 0
    ]
    if bad:
        return f"{' and '.join(bad)}: not a multiple of {ALIGNMENT}"
    return None


def _pattern(module: nn.Module, name: str) -> str:
    """The name with every index into a list of blocks replaced.

    >>> _pattern(nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(16, 16))])}), "layers.0.0")
    'layers.*.0'
    """
    parts = []
    for part in name.split("."):
        parts.append("*" if isinstance(module, nn.ModuleList) or _is_block_list(module) else part)
        module = module.get_submodule(part)
    return ".".join(parts)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _matching_patterns(argument: str, given: Sequence[str] | str | None, names: Sequence[str]) -> tuple[str, ...]:
    patterns = check_patterns("convert", argument, given) or ()
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(repr(name) for name in names[:8]) + (", ..." if len(names) > 8 else "")
            raise ValueError(
                f"The pattern {pattern!r} in `{argument}` matches none of the {len(names)} layers of the model."
                f" Patterns are matched against the whole name (`*` for anything). Layers: {some or 'none'}."
            )
    return patterns


def survey(
    module: nn.Module,
    recipe: FP8Recipe,
    *,
    include: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str | None = None,
    skip_small: SkipSmall = "auto",
) -> ConversionReport:
    """What :func:`convert` would do to ``module`` under an already resolved recipe; nothing is changed."""
    if not isinstance(skip_small, bool) and skip_small != "auto":
        raise ValueError(f"Expected argument `skip_small` to be 'auto', True or False, but got {skip_small!r}.")
    weighted = [(name, child, shape) for name, child in module.named_modules() for shape in _matrices(child)]
    names = [name for name, child, _ in weighted if isinstance(child, nn.Linear)]
    include = _matching_patterns("include", include, names)
    exclude = _matching_patterns("exclude", exclude, names)
    heads, shared = output_heads(module), _shared_weights(module)
    ask_size = skip_small is True or (skip_small == "auto" and not recipe.emulate)
    in_metrics = {below for child in module.modules() if _is_metric(child) for below in child.modules()}

    def why_not(name: str, child: nn.Module, shape: tuple[int, int]) -> str | None:
        if child in in_metrics:
            return "part of a metric"
        if not isinstance(child, nn.Linear):
            return f"not an nn.Linear ({_own_class(child).__name__})"
        never = _why_never(child)
        if never is not None:
            return never
        if id(child.weight) in shared:
            others = [_describe(other) for other in shared[id(child.weight)] if other != name]
            return f"its weight is tied to {', '.join(others)}"
        if _matches(name, exclude):
            return "excluded by `exclude`"
        if include and not _matches(name, include):
            return "not in `include`"
        if name not in include:  # spelled out in full, a layer is wanted whatever the defaults say
            if child in heads:
                return "output head"
            if ask_size and too_small(recipe, *shape):
                return "too small to gain (`skip_small`)"
        return None

    layers = []
    for name, child, shape in weighted:
        kind = "Linear" if _own_class(child) is FP8Linear else _own_class(child).__name__
        pattern = _pattern(module, name) if name else ""
        layers.append(LayerReport(name, kind, *shape, reason=why_not(name, child, shape), pattern=pattern))
    uncounted = tuple(name for name, child in module.named_modules() if _holds_uncounted_weights(child))
    return ConversionReport(recipe, tuple(layers), uncounted)


# ---------------------------------------------------------------------------------------------------------------------
# Changing


def convert(
    module: nn.Module,
    recipe: RecipeName | Literal["auto"] | FP8Recipe | Float8LinearConfig = "auto",
    *,
    include: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str | None = None,
    skip_small: SkipSmall = "auto",
    fp8_format: FP8Format | Literal["auto"] = "auto",
    device: torch.device | None = None,
) -> ConversionReport:
    """Turn linear layers of ``module`` into :class:`~lightning_fp8_rocm.float8.linear.FP8Linear`, in place.

    Left out by default, each named in the report: the output head, tied weights, dimensions that are no multiple of
    16, layers too small to gain, and every module whose type is not exactly ``nn.Linear``.

    Args:
        module: Any module; also a single ``nn.Linear``, and one on the ``meta`` device. Frozen layers are converted.
        recipe: A name, an :class:`FP8Recipe`, or a torchao ``Float8LinearConfig``; ``"auto"`` is ``"tensorwise"``.
        include: Patterns (``fnmatch``) of layer names, matched against the whole name: only these, on top of the
            defaults. A layer whose full name stands here is converted also if it is the output head or small.
        exclude: Patterns of layer names to leave alone.
        skip_small: Leave out layers that gain nothing in speed: ``"auto"`` where FP8 is not emulated, else as told.
        fp8_format: ``"auto"`` is what the hardware multiplies; another one is emulated.
        device: Where the module will run; by default where its parameters are, and for parameters on ``meta`` or the
            CPU of a machine with GPUs those GPUs.

    Returns:
        What was converted and why the rest was not.

    Raises:
        ValueError: For a recipe, format or pattern that does not fit; if no layer at all would be FP8; if a layer
            already is FP8 under another recipe; and for a GPU without FP8, unless ``fp8_format`` names one.
        MixedFormatsError: If the devices do not have one format.
        ImportError: For a version of torch or torchao that is not supported.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        >>> report = convert(model, "rowwise", fp8_format="ocp")
        >>> [layer.name for layer in report.converted], report.left_out[0].reason
        (['0'], 'out_features 10: not a multiple of 16')
        >>> revert(model)
        >>> type(model[0]).__name__
        'Linear'
    """
    check_installed("torch", "torchao")
    devices = _hardware_for(module, device)
    native = hardware.shared_format(devices)
    if native is None and fp8_format == "auto" and devices[0] != hardware.CPU:
        # Emulation on a GPU costs the user his speed: only when a format was asked for by name.
        raise ValueError(f'{devices[0].no_fp8_reason()} In a call of `convert`, fp8_format="ocp" emulates.')
    resolved = resolve_recipe(recipe, fp8_format, native)
    report = survey(module, resolved, include=include, exclude=exclude, skip_small=skip_small)
    modules = dict(module.named_modules())
    for name, child in modules.items():
        if isinstance(child, FP8Linear) and child.fp8_recipe != resolved:
            raise ValueError(
                f"Layer {_describe(name)} already is FP8 under another recipe ({child.fp8_recipe.describe()}). Call"
                " `lightning_fp8_rocm.revert(module)` first, or pass that recipe."
            )
    if not report.converted:
        raise ValueError(_why_nothing(report))
    if torch.cuda.is_available():
        # What torchao's own conversion does before any FP8 kernel is compiled: triton-lang/triton#11111.
        from torchao.float8._inductor_patch import _patch_inductor_min_max_codegen

        _patch_inductor_min_max_codegen()
    _set_fp8_layers(module, {modules[layer.name]: resolved for layer in report.converted})
    return report


def revert(module: nn.Module, *, keep: Mapping[nn.Module, FP8Recipe] | None = None) -> None:
    """Undo :func:`convert`: every layer of ``module`` has the class that it had before. Parameters are untouched.

    Args:
        module: What was converted.
        keep: Layers that are FP8 afterwards, each by its recipe.
    """
    _set_fp8_layers(module, keep or {})


def _set_fp8_layers(module: nn.Module, recipes: Mapping[nn.Module, FP8Recipe]) -> None:
    """Make these layers of ``module`` FP8, each by its recipe, and no others."""
    for child in module.modules():
        if child in recipes:
            _set_own_class(child, FP8Linear)
            child.fp8_recipe = recipes[child]  # type: ignore[assignment]
        elif isinstance(child, FP8Linear):
            for name in ("fp8_recipe", "_fp8_called"):
                child.__dict__.pop(name, None)
            _set_own_class(child, nn.Linear)
    for child in module.modules():
        for flag, value in child.__dict__.pop("_fp8_fast_path", {}).items():
            setattr(child, flag, value)
        for kind, flag, off in _ENCODER_FAST_PATH:
            if isinstance(child, kind) and any(isinstance(below, FP8Linear) for below in child.modules()):
                child.__dict__["_fp8_fast_path"] = {flag: getattr(child, flag)}
                setattr(child, flag, off)


def _set_own_class(module: nn.Module, own: type[nn.Module]) -> None:
    """Change the class that :func:`_own_class` gives; a module that is sharded stays so."""
    cls: Any = type(module)
    new: Any = own
    if _is_sharded_class(cls):
        new = _sharded_class(new, cls.__mro__[1], cls.__deepcopy__)
    module.__class__ = new


@cache
def _sharded_class(own: Any, fsdp_module: Any, no_deepcopy: Any) -> type[nn.Module]:
    return type(f"FSDP{own.__name__}", (fsdp_module, own), {"__deepcopy__": no_deepcopy})


def _hardware_for(module: nn.Module, device: torch.device | None) -> list[hardware.Hardware]:
    """The devices that will run ``module``: the one given, those of its parameters, or the GPUs of this machine."""
    if device is not None:
        return [hardware.of_device(device)]
    on_gpu = {parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"}
    if on_gpu:
        return [hardware.of_device(gpu) for gpu in sorted(on_gpu, key=str)]
    return hardware.local_devices()


def _why_nothing(report: ConversionReport) -> str:
    """The error for a model that would run without a single FP8 product."""
    if not report.layers:
        return (
            "No layer can be FP8: the model has no linear layer. Was it built (`configure_model`) before conversion?"
            ' Train it with `precision="bf16-mixed"`.'
        )
    reasons: dict[str, list[str]] = {}
    for layer in report.left_out:
        reasons.setdefault(layer.reason or "", []).append(_describe(layer.name))
    listed = "\n".join(
        f"  - {len(names)} x {reason}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        for reason, names in reasons.items()
    )
    return (
        f"No layer would run in FP8, so this would be a bf16 run under another name. Why, for {len(report.layers)}"
        f" weight matrices:\n{listed}\nChange `include`, `exclude` or `skip_small`, or train with"
        ' `precision="bf16-mixed"`.'
    )
