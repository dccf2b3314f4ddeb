"""Which versions of torch, torchao and Lightning this package supports: what its own metadata says.

Nothing is imported at the top: `importlib.metadata` and `packaging` take longer to import than all that this package
else imports at first, and that may be at every start of Python.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def supported(distribution: str) -> "Requirement":
    """The range of one dependency, of those that come with an extra, too: each Lightning is in the one of its name.

    >>> supported("lightning").specifier.contains("2.6.3"), supported("torch").specifier.contains("2.13.0+rocm7.1")
    (False, True)
    >>> str(supported("pytorch-lightning"))
    'pytorch-lightning!=2.6.2,!=2.6.3,<2.7,>=2.6.1'

    Raises:
        LookupError: If it is no dependency.
    """
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    for requirement in map(Requirement, requires("lightning-fp8-rocm") or []):
        if requirement.name == distribution:
            requirement.marker = None  # the message is to be pasted into a shell
            return requirement
    raise LookupError(f"lightning_fp8_rocm does not depend on {distribution!r}.")


def installed(distribution: str) -> str | None:
    """The installed version; None where it has no metadata."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_installed(*distributions: str) -> None:
    """Refuse versions outside the range.

    Raises:
        ImportError: If one is; the message names it, the range, and what to do. One without metadata is let pass.
    """
    for distribution in distributions:
        found, needed = installed(distribution), supported(distribution)
        if found is not None and not needed.specifier.contains(found, prereleases=True):
            raise ImportError(
                f"lightning_fp8_rocm supports `{needed}`, but {distribution} {found} is installed. Install one of those"
                f" versions (`pip install '{needed}'`), or train without FP8."
            )
