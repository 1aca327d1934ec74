"""NVMe offload for training in plain PyTorch.

    model = nvoffload.offload(model, param_offload="nvme", nvme_path="/mnt/ssd")
    opt = nvoffload.optim.AdamW(model.parameters(), lr=1e-4)

From there on the loop is plain PyTorch.
"""

import logging

from nvoffload import errors, ledger, optim
from nvoffload.config import Io, OffloadConfig
from nvoffload.errors import (
    ConfigError,
    CorruptionError,
    MachineError,
    NvoffloadError,
    PeerError,
    StorageError,
    UsageError,
)
from nvoffload.offload import OffloadedModule, gathered, offload
from nvoffload.plan import Plan
from nvoffload.stats import OffloadStats

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "CorruptionError",
    "Io",
    "MachineError",
    "NvoffloadError",
    "OffloadConfig",
    "OffloadStats",
    "OffloadedModule",
    "PeerError",
    "Plan",
    "StorageError",
    "UsageError",
    "errors",
    "gathered",
    "ledger",
    "offload",
    "optim",
]

logging.getLogger("nvoffload").addHandler(logging.NullHandler())
