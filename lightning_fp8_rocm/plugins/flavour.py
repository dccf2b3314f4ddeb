"""Under which name Lightning is used: ``lightning``, or the packages ``pytorch_lightning`` and ``lightning_fabric``."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Flavour:
    """The modules of one Lightning; the same under either name.

    Args:
        pytorch: ``"lightning.pytorch"`` or ``"pytorch_lightning"``.
        fabric: ``"lightning.fabric"`` or ``"lightning_fabric"``.
    """

    pytorch: str
    fabric: str

    def of_pytorch(self, path: str) -> Any:
        """The module of that path below ``lightning.pytorch``."""
        return import_module(f"{self.pytorch}.{path}")

    def of_fabric(self, path: str) -> Any:
        """The module of that path below ``lightning.fabric``."""
        return import_module(f"{self.fabric}.{path}")


LIGHTNING = Flavour("lightning.pytorch", "lightning.fabric")
STANDALONE = Flavour("pytorch_lightning", "lightning_fabric")
