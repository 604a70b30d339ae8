"""Interrupts of a run that a Python program started."""

import asyncio
import os
import signal
import threading
import time
import types

from jaxrl_llm.app import training


def test_an_interrupt_that_finds_the_run_ended_is_no_error(tmp_path, monkeypatch):
  """The run sees the interrupt and ends before the main thread passes it on."""
  thread = threading.Thread

  class Interrupted(threading.Event):
    def set(self):
      super().set()
      deadline = time.monotonic() + 60
      while any(each.name == 'train' for each in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)

  interrupted = Interrupted()

  async def run(config, path, *, branch, on_start):
    os.kill(os.getpid(), signal.SIGINT)
    while not interrupted.is_set():
      await asyncio.sleep(0.001)
    signals = []
    on_start(signals.append)
    assert signals == [signal.SIGINT]
    return 3

  names = types.SimpleNamespace(Event=lambda: interrupted, Thread=thread)
  monkeypatch.setattr(training, 'threading', names)
  monkeypatch.setattr(training, 'run', run)
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    assert training._run_in_a_thread(None, tmp_path, None) == 3
  finally:
    signal.signal(signal.SIGINT, before)
