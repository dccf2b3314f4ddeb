"""``checkpoint export``: the weights of a Hugging Face model, as its ``from_pretrained`` and vLLM read them.

In the order of a run: which tensors (:func:`chosen`, :func:`under`), which of them in FP8 (:func:`fp8_layers`), and
then file by file, one tensor in memory at a time.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from lightning_fp8_rocm.cli import files
from lightning_fp8_rocm.distributed.publish import CheckedFile, FileSum, Staging, local_path, write_manifest
from lightning_fp8_rocm.distributed.storage import (
    OWN_KEY,
    Contents,
    Stored,
    as_stored,
    listed,
    open_checkpoint,
    unchanged,
)
from lightning_fp8_rocm.distributed.whole import read_in_turns, tied_names
from lightning_fp8_rocm.float8.recipe import RECIPE_NAMES, FP8Recipe, Granularity, check_patterns

FP8 = torch.float8_e4m3fn
"""OCP, whatever the run trained in: what the layout says. On an MI300, vLLM itself makes fnuz of it."""

WEIGHTS_NAME = "model{suffix}.safetensors"
CONFIG_NAME = "config.json"
# What Hugging Face keeps beside the weights. No code: a config that names some is told of in the summary.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)


class Scaling(NamedTuple):
    """How the weights of FP8 layers are scaled."""

    granularity: Granularity
    power_of_2: bool


def export(
    src: str,
    dst: str,
    dtype: Literal["bf16", "fp8"] = "bf16",
    prefix: str = "model.",
    config: str | None = None,
    weights: str = "model",
    layers: list[str] | str | None = None,
    scales: Literal["row", "tensor"] | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool = True,
    weights_only: bool = True,
    overwrite: bool = False,
) -> None:
    """Write the weights of a Hugging Face model as safetensors.

    DST becomes a directory for `from_pretrained` and vLLM, `--config` given. `--dtype fp8` writes the layers that were
    trained in FP8 as float8_e4m3fn with scales, in the layout `float-quantized` of compressed-tensors, and all else in
    bf16. On the disk of DST it takes twice the size for a while, and of memory little more than the largest tensor.

    Args:
        src: The checkpoint of a Trainer, or of Fabric with one model: a directory of shards, or a file.
        dst: The directory to write.
        dtype: The dtype of the weights that are written.
        prefix: The attribute of the LightningModule that is the Hugging Face model. Other tensors are left out. An
            empty one (`--prefix ""`) takes all, as where Fabric was given the Hugging Face model itself.
        config: A directory with the `config.json` of the model; its tokenizer is copied along. By default only weights
            are written.
        weights: `model`: those that were trained. `ema`: the averages of the EMA callback. Of several callbacks: the
            name that the error lists.
        layers: For fp8: which modules are in FP8, a pattern (`model.layers.*_proj`) or a list of them, of names in the
            LightningModule. Name linear layers alone. By default those that the checkpoint says were trained in FP8.
        scales: For fp8: one scale a row of the weight, or one a weight. By default as in the recipe that trained.
        max_shard_size: Above which there are several files, in bytes or as `5GB`.
        verify: Whether to compare SRC with its checksums first.
        weights_only: Whether to refuse what is more than tensors and plain values. `false` runs any code that SRC
            contains: only for a source that you trust.
        overwrite: Whether to replace an earlier export at DST.
    """
    if dtype != "fp8" and (layers is not None or scales is not None):
        raise ValueError(
            f"`--layers` and `--scales` are for `--dtype fp8`, but the dtype is {dtype!r}. Leave them out."
        )
    split = _splitter(max_shard_size)
    found = files.source(src)
    settings = None if config is None else _read_config(local_path(config))
    with files.output(dst, beside=found, overwrite=overwrite) as staging, unchanged(found):
        _check_is_export(staging.target)
        if verify:
            files.check_sound(found)
        contents = open_checkpoint(found, weights_only=weights_only)
        ties = tied_names(contents, contents.model_key, files.make_in(staging.folder))
        everything = chosen(weights, contents, ties)
        if settings is not None and settings.get("tie_word_embeddings") is False:
            ties = {}  # `from_pretrained` then wants each of them
        plan = _plan(dtype, contents, everything, ties, prefix, layers, scales)

        staging.path.mkdir()
        sums: dict[str, FileSum] = {}
        shards = split(plan.outcome())
        with files.progress(f"reading {found.name}", plan.bytes_to_read) as advance:
            write = _Writer(found, contents.metadata, staging, plan, advance)
            for file, names in shards.filename_to_tensors.items():
                sums[file] = write(file, names)
        if shards.is_sharded:
            name = WEIGHTS_NAME.format(suffix="") + ".index.json"
            index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
            sums[name] = _write_json(staging.path / name, index)
        if settings is not None and config is not None:
            sums |= _write_companions(local_path(config), staging.path, with_dtype(settings, plan.quantization))
        write_manifest(staging.path, sums)

    size = files.human(sum(each.size for each in sums.values()))
    files.say(f"{dst}: {size}, {len(plan.tensors)} tensors in {len(shards.filename_to_tensors)} file(s)")
    for line in (*plan.notes, *_notes_on_config(config, settings, sums, plan)):
        files.say(line)


def _check_is_export(target: Path) -> None:
    """Whatever is replaced must not be a checkpoint that training resumes from."""
    if target.exists() and not (target.is_dir() and any(target.glob("model*.safetensors*"))):
        raise FileExistsError(
            f"{str(target)!r} is there and is no earlier export, which is all that an export replaces. Choose another"
            " name for DST."
        )


# ---------------------------------------------------------------------------------------------------------------------
# Which tensors


def chosen(weights: str, contents: Contents, ties: Mapping[str, str]) -> dict[str, Stored]:
    """The tensors of the model, by name in the LightningModule and in its order; averages in place of what has some.

    Raises:
        ValueError: There are no such averages, or several.
    """
    model = {name: leaf for name, leaf in contents.model.items() if isinstance(leaf, Stored)}
    if weights == "model":
        return model
    found = {
        key: state["weights"]
        for key, state in contents.rest.get("callbacks", {}).items()
        if isinstance(state, dict)
        and isinstance(state.get("weights"), dict)
        and state["weights"].keys() <= model.keys()
    }
    matching = [key for key in found if weights in ("ema", key)]
    if len(matching) != 1:
        there = f"It has averages of {', '.join(map(repr, found))}." if found else "It has none of an EMA callback."
        way_out = "Pass one of those names." if found else "Pass `--weights model`."
        raise ValueError(f"`--weights {weights}` fits {len(matching)} averages in this checkpoint. {there} {way_out}")
    averages = {name: as_stored(value) for name, value in found[matching[0]].items()}
    return {name: averages.get(ties.get(name, name), averages.get(name, stored)) for name, stored in model.items()}


def _full_name(prefix: str, name: str) -> str:
    return f"{prefix.rstrip('.')}.{name}" if prefix else name


def under(prefix: str, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors whose names begin with ``prefix``, without it.

    >>> list(under("model.", {"model.head.weight": None, "metric.total": None}))
    ['head.weight']

    Raises:
        ValueError: There are none.
    """
    start = _full_name(prefix, "")
    found = {name.removeprefix(start): stored for name, stored in tensors.items() if name.startswith(start)}
    if not found:
        first = listed({name.split(".")[0] for name in tensors})
        raise ValueError(
            f"No tensor has a name that begins with {start!r}. Names begin with: {first}. Pass the attribute of the"
            " module that is the Hugging Face model as `--prefix`, or an empty one if the module itself is."
        )
    return found


# ---------------------------------------------------------------------------------------------------------------------
# FP8


def fp8_layers(
    contents: Contents, prefix: str, tensors: Mapping[str, Stored], patterns: Sequence[str] | str | None
) -> list[str]:
    """Which modules were trained in FP8, or are named by ``patterns``, by name in the Hugging Face model.

    Raises:
        ValueError: Nothing says which, or what does names no matrix.
    """
    names = {_full_name(prefix, name): name for name in matrices(tensors)}
    given = check_patterns("checkpoint export", "layers", patterns)
    if given is not None:
        for pattern in given:
            if not any(fnmatchcase(full, pattern) for full in names):
                raise ValueError(
                    f"`--layers {pattern}` matches no module whose weight is a matrix. There are: {listed(names)}."
                )
        return [name for full, name in names.items() if any(fnmatchcase(full, pattern) for pattern in given)]
    recorded = contents.rest.get(OWN_KEY, {}).get("fp8", {}).get("layers")
    if recorded is None:
        raise ValueError(
            "The checkpoint does not say which layers were trained in FP8. Pass their names in the LightningModule,"
            f" `--layers PATTERN`; there are: {listed(names)}."
        )
    found = [names[full] for full in recorded if full in names]
    if not found:
        raise ValueError(
            f"None of the {len(recorded)} layers that were trained in FP8 is under the prefix {prefix!r}:"
            f" {listed(recorded)}. Pass another `--prefix`, or `--layers PATTERN`."
        )
    return found


def matrices(tensors: Mapping[str, Stored]) -> list[str]:
    """The modules whose weight is a matrix: linear layers and embeddings."""
    return [
        name.removesuffix(".weight")
        for name, stored in tensors.items()
        if name.endswith(".weight") and len(stored.shape) == 2 and stored.dtype.is_floating_point
    ]


def scaling_of(contents: Contents, asked: Granularity | None) -> Scaling:
    """How weights are scaled: as by the recipe that trained, or as by torchao's recipe for what is asked for.

    Raises:
        ValueError: Nothing says how.
    """
    trained = contents.rest.get(OWN_KEY, {}).get("fp8", {}).get("recipe")
    if trained in RECIPE_NAMES:
        scaling = _scaling_by(trained)
        if asked in (None, scaling.granularity):
            return scaling
    if asked is None:
        said = f"the recipe {trained!r}, which is none of {', '.join(RECIPE_NAMES)}" if trained else "no recipe"
        raise ValueError(f"The checkpoint names {said}. Say how to scale: `--scales row` or `--scales tensor`.")
    return _scaling_by("rowwise" if asked == "row" else "tensorwise")


def _scaling_by(name: Any) -> Scaling:
    import lightning_fp8_rocm.float8.quantize  # noqa: F401, before torchao is imported: it silences what that says

    recipe = FP8Recipe.named(name)
    return Scaling(recipe.output.right.granularity if recipe.output else "tensor", recipe.power_of_2_scales)


def in_fp8_with_scale(weight: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """An ``(N, K)`` weight in FP8, and the fp32 scale to *multiply* it with on the way back, ``(N, 1)`` or ``(1,)``.

    Note:
        The FP8 data is bit for bit that of an FP8 layer with this weight in the OCP format. Its scale is that on the
        way in, the layout's that on the way back: the reciprocal, exact for powers of two, rounded to fp32 else.
    """
    from lightning_fp8_rocm.float8.quantize import quantize  # imports torchao

    row_dim = 1 if scaling.granularity == "row" else None
    data, scale = quantize(weight, FP8, row_dim=row_dim, power_of_2=scaling.power_of_2)
    return data, scale.reciprocal().view(-1, 1) if row_dim else scale.reciprocal().view(1)


def quantization_config(scaling: Scaling, ignore: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of compressed-tensors for weights so scaled.

    Activations are scaled as they come, as in training: by token where weights are by row, else by tensor.
    """
    by_row = scaling.granularity == "row"
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "strategy": "channel" if by_row else "tensor", "dynamic": False},
                "input_activations": {**common, "strategy": "token" if by_row else "tensor", "dynamic": True},
            }
        },
        "ignore": list(ignore),
    }


# ---------------------------------------------------------------------------------------------------------------------
# What will be written


class _Plan(NamedTuple):
    tensors: dict[str, Stored]
    """By name in the Hugging Face model."""
    in_fp8: frozenset[str]
    """The weights among them."""
    scaling: Scaling | None
    quantization: dict[str, Any] | None
    notes: list[str]

    @property
    def bytes_to_read(self) -> int:
        return sum(each.nbytes for each in self.tensors.values())

    def dtype(self, name: str) -> torch.dtype:
        stored = self.tensors[name].dtype
        return FP8 if name in self.in_fp8 else torch.bfloat16 if stored.is_floating_point else stored

    def outcome(self) -> dict[str, Tensor]:
        """Shapes and dtypes, on the device ``meta``; a scale behind its weight."""
        outcome = {}
        for name, stored in self.tensors.items():
            outcome[name] = torch.empty(stored.shape, dtype=self.dtype(name), device="meta")
            if name in self.in_fp8:
                assert self.scaling is not None
                shape = (stored.shape[0], 1) if self.scaling.granularity == "row" else (1,)
                outcome[f"{name}_scale"] = torch.empty(shape, dtype=torch.float32, device="meta")
        return outcome


def _plan(
    dtype: str,
    contents: Contents,
    everything: Mapping[str, Stored],
    ties: Mapping[str, str],
    prefix: str,
    layers: Sequence[str] | str | None,
    scales: Granularity | None,
) -> _Plan:
    model = under(prefix, everything)
    twice = {name: ties[full] for name in model if (full := _full_name(prefix, name)) in ties}
    tensors = {name: stored for name, stored in model.items() if name not in twice}
    notes = []
    if len(everything) > len(model):
        notes.append(f"Left out, not under {prefix!r}: {len(everything) - len(model)} tensors")
    if others := contents.model.keys() - everything.keys():
        notes.append(f"Left out, no tensors: {listed(others)}")
    if twice:
        notes.append("Tied, written once: " + ", ".join(f"{name} is {first}" for name, first in twice.items()))
    if dtype != "fp8":
        return _Plan(tensors, frozenset(), None, None, notes)

    scaling = scaling_of(contents, scales)
    wanted = fp8_layers(contents, prefix, model, layers)
    shared = {*ties, *ties.values()}
    converted = [name for name in wanted if _full_name(prefix, f"{name}.weight") not in shared]
    if kept := set(wanted) - set(converted):
        notes.append(f"In bf16 though trained in FP8, being tied to others: {listed(kept)}")
    ignore = [name for name in matrices(model) if name not in set(converted)]
    by = "row" if scaling.granularity == "row" else "weight"
    notes.append(
        f"In FP8: {len(converted)} layers, one scale a {by}. Layout: compressed-tensors float-quantized, as vLLM and"
        " transformers (with `pip install compressed-tensors`) read it: float8_e4m3fn `weight` times float32"
        " `weight_scale`"
    )
    return _Plan(
        tensors,
        frozenset(f"{name}.weight" for name in converted),
        scaling,
        quantization_config(scaling, ignore),
        notes,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _splitter(max_shard_size: int | str) -> Callable[[dict[str, Tensor]], Any]:
    try:
        import safetensors.torch  # noqa: F401
        from huggingface_hub import split_torch_state_dict_into_shards
    except ImportError as error:
        raise ImportError(
            "`checkpoint export` needs safetensors and huggingface_hub: pip install 'lightning-fp8-rocm[export]'"
            f" ({error})."
        ) from error
    split = partial(split_torch_state_dict_into_shards, max_shard_size=max_shard_size, filename_pattern=WEIGHTS_NAME)
    split({"a size that it cannot read is an error now": torch.empty(1, device="meta")})
    return split


class _Writer:
    """Writes the files with the tensors, in their order."""

    def __init__(
        self,
        source: Path,
        found: Metadata | None,
        staging: Staging,
        plan: _Plan,
        advance: Callable[[int], None],
    ) -> None:
        self._source, self._found, self._staging, self._plan, self._advance = source, found, staging, plan, advance
        # A scale may come into the file after that of its weight.
        self._scales: dict[str, Tensor] = {}

    def __call__(self, file: str, names: Sequence[str]) -> FileSum:
        """Write one file; the tensors in it lie in files, too, but for one."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        plan, scratch = self._plan, self._staging.folder
        wanted = {name: plan.tensors[name] for name in names if name in plan.tensors}
        tensors = {
            name: files.tensor_in(scratch, stored.shape, stored.dtype if name in plan.in_fp8 else plan.dtype(name))
            for name, stored in wanted.items()
        }
        read_in_turns(
            self._source, [(stored, tensors[name]) for name, stored in wanted.items()], self._advance, self._found
        )
        for name in wanted.keys() & plan.in_fp8:
            assert plan.scaling is not None
            data, self._scales[f"{name}_scale"] = in_fp8_with_scale(tensors[name], plan.scaling)
            tensors[name] = files.tensor_in(scratch, data.shape, data.dtype).copy_(data)
        tensors |= {name: self._scales.pop(name) for name in names if name in self._scales}
        path = self._staging.path / file
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"Writing {str(path)!r} failed: {error}") from error
        return files.sync(path)


def _write_json(path: Path, value: Mapping[str, Any]) -> FileSum:
    return _write(path, json.dumps(value, indent=2).encode() + b"\n")


def _write(path: Path, text: bytes) -> FileSum:
    with CheckedFile(path) as file:
        file.write(text)
    return file.sum


# ---- beside the weights


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise FileNotFoundError(
            f"Expected `--config` to be a directory with the {CONFIG_NAME} of the model, but {str(path)!r} cannot be"
            f" read: {error.strerror}. `model.config.save_pretrained(DIR)` writes one."
        ) from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{str(path)!r} holds a {type(config).__name__}, no object: it is no config of a model.")
    return config


def with_dtype(config: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> dict[str, Any]:
    """The config for what is written, of the whole model and of its parts.

    >>> with_dtype({"torch_dtype": "float32", "quantization_config": {}, "text_config": {"dtype": "float32"}}, None)
    {'text_config': {'dtype': 'bfloat16'}, 'dtype': 'bfloat16'}
    """
    # Two names for one thing: `torch_dtype` was the first.
    dropped = ("dtype", "torch_dtype", "quantization_config")
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and ("dtype" in value or "torch_dtype" in value):
            changed[key] = with_dtype(value, None)
        elif key not in dropped:
            changed[key] = value
    changed["dtype"] = "bfloat16"
    return changed if quantization is None else {**changed, "quantization_config": quantization}


def _write_companions(source: Path, folder: Path, config: Mapping[str, Any]) -> dict[str, FileSum]:
    sums = {CONFIG_NAME: _write_json(folder / CONFIG_NAME, config)}
    for name in COMPANIONS:
        if (source / name).is_file():
            sums[name] = _write(folder / name, (source / name).read_bytes())
    return sums


def _notes_on_config(
    folder: str | None, config: Mapping[str, Any] | None, written: Mapping[str, FileSum], plan: _Plan
) -> list[str]:
    if config is None:
        needed = {"dtype": "bfloat16", **({"quantization_config": plan.quantization} if plan.quantization else {})}
        return [
            "Only weights are written. `from_pretrained` needs a config.json beside them, and the files of a tokenizer:"
            f" pass `--config DIR`, or add a config.json with {json.dumps(needed)}"
        ]
    notes = []
    if not any(name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece")) for name in written):
        notes.append(f"No tokenizer is written: {folder} has none of {', '.join(COMPANIONS[1:4])}")
    if "auto_map" in config:
        notes.append(f"{CONFIG_NAME} names code of its own ({config['auto_map']}), which is not copied")
    return notes
