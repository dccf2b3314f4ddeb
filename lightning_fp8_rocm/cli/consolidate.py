"""``checkpoint consolidate``."""

from lightning_fp8_rocm.cli import files
from lightning_fp8_rocm.distributed.storage import unchanged, write_full
from lightning_fp8_rocm.distributed.whole import whole_checkpoint


def consolidate(src: str, dst: str, verify: bool = True, weights_only: bool = True, overwrite: bool = False) -> None:
    """Make one file of a directory of shards.

    Lightning resumes from it on one device, and so does `LightningModule.load_from_checkpoint`, with neither this
    package nor torchao installed. On the disk of DST it takes twice the size for a while, and of memory little more
    than the largest tensor.

    Args:
        src: The checkpoint: a directory of `strategy="fsdp2_fp8"` or of Lightning's ModelParallelStrategy.
        dst: The file to write, by custom `NAME.ckpt`.
        verify: Whether to compare SRC with its checksums first.
        weights_only: Whether to refuse what is more than tensors and plain values. `false` runs any code that SRC
            contains: only for a source that you trust.
        overwrite: Whether to replace what is at DST.
    """
    found = files.source(src)
    if not found.is_dir():
        raise ValueError(
            f"{src!r} is one file already: Lightning loads it as it is. To make weights for Hugging Face of it, use"
            " `checkpoint export`."
        )
    with files.output(dst, beside=found, overwrite=overwrite) as staging, unchanged(found):
        if verify:
            files.check_sound(found)
        with files.progress(f"reading {found.name}", files.size_of(found)) as advance:
            checkpoint = whole_checkpoint(
                found, weights_only=weights_only, make=files.make_in(staging.folder), after=advance
            )
        write_full(staging.path, checkpoint)
    tensors, optimizers = len(checkpoint["state_dict"]), len(checkpoint.get("optimizer_states", []))
    files.say(
        f"{dst}: {files.human(files.size_of(staging.target))}, {tensors} tensors of the model, the states of"
        f" {optimizers} optimizers"
    )
