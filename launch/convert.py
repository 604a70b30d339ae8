"""Reads a Hugging Face model, lays it out as ours, and writes it as a Hugging Face model again.

  python launch/convert.py --source=Qwen/Qwen3-0.6B --target=/tmp/model --dtype=bfloat16

Checks a checkpoint (every name and shape, every setting), changes its dtype, brings config.json to its newest form,
or gives it another tokenizer. The source is a directory or a hub id.
"""

import shutil
from pathlib import Path

from absl import flags

from jaxrl_llm.core import script
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.trees import flatten
from jaxrl_llm.weights import hf
from jaxrl_llm.weights.layout import DTYPES

_SOURCE = flags.DEFINE_string('source', None, 'Model directory or hub id.', required=True)
_TARGET = flags.DEFINE_string('target', None, 'Directory to write.', required=True)
_DTYPE = flags.DEFINE_enum('dtype', 'float32', list(DTYPES), 'Of the written weights.')
_TOKENIZER = flags.DEFINE_string('tokenizer', None, "Directory whose tokenizer is copied; default: the source's own.")


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise UserError(f'argument {argv[1]!r} is not a flag; usage: launch/convert.py --source=DIR --target=DIR')
  source, target = hf.resolve(_SOURCE.value), Path(_TARGET.value)
  if target.resolve() == source.resolve():
    raise UserError(f'{target}: --target is --source; a model is not rewritten in place, name another directory')
  if target.exists() and not target.is_dir():
    raise UserError(f'{target}: --target is a file, wanted a directory')
  spec, tokens = hf.read_spec(source), hf.read_special_tokens(source)
  params = hf.load_params(source, spec, dtype=_DTYPE.value)
  count = sum(array.size for array in flatten(params).values())
  print(f'read {source}: {spec.family}, {spec.num_hidden_layers} layers, {count:,} parameters')
  tokenizer = _TOKENIZER.value or (source if (source / 'tokenizer_config.json').exists() else None)
  files = hf.export(
    target,
    params,
    spec,
    dtype=_DTYPE.value,
    tokenizer_dir=tokenizer,
    eos_ids=tokens.eos_ids,
    pad_id=tokens.pad_id,
    bos_id=tokens.bos_id,
  )
  if (source / 'generation_config.json').exists():
    # Sampling settings in it belong to the model, and none of them depends on what was converted.
    shutil.copyfile(source / 'generation_config.json', target / 'generation_config.json')
  size = sum(path.stat().st_size for path in files)
  print(
    f'wrote {target}: {len(files)} file(s) of weights, {_DTYPE.value}, {size / 1e6:,.1f} MB, and their configuration'
  )
  print(f'tokenizer: {f"copied from {tokenizer}" if tokenizer else "none, the source has none"}')


if __name__ == '__main__':
  script.run(main)
