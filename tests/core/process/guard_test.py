"""The guard, with real process trees: when it has ended, nothing of its command is left, and
nothing else touched.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import uuid

import pytest
from paths import ROOT

pytestmark = pytest.mark.skipif(sys.platform != 'linux', reason='needs /proc and /dev/shm')

GUARD = ROOT / 'jaxrl_llm' / 'core' / 'process' / 'guard.py'
SHARED = pathlib.Path('/dev/shm')
DEADLINE_S = 60.0

HASTY = f"""
import sys
sys.path[0] = {str(GUARD.parent)!r}
import guard
guard._LOOK_S, guard._SCAN_S, guard._THRIFT = 0.02, 0.2, 1
sys.exit(guard.main(sys.argv[1:]))
"""
"""A guard that looks five times as often, whatever it costs."""

NODE = """
import json, multiprocessing, os, signal, subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory

resource_tracker.register = lambda *_: None  # Python's own tracker would remove the files.
kept = []
signal.alarm(2 * 60)  # So that a failed test leaves nothing for long.

def made(size=4096):
  kept.append(shared_memory.SharedMemory(create=True, size=size))
  return '/dev/shm/' + kept[-1].name

def made_lock():
  kept.append(multiprocessing.get_context('spawn').Lock())
  return '/dev/shm/sem.' + kept[-1]._semlock.name.lstrip('/')

def say(name, *files):
  with open(name + '.new', 'w') as file:
    json.dump({'pid': os.getpid(), 'files': files}, file)
  os.rename(name + '.new', name)

def fork(body, *args):
  if os.fork() == 0:
    signal.alarm(2 * 60)
    body(*args)
    os._exit(0)

def ignore():
  signal.signal(signal.SIGTERM, signal.SIG_IGN)

def idle():
  while True:
    signal.pause()
"""
"""What the processes of a tree have in common: `say` tells the test a process's number and its
files.
"""

FAMILY = """
from node import *
def grandchild():
  os.setsid()
  ignore()
  say('grandchild', made())
  idle()
def child():
  os.setsid()
  ignore()
  fork(grandchild)
  say('child', made(), made_lock())
  idle()
fork(child)
say('command', made(), made_lock())
idle()
"""
"""A command that SIGTERM ends, and two generations below it that SIGTERM does not end; nobody
removes a file.
"""

OWNER = """
import json, subprocess, sys, time
guard = subprocess.Popen(json.loads(sys.argv[1]), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                         start_new_session=True)
print(guard.pid, flush=True)
time.sleep(120)
"""


def until(condition, what: str):
  """Polls for the first true value."""
  deadline = time.monotonic() + DEADLINE_S
  while not (value := condition()):
    assert time.monotonic() < deadline, f'not within {DEADLINE_S:g} s: {what}'
    time.sleep(0.01)
  return value


def is_alive(pid: int) -> bool:
  """A zombie counts as dead: nobody may have collected it yet."""
  try:
    status = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return False
  return status.rsplit(')', 1)[1].split()[0] != 'Z'


class Scene:
  """A directory in which trees run; what they leave after a failed test is cleared away."""

  def __init__(self, path: pathlib.Path):
    self.path = path
    self.log = path / 'server.log'
    self.told: dict[str, dict] = {}
    self.started: list[subprocess.Popen] = []
    (path / 'node.py').write_text(NODE)
    (path / 'hasty.py').write_text(HASTY)

  def command(self, source: str | list[str], *flags: str, guard: str = str(GUARD)) -> list[str]:
    """The guard's command line, for Python source or a whole command."""
    inner = (
      [sys.executable, '-c', f'from node import *\n{source}'] if isinstance(source, str) else source
    )
    return [sys.executable, guard, f'--log={self.log}', *flags, '--', *inner]

  def start(
    self, source: str | list[str], *flags: str, guard: str = str(GUARD)
  ) -> subprocess.Popen:
    return self.run(
      self.command(source, *flags, guard=guard),
      stdin=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  def run(self, command: list[str], **pipes) -> subprocess.Popen:
    self.started.append(subprocess.Popen(command, cwd=self.path, start_new_session=True, **pipes))
    return self.started[-1]

  def wait_for(self, *names: str) -> list[dict]:
    """What these processes of the tree have said; their files exist."""
    for name in names:
      until((self.path / name).exists, f'{name} has started')
      self.told[name] = json.loads((self.path / name).read_text())
      assert is_alive(self.told[name]['pid'])
      assert all(map(os.path.exists, self.told[name]['files']))
    return [self.told[name] for name in names]

  def files(self) -> list[str]:
    return [file for told in self.told.values() for file in told['files']]

  def assert_nothing_left(self) -> None:
    """At once, not eventually: this is the state in which the guard has ended."""
    assert [name for name, told in self.told.items() if is_alive(told['pid'])] == []
    assert [file for file in self.files() if os.path.exists(file)] == []

  def lines(self) -> list[str]:
    return self.log.read_text().splitlines()

  def clear(self) -> None:
    for process in self.started:
      process.kill()
      process.wait()
      for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
        stream.close()
    for told in self.told.values():
      with contextlib.suppress(ProcessLookupError):
        os.kill(told['pid'], signal.SIGKILL)
    for file in self.files():
      pathlib.Path(file).unlink(missing_ok=True)


@pytest.fixture
def scene(tmp_path):
  scene = Scene(tmp_path)
  yield scene
  scene.clear()


@pytest.fixture
def foreign():
  """A file of the servers' kind that is none of theirs."""
  path = SHARED / f'psm_{uuid.uuid4().hex}'
  path.write_bytes(b'not yours')
  yield path
  path.unlink(missing_ok=True)


def stop(guard: subprocess.Popen) -> int:
  """Closes the pipe, as the owner does; the exit code."""
  guard.stdin.close()
  return guard.wait(DEADLINE_S)


def wait_for_looks(guard: subprocess.Popen) -> None:
  """Until the guard has gone to sleep often enough to have looked at /dev/shm in between."""

  def sleeps() -> int:
    status = pathlib.Path(f'/proc/{guard.pid}/status').read_text()
    return int(status.split('\nvoluntary_ctxt_switches:')[1].split()[0])

  wanted = sleeps() + 15
  until(lambda: sleeps() >= wanted, 'the guard has looked')


def killed(line: str) -> set[int]:
  """The process numbers in the guard's line of what it killed."""
  return {int(word) for word in line.replace(',', ' ').split() if word.isdecimal()}


def test_nothing_survives_an_owner_that_is_killed(scene):
  owner = scene.run(
    [sys.executable, '-c', OWNER, json.dumps(scene.command(FAMILY, '--grace_s=0.3'))],
    stdout=subprocess.PIPE,
    text=True,
  )
  guard = int(owner.stdout.readline())
  scene.wait_for('command', 'child', 'grandchild')
  owner.kill()
  until(lambda: not is_alive(guard), 'the guard has ended')
  scene.assert_nothing_left()
  assert 'owner' in scene.lines()[0]


def test_nothing_survives_a_command_that_is_killed(scene):
  guard = scene.start(FAMILY, '--grace_s=600', guard='hasty.py')
  command, child, grandchild = scene.wait_for('command', 'child', 'grandchild')
  wait_for_looks(guard)
  os.kill(command['pid'], signal.SIGKILL)
  assert guard.wait(DEADLINE_S) == 128 + signal.SIGKILL
  scene.assert_nothing_left()
  first, second, *removed = scene.lines()
  assert first == 'guard: stopping, because the command ended by signal SIGKILL'
  assert killed(second) == {child['pid'], grandchild['pid']}
  assert sorted(removed) == sorted(f'guard: removed {file}' for file in scene.files())


@pytest.mark.full
@pytest.mark.parametrize('new, count', [('', 1), ('made(), made_lock()', 3)])
def test_files_that_orphans_still_use_need_no_earlier_look(scene, foreign, new, count):
  # The command is gone as soon as its child uses a file that the tree did not use before, and has
  # made new ones.
  guard = scene.start(f"""
def child():
  kept.append(open('{foreign}', 'rb'))
  say('child', '{foreign}', {new})
  idle()
say('command')
while not os.path.exists('go'): time.sleep(0.01)
fork(child)
while not os.path.exists('child'): pass
os._exit(5)
""")
  scene.wait_for('command')
  wait_for_looks(guard)
  (scene.path / 'go').touch()
  assert guard.wait(DEADLINE_S) == 5
  scene.told['child'] = json.loads((scene.path / 'child').read_text())
  scene.assert_nothing_left()
  assert len(scene.files()) == count


def test_an_order_to_stop_lets_the_command_end_well(scene):
  guard = scene.start(
    """
def leave(*_):
  os.unlink('/dev/shm/' + kept[0].name)
  print('left well', flush=True)
  os._exit(3)
signal.signal(signal.SIGTERM, leave)
say('command', made())
idle()
""",
    '--grace_s=600',
  )
  scene.wait_for('command')
  assert stop(guard) == 0
  scene.assert_nothing_left()
  assert scene.lines() == [
    'guard: stopping, because the owner is gone or has closed the pipe',
    'left well',
    'guard: the command ended with exit code 3',
  ]


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_an_order_to_stop(scene, number):
  guard = scene.start("say('command', made())\nidle()", '--grace_s=600')
  scene.wait_for('command')
  guard.send_signal(number)
  assert guard.wait(DEADLINE_S) == 0
  scene.assert_nothing_left()
  assert number.name in scene.lines()[0]
  assert 'guard: the command ended by signal SIGTERM' in scene.lines()


def test_a_tree_that_ignores_sigterm_is_killed_after_the_grace(scene):
  guard = scene.start('ignore()\n' + FAMILY, '--grace_s=0.3')
  told = scene.wait_for('command', 'child', 'grandchild')
  assert stop(guard) == 0
  scene.assert_nothing_left()
  _, second, third, *_ = scene.lines()
  assert killed(second) == {process['pid'] for process in told}
  assert third == 'guard: the command ended by signal SIGKILL'


def test_descendants_have_the_whole_grace_after_the_command(scene):
  # The command ends at SIGTERM; its child, in another session, ends by itself when it has seen
  # that.
  guard = scene.start(
    """
def child():
  os.setsid()
  ignore()
  command = os.getppid()
  say('child')
  while os.getppid() == command: time.sleep(0.01)
  time.sleep(0.2)
  print('child ended well', flush=True)
fork(child)
say('command')
idle()
""",
    '--grace_s=600',
  )
  scene.wait_for('command', 'child')
  assert stop(guard) == 0
  scene.assert_nothing_left()
  assert 'child ended well' in scene.lines()
  assert not any('killed' in line for line in scene.lines())


@pytest.mark.full
def test_what_is_forked_in_the_last_moment_is_killed_too(scene):
  guard = scene.start(
    """
def late():
  os.setsid()
  ignore()
  say('late', made())
  idle()
def leave(*_):
  fork(late)
  while not os.path.exists('late'): time.sleep(0.01)
  os._exit(0)
signal.signal(signal.SIGTERM, leave)
say('command')
idle()
""",
    '--grace_s=1',
  )
  scene.wait_for('command')
  assert stop(guard) == 0
  scene.told['late'] = json.loads((scene.path / 'late').read_text())
  scene.assert_nothing_left()
  assert scene.told['late']['pid'] in killed(scene.lines()[1])


def test_a_process_that_keeps_forking_and_ending_is_caught(scene):
  # Each generation holds the FIFO open for writing: its end of file says that there is no further
  # one.
  fifo = scene.path / 'fifo'
  os.mkfifo(fifo)
  reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
  guard = scene.start("""
def comet():
  until = time.monotonic() + 100
  while time.monotonic() < until:
    if os.fork(): os._exit(0)
held = os.open('fifo', os.O_WRONLY)
fork(comet)
say('command')
idle()
""")
  (command,) = scene.wait_for('command')
  os.kill(command['pid'], signal.SIGKILL)
  assert guard.wait(DEADLINE_S) == 128 + signal.SIGKILL
  assert os.read(reader, 1) == b''
  os.close(reader)


def test_files_of_others_stay(scene, foreign):
  in_use = SHARED / f'psm_{uuid.uuid4().hex}'
  other_kind = SHARED / f'other_{in_use.name}'
  other_kind.touch()
  with in_use.open('w+b') as held:
    held.write(b'mine')
    guard = scene.start(f"""
kept.extend([open('{in_use}', 'rb'), open('{other_kind}', 'rb')])
say('command', made())
idle()
""")
    scene.wait_for('command')
    try:
      assert stop(guard) == 0
      assert foreign.read_bytes() == b'not yours'
      assert in_use.exists() and other_kind.exists()
      assert f'guard: left {in_use}, which process {os.getpid()} uses' in scene.lines()
    finally:
      in_use.unlink()
      other_kind.unlink()
  scene.assert_nothing_left()


def test_a_file_that_took_the_name_of_a_noted_one_stays(scene, foreign):
  # The tree uses the file and lets go of it; somebody else then makes another one of that name.
  guard = scene.start(
    f"""
held = open('{foreign}', 'rb')
say('using')
while not os.path.exists('let_go'): time.sleep(0.01)
held.close()
say('command')
idle()
""",
    guard='hasty.py',
  )
  scene.wait_for('using')
  wait_for_looks(guard)
  (scene.path / 'let_go').touch()
  scene.wait_for('command')
  other = SHARED / f'{uuid.uuid4().hex}'
  other.write_bytes(b'another')
  other.rename(foreign)
  assert stop(guard) == 0
  assert foreign.read_bytes() == b'another'


def test_a_file_that_the_tree_takes_into_use_later_is_noted(scene, foreign):
  guard = scene.start(
    f"""
say('command')
while not os.path.exists('use'): time.sleep(0.01)
kept.append(open('{foreign}', 'rb'))
say('using', '{foreign}')
idle()
""",
    guard='hasty.py',
  )
  scene.wait_for('command')
  wait_for_looks(guard)
  (scene.path / 'use').touch()
  scene.wait_for('using')
  wait_for_looks(guard)
  os.kill(scene.told['command']['pid'], signal.SIGKILL)
  guard.wait(DEADLINE_S)
  scene.assert_nothing_left()


def test_a_guard_that_is_killed_takes_the_command_with_it(scene):
  guard = scene.start("ignore()\nsay('command')\nidle()")
  (command,) = scene.wait_for('command')
  guard.kill()
  until(lambda: not is_alive(command['pid']), 'the command has died')


@pytest.mark.parametrize(
  'source, code, how',
  [
    ('pass', 0, 'with exit code 0'),
    ('sys.exit(7)', 7, 'with exit code 7'),
    ('os.kill(os.getpid(), signal.SIGTERM)', 143, 'by signal SIGTERM'),
    (
      'os.kill(os.getpid(), signal.SIGRTMIN + 1)',
      128 + signal.SIGRTMIN + 1,
      f'by signal {signal.SIGRTMIN + 1}',
    ),
  ],
)
def test_the_exit_code_is_the_commands(scene, source, code, how):
  scene.log.write_text('from before\n')
  guard = scene.start(f"print('out', flush=True)\nprint('err', file=sys.stderr)\n{source}")
  assert guard.wait(DEADLINE_S) == code
  assert scene.lines() == [
    'from before',
    'out',
    'err',
    f'guard: stopping, because the command ended {how}',
  ]


def test_of_a_log_that_grows_too_large_the_end_is_kept_with_a_note(scene):
  """A million bytes; a child appends a line of its own after the log was cut.

  Output written while the guard cuts the log may be lost, so the guard is stopped meanwhile.
  """
  source = """
os.kill(os.getppid(), signal.SIGSTOP)
for i in range(10_000): print(f'{i:099}')
sys.stdout.flush()
os.kill(os.getppid(), signal.SIGCONT)
while not 5_000 < os.stat('server.log').st_size <= 20_000: time.sleep(0.01)
os.system('echo the child')
"""
  guard = scene.start(f'import os, time\n{source}', '--log_bytes=20000')
  assert guard.wait(DEADLINE_S) == 0
  note, *lines, child, end = scene.lines()
  assert note.startswith('guard: removed about 99') and note.endswith('before this line')
  assert (child, end[:15]) == ('the child', 'guard: stopping')
  assert lines == [f'{i:099}' for i in range(10_000)][-len(lines) :] and 90 <= len(lines) <= 100


def test_the_command_reads_nothing_and_its_dashes_are_its_own(scene):
  inner = [
    sys.executable,
    '-c',
    'import sys; print(sys.stdin.read(), sys.argv[1:])',
    '--',
    '--log=x',
    '--',
    'y',
  ]
  assert scene.start(inner).wait(DEADLINE_S) == 0
  assert scene.lines()[0] == " ['--', '--log=x', '--', 'y']"


def test_a_channel_is_the_commands_input_and_output_and_ends_when_nothing_is_left_of_it(scene):
  bequeath = "fork(lambda: (ignore(), say('heir'), idle()))"
  answer = "print(input()[::-1], flush=True)\nprint('seen', file=sys.stderr)"
  ours, theirs = socket.socketpair()
  with ours, theirs:
    guard = scene.run(
      scene.command(f'{bequeath}\n{answer}', '--channel'), stdin=subprocess.PIPE, stdout=theirs
    )
    theirs.close()
    scene.wait_for('heir')
    ours.settimeout(DEADLINE_S)
    with ours.makefile('rwb') as lines:
      lines.write(b'order\n')
      lines.flush()
      assert lines.read() == b'redro\n'
    assert not is_alive(scene.told['heir']['pid'])
    assert guard.wait(DEADLINE_S) == 0 and scene.lines()[0] == 'seen'


def test_a_command_that_cannot_be_started_is_127(scene):
  guard = scene.start(['/no/such/server'])
  _, err = guard.communicate(timeout=DEADLINE_S)
  line = 'guard: /no/such/server cannot be started: No such file or directory'
  assert (guard.returncode, err) == (127, f'{line}\n')
  assert scene.lines() == [line]


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--grace_s=-1'], 'grace_s'),
    (['--log=/no/such/log'], '/no/such/log'),
    (['--log_bytes=10'], 'log_bytes'),
  ],
)
def test_a_bad_command_line_is_2(scene, flags, words):
  guard = scene.start("say('command')", *flags)
  _, err = guard.communicate(timeout=DEADLINE_S)
  assert guard.returncode == 2
  assert words in err.splitlines()[-1]
  assert not (scene.path / 'command').exists()


@pytest.mark.parametrize('end', ['the command ends', 'an order of a living owner'])
def test_paths_stay_while_the_owner_lives(scene, end):
  path = scene.path / 'published'
  path.touch()
  ends = end == 'the command ends'
  guard = scene.start("say('command')\n" + ('' if ends else 'idle()'), f'--remove_orphaned={path}')
  if not ends:
    scene.wait_for('command')
    guard.terminate()
  assert guard.wait(DEADLINE_S) == 0
  assert (scene.path / 'command').exists()
  assert path.exists()


def test_paths_are_removed_when_the_owner_is_gone_whatever_happens_to_one_of_them(scene):
  tree, file, link, kept = (scene.path / name for name in ('tree', 'file', 'link', 'kept'))
  (tree / 'deep').mkdir(parents=True)
  (tree / 'deep' / 'x').touch()
  kept.mkdir()
  file.touch()
  link.symlink_to(kept)
  wanted = ['/proc/version', str(scene.path / 'missing'), str(tree), str(file), str(link)]
  guard = scene.start("say('command')\nidle()", *(f'--remove_orphaned={path}' for path in wanted))
  scene.wait_for('command')
  assert all(path.exists() for path in (tree, file, link))
  assert stop(guard) == 0
  assert not any(map(os.path.lexists, (tree, file, link)))
  assert kept.is_dir()
  failed, *removed = scene.lines()[-4:]
  assert failed.startswith('guard: cannot remove /proc/version: ')
  assert removed == [f'guard: removed {path}' for path in (tree, file, link)]
