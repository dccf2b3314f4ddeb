"""Both names of Lightning, for tests of what a user calls: `pl` is one of them, as in `import ... as pl`.

    class Net:                                       # the body of a module, without a base of Lightning
        def training_step(self, batch, index): ...

    def test_it_trains(pl: Lightning) -> None:       # runs once under each name
        pl.trainer("fp8-rocm").fit(pl.module(Net)(), batches())

A `Lightning` can be sent to ranks. Nothing is imported before it is asked for, this package neither: some tests show
what is read without it.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

HOMES = {"FP8Precision": "precision", "FSDP2FP8Strategy": "strategy", "EMA": "ema"}


@dataclass(frozen=True)
class Lightning:
    """One name of Lightning. `pl.Trainer` and the like are its own, `pl.FP8Precision` and the like ours for it."""

    name: str
    """The distribution, with underscores."""
    package: str
    """What a user imports as `pl`."""
    fabric: str
    room: str
    """The folder of this package with the classes for the Trainer."""
    fabric_room: str

    def __str__(self) -> str:
        return self.name

    def __getattr__(self, name: str) -> Any:
        """One of our classes, or what stands in the Trainer's package, or a module in that."""
        if name.startswith("_"):  # as pickle asks of an instance that has no fields yet
            raise AttributeError(name)
        if name in HOMES:
            module, _, _ = self.class_path(name).rpartition(".")
            return getattr(import_module(module), name)
        package = import_module(self.package)
        return getattr(package, name) if hasattr(package, name) else self.of(name)

    def of(self, path: str) -> ModuleType:
        """The module of that path in the Trainer's package."""
        return import_module(f"{self.package}.{path}")

    def of_fabric(self, path: str) -> ModuleType:
        """The module of that path in Fabric's package."""
        return import_module(f"{self.fabric}.{path}")

    def class_path(self, name: str) -> str:
        """What YAML says for one of our classes."""
        return f"lightning_fp8_rocm.{f'{self.room}.{HOMES[name]}.' if self.room == self.name else ''}{name}"

    def for_fabric(self, name: str) -> Any:
        """One of our classes, for Fabric."""
        return getattr(import_module(f"lightning_fp8_rocm.{self.fabric_room}.{HOMES[name]}"), name)

    def module(self, body: type) -> Any:
        """The LightningModule of this body, always the same class."""
        return over(body, self.LightningModule)

    def callback(self, body: type) -> Any:
        """The Callback of this body, always the same class."""
        return over(body, self.Callback)

    def trainer(self, precision: Any = "fp8-rocm", **flags: Any) -> Any:
        """A quiet Trainer on the CPU; `precision` may be a plugin."""
        flags["precision" if isinstance(precision, str) else "plugins"] = precision
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        return self.Trainer(**{**defaults, **flags})


@cache
def over(body: type, base: type) -> Any:
    """The class of that body over a class of Lightning."""
    return type(body.__name__, (body, base), {"__module__": body.__module__, "__doc__": body.__doc__})


LIGHTNING = Lightning("lightning", "lightning.pytorch", "lightning.fabric", "pytorch", "fabric")
STANDALONE = Lightning(
    "pytorch_lightning", "pytorch_lightning", "lightning_fabric", "pytorch_lightning", "lightning_fabric"
)
BOTH = (LIGHTNING, STANDALONE)
NAMED = {each.name: each for each in BOTH}
"""For scripts, which are told the name."""


@pytest.fixture(scope="module", params=BOTH, ids=str)
def pl(request: pytest.FixtureRequest) -> Lightning:
    """The test runs once under each name."""
    lightning: Lightning = request.param
    return lightning
