"""Does training in FP8 reach the loss of bf16? A byte-level transformer of about 1 M parameters on real text.

    python benchmarks/convergence.py --json benchmarks/convergence.json

The text is the language reference that ships inside Python (``pydoc_data.topics``), so nothing is downloaded. Every row
is one run through ``lightning.Trainer``; only the precision differs. Losses are in nats a byte, on text held out.
"""

import argparse
import json
import platform
import time
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, get_args

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8_rocm import FP8Precision
from lightning_fp8_rocm.float8.recipe import RECIPE_NAMES
from lightning_fp8_rocm.hardware import FP8Format

CONTEXT = 64  # bytes
BATCH = 16
FORMATS = get_args(FP8Format)


class Block(nn.Module):
    """Pre-norm attention and MLP, causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states in and out, ``(batch, bytes, width)``."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteTransformer(L.LightningModule):
    """Predicts the next byte. Knows nothing of FP8."""

    def __init__(self, width: int = 128, depth: int = 5, heads: int = 4, steps: int = 300, lr: float = 2e-3) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        self.steps, self.lr = steps, lr

    def forward(self, tokens: Tensor) -> Tensor:
        """Bytes ``(batch, n)`` to logits ``(batch, n, 256)``."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Cross entropy of the next byte, nats."""
        (text,) = batch
        return F.cross_entropy(self(text[:, :-1]).float().flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """One batch."""
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """One held-out batch."""
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        """AdamW, one cycle."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=self.steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def text_batches(seed: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Windows of ``CONTEXT + 1`` bytes: nine tenths of the text, shuffled by ``seed``, and a tenth held out."""
    text = torch.frombuffer(bytearray("\n".join(topics[key] for key in sorted(topics)).encode()), dtype=torch.uint8)
    windows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1).long()
    split = len(windows) * 9 // 10
    train, held_out = TensorDataset(windows[:split]), TensorDataset(windows[split:])
    shuffle = torch.Generator().manual_seed(seed)
    return DataLoader(train, BATCH, shuffle=True, drop_last=True, generator=shuffle), DataLoader(held_out, 64)


@dataclass
class Run:
    """One training run."""

    precision: str
    seed: int
    steps: int
    val_loss: float
    fp8_share: float
    seconds: float


def train(precision: str, steps: int, seed: int = 0) -> Run:
    """Train from scratch.

    Args:
        precision: ``"bf16-mixed"``, or a recipe and a format: ``"rowwise/fnuz"``.
        steps: Optimizer steps.
        seed: Of the initial weights and of the order of the text.
    """
    L.seed_everything(seed, verbose=False)
    flags: dict[str, Any] = {"precision": precision}
    if "/" in precision:
        recipe, fp8_format = precision.split("/")
        flags = {"plugins": FP8Precision(recipe, fp8_format=fp8_format)}
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **flags,
    )
    model = ByteTransformer(steps=steps)
    batches, held_out = text_batches(seed)
    started = time.perf_counter()
    trainer.fit(model, batches)
    seconds = time.perf_counter() - started
    [result] = trainer.validate(model, held_out, verbose=False)
    report = getattr(trainer.precision_plugin, "report", None)
    return Run(precision, seed, steps, result["val_loss"], report.fp8_share if report else 0.0, seconds)


def table(runs: list[Run]) -> Table:
    """The runs beside the first, which is bf16."""
    shown = Table(title=f"Held-out loss after {runs[0].steps} steps", caption="nats a byte; FP8 emulated on a CPU")
    for column in ("precision", "seed", "loss", "against bf16", "FP8 share"):
        shown.add_column(column, justify="left" if column == "precision" else "right")
    for run in runs:
        change = f"{run.val_loss / runs[0].val_loss - 1:+.2%}"
        shown.add_row(run.precision, str(run.seed), f"{run.val_loss:.4f}", change, f"{run.fp8_share:.1%}")
    return shown


def main() -> None:
    """Run all, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    precisions = [("bf16-mixed", 0), ("bf16-mixed", 1)]
    precisions += [(f"{recipe}/{fp8_format}", 0) for recipe in RECIPE_NAMES for fp8_format in FORMATS]
    runs = [train(precision, arguments.steps, seed) for precision, seed in precisions]
    Console().print(table(runs))
    if arguments.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}"
        facts = {"device": device, "torch": torch.__version__, "torchao": version("torchao")}
        arguments.json.write_text(json.dumps({**facts, "runs": [asdict(run) for run in runs]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
