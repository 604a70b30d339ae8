"""LoRA for the first time: adapters on frozen weights, merged for export and kept apart for PEFT.

  python docs/start/lora.py DIRECTORY [KEY=VALUE …]

KEY=VALUE changes the configuration, such as policy.lora.rank=4. The script needs PyTorch beside
jaxrl_llm, because transformers makes the checkpoint (tiny.py) and chats with the trained one.
"""

import pathlib

import tiny

from jaxrl_llm.api import load_config, train


def main(directory: pathlib.Path, changes: dict[str, str]) -> None:
  questions = tiny.questions()
  rows = [{'messages': tiny.said(question, right)} for question, right, _ in questions]
  tiny.write_rows(directory / 'rows.jsonl', rows)
  # The checkpoint has seen right and wrong answers, and gives either.
  seen = [tiny.said(question, answer) for question, *answers in questions for answer in answers]
  asked = [question for question, *_ in questions]
  tiny.make_checkpoint(directory / 'checkpoint', 'qwen3', asked, conversations=seen, steps=300)

  # Any stage of any algorithm trains adapters where policy.lora is set.
  values = {
    'policy.init_from': str(directory / 'checkpoint'),
    'policy.lora': '{"rank": 8, "alpha": 16}',
    'stages.sft.steps': '60',
    'stages.sft.optimizer.peak_lr': '1e-2',
    'stages.sft.evaluate_every': '20',
    **changes,
  }
  result = train(load_config(f'sft:{directory / "rows.jsonl"}', values), directory / 'run')
  print('loss on the held-out rows:', result.metrics[-1]['val-core/held_out/sft_loss'])
  for folder in (result.model, result.workdir / 'adapter'):
    weights = sum(file.stat().st_size for file in folder.glob('*.safetensors'))
    print(f'{folder}: {weights:,} bytes of weights')
  # The adapters are merged into result.model. PEFT loads those in adapter/ onto the checkpoint.
  tiny.chat(result.model, asked[:4])


if __name__ == '__main__':
  main(*tiny.arguments(__doc__))
