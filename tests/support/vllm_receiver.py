"""A worker's side of vLLM's own NCCL engine, run in vLLM's environment. Its NCCL group is replaced
by a gloo group, and its model by one that keeps what it is given.

Writes null once the engine is there. Then it reads lines of JSON from stdin, [method of the engine,
its argument], and answers each with a line of JSON: null or, after `update_weights`, the tensors as
hexadecimal bytes, or {"error": reason}.
"""

import json
import os
import sys
from types import SimpleNamespace

if __name__ == '__main__':
  # Before the imports below, because vLLM logs to stdout while it is imported.
  ANSWERS = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)

import gloo_nccl
import torch
from vllm.distributed.weight_transfer import nccl_common
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine


class Model:
  """Keeps loaded tensors.

  Attributes:
    loaded: (name, bytes) of each, in the order of their arrival.
  """

  def __init__(self):
    self.loaded = []

  def load_weights(self, weights):
    for name, tensor in weights:
      assert tensor.is_contiguous()
      self.loaded.append([name, bytes(tensor.view(-1).view(torch.uint8).numpy()).hex()])


def engine():
  nccl_common.uid_init_process_group = gloo_nccl.join
  torch.accelerator.current_device_index = lambda: 0
  torch.accelerator.synchronize = lambda: None
  torch.cuda.current_stream = lambda: None
  parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
  config = SimpleNamespace(parallel_config=parallel, model_config=None)
  return NCCLWeightTransferEngine(None, config, torch.device('cpu'), Model())


def main(answers):
  receiver = engine()
  answers.write('null\n')
  answers.flush()
  for line in sys.stdin:
    method, given = json.loads(line)
    try:
      if method == 'init_transfer_engine':
        given = receiver.parse_init_info(given)
      getattr(receiver, method)(given)
      answer, receiver.model.loaded = receiver.model.loaded or None, []
    except Exception as error:
      answer = {'error': f'{type(error).__name__}: {error}'}
    answers.write(json.dumps(answer) + '\n')
    answers.flush()


if __name__ == '__main__':
  main(ANSWERS)
