"""Each fault of upstream that this package works around, reproduced without the workaround: see docs/upstream.md.

A test here says what upstream should do. It fails today, strictly: on the day it passes, delete the workaround, the
ledger's entry and the test.
"""

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def fault(reason: str, raises: type[BaseException] = AssertionError) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, raises=raises, reason=f"docs/upstream.md: {reason}")


def emulated(recipe: str) -> Float8LinearConfig:
    return dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)


def float8_linear(recipe: str, features: int = 32, bias: bool = True) -> Float8Linear:
    """torchao's own layer, with row scales that differ, which a freshly made `nn.Linear` has not."""
    torch.manual_seed(0)
    layer = nn.Linear(features, features, bias=bias)
    with torch.no_grad():
        layer.weight.mul_(torch.randn(features, 1).exp())
    return Float8Linear.from_float(layer, emulated(recipe))


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


# ---- Lightning


@fault("Lightning has no registry for precisions")
def test_a_third_party_can_name_a_precision():
    done = python('import lightning as L\nL.Trainer(precision="fp8-rocm", accelerator="cpu", logger=False)')
    assert "Precision 'fp8-rocm' is invalid" not in done.stderr
    done.check_returncode()  # an error of another kind is no reproduction


# ---- PyTorch


class NotedLinear(nn.Linear):
    """As `FP8Linear`, a class that an existing layer is given, with a forward of its own. It notes its inputs."""

    inputs: list[torch.Tensor] = []  # noqa: RUF012, one list for all layers of a test

    def forward(self, input):
        NotedLinear.inputs.append(input)
        return super().forward(input)


@pytest.fixture
def noted():
    """Give every Linear below a module the class above, run it, and return the inputs that its layers were given."""

    def inputs_of(module: nn.Module, *args, **kwargs) -> list[torch.Tensor]:
        for child in module.modules():
            if isinstance(child, nn.Linear):
                child.__class__ = NotedLinear
        NotedLinear.inputs.clear()
        with torch.no_grad():
            module(*args, **kwargs)
        return list(NotedLinear.inputs)

    yield inputs_of
    NotedLinear.inputs.clear()


X = torch.zeros(2, 4, 32)
PADDED = torch.tensor([[False, False, False, False], [False, False, True, True]])


@fault("the eval fast path of nn.TransformerEncoderLayer reads weights past the forward of their layers")
def test_a_transformer_layer_calls_its_linears_in_eval(noted):
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    assert len(noted(layer.eval(), X)) >= 2


@fault("nn.TransformerEncoder makes a nested tensor of a padded batch in eval, which no FP8 product takes")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_transformer_encoder_gives_its_layers_ordinary_tensors_in_eval(noted):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1).eval()
    encoder.layers[0].activation_relu_or_gelu = 0  # the fast path of the layer, which is another entry, is off
    assert not any(input.is_nested for input in noted(encoder, X, src_key_padding_mask=PADDED))


@fault("nn.MultiheadAttention reads the weight of out_proj past its forward")
def test_an_attention_calls_its_output_projection_in_training(noted):
    attention = nn.MultiheadAttention(32, 2, batch_first=True).train()
    assert len(noted(attention, X, X, X)) == 1


@pytest.mark.parametrize(
    "as_eager",
    [pytest.param(False, marks=fault("inductor keeps in fp32 what eager rounds to bf16")), True],
    ids=["by default", "with emulate_precision_casts"],
)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_compiled_float8_is_bit_for_bit_eager_float8(recipe, as_eager):
    """The second case shows that the switch which the plugin sets is the cure."""
    model = nn.Sequential(nn.GELU(), float8_linear(recipe, 64, bias=False)).to(torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16)

    def run(forward):
        input = x.clone().requires_grad_()
        model.zero_grad()
        output = forward(input)
        output.float().square().sum().backward()
        return output.detach(), input.grad, model[1].weight.grad

    torch._dynamo.reset()
    eager = run(model)
    with torch._inductor.config.patch(emulate_precision_casts=as_eager):
        compiled = run(torch.compile(model, fullgraph=True))
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


# ---- torchao


class MatmulCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
        return func(*args, **(kwargs or {}))


@fault("Float8Linear makes the grad_weight product of a frozen weight")
def test_a_frozen_weight_costs_one_product_in_backward():
    layer = float8_linear("tensorwise")
    layer.weight.requires_grad_(False)
    output = layer(torch.randn(16, 32, requires_grad=True))
    with MatmulCounter() as products:
        output.sum().backward()
    assert products.count == 1


@fault("Float8Linear saves an input that only a frozen weight's gradient would need")
def test_a_frozen_weight_saves_no_input():
    layer = float8_linear("tensorwise")
    layer.weight.requires_grad_(False)
    input = torch.randn(16, 32, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.data_ptr()), lambda nothing: None):
        layer(input)
    assert input.data_ptr() not in saved


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("tensorwise", marks=fault("Float8Linear fails on an empty batch", RuntimeError)),
        pytest.param("rowwise", marks=fault("Float8Linear fails on an empty batch", IndexError)),
        "rowwise_with_gw_hp",
    ],
)
def test_an_empty_batch_gives_an_empty_output_and_zero_gradients(recipe):
    layer = float8_linear(recipe)
    layer(torch.zeros(0, 32, requires_grad=True)).sum().backward()
    assert layer.weight.grad.count_nonzero() == 0


def converted_by_torchao(layer: nn.Linear) -> nn.Module:
    model = nn.Sequential(layer)
    convert_to_float8_training(model, config=emulated("tensorwise"))
    return model.get_submodule("0")


@fault("torchao's conversion makes a new layer, in training mode")
def test_conversion_keeps_eval_mode():
    assert not converted_by_torchao(nn.Linear(32, 32).eval()).training


@fault("torchao's conversion makes a new layer, without the hooks of the old one")
def test_conversion_keeps_hooks():
    layer, calls = nn.Linear(32, 32), []
    layer.register_forward_hook(lambda *args: calls.append(args))
    converted_by_torchao(layer)(torch.randn(16, 32))
    assert len(calls) == 1


@fault("torchao's conversion makes a new layer, without the attributes of the old one")
def test_conversion_keeps_attributes():
    layer = nn.Linear(32, 32)
    layer.learning_rate_scale = 0.1
    assert hasattr(converted_by_torchao(layer), "learning_rate_scale")


@fault("torchao's conversion of a single nn.Linear returns another module")
def test_conversion_of_a_root_linear_is_in_place():
    layer = nn.Linear(32, 32)
    assert convert_to_float8_training(layer, config=emulated("tensorwise")) is layer


@pytest.mark.parametrize(
    "recipe",
    [
        "tensorwise",
        "rowwise",
        pytest.param("rowwise_with_gw_hp", marks=fault("Float8Linear knows the GPU's autocast only", RuntimeError)),
    ],
)
def test_float8_trains_under_the_autocast_of_a_cpu(recipe):
    layer = float8_linear(recipe)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(torch.randn(16, 32, requires_grad=True))
    output.sum().backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    "recipe",
    [
        "tensorwise",
        "rowwise",
        pytest.param(
            "rowwise_with_gw_hp", marks=fault("torchao's size filter lacks a recipe of torchao's", NotImplementedError)
        ),
    ],
)
def test_every_recipe_has_a_size_filter(recipe):
    assert callable(_auto_filter_for_recipe(recipe, []))


@fault("importing torchao warns of its own use of torch")
def test_importing_torchao_float8_is_silent():
    done = python("import torchao.float8")
    done.check_returncode()
    assert "register_constant() on Enum subclasses is deprecated" not in done.stderr


@fault("the output of Float8Linear is a view that autograd lets nobody change in place", RuntimeError)
def test_the_output_of_a_float8_layer_may_be_changed_in_place():
    output = float8_linear("tensorwise", bias=False)(torch.randn(2, 16, 32))
    output += 1
