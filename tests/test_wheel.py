import os
import subprocess
import sys
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


def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    built, target = tmp_path / "dist", tmp_path / "site"
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(built), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = built.glob("*.whl")
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
