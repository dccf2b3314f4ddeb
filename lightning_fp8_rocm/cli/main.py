"""``lightning-fp8-rocm``: commands about checkpoints, without a GPU, a model or a Trainer."""

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentParser

from lightning_fp8_rocm.cli.consolidate import consolidate
from lightning_fp8_rocm.cli.export import export
from lightning_fp8_rocm.cli.inspect import inspect

PROGRAM = "lightning-fp8-rocm"
CHECKPOINT: Mapping[str, Callable[..., None]] = {"consolidate": consolidate, "export": export, "inspect": inspect}
# What a user can cause and mend. Anything else is a fault of ours, and its traceback is wanted.
USER_ERRORS = (ValueError, TypeError, OSError, RuntimeError, ImportError, pickle.UnpicklingError)


def main(args: Sequence[str] | None = None) -> None:
    """Run one command; the exit code is 0, 1 after an error, 2 for arguments that are not understood.

    Args:
        args: What follows the program's name; by default what the shell passed.
    """
    chosen = _parser().parse_args(args if args is None else list(args))
    command = chosen["checkpoint"]["subcommand"]
    arguments: dict[str, Any] = chosen["checkpoint"][command].as_dict()
    try:
        CHECKPOINT[command](**arguments)
    except USER_ERRORS as error:
        sys.stderr.write(f"error: {_one_line(error)}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was changed\n")
        sys.exit(130)


def _parser() -> ArgumentParser:
    program = ArgumentParser(prog=PROGRAM, description="FP8 training on AMD GPUs: what comes after the training.")
    commands = ArgumentParser(description="What to do with checkpoints. `COMMAND --help` says more of each.")
    program.add_subcommands(metavar="TOPIC", title="topics").add_subcommand(
        "checkpoint", commands, help="Consolidate, export and inspect checkpoints."
    )
    inner = commands.add_subcommands(metavar="COMMAND", title="commands")
    for name, function in CHECKPOINT.items():
        summary, _, rest = (function.__doc__ or "").partition("\n\n")
        details = " ".join(rest.partition("Args:")[0].split())
        command = ArgumentParser(description=f"{summary} {details}")
        command.add_function_arguments(function, as_group=False, as_positional=True)
        inner.add_subcommand(name, command, help=summary)
    return program


def _one_line(error: BaseException) -> str:
    r"""The message of an error in one line, in the words of the command line.

    >>> _one_line(ValueError("It is\n  damaged."))
    'It is damaged.'
    >>> _one_line(pickle.UnpicklingError("'a.ckpt' holds objects."))
    "'a.ckpt' holds objects. Here that is `--weights_only false`."
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text} Here that is `--weights_only false`." if isinstance(error, pickle.UnpicklingError) else text
