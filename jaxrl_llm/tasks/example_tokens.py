"""Tokenizes examples, and determines which tokens enter the loss.

A row is encoded as a whole. A conversation is rendered in the same way as by transformers'
`apply_chat_template`. Any other row consists of its text and the end token. To locate the beginning
or end of an answer, the text before this position is encoded by itself, and the result must be
equal to the first tokens of the row. Hence the policy learns to continue exactly the tokens with
which it will be prompted.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from absl import logging
from jaxtyping import Bool, Int32

from jaxrl_llm.core.errors import UserError, one_line
from jaxrl_llm.core.records.sample import Role, Sample, Source
from jaxrl_llm.core.records.task import ChatMessage
from jaxrl_llm.core.types import Json
from jaxrl_llm.tasks import sources
from jaxrl_llm.tasks.examples import (
  Completion,
  Conversation,
  Example,
  ExampleSet,
  LossOn,
  Text,
)
from jaxrl_llm.tasks.messages import called_name
from jaxrl_llm.tasks.rendering import Rendered
from jaxrl_llm.tasks.tokenizer import Tokenizer

_ALL = ((0, None),)
"""A single range [start, end) that contains all tokens of a row."""
_SEQUENCES = ('corrupt', 'too_long', 'truncated', 'without_loss', 'sequences')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleTokens:
  """Tokens of an example and their loss mask."""

  tokens: Int32[np.ndarray, 'time']
  loss_mask: Bool[np.ndarray, 'time']
  """True for tokens that enter the loss; False at position 0, which has no logprob."""


def example_samples(
  examples: ExampleSet, tokenizer: Tokenizer, longest: int
) -> tuple[list[Sample], dict[str, int]]:
  """Converts examples to samples of at most `longest` tokens each.

  Returns the samples and five counts, keyed by name:
    corrupt: rows that are left out because `example_tokens` refuses them.
    too_long: rows that are left out because of their length.
    truncated: rows that are shortened to `longest` tokens.
    without_loss: rows that are left out because, once shortened or split, they have no token in the
      loss.
    sequences: samples returned.

  Raises:
    UserError: a row is corrupt and `on_corrupt` is 'fail'; a row is too long and `too_long` is
      'fail'; or no sequence is left.
  """
  config, counts = examples.config, dict.fromkeys(_SEQUENCES, 0)
  if config.chat_template is not None:
    tokenizer = tokenizer.with_template(config.chat_template)
  samples: list[Sample] = []
  stops = False
  for example in examples.examples:
    try:
      located = example_tokens(example, tokenizer, loss_on=config.loss_on)
    except (UserError, ValueError) as error:
      counts['corrupt'] += 1
      corrupt = sources.Corrupt(where=example.where, reason=str(error))
      reader = f'examples {config.name}'
      sources.report_corrupt(corrupt, reader, config.on_corrupt, counts['corrupt'])
      continue
    length = len(located.tokens)
    if length > longest and config.too_long == 'fail':
      raise UserError(
        f'{example.where}: {length} tokens, wanted at most {longest} (examples {config.name}; '
        "too_long='truncate', 'split' or 'skip' allows such rows)"
      )
    if length > longest and config.too_long == 'skip':
      counts['too_long'] += 1
      continue
    counts['truncated'] += length > longest and config.too_long == 'truncate'
    pieces = [
      _part(located, start, start + longest)
      for start in range(0, length if config.too_long == 'split' else 1, longest)
    ]
    kept = [(i, piece) for i, piece in enumerate(pieces) if piece.loss_mask.any()]
    counts['without_loss'] += not kept
    counts['sequences'] += len(kept)
    stops |= bool(np.isin(located.tokens[located.loss_mask], tokenizer.stop_ids).any())
    samples += [
      _sample(example, piece, f'{example.uid}/{i}' if len(pieces) > 1 else example.uid)
      for i, piece in kept
    ]
  summary = ', '.join(f'{name} {count}' for name, count in counts.items() if count)
  logging.info('examples %s: %s', config.name, summary)
  if not samples:
    raise UserError(
      f'examples {config.name}: no sequence of at most {longest} tokens is left: {summary}; raise '
      'the lengths, or correct the rows'
    )
  if not stops:
    logging.warning(
      'examples %s: no answer ends with one of the stop tokens %s, so the policy does not learn to '
      'stop',
      config.name,
      ', '.join(repr(tokenizer.token_text(token)) for token in tokenizer.stop_ids),
    )
  return samples, counts


def example_tokens(
  example: Example, tokenizer: Tokenizer, *, loss_on: LossOn = 'answers'
) -> ExampleTokens:
  """Encodes an example.

  Args:
    loss_on: tokens that the loss covers, see `ExamplesConfig.loss_on`.

  Raises:
    ValueError: the answers cannot be located among the tokens, no token is in the loss, or the chat
      template leaves out tools or tool calls.
    UserError: the chat template or the tokenizer refuses the example.
  """
  match example.content:
    case Text(text=text):
      tokens, answers = _encode_text(tokenizer, text), _ALL
    case Completion(prompt=prompt, completion=completion):
      tokens, answers = _encode_text(tokenizer, prompt + completion), _ALL
      if loss_on != 'all':
        before = tokenizer.encode(prompt, add_special_tokens=True)
        remedy = 'move the space at the end of the prompt to the completion'
        answers = [(_prefix(tokenizer, before, tokens, 'completion', remedy), None)]
    case Conversation() as conversation:
      tokens, answers = _encode_conversation(conversation, tokenizer, loss_on)
  mask = np.zeros(len(tokens), bool)
  for start, end in answers:
    mask[start:end] = True
  mask[:1] = False  # Token 0 has no logprob.
  if not mask.any():
    raise ValueError(f'none of its {len(tokens)} tokens is in the loss')
  return ExampleTokens(tokens=np.array(tokens, np.int32), loss_mask=mask)


def _encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
  """Encodes a text followed by the end token, unless the text already ends with that token (as in
  TRL).
  """
  end = '' if text.endswith(tokenizer.eos_token) else tokenizer.eos_token
  return tokenizer.encode(text + end, add_special_tokens=True)


def _encode_conversation(
  conversation: Conversation, tokenizer: Tokenizer, loss_on: LossOn
) -> tuple[list[int], Sequence[tuple[int, int | None]]]:
  """Returns the tokens of a conversation, and the ranges [start, end) of its answers."""
  render = functools.partial(
    tokenizer.render_chat, tools=conversation.tools, variables=conversation.variables
  )
  messages, first = conversation.messages, conversation.prompt_messages
  text, marks = render(messages, add_generation_prompt=False)
  tokens = tokenizer.encode(text)
  _check_tools(conversation.tools, text)
  if loss_on == 'all' or (loss_on == 'completions' and first is None):
    return tokens, _ALL
  starts = {}
  for i in range(first or 0, len(messages)):
    if messages[i]['role'] == 'assistant':
      prompt = tokenizer.encode(render(messages[:i], add_generation_prompt=True).text)
      starts[i] = _prefix(tokenizer, prompt, tokens, f'messages[{i}]')
  alone = first is not None and len(starts) == len(messages) - first
  if alone or loss_on == 'completions':
    # Everything after the prompt is the completion, as in TRL.
    answers = [(starts[first], len(tokens))]
  elif marks:
    _check_marks(messages, text, marks, functools.partial(render, add_generation_prompt=False))
    answers = _marked(tokenizer, text, marks, tokens, from_token=starts[first] if first else 0)
  else:
    answers = []
    for i, start in starts.items():
      end = len(tokens)
      if i + 1 < len(messages):
        before = tokenizer.encode(render(messages[: i + 1], add_generation_prompt=False).text)
        end = _prefix(tokenizer, before, tokens, f'what follows messages[{i}]')
      answers.append((start, end))
  for (i, start), following in itertools.zip_longest(starts.items(), [*starts.values()][1:]):
    _check_answer(
      i,
      messages[i],
      tokenizer,
      tokens,
      [(max(start, a), min(b, following or b)) for a, b in answers],
    )
  return tokens, answers


def _check_marks(
  messages: Sequence[ChatMessage],
  text: str,
  marks: Sequence[tuple[int, int]],
  render: Callable[[Sequence[ChatMessage]], Rendered],
) -> None:
  """Raises ValueError if the chat template marks text of a system, user or tool message as the
  assistant's.

  To find the text of the messages between two assistant turns, the conversation is rendered twice:
  with only the messages before them, and with these messages as well. If the two rendered texts are
  not prefixes of the whole text, the messages are not checked.
  """
  at = 0
  for answers, turn in itertools.groupby(messages, lambda message: message['role'] == 'assistant'):
    first, at = at, at + len(list(turn))
    if answers:
      continue
    before, through = (render(messages[:n]).text if n else '' for n in (first, at))
    if not (text.startswith(before) and text.startswith(through)):
      continue
    for start, end in marks:
      if wrong := text[max(start, len(before)) : min(end, len(through))].strip():
        raise ValueError(
          f'the chat template marks {one_line(repr(wrong), 80)} of messages[{first}] as the '
          "assistant's; wanted {% generation %} around the assistant's turns only"
        )


def _marked(
  tokenizer: Tokenizer,
  text: str,
  marks: Sequence[tuple[int, int]],
  tokens: Sequence[int],
  *,
  from_token: int,
) -> list[tuple[int, int]]:
  """Returns the ranges of tokens that the chat template marks as the assistant's. Tokens before
  `from_token` are left out.
  """
  edges = [
    [
      _prefix(tokenizer, tokenizer.encode(text[:at]), tokens, 'a boundary of an answer')
      for at in mark
    ]
    for mark in marks
  ]
  return [(max(start, from_token), end) for start, end in edges if end > from_token]


def _prefix(
  tokenizer: Tokenizer,
  before: Sequence[int],
  tokens: Sequence[int],
  what: str,
  remedy: str = 'use a chat template in which later messages do not change earlier tokens',
) -> int:
  """Returns the number of tokens before a part of a row, such as an answer.

  Args:
    before: tokens of the text before the part, encoded without the part.
    tokens: tokens of the whole row.
    what: name of the part, for the error message.
    remedy: advice in the error message.

  Raises ValueError if the row does not begin with the tokens in `before`.
  """
  count = len(before)
  if tokens[:count] == before:
    return count
  same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, tokens)))
  wanted = tokenizer.token_text(before[same])
  actual = repr(tokenizer.token_text(tokens[same])) if same < len(tokens) else 'no token'
  raise ValueError(
    f'the row does not begin with the tokens before {what}: token {same} is {actual}, but '
    f'{wanted!r} if the text before {what} is encoded alone; {remedy}'
  )


def _check_answer(
  i: int,
  message: ChatMessage,
  tokenizer: Tokenizer,
  tokens: Sequence[int],
  answers: Sequence[tuple[int, int]],
) -> None:
  """Raises ValueError if the answer has no token, or if a tool call of the message is missing from
  it.

  Args:
    i: index of the message in the conversation.
    message: message of the assistant.
    answers: ranges [start, end) in `tokens` of the message's own tokens.
  """
  answer = tokenizer.decode([token for start, end in answers for token in tokens[start:end]])
  if not any(start < end for start, end in answers):
    raise ValueError(f"the chat template has no token for messages[{i}] of 'assistant'")
  for call in message.get('tool_calls', ()):
    if called_name(call) not in answer:
      raise ValueError(
        f'the chat template leaves out the tool call {called_name(call)!r} of messages[{i}]'
      )


def _check_tools(tools: Sequence[Json] | None, text: str) -> None:
  """Raises ValueError if the chat template has left out a tool."""
  for tool in tools or ():
    if called_name(tool) not in text:
      raise ValueError(f'the chat template leaves out the tool {called_name(tool)!r}')


def _part(located: ExampleTokens, start: int, end: int) -> ExampleTokens:
  mask = located.loss_mask[start:end].copy()
  mask[:1] = False
  return ExampleTokens(tokens=located.tokens[start:end], loss_mask=mask)


def _sample(example: Example, located: ExampleTokens, uid: str) -> Sample:
  length, prompt_len = len(located.tokens), int(located.loss_mask.argmax())
  role = np.where(located.loss_mask, Role.POLICY, Role.TOOL).astype(np.uint8)
  role[:prompt_len] = Role.PROMPT
  return Sample(
    uid=uid,
    task_id=example.task_id,
    visit=0,
    sample_index=0,
    group_id=uid,
    trajectory_id=uid,
    taskset=example.name,
    domain=example.domain,
    source=Source.EXPERT,
    tokens=located.tokens,
    prompt_len=prompt_len,
    role=role,
    loss_mask=located.loss_mask,
    sampled=np.zeros(length, bool),
    behaviour_logprobs=np.zeros(length, np.float32),
  )
