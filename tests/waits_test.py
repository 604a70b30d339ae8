"""Every wait of the program is bounded where it stands, or says what bounds it;
docs/develop/waits.md lists all.
"""

import ast
import io
import re
import tokenize

import pytest
from paths import ROOT

PAGE = ROOT / 'docs' / 'develop' / 'waits.md'
SANDBOXED = ROOT / 'jaxrl_llm' / 'rewards' / 'sandbox' / 'inside'
"""Runs inside sandboxes, which their owner ends when a program's time is over."""
MODULES = sorted(
  path
  for top in ('jaxrl_llm', 'launch')
  for path in (ROOT / top).rglob('*.py')
  if SANDBOXED not in path.parents
)

MARKER = re.compile(r"# Wait '(\w+)': \S")
BOUNDING = {
  'bounded',
  'gathered',
  'limit',
  'watched',
  'asyncio.wait_for',
  'asyncio.timeout',
  'asyncio.timeout_at',
}
"""Calls that bound everything inside them."""
NAMING = {'bounded', 'gathered', 'limit', 'watched', 'ended'}
"""Functions of `core.waits` that take a name."""
SEVERAL = {
  'asyncio.wait',
  'connection.wait',
  'multiprocessing.connection.wait',
  'futures.wait',
  'wait',
}
"""Functions whose first argument is what to wait for."""
READS = {
  'recv',
  'recvfrom',
  'recvmsg',
  'recv_into',
  'recv_bytes',
  'recv_fds',
  'accept',
  'readline',
  'readexactly',
}
"""Reads of sockets and pipes. A `readline` with a limit reads a file."""
COLLECTIVES = {
  'sync_global_devices',
  'process_allgather',
  'broadcast_one_to_all',
  'wait_at_barrier',
}


def bare_waits(source: str) -> list[tuple[int, str]]:
  """Line and text of each wait that nothing bounds where it stands.

  Not seen, since it looks the same with a bound elsewhere or is none: locks that are held by
  `with`, `gather` and task groups (what they join has waits of its own), writes, files, `while
  True` loops, computation.
  """
  visitor = _Waits(_marked_lines(source))
  visitor.visit(ast.parse(source))
  return visitor.found


def names(source: str) -> set[str]:
  """Names of a module's waits: in comments, and as the `name` of `bounded` and the like."""
  found = {
    match[1] for line in _comments(source).values() for match in [MARKER.match(line)] if match
  }
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition('.')[2] in NAMING:
      found |= {
        word.value.value
        for word in node.keywords
        if word.arg == 'name' and isinstance(word.value, ast.Constant)
      }
  return found


def _comments(source: str) -> dict[int, str]:
  tokens = tokenize.generate_tokens(io.StringIO(source).readline)
  return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def _marked_lines(source: str) -> set[int]:
  """Lines with a marker, or below one that stands alone."""
  lines, marked = source.splitlines(), set()
  for number, comment in _comments(source).items():
    if MARKER.match(comment):
      marked.add(number)
      if lines[number - 1].strip() == comment:
        marked.add(number + 1)
  return marked


class _Waits(ast.NodeVisitor):
  def __init__(self, marked: set[int]):
    self.found: list[tuple[int, str]] = []
    self._marked, self._bounding = marked, 0
    self._functions: list[ast.AST] = []

  def _note(self, node: ast.AST) -> None:
    if not self._bounding and not self._marked & {*range(node.lineno, node.end_lineno + 1)}:
      self.found.append((node.lineno, ast.unparse(node).partition('\n')[0]))

  def _in_function(self, node: ast.AST) -> None:
    bounding, self._bounding = self._bounding, 0  # It may be called anywhere.
    self._functions.append(node)
    self.generic_visit(node)
    self._functions.pop()
    self._bounding = bounding

  visit_FunctionDef = visit_AsyncFunctionDef = _in_function

  def _called_before(self, names: set[str], line: int) -> bool:
    """Whether this function calls one of them above the line."""
    calls = (
      (node for node in ast.walk(self._functions[-1]) if isinstance(node, ast.Call))
      if self._functions
      else ()
    )
    return any(
      call.lineno < line and ast.unparse(call.func).rpartition('.')[2] in names for call in calls
    )

  def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
    for item in node.items:
      opened = item.context_expr
      if isinstance(opened, ast.Call) and _method(opened).endswith('PoolExecutor'):
        self._note(opened)
      if isinstance(node, ast.AsyncWith) and _asks(opened) and not _has_bound(opened):
        self._note(opened)
      self.visit(item)
    bounds = sum(_bounds(item.context_expr) for item in node.items)
    self._bounding += bounds
    for statement in node.body:
      self.visit(statement)
    self._bounding -= bounds

  visit_AsyncWith = visit_With

  def visit_Await(self, node: ast.Await) -> None:
    if isinstance(node.value, ast.Name | ast.Attribute | ast.IfExp):  # A future or a task.
      self._note(node)
    self.generic_visit(node)

  def visit_While(self, node: ast.While) -> None:
    calls = {_method(call) for call in ast.walk(node) if isinstance(call, ast.Call)}
    endless = isinstance(node.test, ast.Constant)
    if not endless and 'sleep' in calls and not calls & {'monotonic', 'time'}:
      self._note(node.test)
    self.generic_visit(node)

  def visit_Call(self, node: ast.Call) -> None:
    if self._is_bare(node):
      self._note(node)
    bounds = _bounds(node)
    self._bounding += bounds
    self.generic_visit(node)
    self._bounding -= bounds

  def _is_bare(self, call: ast.Call) -> bool:
    function, method, count = ast.unparse(call.func), _method(call), len(call.args)
    if _has_bound(call):
      return False
    if method in ('wait', 'communicate') and function not in SEVERAL:
      return count == 0 and not self._called_before({'kill', 'killpg'}, call.lineno)
    if method == 'wait':
      return count < 2
    if method == 'wait_for':
      return function != 'asyncio.wait_for' and count < 2
    if method in READS:
      return not (method == 'readline' and count) and not self._called_before(
        {'settimeout'}, call.lineno
      )
    if method == 'result':  # In a coroutine it is that of a task that has ended.
      return (
        count == 0 and bool(self._functions) and isinstance(self._functions[-1], ast.FunctionDef)
      )
    if (
      method in ('get', 'join', 'acquire', 'select')
      and '.' in function
      and function != 'select.select'
    ):
      return count == 0
    if method in ('flock', 'lockf'):
      return not {'LOCK_NB', 'LOCK_UN'} & set(re.findall(r'\w+', ast.unparse(call)))
    if function in ('os.waitpid', 'os.wait4', 'os.waitid', 'os.wait3'):
      return 'WNOHANG' not in ast.unparse(call)
    if method == 'poll':  # That of a process does not wait.
      return 'None' in ast.unparse(call) or (
        count == 0 and function.removesuffix('.poll').endswith('poll')
      )
    if function == 'select.select':
      return count < 4
    if function in (
      'subprocess.run',
      'subprocess.call',
      'subprocess.check_call',
      'subprocess.check_output',
    ):
      return True
    if function == 'jax.distributed.initialize':
      return True
    if method == 'shutdown':
      return count == 0
    if method == 'Thread':  # The end of the process waits for it.
      return True
    return method in COLLECTIVES or method in ('urlopen', 'create_connection')


def _method(call: ast.Call) -> str:
  return ast.unparse(call.func).rpartition('.')[2]


def _asks(opened: ast.AST) -> bool:
  return isinstance(opened, ast.Call) and _method(opened) in ('request', 'post')


def _bounds(node: ast.AST) -> bool:
  return isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix('waits.') in BOUNDING


def _has_bound(call: ast.Call) -> bool:
  """Whether an argument is a time limit, or says that it is not to wait."""
  for word in call.keywords:
    if word.arg in ('timeout', 'deadline_s') and 'None' not in re.findall(
      r'\w+', ast.unparse(word.value)
    ):
      return True
    if word.arg in ('wait', 'block', 'blocking') and ast.unparse(word.value) == 'False':
      return True
    if word.arg == 'daemon' and ast.unparse(word.value) == 'True':
      return True
  return False


@pytest.mark.parametrize('path', MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_wait_is_bare(path):
  for line, code in bare_waits(path.read_text()):
    pytest.fail(
      f'{path.relative_to(ROOT)}:{line}: {code} waits without a bound; wrap it in '
      'core.waits.bounded, give it a timeout, or say what ends it in a comment '
      '"# The wait \'NAME\' is BOUND."'
    )


def test_the_page_lists_every_wait_that_has_a_name_and_no_other():
  listed = re.findall(r'^\| `(\w+)` \|', PAGE.read_text(), re.MULTILINE)
  named = set().union(*(names(path.read_text()) for path in MODULES))
  assert sorted(listed) == sorted(named)


BARE = [
  'event.wait()',
  'process.wait(timeout=None)',
  'condition.wait_for(ready)',
  'await asyncio.wait(tasks)',
  'asyncio.create_task(stop.wait())',
  'connection.wait([pipe])',
  'futures.wait(calls)',
  'queue.get()',
  'queue.get(timeout=None if deadline is None else deadline)',
  'thread.join()',
  'future.result()',
  'await future',
  'await self._task',
  'lock.acquire()',
  'process.communicate()',
  'pipe.recv()',
  'server.accept()',
  'stream.readline()',
  'await stream.readexactly(4)',
  'selector.select()',
  'select.select(sources, [], [])',
  'poll.poll()',
  'poll.poll(None)',
  'subprocess.run(command)',
  'subprocess.check_output(command, text=True)',
  'os.waitpid(pid, 0)',
  'fcntl.flock(file, fcntl.LOCK_EX)',
  'urllib.request.urlopen(url)',
  'socket.create_connection(address)',
  'executor.shutdown()',
  'executor.shutdown(wait=True)',
  'jax.distributed.initialize(address)',
  'jax.distributed.shutdown()',
  "multihost_utils.sync_global_devices('here')",
  'threading.Thread(target=work).start()',
  'with lock: event.wait()',
  'async with lock: await event.wait()',
  'with ThreadPoolExecutor(1) as pool: pass',
  'async with session.post(url, json=body) as response: pass',
  'while not ready(): await asyncio.sleep(0.1)',
]
BOUNDED = [
  'event.wait(5)',
  'await asyncio.wait(tasks, timeout=1.0)',
  'connection.wait([pipe], timeout=0)',
  'queue.get(timeout=left)',
  'values.get(key)',
  "', '.join(words)",
  'thread.join(1.0)',
  'future.result(BUDGET_S)',
  'lock.acquire(timeout=1)',
  'lock.acquire(blocking=False)',
  'process.communicate(timeout=3)',
  'process.poll()',
  'poll.poll(100)',
  'file.readline(MAX_BYTES)',
  'subprocess.run(command, timeout=START_S)',
  'os.waitpid(-1, os.WNOHANG)',
  'fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)',
  'executor.shutdown(wait=False, cancel_futures=True)',
  'connection.shutdown(socket.SHUT_RDWR)',
  'threading.Thread(target=work, daemon=True).start()',
  'async with session.post(url, json=body, timeout=timeout) as response: pass',
  'await event_handler()',
  "await bounded(event.wait(), name='a', owner='b', waits_for='c', deadline_s=1.0)",
  'await asyncio.wait_for(event.wait(), 1.0)',
  'async with asyncio.timeout(1.0): await event.wait()',
  'async with limit(name=n, owner=o, waits_for=w, deadline_s=1.0): await future',
  'with watched(name=n, owner=o, waits_for=w, deadline_s=1.0): event.wait()',
  'while time.monotonic() < deadline: await asyncio.sleep(0.1)',
  'process.kill(); x = 1\n  process.wait()',
  'link.settimeout(1.0)\n  link.recv(10)',
  "await event.wait()  # Wait 'work': bounded by the caller.",
  "# Wait 'work': bounded by the caller.\n  await event.wait()",
]


def _function(body: str, kind: str) -> str:
  return f'{kind} f():\n  {body}\n'


@pytest.mark.parametrize('code', BARE)
def test_a_bare_wait_is_found(code):
  kind = 'async def' if 'await ' in code or 'async ' in code else 'def'
  assert [line for line, _ in bare_waits(_function(code, kind))] == [2]


@pytest.mark.parametrize('code', BOUNDED)
def test_a_wait_with_a_bound_is_accepted(code):
  kind = 'async def' if 'await ' in code or 'async ' in code else 'def'
  assert bare_waits(_function(code, kind)) == []


def test_a_bound_around_a_function_does_not_cover_calls_of_it():
  source = (
    'async def f():\n  async with asyncio.timeout(1):\n    async def g():\n      await '
    'event.wait()\n'
  )
  assert [line for line, _ in bare_waits(source)] == [4]


@pytest.mark.parametrize('comment', ['# The wait', "# Wait 'work'", "# Wait 'work':", '# noqa'])
def test_a_comment_that_names_no_bound_marks_nothing(comment):
  assert bare_waits(f'async def f():\n  await event.wait()  {comment}\n')


def test_the_names_of_a_module_are_those_of_its_comments_and_calls():
  source = (
    "x = bounded(y, name='a', deadline_s=1)\ny = gathered(z, name='b')\nz.wait()  "
    "# Wait 'c': short.\n# Wait 'd'\n"
  )
  assert names(source) == {'a', 'b', 'c'}
