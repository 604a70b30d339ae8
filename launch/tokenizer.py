"""Makes a tokenizer directory from the text of a taskset.

  python launch/tokenizer.py --source=reasoning_gym:spell_backward --options='{"min_word_len": 3, "max_word_len": 5}' \
    --size=20000 --prompt='{word}>' --match='[a-z]+>' --target=/tmp/tokenizer
"""

import json

from absl import flags

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.tasks.taskset import TasksetConfig, load_taskset
from jaxrl_llm.tasks.tokenizer import TokenizerConfig, build_tokenizer, task_texts

_SOURCE = flags.DEFINE_string('source', None, 'Taskset source, as in TasksetConfig.source.', required=True)
_TARGET = flags.DEFINE_string('target', None, 'Directory to write.', required=True)
_OPTIONS = flags.DEFINE_string('options', '{}', "The source's own parameters, a JSON object.")
_SIZE = flags.DEFINE_integer('size', None, 'Items drawn from a procedural source; at most so many rows of others.')
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of a procedural source.')
_PROMPT = flags.DEFINE_string('prompt', None, "Template of the prompt; default: the source's own.")
_TRUTH = flags.DEFINE_string('truth', None, "Template of the reference answer; default: the source's own.")
_SYSTEM = flags.DEFINE_string('system', None, 'System message.')
_MATCH = flags.DEFINE_string('match', None, 'Regular expression that a prompt must match in full; others are skipped.')
_SKIP = flags.DEFINE_bool('skip_corrupt', False, 'Skip and count corrupt rows instead of stopping at the first.')
_KIND = flags.DEFINE_enum('kind', 'character', ['character', 'bpe'], 'Character table or byte-level BPE.')
_TEMPLATE = flags.DEFINE_enum('template', 'plain', ['plain', 'chatml'], 'Chat template.')
_VOCAB_SIZE = flags.DEFINE_integer('vocab_size', 1024, 'Of bpe, special tokens included.')


def _parsed_options() -> dict:
  try:
    options = json.loads(_OPTIONS.value)
  except ValueError as error:
    raise UserError(f'--options={_OPTIONS.value}: not JSON: {error}') from None
  if not isinstance(options, dict):
    raise UserError(f'--options={_OPTIONS.value}: wanted a JSON object')
  return options


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise UserError(f'unexpected argument {argv[1]!r}; every value has a flag, see --help')
  taskset = load_taskset(
    TasksetConfig(
      name='tokenizer',
      source=_SOURCE.value,
      options=_parsed_options(),
      size=_SIZE.value,
      seed=_SEED.value,
      prompt=_PROMPT.value,
      truth=_TRUTH.value,
      system=_SYSTEM.value,
      match=_MATCH.value,
      on_corrupt='skip' if _SKIP.value else 'fail',
    )
  )
  config = TokenizerConfig(kind=_KIND.value, template=_TEMPLATE.value, vocab_size=_VOCAB_SIZE.value)
  tokenizer = build_tokenizer(config, task_texts(taskset.tasks), _TARGET.value)
  task = taskset.tasks[0]
  prompt, answer = tokenizer.render_answer(task.prompt, task.truth or '')
  print(', '.join(f'{name} {count}' for name, count in taskset.counts.items()))
  print(f'vocabulary of {tokenizer.vocab_size} tokens in {_TARGET.value}')
  print(f'{tokenizer.decode([*prompt, *answer], skip_special=False)!r} <-> {[*prompt, *answer]}')


if __name__ == '__main__':
  script.run(main)
