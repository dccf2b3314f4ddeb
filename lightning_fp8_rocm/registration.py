"""Teaches Lightning the names ``"fp8-rocm"`` and ``"fsdp2_fp8"``: the one place that changes its private parts.

Lightning has a registry for strategies, where ours is entered, and none for precisions: its connectors compare the
string with a ``Literal``. What we touch for that, in each flavour of Lightning, and why:

===================================================================== ================================================
``_AcceleratorConnector._check_config_and_set_final_flags`` (Trainer) Runs before every check of ``precision``: here the
``_Connector._check_config_and_set_final_flags`` (Fabric)             string becomes the documented ``plugins=[...]``.
``Trainer.__init__.__annotations__["precision"]``                     What jsonargparse checks in LightningCLI, and what
``Fabric.__init__.__annotations__["precision"]``                      ``--help`` lists.
``fabric.plugins.precision.precision._PRECISION_INPUT_STR``           What ``fabric run --precision`` offers.
``fabric.connector._PRECISION_INPUT_STR``                             What the error for a mistyped name lists.
``pytorch.core.saving.pl_load``                                       ``load_from_checkpoint`` of a sharded checkpoint,
                                                                      a directory, where Lightning opens a file.
===================================================================== ================================================

Where one of them is missing or has another shape, :class:`UnsupportedLightningError` says which versions are supported.
Nothing of Lightning is imported: a flavour that is there already is taught at once, another when it is imported.
The ledger entry with the test that says when to delete this: ``docs/upstream.md``.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from os import PathLike, fspath
from os.path import exists, isdir
from types import ModuleType
from typing import Any, Literal, get_args

from lightning_fp8_rocm.versions import check_installed, installed, supported

PRECISION = "fp8-rocm"
STRATEGY = "fsdp2_fp8"
_MARK = "_lightning_fp8_rocm"


class UnsupportedLightningError(ImportError):
    """The installed Lightning is not one that this package knows."""


@dataclass(frozen=True)
class _Entry:
    """One entry point of Lightning: Trainer or Fabric."""

    trigger: str  # the module whose import completes it, and which holds `owner`
    owner: str
    connector: tuple[str, str]
    literals: tuple[tuple[str, str], ...]
    precision: str  # the module with the class Precision
    plugin: str  # our module with the class FP8Precision
    distribution: str
    registry: tuple[str, str] | None  # where strategies are entered by name
    strategy: str = ""  # our module with the class FSDP2FP8Strategy
    reader: tuple[str, str] | None = None  # what reads the file for `load_from_checkpoint`


_LITERALS = (
    ("lightning.fabric.plugins.precision.precision", "_PRECISION_INPUT_STR"),
    ("lightning.fabric.connector", "_PRECISION_INPUT_STR"),
)
_ENTRIES = (
    _Entry(
        trigger="lightning.pytorch.trainer.trainer",
        owner="Trainer",
        connector=("lightning.pytorch.trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
        literals=_LITERALS,
        precision="lightning.pytorch.plugins.precision",
        plugin="lightning_fp8_rocm.pytorch.precision",
        distribution="lightning",
        registry=("lightning.pytorch.strategies", "StrategyRegistry"),
        strategy="lightning_fp8_rocm.pytorch.strategy",
        reader=("lightning.pytorch.core.saving", "pl_load"),
    ),
    _Entry(
        trigger="lightning.fabric.fabric",
        owner="Fabric",
        connector=("lightning.fabric.connector", "_Connector"),
        literals=_LITERALS,
        precision="lightning.fabric.plugins.precision",
        plugin="lightning_fp8_rocm.fabric.precision",
        distribution="lightning",
        registry=None,
    ),
)


def register() -> None:
    """Teach every flavour of Lightning that is imported now, and every other one when it will be. Idempotent."""
    for entry in _ENTRIES:
        if entry.trigger in sys.modules:
            _teach(entry)
    if not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _teach(entry: _Entry) -> None:
    check_installed(entry.distribution)
    try:
        _route_precision(getattr(import_module(entry.connector[0]), entry.connector[1]), entry)
        _accept_in_annotation(getattr(import_module(entry.trigger), entry.owner))
        for module, name in entry.literals:
            _accept_in_literal(import_module(module), name)
        if entry.registry is not None:
            _enter_strategy(getattr(import_module(entry.registry[0]), entry.registry[1]), entry)
        if entry.reader is not None:
            _read_directories(import_module(entry.reader[0]), entry.reader[1])
    except (AttributeError, KeyError, ImportError) as missing:
        raise UnsupportedLightningError(
            f"lightning_fp8_rocm cannot teach {entry.distribution} {installed(entry.distribution)} the precision"
            f" {PRECISION!r}: {missing}. Supported: {supported(entry.distribution)}. Install one of those, or remove"
            " `import lightning_fp8_rocm`."
        ) from missing


def _route_precision(connector: type, entry: _Entry) -> None:
    """Make ``precision="fp8-rocm"`` mean ``plugins=[FP8Precision()]`` for one connector class."""
    original: Callable[..., None] = connector._check_config_and_set_final_flags  # type: ignore[attr-defined]
    if hasattr(original, _MARK):
        return
    signature = inspect.signature(original)
    for parameter in ("precision", "plugins"):
        if parameter not in signature.parameters:
            raise AttributeError(f"{connector.__name__}._check_config_and_set_final_flags takes no `{parameter}`")

    @wraps(original)
    def routed(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("precision") == PRECISION:
            given = bound.arguments.get("plugins")
            plugins = [] if given is None else list(given) if isinstance(given, Sequence) else [given]
            for other in plugins:
                if isinstance(other, import_module(entry.precision).Precision):
                    raise ValueError(
                        f"Received both `precision={PRECISION!r}` and a precision plugin,"
                        f" `plugins=[{type(other).__name__}(...)]`. Choose one: drop the plugin, or drop `precision`"
                        " and pass `plugins=[FP8Precision(...)]` to set the arguments of FP8."
                    )
            bound.arguments.update(precision=None, plugins=[*plugins, import_module(entry.plugin).FP8Precision()])
        original(*bound.args, **bound.kwargs)

    setattr(routed, _MARK, True)
    connector._check_config_and_set_final_flags = routed  # type: ignore[attr-defined]


def _accept_in_annotation(owner: type) -> None:
    """Widen the ``precision`` annotation on every layer of ``__init__``, which Lightning wraps."""
    init: Any = owner.__init__  # type: ignore[misc]
    while init is not None:
        annotation = init.__annotations__["precision"]
        if PRECISION not in str(annotation):
            init.__annotations__["precision"] = annotation | Literal["fp8-rocm"]
        init = getattr(init, "__wrapped__", None)


def _accept_in_literal(module: ModuleType, name: str) -> None:
    values = get_args(getattr(module, name))
    if not values:
        raise AttributeError(f"{module.__name__}.{name} is no Literal")
    if PRECISION not in values:
        setattr(module, name, Literal[(*values, PRECISION)])


def _enter_strategy(registry: Any, entry: _Entry) -> None:
    """Enter ``"fsdp2_fp8"``; asking the registry for it is what imports the class."""

    def make(**arguments: Any) -> Any:
        return import_module(entry.strategy).FSDP2FP8Strategy(**arguments)

    registry.register(STRATEGY, make, description="FSDP2 with FP8 weight all-gather", override=True)


def _read_directories(module: ModuleType, name: str) -> None:
    """Let ``load_from_checkpoint`` take a sharded checkpoint, too."""
    original: Callable[..., Any] = getattr(module, name)
    if hasattr(original, _MARK):
        return

    @wraps(original)
    def reads(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path_or_url, str | PathLike) and _is_directory(fspath(path_or_url)):
            whole = import_module("lightning_fp8_rocm.distributed.whole")
            return whole.load(path_or_url, map_location=map_location, weights_only=weights_only)
        return original(path_or_url, map_location=map_location, weights_only=weights_only)

    setattr(reads, _MARK, True)
    setattr(module, name, reads)


def _is_directory(path: str) -> bool:
    path = path.removeprefix("file://")
    return isdir(path) or (not exists(path) and isdir(f"{path}.old"))  # one whose replacement ended halfway


class _WhenImported(MetaPathFinder):
    """Teaches a flavour right after its last module has run, without importing it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        entry = next((entry for entry in _ENTRIES if entry.trigger == fullname), None)
        if entry is None:
            return None
        sys.meta_path.remove(self)  # ask the others
        try:
            spec = find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_teach(module: ModuleType) -> None:
            run(module)
            _teach(entry)

        spec.loader.exec_module = run_and_teach  # type: ignore[method-assign]
        return spec
