"""An exponential moving average of the weights: each rank averages what it holds of them.

The average of a sharded parameter is sharded as the parameter is, so nothing here communicates: an update is arithmetic
on local shards, and a rank with no rows of a parameter has no rows of its average.

In the order of a run: the averages are updated after optimizer steps; an evaluation begins by writing them over the
weights and ends by writing the weights back; a checkpoint holds both.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_fp8_rocm.distributed import fsdp
from lightning_fp8_rocm.distributed.storage import copy_own_part, listed, plain_name

if TYPE_CHECKING:
    # What a concrete class adds; one flavour stands for both.
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback
else:
    Callback = object


class EMAMixin(Callback):
    """Averages the weights while they are trained, and evaluates with the averages.

    After an optimizer step each average becomes ``decay * average + (1 - decay) * weight``; the first update takes the
    weights as they are. Averaged is every parameter that is trained, in fp32; one that is thawed later begins with its
    value of then, one that is frozen later is averaged on. Buffers, as the statistics of BatchNorm, are not averaged.

    Validation, test and prediction run with the averages. At their end, or when they are interrupted, the trained
    weights are back, bit for bit, and a checkpoint that training resumes from holds those at any time; the averages are
    in it as the state of this callback. The module itself is left with the trained weights: see
    :meth:`averaged_weights` for the others.

    Args:
        decay: How much of the average an update keeps, ``0 <= decay < 1``. It reaches back over about
            ``1 / (1 - decay)`` updates.
        every_n_steps: Update after every so many optimizer steps, as ``trainer.global_step`` counts them. The optimizer
            steps of one batch, which manual optimization may take, make one update at the end of the batch.
        start_step: The optimizer step after which the averages begin.
        evaluate: Whether evaluations run with the averages. Of several of these callbacks one may.

    Raises:
        TypeError: An argument is of another type.
        ValueError: An argument is out of its range.
    """

    def __init__(
        self, decay: float = 0.999, every_n_steps: int = 1, start_step: int = 0, evaluate: bool = True
    ) -> None:
        if not isinstance(decay, float | int) or isinstance(decay, bool):
            raise TypeError(f"Expected argument `decay` of EMA to be a number, but got {decay!r}.")
        if not 0 <= decay < 1:
            raise ValueError(
                f"Expected argument `decay` of EMA to be at least 0 and less than 1, but got {decay!r}. At 1 the"
                " averages would never move; 0.999 reaches back over about 1000 updates."
            )
        for name, value, least in (("every_n_steps", every_n_steps, 1), ("start_step", start_step, 0)):
            if type(value) is not int:
                raise TypeError(f"Expected argument `{name}` of EMA to be a whole number, but got {value!r}.")
            if value < least:
                raise ValueError(f"Expected argument `{name}` of EMA to be at least {least}, but got {value!r}.")
        if not isinstance(evaluate, bool):
            raise TypeError(f"Expected argument `evaluate` of EMA to be True or False, but got {evaluate!r}.")
        self.decay, self.every_n_steps, self.start_step, self.evaluate = decay, every_n_steps, start_step, evaluate
        self.updates = 0
        """How many updates the averages are made of, the one that they began with included."""
        self._averages: dict[str, Tensor] = {}
        self._module: pl.LightningModule | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._step_before = 0
        self._are_unchecked = False
        self._are_current = True
        self._swapped: list[tuple[nn.Parameter, Tensor, Tensor]] | None = None
        """While the averages stand in the module: parameters, their trained values here, their averages."""
        self._is_evaluating = False

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(decay=self.decay)

    # ---- averages

    @contextmanager
    def averaged_weights(self, module: nn.Module) -> Iterator[None]:
        """The span in which the parameters of ``module`` have the averages as their values.

        Within it ``trainer.save_checkpoint(path, weights_only=True)`` writes the averages as the weights; a checkpoint
        with all else holds the trained ones. It takes as much memory as the averaged parameters. What is written into
        these within the span is lost.

        Args:
            module: The module that was trained, or one with parameters of the same names and shapes.

        Raises:
            RuntimeError: There are no averages yet.
            ValueError: The averages are of another module.
        """
        is_mine = self._swapped is None
        try:
            if is_mine:
                self._swap_in(module)
            yield
        finally:
            if is_mine:
                self._swap_out(module)

    @torch.no_grad()
    def _update(self) -> None:
        averages, weights = [], []
        for name, parameter in self._parameters.items():
            average = self._averages.get(name)
            if average is None:
                if parameter.requires_grad:
                    self._averages[name] = parameter.to(_average_dtype(parameter), copy=True)
                continue
            local, weight = _local(average), _local(parameter)
            if weight.dtype == local.dtype:
                averages.append(local)
                weights.append(weight)
            else:  # cast one by one: together they would be a second copy of the averages
                local.lerp_(weight.to(local.dtype), 1 - self.decay)
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - self.decay)
        self.updates += 1

    @torch.no_grad()
    def _swap_in(self, module: nn.Module) -> None:
        if not self._averages:
            raise RuntimeError(
                "EMA has no averages yet: they begin with the first update in `fit` (see `start_step`), or are loaded"
                " with a checkpoint. Ask for them later."
            )
        parameters = _parameters(module)
        averages = self._placed(module, parameters)
        swapped = [(parameters[name], _local(parameters[name]).clone(), average) for name, average in averages.items()]
        self._swapped = swapped  # from here on an interruption puts the trained weights back
        _write(module, ((parameter, average) for parameter, _, average in swapped))

    def _swap_out(self, module: nn.Module) -> None:
        if self._swapped is not None:
            _write(module, ((parameter, trained) for parameter, trained, _ in self._swapped))
            self._swapped = None

    def _placed(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """The averages, each where its parameter is and sharded as that is; those that are so already are the same."""
        averages = self._averages
        unexpected = averages.keys() - parameters.keys()
        # One that is thawed after an update joins at the next; only loaded averages can lack one.
        trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        missing = trained - averages.keys() if self._are_unchecked and averages else set()
        if (missing or unexpected) and getattr(module, "strict_loading", True):
            lacks = f" They lack {listed(missing)}." if missing else ""
            have = f" They have {listed(unexpected)}, which the module has not." if unexpected else ""
            raise ValueError(
                f"The averages of EMA do not fit {type(module).__name__}.{lacks}{have} Build and freeze the module as"
                " in the run that saved them, or set `strict_loading = False` on it to use what both have."
            )
        averages = {name: average for name, average in averages.items() if name not in unexpected}
        wrong = [
            f"{name} (average {tuple(average.shape)}, parameter {tuple(parameters[name].shape)})"
            for name, average in averages.items()
            if average.shape != parameters[name].shape
        ]
        if wrong:
            raise ValueError(
                f"The averages of EMA have other shapes than the parameters of {type(module).__name__}:"
                f" {listed(wrong)}. Build the module with the hyper-parameters of the run that saved them."
            )
        strange = [name for name, average in averages.items() if _is_sharded_otherwise(average, parameters[name])]
        if strange:
            raise ValueError(
                f"The averages of EMA are sharded otherwise than the parameters of {type(module).__name__}:"
                f" {listed(strange)}. Use them with the module that was trained, or load them from a checkpoint."
            )
        self._are_unchecked = False
        return {name: _placed_like(average, parameters[name]) for name, average in averages.items()}

    # ---- hooks in the order of a run

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        evaluating = [each for each in trainer.callbacks if isinstance(each, EMAMixin) and each.evaluate]  # type: ignore[attr-defined]
        if len(evaluating) > 1:
            raise ValueError(
                f"{len(evaluating)} EMA callbacks would each evaluate with their averages (decay"
                f" {', '.join(str(each.decay) for each in evaluating)}). Pass `evaluate=False` to all but one."
            )
        if self._module is not None and self._module is not pl_module:
            self._forget()
        self._module = pl_module
        self._are_current = False

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._forget_those_of_other_weights(trainer)
        with torch.no_grad():
            self._parameters = _parameters(pl_module)
            self._averages = self._placed(pl_module, self._parameters)

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        self._step_before = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_due(self._step_before, trainer.global_step, self.every_n_steps, self.start_step):
            self._update()

    @override
    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._evaluation_starts(trainer, pl_module)

    @override
    def on_test_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._evaluation_starts(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._evaluation_starts(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._evaluation_ends(pl_module)

    @override
    def on_test_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._evaluation_ends(pl_module)

    @override
    def on_predict_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._evaluation_ends(pl_module)

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        # Lightning puts what saves checkpoints last in the list, so this comes before.
        self._is_evaluating = False
        self._swap_out(pl_module)

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        # A tuner ends a stage in its middle, without an exception that callbacks see.
        self._evaluation_ends(pl_module)

    def _evaluation_starts(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        is_fitting = trainer.state.fn == "fit"
        if not is_fitting:
            self._forget_those_of_other_weights(trainer)
        if not self.evaluate or self._swapped is not None:
            return
        if self._averages:
            self._is_evaluating = True
            self._swap_in(module)
        elif not is_fitting:
            rank_zero_warn(
                "EMA has no averages, so the evaluation runs with the weights as they are. Averages come from `fit`, or"
                f" from a checkpoint of a run with `EMA(decay={self.decay})`, saved without `weights_only`. If that is"
                " meant, pass `evaluate=False`."
            )

    def _evaluation_ends(self, module: "pl.LightningModule") -> None:
        if self._is_evaluating:  # not within `averaged_weights` of the user
            self._is_evaluating = False
            self._swap_out(module)

    # ---- checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        """The averages by the name of the parameter in the module as it was written, not copied."""
        return {"decay": self.decay, "updates": self.updates, "weights": dict(self._averages)}

    @override
    def on_load_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        # Of a checkpoint without a state for it a callback is told nothing else.
        states = checkpoint.get("callbacks") or {}
        if self.state_key in states:
            return
        others = sorted(str(key) for key in states if str(key).startswith(type(self).__name__ + "{"))
        has = f"averages of {', '.join(others)}" if others else "no averages"
        rank_zero_warn(
            f"The checkpoint has {has}, and this run has {self.state_key}: its averages begin anew."
            + (" To go on with those of the checkpoint, pass their `decay`." if others else "")
        )

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the averages of a checkpoint. They are compared with the module when a stage starts.

        Args:
            state_dict: What :meth:`state_dict` returned. The tensors are whole, or sharded as the parameters are; they
                are not copied.
        """
        self._averages, self.updates = dict(state_dict["weights"]), state_dict["updates"]
        self._are_unchecked = self._are_current = True

    @override
    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        # Saved within an evaluation, by a hook of the user or by a signal: what training resumes from must be trained.
        if self._swapped is None:
            return
        _write(pl_module, ((parameter, trained) for parameter, trained, _ in self._swapped))
        state = trainer.strategy.lightning_module_state_dict()
        checkpoint["state_dict"] = {
            name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()
        }
        _write(pl_module, ((parameter, average) for parameter, _, average in self._swapped))

    def _forget(self) -> None:
        self._averages, self.updates, self._are_unchecked = {}, 0, False

    def _forget_those_of_other_weights(self, trainer: "pl.Trainer") -> None:
        """Once in a stage: of a checkpoint without a state for it a callback is told nothing."""
        if trainer.ckpt_path is not None and not self._are_current:
            self._forget()
        self._are_current = True


def is_due(before: int, now: int, every: int, start: int) -> bool:
    """Whether the averages are updated after a batch: ``start`` or a whole number of ``every`` later was reached in it.

    Args:
        before: Optimizer steps before the batch.
        now: Optimizer steps after it; the same while gradients are accumulated.
        every: Optimizer steps from one update to the next.
        start: The optimizer step of the first update.

    >>> [step for step in range(1, 10) if is_due(step - 1, step, every=3, start=2)]
    [2, 5, 8]
    >>> is_due(4, 4, every=1, start=0)
    False
    >>> is_due(2, 4, every=3, start=0)  # two steps in one batch
    True
    """
    return now >= start and (now - start) // every > (before - start) // every


def _average_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float32 if parameter.is_floating_point() else parameter.dtype


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds; under ``no_grad`` the shard itself, not a view."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, tied ones once, and none as it is gathered."""
    fsdp.reshard(module)
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


@torch.no_grad()
def _write(module: nn.Module, values: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    fsdp.reshard(module)  # else a unit would go on with what it has gathered
    for parameter, value in values:
        _local(parameter).copy_(_local(value))


def _is_sharded_otherwise(average: Tensor, parameter: Tensor) -> bool:
    return isinstance(average, DTensor) and (
        not isinstance(parameter, DTensor)
        or average.device_mesh != parameter.device_mesh
        or average.placements != parameter.placements
    )


def _placed_like(average: Tensor, parameter: nn.Parameter) -> Tensor:
    """An average on the device of its parameter and sharded as that is: of a whole tensor each rank takes its part."""
    dtype = _average_dtype(parameter)
    if isinstance(average, DTensor) or not isinstance(parameter, DTensor):
        return average.to(device=parameter.device, dtype=dtype)
    placed = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    copy_own_part(average, placed)
    return placed
