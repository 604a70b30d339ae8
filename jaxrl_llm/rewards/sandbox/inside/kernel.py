"""System calls that Python does not wrap, and the permanent restrictions of a sandboxed process."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = (
  1,
  2,
  4,
  8,
  32,
  0x1000,
  0x4000,
)
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP = 1, 4, 22, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION = 0x20080522

_ARCHITECTURES = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}
_DENIED = {
  # System calls that are denied. They allocate memory that no limit counts, open other ways into
  # the kernel, act on other processes, set priorities and processors, or use resources shared by
  # all processes of a user or of the host. Scheduler calls must be denied because the kernel
  # permits them for any process of the same user, and the supervisor runs as the program's user.
  'x86_64': {
    'shmget': 29, 'ptrace': 101, 'pivot_root': 155, 'chroot': 161, 'mount': 165, 'umount2': 166,
    'swapon': 167, 'add_key': 248, 'request_key': 249, 'keyctl': 250, 'unshare': 272,
    'perf_event_open': 298, 'setns': 308, 'process_vm_readv': 310, 'process_vm_writev': 311,
    'memfd_create': 319, 'bpf': 321, 'userfaultfd': 323, 'msgget': 68, 'semget': 64,
    'vmsplice': 278, 'io_setup': 206, 'inotify_init': 253, 'inotify_init1': 294,
    'fanotify_init': 300, 'sched_setaffinity': 203, 'sched_setscheduler': 144,
    'sched_setparam': 142, 'sched_setattr': 314, 'setpriority': 141, 'ioprio_set': 251,
  },
  'aarch64': {
    'shmget': 194, 'ptrace': 117, 'pivot_root': 41, 'chroot': 51, 'mount': 40, 'umount2': 39,
    'swapon': 224, 'add_key': 217, 'request_key': 218, 'keyctl': 219, 'unshare': 97,
    'perf_event_open': 241, 'setns': 268, 'process_vm_readv': 270, 'process_vm_writev': 271,
    'memfd_create': 279, 'bpf': 280, 'userfaultfd': 282, 'msgget': 186, 'semget': 190,
    'vmsplice': 75, 'io_setup': 0, 'inotify_init1': 26, 'fanotify_init': 262,
    'sched_setaffinity': 122, 'sched_setscheduler': 119, 'sched_setparam': 118,
    'sched_setattr': 274, 'setpriority': 140, 'ioprio_set': 30,
  },
}  # fmt: skip
_PRLIMIT = {'x86_64': 302, 'aarch64': 261}
"""Number of the system call prlimit64, keyed by machine. The call is denied for other processes:
the kernel would permit it for any process of the same user, and the supervisor runs as the
program's user.
"""
_SIGACTION = {'x86_64': 13, 'aarch64': 134}
"""Number of the system call rt_sigaction, keyed by machine. The call is denied for SIGCHLD: if a
process ignored this signal, the kernel would not report the processor time of its ended children.
"""
_SYNC = {'x86_64': (74, 75, 162, 277, 306), 'aarch64': (81, 82, 83, 84, 267)}
"""Numbers of the system calls fsync, fdatasync, sync, sync_file_range and syncfs, keyed by machine.
The filter makes these calls succeed at once without effect. A program has no data on disk, and no
signal could end it while such a call waits for the host's disks.
"""
_FCNTL = {'x86_64': 72, 'aarch64': 25}
"""Number of the system call fcntl, keyed by machine. The call is denied for leases and directory
notifications. A lease blocks anyone who opens the file, even on the host.
"""
_F_SETLEASE, _F_NOTIFY = 1024, 1026
_CLONE, _CLONE3 = {'x86_64': 56, 'aarch64': 220}, 435
"""Numbers of the system calls clone, keyed by machine, and clone3. Calls of clone that create a
user namespace are denied, since not every sandbox can forbid them through /proc. clone3 is always
refused, because the filter cannot see its flags.
"""
_MMAP = {'x86_64': 9, 'aarch64': 222}
"""Number of the system call mmap, keyed by machine. Calls that map shared anonymous memory are
denied, since it can exist without residing in any process.
"""
_SOCKET = {'x86_64': (41, 53), 'aarch64': (198, 199)}
"""Numbers of the system calls socket and socketpair, keyed by machine. The calls are allowed only
for the address families `_FAMILIES`, which the network namespace confines.
"""
_SETSOCKOPT = {'x86_64': 54, 'aarch64': 208}
"""Number of the system call setsockopt, keyed by machine. Calls that set the size of a send
buffer are denied, since the supervisor's estimate of a socket's memory assumes the default size.
"""
_SOL_SOCKET, _SO_SNDBUF = 1, 7
_FAMILIES = {'AF_UNIX': 1, 'AF_INET': 2, 'AF_INET6': 10}
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20
_DENIED_EVERYWHERE = {
  'io_uring_setup': 425, 'io_uring_enter': 426, 'io_uring_register': 427, 'open_tree': 428,
  'move_mount': 429, 'fsopen': 430, 'pidfd_getfd': 438, 'mount_setattr': 442, 'memfd_secret': 447,
}  # fmt: skip


def _check(result: int, what: str) -> None:
  if result < 0:
    number = ctypes.get_errno()
    raise OSError(number, f'{what}: {os.strerror(number)}')


def unshare(flags: int) -> None:
  _check(_libc.unshare(flags), 'unshare')


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
  def encode(text):
    return None if text is None else text.encode()

  result = _libc.mount(
    encode(source), encode(target), encode(kind), ctypes.c_ulong(flags), encode(data)
  )
  _check(result, f'mount {target}')


def bind(source: str, target: str) -> None:
  """Bind-mounts `source`, with all mounts below it."""
  mount(source, target, None, MS_BIND | MS_REC)


def make_read_only(path: str, *, recursive: bool) -> None:
  """Makes a mount read-only, with or without the mounts below it (mount_setattr, Linux 5.12)."""
  attributes = struct.pack('=QQQQ', MS_RDONLY | MS_NOSUID, 0, 0, 0)
  flags, here = 0x8000 if recursive else 0, -100
  result = _libc.syscall(
    442, here, path.encode(), flags, attributes, ctypes.c_size_t(len(attributes))
  )
  _check(result, f'mount_setattr {path}')


def change_root(path: str) -> None:
  """Makes `path` the root directory and detaches the old root."""
  os.chdir(path)
  number = {'x86_64': 155, 'aarch64': 41}.get(platform.machine())
  if number is None:
    raise OSError(f'no pivot_root for {platform.machine()}')
  _check(_libc.syscall(number, b'.', b'.'), 'pivot_root')
  _check(_libc.umount2(b'.', MNT_DETACH), 'umount2')
  os.chdir('/')


def _prctl(option: int, value: int) -> None:
  _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f'prctl {option}')


def die_with_parent(number: int) -> None:
  _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
  _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_inspectable(inspectable: bool) -> None:
  """Sets whether processes of the same user may read this process's memory and descriptors."""
  _prctl(_PR_SET_DUMPABLE, int(inspectable))


def gain_nothing() -> None:
  """Sets no_new_privs, so that executing a file never grants this process more privileges."""
  _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
  for number in range(64):
    if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0) < 0:
      break
  header, nothing = struct.pack('=Ii', _CAPABILITY_VERSION, 0), struct.pack('=IIIIII', *[0] * 6)
  _check(_libc.capset(header, nothing), 'capset')


_Step = tuple[str, int, str, str] | tuple[str, int]
"""A step of the filter: (operation, operand). A jump also has two labels: the target if its
condition is true, and the target otherwise. An empty label refers to the next step.
"""
_OPERATIONS = {'load': 0x20, 'equal': 0x15, 'at least': 0x35, 'and': 0x54, 'answer': 0x06}
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, (16, 24, 32, 40, 48, 56)
"""Byte offsets in `struct seccomp_data`: of the number of the system call, of the architecture, and
of the low 32 bits of each argument.
"""


def _filter(machine: str) -> list[str | _Step]:
  """Returns the steps of the seccomp filter, with a label before each jump target."""
  denied = sorted({**_DENIED[machine], **_DENIED_EVERYWHERE}.values())
  shared = _MAP_SHARED | _MAP_ANONYMOUS
  return [
    ('load', _ARCHITECTURE),
    ('equal', _ARCHITECTURES[machine], 'number', ''),
    ('answer', _KILL),
    'number',
    ('load', _NUMBER),
    ('at least', 0x40000000, 'deny', ''),  # System calls of the x32 ABI.
    *(('equal', number, 'deny', '') for number in denied),
    *(('equal', number, 'done', '') for number in _SYNC[machine]),
    ('equal', _PRLIMIT[machine], 'prlimit', ''),
    ('equal', _SIGACTION[machine], 'sigaction', ''),
    ('equal', _FCNTL[machine], 'fcntl', ''),
    ('equal', _CLONE[machine], 'clone', ''),
    ('equal', _CLONE3, 'unknown', ''),
    ('equal', _MMAP[machine], 'mmap', ''),
    *(('equal', number, 'socket', '') for number in _SOCKET[machine]),
    ('equal', _SETSOCKOPT[machine], 'option', ''),
    ('answer', _ALLOW),
    'prlimit',
    ('load', _ARGUMENTS[0]),  # Target process; 0 is the caller.
    ('equal', 0, 'allow', 'deny'),
    'sigaction',
    ('load', _ARGUMENTS[0]),
    ('equal', signal.SIGCHLD, '', 'allow'),
    # Loads both halves of the address of the new action. The address is null if the call only reads
    # the current action, which is allowed.
    ('load', _ARGUMENTS[1]),
    ('equal', 0, '', 'deny'),
    ('load', _ARGUMENTS[1] + 4),
    ('equal', 0, 'allow', 'deny'),
    'fcntl',
    ('load', _ARGUMENTS[1]),
    ('equal', _F_SETLEASE, 'deny', ''),
    ('equal', _F_NOTIFY, 'deny', 'allow'),
    'clone',
    ('load', _ARGUMENTS[0]),  # Loads the call's flags.
    ('and', CLONE_NEWUSER),
    ('equal', 0, 'allow', 'deny'),
    'done',
    ('answer', _ERRNO | 0),
    'unknown',
    ('answer', _ERRNO | _ENOSYS),  # With ENOSYS for clone3, the C library falls back to clone.
    'mmap',
    ('load', _ARGUMENTS[3]),  # Loads the call's flags.
    ('and', shared),
    ('equal', shared, 'deny', 'allow'),
    'option',
    ('load', _ARGUMENTS[1]),
    ('equal', _SOL_SOCKET, '', 'allow'),
    ('load', _ARGUMENTS[2]),
    ('equal', _SO_SNDBUF, 'deny', 'allow'),
    'socket',
    ('load', _ARGUMENTS[0]),  # Loads the call's address family.
    *(('equal', family, 'allow', '') for family in _FAMILIES.values()),
    ('answer', _ERRNO | _EAFNOSUPPORT),
    'deny',
    ('answer', _ERRNO | _EPERM),
    'allow',
    ('answer', _ALLOW),
  ]


def _assemble(steps: list[str | _Step]) -> bytes:
  """Assembles the steps into BPF instructions. Jumps go forward only."""
  labels, program = {}, []
  for step in steps:
    if isinstance(step, str):
      labels[step] = len(program)
    else:
      program.append(step)

  def distance(place, label):
    return labels[label] - place - 1 if label else 0

  return b''.join(
    struct.pack(
      '=HBBI',
      _OPERATIONS[operation],
      *(distance(place, label) for label in jumps or ('', '')),
      operand,
    )
    for place, (operation, operand, *jumps) in enumerate(program)
  )


def deny_calls() -> None:
  """Installs the seccomp filter. A denied system call fails with an error; a call made through
  another architecture's ABI kills the process.

  Does nothing on machines other than x86_64 and aarch64.
  """
  machine = platform.machine()
  if machine not in _ARCHITECTURES:
    return
  program = _assemble(_filter(machine))
  instructions = ctypes.create_string_buffer(program)
  header = struct.pack('@HP', len(program) // 8, ctypes.addressof(instructions))
  result = _libc.prctl(
    _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.c_char_p(header), 0, 0
  )
  _check(result, 'seccomp')
