"""NCCL group of the trainer and the workers of one vLLM server. The trainer is rank 0, and
broadcasts from its device memory. NCCL and the CUDA driver are called through ctypes.

vLLM documents this way for trainers without torch: the trainer creates the group's id, and sends it
to the workers over HTTP (`NCCLWeightTransferInitInfo.nccl_unique_id_b64` in vLLM 0.32). Every rank
then joins, and takes part in an all-reduce of one float32 before the first broadcast.

Not tested on GPUs. The constants and signatures are those of nccl.h 2.32 and cuda.h 12.

Invariant: no call waits for another rank without a deadline. The group is non-blocking, so NCCL's
functions return at once; this module asks for the state of the group and of its stream until they
are done, the deadline passes or the group is aborted.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

ID_BYTES = 128
"""Size in bytes of the id of a group."""
DTYPES: Mapping[str, int] = {'float16': 6, 'float32': 7, 'float64': 8, 'bfloat16': 9}
"""NCCL's numbers of data types, keyed by Hugging Face name."""
_IN_PROGRESS = 7
"""NCCL's result of a call that continues in the background."""
_SUM = 0
"""NCCL's number of the reduction to a sum."""
_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 21400
"""Version of NCCL whose configuration has the fields of `Config`. Newer libraries accept it, and
use their defaults for all further fields.
"""
_NOT_READY = 600
"""The CUDA driver's result for a stream that has work in progress (CUDA_ERROR_NOT_READY)."""
_NON_BLOCKING = 1
"""Flag of a stream that does not wait for the default stream (CU_STREAM_NON_BLOCKING)."""
_LOOK_S = 0.0005
_STOP_S = 30.0
"""Maximum seconds for another thread to leave NCCL when the group is aborted."""


class UniqueId(ctypes.Structure):
  """Id of a group (ncclUniqueId)."""

  _fields_ = [('bytes', ctypes.c_ubyte * ID_BYTES)]


class Config(ctypes.Structure):
  """Configuration of a group (ncclConfig_t of NCCL 2.14)."""

  _fields_ = [
    ('size', ctypes.c_size_t),
    ('magic', ctypes.c_uint),
    ('version', ctypes.c_uint),
    ('blocking', ctypes.c_int),
  ]


_POINTER = ctypes.c_void_p
_NCCL = {
  'ncclGetUniqueId': (ctypes.POINTER(UniqueId),),
  'ncclCommInitRankConfig': (
    ctypes.POINTER(_POINTER),
    ctypes.c_int,
    UniqueId,
    ctypes.c_int,
    ctypes.POINTER(Config),
  ),
  'ncclCommGetAsyncError': (_POINTER, ctypes.POINTER(ctypes.c_int)),
  'ncclAllReduce': (
    *(_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
    *(_POINTER, _POINTER),
  ),
  'ncclBroadcast': (
    *(_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
    *(_POINTER, _POINTER),
  ),
  'ncclCommAbort': (_POINTER,),
}
"""Argument types of the functions of NCCL that return a result."""
_DRIVER = {
  'cuInit': (ctypes.c_uint,),
  'cuDeviceGet': (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
  'cuDevicePrimaryCtxRetain': (ctypes.POINTER(_POINTER), ctypes.c_int),
  'cuCtxSetCurrent': (_POINTER,),
  'cuStreamCreate': (ctypes.POINTER(_POINTER), ctypes.c_uint),
  'cuStreamQuery': (_POINTER,),
  'cuStreamDestroy_v2': (_POINTER,),
  'cuMemAlloc_v2': (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t),
  'cuMemFree_v2': (ctypes.c_uint64,),
}
"""Argument types of the functions of the CUDA driver."""
_DRIVER_LIBRARY = 'libcuda.so.1'


class GroupError(Exception):
  """Raised when NCCL or the CUDA driver fails, or when the group did not finish in time."""


class Libraries:
  """Functions of NCCL and of the CUDA driver."""

  def __init__(self, nccl: Any, driver: Any):
    """
    Args:
      nccl: NCCL as a library of ctypes.
      driver: CUDA driver as a library of ctypes.
    """
    for library, functions in ((nccl, _NCCL), (driver, _DRIVER)):
      for name, types in functions.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, ctypes.c_int
    nccl.ncclGetErrorString.argtypes = (ctypes.c_int,)
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    self._nccl, self._driver = nccl, driver

  @classmethod
  def load(cls, path: str) -> Libraries:
    """Loads NCCL from a file, and the CUDA driver. Raises GroupError if one of them is missing, or
    lacks a function.
    """
    try:
      return cls(ctypes.CDLL(path), ctypes.CDLL(_DRIVER_LIBRARY))
    except (OSError, AttributeError) as error:
      raise GroupError(f'NCCL cannot be loaded from {path}: {error}') from None

  def unique_id(self) -> bytes:
    """Creates the id of a new group."""
    made = UniqueId()
    self.nccl('ncclGetUniqueId', ctypes.byref(made))
    return bytes(made.bytes)

  def nccl(self, name: str, *args: Any) -> None:
    """Calls a function of NCCL, which may continue in the background. Raises GroupError if it
    fails.
    """
    result = getattr(self._nccl, name)(*args)
    if result not in (0, _IN_PROGRESS):
      raise GroupError(f'{name}: {self.explain(result)}')

  def explain(self, result: int) -> str:
    """Returns NCCL's text for a result."""
    return self._nccl.ncclGetErrorString(result).decode(errors='replace')

  def driver(self, name: str, *args: Any) -> None:
    """Calls a function of the CUDA driver. Raises GroupError if it fails."""
    result = getattr(self._driver, name)(*args)
    if result:
      raise GroupError(f'{name}: CUDA error {result}')

  def is_idle(self, stream: ctypes.c_void_p) -> bool:
    """Returns whether all work of a stream is done. Raises GroupError if the work has failed."""
    result = self._driver.cuStreamQuery(stream)
    if result not in (0, _NOT_READY):
      raise GroupError(f'cuStreamQuery: CUDA error {result}')
    return result == 0


class Group:
  """NCCL group of which this process is rank 0, on one GPU.

  After any error, the group is aborted and of no further use. Methods may be called from any
  thread; they take turns.

  Attributes:
    failure: error after which the group was aborted; None if there was none, or if `stop` came
      first.
  """

  def __init__(self, libraries: Libraries, device: int):
    """
    Args:
      device: CUDA's number of the GPU in this process. The context is the one that JAX uses.

    Raises:
      GroupError: CUDA cannot use the GPU.
    """
    self._libraries = libraries
    self._comm, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
    self._scratch = ctypes.c_uint64()
    """Address of the one element of the first all-reduce."""
    self.failure: GroupError | None = None
    self._lock = threading.Lock()
    """Lock that is held while NCCL works for this group."""
    self._stopped = threading.Event()
    """Event that is set once the group is to be aborted."""
    number, self._context = ctypes.c_int(), ctypes.c_void_p()
    libraries.driver('cuInit', 0)
    libraries.driver('cuDeviceGet', ctypes.byref(number), device)
    # The context stays retained: JAX keeps it until the process ends.
    libraries.driver('cuDevicePrimaryCtxRetain', ctypes.byref(self._context), number)

  def join(self, unique_id: bytes, world_size: int, *, deadline_s: float) -> None:
    """Joins the group, together with the other ranks.

    Args:
      world_size: number of ranks.

    Raises:
      GroupError: the group could not be formed.
    """
    config = Config(ctypes.sizeof(Config), _MAGIC, _CONFIG_VERSION, 0)
    given = UniqueId.from_buffer_copy(unique_id)

    def join() -> None:
      libraries = self._libraries
      libraries.driver('cuStreamCreate', ctypes.byref(self._stream), _NON_BLOCKING)
      arguments = ctypes.byref(self._comm), world_size, given, 0, ctypes.byref(config)
      libraries.nccl('ncclCommInitRankConfig', *arguments)
      self._await('join', deadline_s)
      libraries.driver('cuMemAlloc_v2', ctypes.byref(self._scratch), 4)
      address = self._scratch.value
      summed = address, address, 1, DTYPES['float32'], _SUM
      libraries.nccl('ncclAllReduce', *summed, self._comm, self._stream)
      self._await('join', deadline_s)

    self._do(join)

  def broadcast(self, address: int, count: int, dtype: str, *, deadline_s: float) -> None:
    """Sends elements from device memory to all other ranks. Returns once they have left the memory.

    Args:
      address: address of the first element on the group's GPU. All work that writes the elements
        must be done.
      count: number of elements.
      dtype: Hugging Face name of the data type.

    Raises:
      GroupError: the elements could not be sent.
    """

    def send() -> None:
      sent = address, address, count, DTYPES[dtype], 0
      self._libraries.nccl('ncclBroadcast', *sent, self._comm, self._stream)
      self._await('broadcast', deadline_s)

    self._do(send)

  def stop(self) -> None:
    """Makes a method that is running in another thread end with an error. Does not wait for it."""
    self._stopped.set()

  def abort(self) -> None:
    """Ends the group without the other ranks. Does nothing if the group has ended before."""
    self.stop()
    if not self._lock.acquire(timeout=_STOP_S):
      logging.warning('NCCL does not return; its group is left behind')
      return
    try:
      self._release()
    finally:
      self._lock.release()

  def _do(self, work: Callable[[], None]) -> None:
    """Calls a function that uses the group, and ends the group if that fails."""
    with self._lock:
      if self._stopped.is_set():
        raise GroupError('the group has ended')
      try:
        self._libraries.driver('cuCtxSetCurrent', self._context)
        work()
      except GroupError as error:
        if not self._stopped.is_set():
          self.failure = error
        self._stopped.set()
        self._release()
        raise

  def _await(self, what: str, deadline_s: float) -> None:
    """Waits until NCCL has accepted the last call, and its work is done."""
    end, state = time.monotonic() + deadline_s, ctypes.c_int()
    while True:
      self._libraries.nccl('ncclCommGetAsyncError', self._comm, ctypes.byref(state))
      if state.value not in (0, _IN_PROGRESS):
        raise GroupError(f'{what}: {self._libraries.explain(state.value)}')
      # While a call is in progress, the stream must not be asked: its work may not be there yet.
      if state.value == 0 and self._libraries.is_idle(self._stream):
        return
      if self._stopped.is_set():
        raise GroupError(f'{what}: the group was closed')
      if time.monotonic() > end:
        raise GroupError(f'{what}: not done within {deadline_s:g} s')
      # Wait 'group': bounded by `deadline_s`.
      time.sleep(_LOOK_S)

  def _release(self) -> None:
    """Ends the running work, and frees the group, its stream and its memory. Failures are logged:
    after an error of the GPU, all further calls of CUDA fail too.
    """
    comm, stream, scratch = self._comm, self._stream, self._scratch
    self._comm, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
    self._scratch = ctypes.c_uint64()
    libraries = self._libraries
    # The group comes first, so that no work is left that the others would wait for.
    for used, call, name, argument in (
      (stream, libraries.driver, 'cuCtxSetCurrent', self._context),
      (comm, libraries.nccl, 'ncclCommAbort', comm),
      (scratch, libraries.driver, 'cuMemFree_v2', scratch),
      (stream, libraries.driver, 'cuStreamDestroy_v2', stream),
    ):
      if used:
        try:
          call(name, argument)
        except GroupError as error:
          logging.warning('the NCCL group was not freed completely: %s', error)
