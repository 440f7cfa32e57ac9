"""Tensor plan: which linear layers tensor-parallel ranks divide, and which modules they compute together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

# Private: torch has no public name for rows that are divided in several blocks, as those of one layer for queries,
# keys and values are.
from torch.distributed.tensor.placement_types import _StridedShard

from trainkit.errors import UserError
from trainkit.model.transforms import modules_named

Kind = Literal["columns", "qkv", "rows", "replicate"]
TensorPlan: TypeAlias = Literal["auto"] | Mapping[str, Kind]
KINDS = ("columns", "qkv", "rows", "replicate")
MIB = 2**20
_MOST_LAYERS = 12  # of a block; larger modules are not one pattern


@dataclass(frozen=True)
class Division:
    """How a tensor is divided over tensor-parallel ranks.

    dim=0             rank 0 [ a ]      rank 1 [ b ]
    dim=0, blocks=3   rank 0 [ a c e ]  rank 1 [ b d f ]
    """

    dim: int
    blocks: int = 1

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return the part of one of `size` ranks, a copy."""
        return torch.cat([block.chunk(size, self.dim)[rank] for block in whole.chunk(self.blocks, self.dim)], self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor whose parts are given in the order of ranks."""
        blocks = zip(*(part.chunk(self.blocks, self.dim) for part in parts), strict=True)
        return torch.cat([part for block in blocks for part in block], self.dim)

    def part_shape(self, whole: torch.Size, size: int) -> torch.Size:
        """Return the shape of the part of one of `size` ranks."""
        return torch.Size(width // size if dim == self.dim else width for dim, width in enumerate(whole))

    def whole_shape(self, part: torch.Size, size: int) -> torch.Size:
        """Return the shape of the tensor of which each of `size` ranks has a part."""
        return torch.Size(width * size if dim == self.dim else width for dim, width in enumerate(part))

    @property
    def placement(self) -> Placement:
        """The same in torch's words."""
        return Shard(self.dim) if self.blocks == 1 else _StridedShard(self.dim, split_factor=self.blocks)


_meshes = itertools.count()


def mesh_names(*dimensions: str) -> tuple[str, ...]:
    """Return names for the dimensions of a mesh that no other mesh of this process has.

    DTensor keeps meshes by what they contain, and names are a part of it: those of a run that has ended, whose groups
    are gone, would be taken for the present ones.
    """
    number = next(_meshes)
    return tuple(f"{dimension}_{number}" for dimension in dimensions)


@dataclass(frozen=True)
class TensorUnit:
    """A module that tensor-parallel ranks compute together."""

    name: str
    module: nn.Module
    kinds: Mapping[str, Kind]
    """Of its linear layers, by their names in the task."""


def divisions(layer: nn.Linear, kind: Kind) -> dict[str, Division]:
    """Return how the parameters of a layer are divided; the others are whole on every rank."""
    if kind == "rows":  # of the matrix that multiplies from the right, as papers write it
        return {"weight": Division(1)}
    division = Division(0, 3 if kind == "qkv" else 1)
    return {"weight": division} if layer.bias is None else {"weight": division, "bias": division}


def choose_tensor_units(task: nn.Module, plan: TensorPlan, *, size: int) -> list[TensorUnit]:
    """Return the modules that `size` ranks compute together.

    A layer with `columns` gives each rank some of its outputs, and one with `rows` takes them: between them there is no
    message. Megatron-LM (Shoeybi et al., 2019) has this pattern. `auto` finds pairs of layers whose widths fit, and
    their number of features can be divided:

        columns (widen), rows (shrink)                       a network of two layers
        columns (gate), columns (up), rows (down)            a gated one
        columns (query), columns (key), columns (value), rows (output)    attention
        qkv (queries, keys and values in one layer), rows (output)

    Raises UserError for a plan with unknown names, kinds or layers that cannot be divided.
    """
    shared = _shared_parameters(task)
    layers = {
        name: module
        for name, module in task.named_modules()
        if isinstance(module, nn.Linear)
        # Not a parametrized one, whose weight is computed from others; a hook would get a part of the gradient.
        and isinstance(module._parameters.get("weight"), nn.Parameter)
        and not any(id(parameter) in shared or _has_hooks(parameter) for parameter in module.parameters())
    }
    kinds = _kinds_by_widths(task, layers, size) if plan == "auto" else _named_kinds(task, plan, layers, size)
    units: dict[str, dict[str, Kind]] = {}
    for name in kinds:
        units.setdefault(_unit_of(task, name, kinds), {})[name] = kinds[name]
    # A unit inside another one is computed with it.
    outer = [name for name in units if not any(name.startswith(f"{other}.") for other in units)]
    return [
        TensorUnit(
            name,
            task.get_submodule(name),
            {layer: kind for layer, kind in kinds.items() if f"{layer}.".startswith(f"{name}.")},
        )
        for name in outer
    ]


def describe_tensor_units(units: Sequence[TensorUnit], task: nn.Module, *, size: int) -> str:
    """Return the table of the divided layers, and the memory of parameters on a rank before they are sharded."""
    rows = [
        (layer, kind, unit.name, sum(p.nbytes for p in task.get_submodule(layer).parameters()))
        for unit in units
        for layer, kind in unit.kinds.items()
    ]
    width = max([len(layer) for layer, *_ in rows], default=5)
    lines = [f"{'layer':<{width}}  {'divided':<9}  {'MiB':>8}  computed in"]
    lines += [f"{layer:<{width}}  {kind:<9}  {num_bytes / MIB:8.2f}  {unit}" for layer, kind, unit, num_bytes in rows]
    divided, total = sum(row[3] for row in rows), sum(parameter.nbytes for parameter in task.parameters())
    lines.append(
        f"tensor_parallel={size}: {divided / MIB:.2f} of {total / MIB:.2f} MiB are divided, "
        f"{(total - divided + divided / size) / MIB:.2f} MiB for each tensor-parallel rank"
    )
    return "\n".join(lines)


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _shared_parameters(task: nn.Module) -> set[int]:
    """Return the ids of parameters that several modules hold: one of them might use it as a whole."""
    holders: dict[int, int] = {}
    for module in task.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return {key for key, count in holders.items() if count > 1}


def _unit_of(task: nn.Module, layer: str, kinds: Mapping[str, Kind]) -> str:
    """Return the name of the smallest module around a layer with outputs and inputs that are divided, or the layer's.

    Activations stay divided inside it.
    """
    name = layer
    while "." in name:
        name = name.rpartition(".")[0]
        present = {kind for other, kind in kinds.items() if other.startswith(f"{name}.")}
        # A list of modules has no forward of its own. The task's steps are not its forward.
        has_forward = type(task.get_submodule(name)).forward is not nn.Module.forward
        if "rows" in present and len(present) > 1 and has_forward:
            return name
    return layer


def _named_kinds(
    task: nn.Module, plan: Mapping[str, Kind], layers: Mapping[str, nn.Linear], size: int
) -> dict[str, Kind]:
    chosen: dict[str, Kind] = {}
    named = {name: module for name, module in task.named_modules() if isinstance(module, nn.Linear)}
    for pattern, kind in plan.items():
        for name in modules_named("tensor_plan", [pattern], dict(named), "linear layer"):
            layer = named[name]
            chosen.pop(name, None)  # a later pattern counts
            if kind == "replicate":
                continue
            if name not in layers:
                raise UserError(
                    f"tensor_plan: {name} cannot be divided, as another module has one of its parameters too, it is "
                    f"parametrized, or its parameters have hooks. Leave it out, or set {name}: replicate."
                )
            divided = layer.in_features if kind == "rows" else layer.out_features
            if divided % (3 * size if kind == "qkv" else size):
                raise UserError(
                    f"tensor_plan: {size} ranks cannot divide {name} by {kind}, which has {divided} "
                    f"{'inputs' if kind == 'rows' else 'outputs'}. Leave it out, or set another "
                    "strategy.tensor_parallel."
                )
            chosen[name] = kind
    return {name: chosen[name] for name in named if name in chosen}  # in the order of the task


def _kinds_by_widths(task: nn.Module, layers: Mapping[str, nn.Linear], size: int) -> dict[str, Kind]:
    chosen: dict[str, Kind] = {}
    modules = [(name, module) for name, module in task.named_modules() if name]
    # torch's attention uses the weights of its layers without calling them.
    of_torch = [f"{name}." for name, module in modules if isinstance(module, nn.MultiheadAttention)]
    callable_layers = [key for key in layers if not key.startswith(tuple(of_torch))]
    # Inner modules first, so that layers of one pair are not taken for those of two.
    for name, module in sorted(modules, key=lambda item: -item[0].count(".")):
        inside = [key for key in callable_layers if key.startswith(f"{name}.")]
        if not 1 < len(inside) <= _MOST_LAYERS:
            continue
        left = [key for key in inside if key not in chosen]
        while left:
            pattern = _pattern_of([layers[key] for key in left], size, is_chain=isinstance(module, nn.Sequential))
            chosen |= dict(zip(left, pattern, strict=False))
            left = left[len(pattern) or 1 :]
    # A layer whose partner is in no module with it would only add messages.
    return {name: chosen[name] for name in layers if name in chosen and _unit_of(task, name, chosen) != name}


def _pattern_of(layers: Sequence[nn.Linear], size: int, *, is_chain: bool) -> tuple[Kind, ...]:
    """Return the kinds of the first layers if they belong together, else nothing; those of a chain run in turn."""

    def is_divisible(*widths: int) -> bool:
        return all(width % size == 0 for width in widths)

    if not is_chain and len(layers) > 3:
        query, key, value, output = layers[:4]
        has_same_input = key.in_features == value.in_features
        is_grouped = key.out_features == value.out_features and query.out_features % key.out_features == 0
        if has_same_input and is_grouped and query.out_features == output.in_features:
            return ("columns", "columns", "columns", "rows") if is_divisible(key.out_features) else ()
    if not is_chain and len(layers) > 2:
        gate, up, down = layers[:3]
        has_same_input = gate.in_features == up.in_features != gate.out_features
        if has_same_input and gate.out_features == up.out_features == down.in_features:
            return ("columns", "columns", "rows") if is_divisible(down.in_features) else ()
    if len(layers) > 1:
        first, second = layers[:2]
        # Of square layers those of attention might be taken for two that follow each other.
        is_pair = first.out_features == second.in_features and (is_chain or first.in_features != first.out_features)
        if is_pair and is_divisible(second.in_features):
            return "columns", "rows"
        if first.out_features == 3 * second.in_features and is_divisible(second.in_features):
            return "qkv", "rows"
    return ()
