"""FSDP2's weight all-gather in FP8 on real ranks: the numbers, the bytes, and that no scale is ever stale.

Plain ``convert``, ``fully_shard``, ``fsdp.initialise`` and ``FP8AllGather``: no Trainer. Functions named ``check_*``
run on each rank. Letters: N rows (out_features), K columns, W ranks.
"""

import copy
import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fp8_rocm.distributed import all_gather, fsdp
from lightning_fp8_rocm.distributed.all_gather import FP8AllGather, MarkedShard
from lightning_fp8_rocm.float8.convert import convert, revert
from lightning_fp8_rocm.float8.linear import FP8Linear
from lightning_fp8_rocm.float8.quantize import dequantize, quantize
from lightning_fp8_rocm.float8.recipe import RECIPE_NAMES, FP8Recipe, Operand, Product

BF16, FP32 = torch.bfloat16, torch.float32
# 80 rows on 3 ranks are 27, 27 and 26; 16 rows on 5 ranks are 4, 4, 4, 4 and none.
WIDTH, HIDDEN, TOKENS = 16, 80, 8
every_recipe = pytest.mark.parametrize("recipe", RECIPE_NAMES)


class Block(nn.Module):
    """Two FP8 weights, one norm; and biases, or not."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=bias)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def vary_rows(module: nn.Module) -> nn.Module:
    """Rows and layers of unlike sizes: a fresh layer has one power-of-two row scale, which any mix of rows has too."""
    generator = torch.Generator().manual_seed(3)
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.out_features >= WIDTH:
            with torch.no_grad():
                layer.weight.mul_(torch.randn(layer.out_features, 1, generator=generator).exp())
                layer.weight.mul_(layer.out_features / HIDDEN)
            _, scale = quantize(layer.weight, torch.float8_e4m3fn, row_dim=-1, power_of_2=True)
            assert scale.unique().numel() >= 4
    return module


def net(depth: int = 2, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return vary_rows(nn.Sequential(*(Block(bias) for _ in range(depth))))


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded(
    module: nn.Module,
    recipe: Any = "tensorwise",
    *,
    mesh: DeviceMesh | None = None,
    masters: torch.dtype = FP32,
    gather: bool = True,
    convert_first: bool = True,
    offload: bool = False,
    reshard: bool | None = None,
) -> tuple[nn.Module, FP8AllGather | None]:
    """``module`` in FP8, a unit a child and one for the rest, marked if its weights shall travel in FP8."""
    module.to(masters)
    if convert_first and recipe is not None:
        convert(module, recipe)
    how: dict[str, Any] = {
        "mesh": mesh or mesh_of((dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy(),
        "reshard_after_forward": reshard,
    }
    for child in module.children():
        if not isinstance(child, nn.Linear):
            fully_shard(child, **how)
    fully_shard(module, **how)
    if not convert_first and recipe is not None:
        convert(module, recipe)
    fsdp.initialise(module)
    return module, FP8AllGather(module) if gather else None


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """What this rank sees."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(TOKENS, WIDTH, generator=generator), torch.randn(TOKENS, WIDTH, generator=generator)


def step_of(gathers: FP8AllGather | None, weights_change: bool = False) -> Any:
    return nullcontext() if gathers is None else gathers.step(weights_change=weights_change)


def train(
    module: nn.Module,
    gathers: FP8AllGather | None,
    steps: int = 20,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> list[float]:
    """Losses of this rank; backward comes after the step, as Lightning does it."""
    optimize = optimizer([p for p in module.parameters() if p.requires_grad], lr=3e-3, **options)
    losses = []
    for step in range(steps):
        x, target = batch(step % 2)
        optimize.zero_grad()
        with step_of(gathers):
            loss = (module(x).float() - target).square().mean()
        loss.backward()
        optimize.step()
        losses.append(loss.item())
    return losses


class Collectives(TorchDispatchMode):
    """Counts what goes over the wire, forward and backward, as c10d gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered_bytes: list[int] = []
        self.gathered: list[Tensor] = []
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            self.calls[name] += 1
            if name == "_allgather_base_":
                self.gathered_bytes.append(args[0].nbytes)
                self.gathered.append(args[1].clone())
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_casts() -> Iterator[Counter[str]]:
    """How many weights were cast, by kind of scale."""
    counts: Counter[str] = Counter()
    before = {name: getattr(all_gather, name) for name in ("cast", "quantize")}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return before[name](*args, **kwargs)

        return call

    for name in before:
        setattr(all_gather, name, counting(name))
    try:
        yield counts
    finally:
        for name, function in before.items():
            setattr(all_gather, name, function)


def ceil(rows: int, ranks: int) -> int:
    return -(-rows // ranks)


# ---------------------------------------------------------------------------------------------------------------------
# Losses


def whole_output(module: nn.Module, recipe: str, x: Tensor) -> Tensor:
    """What one process computes from the fp32 masters, with all else in bf16 as FSDP2 gathers it."""
    whole = net()
    whole.load_state_dict({name: p.full_tensor().detach() for name, p in module.named_parameters()})
    convert(whole, recipe)
    for name, parameter in whole.named_parameters():
        if not name.endswith(("up.weight", "down.weight")):
            parameter.data = parameter.data.to(BF16)
    with torch.no_grad():
        return whole(x.to(BF16))


def check_losses(shape: tuple[int, ...], recipe: str) -> dict[str, list[float]]:
    mesh = mesh_of(shape)
    found = {}
    for masters in (BF16, FP32):
        for gather in (True, False):
            module, gathers = sharded(net(), recipe, mesh=mesh, masters=masters, gather=gather)
            if gathers is not None:
                assert len(gathers) == (4 if shape[-1] > 1 else 0)
                assert len(gathers.in_bf16) == 4 - len(gathers)
            key = f"{'bf16' if masters is BF16 else 'fp32'} masters, {'fp8' if gather else 'bf16'} gather"
            found[key] = train(module, gathers)
            if masters is FP32 and gathers:
                x, _ = batch()
                with torch.no_grad(), step_of(gathers):
                    assert module(x).equal(whole_output(module, recipe, x))
    return found


def apart(losses: list[float], others: list[float]) -> float:
    """Relative distance of two curves of losses."""
    a, b = torch.tensor(losses), torch.tensor(others)
    return ((a - b).norm() / b.norm()).item()


# Measured on 2 to 5 ranks: at most 0.9 %, where fp32 masters are rounded once and not by way of bf16. What a wrong
# scale does is shown below.
TOLERANCE = 0.02


@pytest.mark.parametrize(
    ("shape", "recipe"),
    [
        (shape, recipe)
        for shape in [(1,), (2,), (3,), (4,), (5,), (2, 2), (2, 1)]
        for recipe in RECIPE_NAMES
        if recipe != "rowwise_with_gw_hp" or shape == (3,)
    ],
    ids=str,
)
def test_losses_with_fp8_all_gather_equal_those_without_it(ranks: Ranks, shape: tuple[int, ...], recipe: str) -> None:
    world = shape[0] * (shape[1] if len(shape) > 1 else 1)
    for rank, found in enumerate(ranks(world, check_losses, shape, recipe)):
        for masters in ("bf16", "fp32"):
            fp8, bf16 = found[f"{masters} masters, fp8 gather"], found[f"{masters} masters, bf16 gather"]
            assert bf16[-2] < 0.9 * bf16[0]  # the same batch
            # The same numbers are quantised where masters are bf16, and where nothing is gathered.
            if shape[-1] == 1 or (recipe, masters) == ("tensorwise", "bf16"):
                assert fp8 == bf16, f"rank {rank}, {masters}"
                continue
            if masters == "bf16":
                assert fp8[0] == bf16[0]  # the output product of row scales has the same bits, its grad_input has not
            print(f"rank {rank} of {shape}, {recipe}, {masters} masters: {apart(fp8, bf16):.4f}")
            assert apart(fp8, bf16) < TOLERANCE, f"rank {rank}, {masters}: {fp8} {bf16}"


class OneLayer(nn.Module):
    """No grad_input product: all that is left has the same bits under every recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def check_one_layer(recipe: str) -> bool:
    found = []
    for gather in (True, False):
        torch.manual_seed(0)
        module, gathers = sharded(nn.Sequential(vary_rows(OneLayer())), recipe, masters=BF16, gather=gather)
        found.append(train(module, gathers))
    return found[0] == found[1] and found[0][-2] < found[0][0]  # the same batch


@every_recipe
def test_output_and_grad_weight_have_the_same_bits_under_every_recipe_also_on_ranks_without_rows(
    ranks: Ranks, recipe: str
) -> None:
    assert all(ranks(5, check_one_layer, recipe))


def check_wrong_scales(recipe: str) -> float:
    """How far the loss moves when scales are swapped: of neighbouring rows, or of the same weights of two blocks."""
    whole = net()
    with torch.no_grad():
        # Of two weights of one block a swap would cancel: the one grows by as much as the other shrinks.
        whole[1].down.weight.mul_(4)
    whole, gathers = sharded(whole, recipe)
    x, target = batch()

    def loss() -> float:
        with torch.no_grad(), step_of(gathers):
            return (whole(x).float() - target).square().mean().item()

    right = loss()
    received = all_gather._Weight.received

    def swapped(self: Any, outputs: Any, scale: Any, param_dtype: Any, out: Any) -> Any:
        if scale is None:
            outputs[1].copy_(outputs[1].roll(1))
        else:
            weights = gathers._weights
            scale = weights[(weights.index(self) + 2) % 4].scale
        return received(self, outputs, scale, param_dtype, out)

    all_gather._Weight.received = swapped
    try:
        wrong = loss()
    finally:
        all_gather._Weight.received = received
    return abs(wrong - right) / right


@every_recipe
def test_swapped_scales_would_move_the_loss_beyond_the_tolerance(ranks: Ranks, recipe: str) -> None:
    assert min(ranks(3, check_wrong_scales, recipe)) > 5 * TOLERANCE


# ---------------------------------------------------------------------------------------------------------------------
# A gathered weight that something else reads


class Reader(nn.Module):
    """Reads the weight past the layer's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor, how: str) -> Tensor:
        return READS[how](x, self.layer.weight)


READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "F.linear": lambda x, w: F.linear(x, w),
    "penalty": lambda x, w: (w**2).sum(),
    "T @": lambda x, w: w.T @ w[:, :3],
    "@ t()": lambda x, w: x @ w.t(),
    "tied head": lambda x, w: F.cross_entropy(F.linear(F.embedding(torch.tensor([1, 79]), w), w).float(), _LABELS),
}
_LABELS = torch.tensor([3, 5])


def check_reads(recipe: str) -> None:
    torch.manual_seed(0)
    reader = vary_rows(Reader())
    row_dim = None if recipe == "tensorwise" else -1
    quantized = quantize(
        reader.layer.weight.detach(), torch.float8_e4m3fn, row_dim=row_dim, power_of_2=row_dim is not None
    )
    stands_for = dequantize(*quantized).to(BF16).requires_grad_()
    module, gathers = sharded(nn.Sequential(reader), recipe)
    x = torch.randn(4, WIDTH).to(BF16)  # the same on all ranks, so that the mean of the gradients is each of them
    for how, read in READS.items():
        module.zero_grad()
        stands_for.grad = None
        expected = read(x, stands_for)
        expected.float().square().sum().backward()
        with step_of(gathers):
            value = module[0](x, how)
        value.float().square().sum().backward()
        assert type(value) is Tensor
        assert value.equal(expected), how
        assert reader.layer.weight.grad.full_tensor().to(BF16).equal(stands_for.grad), how


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_unit_that_reads_its_gathered_weight_gets_the_dequantised_tensor_and_the_right_gradient(
    ranks: Ranks, recipe: str
) -> None:
    ranks(2, check_reads, recipe)


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.clamp_(-1, 1)
        return self.layer(x)


def check_write() -> None:
    module, _ = sharded(nn.Sequential(vary_rows(Writer())))
    with pytest.raises(RuntimeError, match=r"clamp_.*gathered in FP8.*where they are sharded"):
        module(torch.randn(4, WIDTH))


def test_writing_into_a_gathered_weight_is_an_error(ranks: Ranks) -> None:
    ranks(2, check_write)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.layer(x) + self.other(x) if both else self.layer(x)


def check_unused_parameters(recipe: str) -> None:
    module, gathers = sharded(nn.Sequential(vary_rows(Branches())), recipe)
    set_unused = getattr(module[0], "set_reduce_scatter_unused_params", None)
    if set_unused is not None:
        set_unused(True)
    for both in (True, False):
        module.zero_grad()
        with step_of(gathers):
            loss = module[0](torch.randn(4, WIDTH), both).sum()
        loss.backward()
    assert module[0].layer.weight.grad is not None
    unused = module[0].other.weight.grad
    assert unused is None or unused.full_tensor().eq(0).all()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_weight_without_a_gradient_in_this_step_is_no_trouble(ranks: Ranks, recipe: str) -> None:
    ranks(2, check_unused_parameters, recipe)


# ---------------------------------------------------------------------------------------------------------------------
# Bytes and collectives


class Twice(nn.Module):
    """Calls its unit twice, as a shared block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


def expected_bytes(world: int, recipe: str, bias: bool, *, fp8: bool) -> int:
    """Of one gather of a Block, padding included; the norm and the biases travel in bf16."""
    weights = ceil(HIDDEN, world) * WIDTH + ceil(WIDTH, world) * HIDDEN
    scales = 4 * (ceil(HIDDEN, world) + ceil(WIDTH, world)) if fp8 and recipe != "tensorwise" else 0
    others = ceil(WIDTH, world) * (3 if bias else 1) + (ceil(HIDDEN, world) if bias else 0)
    return world * (weights * (1 if fp8 else 2) + scales + 2 * others)


def check_bytes(recipe: str, bias: bool) -> None:
    world, row_scaled = dist.get_world_size(), recipe != "tensorwise"
    for fp8 in (True, False):
        module, gathers = sharded(net(depth=3, bias=bias), recipe, gather=fp8)
        assert not fp8 or (len(gathers) == 6 and gathers.is_row_scaled == row_scaled)
        expected = expected_bytes(world, recipe, bias, fp8=fp8)
        of_unit = 0
        for param in next(iter(fsdp.groups(module))).fsdp_params:
            usual, in_fp8 = fsdp.gathered_bytes(param)
            is_weight = isinstance(fsdp.owner(param), FP8Linear) and fsdp.name_of(param) == "weight"
            of_unit += in_fp8(row_scaled) if fp8 and is_weight else usual
        assert of_unit == expected
        for _ in range(2):
            with Collectives() as wire, counted_casts() as casts:
                with step_of(gathers):
                    agreed = dict(wire.calls)
                    loss = module(batch()[0]).float().square().mean()
                forward = dict(wire.calls)
                loss.backward()
            # One amax all-reduce a step, before the first gather, whatever the number of layers; none for row scales.
            amaxes = 1 if fp8 and not row_scaled else 0
            assert agreed == ({"allreduce_": 1} if amaxes else {})
            assert wire.calls["allreduce_"] == amaxes
            assert forward["_allgather_base_"] == 3
            assert wire.calls["_allgather_base_"] == 6
            assert wire.calls["_reduce_scatter_base_"] == 3
            assert wire.gathered_bytes == [expected] * 6
            assert set(wire.calls) <= {"allreduce_", "_allgather_base_", "_reduce_scatter_base_"}
            # The same bytes in backward, where units come in the other order, and no new cast.
            if fp8:
                assert all(a.equal(b) for a, b in zip(wire.gathered[:3], wire.gathered[:2:-1], strict=True))
                assert casts == ({"quantize": 6} if row_scaled else {"cast": 6}), casts
                assert all(weight.sent is None for weight in gathers._weights)


@every_recipe
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no_biases"])
def test_a_weight_sends_one_byte_an_element_and_is_cast_once_a_step(ranks: Ranks, recipe: str, bias: bool) -> None:
    ranks(3, check_bytes, recipe, bias)


def check_repeated_gathers(recipe: str) -> None:
    kind = "cast" if recipe == "tensorwise" else "quantize"
    block, gathers = sharded(Twice(vary_rows(Block())), recipe)
    x, _ = batch()
    for weights_change in (False, True):
        for _ in range(2):
            with Collectives() as wire, counted_casts() as casts:
                with step_of(gathers, weights_change):
                    loss = block(x).float().square().mean()
                loss.backward()
            assert wire.calls["_allgather_base_"] == 4
            # Weights that may change are cast for each forward gather; two, one of this unit's weights each.
            assert casts == {kind: 4 if weights_change else 2}, (weights_change, casts)
            expected = (2 if weights_change else 1) if recipe == "tensorwise" else 0
            assert wire.calls["allreduce_"] == expected
            assert all(weight.sent is None for weight in gathers._weights)

    # An evaluation casts once too, and lets go of the bytes when it ends.
    with counted_casts() as casts, torch.no_grad(), step_of(gathers):
        block(x)
    assert casts == {kind: 2}
    assert all(weight.sent is None for weight in gathers._weights)

    # Outside of a step, one all-reduce for each forward gather of a unit, none in backward, which casts once more.
    with Collectives() as wire, counted_casts() as casts:
        block(x).sum().backward()
    assert casts == {kind: 8}
    assert all(weight.sent is None for weight in gathers._weights)
    assert wire.calls["allreduce_"] == (2 if recipe == "tensorwise" else 0)

    # Micro-batches whose gradients are not reduced yet.
    block.set_requires_gradient_sync(False)
    for _ in range(2):
        with Collectives() as wire, counted_casts() as casts:
            with step_of(gathers):
                loss = block(x).float().square().mean()
            loss.backward()
        assert casts == {kind: 2}
        assert not wire.calls["_reduce_scatter_base_"]
        assert all(weight.sent is None for weight in gathers._weights)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_unit_that_is_called_twice_is_cast_once_and_anew_where_weights_may_change(ranks: Ranks, recipe: str) -> None:
    ranks(2, check_repeated_gathers, recipe)


def check_root_holds_no_bytes(recipe: str) -> None:
    """The root is not gathered again in backward, so nobody ever asks for its bytes a second time."""
    module, gathers = sharded(vary_rows(Branches()), recipe)
    assert len(gathers) == 2
    for weights_change in (False, True):
        with Collectives() as wire, step_of(gathers, weights_change):
            loss = module(batch()[0], True).sum()
        loss.backward()
        assert wire.calls["_allgather_base_"] == 1
        assert all(weight.sent is None for weight in gathers._weights)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_unit_that_stays_gathered_keeps_no_bytes_besides(ranks: Ranks, recipe: str) -> None:
    ranks(2, check_root_holds_no_bytes, recipe)


# ---------------------------------------------------------------------------------------------------------------------
# Nothing is stale


def fresh_output(module: nn.Module, recipe: str, x: Tensor) -> Tensor:
    """What a model that was just built, with the weights of now, gives."""
    whole = {name: p.full_tensor().float() for name, p in module.named_parameters()}
    fresh = net()
    fresh.load_state_dict({name: value.detach() for name, value in whole.items()})
    fresh, _ = sharded(fresh, recipe)
    with torch.no_grad():
        return fresh(x)


def _optimizer(kind: Any, **options: Any) -> Callable[[nn.Module, Path], None]:
    def write(module: nn.Module, path: Path) -> None:
        for parameter in module.parameters():
            parameter.grad = parameter.detach() * 0.1 + 0.01
        kind(module.parameters(), lr=0.1, **options).step()

    return write


def _all(change: Callable[[nn.Parameter], object]) -> Callable[[nn.Module, Path], None]:
    def write(module: nn.Module, path: Path) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                change(parameter)

    return write


def _of_rank_0(module: nn.Module, path: Path) -> None:
    if dist.get_rank() == 0:
        with torch.no_grad():
            module[0].up.weight.to_local().mul_(100)
            module[1].down.weight._local_tensor.add_(1)


def _load(module: nn.Module, path: Path, assign: bool = False) -> None:
    state = {name: value.detach().clone() * 5 for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=assign)


def _load_dcp(module: nn.Module, path: Path) -> None:
    saved = {name: value.detach().clone() * 7 for name, value in module.state_dict().items()}
    dcp.save(saved, checkpoint_id=path / "dcp")
    dcp.load(module.state_dict(), checkpoint_id=path / "dcp")


def _swap_ema(module: nn.Module, path: Path) -> None:
    """As Lightning's WeightAveraging does it."""
    for parameter in module.parameters():
        average = parameter.data.clone() * 3
        kept = parameter.data.clone()
        parameter.data.copy_(average)
        average.copy_(kept)


WRITES: dict[str, Callable[[nn.Module, Path], Any]] = {
    "AdamW, a loop": _optimizer(torch.optim.AdamW, foreach=False),
    "AdamW, foreach": _optimizer(torch.optim.AdamW, foreach=True),
    "AdamW, fused": _optimizer(torch.optim.AdamW, fused=True),
    "SGD": _optimizer(torch.optim.SGD, momentum=0.9),
    "mul_ by 100": _all(lambda p: p.mul_(100)),
    "copy_": _all(lambda p: p.copy_(p * 0.3)),
    ".data": _all(lambda p: p.data.mul_(30)),
    ".data of the local": _all(lambda p: p._local_tensor.data.mul_(0.2)),
    "to_local": _all(lambda p: p.to_local().mul_(9)),
    "foreach": lambda module, path: torch._foreach_mul_([p.detach() for p in module.parameters()], 0.25),
    "load_state_dict": _load,
    "load_state_dict, assign": lambda module, path: _load(module, path, assign=True),
    "DCP in place": _load_dcp,
    "to(bfloat16)": lambda module, path: module.to(BF16),
    "to(bfloat16) and back": lambda module, path: module.to(BF16).to(FP32),
    "half of it": _all(lambda p: p.mul_(0.01)),
    "an average swapped in": _swap_ema,
    "on rank 0 alone": _of_rank_0,
}


def check_writes(recipe: str, path: Path) -> list[str]:
    module, gathers = sharded(net(), recipe)
    x, target = batch()
    stale = []
    for name, write in WRITES.items():
        module.zero_grad()
        with step_of(gathers):  # whatever could be kept is kept by now
            loss = (module(x).float() - target).square().mean()
        loss.backward()
        with torch.no_grad(), step_of(gathers):
            before = module(x)
        kept = [(weight.scale, weight.sent, weight.due) for weight in gathers._weights]
        module.zero_grad()
        write(module, path)
        gathers.mark()  # what stands before every forward in the strategy
        outputs = {}
        for where, context in (
            ("outside of a step", nullcontext),
            ("in a step", lambda: step_of(gathers)),
            ("in a step that changes weights", lambda: step_of(gathers, weights_change=True)),
        ):
            for weight, values in zip(gathers._weights, kept, strict=True):  # each is the first to look
                weight.scale, weight.sent, weight.due = values
            with torch.no_grad(), context():
                outputs[where] = module(x)
        outputs["with gradients"] = module(x).detach()
        fresh = fresh_output(module, recipe, x)
        # Rounded to bf16 twice, it is the same.
        assert name.endswith("and back") or not fresh.equal(before), f"{name} changed nothing"
        assert fresh.isfinite().all(), name
        stale += [f"{name}, {where}" for where, output in outputs.items() if not output.equal(fresh)]
        marked = [type(fsdp.local_shard(weight.param)) for weight in gathers._weights]
        assert marked == [MarkedShard] * 4, name
        if module[0].up.weight.dtype is BF16:
            module.to(FP32)  # FSDP2 reduces gradients to the dtype of then
    return stale


@pytest.mark.parametrize(("world", "recipe"), [(2, "tensorwise"), (3, "tensorwise"), (3, "rowwise")])
def test_after_any_write_the_next_output_is_that_of_a_freshly_built_model(
    ranks: Ranks, tmp_path: Path, recipe: str, world: int
) -> None:
    assert ranks(world, check_writes, recipe, tmp_path) == [[]] * world


def check_manual_optimization(recipe: str) -> None:
    """An optimizer steps between two forwards of one step; each backward uses the bytes of its own forward."""
    found = []
    for gather in (True, False):
        module, gathers = sharded(net(), recipe, masters=BF16, gather=gather)
        optimize = torch.optim.SGD(module.parameters(), lr=0.5)
        losses = []
        with step_of(gathers, weights_change=True):
            for turn in range(4):
                optimize.zero_grad()
                x, target = batch(turn)
                loss = (module(x).float() - target).square().mean()
                loss.backward()
                optimize.step()
                losses.append(loss.item())
        found.append(losses)
    if recipe == "tensorwise":
        assert found[0] == found[1]
    assert apart(*found) < TOLERANCE
    assert len(set(found[0])) == 4


class LeavesEarly(nn.Sequential):
    depth = 3

    def forward(self, x: Tensor) -> Tensor:
        for block in list(self)[: self.depth]:
            x = block(x)
        return x


def check_gathered_ahead_for_nobody(recipe: str | None) -> None:
    module, gathers = sharded(LeavesEarly(*net(3)), recipe, gather=recipe is not None)
    for place in (0, 1):
        module[place].set_modules_to_forward_prefetch([module[place + 1]])
    units = list(fsdp.units(module).values())
    x, _ = batch()
    outputs = []
    with torch.no_grad():
        module.depth = 1
        with step_of(gathers):
            module(x)
        assert module[1]._get_fsdp_state()._fsdp_param_groups[0]._all_gather_result is not None
        for parameter in module.parameters():
            parameter.mul_(2)
        module.depth = 3
        for _ in range(2):
            fsdp.reshard_units(units)
            with step_of(gathers):
                outputs.append(module(x))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise"])
def test_what_was_gathered_ahead_for_a_unit_that_was_not_called_is_not_used_later(
    ranks: Ranks, recipe: str | None
) -> None:
    ranks(2, check_gathered_ahead_for_nobody, recipe)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_an_optimizer_may_step_within_a_step_of_manual_optimization(ranks: Ranks, recipe: str) -> None:
    ranks(2, check_manual_optimization, recipe)


def check_not_finite(recipe: str, value: float) -> None:
    torch.manual_seed(0)
    module, gathers = sharded(nn.Sequential(vary_rows(OneLayer())), recipe)
    rows = ceil(WIDTH, dist.get_world_size())
    if dist.get_rank() == 1:
        with torch.no_grad():
            module[0].layer.weight.to_local()[2, 5] = value
    x, _ = batch()
    outputs = []
    with torch.no_grad(), step_of(gathers):
        outputs.append(module(x))
    outputs.append(module(x))
    for output in outputs:
        if recipe == "tensorwise":
            assert output.isnan().all()
        else:
            is_row = torch.arange(WIDTH) == rows + 2
            assert output[:, is_row].isnan().all()
            assert output[:, ~is_row].isfinite().all()


@every_recipe
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_what_is_not_finite_on_one_rank_is_nan_on_all_of_them_and_never_a_clean_number(
    ranks: Ranks, recipe: str, value: float
) -> None:
    ranks(3, check_not_finite, recipe, value)


# ---------------------------------------------------------------------------------------------------------------------
# What models are made of


class LoRABlock(nn.Module):
    """A frozen FP8 base with an adapter that is not FP8, a frozen fp32 vector, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.base = nn.Linear(WIDTH, HIDDEN).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, HIDDEN, bias=False)
        self.offset = nn.Parameter(torch.randn(HIDDEN), requires_grad=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(F.gelu(self.base(x) + self.b(self.a(x)) + self.offset))


def check_mixed_group(recipe: str) -> None:
    found = []
    for gather in (True, False):
        torch.manual_seed(0)
        blocks = vary_rows(nn.Sequential(LoRABlock(), LoRABlock()))
        module, gathers = sharded(blocks, recipe, masters=BF16, gather=gather)
        base = module[0].base.weight
        before = base.full_tensor().clone()
        found.append(train(module, gathers, steps=8))
        assert module[0].base.weight is base
        assert base.grad is None
        assert base.full_tensor().equal(before)
        assert module[0].a.weight.grad is not None
        if gathers is not None:
            assert sorted(gathers.names) == ["0.base", "0.down", "1.base", "1.down"]
    assert found[0][-2] < found[0][0]  # the same batch
    assert apart(*found) < TOLERANCE
    assert recipe != "tensorwise" or found[0] == found[1]


@every_recipe
def test_a_frozen_fp8_base_travels_in_fp8_beside_what_does_not(ranks: Ranks, recipe: str) -> None:
    ranks(3, check_mixed_group, recipe)


def check_variants(recipe: str) -> None:
    """However the model came to be sharded and marked, its losses are the same bits."""
    plain, gathers = sharded(net(), recipe)
    expected = train(plain, gathers, steps=4)

    offloaded, gathers = sharded(net(), recipe, offload=True)
    assert train(offloaded, gathers, steps=4) == expected

    by_user, gathers = sharded(net(), recipe, convert_first=False)
    assert len(gathers) == 4
    assert train(by_user, gathers, steps=4) == expected

    kept, gathers = sharded(net(), recipe, reshard=False)
    assert train(kept, gathers, steps=4) == expected

    # Marked, used, unmarked, used, and marked again.
    module, first = sharded(net(), recipe)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    assert train(module, first, steps=4) == expected
    first.unmark()
    assert len(first) == 0
    assert not any(isinstance(fsdp.local_shard(p), MarkedShard) for g in fsdp.groups(module) for p in g.fsdp_params)
    module.load_state_dict(start)
    with Collectives() as wire:
        usual = train(module, None, steps=4)
    assert expected_bytes(dist.get_world_size(), recipe, True, fp8=False) in wire.gathered_bytes
    without, _ = sharded(net(), recipe, gather=False)
    assert usual == train(without, None, steps=4)
    module.load_state_dict(start)
    assert train(module, FP8AllGather(module), steps=4) == expected


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_offloaded_sharded_by_the_user_kept_gathered_or_marked_twice_the_losses_are_the_same(
    ranks: Ranks, recipe: str
) -> None:
    ranks(3, check_variants, recipe)


def check_reverted() -> None:
    module, gathers = sharded(net())
    start = {name: value.clone() for name, value in module.state_dict().items()}
    train(module, gathers, steps=2)
    gathers.unmark()
    revert(module)
    module.load_state_dict(start)
    usual, _ = sharded(net(), None, gather=False)
    assert train(module, None, steps=4) == train(usual, None, steps=4)
    kinds = {type(layer.weight._local_tensor) for layer in module.modules() if isinstance(layer, nn.Linear)}
    assert kinds == {Tensor}
    assert not any(isinstance(layer, FP8Linear) for layer in module.modules())

    with torch.no_grad():
        module[0].unshard()
        assert type(module[0].up.weight) is nn.Parameter
        module[0].reshard()


def test_unmarked_and_reverted_a_model_computes_bf16_with_ordinary_tensors(ranks: Ranks) -> None:
    ranks(2, check_reverted)


def check_two_recipes() -> None:
    """Each half of a model was converted by the user under another recipe of one scale a tensor."""
    e4m3, e5m2 = Operand("tensor", "e4m3"), Operand("tensor", "e5m2")
    coarse = FP8Recipe(Product(e4m3, e5m2), Product(e5m2, e5m2), None, power_of_2_scales=True, name="coarse")
    found = []
    for gather in (True, False):
        module = net()
        convert(module[0], "tensorwise")
        convert(module[1], coarse)
        module, gathers = sharded(module, None, masters=BF16, gather=gather)
        found.append(train(module, gathers, steps=4))
    assert found[0] == found[1]


def test_two_recipes_in_one_model_each_scale_their_own_weights(ranks: Ranks) -> None:
    ranks(2, check_two_recipes)


def check_refused() -> None:
    row, tensor = Operand("row"), Operand("tensor")
    recipe = FP8Recipe(Product(row, row), Product(row, tensor), None, name="no one cast of the weight")
    assert recipe.gather_granularity is None
    found = []
    for gather in (True, False):
        module, gathers = sharded(net(), recipe, masters=BF16, gather=gather)
        if gathers is not None:
            assert len(gathers) == 0
            assert set(gathers.in_bf16) == {"0.up", "0.down", "1.up", "1.down"}
            assert "cast the weight differently" in gathers.in_bf16["0.up"]
        with Collectives() as wire:
            found.append(train(module, gathers, steps=2))
        assert set(wire.gathered_bytes) == {expected_bytes(dist.get_world_size(), "", True, fp8=False)}
    assert found[0] == found[1]


def test_a_recipe_that_wants_two_casts_of_the_weight_travels_in_bf16_and_says_so(ranks: Ranks) -> None:
    ranks(2, check_refused)


# ---------------------------------------------------------------------------------------------------------------------
# What leaves the model


def check_plain_outside(path: Path) -> None:
    module, gathers = sharded(net())
    train(module, gathers, steps=1)
    assert type(module[0].up.weight._local_tensor) is MarkedShard
    state = module.state_dict()
    for value in (*state.values(), *copy.deepcopy(state).values()):
        assert type(value._local_tensor) is Tensor
    shard = module[0].up.weight._local_tensor
    for copied in (pickle.loads(pickle.dumps(shard)), copy.deepcopy(shard), shard.clone(), shard + 0):
        assert type(copied) is Tensor
        assert copied.equal(shard.detach())
    box = io.BytesIO()
    torch.save({"shard": shard, "whole": module[0].up.weight.full_tensor()}, box)
    assert b"lightning_fp8_rocm" not in box.getvalue()
    box.seek(0)
    assert torch.load(box, weights_only=True)["shard"].equal(shard.detach())
    box = io.BytesIO()
    torch.save(dict(module.named_parameters()), box)
    assert b"lightning_fp8_rocm" not in box.getvalue()
    optimize = torch.optim.AdamW(module.parameters())
    with step_of(gathers):
        loss = module(batch()[0]).sum()
    loss.backward()
    optimize.step()
    assert type(module[0].up.weight.grad._local_tensor) is Tensor
    assert {type(v._local_tensor) for s in optimize.state.values() for v in s.values() if isinstance(v, DTensor)} == {
        Tensor
    }
    dcp.save({"model": state, "parameters": dict(module.named_parameters())}, checkpoint_id=path)


def test_what_is_saved_or_copied_is_an_ordinary_tensor_that_knows_nothing_of_this_package(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(2, check_plain_outside, tmp_path / "dcp")
    files = [file for file in (tmp_path / "dcp").rglob("*") if file.is_file()]
    assert len(files) == 3  # one a rank, and the metadata
    for file in files:
        assert b"lightning_fp8_rocm" not in file.read_bytes()
        assert b"MarkedShard" not in file.read_bytes()


# ---------------------------------------------------------------------------------------------------------------------
# 1,024 ranks, and a compiler


def check_many_ranks(recipe: str) -> None:
    """No data moves in a `fake` group; shapes, bytes and collectives are those of rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = 1024
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    module, gathers = sharded(net(), recipe)
    with Collectives() as wire:
        with step_of(gathers):
            loss = module(batch()[0]).float().square().mean()
        loss.backward()
    torch.optim.AdamW(module.parameters()).step()
    assert wire.gathered_bytes == [expected_bytes(world, recipe, True, fp8=True)] * 4
    assert wire.calls["allreduce_"] == (1 if recipe == "tensorwise" else 0)
    assert module[0].up.weight.to_local().shape == (1, WIDTH)


@every_recipe
def test_a_training_step_of_one_rank_of_1024_sends_what_was_predicted(ranks: Ranks, recipe: str) -> None:
    ranks(1, check_many_ranks, recipe)


def check_compiled(recipe: str) -> None:
    from torch._dynamo.utils import counters

    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        module = net()
        if compiled:
            for block in module:
                block.compile(fullgraph=True, backend="aot_eager")
        module, gathers = sharded(module, recipe)
        optimize = torch.optim.AdamW(module.parameters(), lr=1e-2)
        losses, graphs = [], []
        for step in range(6):
            optimize.zero_grad()
            for micro in range(2):
                module.set_requires_gradient_sync(micro == 1)
                x, target = batch(2 * step + micro)
                with step_of(gathers):
                    loss = (module(x).float() - target).square().mean()
                loss.backward()
                losses.append(loss.item())
            optimize.step()
            with torch.no_grad(), step_of(gathers):
                losses.append(module(batch()[0]).float().square().mean().item())
            graphs.append(counters["stats"]["unique_graphs"])
        found.append(losses)
        if compiled:
            assert graphs[0] > 0
            assert len(set(graphs[1:])) == 1, f"compiled again: {graphs}"
            assert not counters["graph_break"]
    assert found[0] == found[1]


@every_recipe
def test_a_compiled_block_gives_the_losses_of_eager_in_one_graph_and_is_compiled_once(
    ranks: Ranks, recipe: str
) -> None:
    ranks(2, check_compiled, recipe)
