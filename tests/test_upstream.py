"""Each fault of upstream that this package works around, reproduced without the workaround: see docs/upstream.md.

A test here says what upstream should do. It fails today, strictly: on the day it passes, delete the workaround, the
ledger's entry and the test.
"""

import ast
import dataclasses
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from packaging.version import Version
from ranks import Ranks, RanksFailedError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import (
    CastConfig,
    Float8LinearConfig,
    ScalingGranularity,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def fault(
    reason: str, raises: type[BaseException] = AssertionError, torch_before: str | None = None
) -> pytest.MarkDecorator:
    is_there = torch_before is None or Version(torch.__version__) < Version(torch_before)
    return pytest.mark.xfail(is_there, strict=True, raises=raises, reason=f"docs/upstream.md: {reason}")


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


# ---- what needs ranks

FACTS: list[Callable[[], Any]] = []


def on_ranks(function: Callable[[], Any]) -> Callable[[], Any]:
    """Each of two ranks runs it, all in one call. It returns a fact, and raises nothing: the ranks would start anew."""
    FACTS.append(function)
    return function


def all_facts() -> dict[str, tuple[bool, Any]]:
    found = {}
    for function in FACTS:
        try:
            found[function.__name__] = (True, function())
        except Exception:
            found[function.__name__] = (False, traceback.format_exc())
    return found


@pytest.fixture(scope="module")
def facts(ranks: Ranks) -> Callable[[Callable[[], Any]], list[Any]]:
    """What each of two ranks found by a function; what it raised unexpectedly is no reproduction, so no xfail."""
    try:
        by_rank = ranks(2, all_facts)
    except RanksFailedError as error:
        raise RuntimeError("the ranks failed") from error

    def found_by(function: Callable[[], Any]) -> list[Any]:
        replies = [found[function.__name__] for found in by_rank]
        for is_fact, what in replies:
            if not is_fact:
                raise RuntimeError(what)
        return [what for _, what in replies]

    return found_by


def refused(call: Callable[[], Any], kind: type[BaseException], words: str) -> str:
    """The message of this kind with these words; empty if nothing was raised. Anything else is raised."""
    try:
        call()
    except kind as error:
        if words not in str(error):
            raise
        return str(error)
    return ""


def layers(*sizes: int, bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(inputs, outputs, bias=bias) for inputs, outputs in pairwise(sizes)))


def sharded(model: nn.Module, **how: Any) -> Any:
    """``fully_shard`` over all ranks, the direct children too."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in model.children():
        fully_shard(child, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


# ---- Lightning


@fault("Lightning has no registry for precisions")
def test_a_third_party_can_name_a_precision():
    done = python('import lightning as L\nL.Trainer(precision="fp8-rocm", accelerator="cpu", logger=False)')
    assert "Precision 'fp8-rocm' is invalid" not in done.stderr
    done.check_returncode()  # an error of another kind is no reproduction


@on_ranks
def run_of_model_parallel_strategy() -> tuple[list[int], bool]:
    """The batches of this rank, and whether the weights were sharded already when the precision converted the model."""
    import lightning as L
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader

    seen: list[int] = []
    was_sharded: list[bool] = []

    class Noting(Precision):
        def convert_module(self, module: nn.Module) -> nn.Module:
            was_sharded.append(any(isinstance(parameter, DTensor) for parameter in module.parameters()))
            return module

    class Module(L.LightningModule):
        def configure_model(self) -> None:
            self.net = fully_shard(layers(1, 2), mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            seen.extend(batch.flatten().int().tolist())
            return self.net(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(),
        plugins=[Noting()],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), DataLoader(torch.arange(4.0).view(4, 1), batch_size=1))
    return seen, was_sharded[0]


@fault("ModelParallelStrategy gives every process of a node the same batches")
def test_each_process_of_a_node_gets_batches_of_its_own(facts):
    (mine, _), (others, _) = facts(run_of_model_parallel_strategy)
    assert sorted(mine + others) == [0, 1, 2, 3]


@fault("ModelParallelStrategy converts what is sharded already")
def test_the_precision_converts_a_model_before_it_is_sharded(facts):
    assert [was_sharded for _, was_sharded in facts(run_of_model_parallel_strategy)] == [False, False]


@on_ranks
def accumulates_without_reducing() -> bool:
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy()
    strategy.model = sharded(layers(4, 4))
    with strategy.block_backward_sync():
        strategy.model(torch.ones(2, 4)).sum().backward()
    return all(parameter.grad is None for parameter in strategy.model.parameters())


@fault("block_backward_sync knows DDP only")
def test_gradients_of_fsdp2_are_not_reduced_while_they_are_accumulated(facts):
    assert facts(accumulates_without_reducing) == [True, True]


def third_party_strategy() -> Any:
    from lightning.pytorch.strategies import ParallelStrategy

    ours = type("Ours", (ParallelStrategy,), {"__abstractmethods__": frozenset()})
    ours.__abstractmethods__ = frozenset()
    return ours()


@fault("Lightning lists the strategies that are distributed")
def test_a_parallel_strategy_is_distributed():
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    assert _AcceleratorConnector.is_distributed.fget(SimpleNamespace(strategy=third_party_strategy()))


@fault("Lightning lists the strategies that take a compiled module", RuntimeError)
def test_a_third_party_strategy_may_be_given_a_compiled_module():
    import lightning as L
    from lightning.pytorch.utilities.compile import _verify_strategy_supports_compile, from_compiled

    _verify_strategy_supports_compile(from_compiled(torch.compile(L.LightningModule())), third_party_strategy())


@fault("the precision that a strategy carries wins over the flag, silently")
def test_a_trainer_has_the_precision_that_it_was_given():
    import lightning as L
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy

    strategy = DDPStrategy(precision_plugin=MixedPrecision("bf16-mixed", "cpu"))  # as after an earlier Trainer
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, precision="32-true", logger=False)
    assert trainer.precision == "32-true"


@fault("materialisation overwrites every weight if one is on the meta device")
def test_materialisation_keeps_weights_that_have_values():
    from lightning.fabric.utilities.init import _materialize_distributed_module

    model = layers(4, 4, 4)
    loaded = model[0].weight.detach().clone()
    model[1].to("meta")
    _materialize_distributed_module(model, torch.device("cpu"))
    assert torch.equal(model[0].weight, loaded)


@fault("loading assumes that every optimizer has a state", IndexError)
def test_the_state_of_an_optimizer_without_any_can_be_loaded():
    from lightning.fabric.strategies.model_parallel import _rekey_optimizer_state_if_needed

    model = layers(4, 4)
    _rekey_optimizer_state_if_needed(torch.optim.SGD(model.parameters(), lr=0.1).state_dict(), model)


@fault("the tool that makes one file of a sharded checkpoint expects another key than the Trainer writes", KeyError)
def test_a_sharded_checkpoint_of_the_trainer_can_be_consolidated():
    from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint

    _format_checkpoint({"state_dict": {}, "optimizer_0": {}})  # the keys of ModelParallelStrategy.save_checkpoint


@fault("a run that resumes does not hear of weights_only")
def test_a_strategy_that_loads_after_its_setup_hears_of_weights_only(tmp_path):
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.strategies import SingleDeviceStrategy

    class Late(SingleDeviceStrategy):
        restore_checkpoint_after_setup = True
        heard: Any = "nothing"

        def load_checkpoint(self, checkpoint_path, weights_only=None):
            self.heard = weights_only
            return super().load_checkpoint(checkpoint_path, weights_only=False)

    run = lightning_trainer()
    run.fit(BoringModel())
    run.save_checkpoint(tmp_path / "one.ckpt")
    run = lightning_trainer(strategy=Late("cpu"))
    run.fit(BoringModel(), ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    assert run.strategy.heard is False


def lightning_trainer(**arguments: Any) -> Any:
    from lightning.pytorch import Trainer

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    limits = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0}
    return Trainer(
        **{"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, **quiet, **limits, **arguments}
    )


@fault("load_from_checkpoint opens files only", IsADirectoryError)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_module_loads_from_a_sharded_checkpoint(tmp_path):
    from inspect import unwrap

    from lightning.pytorch.core import saving
    from lightning.pytorch.demos.boring_classes import BoringModel

    dcp.save({"state_dict": BoringModel().state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    torch.save({"pytorch-lightning_version": "2.6.6"}, tmp_path / "meta.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "pl_load", unwrap(saving.pl_load))  # Lightning's own, which ours stands in front of
        BoringModel.load_from_checkpoint(tmp_path)


@on_ranks
def sync_after_a_span_of_fabric() -> bool:
    from lightning.fabric.strategies.model_parallel import _FSDPNoSync

    model = sharded(layers(4, 3, 4))
    with _FSDPNoSync(model, enabled=False):
        pass
    model(torch.ones(1, 4)).sum().backward()
    return model[0].weight.grad is not None


@fault("Fabric leaves gradients unreduced")
def test_gradients_are_reduced_after_a_span_that_was_not_enabled(facts):
    assert facts(sync_after_a_span_of_fabric) == [True, True]


@fault("Fabric does not tell a precision its device")
def test_a_precision_of_fabric_knows_the_device_when_it_converts():
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.precision import Precision

    class Asks(Precision):
        def convert_module(self, module: nn.Module) -> nn.Module:
            known.update(vars(self))
            return module

    known: dict[str, Any] = {}
    Fabric(accelerator="cpu", devices=1, plugins=Asks()).setup(nn.Linear(2, 2))
    assert known


@fault("a LightningModule of the other name is said to be none")
def test_a_module_of_the_other_name_is_called_that():
    from inspect import unwrap

    import pytorch_lightning
    from lightning.pytorch.trainer import trainer

    class OfAUser(pytorch_lightning.LightningModule):
        pass

    with pytest.raises(TypeError) as error:
        unwrap(trainer._maybe_unwrap_optimized)(OfAUser())  # Lightning's own, which ours stands in front of
    assert "pytorch_lightning" in str(error.value)


@fault("the names that `fabric run` takes are fixed when it starts")
def test_fabric_run_takes_a_strategy_of_a_third_party(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from lightning.fabric import Fabric\n"
        "from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy\n"
        "STRATEGY_REGISTRY.register('of_a_third_party', DDPStrategy)\n"
        "Fabric(devices=1, accelerator='cpu')\n"
    )
    command = [sys.executable, "-c", "from lightning.fabric.cli import _main; _main()", "run"]
    done = subprocess.run(
        [*command, "--accelerator=cpu", "--strategy=of_a_third_party", script],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Invalid value for '--strategy'" not in done.stderr
    done.check_returncode()  # an error of another kind is no reproduction


@fault("a checkpoint holds no random numbers")
def test_a_resumed_run_draws_the_same_random_numbers(tmp_path):
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Draws(BoringModel):
        def on_train_epoch_start(self):
            self.drawn = torch.rand(1).item()

    def fit(epochs: int, **arguments: Any) -> float:
        torch.manual_seed(0)
        module = Draws()
        run = lightning_trainer(max_epochs=epochs)
        run.fit(module, **arguments)
        run.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module.drawn

    fit(1)
    assert fit(2, ckpt_path=tmp_path / "1.ckpt") == fit(2)


@on_ranks
def error_of_the_norms_of_sharded_gradients() -> str:
    from lightning.pytorch.utilities import grad_norm

    model = sharded(layers(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    return refused(lambda: grad_norm(model, 2), RuntimeError, "its data is not allocated yet")


@fault("Lightning puts the norms of gradients, which are DTensors, into a tensor of numbers")
def test_norms_of_sharded_gradients_can_be_asked_of_lightning(facts):
    assert facts(error_of_the_norms_of_sharded_gradients) == ["", ""]


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


# ---- PyTorch: collectives


@on_ranks
def gloo_refuses_fp8() -> str:
    mine = torch.ones(2).to(torch.float8_e4m3fn)
    gathered = [torch.empty_like(mine) for _ in range(2)]
    return refused(lambda: dist.all_gather(gathered, mine), RuntimeError, "Invalid scalar type")


@fault("gloo cannot gather FP8")
def test_gloo_gathers_fp8(facts):
    assert facts(gloo_refuses_fp8) == ["", ""]


@on_ranks
def gloo_keeps_nan() -> list[bool]:
    values = torch.tensor([1.0, 1.0])
    values[dist.get_rank()] = float("nan")
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values.isnan().tolist()


@fault("the MAX of gloo drops NaN")
def test_the_maximum_over_ranks_is_nan_where_one_of_them_is(facts):
    assert facts(gloo_keeps_nan) == [[True, True], [True, True]]


# ---- PyTorch: FSDP2


@fault("no public way leads from a sharded module to its shards: all that it offers is gathering and settings")
def test_fsdp2_tells_about_the_shards_of_a_module():
    offered = {name for name in vars(FSDPModule) if not name.startswith(("_", "set_"))}
    assert offered - {"reshard", "unshard", "reset_iter_state"}


def private_names_in_fsdp() -> set[str]:
    from lightning_fp8_rocm.distributed import fsdp

    tree = ast.parse(Path(fsdp.__file__).read_text())
    touched = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    by_name = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()
    }
    of_tensors = {"_version", "_cdata"}
    return {name for name in touched | by_name if name.startswith("_") and not name.startswith("__")} - of_tensors


def test_each_private_part_of_fsdp2_is_listed_where_it_is_touched():
    from lightning_fp8_rocm.distributed import fsdp

    assert [name for name in sorted(private_names_in_fsdp()) if name not in (fsdp.__doc__ or "")] == []


@on_ranks
def private_parts_of_fsdp2() -> list[str]:
    """What is not there, or does not behave as ``distributed/fsdp.py`` takes it to."""
    from lightning_fp8_rocm.distributed import fsdp

    model = sharded(layers(4, 3, 4), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    mesh = fsdp.mesh_of(model)
    of_units = [param for group in fsdp.groups(model) for param in group.fsdp_params]
    first = of_units[0]
    shard = fsdp.local_shard(first)
    rows = 2 if dist.get_rank() == 0 else 1
    state = model[0]._get_fsdp_state()
    owners = [model, state, state._fsdp_param_groups[0], first, model[0].weight]
    made_later = {"_unsharded_param", "_extensions_data"}  # by a gather, and for a shard with hooks
    names = private_names_in_fsdp() - made_later
    wrong = [name for name in sorted(names) if not any(hasattr(owner, name) for owner in owners)]

    def check(what: str, holds: bool) -> None:
        if not holds:
            wrong.append(what)

    check("fsdp_params", len(of_units) == 2)
    check("_module_info", fsdp.owner(first) is model[0] and fsdp.name_of(first) == "weight")
    check("_orig_size", fsdp.full_shape(first) == (3, 4))
    check("shard_mesh", fsdp.shard_mesh(first) == mesh)
    check("_mp_policy", fsdp.param_dtype(model[0]) == torch.bfloat16)
    check("sharded_param", shard.shape == (rows, 4) and shard.data_ptr() == model[0].weight.to_local().data_ptr())

    fsdp.initialise(model)
    model[0](torch.ones(1, 4))  # a child before the root
    usual, in_fp8 = fsdp.gathered_bytes(first)
    check("padded_sharded_param_size, param_dtype", (usual, in_fp8(False), in_fp8(True)) == (2 * 8 * 2, 16, 32))

    calls = []

    class Shard(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        def fsdp_pre_all_gather(self, mesh):
            calls.append("pre")
            mine = self.detach().as_subclass(Tensor)
            return (torch.cat([mine, mine.new_zeros(2 - len(mine), 4)]),), None

        def fsdp_post_all_gather(self, outputs, scale, param_dtype, *, out=None):
            calls.append("post")
            return None if out is not None else (outputs[0][:3].to(param_dtype), outputs)

    fsdp.reshard(model)
    fsdp.set_local_shard(first, shard.detach().as_subclass(Shard))
    check("_local_tensor", type(fsdp.local_shard(first)) is Shard)
    fsdp.reset_gathered(first)
    with torch.no_grad():
        model(torch.ones(1, 4))
    check("_init_extensions", calls == ["pre", "post"])
    fsdp.set_local_shard(first, shard)
    fsdp.reset_gathered(first)
    model(torch.ones(1, 4)).sum().backward()
    check("_unsharded_param, _extensions_data, all_gather_outputs", calls == ["pre", "post"])
    check("_training_state", not fsdp.is_in_forward(model))
    seen = []
    within = model[0].register_forward_pre_hook(lambda *_: seen.append([fsdp.is_in_forward(unit) for unit in model]))
    with fsdp.no_reshard_after_forward(model[0]), torch.no_grad():
        model(torch.ones(1, 4))
    within.remove()
    check("_training_state within", seen == [[True, False]])
    check("post_forward_mesh_info", not isinstance(model[0].weight, DTensor) and isinstance(model[1].weight, DTensor))
    check("_unsharded_param", fsdp.sharded_by_gathered(model)[id(model[0].weight)] is first.sharded_param)
    fsdp.reshard(model)
    check("is_unsharded", isinstance(model[0].weight, DTensor))
    ahead = list(fsdp.groups(model))[1]
    ahead.unshard()
    check("_all_gather_result", ahead._all_gather_result is not None)
    fsdp.reshard(model)
    check("_all_gather_result, device_handle", ahead._all_gather_result is None)
    fsdp.follow_frozen(model)
    return wrong


def test_the_private_parts_of_fsdp2_behave_as_we_take_them_to(facts):
    """Must pass: where it fails, ``distributed/fsdp.py`` is to be changed."""
    assert facts(private_parts_of_fsdp2) == [[], []]


class SendsTwo(Tensor):
    """A shard that sends its bytes and something smaller, as row scales are; the older form of the hook."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    received: list[int] = []  # noqa: RUF012

    def fsdp_pre_all_gather(self, mesh):
        mine = self.detach().as_subclass(Tensor)
        padded = torch.cat([mine, mine.new_zeros(2 - len(mine), 4)])
        return (padded, padded.amax(1)), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        SendsTwo.received.append(len(outputs))
        return None if out is not None else (outputs[0], outputs)


class SendsTwoByFiveArguments(SendsTwo):
    """The newer form."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return super().fsdp_pre_all_gather(mesh)


def with_shard(model: Any, shard: type[Tensor]) -> Any:
    """The private ``FSDPParam`` of the model's only parameter, its shard of this class."""
    (param,) = model._get_fsdp_state()._fsdp_param_groups[0].fsdp_params
    param.sharded_param._local_tensor = param.sharded_param._local_tensor.detach().as_subclass(shard)
    param._init_extensions()
    return param


@on_ranks
def refuses_inputs_of_another_size() -> str:
    param = with_shard(fully_shard(layers(4, 3), mesh=init_device_mesh("cpu", (2,))), SendsTwoByFiveArguments)
    return refused(lambda: param.all_gather_inputs, AssertionError, "must return all-gather inputs with the padded")


@fault("the newer hook refuses inputs of another size, on the ranks that have padding")
def test_a_shard_may_send_something_of_another_size(facts):
    assert facts(refuses_inputs_of_another_size) == ["", ""]


@on_ranks
def received_on_one_rank() -> list[int]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(layers(4, 2), mesh=mesh)
    with_shard(model, SendsTwo)
    SendsTwo.received.clear()
    with torch.no_grad():
        model(torch.ones(1, 4))
    return list(SendsTwo.received)


@fault("on one rank the hook receives the first of what it sent, and no more")
def test_a_shard_on_one_rank_receives_all_that_it_sends(facts):
    assert facts(received_on_one_rank) == [[2], [2]]


@on_ranks
def refuses_inference_mode() -> str:
    model = sharded(layers(4, 4))

    def validate_and_fit() -> None:
        with torch.inference_mode():
            model(torch.ones(1, 4))
        model(torch.ones(1, 4)).sum().backward()

    return refused(validate_and_fit, RuntimeError, "nference")


@fault("what FSDP2 gathers under inference_mode cannot be trained")
def test_a_sharded_model_is_evaluated_under_inference_mode_and_trained_then(facts):
    assert facts(refuses_inference_mode) == ["", ""]


@on_ranks
def refuses_a_child_first() -> str:
    model = sharded(layers(4, 4))
    with torch.no_grad():
        model[0](torch.ones(1, 4))
    return refused(lambda: model(torch.ones(1, 4)), RuntimeError, "already been lazily initialized")


@fault("the first module that is called makes itself the root")
def test_a_child_may_be_called_before_the_root(facts):
    assert facts(refuses_a_child_first) == ["", ""]


@on_ranks
def refuses_thawed() -> str:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(layers(4, 4).requires_grad_(False), mp_policy=policy)
    model(torch.ones(1, 4))
    model.requires_grad_(True)
    return refused(lambda: model(torch.ones(1, 4)).sum().backward(), RuntimeError, "assign a gradient")


@fault("FSDP2 asks once which parameters are trained", torch_before="2.14")
def test_a_parameter_may_be_thawed_after_the_first_forward(facts):
    assert facts(refuses_thawed) == ["", ""]


class Manual(nn.Module):
    """Trains inside a method, as a LightningModule with manual optimization does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(2))

    def training_step(self, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
        for _ in range(steps):
            (self.layer(torch.ones(1, 4)).sum() * self.scale.sum()).backward()
            optimizer.step()


def manual(model: Any) -> tuple[Any, torch.optim.Optimizer]:
    register_fsdp_forward_method(model, "training_step")
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@on_ranks
def changed_by_a_backward_within_forward() -> dict[str, bool]:
    model, optimizer = manual(fully_shard(Manual(), mesh=init_device_mesh("cpu", (2,))))
    before = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    model.training_step(optimizer)
    model.reshard()
    return {name: not torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters()}


@fault("what the root itself owns never changes by a backward within its forward, silently")
def test_a_parameter_of_the_root_is_trained_under_manual_optimization(facts):
    everything = {"scale": True, "layer.weight": True, "layer.bias": True}
    assert facts(changed_by_a_backward_within_forward) == [everything, everything]


@on_ranks
def refuses_two_backwards_within_forward() -> str:
    model, optimizer = manual(sharded(Manual()))
    return refused(lambda: model.training_step(optimizer, 2), RuntimeError, "mixed torch.Tensor and DTensor")


@fault("a backward within the forward of the root shards what the root owns")
def test_a_parameter_of_the_root_is_trained_twice_in_a_step_of_manual_optimization(facts):
    assert facts(refuses_two_backwards_within_forward) == ["", ""]


class WithMethods(nn.Linear):
    def is_gathered_after_forward(self) -> bool:
        self(torch.ones(1, 4))
        return not isinstance(self.weight, DTensor)

    def the_weight(self) -> nn.Parameter:
        return self.weight


@on_ranks
def methods_that_gather() -> tuple[bool, bool]:
    """Whether a forward within a method leaves the weight gathered, and whether a method returns lasting parameters."""
    layer = fully_shard(WithMethods(4, 4), mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    for name in ("is_gathered_after_forward", "the_weight"):
        register_fsdp_forward_method(layer, name)
    return layer.is_gathered_after_forward(), layer.the_weight() is layer.weight


@fault("a forward within a method that gathers ends the gathering")
def test_a_method_may_call_forward_and_then_use_the_weights(facts):
    assert [gathered for gathered, _ in facts(methods_that_gather)] == [True, True]


@fault("a method that gathers returns the gathered parameters, which are gone")
def test_a_method_that_gathers_returns_parameters_that_last(facts):
    assert [lasts for _, lasts in facts(methods_that_gather)] == [True, True]


class Writes(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        self.weight.data.fill_(2)
        return super().forward(input)


@on_ranks
def weight_after_a_forward_that_writes() -> float:
    layer = fully_shard(Writes(4, 2), mesh=init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        layer(torch.ones(1, 4))
        layer.reshard()
        return layer.weight.full_tensor().mean().item()


@fault("what a forward writes into a gathered weight is lost, silently")
def test_what_a_forward_writes_lasts(facts):
    assert facts(weight_after_a_forward_that_writes) == [2.0, 2.0]


class Fails(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        raise ValueError("on purpose")


@on_ranks
def is_sharded_after_an_error() -> bool:
    layer = fully_shard(Fails(4, 2), mesh=init_device_mesh("cpu", (2,)))
    assert refused(lambda: layer(torch.ones(1, 4)), ValueError, "on purpose")
    return isinstance(layer.weight, DTensor)


@fault("an exception leaves a unit gathered, in the middle of its forward")
def test_a_unit_is_sharded_after_an_exception(facts):
    assert facts(is_sharded_after_an_error) == [True, True]


@on_ranks
def output_after_the_weight_was_written() -> float:
    model = fully_shard(layers(4, 2), mesh=init_device_mesh("cpu", (2,)))
    (weight,) = model.parameters()
    with torch.no_grad():
        model(torch.ones(1, 4))
        weight.fill_(2)  # as an optimizer does, that holds the shard
        return model(torch.ones(1, 4))[0, 0].item()


@fault("the root stays gathered after an evaluation, with the weights of then")
def test_a_forward_after_an_evaluation_sees_what_the_optimizer_wrote(facts):
    assert facts(output_after_the_weight_was_written) == [8.0, 8.0]


@on_ranks
def refuses_a_tie() -> str:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    return refused(lambda: sharded(model)(torch.tensor([0])), ValueError, "another FSDP group")


@fault("a tied weight may lie in one unit only")
def test_modules_with_a_tied_weight_may_be_units(facts):
    assert facts(refuses_a_tie) == ["", ""]


@on_ranks
def refuses_parameters() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))

    def shard_with(parameter: Tensor) -> None:
        module = nn.Module()
        module.own = nn.Parameter(parameter)
        fully_shard(module, mesh=mesh)

    return [
        refused(lambda: shard_with(torch.tensor(1.0)), ValueError, "scalar parameters"),
        refused(lambda: shard_with(torch.ones(2, 4).t()), NotImplementedError, "non-contiguous"),
    ]


@pytest.mark.parametrize("which", [0, 1], ids=["without a dimension", "not contiguous"])
@fault("fully_shard refuses the parameter")
def test_every_parameter_can_be_sharded(facts, which):
    assert [messages[which] for messages in facts(refuses_parameters)] == ["", ""]


@on_ranks
def refuses_batch_norm() -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), mesh=init_device_mesh("cpu", (2,)))
    return refused(lambda: model(torch.ones(2, 4)), RuntimeError, "expected scalar type BFloat16")


@fault("fully_shard casts the weights of BatchNorm, whose kernels want the dtype of the running statistics")
def test_batch_norm_runs_in_a_unit_that_computes_in_bf16(facts):
    assert facts(refuses_batch_norm) == ["", ""]


@on_ranks
def bytes_of_a_gathered_tensor() -> int:
    (weight,) = sharded(layers(4, 3)).parameters()
    return weight.full_tensor().untyped_storage().nbytes()


@fault("a tensor gathered of uneven shards is a view of padded memory, which torch.save writes")
def test_a_gathered_tensor_has_the_memory_of_its_elements(facts):
    assert facts(bytes_of_a_gathered_tensor) == [48, 48]


# ---- PyTorch: checkpoints


@fault("asking for the state of an optimizer takes a step")
def test_asking_for_the_state_of_an_optimizer_changes_nothing():
    model = layers(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    get_optimizer_state_dict(model, optimizer)
    assert not optimizer.state


class Renames(nn.Linear):
    def state_dict(self, *args, **kwargs):
        return {f"mine.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}


@fault("each name in a state_dict is looked up as an attribute of the module", AttributeError)
def test_the_state_of_a_model_is_what_its_state_dict_says():
    assert set(get_model_state_dict(Renames(4, 4))) == {"mine.weight", "mine.bias"}


@fault("an optimizer casts a state to the dtype of its parameter")
def test_a_loaded_state_keeps_its_dtype():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {0: {"momentum_buffer": torch.ones(4)}}})
    assert optimizer.state[parameter]["momentum_buffer"].dtype == torch.float32


class Runs:
    """What is unpickled creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@fault("loading a sharded checkpoint runs what it holds")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_loading_a_sharded_checkpoint_runs_no_code(tmp_path):
    dcp.save({"value": Runs(tmp_path / "ran")}, checkpoint_id=tmp_path / "files", no_dist=True)
    assert not (tmp_path / "ran").exists()
    dcp.load({"value": 0}, checkpoint_id=tmp_path / "files", no_dist=True)
    assert not (tmp_path / "ran").exists()


@fault("opening a sharded checkpoint runs what it holds")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_opening_a_sharded_checkpoint_runs_no_code(tmp_path):
    dcp.save({"value": torch.ones(1)}, checkpoint_id=tmp_path / "files", no_dist=True)
    (tmp_path / "files" / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with suppress(CheckpointException):
        dcp.load({"value": torch.ones(1)}, checkpoint_id=tmp_path / "files", no_dist=True)
    assert not (tmp_path / "ran").exists()


@fault("a damaged shard loads without a word", pytest.fail.Exception)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_shard_is_not_loaded(tmp_path):
    dcp.save({"value": torch.ones(1000)}, checkpoint_id=tmp_path, no_dist=True)
    flip_a_byte(tmp_path / "__0_0.distcp")
    with pytest.raises((Exception, CheckpointException)):
        dcp.load({"value": torch.zeros(1000)}, checkpoint_id=tmp_path, no_dist=True)


@fault("a damaged file loads without a word", pytest.fail.Exception)
def test_a_damaged_file_is_not_loaded(tmp_path):
    torch.save(torch.ones(1000), tmp_path / "file")
    flip_a_byte(tmp_path / "file")
    with pytest.raises(RuntimeError):
        torch.load(tmp_path / "file")


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    ones = b"\x00\x00\x80\x3f" * 10
    content[content.index(ones) + 20] ^= 1
    path.write_bytes(content)


class CannotBePickled:
    def __reduce__(self):
        raise RuntimeError("the disk is full, say")


@fault("a checkpoint is overwritten in place", CheckpointException)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")
def test_a_save_that_fails_leaves_the_checkpoint_that_was_there(tmp_path):
    dcp.save({"value": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointException, match="disk is full"):
        dcp.save({"value": torch.zeros(3), "other": CannotBePickled()}, checkpoint_id=tmp_path, no_dist=True)
    value = torch.zeros(3)
    dcp.load({"value": value}, checkpoint_id=tmp_path, no_dist=True)
    assert value.tolist() == [1, 1, 1]


@fault("the error of torch.distributed.checkpoint is no Exception")
def test_a_failed_checkpoint_is_caught_as_an_exception():
    assert issubclass(CheckpointException, Exception)


# ---- PyTorch: compile and activation checkpointing


@fault("torch.compile takes a mode or options, not both", RuntimeError)
def test_a_mode_of_compile_may_have_options():
    torch.compile(layers(4, 4), mode="max-autotune-no-cudagraphs", options={"emulate_precision_casts": True})


@fault("activation checkpointing puts a wrapper in the place of a block")
def test_activation_checkpointing_keeps_the_module():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = layers(4, 4)
    block = model[0]
    apply_activation_checkpointing(model, check_fn=lambda module: module is block)
    assert model[0] is block


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


def gathered_in_fp8(*sizes: int) -> nn.Sequential:
    model = layers(*sizes)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    return model


@fault("torchao gathers weights with one scale in FP8 only")
def test_a_weight_with_row_scales_may_be_gathered_in_fp8():
    rows = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
    Float8LinearConfig(
        cast_config_input=rows,
        cast_config_weight=rows,
        cast_config_grad_output=rows,
        enable_fsdp_float8_all_gather=True,
    )


@on_ranks
def error_of_a_weight_that_was_written() -> float:
    """Of what is sent after the weight was written, relative to the weight; FP8 alone makes some percent."""
    model = sharded(gathered_in_fp8(16, 16))
    precompute_float8_dynamic_scale_for_fsdp(model)
    with torch.no_grad():
        model[0].weight.mul_(100)
    shard = model[0].weight._local_tensor
    (data,), (scale,) = shard.fsdp_pre_all_gather(init_device_mesh("cpu", (2,)))
    return ((data.float() / scale - shard._tensor).norm() / shard._tensor.norm()).item()


@fault("a scale that was computed ahead stays when the weight is written")
def test_a_weight_is_gathered_as_it_was_written(facts):
    assert max(facts(error_of_a_weight_that_was_written)) < 0.1


@on_ranks
def rows_sent() -> int:
    model = sharded(gathered_in_fp8(16, 3))
    (data,), _ = model[0].weight._local_tensor.fsdp_pre_all_gather(init_device_mesh("cpu", (2,)))
    return len(data)


@fault("a rank with fewer rows sends fewer")
def test_every_rank_sends_equally_many_rows(facts):
    assert facts(rows_sent) == [2, 2]


@fault("a weight that is to be gathered in FP8 is another parameter afterwards")
def test_conversion_for_the_gather_keeps_ties():
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32, bias=False))
    model[1].weight = model[0].weight
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    assert model[1].weight is model[0].weight


@fault("a weight that is to be gathered in FP8 is of a class of torchao's, also in a checkpoint")
def test_the_state_of_a_model_that_gathers_in_fp8_is_made_of_plain_tensors():
    assert {type(value) for value in gathered_in_fp8(16, 16).state_dict().values()} == {Tensor}
