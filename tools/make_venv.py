"""Make a virtual environment that keeps the torch which the interpreter already has.

A ROCm build of torch is chosen with care; nothing here may replace it. So where the interpreter has a torch, the
environment sees it, and a constraint pins it: an installer that wants another one fails instead. Where it has none, the
given one is installed.

The standard library alone: this runs before anything is installed.
"""

import argparse
import subprocess
import sys
import sysconfig
from pathlib import Path

VERSION_OF_TORCH = "import importlib.metadata as m; print(m.version('torch'))"


def torch_of(python: str | Path) -> str | None:
    """The version of torch that an interpreter has, without importing it; None if it has none."""
    done = subprocess.run([str(python), "-c", VERSION_OF_TORCH], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> None:
    """Make the environment, and write ``constraints.txt`` into it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--torch", default="torch", help="what to install where the interpreter has no torch")
    arguments = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036, an older interpreter may well run this
        sys.exit(
            f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}. Name another: make PYTHON=python3.11"
        )

    python = arguments.venv / "bin" / "python"
    found = torch_of(sys.executable)
    if not python.exists():
        command = [sys.executable, "-m", "venv", str(arguments.venv)]
        subprocess.run(command + (["--system-site-packages"] if found else []), check=True)
        if found and sys.prefix != sys.base_prefix:
            # The interpreter is one of a virtual environment itself, and only its base is a "system" to the new one.
            (own,) = (arguments.venv / "lib").glob("python*/site-packages")
            (own / "_parent_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if torch_of(python) is None:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *arguments.torch.split()], check=True)
    version = torch_of(python)
    if found and version != found:
        sys.exit(
            f"{arguments.venv} has torch {version}, the interpreter {found}, which is not to be replaced. Remove"
            f" {arguments.venv} (`make clean`) and start again."
        )
    print(f"torch {version}: {'found with the interpreter, kept' if found else 'in the environment'}")
    (arguments.venv / "constraints.txt").write_text(f"torch=={version}\n")


if __name__ == "__main__":
    main()
