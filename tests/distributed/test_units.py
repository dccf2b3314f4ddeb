import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torchmetrics import Metric
from torchmetrics.classification import BinaryAccuracy

from lightning_fp8_rocm.distributed.units import (
    Unit,
    check_parameters,
    forward_methods,
    owned_parameters,
    plan_units,
)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.up(x))


class Trunk(nn.Module):
    """Embedding, blocks, head: what most language models look like."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Wrapped(L.LightningModule):
    """The shape of a user's module: one network below it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any) -> Any:
        return self.net(x)


class Holder(nn.Module):
    """A root with whatever below it."""

    def __init__(self, **members: Any) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class MoEBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(8, 8)
        self.dec = nn.Linear(8, 8)

    def encode(self, x: Tensor) -> Tensor:
        return self.enc(x)

    def decode(self, z: Tensor) -> Tensor:
        return self.dec(z)


# ---------------------------------------------------------------------------------------------------------------------
# Models


def untied() -> nn.Module:
    return Wrapped(Trunk())


def tied_within_a_child() -> nn.Module:
    net = Trunk()
    net.head.weight = net.embed.weight
    return Wrapped(net)


def gan() -> nn.Module:
    def stack() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    return Holder(generator=stack(), discriminator=stack())


def vae() -> nn.Module:
    return Holder(vae=VAE(), scale=nn.Parameter(torch.ones(1)))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return Wrapped(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def parameter_containers() -> nn.Module:
    return Holder(
        prompts=nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(2)),
        scales=nn.ParameterDict({"a": nn.Parameter(torch.ones(2))}),
        towers=nn.ModuleDict({"image": nn.Linear(2, 2), "text": nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])}),
    )


def shared_module() -> nn.Module:
    net = Trunk()
    return Holder(net=net, loss=Holder(net=net), again=net.blocks[0])


def shared_below_two_children() -> nn.Module:
    shared = nn.Linear(8, 8)
    return Holder(left=nn.Sequential(shared, nn.Linear(8, 2)), right=nn.Sequential(shared, nn.Linear(8, 4)))


def one_block_many_times() -> nn.Module:
    return Wrapped(nn.Sequential(*[Block()] * 4))


def tied_across_two_children() -> nn.Module:
    left, right = Trunk(), Trunk()
    right.embed.weight = left.embed.weight
    return Holder(left=left, right=right)


def tied_between_two_blocks() -> nn.Module:
    net = Trunk()
    net.blocks[2].up.weight = net.blocks[0].up.weight
    return Wrapped(net)


def tied_between_a_block_and_the_root() -> nn.Module:
    net = Trunk()
    root = Wrapped(net)
    root.probe = net.blocks[1].up.weight
    return root


def metric_child() -> nn.Module:
    return Holder(net=Trunk(), accuracy=BinaryAccuracy())


def experts() -> nn.Module:
    return Wrapped(nn.Sequential(MoEBlock(), MoEBlock()))


def lists_of_lists() -> nn.Module:
    return Wrapped(Holder(layers=nn.ModuleList(nn.ModuleList([Block(), nn.LayerNorm(8)]) for _ in range(2))))


def _llama(tie: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tie,
    )
    return Wrapped(LlamaForCausalLM(config))


def llama() -> nn.Module:
    return _llama(tie=False)


def llama_tied() -> nn.Module:
    return _llama(tie=True)


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return CLIPModel(
        CLIPConfig(
            text_config={**tower, "vocab_size": 64},
            vision_config={**tower, "image_size": 16, "patch_size": 8},
            projection_dim=16,
        )
    )


def clip() -> nn.Module:
    model = _clip()
    model.logit_scale = nn.Parameter(model.logit_scale.detach().reshape(1))
    return Wrapped(model)


def _bert_sizes() -> dict[str, int]:
    return {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return Wrapped(BertForMaskedLM(BertConfig(**_bert_sizes())))


def albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertModel

    return Wrapped(AlbertModel(AlbertConfig(**_bert_sizes(), embedding_size=16)))


MODELS: list[Callable[[], nn.Module]] = [
    untied,
    tied_within_a_child,
    gan,
    vae,
    encoder,
    parameter_containers,
    shared_module,
    shared_below_two_children,
    one_block_many_times,
    tied_across_two_children,
    tied_between_two_blocks,
    tied_between_a_block_and_the_root,
    metric_child,
    experts,
    lists_of_lists,
    llama,
    llama_tied,
    clip,
    bert,
    albert,
]
every_model = pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)


def names(root: nn.Module, policy: Any = "auto") -> list[str]:
    return [unit.name for unit in plan_units(root, policy)]


def kinds(root: nn.Module, policy: Any = "auto") -> list[tuple[str, str]]:
    return [(unit.name, unit.kind) for unit in plan_units(root, policy)]


# ---------------------------------------------------------------------------------------------------------------------
# Which modules


def test_blocks_come_first_then_the_child_around_them_then_the_root() -> None:
    assert kinds(untied()) == [
        ("net.blocks.0", "block"),
        ("net.blocks.1", "block"),
        ("net.blocks.2", "block"),
        ("net", "child"),
        ("", "root"),
    ]


def test_planning_changes_nothing() -> None:
    root = tied_across_two_children()
    before = {name: (type(module), dict(vars(module))) for name, module in root.named_modules()}
    plan_units(root)
    assert {name: (type(module), dict(vars(module))) for name, module in root.named_modules()} == before


def test_a_list_of_one_entry_of_different_classes_or_of_bare_layers_is_no_list_of_blocks() -> None:
    assert names(Wrapped(Trunk(depth=1))) == ["net", ""]
    assert names(Wrapped(nn.Sequential(Block(), Expert()))) == ["net", ""]
    assert names(Wrapped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))) == ["net", ""]


def test_experts_inside_a_block_are_not_split() -> None:
    assert names(experts()) == ["net.0", "net.1", ""]


def test_a_block_list_of_containers_gives_what_is_called_inside() -> None:
    assert names(lists_of_lists()) == ["net.layers.0.0", "net.layers.1.0", "net", ""]


def test_encoder_layers_of_pytorch_are_blocks() -> None:
    assert names(encoder()) == ["net.layers.0", "net.layers.1", ""]


def test_a_child_whose_parameters_all_lie_in_blocks_is_no_unit() -> None:
    root = Wrapped(nn.Sequential(Block(), Block()))
    assert kinds(root) == [("net.0", "block"), ("net.1", "block"), ("", "root")]
    assert owned_parameters(plan_units(root))[""] == []


def test_containers_without_forward_give_their_entries_and_leave_their_own_parameters_to_the_root() -> None:
    root = parameter_containers()
    assert names(root) == ["towers.image", "towers.text.0", ""]
    assert owned_parameters(plan_units(root))[""] == ["prompts.0", "prompts.1", "scales.a"]


def test_a_child_without_forward_but_with_methods_is_a_unit() -> None:
    assert names(vae()) == ["vae", ""]


def test_a_lightning_module_below_another_without_forward_or_methods_gives_its_entries() -> None:
    class Bare(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

        def training_step(self, batch: Tensor) -> Tensor:
            return self.net(batch).sum()

    assert names(Holder(inner=Bare())) == ["inner.net", ""]


def test_a_module_list_subclass_with_methods_but_without_forward_gives_its_entries_since_fsdp2_refuses_it() -> None:
    class Towers(nn.ModuleDict):
        def encode(self, x: Tensor) -> Tensor:
            return self["a"](x)

    root = Holder(towers=Towers({"a": nn.Linear(2, 2)}))
    with pytest.raises(ValueError, match="does not support containers"):
        fully_shard(root.towers)
    assert names(root) == ["towers.a", ""]


def test_a_metric_without_parameters_is_no_unit() -> None:
    assert names(metric_child()) == ["net.blocks.0", "net.blocks.1", "net.blocks.2", "net", ""]


def test_a_model_without_parameters_is_its_root() -> None:
    assert kinds(Holder(activation=nn.ReLU())) == [("", "root")]


def test_the_root_of_a_bare_linear_layer_owns_it() -> None:
    assert owned_parameters(plan_units(nn.Linear(2, 2))) == {"": ["weight", "bias"]}


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face


def test_llama_is_split_into_its_decoder_layers() -> None:
    expected = ["net.model.layers.0", "net.model.layers.1", "net", ""]
    root = llama()
    assert names(root) == expected
    assert owned_parameters(plan_units(root))["net"] == [
        "net.model.embed_tokens.weight",
        "net.model.norm.weight",
        "net.lm_head.weight",
    ]


def test_a_tied_llama_keeps_embedding_and_head_in_one_unit() -> None:
    root = llama_tied()
    assert root.net.lm_head.weight is root.net.model.embed_tokens.weight  # else this test shows nothing
    assert names(root) == ["net.model.layers.0", "net.model.layers.1", "net", ""]
    assert owned_parameters(plan_units(root))["net"] == ["net.model.embed_tokens.weight", "net.model.norm.weight"]


def test_clip_is_split_in_both_towers_and_keeps_its_projections() -> None:
    root = clip()
    planned = names(root)
    assert [name for name in planned if name.endswith(("layers.0", "layers.1", "embeddings"))] == planned[:-2]
    assert len(planned) == 8  # two layers and the embeddings of two towers, the model, the root
    owned = owned_parameters(plan_units(root))
    assert "net.logit_scale" in owned["net"]
    assert "net.visual_projection.weight" in owned["net"]


def test_bert_which_names_no_classes_is_split_by_its_list_and_keeps_its_tied_decoder() -> None:
    root = bert()
    assert root.net.cls.predictions.decoder.weight is root.net.bert.embeddings.word_embeddings.weight
    assert names(root) == ["net.bert.encoder.layer.0", "net.bert.encoder.layer.1", "net", ""]


def test_albert_which_calls_one_layer_many_times_is_one_unit() -> None:
    assert names(albert()) == ["net", ""]


@pytest.mark.parametrize("declared", [["Block"], ("Block",), {"Block"}, "Block"], ids=repr)
def test_no_split_modules_are_read_whatever_holds_them(declared: Any) -> None:
    net = Holder(first=Block(), second=nn.Sequential(Expert(), Expert()))
    net._no_split_modules = declared
    assert names(Wrapped(net)) == ["net.first", "net", ""]


@pytest.mark.parametrize("declared", [None, [], ["Absent"]], ids=repr)
def test_a_hugging_face_model_that_names_nothing_present_is_split_by_its_lists(declared: Any) -> None:
    net = Trunk()
    net._no_split_modules = declared
    assert names(Wrapped(net)) == names(untied())


def test_parts_beside_a_hugging_face_model_are_split_by_their_lists() -> None:
    pretrained = Holder(first=Block())
    pretrained._no_split_modules = ["Block"]
    root = Holder(pretrained=pretrained, adapter=nn.Sequential(Expert(), Expert()))
    assert names(root) == ["pretrained.first", "adapter.0", "adapter.1", ""]


def test_a_submodel_alone_is_enough_to_name_the_classes() -> None:
    inner = Holder(first=Block(), rest=nn.Linear(2, 2))
    inner._no_split_modules = ["Block"]
    outer = Holder(inner=inner, tail=nn.Linear(2, 2))
    assert names(Wrapped(outer)) == ["net.inner.first", "net", ""]


def test_a_submodel_without_names_of_its_own_is_split_by_its_lists() -> None:
    tower = Holder(layers=nn.ModuleList(Expert() for _ in range(2)))
    tower._no_split_modules = None
    outer = Holder(tower=tower, first=Block(), tail=nn.Linear(2, 2))
    outer._no_split_modules = ["Block"]
    assert names(Wrapped(outer)) == ["net.tower.layers.0", "net.tower.layers.1", "net.first", "net", ""]


def test_names_of_an_outer_model_reach_into_its_submodels() -> None:
    inner = Holder(first=Block(), second=Expert())
    inner._no_split_modules = ["Expert"]
    outer = Holder(inner=inner, tail=nn.Linear(2, 2))
    outer._no_split_modules = ["Block"]
    assert names(Wrapped(outer)) == ["net.inner.first", "net.inner.second", "net", ""]


# ---------------------------------------------------------------------------------------------------------------------
# Ties


def test_a_tie_across_two_children_falls_to_the_root_and_leaves_their_blocks() -> None:
    root = tied_across_two_children()
    blocks = [f"{side}.blocks.{index}" for side in ("left", "right") for index in range(3)]
    assert names(root) == [*blocks, ""]
    assert owned_parameters(plan_units(root))[""] == ["left.embed.weight", "left.head.weight", "right.head.weight"]


def test_a_tie_between_two_blocks_falls_to_the_child_around_them() -> None:
    root = tied_between_two_blocks()
    assert names(root) == ["net.blocks.1", "net", ""]
    assert "net.blocks.0.up.weight" in owned_parameters(plan_units(root))["net"]


def test_a_tie_between_a_block_and_the_root_falls_to_the_root() -> None:
    root = tied_between_a_block_and_the_root()
    assert names(root) == ["net.blocks.0", "net.blocks.2", ""]


def test_a_module_under_two_names_is_one_unit_under_the_first() -> None:
    root = shared_module()
    assert names(root) == ["net.blocks.0", "net.blocks.1", "net.blocks.2", "net", ""]
    assert names(one_block_many_times()) == ["net.0", ""]


def test_a_module_shared_below_two_children_falls_to_the_root() -> None:
    # fully_shard on both would shard the parameters of the shared layer twice.
    root = shared_below_two_children()
    assert names(root) == [""]


# ---------------------------------------------------------------------------------------------------------------------
# Policies


def test_a_policy_of_classes_and_names_may_nest() -> None:
    root = untied()
    assert names(root, {Block, "Embedding"}) == ["net.embed", "net.blocks.0", "net.blocks.1", "net.blocks.2", "net", ""]
    assert names(Wrapped(experts().net), [MoEBlock, "Expert"]) == [
        *("net.0.experts.0", "net.0.experts.1", "net.0", "net.1.experts.0", "net.1.experts.1", "net.1"),
        "",
    ]


def test_a_class_name_matches_subclasses_as_the_class_does() -> None:
    class Special(Block):
        pass

    root = Wrapped(Holder(special=Special(), tail=nn.Linear(2, 2)))
    assert names(root, ["Block"]) == names(root, [Block]) == ["net.special", "net", ""]


def test_a_function_is_asked_for_each_module_below_the_root() -> None:
    root, asked = untied(), []

    def policy(module: nn.Module) -> bool:
        asked.append(module)
        return isinstance(module, Trunk | Block)

    assert names(root, policy) == names(root)
    assert set(asked) == set(root.modules()) - {root}


def test_a_policy_without_entries_leaves_the_children() -> None:
    assert names(untied(), []) == ["net", ""]


def test_chosen_modules_without_parameters_or_with_outward_ties_are_no_units() -> None:
    root = tied_within_a_child()
    assert names(root, ["Embedding", "Linear", "LayerNorm"]) == [
        name for index in range(3) for name in (f"net.blocks.{index}.up", f"net.blocks.{index}.norm")
    ] + ["net", ""]
    assert names(Wrapped(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), ["ReLU"]) == ["net", ""]


def test_an_entry_that_matches_nothing_is_an_error_that_lists_classes() -> None:
    with pytest.raises(ValueError, match=r"'LlamaDecoderLayer'.*`auto_wrap_policy`.*Trunk, Embedding, .*Block"):
        plan_units(untied(), {Block, "LlamaDecoderLayer"})
    with pytest.raises(ValueError, match="'Expert' in `auto_wrap_policy`"):
        plan_units(untied(), {Expert})
    with pytest.raises(ValueError, match="below the root"):
        plan_units(untied(), {Wrapped})


def test_choosing_a_container_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"`auto_wrap_policy`.*'net.blocks' \(ModuleList\).*no forward"):
        plan_units(untied(), {nn.ModuleList})


def _fsdp1_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return True


@pytest.mark.parametrize(
    "policy",
    [
        None,
        7,
        "Block",
        Block,
        {Block: 1},
        [3],
        {int},
        Block(),
        ModuleWrapPolicy({Block}),
        functools.partial(_fsdp1_policy, recurse=True),
        lambda module: None,
    ],
    ids=[
        *("None", "number", "string", "class", "dict", "list of numbers", "other class", "module", "FSDP1 policy"),
        *("FSDP1 function", "no answer"),
    ],
)
def test_other_policies_are_a_type_error_that_names_the_argument(policy: Any) -> None:
    with pytest.raises(TypeError, match="`auto_wrap_policy`"):
        plan_units(untied(), policy)


# ---------------------------------------------------------------------------------------------------------------------
# Properties of every plan, and what fully_shard makes of it


@every_model
def test_each_parameter_is_in_one_unit_and_units_come_innermost_first(build: Callable[[], nn.Module]) -> None:
    root = build()
    units = plan_units(root)
    owned = owned_parameters(units)
    assert sorted(name for group in owned.values() for name in group) == sorted(dict(root.named_parameters()))
    assert list(owned) == [unit.name for unit in units]
    assert all(owned[unit.name] for unit in units[:-1])
    assert units[-1] == Unit("", root, "root")
    assert len({id(unit.module) for unit in units}) == len(units)
    assert all(root.get_submodule(unit.name) is unit.module for unit in units)
    for index, unit in enumerate(units):
        assert not any(later.module in set(unit.module.modules()) for later in units[index + 1 :])
    check_parameters(root, units, manual_optimization=False)


@every_model
def test_whatever_uses_a_tied_parameter_lies_in_its_unit(build: Callable[[], nn.Module]) -> None:
    root = build()
    units = plan_units(root)
    parameters, modules = dict(root.named_parameters()), {unit.name: unit.module for unit in units}
    for unit_name, group in owned_parameters(units).items():
        inside = set(modules[unit_name].modules())
        for name in group:
            users = {
                module
                for module in root.modules()
                if any(own is parameters[name] for own in module.parameters(recurse=False))
            }
            assert users <= inside


def shard_as_planned(build_name: str) -> dict[str, Any]:
    """What fully_shard makes of the plan, on a rank."""
    root = globals()[build_name]()
    units = plan_units(root)
    owned = owned_parameters(units)
    methods = [forward_methods(unit.module) for unit in units]
    for unit in units:
        fully_shard(unit.module)
    by_tensor = {id(parameter): name for name, parameter in root.named_parameters()}
    groups = {
        unit.name: [
            by_tensor[id(parameter.sharded_param)]
            for group in unit.module._get_fsdp_state()._fsdp_param_groups
            for parameter in group.fsdp_params
        ]
        for unit in units
    }
    # Not named_parameters alone: a module that the sharding overlooked would hold a plain parameter of a tied pair.
    plain = [
        f"{name}.{key}"
        for name, module in root.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and not isinstance(parameter, DTensor)
    ]
    return {
        "owned": {name: sorted(group) for name, group in owned.items()},
        "groups": {name: sorted(group) for name, group in groups.items()},
        "plain": plain,
        "planned": [(unit.name, unit.kind) for unit in units],
        "planned again": kinds(root),
        "methods": methods,
        "methods again": [forward_methods(unit.module) for unit in units],
        "error again": _error(lambda: check_parameters(root, plan_units(root), manual_optimization=False)),
    }


def _error(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@every_model
def test_fully_shard_groups_exactly_what_was_planned(build: Callable[[], nn.Module], ranks: Ranks) -> None:
    (seen,) = ranks(1, shard_as_planned, build.__name__)
    assert seen["groups"] == seen["owned"]
    assert seen["plain"] == []
    assert seen["planned again"] == seen["planned"]
    assert seen["methods again"] == seen["methods"]
    assert seen["error again"] is None


def plan_what_the_user_sharded() -> dict[str, Any]:
    part = Holder(net=Trunk(), tail=nn.Linear(8, 8))
    for module in (part.net.blocks[0], part.net):
        fully_shard(module)
    return {
        "auto": kinds(part),
        "owned": owned_parameters(plan_units(part)),
        "error": _error(lambda: check_parameters(part, plan_units(part), manual_optimization=True)),
        "by class": names(part, {Block}),
    }


def plan_beside_what_the_user_sharded() -> list[tuple[str, str]]:
    root = untied()
    fully_shard(root.net.blocks[1])
    return kinds(root)


def test_a_block_that_the_user_sharded_is_a_block_like_its_neighbours(ranks: Ranks) -> None:
    assert ranks(1, plan_beside_what_the_user_sharded) == [kinds(untied())]


def test_what_the_user_sharded_stays_a_unit_and_nothing_else_below_it_becomes_one(ranks: Ranks) -> None:
    (seen,) = ranks(1, plan_what_the_user_sharded)
    assert seen["auto"] == [("net.blocks.0", "block"), ("net", "child"), ("tail", "child"), ("", "root")]
    assert seen["owned"]["net.blocks.0"] == [f"net.blocks.0.{name}" for name, _ in Block().named_parameters()]
    assert seen["error"] is None
    assert seen["by class"] == ["net.blocks.0", "net", "tail", ""]


# ---------------------------------------------------------------------------------------------------------------------
# What FSDP2 cannot take


def refused(root: nn.Module, manual: bool = False, policy: Any = "auto") -> str | None:
    return _error(lambda: check_parameters(root, plan_units(root, policy), manual_optimization=manual))


def scalar() -> nn.Module:
    return Holder(net=Holder(temperature=nn.Parameter(torch.tensor(1.0)), linear=nn.Linear(2, 2)))


def mixed_dtypes() -> nn.Module:
    return Holder(net=Holder(first=nn.Linear(2, 2), second=nn.Linear(2, 2).bfloat16()))


def complex_values() -> nn.Module:
    return Holder(net=Holder(phase=nn.Parameter(torch.ones(2, dtype=torch.complex64))))


def not_contiguous() -> nn.Module:
    return Holder(net=Holder(weight=nn.Parameter(torch.ones(2, 3).t())))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (scalar, r"'net\.temperature' has no dimension to shard: register it with shape \(1,\)"),
        (mixed_dtypes, r"unit 'net' .*float32 \('net\.first\.weight', 'net\.first\.bias'\), bfloat16 \('net\.second"),
        (complex_values, r"'net\.phase' is complex"),
        (not_contiguous, r"'net\.weight' is not contiguous"),
    ],
)
def test_what_is_refused_here_fails_in_fsdp2_too(build: Callable[[], nn.Module], message: str, ranks: Ranks) -> None:
    assert re.search(message, refused(build()) or "")
    (seen,) = ranks(1, shard_and_step, build.__name__)
    assert seen is not None


def shard_and_step(build_name: str) -> str | None:
    root = globals()[build_name]()

    def step() -> None:
        for unit in plan_units(root):
            fully_shard(unit.module, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        root.net.forward = lambda x: sum((parameter * x).abs().sum() for parameter in root.net.parameters())
        root.net(torch.ones(1)).backward()

    return _error(step)


def shard_what_is_allowed() -> str | None:
    frozen = functools.partial(nn.Parameter, requires_grad=False)
    root = Holder(
        net=Holder(
            index=frozen(torch.arange(5)),
            mask=frozen(torch.tensor([True, False])),
            phase=frozen(torch.ones(2, dtype=torch.complex64)),
            half_precision=frozen(torch.ones(2, dtype=torch.float16)),
            scale=nn.Parameter(torch.ones(2)),
        )
    )
    message = refused(root)
    if message is not None:
        return message

    def step() -> None:
        for unit in plan_units(root):
            fully_shard(unit.module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        root.net.forward = lambda x: (root.net.scale * x).sum()
        root.net(torch.ones(2)).backward()
        assert root.net.scale.grad.full_tensor().tolist() == [1.0, 1.0]
        assert root.net.index.full_tensor().tolist() == [0, 1, 2, 3, 4]

    return _error(step)


def test_frozen_parameters_may_be_of_any_dtype(ranks: Ranks) -> None:
    assert ranks(2, shard_what_is_allowed) == [None, None]


def test_different_dtypes_in_different_units_are_fine() -> None:
    assert refused(Holder(first=nn.Linear(2, 2), second=nn.Linear(2, 2).bfloat16())) is None
    assert refused(mixed_dtypes(), policy={nn.Linear}) is None


def test_all_offenders_are_named_at_once() -> None:
    root = Holder(a=nn.Parameter(torch.tensor(1.0)), b=nn.LazyLinear(2), c=nn.Parameter(torch.ones(2)))
    message = refused(root, manual=True)
    assert message is not None
    assert re.findall(r"\n  - '([\w.]+)'", message) == ["b.weight", "b.bias", "a", "a", "c"]


def test_lazy_parameters_are_refused_by_name() -> None:
    assert "'net.weight' is not initialised yet" in (refused(Wrapped(nn.LazyLinear(2))) or "")


def test_clip_is_refused_for_its_scalar_with_a_way_out_that_works() -> None:
    root = Wrapped(_clip())
    message = refused(root)
    assert message is not None
    assert "'net.logit_scale' has no dimension" in message
    assert "owner.logit_scale = nn.Parameter(owner.logit_scale.detach().reshape(1))" in message
    owner = root.net
    owner.logit_scale = nn.Parameter(owner.logit_scale.detach().reshape(1))
    assert refused(root) is None


def test_the_root_may_own_parameters_unless_it_steps_its_optimizers_itself() -> None:
    root = vae()
    assert refused(root) is None
    message = refused(root, manual=True)
    assert message is not None
    assert re.search(r"'scale' belongs to the root, .*`automatic_optimization=False`.*never change", message)
    assert "share it" not in message
    assert refused(untied(), manual=True) is None


def test_under_manual_optimization_a_tie_across_children_is_explained() -> None:
    message = refused(tied_across_two_children(), manual=True) or ""
    assert re.search(r"'left\.embed\.weight' .* because 'left' and 'right' share it: .* into one submodule", message)
    message = refused(tied_between_a_block_and_the_root(), manual=True) or ""
    assert "because the root itself and 'net' share it" in message


def refuse_tensor_parallelism() -> tuple[str | None, str | None]:
    net = Trunk()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    net.head.weight = nn.Parameter(distribute_tensor(net.head.weight.detach(), mesh["tp"], [Replicate()]))
    root = Wrapped(net)
    before = refused(root)
    fully_shard(net, mesh=mesh["dp"])
    return before, refused(root)


def test_tensor_parallelism_of_the_user_is_refused_by_name_unless_he_shards_it_too(ranks: Ranks) -> None:
    ((before, after),) = ranks(1, refuse_tensor_parallelism)
    assert before is not None
    assert "'net.head.weight' is a DTensor" in before
    assert "embed" not in before
    assert after is None


def test_units_of_another_module_are_refused() -> None:
    with pytest.raises(ValueError, match="`units`"):
        check_parameters(untied(), plan_units(gan()), manual_optimization=False)
    with pytest.raises(ValueError, match="`units`"):
        owned_parameters(plan_units(untied())[:-1])
    with pytest.raises(ValueError, match="`units`"):
        owned_parameters([])


# ---------------------------------------------------------------------------------------------------------------------
# Methods


def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Base(nn.Module):
    def score(self, x: Tensor) -> Tensor:
        return x

    def removed(self) -> None: ...


class Many(Base):
    limit = 3
    removed = property(lambda self: 1)
    other_class = Block

    def forward(self, x: Tensor) -> Tensor:
        return x

    def encode(self, x: Tensor) -> Tensor:
        return x

    @decorate
    def decorated(self) -> None: ...

    @torch.no_grad()
    def sample(self) -> None: ...

    def stream(self) -> Iterator[int]:
        yield 1

    @property
    def size(self) -> int:
        return 1

    @staticmethod
    def build() -> None: ...

    @classmethod
    def load(cls) -> None: ...

    def _hidden(self) -> None: ...

    def train(self, mode: bool = True) -> "Many":
        return super().train(mode)

    def reset_parameters(self) -> None: ...

    def init_weights(self) -> None: ...

    def unshard(self) -> None: ...


def test_methods_are_the_public_functions_of_the_module_s_own_classes() -> None:
    assert forward_methods(Many()) == ["encode", "decorated", "sample", "stream", "score"]
    assert forward_methods(Block()) == []
    assert forward_methods(VAE()) == ["encode", "decode"]


def test_layers_of_pytorch_have_no_methods_but_the_one_that_computes_by_them() -> None:
    layers = [nn.Linear(2, 2), nn.LSTM(2, 2), nn.MultiheadAttention(2, 1), nn.ModuleList(), nn.ParameterDict()]
    assert [forward_methods(layer) for layer in layers] == [[]] * len(layers)
    assert forward_methods(nn.AdaptiveLogSoftmaxWithLoss(4, 8, [4])) == ["log_prob", "predict"]


def test_methods_of_transformers_models() -> None:
    found = forward_methods(_clip())
    assert {"get_image_features", "get_text_features"} <= set(found)
    assert not {"get_input_embeddings", "tie_weights", "save_pretrained", "from_pretrained", "post_init"} & set(found)
    assert forward_methods(llama().net) == ["generate"]


def test_a_model_that_overrides_what_its_base_defines_gains_no_method() -> None:
    from transformers import LlamaForCausalLM

    class Mine(LlamaForCausalLM):
        def save_pretrained(self, *args: Any, **kwargs: Any) -> None: ...

        def get_input_embeddings(self) -> nn.Module:
            return super().get_input_embeddings()

        def generate(self, *args: Any, **kwargs: Any) -> Any: ...

        def embed(self, tokens: Tensor) -> Tensor:
            return self.model.embed_tokens(tokens)

    assert forward_methods(Mine(llama().net.config)) == ["generate", "embed"]


def test_a_lightning_module_as_a_child_brings_its_own_methods_but_no_hooks() -> None:
    class Inner(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

        def embed(self, x: Tensor) -> Tensor:
            return self.net(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Tensor) -> Tensor:
            return self.net(batch).sum()

        def predict_step(self, batch: Tensor) -> Tensor:
            return self.net(batch)

        def configure_optimizers(self) -> None: ...

        def on_train_start(self) -> None: ...

        def train_dataloader(self) -> None: ...

    assert forward_methods(Inner()) == ["embed"]


def test_a_metric_is_used_by_update_and_compute() -> None:
    class Distance(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

        def update(self, x: Tensor) -> None: ...

        def compute(self) -> Tensor:
            return torch.zeros(1)

        def plot(self) -> None: ...

    assert sorted(forward_methods(Distance())) == ["compute", "update"]


def use_methods() -> dict[str, Any]:
    """A unit used by its methods alone gives what it gave before it was sharded."""
    root = vae()
    x = torch.ones(2, 8)
    before = root.vae.decode(root.vae.encode(x)).detach()
    units = plan_units(root)
    for unit in units:
        fully_shard(unit.module)
    without = _error(lambda: root.vae.encode(x))
    for unit in units:
        for name in forward_methods(unit.module):
            register_fsdp_forward_method(unit.module, name)
    after = root.vae.decode(root.vae.encode(x)).detach()
    torch.testing.assert_close(after, before)
    return {"without": "DTensor" in (without or ""), "methods again": forward_methods(root.vae)}


def test_a_unit_without_forward_works_by_its_registered_methods(ranks: Ranks) -> None:
    assert ranks(2, use_methods) == [{"without": True, "methods again": ["encode", "decode"]}] * 2
