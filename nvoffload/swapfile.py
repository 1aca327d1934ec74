"""Files of a run: the run folder, swap files, direct I/O, locks, headers, removal.

Knows names and bytes, not tiles. Everything below a run folder is opened relative to its
descriptor, without following links.

Note [Ownership]: a swap file belongs to whoever holds flock on the very description that the
engine does I/O with. A pid proves nothing: a dead process's queued writes can land after its
pid is gone, and only that lock covers them.
"""

import errno
import fcntl
import json
import mmap
import os
import re
import secrets
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nvoffload import native
from nvoffload.config import format_bytes
from nvoffload.errors import ConfigError, MachineError, StorageError
from nvoffload.layout import ALIGN, round_up

RUN_NAME = re.compile(r"nvo-[0-9a-f]{16}")
SWAP_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\.r[0-9]+\.f[0-9]+\.swap")
MANIFEST_NAME = re.compile(r"r[0-9]+\.manifest\.[01]")
_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
_NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "fuse.sshfs")
_COPY_ON_WRITE_FILESYSTEMS = ("btrfs", "zfs", "bcachefs")
_HEADER = struct.Struct("<8sII16sII64s")  # magic, version, crc, run id, rank, folder, layout digest
_MAGIC = b"NVOSWAP1"
_VERSION = 1


def filesystem_of(path: Path) -> str:
    """Return the type of the filesystem that holds `path`, "unknown" if the kernel does not say."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            found = right.split()[0]
    return found


def check_folder(path: Path | None) -> Path:
    """Return the folder, absolute, if swap files can live there; else raise ConfigError saying why."""
    if path is None:
        raise ConfigError('nvme_path is missing: states on "nvme" need a folder on a local disk.')
    folder = Path(path).expanduser().absolute()
    try:
        is_there = folder.exists()
    except (OSError, ValueError) as error:
        raise ConfigError(f"nvme_path={str(folder)[:80]!r} can't be a folder: {error}.") from None
    if not is_there:
        raise ConfigError(f"nvme_path={folder} does not exist. Create it: mkdir -p {folder}")
    if not folder.is_dir():
        raise ConfigError(f"nvme_path={folder} is a file; it must be a folder.")
    if not os.access(folder, os.W_OK | os.X_OK) or os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise ConfigError(f"nvme_path={folder} is not writable for this user. Choose another or chmod it.")
    kind = filesystem_of(folder)
    if kind in _MEMORY_FILESYSTEMS:
        raise ConfigError(
            f'nvme_path={folder} is on {kind} (memory). Choose a folder on a disk, or optimizer_offload="cpu".'
        )
    if kind in _NETWORK_FILESYSTEMS:
        raise ConfigError(f"nvme_path={folder} is on {kind} (a network). Choose a folder on a local disk.")
    return folder


def check_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise MachineError with the numbers if `needed_bytes` are not free in `folder`."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if needed_bytes > free:
        raise MachineError(
            f"{what} needs {format_bytes(needed_bytes)} in {folder}, and {format_bytes(free)} are free. "
            "Free some space, choose another nvme_path, or offload a smaller model."
        )


class RunFolder:
    """A folder of one run, 0700, ours; its descriptor is the way to everything in it."""

    def __init__(self, parent: Path, name: str, *, create: bool) -> None:
        self.path = parent / name
        self.run_id = name.removeprefix("nvo-")
        if create:
            os.mkdir(self.path, 0o700)
        self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        owner = os.fstat(self.fd)
        if owner.st_uid != os.geteuid() or stat.S_IMODE(owner.st_mode) & 0o077:
            os.close(self.fd)
            raise ConfigError(f"{self.path} is not a private folder of this user; it is left alone.")

    @classmethod
    def create(cls, parent: Path) -> "RunFolder":
        """Make a new one with a name nobody has."""
        return cls(parent, f"nvo-{secrets.token_hex(8)}", create=True)

    @classmethod
    def join(cls, parent: Path, run_id: str) -> "RunFolder":
        """Open another rank's, or make it if that is under another path."""
        try:
            return cls(parent, f"nvo-{run_id}", create=True)
        except FileExistsError:
            return cls(parent, f"nvo-{run_id}", create=False)

    def names(self, pattern: re.Pattern[str]) -> list[str]:
        """Return the files whose names this format can produce."""
        return sorted(name for name in os.listdir(self.fd) if pattern.fullmatch(name))

    def remove(self, *, of_rank: int | None = None) -> None:
        """Unlink our files, manifests first, then the folder; other people's files, and other ranks', stay."""
        for pattern in (MANIFEST_NAME, SWAP_NAME):
            for name in self.names(pattern):
                if of_rank is not None and f"r{of_rank}" not in name.split("."):
                    continue
                os.unlink(name, dir_fd=self.fd)
        try:
            os.rmdir(self.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT, errno.EEXIST):
                raise

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def find_runs(parent: Path) -> Iterator[RunFolder]:
    """Yield the run folders of this user in `parent`, open; the caller closes each."""
    for entry in sorted(os.listdir(parent)):
        if RUN_NAME.fullmatch(entry):
            try:
                yield RunFolder(parent, entry, create=False)
            except (OSError, ConfigError):
                continue


@contextmanager
def locked_if_dead(folder: RunFolder) -> Iterator[bool]:
    """Hold the locks of a run nobody owns: True inside; False if any of its files is in use."""
    fds = []
    try:
        for name in folder.names(SWAP_NAME):
            try:
                fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder.fd)
                fds.append(fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
        yield True
    finally:
        for fd in fds:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Header:
    """What stands in the first page of a swap file."""

    run_id: str
    rank: int
    folder: int
    digest: str

    def encode(self) -> bytes:
        """Return one page: the fields, their crc32c, and a line about the owner for people."""
        fields = (bytes.fromhex(self.run_id).ljust(16), self.rank, self.folder, self.digest.encode())
        blank = _HEADER.pack(_MAGIC, _VERSION, 0, *fields)
        crc = crc32c(blank)
        owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "boot": boot_id()})
        return (_HEADER.pack(_MAGIC, _VERSION, crc, *fields) + owner.encode()).ljust(ALIGN, b"\0")


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def crc32c(content: bytes | bytearray | memoryview) -> int:
    """Return the CRC-32C of `content`."""
    return int(native.lib.nvo_crc32c(0, native.ffi.from_buffer(content), len(content)))


class SwapFile:
    """A file with direct I/O where the filesystem has it, locked and preallocated.

    `fd` is what an engine reads and writes; it is open from creation to `close`.
    """

    def __init__(self, folder: RunFolder, name: str, *, wants_direct: bool = True) -> None:
        self.path = folder.path / name
        self._folder = folder
        self._name = name
        self.size = 0
        self.is_preallocated = True
        self.fd, self.is_direct = _open_new(folder, name, wants_direct=wants_direct)
        native.check(native.lib.nvo_fork_guard(self.fd), "guarding the swap file against forks")
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.is_direct and not self._probe_direct():
                self.is_direct = False
        except BaseException:
            self.close(remove=True)
            raise

    def extend(self, nbytes: int) -> int:
        """Preallocate `nbytes` more, a multiple of align; return where they start."""
        start = self.size
        code = native.lib.nvo_fallocate(self.fd, start, nbytes)
        if code == -errno.EOPNOTSUPP:
            self.is_preallocated = False
            os.ftruncate(self.fd, start + nbytes)
        elif code < 0:
            raise StorageError(
                f"reserving {format_bytes(nbytes)} at {start} of {self.path} failed: "
                f"{native.describe(code)}. Free some space or choose another nvme_path.",
                errno=-code,
                path=str(self.path),
                offset=start,
                nbytes=nbytes,
            )
        self.size = start + nbytes
        if filesystem_of(self._folder.path) in _COPY_ON_WRITE_FILESYSTEMS:
            self.is_preallocated = False
        return start

    def write(self, content: bytes, offset: int) -> int:
        """Write `content`, padded to align, at `offset`; return the bytes written."""
        nbytes = round_up(max(1, len(content)), ALIGN)
        with mmap.mmap(-1, nbytes) as page:
            page[: len(content)] = content
            try:
                written = os.pwrite(self.fd, page, offset)
            except OSError as error:
                raise self._error("write", error.errno or 0, offset, nbytes) from error
        if written != nbytes:
            raise self._error("write", errno.EIO, offset, nbytes)
        return nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` (rounded up to align) from `offset`, shorter at the end of the file."""
        return read_aligned(self.fd, offset, nbytes)

    def _error(self, verb: str, code: int, offset: int, nbytes: int) -> StorageError:
        return StorageError(
            f"{verb} of {nbytes} bytes at {offset} of {self.path} failed: {native.describe(code)}.",
            errno=code,
            path=str(self.path),
            offset=offset,
            nbytes=nbytes,
        )

    def _probe_direct(self) -> bool:
        """Is direct I/O real here? A page is written and read; then it must not be cached."""
        try:
            self.write(b"probe", 0)
            self.read(0, ALIGN)
        except (StorageError, OSError):
            flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            return False
        return int(native.lib.nvo_is_cached(self.fd, 0)) != 1

    def close(self, *, remove: bool) -> None:
        """Unlink if told to, under the lock; then close. Idempotent."""
        if self.fd < 0:
            return
        if remove:
            with suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=self._folder.fd)
        native.lib.nvo_fork_unguard(self.fd)
        os.close(self.fd)
        self.fd = -1


def _open_new(folder: RunFolder, name: str, *, wants_direct: bool) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    if wants_direct:
        try:
            return os.open(name, flags | os.O_DIRECT, 0o600, dir_fd=folder.fd), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some kernels create the file before they refuse the flag.
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder.fd)
    return os.open(name, flags, 0o600, dir_fd=folder.fd), False


def read_aligned(fd: int, offset: int, nbytes: int) -> bytes:
    """Return `nbytes` (rounded up to align) at `offset` of a file that may be open for direct I/O."""
    with mmap.mmap(-1, round_up(max(1, nbytes), ALIGN)) as page:
        done = os.preadv(fd, [page], offset)
        return page[:done]
