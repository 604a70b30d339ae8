"""Writer of TensorBoard scalar event files, flushed after each event.

The format is small and frozen: TFRecord framing (length, masked CRC-32C of the length, data, masked
CRC-32C of the data) around the protocol buffer `tensorflow.Event`. This module writes it because
tensorboardX imports torch wherever torch is installed (which takes seconds, and trainer processes
must not import it) and names its files by the second, so that a quick restart overwrites one. The
tests read these files with tensorboardX.

Invariant: a file starts with two records that are not rows (the format's version; a session start,
which makes a watching TensorBoard discard what it read before); each later record is one `write`.
"""

from __future__ import annotations

import pathlib
import struct
from collections.abc import Mapping

import numpy as np

_HEADER_RECORDS = 2


class EventFile:
  """New event file; TensorBoard finds only paths named `events.out.tfevents.<anything>`."""

  def __init__(self, path: pathlib.Path, wall_time: float):
    path.parent.mkdir(parents=True, exist_ok=True)
    self._file = path.open('wb')
    self._record(_wall_time(wall_time) + _message(3, b'brain.Event:2'))
    start = _number(1, 1)  # SessionLog.status = START
    self._record(_wall_time(wall_time) + _message(7, start))

  def write(self, step: int, scalars: Mapping[str, float | int], wall_time: float) -> None:
    """Appends one event with a step's scalars and flushes it."""
    with np.errstate(over='ignore'):
      values = [
        (tag.encode(), np.float32(value).astype('<f4').tobytes()) for tag, value in scalars.items()
      ]
    summary = b''.join(_message(1, _message(1, tag) + b'\x15' + value) for tag, value in values)
    self._record(_wall_time(wall_time) + _number(2, step) + _message(5, summary))

  def close(self) -> None:
    self._file.close()

  def _record(self, event: bytes) -> None:
    length = struct.pack('<Q', len(event))
    self._file.write(length + _masked_crc(length) + event + _masked_crc(event))
    self._file.flush()


def row_times(path: pathlib.Path) -> list[float]:
  """Returns the wall time of each row of an event file, up to the first incomplete record."""
  data, times, at = path.read_bytes(), [], 0
  while at + 12 <= len(data):
    (length,) = struct.unpack_from('<Q', data, at)
    if length < 9 or at + 16 + length > len(data):
      break
    # every event begins with field 1, its wall time
    times.append(struct.unpack_from('<d', data, at + 13)[0])
    at += 16 + length
  return times[_HEADER_RECORDS:]


def _varint(value: int) -> bytes:
  digits = bytearray()
  while value > 0x7F:
    digits.append(value & 0x7F | 0x80)
    value >>= 7
  return bytes([*digits, value])


def _number(field: int, value: int) -> bytes:
  return bytes([field << 3]) + _varint(value)


def _message(field: int, content: bytes) -> bytes:
  return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _wall_time(seconds: float) -> bytes:
  return b'\x09' + struct.pack('<d', seconds)


def _crc_table() -> list[int]:
  table = []
  for value in range(256):
    for _ in range(8):
      value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    table.append(value)
  return table


_CRC_TABLE = _crc_table()


def _masked_crc(data: bytes) -> bytes:
  """CRC-32C (Castagnoli, RFC 3720), rotated and offset as TFRecord stores it."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
  crc ^= 0xFFFFFFFF
  return struct.pack('<I', ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
