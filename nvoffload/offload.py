"""offload(): check everything that can be checked, then bring a model's states to their tier."""

import copy
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import nn

from nvoffload import native
from nvoffload.config import Io, OffloadConfig, PathLike, Size, nearest, resolve
from nvoffload.errors import ConfigError, UsageError
from nvoffload.ledger import Traffic
from nvoffload.opening import find_peers, open_session, prepare
from nvoffload.parameter import OffloadedParameter
from nvoffload.partition import Cut, owners_of
from nvoffload.plan import Plan
from nvoffload.runtime import Runtime
from nvoffload.session import Session
from nvoffload.stats import OffloadStats
from nvoffload.unit import Binding, Unit

log = logging.getLogger("nvoffload")
M = TypeVar("M", bound=nn.Module)
PROGRESS_AFTER_S = 2.0


class OffloadedModule:
    """What `offload` adds to a module: flush, close, figures, and `with`."""

    _nvoffload: Session
    offload_plan: Plan

    def flush(self) -> None:
        """Return when every step made so far is applied, written and committed. Not inside a backward."""
        self._nvoffload.flush()

    def close(self) -> None:
        """End the offload: free memory, remove the store unless keep="always". Idempotent.

        With param_offload="none" the module is an ordinary one again; else its parameters are gone, and
        every read of one says so. Raises, after all this, an error of an update that nobody was told of.
        """
        _end(self, self._nvoffload, is_clean=True)

    @contextmanager
    def local_forward(self) -> Iterator[None]:
        """Let the block run forwards that other ranks do not run: evaluation, generation of any length.

        All ranks enter together; each then has a copy of all framed parameters in its own swap folder (2
        bytes per bfloat16 element), or in host memory with param_offload="cpu", and leaves when it likes.
        Inside, backward(), step(), reads and writes of parameters raise UsageError. Raises MachineError on
        all ranks where the copy does not fit.
        """
        with self._nvoffload.local_forward():
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: gradients are averaged, and added to this rank's part, in every backward.

        For loops written for DistributedDataParallel. The sum over backwards is the same; a whole gradient
        kept until the last one is what these models have no memory for.
        """
        yield

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Do nothing, as `no_sync` does; for loops written for FSDP2."""

    def offload_stats(self) -> OffloadStats:
        """Return bytes and seconds since offload()."""
        return self._nvoffload.stats()

    def offload_ledger(self, *, steps: int = 1, passes: int = 1) -> Traffic:
        """Return the bytes that `steps` steps of `passes` forwards and backwards, and a flush, must move."""
        return self._nvoffload.ledger(steps=steps, passes=passes)

    def offload_summary(self) -> str:
        """Return what is where, and where the time went, in lines for people."""
        return "\n".join(self._nvoffload.summary())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _end(self, self._nvoffload, is_clean=error is None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        base, state = self._plain("deep-copied; copy it before offload()")
        other = memo[id(self)] = _make_plain(base, {})
        vars(other).update(copy.deepcopy(state, memo))
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        base, state = self._plain("pickled; save the values of model.state_dict()")
        return _make_plain, (base, state)

    def _plain(self, verb: str) -> tuple[type, dict[str, Any]]:
        """Return class and attributes without what offload() added; raise UsageError while it is offloaded."""
        if "_nvoffload_runtime" in vars(self):
            raise UsageError(f"an offloaded model can't be {verb}.")
        state = {name: value for name, value in vars(self).items() if name not in ("_nvoffload", "offload_plan")}
        return type(self).__bases__[1], state

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        # The first thing that DistributedDataParallel asks of a module.
        raise UsageError(
            "DistributedDataParallel can't wrap an offloaded model: its parameters and gradients are not in memory. "
            "Use the model as it is."
        )


def _end(module: OffloadedModule, session: Session, *, is_clean: bool) -> None:
    was_told = session.backend.is_told
    was_open = session.is_open
    session.end(is_clean=is_clean)
    _unhook(module)
    if was_open and is_clean and not was_told and session.backend.error is not None:
        raise session.backend.error


def _make_plain(base: type, state: dict[str, Any]) -> Any:
    """Return an object of class `base` with these attributes, as pickle would."""
    other: Any = object.__new__(base)
    vars(other).update(state)
    return other


def _unhook(module: OffloadedModule) -> None:
    """Give the module its own class back once its parameters are ordinary ones again."""
    if not any(isinstance(p, OffloadedParameter) for p in cast(Any, module).parameters()):
        runtime = vars(module).pop("_nvoffload_runtime", None)
        if runtime is not None:
            runtime.remove()


def offload(
    module: M,
    *,
    param_offload: str | None = None,
    optimizer_offload: str | None = None,
    nvme_path: PathLike | None = None,
    buffer_count: int | None = None,
    buffer_size: Size | None = None,
    io: Io | None = None,
    keep: str | None = None,
    resume: bool | str | None = None,
    update: str | None = None,
    update_threads: int | None = None,
    device_budget: Size | None = None,
    units: Any = None,
    name: str | None = None,
    device: torch.device | str | None = None,
    zero_stage: int | None = None,
    mesh: Any = None,
    mp_policy: Any = None,
    verify: bool | None = None,
    config: OffloadConfig | Mapping[str, Any] | PathLike | None = None,
    **others: Any,
) -> M:
    """Offload a module in place and return it, now also an OffloadedModule.

    Parameters and optimizer states go to their tiers: "nvme" is a swap file in `nvme_path`, "cpu" host
    memory, "none" where they are. Registered parameters become wrappers with true shape, dtype and
    device that are read on demand; inside the forward and backward of their unit (`units`: what is
    brought together) they are plain tensors. Build the optimizer after this call, with nvoffload.optim.

    With torch.distributed initialised, all ranks of `mesh` (a process group or a DeviceMesh of one
    dimension; default all) call this with the same model and arguments, and share it: each keeps and
    updates 1/n of everything, gradients are averaged. zero_stage 3 gathers parameters when they are
    used; 1 and 2 keep them whole, with param_offload="none". The values are those of the first rank.

    Raises ConfigError for arguments and models that can't work, MachineError for too little space or
    memory, UsageError for a module that is offloaded already; nothing is left behind then.
    """
    arguments = dict(
        param_offload=param_offload,
        optimizer_offload=optimizer_offload,
        nvme_path=nvme_path,
        buffer_count=buffer_count,
        buffer_size=buffer_size,
        io=io,
        keep=keep,
        resume=resume,
        update=update,
        update_threads=update_threads,
        device_budget=device_budget,
        units=units,
        name=name,
        device=device,
        zero_stage=zero_stage,
        mesh=mesh,
        mp_policy=mp_policy,
        verify=verify,
        **others,
    )
    return _offload(module, arguments, config)


def _offload(module: M, arguments: dict[str, Any], config: Any) -> M:
    given = (
        config if isinstance(config, Mapping) else {name: getattr(config, name, None) for name in ("mesh", "device")}
    )
    mesh, device = (arguments.get(name) or given.get(name) for name in ("mesh", "device"))
    peers = find_peers(module, mesh, device)
    try:
        with peers.agreeing() if peers else nullcontext():
            known = [*OffloadConfig.__dataclass_fields__, "config"]
            for key in arguments:
                if key not in known:
                    raise ConfigError(f"offload() has no argument {key!r}.{nearest(key, known)}")
            chosen = resolve(config, **arguments)
            if not isinstance(module, nn.Module):
                raise ConfigError(f"offload() takes an nn.Module, not {type(module).__name__}.")
            _check_unowned(module)
            prepared = prepare(module, chosen, peers)
        session, plan = open_session(prepared, peers)
    except BaseException as error:
        if peers is not None:
            peers.fail(error)
            peers.close()
        raise
    try:
        _attach(module, prepared.params, session, prepared.cuts, plan)
    except BaseException as error:
        if peers is not None:
            peers.fail(error)
        session.end(is_clean=True)
        raise
    for line in plan.lines():
        log.info("%s", line)
    return module


def _attach(
    module: nn.Module, params: dict[str, nn.Parameter], session: Session, cuts: Sequence[Cut], plan: Plan
) -> None:
    owners = owners_of(module, params)
    tensors: list[Any] = list(params.values())
    params.clear()  # nobody but the module keeps what is taken over
    modules = dict(module.named_modules())
    show = progress("writing parameters")
    session.synchronize()
    runtime = Runtime(session)
    # Without a disk a unit is taken over as it is filled, which frees the original; with one, once all
    # units are on it, so that an I/O error before leaves the module as it was.
    is_copied = not session.config.uses_disk
    for done, unit in enumerate(session.units):
        session.fill(unit, {i: tensors[i] for i in unit.spec.params})
        if is_copied:
            _adopt(session, unit, tensors, owners, modules)
        show(done + 1, len(session.units))
    for unit, cut in zip(session.units, cuts, strict=True):
        if not is_copied:
            _adopt(session, unit, tensors, owners, modules)
        runtime.hook_unit(unit, [modules[name] for name in cut.modules])
    runtime.hook_root(module)
    native.lib.nvo_trim()  # of the parameters that have just been freed
    base = type(module)
    if not isinstance(module, OffloadedModule):
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
        module.__class__ = type(f"Offloaded{base.__name__}", (OffloadedModule, base), names)
    facts: dict[str, Any] = {"_nvoffload": session, "offload_plan": plan, "_nvoffload_runtime": runtime}
    vars(module).update(facts)
    # Also runs at the interpreter's exit, before daemon threads are stopped.
    weakref.finalize(module, _end_unseen, session)


def _end_unseen(session: Session) -> None:
    """The module is gone, or the program ends. Garbage is collected on any thread, also on one that ends need."""
    if threading.current_thread().name.startswith("nvoffload"):
        threading.Thread(target=session.end_at_exit, name="nvoffload-end").start()
    else:
        session.end_at_exit()


def _adopt(
    session: Session,
    unit: Unit,
    tensors: list[Any],
    owners: Sequence[Sequence[tuple[str, str]]],
    modules: Mapping[str, nn.Module],
) -> None:
    bindings = []
    for index in unit.spec.params:
        wrapper = session.wrapper_of(index, requires_grad=tensors[index].requires_grad)
        bindings += [Binding(weakref.ref(modules[name]), attribute, wrapper) for name, attribute in owners[index]]
    session.adopt(unit, bindings, {index: tensors[index] for index in unit.spec.params})
    for index in unit.spec.params:
        _retire(tensors[index], session, unit, index)
        tensors[index] = None


def _retire(original: nn.Parameter, session: Session, unit: Unit, index: int) -> None:
    """Pass on what was attached to a parameter; who holds the original reads NaN from now on, and keeps no memory."""
    wrapper = session.wrappers[index]
    vars(wrapper).update({name: value for name, value in vars(original).items() if name not in vars(wrapper)})
    if original.grad is not None and index in session.accumulators:
        session.landing.adopt(index, original.grad)
    original.grad = None
    original.data = unit.blank(index)
    original.offloaded_as = session.layout.specs[index].name  # type: ignore[attr-defined]


def _check_unowned(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or 'the module'} is a ScriptModule, which takes no hooks; offload what it is made of."
            )
    for name, param in module.named_parameters():
        if isinstance(param, OffloadedParameter):
            raise UsageError(
                f"{name} is offloaded already. Offload once, at the top; to do it anew build the model again, and "
                "close this one: model.close()."
            )


def progress(what: str) -> Callable[[int, int], None]:
    """Return a callback that shows, after a while and only on a terminal, how far a job is."""
    start_s = time.monotonic()

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty() and time.monotonic() - start_s > PROGRESS_AFTER_S:
            end = "\n" if done == total else ""
            print(f"\rnvoffload: {what} {100 * done // max(1, total)} %", end=end, file=sys.stderr)

    return show


@contextmanager
def gathered(what: nn.Module | torch.Tensor | Sequence[torch.Tensor], *, write: bool = False) -> Iterator[Any]:
    """Give whole values of offloaded parameters as plain tensors, after all steps made so far.

    A module gives a dict by name, a sequence of parameters a list, one parameter a tensor. With `write`
    what the tensors hold at the end of the block is stored. Raises UsageError for other tensors.
    """
    named = dict(what.named_parameters()) if isinstance(what, nn.Module) else None
    given: Any = what
    tensors = list(named.values()) if named is not None else [given] if isinstance(given, torch.Tensor) else list(given)
    params: list[Any] = []
    for tensor in tensors:
        if not isinstance(tensor, OffloadedParameter) or not isinstance(tensor.home, Session):
            raise UsageError(f"gathered() takes offloaded parameters; one of shape {tuple(tensor.shape)} is not.")
        params.append(tensor)
    sessions: dict[int, Session] = {id(param.home): param.home for param in params}
    with ExitStack() as stack:
        found = {
            key: stack.enter_context(session.gathered([p.index for p in params if p.home is session], write=write))
            for key, session in sessions.items()
        }
        values = [found[id(param.home)][param.index] for param in params]
        if named is not None:
            yield dict(zip(named, values, strict=True))
        else:
            yield values[0] if isinstance(what, torch.Tensor) else values
