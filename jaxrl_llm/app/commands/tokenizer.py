"""Builds a tokenizer directory from the text of a taskset.

  jaxrl tokenizer --source=reasoning_gym:spell_backward \\
    --options='{"min_word_len": 3, "max_word_len": 5}' \\
    --size=20000 --prompt='{word}>' --match='[a-z]+>' --target=/tmp/tokenizer
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from absl import flags

from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.tasks.taskset import TasksetConfig, load_taskset
from jaxrl_llm.tasks.tokenizer import TokenizerConfig, build_tokenizer, task_texts

FLAGS = flags.FlagValues()
_DEFINITIONS = (
  (flags.DEFINE_string, 'source', None, 'Taskset source, as in TasksetConfig.source.'),
  (flags.DEFINE_string, 'target', None, 'Directory to write.'),
  (flags.DEFINE_string, 'options', '{}', 'Parameters of the source, a JSON object.'),
  (
    flags.DEFINE_integer,
    'size',
    None,
    'Number of items drawn from a procedural source, or maximum number of rows of another source.',
  ),
  (flags.DEFINE_integer, 'seed', 0, 'Seed of a procedural source.'),
  (flags.DEFINE_string, 'prompt', None, "Template of the prompt; default: the source's."),
  (flags.DEFINE_string, 'truth', None, "Template of the reference answer; default: the source's."),
  (flags.DEFINE_string, 'system', None, 'System message.'),
  (
    flags.DEFINE_string,
    'match',
    None,
    'Regular expression; prompts without a full match are skipped.',
  ),
  (
    flags.DEFINE_bool,
    'skip_corrupt',
    False,
    'Skip and count corrupt rows instead of stopping at the first.',
  ),
  (
    flags.DEFINE_integer,
    'vocab_size',
    1024,
    'Size of a bpe vocabulary in tokens, special tokens included.',
  ),
)
for _define, *_definition in _DEFINITIONS:
  _define(*_definition, flag_values=FLAGS)
flags.DEFINE_enum(
  'kind', 'character', ['character', 'bpe'], 'Character table or byte-level BPE.', flag_values=FLAGS
)
flags.DEFINE_enum('template', 'plain', ['plain', 'chatml'], 'Chat template.', flag_values=FLAGS)


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv))


def _parsed_options() -> dict:
  try:
    options = json.loads(FLAGS.options)
  except ValueError as error:
    raise UserError(f'--options={FLAGS.options}: not JSON: {error}') from None
  if not isinstance(options, dict):
    raise UserError(f'--options={FLAGS.options}: wanted a JSON object')
  return options


def _main(argv: Sequence[str]) -> int:
  parse_flags(argv, FLAGS, __doc__, takes_config=False)
  for name in ('source', 'target'):
    if FLAGS[name].value is None:
      raise UserError(f'--{name} is missing; usage: jaxrl tokenizer --source=SOURCE --target=DIR')
  taskset = load_taskset(
    TasksetConfig(
      name='tokenizer',
      source=FLAGS.source,
      options=_parsed_options(),
      size=FLAGS.size,
      seed=FLAGS.seed,
      prompt=FLAGS.prompt,
      truth=FLAGS.truth,
      system=FLAGS.system,
      match=FLAGS.match,
      on_corrupt='skip' if FLAGS.skip_corrupt else 'fail',
    )
  )
  config = TokenizerConfig(kind=FLAGS.kind, template=FLAGS.template, vocab_size=FLAGS.vocab_size)
  tokenizer = build_tokenizer(config, task_texts(taskset.tasks), FLAGS.target)
  task = taskset.tasks[0]
  prompt, answer = tokenizer.render_answer(task.prompt, task.truth or '')
  print(', '.join(f'{name} {count}' for name, count in taskset.counts.items()))
  print(f'vocabulary of {tokenizer.vocab_size} tokens in {FLAGS.target}')
  print(f'{tokenizer.decode([*prompt, *answer], skip_special=False)!r} <-> {[*prompt, *answer]}')
  return 0
