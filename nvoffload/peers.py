"""The ranks that share a model, as one of them sees them: groups, agreement, errors of others, limits.

The only room that names torch.distributed. Knows neither units nor order.

Note [Limit]: a wait is cut into slices. After each the thread looks for an error that another rank has
put under a key of the group's store, and at the clock: after `limit_s`, that of the process group, it
raises and says what the ranks that wait are waiting for.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nvoffload import shims
from nvoffload.errors import ConfigError, NvoffloadError, PeerError, Stopped
from nvoffload.swapfile import boot_id

SLICE_S = 0.2
PUBLISH_AFTER_S = 2.0
ERROR_KEY = "nvoffload-error"
ADVICE = (
    "All ranks must run the same forwards, backwards, steps and reads of parameters. For forwards that only "
    "some ranks run (evaluation, generation) use: with model.local_forward(): ..."
)


class Channel:
    """One group as one thread uses it: each call returns when it is done, or raises within the limit.

    `waits_for` says, for people, what the thread is doing.
    """

    def __init__(self, peers: "Peers", group: Any, *, is_host: bool) -> None:
        self.waits_for = "the other ranks at offload()"
        self.is_stopping: Callable[[], bool] = lambda: False
        self._peers = peers
        self._group = group
        self._is_host = is_host

    def gather(self, out: Tensor, own: Tensor) -> None:
        """Fill `out` with every rank's `own`, in rank order; `own` may be its place in `out`."""
        self._wait(lambda: self._group.gather(out, own))

    def reduce(self, out: Tensor, given: Tensor) -> None:
        """Fill `out` with this rank's part of the sum of all `given`, `num_ranks` times as long."""
        self._wait(lambda: self._group.reduce(out, given))

    def sum(self, tensor: Tensor) -> None:
        """Replace `tensor` by the sum over ranks."""
        self._wait(lambda: self._group.sum(tensor))

    def broadcast(self, tensor: Tensor) -> None:
        """Replace `tensor` by that of rank 0."""
        self._wait(lambda: self._group.broadcast(tensor))

    def exchange(self, own: Tensor) -> Tensor:
        """Return every rank's `own`, a host tensor of one shape, stacked."""
        out = torch.empty((self._peers.num_ranks, *own.shape), dtype=own.dtype)
        self.gather(out.view(-1), own.contiguous().view(-1))
        return out

    def texts(self, own: str) -> list[str]:
        """Return every rank's text."""
        content = own.encode()
        lengths = self.exchange(torch.tensor([len(content)]))[:, 0].tolist()
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[: len(content)]
        rows = self.exchange(padded)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]

    def close(self) -> None:
        """Give the group back. Idempotent."""
        self._group = None

    def _wait(self, start: Callable[[], Any]) -> None:
        begin_s = time.monotonic()
        try:
            work = start()
        except RuntimeError as error:
            raise self._peers.lost(self.waits_for, error) from None
        if not self._is_host:
            work.wait()  # of the stream
            return
        is_published = False
        while True:
            try:
                work.wait(timedelta(seconds=SLICE_S))
                break
            except RuntimeError as error:
                if work.is_completed():
                    raise self._peers.lost(self.waits_for, error) from None
            self._peers.check()
            if self.is_stopping():
                raise Stopped
            waited_s = time.monotonic() - begin_s
            if waited_s > PUBLISH_AFTER_S and not is_published:
                is_published = True
                self._peers.publish(self.waits_for)
            if waited_s > self._peers.limit_s:
                raise self._peers.late(self.waits_for)
        if is_published:
            self._peers.publish("")


class Peers:
    """The ranks that share a model: rank and number, groups of our own, the errors of others.

    Made by all ranks of the group at once; raises ConfigError where a backend is missing.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.global_ranks = dist.get_process_group_ranks(group)
        self.limit_s = shims.timeout_of(group, device)
        if self.rank < 0:
            raise ConfigError("mesh: this process is not in the process group that it passes to offload().")
        if not dist.is_gloo_available():
            raise ConfigError(
                "this build of torch has no gloo, which the ranks' host side needs: error messages, the order of "
                "collectives, commits. Install a torch with USE_GLOO=1."
            )
        # The how manieth model of the group this is: counted where all see it, for one may have failed to come.
        self._base = group.get_group_store()
        arrival = self._base.add("nvoffload/arrivals", 1) - 1
        self._store = shims.prefixed(self._base, f"nvoffload/{arrival // self.num_ranks}")
        self.control = self.data = Channel(self, self._group("control", "gloo"), is_host=True)
        if device.type != "cpu":
            self.data = Channel(self, self._group("data", "nccl"), is_host=False)
        self.hosts = self.control.texts(f"{socket.gethostname()} {boot_id()}")

    def _group(self, name: str, backend: str) -> shims.RankGroup:
        try:
            return shims.RankGroup(self._store, name, backend, self.rank, self.num_ranks, self.limit_s)
        except RuntimeError as error:
            self._base.add("nvoffload/arrivals", -1)
            raise PeerError(
                f"rank {self.rank} called offload(), and not all {self.num_ranks} ranks came in {self.limit_s:g} s: "
                f"{str(error)[:120]}. All ranks of the process group must call offload()."
            ) from None

    # ---- agreement at the start

    def agree(self, error: Exception | None) -> None:
        """Raise on all ranks if one has an error: its own there, a PeerError elsewhere."""
        judge(error, self.control.texts(text_of(error)))

    def agree_on(self, facts: dict[str, str]) -> None:
        """Raise ConfigError on all ranks, naming the first fact that differs and its values."""
        every = [json.loads(text) for text in self.control.texts(json.dumps(facts))]
        for name in facts:
            values = [found.get(name) for found in every]
            if len(set(values)) > 1:
                other = next(rank for rank, value in enumerate(values) if value != values[0])
                raise ConfigError(
                    f"{name} differs between ranks: rank 0 has {values[0]}, rank {other} has {values[other]}. "
                    "Every rank must build the same model and pass the same arguments."
                )

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Run the block on every rank; an error of one is raised on all."""
        try:
            yield
        except Exception as error:
            self.agree(error)
            raise
        else:
            self.agree(None)

    @property
    def num_local(self) -> int:
        """How many ranks share this machine."""
        return sum(host == self.hosts[self.rank] for host in self.hosts)

    def new_fence(self) -> "Fence":
        """Make a group for commits. Made by all ranks at once."""
        return Fence(self, self._group("fence", "gloo"))

    # ---- errors of others

    def fail(self, error: BaseException) -> None:
        """Tell the others; the first error stays."""
        text = json.dumps([self.rank, f"{type(error).__name__}: {error}"])
        try:
            if not isinstance(error, PeerError) and not self._store.check([ERROR_KEY]):
                self._store.set(ERROR_KEY, text)
        except RuntimeError:
            pass  # the store went with rank 0

    def check(self) -> None:
        """Raise PeerError if another rank has failed."""
        try:
            if not self._store.check([ERROR_KEY]):
                return
            rank, text = json.loads(self._store.get(ERROR_KEY))
        except RuntimeError as error:
            raise PeerError(f"the process group's store is gone: {error}. Look at the output of rank 0.") from None
        if rank != self.rank:
            raise PeerError(f"rank {rank} failed: {text}")

    def publish(self, waits_for: str) -> None:
        """Let the others see what this rank waits for."""
        try:
            self._store.set(f"nvoffload-waits-{self.rank}", waits_for)
        except RuntimeError:
            return  # then nobody looks

    def late(self, waits_for: str) -> PeerError:
        """Return the error of a wait that took too long, with what each rank waits for."""
        lines = [f"rank {self.rank} has waited for {self.limit_s:g} s to {waits_for}."]
        for rank in range(self.num_ranks):
            key = f"nvoffload-waits-{rank}"
            if rank != self.rank:
                found = self._store.get(key).decode() if self._store.check([key]) else ""
                lines.append(f"rank {rank} " + (f"waits to {found}." if found else "waits for nothing here."))
        return PeerError(" ".join(lines) + " " + ADVICE)

    def lost(self, waits_for: str, error: Exception) -> NvoffloadError:
        """Return the error for a connection that broke: what a peer said before, if it did."""
        time.sleep(SLICE_S)
        try:
            self.check()
        except PeerError as told:
            return told
        return PeerError(
            f"rank {self.rank} wanted to {waits_for}, and another rank's connection is gone: {str(error)[:200]}. "
            "Look at the end of the other ranks' output."
        )

    def close(self) -> None:
        """Give the groups back. Idempotent."""
        self.control.close()
        self.data.close()


class Fence:
    """What the thread of a run's commits asks of the other ranks, on a group of its own."""

    def __init__(self, peers: Peers, group: Any) -> None:
        self._channel = Channel(peers, group, is_host=True)
        self._peers = peers

    def wait(self, generation: int, is_stopping: Callable[[], bool]) -> bool:
        """Return True once all ranks have come here with `generation`; False when told to stop before."""
        self._channel.waits_for = f"see generation {generation} committed by every rank"
        self._channel.is_stopping = is_stopping
        try:
            every = self._channel.exchange(torch.tensor([generation]))[:, 0].tolist()
        except Stopped:
            return False
        if any(other != generation for other in every):
            raise PeerError(f"ranks commit different generations: {every}. All ranks must make the same steps.")
        return True

    def fail(self, error: Exception) -> None:
        """Tell the others."""
        self._peers.fail(error)

    def close(self) -> None:
        """Give the group back."""
        self._channel.close()


def text_of(error: Exception | None) -> str:
    """Return an error as others are told of it, nothing for none."""
    return f"{type(error).__name__}: {error}" if error is not None else ""


def judge(error: Exception | None, texts: Sequence[str]) -> None:
    """Raise `error`, or a PeerError for the first of the ranks' texts that tells of one."""
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise PeerError(f"rank {rank} failed: {text}")


def find_group(mesh: Any) -> Any:
    """Return the process group of data parallelism: that of `mesh`, else the default one; None without ranks.

    `mesh`: a process group, or a DeviceMesh of one dimension. Raise ConfigError for anything else.
    """
    is_there = dist.is_available() and dist.is_initialized()
    if mesh is None:
        return dist.group.WORLD if is_there and dist.get_world_size() > 1 else None
    if not is_there:
        raise ConfigError("mesh is given, and torch.distributed.init_process_group() was not called.")
    group = mesh
    if hasattr(mesh, "get_group") and hasattr(mesh, "ndim"):
        if mesh.ndim != 1:
            raise ConfigError(f"mesh has {mesh.ndim} dimensions; pass the one of data parallelism: mesh['dp'].")
        group = mesh.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"mesh={type(mesh).__name__} must be a DeviceMesh of one dimension or a process group.")
    return group if dist.get_world_size(group) > 1 else None
