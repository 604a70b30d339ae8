"""Provides a service to runs on this or other machines until Ctrl-C: vLLM servers, an explorer, a
reward model, sandboxes, or an inbox for delayed rewards.

  jaxrl serve --model=DIR [--servers=2] [-- --max-num-seqs 64 ...]                  (--role=vllm)
  jaxrl serve --model=DIR --host=10.0.0.5 --port=8400 --token_file=FILE \\
    --tls_cert=FILE --tls_key=FILE
  jaxrl serve --role=explorer --master=https://HOST:PORT --key_file=FILE \\
    [--ca_file=FILE] [--name=NAME]
  jaxrl serve --role=reward --model=DIR [--host=10.0.0.6 --port=8500 --token_file=FILE ...]
  jaxrl serve --role=sandbox [--programs=8] [--host=10.0.0.7 --port=8500 --token_file=FILE ...]
  jaxrl serve --role=feedback --workdir=DIR [--host=10.0.0.8 --port=8600 --token_file=FILE ...]

vllm: servers that a trainer attaches to. DIR holds the policy's config.json (and its tokenizer, for
text requests); the trainer sends the weights. Prints the addresses for
`--config.rollout.vllm.addresses='["unix:...", ...]'`. Arguments after `--` are vLLM's own options.
explorer: a process that runs the rollout workflow (task to samples) for the run that listens at
`rollout.explorers.listen`; any number may join and leave. reward: a reward model on this machine's
devices, for scorers of kind `http`.
sandbox: runs up to --programs untrusted programs at once, for the scorer `code`. List its address
in the scorer's option `addresses`, and set `key_file` to a file with the same token.
feedback: accepts delayed rewards for the run in DIR, which may be active or stopped: `POST
/feedback` with `{"uid": ..., "value": ..., "who": ...}`. This service does not register itself.

With --registry=DIR, addresses and tokens need not be exchanged by hand. DIR is a directory that all
hosts of the job share. Services register in it and use its key as their token. Runs with
`registry.directory` find the services in it, and explorers wait there for a run (instead of
--master).

Services listen on unix sockets that only this user can reach. With --host, a front (an HTTP server)
listens at that address (vllm: one per server, on ports PORT, PORT + 1, ...). It rejects every
request that lacks the token of --token_file, on all paths. `--role=ROLE --help` lists the flags of
a role.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

ROLES = {
  'vllm': 'jaxrl_llm.app.serve.vllm',
  'explorer': 'jaxrl_llm.app.serve.explorer',
  'reward': 'jaxrl_llm.app.serve.reward',
  'sandbox': 'jaxrl_llm.app.serve.sandbox',
  'feedback': 'jaxrl_llm.app.serve.feedback',
}
"""Module of each role. Only the requested one is imported, so that a host needs only the
dependencies of its role.
"""


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  argv = list(argv)
  role, rest = 'vllm', []
  role_args, vllm_args = (
    (argv, []) if '--' not in argv else (argv[: argv.index('--')], argv[argv.index('--') :])
  )
  words = iter(role_args)
  for word in words:
    if word in ('--role', '-role'):
      role = next(words, '')
    elif word.startswith(('--role=', '-role=')):
      role = word.partition('=')[2]
    else:
      rest.append(word)
  if role not in ROLES:
    sys.stderr.write(f'error: --role={role}: wanted one of {", ".join(ROLES)}\n')
    return 2
  return importlib.import_module(ROLES[role]).run([*rest, *vllm_args], __doc__)
