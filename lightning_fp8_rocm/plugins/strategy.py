"""What our Strategy does, written once for every flavour of Lightning: ranks, sharding, and the span of a step.

When it does what is said by ``trainer.py`` and ``fabric.py``. No Lightning is imported, nor torchao: constructing a
strategy is too early for that. What is private in Lightning and is called here, as its own strategies call it:
``_init_dist_connection``, ``_get_default_process_group_backend_for_device``, ``_sync_ddp_if_available``.
"""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args
from weakref import WeakSet

import torch
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_fp8_rocm import hardware
from lightning_fp8_rocm.distributed import checkpoint as files
from lightning_fp8_rocm.distributed import fsdp, publish, sharding, storage, units
from lightning_fp8_rocm.distributed.faults import Watcher, raise_together, same_on_all_ranks
from lightning_fp8_rocm.distributed.materialise import check_materialisable
from lightning_fp8_rocm.distributed.model import GradientSync, ShardedModel, ShardingReport
from lightning_fp8_rocm.distributed.saver import Saver
from lightning_fp8_rocm.distributed.units import AutoWrapPolicy
from lightning_fp8_rocm.hardware import Hardware
from lightning_fp8_rocm.plugins.console import log, say
from lightning_fp8_rocm.plugins.flavour import Flavour
from lightning_fp8_rocm.plugins.precision import FP8PrecisionMixin, check_choice

if TYPE_CHECKING:
    # Annotations of these are quoted: see recipe.py.
    from lightning_fp8_rocm.float8.convert import ConversionReport

T = TypeVar("T")

_STRATEGY = "FSDP2FP8Strategy"
_FSDP1 = {
    "accelerator": "`{entry}(accelerator=...)`",
    "parallel_devices": "`{entry}(devices=...)`",
    "cluster_environment": "`{entry}(plugins=[...])`",
    "checkpoint_io": "nothing: checkpoints are written by torch.distributed.checkpoint",
    "precision_plugin": "`{entry}(precision=...)` or `{entry}(plugins=[FP8Precision(...)])`",
    "mixed_precision": "`{entry}(precision=...)`, and `reduce_dtype` for the dtype in which gradients are reduced",
    "activation_checkpointing": "`activation_checkpointing_policy`",
    "sharding_strategy": "`reshard_after_forward=True` (FULL_SHARD), `reshard_after_forward=False` (SHARD_GRAD_OP),"
    " `device_mesh=(replicate, shard)` (HYBRID_SHARD), or `strategy='ddp'` (NO_SHARD)",
    "limit_all_gathers": "nothing: FSDP2 always limits them",
    "use_orig_params": "nothing: FSDP2 always keeps the original parameters",
    "sync_module_states": "nothing: every rank starts with the values of rank 0",
    "param_init_fn": "a method `reset_parameters()` on modules that are built on the `meta` device",
    "ignored_modules": "nothing: a parameter outside FSDP2 would diverge; freeze it instead",
    "ignored_states": "nothing: a parameter outside FSDP2 would diverge; freeze it instead",
    "ignored_params": "nothing: a parameter outside FSDP2 would diverge; freeze it instead",
    "ignored_parameters": "nothing: a parameter outside FSDP2 would diverge; freeze it instead",
    "device_id": "`{entry}(accelerator=..., devices=...)`",
    "process_group": "`device_mesh`",
    "mesh": "`device_mesh`",
    "dp_mesh_dims": "`device_mesh`",
    "mp_policy": "`{entry}(precision=...)`, and `reduce_dtype` for the dtype in which gradients are reduced",
    "offload_policy": "`cpu_offload`",
    "shard_placement_fn": "nothing: the rows of a weight lie whole on one rank, which row scales need",
    "use_fp8_all_gather": "`fp8_all_gather`",
    "save_distributed_checkpoint": "`state_dict_type`",
    "data_parallel_size": "`device_mesh=(replicate, shard)`",
    "tensor_parallel_size": "nothing: tensor parallelism is not supported",
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

ReduceDtype = Literal["float32", "bfloat16"]
StateDictType = Literal["sharded", "full"]


class FSDP2StrategyMixin:
    """FSDP2 for any module, with the weights of FP8 layers gathered in FP8.

    The precision is that of the Trainer or of Fabric: ``"fp8-rocm"`` for FP8, ``"bf16-mixed"``, ``"bf16-true"`` or
    ``"32-true"`` for the same sharding without it. Constructing it asks no device and imports no torchao.

    Args:
        auto_wrap_policy: Which modules are gathered and freed together. ``"auto"``: the blocks of a model
            (``_no_split_modules`` of a Hugging Face model, else the entries of each repeated ``ModuleList``); a
            collection of classes or class names; or a function from a module to a bool. Direct children of the
            module that hold further parameters are units besides.
        activation_checkpointing_policy: What is recomputed in backward. ``"full"``: the blocks; ``"selective"``: the
            blocks, but for every second matrix product, attention and the amaxes; or classes or class names.
        fp8_all_gather: Whether the weights of FP8 layers travel in FP8. ``"auto"``: where the recipe allows;
            ``True``: an error where it does not.
        device_mesh: ``(replicate, shard)``: each ``shard`` ranks hold one copy of the model (HSDP). None: all ranks
            together hold one.
        reshard_after_forward: Whether gathered parameters are freed between forward and backward. None is torch's own
            choice: all but the outermost unit's.
        reduce_dtype: In which gradients are summed over ranks.
        cpu_offload: Keep shards, gradients and optimizer states in the host's memory.
        compile: Compile each block with ``torch.compile``. ``"auto"``: on GPUs; or the arguments of ``torch.compile``.
        gradient_sync: Under ``accumulate_grad_batches``, and within ``fabric.no_backward_sync``, reduce gradients at
            the ``"last"`` batch alone (keeps whole gradients until then), or at ``"every"`` one (keeps shards).
        forward_prefetch: How many blocks ahead parameters are gathered in forward; None is torch's own.
        backward_prefetch: The same in backward.
        find_unused_parameters: For models whose ranks use different parameters of a unit (experts): reduce zeros for
            those without a gradient. Optimizers then see a zero gradient, not None, for what no rank used. Without it,
            such a model is an error, which is looked for in the first steps and every 100.
        state_dict_type: ``"sharded"``: a checkpoint is a directory to which each rank writes its part. ``"full"``: one
            file, as on one device.
        async_checkpoint: Whether training goes on while a checkpoint is written. It waits only until its copy in memory
            of the host is made; the next checkpoint, the end of training and an exception wait for the writing.
        process_group_backend: ``"nccl"`` (RCCL) on GPUs and ``"gloo"`` on CPUs by default.
        timeout: After which a collective that a rank does not join is an error.

    Raises:
        TypeError: For an argument that FSDP2 does not have, naming what to use instead.
        ValueError: For a value that is not allowed.
    """

    _flavour: Flavour  # of a concrete class
    # For messages.
    _entry: str
    _mesh_exists: str
    _saving_weights_alone: str
    # What every Strategy of Lightning has, Trainer's and Fabric's.
    accelerator: Any
    cluster_environment: Any
    parallel_devices: Any
    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int

    strategy_name = "fsdp2_fp8"

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
        known = [name for name in inspect.signature(type(self)).parameters if name != "others"]
        for name in others:
            raise TypeError(
                f"{_STRATEGY} has no argument `{name}`. Use {_FSDP1[name].format(entry=self._entry)} instead."
                if name in _FSDP1
                else f"{_STRATEGY} got an unexpected argument `{name}`. It has {', '.join(map(repr, known))}."
            )
        _check_policies(auto_wrap_policy, activation_checkpointing_policy)
        check = _for_strategy
        check("fp8_all_gather", fp8_all_gather, ("auto", True, False))
        smaller = isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool)
        hint = " Resharding to a smaller group of ranks does not work with weights gathered in FP8." if smaller else ""
        check("reshard_after_forward", reshard_after_forward, (None, True, False), hint)
        check("reduce_dtype", reduce_dtype, get_args(ReduceDtype))
        check("cpu_offload", cpu_offload, (True, False))
        if not isinstance(compile, dict):
            check(
                "compile", compile, ("auto", True, False), " A dict of arguments of `torch.compile` is taken as well."
            )
        check("gradient_sync", gradient_sync, get_args(GradientSync))
        check("find_unused_parameters", find_unused_parameters, (True, False))
        check("state_dict_type", state_dict_type, get_args(StateDictType))
        check("async_checkpoint", async_checkpoint, (True, False))
        for name, depth in (("forward_prefetch", forward_prefetch), ("backward_prefetch", backward_prefetch)):
            if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 0):
                raise ValueError(
                    f"Expected argument `{name}` of {_STRATEGY} to be None or a number of blocks >= 0,"
                    f" but got {depth!r}."
                )
        check_process_group(process_group_backend, timeout)
        super().__init__()  # of Lightning, which refuses nothing
        self.auto_wrap_policy: AutoWrapPolicy = auto_wrap_policy
        self.activation_checkpointing_policy = activation_checkpointing_policy
        self.fp8_all_gather = fp8_all_gather
        self.mesh_sizes = _check_mesh(device_mesh)
        self.reshard_after_forward, self.reduce_dtype, self.cpu_offload = (
            reshard_after_forward,
            reduce_dtype,
            cpu_offload,
        )
        self.compile, self.gradient_sync = compile, gradient_sync
        self.forward_prefetch, self.backward_prefetch = forward_prefetch, backward_prefetch
        self.find_unused_parameters = find_unused_parameters
        self.state_dict_type, self.async_checkpoint = state_dict_type, async_checkpoint
        self.report: ShardingReport | None = None
        """Units and bytes of what was set up last; None before setup."""
        self.num_nodes = 1
        self._process_group_backend, self._timeout = process_group_backend, timeout
        self._mesh: DeviceMesh | None = None
        self._watcher = Watcher()
        self._saver = Saver()
        self._looked_at: WeakSet[Optimizer] = WeakSet()

    # ---- who and where

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_processes(self) -> int:
        """Processes of this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank gets batches of its own."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all ranks."""
        if self._mesh is None:
            raise RuntimeError(f"The device mesh exists {self._mesh_exists}.")
        return self._mesh

    @property
    def process_group_backend(self) -> str | None:
        """The backend in use, or the one that was asked for."""
        return self._process_group_backend

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero functions which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        functions: list[Any] = [self._flavour.of_fabric("utilities.rank_zero").rank_zero_only, rank_zero_only]
        for function in functions:
            function.rank = self.global_rank

    # ---- processes

    def check_device(self) -> None:
        """Before a process group is made.

        Raises:
            ValueError: It is neither a GPU of ROCm or CUDA nor a CPU.
        """
        if self.root_device.type not in ("cuda", "cpu"):
            raise ValueError(
                f"{type(self).__name__} runs on GPUs (ROCm, CUDA) and CPUs, but the device is {self.root_device}."
            )

    def connect_ranks(self) -> None:
        """Make the process group and the mesh, and begin to watch the other ranks; all ranks together."""
        device = self.root_device
        self._flavour.of_fabric("utilities.seed").reset_seed()
        self.set_world_ranks()
        if device.type == "cuda":
            set_environment(hardware.of_device(device))
        distributed = self._flavour.of_fabric("utilities.distributed")
        if self._process_group_backend is None:
            backend = distributed._get_default_process_group_backend_for_device(device)
            # The norm of gradients that lie in the host's memory is reduced there.
            self._process_group_backend = (
                f"cpu:gloo,cuda:{backend}" if self.cpu_offload and backend != "gloo" else backend
            )
        distributed._init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device if device.type != "cpu" else None,
        )
        makes_group = self._mesh is None or self._mesh_is_of_another_group()
        if makes_group:
            self._mesh = sharding.make_mesh(device.type, self.world_size, self.mesh_sizes)
        self._watcher.start()
        if makes_group:
            self._saver.prepare()

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if not self._is_connected():
            return
        if torch.distributed.get_backend() == "nccl":
            torch.distributed.barrier(device_ids=[self.root_device.index])
        else:
            torch.distributed.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """What rank ``src`` passes, on all ranks."""
        if not self._is_connected():
            return obj
        box = [obj]
        torch.distributed.broadcast_object_list(box, src)
        return box[0]

    def _reduced(self, value: Any, group: Any, reduce_op: Any) -> Any:
        reduce = self._flavour.of_fabric("utilities.distributed")._sync_ddp_if_available
        return reduce(value, group, reduce_op=reduce_op) if isinstance(value, Tensor) else value

    @staticmethod
    def _is_connected() -> bool:
        return torch.distributed.is_available() and torch.distributed.is_initialized()

    def _mesh_is_of_another_group(self) -> bool:
        """Whether the process group was destroyed and made anew since the mesh was made."""
        assert self._mesh is not None
        try:
            self._mesh.get_group(0) if self._mesh.ndim == 1 else self._mesh.get_group("shard")
        except (RuntimeError, ValueError, KeyError):
            return True
        return bool(self._mesh.size() != self.world_size)

    # ---- setup

    def compiles_on(self, device: torch.device) -> bool:
        """Whether blocks are compiled there."""
        return device.type == "cuda" if self.compile == "auto" else self.compile is not False

    def shard_module(
        self,
        model: ShardedModel,
        convert: Callable[[nn.Module], nn.Module],
        *,
        param_dtype: torch.dtype | None,
        steps_are_called: bool,
        manual_optimization: bool = False,
    ) -> None:
        """Convert, materialise, checkpoint, compile and shard the root of ``model``, in that order.

        What has been sharded before, by an earlier stage or by the user, is left as it is.

        Args:
            model: Of :meth:`new_model`.
            convert: What the precision makes of a module, in place.
            param_dtype: In which gathered parameters are computed with; None for the dtype that they have.
            steps_are_called: Whether what is called of the root are the steps of a LightningModule, which get batches
                as they were made: then it casts nothing itself.
            manual_optimization: Whether an optimizer steps within the training step.
        """
        from lightning_fp8_rocm.float8.linear import FP8Linear

        root, device = model.root, self.root_device
        with raise_together("the setup of the model"):
            convert(root)
            planned = units.plan_units(root, self.auto_wrap_policy)
            units.check_parameters(root, planned, manual_optimization=manual_optimization)
            check_materialisable(root)
            mesh = fsdp.mesh_of(root) or self._mesh
            assert mesh is not None
            plan = sharding.ShardingPlan(
                mesh=mesh,
                device=device,
                param_dtype=param_dtype,
                reduce_dtype=_DTYPES[self.reduce_dtype],
                reshard_after_forward=self.reshard_after_forward,
                cpu_offload=self.cpu_offload,
                casts_root=not steps_are_called,
            )
            sharding.check_sharded_before(planned, plan)
        recipes = {layer.fp8_recipe for layer in root.modules() if isinstance(layer, FP8Linear)}
        same_on_all_ranks(sorted(recipe.describe() for recipe in recipes), "the FP8 recipe and format")
        with raise_together("the setup of the model"):
            if self.activation_checkpointing_policy is not None:
                model.undo.append(sharding.checkpoint_activations(planned, root, self.activation_checkpointing_policy))
            blocks = [unit for unit in planned if unit.kind == "block"]
            if self.compiles_on(device) and (blocks or self.compile != "auto"):
                options = self.compile if isinstance(self.compile, dict) else {}
                rows = any(recipe.row_scaled for recipe in recipes)
                model.undo.append(sharding.compile_blocks(planned, options, emulate_precision_casts=rows))
        sharding.shard(planned, plan)
        sharding.move_others(root, device)
        model.undo.append(sharding.cast_inputs_of_layers(root))
        if self.forward_prefetch is not None or self.backward_prefetch is not None:
            sharding.prefetch(planned, self.forward_prefetch, self.backward_prefetch)
        model.begin()
        with raise_together("the setup of the model"):
            model.mark(self.fp8_all_gather, recipes)
        self.report = model.describe()

    def new_model(self, root: nn.Module) -> ShardedModel:
        """What will be known of ``root`` when it is sharded."""
        return ShardedModel(root, gradient_sync=self.gradient_sync, find_unused_parameters=self.find_unused_parameters)

    def facts_of_setup(self, precision: Any, converted: "ConversionReport | None") -> tuple[str, dict[str, Any]]:
        """What runs here, and how: one line for a person, and the same for loggers."""
        assert self.report is not None
        facts: dict[str, Any] = {
            "strategy": self.strategy_name,
            "precision": str(precision),
            "fsdp2_units": len(self.report.units),
            "ranks": "x".join(str(size) for size in self.report.ranks),
            "gathered_bytes": self.report.gathered_bytes,
            "gathered_bytes_in_bf16": self.report.bf16_bytes,
        }
        line = f"{self.report}"
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
        return line, facts

    def param_dtype_of(self, precision: Any, plugins: Any) -> torch.dtype | None:
        """In what dtype gathered parameters are computed with, under one of the precisions that FSDP2 can shard.

        Args:
            precision: The plugin.
            plugins: The module of Lightning that has the classes of precisions.

        Raises:
            ValueError: It is another precision.
        """
        if isinstance(precision, FP8PrecisionMixin):
            return torch.bfloat16
        if type(precision) is plugins.Precision:
            return None
        if isinstance(precision, plugins.MixedPrecision | plugins.HalfPrecision) and precision.precision.startswith(
            "bf16"
        ):
            return torch.bfloat16
        raise ValueError(
            f'`strategy="fsdp2_fp8"` does not work with the precision {precision.precision!r}'
            f" ({type(precision).__name__}). Allowed: 'fp8-rocm', 'bf16-mixed', 'bf16-true', '32-true'."
        )

    # ---- checkpoints

    @property
    def _saves_one_file(self) -> bool:
        return self.state_dict_type == "full"

    def _versions(self) -> dict[str, Any]:
        return {"version": version("lightning-fp8-rocm"), "torch": str(torch.__version__)}

    @contextmanager
    def verified(self, path: Path) -> Iterator[Path]:
        """The span in which all ranks read a checkpoint, without collectives; gives where it is.

        Raises:
            FileNotFoundError: Nothing is there.
            ValueError: It is damaged, or no checkpoint.
            ReplacedError: Another process replaced it meanwhile.
            DistributedError: Ranks see different ones, or what one raised in the span, on all ranks.
        """
        found, notice = self.broadcast(publish.find(path))
        before: tuple[int, ...] = ()
        with raise_together(f"loading {path}"):
            storage.check_readable(found)
            before = storage.identity(found)
        if notice is not None:
            rank_zero_warn(notice)
        self._saver.check_sound(found)
        with raise_together(f"loading {path}"), storage.unchanged(found):
            if storage.identity(found) != before:
                raise storage.replaced(found)
            yield found

    @staticmethod
    def warn_unless_verified(found: Path, own: Mapping[str, Any] | None) -> None:
        """Say of a directory of ours that it could not be checked."""
        if own is not None and found.is_dir() and not (found / publish.MANIFEST_NAME).is_file():
            rank_zero_warn(
                f"The checkpoint {str(found)!r} has lost its {publish.MANIFEST_NAME}: it was loaded without being"
                " verified. Copy all files of a checkpoint."
            )

    def own_part_of(self, own: Mapping[str, Any]) -> dict[str, Any] | None:
        """What this rank itself saved; None, and a word of it, where other ranks saved."""
        ranks = own.get("ranks")
        if ranks is None:
            return None
        if len(ranks) != self.world_size:
            say(
                f"The checkpoint was saved by {len(ranks)} rank(s) and is loaded by {self.world_size}: random numbers"
                " start anew, batches are divided otherwise, and a dataloader that saves its state gets that of rank 0."
            )
            return None
        part: dict[str, Any] = ranks[self.global_rank]
        return part

    def _wait_for_the_last_checkpoint(self) -> None:
        """Where something else is to be raised, or nothing any more."""
        try:
            self._saver.wait()
        except Exception as error:
            log.error("%s", error)

    def _look_at_states(self, optimizer: Optimizer) -> None:
        """After its first step: say now that its states cannot be saved, not hours later."""
        if optimizer in self._looked_at:
            return
        self._looked_at.add(optimizer)
        packed = {key for state in optimizer.state.values() for key, each in state.items() if files.is_packed(each)}
        if packed:
            rank_zero_warn(
                f"{type(optimizer).__name__} keeps its states {sorted(map(str, packed))} in tensors of a class of its"
                f" own, which no checkpoint can hold: saving will fail, {self._saving_weights_alone}."
            )


def _for_strategy(argument: str, value: object, allowed: Sequence[object], hint: str = "") -> None:
    check_choice(argument, value, allowed, hint, owner=_STRATEGY)


def _check_policies(auto_wrap: object, checkpointing: object) -> None:
    def are_classes(value: object) -> bool:
        return (
            isinstance(value, set | frozenset | list | tuple)
            and len(value) > 0
            and all(
                isinstance(entry, str) or (isinstance(entry, type) and issubclass(entry, nn.Module)) for entry in value
            )
        )

    is_function = callable(auto_wrap) and not isinstance(auto_wrap, type | nn.Module)
    if auto_wrap != "auto" and not are_classes(auto_wrap) and not is_function:
        raise TypeError(
            f"Expected argument `auto_wrap_policy` of {_STRATEGY} to be 'auto', a set of module classes or class names,"
            f" or a function that takes a module and returns a bool, but got {auto_wrap!r}."
        )
    if checkpointing not in (None, "full", "selective") and not are_classes(checkpointing):
        raise TypeError(
            f"Expected argument `activation_checkpointing_policy` of {_STRATEGY} to be None, 'full', 'selective', or a"
            f" set of module classes or class names, but got {checkpointing!r}."
        )


def _check_mesh(sizes: object) -> tuple[int, int] | None:
    if sizes is None:
        return None
    if (
        not isinstance(sizes, tuple | list)
        or len(sizes) != 2
        or not all(type(size) is int and size > 0 for size in sizes)
    ):
        raise ValueError(
            f"Expected argument `device_mesh` of {_STRATEGY} to be None or a pair (replicate, shard) of numbers of"
            f" ranks, but got {sizes!r}."
        )
    return sizes[0], sizes[1]


def check_process_group(backend: object, timeout: object) -> None:
    """Refuse what `init_process_group` would only refuse on every rank, after the launch."""
    if backend is not None and (not isinstance(backend, str) or not backend):
        raise TypeError(
            f"Expected argument `process_group_backend` of {_STRATEGY} to be None or the name of a backend ('nccl',"
            f" 'gloo', 'cpu:gloo,cuda:nccl'), but got {backend!r}."
        )
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(
            f"Expected argument `timeout` of {_STRATEGY} to be None or a `datetime.timedelta`, but got {timeout!r}."
        )


def set_environment(on: Hardware) -> dict[str, str]:
    """Set what AMD advises for ``on``, where the user has not; before the process group starts.

    Returns:
        The variables that were set.
    """
    made = {name: value for name, value in on.environment().items() if name not in os.environ}
    os.environ.update(made)
    if made:
        shown = " ".join(f"{name}={value}" for name, value in made.items())
        say(f"Environment for {on.name} ({on.arch}), where it was not set: {shown}")
    return made
