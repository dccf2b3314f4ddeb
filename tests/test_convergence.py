"""FP8 reaches the loss of bf16 from scratch, on real text, in every recipe and format."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import convergence

STEPS = 100


@pytest.fixture(scope="module")
def bf16() -> tuple[float, float]:
    """Loss of bf16, and how far two of its seeds are apart."""
    first, second = (convergence.train("bf16-mixed", STEPS, seed).val_loss for seed in (0, 1))
    return first, abs(first - second)


@pytest.mark.slow
@pytest.mark.parametrize("fp8_format", convergence.FORMATS)
@pytest.mark.parametrize("recipe", convergence.RECIPE_NAMES)
def test_a_transformer_reaches_the_held_out_loss_of_bf16(
    recipe: str, fp8_format: str, bf16: tuple[float, float], capsys: pytest.CaptureFixture[str]
) -> None:
    loss, spread = bf16
    run = convergence.train(f"{recipe}/{fp8_format}", STEPS)
    with capsys.disabled():
        # To stderr, which the processes of a parallel run pass on.
        print(
            f"\n{recipe}/{fp8_format}: {run.val_loss:.4f}, bf16 {loss:.4f}, two bf16 seeds {spread:.4f} apart",
            file=sys.stderr,
        )
    assert run.fp8_share > 0.9
    assert loss < 2.6  # it has learnt: the entropy of single bytes is 3.1 nats
    assert abs(run.val_loss - loss) <= max(0.02 * loss, 3 * spread)
