"""FP8 training for PyTorch Lightning on AMD Instinct GPUs.

Importing this package teaches Lightning ``precision="fp8-rocm"`` and ``strategy="fsdp2_fp8"``; it imports neither
Lightning nor torchao. The names below are imported when they are asked for.
"""

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from lightning_fp8_rocm.registration import register as _register

if TYPE_CHECKING:
    from lightning_fp8_rocm.callbacks.ema import EMA
    from lightning_fp8_rocm.float8.convert import ConversionReport, convert, revert
    from lightning_fp8_rocm.float8.linear import FP8Linear
    from lightning_fp8_rocm.float8.recipe import FP8Recipe, Operand, Product
    from lightning_fp8_rocm.pytorch.precision import FP8Precision
    from lightning_fp8_rocm.pytorch.strategy import FSDP2FP8Strategy

__version__ = _version("lightning-fp8-rocm")
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
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
