"""``checkpoint consolidate``."""

from lightning_fp8_rocm.cli import files
from lightning_fp8_rocm.distributed.storage import open_checkpoint, unchanged, write_full
from lightning_fp8_rocm.distributed.whole import assembled


def consolidate(src: str, dst: str, verify: bool = True, weights_only: bool = True, overwrite: bool = False) -> None:
    """Make one file of a directory of shards.

    A Trainer on one device resumes from it, and `LightningModule.load_from_checkpoint` reads it, with neither this
    package nor torchao installed. Of a directory that Fabric saved it is the file that `fabric.load` reads on one
    device. On the disk of DST it takes twice the size for a while, and of memory little more than the largest tensor.

    Args:
        src: The checkpoint: a directory of `strategy="fsdp2_fp8"` or of Lightning's ModelParallelStrategy, saved by a
            Trainer or by Fabric.
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
            contents = open_checkpoint(found, weights_only=weights_only)
            write_full(staging.path, assembled(contents, files.make_in(staging.folder), advance))
    models = "the model" if len(contents.models) == 1 else f"{len(contents.models)} models"
    files.say(
        f"{dst}: {files.human(files.size_of(staging.target))}, {sum(map(len, contents.models.values()))} tensors of"
        f" {models}, the states of {len(contents.optimizers)} optimizers"
    )
