"""From amax to scale to cast, and the product of two operands so cast.

A scale multiplies on the way to FP8 and divides on the way back, as in torchao. Letters: see ``recipe``.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F


@contextmanager
def _no_import_chatter() -> Iterator[None]:
    """Importing torchao warns of kernels for other hardware and of its own use of torch: nothing a user can act on."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]

    def drop(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("Failed to load", "<enum"))

    for logger in loggers:
        logger.addFilter(drop)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(drop)


with _no_import_chatter():
    from torchao.float8.float8_ops import addmm_float8_unwrapped
    from torchao.float8.float8_utils import amax_to_scale

# `torch._scaled_mm` reads the summed dimension in blocks of 16 bytes on every GPU.
ALIGNMENT = 16

Quantized = tuple[Tensor, Tensor]
"""FP8 data, and its fp32 scale: 0-dimensional, or of the data's shape with 1 in the summed dimension."""


def quantize(tensor: Tensor, dtype: torch.dtype, *, row_dim: int | None, power_of_2: bool) -> Quantized:
    """Scale ``tensor`` by its largest magnitude and cast it.

    Note:
        The result is bit for bit torchao's. Its clamp to the largest value is left out: ``scale`` comes from the very
        tensor that it scales, so no product exceeds the largest value by more than the rounding of the scale, which
        the cast rounds back. A NaN or an infinity anywhere in a row makes its scale NaN or 0, hence the cast NaN:
        it is never turned into a plausible number.

    Args:
        tensor: Any shape, floating point.
        dtype: An FP8 dtype.
        row_dim: None for one scale for the tensor; else the dimension that the product sums over.
        power_of_2: Whether the scale is rounded down to a power of two.

    Returns:
        The data, of ``tensor``'s shape, and the scale in fp32. An amax under 1e-12 (torchao's ``EPS``) counts as that.
    """
    scale = scales_of(_amax(tensor.detach(), row_dim), dtype, power_of_2=power_of_2)
    return cast(tensor, scale, dtype), scale


def scales_of(amax: Tensor, dtype: torch.dtype, *, power_of_2: bool) -> Tensor:
    """The fp32 scale for each largest magnitude, of ``amax``'s shape."""
    scales: Tensor = amax_to_scale(amax, dtype, round_scales_to_power_of_2=power_of_2)
    return scales


def cast(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor * scale`` in an FP8 dtype, multiplied in fp32."""
    # bf16 times an fp32 scale is bf16 where the scale has no dimension, and fp32 where it has.
    return (tensor * (scale if scale.dim() else scale.view(1))).to(dtype)


def _amax(tensor: Tensor, row_dim: int | None) -> Tensor:
    magnitude = tensor.abs()
    return magnitude.max() if row_dim is None else magnitude.amax(dim=row_dim, keepdim=True)


def dequantize(data: Tensor, scale: Tensor) -> Tensor:
    """The fp32 tensor that ``data`` stands for, of the same shape."""
    return data.to(torch.float32).div_(scale)


def pad_summed_dim(data: Tensor) -> Tensor:
    """Append rows of zeros to ``(M, ...)`` FP8 data until M is a multiple of 16. Zero is the byte 0 in every format.

    >>> pad_summed_dim(torch.ones(17, 4).to(torch.float8_e4m3fn)).shape
    torch.Size([32, 4])
    """
    missing = -data.shape[0] % ALIGNMENT
    if missing == 0:
        return data
    # Through bytes, which every device and compiler can move.
    return F.pad(data.view(torch.uint8), (0, 0, 0, missing)).view(data.dtype)


def scaled_product(
    left: Quantized, right: Quantized, out_dtype: torch.dtype, *, fast_accum: bool, emulate: bool
) -> Tensor:
    """``dequantize(left) @ dequantize(right)`` in one FP8 product, or emulated.

    Args:
        left: ``(rows, summed)`` data; scale ``()`` or ``(rows, 1)``.
        right: ``(summed, columns)`` data; scale ``()`` or ``(1, columns)``.
        out_dtype: Of the result.
        fast_accum: See :class:`~lightning_fp8_rocm.float8.recipe.Product`.
        emulate: Dequantise both in fp32 and multiply those, bit for bit as torchao's ``emulate`` does. A CPU emulates
            too: the kernel behind ``torch._scaled_mm`` there is a loop over elements on some processors, and rejects
            fnuz on some (docs/recipes.md).

    Returns:
        ``(rows, columns)`` in ``out_dtype``. With row scales and fp32 asked for, the value is rounded to bf16 on the
        way, as torchao does, since no GPU kernel writes fp32 there.
    """
    (a, a_scale), (b, b_scale) = left, right
    if emulate:
        return (dequantize(a, a_scale) @ dequantize(b, b_scale)).to(out_dtype)
    # The kernels read the left operand by rows and the right one by columns, and scale both by row or neither.
    if a_scale.dim() != b_scale.dim():
        a_scale = a_scale.expand(a.shape[0], 1).contiguous()
        b_scale = b_scale.expand(1, b.shape[1]).contiguous()
    out: Tensor = addmm_float8_unwrapped(
        a.contiguous(), a_scale, b.t().contiguous().t(), b_scale, out_dtype, use_fast_accum=fast_accum
    )
    return out
