"""What the user asked for: names, sizes and choices, checked and spelled out in errors.

Pure: touches no file, no device, no torch.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

from nvoffload.errors import ConfigError

Size = int | str
PathLike = str | os.PathLike[str]

_UNITS = {
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
    "KB": 1000,
}
TIERS = ("none", "cpu", "nvme")
ENGINES = ("auto", "libaio", "portable")


def parse_size(value: Size, field: str) -> int:
    """Return bytes. Accepts an int (bytes) or a string such as "256MiB" or "5GB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", str(value))
        if match is None or match[2] not in _UNITS:
            raise ConfigError(
                f'{field}={value!r} is not a size. Write bytes as an int, or "256MiB" (2^20) or "5GB" (10^9).'
            )
        nbytes = int(Fraction(match[1]) * _UNITS[match[2]])
    if not 0 < nbytes < 1 << 62:
        raise ConfigError(f"{field}={str(value)[:40]!r} must be positive and below 2^62 bytes.")
    return nbytes


def format_bytes(nbytes: float) -> str:
    """Return a size for people, in binary units: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    raise AssertionError


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_choice(field: str, value: object, known: Iterable[object]) -> None:
    """Raise ConfigError, naming the nearest, unless `value` is one of `known`."""
    choices = list(known)
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        hint = nearest(str(value), [str(choice) for choice in choices])
        listed = ", ".join(repr(choice) for choice in choices)
        raise ConfigError(f"{field}={value!r} is unknown; it is one of {listed}.{hint}")


def _is_count(value: object, *, least: int, most: int = 1 << 20) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _one_path(value: Any) -> Path:
    if isinstance(value, str | os.PathLike):
        if not os.fspath(value):
            raise ConfigError("nvme_path is empty; is an environment variable unset? Pass a folder on a disk.")
        return Path(value)
    raise ConfigError(f"nvme_path={value!r}: several folders are not supported yet; pass one path.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Io:
    """How bytes move. `block_size` is the most one request moves; `queue_depth` requests fly at once.

    `stall_limit_s`: seconds without any completion after which a wait becomes a StorageError.
    """

    engine: str = "auto"
    block_size: Size = "1MiB"
    queue_depth: int = 32
    stall_limit_s: float = 120.0

    def __post_init__(self) -> None:
        check_choice("Io.engine", self.engine, ENGINES)
        block_bytes = parse_size(self.block_size, "Io.block_size")
        if block_bytes % 4096 != 0 or block_bytes > 1 << 30:
            rounded = min(max(4096, -(-block_bytes // 4096) * 4096), 1 << 30)
            raise ConfigError(
                f"Io.block_size={self.block_size!r} is {block_bytes} bytes; direct I/O needs a multiple "
                f"of 4096, at most 1GiB. The nearest is {rounded}."
            )
        if not _is_count(self.queue_depth, least=1, most=4096):
            raise ConfigError(f"Io.queue_depth={self.queue_depth!r} must be an int from 1 to 4096.")
        if type(self.stall_limit_s) not in (int, float) or not self.stall_limit_s > 0:
            raise ConfigError(f"Io.stall_limit_s={self.stall_limit_s!r} must be positive seconds.")

    @property
    def block_bytes(self) -> int:
        """`block_size` in bytes."""
        return parse_size(self.block_size, "Io.block_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """Everything `offload` can be told; the fields are its arguments.

    Fields that are not supported yet must keep their value here.
    """

    param_offload: str = "nvme"
    optimizer_offload: str | None = None
    grad_offload: str = "cpu"
    nvme_path: PathLike | None = None
    buffer_count: int | None = None
    buffer_size: Size | None = None
    device_budget: Size | None = None
    units: Any = "auto"
    io: Io = Io()
    keep: str = "on_error"
    resume: bool | str | None = None
    update: str = "deferred"
    update_threads: int | None = None
    name: str | None = None
    device: Any = None
    zero_stage: int | None = None
    mesh: Any = None
    mp_policy: Any = None
    weights: PathLike | None = None
    init_fn: Any = None
    durability: str = "process"
    verify: bool = True
    cpu_budget: Size = 0

    def __post_init__(self) -> None:
        check_choice("param_offload", self.param_offload, TIERS)
        check_choice("optimizer_offload", self.optimizer_offload, (None, *TIERS))
        check_choice("keep", self.keep, ("on_error", "never", "always"))
        check_choice("resume", self.resume, (None, False, True, "require"))
        check_choice("update", self.update, ("blocking", "deferred", "on_arrival", "delayed"))
        check_choice("durability", self.durability, ("process", "power", "none"))
        check_choice("verify", self.verify, (True, False))
        if not isinstance(self.io, Io):
            raise ConfigError(f"io={self.io!r} must be an nvoffload.Io, such as Io(queue_depth=32).")
        if self.buffer_count is not None and not _is_count(self.buffer_count, least=2):
            raise ConfigError(
                f"buffer_count={self.buffer_count!r} must be an int of at least 2 "
                "(one buffer for the update, one for a demanded read)."
            )
        if self.update_threads is not None and not _is_count(self.update_threads, least=1, most=256):
            raise ConfigError(f"update_threads={self.update_threads!r} must be an int from 1 to 256.")
        if self.buffer_size is not None:
            parse_size(self.buffer_size, "buffer_size")
        if self.device_budget is not None:
            parse_size(self.device_budget, "device_budget")
        check_choice("grad_offload", self.grad_offload, TIERS)
        if self.name is not None and not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.name):
            raise ConfigError(f"name={self.name!r} must be 1 to 64 letters, digits, '-' or '_'.")
        if self.nvme_path is not None:
            object.__setattr__(self, "nvme_path", _one_path(self.nvme_path))
        self._check_policy()
        self._check_stage()
        self._check_supported()

    @property
    def state_tier(self) -> str:
        """Where optimizer states live: "cpu" or "nvme"."""
        chosen = self.optimizer_offload or self.param_offload
        return "nvme" if chosen == "nvme" else "cpu"

    @property
    def uses_disk(self) -> bool:
        """Is anything at home on disk? If so, the parameters are: a store with states is complete."""
        return "nvme" in (self.param_offload, self.state_tier)

    @property
    def reduce_dtype(self) -> Any:
        """In what dtype gradients of several ranks are averaged; None: their own."""
        return self.mp_policy.reduce_dtype if self.mp_policy is not None else None

    @property
    def is_sharded(self) -> bool:
        """Are parameters partitioned over ranks too?"""
        return self.zero_stage in (None, 3)

    def _check_policy(self) -> None:
        """Raise ConfigError for a torch.distributed.fsdp.MixedPrecisionPolicy with more than a reduce_dtype."""
        policy = self.mp_policy
        if policy is None:
            return
        if not hasattr(policy, "reduce_dtype"):
            raise ConfigError(f"mp_policy={policy!r} must be a torch.distributed.fsdp.MixedPrecisionPolicy.")
        for name, default in (("param_dtype", None), ("output_dtype", None), ("cast_forward_inputs", True)):
            if getattr(policy, name, default) not in (default, None):
                raise ConfigError(f"mp_policy.{name} is not supported yet; only reduce_dtype is.")

    def _check_stage(self) -> None:
        check_choice("zero_stage", self.zero_stage, (None, 1, 2, 3))
        if self.param_offload != "none" and not self.is_sharded:
            raise ConfigError(
                f'zero_stage={self.zero_stage} keeps whole parameters on the device, and param_offload="'
                f'{self.param_offload}" moves them off it: that needs zero_stage=3. Use that, or param_offload="none".'
            )

    def _check_supported(self) -> None:
        if self.resume in (True, "require"):
            raise ConfigError(f"resume={self.resume!r} is not supported yet; use None or False.")
        defaults = {f.name: f.default for f in fields(type(self))}
        if self.update not in ("deferred", "blocking"):
            raise ConfigError(f'update={self.update!r} is not supported yet; use "deferred" or "blocking".')
        if self.grad_offload != "cpu":
            raise ConfigError(f'grad_offload={self.grad_offload!r} is not supported yet; use "cpu".')
        for name in ("weights", "init_fn", "durability", "cpu_budget"):
            if getattr(self, name) != defaults[name]:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not supported yet; leave it out.")

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Self:
        """Build from plain values; `io` may be a mapping too. Unknown keys are errors."""
        values = dict(mapping)
        _check_keys("config", values, cls)
        if isinstance(values.get("io"), Mapping):
            _check_keys("config['io']", values["io"], Io)
            values["io"] = Io(**values["io"])
        return cls(**values)


def _check_keys(what: str, given: Mapping[str, Any], known: type) -> None:
    names = [f.name for f in fields(known)]
    for key in given:
        if key not in names:
            raise ConfigError(f"{what} has no field {key!r}.{nearest(str(key), names)}")


def resolve(config: OffloadConfig | Mapping[str, Any] | PathLike | None, **given: Any) -> OffloadConfig:
    """Merge `config` with arguments; None means not given. A field given twice is a ConfigError."""
    arguments = {name: value for name, value in given.items() if value is not None}
    if config is None:
        return OffloadConfig.from_dict(arguments)
    if isinstance(config, str | os.PathLike):
        raise ConfigError(f"config={os.fspath(config)!r}: reading a file is not supported yet; pass a dict.")
    if not isinstance(config, OffloadConfig | Mapping):
        raise ConfigError(f"config={config!r} must be an OffloadConfig or a mapping of its fields.")
    if isinstance(config, OffloadConfig):
        defaults = {f.name: f.default for f in fields(OffloadConfig)}
        in_config = {name for name, value in defaults.items() if getattr(config, name) != value}
    else:
        in_config = set(config)
    twice = sorted(in_config & set(arguments))
    if twice:
        raise ConfigError(f"given both in config and as an argument: {', '.join(twice)}. Keep one.")
    if isinstance(config, OffloadConfig):
        return replace(config, **arguments)
    return OffloadConfig.from_dict({**config, **arguments})
