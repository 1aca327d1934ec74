"""The only room that registers hooks: they tell the session when a unit is needed and when no more.

Note [Visits]: a forward of a unit that records a graph leaves a visit behind. The nodes that made its
outputs, its exits, open it in backward, which brings the unit. Its entries, the nodes that made its inputs
as they were before it, are older than every node of the unit, and backward goes from young to old: the
first of them that runs closes the visit. Inputs that are leaves, or need no gradient, have no such node;
if all are so, the oldest node of the unit closes the visit after it has run. At the latest it closes when
that backward ends, also by an exception. Nested backwards (reentrant checkpointing) end their own visits
only.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils import _pytree

from nvoffload.schedule import FORWARD_END
from nvoffload.session import Session
from nvoffload.shims import graph_task_id, next_sequence_number, queue_end_of_backward, sequence_number
from nvoffload.unit import Binding, Unit


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a forward begins: the nodes of its inputs, and the number of the first one it may make."""

    nodes: set[Node]
    first_number: int


class Visit:
    """One forward of a unit, as its backward will see it."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.task = -1  # of the backward it is open in
        self.is_open = False
        self.entries: frozenset[int] = frozenset()  # numbers of the nodes that close it
        self.watches: list[Any] = []  # handles of what closes it

    def __del__(self) -> None:
        # Its exits own the visit. Tensors and nodes that outlive them would keep its hooks for ever.
        for watch in self.watches:
            watch.remove()


class BackwardEnd:
    """Calls `end` once: when a backward has done everything else, or, False, when an exception has ended it."""

    def __init__(self, end: Callable[[bool], None]) -> None:
        self._end: Callable[[bool], None] | None = end

    def __call__(self, *, is_complete: bool = True) -> None:
        """The backward has come to its end."""
        end, self._end = self._end, None
        if end is not None:
            end(is_complete)

    def __del__(self) -> None:
        self(is_complete=False)


class Runtime:
    """Hooks of one model. Holds its modules by their hooks only: the model owns it, not the reverse."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._residency = session.residency
        self._order = session.order
        self._visits: list[Visit] = []  # open ones
        self._tasks: set[int] = set()  # backwards whose end is awaited
        self._entries: dict[int, Entry] = {}  # of the forwards that run, by unit
        self._handles: list[Any] = []

    def hook_root(self, module: nn.Module) -> None:
        """Watch the forward of the whole model. Call it after `hook_unit`: the root comes first."""
        self._handles.append(module.register_forward_pre_hook(self._before_root, prepend=True))
        self._handles.append(module.register_forward_hook(self._after_root))

    def hook_unit(self, unit: Unit, modules: Sequence[nn.Module]) -> None:
        """Watch the forwards that need `unit`, and the gradients of its stand-ins."""
        for module in modules:
            before = partial(self._before_forward, unit)
            after = partial(self._after_forward, unit)
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        for binding in unit.bindings:
            if binding.stand_in is not None and binding.wrapper.is_trainable:
                self._handles.append(_hear_gradient(binding, self._land))

    def remove(self) -> None:
        """Take all hooks back."""
        while self._handles:
            self._handles.pop().remove()

    # ---- forward

    def _before_root(self, module: nn.Module, _args: Any) -> None:
        self._session.backend.check()
        if graph_task_id() != -1:
            return  # recomputed within a backward
        self._leave_interrupted(module)
        self._order.begin_pass("train" if torch.is_grad_enabled() else "eval")
        self._mark_iteration()
        self._residency.prefetch()

    def _after_root(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if graph_task_id() == -1:
            self._order.end(FORWARD_END)

    def _mark_iteration(self) -> None:
        if torch.is_grad_enabled() and graph_task_id() == -1:
            self._session.close_generation()

    def _before_forward(self, unit: Unit, _module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if unit.depth == 0:
            self._session.backend.check()
            self._mark_iteration()
            self._order.enter(unit, is_backward=False)
            try:
                unit.register_stand_ins()
            except BaseException:
                self._order.leave(unit)
                raise
            nodes = {t.grad_fn for t in _tensors((args, kwargs)) if t.grad_fn is not None}
            self._entries[unit.number] = Entry(nodes, next_sequence_number())
        unit.depth += 1

    def _after_forward(self, unit: Unit, _module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        if unit.depth == 0:
            return None  # its values could not be brought
        unit.depth -= 1
        if unit.depth:
            return None
        entry = self._entries.pop(unit.number)
        try:
            unit.register_wrappers()
            unit.take_replaced()
            if unit.written():
                self._session.values.write_back(unit)
            if output is not None:
                output = _without_aliases(unit, output)
            # What has a place of its own does not go away between forward and backward.
            if output is not None and torch.is_grad_enabled() and self._order.has_visits(unit):
                exits = {node for node in map(_node_of, _tensors(output)) if node is not None}
                self._watch(Visit(unit), exits - entry.nodes, entry)
        finally:
            self._order.leave(unit)
        return output

    def _leave_interrupted(self, root: nn.Module) -> None:
        """End forwards that a KeyboardInterrupt has ended: torch calls no hook then."""
        interrupted = [unit for unit in self._residency.units if unit.depth]
        if interrupted and not _runs_already(root):
            for unit in interrupted:
                unit.depth = 1
                self._after_forward(unit, root, (), {}, None)

    def _watch(self, visit: Visit, exits: set[Node], entry: "Entry") -> None:
        if not exits:
            return
        for node in exits:
            node.register_prehook(partial(self._open, visit, sequence_number(node)))
        visit.entries = frozenset(sequence_number(node) for node in entry.nodes)
        close = partial(self._close_seen, weakref.ref(visit))
        if entry.nodes:
            visit.watches = [node.register_prehook(close) for node in entry.nodes]
        elif self._session.collectives is None:  # else at the end: its gradients come after its oldest node
            visit.watches = [_oldest(exits, entry.first_number).register_hook(close)]

    # ---- backward

    def _open(self, visit: Visit, number: int, _grads: Any) -> None:
        if visit.is_open:
            return
        for other in [other for other in self._visits if number in other.entries]:
            self._close(other)
        task = graph_task_id()
        self._await_end(task)
        self._order.enter(visit.unit, is_backward=True)
        visit.task, visit.is_open = task, True
        self._visits.append(visit)

    def _close_seen(self, seen: "weakref.ref[Visit]", *_grads: Any) -> None:
        visit = seen()
        if visit is not None:
            self._close(visit)

    def _close(self, visit: Visit, *, is_complete: bool = True) -> None:
        if visit.is_open:
            visit.is_open = False
            self._visits.remove(visit)
            self._order.leave(visit.unit)
            if is_complete:
                self._order.close(visit.unit)

    def _await_end(self, task: int) -> None:
        if task not in self._tasks:
            self._tasks.add(task)
            queue_end_of_backward(BackwardEnd(partial(self._end_backward, task)))

    def _end_backward(self, task: int, is_complete: bool) -> None:
        self._tasks.discard(task)
        for visit in [visit for visit in self._visits if visit.task == task]:
            self._close(visit, is_complete=is_complete)
        self._session.landing.publish(is_complete=is_complete)

    def _land(self, binding: Binding, stand_in: Tensor) -> None:
        grad, stand_in.grad = stand_in.grad, None
        assert grad is not None
        self._await_end(graph_task_id())
        self._session.landing.land(binding.wrapper.index, grad)


def _hear_gradient(binding: Binding, land: Callable[[Binding, Tensor], None]) -> Any:
    stand_in: Any = binding.stand_in
    return stand_in.register_post_accumulate_grad_hook(partial(land, binding))


def _runs_already(module: nn.Module) -> bool:
    """Does the call of `module` that is being made stand within another one of it?"""
    calls = 0
    frame = inspect.currentframe()
    while frame is not None:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module
        frame = frame.f_back
    return calls > 1


def _node_of(tensor: Tensor) -> Node | None:
    """Return the node that made a tensor, or its base if it is a view: a change in place keeps that one."""
    base = tensor._base if tensor._is_view() else None
    return (base if base is not None and base.requires_grad else tensor).grad_fn


def _oldest(exits: set[Node], first_number: int) -> Node:
    """Return the oldest of the nodes from `first_number` on that lead to `exits`."""
    seen, ahead = set(exits), list(exits)
    while ahead:
        for node, _ in ahead.pop().next_functions:
            if node is not None and node not in seen and sequence_number(node) >= first_number:
                seen.add(node)
                ahead.append(node)
    return min(seen, key=sequence_number)


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in _pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dataclass_fields__"):
            yield from _tensors(list(vars(leaf).values()))


def _without_aliases(unit: Unit, output: Any) -> Any:
    """Return the output with tensors that are the unit's own memory copied: that goes away."""

    def is_alias(tensor: Tensor) -> bool:
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        return is_plain and unit.owns(tensor)

    if not any(map(is_alias, _tensors(output))):
        return output
    return _pytree.tree_map_only(Tensor, lambda t: t.clone() if is_alias(t) else t, output)
