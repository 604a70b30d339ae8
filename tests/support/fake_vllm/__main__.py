"""A fake vLLM server as a process: `python tests/support/fake_vllm --model=DIR --uds=PATH`."""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import signal
import sys
from collections.abc import Sequence

# Python puts this directory first on the path. Its modules would then hide other modules of the
# same names.
sys.path[0] = str(pathlib.Path(__file__).parents[1])

from fake_vllm.backends import Sampled  # noqa: E402
from fake_vllm.faults import Latency  # noqa: E402
from fake_vllm.server import FakeServer  # noqa: E402
from jaxrl_llm.core.errors import UserError  # noqa: E402
from jaxrl_llm.weights.hf import read_spec, read_special_tokens  # noqa: E402


async def serve(server: FakeServer, *, uds: str | None, port: int) -> int:
  """Serves until SIGTERM or SIGINT arrives (returns 0), or until the server has died (returns
  1).
  """
  stop, loop = asyncio.Event(), asyncio.get_running_loop()
  for number in (signal.SIGTERM, signal.SIGINT):
    loop.add_signal_handler(number, stop.set)
  address = await server.start(uds=uds, port=port)
  print(f'fake vLLM server at {address}', flush=True)
  # Wait 'signal': unbounded, since the server runs until then.
  waits = [asyncio.create_task(event.wait()) for event in (stop, server.ended)]
  # Wait 'signal': unbounded, since the server runs until then.
  await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
  for wait in waits:
    wait.cancel()
  await server.close()
  return 0 if stop.is_set() else 1


def main(argv: Sequence[str]) -> int:
  parser = argparse.ArgumentParser(prog='python tests/support/fake_vllm', allow_abbrev=False)
  parser.add_argument(
    '--model', required=True, help='Directory whose config.json tells the model; weights are drawn.'
  )
  where = parser.add_mutually_exclusive_group(required=True)
  where.add_argument('--uds', help='Unix socket to serve at.')
  where.add_argument('--port', type=int, help='Port of 127.0.0.1 to serve at; 0 = a free one.')
  parser.add_argument('--dtype', default='float32', help='Of weights and activations.')
  parser.add_argument(
    '--max_model_len',
    type=int,
    help="Tokens of the longest sequence; the model's own if not given.",
  )
  parser.add_argument(
    '--latency_median_s', type=float, default=0.0, help='Median of what a completion takes longer.'
  )
  parser.add_argument(
    '--latency_sigma', type=float, default=0.0, help='Standard deviation of its logarithm.'
  )
  parser.add_argument('--token_s', type=float, default=0.0, help='Seconds between two tokens.')
  parser.add_argument(
    '--piece', type=int, default=16, help='Tokens that are sampled before a stream sends them.'
  )
  parser.add_argument('--seed', type=int, default=0, help='Of weights, tokens and latencies.')
  parser.add_argument('--api_key', help='Bearer token that is wanted on /v1 and /inference.')
  options = parser.parse_args(argv)
  spec = read_spec(options.model)

  async def run() -> int:
    server = FakeServer(
      Sampled(spec, seed=options.seed, dtype=options.dtype, piece=options.piece),
      max_model_len=options.max_model_len or spec.max_position_embeddings,
      vocab_size=spec.vocab_size,
      eos_ids=read_special_tokens(options.model).eos_ids,
      latency=Latency(
        median_s=options.latency_median_s,
        sigma=options.latency_sigma,
        token_s=options.token_s,
        seed=options.seed,
      ),
      api_key=options.api_key,
      root=options.model,
    )
    return await serve(server, uds=options.uds, port=options.port)

  return asyncio.run(run())


if __name__ == '__main__':
  try:
    sys.exit(main(sys.argv[1:]))
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(error.exit_code)
