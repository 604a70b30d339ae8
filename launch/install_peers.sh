#!/usr/bin/env bash
# Makes the environment of the libraries that tests/peers_test.py and tests/peft_test.py compare with: TRL, Tunix and
# PEFT, on the CPU.
#
#   bash launch/install_peers.sh [--target=DIR]
#
# DIR is .venv-peers, where the tests look for it. Versions are those of constraints/peers.txt (2 GB). Nothing else of
# this project runs there. Installing is skipped where nothing changed.
#
# PyTorch's CPU build is enough: UV_FIND_LINKS or PIP_FIND_LINKS may name a place that has it; where neither is set, uv
# asks PyTorch's own index for it.
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

exec 9<launch/install_peers.sh
if command -v flock >/dev/null && ! flock --nonblock 9; then
  say "waiting for another script that is setting up an environment"
  flock 9
fi
python=$(find_python)
stamp=$venv/installed
want=$(cat launch/install_peers.sh constraints/peers.txt | "$python" -c \
  'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest(), sys.version)')
if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
  say "$venv is up to date"
  exit 0
fi
made=$venv/made-by-install_peers
if [ -e "$venv" ] && [ ! -e "$made" ] && [ -n "$(ls -A "$venv")" ]; then
  fail "$venv is there and was not made by this script; it is left alone: remove it, or name another --target"
fi
say "creating $venv with Python $(version_of "$python")"
"$python" -m venv --clear "$venv" || fail "$python cannot create $venv; wanted Python's venv and ensurepip (Debian: apt-get install python3-venv)"
touch "$made"
"$venv/bin/python" -m pip install --quiet uv || fail "pip could not install uv (its own words are above)"
say "installing the versions of constraints/peers.txt into $venv"
# What pip would find in a folder, uv is to find there too.
export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
build=()
[ -n "$UV_FIND_LINKS" ] || build=(--torch-backend=cpu)
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "${build[@]}" \
  --constraint constraints/peers.txt trl google-tunix peft torch || fail "uv could not install the peers (its own words are above)"
"$venv/bin/python" -c 'from importlib.metadata import version; print("install_peers: TRL", version("trl"), "Tunix", version("google-tunix"), "and PEFT", version("peft"))'
echo "$want" >"$stamp"
