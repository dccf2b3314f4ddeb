"""Which modules become units of FSDP2, which parameters each of them manages, and what FSDP2 cannot shard.

A unit is a module that ``fully_shard`` is called on: its parameters are gathered together before its forward. Nothing
here changes a module or needs a process: :func:`plan_units` chooses, :func:`owned_parameters` says what follows from
that, :func:`check_parameters` refuses what would fail or diverge, :func:`forward_methods` says how else a unit is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

AutoWrapPolicy = Literal["auto"] | Collection[type[nn.Module] | str] | Callable[[nn.Module], bool]

_POLICY_HELP = (
    "Allowed are 'auto', a collection of module classes or class names (`auto_wrap_policy={TransformerBlock}`,"
    " `auto_wrap_policy=['LlamaDecoderLayer']`), or a function that takes a module and returns True or False."
)

# Packages whose classes are infrastructure, with the methods of theirs that run the module nevertheless. What such a
# class calls its own is no forward, also where a model overrides it: `save_pretrained` on rank 0 alone would hang if it
# gathered, and a gathered parameter that is written to is thrown away.
_INFRASTRUCTURE: dict[str, frozenset[str]] = {
    "torch": frozenset({"log_prob", "predict"}),  # nn.AdaptiveLogSoftmaxWithLoss
    "lightning": frozenset(),
    "lightning_fabric": frozenset(),
    "pytorch_lightning": frozenset(),
    "lightning_fp8_rocm.float8": frozenset(),
    "torchmetrics": frozenset({"update", "compute"}),  # a metric with a network inside (FID, LPIPS)
    "transformers": frozenset({"generate"}),
    "peft": frozenset({"generate"}),
    "huggingface_hub": frozenset(),
    "accelerate": frozenset(),
}
_MODELS = "transformers.models"  # not infrastructure
_WRAPPERS = (FullyShardedDataParallel, nn.parallel.DistributedDataParallel, nn.DataParallel)
_INITIALISERS = frozenset({"reset_parameters", "init_weights"})  # write parameters, so they need the shards


@dataclass(frozen=True)
class Unit:
    """One module that ``fully_shard`` is called on.

    Args:
        name: Fully-qualified name of the module, the first one if it has several; ``""`` for the root.
        module: The module.
        kind: ``"block"`` for what the policy chose, ``"child"`` for what stands directly below the root, ``"root"``.
    """

    name: str
    module: nn.Module
    kind: Literal["block", "child", "root"]


# ---------------------------------------------------------------------------------------------------------------------
# Classes and their methods


def _classes(module: nn.Module) -> list[type]:
    """The classes of ``module`` as its author wrote them: without those that ``fully_shard`` puts in front.

    >>> [cls.__name__ for cls in _classes(nn.LayerNorm(4))]
    ['LayerNorm', 'Module', 'object']
    """
    mro = list(type(module).__mro__)
    return mro[mro.index(FSDPModule) + 1 :] if FSDPModule in mro else mro


def class_name(module: nn.Module) -> str:
    """Name of the class that the author of ``module`` wrote.

    >>> class_name(nn.Linear(2, 2))
    'Linear'
    """
    return _classes(module)[0].__name__


def _infrastructure(cls: type) -> str | None:
    """The package of infrastructure that defines ``cls``; None for the class of a model.

    >>> _infrastructure(nn.ModuleList), _infrastructure(Unit)
    ('torch', None)
    """
    where = cls.__module__ + "."
    if where.startswith(_MODELS + "."):
        return None
    return next((package for package in _INFRASTRUCTURE if where.startswith(package + ".")), None)


def _implements_forward(module: nn.Module) -> bool:
    """Whether calling ``module`` does something, so that FSDP2 can gather before it.

    >>> _implements_forward(nn.Sequential()), _implements_forward(nn.ModuleList())
    (True, False)
    """
    if "forward" in vars(module):
        return True
    owner = next(cls for cls in _classes(module) if "forward" in vars(cls))
    # LightningModule defines one that calls the one of nn.Module, which raises.
    return owner is not nn.Module and not _is_lightning_module(owner)


def _is_lightning_module(cls: type) -> bool:
    return cls.__name__ == "LightningModule" and _infrastructure(cls) is not None


def has_steps(module: nn.Module) -> bool:
    """Whether ``module`` is a LightningModule, of either name of Lightning, whose steps are called, not its forward.

    >>> has_steps(nn.Linear(2, 2))
    False
    """
    return any(_is_lightning_module(cls) for cls in _classes(module))


def forward_methods(module: nn.Module) -> list[str]:
    """Names of the public methods that use the parameters of ``module`` like ``forward`` does.

    For ``register_fsdp_forward_method``: ``vae.encode``, ``clip.get_image_features``, ``model.generate``. They are the
    functions (no properties, static or class methods) that the module's own classes define. Names that a base class of
    PyTorch, Lightning, torchmetrics, transformers, PEFT or ``huggingface_hub`` defines are left out, overridden or not
    (``save_pretrained``, ``get_input_embeddings``, ``training_step``), and so are ``reset_parameters`` and
    ``init_weights``, which write. The answer is the same before and after ``fully_shard``.

    Args:
        module: Any module, sharded or not.

    Returns:
        The names in the order of the classes (most derived first), then of definition.

    Example:
        >>> class VAE(nn.Module):
        ...     def encode(self, x): ...
        ...     def decode(self, z): ...
        ...     def forward(self, x): return self.decode(self.encode(x))
        ...     def half(self): return self
        >>> forward_methods(VAE())
        ['encode', 'decode']
    """
    classes = _classes(module)
    skipped = {"forward", *_INITIALISERS, *dir(nn.Module), *dir(FSDPModule)}
    wanted: set[str] = set()
    for cls in classes:
        package = _infrastructure(cls)
        if package is not None:
            skipped.update(vars(cls))
            wanted.update(_INFRASTRUCTURE[package] & vars(cls).keys())
    skipped -= wanted
    names = dict.fromkeys(name for cls in classes for name in vars(cls))
    return [
        name
        for name in names
        if not name.startswith("_")
        and name not in skipped
        and isinstance(inspect.getattr_static(classes[0], name), FunctionType)
    ]


def _can_be_unit(module: nn.Module) -> bool:
    """Whether something of ``module`` is called: its forward or a method of its own.

    ``fully_shard`` refuses a ModuleList or ModuleDict without a forward whatever its methods are.

    >>> _can_be_unit(nn.Linear(2, 2)), _can_be_unit(nn.ModuleDict()), _can_be_unit(nn.ParameterList())
    (True, False, False)
    """
    if type(module).__hash__ is not nn.Module.__hash__:
        return False  # FSDP2 keeps what it knows of a module by its hash, and that of a metric changes with its states
    if _implements_forward(module):
        return True
    return not isinstance(module, nn.ModuleList | nn.ModuleDict) and bool(forward_methods(module))


# ---------------------------------------------------------------------------------------------------------------------
# Walking the tree


def _chains(root: nn.Module) -> Iterator[tuple[nn.Module, ...]]:
    """Every way from ``root`` down to a module, both ends included; a shared module is reached several ways.

    >>> shared = nn.ReLU()
    >>> [len(chain) for chain in _chains(nn.Sequential(shared, nn.Sequential(shared)))]
    [1, 2, 2, 3]
    """
    stack: list[tuple[nn.Module, ...]] = [(root,)]
    while stack:
        chain = stack.pop()
        yield chain
        children = [child for child in chain[-1]._modules.values() if child is not None]
        stack.extend((*chain, child) for child in reversed(children))


def _registrations(root: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, ...]]]:
    """For each parameter the chains of modules that it is registered under: one, or more where it is tied.

    >>> embed, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    >>> head.weight = embed.weight
    >>> [len(chains) for chains in _registrations(nn.Sequential(embed, head)).values()]
    [2]
    """
    found: dict[nn.Parameter, list[tuple[nn.Module, ...]]] = {}
    for chain in _chains(root):
        for parameter in chain[-1]._parameters.values():
            if parameter is not None:
                found.setdefault(parameter, []).append(chain)
    return found


def _innermost_first(root: nn.Module) -> list[nn.Module]:
    """Every module once, after all that are below it.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    >>> [class_name(module) for module in _innermost_first(net)]
    ['Linear', 'ReLU', 'Sequential', 'Sequential']
    """
    ordered: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child not in ordered:
                visit(child)
        ordered[module] = None

    visit(root)
    return list(ordered)


def _without_outward_ties(root: nn.Module, candidates: set[nn.Module], sharded: set[nn.Module]) -> list[nn.Module]:
    """The candidates that would manage no parameter which is also registered outside them, innermost first.

    Such a unit would hide the parameter from every other unit: ``fully_shard`` on an ancestor skips nested units, so
    whoever else uses the parameter would keep a plain one. What is ``sharded`` already stays.

    >>> embed, norm, head = nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 8, bias=False)
    >>> head.weight = embed.weight
    >>> net = nn.Sequential(embed, norm, head)
    >>> _without_outward_ties(net, {embed, norm, head, net}, set()) == [norm, net]
    True
    """
    tied = [chains for chains in _registrations(root).values() if len(chains) > 1]
    units = set(sharded)

    def hides(module: nn.Module, chains: list[tuple[nn.Module, ...]]) -> bool:
        if any(not units.isdisjoint(chain) for chain in chains):
            return False  # a unit inside manages it, for instance a block that is registered twice as a whole
        inside = [module in chain for chain in chains]
        return any(inside) and not all(inside)

    ordered = []
    for module in _innermost_first(root):
        if module in sharded or (module in candidates and not any(hides(module, chains) for chains in tied)):
            ordered.append(module)
            units.add(module)
    return ordered


def _managers(root: nn.Module, units: Sequence[nn.Module]) -> dict[nn.Parameter, nn.Module]:
    """The unit that manages each parameter: the innermost one around it, in the order in which they are sharded.

    >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2, bias=False))
    >>> [class_name(unit) for unit in _managers(net, [net[0], net]).values()]
    ['Linear', 'Sequential']
    """
    order = {module: index for index, module in enumerate(units)}
    return {
        parameter: min(
            (next(module for module in reversed(chain) if module in order) for chain in chains),
            key=order.__getitem__,
        )
        for parameter, chains in _registrations(root).items()
    }


def _has_parameters(module: nn.Module) -> bool:
    """Whether there is a parameter in or below ``module``.

    >>> _has_parameters(nn.Sequential(nn.ReLU())), _has_parameters(nn.Linear(2, 2))
    (False, True)
    """
    return next(module.parameters(), None) is not None


# ---------------------------------------------------------------------------------------------------------------------
# Choosing blocks


def _no_split_classes(module: nn.Module) -> frozenset[str] | None:
    """Class names that a Hugging Face model wants whole; None if ``module`` is no such model.

    transformers writes them on the class as None, a list, a tuple or a set, and merges those of the submodels into a
    set on the instance when its ``post_init`` runs.

    >>> _no_split_classes(nn.Linear(2, 2)) is None
    True
    """
    if not hasattr(module, "_no_split_modules"):
        return None
    declared = module._no_split_modules
    if isinstance(declared, str):
        return frozenset({declared})
    return frozenset(declared) if isinstance(declared, list | tuple | set | frozenset) else frozenset()


def _is_block_list(module: nn.Module) -> bool:
    """Whether ``module`` is a list of at least two blocks of one class.

    A list of bare layers is none: whoever owns it may read their weights without calling them.

    >>> _is_block_list(nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)))
    True
    >>> _is_block_list(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)))
    False
    """
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
        return False
    entries = list(module)
    return len({_classes(entry)[0] for entry in entries}) == 1 and all(
        _has_parameters(entry) and any(True for _ in entry.children()) for entry in entries
    )


def _callable_modules(module: nn.Module) -> Iterator[nn.Module]:
    """``module``, or, if nobody calls it, the modules nearest below that are called.

    >>> norm, layer = nn.LayerNorm(2), nn.Linear(2, 2)
    >>> list(_callable_modules(nn.ModuleDict({"norm": norm, "more": nn.ModuleList([layer])}))) == [norm, layer]
    True
    """
    if _can_be_unit(module):
        yield module
        return
    for child in module.children():
        yield from _callable_modules(child)


def _auto_blocks(root: nn.Module) -> list[nn.Module]:
    """The repeated blocks of ``root``: those that Hugging Face models name, elsewhere the entries of repeated lists.

    >>> class Layer(nn.Sequential):
    ...     pass
    >>> class Pretrained(nn.Module):
    ...     _no_split_modules = ["Layer"]
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first = Layer(nn.Linear(2, 2))
    ...         self.rest = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    >>> model = Pretrained()
    >>> _auto_blocks(model) == [model.first]
    True
    >>> list_of_blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    >>> _auto_blocks(nn.Sequential(list_of_blocks)) == list(list_of_blocks)
    True
    """

    def walk(module: nn.Module, names: frozenset[str], is_covered: bool) -> Iterator[nn.Module]:
        declared = _no_split_classes(module)
        if declared is not None:
            names = names | declared
            below = module.modules()
            next(below)  # the model itself
            is_covered = any(class_name(child) in names for child in below)
        is_list = not is_covered and _is_block_list(module)
        for child in module.children():
            if is_list or class_name(child) in names:
                # Not walked further: a list inside a block may hold experts, and ranks may call different ones.
                yield from (found for found in _callable_modules(child) if found is child or any(found.children()))
            else:
                yield from walk(child, names, is_covered)

    return list(dict.fromkeys(walk(root, frozenset(), is_covered=False)))


def _chosen_blocks(root: nn.Module, policy: AutoWrapPolicy) -> list[nn.Module]:
    """The modules below ``root`` that the policy names.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.LayerNorm(2)))
    >>> _chosen_blocks(net, {"LayerNorm", nn.Linear}) == [net[0], net[1][0]]
    True
    >>> _chosen_blocks(net, lambda module: isinstance(module, nn.Sequential)) == [net[1]]
    True
    """
    below = [module for module in root.modules() if module is not root]
    if isinstance(policy, Collection):
        chosen = _matching_modules(below, policy)
    else:
        chosen = [module for module in below if _ask(policy, module)]
    names = {module: name for name, module in root.named_modules()}
    silent = [f"{names[module]!r} ({class_name(module)})" for module in chosen if not _can_be_unit(module)]
    if silent:
        raise ValueError(
            "Expected argument `auto_wrap_policy` to choose modules that are called, but it chose"
            f" {', '.join(silent)}, which have no forward: FSDP2 gathers parameters when a module is called. Choose the"
            " modules inside."
        )
    return chosen


def is_of(module: nn.Module, entry: type[nn.Module] | str) -> bool:
    """Whether ``module`` is of this class, or of a class of this name.

    >>> is_of(nn.ReLU(), "ReLU"), is_of(nn.ReLU(), nn.Linear)
    (True, False)
    """
    return entry in {cls.__name__ for cls in _classes(module)} if isinstance(entry, str) else isinstance(module, entry)


def _matching_modules(modules: Sequence[nn.Module], wanted: Collection[type[nn.Module] | str]) -> list[nn.Module]:
    """The modules of these classes, or of classes of these names; each entry must match one.

    >>> [class_name(module) for module in _matching_modules([nn.ReLU(), nn.Linear(2, 2)], ["Linear"])]
    ['Linear']
    """
    chosen: set[nn.Module] = set()
    for entry in wanted:
        matching = [module for module in modules if is_of(module, entry)]
        if not matching:
            present = list(dict.fromkeys(map(class_name, modules)))
            shown = ", ".join(present[:20]) + (", ..." if len(present) > 20 else "")
            raise ValueError(
                f"The entry {entry if isinstance(entry, str) else entry.__name__!r} in `auto_wrap_policy` matches no"
                f" module below the root. Classes there: {shown or 'none'}."
            )
        chosen.update(matching)
    return [module for module in modules if module in chosen]


def _ask(policy: Callable[[nn.Module], bool], module: nn.Module) -> bool:
    """What the function says about ``module``.

    >>> _ask(lambda module: isinstance(module, nn.Linear), nn.ReLU())
    False
    """
    answer = policy(module)
    if not isinstance(answer, bool):
        raise TypeError(
            "Expected the function in argument `auto_wrap_policy` to return True or False, but for a"
            f" {class_name(module)} it returned {answer!r}."
        )
    return answer


def _check_policy(policy: object) -> None:
    """Refuse what is no policy.

    >>> _check_policy(nn.Linear)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: Expected argument `auto_wrap_policy` to be ..., but got the class Linear: put it into a set. Allowed...
    """
    expected = "Expected argument `auto_wrap_policy` to be 'auto', a collection or a function, but got"
    if policy == "auto":
        return
    if isinstance(policy, str):
        raise TypeError(f"{expected} {policy!r}: put a class name into a list. {_POLICY_HELP}")
    if isinstance(policy, type):
        raise TypeError(f"{expected} the class {policy.__name__}: put it into a set. {_POLICY_HELP}")
    if isinstance(policy, Collection) and not isinstance(policy, Mapping | nn.Module):
        for entry in policy:
            if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, nn.Module)):
                raise TypeError(f"{expected} the entry {entry!r}. {_POLICY_HELP}")
        return
    if not callable(policy) or isinstance(policy, nn.Module):
        raise TypeError(f"{expected} {policy!r}. {_POLICY_HELP}")
    if not _takes_one_argument(policy):
        raise TypeError(
            f"{expected} {policy!r}, which cannot be called with one module; the policies of FSDP1"
            f" (`ModuleWrapPolicy`, `transformer_auto_wrap_policy`) are not those of FSDP2. {_POLICY_HELP}"
        )


def _takes_one_argument(function: Callable[..., object]) -> bool:
    """Whether ``function(module)`` is a call that Python accepts.

    >>> _takes_one_argument(lambda module: True), _takes_one_argument(lambda module, recurse: True)
    (True, False)
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without one
        return True
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Units


def plan_units(root: nn.Module, policy: AutoWrapPolicy = "auto") -> list[Unit]:
    """Which modules of ``root`` become units, in the order in which to call ``fully_shard``.

    First the blocks that the policy chooses, then every direct child of ``root`` that still owns parameters (a
    container without a forward gives its entries instead), then ``root``, which holds what is left. Every unit except
    the root manages at least one parameter. A module with a parameter that is tied to one outside of it is no unit, so
    that tied parameters lie in one: the smallest unit around all of them. A module that is sharded already stays a
    unit, and nothing else below it becomes one.

    Args:
        root: Any module, for instance a LightningModule; also one on the ``meta`` device.
        policy: What the strategy calls ``auto_wrap_policy``.

            - ``"auto"``: the modules that a Hugging Face model lists in ``_no_split_modules``; elsewhere the entries of
              each outermost ``ModuleList`` or ``Sequential`` of at least two modules of one class that have parameters
              and child modules.
            - A collection of classes and class names: their instances, nested ones too.
            - A function, asked for each module below the root.

    Returns:
        The units, innermost first, the root last.

    Raises:
        TypeError: If ``policy`` is something else.
        ValueError: If an entry of ``policy`` matches no module, or a module was chosen that has no forward.

    Example:
        >>> from collections import OrderedDict
        >>> blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
        >>> net = nn.Sequential(OrderedDict(embed=nn.Embedding(16, 8), blocks=blocks, head=nn.Linear(8, 16)))
        >>> [(unit.name, unit.kind) for unit in plan_units(net)]
        [('embed', 'child'), ('blocks.0', 'block'), ('blocks.1', 'block'), ('head', 'child'), ('', 'root')]
        >>> net.head.weight = net.embed.weight
        >>> [unit.name for unit in plan_units(net)]
        ['blocks.0', 'blocks.1', '']
    """
    _check_policy(policy)
    blocks = set(_auto_blocks(root) if policy == "auto" else _chosen_blocks(root, policy))
    children = {found for child in root.children() for found in _callable_modules(child)}
    sharded: set[nn.Module] = {module for module in root.modules() if isinstance(module, FSDPModule)}
    inside_sharded = {below for module in sharded for below in module.modules()}
    candidates = ((blocks | children) - inside_sharded) | {root}
    ordered = _without_outward_ties(root, candidates, sharded)
    in_use = set(_managers(root, ordered).values()) | sharded | {root}
    names = {module: name for name, module in root.named_modules()}

    def kind(module: nn.Module) -> Literal["block", "child", "root"]:
        if module is root:
            return "root"
        return "child" if module in children and module not in blocks else "block"

    return [Unit(names[module], module, kind(module)) for module in ordered if module in in_use]


def owned_parameters(units: Sequence[Unit]) -> dict[str, list[str]]:
    """Fully-qualified names of the parameters that each unit manages.

    The rule is that of ``fully_shard``: all parameters below the module, except those below a nested unit. A tied
    parameter counts once, under the name that ``named_parameters`` gives it.

    Args:
        units: What :func:`plan_units` returned: innermost first, the root last.

    Returns:
        The names by the unit's name, in the order of ``units``; empty for a root with nothing left.

    Raises:
        ValueError: If the last unit is not the root.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        >>> net.register_parameter("scale", nn.Parameter(torch.ones(1)))
        >>> owned_parameters(plan_units(net))
        {'0': ['0.weight', '0.bias'], '1': ['1.weight', '1.bias'], '': ['scale']}
    """
    root = _root_of(units)
    managers = _managers(root, [unit.module for unit in units])
    unit_names = {unit.module: unit.name for unit in units}
    owned: dict[str, list[str]] = {unit.name: [] for unit in units}
    for name, parameter in root.named_parameters():
        owned[unit_names[managers[parameter]]].append(name)
    return owned


def _root_of(units: Sequence[Unit]) -> nn.Module:
    """The module of the last unit, which is the root.

    >>> _root_of(plan_units(nn.Linear(2, 2)))
    Linear(in_features=2, out_features=2, bias=True)
    """
    if not units or units[-1].kind != "root":
        raise ValueError(
            "Expected argument `units` to be what `plan_units` returned, the root last, but got"
            f" {[unit.name for unit in units]!r}."
        )
    return units[-1].module


# ---------------------------------------------------------------------------------------------------------------------
# What FSDP2 cannot take


def check_parameters(root: nn.Module, units: Sequence[Unit], *, manual_optimization: bool) -> None:
    """Refuse parameters that FSDP2 cannot shard, or would silently not train.

    Args:
        root: The module that ``units`` were planned for.
        units: What :func:`plan_units` returned.
        manual_optimization: Whether the module steps its optimizers itself, so that the backward runs inside the
            root's forward. What the root unit manages would then never change, and no error would say so.

    Raises:
        ValueError: For modules wrapped by FSDP1 or DDP, uninitialised lazy parameters, DTensors of the user's own
            (tensor parallelism), parameters without a dimension, with complex values, or not contiguous in memory,
            trainable parameters of different dtypes in one unit, and, under manual optimization, parameters of the
            root unit. All offenders are named.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2))
        >>> check_parameters(net, plan_units(net), manual_optimization=True)
        >>> net.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
        >>> check_parameters(net, plan_units(net), manual_optimization=False)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: FSDP2 cannot train this module as it is:
          - 'temperature' has no dimension to shard: register it with shape (1,), ...
    """
    if _root_of(units) is not root:
        raise ValueError(
            f"Expected argument `units` to be planned for argument `root`, a {class_name(root)}, but their root is"
            f" another module, a {class_name(units[-1].module)}: call `plan_units(root)`."
        )
    parameters = dict(root.named_parameters())
    owned = owned_parameters(units)
    problems = [
        f"{name or 'the root'!r} is wrapped by {type(module).__name__}, which keeps or reduces parameters by itself:"
        " leave that out, this strategy shards the module inside."
        for name, module in root.named_modules()
        if isinstance(module, _WRAPPERS)
    ]
    problems += [
        problem
        for unit in units
        for name in owned[unit.name]
        if (problem := _why_unshardable(name, parameters[name], unit.module)) is not None
    ]
    for unit in units:
        problems += _mixed_dtypes(unit, {name: parameters[name] for name in owned[unit.name]})
    if manual_optimization:
        problems += _untrained_under_manual_optimization(root, owned[""])
    if problems:
        raise ValueError("\n  - ".join(["FSDP2 cannot train this module as it is:", *problems]))


def _why_unshardable(name: str, parameter: nn.Parameter, unit: nn.Module) -> str | None:
    """Why FSDP2 cannot take this parameter, and the way out; None if it can.

    Sources: ``_verify_managed_param`` in ``torch/distributed/fsdp/_fully_shard/_fsdp_init.py`` and
    ``_init_sharded_param`` in ``_fsdp_param.py``.

    >>> layer = nn.LazyLinear(4)
    >>> _why_unshardable("weight", layer.weight, layer)  # doctest: +ELLIPSIS
    "'weight' is not initialised yet (a lazy module): run one forward pass ..."
    """
    if is_lazy(parameter):
        return (
            f"{name!r} is not initialised yet (a lazy module): run one forward pass with a sample batch in `__init__`"
            " or `configure_model`, or give the layer its sizes."
        )
    if isinstance(parameter, DTensor):
        if isinstance(unit, FSDPModule):
            return None  # what the user sharded is the user's
        return (
            f"{name!r} is a DTensor over {parameter.device_mesh}: the module is parallelised already (tensor"
            " parallelism), and this strategy shards over all ranks. Leave that out, or call `fully_shard` on that"
            " part in `configure_model` as well."
        )
    if parameter.dim() == 0:
        attribute = name.rpartition(".")[2]
        return (
            f"{name!r} has no dimension to shard: register it with shape (1,), in a module that is not yours by"
            f" `owner.{attribute} = nn.Parameter(owner.{attribute}.detach().reshape(1))` before training."
        )
    if parameter.is_complex() and parameter.requires_grad:
        return (
            f"{name!r} is complex ({parameter.dtype}), and gradients are reduced in a real dtype: register"
            " `torch.view_as_real` of it and use `torch.view_as_complex` in forward, or freeze it."
        )
    if not parameter.is_contiguous():
        return (
            f"{name!r} is not contiguous in memory (shape {tuple(parameter.shape)}, stride {parameter.stride()}): set"
            " `parameter.data = parameter.data.contiguous()` before training."
        )
    return None


def _mixed_dtypes(unit: Unit, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """What is wrong with the dtypes of a unit: the gradients of a unit are reduced together, in one dtype.

    Source: ``_init_mp_dtypes`` in ``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``. Frozen parameters may
    differ.

    >>> net = nn.Linear(2, 2)
    >>> net.bias.data = net.bias.data.bfloat16()
    >>> _mixed_dtypes(Unit("", net, "root"), dict(net.named_parameters()))  # doctest: +ELLIPSIS
    ["The root unit has trainable parameters of different dtypes: float32 ('weight'), bfloat16 ('bias'). ..."]
    """
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad and not parameter.is_complex():
            by_dtype.setdefault(parameter.dtype, []).append(name)
    if len(by_dtype) < 2:
        return []
    listed = ", ".join(
        f"{str(dtype).removeprefix('torch.')} ({', '.join(map(repr, names))})" for dtype, names in by_dtype.items()
    )
    where = f"unit {unit.name!r}" if unit.name else "root unit"
    return [
        f"The {where} has trainable parameters of different dtypes: {listed}. FSDP2 reduces the gradients of a unit in"
        " one dtype: convert them to one, freeze those that differ, or make them a unit of their own by"
        " `auto_wrap_policy`."
    ]


def _untrained_under_manual_optimization(root: nn.Module, names: Sequence[str]) -> list[str]:
    """What the root unit manages, with the way out for each.

    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.scale = nn.Parameter(torch.ones(1))
    >>> _untrained_under_manual_optimization(Model(), ["scale"])  # doctest: +ELLIPSIS
    ["'scale' belongs to the root, ... put it into a submodule that is called."]
    """
    registrations = _registrations(root)
    parameters = dict(root.named_parameters())
    users = {root: "the root itself", **{child: repr(name) for name, child in root.named_children()}}
    problems = []
    for name in names:
        tied = dict.fromkeys(users[chain[:2][-1]] for chain in registrations[parameters[name]])
        if len(tied) > 1:
            way_out = f"it is there because {' and '.join(tied)} share it: put them into one submodule that is called"
        else:
            way_out = "put it into a submodule that is called"
        problems.append(
            f"{name!r} belongs to the root, and with `automatic_optimization=False` it would never change: FSDP2"
            " reduces gradients of a unit behind the unit's forward, and a manual backward runs inside the root's;"
            f" {way_out}."
        )
    return problems
