"""``Trainer(strategy="fsdp2_fp8")``.

Private functions of Lightning that are called here, as its own strategies call them, and nothing that is changed:
``_init_dist_connection``, ``_get_default_process_group_backend_for_device``, ``_distributed_is_initialized``,
``_sync_ddp_if_available``, ``_optimizers_to_device``, ``_SubprocessScriptLauncher``. The supported versions of
Lightning have them.
"""

import inspect
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only as pl_rank_zero_only  # type: ignore[attr-defined]
from lightning_utilities.core.rank_zero import rank_zero_only as utils_rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_fp8_rocm import hardware
from lightning_fp8_rocm.distributed import checkpoint as files
from lightning_fp8_rocm.distributed import publish, sharding, storage
from lightning_fp8_rocm.distributed.faults import Watcher, raise_together
from lightning_fp8_rocm.distributed.random_states import random_states, set_random_states
from lightning_fp8_rocm.distributed.saver import Saver
from lightning_fp8_rocm.distributed.units import AutoWrapPolicy
from lightning_fp8_rocm.plugins import (
    FP8PrecisionMixin,
    FSDP2StrategyMixin,
    GradientSync,
    ReduceDtype,
    StateDictType,
    check_process_group,
    log,
    say,
    set_environment,
)

_SLURM_PREFIX = "hpc_ckpt_"  # Lightning's, of what it saves before SLURM ends the job


class FSDP2FP8Strategy(FSDP2StrategyMixin, ParallelStrategy):  # noqa: D101, the mixin's
    __doc__ = FSDP2StrategyMixin.__doc__

    strategy_name = "fsdp2_fp8"
    is_distributed = True
    """Lightning asks: whether ranks get batches of their own, and ``self.log(..., sync_dist=True)`` reduces."""

    def __init__(
        self,
        auto_wrap_policy: Literal["auto"] | set[type[nn.Module] | str] | Callable[[nn.Module], bool] = "auto",
        activation_checkpointing_policy: Literal["full", "selective"] | set[type[nn.Module] | str] | None = None,
        fp8_all_gather: Literal["auto"] | bool = "auto",
        device_mesh: tuple[int, int] | None = None,
        reshard_after_forward: bool | None = None,
        reduce_dtype: ReduceDtype = "float32",
        cpu_offload: bool = False,
        compile: Literal["auto"] | bool | dict[str, Any] = "auto",
        gradient_sync: GradientSync = "last",
        forward_prefetch: int | None = None,
        backward_prefetch: int | None = None,
        find_unused_parameters: bool = False,
        state_dict_type: StateDictType = "sharded",
        async_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **others: Any,
    ) -> None:
        policy: AutoWrapPolicy = auto_wrap_policy
        FSDP2StrategyMixin.__init__(
            self,
            policy,
            activation_checkpointing_policy,
            fp8_all_gather,
            device_mesh,
            reshard_after_forward,
            reduce_dtype,
            cpu_offload,
            compile,
            gradient_sync,
            forward_prefetch,
            backward_prefetch,
            find_unused_parameters,
            state_dict_type,
            async_checkpoint,
            others,
        )
        check_process_group(process_group_backend, timeout)
        self._precision: Precision | None = None
        ParallelStrategy.__init__(self)
        self.num_nodes = 1
        self._process_group_backend, self._timeout = process_group_backend, timeout
        self._watcher = Watcher()
        self._says_goodbye = True
        self._saver = Saver()
        self._is_training = False
        self._weights_only: bool | None = None
        self._random_states: dict[str, Any] | None = None
        self._looked_at: WeakSet[Optimizer] = WeakSet()

    # ---- who and where

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision if self._precision is not None else Precision()

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
        _param_dtype(precision_plugin)
        self._precision = precision_plugin

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes of this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all ranks; ``LightningModule.device_mesh`` is the same."""
        if self._mesh is None:
            raise RuntimeError("The device mesh exists from `setup` on: ask for it in `configure_model` or later.")
        mesh: DeviceMesh = self._mesh
        return mesh

    @property
    def process_group_backend(self) -> str | None:
        """The backend in use, or the one that was asked for."""
        return self._process_group_backend

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
        if self.cluster_environment.creates_processes_externally:
            self._launcher = _InPlace(self)
        else:
            self._launcher = _Subprocesses(self, self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        self._refuse_what_cannot_be_sharded()
        device = self.root_device
        if device.type not in ("cuda", "cpu"):
            raise ValueError(f"{type(self).__name__} runs on GPUs (ROCm, CUDA) and CPUs, but the device is {device}.")
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        if device.type == "cuda":
            set_environment(hardware.of_device(device))
        assert self.cluster_environment is not None
        if self._process_group_backend is None:
            backend = _get_default_process_group_backend_for_device(device)
            # The norm of gradients that lie in the host's memory is reduced there.
            self._process_group_backend = (
                f"cpu:gloo,cuda:{backend}" if self.cpu_offload and backend != "gloo" else backend
            )
        _init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device if device.type != "cpu" else None,
        )
        makes_group = False
        if self._mesh is None or self._mesh_is_of_another_group():
            self._mesh = sharding.make_mesh(device.type, self.world_size, self.mesh_sizes)
            makes_group = True
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._mesh
        self._watcher.start()
        if makes_group:
            self._saver.prepare()

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_where_checkpoints_go()  # not at the first save, hours later
        # FSDP2 and tensor subclasses fail under it, and the weights it gathered cannot be trained afterwards.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        self.model = self.shard_module(
            self.lightning_module,
            self.precision_plugin.convert_module,
            device=self.root_device,
            param_dtype=_param_dtype(self.precision_plugin),
            manual_optimization=trainer.state.fn == TrainerFn.FITTING
            and not self.lightning_module.automatic_optimization,
        )
        self._tell(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING and not self.cpu_offload:
            _optimizers_to_device(self.optimizers, self.root_device)
        self.activate_methods(
            self.lightning_module, manual_optimization=not self.lightning_module.automatic_optimization
        )

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
        manual = not self.lightning_module.automatic_optimization
        with self.step_of(self.lightning_module, weights_change=manual, trains=True):
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
        with self.without_gradient_sync(self.model):
            yield

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        assert self.lightning_module is not None
        self.after_backward(self.lightning_module)

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
        if not isinstance(exception, SIGTERMException):
            self._watcher.announce(exception)

    @override
    def teardown(self) -> None:
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._wait_for_the_last_checkpoint()
        if self._says_goodbye:
            self._watcher.stop()
        self.release()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # ---- collectives

    @override
    def barrier(self, name: str | None = None) -> None:
        if not _distributed_is_initialized():
            return
        if torch.distributed.get_backend() == "nccl":
            torch.distributed.barrier(device_ids=[self.root_device.index])
        else:
            torch.distributed.barrier()

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not _distributed_is_initialized():
            return obj
        box = [obj]
        torch.distributed.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Tensor | Any:
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op) if isinstance(tensor, Tensor) else tensor

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
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
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
        is_fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        found, notice = self.broadcast(publish.find(path))
        before: tuple[int, ...] = ()
        with raise_together(f"loading {path}"):
            storage.check_readable(found)
            before = storage.identity(found)
        if notice is not None:
            rank_zero_warn(notice)
        self._saver.check_sound(found)
        with raise_together(f"loading {path}"), storage.unchanged(found):  # reading needs no collectives
            if storage.identity(found) != before:
                raise storage.replaced(found)
            checkpoint = files.load(
                found,
                self.model,
                self.optimizers if is_fitting else [],
                strict=self.lightning_module.strict_loading,
                weights_only=self._weights_only if weights_only is None else weights_only,
            )
            if is_fitting:
                self._restore_rank(checkpoint)
        if storage.OWN_KEY in checkpoint and found.is_dir() and not (found / publish.MANIFEST_NAME).is_file():
            rank_zero_warn(
                f"The checkpoint {str(found)!r} has lost its {publish.MANIFEST_NAME}: it was loaded without being"
                " verified. Copy all files of a checkpoint."
            )
        return checkpoint

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self.is_global_zero:
            self._saver.remove(publish.local_path(filepath))

    # ---- how

    @property
    def _saves_one_file(self) -> bool:
        return bool(self.state_dict_type == "full")

    @property
    def _saves_in_background(self) -> bool:
        """Only while training goes on is there anything to overlap with."""
        return bool(self.async_checkpoint and self._is_training)

    def _facts(self) -> dict[str, Any]:
        """What this package adds to a checkpoint, for the console script and the reader."""
        assert self.model is not None
        facts: dict[str, Any] = {
            "version": version("lightning-fp8-rocm"),
            "torch": str(torch.__version__),
            "tied": files.tied_names(self.model),
        }
        precision = self.precision_plugin
        return facts | (precision.facts() if isinstance(precision, FP8PrecisionMixin) else {})

    def _restore_rank(self, checkpoint: dict[str, Any]) -> None:
        """Take what this rank itself saved: its random numbers, and where its dataloaders are."""
        ranks = checkpoint.get(storage.OWN_KEY, {}).get("ranks")
        if ranks is None:
            return
        if len(ranks) != self.world_size:
            say(
                f"The checkpoint was saved by {len(ranks)} rank(s) and is loaded by {self.world_size}: random numbers"
                " start anew, batches are divided otherwise, and a dataloader that saves its state gets that of rank 0."
            )
            return
        own = ranks[self.global_rank]
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

    def _wait_for_the_last_checkpoint(self) -> None:
        """Where something else is to be raised, or nothing any more."""
        try:
            self._saver.wait()
        except Exception as error:
            log.error("%s", error)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero functions which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for function in (pl_rank_zero_only, utils_rank_zero_only):
            function.rank = self.global_rank  # type: ignore[attr-defined]

    def _refuse_what_cannot_be_sharded(self) -> None:
        assert self.lightning_module is not None
        if type(self.checkpoint_io) is not TorchCheckpointIO:
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
        for callback in self.lightning_module.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise ValueError(
                    f"The callback {type(callback).__name__} copies the whole model, which {type(self).__name__} has"
                    " sharded. Use `lightning_fp8_rocm.EMA`, which averages each rank's shards, or average the weights"
                    " of the checkpoints after training."
                )
            if isinstance(callback, ModelPruning):
                raise ValueError(
                    f"The callback {type(callback).__name__} replaces parameters while training goes on, and"
                    f" {type(self).__name__} has sharded them. Remove it, or prune the checkpoint after training."
                )

    def _mesh_is_of_another_group(self) -> bool:
        """Whether the process group was destroyed and made anew since the mesh was made."""
        try:
            self._mesh.get_group(0) if self._mesh.ndim == 1 else self._mesh.get_group("shard")
        except (RuntimeError, ValueError, KeyError):
            return True
        return bool(self._mesh.size() != self.world_size)

    def _tell(self, trainer: "pl.Trainer") -> None:
        """One line, and the same for the loggers: what runs here, and how."""
        assert self.report is not None
        facts: dict[str, Any] = {
            "strategy": self.strategy_name,
            "precision": str(self.precision_plugin.precision),
            "fsdp2_units": len(self.report.units),
            "ranks": "x".join(str(size) for size in self.report.ranks),
            "gathered_bytes": self.report.gathered_bytes,
            "gathered_bytes_in_bf16": self.report.bf16_bytes,
        }
        line = f"{self.report}"
        converted = getattr(self.precision_plugin, "report", None)
        if converted is not None:
            recipe = converted.recipe
            facts |= {
                "fp8_recipe": recipe.name,
                "fp8_format": recipe.fp8_format,
                "fp8_emulated": recipe.emulate,
                "fp8_share": converted.fp8_share,
                "fp8_weights_gathered": self.report.fp8_weights,
            }
            emulated = ", emulated" if recipe.emulate else ""
            line = (
                f"FP8 recipe {recipe.name}, format {recipe.fp8_format}{emulated}, {converted.fp8_percent} of the"
                f" multiply-adds. {line}"
            )
        if facts != getattr(self, "_told", None):
            self._told = facts
            say(line)
            for logger in trainer.loggers:
                logger.log_hyperparams({f"fp8_rocm/{name}": value for name, value in facts.items()})

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.after_optimizer_step()
        if optimizer not in self._looked_at:
            self._looked_at.add(optimizer)
            packed = {key for state in optimizer.state.values() for key, each in state.items() if files.is_packed(each)}
            if packed:
                rank_zero_warn(
                    f"{type(optimizer).__name__} keeps its states {sorted(map(str, packed))} in tensors of a class of"
                    " its own, which no checkpoint can hold: saving will fail, unless with `save_weights_only=True`."
                )

    @contextmanager
    def _evaluation_step(self) -> Generator[None, None, None]:
        assert self.lightning_module is not None
        with self.step_of(self.lightning_module, weights_change=False, trains=False):
            yield

    def _share_buffers(self) -> None:
        assert self.lightning_module is not None
        sharding.broadcast_buffers(self.lightning_module)


class _Subprocesses(_SubprocessScriptLauncher):
    """Lightning's, that also hears what ``fit`` was called with."""

    def __init__(self, strategy: FSDP2FP8Strategy, *args: Any) -> None:
        super().__init__(*args)
        self._strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self._strategy._is_called(trainer, function, *args, **kwargs)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class _InPlace(_Launcher):
    """Starts nothing where ``torchrun`` or SLURM has, and hears what ``fit`` was called with."""

    def __init__(self, strategy: FSDP2FP8Strategy) -> None:
        self._strategy = strategy

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self._strategy._is_called(trainer, function, *args, **kwargs)
        return function(*args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        """Nothing was started."""


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


def _param_dtype(precision: Precision) -> torch.dtype | None:
    """In what dtype gathered parameters are computed with, under one of the precisions that FSDP2 can shard."""
    if isinstance(precision, FP8PrecisionMixin):
        return torch.bfloat16
    if type(precision) is Precision:
        return None
    if isinstance(precision, MixedPrecision | HalfPrecision) and precision.precision.startswith("bf16"):
        return torch.bfloat16
    raise ValueError(
        f'`strategy="fsdp2_fp8"` does not work with the precision {precision.precision!r}'
        f" ({type(precision).__name__}). Allowed: 'fp8-rocm', 'bf16-mixed', 'bf16-true', '32-true'."
    )
