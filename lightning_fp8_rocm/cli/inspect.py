"""``checkpoint inspect``."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_fp8_rocm.cli import files
from lightning_fp8_rocm.distributed.publish import MANIFEST_NAME
from lightning_fp8_rocm.distributed.storage import (
    OWN_KEY,
    VERSION_KEY,
    Contents,
    Stored,
    as_stored,
    listed,
    open_checkpoint,
    read_metadata,
)

_UNBOUNDED = 10_000  # columns, where nobody sees where the line ends
_WORTH_A_LINE = 1000  # bytes: averages of weights are, the best score of ModelCheckpoint is not


def inspect(src: str, verify: bool = True, weights_only: bool = True) -> None:
    """Show what is in a checkpoint, and whether it is sound.

    No tensor is loaded. The exit code is 1 if the checkpoint is damaged.

    Args:
        src: The checkpoint of a Trainer or of Fabric: a directory of shards, or a file.
        verify: Whether to compare it with its checksums, for which all of it is read.
        weights_only: Whether to refuse what is more than tensors and plain values. `false` runs any code that SRC
            contains: only for a source that you trust.
    """
    found = files.source(src)
    damages = files.damage(found) if verify else None
    try:
        contents = open_checkpoint(found, weights_only=weights_only, with_optimizers=False)
    except Exception as error:
        if not damages:
            raise
        raise ValueError(f"{src!r} is damaged: {'; '.join(map(str, damages))}") from error
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_UNBOUNDED)
    console.print(_table(contents))
    facts = Table.grid("fact", "value", padding=(0, 2))
    for fact, value in _facts(found, contents).items():
        facts.add_row(fact, value)
    state = "not looked at" if damages is None else "; ".join(map(str, damages))
    facts.add_row("files", state or _sound(found, is_ours=OWN_KEY in contents.rest))
    console.print(facts)
    if damages:
        sys.exit(1)


def _sound(path: Path, is_ours: bool) -> str:
    if path.is_file() or (path / MANIFEST_NAME).is_file():
        return "sound"
    return f"not verified: its {MANIFEST_NAME} is gone" if is_ours else "no checksums: Lightning itself wrote it"


def _table(contents: Contents) -> Table:
    table = Table("tensor", "shape", "dtype", "size")
    table.columns[0].overflow = "fold"
    table.columns[3].justify = "right"
    for key, model in contents.models.items():
        if len(contents.models) > 1:
            table.add_section()
            table.add_row(f"of {key!r}")
        for name, value in model.items():
            if isinstance(value, Stored):
                table.add_row(name, _shape(value), _dtype(value), files.human(value.nbytes))
            else:
                table.add_row(name, "", type(value).__name__, "")
    return table


def _facts(path: Path, contents: Contents) -> dict[str, str]:
    own, rest = contents.facts, contents.rest
    facts = {"form": f"directory of shards, of {_ranks(path)} rank(s)" if path.is_dir() else "one file"}
    sizes = {key: _bytes(state) for key, state in contents.optimizers.items()}
    if contents.of_trainer:
        facts["model"] = _size(contents.model)
        facts["optimizers"] = ", ".join(map(files.human, sizes.values())) or "none"
        callbacks = {key: _bytes(state) for key, state in rest.get("callbacks", {}).items()}
        facts |= {f"callback {key}": files.human(size) for key, size in callbacks.items() if size >= _WORTH_A_LINE}
    else:
        facts |= {f"model {key!r}": _size(model) for key, model in contents.models.items()} or {"model": "none"}
        facts |= {f"optimizer {key!r}": files.human(size) for key, size in sizes.items()}
        facts["other keys"] = listed(repr(key) for key in rest if key != OWN_KEY) or "none"
    for key in ("epoch", "global_step"):
        if key in rest:
            facts[key] = str(rest[key])
    versions = {"lightning": rest.get(VERSION_KEY), "torch": own.get("torch")}
    versions["lightning_fp8_rocm"] = own.get("version")
    facts["written by"] = ", ".join(f"{name} {value}" for name, value in versions.items() if value) or "not recorded"
    fp8 = own.get("fp8")
    if fp8:
        facts["fp8"] = f"recipe {fp8['recipe']}, format {fp8['format']}, {len(fp8['layers'])} layers"
    else:
        facts["fp8"] = "none recorded"
    return facts


def _size(model: Mapping[str, Any]) -> str:
    tensors = list(_stored(model.values()))
    elements = sum(each.shape.numel() for each in tensors)
    return f"{len(tensors)} tensors, {elements:,} elements, {files.human(_bytes(model))}"


def _bytes(state: Any) -> int:
    return sum(each.nbytes for each in _stored([state]))


def _ranks(path: Path) -> int:
    """How many processes wrote the shards: torch begins their names with `__RANK_`."""
    names = [place.relative_path for place in (read_metadata(path).storage_data or {}).values()]
    return len({name.split("_")[2] for name in names if name.startswith("__")})


def _stored(values: Iterable[Any]) -> Iterator[Stored]:
    """All tensors inside of nested containers."""
    for value in values:
        if isinstance(value, Stored | Tensor):
            yield as_stored(value)
        elif isinstance(value, dict):
            yield from _stored(value.values())
        elif isinstance(value, list | tuple):
            yield from _stored(value)


def _shape(stored: Stored) -> str:
    return " x ".join(map(str, stored.shape)) or "scalar"


def _dtype(stored: Stored) -> str:
    return str(stored.dtype).removeprefix("torch.")
