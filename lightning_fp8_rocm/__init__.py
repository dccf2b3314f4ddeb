"""FP8 training for PyTorch Lightning on AMD Instinct GPUs.

Importing this package teaches Lightning ``precision="fp8-rocm"`` and ``strategy="fsdp2_fp8"``; it imports neither
Lightning nor torchao. The names below are imported when they are asked for; those of Lightning are for the distribution
``lightning``, and those for ``pytorch_lightning`` and ``lightning_fabric`` lie in the subpackages of these names.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_fp8_rocm.registration import register as _register

if TYPE_CHECKING:
    from lightning_fp8_rocm.callbacks.ema import EMA
    from lightning_fp8_rocm.float8.convert import ConversionReport, convert, revert
    from lightning_fp8_rocm.float8.linear import FP8Linear
    from lightning_fp8_rocm.float8.recipe import FP8Recipe, Operand, Product
    from lightning_fp8_rocm.pytorch.precision import FP8Precision
    from lightning_fp8_rocm.pytorch.strategy import FSDP2FP8Strategy

    __version__: str

__all__ = [
    "EMA",
    "ConversionReport",
    "FP8Linear",
    "FP8Precision",
    "FP8Recipe",
    "FSDP2FP8Strategy",
    "Operand",
    "Product",
    "convert",
    "revert",
]

_HOME = {
    "EMA": "callbacks.ema",
    "ConversionReport": "float8.convert",
    "FP8Linear": "float8.linear",
    "FP8Precision": "pytorch.precision",
    "FP8Recipe": "float8.recipe",
    "FSDP2FP8Strategy": "pytorch.strategy",
    "Operand": "float8.recipe",
    "Product": "float8.recipe",
    "convert": "float8.convert",
    "revert": "float8.convert",
}

_register()


def __getattr__(name: str) -> Any:
    if name == "__version__":  # looked up here: `importlib.metadata` takes twice as long to import as all the rest
        return import_module("importlib.metadata").version("lightning-fp8-rocm")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as missing:
        if missing.name != "lightning":
            raise
        # An AttributeError, which `getattr` with a default and `hasattr` expect; `from ... import` asks registration.
        raise AttributeError(why_missing(name)) from missing


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def why_missing(name: str) -> str:
    """What to say of a public name whose Lightning is not installed."""
    module = _HOME[name].rpartition(".")[2]
    there = [
        f" For {flavour}, which is installed, it is `{home}.{name}`."
        for flavour in ("pytorch_lightning", "lightning_fabric")
        if find_spec(flavour) and find_spec(home := f"{__name__}.{flavour}.{module}")
    ]
    return (
        f"`{__name__}.{name}` is for `lightning`, which is not installed: `pip install"
        f" 'lightning-fp8-rocm[lightning]'`.{''.join(there)}"
    )
