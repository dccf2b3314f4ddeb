import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric

from lightning_fp8_rocm.distributed import fsdp
from lightning_fp8_rocm.distributed.materialise import check_materialisable, materialise
from lightning_fp8_rocm.distributed.methods import gather_in_methods
from lightning_fp8_rocm.distributed.sharding import (
    ShardingPlan,
    broadcast_buffers,
    cast_inputs_of_layers,
    check_sharded_before,
    checkpoint_activations,
    make_mesh,
    move_others,
    prefetch,
    shard,
)
from lightning_fp8_rocm.distributed.units import plan_units
from lightning_fp8_rocm.float8.convert import convert

CPU = torch.device("cpu")


def plan(mesh: Any = None, **changes: Any) -> ShardingPlan:
    mesh = make_mesh("cpu", dist.get_world_size(), None) if mesh is None else mesh
    return ShardingPlan(**{"mesh": mesh, "device": CPU, "param_dtype": None, "reduce_dtype": torch.float32, **changes})


def sharded(root: nn.Module, mesh: Any = None, policy: Any = "auto", **changes: Any) -> nn.Module:
    """``root`` as a strategy shards it."""
    units = plan_units(root, policy)
    check_materialisable(root)
    shard(units, plan(mesh, **changes))
    cast_inputs_of_layers(root)
    fsdp.initialise(root)
    return root


def whole(tensor: Tensor) -> Tensor:
    """The values of a tensor, gathered if it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def values(root: nn.Module) -> dict[str, Tensor]:
    fsdp.reshard(root)
    return {name: whole(tensor) for name, tensor in [*root.named_parameters(), *root.named_buffers()]}


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Names whose tensors are not the same in dtype, shape and each bit."""
    assert first.keys() == second.keys()
    return [
        name
        for name, tensor in first.items()
        if tensor.dtype != second[name].dtype or not torch.equal(tensor, second[name])
    ]


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


class Holder(nn.Module):
    """A root with whatever below it; it calls its children in turn."""

    def __init__(self, **members: Any) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


class Block(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        y = self.dropout(self.down(self.up(x).relu())) * scale
        return x + y if shift is None else x + y + shift


class Net(nn.Module):
    """Blocks and a head; ``scale`` lies on the root."""

    def __init__(self, depth: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(depth))
        self.head = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def seeded(build: Callable[..., nn.Module], *args: Any, seed: int = 0, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return build(*args, **kwargs)


def train(root: nn.Module, inputs: Tensor, steps: int = 2, lr: float = 0.1) -> list[float]:
    optimizer = torch.optim.SGD(root.parameters(), lr)
    losses = []
    for _ in range(steps):
        loss = root(inputs).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---------------------------------------------------------------------------------------------------------------------
# The mesh


def test_a_mesh_that_does_not_multiply_to_the_ranks_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"`device_mesh` .* replicate \* shard = 4.*got \(2, 3\): 2 \* 3 = 6"):
        make_mesh("cpu", 4, (2, 3))


def meshes() -> Any:
    rank = dist.get_rank()
    flat, hybrid = make_mesh("cpu", 4, None), make_mesh("cpu", 4, (2, 2))
    samplers = [mesh["data_parallel"] for mesh in (flat, hybrid)]
    return [(mesh.size(), mesh.get_local_rank() == rank) for mesh in samplers], hybrid.mesh_dim_names


# ---------------------------------------------------------------------------------------------------------------------
# Materialise


class OwnBuffers(nn.Module):
    """Fills everything that it has: tables, counters, flags, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.register_buffer("table", torch.empty(4, dtype=torch.float64), persistent=False)
        self.register_buffer("order", torch.empty(4, dtype=torch.int64))
        self.register_buffer("small", torch.empty(4, dtype=torch.uint8))
        self.register_buffer("mask", torch.empty(2, 3, dtype=torch.bool))
        self.register_buffer("count", torch.empty((), dtype=torch.int32))
        self.register_buffer("phase", torch.empty(2, dtype=torch.complex64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.table.copy_(torch.arange(4))
        self.order.copy_(torch.arange(4).flip(0))
        self.small.data.copy_(torch.tensor([165, 0, 165, 255]))  # through `.data`, which no version counts
        self.mask.data.copy_(torch.ones(2, 3).tril().bool())
        self.count.data.fill_(3)
        self.phase.fill_(1j)


def materialised(root: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    check_materialisable(root)
    materialise(list(root.modules()), root, CPU)
    return root


def on_meta(build: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> Any:
    with torch.device("meta"):
        return build(*args, **kwargs)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(3, 4, padding_idx=0)),
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm2d(4, affine=False), nn.BatchNorm1d(4, affine=False)),
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.LSTM(4, 4, 2),
        OwnBuffers,
    ],
    ids=["layers", "norms", "attention", "lstm", "buffers"],
)
def test_what_was_made_on_meta_gets_the_values_that_it_would_have_had(build: Callable[[], nn.Module]) -> None:
    expected = seeded(build)
    made = materialised(on_meta(build))
    state = dict([*made.named_parameters(), *made.named_buffers()])
    plain = dict([*expected.named_parameters(), *expected.named_buffers()])
    assert state.keys() == plain.keys()
    for name, tensor in state.items():
        assert (tensor.device.type, tensor.dtype, tensor.shape) == ("cpu", plain[name].dtype, plain[name].shape)
        is_random = plain[name].is_floating_point() and plain[name].float().std() > 0
        if not is_random or isinstance(made, OwnBuffers | nn.LSTM):
            torch.testing.assert_close(tensor, plain[name], rtol=0, atol=0)
        else:
            assert not tensor.isnan().any()
            assert 0.3 < tensor.std() / plain[name].std() < 3


def test_values_that_were_loaded_are_not_reset_and_stay_the_same_tensors() -> None:
    class ResetsItsChildren(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.empty(2, device="meta"))
            self.child = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)

        def reset_parameters(self) -> None:
            self.own.fill_(1.0) if not self.own.requires_grad else nn.init.ones_(self.own)
            self.child.weight = nn.Parameter(torch.zeros(4, 4))
            self.norm.reset_parameters()

    layer = on_meta(nn.Linear, 4, 4)
    loaded = torch.full((4, 4), 7.0)
    layer.load_state_dict({"weight": loaded}, strict=False, assign=True)
    outer = ResetsItsChildren()
    nn.init.constant_(outer.norm.running_mean, 5.0)
    before = {name: (tensor, tensor.detach().clone()) for name, tensor in outer.state_dict(keep_vars=True).items()}
    root = nn.Sequential(layer, outer)
    weight = layer.weight
    materialised(root)
    assert layer.weight is weight
    assert torch.equal(layer.weight, loaded)
    assert layer.bias.device.type == "cpu"
    assert 0 < layer.bias.abs().max() < 1
    for name, tensor in outer.state_dict(keep_vars=True).items():
        if name != "own":
            assert tensor is before[name][0], name
            assert torch.equal(tensor, before[name][1]), name
    assert torch.equal(outer.own, torch.ones(2))


def test_ties_on_meta_survive() -> None:
    root = on_meta(lambda: nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 8, bias=False)))
    root[2].weight = root[0].weight
    table = torch.empty(3, device="meta")
    root[1].register_buffer("table", table)
    root[2].register_buffer("table", table)
    for module in (root[1], root[2]):
        plain = module.reset_parameters
        module.reset_parameters = lambda module=module, plain=plain: (plain(), module.table.fill_(2.0))
    materialised(root)
    assert root[2].weight is root[0].weight
    assert isinstance(root[0].weight, nn.Parameter)
    assert root[2].table is root[1].table


def test_a_module_that_cannot_initialise_itself_is_refused_with_its_tensors() -> None:
    class Lost(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(2))
            self.register_buffer("steps", torch.ones(2), persistent=False)

    root = Holder(fine=on_meta(nn.Linear, 2, 2), deep=Holder(lost=on_meta(Lost)))
    with pytest.raises(ValueError, match=r"deep\.lost \(Lost: gain, steps\).*reset_parameters"):
        check_materialisable(root)


@pytest.mark.parametrize("key", ["weight", "table", "order", "small", "mask", "count", "phase"])
def test_what_an_initialiser_leaves_unfilled_is_an_error_that_names_it(key: str) -> None:
    root = Holder(net=on_meta(OwnBuffers))

    def forgets() -> None:
        made = OwnBuffers()
        for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
            if name != key:
                getattr(root.net, name).copy_(tensor)

    root.net.reset_parameters = forgets
    with pytest.raises(ValueError, match=rf"net \(OwnBuffers\) .*did not fill '{key}': .*`reset_parameters\(\)`"):
        materialised(root)


@pytest.mark.parametrize("fill", [lambda t: t[0].zero_(), lambda t: t.mul_(2), lambda t: t[:, 0].fill_(1)])
def test_a_tensor_that_is_filled_in_part_or_from_nothing_is_an_error(fill: Callable[[Tensor], Any]) -> None:
    for key in ("weight", "bias"):
        layer = on_meta(nn.Linear, 4, 4)
        layer.bias = nn.Parameter(torch.empty(4, 4, device="meta"))

        def initialise(layer: nn.Linear = layer, key: str = key) -> None:
            nn.init.ones_(layer.bias if key == "weight" else layer.weight)
            fill(getattr(layer, key))

        layer.reset_parameters = initialise
        with pytest.raises(ValueError, match=f"did not fill '{key}'"):
            materialised(Holder(net=layer))


def test_a_model_with_init_weights_of_its_own_gets_those() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
            self.apply(self._init_weights)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 0.5)

    root = materialised(Holder(net=on_meta(Small)))
    assert torch.equal(root.net.body[0].weight, torch.full((16, 16), 0.5))
    assert root.net.body[0].bias.abs().max() > 0  # torch's own, which the model does not replace
    assert torch.equal(root.net.body[1].weight, torch.ones(16))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.005,
    )
    return LlamaForCausalLM(config)


def test_a_hugging_face_model_on_meta_is_initialised_as_it_does_it_itself() -> None:
    expected = seeded(llama)
    made = materialised(on_meta(llama))
    for (name, tensor), (_, plain) in zip(made.named_buffers(), expected.named_buffers(), strict=True):
        torch.testing.assert_close(tensor, plain, rtol=0, atol=0, msg=name)  # the rotary frequencies, not persistent
    assert len(list(made.named_buffers())) > 0
    for (name, tensor), (_, plain) in zip(made.named_parameters(), expected.named_parameters(), strict=True):
        assert abs(tensor.std() - plain.std()) < 0.001, name
    tokens = torch.arange(8).view(1, 8)
    made.load_state_dict(expected.state_dict())
    torch.testing.assert_close(made(tokens).logits, expected(tokens).logits, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Shard


class AllKinds(nn.Module):
    """Tensors of every kind in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 3, bias=False)  # 3 rows: ranks with one, or none
        self.base.weight.requires_grad_(False)
        self.base.to(torch.bfloat16)
        self.adapter = nn.Linear(16, 3, bias=False)
        self.one = nn.Parameter(torch.randn(1))
        self.register_buffer("index", torch.randint(0, 9, (5,)))
        self.register_buffer("wide", torch.randn(3, dtype=torch.float64))
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("count", torch.randint(0, 9, ()))
        self.register_buffer("across", torch.randn(3, 4).t(), persistent=False)
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x.to(self.base.weight.dtype), self.base.weight)
        return (self.adapter(x) + y) * self.one


def all_kinds() -> nn.Module:
    net = AllKinds()
    frozen = nn.Linear(3, 3).requires_grad_(False)
    root = Holder(net=net, frozen=frozen, head=nn.Linear(3, 3, bias=False))
    frozen.register_buffer("across", net.across)  # one buffer of two units
    return root


def with_own_seed(on_a_mesh_of: tuple[int, int] | None, meta: bool) -> Any:
    """All ranks build with a seed of their own; what each has after ``shard``, and rank 0 had before."""
    world = dist.get_world_size()
    mesh = make_mesh("cpu", world, on_a_mesh_of)
    root = seeded(on_meta if meta else lambda build: build(), Net if meta else all_kinds, seed=dist.get_rank())
    before = {} if meta else {n: t.detach().clone() for n, t in [*root.named_parameters(), *root.named_buffers()]}
    sharded(root, mesh)
    shared = meta or root.net.across is root.frozen.across
    after = values(root)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (before, after))
    unlike = [name for _, other in everyone for name in differing(after, other)]
    unlike += [] if meta else differing(after, everyone[0][0])
    gathered = root(torch.ones(2, 16)).detach()
    same_output = all(bool(torch.equal(gathered, other)) for other in _gather(gathered))
    return unlike, shared, same_output


def _gather(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def test_every_rank_starts_with_what_rank_0_has(ranks: Ranks) -> None:
    for world, mesh in ((2, None), (4, (2, 2))):
        for meta in (False, True):
            for unlike, shared, same_output in ranks(world, with_own_seed, mesh, meta):
                assert unlike == []
                assert shared
                assert same_output
    for samplers, names in ranks(4, meshes):
        assert samplers == [(4, True), (4, True)]
        assert names == ("replicate", "shard")


def kinds_train(cpu_offload: bool) -> Any:
    root, one = seeded(all_kinds), seeded(all_kinds)
    before = values(one)
    sharded(root, cpu_offload=cpu_offload)
    inputs = torch.randn(8, 16)
    losses = train(root, inputs), train(one, inputs)
    after = values(root)
    buffers = [name for name, _ in one.named_buffers()]
    return losses, differing(after, values(one)), [n for n in differing(after, before) if n in buffers], len(buffers)


def test_tensors_of_every_kind_train_as_on_one_device_also_on_ranks_without_rows(ranks: Ranks) -> None:
    for world, cpu_offload in ((4, False), (2, True)):
        for (losses, expected), unlike, changed, buffers in ranks(world, kinds_train, cpu_offload):
            assert losses == expected
            assert losses[0] != losses[1]
            assert unlike == []
            assert changed == []
            assert buffers == 7


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8))
        self.inner = nn.Sequential(
            nn.BatchNorm1d(8, affine=False),
            nn.Linear(8, 8),
            nn.BatchNorm1d(8, track_running_stats=False),
            nn.BatchNorm1d(8),
        )
        self.norm = nn.BatchNorm1d(8)
        self.instance = nn.InstanceNorm1d(1, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.inner(self.image(x)))
        return self.instance(y.unsqueeze(1)).squeeze(1)


def norms() -> Any:
    root, one = seeded(Norms), seeded(Norms)
    for net in (root, one):
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.affine:
                torch.manual_seed(1)
                nn.init.normal_(module.weight, 1.0)
    sharded(root, param_dtype=torch.bfloat16)
    gathered = []
    for module in root.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.affine:
            module.register_forward_hook(lambda m, *_: gathered.append(m.weight.dtype))
    inputs = torch.randn(6, 3, 6, 6)
    found = []
    for net in (root, one):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            losses = train(net, inputs)
            net.eval()
            losses.append(net(inputs).float().pow(2).mean().item())
            net.train()
        found.append(losses)
    after, expected = values(root), values(one)
    unlike = differing({n: after[n] for n, _ in one.named_buffers()}, dict(one.named_buffers()))
    far = [n for n, p in after.items() if not torch.allclose(p.float(), expected[n].float(), rtol=2e-2, atol=2e-3)]
    return found, unlike, far, set(gathered)


def test_norms_with_running_statistics_train_and_evaluate_as_on_one_device(ranks: Ranks) -> None:
    for (losses, expected), unlike, far, gathered in ranks(2, norms):
        torch.testing.assert_close(losses, expected, rtol=1e-3, atol=0)
        assert losses[0] == expected[0]
        assert [name for name in unlike if "num_batches" in name] == []
        assert far == []
        assert gathered == {torch.float32}


class Judge(Metric):
    """A metric with a network inside, as FID and LPIPS have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)))
        self.head = nn.Linear(16, 1)
        self.add_state("total", torch.zeros(1), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        score = self.head(self.net(x))
        self.seen = x.dtype, score.dtype
        self.total = self.total + score.sum()

    def compute(self) -> Tensor:
        return self.total


def metrics() -> Any:
    one = seeded(Judge)
    root = Holder(net=nn.Sequential(Block(), Block()), lstm=nn.LSTM(16, 16), judge=copy.deepcopy(one))
    sharded(root, param_dtype=torch.bfloat16)
    undos = [gather_in_methods(module) for module in fsdp.units(root).values()]
    x = torch.randn(4, 16)
    with torch.no_grad():
        root.judge.update(x)
        one.update(x)
    same = torch.equal(root.judge.total, one.total)
    for undo in undos:
        undo()
    check_sharded_before(plan_units(root), plan(param_dtype=torch.bfloat16))
    refused = error_of(lambda: check_sharded_before(plan_units(root), plan()))
    move_others(root, torch.device("meta"))
    places = root.judge.total.device.type, {p.to_local().device.type for p in root.parameters()}
    return same, root.judge.seen, refused, places, [name for name in fsdp.units(root) if "judge" in name]


def test_a_metric_with_a_network_measures_in_its_own_dtype_and_its_states_move(ranks: Ranks) -> None:
    for same, seen, refused, places, units in ranks(2, metrics):
        # Not the metric: it hashes by its states, and FSDP2 finds what it knows of a module by its hash.
        assert units == ["judge.net.0", "judge.net.1", "judge.head"]
        assert same
        assert seen == (torch.float32, torch.float32)
        assert "'net.0' was sharded before, to compute in torch.bfloat16" in refused
        assert places == ("meta", {"cpu"})


class Casts(Holder):
    """Says what its children get."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.full((1,), 1.001))
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {"input": x.dtype, "own": self.scale.dtype}
        for block in self.blocks:
            block.register_forward_pre_hook(lambda m, args: self.seen.update(block=(args[0].dtype, m.up.weight.dtype)))
            x = block(x)
        return x * self.scale


def sharding_plans() -> Any:
    problems = []
    root = sharded(seeded(Casts), param_dtype=torch.bfloat16)
    root(torch.ones(2, 16))
    wanted = {"input": torch.float32, "own": torch.float32, "block": (torch.bfloat16, torch.bfloat16)}
    problems += [] if root.seen == wanted else [f"casts {root.seen}"]

    inputs = torch.randn(4, 16)
    one = seeded(Net)
    expected = train(one, inputs), values(one)
    for changes in (
        {"reshard_after_forward": None},
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"cpu_offload": True},
        {"prefetch": (0, 0)},
        {"prefetch": (1, 1)},
        {"prefetch": (2, 2)},
        {"prefetch": (7, None)},
    ):
        depths = changes.pop("prefetch", None)
        root = sharded(seeded(Net), **changes)
        blocks = [block._get_fsdp_state() for block in root.blocks]
        if depths is not None:
            prefetch(plan_units(root), *depths)
            ahead = [[blocks.index(s) for s in block._states_to_forward_prefetch] for block in blocks]
            behind = [[blocks.index(s) for s in block._states_to_backward_prefetch] for block in blocks]
            forward, backward = depths[0], depths[1] or 0
            wanted_ahead = [[i for i in (1, 2) if place < i <= place + forward] for place in range(3)]
            wanted_behind = [[i for i in (1, 0) if place - backward <= i < place] for place in range(3)]
            if (ahead, behind) != (wanted_ahead, wanted_behind):
                problems.append(f"prefetch {depths}: {ahead} {behind}")
        is_gathered = []
        root.head.register_forward_pre_hook(lambda m, a, r=root, g=is_gathered: g.append(any(fsdp.groups(r.blocks[0]))))
        seen: list[bool] = []
        root.head.register_forward_pre_hook(
            lambda m, a, b=root.blocks[0], seen=seen: seen.append(not isinstance(b.up.weight, DTensor))
        )
        if (train(root, inputs), expected[0]) != (expected[0], expected[0]) or differing(values(root), expected[1]):
            problems.append(f"training differs {changes} {depths}")
        if depths is None and set(seen) != {changes.get("reshard_after_forward") is False}:
            problems.append(f"reshard {changes} {seen}")

    buffers = Holder(net=nn.Linear(2, 2))
    torch.manual_seed(dist.get_rank())
    buffers.register_buffer("across", torch.randn(3, 4).t())
    buffers.register_buffer("flag", torch.rand(()) > 0.5)
    broadcast_buffers(buffers)
    everyone = _gather(buffers.across)
    problems += [] if all(torch.equal(other, buffers.across) for other in everyone) else ["buffers"]
    problems += [] if buffers.across.stride() == (1, 4) else ["layout"]
    return problems


def test_each_argument_of_the_plan_does_what_it_says_and_changes_no_result(ranks: Ranks) -> None:
    assert ranks(2, sharding_plans) == [[], []]


def sharded_by_the_user_on_meta() -> Any:
    root = on_meta(lambda: Holder(net=Net(), norm=nn.BatchNorm1d(4)))
    for block in root.net.blocks:
        fully_shard(block)
    fully_shard(root.net)
    sharded(root)
    found = values(root)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    losses = train(root, torch.randn(4, 16))
    return (
        [name for other in everyone for name in differing(found, other)],
        any(t.isnan().any() for t in found.values()),
        losses,
    )


def test_what_the_user_sharded_on_meta_is_materialised(ranks: Ranks) -> None:
    for unlike, any_nan, losses in ranks(2, sharded_by_the_user_on_meta):
        assert unlike == []
        assert not any_nan
        assert losses[0] != losses[1]


# ---------------------------------------------------------------------------------------------------------------------
# Activation checkpointing


class Counts(TorchDispatchMode):
    """How often each op runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def fp8_net(recipe: str | None, emulate: bool) -> nn.Module:
    net = seeded(Net, depth=2, dropout=0.25)
    if recipe is not None:
        import dataclasses

        report = convert(net, recipe, skip_small=False, device=CPU, include=None, exclude=None, fp8_format="ocp")
        assert len(report.converted) == 4
        with torch.no_grad():
            for layer in net.modules():
                if hasattr(layer, "fp8_recipe"):
                    layer.fp8_recipe = dataclasses.replace(layer.fp8_recipe, emulate=emulate)
                    layer.weight.mul_(torch.randn(layer.weight.shape[0], 1).exp())
    return net


def gradients(net: nn.Module) -> tuple[Counter[str], dict[str, Tensor]]:
    torch.manual_seed(5)
    inputs = torch.randn(32, 16, requires_grad=True)
    loss = net(inputs).pow(2).mean()
    with Counts() as counts:
        loss.backward()
    assert inputs.grad is not None
    found = {"input": inputs.grad} | {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return counts.ops, found


AMAX = ("aten.max.default", "aten.amax.default")
PRODUCTS = ("aten._scaled_mm.default", "aten.mm.default", "aten.addmm.default")


def total(counts: Counter[str], ops: tuple[str, ...]) -> int:
    return sum(counts[op] for op in ops)


@pytest.mark.parametrize(
    ("recipe", "emulate"),
    [(None, True), ("tensorwise", True), ("tensorwise", False), ("rowwise", False), ("rowwise_with_gw_hp", False)],
)
def test_checkpointing_changes_no_gradient_and_selective_keeps_scales_and_half_of_the_products(
    recipe: str | None, emulate: bool
) -> None:
    net = fp8_net(recipe, emulate)
    names, keys = [name for name, _ in net.named_modules()], list(net.state_dict())
    plain, expected = gradients(net)
    products: dict[str, int] = {}
    amaxes: dict[str, int] = {}
    for policy in ("full", "selective", {Block}, ["Block"]):
        undo = checkpoint_activations(plan_units(net), net, policy)
        assert [name for name, _ in net.named_modules()] == names
        assert list(net.state_dict()) == keys
        counts, found = gradients(net)
        assert differing(found, expected) == [], policy
        products[str(policy)] = total(counts, PRODUCTS) - total(plain, PRODUCTS)
        amaxes[str(policy)] = total(counts, AMAX) - total(plain, AMAX)
        undo()
    print(recipe, emulate, products, amaxes)
    again, found = gradients(net)
    assert again == plain
    assert differing(found, expected) == []
    assert products["full"] == products[str({Block})] == products["['Block']"] == 4
    assert products["selective"] == 2
    assert amaxes["selective"] == 0
    assert (amaxes["full"] > 0) == (recipe is not None)


def test_without_gradients_nothing_is_kept_for_a_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    from lightning_fp8_rocm.distributed import sharding

    plain = sharding.checkpoint
    monkeypatch.setattr(sharding, "checkpoint", lambda *args, **kwargs: calls.append(args) or plain(*args, **kwargs))
    net = seeded(Net)
    undo = checkpoint_activations(plan_units(net), net, "full")
    with torch.no_grad():
        net(torch.ones(2, 16))
    assert calls == []
    net(torch.ones(2, 16))
    assert len(calls) == 3
    undo()


def test_patches_come_off_in_any_order_of_use_and_leave_an_instances_own_forward() -> None:
    net = seeded(Net)
    own = net.blocks[1].forward = lambda x: x
    for _ in range(2):
        undo = checkpoint_activations(plan_units(net), net, "selective")
        assert "forward" in vars(net.blocks[0])
        assert net.blocks[0].forward.__name__ == "forward"
        undo()
        assert "forward" not in vars(net.blocks[0])
        assert net.blocks[1].forward is own
        assert not [name for block in net.blocks for name in vars(block) if "unpatched" in name or "inside" in name]


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputed_blocks_take_keywords_and_what_is_no_tensor(policy: Any) -> None:
    class Calls(Net):
        def forward(self, x: Tensor) -> Tensor:
            shift = torch.ones(16, requires_grad=True)
            for block in self.blocks:
                x = block(x, 0.5, shift=shift)
            x.sum().backward()
            assert shift.grad is not None
            return shift.grad

    net = seeded(Calls)
    expected = net(torch.ones(2, 16))
    undo = checkpoint_activations(plan_units(net), net, policy)
    assert torch.equal(net(torch.ones(2, 16)), expected)
    undo()


def test_checkpointing_that_means_no_module_or_happens_already_is_refused() -> None:
    flat = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    for policy in ("full", "selective"):
        with pytest.raises(
            ValueError, match=rf"policy='{policy}'` matches no module. The model has no repeated blocks"
        ):
            checkpoint_activations(plan_units(flat), flat, policy)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"entry 'Blok' .* matches no module. Classes in the model: Linear, ReLU, S"):
        checkpoint_activations(plan_units(flat), flat, {"Blok"})
    net = Net()
    with pytest.raises(ValueError, match=r"entry 'Blok' in .*matches no module"):
        checkpoint_activations(plan_units(net), net, ["Block", "Blok"])
    model = llama()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"gradient_checkpointing_disable\(\)"):
        checkpoint_activations(plan_units(model), model, "full")
    model.gradient_checkpointing_disable()
    checkpoint_activations(plan_units(model), model, "full")()


# ---------------------------------------------------------------------------------------------------------------------
# Methods that gather


class VAE(nn.Module):
    """A unit that is used by more than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))
        self.dec = nn.Linear(8, 8)
        self.fail = False

    def encode(self, x: Tensor) -> Tensor:
        x = self.enc(x)
        for block in self.blocks:
            x = block(x).tanh()
        if self.fail:
            raise ValueError("no")
        return x

    def decode(self, z: Tensor) -> Tensor:
        return self.dec(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x)) + self.dec(x)

    def sample(self, x: Tensor) -> Tensor:
        a = self(x)
        b = self.decode(a) + torch.nn.functional.linear(x, self.enc.weight)
        c = self(self.enc(b.tanh()))
        return self.dec(a * b * c)

    def both(self, x: Tensor, *, call: Tensor) -> Tensor:
        return self.sample(self.encode(x)) + self.encode(self(call))

    def forgives(self, x: Tensor) -> Tensor:
        self.fail = True
        try:
            self.encode(x)
        except ValueError:
            self.fail = False
        return self.dec(self(x))

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        weight = self.enc.weight
        for _ in range(3):
            x = torch.nn.functional.linear(x, weight).tanh() + self(x)
            yield x

    def posterior(self, x: Tensor) -> torch.distributions.Distribution:
        scale = self.dec(x).exp()
        return torch.distributions.Independent(torch.distributions.Normal(self.encode(x), scale), 1)

    def trained(self) -> Any:
        return {"weights": [self.enc.weight, self.dec.weight], "bias": self.dec.bias}

    def freeze(self, freeze: bool) -> None:
        self.dec.weight.requires_grad_(not freeze)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vae = VAE()

    def forward(self, use: Callable[[VAE, Tensor], Tensor], x: Tensor) -> Tensor:
        return use(self.vae, x)


USES: dict[str, Callable[[VAE, Tensor], Tensor]] = {
    "forward": lambda vae, x: vae(x),
    "methods": lambda vae, x: vae.decode(vae.encode(x).relu()),
    "forward within a method": lambda vae, x: vae.sample(x),
    "everything": lambda vae, x: vae.both(x, call=x * 2) + vae(x) + vae.decode(x),
    "an error within": lambda vae, x: vae.forgives(x) + vae.encode(x),
    "generator": lambda vae, x: sum(vae.stream(x), torch.zeros(())) + vae.decode(x),  # type: ignore[return-value]
    "an object": lambda vae, x: vae.posterior(x).mean * vae.posterior(x).stddev,
    "checkpointed": lambda vae, x: torch.utils.checkpoint.checkpoint(vae.sample, x, use_reentrant=False),
}


def methods(use_of: str, reshard: bool | None, within_root: bool) -> list[str]:
    use = USES[use_of]
    problems = []
    one = seeded(Root)
    root = sharded(copy.deepcopy(one), policy=lambda m: isinstance(m, nn.Sequential), reshard_after_forward=reshard)
    undos = [gather_in_methods(module) for module in fsdp.units(root).values()]
    inputs = torch.randn(4, 8)

    def call(net: Any) -> Tensor:
        x = inputs.clone().requires_grad_()
        out = net(use, x) if within_root else use(net.vae, x)
        out.pow(2).sum().backward()
        assert x.grad is not None
        return torch.cat([out.detach(), x.grad])

    for _ in range(2):
        if not torch.allclose(call(root), call(one), rtol=1e-5, atol=1e-6):  # gradients are summed in another order
            problems.append("output")
        with torch.no_grad():
            ours = root(use, inputs) if within_root else use(root.vae, inputs)
            problems += [] if torch.equal(ours, use(one.vae, inputs)) else ["output under no_grad"]
        if not within_root and use_of != "forward" and not isinstance(root.vae.enc.weight, DTensor):
            problems.append("still gathered under no_grad")
    fsdp.reshard(root)
    for (name, p), (_, q) in zip(root.named_parameters(), one.named_parameters(), strict=True):
        if q.grad is not None and (p.grad is None or not torch.allclose(whole(p.grad), q.grad, rtol=1e-5, atol=1e-6)):
            problems.append(f"gradient of {name}")
    for undo in reversed(undos):
        undo()
    left = [
        name
        for module in root.modules()
        for name in vars(module)
        if name in {*dir(VAE), "_fp8_inside"} - {*dir(nn.Module)}
    ]
    return problems + [name for name in left if name != "fail"] + (["forward"] if "forward" in vars(root.vae) else [])


def all_methods() -> dict[str, list[str]]:
    found = {}
    for use in USES:
        for reshard in (None, False):
            for within_root in (False, True):
                if not (within_root and use == "checkpointed"):
                    found[f"{use}, {reshard}, {within_root}"] = methods(use, reshard, within_root)
    return {name: problems for name, problems in found.items() if problems}


def test_methods_give_what_they_give_unsharded_in_all_combinations(ranks: Ranks) -> None:
    assert ranks(2, all_methods) == [{}, {}]


class Encoder(nn.Module):
    """A unit whose forward returns an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> torch.distributions.Normal:
        loc, scale = self.layers(x).chunk(2, dim=-1)
        return torch.distributions.Normal(loc, scale.exp())


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        posterior = self.encoder(x)
        decoded: Tensor = self.decoder(posterior.mean + posterior.stddev)
        return decoded


def gradients_through_an_object() -> list[bool]:
    one = seeded(Coder)
    root = sharded(copy.deepcopy(one), reshard_after_forward=True)
    undo = gather_in_methods(root.encoder)
    inputs = torch.randn(4, 8)
    for net in (root, one, root, one):
        net(inputs).pow(2).sum().backward()
    undo()
    mine, theirs = root.parameters(), one.parameters()
    return [p.grad is not None and torch.allclose(whole(p.grad), q.grad) for p, q in zip(mine, theirs, strict=True)]


def test_a_unit_that_returns_an_object_with_tensors_gets_its_gradients(ranks: Ranks) -> None:
    assert ranks(2, gradients_through_an_object) == [[True] * 6] * 2


def other_methods() -> dict[str, Any]:
    root = sharded(seeded(Root))
    undo = gather_in_methods(root.vae)
    vae, x = root.vae, torch.ones(2, 8)
    found: dict[str, Any] = {}
    returned = vae.trained()
    fsdp.reshard(root)
    found["returned"] = [
        returned["weights"][0] is vae.enc.weight,
        returned["weights"][1] is vae.dec.weight,
        returned["bias"] is vae.dec.bias,
        isinstance(returned["bias"], DTensor),
    ]
    found["after an error"] = []
    for reshard in (True, False):
        vae.set_reshard_after_forward(reshard)
        for use in (vae.encode, vae):
            vae.fail = True
            message = error_of(lambda use=use: use(x))
            vae.fail = False
            is_sharded = isinstance(vae.enc.weight, DTensor)
            (vae.decode(vae.encode(x)) + vae(x)).sum().backward()
            found["after an error"].append((message, is_sharded, vae.enc.weight.grad is not None))
    vae.freeze(True)
    fsdp.reshard(root)
    frozen = vae.dec.weight.requires_grad, isinstance(vae.dec.weight, DTensor)
    vae.freeze(False)
    fsdp.reshard(root)
    found["frozen"] = (*frozen, vae.dec.weight.requires_grad)
    undo()
    return found


def test_methods_return_shards_survive_errors_and_freeze(ranks: Ranks) -> None:
    for found in ranks(2, other_methods):
        assert found["returned"] == [True] * 4
        assert found["after an error"] == [("no", True, True)] * 4
        assert found["frozen"] == (False, True, True)


class Writes(nn.Module):
    """Every way to write into a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(16, 16)
        self.embed = nn.Embedding(4, 16, max_norm=0.1)
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("mean", torch.zeros(16))
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))
        self.writes = True

    def clip(self) -> None:
        for parameter in (self.lin.weight, self.scale):
            parameter.data.clamp_(-0.01, 0.01)

    def twice(self) -> None:
        with torch.no_grad():
            self.scale.mul_(2)

    def through_a_view(self) -> None:
        self.lin.weight.detach()[0].zero_()

    def fused(self) -> None:
        torch._foreach_mul_([self.scale.data], 2.0)

    def out(self) -> None:
        torch.add(self.scale.detach(), 1.0, out=self.scale.data)

    def replaced(self) -> None:
        self.scale.data = self.scale.data * 2

    def later(self) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.scale.add_(1)
        return self.scale.sum()

    def renormed(self) -> Tensor:
        return self.embed(torch.arange(4))

    def allowed(self, x: Tensor) -> Tensor:
        """Buffers, results, gradients, optimizers over shards, and blocks inside that are gathered meanwhile."""
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        y = self.lin(x).mul_(2) + self.scale.clone().add_(1)
        for block in self.inner:
            y = block(y)
        compiled = torch.compile(torch.nn.functional.gelu, backend="aot_eager", fullgraph=True)
        z = compiled(self.scale * x)
        y.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return z

    def _clip(self) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.01, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.scale.data.lerp_(x.mean(0), 0.5)
        return self.lin(x) * self.scale


def lost_writes(fp8: bool) -> dict[str, Any]:
    net = seeded(Writes)
    if fp8:
        convert(net, "tensorwise", skip_small=False, device=CPU, include=None, exclude=None, fp8_format="ocp")
    root = sharded(Holder(net=net), policy=lambda m: isinstance(m, nn.Sequential), param_dtype=torch.bfloat16)
    gathers = None
    if fp8:
        from lightning_fp8_rocm.distributed.all_gather import FP8AllGather

        gathers = FP8AllGather(root)
    undo = gather_in_methods(net)
    net.optimizer = torch.optim.SGD([p for block in net.inner for p in block.parameters()], 0.1)
    before = values(root)
    x = torch.ones(2, 16)
    found: dict[str, Any] = {"errors": {}}
    for name in ("clip", "twice", "through_a_view", "fused", "out", "replaced", "renormed"):
        found["errors"][name] = error_of(getattr(net, name))
    found["errors"]["forward"] = error_of(lambda: net(x))
    net.writes = False
    net.later()
    net(x)
    net.writes = True
    found["errors"]["later"] = error_of(net.later)
    net.writes = False
    found["unchanged"] = (
        differing(before, values(root)),
        torch.equal(whole(net.later().detach()), whole(before["net.scale"].bfloat16().sum())),
    )
    found["allowed"] = (
        error_of(lambda: net.allowed(x)),
        error_of(lambda: net.allowed(x)),
        error_of(lambda: net(x).sum().backward()),
    )
    found["mean moved"] = bool(net.mean.abs().sum() > 0)
    net._clip()
    fsdp.reshard(root)
    found["clipped"] = max(float(whole(p).abs().max()) for p in net.parameters())
    undo()
    if gathers is not None:
        gathers.unmark()
    return found


def test_a_write_into_what_is_gathered_is_an_error_and_no_other_write_is(ranks: Ranks) -> None:
    for fp8 in (False, True):
        for found in ranks(2, lost_writes, fp8):
            errors = found["errors"]
            written = dict.fromkeys(errors, "net.scale") | {
                "clip": "net.lin.weight",
                "through_a_view": "net.lin.weight",
                "renormed": "net.embed.weight",
            }
            for name, message in errors.items():
                assert message.startswith(f"Writes.{name} writes into '{written[name]}' while"), (name, message)
            assert "a name that starts with `_` (`_clip`)" in errors["clip"]
            assert "register_buffer" in errors["forward"]
            assert found["unchanged"] == ([], True)
            assert found["allowed"] == ("", "", "")
            assert found["mean moved"]
            assert found["clipped"] <= 0.01 + 1e-6
