#!/usr/bin/env bash
# Creates the environment that compiles for TPUs and GPUs that are not in this machine (launch/train.py --dry_run
# --topology=...): the trainer's packages, libtpu, and JAX's CUDA plugin without CUDA.
#
#   bash launch/install_aot.sh [--target=DIR]
#
# DIR is .venv-aot by default, where `--topology` looks for it (1.5 GB). If nothing has changed, nothing is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SAY=install_aot
source launch/environment.sh

venv=.venv-aot
while [ $# -gt 0 ]; do
  case $1 in
    --target=?*) venv=${1#--target=} ;;
    *) fail "$1: unknown argument; wanted [--target=DIR]" ;;
  esac
  shift
done

python=$(find_python)
version=$(version_of "$python")
constraints=constraints/py${version/./}.txt
begin_separate_environment "$venv" "$python" install_aot launch/install_aot.sh pyproject.toml \
  <(cat "$constraints" 2>/dev/null; echo "$PWD") || exit 0
if [ -f "$constraints" ]; then
  say "installing the trainer's packages and the compilers into $venv (versions of $constraints)"
else
  say "installing the trainer's packages and the compilers into $venv; there are no tested versions for Python $version"
fi
install_packages "$venv" "$constraints" aot
"$venv/bin/python" -c 'from importlib.metadata import version as v; print("install_aot: JAX", v("jax"), "libtpu", v("libtpu"), "CUDA plugin", v("jax-cuda12-plugin"))'
end_separate_environment
