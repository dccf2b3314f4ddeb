"""Scales, casts, padding and the product of two quantised operands."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

from lightning_fp8_rocm.float8.quantize import ALIGNMENT, dequantize, pad_summed_dim, quantize, scaled_product

LARGEST = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2fnuz: 57344.0,
}
every_dtype = pytest.mark.parametrize("dtype", LARGEST, ids=lambda dtype: str(dtype).removeprefix("torch.float8_"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def bits(data: Tensor) -> Tensor:
    return data.view(torch.uint8)


@every_dtype
def test_the_largest_magnitude_is_cast_to_the_largest_value_of_the_format(dtype):
    x = torch.randn(33, 64) * 7
    data, scale = quantize(x, dtype, row_dim=None, power_of_2=False)
    assert scale.shape == ()
    assert scale.dtype == torch.float32
    assert scale.double().item() == pytest.approx(LARGEST[dtype] / x.abs().max().item(), rel=2**-23)
    assert data.float().isfinite().all()
    assert data.float().abs().max() == LARGEST[dtype]


@every_dtype
@pytest.mark.parametrize("row_dim", [0, -1])
def test_each_row_has_the_scale_of_its_own_amax(dtype, row_dim):
    x = torch.randn(33, 64) * torch.randn(33, 1).exp() * torch.randn(1, 64).exp()
    data, scale = quantize(x, dtype, row_dim=row_dim, power_of_2=False)
    assert scale.shape == ((1, 64) if row_dim == 0 else (33, 1))
    assert (data.float().abs().amax(dim=row_dim) == LARGEST[dtype]).all()


@every_dtype
@pytest.mark.parametrize("row_dim", [None, -1])
def test_power_of_2_scales_are_powers_of_2_and_the_largest_that_fit_within_a_rounding(dtype, row_dim):
    """s is in (t / 2, t] with t = largest / amax; t itself is rounded to fp32 first, hence 2**-23 of slack."""
    x = torch.cat([torch.randn(500, 16) * torch.randn(500, 1).mul(20).exp(), torch.full((1, 16), 1e-20)])
    _, scale = quantize(x, dtype, row_dim=row_dim, power_of_2=True)
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    magnitude = x.double().abs()
    amax = magnitude.max() if row_dim is None else magnitude.amax(dim=row_dim, keepdim=True)
    target = LARGEST[dtype] / amax.clamp(min=1e-12)
    assert (scale <= target * (1 + 2**-23)).all()
    assert (scale > target / 2 * (1 - 2**-23)).all()
    assert row_dim is None or scale.unique().numel() >= 4


@every_dtype
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cast_without_a_clamp_is_the_saturated_cast_of_torchao_also_where_the_scaled_amax_exceeds_the_largest_value(
    dtype, power_of_2, input_dtype
):
    """fl(fl(largest / amax) * amax) exceeds the largest value for about one amax in seven: the cast rounds it back."""
    amax = torch.rand(20_000).mul(28).sub(14).exp2()  # 2**-14 to 2**14, which fp16 holds
    x = amax.to(input_dtype).unsqueeze(1) * torch.tensor([1.0, -1.0, 0.7, 0.01], dtype=input_dtype)
    scaled = x.float() * amax_to_scale(x.abs().amax(dim=1, keepdim=True), dtype, round_scales_to_power_of_2=power_of_2)
    if not power_of_2:
        assert (scaled.abs() > LARGEST[dtype]).sum() >= 100
    data, _ = quantize(x, dtype, row_dim=-1, power_of_2=power_of_2)
    assert data.float().isfinite().all()
    assert torch.equal(bits(data), bits(to_fp8_saturated(scaled, dtype)))


@every_dtype
def test_amax_just_above_a_power_of_2_fraction_of_the_largest_value_is_cast_as_torchao_casts_it(dtype):
    """There largest / amax is just under a power of two, where log2 in fp32 rounds up and the scale with it."""
    amax = torch.tensor([LARGEST[dtype] * 2.0**k for k in range(-40, 40)])
    for _ in range(3):
        amax = torch.nextafter(amax, torch.tensor(float("inf")))
        x = torch.stack([amax, -amax, amax / 3], dim=1)
        data, scale = quantize(x, dtype, row_dim=-1, power_of_2=True)
        assert torch.equal(bits(data), bits(to_fp8_saturated(x * scale, dtype)))
        assert data.float().abs().max() <= LARGEST[dtype]


@every_dtype
@pytest.mark.parametrize("row_dim", [None, -1])
def test_bf16_is_scaled_in_fp32(dtype, row_dim):
    """bf16 times a 0-dimensional fp32 scale is bf16 in torch: rounded twice."""
    x = torch.randn(33, 64).to(torch.bfloat16)
    data, scale = quantize(x, dtype, row_dim=row_dim, power_of_2=False)
    expected, expected_scale = quantize(x.float(), dtype, row_dim=row_dim, power_of_2=False)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(bits(data), bits(expected))
    if row_dim is None:
        assert not torch.equal(bits(data), bits((x * scale).to(dtype)))


@every_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("power_of_2", [False, True])
def test_a_row_with_nan_or_infinity_comes_back_as_nan_and_the_other_rows_as_they_were(dtype, bad, power_of_2):
    x = torch.randn(5, 16)
    poisoned = x.clone()
    poisoned[2, 3] = bad
    back = dequantize(*quantize(poisoned, dtype, row_dim=-1, power_of_2=power_of_2))
    clean = dequantize(*quantize(x, dtype, row_dim=-1, power_of_2=power_of_2))
    assert back[2].isnan().all()
    others = torch.arange(5) != 2
    assert torch.equal(back[others], clean[others])
    assert dequantize(*quantize(poisoned, dtype, row_dim=None, power_of_2=power_of_2)).isnan().all()


@every_dtype
def test_values_of_the_format_times_a_power_of_2_come_back_unchanged(dtype):
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()] / 8
    assert values.unique().numel() > 200
    back = dequantize(*quantize(values, dtype, row_dim=None, power_of_2=True))
    assert torch.equal(back, values)


@every_dtype
@pytest.mark.parametrize("rows", [1, 5, 15, 16, 17, 32, 33])
def test_padding_appends_zeros_up_to_the_next_multiple_of_16(dtype, rows):
    data = torch.randn(rows, 8).to(dtype)
    padded = pad_summed_dim(data)
    assert padded.dtype == dtype
    assert ALIGNMENT == 16
    assert padded.shape == (-(-rows // 16) * 16, 8)
    assert torch.equal(bits(padded[:rows]), bits(data))
    assert not padded[rows:].float().any()
    assert (padded is data) == (rows % 16 == 0)


def test_padding_takes_a_transposed_tensor():
    data = torch.randn(8, 17).to(torch.float8_e4m3fn).t()
    assert torch.equal(bits(pad_summed_dim(data))[:17], bits(data.contiguous()))


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("left_by_row", [False, True])
@pytest.mark.parametrize("right_by_row", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_the_product_is_that_of_the_dequantised_operands_also_if_one_alone_is_scaled_by_row(
    emulate, left_by_row, right_by_row, out_dtype
):
    """fp32 accumulation of 32 terms is exact to 1e-5 here; a bf16 result, and fp32 by way of bf16, to 2**-8."""
    a = torch.randn(16, 32) * torch.randn(16, 1).exp()
    b = torch.randn(32, 48) * torch.randn(1, 48).exp()
    left = quantize(a, torch.float8_e4m3fn, row_dim=-1 if left_by_row else None, power_of_2=True)
    right = quantize(b, torch.float8_e4m3fn, row_dim=0 if right_by_row else None, power_of_2=True)
    result = scaled_product(left, right, out_dtype, fast_accum=False, emulate=emulate)
    exact = dequantize(*left).double() @ dequantize(*right).double()
    by_way_of_bf16 = out_dtype == torch.bfloat16 or (not emulate and (left_by_row or right_by_row))
    assert result.dtype == out_dtype
    assert torch.allclose(result.double(), exact, rtol=2**-8 if by_way_of_bf16 else 1e-5, atol=1e-5)


def test_importing_the_numerics_says_nothing():
    """torchao warns at import of kernels for other hardware, and of its own use of torch."""
    script = "import lightning_fp8_rocm.float8.quantize"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
