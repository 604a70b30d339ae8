"""A server's process, before it serves."""

import asyncio
import pathlib
import sys

import pytest

from jaxrl_llm.core.errors import RunError
from jaxrl_llm.rollout.vllm.server import OwnedServer, ServerCommand


@pytest.mark.parametrize('missing', ['log', 'worker'])
def test_a_server_whose_files_cannot_be_written_fails_with_one_line(tmp_path, missing):
  file = tmp_path / 'file'
  file.touch()
  worker = {'worker': pathlib.Path('/no/such/worker.py')} if missing == 'worker' else {}
  command = ServerCommand(
    python=pathlib.Path(sys.executable), model=tmp_path, args={}, env={}, worker_files=worker
  )
  log = tmp_path / 'log' if missing == 'worker' else file / 'log'
  server = OwnedServer(command, name='vllm-0', log=log)
  with pytest.raises(RunError, match=r'^engine vllm-0: cannot be started \(\[Errno ') as caught:
    server.start()
  assert '\n' not in str(caught.value) and not server.is_running()
  asyncio.run(server.close())
