"""What `fabric.save` and `fabric.load` do, without our Fabric strategy; stock Fabric is the real one."""

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from lightning_fp8_rocm.distributed.checkpoint import model_state, named_optimizer_state, namings, optimizer_state
from lightning_fp8_rocm.distributed.objects import collect, load_objects
from lightning_fp8_rocm.distributed.publish import verify
from lightning_fp8_rocm.distributed.saver import Saver
from lightning_fp8_rocm.distributed.storage import OWN_KEY, open_checkpoint
from lightning_fp8_rocm.distributed.whole import assembled

sys.path.insert(0, str(Path(__file__).parent))

from nets import FORMS, Net, Tied, assert_plain, build, everything, listed, shard, train


class Count:
    """Has a state, as a sampler or a metric of a user has."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def save(path: str | Path, state: dict[str, Any], form: str, **arguments: Any) -> None:
    shards, rest = collect(state, full=form == "full", **arguments)
    assert_plain(shards)
    Saver().save(Path(path), shards, rest, full=form == "full")


def load(path: str | Path, state: Any, strict: bool = True) -> dict[str, Any]:
    rest = load_objects(path, state, strict=strict, weights_only=None)
    rest.pop(OWN_KEY, None)
    return rest


def of(state: dict[str, Any]) -> Any:
    """All that is in the objects of a state, whole and the same on all ranks."""
    modules = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
    box: list[Any] = [{}]
    for key, value in state.items():
        if isinstance(value, nn.Module):
            box[0][key] = listed(model_state(value, full=True))
        elif isinstance(value, Optimizer):
            names = namings(value, modules)[0].names
            box[0][key] = listed(named_optimizer_state(value, names, full=True))
        elif hasattr(value, "state_dict"):
            box[0][key] = listed(value.state_dict())
        else:
            box[0][key] = listed(whole(value))
    dist.broadcast_object_list(box)
    return box[0]


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


# ---- several models and optimizers


def gan(seed: int) -> dict[str, Any]:
    """Two models; an optimizer for each and one over both, of which one has no state; all kinds of other things."""
    torch.manual_seed(seed)
    generator, critic = shard(Net(), mark=True), shard(Tied())
    slow = SGD([generator.scale, critic.block.bias], lr=0.1 / seed, momentum=0.9)
    fast = AdamW([*generator.blocks.parameters(), *generator.head.parameters()], lr=0.05 / seed)
    return {
        "generator": generator,
        "of.generator": fast,
        "critic": critic,
        "critic_optimizer": SGD([critic.embedding.weight, critic.block.weight], lr=0.01 / seed),
        "over both": slow,
        "scheduler": StepLR(fast, 1, gamma=0.5),
        "step": seed,
        "count": Count(seed),
        "average": {
            "updates": seed,
            "weights": {name: seed * each.detach() for name, each in critic.named_parameters()},
            "by number": {0: seed * critic.block.weight.detach()},
        },
        "not sharded": nn.BatchNorm1d(seed + 2),
        "alone": generator.head.weight.detach() * seed,
    }


def train_gan(state: dict[str, Any], first: int = 0) -> None:
    optimizers = [each for each in state.values() if isinstance(each, Optimizer)]
    for step in range(first, first + 2):
        train(state["generator"], first=step, steps=1)
        train(state["critic"], *optimizers, first=step, steps=1)
        state["scheduler"].step()


def gan_saved(path: str, form: str) -> Any:
    state = gan(1)
    train_gan(state)
    save(path, state, form)
    before = of(state)
    train_gan(state, first=2)
    return before, of(state)


def gan_loaded(path: str, again: str, form: str) -> Any:
    state = gan(2)
    state["not sharded"] = nn.BatchNorm1d(3)
    assert load(path, state) == {}
    assert isinstance(state["average"]["weights"]["block.weight"], DTensor)
    assert isinstance(state["alone"], DTensor)
    save(again, state, form)
    loaded = of(state)
    train_gan(state, first=2)
    return loaded, of(state)


@pytest.mark.parametrize("form", FORMS)
def test_several_models_and_optimizers_go_from_two_ranks_to_one_and_three_and_back(
    ranks: Ranks, tmp_path: Path, form: str
) -> None:
    other = FORMS[1 - FORMS.index(form)]
    path, places = tmp_path / "first", [str(tmp_path / str(number)) for number in range(3)]
    saved, later = ranks(2, gan_saved, str(path), form)[0]
    assert saved["over both"]["param_groups"][0]["params"] == ["generator.scale", "critic.block.bias"]
    assert not saved["critic_optimizer"]["state"]  # the optimizer without state has been in the test
    assert len(saved["of.generator"]["state"]) == 10
    assert ranks(1, gan_loaded, str(path), places[0], other)[0][0] == saved
    assert ranks(3, gan_loaded, places[0], places[1], form)[0][0] == saved
    assert ranks(2, gan_loaded, places[1], places[2], other)[0] == (saved, later)  # and goes on bit for bit


def test_one_file_has_what_is_in_the_shards_and_so_has_the_directory_made_whole(ranks: Ranks, tmp_path: Path) -> None:
    for form in FORMS:
        ranks(2, gan_saved, str(tmp_path / form), form)
    full = torch.load(tmp_path / "full", weights_only=True)
    made_whole = assembled(open_checkpoint(tmp_path / "sharded", weights_only=True))
    assert listed(made_whole) == listed(full)
    for checkpoint in (full, made_whole):
        assert checkpoint[OWN_KEY] == {
            "models": ["generator", "critic"],
            "optimizers": ["of.generator", "critic_optimizer", "over both"],
            "tied": {"generator": {}, "critic": {"head.weight": "embedding.weight"}},
        }
        critic = checkpoint["critic"]
        assert critic["head.weight"].data_ptr() == critic["embedding.weight"].data_ptr()
    contents = open_checkpoint(tmp_path / "sharded", weights_only=True)
    assert list(contents.models) == ["generator", "critic"]
    assert list(contents.optimizers) == ["of.generator", "critic_optimizer", "over both"]
    assert verify(tmp_path / "sharded") == []


def a_part_and_the_whole(folder: str) -> None:
    """Two keys whose modules share parameters: the optimizer is called by the names of either."""
    for form in FORMS:
        model = shard(build())
        optimizer = AdamW(model.blocks[0].parameters(), lr=0.05)
        train(model, optimizer)
        save(f"{folder}/{form}", {"net": model, "block": model.blocks[0], "optimizer": optimizer}, form)
        for keys in (("net",), ("block",), ("block", "net")):
            torch.manual_seed(9)
            fresh = shard(Net())
            ours = AdamW(fresh.blocks[0].parameters(), lr=0.1)
            state = {key: {"net": fresh, "block": fresh.blocks[0]}[key] for key in keys}
            if keys == ("block",):
                with pytest.raises(ValueError, match=r"Only in the checkpoint: blocks\.0\.0\.bias"):
                    load(f"{folder}/{form}", state | {"optimizer": ours})
                continue
            load(f"{folder}/{form}", state | {"optimizer": ours})
            assert everything(fresh.blocks[0], ours) == everything(model.blocks[0], optimizer)


def test_of_two_models_with_common_parameters_either_may_name_those_of_an_optimizer(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks(2, a_part_and_the_whole, str(tmp_path))


# ---- filter


def filtered(folder: str) -> None:
    for form in FORMS:
        model = shard(build(Tied))
        optimizer = AdamW(model.parameters(), lr=0.05)
        train(model, optimizer)
        state = {"net": model, "optimizer": optimizer, "notes": {"a": 1, "b": 2}, "step": 3}
        keep: dict[str, Callable[[str, Any], bool]] = {
            "net": lambda name, value: "embedding" not in name and value.numel() > 5,
            "optimizer": lambda name, value: name == "param_groups",
            "notes": lambda name, value: value == 2,
        }
        path = f"{folder}/{form}"
        save(path, state, form, filter=keep)
        dist.barrier()
        found = assembled(open_checkpoint(Path(path), weights_only=True))
        assert list(found["net"]) == ["block.weight", "head.weight"]
        assert found[OWN_KEY]["tied"] == {"net": {}}  # its first name was left out
        assert found["notes"] == {"b": 2}

        torch.manual_seed(9)
        fresh = shard(Tied())
        new: dict[str, Any] = {"net": fresh, "optimizer": AdamW(fresh.parameters(), lr=0.7), "notes": {}}
        bias = listed(fresh.block.bias.full_tensor().detach())
        with pytest.raises(ValueError, match=r"It lacks block.bias, embedding.weight\. To load what both have, pass"):
            load(path, new)
        load(path, new, strict=False)
        weights = model_state(fresh, full=False)
        assert listed(weights["block.bias"].full_tensor()) == bias
        assert torch.equal(weights["head.weight"].full_tensor(), model.head.weight.full_tensor())
        assert not new["optimizer"].state
        assert new["optimizer"].param_groups[0]["lr"] == 0.05
        assert new["notes"] == {"b": 2}

        save(path, state, form, filter={"optimizer": lambda name, value: name == "state"})
        with pytest.raises(ValueError, match=r"The state of 'optimizer' \(AdamW\) .* has no 'param_groups'"):
            load(path, new)

    message = r"What `filter` keeps, here as a crc32, must be the same on all ranks, but is \d+ on rank 0 of 2"
    with pytest.raises(RuntimeError, match=message):
        collect({"net": model}, full=False, filter={"net": lambda name, value: dist.get_rank() == 0})
    with pytest.raises(RuntimeError, match=r"filtering what goes into the checkpoint: rank 0 of 2 raised .*int"):
        collect({"net": model}, full=True, filter={"net": lambda name, value: name + 1})  # type: ignore[operator]


def test_a_filter_leaves_out_what_it_names_in_either_form(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, filtered, str(tmp_path))


# ---- refused, with nothing changed


def refused(state: Any, path: str, *parts: str, kind: Any = ValueError, **arguments: Any) -> None:
    objects = state if isinstance(state, dict) else {"": state}
    before = of({key: value for key, value in objects.items() if not isinstance(value, Optimizer)})
    counts = [len(each.state) for each in objects.values() if isinstance(each, Optimizer)]
    with pytest.raises(kind) as raised:
        load_objects(path, state, **{"strict": True, "weights_only": None, **arguments})
    for part in parts:
        assert part in str(raised.value), str(raised.value)
    assert of({key: value for key, value in objects.items() if not isinstance(value, Optimizer)}) == before
    assert [len(each.state) for each in objects.values() if isinstance(each, Optimizer)] == counts


def refusals(folder: str) -> None:
    for form in FORMS:
        model = shard(build())
        optimizer = AdamW(model.parameters(), lr=0.05)
        train(model, optimizer)
        path = f"{folder}/{form}"
        save(path, {"net": model, "optimizer": optimizer, "step": 3, "count": Count(3)}, form)

        torch.manual_seed(9)
        fresh = shard(Net())
        ours = AdamW(fresh.parameters(), lr=0.1)
        there = "It has: count, net, optimizer, step. To disable strict loading, set `strict=False`."
        # Each of them is found to be wrong after a model that is right.
        for wrong in ("epoch", "net2", "optimizer2", "count2"):
            value = {"epoch": 1, "net2": fresh.head, "optimizer2": ours, "count2": Count(1)}[wrong]
            said = f"contains a key {wrong!r} that does not exist in the loaded checkpoint {path!r}."
            refused({"net": fresh, "count": Count(7), wrong: value}, path, said, there, kind=KeyError)
        refused({"net": fresh, "step": ours}, path, "'step'", "to be the state of an optimizer", "is of type int")
        refused({"net": fresh, "step": fresh.head}, path, "'step'", "to be the state of a module", "is of type int")
        refused({"net": fresh, "net2": fresh, "optimizer": fresh.head}, path, "net2", kind=KeyError)
        refused({"net": fresh, "optimizer": AdamW(fresh.head.parameters())}, path, "'optimizer' (AdamW)", "group 0")
        refused({"net": shard(Net(width=9))}, path, "of other shapes", strict=False)
        refused({"net": fresh, OWN_KEY: {}}, path, f"but got {OWN_KEY!r}", "Choose another key")
        refused({"optimizer": ours}, path, "13 parameters of the optimizer 'optimizer' (AdamW) are of no module")
        with (
            pytest.raises(ValueError, match=r"device `meta`.*blocks\.0\.0\.bias.*`fabric.setup`"),
            torch.device("meta"),
        ):
            load(path, {"net": Net()})

        left = load(path, {"net": fresh, "nothing": 1, "more": ours}, strict=False)
        assert everything(fresh) == everything(model)
        assert not ours.state
        assert left == {"step": 3, "count": {"value": 3}}

    for full in (False, True):
        with pytest.raises(ValueError, match=r"but got 'fp8_rocm'.*Choose another key"):
            collect({OWN_KEY: 1}, full=full)
        message = r"13 parameters of the optimizer 'adam' \(AdamW\) are of no module.*Pass its model, too"
        with pytest.raises(ValueError, match=message):
            collect({"head": fresh.head, "adam": optimizer}, full=full)


def test_what_does_not_fit_is_refused_before_anything_changes(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, refusals, str(tmp_path))


def with_objects(folder: str) -> None:
    for form in FORMS:
        model = shard(build())
        path = f"{folder}/{form}"
        save(path, {"net": model, "where": Path("here")}, form)
        refused({"net": model, "where": 1}, path, "`weights_only=None`", kind=pickle.UnpicklingError)
        state = {"net": model, "where": 1}
        load_objects(path, state, strict=True, weights_only=False)
        assert state["where"] == Path("here")


def test_objects_are_unpickled_only_when_asked(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, with_objects, str(tmp_path))


# ---- a module or an optimizer alone


def alone(folder: str) -> None:
    model = shard(build())
    optimizer = AdamW(model.parameters(), lr=0.05)
    train(model, optimizer)
    saved = everything(model, optimizer)
    weights, state = model_state(model, full=True), optimizer_state(model, optimizer, full=True)
    if dist.get_rank() == 0:
        torch.save(weights, f"{folder}/weights.pt")
        torch.save(state, f"{folder}/optimizer.pt")
    save(f"{folder}/no model", {"step": 3, "head": nn.Linear(2, 2)}, "sharded")
    for form in FORMS:
        save(f"{folder}/one {form}", {"net": model, "optimizer": optimizer, "step": 3}, form)
        save(f"{folder}/two {form}", {"net": model, "a": optimizer, "b": optimizer, "head": model.head}, form)
    for path in (f"{folder}/weights.pt", f"{folder}/one sharded", f"{folder}/one full"):
        torch.manual_seed(9)
        fresh = shard(Net(), mark=True)
        assert load(path, fresh) == {}
        assert everything(fresh) == saved[:1]
        refused(shard(build(Tied)), path, "does not fit the model", "It lacks block.bias", "pass `strict=False`")
    for path in (f"{folder}/optimizer.pt", f"{folder}/one sharded", f"{folder}/one full"):
        ours = AdamW(fresh.parameters(), lr=0.1)
        assert load(path, ours) == {}
        assert everything(fresh, ours) == saved
    for path in (f"{folder}/two sharded", f"{folder}/two full"):
        refused(fresh, path, "to be a checkpoint of one model, but it has 2: head, net")
        refused(ours, path, "to have the state of one optimizer, but it has 2. Found: a, b, head, net")
    refused(fresh, f"{folder}/optimizer.pt", "has no model. Found: param_groups, state")
    refused(fresh, f"{folder}/no model", "has no model. Found: fp8_rocm, head, step")
    refused(ours, f"{folder}/weights.pt", "it has 0. Found: blocks.0.0.bias")


def test_a_module_or_an_optimizer_by_itself(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, alone, str(tmp_path))


# ---- of a Trainer


def of_trainer(folder: str) -> None:
    model = shard(build(), mark=True)
    optimizers = AdamW(model.head.parameters(), lr=0.05), SGD(model.blocks.parameters(), lr=0.1, momentum=0.5)
    train(model, *optimizers)
    saved = everything(model, *optimizers)
    for form in FORMS:
        path, full = Path(folder, form), form == "full"
        states = [optimizer_state(model, each, full=full) for each in optimizers]
        numbered = (
            {"optimizer_states": states} if full else dict(zip(("optimizer_0", "optimizer_1"), states, strict=True))
        )
        state = {"state_dict": model_state(model, full=full), **numbered}
        # The facts of a Trainer have no list of models.
        rest = {"epoch": 3, "lr_schedulers": [], OWN_KEY: {"tied": {}}}
        Saver().save(path, state, rest, full=full)

        torch.manual_seed(9)
        fresh = shard(Net())
        ours = AdamW(fresh.head.parameters(), lr=0.1), SGD(fresh.blocks.parameters(), lr=0.2, momentum=0.1)
        objects = {"net": fresh, "adam": ours[0], "epoch": 0, "sgd": ours[1]}
        assert load(path, objects) == {"lr_schedulers": []}
        assert objects["epoch"] == 3
        assert everything(fresh, *ours) == saved
        refused(
            {"net": fresh, "adam": ours[0]}, str(path), "has the states of 2 optimizers", "has 1: adam", "all of them"
        )
        refused({"net": fresh, "head": fresh.head}, str(path), "a key 'net'", kind=KeyError)
        refused({"state_dict": fresh, "head": fresh.head}, str(path), "a key 'head'", kind=KeyError)


def test_a_checkpoint_of_a_trainer_is_loaded_under_any_keys(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, of_trainer, str(tmp_path))


# ---- stock Fabric


def two_groups(model: nn.Module) -> Optimizer:
    matrices = [each for each in model.parameters() if each.dim() == 2 and each.requires_grad]
    vectors = [each for each in model.parameters() if each.dim() == 1 and each.requires_grad]
    return AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.05)


def stock(form: str) -> tuple[Any, Callable[..., dict[str, Any]]]:
    """A stock Fabric on the ranks, and what makes its objects: model, optimizer, scheduler."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        lambda model, mesh: shard(model), 2, 1, save_distributed_checkpoint=form == "sharded"
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()

    def objects(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = fabric.setup_module(Net())
        optimizer = fabric.setup_optimizers(two_groups(model))
        return {"model": model, "optimizer": optimizer, "count": Count(seed), "step": seed}

    return fabric, objects


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """What Fabric hands on to its strategy."""
    from lightning.fabric.wrappers import _unwrap_objects

    return dict(_unwrap_objects(state))


def ours_reads_stock(folder: str) -> None:
    for form in FORMS:
        fabric, objects = stock(form)
        state = objects(1)
        train(state["model"], state["optimizer"])
        fabric.save(f"{folder}/{form}", state | {"rng": {"cpu": torch.ones(2)}})
        saved = of(plain(state))
        ours = plain(objects(2))
        left = load(f"{folder}/{form}", ours)
        assert listed(left) == {"rng": {"cpu": ("torch.float32", (2,), [1.0, 1.0])}}
        assert of(ours) == saved
        torch.manual_seed(9)
        assert load(f"{folder}/{form}", {"model": shard(Net())}).keys() == {"rng", "count", "step"}


def stock_reads_ours(folder: str) -> None:
    for form in FORMS:
        fabric, objects = stock(form)
        state = objects(1)
        train(state["model"], state["optimizer"])
        save(f"{folder}/{form}", plain(state), form)
        saved = of(plain(state))
        theirs = objects(2)
        assert fabric.load(f"{folder}/{form}", theirs).keys() == {OWN_KEY}
        if form == "sharded":  # where stock Fabric replaces what has a state, too
            assert theirs["count"] == {"value": 1}
            theirs["count"] = Count(1)
        assert of(plain(theirs)) == saved
        train(state["model"], state["optimizer"], first=2)
        train(theirs["model"], theirs["optimizer"], first=2)
        assert everything(plain(theirs)["model"]) == everything(plain(state)["model"])


def test_what_stock_fabric_saves_is_loaded_from_either_form(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, ours_reads_stock, str(tmp_path))


def test_stock_fabric_loads_either_form_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, stock_reads_ours, str(tmp_path))


def one_device(folder: Path, seed: int) -> tuple[Any, dict[str, Any]]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(seed)
    model = Net()
    model, optimizer = fabric.setup(model, two_groups(model))
    return fabric, {"model": model, "optimizer": optimizer, "count": Count(seed), "step": seed}


def save_full(path: str) -> Any:
    model = shard(build())
    state = {"model": model, "optimizer": two_groups(model), "count": Count(4), "step": 4}
    train(model, state["optimizer"])
    save(path, state, "full")
    return everything(model, state["optimizer"])


def test_stock_fabric_on_one_device_loads_the_one_file(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(2, save_full, str(tmp_path / "full"))[0]
    fabric, state = one_device(tmp_path, 1)
    fabric.load(tmp_path / "full", state)
    assert [listed(dict(state["model"].state_dict())), listed(state["optimizer"].state_dict())] == saved
    assert (state["count"].value, state["step"]) == (4, 4)


def load_full(path: str) -> Any:
    torch.manual_seed(9)
    model = shard(Net())
    state: dict[str, Any] = {"model": model, "optimizer": two_groups(model), "count": Count(1), "step": 1}
    assert load(path, state) == {}
    return everything(model, state["optimizer"]), state["count"].value, state["step"]


def test_what_stock_fabric_saves_on_one_device_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    fabric, state = one_device(tmp_path, 4)
    train(state["model"], state["optimizer"])
    fabric.save(tmp_path / "plain.ckpt", state)
    expected = [listed(dict(state["model"].state_dict())), listed(state["optimizer"].state_dict())]
    assert ranks(2, load_full, str(tmp_path / "plain.ckpt")) == [(expected, 4, 4)] * 2
