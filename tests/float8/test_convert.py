"""Which layers become FP8, what the class swap keeps, and the way back."""

import copy
import io
import pickle
import types
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig

from lightning_fp8_rocm import hardware
from lightning_fp8_rocm.float8.convert import ConversionReport, convert, output_heads, revert, survey, too_small
from lightning_fp8_rocm.float8.linear import FP8Linear
from lightning_fp8_rocm.float8.recipe import FP8Recipe, resolve_recipe
from lightning_fp8_rocm.hardware import Hardware, MixedFormatsError

MI250X = Hardware("AMD Instinct MI250X", "gfx90a", None)
MI300X = Hardware("AMD Instinct MI300X", "gfx942", "fnuz")
MI350X = Hardware("AMD Instinct MI350X", "gfx950", "ocp")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def fp8_names(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if type(child) is FP8Linear]


def reasons(report: ConversionReport) -> dict[str, str | None]:
    return {layer.name: layer.reason for layer in report.layers}


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Embedding, two blocks of one class, and a head of 64 tokens."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 64, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCK_LAYERS = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]


class ScaledProductCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten._scaled_mm
        return func(*args, **(kwargs or {}))


def count_fp8_products(module: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The result of ``run``, and how many products it made through `torch._scaled_mm`."""
    for child in module.modules():
        if isinstance(child, FP8Linear):
            child.fp8_recipe = replace(child.fp8_recipe, emulate=False)
    with ScaledProductCounter() as counter:
        output = run()
    return output, counter.count


# ---------------------------------------------------------------------------------------------------------------------
# What the class swap keeps


def test_an_optimizer_made_before_still_trains_the_same_parameters():
    model = Model()
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert(model)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    old = model.blocks[1].up.weight.detach().clone()
    tokens = torch.randint(64, (4, 16))
    first = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
    assert not torch.equal(model.blocks[1].up.weight, old)
    assert loss < first


def test_training_flag_attributes_and_requires_grad_survive_both_ways():
    layer = nn.Linear(32, 64).eval()
    layer.note = {"lr_scale": 0.5}
    layer.weight.requires_grad_(False)
    layer.register_buffer("mask", torch.ones(64))
    convert(layer)
    for _ in range(2):
        assert layer.training is False
        assert layer.note == {"lr_scale": 0.5}
        assert not layer.weight.requires_grad
        assert layer.bias.requires_grad
        assert layer.mask.sum() == 64
        assert (layer.in_features, layer.out_features) == (32, 64)
        revert(layer)


def test_hooks_made_before_fire_afterwards():
    layer = nn.Linear(32, 64)
    fired = []
    layer.register_forward_pre_hook(lambda module, args: fired.append("pre"))
    layer.register_forward_hook(lambda module, args, output: fired.append("forward"))
    layer.register_full_backward_hook(lambda module, grad_input, grad_output: fired.append("backward"))
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append("accumulated"))
    convert(layer)
    layer(torch.randn(4, 32, requires_grad=True)).sum().backward()
    assert sorted(fired) == ["accumulated", "backward", "forward", "pre"]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_fp8_computes_the_same_and_reverts_on_its_own(duplicate):
    model = Model()
    convert(model, "rowwise")
    twin = duplicate(model)
    tokens = torch.randint(64, (2, 5))
    assert fp8_names(twin) == BLOCK_LAYERS
    assert twin.blocks[0].up.weight is not model.blocks[0].up.weight
    assert torch.equal(twin(tokens), model(tokens))
    revert(twin)
    assert fp8_names(twin) == []
    assert fp8_names(model) == BLOCK_LAYERS


def test_the_state_dict_is_that_of_the_unconverted_module_and_loads_both_ways():
    model, plain = Model(), Model()
    keys = list(model.state_dict())
    convert(model)
    model(torch.randint(64, (2, 5)))
    state = model.state_dict()
    assert list(state) == keys
    assert all(type(value) is Tensor for value in state.values())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(plain.blocks[0].up.weight, model.blocks[0].up.weight)
    model.load_state_dict(Model().state_dict())


def test_a_converted_layer_is_still_an_nn_linear():
    layer = nn.Linear(32, 64)
    convert(layer)
    assert isinstance(layer, nn.Linear)


def test_revert_restores_the_very_classes_and_leaves_nothing_of_ours():
    model = nn.ModuleDict(
        {"model": Model(), "encoder": nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)}
    )
    before = {name: (type(child), set(vars(child))) for name, child in model.named_modules()}
    convert(model)
    model["model"](torch.randint(64, (2, 5)))
    model["encoder"](torch.randn(2, 5, 32))
    assert {name: (type(child), set(vars(child))) for name, child in model.named_modules()} != before
    revert(model)
    assert {name: (type(child), set(vars(child))) for name, child in model.named_modules()} == before


def test_a_reverted_model_computes_what_it_did_before():
    model, tokens = Model(), torch.randint(64, (2, 5))
    expected = model(tokens)
    convert(model)
    assert not torch.equal(model(tokens), expected)
    revert(model)
    assert torch.equal(model(tokens), expected)


def test_revert_keeps_the_layers_it_is_told_to_keep_each_by_its_recipe():
    model = Model()
    convert(model, "rowwise", include="head")
    kept = {model.head: model.head.fp8_recipe}
    revert(model)
    recipe = convert(model).recipe
    revert(model, keep={model.blocks[0].up: recipe, **kept})
    assert fp8_names(model) == ["blocks.0.up", "head"]
    assert model.blocks[0].up.fp8_recipe.name == "tensorwise"
    assert model.head.fp8_recipe.name == "rowwise"


def test_revert_of_a_module_that_was_never_converted_does_nothing():
    model = Model()
    before = {name: dict(vars(child)) for name, child in model.named_modules()}
    revert(model)
    assert {name: dict(vars(child)) for name, child in model.named_modules()} == before


def test_a_root_linear_converts_in_place_and_reverts():
    layer = nn.Linear(32, 64)
    report = convert(layer)
    assert type(layer) is FP8Linear
    assert [(entry.name, entry.kind, entry.out_features, entry.in_features) for entry in report.converted] == [
        ("", "Linear", 64, 32)
    ]
    revert(layer)
    assert type(layer) is nn.Linear


def test_a_frozen_base_under_an_adapter_is_converted_and_the_adapter_trains_in_bf16():
    class LoRALinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(64, 64).requires_grad_(False)
            self.down, self.up = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    model = nn.Sequential(LoRALinear(), LoRALinear())
    report = convert(model)
    assert fp8_names(model) == ["0.base", "1.base"]
    assert reasons(report)["0.down"] == "out_features 8: not a multiple of 16"
    assert reasons(report)["0.up"] == "in_features 8: not a multiple of 16"
    model(torch.randn(4, 64)).sum().backward()
    assert model[0].base.weight.grad is None
    assert model[0].up.weight.grad.abs().sum() > 0  # through the FP8 base of the second


def test_a_module_on_meta_is_converted_and_runs_once_it_has_values():
    with torch.device("meta"):
        model = Model()
    convert(model, "rowwise", fp8_format="fnuz")
    assert fp8_names(model) == BLOCK_LAYERS
    model.to_empty(device="cpu")
    model.load_state_dict(Model().state_dict())
    assert model(torch.randint(64, (2, 5))).isfinite().all()


def test_a_module_on_meta_computes_the_shapes_of_its_forward_and_backward_as_an_nn_linear_does():
    """Lightning's `measure_flops` runs a model on meta, for instance."""
    layer = nn.Linear(32, 64, device="meta")
    convert(layer)
    x = torch.empty(2, 5, 32, device="meta", requires_grad=True)
    output = layer(x)
    output.sum().backward()
    assert (output.shape, x.grad.shape, layer.weight.grad.shape) == ((2, 5, 64), (2, 5, 32), (64, 32))


def test_casting_a_converted_model_to_bf16_keeps_it_fp8():
    model = Model()
    convert(model)
    model.bfloat16()
    assert fp8_names(model) == BLOCK_LAYERS
    assert model(torch.randint(64, (2, 5))).dtype == torch.bfloat16


# ---------------------------------------------------------------------------------------------------------------------
# What is left alone, and reported


def test_a_head_tied_to_the_embedding_is_left_out_and_the_report_names_the_other():
    model = Model(tied=True)
    report = convert(model)
    assert fp8_names(model) == BLOCK_LAYERS
    assert reasons(report)["head"] == "its weight is tied to 'embed'"
    assert model.head.weight is model.embed.weight


def test_two_linears_that_share_a_weight_are_both_left_out():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    model[2].weight = model[0].weight
    report = convert(model)
    assert reasons(report) == {"0": "its weight is tied to '2'", "1": None, "2": "its weight is tied to '0'"}


def test_one_module_under_two_names_is_one_layer_and_is_converted():
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    report = convert(model)
    assert reasons(report) == {"0": None}
    assert model[0] is model[2]
    assert type(model[2]) is FP8Linear
    revert(model)
    assert type(model[2]) is nn.Linear


class Subclass(nn.Linear):
    pass


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(layer: nn.Linear) -> nn.Linear:
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


def old_weight_norm(layer: nn.Linear) -> nn.Linear:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in torch, and still in use
        return weight_norm(layer)


def pruned(layer: nn.Linear) -> nn.Linear:
    prune.l1_unstructured(layer, "weight", amount=0.5)
    return layer


def patched(layer: nn.Linear) -> nn.Linear:
    layer.forward = types.MethodType(lambda self, x: 2 * nn.functional.linear(x, self.weight, self.bias), layer)
    return layer


A_SUBCLASS = "a subclass of nn.Linear"
BY_A_HOOK = "its weight is computed by a hook"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: parametrized(nn.Linear(32, 32)), A_SUBCLASS),
        (lambda: parametrizations.weight_norm(nn.Linear(32, 32)), A_SUBCLASS),
        (lambda: parametrizations.spectral_norm(nn.Linear(32, 32)), A_SUBCLASS),
        (lambda: old_weight_norm(nn.Linear(32, 32)), BY_A_HOOK),
        (lambda: spectral_norm(nn.Linear(32, 32)), BY_A_HOOK),
        (lambda: pruned(nn.Linear(32, 32)), BY_A_HOOK),
        (lambda: Subclass(32, 32), "a subclass of nn.Linear (Subclass)"),
        (lambda: nn.LazyLinear(32), "a subclass of nn.Linear (LazyLinear)"),
        (lambda: patched(nn.Linear(32, 32)), "its forward is replaced on the instance"),
        (lambda: nn.Linear(32, 32).double(), "its weight is float64"),
        (lambda: nn.Linear(32, 40), "out_features 40: not a multiple of 16"),
        (lambda: nn.Linear(8, 32), "in_features 8: not a multiple of 16"),
        (lambda: nn.Linear(8, 40), "out_features 40 and in_features 8: not a multiple of 16"),
    ],
    ids=[
        "parametrized",
        "weight_norm",
        "spectral_norm",
        "old_weight_norm",
        "old_spectral_norm",
        "pruned",
        "subclass",
        "lazy",
        "patched_forward",
        "float64",
        "out_features",
        "in_features",
        "both_dimensions",
    ],
)
def test_what_cannot_be_fp8_is_left_alone_and_reported_also_if_it_is_asked_for_by_name(make, reason):
    model = nn.ModuleDict({"odd": make(), "plain": nn.Linear(32, 32)})
    kind = type(model["odd"])
    for report in (convert(model), convert(model, include=["odd", "plain"])):
        assert type(model["odd"]) is kind
        assert fp8_names(model) == ["plain"]
        assert reasons(report)["plain"] is None
        assert reasons(report)["odd"].startswith(reason)
        assert {layer.name: layer.kind for layer in report.layers} == {"odd": kind.__name__, "plain": "Linear"}


def test_a_pruned_bias_is_no_reason_to_leave_a_layer_out():
    layer = nn.Linear(32, 32)
    prune.l1_unstructured(layer, "bias", amount=0.5)
    convert(layer)
    assert (layer(torch.zeros(1, 32)) == 0).sum() == 16


def test_a_lazy_linear_converts_once_it_has_its_shape():
    model = nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 32))
    model(torch.randn(2, 16))
    convert(model)
    assert fp8_names(model) == ["0", "1"]


def test_a_model_without_a_linear_layer_is_an_error():
    with pytest.raises(ValueError, match="the model has no linear layer"):
        convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))


def test_a_model_of_which_nothing_fits_is_an_error_that_lists_every_reason():
    model = nn.Sequential(nn.Linear(10, 32), nn.Linear(32, 10), Subclass(32, 32))
    with pytest.raises(ValueError, match="No layer would run in FP8") as error:
        convert(model)
    message = str(error.value)
    assert "1 x in_features 10: not a multiple of 16: '0'" in message
    assert "1 x out_features 10: not a multiple of 16: '1'" in message
    assert "Subclass" in message
    assert "skip_small" in message
    assert fp8_names(model) == []


# ---------------------------------------------------------------------------------------------------------------------
# Modules that read the weights of their layers past the layers' forward


def encoder_layer(**options) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, **options)


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.out = nn.Linear(32, 64)

    def forward(self, x: Tensor, **_: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x, need_weights=False)[0])


def encoder(**options) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(encoder_layer(), 2, **options)


# The FP8 products of one forward: `out`; `linear1` and `linear2`; both in two layers. Attention has none.
@pytest.mark.parametrize(
    ("make", "products"),
    [
        (AttentionBlock, 1),
        (encoder_layer, 2),
        (lambda: encoder_layer(norm_first=True), 2),
        (lambda: encoder_layer(activation="gelu"), 2),
        (encoder, 4),
        (lambda: encoder(enable_nested_tensor=False), 4),
    ],
    ids=["attention", "layer", "layer_norm_first", "layer_gelu", "encoder", "encoder_without_nested_tensors"],
)
@pytest.mark.parametrize("padded", [False, True])
def test_attention_and_encoders_make_the_same_fp8_products_in_eval_as_in_train(make, products, padded):
    module = make()
    # Rows of different sizes, as trained ones.
    for child in module.modules():
        if type(child) is nn.Linear:
            child.weight.data.mul_(torch.randn(child.out_features, 1).exp())
    convert(module, "rowwise")
    x = torch.randn(2, 5, 32)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = padded
    options = {"src_key_padding_mask": mask} if padded else {}

    in_train, made_in_train = count_fp8_products(module.train(), lambda: module(x, **options))
    module.eval()
    with torch.no_grad():
        in_eval, made_in_eval = count_fp8_products(module, lambda: module(x, **options))
    with torch.inference_mode():
        _, made_in_inference = count_fp8_products(module, lambda: module(x, **options))

    assert made_in_train == made_in_eval == made_in_inference == products
    assert in_eval.shape == in_train.shape
    # The fused attention of eval differs in the last fp32 bits, which may tip a cast to the next FP8 value: of 32 or
    # 64 terms one changes by an eighth of itself. The unconverted fast path differs by the whole FP8 error instead.
    kept = ~mask
    assert (in_eval - in_train)[kept].norm() <= 1e-3 * in_train[kept].norm()


def test_an_unconverted_encoder_takes_the_fast_path_that_the_test_above_guards_against():
    """With the flag left on, two FP8 layers make no FP8 product in eval: the test above can fail."""
    module = encoder_layer()
    convert(module)
    module.activation_relu_or_gelu = 1
    with torch.no_grad():
        _, made = count_fp8_products(module.eval(), lambda: module(torch.randn(2, 5, 32)))
    assert made == 0


def test_revert_gives_encoders_their_fast_path_back():
    model = nn.ModuleDict(
        {
            "relu": encoder_layer(),
            "gelu": encoder_layer(activation="gelu"),
            "other": encoder_layer(activation=nn.functional.silu),
            "stack": encoder(),
            "plain": encoder(enable_nested_tensor=False),
        }
    )

    def flags() -> list[object]:
        return [
            *(model[name].activation_relu_or_gelu for name in ("relu", "gelu", "other")),
            *(layer.activation_relu_or_gelu for layer in model["stack"].layers),
            *(model[name].use_nested_tensor for name in ("stack", "plain")),
        ]

    before = flags()
    assert before == [1, 2, 0, 1, 1, True, False]
    convert(model)
    assert flags() == [0, 0, 0, 0, 0, False, False]
    convert(model)  # what is noted the first time must not be overwritten by the second
    revert(model)
    assert flags() == before


def test_an_encoder_none_of_whose_layers_is_fp8_keeps_its_fast_path():
    model = nn.ModuleDict({"fp8": nn.Linear(32, 32), "encoder": encoder()})
    convert(model, exclude="encoder.*")
    assert model["encoder"].use_nested_tensor is True
    assert model["encoder"].layers[0].activation_relu_or_gelu == 1
    convert(model)
    assert model["encoder"].use_nested_tensor is False
    convert(model, exclude="encoder.*")
    assert model["encoder"].use_nested_tensor is True
    assert model["encoder"].layers[0].activation_relu_or_gelu == 1


def test_a_copy_of_a_converted_encoder_reverts_with_its_flags():
    module = encoder()
    convert(module)
    twin = copy.deepcopy(module)
    revert(twin)
    assert (twin.use_nested_tensor, twin.layers[1].activation_relu_or_gelu) == (True, 1)
    assert (module.use_nested_tensor, module.layers[1].activation_relu_or_gelu) == (False, 0)


def test_the_projections_of_multihead_attention_are_reported_as_not_fp8():
    model = AttentionBlock()
    report = convert(model)
    assert reasons(report) == {
        "attention": "not an nn.Linear (MultiheadAttention)",
        "attention.out_proj": "MultiheadAttention reads its weight past its forward",
        "out": None,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Converting again


def test_converting_twice_by_the_same_recipe_changes_nothing():
    model = Model()
    first = convert(model, "rowwise")
    classes = {name: type(child) for name, child in model.named_modules()}
    second = convert(model, "rowwise")
    assert second == first
    assert {name: type(child) for name, child in model.named_modules()} == classes
    revert(model)
    assert fp8_names(model) == []


@pytest.mark.parametrize(("recipe", "fp8_format"), [("tensorwise", "ocp"), ("rowwise", "fnuz")])
def test_converting_again_by_another_recipe_or_format_is_an_error_that_names_the_layer(recipe, fp8_format):
    model = Model()
    convert(model, "rowwise", fp8_format="ocp")
    with pytest.raises(ValueError, match=r"'blocks\.0\.up' already is FP8 under another recipe \(rowwise, ocp.*revert"):
        convert(model, recipe, fp8_format=fp8_format)
    assert fp8_names(model) == BLOCK_LAYERS
    assert {child.fp8_recipe.name for child in model.modules() if isinstance(child, FP8Linear)} == {"rowwise"}
    revert(model)
    convert(model, recipe, fp8_format=fp8_format)


def test_a_root_layer_under_another_recipe_is_named_as_the_root():
    layer = nn.Linear(32, 32)
    convert(layer, "rowwise")
    with pytest.raises(ValueError, match="Layer the root module already is FP8"):
        convert(layer, "tensorwise")


def test_a_second_conversion_with_other_excludes_leaves_exactly_the_set_it_asks_for():
    model = Model()
    convert(model, exclude="blocks.0.*")
    assert fp8_names(model) == ["blocks.1.up", "blocks.1.down"]
    report = convert(model, exclude="*.down")
    assert fp8_names(model) == ["blocks.0.up", "blocks.1.up"] == [layer.name for layer in report.converted]
    assert type(model.blocks[1].down) is nn.Linear
    assert set(vars(model.blocks[1].down)) == set(vars(nn.Linear(16, 16)))
    convert(model)
    assert fp8_names(model) == BLOCK_LAYERS


def test_a_conversion_that_is_refused_leaves_the_module_as_it_was():
    model = Model()
    convert(model, include="blocks.0.*")
    for bad in ({"exclude": "*"}, {"include": "nothing.*"}, {"recipe": "blockwise"}, {"fp8_format": "int8"}):
        with pytest.raises(ValueError, match=r"."):
            convert(model, **bad)
        assert fp8_names(model) == ["blocks.0.up", "blocks.0.down"]


def test_survey_says_what_convert_would_do_and_changes_nothing():
    model = Model()
    surveyed = survey(model, resolve_recipe("rowwise", "auto", None), exclude="*.up")
    assert fp8_names(model) == []
    assert convert(model, "rowwise", exclude="*.up") == surveyed


@pytest.mark.parametrize(
    "recipe",
    [
        Float8LinearConfig.from_recipe_name("rowwise"),
        replace(FP8Recipe.named("rowwise"), name="mine"),
    ],
    ids=["torchao config", "own recipe"],
)
def test_a_torchao_config_and_an_own_recipe_give_the_numbers_of_the_recipe_they_stand_for(recipe):
    named, given = nn.Linear(32, 64), nn.Linear(32, 64)
    given.load_state_dict(named.state_dict())
    convert(named, "rowwise")
    report = convert(given, recipe)
    assert report.recipe.emulate
    assert report.recipe.fp8_format == "ocp"
    x = torch.randn(5, 32)
    assert torch.equal(given(x), named(x))


# ---------------------------------------------------------------------------------------------------------------------
# Output heads


def test_the_head_after_the_blocks_is_left_out():
    model = Model()
    report = convert(model)
    assert fp8_names(model) == BLOCK_LAYERS
    assert reasons(report)["head"] == "output head"


def test_a_model_without_blocks_has_no_head():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    assert output_heads(model) == set()
    assert len(convert(model).converted) == 2


def test_a_linear_registered_before_the_blocks_is_no_head():
    model = nn.ModuleDict({"embed": nn.Linear(32, 32), "blocks": nn.ModuleList(Block() for _ in range(2))})
    assert output_heads(model) == set()


def test_the_last_of_several_linears_after_the_blocks_is_the_head():
    model = nn.ModuleDict(
        {
            "blocks": nn.Sequential(Block(), Block()),
            "pooler": nn.Linear(32, 32),
            "head": nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 64)),
        }
    )
    assert output_heads(model) == {model["head"][2]}


def test_of_an_encoder_and_a_decoder_the_head_is_after_the_decoder():
    model = nn.ModuleDict(
        {
            "encoder": nn.ModuleList(Block() for _ in range(2)),
            "bridge": nn.Linear(32, 32),
            "decoder": nn.ModuleList(Block() for _ in range(2)),
            "head": nn.Linear(32, 64),
        }
    )
    assert output_heads(model) == {model["head"]}
    del model["head"]
    assert output_heads(model) == set()  # the bridge is inside the model


def test_a_list_of_different_modules_or_of_bare_linears_is_no_list_of_blocks():
    model = nn.ModuleDict(
        {
            "mixed": nn.ModuleList([Block(), nn.Sequential(nn.Linear(32, 32))]),
            "linears": nn.ModuleList(nn.Linear(32, 32) for _ in range(2)),
            "last": nn.Linear(32, 32),
        }
    )
    assert output_heads(model) == set()


def test_what_a_model_names_as_its_output_embeddings_is_the_head_wherever_it_is_registered():
    class Named(Model):
        def __init__(self) -> None:
            super().__init__()
            self.after = nn.Linear(32, 32)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    assert [module.out_features for module in output_heads(Named())] == [64]
    wrapped = nn.ModuleDict({"net": Named()})
    assert output_heads(wrapped) == {wrapped["net"].head}


# ---------------------------------------------------------------------------------------------------------------------
# include and exclude


def test_include_takes_only_what_matches_and_keeps_the_defaults():
    model = Model()
    report = convert(model, include=["blocks.0.*", "h*"])
    assert fp8_names(model) == ["blocks.0.up", "blocks.0.down"]
    assert reasons(report) == {
        "blocks.0.up": None,
        "blocks.0.down": None,
        "blocks.1.up": "not in `include`",
        "blocks.1.down": "not in `include`",
        "head": "output head",
    }


def test_a_full_name_in_include_overrides_the_default_for_the_head():
    model = Model()
    convert(model, include=["*", "head"])
    assert fp8_names(model) == [*BLOCK_LAYERS, "head"]


def test_a_full_name_in_include_does_not_untie_a_weight():
    model = Model(tied=True)
    report = convert(model, include=["*", "head"])
    assert reasons(report)["head"] == "its weight is tied to 'embed'"


def test_exclude_wins_over_include():
    model = Model()
    report = convert(model, include=["blocks.0.up", "blocks.0.down"], exclude=["blocks.0.up"])
    assert fp8_names(model) == ["blocks.0.down"]
    assert reasons(report)["blocks.0.up"] == "excluded by `exclude`"


def test_one_pattern_may_be_given_as_a_string_and_matches_the_whole_name_only():
    model = Model()
    convert(model, exclude="*.up")
    assert fp8_names(model) == ["blocks.0.down", "blocks.1.down"]
    with pytest.raises(ValueError, match="matched against the whole name"):
        convert(model, exclude="up")


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_an_error_that_lists_the_names(argument):
    model = Model()
    with pytest.raises(ValueError, match=rf"'block\.\*' in `{argument}` matches none of the 5 layers") as error:
        convert(model, **{argument: ["blocks.*", "block.*"]})
    assert all(repr(name) in str(error.value) for name in [*BLOCK_LAYERS, "head"])
    assert fp8_names(model) == []


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_pattern_that_is_no_string_is_a_type_error(argument):
    model = Model()
    with pytest.raises(TypeError, match=rf"`{argument}` of convert to be None, a pattern.*but got \[Linear"):
        convert(model, **{argument: [model.head]})


# ---------------------------------------------------------------------------------------------------------------------
# Size


@pytest.mark.parametrize(
    ("recipe", "shapes"),
    [
        # torchao's tables: tensorwise gains unless K <= 4096 and N <= 1024.
        ("tensorwise", {(1024, 4096): False, (1040, 4096): True, (1024, 4112): True}),
        # rowwise gains if N > 2048 and K > 1024, and not if N <= 4096 and K <= 2048.
        ("rowwise", {(2048, 8192): False, (8192, 1024): False, (4096, 2048): False, (4112, 2048): True}),
        ("rowwise_with_gw_hp", {(4096, 2048): False, (4096, 2064): True}),
    ],
)
def test_skip_small_true_follows_the_tables_of_torchao(recipe, shapes):
    with torch.device("meta"):
        model = nn.ModuleDict({f"{n}x{k}": nn.Linear(k, n) for n, k in shapes})
    report = convert(model, recipe, skip_small=True)
    assert {layer.name: layer.is_fp8 for layer in report.layers} == {f"{n}x{k}": v for (n, k), v in shapes.items()}
    assert {layer.reason for layer in report.left_out} == {"too small to gain (`skip_small`)"}
    assert all(too_small(report.recipe, n, k) is not gains for (n, k), gains in shapes.items())


def test_a_full_name_in_include_overrides_the_size():
    with torch.device("meta"):
        model = nn.ModuleDict({"small": nn.Linear(32, 32), "large": nn.Linear(4096, 4096)})
    convert(model, skip_small=True, include=["small", "*"])
    assert fp8_names(model) == ["small", "large"]


@pytest.mark.parametrize("skip_small", ["auto", False])
def test_under_emulation_auto_skips_nothing_small(skip_small):
    model = Model()
    assert convert(model, skip_small=skip_small).recipe.emulate
    assert fp8_names(model) == BLOCK_LAYERS


def test_if_all_layers_are_small_the_error_says_so():
    with pytest.raises(ValueError, match=r"4 x too small to gain \(`skip_small`\)"):
        convert(Model(), skip_small=True)


@pytest.mark.parametrize("skip_small", ["yes", None, 1])
def test_a_bad_skip_small_is_an_error(skip_small):
    with pytest.raises(ValueError, match=r"`skip_small` to be 'auto', True or False, but got"):
        convert(Model(), skip_small=skip_small)


# ---------------------------------------------------------------------------------------------------------------------
# Pretended hardware


def pretend(monkeypatch: pytest.MonkeyPatch, *devices: Hardware) -> None:
    monkeypatch.setattr(hardware, "local_devices", lambda: list(devices))


def test_a_pretended_gpu_without_fp8_is_an_error_unless_a_format_is_asked_for(monkeypatch):
    pretend(monkeypatch, MI250X)
    model = Model()
    with pytest.raises(ValueError, match=r'MI250X \(gfx90a\) has no FP8.*fp8_format="ocp" emulates'):
        convert(model)
    assert fp8_names(model) == []
    report = convert(model, fp8_format="ocp")
    assert (report.recipe.fp8_format, report.recipe.emulate) == ("ocp", True)
    assert fp8_names(model) == BLOCK_LAYERS


@pytest.mark.parametrize(("gpu", "own", "other"), [(MI300X, "fnuz", "ocp"), (MI350X, "ocp", "fnuz")])
def test_a_pretended_gpu_multiplies_its_own_format_and_emulates_the_other(monkeypatch, gpu, own, other):
    pretend(monkeypatch, gpu, gpu)
    recipe = convert(Model(), skip_small=False).recipe
    assert (recipe.fp8_format, recipe.emulate) == (own, False)
    recipe = convert(Model(), skip_small=False, fp8_format=other).recipe
    assert (recipe.fp8_format, recipe.emulate) == (other, True)


def test_on_a_pretended_gpu_auto_skips_small_layers(monkeypatch):
    pretend(monkeypatch, MI300X)
    with torch.device("meta"):
        model = nn.ModuleDict({"small": nn.Linear(32, 32), "large": nn.Linear(4096, 4096)})
    report = convert(model)
    assert reasons(report) == {"small": "too small to gain (`skip_small`)", "large": None}


def test_pretended_gpus_of_two_formats_are_an_error(monkeypatch):
    pretend(monkeypatch, MI300X, MI350X)
    with pytest.raises(MixedFormatsError):
        convert(Model())


def test_a_device_that_is_given_decides_over_the_pretended_gpus_of_the_machine(monkeypatch):
    pretend(monkeypatch, MI300X)
    recipe = convert(Model(), device=torch.device("cpu")).recipe
    assert (recipe.fp8_format, recipe.emulate) == ("ocp", True)


# ---------------------------------------------------------------------------------------------------------------------
# The report


def test_the_share_is_that_of_the_multiply_adds_and_counts_the_projections_of_attention():
    """in_proj is 96 x 32 = 3072, out_proj 32 x 32 = 1024, `out` 64 x 32 = 2048: 2048 of 6144 is a third."""
    report = convert(AttentionBlock())
    assert [layer.multiply_adds for layer in report.layers] == [3072, 1024, 2048]
    assert report.fp8_share == pytest.approx(1 / 3)
    assert "1 of 3 weight matrices and 33.3 % of the weights' multiply-adds" in report.caption()


def test_the_share_of_a_model_with_a_head_and_an_embedding():
    """Each block 64 x 32 + 32 x 64 = 4096, two of them 8192; the head 64 x 32 = 2048; the embedding is a look-up."""
    report = convert(Model())
    assert report.fp8_share == pytest.approx(8192 / 10240)
    assert [layer.name for layer in report.left_out] == ["head"]


def test_the_projections_of_attention_over_other_widths_are_counted_one_by_one():
    """q 32 x 32, k 32 x 16, v 32 x 16 and out_proj 32 x 32: 1024 + 512 + 512 + 1024."""
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 4, kdim=16, vdim=16), "out": nn.Linear(32, 32)})
    report = convert(model)
    assert sum(layer.multiply_adds for layer in report.left_out) == 3072
    assert report.fp8_share == pytest.approx(1024 / 4096)


def test_weights_that_are_no_matrix_are_named_but_not_counted():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 32))
    report = convert(model)
    assert report.fp8_share == 1.0
    assert report.uncounted == ("0", "1")
    assert "2 modules without a plain matrix" in report.caption()


def test_the_report_of_a_second_conversion_shows_the_class_that_the_user_wrote():
    model = Model()
    convert(model)
    assert {layer.kind for layer in convert(model).layers} == {"Linear"}


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_shows_layers_that_differ_in_an_index_as_one_row(width):
    class Deep(Model):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(12))

    model = Deep()
    console = Console(width=width, file=io.StringIO())
    console.print(convert(model, "rowwise", fp8_format="fnuz", exclude="blocks.11.down"))
    text = console.file.getvalue()
    rows = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    assert max(len(line) for line in text.splitlines()) <= width
    assert "FP8 conversion: recipe rowwise, format fnuz, emulated" in text
    assert "blocks.*.up 12 64 x 32 yes" in rows
    assert "blocks.*.down 11 32 x 64 yes" in rows
    assert "blocks.11.down 1 32 x 64 no: excluded by `exclude`" in rows
    assert "head 1 64 x 32 no: output head" in rows
    # 12 x 2048 up, 11 x 2048 down, of 25 x 2048.
    assert "23 of 25 weight matrices and 92.0 %" in " ".join(text.split())


def test_the_table_of_a_root_layer_and_of_names_with_brackets_renders():
    console = Console(width=80, file=io.StringIO())
    console.print(convert(nn.Linear(32, 32)))
    console.print(convert(nn.ModuleDict({"[bold]x": nn.Linear(32, 32)})))
    text = console.file.getvalue()
    assert "(root)" in text
    assert "[bold]x" in text


def test_the_report_as_text_is_title_and_caption():
    report = convert(Model())
    assert str(report) == f"{report.title()}\n{report.caption()}"
    assert report.title() == "FP8 conversion: recipe tensorwise, format ocp, emulated"


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face models, from a config: nothing is downloaded


@pytest.fixture(scope="module")
def hf():
    return pytest.importorskip("transformers")


def test_gpt2_of_hugging_face_is_an_error_that_names_its_conv1d_and_its_tied_head(hf):
    config = hf.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    model = hf.GPT2LMHeadModel(config)
    with pytest.raises(ValueError, match="No layer would run in FP8") as error:
        convert(model)
    assert "8 x not an nn.Linear (Conv1D): 'transformer.h.0.attn.c_attn'" in str(error.value)
    assert "1 x its weight is tied to 'transformer.wte': 'lm_head'" in str(error.value)


@pytest.mark.parametrize(
    ("tied", "reason"), [(True, "its weight is tied to 'model.embed_tokens'"), (False, "output head")]
)
def test_llama_of_hugging_face_is_converted_but_for_its_head(hf, tied, reason):
    config = hf.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model = hf.LlamaForCausalLM(config)
    report = convert(model)
    assert [(layer.name, layer.reason) for layer in report.left_out] == [("lm_head", reason)]
    # q, o 32 x 32; k, v 16 x 32; gate, up, down 64 x 32; in two layers; the head 64 x 32.
    per_layer = 2 * 1024 + 2 * 512 + 3 * 2048
    assert len(report.converted) == 14
    assert report.fp8_share == pytest.approx(2 * per_layer / (2 * per_layer + 2048))
    tokens = torch.randint(64, (2, 5))
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(("labels", "reason"), [(3, "out_features 3: not a multiple of 16"), (16, "output head")])
def test_a_bert_classifier_of_hugging_face_is_converted_but_for_its_classifier(hf, labels, reason):
    config = hf.BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        num_labels=labels,
    )
    model = hf.BertForSequenceClassification(config)
    report = convert(model)
    assert [(layer.name, layer.reason) for layer in report.left_out] == [("classifier", reason)]
    assert "bert.pooler.dense" in fp8_names(model)
    assert model(input_ids=torch.randint(64, (2, 5))).logits.shape == (2, labels)


def test_uninitialised_lazy_modules_and_missing_weights_are_passed_over():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm1d(), nn.Linear(32, 32), nn.Linear(32, 32))
    model[3].weight = None
    report = convert(model)
    assert [layer.name for layer in report.converted] == ["2"]
    assert "computed by a hook" in report.left_out[0].reason


def test_a_metric_measures_in_its_own_precision():
    from torchmetrics import Metric

    class Distance(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Linear(32, 32)

        def update(self) -> None: ...

        def compute(self) -> None: ...

    report = convert(nn.ModuleDict({"layer": nn.Linear(32, 32), "metric": Distance()}))
    assert [(layer.name, layer.reason) for layer in report.left_out] == [("metric.features", "part of a metric")]
