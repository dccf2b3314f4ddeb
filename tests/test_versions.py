import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lightning_fp8_rocm import convert, versions
from lightning_fp8_rocm.registration import register


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    def installed(distribution: str, version: str) -> None:
        real = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == distribution else real(name))

    return installed


@pytest.mark.parametrize(
    ("distribution", "version"), [("torch", "2.4.0"), ("torchao", "0.10.0"), ("torchao", "0.19.0")]
)
def test_a_pretended_unsupported_torch_or_torchao_is_refused(pretend: Any, distribution: str, version: str) -> None:
    pretend(distribution, version)
    layer = nn.Linear(32, 32)
    with pytest.raises(ImportError, match=rf"supports `{distribution}.*>=.*{distribution} {version} is installed.*pip"):
        convert(layer)
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("version", ["2.4.0", "2.6.0", "2.6.2", "2.6.3", "2.7.0"])
def test_a_pretended_unsupported_lightning_is_refused_when_it_is_taught(pretend: Any, version: str) -> None:
    import lightning  # noqa: F401

    pretend("lightning", version)
    with pytest.raises(ImportError, match=rf"lightning {version} is installed"):
        register()


@pytest.mark.parametrize("version", ["2.13.0+rocm7.1", "2.14.1", "2.15.0.dev20261101"])
def test_a_pretended_rocm_build_or_nightly_is_supported(pretend: Any, version: str) -> None:
    pretend("torch", version)
    versions.check_installed("torch")


def test_a_build_without_metadata_is_let_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    versions.check_installed("torch")


def test_make_venv_keeps_the_torch_of_a_pretended_interpreter(tmp_path: Any) -> None:
    script = Path(__file__).parents[1] / "tools" / "make_venv.py"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "parent"), "--without-pip"], check=True)
    (site,) = (tmp_path / "parent" / "lib").glob("python*/site-packages")
    metadata = site / "torch-2.13.0+rocm7.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+rocm7.0\n")
    child, parent = tmp_path / "child", tmp_path / "parent" / "bin" / "python"
    command = [str(parent), str(script), str(child), "--torch", "must-not-be-installed"]
    for _ in range(2):  # quick and the same the second time
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "torch 2.13.0+rocm7.0: found with the interpreter, kept" in done.stdout
        assert (child / "constraints.txt").read_text() == "torch==2.13.0+rocm7.0\n"
    (own,) = (child / "lib").glob("python*/site-packages")
    other = own / "torch-2.13.0+cpu.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "has torch 2.13.0+cpu, the interpreter 2.13.0+rocm7.0" in done.stderr
