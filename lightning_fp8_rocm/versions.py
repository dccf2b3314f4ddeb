"""Which versions of torch, torchao and Lightning this package supports: what its own metadata says."""

from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def supported(distribution: str) -> "Requirement":
    """The range of one dependency.

    >>> supported("lightning").specifier.contains("2.6.3"), supported("torch").specifier.contains("2.13.0+rocm7.1")
    (False, True)
    """
    from packaging.requirements import Requirement  # not at the top: importing us would take a third longer

    for line in requires("lightning-fp8-rocm") or []:
        requirement = Requirement(line)
        if requirement.name == distribution and requirement.marker is None:
            return requirement
    raise LookupError(f"lightning_fp8_rocm does not depend on {distribution!r}.")


def installed(distribution: str) -> str | None:
    """The installed version; None where it has no metadata."""
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
