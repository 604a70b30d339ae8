"""Answers of a fake server in vLLM's form, complete or damaged."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

from fake_vllm.core import Call, Core, Sample
from fake_vllm.requests import MODEL, Params

_MESSAGE = 4000
"""Maximum number of characters of an error message."""


def to_json(answer: Any, *, status: int = 200) -> web.Response:
  return web.Response(
    body=json.dumps(answer).encode(), status=status, content_type='application/json'
  )


def completions(call: Call, *, with_prompt: bool) -> dict[str, Any]:
  """Returns the body of the response to a call that has ended."""
  drawn = sum(len(sample.tokens) for sample in call.samples)
  usage = {
    'prompt_tokens': len(call.prompt),
    'total_tokens': len(call.prompt) + drawn,
    'completion_tokens': drawn,
  }
  usage |= {'prompt_tokens_details': None, 'completion_tokens_details': None}
  body = {
    'request_id': call.name,
    'model': MODEL,
    'created': int(time.time()),
    'usage': usage,
    'prompt_logprobs': None,
  }
  if call.scores is not None:
    rows = zip(call.prompt[1:], *call.scores, strict=True)
    scores = [
      {str(token): {'logprob': value, 'rank': rank, 'decoded_token': None}}
      for token, value, rank in rows
    ]
    body['prompt_logprobs'] = [None, *scores]
  body |= dict.fromkeys(('prompt_token_id_logprobs', 'mm_placeholders', 'metrics'))
  body |= dict.fromkeys(('kv_transfer_params', 'ec_transfer_params'))
  body |= {'prompt_token_ids': call.prompt if with_prompt else None, 'output_mode': 'tokens'}
  return body | {'choices': [_choice(sample, call.params) for sample in call.samples]}


def event(call: Call, sample: Sample, sent: int, *, with_prompt: bool) -> dict[str, Any]:
  """Returns a stream's event with the tokens of a sample after the first `sent` tokens."""
  body: dict[str, Any] = {'request_id': call.name, 'usage': None}
  if with_prompt:
    body |= {'prompt_token_ids': call.prompt}
  choice = _choice(sample, call.params, sent)
  if sample.finish is None:
    choice |= {'stop_reason': None, 'weight_versions': None}
  return body | {'output_mode': 'tokens', 'choices': [choice]}


def _choice(sample: Sample, params: Params, sent: int = 0) -> dict[str, Any]:
  rows = [
    {'token_id': token, 'logprob': max(logprob, -9999.0), 'rank': None}
    for token, logprob in zip(sample.tokens[sent:], sample.logprobs[sent:], strict=True)
  ]
  return {
    'index': sample.index,
    'finish_reason': sample.finish,
    'stop_reason': {'stop': sample.tokens[-1:], 'repetition': ['repetition_detected']}.get(
      sample.finish, [None]
    )[0],
    'token_ids': sample.tokens[sent:],
    'routed_experts': None,
    'sampling_mask': None,
    'weight_versions': list(_spans(sample.labels)),
    'logprobs': None
    if params.logprobs is None
    else {'content': [{**row, 'top_logprobs': [row]} for row in rows]},
  }


def _spans(labels: Sequence[str]) -> Iterator[dict[str, Any]]:
  start = 0
  for label, group in itertools.groupby(labels):
    end = start + len(list(group))
    yield {'version': label, 'start': start, 'end': end}
    start = end


def metrics(core: Core) -> str:
  """Returns the text of /metrics, with only a few of vLLM's metrics."""
  samples = [sample for call in core.calls for sample in call.samples]
  waiting = sum(not s.tokens and s.finish is None for s in samples) if core.paused else 0
  values = [
    ('gauge', 'num_requests_running', '', core.running - waiting),
    ('gauge', 'num_requests_waiting', '', waiting),
    ('counter', 'prompt_tokens_total', '', core.prompt_tokens),
    ('counter', 'generation_tokens_total', '', core.tokens),
  ]
  for reason in ('stop', 'length', 'abort', 'repetition'):
    values.append(
      ('counter', 'request_success_total', f'finished_reason="{reason}",', core.finished[reason])
    )
  lines = []
  for kind, name, labels, value in values:
    lines.append(f'# TYPE vllm:{name} {kind}')
    lines.append(f'vllm:{name}{{engine="0",{labels}model_name="{MODEL}"}} {float(value)}')
  return '\n'.join([*dict.fromkeys(lines), ''])


def failure(
  message: str, *, status: int = 500, kind: str = 'InternalServerError', param: str | None = None
) -> web.Response:
  message = message[:_MESSAGE]
  # vLLM hides paths too, so a client must not rely on a path in a message.
  message = re.sub(r'/(?:home|usr|opt|var|tmp|root|lib|mnt|srv)(?:/[\w.\-]+)+', '<path>', message)
  message = re.sub(r'(?:/[\w\-]+)+/[\w\-]+\.\w+', '<path>', message)
  error = {'message': message.strip(), 'type': kind, 'param': param, 'code': status}
  return to_json({'error': error}, status=status)


async def send_and_close(request: web.Request, response: web.Response) -> web.Response:
  """Closes the connection without announcing it, as vLLM's server does after an exception."""
  await response.prepare(request)
  await response.write_eof()
  if request.transport is not None:
    request.transport.close()
  return response


async def send_half(request: web.Request, whole: web.StreamResponse) -> web.StreamResponse:
  """Sends half of the body, and then breaks the connection off."""
  assert isinstance(whole, web.Response) and isinstance(whole.body, bytes)
  response = web.StreamResponse(status=whole.status, headers={'Content-Type': 'application/json'})
  response.content_length = len(whole.body)
  await response.prepare(request)
  await response.write(whole.body[: len(whole.body) // 2])
  if request.transport is not None:
    request.transport.close()
  return response


def aborted_half_way(response: web.StreamResponse) -> web.StreamResponse:
  """Returns the same completions, each changed as if it had been aborted after half of its
  tokens.
  """
  if response.status != 200:
    return response
  assert isinstance(response, web.Response) and response.text is not None
  body = json.loads(response.text)
  for choice in body['choices']:
    half = len(choice['token_ids']) // 2
    choice |= {
      'finish_reason': 'abort',
      'stop_reason': None,
      'token_ids': choice['token_ids'][:half],
    }
    spans = [{**span, 'end': min(half, span['end'])} for span in choice['weight_versions']]
    choice['weight_versions'] = [span for span in spans if span['start'] < span['end']]
    if choice['logprobs'] is not None:
      choice['logprobs'] = {'content': choice['logprobs']['content'][:half]}
  return to_json(body)
