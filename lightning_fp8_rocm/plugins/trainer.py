"""What is the Trainer's own of our Precision and Strategy: which of its hooks calls what.

No Lightning is imported. What is private there and is called here, besides what ``strategy.py`` calls:
``_optimizers_to_device``, ``_SubprocessScriptLauncher``. The supported versions of Lightning have it.
"""

import inspect
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8_rocm.distributed import checkpoint as files
from lightning_fp8_rocm.distributed import publish, sharding, storage
from lightning_fp8_rocm.distributed.faults import raise_together
from lightning_fp8_rocm.distributed.model import ShardedModel
from lightning_fp8_rocm.distributed.random_states import random_states, set_random_states
from lightning_fp8_rocm.plugins.console import log, say
from lightning_fp8_rocm.plugins.flavour import Flavour
from lightning_fp8_rocm.plugins.precision import FP8PrecisionMixin
from lightning_fp8_rocm.plugins.strategy import FSDP2StrategyMixin

if TYPE_CHECKING:
    # What a concrete class adds; one flavour stands for both.
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import ParallelStrategy
else:
    Precision = ParallelStrategy = object

_SLURM_PREFIX = "hpc_ckpt_"  # Lightning's, of what it saves before SLURM ends the job
_PATH = str | os.PathLike[str]


class TrainerPrecisionMixin(FP8PrecisionMixin, Precision):  # noqa: D101, the mixin's
    __doc__ = FP8PrecisionMixin.__doc__
    _flavour: Flavour

    @override
    def _devices_of(self, module: nn.Module) -> list[torch.device]:
        package = self._flavour.pytorch
        if not isinstance(module, self._flavour.of_pytorch("core").LightningModule):
            raise TypeError(
                f"Expected a `{package}.LightningModule`, but got {type(module).__module__}."
                f"{type(module).__qualname__}. To convert a plain module, call `lightning_fp8_rocm.convert(module)`."
            )
        strategy: Any = module.trainer.strategy
        strategies = self._flavour.of_pytorch("strategies")
        allowed = (strategies.SingleDeviceStrategy, strategies.DDPStrategy, FSDP2StrategyMixin)
        if not isinstance(strategy, allowed) or isinstance(strategy, strategies.DeepSpeedStrategy):
            raise TypeError(
                f'`precision="fp8-rocm"` does not work with {type(strategy).__name__}, which would convert the layers'
                " after it has sharded or copied them. Use strategy 'auto', 'ddp' or 'fsdp2_fp8'."
            )
        others = getattr(strategy, "parallel_devices", None) or []
        return [strategy.root_device, *(device for device in others if device != strategy.root_device)]

    @override
    def _compiled_by_strategy(self, module: nn.Module) -> bool:
        trainer: Any = module.trainer
        strategy = trainer.strategy
        return isinstance(strategy, FSDP2StrategyMixin) and strategy.compiles_on(strategy.root_device)

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        for watch in self._watches:
            watch.step_begins()
        with self.forward_context():
            yield
        for watch in self._watches:
            watch.step_ended()

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        for watch in self._watches:
            watch.note()  # before the user's code clears the gradients
        return result


class TrainerStrategyMixin(FSDP2StrategyMixin, ParallelStrategy):  # noqa: D101, the mixin's
    __doc__ = FSDP2StrategyMixin.__doc__

    is_distributed = True
    """Lightning asks: whether ranks get batches of their own, and ``self.log(..., sync_dist=True)`` reduces."""

    _entry = "Trainer"
    _mesh_exists = "from `setup` on: ask for it in `configure_model` or later"
    _saving_weights_alone = "unless with `save_weights_only=True`"

    _precision: Any = None
    _sharded: ShardedModel | None = None
    _says_goodbye = True
    _is_training = False
    _weights_only: bool | None = None
    _random_states: dict[str, Any] | None = None

    # ---- who and where

    @property
    @override
    def precision_plugin(self) -> Precision:
        plain: Precision = self._flavour.of_pytorch("plugins.precision").Precision()
        return self._precision if self._precision is not None else plain

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # Not kept where Lightning looks whether a strategy "carries a precision": it would let that one win, silently,
        # over the one of a second Trainer.
        if precision_plugin is None:
            return
        if self.accelerator is None:
            raise TypeError(
                f"The precision is no part of {type(self).__name__}. Pass it to the Trainer:"
                ' `Trainer(precision="fp8-rocm")`, or `Trainer(plugins=[FP8Precision(...)])`.'
            )
        self.param_dtype_of(precision_plugin, self._flavour.of_pytorch("plugins.precision"))
        self._precision = precision_plugin

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    # ---- hooks in the order of a run

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        launcher: Any
        if self.cluster_environment.creates_processes_externally:
            launcher = _InPlace()
        else:
            launchers = self._flavour.of_pytorch("strategies.launchers")
            launcher = launchers._SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        launch = launcher.launch

        @wraps(launch)
        def launch_and_hear(function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            self._is_called(trainer, function, *args, **kwargs)
            return launch(function, *args, trainer=trainer, **kwargs)

        launcher.launch = launch_and_hear
        self._launcher = launcher

    @override
    def setup_environment(self) -> None:
        self._refuse_what_cannot_be_sharded()
        self.check_device()
        super().setup_environment()
        self.connect_ranks()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._mesh

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        if _is_fitting(trainer):
            self._check_where_checkpoints_go()  # not at the first save, hours later
        # FSDP2 and tensor subclasses fail under it, and the weights it gathered cannot be trained afterwards.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        self.model = self.lightning_module
        self._sharded = self.new_model(self.model)
        manual = not self.lightning_module.automatic_optimization
        self.shard_module(
            self._sharded,
            self.precision_plugin.convert_module,
            param_dtype=self.param_dtype_of(self.precision_plugin, self._flavour.of_pytorch("plugins.precision")),
            steps_are_called=True,
            manual_optimization=_is_fitting(trainer) and manual,
        )
        self._tell(trainer)
        if _is_fitting(trainer):
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if _is_fitting(trainer) and not self.cpu_offload:
            self._flavour.of_fabric("utilities.optimizer")._optimizers_to_device(self.optimizers, self.root_device)
        self._sharded.activate_methods(manual_optimization=manual)

    @override
    def setup_optimizers(self, trainer: "pl.Trainer") -> None:
        self._reset_optimizers_and_schedulers()
        with raise_together("`configure_optimizers`"):
            super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            optimizer.register_step_post_hook(self._after_step)

    @override
    def model_to_device(self) -> None:
        """Nothing: each unit was moved before it was sharded."""

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Materialisation happens in `setup`.
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        assert self._sharded is not None
        manual = not self.lightning_module.automatic_optimization
        with self._sharded.step(weights_change=manual, trains=True):
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step():
            return super().predict_step(*args, **kwargs)

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        assert self._sharded is not None
        with self._sharded.without_gradient_sync():
            yield

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        assert self._sharded is not None
        self._sharded.after_backward()

    @override
    def on_validation_start(self) -> None:
        self._share_buffers()

    @override
    def on_test_start(self) -> None:
        self._share_buffers()

    @override
    def on_predict_start(self) -> None:
        self._share_buffers()

    @override
    def on_train_start(self) -> None:
        self._is_training = True
        states, self._random_states = self._random_states, None
        if states is not None and self._is_within_an_epoch():
            # The iterator of the dataloader was made since they were loaded, which drew from them; the run that saved
            # them had made its own long before.
            set_random_states(states, self.root_device)
        self._name_left_overs()

    @override
    def on_train_end(self) -> None:
        self._is_training = False
        self._share_buffers()
        self._saver.wait()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._is_training = False
        self._wait_for_the_last_checkpoint()  # before the others learn of it, who would end in the middle of it
        # A rank that is interrupted leaves alone: without a goodbye, the watchers of the others end them.
        self._says_goodbye = not isinstance(exception, KeyboardInterrupt | SystemExit)
        if not isinstance(exception, self._flavour.of_pytorch("utilities.exceptions").SIGTERMException):
            self._watcher.announce(exception)

    @override
    def teardown(self) -> None:
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._wait_for_the_last_checkpoint()
        if self._says_goodbye:
            self._watcher.stop()
        if self._sharded is not None:
            self._sharded.release()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # ---- collectives

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        return self._reduced(tensor, group, reduce_op)

    # ---- checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        self._check_that_all_save()
        self._saver.wait()  # before there are two copies on the host
        self._share_buffers()
        return files.model_state(self.model, full=self._saves_one_file, copy=self._saves_in_background)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: :meth:`load_checkpoint` has loaded it."""

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.model is not None
        wrapped = self._flavour.of_pytorch("core.optimizer").LightningOptimizer
        plain = optimizer._optimizer if isinstance(optimizer, wrapped) else optimizer
        return files.optimizer_state(self.model, plain, full=self._saves_one_file, copy=self._saves_in_background)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: :meth:`load_checkpoint` has loaded it."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise TypeError(
                f"`{type(self).__name__}.save_checkpoint(..., storage_options=...)` is not supported: checkpoints are"
                " written by torch.distributed.checkpoint, not by a `CheckpointIO`. Leave `storage_options` out."
            )
        path = publish.local_path(self.broadcast(os.fspath(filepath)))  # all write to one place
        is_whole = "optimizer_states" in checkpoint  # else weights alone are wanted
        loaders = _loader_states(checkpoint)
        state = {"state_dict": checkpoint.pop("state_dict")}
        optimizers = checkpoint.pop("optimizer_states", [])
        if self._saves_one_file:
            state |= {"optimizer_states": optimizers} if is_whole else {}
        else:
            state |= {f"optimizer_{index}": each for index, each in enumerate(optimizers)}
        shards, rest = files.split(checkpoint, full=self._saves_one_file, copy=self._saves_in_background)
        self._saver.save(
            path,
            {**state, **shards},
            {**rest, storage.OWN_KEY: self._facts()},
            full=self._saves_one_file,
            own={"random": random_states(self.root_device), "dataloaders": loaders} if is_whole else None,
            # After the last one, Lightning asks SLURM to stop the job and to start it anew.
            background=self._saves_in_background and not path.name.startswith(_SLURM_PREFIX),
        )

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.model is not None
        assert self.lightning_module is not None
        self._saver.wait()
        path = publish.local_path(self.broadcast(os.fspath(checkpoint_path)))
        is_fitting = _is_fitting(self.lightning_module.trainer)
        with self.verified(path) as found:
            checkpoint = files.load(
                found,
                self.model,
                self.optimizers if is_fitting else [],
                strict=self.lightning_module.strict_loading,
                weights_only=self._weights_only if weights_only is None else weights_only,
            )
            if is_fitting:
                self._restore_rank(checkpoint)
        self.warn_unless_verified(found, checkpoint.get(storage.OWN_KEY))
        if storage.VERSION_KEY not in checkpoint:
            self._fill_up(checkpoint, found)
        return checkpoint

    def _fill_up(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Add what Lightning looks for in every checkpoint to one that no Trainer has saved."""
        rank_zero_warn(
            f"The checkpoint {str(path)!r} was saved by Fabric: it has no loops, schedulers and callbacks of a Trainer."
            " Weights, and optimizer states where training continues, are those of the checkpoint; epochs and steps are"
            " counted from 0, schedulers and callbacks start anew."
        )
        checkpoint[storage.VERSION_KEY] = import_module(self._flavour.pytorch).__version__
        for key, empty in (("epoch", 0), ("global_step", 0), ("lr_schedulers", []), ("callbacks", {})):
            checkpoint.setdefault(key, empty)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self.is_global_zero:
            self._saver.remove(publish.local_path(filepath))

    # ---- how

    @property
    def _saves_in_background(self) -> bool:
        """Only while training goes on is there anything to overlap with."""
        return bool(self.async_checkpoint and self._is_training)

    def _facts(self) -> dict[str, Any]:
        """What this package adds to a checkpoint, for the console script and the reader."""
        assert self.model is not None
        precision = self.precision_plugin
        return {
            **self._versions(),
            "tied": files.tied_names(self.model),
            **(precision.facts() if isinstance(precision, FP8PrecisionMixin) else {}),
        }

    def _restore_rank(self, checkpoint: dict[str, Any]) -> None:
        """Take what this rank itself saved: its random numbers, and where its dataloaders are."""
        own = self.own_part_of(checkpoint.get(storage.OWN_KEY, {}))
        if own is None:
            return
        if own["dataloaders"] is not None:
            _set_loader_states(checkpoint, own["dataloaders"])
        self._random_states = own["random"]
        set_random_states(own["random"], self.root_device)

    def _is_within_an_epoch(self) -> bool:
        assert self.lightning_module is not None
        # Also after the last batch, as in a validation there: the epoch is over when its end was processed.
        progress: Any = self.lightning_module.trainer.fit_loop.epoch_progress.current
        return bool(progress.processed < progress.started)

    def _checkpoint_folders(self) -> list[Path]:
        """Where callbacks save.

        Raises:
            ValueError: One of them is a URL.
        """
        assert self.lightning_module is not None
        places = [getattr(each, "dirpath", None) for each in self.lightning_module.trainer.checkpoint_callbacks]
        return [publish.local_path(place) for place in places if place]

    def _check_where_checkpoints_go(self) -> None:
        folders = self._checkpoint_folders()
        with raise_together("looking at where checkpoints go"):
            if self.is_global_zero:
                for folder in folders:
                    _check_writable(folder)
        assert self.lightning_module is not None
        for callback in self.lightning_module.trainer.checkpoint_callbacks:
            if self.async_checkpoint and getattr(callback, "save_last", None) == "link":
                raise ValueError(
                    f'`ModelCheckpoint(save_last="link")` does not work with `{type(self).__name__}'
                    "(async_checkpoint=True)`: Lightning would make `last.ckpt` a link to a checkpoint that is not"
                    " written yet, and a run that ends meanwhile has no last one. Pass `save_last=True`."
                )

    def _name_left_overs(self) -> None:
        folders = self._checkpoint_folders()
        found: list[publish.LeftOver] = []
        with raise_together("looking for unpublished checkpoints"):
            found = self._saver.look_around(folders)
        if found:
            names = "; ".join(f"{each.folder} (of {each.target}, by {each.owner})" for each in found)
            rank_zero_warn(
                f"Earlier runs began checkpoints that they did not complete: {names}. These are not used, and the next"
                " checkpoint that is saved there removes them."
            )

    def _check_that_all_save(self) -> None:
        """Callbacks save on an exception, each rank for itself: where one has failed alone, the others never come.

        Raises:
            RuntimeError: That is so. The others are told why this rank ends.
        """
        assert self.lightning_module is not None
        if not self.lightning_module.trainer.interrupted or self._watcher.meet():
            return
        self._is_training = False
        self._wait_for_the_last_checkpoint()
        error = sys.exception()
        if error is not None:
            self._watcher.announce(error)
        raise RuntimeError(
            "No checkpoint is saved because of this exception: not all ranks raised one, and those that go on hold"
            " their part of the weights. The last checkpoint that was saved before is complete."
        )

    def _is_called(self, trainer: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """``fit`` or the like begins, before Lightning looks for the checkpoint that ``ckpt_path="last"`` means."""
        self._weights_only = _weights_only_of(function, *args, **kwargs)
        for callback in trainer.checkpoint_callbacks if trainer is not None else ():
            folder = getattr(callback, "dirpath", None) or os.path.join(trainer.default_root_dir, "checkpoints")
            if "://" not in str(folder):
                for recovered in publish.recover(Path(folder)):
                    log.warning(
                        "%s has its name again: a process that was replacing it had ended halfway and left it as"
                        " NAME.old.",
                        recovered,
                    )

    def _refuse_what_cannot_be_sharded(self) -> None:
        assert self.lightning_module is not None
        if type(self.checkpoint_io) is not self._flavour.of_pytorch("plugins").TorchCheckpointIO:
            raise ValueError(
                f"The plugin {type(self.checkpoint_io).__name__} is a CheckpointIO, and {type(self).__name__} uses"
                " none: checkpoints are written by torch.distributed.checkpoint. Remove it from `Trainer(plugins=...)`."
                f" To write in the background, pass `{type(self).__name__}(async_checkpoint=True)`."
            )
        if self._layer_sync is not None:
            raise ValueError(
                f"`Trainer(sync_batchnorm=True)` is not supported by {type(self).__name__}. Pass `sync_batchnorm=False`"
                " and use a normalisation without statistics over the batch (LayerNorm, GroupNorm, RMSNorm), or"
                " `strategy='ddp'`."
            )
        callbacks = self._flavour.of_pytorch("callbacks")
        for callback in self.lightning_module.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, callbacks.StochasticWeightAveraging | callbacks.WeightAveraging):
                raise ValueError(
                    f"The callback {type(callback).__name__} copies the whole model, which {type(self).__name__} has"
                    " sharded. Use `lightning_fp8_rocm.EMA`, which averages each rank's shards, or average the weights"
                    " of the checkpoints after training."
                )
            if isinstance(callback, callbacks.ModelPruning):
                raise ValueError(
                    f"The callback {type(callback).__name__} replaces parameters while training goes on, and"
                    f" {type(self).__name__} has sharded them. Remove it, or prune the checkpoint after training."
                )

    def _tell(self, trainer: "pl.Trainer") -> None:
        """One line, and the same for the loggers: what runs here, and how."""
        precision = self.precision_plugin
        line, facts = self.facts_of_setup(precision.precision, getattr(precision, "report", None))
        if facts != getattr(self, "_told", None):
            self._told = facts
            say(line)
            for logger in trainer.loggers:
                logger.log_hyperparams({f"fp8_rocm/{name}": value for name, value in facts.items()})

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        assert self._sharded is not None
        self._sharded.after_optimizer_step()
        self._look_at_states(optimizer)

    @contextmanager
    def _evaluation_step(self) -> Generator[None, None, None]:
        assert self._sharded is not None
        with self._sharded.step(weights_change=False, trains=False):
            yield

    def _share_buffers(self) -> None:
        assert self.lightning_module is not None
        sharding.broadcast_buffers(self.lightning_module)


def _weights_only_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool | None:
    """What the user passed as ``weights_only``, which Lightning hands to no strategy that loads after its setup."""
    value = inspect.signature(function).bind(*args, **kwargs).arguments.get("weights_only")
    return value if isinstance(value, bool) else None


def _check_writable(folder: Path) -> None:
    """Not a proof, but what can be said without writing.

    Raises:
        PermissionError: ``folder``, or where it would be made, is read-only.
    """
    above = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(
            f"Checkpoints are to be saved in {str(folder)!r}, but {str(above)!r} is no directory that this process may"
            " write to. Choose another `dirpath` of ModelCheckpoint, or another `default_root_dir` of the Trainer."
        )


def _fit_loop_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


def _loader_states(checkpoint: Mapping[str, Any]) -> Any:
    """Of dataloaders that save where they are; Lightning keeps those of rank 0."""
    return _fit_loop_state(checkpoint).get("combined_loader")


def _set_loader_states(checkpoint: Mapping[str, Any], states: Any) -> None:
    _fit_loop_state(checkpoint)["combined_loader"] = states


def _is_fitting(trainer: "pl.Trainer") -> bool:
    return trainer.state.fn == "fit"


class _InPlace:
    """Starts nothing, where ``torchrun`` or SLURM has."""

    is_interactive_compatible = True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Nothing was started."""
