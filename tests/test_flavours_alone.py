"""Each name that Lightning goes by, in a virtual environment that has no other: the oldest and the newest supported.

The environments are real. They show everything that this one has but Lightning, and hold wheels that `make install` put
beside it. In each of them a process that imports this package first and one that imports Lightning first train alike.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flavours import BOTH, HOMES, STANDALONE, Lightning
from packaging.utils import parse_wheel_filename
from ranks import _free_port

import lightning_fp8_rocm
from lightning_fp8_rocm.versions import supported

ROOT = Path(__file__).parents[1]
WHEELS = Path(sys.prefix) / "lightnings"
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
AGES = {"oldest": min, "newest": max}


def entry_points(name: Lightning) -> list[tuple[str, str, str]]:
    """The class, Lightning's module with it, ours."""
    return [
        ("Trainer", name.package, f"lightning_fp8_rocm.{name.room}"),
        ("Fabric", name.fabric, f"lightning_fp8_rocm.{name.fabric_room}"),
    ]


NAMES = {**{each.name: entry_points(each) for each in BOTH}, "lightning_fabric": entry_points(STANDALONE)[1:]}
# The wheels of each environment, by module. That of pytorch-lightning holds `lightning_fabric`, too.
ALONE = [(name, age) for name in NAMES for age in AGES]
ENVIRONMENTS = [*ALONE, ("lightning+pytorch_lightning", "newest")]


# ---- environments


def wheel(name: str, age: str) -> Path:
    """The downloaded wheel of the oldest or the newest supported version."""
    there = {parse_wheel_filename(path.name)[1]: path for path in WHEELS.glob(f"{name}-*.whl")}
    allowed = list(supported(name.replace("_", "-")).specifier.filter(there))
    assert len(allowed) >= 2, f"{WHEELS} has {sorted(map(str, there))} of {name}; `make install` puts two there."
    return there[AGES[age](allowed)]


@cache
def visible() -> list[Path]:
    """This package, and what else this interpreter imports, but for its own modules, Lightning and `.pth` files."""
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    found = {"lightning_fp8_rocm": Path(lightning_fp8_rocm.__file__).parent}
    for folder in map(Path, json.loads(done.stdout)):
        if folder.resolve() in {*own, *(each / "lib-dynload" for each in own), ROOT} or not folder.is_dir():
            continue
        for entry in folder.iterdir():
            if entry.name.partition("-")[0] not in LIGHTNING | {"__pycache__"} and entry.suffix != ".pth":
                found.setdefault(entry.name, entry)
    return list(found.values())


def make_environment(home: Path, entries: list[Path]) -> Any:
    """A virtual environment whose site-packages shows `entries`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (site,) = (home / "lib").glob("python*/site-packages")
    for entry in entries:
        (site / entry.name).symlink_to(entry)

    def python(*arguments: str, code: int = 0, **variables: str) -> Any:
        """Run it; variables of Lightning, of torchrun and of Python that this process has are not handed on."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LT_", "PL_", "PYTHON", "TORCHELASTIC_"))}
        done = subprocess.run(
            [str(home / "bin" / "python"), *arguments],
            cwd=home,
            env={**kept, "OMP_NUM_THREADS": "1", **variables},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return SimpleNamespace(home=home, site=site, python=python)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """Makes the environment of some wheels, once; what a wheel holds is unpacked, and compiled by Python, once."""

    @cache
    def unpacked(path: Path) -> list[Path]:
        folder = tmp_path_factory.mktemp(path.stem)
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
        return list(folder.iterdir())

    @cache
    def made(names: str, age: str) -> Any:
        entries = [entry for name in names.split("+") for entry in unpacked(wheel(name, age))]
        return make_environment(tmp_path_factory.mktemp(f"{names}-{age}") / "venv", [*visible(), *entries])

    return made


# ---- a run by name and one by class, in each

TRAIN = """
import json
import re
import sys
from importlib import import_module
from importlib.util import find_spec

LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
first, wanted = json.loads(sys.argv[1])
facts = {"importable": sorted(name for name in LIGHTNING if find_spec(name))}
if first == "ours":
    import lightning_fp8_rocm

    facts["imported by ours"] = sorted(LIGHTNING & sys.modules.keys())
for _, theirs, _ in wanted:
    import_module(theirs)
import lightning_fp8_rocm
import torch
from jsonargparse import ArgumentParser
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader


def path(thing):
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def network():
    # 32 to 64 is FP8; 2 outputs are no multiple of 16
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 2))


def in_fp8(net):
    return [isinstance(layer, lightning_fp8_rocm.FP8Linear) for layer in net]


def values(net):
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters())
    return [p.detach().clone() for p in whole]


def trainer(lightning, **arguments):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.fp8, self.losses = network(), None, []

        def training_step(self, batch, _):
            self.fp8 = in_fp8(self.net)
            loss = self.net(batch).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    before = values(module)
    # a sampler of Lightning's would shuffle
    off = ("use_distributed_sampler", "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    run = lightning.Trainer(accelerator="cpu", devices=1, max_steps=2, **dict.fromkeys(off, False), **arguments)
    run.fit(module, DataLoader(BATCHES.flatten(0, 1), batch_size=4))
    return run.precision_plugin, run.strategy, module.net, module.fp8, module.losses, before


def fabric(lightning, **arguments):
    run = lightning.Fabric(accelerator="cpu", devices=1, **arguments)
    run.launch()
    net = network()
    before = values(net)
    model, optimizer = run.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fp8, losses = in_fp8(net), []
    for batch in BATCHES:
        loss = model(batch).square().mean()
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return run.strategy.precision, run.strategy, net, fp8, losses, before


BATCHES = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))
facts["runs"] = []
for kind, theirs, ours in wanted:
    plugin, strategy = import_module(f"{ours}.precision"), import_module(f"{ours}.strategy")
    for how, arguments in {
        "precision by name": {"precision": "fp8-rocm"},
        "both by name": {"precision": "fp8-rocm", "strategy": "fsdp2_fp8"},
        "both by class": {"plugins": [plugin.FP8Precision()], "strategy": strategy.FSDP2FP8Strategy()},
    }.items():
        torch.manual_seed(0)
        run = {"Trainer": trainer, "Fabric": fabric}[kind](import_module(theirs), **arguments)
        precision, strategy_used, net, fp8, losses, before = run
        facts["runs"].append({
            "run": [kind, theirs, how],
            "precision": path(precision),
            "strategy": path(strategy_used),
            "in fp8": fp8,
            "losses": losses,
            "sharded": [isinstance(p, DTensor) for p in net.parameters()],
            "unchanged": [i for i, (a, b) in enumerate(zip(before, values(net), strict=True)) if torch.equal(a, b)],
        })
facts["by class path"] = []
for kind, theirs, ours in wanted:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(import_module(f"{theirs}.plugins.precision").Precision, "plugin")
    wished = {"class_path": f"{ours}.precision.FP8Precision", "init_args": {"recipe": "rowwise"}}
    made = parser.instantiate_classes(parser.parse_object({"plugin": wished})).plugin
    facts["by class path"].append([path(made), made.recipe])
facts["errors"] = {}
for name in ("FP8Precision", "FSDP2FP8Strategy", "EMA"):
    try:
        exec(f"from lightning_fp8_rocm import {name}", {})
    except ImportError as error:
        assert getattr(lightning_fp8_rocm, name, None) is None  # as jsonargparse asks for the shortest path of a class
        try:
            getattr(lightning_fp8_rocm, name)
        except AttributeError as same:
            assert str(same) == str(error)
        message, *others = str(error).split(" For ")
        there = (re.search(r"it is `([\\w.]+)\\.(\\w+)`", other).groups() for other in others)
        facts["errors"][name] = message, [path(getattr(import_module(m), n)()) for m, n in there]
facts["imported in the end"] = sorted(LIGHTNING & sys.modules.keys())
print(json.dumps(facts))
"""


def modules(names: str) -> set[str]:
    """The modules that the wheels of an environment bring."""
    return {theirs.partition(".")[0] for name in names.split("+") for _, theirs, _ in NAMES[name]}


@pytest.fixture(scope="module", params=ENVIRONMENTS, ids="-".join)
def ran(request: pytest.FixtureRequest, environment: Any) -> Any:
    """What the processes of one environment found, that of either order of imports."""
    names, age = request.param
    wanted = [entry for name in names.split("+") for entry in NAMES[name]]

    def train(first: str) -> dict[str, Any]:
        done = environment(names, age).python("-c", TRAIN, json.dumps([first, wanted]))
        return json.loads(done.stdout.splitlines()[-1])

    environment(names, age)  # made once, before two threads ask for it
    with ThreadPoolExecutor(2) as pool:
        both = dict(zip(("ours", "theirs"), pool.map(train, ("ours", "theirs")), strict=True))
    return SimpleNamespace(
        names=names, both=both, runs=[run for facts in both.values() for run in facts["runs"]], wanted=wanted
    )


def test_no_other_name_of_lightning_can_be_imported_nor_was(ran: Any) -> None:
    for facts in ran.both.values():
        assert set(facts["importable"]) == set(facts["imported in the end"]) == modules(ran.names)
    assert ran.both["ours"]["imported by ours"] == []


def test_the_classes_are_those_for_the_name_asked_for(ran: Any) -> None:
    homes = {theirs: ours for _, theirs, ours in ran.wanted}
    assert len(ran.runs) == 2 * 3 * len(homes)  # orders of imports, ways to ask
    for run in ran.runs:
        _, theirs, how = run["run"]
        home = homes[theirs]
        assert run["precision"] == f"{home}.precision.FP8Precision", run
        if how == "precision by name":
            assert run["strategy"].startswith(f"{theirs}.strategies."), run
        else:
            assert run["strategy"] == f"{home}.strategy.FSDP2FP8Strategy", run


def test_a_class_path_makes_the_class_for_the_name_asked_for(ran: Any) -> None:
    expected = [[f"{ours}.precision.FP8Precision", "rowwise"] for _, _, ours in ran.wanted]
    assert [facts["by class path"] for facts in ran.both.values()] == [expected] * 2


def test_two_steps_train_every_parameter_in_fp8(ran: Any) -> None:
    for run in ran.runs:
        assert run["in fp8"] == [True, False], run
        assert run["unchanged"] == [], run
        assert run["losses"][1] < run["losses"][0], run
        assert set(run["sharded"]) == {run["run"][2] != "precision by name"}, run


def test_neither_the_order_of_imports_nor_the_name_nor_how_it_is_asked_for_changes_a_loss(ran: Any) -> None:
    losses: dict[tuple[str, bool], set[tuple[float, ...]]] = {}
    for run in ran.runs:
        kind, _, how = run["run"]
        losses.setdefault((kind, how == "precision by name"), set()).add(tuple(run["losses"]))
    assert {key: len(different) for key, different in losses.items()} == dict.fromkeys(losses, 1)


def test_a_class_for_a_name_that_is_not_there_is_an_error_with_the_way_out(ran: Any) -> None:
    homes = [ours.removeprefix("lightning_fp8_rocm.") for _, _, ours in ran.wanted]
    for facts in ran.both.values():
        assert bool(facts["errors"]) == ("lightning" not in modules(ran.names))
        for name, (message, instead) in facts["errors"].items():
            assert message == (
                f"`lightning_fp8_rocm.{name}` is for `lightning`, which is not installed:"
                " `pip install 'lightning-fp8-rocm[lightning]'`."
            )
            assert instead == [
                f"lightning_fp8_rocm.{home}.{HOMES[name]}.{name}"
                for home in homes
                if (name, home) != ("EMA", "lightning_fabric")  # a callback of the Trainer's
            ]


def test_what_lightning_itself_lacks_is_not_called_a_missing_lightning(environment: Any) -> None:
    code = "import sys; sys.modules['torch'] = None; import lightning_fp8_rocm; lightning_fp8_rocm.FP8Precision"
    done = environment("lightning", "newest").python("-c", code, code=1)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: import of torch halted; None in sys.modules"


# ---- versions outside the range

IMPORT_EACH = """
import json

import lightning_fp8_rocm

errors = {}
for name in ("lightning", "pytorch_lightning", "lightning_fabric"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        pass
    except ImportError as error:
        errors[name] = str(error)
print(json.dumps(errors))
"""


@pytest.mark.parametrize(
    ("names", "pretended"),
    [
        ("lightning+pytorch_lightning", ["lightning", "pytorch_lightning", "lightning_fabric"]),
        ("pytorch_lightning", ["pytorch_lightning"]),  # whose wheel holds `lightning_fabric`
    ],
)
def test_a_pretended_version_outside_the_range_is_refused_at_the_import(
    environment: Any, tmp_path: Path, names: str, pretended: list[str]
) -> None:
    for name in pretended:
        (metadata := tmp_path / f"{name}-2.7.0.dist-info").mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.7.0\n")
    done = environment(names, "newest").python("-c", IMPORT_EACH, PYTHONPATH=str(tmp_path))
    errors = json.loads(done.stdout)
    assert errors.keys() == modules(names)
    for name, error in errors.items():
        # `pytorch_lightning` imports `lightning_fabric`: whichever is taught first is named
        possible = {"lightning"} if name == "lightning" else {"pytorch_lightning", "lightning_fabric"}
        distribution = "|".join(each.replace("_", "-") for each in sorted(possible.intersection(pretended)))
        assert re.search(
            rf"but ({distribution}) 2\.7\.0 is installed.* \(`pip install '\1!=2\.6\.2,!=2\.6\.3,<2\.7,>=2\.6\.1'`\)",
            error,
        )


# ---- autoload

PTH = ROOT / "autoload" / "lightning_fp8_rocm_autoload.pth"
NAMED = ("--precision", "fp8-rocm", "--strategy", "fsdp2_fp8")

SCRIPT = """
import torch
from lightning.fabric import Fabric
from torch import nn

fabric = Fabric()  # launched by the command
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 2))
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
losses = []
for _ in range(2):
    loss = model(torch.ones(4, 32) * (1 + fabric.global_rank)).square().mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(fabric.all_reduce(loss).item())
assert losses[1] < losses[0], losses
for rank in range(fabric.world_size):
    if rank == fabric.global_rank:
        in_fp8 = [any(cls.__name__ == "FP8Linear" for cls in type(layer).__mro__) for layer in net]
        print("trained by", rank, "of", fabric.world_size, in_fp8, flush=True)
    fabric.barrier()
"""


@pytest.fixture(scope="module")
def autoloaded(tmp_path_factory: pytest.TempPathFactory, environment: Any) -> Any:
    """As the environment of the newest `lightning`, and what the wheel of `autoload/` holds."""
    plain = environment("lightning", "newest")
    home = tmp_path_factory.mktemp("autoload") / "venv"
    made = make_environment(home, list(plain.site.iterdir()))
    shutil.copy(PTH, made.site)
    return made


def fabric_run(environment: Any, fabric: str, options: Sequence[str], script: str = SCRIPT, **kwargs: Any) -> Any:
    """What the console script `fabric run` does, on two CPU processes."""
    (path := environment.home / "script.py").write_text(script.replace("lightning.fabric", fabric))
    command = ("-c", f"from {fabric}.cli import _main; _main()", "run", "--main-port", str(_free_port()))
    return environment.python(*command, *options, "--accelerator", "cpu", "--devices", "2", str(path), **kwargs)


def lines_of_ranks(done: Any) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("trained by")]


BOTH_RANKS = [f"trained by {rank} of 2 [True, False]" for rank in range(2)]


def test_fabric_run_knows_the_names_where_autoload_is_installed(autoloaded: Any) -> None:
    assert lines_of_ranks(fabric_run(autoloaded, "lightning.fabric", NAMED)) == BOTH_RANKS


def test_fabric_run_refuses_the_names_without_autoload(environment: Any) -> None:
    done = fabric_run(environment("lightning", "newest"), "lightning.fabric", NAMED, code=2)
    assert "'fp8-rocm' is not one of" in done.stderr or "'fsdp2_fp8' is not one of" in done.stderr


def test_variables_give_the_names_to_fabric_run_and_the_script_imports_them(environment: Any) -> None:
    alone = environment("lightning_fabric", "newest")
    script = f"import lightning_fp8_rocm\n{SCRIPT}"
    done = fabric_run(alone, "lightning_fabric", (), script, LT_PRECISION="fp8-rocm", LT_STRATEGY="fsdp2_fp8")
    assert lines_of_ranks(done) == BOTH_RANKS


def test_autoload_imports_this_package_at_the_start_and_no_lightning(autoloaded: Any) -> None:
    code = "import sys; print(sorted({'lightning_fp8_rocm', 'lightning', 'torch'} & sys.modules.keys()))"
    assert autoloaded.python("-c", code).stdout == "['lightning_fp8_rocm']\n"


def test_python_starts_where_autoload_finds_no_package_or_a_broken_one(autoloaded: Any, tmp_path: Path) -> None:
    (tmp_path / "lightning_fp8_rocm.py").write_text("raise RuntimeError('this is broken')")
    done = autoloaded.python("-c", "print('started')", PYTHONPATH=str(tmp_path))
    assert done.stdout == "started\n"
    assert "RuntimeError: this is broken" in done.stderr
    assert PTH.name in done.stderr
