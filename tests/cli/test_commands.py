"""`lightning-fp8-rocm checkpoint`: what becomes of a checkpoint after the training.

Checkpoints are of real Trainers on two ranks; what is read back is read by stock Lightning, transformers and
compressed-tensors.
"""

import ctypes
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from ranks import Ranks
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import lightning_fp8_rocm as ours
from lightning_fp8_rocm.cli import files
from lightning_fp8_rocm.cli.main import main
from lightning_fp8_rocm.distributed import publish
from lightning_fp8_rocm.distributed.storage import open_checkpoint
from lightning_fp8_rocm.distributed.whole import assembled
from lightning_fp8_rocm.float8.quantize import dequantize, quantize

sys.path.insert(0, str(Path(__file__).parent))

HERE = Path(__file__).parent
LAYERS = [
    f"model.layers.{block}.{name}"
    for block in range(2)
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
]


def read_whole(path: Path) -> dict[str, Any]:
    return assembled(open_checkpoint(path, weights_only=True))


def _train(path: Path) -> dict[str, list[float]]:
    """On each rank: three runs and their checkpoints. Beside each, `NAME.pt` has the weights as the module has them."""
    sys.path.insert(0, str(HERE))
    from llama import Llama, tokens
    from models import trainer
    from torch import distributed as dist
    from torch.distributed.tensor import DTensor

    from lightning_fp8_rocm import FP8Precision
    from lightning_fp8_rocm.callbacks.ema import EMA

    def fit(name: str, precision: Any, *, tied: bool, epochs: int, callbacks: Any = (), resume: Any = None) -> Llama:
        module = Llama(tied)
        run = trainer(precision, strategy="fsdp2_fp8", devices=2, max_epochs=epochs, callbacks=list(callbacks))
        run.fit(module, tokens(4, dist.get_world_size(), dist.get_rank()), ckpt_path=resume)
        run.save_checkpoint(path / f"{name}.ckpt")
        weights = {
            key: value.full_tensor() if isinstance(value, DTensor) else value
            for key, value in module.state_dict().items()
        }
        if run.is_global_zero:
            torch.save({key: value.clone() for key, value in weights.items()}, path / f"{name}.pt")
        return module

    fit("tied", "32-true", tied=True, epochs=2)
    last = fit("later", "32-true", tied=True, epochs=3, resume=path / "tied.ckpt")
    fit("rows", FP8Precision("rowwise"), tied=False, epochs=1, callbacks=[EMA(0.5)])
    fit("fnuz", FP8Precision("tensorwise", fp8_format="fnuz"), tied=True, epochs=1)
    _train_in_a_loop(path)
    return {"losses": last.losses}


def _train_in_a_loop(path: Path) -> None:
    """What Fabric saves: the Hugging Face model itself, in both forms, and two models in one checkpoint."""
    from llama import config
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM

    from lightning_fp8_rocm.distributed.objects import collect
    from lightning_fp8_rocm.distributed.saver import Saver

    model = LlamaForCausalLM(config(tied=True))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(input_ids=torch.arange(8).view(1, 8), labels=torch.arange(8).view(1, 8)).loss.backward()
    optimizer.step()
    state = {"llama": model, "adam": optimizer, "step": 1, "callbacks": "none"}
    for name, full, more in (
        ("loop", False, {}),
        ("loop-full", True, {}),
        ("two", False, {"head": model.lm_head}),
    ):
        Saver().save(path / f"{name}.ckpt", *collect(state | more, full=full), full=full)


class Runs(NamedTuple):
    folder: Path
    losses: list[float]
    """Of the third epoch of the run `tied`, as our strategy goes on."""

    def checkpoint(self, name: str) -> str:
        return str(self.folder / f"{name}.ckpt")

    def weights(self, name: str) -> dict[str, Tensor]:
        """Of the Hugging Face model, by its names."""
        state = torch.load(self.folder / f"{name}.pt", weights_only=True)
        return {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}

    def config(self, tied: bool) -> str:
        return str(self.folder / f"config-{tied}")


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    from llama import config

    folder = tmp_path_factory.mktemp("runs")
    told, _ = ranks(2, _train, folder)
    made = Runs(folder, told["losses"])
    for tied in (True, False):
        config(tied).save_pretrained(made.config(tied))
        Path(made.config(tied), "tokenizer.json").write_text("{}")
        Path(made.config(tied), "generation_config.json").write_text("{}")
        Path(made.config(tied), "modeling.py").write_text("code")
    return made


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command; returns the exit code, what it printed and what it complained of."""

    def call(*args: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = 0
        try:
            main(["checkpoint", *args])
        except SystemExit as leave:
            code = int(leave.code or 0)
        out, error = capfd.readouterr()
        assert "Traceback" not in error
        return code, out, error

    return call


def fails(result: tuple[int, str, str]) -> str:
    code, _, error = result
    assert code == 1, result
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


# ---------------------------------------------------------------------------------------------------------------------
# The script


def test_the_installed_script_lists_the_commands() -> None:
    script = Path(sys.executable).with_name("lightning-fp8-rocm")
    done = subprocess.run([script, "checkpoint", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for command in ("consolidate", "export", "inspect"):
        assert command in done.stdout


@pytest.mark.parametrize("command", ["consolidate", "export", "inspect"])
def test_the_help_of_a_command_explains_each_of_its_arguments(run: Any, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "src" in out
    assert "Whether to compare" in out
    assert "Args:" not in out


# ---------------------------------------------------------------------------------------------------------------------
# consolidate


def test_stock_lightning_goes_on_from_a_consolidated_file_with_the_same_losses(
    run: Any, runs: Runs, tmp_path: Path
) -> None:
    target = tmp_path / "new" / "one.ckpt"
    code, out, _ = run("consolidate", runs.checkpoint("tied"), str(target))
    assert code == 0
    assert "1 optimizers" in out
    assert os.listdir(target.parent) == ["one.ckpt"]

    done = subprocess.run(
        [sys.executable, HERE / "resume.py", target], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    losses = [float(each) for each in done.stdout.split("losses")[1].split()]
    # One batch of 8 on one device, two of 4 on two ranks: the same sums in another order of fp32.
    assert losses == pytest.approx(runs.losses, rel=1e-5)
    assert len(losses) == 4


def test_a_consolidated_checkpoint_has_all_that_the_run_saved(runs: Runs) -> None:
    checkpoint = read_whole(Path(runs.checkpoint("rows")))
    weights = runs.weights("rows")
    for name, value in weights.items():
        assert torch.equal(checkpoint["state_dict"][f"model.{name}"], value)
    (optimizer,) = checkpoint["optimizer_states"]
    assert [group["params"] for group in optimizer["param_groups"]] == [list(range(5)), list(range(5, 21))]
    assert list(optimizer["state"]) == list(range(21))
    assert optimizer["state"][5]["exp_avg"].shape == weights["model.embed_tokens.weight"].shape
    (average,) = [state for key, state in checkpoint["callbacks"].items() if key.startswith("EMA")]
    assert average["weights"]["model.lm_head.weight"].shape == weights["lm_head.weight"].shape
    assert not torch.equal(average["weights"]["model.lm_head.weight"], weights["lm_head.weight"])
    assert checkpoint["epoch"] == 1
    assert checkpoint["hyper_parameters"] == {"tied": False}
    assert len(checkpoint["lr_schedulers"]) == 1


def test_tied_weights_are_one_tensor_and_equal_ones_that_are_trained_apart_are_not(runs: Runs, tmp_path: Path) -> None:
    state = read_whole(Path(runs.checkpoint("tied")))["state_dict"]
    memory = {value.data_ptr() for value in state.values()}
    assert len(memory) == len(state) - 1
    # Of one value throughout, and vectors: alike, and no ties.
    norms = [value for name, value in state.items() if name.endswith("layernorm.weight")]
    assert len({value.data_ptr() for value in norms}) == len(norms) == 4


def test_a_file_is_not_consolidated(run: Any, runs: Runs, tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(2)}}, tmp_path / "one.ckpt")
    assert "is one file already: Lightning loads it as it is" in fails(
        run("consolidate", str(tmp_path / "one.ckpt"), str(tmp_path / "two.ckpt"))
    )


def test_a_checkpoint_of_weights_alone_has_no_optimizer_states(tmp_path: Path) -> None:
    write_lightnings(tmp_path / "one.ckpt", {"a": torch.ones(2, 2)}, rest={"epoch": 1})
    assert read_whole(tmp_path / "one.ckpt").keys() == {"state_dict", "epoch"}


def write_lightnings(path: Path, state: dict[str, Tensor], rest: Any) -> None:
    """A directory as Lightning's ModelParallelStrategy writes it, on one process."""
    from torch.distributed.checkpoint import save

    save({"state_dict": state}, checkpoint_id=path, no_dist=True)
    torch.save(rest, path / "meta.pt")


# ---------------------------------------------------------------------------------------------------------------------
# Of Fabric


def test_a_directory_of_fabric_becomes_the_one_file_that_fabric_writes(run: Any, runs: Runs, tmp_path: Path) -> None:
    code, out, _ = run("consolidate", runs.checkpoint("loop"), str(tmp_path / "one.ckpt"))
    assert code == 0
    assert "21 tensors of the model, the states of 1 optimizers" in out
    made = torch.load(tmp_path / "one.ckpt", weights_only=True)
    written = torch.load(runs.checkpoint("loop-full"), weights_only=True)
    assert set(made) == set(written) == {"llama", "adam", "step", "callbacks", "fp8_rocm"}
    assert made["llama"].keys() == written["llama"].keys()
    assert all(torch.equal(made["llama"][name], value) for name, value in written["llama"].items())
    assert made["llama"]["lm_head.weight"].data_ptr() == made["llama"]["model.embed_tokens.weight"].data_ptr()
    assert made["adam"]["param_groups"] == written["adam"]["param_groups"]
    for name, state in written["adam"]["state"].items():
        assert all(torch.equal(made["adam"]["state"][name][key], value) for key, value in state.items())
    assert made["fp8_rocm"] == written["fp8_rocm"]
    assert "22 tensors of 2 models" in run("consolidate", runs.checkpoint("two"), str(tmp_path / "two.ckpt"))[1]


@pytest.mark.parametrize("name", ["loop", "loop-full"])
def test_the_one_model_of_fabric_is_exported(run: Any, runs: Runs, tmp_path: Path, name: str) -> None:
    source = runs.checkpoint(name)
    said = fails(run("export", source, str(tmp_path / "a"), "--prefix", "net."))
    assert "or an empty one if the module itself is" in said
    code, out, _ = run("export", source, str(tmp_path / "a"), "--prefix", "", "--config", runs.config(True))
    assert code == 0
    assert "Tied, written once: lm_head.weight is model.embed_tokens.weight" in out
    weights = torch.load(runs.checkpoint("loop-full"), weights_only=True)["llama"]
    assert torch.equal(logits(tmp_path / "a", dtype="auto"), logits_of(weights, True))


def test_of_several_models_of_fabric_none_is_exported(run: Any, runs: Runs, tmp_path: Path) -> None:
    said = fails(run("export", runs.checkpoint("two"), str(tmp_path / "a"), "--prefix", ""))
    assert "to be a checkpoint of one model, but it has 2: head, llama" in said
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["loop", "two"])
def test_inspect_shows_the_keys_of_fabric(run: Any, runs: Runs, name: str) -> None:
    code, out, _ = run("inspect", runs.checkpoint(name))
    assert code == 0
    lines = out.splitlines()
    # The tied weight, 64 x 32, is there under both of its names, and was trained once. Two moments and a step, in fp32.
    weights = torch.load(runs.checkpoint("loop-full"), weights_only=True)["llama"]
    elements = sum(value.numel() for value in weights.values())
    trained = elements - 64 * 32
    assert [" ".join(line.split()) for line in lines if not line.startswith(("│", "┏", "┃", "┡", "└", "├"))] == [
        "form directory of shards, of 2 rank(s)",
        f"model 'llama' {len(weights)} tensors, {elements:,} elements, {files.human(4 * elements)}",
        *(["model 'head' 1 tensors, 2,048 elements, 8.2 kB"] if name == "two" else []),
        f"optimizer 'adam' {files.human(4 * (2 * trained + len(weights) - 1))}",
        "other keys 'callbacks', 'step'",
        "written by not recorded",
        "fp8 none recorded",
        "files sound",
    ]
    titles = [line.split()[1:3] for line in lines if line.startswith("│ of ")]
    assert titles == ([["of", "'llama'"], ["of", "'head'"]] if name == "two" else [])


# ---------------------------------------------------------------------------------------------------------------------
# export


def logits(path: Path, **arguments: Any) -> Tensor:
    from llama import VOCABULARY
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **arguments)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        out: Tensor = model(input_ids=torch.arange(VOCABULARY).view(8, 8)).logits
    return out


def logits_of(weights: dict[str, Tensor], tied: bool) -> Tensor:
    """The same of a model that is given its weights, in bf16."""
    from llama import VOCABULARY, config
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(config(tied))
    model.load_state_dict(weights)
    for parameter in model.parameters():  # not `model.to`: the frequencies of the positions stay fp32
        parameter.data = parameter.data.bfloat16()
    with torch.no_grad():
        out: Tensor = model(input_ids=torch.arange(VOCABULARY).view(8, 8)).logits
    return out


@pytest.mark.parametrize(("name", "tied"), [("rows", False), ("tied", True)])
def test_from_pretrained_has_the_trained_weights_rounded_to_bf16(
    run: Any, runs: Runs, tmp_path: Path, name: str, tied: bool
) -> None:
    target = tmp_path / "hub"
    code, out, _ = run("export", runs.checkpoint(name), str(target), "--config", runs.config(tied))
    assert code == 0
    assert ("Tied, written once: lm_head.weight is model.model.embed_tokens.weight" in out) is tied
    assert "Left out, not under 'model.': 1 tensors" in out
    expected = ["config.json", "generation_config.json", "manifest.json", "model.safetensors", "tokenizer.json"]
    assert sorted(os.listdir(target)) == expected
    assert publish.verify(target) == []
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(target / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118, it is no dict
    assert torch.equal(logits(target, dtype="auto"), logits_of(runs.weights(name), tied))


@pytest.mark.parametrize(("name", "tied", "row_dim"), [("rows", False, 1), ("fnuz", True, None)])
def test_an_fp8_export_dequantises_in_compressed_tensors_to_what_our_layers_compute_with(
    run: Any, runs: Runs, tmp_path: Path, name: str, tied: bool, row_dim: int | None
) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    target = tmp_path / "hub"
    code, out, _ = run("export", runs.checkpoint(name), str(target), "--dtype", "fp8", "--config", runs.config(tied))
    assert code == 0
    assert "In FP8: 14 layers" in out
    assert "compressed-tensors float-quantized" in out
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["model.embed_tokens", "lm_head"]

    stored, weights = load_file(target / "model.safetensors"), runs.weights(name)
    model = AutoModelForCausalLM.from_pretrained(
        target, quantization_config=CompressedTensorsConfig(dequantize=True), dtype=torch.float32
    )
    for layer in LAYERS:
        weight = weights[f"{layer}.weight"]
        data, scale = quantize(weight, torch.float8_e4m3fn, row_dim=row_dim, power_of_2=row_dim is not None)
        written = stored[f"{layer}.weight_scale"]
        assert written.shape == ((len(weight), 1) if row_dim else (1,))
        assert written.dtype == torch.float32
        assert stored[f"{layer}.weight"].dtype == torch.float8_e4m3fn
        assert torch.equal(stored[f"{layer}.weight"].float(), data.float())
        ours, theirs = dequantize(data, scale), model.get_parameter(f"{layer}.weight")
        if row_dim:  # powers of two: exact
            assert len(scale.unique()) >= 4
            assert torch.equal(theirs, ours)
        else:  # the reciprocal of the scale, and the product with it, each rounded to 24 bits
            torch.testing.assert_close(theirs, ours, rtol=2 * 2**-24, atol=0)
        # 3 mantissa bits: half a unit in the last place is 2**-4 of a normal number, and of the smallest one (2**-6)
        # of the scaled weight in what is subnormal.
        bound = weight.abs() * 2**-4 + 2**-10 / scale
        assert ((theirs - weight).abs() <= bound * (1 + 2**-20)).all()
    others = {key: value for key, value in stored.items() if key.rpartition(".")[0] not in LAYERS}
    assert {value.dtype for value in others.values()} == {torch.bfloat16}


@pytest.mark.parametrize(("name", "tied"), [("rows", False), ("fnuz", True)])
def test_the_logits_of_an_fp8_export_are_as_near_as_the_format_lets_them_be(
    run: Any, runs: Runs, tmp_path: Path, name: str, tied: bool
) -> None:
    target = tmp_path / "hub"
    run("export", runs.checkpoint(name), str(target), "--dtype", "fp8", "--config", runs.config(tied))
    found = logits(target, dtype="auto").float()
    wanted = logits_of(runs.weights(name), tied).float()
    # Rounding to 3 mantissa bits is off by at most 2**-4 of the value, 2**-4 / sqrt(3) of it in the mean square. A
    # product has two rounded operands; the errors of the 2 * 7 products are independent, and none is amplified on its
    # way to the logits by more than the signal is.
    bound = 2**-4 / 3**0.5 * 2**0.5 * 14**0.5
    error = float((found - wanted).norm() / wanted.norm())
    assert 0.001 < error < bound


def test_averages_are_exported_in_place_of_the_weights(run: Any, runs: Runs, tmp_path: Path) -> None:
    code, out, _ = run("export", runs.checkpoint("rows"), str(tmp_path / "a"), "--weights", "ema")
    assert code == 0
    assert "Only weights are written" in out
    checkpoint = read_whole(Path(runs.checkpoint("rows")))
    (key,) = [key for key in checkpoint["callbacks"] if key.startswith("EMA")]
    averages = checkpoint["callbacks"][key]["weights"]
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert stored.keys() == {name.removeprefix("model.") for name in averages}
    for name, value in averages.items():
        assert torch.equal(stored[name.removeprefix("model.")], value.bfloat16())
    assert run("export", runs.checkpoint("rows"), str(tmp_path / "b"), "--weights", key)[0] == 0
    assert 'fits 0 averages in this checkpoint. It has averages of "EMA{' in fails(
        run("export", runs.checkpoint("rows"), str(tmp_path / "c"), "--weights", "mean")
    )
    assert "It has none of an EMA callback" in fails(
        run("export", runs.checkpoint("tied"), str(tmp_path / "c"), "--weights", "ema")
    )


def test_a_large_model_is_several_files_with_an_index(run: Any, runs: Runs, tmp_path: Path) -> None:
    target = tmp_path / "hub"
    run("export", runs.checkpoint("rows"), str(target), "--max_shard_size", "10KB", "--config", runs.config(False))
    index = json.loads((target / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in target.glob("model-*.safetensors"))
    assert len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(names)
    assert index["weight_map"].keys() == runs.weights("rows").keys()
    assert all((target / name).stat().st_size < 12_000 for name in names)
    assert torch.equal(logits(target, dtype="auto"), logits_of(runs.weights("rows"), False))

    assert "Unit" in fails(run("export", runs.checkpoint("rows"), str(tmp_path / "b"), "--max_shard_size", "10XX"))


def test_an_fp8_export_in_several_files_has_every_scale(run: Any, runs: Runs, tmp_path: Path) -> None:
    for size, target in (("100GB", tmp_path / "one"), ("2KB", tmp_path / "many")):
        run("export", runs.checkpoint("rows"), str(target), "--dtype", "fp8", "--max_shard_size", size)
    one = load_file(tmp_path / "one" / "model.safetensors")
    many: dict[str, Tensor] = {}
    for file in sorted((tmp_path / "many").glob("model-*.safetensors")):
        many |= load_file(file)
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name].view(torch.uint8), many[name].view(torch.uint8)) for name in one)


def test_layers_and_scales_may_be_named(run: Any, runs: Runs, tmp_path: Path) -> None:
    result = run(
        *("export", runs.checkpoint("tied"), str(tmp_path / "a"), "--dtype", "fp8", "--scales", "tensor"),
        *("--layers", '["model.*.mlp.*", "model.*.q_proj"]'),
    )
    assert result[0] == 0, result
    stored = load_file(tmp_path / "a" / "model.safetensors")
    in_fp8 = {name for name, value in stored.items() if value.dtype == torch.float8_e4m3fn}
    assert in_fp8 == {f"{name}.weight" for name in LAYERS if "mlp" in name or "q_proj" in name}
    assert {stored[f"{name}_scale"].shape for name in in_fp8} == {(1,)}

    result = run("export", runs.checkpoint("fnuz"), str(tmp_path / "b"), "--dtype", "fp8", "--scales", "row")
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert stored[f"{LAYERS[0]}.weight_scale"].shape == (32, 1)


def test_a_tied_layer_stays_in_bf16(run: Any, runs: Runs, tmp_path: Path) -> None:
    result = run(
        *("export", runs.checkpoint("tied"), str(tmp_path / "a"), "--dtype", "fp8", "--scales", "row"),
        *("--layers", "model.*"),
    )
    assert "In bf16 though trained in FP8, being tied to others: lm_head, model.embed_tokens" in result[1]


def test_what_cannot_be_exported_is_an_error_that_says_what_to_do(run: Any, runs: Runs, tmp_path: Path) -> None:
    def error(*args: str, name: str = "tied") -> str:
        return fails(run("export", runs.checkpoint(name), str(tmp_path / "a"), *args))

    assert "begins with 'net.'. Names begin with: model, seen." in error("--prefix", "net")
    assert "`--scales` are for `--dtype fp8`" in error("--scales", "row")
    assert "names no recipe. Say how to scale: `--scales row`" in error("--dtype", "fp8")
    assert "Pass their names in the LightningModule, `--layers PATTERN`" in error("--dtype", "fp8", "--scales", "row")
    assert "`--layers *.w9` matches no module" in error("--dtype", "fp8", "--scales", "row", "--layers", "*.w9")
    assert "None of the 14 layers" in error("--dtype", "fp8", "--prefix", "model.lm_head", name="rows")
    assert "with the config.json of the model" in error("--config", str(tmp_path))
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------------------------------------------------------------
# inspect


def test_inspect_lists_the_tensors_in_the_order_of_the_model_and_what_there_is_besides(run: Any, runs: Runs) -> None:
    code, out, _ = run("inspect", runs.checkpoint("rows"))
    assert code == 0
    lines = out.splitlines()
    names = [line.split()[1] for line in lines if line.startswith("│ ")]
    assert names == list(torch.load(runs.folder / "rows.pt", weights_only=True))
    assert any("model.lm_head.weight" in line and "64 x 32" in line and "float32" in line for line in lines)
    # Two moments and a step for each of 21 parameters, in fp32.
    elements = sum(value.numel() for value in runs.weights("rows").values())
    facts = [" ".join(line.split()) for line in lines if not line.startswith(("│", "┏", "┃", "┡", "└"))]
    assert facts == [
        "form directory of shards, of 2 rank(s)",
        f"model 22 tensors, {elements + 3:,} elements, {files.human(4 * (elements + 3))}",
        f"optimizers {files.human(4 * (2 * elements + 21))}",
        f"callback EMA{{'decay': 0.5}} {files.human(4 * elements)}",
        "epoch 1",
        "global_step 4",
        f"written by lightning {L.__version__}, torch {torch.__version__}, lightning_fp8_rocm {ours.__version__}",
        "fp8 recipe rowwise, format ocp, 14 layers",
        "files sound",
    ]


def test_inspect_takes_a_file_too(run: Any, runs: Runs, tmp_path: Path) -> None:
    run("consolidate", runs.checkpoint("fnuz"), str(tmp_path / "one.ckpt"))
    code, out, _ = run("inspect", str(tmp_path / "one.ckpt"))
    assert code == 0
    assert "one file" in out
    assert "recipe tensorwise, format fnuz" in out
    assert out.splitlines()[-1].split() == ["files", "sound"]


def test_inspect_of_a_directory_without_checksums_says_so(run: Any, tmp_path: Path) -> None:
    write_lightnings(tmp_path / "one.ckpt", {"a": torch.ones(2, 2)}, rest={"epoch": 1})
    code, out, _ = run("inspect", str(tmp_path / "one.ckpt"))
    assert code == 0
    assert "no checksums" in out


# ---------------------------------------------------------------------------------------------------------------------
# All


@pytest.fixture
def damaged(runs: Runs, tmp_path: Path) -> Path:
    """A copy with one bit of a shard flipped."""
    copy = tmp_path / "damaged.ckpt"
    shutil.copytree(runs.checkpoint("rows"), copy)
    file = copy / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return copy


@pytest.mark.parametrize("command", ["consolidate", "export"])
def test_a_damaged_source_is_an_error_that_names_the_file(
    run: Any, damaged: Path, tmp_path: Path, command: str
) -> None:
    error = fails(run(command, str(damaged), str(tmp_path / "new")))
    assert "__1_0.distcp" in error
    assert "crc32" in error
    assert os.listdir(tmp_path) == ["damaged.ckpt"]
    assert run(command, str(damaged), str(tmp_path / "new"), "--verify", "false")[0] == 0


def test_inspect_of_a_damaged_source_says_what_is_damaged(run: Any, damaged: Path) -> None:
    code, out, _ = run("inspect", str(damaged))
    assert code == 1
    assert "__1_0.distcp" in out.splitlines()[-1]
    assert run("inspect", str(damaged), "--verify", "false")[0] == 0


@pytest.mark.parametrize("command", ["consolidate", "export"])
def test_what_is_there_is_replaced_only_when_asked(run: Any, runs: Runs, tmp_path: Path, command: str) -> None:
    target = str(tmp_path / "new")
    assert run(command, runs.checkpoint("tied"), target)[0] == 0
    assert "is there already" in fails(run(command, runs.checkpoint("rows"), target))
    assert run(command, runs.checkpoint("rows"), target, "--overwrite", "true")[0] == 0
    assert os.listdir(tmp_path) == ["new"]
    source = runs.checkpoint("rows")
    for inside in (source, f"{source}/new"):
        assert "outside of SRC" in fails(run(command, source, inside, "--overwrite", "true"))


def test_a_directory_that_is_no_checkpoint_is_never_replaced(run: Any, runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    assert "it is no checkpoint" in fails(run("export", runs.checkpoint("rows"), str(tmp_path), "--overwrite", "true"))


def test_an_export_never_replaces_what_training_resumes_from(run: Any, runs: Runs, tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    shutil.copytree(runs.checkpoint("tied"), target)
    said = fails(run("export", runs.checkpoint("rows"), str(target), "--overwrite", "true"))
    assert "is no earlier export, which is all that an export replaces" in said
    assert (target / "meta.pt").is_file()
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_checkpoint_of_ours_without_its_manifest_is_not_called_sound(run: Any, runs: Runs, tmp_path: Path) -> None:
    shutil.copytree(runs.checkpoint("tied"), tmp_path / "a.ckpt", ignore=shutil.ignore_patterns("manifest.json"))
    code, out, _ = run("inspect", str(tmp_path / "a.ckpt"))
    assert code == 0
    assert "not verified: its manifest.json is gone" in out


def test_objects_are_loaded_only_when_asked(run: Any, tmp_path: Path) -> None:
    write_lightnings(tmp_path / "one.ckpt", {"a": torch.ones(2, 2)}, rest={"hyper_parameters": {"path": Path("/")}})
    error = fails(run("consolidate", str(tmp_path / "one.ckpt"), str(tmp_path / "new")))
    assert "`--weights_only false`" in error
    assert run("consolidate", str(tmp_path / "one.ckpt"), str(tmp_path / "new"), "--weights_only", "false")[0] == 0
    with pytest.raises(pickle.UnpicklingError):
        read_whole(tmp_path / "one.ckpt")


def test_nothing_there_is_an_error(run: Any, tmp_path: Path) -> None:
    assert "No checkpoint at" in fails(run("inspect", str(tmp_path / "none.ckpt")))


def limited(anonymous: int, *command: str) -> int:
    """Run a command in a child that may allocate so many bytes; its exit code. Files that it maps do not count."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        torch.set_num_threads(1)
        # Else glibc keeps what is freed, of sizes up to 32 MiB.
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
        status = Path("/proc/self/status").read_text()
        used = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData")) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + anonymous, -1))
        main(["checkpoint", *command])
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize(
    "command",
    [("consolidate",), ("export",), ("export", "--dtype", "fp8", "--scales", "row", "--layers", "model.*")],
    ids=["consolidate", "export", "export in fp8"],
)
def test_memory_is_that_of_a_tensor_not_that_of_the_model(tmp_path: Path, command: tuple[str, ...]) -> None:
    # 30 matrices of 4 MiB, 120 in all. To read one, torch itself has its bytes three times.
    size = 4 << 20
    generator = torch.Generator().manual_seed(0)
    state = {f"model.{index}.weight": torch.randn(1024, 1024, generator=generator) for index in range(30)}
    write_lightnings(tmp_path / "old.ckpt", state, rest={"epoch": 1})
    name, *arguments = command
    source, target = str(tmp_path / "old.ckpt"), str(tmp_path / "new")
    assert limited(4 * size, name, source, target, *arguments) == 0
    assert limited(size // 2, name, source, str(tmp_path / "less"), *arguments) == 1  # the limit is one
    if name == "consolidate":
        found = torch.load(target, weights_only=True, mmap=True)["state_dict"]
        assert len({value.data_ptr() for value in found.values()}) == 30
    else:
        assert len(load_file(tmp_path / "new" / "model.safetensors")) == (60 if arguments else 30)


def test_a_full_disk_is_an_error_and_leaves_nothing(run: Any, runs: Runs, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        code, _, error = run("export", runs.checkpoint("rows"), str(tmp_path / "new"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert code == 1
    assert "File too large" in error
    assert os.listdir(tmp_path) == []
