import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

USE = """
import lightning_fp8_rocm, sys
from pathlib import Path

home = Path(lightning_fp8_rocm.__file__).parent
assert home == Path(sys.argv[1]) / "lightning_fp8_rocm", home
assert (home / "py.typed").exists()
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

class Wide(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 2))

module = Wide()
trainer = L.Trainer(precision="fp8-rocm", fast_dev_run=True, accelerator="cpu", logger=False)
trainer.fit(module)
assert [layer.name for layer in trainer.precision_plugin.report.converted] == ["layer.0"]
print("trained", lightning_fp8_rocm.__version__)
"""


def wheel_of(source: Path, into: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(into), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = into.glob("*.whl")
    return wheel


def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    target = tmp_path / "site"
    wheel = wheel_of(ROOT, tmp_path / "dist")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    assert sorted(p.name for p in target.iterdir() if "dist-info" not in p.name) == ["bin", "lightning_fp8_rocm"]
    assert [each.name for each in (target / "bin").iterdir()] == ["lightning-fp8-rocm"]
    script = tmp_path / "use.py"
    script.write_text(USE)
    done = subprocess.run(
        [sys.executable, str(script), str(target)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trained 0.1.0" in done.stdout


def test_the_wheel_of_autoload_is_one_pth_file_and_needs_this_package(tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel_of(ROOT / "autoload", tmp_path)) as wheel:
        (pth,) = (name for name in wheel.namelist() if ".dist-info/" not in name)
        (metadata,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        assert pth == "lightning_fp8_rocm_autoload.pth"  # at the top, where Python looks for it
        assert wheel.read(pth) == b"import lightning_fp8_rocm\n"
        assert "Requires-Dist: lightning-fp8-rocm\n" in wheel.read(metadata).decode()
