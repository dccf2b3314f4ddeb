"""FSDP2's weight all-gather in FP8: the marked shard that travels in one byte an element, and who keeps its scale.

After ``fully_shard`` the local shard of an FP8 weight becomes a :class:`MarkedShard`: ordinary storage, no table of
ops, and the two hooks by which FSDP2 lets a tensor choose what travels. So optimizers, clipping and checkpoints see an
ordinary tensor. What arrives is a :class:`~lightning_fp8_rocm.float8.gathered.GatheredWeight`.

============ ============================= ==================================== ===================================
granularity  scale                         collective for it                    on the wire
============ ============================= ==================================== ===================================
``"tensor"`` one for the weight            one all-reduce of all amaxes at once  1 byte an element
``"row"``    one for each row, which one   none                                 1 byte an element, 4 bytes a row
             rank holds whole
============ ============================= ==================================== ===================================

When a weight is quantised. There is no cache that a write could make stale:

* Within a step (:meth:`FP8AllGather.step`, under automatic optimization) weights do not change. All scales are made
  anew when it begins, and each weight is cast once, however often it is gathered.
* At any other time, and under manual optimization, where an optimizer may step between two forwards, a forward gather
  makes scale and bytes anew, with one all-reduce for a unit.
* A gather in backward takes the bytes of its forward; after a forward outside of a step it casts again, by the same
  scale of the tensor.

Letters: N rows (out_features), K columns, W ranks of the shard mesh, P = ceil(N / W) rows on the wire of each rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from lightning_fp8_rocm.distributed import fsdp
from lightning_fp8_rocm.float8.gathered import GatheredWeight
from lightning_fp8_rocm.float8.linear import FP8Linear
from lightning_fp8_rocm.float8.quantize import cast, quantize, scales_of


class MarkedShard(Tensor):
    """The local shard of an FP8 weight: an ordinary tensor that FSDP2 gathers in FP8.

    Every operation on it gives an ordinary tensor, and so does pickling it.
    """

    weight: "_Weight"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(tensor: Tensor, weight: "_Weight") -> "MarkedShard":
        """``tensor`` under another class; the storage is the same."""
        shard = tensor.detach().as_subclass(MarkedShard)
        shard.weight = weight
        return shard

    @override
    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """FSDP2 moves an offloaded shard to the GPU and then asks it what to gather."""
        moved: Tensor = super().to(*args, **kwargs)
        return moved if moved is self else MarkedShard.of(moved, self.weight)

    # One argument, the older form of this hook: with five, FSDP2 refuses inputs of another size than the padded shard,
    # which the scales of rows are.
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What this rank sends: ``(P, K)`` bytes, and ``(P,)`` fp32 scales of rows; and the scale of the tensor."""
        return self.weight.to_send(self.detach())

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], scale: Tensor | None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Make the weight of what all ranks sent; later gathers come in the same storage, as ``out`` shows it."""
        return self.weight.received(outputs, scale, param_dtype, out)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().clone()


@dataclass(eq=False)
class _Weight:
    """One weight that travels in FP8, as this rank sees it."""

    name: str
    param: fsdp.Param
    group: fsdp.Group
    layer: FP8Linear
    gathers: "FP8AllGather"
    siblings: "list[_Weight]" = field(default_factory=list)
    """All such weights of its FSDP unit, in the order in which FSDP2 gathers them."""
    scale: Tensor | None = None
    sent: tuple[Tensor, ...] | None = None
    due: int = 0
    """Gathers in backward that will still want the bytes."""

    @property
    def dtype(self) -> torch.dtype:
        recipe = self.layer.fp8_recipe
        assert recipe.output is not None
        return recipe.dtype(recipe.output.right)

    @property
    def is_row_scaled(self) -> bool:
        return self.layer.fp8_recipe.gather_granularity == "row"

    def mark(self) -> None:
        shard = fsdp.local_shard(self.param)
        if not isinstance(shard, MarkedShard):
            fsdp.set_local_shard(self.param, MarkedShard.of(shard, self))

    def forget(self) -> None:
        self.scale, self.sent, self.due = None, None, 0

    def to_send(self, shard: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        in_backward = torch._C._current_graph_task_id() != -1
        is_known = self.sent is not None and (in_backward or self.gathers.in_step)
        if not is_known:
            self._cast(shard, in_backward)
        assert self.sent is not None
        sent, scale = self.sent, None if self.is_row_scaled else self.scale
        _read_here(*sent)  # a user's `module.unshard()` casts on another stream than forward and backward
        if in_backward:
            self.due -= 1
        elif self.gathers.expects_backward and fsdp.is_gathered_in_backward(self.group):
            self.due += 1
        if self.due <= 0 and not self.gathers.in_evaluation_step:
            self.sent = None  # nobody will ask again; held, they would be a copy of the model
            self.due = 0
        return sent, scale

    def _cast(self, shard: Tensor, in_backward: bool) -> None:
        recipe = self.layer.fp8_recipe
        rows = fsdp.full_shape(self.param)[0]
        missing = -(-rows // fsdp.shard_mesh(self.param).size()) - shard.shape[0]
        if self.is_row_scaled:
            # A rank without rows sends zeros; amax over no columns would be an error, and there always are some.
            data, scales = quantize(shard, self.dtype, row_dim=-1, power_of_2=recipe.power_of_2_scales)
            scales = torch.cat([scales, scales.new_ones(missing, 1)]) if missing else scales
            self.sent = (_pad_rows(data.view(torch.uint8), missing), scales.view(-1))
            return
        is_fresh = self.scale is not None and (in_backward or self.gathers.in_step or self is not self.siblings[0])
        if not is_fresh:
            # FSDP2 asks the weights of a unit in their order: the first asks for all, in one collective.
            _agree_on_scales(self.siblings)
        assert self.scale is not None
        self.sent = (_pad_rows(cast(shard, self.scale, self.dtype).view(torch.uint8), missing),)

    def received(
        self, outputs: tuple[Tensor, ...], scale: Tensor | None, param_dtype: torch.dtype, out: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        if scale is not None:
            _read_here(scale)  # made on the stream of FSDP2's copy-in, unless it is one of a step
        if out is not None:
            assert isinstance(out, GatheredWeight)
            if scale is not None:
                out._scale = scale
            return None
        rows = fsdp.full_shape(self.param)[0]
        data = outputs[0].view(self.dtype)[:rows]
        of_rows = outputs[1][:rows].unsqueeze(-1) if scale is None else scale
        return GatheredWeight(data, of_rows, param_dtype), outputs


def _read_here(*tensors: Tensor) -> None:
    """Let no one have their memory, once they are let go of, before the current stream has read it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _pad_rows(data: Tensor, missing: int) -> Tensor:
    return torch.cat([data, data.new_zeros(missing, data.shape[1])]) if missing else data


@torch.no_grad()
def _agree_on_scales(weights: list[_Weight]) -> None:
    """Give tensorwise weights the scale of the whole tensor: one all-reduce for each group of ranks, which is one.

    Every element of a weight that holds a NaN or an infinity becomes NaN on every rank.
    """
    for group, members in _by_group(weights).items():
        device = members[0].param.device
        # Fused over all weights; it takes no empty shards, whose amax is 0.
        shards = [fsdp.local_shard(weight.param).detach() for weight in members]
        filled = [shard for shard in shards if shard.numel()]
        found = iter(torch._foreach_norm(filled, float("inf")) if filled else [])
        zero = torch.zeros((), device=shards[0].device)
        amaxes = torch.stack([next(found).float() if shard.numel() else zero for shard in shards]).to(device)
        # gloo's MAX drops NaN, and a scale of 0 makes NaN of everything just as well.
        amaxes = amaxes.nan_to_num(nan=float("inf"), posinf=float("inf"))
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
        for weight, scale in zip(members, _scales(members, amaxes), strict=True):
            weight.scale = scale


def _scales(weights: list[_Weight], amaxes: Tensor) -> list[Tensor]:
    # One kind, unless the user converted parts of the model under recipes of his own.
    kinds = [(weight.dtype, weight.layer.fp8_recipe.power_of_2_scales) for weight in weights]
    of_kind = {kind: scales_of(amaxes, kind[0], power_of_2=kind[1]).unbind() for kind in set(kinds)}
    return [of_kind[kind][place] for place, kind in enumerate(kinds)]


def _by_group(weights: list[_Weight]) -> dict[dist.ProcessGroup, list[_Weight]]:
    groups: dict[dist.ProcessGroup, list[_Weight]] = {}
    for weight in weights:
        groups.setdefault(fsdp.shard_mesh(weight.param).get_group(), []).append(weight)
    return groups


class FP8AllGather:
    """The weights of a sharded model that travel in FP8.

    Args:
        root: A model after ``fully_shard``; its FP8 layers are looked at, no others.

    Attributes:
        in_bf16: Names of FP8 layers whose weight travels in bf16, each with the reason.
    """

    def __init__(self, root: nn.Module) -> None:
        self.is_stepping = self.in_step = self.in_evaluation_step = self.expects_backward = False
        self.in_bf16: dict[str, str] = {}
        self._weights: list[_Weight] = []
        layers = {child: name for name, child in root.named_modules() if isinstance(child, FP8Linear)}
        for group in fsdp.groups(root):
            of_unit = []
            for param in group.fsdp_params:
                layer = fsdp.owner(param)
                if not isinstance(layer, FP8Linear) or layer.weight is not param.sharded_param:
                    continue
                reason = _why_in_bf16(layer, param)
                if reason is None:
                    of_unit.append(_Weight(layers[layer], param, group, layer, self))
                else:
                    self.in_bf16[layers[layer]] = reason
            for weight in of_unit:
                weight.siblings = [other for other in of_unit if not other.is_row_scaled]
            self._weights += of_unit
        for weight in self._weights:
            weight.mark()
            fsdp.reset_gathered(weight.param)

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def names(self) -> list[str]:
        """Fully-qualified names of the layers whose weight travels in FP8."""
        return [weight.name for weight in self._weights]

    @property
    def is_row_scaled(self) -> bool:
        """Whether scales of rows travel with the weights."""
        return any(weight.is_row_scaled for weight in self._weights)

    def mark(self) -> None:
        """Set the marks that ``.to(dtype)`` or ``load_state_dict(assign=True)`` dropped; nothing is communicated."""
        for weight in self._weights:
            weight.mark()

    def unmark(self) -> None:
        """Make all shards ordinary tensors, that travel in the compute dtype."""
        for weight in self._weights:
            weight.forget()
            fsdp.set_local_shard(weight.param, fsdp.local_shard(weight.param).detach().as_subclass(Tensor))
            fsdp.reset_gathered(weight.param)
        self._weights.clear()

    def forget(self) -> None:
        """Drop scales and bytes, after weights changed."""
        for weight in self._weights:
            weight.forget()

    @contextmanager
    def step(self, *, weights_change: bool) -> Iterator[None]:
        """The span of one step of a LightningModule, forward and what backward it holds.

        Args:
            weights_change: Whether an optimizer may step within it: manual optimization.
        """
        self.mark()
        self.forget()
        tensorwise = [weight for weight in self._weights if not weight.is_row_scaled]
        if not weights_change and tensorwise:
            _agree_on_scales(tensorwise)
        self.is_stepping, self.in_step = True, not weights_change
        # FSDP2 gathers under `no_grad`, so a gather itself cannot ask.
        self.expects_backward = torch.is_grad_enabled()
        self.in_evaluation_step = self.in_step and not self.expects_backward
        try:
            yield
        finally:
            if self.in_evaluation_step:
                self.forget()  # no backward will ask
            self.is_stepping = self.in_step = self.in_evaluation_step = self.expects_backward = False


def _why_in_bf16(layer: FP8Linear, param: fsdp.Param) -> str | None:
    mesh = fsdp.shard_mesh(param)
    if mesh.size() == 1:
        return "its rows lie on one rank: nothing is gathered"
    if layer.fp8_recipe.gather_granularity is None:
        return "two products of its recipe cast the weight differently"
    weight = param.sharded_param
    if not isinstance(weight, DTensor) or weight.placements[-1] != Shard(0):
        return f"it is not sharded by rows ({getattr(weight, 'placements', 'no DTensor')})"
    return None
