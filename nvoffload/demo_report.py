"""What a run of the demo took, beside what it was to take; in figures and in lines for people."""

from dataclasses import dataclass

from nvoffload.config import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the run took. Bytes of a step are means over the steps; shares are of `seconds`, the training."""

    size: str
    parameters: int
    steps: int
    device: str
    dtype: str
    engine: str
    is_direct: bool
    loss_first: float
    loss_last: float
    seconds: float
    total_seconds: float
    tokens_per_s: float
    step_read_bytes: float
    step_write_bytes: float
    ledger_read_bytes: float
    ledger_write_bytes: float
    fill_bytes: int
    manifest_bytes: int
    disk_bytes_per_s: float
    peak_bytes: int
    plan_bytes: int
    activation_bytes: int
    budget_bytes: int
    enforced_by: str
    in_memory_bytes: int
    stall_disk_share: float
    stall_commit_share: float
    stall_kernel_share: float
    overlap: float

    @property
    def compute_share(self) -> float:
        """The part of the training that did not wait for anything."""
        return 1 - self.stall_disk_share - self.stall_commit_share - self.stall_kernel_share

    def lines(self) -> list[str]:
        """Return the closing report for people."""
        allowed = self.plan_bytes + self.activation_bytes
        cached = "" if self.is_direct else ", through the page cache"
        return [
            "report",
            f"  loss              {self.loss_first:.3f} first, {self.loss_last:.3f} last, over {self.steps} steps",
            f"  speed             {self.tokens_per_s:.0f} tokens/s; {self.seconds:.0f} s of training, "
            f"{self.total_seconds:.0f} s in all",
            f"  disk per step     {self._traffic()}",
            f"  disk while busy   {self.disk_bytes_per_s / 1e9:.2f} GB/s, both ways, by {self.engine}{cached}; "
            f"{self.overlap:.0%} of that time ran under compute",
            f"  disk besides      {self.fill_bytes / 1e9:.2f} GB written once at the start, "
            f"{self.manifest_bytes / 1e9:.4f} GB of manifests",
            f"  peak memory       {format_bytes(self.peak_bytes)}: {self.peak_bytes / allowed:.2f} of plan and "
            f"activations ({format_bytes(allowed)}), budget {format_bytes(self.budget_bytes)} ({self.enforced_by})",
            f"  all in memory     would need {format_bytes(self.in_memory_bytes)}: this run took "
            f"{self.peak_bytes / self.in_memory_bytes:.2f} of it",
            f"  time              computing {self.compute_share:.0%}; waiting for the disk "
            f"{self.stall_disk_share:.0%}, commits {self.stall_commit_share:.0%}, "
            f"the AdamW kernel {self.stall_kernel_share:.0%}",
            f"  limited by        {self._limit()}",
        ]

    def _traffic(self) -> str:
        n, step = self.parameters, self.step_read_bytes + self.step_write_bytes
        text = f"{self.step_read_bytes / n:.3f} read + {self.step_write_bytes / n:.3f} written bytes per parameter"
        if (self.step_read_bytes, self.step_write_bytes) == (self.ledger_read_bytes, self.ledger_write_bytes):
            return f"{text}, equal to the ledger to the byte"
        return f"{text}, {step - self.ledger_read_bytes - self.ledger_write_bytes:+.0f} bytes against the ledger"

    def _limit(self) -> str:
        parts = {
            f"forward and backward of the model; a faster disk would save {self.stall_disk_share:.0%}": (
                self.compute_share
            ),
            "the disk": self.stall_disk_share,
            "commits": self.stall_commit_share,
            "the AdamW kernel": self.stall_kernel_share,
        }
        return max(parts, key=lambda name: parts[name])
