"""Teaches Lightning the names ``"fp8-rocm"`` and ``"fsdp2_fp8"``: the one place that changes its private parts.

Lightning has a registry for strategies, where ours is entered, and none for precisions: its connectors compare the
string with a ``Literal``. What we touch for that, and why, in ``lightning`` and alike in the packages
``pytorch_lightning`` and ``lightning_fabric``:

===================================================================== ================================================
``_AcceleratorConnector._check_config_and_set_final_flags`` (Trainer) Runs before every check of ``precision``: here the
``_Connector._check_config_and_set_final_flags`` (Fabric)             string becomes the documented ``plugins=[...]``,
                                                                      ours of another Lightning are refused by name,
                                                                      and Fabric's FP8Precision gets to know the
                                                                      connector, which will know the device.
``Trainer.__init__.__annotations__["precision"]``                     What jsonargparse checks in LightningCLI, and what
``Fabric.__init__.__annotations__["precision"]``                      ``--help`` lists.
``fabric.plugins.precision.precision._PRECISION_INPUT_STR``           What ``fabric run --precision`` offers.
``fabric.connector._PRECISION_INPUT_STR``                             What the error for a mistyped name lists.
``pytorch.core.saving.pl_load``                                       ``load_from_checkpoint`` of a sharded checkpoint,
                                                                      a directory, where Lightning opens a file.
``pytorch.trainer.trainer._maybe_unwrap_optimized``                   A LightningModule of ``pytorch_lightning`` is none
                                                                      of ``lightning``, nor the other way round, and
                                                                      the error does not say why.
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
    strategies: str  # the module with the class Strategy, and with
    registry: str  # where strategies are entered by name
    room: str  # our package with the classes FP8Precision and FSDP2FP8Strategy
    distributions: tuple[str, ...]  # that hold it
    reader: tuple[str, str] | None = None  # what reads the file for `load_from_checkpoint`

    @property
    def package(self) -> str:
        """What the user imports: ``lightning.pytorch``."""
        return self.strategies.removesuffix(".strategies")

    @property
    def place(self) -> str:
        """``lightning.pytorch.Trainer``."""
        return f"{self.package}.{self.owner}"

    def is_module(self, given: object) -> bool:
        """Whether an object is a LightningModule of this Lightning."""
        mro = type(given).__mro__
        return any(cls.__name__ == "LightningModule" and cls.__module__.startswith(f"{self.package}.") for cls in mro)

    def ours(self, module: str) -> Any:
        """Our module for this entry point."""
        return import_module(f"{__package__}.{self.room}.{module}")


def _entries(
    pytorch: str, fabric: str, distributions: tuple[tuple[str, ...], tuple[str, ...]], rooms: tuple[str, str]
) -> tuple[_Entry, _Entry]:
    """Trainer and Fabric of ``lightning``, or of the packages that have the same modules under another name."""
    literals = (
        (f"{fabric}.plugins.precision.precision", "_PRECISION_INPUT_STR"),
        (f"{fabric}.connector", "_PRECISION_INPUT_STR"),
    )
    trainer = _Entry(
        trigger=f"{pytorch}.trainer.trainer",
        owner="Trainer",
        connector=(f"{pytorch}.trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
        literals=literals,
        precision=f"{pytorch}.plugins.precision",
        strategies=f"{pytorch}.strategies",
        registry="StrategyRegistry",
        room=rooms[0],
        distributions=distributions[0],
        reader=(f"{pytorch}.core.saving", "pl_load"),
    )
    of_fabric = _Entry(
        trigger=f"{fabric}.fabric",
        owner="Fabric",
        connector=(f"{fabric}.connector", "_Connector"),
        literals=literals,
        precision=f"{fabric}.plugins.precision",
        strategies=f"{fabric}.strategies",
        registry="STRATEGY_REGISTRY",
        room=rooms[1],
        distributions=distributions[1],
    )
    return trainer, of_fabric


_ENTRIES = (
    *_entries("lightning.pytorch", "lightning.fabric", (("lightning",), ("lightning",)), ("pytorch", "fabric")),
    *_entries(
        "pytorch_lightning",
        "lightning_fabric",
        # The first one holds both modules, without the metadata of the second.
        (("pytorch-lightning",), ("lightning-fabric", "pytorch-lightning")),
        ("pytorch_lightning", "lightning_fabric"),
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
    check_installed(*entry.distributions)
    try:
        _route_precision(getattr(import_module(entry.connector[0]), entry.connector[1]), entry)
        _accept_in_annotation(getattr(import_module(entry.trigger), entry.owner))
        for module, name in entry.literals:
            _accept_in_literal(import_module(module), name)
        _enter_strategy(getattr(import_module(entry.strategies), entry.registry), entry)
        if entry.reader is not None:
            _read_directories(import_module(entry.reader[0]), entry.reader[1], entry)
        if entry.owner == "Trainer":
            _name_other_modules(import_module(entry.trigger), entry)
    except (AttributeError, KeyError, ImportError) as missing:
        found = next((each for each in entry.distributions if installed(each)), entry.distributions[0])
        raise UnsupportedLightningError(
            f"lightning_fp8_rocm cannot teach {found} {installed(found)} the precision {PRECISION!r}: {missing}."
            f" Supported: {supported(found)}. Install one of those, or remove `import lightning_fp8_rocm`."
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
        given = bound.arguments.get("plugins")
        plugins = [] if given is None else list(given) if isinstance(given, Sequence) else [given]
        for each in (*plugins, bound.arguments.get("strategy")):
            _check_flavour(each, entry)
        if bound.arguments.get("precision") == PRECISION:
            for other in plugins:
                if isinstance(other, import_module(entry.precision).Precision):
                    raise ValueError(
                        f"Received both `precision={PRECISION!r}` and a precision plugin,"
                        f" `plugins=[{type(other).__name__}(...)]`. Choose one: drop the plugin, or drop `precision`"
                        " and pass `plugins=[FP8Precision(...)]` to set the arguments of FP8."
                    )
            plugins.append(entry.ours("precision").FP8Precision())
            bound.arguments.update(precision=None, plugins=plugins)
        if entry.owner == "Fabric":
            # Fabric does not tell its precision where a module will run; the connector will know.
            for each in (*plugins, getattr(bound.arguments.get("strategy"), "_precision", None)):
                if _room_of(each) == entry.room:
                    each.connector = next(iter(bound.arguments.values()))
        original(*bound.args, **bound.kwargs)

    setattr(routed, _MARK, True)
    connector._check_config_and_set_final_flags = routed  # type: ignore[attr-defined]


def _room_of(given: object) -> str | None:
    """Which of our packages of classes an object comes from, also by a subclass of the user's."""
    rooms = {entry.room for entry in _ENTRIES}
    modules = [cls.__module__.split(".") for cls in type(given).__mro__]
    return next((path[1] for path in modules if path[0] == __package__ and path[1] in rooms), None)


def _check_flavour(given: object, entry: _Entry) -> None:
    """Refuse our plugin or strategy of another Lightning, of which Lightning would only say that it is none."""
    room = _room_of(given)
    if room is not None and room != entry.room:
        theirs = next(each for each in _ENTRIES if each.room == room)
        name = type(given).__name__
        raise TypeError(
            f"This {name} is of `{__package__}.{room}`, for `{theirs.place}`, but was passed to `{entry.place}`. Take"
            f" the one of `{__package__}.{entry.room}`."
        )


def _name_other_modules(module: ModuleType, entry: _Entry) -> None:
    """Say of a LightningModule of another Lightning that it is one, where Lightning says that it is none."""
    original: Callable[[object], Any] = module._maybe_unwrap_optimized
    if hasattr(original, _MARK):
        return

    @wraps(original)
    def unwrapped(model: object) -> Any:
        try:
            return original(model)
        except (TypeError, ValueError) as error:  # the second of a module that `torch.compile` has wrapped
            inner = getattr(model, "_orig_mod", model)
            theirs = next((each for each in _ENTRIES if each != entry and each.is_module(inner)), None)
            if theirs is None:
                raise
            ours, other = entry.package, theirs.package
            raise TypeError(
                f"{type(inner).__name__} is a LightningModule of `{other}`, but was passed to a Trainer of `{ours}`,"
                f" which are two packages with classes of their own. Import both from one: `import {ours} as pl`, or"
                f" `import {other} as pl`."
            ) from error

    setattr(unwrapped, _MARK, True)
    module._maybe_unwrap_optimized = unwrapped  # type: ignore[attr-defined]


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
        return entry.ours("strategy").FSDP2FP8Strategy(**arguments)

    registry.register(STRATEGY, make, description="FSDP2 with FP8 weight all-gather", override=True)


def _read_directories(module: ModuleType, name: str, entry: _Entry) -> None:
    """Let ``load_from_checkpoint`` take a sharded checkpoint, too, and what Fabric has saved in either form."""
    original: Callable[..., Any] = getattr(module, name)
    if hasattr(original, _MARK):
        return

    @wraps(original)
    def reads(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        how = {"map_location": map_location, "weights_only": weights_only}
        if not isinstance(path_or_url, str | PathLike) or not _is_directory(fspath(path_or_url)):
            checkpoint = original(path_or_url, **how)
            if not isinstance(checkpoint, dict) or "fp8_rocm" not in checkpoint or "state_dict" in checkpoint:
                return checkpoint
        whole = import_module("lightning_fp8_rocm.distributed.whole")
        return whole.load(path_or_url, version=import_module(entry.package).__version__, **how)

    setattr(reads, _MARK, True)
    setattr(module, name, reads)


def _is_directory(path: str) -> bool:
    path = path.removeprefix("file://")
    return isdir(path) or (not exists(path) and isdir(f"{path}.old"))  # one whose replacement ended halfway


class _WhenImported:
    """Teaches a flavour right after its last module has run, without importing it.

    A finder by what it has: the base class takes a third of the time that importing this package takes.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        entry = next((entry for entry in _ENTRIES if entry.trigger == fullname), None)
        if entry is None:
            package, _, name = fullname.rpartition(".")
            if package == __package__ and name in sys.modules[package]._HOME:
                # `from lightning_fp8_rocm import FP8Precision`, which was not there to be had: say why.
                raise ImportError(sys.modules[package].why_missing(name), name="lightning")
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
