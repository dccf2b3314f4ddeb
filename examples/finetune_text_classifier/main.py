"""Fine-tune a text classifier from the command line, in FP8 or in bf16: one word of the config differs, the precision.

From the root of the repository:

    python examples/finetune_text_classifier/main.py fit --config examples/finetune_text_classifier/fp8.yaml
"""

import lightning_fp8_rocm  # noqa: F401  # Teaches Lightning "fp8-rocm" and "fsdp2_fp8"; nothing else here does that.

# isort: split
import json
import logging
import re
import shlex
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import transformers
from classifier import TextClassifier
from data import SentimentTweets
from installed import MissingPackageError
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_module, rank_zero_only
from rich.console import Console
from rich.table import Table

METRICS = ("accuracy", "f1", "loss")


class FineTuneCLI(LightningCLI):
    """Around `fit`, validates the model before and after, and says what the training gained and what it took."""

    before: dict[str, float]
    started: float

    def before_fit(self) -> None:
        """Validate the model as it comes: pre-trained encoder, untrained head."""
        self.before = self._validate()
        self.started = time.perf_counter()

    def after_fit(self) -> None:
        """Validate the best checkpoint as it was written, then print the summary and store it as `summary.json`."""
        train_seconds = time.perf_counter() - self.started
        checkpoint = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
        after = self._validate(checkpoint or None)
        run = self.trainer.log_dir  # every rank has to ask
        if not self.trainer.is_global_zero:
            return

        summary = {
            "precision": self.trainer.precision_plugin.precision,
            **fp8_part(self.trainer.precision_plugin),
            "processes": self.trainer.world_size,
            **sharding_part(self.trainer.strategy),
            "before": self.before,
            "after": after,
            "held_out_texts": len(self.datamodule.val),
            "steps": self.trainer.global_step,
            "train_seconds": round(train_seconds, 1),
            "checkpoint": checkpoint or None,
            "compare_with": command_to_compare(sys.argv),
        }
        print_summary(summary)
        if run is not None and not self.trainer.fast_dev_run:
            Path(run, "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    def _validate(self, checkpoint: str | None = None) -> dict[str, float]:
        [results] = self.trainer.validate(self.model, self.datamodule, ckpt_path=checkpoint, verbose=False)
        return {name: results[f"val_{name}"] for name in METRICS}


def fp8_part(precision_plugin: Any) -> dict[str, Any]:
    """Say how much of the model computes in FP8, from the report of a plugin that has one."""
    report = getattr(precision_plugin, "report", None)
    if report is None:
        return {"fp8_share": 0.0, "fp8_layers": 0, "left_out": []}
    return {
        "fp8_share": report.fp8_share,
        "fp8_layers": len(report.converted),
        "left_out": [f"{layer.name}: {layer.reason}" for layer in report.left_out],
    }


def sharding_part(strategy: Any) -> dict[str, Any]:
    """Say how the model was sharded and what a training step gathers, from the report of a strategy that has one.

    A step gathers every weight in forward, and again in backward where it was freed in between. Which it was: the root
    alone keeps its parameters, and the root of this model, the LightningModule, has none of its own.
    """
    report = getattr(strategy, "report", None)
    if report is None:
        return {"units": 0}
    gathers = 1 if strategy.reshard_after_forward is False else 2
    return {
        "units": len(report.units),
        "gathered_bytes_a_step": gathers * report.gathered_bytes,
        "gathered_bytes_a_step_in_bf16": gathers * report.bf16_bytes,
    }


def command_to_compare(argv: list[str]) -> str:
    """Give the command of the same run in the other precision: the baseline of an FP8 run, the FP8 run of a baseline.

    >>> command_to_compare(["main.py", "fit", "--config", "fp8.yaml", "--trainer.max_steps", "20"])
    'python main.py fit --config bf16.yaml --trainer.max_steps 20'
    """
    other = {"fp8": "bf16", "bf16": "fp8"}
    words = [re.sub(r"\b(fp8|bf16)(?=\.yaml$)", lambda match: other[match[0]], word) for word in argv]
    if words == argv:
        words = [argv[0], "fit", "--config", str(Path(argv[0]).with_name("bf16.yaml"))]
    return shlex.join(["python", *words])


def print_summary(summary: dict[str, Any]) -> None:
    """Print what `summary.json` holds, for eyes."""
    precision = summary["precision"]
    if summary["fp8_layers"]:
        share = f"{summary['fp8_share']:.2%} of the weights' multiply-adds: {summary['fp8_layers']} layers in FP8, "
        share += f"{len(summary['left_out'])} left out"
    else:
        share = f"0 % ({precision.split('-')[0]})"
    processes = f"{summary['processes']} process" + "es" * (summary["processes"] != 1)

    table = Table("", "before", "after", title=f"{summary['held_out_texts']:,} held-out texts", title_justify="left")
    for metric, label in zip(METRICS, ("accuracy", "macro F1", "loss"), strict=True):
        table.add_row(label, f"{summary['before'][metric]:.3f}", f"{summary['after'][metric]:.3f}")

    console = Console(highlight=False)
    console.print()
    console.print(table)
    for label, value in {
        "precision": precision,
        "FP8 share": share,
        "sharding": f"{summary['units']} units on {processes}" if summary["units"] else f"none, {processes}",
        "gathered": gathered_text(summary),
        "training": f"{summary['train_seconds']:.0f} s for {summary['steps']} steps, validation included",
        "checkpoint": summary["checkpoint"] or "none written",
        "compare with": summary["compare_with"],
    }.items():
        console.print(f"[bold]{label:<13}[/bold]{value}", soft_wrap=True)


def gathered_text(summary: dict[str, Any]) -> str:
    """Say in one line what each rank receives in a step.

    >>> gathered_text({"gathered_bytes_a_step": 70_000_000, "gathered_bytes_a_step_in_bf16": 90_000_000})
    '70.0 MB a step and process, 78 % of the 90.0 MB in bf16'
    """
    here, in_bf16 = (summary.get(f"gathered_bytes_a_step{end}", 0) for end in ("", "_in_bf16"))
    if not here:
        return "nothing"
    of_bf16 = "" if here == in_bf16 else f", {here / in_bf16:.0%} of the {in_bf16 / 1e6:.1f} MB in bf16"
    return f"{here / 1e6:.1f} MB a step and process{of_bf16.replace('%', ' %')}"


def quiet_third_parties() -> None:
    """Silence what other libraries say of matters that this example has settled. Errors still show."""
    # A head without pre-trained weights, and layers left out by `num_hidden_layers`: both are meant.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # torchao, which transformers imports: CUDA kernels that a CPU or an AMD GPU lacks, and a deprecation of its own.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Lightning: what each process says of itself, which the first one says for all.
    if rank_zero_only.rank != 0:
        logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    # Lightning: advertisements, and the advice to start worker processes for batches that lie in memory.
    rank_zero_module.log.addFilter(lambda record: "Tip:" not in record.getMessage())
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning repeats a text or two of those held out where the processes cannot share them evenly (README.md).
    warnings.filterwarnings("ignore", message=".*Using `DistributedSampler` with the dataloaders")
    # The checkpoint of one config may be scored under the other, which writes into a folder of its own.
    warnings.filterwarnings("ignore", message="The dirpath has changed")
    # Lightning calls what torch has deprecated.
    warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\)")


def main() -> None:
    """Run the subcommand that the command line names."""
    quiet_third_parties()
    try:
        FineTuneCLI(
            TextClassifier,
            SentimentTweets,
            auto_configure_optimizers=False,
            trainer_defaults={"devices": "auto" if CUDAAccelerator.is_available() else 2},  # all GPUs, or two processes
        )
    except MissingPackageError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
