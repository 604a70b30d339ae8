"""What the peft library makes of exported adapters: its logits with them beside the base, and
merged into it.

  python peft_logits.py CASES RESULTS.npz

CASES holds a folder per case, with base/, adapter/, merged/ and tokens.npy. Runs in the peers'
environment (launch/install_peers.sh) and imports nothing of this project.
"""

import os
import pathlib
import sys

os.environ |= {'HF_HUB_OFFLINE': '1'}

import numpy as np
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, PeftConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

KINDS = {
  'CAUSAL_LM': (AutoPeftModelForCausalLM, AutoModelForCausalLM),
  'SEQ_CLS': (AutoPeftModelForSequenceClassification, AutoModelForSequenceClassification),
}


def logits(model, tokens):
  with torch.no_grad():
    return model.eval()(input_ids=tokens).logits.numpy()


def main(cases, results):
  found = {}
  for case in sorted(pathlib.Path(cases).iterdir()):
    tokens = torch.from_numpy(np.load(case / 'tokens.npy'))
    config = PeftConfig.from_pretrained(case / 'adapter')
    adapted, plain = KINDS[config.task_type]
    options = {'num_labels': 1} if config.task_type == 'SEQ_CLS' else {}
    # The base is the one that adapter_config.json names.
    model = adapted.from_pretrained(case / 'adapter', dtype=torch.float32, **options)
    found[f'{case.name}/adapted'] = logits(model, tokens)
    found[f'{case.name}/merged by peft'] = logits(model.merge_and_unload(), tokens)
    found[f'{case.name}/merged'] = logits(
      plain.from_pretrained(case / 'merged', dtype=torch.float32), tokens
    )
    found[f'{case.name}/base'] = logits(
      plain.from_pretrained(case / 'base', dtype=torch.float32, **options), tokens
    )
  np.savez(results, **found)


if __name__ == '__main__':
  main(*sys.argv[1:])
