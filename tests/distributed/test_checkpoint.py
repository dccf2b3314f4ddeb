import io
import pickle
import pickletools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, RanksFailedError
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from lightning_fp8_rocm.distributed.checkpoint import load, model_state, optimizer_state
from lightning_fp8_rocm.distributed.objects import collect
from lightning_fp8_rocm.distributed.publish import MANIFEST_NAME
from lightning_fp8_rocm.distributed.saver import Saver
from lightning_fp8_rocm.distributed.storage import META_NAME, check_readable

sys.path.insert(0, str(Path(__file__).parent))

from nets import FORMS, Marked, Net, Tied, assert_plain, build, everything, listed, shard, train

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda parameters: AdamW(parameters, lr=0.05, foreach=True),
    "adamw_fused": lambda parameters: AdamW(parameters, lr=0.05, fused=True),
    "sgd": lambda parameters: SGD(parameters, lr=0.05),
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
}
REST = {"epoch": 3, "lr_schedulers": [], "callbacks": {"Mean": {"total": torch.ones(2)}}}


def save(path: str, form: str, model: nn.Module, *optimizers: Optimizer) -> None:
    weights = model_state(model, full=form == "full")
    states = [optimizer_state(model, optimizer, full=form == "full") for optimizer in optimizers]
    assert_plain([weights, states])
    if form == "sharded":
        numbered = {f"optimizer_{number}": state for number, state in enumerate(states)}
        save_sharded(path, {"state_dict": weights, **numbered}, REST)
        return
    if dist.get_rank() == 0:
        for tensor in weights.values():  # no padding of uneven shards is written with it
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    else:
        assert weights == {}
        assert all(state == {} for state in states)
    Saver().save(Path(path), {"state_dict": weights, "optimizer_states": states}, REST, full=True)


def save_sharded(path: str | Path, state: dict[str, Any], rest: dict[str, Any]) -> None:
    Saver().save(Path(path), state, rest, full=False)


def read(path: str | Path, model: nn.Module, *optimizers: Optimizer, strict: bool = True) -> dict[str, Any]:
    return load(path, model, optimizers, strict=strict, weights_only=None)


# ---- on the ranks


def train_save_train(folder: str, form: str, mark: bool) -> Any:
    after = {}
    for name, make in OPTIMIZERS.items():
        model = shard(build(), mark)
        optimizer = make(model.parameters())
        train(model, optimizer)
        save(f"{folder}/{name}", form, model, optimizer)
        saved = everything(model, optimizer)
        train(model, optimizer, first=2)
        after[name] = saved, everything(model, optimizer)
    return after


def load_train(folder: str, mark: bool) -> Any:
    after = {}
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(9)
        model = shard(Net(), mark)
        locals_before = [parameter._local_tensor for parameter in model.parameters()]
        optimizer = make(model.parameters())
        rest = read(f"{folder}/{name}", model, optimizer)
        assert listed(rest) == listed(REST)
        for parameter, before in zip(model.parameters(), locals_before, strict=True):
            assert type(parameter._local_tensor) is type(before)  # in place: the mark is still there
            assert parameter._local_tensor.data_ptr() == before.data_ptr()
        loaded = everything(model, optimizer)
        train(model, optimizer, first=2)
        after[name] = loaded, everything(model, optimizer)
    return after


def load_and_save_again(source: str, target: str, form: str) -> Any:
    after = {}
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(9)
        model = shard(Net())
        optimizer = make(model.parameters())
        read(f"{source}/{name}", model, optimizer)
        save(f"{target}/{name}", form, model, optimizer)
        after[name] = everything(model, optimizer)
    return after


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("world", "mark"), [(1, True), (2, False), (2, True), (3, True)])
def test_a_resumed_run_continues_bit_for_bit(ranks: Ranks, tmp_path: Path, world: int, form: str, mark: bool) -> None:
    saved = ranks(world, train_save_train, str(tmp_path), form, mark)[0]
    loaded = ranks(world, load_train, str(tmp_path), mark)[0]
    assert loaded == saved
    momentum, sgd = saved["momentum"][0][1]["state"], saved["sgd"][0][1]["state"]
    assert momentum
    assert not any(sgd.values())  # the optimizer without state has been in the test


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_of_two_ranks_goes_through_three_to_one(ranks: Ranks, tmp_path: Path, form: str) -> None:
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    other = FORMS[1 - FORMS.index(form)]
    first = ranks(2, train_save_train, str(folders[0]), form, True)[0]
    saved = {name: states[0] for name, states in first.items()}
    assert ranks(3, load_and_save_again, str(folders[0]), str(folders[1]), other)[0] == saved
    assert ranks(1, load_and_save_again, str(folders[1]), str(folders[2]), form)[0] == saved


def test_a_full_file_is_what_a_plain_run_reads(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(2, train_save_train, str(tmp_path), "full", True)[0]
    for name, make in OPTIMIZERS.items():
        checkpoint = torch.load(tmp_path / name, weights_only=True)
        model = build()
        optimizer = make(model.parameters())
        train(model, optimizer)
        own = optimizer.state_dict()
        assert list(checkpoint["state_dict"]) == list(model.state_dict())
        assert listed(own["param_groups"]) == listed(checkpoint["optimizer_states"][0]["param_groups"])
        assert own["state"].keys() == checkpoint["optimizer_states"][0]["state"].keys()
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        assert [listed(dict(model.state_dict())), listed(optimizer.state_dict())] == saved[name][0]
        train(model, optimizer, first=2)


def load_everything(path: str, tuples: bool = False) -> Any:
    torch.manual_seed(9)
    model = shard(Net(), mark=True)
    optimizer = AdamW(model.parameters(), lr=0.1)
    rest = read(path, model, optimizer)
    assert "state_dict" not in rest
    assert "optimizer_states" not in rest
    return everything(model, optimizer)


def test_a_full_file_of_a_plain_run_loads_into_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    model = build()
    optimizer = AdamW(model.parameters(), lr=0.05)
    train(model, optimizer)
    checkpoint = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], **REST}
    torch.save(checkpoint, tmp_path / "plain.ckpt")
    expected = [listed(dict(model.state_dict())), listed(optimizer.state_dict())]
    assert ranks(2, load_everything, str(tmp_path / "plain.ckpt")) == [expected, expected]


# ---- Lightning's own


def two_groups(model: nn.Module) -> Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2 and parameter.requires_grad]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1 and parameter.requires_grad]
    return AdamW([{"params": matrices, "name": "matrices"}, {"params": vectors, "weight_decay": 0.0}], lr=0.05)


def lightning_reads(folder: str) -> None:
    from lightning.fabric.strategies.model_parallel import _load_checkpoint

    model = shard(build(), mark=True)
    optimizer = two_groups(model)
    train(model, optimizer)
    for form in FORMS:
        save(f"{folder}/{form}", form, model, optimizer)
        torch.manual_seed(9)
        other = shard(Net())
        theirs = two_groups(other)
        if form == "full":  # its numbers go through the model, where the frozen parameters count: weights only
            theirs = AdamW(other.parameters(), lr=0.05)
            mine = AdamW(model.parameters(), lr=0.05)
            train(model, mine)
            save(f"{folder}/{form}", form, model, mine)
        else:
            mine = optimizer
        rest = _load_checkpoint(
            Path(folder, form), {"state_dict": other, "optimizer_0": theirs}, optimizer_states_from_list=True
        )
        assert rest["epoch"] == 3
        assert everything(other, theirs) == everything(model, mine)


def test_lightnings_own_loader_reads_either_form(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, lightning_reads, str(tmp_path))


def reads_lightnings(folder: str) -> None:
    from lightning.fabric.strategies.model_parallel import _save_checkpoint

    model = shard(build())
    optimizer = two_groups(model)
    train(model, optimizer)
    saved = everything(model, optimizer)
    _save_checkpoint(
        Path(folder, "sharded"), {"state_dict": model, "optimizer_0": optimizer, **REST}, False, dist.get_rank()
    )
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model)
        assert state["param_groups"][0]["params"] != list(range(5))  # not torch's numbers
        torch.save({"state_dict": weights, "optimizer_states": [state], **REST}, f"{folder}/full")
    dist.barrier()
    for form in FORMS:
        torch.manual_seed(9)
        other = shard(Net(), mark=True)
        ours = two_groups(other)
        read(f"{folder}/{form}", other, ours)
        assert everything(other, ours) == saved


def test_either_form_of_lightning_is_read(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, reads_lightnings, str(tmp_path))


# ---- what is on disk


def pickles(path: Path) -> Iterator[bytes]:
    if path.name == ".metadata":
        yield path.read_bytes()
    elif path.suffix == ".distcp":
        content = path.read_bytes()
        for info in FileSystemReader(path.parent).read_metadata().storage_data.values():
            if info.relative_path == path.name:
                yield from zipped(content[info.offset : info.offset + info.length])
    elif path.name != MANIFEST_NAME:
        yield from zipped(path.read_bytes())


def zipped(content: bytes) -> Iterator[bytes]:
    reader = torch._C.PyTorchFileReader(io.BytesIO(content))  # not `zipfile`: in shards there is no crc32 for it
    yield from (reader.get_record(name) for name in reader.get_all_records() if name.endswith(".pkl"))


def named_in(pickled: bytes) -> set[str]:
    return {argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)}


def test_nothing_on_disk_names_a_class_of_ours(ranks: Ranks, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(torch.ones(2).as_subclass(Marked), buffer)
    assert any("Marked" in word for each in zipped(buffer.getvalue()) for word in named_in(each))  # the scan sees it
    found = 0
    for form in FORMS:
        (tmp_path / form).mkdir()
        ranks(2, train_save_train, str(tmp_path / form), form, True)
        for file in (tmp_path / form).rglob("*"):
            for each in pickles(file) if file.is_file() else ():
                found += 1
                for word in named_in(each):
                    assert "Marked" not in word
                    assert "lightning" not in word
                    assert "test_checkpoint" not in word
    assert found > 100


def save_twice(path: str) -> None:
    model = shard(build())
    save(path, "sharded", model)


def test_saving_over_a_checkpoint_leaves_nothing_of_it(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"a file")
    ranks(3, save_twice, str(path))
    assert len(list(path.glob("*.distcp"))) == 3
    ranks(1, save_twice, str(path))
    assert sorted(file.name for file in path.iterdir()) == [".metadata", "__0_0.distcp", MANIFEST_NAME, META_NAME]


def cannot_write(path: str) -> str:
    try:
        save_sharded(path, {"state_dict": model_state(shard(build()), full=False)}, {"epoch": lambda: 3})
    except RuntimeError as error:
        return str(error)
    return ""


def test_all_ranks_learn_that_one_could_not_write(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2, cannot_write, str(tmp_path / "ckpt")):
        assert f"The checkpoint '{tmp_path}/ckpt' could not be written" in message
        assert "writing meta.pt: rank 0 of 2 raised" in message
    assert list(tmp_path.iterdir()) == []


# ---- models


def tied(folder: str) -> None:
    for form in FORMS:
        model = shard(build(Tied), mark=True)
        assert model.head.weight is model.embedding.weight
        optimizer = AdamW(model.parameters(), lr=0.05)
        train(model, optimizer)
        save(f"{folder}/{form}", form, model, optimizer)
        saved = everything(model, optimizer)
        assert list(saved[0]) == list(build(Tied).state_dict())
        torch.manual_seed(9)
        other = shard(Tied())
        ours = AdamW(other.parameters(), lr=0.05)
        read(f"{folder}/{form}", other, ours)
        assert other.head.weight is other.embedding.weight
        assert everything(other, ours) == saved


def test_tied_weights_stay_tied_and_a_full_file_holds_them_once(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, tied, str(tmp_path))
    state = torch.load(tmp_path / "full", weights_only=True)["state_dict"]
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()


class Adapter(Net):
    """Saves its head alone, as adapters do, under a name that is no attribute."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        own = super().state_dict(*args, **kwargs, keep_vars=True)  # the parameters themselves, mark and all
        return {f"adapter:{key}": value for key, value in own.items() if "head" in key}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        renamed = {key.removeprefix("adapter:"): value for key, value in state_dict.items()}
        return super().load_state_dict(renamed, strict=False)


def own_state_dict(folder: str) -> None:
    for form in FORMS:
        model = shard(build(Adapter), mark=True)
        save(f"{folder}/{form}", form, model)
        saved = everything(model)
        assert list(saved[0]) == ["adapter:head.weight", "adapter:head.bias"]
        torch.manual_seed(9)
        other = shard(Adapter())
        read(f"{folder}/{form}", other)
        assert everything(other) == saved


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_with_a_state_dict_of_its_own_is_asked(ranks: Ranks, tmp_path: Path, world: int) -> None:
    ranks(world, own_state_dict, str(tmp_path))


def converted(folder: str) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from lightning_fp8_rocm.float8.convert import convert

    def wrap(seed: int) -> Any:
        torch.manual_seed(seed)
        model: Any = nn.Sequential(OrderedDict(block=nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))))
        convert(model, "tensorwise")
        assert type(model.block[0]).__name__ == "FP8Linear"
        model.block[1] = torch.compile(model.block[1])
        model.block = checkpoint_wrapper(model.block)
        return shard(model)

    plain = ["block.0.weight", "block.0.bias", "block.1.weight", "block.1.bias"]
    for form in FORMS:
        model = wrap(1)
        optimizer = AdamW(model.parameters())
        save(f"{folder}/{form}", form, model, optimizer)
        saved = everything(model, optimizer)
        assert list(saved[0]) == plain
        assert optimizer_state(model, optimizer, full=False)["param_groups"][0]["params"] == plain
        other = wrap(9)
        read(f"{folder}/{form}", other, AdamW(other.parameters()))
        assert everything(other) == saved[:1]


def test_fp8_compiled_and_checkpointed_layers_have_their_plain_names(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, converted, str(tmp_path))


def replicated(folder: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    for form in FORMS:
        models = [build(), build()]
        for model, mesh in zip(models, ((2, 2), (1, 4)), strict=True):
            mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
            fully_shard(model.blocks[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizers = [AdamW(model.parameters(), lr=0.05) for model in models]
        train(models[0], optimizers[0])
        save(f"{folder}/{form}", form, models[0], optimizers[0])
        assert everything(models[1]) != everything(models[0])
        read(f"{folder}/{form}", models[1], optimizers[1])
        assert everything(models[1], optimizers[1]) == everything(models[0], optimizers[0])


def test_a_replicated_and_sharded_model(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4, replicated, str(tmp_path))


def gathered_root(path: str) -> None:
    model = shard(build())
    model.set_reshard_after_forward(False)
    optimizer = AdamW(model.parameters())
    with torch.no_grad():
        model(torch.ones(1, 5))
    assert not isinstance(model.head.weight, DTensor)
    optimizer_state(model, optimizer, full=False)
    with torch.no_grad():
        model(torch.ones(1, 5))
    save(path, "sharded", model, optimizer)
    with torch.no_grad():
        model(torch.ones(1, 5))
    read(path, model, optimizer)


def test_a_model_that_still_holds_gathered_parameters_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, gathered_root, str(tmp_path / "ckpt"))


# ---- optimizers


def before_the_first_step(folder: str) -> None:
    for form in FORMS:
        model = shard(build())
        optimizer = AdamW(model.parameters(), lr=0.05)
        save(f"{folder}/{form}", form, model, optimizer)
        assert not optimizer.state  # torch's own takes a step, and Adam's count is off for good
        other = shard(build())
        ours = AdamW(other.parameters(), lr=0.1)
        read(f"{folder}/{form}", other, ours)
        assert not ours.state
        assert ours.param_groups[0]["lr"] == 0.05


def test_saving_before_the_first_step_takes_none(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, before_the_first_step, str(tmp_path))


def scheduled(folder: str) -> None:
    for form in FORMS:
        for schedule_saved, schedule_loaded in ((True, False), (False, True)):
            model = shard(build())
            optimizer = AdamW(model.parameters(), lr=0.05, betas=(0.8, 0.9))
            if schedule_saved:
                StepLR(optimizer, 1)
            save(f"{folder}/{form}{schedule_saved}", form, model, optimizer)
            other = shard(build())
            ours = AdamW(other.parameters(), lr=0.1)
            if schedule_loaded:
                StepLR(ours, 1)
            read(f"{folder}/{form}{schedule_saved}", other, ours)
            group = ours.param_groups[0]
            assert (group["lr"], group["betas"]) == (0.05, (0.8, 0.9))
            assert group["initial_lr"] == (0.05 if schedule_saved else 0.1)


def test_a_scheduler_may_come_or_go_between_the_runs(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, scheduled, str(tmp_path))


def several(folder: str) -> None:
    def optimizers(model: Any) -> tuple[Optimizer, Optimizer]:
        return AdamW(model.blocks.named_parameters(), lr=0.05), SGD(
            [{"params": [model.head.weight]}, {"params": [], "lr": 1.0}], lr=0.1, momentum=0.5
        )

    for form in FORMS:
        model = shard(build(), mark=True)
        both = optimizers(model)
        train(model, *both)
        save(f"{folder}/{form}", form, model, *both)
        saved = everything(model, *both)
        torch.manual_seed(9)
        other = shard(Net())
        ours = optimizers(other)
        read(f"{folder}/{form}", other, *ours)
        assert everything(other, *ours) == saved
        train(model, *both, first=2)
        train(other, *ours, first=2)
        assert everything(other, *ours) == everything(model, *both)


def test_several_optimizers_over_parts_of_the_model(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, several, str(tmp_path))


class Factored(Optimizer):
    """Keeps a row factor, and moments in fp32 for any weight."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["row"] = parameter.new_zeros((parameter.shape[0], 1) if parameter.dim() == 2 else (2, 2))
                state["moment"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["calls"] = 0
                state["nothing"] = None
            state["row"].add_(1.5)
            state["moment"].add_(parameter.grad.float(), alpha=1 / 3)
            state["calls"] += 1
            parameter.sub_(state["moment"].to(parameter.dtype), alpha=0.01)


def factored(folder: str) -> None:
    for form in FORMS:
        model = shard(build().bfloat16(), mark=True)
        optimizer = Factored(model.parameters())
        train_bf16(model, optimizer)
        save(f"{folder}/{form}", form, model, optimizer)
        saved = everything(model, optimizer)
        torch.manual_seed(9)
        other = shard(Net().bfloat16())
        ours = Factored(other.parameters())
        read(f"{folder}/{form}", other, ours)
        assert everything(other, ours) == saved
        assert ours.state[other.head.weight]["moment"].dtype == torch.float32
        train_bf16(model, optimizer)
        train_bf16(other, ours)
        assert everything(other, ours) == everything(model, optimizer)


def train_bf16(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.ones(2, 5, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_states_of_another_shape_or_dtype_than_the_parameter(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, factored, str(tmp_path))


def local_state() -> None:
    model = shard(build())
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model.head.weight]["quantised"] = torch.zeros(6)
    for full in (False, True):
        with pytest.raises(ValueError, match=r"SGD keeps the state 'quantised' of the sharded parameter 'head.weight'"):
            optimizer_state(model, optimizer, full=full)
    optimizer = SGD(build().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"13 parameters of SGD are not parameters of .*after the model is sharded"):
        optimizer_state(model, optimizer, full=False)


def test_a_state_that_cannot_be_put_together_is_refused(ranks: Ranks) -> None:
    ranks(2, local_state)


# ---- refused, with nothing changed


def refused(model: nn.Module, optimizers: list[Optimizer], path: str, *parts: str, **kwargs: Any) -> None:
    before = everything(model, *optimizers)
    arguments = {"strict": True, "weights_only": None, **kwargs}
    with pytest.raises((ValueError, pickle.UnpicklingError)) as raised:
        load(path, model, optimizers, **arguments)
    for part in (*parts, path):
        assert part in str(raised.value), str(raised.value)
    assert everything(model, *optimizers) == before


class Bigger(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(5, 5)
        del self.scale


def strictness(folder: str) -> None:
    for form in FORMS:
        path = f"{folder}/{form}"
        saved_model = shard(build())
        saved_optimizer = AdamW(saved_model.parameters(), lr=0.05)
        train(saved_model, saved_optimizer)
        save(path, form, saved_model, saved_optimizer)
        saved = everything(saved_model, saved_optimizer)

        torch.manual_seed(9)
        other = shard(Bigger())
        parts = "It lacks extra.bias, extra.weight.", "It has scale, which the model has not.", "strict_loading = False"
        refused(other, [], path, *parts)
        extra = everything(other)[0]["extra.weight"]
        read(path, other, strict=False)
        after = everything(other)[0]
        assert after.pop("extra.weight") == extra
        after.pop("extra.bias")
        assert after == {name: value for name, value in saved[0].items() if name != "scale"}

        shapes = "blocks.0.0.weight (checkpoint (7, 5), model (9, 5))"
        refused(shard(Net(width=9)), [], path, shapes, "other shapes", strict=False)

        torch.manual_seed(9)
        fresh = shard(Net())
        two = [SGD([fresh.head.weight], lr=0.1), SGD([fresh.head.bias], lr=0.1)]
        refused(fresh, two, path, "the states of 1 optimizers, but `configure_optimizers` returned 2")
        split = SGD([{"params": [fresh.head.weight]}, {"params": [fresh.head.bias]}], lr=0.1)
        refused(fresh, [split], path, "optimizer 0 (SGD)", "has 1 parameter groups, but the optimizer has 2")
        less = SGD([fresh.head.weight], lr=0.1)
        refused(fresh, [less], path, "group 0", "Give the optimizer the parameters of the run that saved it")

        # Not fitting: an optimizer that is left over is not given, and nothing of it changes.
        stale = AdamW(fresh.parameters(), lr=0.7)
        train(fresh, stale)
        before = listed(optimizer_state(fresh, stale, full=True))
        read(path, fresh)
        assert listed(optimizer_state(fresh, stale, full=True)) == before
        assert everything(fresh) == saved[:1]


def test_what_does_not_fit_is_refused_before_anything_changes(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, strictness, str(tmp_path))


def only_weights(folder: str) -> None:
    model = shard(build())
    for form in FORMS:
        path = f"{folder}/{form}"
        weights = model_state(model, full=form == "full")
        if form == "sharded":
            save_sharded(path, {"state_dict": weights}, {"epoch": 3})
        elif dist.get_rank() == 0:
            torch.save({"state_dict": weights, "epoch": 3}, path)
        dist.barrier()
        torch.manual_seed(9)
        other = shard(Net())
        optimizer = SGD(other.parameters(), lr=0.1)
        refused(other, [optimizer], path, "`save_weights_only=True`", "`trainer.validate`", "`load_state_dict`")
        assert read(path, other) == {"epoch": 3}
        assert everything(other) == everything(model)


def test_training_cannot_resume_from_weights_alone(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, only_weights, str(tmp_path))


def objects(folder: str) -> None:
    model = shard(build())
    for form in FORMS:
        path = f"{folder}/{form}"
        weights, rest = model_state(model, full=form == "full"), {"hyper_parameters": Path("here")}
        if form == "sharded":
            save_sharded(path, {"state_dict": weights}, rest)
        elif dist.get_rank() == 0:
            torch.save({"state_dict": weights, **rest}, path)
        dist.barrier()
        torch.manual_seed(9)
        refused(shard(Net()), [], path, "`weights_only=None`", "pass `weights_only=False`")
        assert load(path, model, [], strict=True, weights_only=False) == rest

    path = f"{folder}/group"
    optimizer = SGD([{"params": list(model.parameters()), "source": Path("here")}], lr=0.1)
    save(path, "sharded", model, optimizer)
    refused(model, [optimizer], path, "`weights_only=None`", "pass `weights_only=False`")
    optimizer.param_groups[0]["source"] = None
    read(path, model)
    load(path, model, [optimizer], strict=True, weights_only=False)
    assert optimizer.param_groups[0]["source"] == Path("here")


def test_objects_are_unpickled_only_when_asked(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, objects, str(tmp_path))


def of_fabric(folder: str) -> None:
    for form in FORMS:
        model, other = shard(build(), mark=True), shard(Tied())
        optimizers = AdamW(model.head.parameters(), lr=0.05), SGD(model.blocks.parameters(), lr=0.1, momentum=0.5)
        train(model, *optimizers)
        saved = everything(model, *optimizers)
        state = {"net": model, "slow": optimizers[1], "fast": optimizers[0], "step": 3}
        Saver().save(Path(folder, form), *collect(state, full=form == "full"), full=form == "full")
        state |= {"other": other}
        Saver().save(Path(folder, f"{form}2"), *collect(state, full=form == "full"), full=form == "full")

        torch.manual_seed(9)
        fresh = shard(Net())
        ours = AdamW(fresh.head.parameters(), lr=0.1), SGD(fresh.blocks.parameters(), lr=0.2, momentum=0.1)
        rest = read(f"{folder}/{form}", fresh, ours[1], ours[0])  # in the order saved
        assert rest["step"] == 3
        assert everything(fresh, *ours) == saved
        refused(fresh, list(ours), f"{folder}/{form}2", "one model, but it has 2: net, other")


def test_a_trainer_reads_the_one_model_of_fabric_and_its_optimizers_in_their_order(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(2, of_fabric, str(tmp_path))


def of_others(folder: str) -> None:
    model = shard(build())
    if dist.get_rank() == 0:
        torch.save({"weight": torch.ones(2)}, f"{folder}/weights.pt")
        torch.save([torch.ones(2)], f"{folder}/list.pt")
    dist.barrier()
    refused(model, [], f"{folder}/weights.pt", "has no model", "Found: weight", "`load_state_dict`")
    refused(model, [], f"{folder}/list.pt", "is no checkpoint: expected a dict, but it holds a list")


def test_what_neither_a_trainer_nor_fabric_wrote_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, of_others, str(tmp_path))


def test_a_path_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No checkpoint at '.*/none.ckpt' as host .* all hosts share"):
        check_readable(tmp_path / "none.ckpt")
    with pytest.raises(ValueError, match=r"lacks \['meta.pt', '.metadata'\]\. A checkpoint is a directory of shards"):
        check_readable(tmp_path)
    (tmp_path / META_NAME).touch()
    with pytest.raises(ValueError, match=r"lacks \['.metadata'\]"):
        check_readable(tmp_path)
    (tmp_path / "cut.ckpt").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"cut.ckpt' is damaged, or was not written by `torch.save`"):
        check_readable(tmp_path / "cut.ckpt")


def one_cannot_see(folder: str) -> None:
    model = shard(build())
    load(f"{folder}/{dist.get_rank()}", model, [], strict=True, weights_only=None)


def test_a_rank_that_cannot_read_keeps_no_other_waiting(ranks: Ranks, tmp_path: Path) -> None:
    torch.save({"state_dict": build().state_dict()}, tmp_path / "0")
    with pytest.raises(RanksFailedError) as raised:
        ranks(2, one_cannot_see, str(tmp_path))
    assert raised.value.tracebacks.keys() == {1}
    assert "FileNotFoundError" in raised.value.tracebacks[1]
