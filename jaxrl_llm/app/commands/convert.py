"""Reads a Hugging Face model directory, and writes it again in the format that this package
exports.

  jaxrl convert --source=Qwen/Qwen3-0.6B --target=/tmp/model --dtype=bfloat16

Use it to check a checkpoint (names, shapes and settings), to change its dtype, to update
config.json to the current format, or to replace the tokenizer. The source is a directory or a hub
id. The target also gets a model card, README.md. --push_to_hub=USER/NAME uploads the target. --json
prints one JSON document.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jaxrl_llm.config.load import parse_flags
from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.runtime.model_card import CARD, Origin, typed_command, write_converted_card
from jaxrl_llm.weights import hf, hub
from jaxrl_llm.weights.layout import DTYPES

FLAGS = flags.FlagValues()
flags.DEFINE_string('source', None, 'Model directory or hub id.', flag_values=FLAGS)
flags.DEFINE_string('target', None, 'Directory to write.', flag_values=FLAGS)
flags.DEFINE_enum(
  'dtype', 'float32', list(DTYPES), 'Data type of the written weights.', flag_values=FLAGS
)
flags.DEFINE_string(
  'tokenizer',
  None,
  "Directory of the tokenizer to copy; by default the source's.",
  flag_values=FLAGS,
)
flags.DEFINE_string(
  'push_to_hub', None, 'Also upload the target to this repository, USER/NAME.', flag_values=FLAGS
)
flags.DEFINE_bool(
  'hub_private', False, 'With --push_to_hub: a new repository is private.', flag_values=FLAGS
)
flags.DEFINE_bool('json', False, 'Print one JSON document.', flag_values=FLAGS)


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit code."""
  return script.exit_code(lambda: _main(argv), as_json=script.asks_json(argv))


def _main(argv: Sequence[str]) -> int:
  parse_flags(argv, FLAGS, __doc__, takes_config=False)
  for name in ('source', 'target'):
    if FLAGS[name].value is None:
      raise UserError(f'--{name} is missing; usage: jaxrl convert --source=DIR --target=DIR')
  source, target = hf.resolve(FLAGS.source), Path(FLAGS.target)
  if target.resolve() == source.resolve():
    raise UserError(f'{target}: --target is the same directory as --source; choose another')
  if target.exists() and not target.is_dir():
    raise UserError(f'{target}: --target is a file, wanted a directory')
  if FLAGS.push_to_hub is not None:
    hub.check_repository(FLAGS.push_to_hub)
  elif FLAGS.hub_private:
    raise UserError('--hub_private: needs --push_to_hub=USER/NAME')
  spec, tokens = hf.read_spec(source), hf.read_special_tokens(source)
  params = hf.load_params(source, spec, dtype=FLAGS.dtype)
  count = sum(array.size for array in flatten(params).values())
  _tell(f'read {source}: {spec.family}, {spec.num_hidden_layers} layers, {count:,} parameters')
  tokenizer = FLAGS.tokenizer or (source if (source / 'tokenizer_config.json').exists() else None)
  files = hf.export(
    target,
    params,
    spec,
    dtype=FLAGS.dtype,
    tokenizer_dir=tokenizer,
    eos_ids=tokens.eos_ids,
    pad_id=tokens.pad_id,
    bos_id=tokens.bos_id,
  )
  if (source / 'generation_config.json').exists():
    # The file's sampling settings belong to the model and do not depend on the conversion.
    shutil.copyfile(source / 'generation_config.json', target / 'generation_config.json')
  size = sum(path.stat().st_size for path in files)
  _tell(
    f'wrote {target}: {len(files)} file(s) of weights, {FLAGS.dtype}, {size / 1e6:,.1f} MB, and '
    'their configuration'
  )
  _tell(f'tokenizer: {f"copied from {tokenizer}" if tokenizer else "none, the source has none"}')
  origin = Origin(base=FLAGS.source, command=typed_command(sys.argv))
  write_converted_card(target, source, name=FLAGS.source, dtype=FLAGS.dtype, origin=origin)
  _tell(f'model card: {target / CARD}')
  address = None
  if FLAGS.push_to_hub is not None:
    address = hub.push(target, FLAGS.push_to_hub, private=FLAGS.hub_private)
    _tell(f'uploaded: {address}')
  if FLAGS.json:
    script.print_json(
      {
        'source': str(source),
        'target': str(target),
        'family': spec.family,
        'layers': spec.num_hidden_layers,
        'parameters': int(count),
        'dtype': FLAGS.dtype,
        'files': [path.name for path in files],
        'bytes': size,
        'tokenizer': None if tokenizer is None else str(tokenizer),
        'hub': address,
      }
    )
  return 0


def _tell(line: str) -> None:
  print(line, file=sys.stderr if FLAGS.json else sys.stdout)
