"""The manifest's format: a fixed header, a JSON body, the tile tables. Bytes in, bytes out.

Opens nothing. Holds no path and no offset: extents follow from the layout, whose hash must agree.
"""

import json
import struct
from dataclasses import dataclass
from typing import Any

from nvoffload.errors import CorruptionError
from nvoffload.swapfile import crc32c

MAGIC = b"NVOMANI1"
VERSION = 1
BODY_BYTES_MAX = 64 << 20
TABLE_BYTES_MAX = 1 << 36
# magic, version, crc of this header with the field zero, incarnation, step, body and table bytes, their crc
_HEADER = struct.Struct("<8sIIQQQQI")


@dataclass(frozen=True, slots=True)
class Generation:
    """What a commit makes durable. Larger is newer."""

    incarnation: int
    step: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One committed generation: `body` describes the stores, `tables` are their records."""

    generation: Generation
    body: dict[str, Any]
    tables: bytes


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of one place of the manifest file."""
    body = json.dumps(manifest.body, separators=(",", ":")).encode()
    if len(body) > BODY_BYTES_MAX:
        raise ValueError(f"a manifest body of {len(body)} bytes exceeds {BODY_BYTES_MAX}")
    generation = manifest.generation
    counts = (generation.incarnation, generation.step, len(body), len(manifest.tables))
    content = crc32c(body + manifest.tables)
    crc = crc32c(_HEADER.pack(MAGIC, VERSION, 0, *counts, content))
    return _HEADER.pack(MAGIC, VERSION, crc, *counts, content) + body + manifest.tables


def decode(content: bytes) -> Manifest:
    """Return what `encode` wrote; raise CorruptionError for anything else."""
    if len(content) < _HEADER.size:
        raise CorruptionError(f"a manifest of {len(content)} bytes is shorter than its header.")
    magic, version, crc, incarnation, step, body_bytes, table_bytes, content_crc = _HEADER.unpack_from(content)
    if magic != MAGIC or version != VERSION:
        raise CorruptionError(f"not a manifest of version {VERSION}: {magic!r} {version}.")
    counts = (incarnation, step, body_bytes, table_bytes)
    if crc32c(_HEADER.pack(magic, version, 0, *counts, content_crc)) != crc:
        raise CorruptionError("the manifest's header has a bad checksum.")
    if body_bytes > BODY_BYTES_MAX or table_bytes > TABLE_BYTES_MAX:
        raise CorruptionError(f"the manifest claims {body_bytes} + {table_bytes} bytes.")
    end = _HEADER.size + body_bytes + table_bytes
    if len(content) < end or crc32c(content[_HEADER.size : end]) != content_crc:
        raise CorruptionError("the manifest's content is cut off or has a bad checksum.")
    body = json.loads(content[_HEADER.size : _HEADER.size + body_bytes])
    if not isinstance(body, dict):
        raise CorruptionError("the manifest's body is not an object.")
    return Manifest(Generation(incarnation, step), body, content[_HEADER.size + body_bytes : end])
