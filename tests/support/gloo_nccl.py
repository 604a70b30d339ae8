"""Stand-in for NCCL and the CUDA driver on CPUs: functions with the same names and C signatures
(nccl.h, cuda.h), which move host memory over gloo. Needs only torch, so that it also runs in vLLM's
environment.
"""

import concurrent.futures
import ctypes
import datetime
import time
import types

import torch
import torch.distributed as dist

IN_PROGRESS, INVALID, REMOTE = 7, 4, 6
NOT_READY = 600
TYPES = {6: 'float16', 7: 'float32', 8: 'float64', 9: 'bfloat16'}
SIZES = {6: 2, 7: 4, 8: 8, 9: 2}
TEXT = ctypes.create_string_buffer(b'stand-in error')
PATIENCE = datetime.timedelta(seconds=10)
P, INT, SIZE, U64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64


class Id(ctypes.Structure):
  _fields_ = [('internal', ctypes.c_char * 128)]


class Configuration(ctypes.Structure):
  """The beginning of ncclConfig_t."""

  _fields_ = [
    ('size', SIZE),
    ('magic', ctypes.c_uint),
    ('version', ctypes.c_uint),
    ('blocking', INT),
  ]


class Member:
  """A rank of the group with the given id; has the methods of vLLM's PyNcclCommunicator that its
  engine calls.
  """

  def __init__(self, unique_id, rank, size):
    host, port = unique_id.rstrip(b'\0').decode().split(':')
    self._group = dist.ProcessGroupGloo(
      dist.TCPStore(host, int(port), timeout=PATIENCE), rank, size, PATIENCE
    )

  def all_reduce(self, tensor):
    self._group.allreduce([tensor]).wait()

  def broadcast(self, tensor, src, stream=None):
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = src, 0
    self._group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

  def destroy(self): ...


def join(unique_id, rank, size, device=None):
  """What a worker of vLLM does with an id (PyNcclCommunicator.from_unique_id_bytes)."""
  member = Member(unique_id, rank, size)
  member.all_reduce(torch.zeros(1))
  return member


class GlooLibraries:
  """NCCL and the CUDA driver of one process.

  Attributes:
    nccl, driver: libraries, as ctypes would load them.
    calls: (name, what matters of the arguments) of each call that is not a question.
    faults: result with which a function answers instead, keyed by name.
  """

  def __init__(self):
    self.calls, self.faults = [], {}
    self._stores, self._comms = {}, {}
    self._memory, self._made, self._work = {}, 0, {}
    self.nccl = types.SimpleNamespace(
      ncclGetErrorString=ctypes.CFUNCTYPE(P, INT)(lambda code: ctypes.addressof(TEXT)),
      ncclGetUniqueId=self._function(self._unique_id, P),
      ncclCommInitRankConfig=self._function(self._init, P, INT, Id, INT, P),
      ncclCommGetAsyncError=self._function(self._state, P, P),
      ncclAllReduce=self._function(self._all_reduce, P, P, SIZE, INT, INT, P, P),
      ncclBroadcast=self._function(self._broadcast, P, P, SIZE, INT, INT, P, P),
      ncclCommAbort=self._function(self._abort, P),
    )
    self.driver = types.SimpleNamespace(
      cuInit=self._function(self._nothing, ctypes.c_uint),
      cuDeviceGet=self._function(self._device, P, INT),
      cuDevicePrimaryCtxRetain=self._function(self._new, P, INT),
      cuCtxSetCurrent=self._function(self._nothing, P),
      cuStreamCreate=self._function(self._new, P, ctypes.c_uint),
      cuStreamQuery=self._function(self._query, P),
      cuStreamDestroy_v2=self._function(self._nothing, P),
      cuMemAlloc_v2=self._function(self._alloc, P, SIZE),
      cuMemFree_v2=self._function(self._free, U64),
    )

  def _function(self, work, *arguments):
    name = work.__name__

    def call(*args):
      if name in self.faults:
        return self.faults[name]
      try:
        return work(*args) or 0
      except Exception as error:
        self.calls.append(('error', repr(error)))
        return INVALID

    return ctypes.CFUNCTYPE(INT, *arguments)(call)

  def _nothing(self, *args): ...

  def _unique_id(self, out):
    store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    text = b'127.0.0.1:%d' % store.port
    self._stores[text] = store
    ctypes.memmove(out, text.ljust(128, b'\0'), 128)

  def _init(self, out, size, unique_id, rank, config):
    given = Configuration.from_address(config)
    assert given.size == ctypes.sizeof(Configuration) and given.magic == 0xCAFEBEEF
    assert given.blocking == 0 and rank == 0
    self.calls.append(('join', size))
    self._made += 1
    key = self._made
    comm = self._comms[key] = types.SimpleNamespace(
      pool=concurrent.futures.ThreadPoolExecutor(1), work=[]
    )

    comm.store = self._stores.pop(unique_id.internal)
    comm.joined = comm.pool.submit(Member, unique_id.internal, rank, size)
    ctypes.c_void_p.from_address(out).value = key
    return IN_PROGRESS

  def _state(self, comm, out):
    comm = self._comms[comm]
    failed = any(each.done() and each.exception() for each in (comm.joined, *comm.work))
    state = REMOTE if failed else 0 if comm.joined.done() else IN_PROGRESS
    ctypes.c_int.from_address(out).value = state

  def _all_reduce(self, source, target, count, dtype, operation, comm, stream):
    assert (count, TYPES[dtype], operation) == (1, 'float32', 0) and source == target
    self.calls.append(('all-reduce', count))
    member = self._comms[comm].joined.result(timeout=0)  # It must be ready.
    self._begin(comm, stream, lambda: member.all_reduce(torch.ones(1)))

  def _broadcast(self, source, target, count, dtype, root, comm, stream):
    assert root == 0 and source == target and stream
    self.calls.append(('broadcast', count, TYPES[dtype]))
    member = self._comms[comm].joined.result(timeout=0)

    def send():
      time.sleep(0.002)  # The memory must still be there.
      data = bytearray(ctypes.string_at(source, count * SIZES[dtype]))
      member.broadcast(torch.frombuffer(data, dtype=torch.uint8), 0)

    self._begin(comm, stream, send)

  def _begin(self, comm, stream, work):
    assert stream in self._work, 'on a stream of its own'
    future = self._comms[comm].pool.submit(work)
    self._comms[comm].work.append(future)
    self._work[stream].append(future)

  def _abort(self, comm):
    self.calls.append(('abort',))
    # Without its last reference, the group's connections end, and the others' waits with them.
    self._comms.pop(comm).pool.shutdown(wait=False, cancel_futures=True)
    for work in self._work.values():
      work[:] = [each for each in work if not each.done()]

  def _query(self, stream):
    return 0 if all(each.done() for each in self._work[stream]) else NOT_READY

  def _device(self, out, number):
    ctypes.c_int.from_address(out).value = number

  def _new(self, out, flags):
    self._made += 1
    ctypes.c_void_p.from_address(out).value = self._made
    self._work[self._made] = []

  def _alloc(self, out, size):
    memory = ctypes.create_string_buffer(size)
    address = ctypes.addressof(memory)
    self._memory[address] = memory
    ctypes.c_uint64.from_address(out).value = address

  def _free(self, address):
    del self._memory[address]
