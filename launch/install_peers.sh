#!/usr/bin/env bash
# Creates the environment of the libraries with which tests/peers/losses_test.py and tests/peers/peft_test.py compare
# results: TRL, Tunix and PEFT, on the CPU.
#
#   bash launch/install_peers.sh [--target=DIR]
#
# DIR is .venv-peers by default, where the tests look for it (2 GB, with the versions of constraints/peers.txt). Nothing
# else of this project runs there. If nothing has changed, nothing is installed.
#
# PyTorch's CPU build is enough: UV_FIND_LINKS or PIP_FIND_LINKS may name a folder or page that has it. If neither is
# set, uv uses PyTorch's own index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SAY=install_peers
source launch/environment.sh

venv=.venv-peers
while [ $# -gt 0 ]; do
  case $1 in
    --target=?*) venv=${1#--target=} ;;
    *) fail "$1: unknown argument; wanted [--target=DIR]" ;;
  esac
  shift
done

python=$(find_python)
begin_separate_environment "$venv" "$python" install_peers launch/install_peers.sh constraints/peers.txt || exit 0
say "installing the versions of constraints/peers.txt into $venv"
build=()
[ -n "${UV_FIND_LINKS:-}" ] || build=(--torch-backend=cpu)
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "${build[@]}" \
  --constraint constraints/peers.txt trl google-tunix peft torch || fail "uv could not install the peers (see its output above)"
"$venv/bin/python" -c 'from importlib.metadata import version; print("install_peers: TRL", version("trl"), "Tunix", version("google-tunix"), "and PEFT", version("peft"))'
end_separate_environment
