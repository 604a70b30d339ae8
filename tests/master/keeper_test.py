"""The keeper of a process other than 0."""

import asyncio
import types

from jaxrl_llm.master.keeper import RunKeeper, Start
from jaxrl_llm.master.loop import LoopState
from jaxrl_llm.master.process import Process
from jaxrl_llm.runtime import goodput


class Follower:
  """Coordinator of a process that is told `said`."""

  leads = False

  def __init__(self, said):
    self.said = said

  async def broadcast(self, decision):
    assert decision is None
    return self.said


def test_every_process_knows_which_steps_are_repeated(tmp_path):
  process = Process(coordinator=Follower(said=2), device=None, mesh=None)
  stage = types.SimpleNamespace(name='grpo', start=1)
  batch = types.SimpleNamespace(plan=types.SimpleNamespace(evaluate=False, commit=False))
  keeper = RunKeeper(
    process,
    Start(stop=None),
    publisher=None,
    checkpoints=None,
    logs=None,
    generates=False,
    goodput_file=goodput.file_of(tmp_path, 1),
  )

  async def main():
    await keeper.start(LoopState(None, 1, evaluated=True), stage)
    for step in (2, 3):
      with process.stopwatch.timed('step'), process.stopwatch.timed('gen'):
        pass
      await keeper.after_step(LoopState(None, step), stage, batch, None)

  asyncio.run(main())
  classes = [
    {key.removeprefix('goodput/seconds/trainer/') for key in row} & {'recompute', 'wait'}
    for row in goodput.rows_of_others(tmp_path)
  ]
  assert classes == [{'recompute'}, {'wait'}]
