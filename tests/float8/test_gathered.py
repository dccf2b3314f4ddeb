"""A weight that arrives in FP8: its products against float64 and torchao, and an ordinary tensor to all others.

Letters: M tokens, K in_features, N out_features.
"""

import copy
import pickle
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from lightning_fp8_rocm.float8.convert import convert
from lightning_fp8_rocm.float8.gathered import GatheredWeight
from lightning_fp8_rocm.float8.linear import FP8Linear
from lightning_fp8_rocm.float8.quantize import dequantize, quantize

M, K, N = 128, 256, 512
BF16, E4M3, E4M3_FNUZ = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def gathered(weight: Tensor, *, rows: bool = True, dtype: torch.dtype = E4M3, as_dtype: torch.dtype = BF16) -> Tensor:
    """``weight`` as FSDP2 hands it to the layer: a leaf that wants a gradient."""
    data, scale = quantize(weight, dtype, row_dim=-1 if rows else None, power_of_2=rows)
    if rows:
        assert scale.unique().numel() >= 4
    return GatheredWeight(data, scale, as_dtype).requires_grad_()


def put(layer: nn.Linear, weight: Tensor) -> nn.Linear:
    """What FSDP2 does to unshard: it sets the parameter past nn.Module's check."""
    layer._parameters["weight"] = weight
    return layer


def varied(n: int = 32, k: int = 16) -> Tensor:
    return torch.randn(n, k) * torch.randn(n, 1).exp()


# ---------------------------------------------------------------------------------------------------------------------
# The three products


class Case(NamedTuple):
    weight: Tensor
    input: Tensor
    grad_output: Tensor


def _scaled_slices(tensor: Tensor, dim: int, by: float) -> Tensor:
    out = tensor.clone()
    index = [slice(None)] * 2
    index[dim] = slice(None, None, 64)  # type: ignore[call-overload]
    out[tuple(index)] *= by
    return out


# What weights, activations and gradients look like.
DISTRIBUTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Case]] = {
    "gauss": Case,
    "log-normal rows": lambda w, x, g: Case(w * torch.exp(torch.randn(N, 1) * 1.5), x, g),
    "activation outliers": lambda w, x, g: Case(w, _scaled_slices(x, 1, 100), g),
    "row outliers": lambda w, x, g: Case(_scaled_slices(w, 0, 50), x, g),
    "column outliers": lambda w, x, g: Case(_scaled_slices(w, 1, 50), x, g),
    "gradients of unlike tokens": lambda w, x, g: Case(w, x, g * torch.exp(torch.randn(M, 1) * 2)),
}


def errors(layer: nn.Module, weight: Callable[[], Tensor], case: Case) -> list[float]:
    """Relative errors of output, grad_input and grad_weight against float64."""
    x = case.input.clone().requires_grad_()
    output = layer(x)
    output.backward(case.grad_output)
    w, i, g = (tensor.double() for tensor in case)
    found = (output, x.grad, weight())
    return [
        ((ours.double() - true).norm() / true.norm()).item()
        for ours, true in zip(found, (i @ w.t(), g @ w, g.t() @ i), strict=True)
    ]


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_row_scaled_weight_gathered_in_fp8_is_as_exact_as_torchaos_own_rowwise(name: str, recipe: str) -> None:
    base = Case(torch.randn(N, K) * 0.02, torch.randn(M, K), torch.randn(M, N) * 1e-3)
    case = Case(*(tensor.to(BF16) for tensor in DISTRIBUTIONS[name](*base)))
    plain = nn.Linear(K, N, bias=False, dtype=BF16)
    with torch.no_grad():
        plain.weight.copy_(case.weight)
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    twin = convert_to_float8_training(nn.Sequential(copy.deepcopy(plain)), config=config)
    assert type(twin[0]).__name__ == "Float8Linear"
    theirs = errors(twin, lambda: twin[0].weight.grad, case)

    convert(plain, recipe, fp8_format="ocp")
    weight = GatheredWeight(*quantize(case.weight, E4M3, row_dim=-1, power_of_2=True), BF16).requires_grad_()
    ours = errors(put(plain, weight), lambda: weight.grad, case)
    print(f"{name}, {recipe}: ours {ours}, torchao {theirs}")
    # With one scale for the whole weight (`rowwise_with_gw_hp` casts it so for grad_input) torchao is the worse one.
    for product, a, b in zip(("output", "grad_input", "grad_weight"), ours, theirs, strict=True):
        assert 0 < a < 1.05 * b, f"{product}: {a:.4f}, torchao {b:.4f}"
    assert max(ours) < 0.05


@pytest.mark.parametrize("dtype", [E4M3, E4M3_FNUZ], ids=["ocp", "fnuz"])
@pytest.mark.parametrize("masters", [BF16, torch.float32], ids=["bf16", "fp32"])
def test_a_tensorwise_weight_gives_the_same_bits_gathered_in_fp8_or_not(
    dtype: torch.dtype, masters: torch.dtype
) -> None:
    layer = nn.Linear(16, 32, dtype=masters)
    convert(layer, "tensorwise", fp8_format="ocp" if dtype is E4M3 else "fnuz")
    x, grad = torch.randn(7, 16, dtype=BF16), torch.randn(7, 32, dtype=BF16)
    whole = layer.weight
    weight = gathered(whole.detach(), rows=False, dtype=dtype)
    results = []
    for each in (whole, weight):
        put(layer, each)
        inputs = x.clone().requires_grad_()
        output = layer(inputs)
        output.backward(grad)
        results.append((output, inputs.grad, each.grad.to(BF16)))
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_the_output_of_a_row_scaled_weight_has_the_same_bits_gathered_in_fp8_or_not(recipe: str) -> None:
    layer = nn.Linear(16, 32, dtype=BF16)
    convert(layer, recipe, fp8_format="ocp")
    weight = varied().to(BF16)
    x = torch.randn(7, 16, dtype=BF16)
    whole = put(layer, weight)(x)
    assert put(layer, gathered(weight))(x).equal(whole)


# ---------------------------------------------------------------------------------------------------------------------
# Read past our product

x16, y32 = torch.randn(5, 16, dtype=BF16), torch.randn(32, 5, dtype=BF16)
READS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.linear": lambda w: F.linear(x16, w),
    "a penalty": lambda w: (w**2).sum(),
    "T @": lambda w: w.T @ y32,
    "@ t()": lambda w: x16 @ w.t(),
    "einsum": lambda w: torch.einsum("mk,nk->mn", x16, w),
    "a slice": lambda w: w[3:7, ::2].float().sum(),
    "a row": lambda w: w[0].sum(),
    "embedding": lambda w: F.embedding(torch.tensor([3, 3, 31]), w),
    "norm": lambda w: torch.linalg.vector_norm(w, dim=1),
    "float": lambda w: w.float() * 2,
    "clone": lambda w: w.clone(),
    "reshape": lambda w: w.reshape(-1) * 3,
    "view": lambda w: w.view(16, 32).sum(0),
    "cat": lambda w: torch.cat([w, w]),
    "weight decomposition": lambda w: w / w.norm(dim=1, keepdim=True),
    "other strides": lambda w: w.as_strided((32, 16), (1, 32)) * torch.arange(16, dtype=BF16),
    "narrow strided": lambda w: w.as_strided((4, 4), (16, 1), 2).sum(),
}


@pytest.mark.parametrize("rows", [True, False], ids=["row", "tensor"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_read_past_our_product_it_is_the_tensor_that_it_stands_for_value_and_gradient(
    read: Callable[[Tensor], Tensor], rows: bool
) -> None:
    weight = gathered(varied(), rows=rows)
    stands_for = dequantize(weight._data, weight._scale).to(BF16).requires_grad_()
    value, expected = read(weight), read(stands_for)
    assert type(value) is Tensor
    assert value.dtype == expected.dtype
    assert value.equal(expected)
    grad = torch.randn_like(expected)
    value.backward(grad)
    expected.backward(grad)
    assert type(weight.grad) is Tensor
    assert weight.grad.equal(stands_for.grad)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_layer_that_is_also_a_tied_head_adds_both_gradients(recipe: str) -> None:
    layer = nn.Linear(16, 32, bias=False)
    convert(layer, recipe, fp8_format="ocp")
    assert isinstance(layer, FP8Linear)
    weight = gathered(varied(), rows=recipe == "rowwise")
    put(layer, weight)
    x, labels = torch.randn(5, 16, dtype=BF16), torch.randint(0, 16, (5,))

    def loss(product: Tensor, head: Tensor) -> Tensor:
        return F.cross_entropy((product @ head).float(), labels)

    loss(layer(x), weight).backward()
    together = weight.grad
    weight.grad = None
    # The same in two parts: our product with the head held fixed, and the head as a plain tensor.
    fixed = weight.dequantized()
    loss(layer(x), fixed).backward()
    head = fixed.clone().requires_grad_()
    loss(layer(x).detach(), head).backward()
    assert head.grad.norm() > 0
    torch.testing.assert_close(together, weight.grad + head.grad, rtol=2**-7, atol=1e-6)


def test_asking_for_a_tensor_of_its_shape_reads_nothing() -> None:
    weight = gathered(varied())
    weight._data.untyped_storage().resize_(0)  # as FSDP2 frees it; reading it would end the process
    zeros = torch.zeros_like(weight)
    assert zeros.eq(0).all()
    assert (zeros.shape, zeros.dtype, type(zeros)) == (weight.shape, BF16, Tensor)
    assert torch.ones_like(weight, dtype=torch.float32).eq(1).all()
    assert weight.new_zeros(3).dtype == BF16
    assert torch.empty_like(weight).shape == weight.shape


def _written(name: str, write: Callable[[Tensor], object]) -> object:
    return pytest.param(write, id=name)


@pytest.mark.parametrize(
    "write",
    [
        _written("mul_", lambda w: w.mul_(2)),
        _written("copy_", lambda w: w.copy_(torch.zeros(32, 16))),
        _written("setitem", lambda w: w.__setitem__(slice(None), 0.0)),
        _written("data", lambda w: w.data.zero_()),
        _written("detach", lambda w: w.detach().add_(1)),
        _written("init", lambda w: nn.init.normal_(w)),
        _written("foreach", lambda w: torch._foreach_mul_([torch.ones(2), w], 2.0)),
        _written("foreach pair", lambda w: torch._foreach_add_([w], [torch.ones(32, 16)])),
        _written("out", lambda w: torch.add(torch.ones(32, 16), 1, out=w)),
        _written("clamp_", lambda w: w.clamp_(-1, 1)),
    ],
)
def test_writing_into_it_in_place_is_an_error_that_says_where_to_write(write: Callable[[Tensor], object]) -> None:
    weight = gathered(varied())
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"gathered in FP8.*where they are sharded"):
        write(weight)


def test_it_may_be_copied_from_and_shown() -> None:
    weight = gathered(varied())
    into = torch.zeros(32, 16, dtype=BF16)
    with torch.no_grad():
        into.copy_(weight)
    assert into.equal(weight.dequantized())
    torch._foreach_add_([into], [weight.detach()])
    assert into.equal(weight.dequantized() * 2)
    assert "row scales" in repr(weight)
    assert "one scale" in repr(gathered(varied(), rows=False))
    assert type(copy.deepcopy(weight.dequantized())) is Tensor
    assert pickle.loads(pickle.dumps(weight.dequantized())).equal(weight.dequantized())


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_product_with_it_compiles_whole_and_gives_the_bits_of_eager(recipe: str) -> None:
    layer = nn.Linear(16, 32)
    convert(layer, recipe, fp8_format="ocp")
    weight = gathered(varied(), rows=recipe != "tensorwise")
    put(layer, weight)
    x = torch.randn(5, 16, dtype=BF16)
    results = []
    torch._dynamo.reset()
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        weight.grad = None
        inputs = x.clone().requires_grad_()
        output = call(inputs)
        output.square().sum().backward()
        results.append((output, inputs.grad, weight.grad))
    assert all(a.equal(b) for a, b in zip(*results, strict=True))
