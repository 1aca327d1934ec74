"""Which parameters travel together: units from the module tree, flats by dtype and trainability.

Checks that every parameter is one that can be stored; touches no value.

Note [Cuts]: "auto" cuts by these rules; classes or a predicate replace the first.

1. From the root down, the parameter-owning children of a ModuleList or Sequential, if they are two or
   more of one class, are units, and nothing inside a unit is cut. A child that is itself a list without
   a forward is cut further if this rule cuts it. A ModuleDict's children are no units by this rule.
2. Of the rest, a module below the root that itself owns 1 Mi elements or more is a unit. It is kept
   if other units lie beneath it, since it is in use while they come and go.
3. Parameters that modules of different units, or different modules of the rest, share are a unit, kept;
   shared ones with an owner in common are one. The owners' other parameters stay where they are.
4. What is left is the root unit, kept.

A module object that is registered twice within one unit, or as a unit, or in the rest, is no tie: it
has one place, and its unit is entered as often as it is called. Only where it lies in two units is it
tied by rule 3.

A module without a forward (ParameterList, ModuleDict, a bare holder) can't be hooked: what reads its
parameters is the nearest module around it with one, its *reader*. Names are the first ones that
`named_modules()` gives.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from nvoffload.errors import ConfigError
from nvoffload.layout import ALIGN, Flat, Layout, ParameterSpec, choose_tile_numel, cut_tiles, lay_units

TRAINABLE_DTYPES = (torch.float32, torch.bfloat16)
UNIT_NUMEL_MIN = 1 << 20
ROOT_NAME = "(root)"
# A tied unit is named after this many of its modules.
TIED_NAMES_MAX = 3


@dataclass(frozen=True, slots=True)
class Cut:
    """One unit before it is laid out: "blocks.3"; tied, "embed + head"; the rest, "(root)".

    `modules` names those whose forward needs the unit, where hooks sit: the unit's own, and each
    reader of one of its parameters. `params` index `named_parameters`, ascending.
    """

    name: str
    modules: tuple[str, ...]
    params: tuple[int, ...]
    is_kept: bool


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by name, tied ones once."""
    return dict(module.named_parameters())


def is_dense(tensor: torch.Tensor) -> bool:
    """Do the elements fill one run of memory, each once, in any order?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def owners_of(module: nn.Module, params: dict[str, nn.Parameter]) -> list[list[tuple[str, str]]]:
    """Return, per parameter, every (module name, attribute) that registers it, each module once."""
    indices = {id(param): index for index, param in enumerate(params.values())}
    owners: list[list[tuple[str, str]]] = [[] for _ in params]
    for name, owner in module.named_modules():
        for attribute, param in owner._parameters.items():
            if id(param) in indices:
                owners[indices[id(param)]].append((name, attribute))
    return owners


def cut_units(module: nn.Module, params: dict[str, nn.Parameter], units: Any = "auto") -> list[Cut]:
    """Cut `params` into units by Note [Cuts], each in exactly one, in the order of first appearance.

    `units` is "auto", a class, a collection of classes, or a predicate of (name, module); raise
    ConfigError if it is none of these or matches nothing.
    """
    if not params:
        return []
    chosen = _chosen(module, units)
    names = {child: name for name, child in module.named_modules()}
    places = _places(module, names, params, chosen)
    numels = [param.numel() for param in params.values()]
    tied, homes = [], dict[str, list[int]]()
    for index, found in enumerate(places):
        if len({place.home for place in found}) > 1:
            tied.append(index)
        else:
            homes.setdefault(found[0].home, []).append(index)
    root = homes.pop("", [])
    for home in [home for home in homes if home not in chosen]:
        if sum(numels[i] for i in homes[home]) < UNIT_NUMEL_MIN:
            root += homes.pop(home)
    rank = {name: position for position, name in enumerate(names.values())}

    def readers_of(indices: Iterable[int]) -> list[str]:
        return sorted({place.reader for i in indices for place in places[i]}, key=rank.__getitem__)

    units_by_module = {child: homes[name] for child, name in names.items() if name in homes}
    cuts = []
    for at, indices in units_by_module.items():
        modules = dict.fromkeys([*(names[entry] for entry in _entries(at)), *readers_of(indices)])
        is_kept = any(inner is not at and inner in units_by_module for inner in at.modules())
        cuts.append(Cut(names[at], tuple(modules), tuple(indices), is_kept))
    for indices in _ties(tied, places):
        readers = readers_of(indices)
        cuts.append(Cut(_tied_name(readers), tuple(readers), tuple(indices), is_kept=True))
    if root:
        modules = dict.fromkeys(["", *readers_of(root)])
        cuts.append(Cut(ROOT_NAME, tuple(modules), tuple(sorted(root)), is_kept=True))
    assert sorted(i for cut in cuts for i in cut.params) == list(range(len(params)))
    return sorted(cuts, key=lambda cut: cut.params[0])


def build_layout(
    params: dict[str, nn.Parameter],
    buffer_bytes: int | None,
    cuts: Sequence[Cut],
    *,
    rank: int = 0,
    num_ranks: int = 1,
) -> Layout:
    """Return a rank's layout of `params`, one unit per cut; raise ConfigError naming one that cannot be stored."""
    for name, param in params.items():
        _check(name, param)
    _check_overlap(params)
    specs = [
        ParameterSpec(name, tuple(p.shape), tuple(p.stride()), _dtype_name(p), p.numel()) for name, p in params.items()
    ]
    flats = [
        flat for unit, cut in enumerate(cuts) for flat in _flats(unit, cut, list(params.values()), specs, num_ranks)
    ]
    tile_numel = choose_tile_numel(flats, buffer_bytes)
    tiles = cut_tiles(flats, specs, tile_numel, rank)
    units = lay_units([cut.name for cut in cuts], [cut.is_kept for cut in cuts], flats, tiles)
    return Layout(ALIGN, tile_numel, tuple(specs), tuple(flats), tiles, units, rank, num_ranks)


def _flats(
    unit: int, cut: Cut, params: Sequence[nn.Parameter], specs: Sequence[ParameterSpec], num_ranks: int
) -> list[Flat]:
    groups: dict[tuple[torch.dtype, bool], list[int]] = {}
    for index in cut.params:
        groups.setdefault((params[index].dtype, params[index].requires_grad), []).append(index)
    return [
        Flat.of(
            specs,
            indices,
            unit=unit,
            item_bytes=params[indices[0]].element_size(),
            is_trainable=is_trainable,
            num_ranks=num_ranks,
        )
        for (_, is_trainable), indices in groups.items()
    ]


@dataclass(frozen=True, slots=True)
class _Place:
    """One place where a parameter is read: the reader's name, and that of the unit around it, if any."""

    reader: str
    unit: str | None

    @property
    def home(self) -> str:
        """What it would travel with: the unit, in the rest the reader."""
        return self.reader if self.unit is None else self.unit


def _places(
    module: nn.Module, names: dict[nn.Module, str], params: dict[str, nn.Parameter], chosen: frozenset[str]
) -> list[list[_Place]]:
    """Return where each parameter is read, over all paths from the root that differ in it."""
    indices = {id(param): index for index, param in enumerate(params.values())}
    places: list[dict[_Place, None]] = [{} for _ in params]
    seen = set()

    def walk(at: nn.Module, place: _Place, unit: str | None) -> None:
        name = names[at]
        if unit is None and name in chosen:
            unit = name
        if _has_forward(at):
            place = _Place(name, unit)
        if (name, place, unit) in seen:
            return
        seen.add((name, place, unit))
        for param in at._parameters.values():
            if id(param) in indices:
                places[indices[id(param)]][place] = None
        for child in at.children():
            walk(child, place, unit)

    walk(module, _Place("", None), None)
    return [list(found) for found in places]


def _ties(tied: Iterable[int], places: Sequence[Sequence[_Place]]) -> Iterator[list[int]]:
    """Yield the shared parameters in groups that no reader spans."""
    groups: list[tuple[set[str], list[int]]] = []
    for index in tied:
        readers, indices = {place.reader for place in places[index]}, [index]
        for group in [group for group in groups if group[0] & readers]:
            groups.remove(group)
            readers |= group[0]
            indices += group[1]
        groups.append((readers, indices))
    yield from (sorted(indices) for _, indices in groups)


def _tied_name(readers: Sequence[str]) -> str:
    shown = [name or ROOT_NAME for name in readers[:TIED_NAMES_MAX]]
    num_more = len(readers) - len(shown)
    return " + ".join([*shown, *([f"{num_more} more"] if num_more else [])])


def _chosen(module: nn.Module, units: Any) -> frozenset[str]:
    """Return the names of the modules that are units by rule 1, or by what stands in its place.

    Some may lie inside others; the outermost on a path counts.
    """
    named = list(module.named_modules())
    if isinstance(units, str) and units == "auto":
        names = {child: name for name, child in named}
        return frozenset(names[child] for _, parent in named for child in _cut_children(parent))
    matches = _predicate(units)
    chosen = frozenset(name for name, child in named if matches(name, child) and _can_be_unit(child))
    if not chosen:
        raise ConfigError(
            f"units={units!r} matches no module with a forward and parameters of its own or beneath. "
            f"Classes that would: {', '.join(_likely_classes(module))}."
        )
    return chosen


def _predicate(units: Any) -> Callable[[str, nn.Module], object]:
    def is_module_class(kind: object) -> bool:
        return isinstance(kind, type) and issubclass(kind, nn.Module)

    if is_module_class(units):
        return lambda _, module: isinstance(module, units)
    if isinstance(units, Collection) and not isinstance(units, str | nn.Module) and units:
        kinds = tuple(units)
        if all(map(is_module_class, kinds)):
            return lambda _, module: isinstance(module, kinds)
    elif callable(units) and not isinstance(units, type | nn.Module):
        return cast("Callable[[str, nn.Module], object]", units)
    shown = f"a {type(units).__name__}" if isinstance(units, nn.Module) else repr(units)
    raise ConfigError(
        f'units={shown} is not supported. It is "auto", a class of modules, a collection of such classes, '
        "or a function of (name, module) that answers whether the module is a unit."
    )


def _likely_classes(module: nn.Module) -> list[str]:
    """Return up to three class names that make units, the class of the largest module first, the root's last."""
    numels = Counter[str]()
    for name, child in module.named_modules():
        if _owns_parameters(child) and _has_forward(child):
            kind, numel = type(child).__name__, sum(p.numel() for p in child.parameters())
            numels[kind] = max(numels[kind], numel if name else 0)
    return [kind for kind, _ in numels.most_common(3)]


def _cut_children(parent: nn.Module) -> list[nn.Module]:
    if not isinstance(parent, nn.ModuleList | nn.Sequential):
        return []
    children = [child for child in parent.children() if _owns_parameters(child)]
    if len(children) < 2 or len({type(child) for child in children}) > 1:
        return []
    return [c for c in children if _can_be_unit(c) and (_has_forward(c) or not _cut_children(c))]


def _can_be_unit(module: nn.Module) -> bool:
    return _owns_parameters(module) and any(True for _ in _entries(module))


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _entries(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, or if it can't be hooked, the nearest beneath it that can."""
    if _has_forward(module):
        yield module
        return
    for child in module.children():
        yield from _entries(child)


def _has_forward(module: nn.Module) -> bool:
    # MultiheadAttention reads the weight of its out_proj, of this class, and never calls it.
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _dtype_name(param: nn.Parameter) -> str:
    return str(param.dtype).removeprefix("torch.")


def _check(name: str, param: nn.Parameter) -> None:
    if param.is_meta:
        raise ConfigError(f"{name} is on the meta device and has no values; give it values before offload().")
    if param.layout is not torch.strided or param.is_quantized:
        raise ConfigError(f"{name} is not an ordinary strided tensor ({param.layout}); it can't be offloaded.")
    if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
        raise ConfigError(
            f"{name} has a hook on its gradient, which is not supported yet: it would not be called. Remove it before "
            "offload(), and edit p.grad between backward() and step()."
        )
    if not is_dense(param):
        raise ConfigError(
            f"{name} has strides {tuple(param.stride())} for shape {tuple(param.shape)}: its elements overlap or "
            "leave gaps (an expanded or sliced tensor). Replace it by nn.Parameter(p.detach().clone())."
        )
    if param.requires_grad and param.dtype not in TRAINABLE_DTYPES:
        raise ConfigError(
            f"{name} is trainable in {_dtype_name(param)}, which is not supported yet: float32 and bfloat16 are. "
            "Convert it, or freeze it with requires_grad_(False) before offload()."
        )


def _check_overlap(params: dict[str, nn.Parameter]) -> None:
    spans = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in params.items()
        if p.numel()
    )
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            raise ConfigError(
                f"{name} and {other} share memory but are two Parameters; both would be updated. "
                "Tie them by assigning one Parameter object to both modules."
            )
