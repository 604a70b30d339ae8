#!/usr/bin/env bash
# Sets up and runs the tests.
#
#   bash launch/test.sh [--tier=fast|full|acceptance] [-- PYTEST ARGUMENTS]
#
# fast: what needs no real job, kill or browser. full (the default): that and those, and the fast tests once more on
# Python 3.12 with the newest JAX where a python3.12 exists. acceptance: everything (hours).
#
# The parity tests' PyTorch may be a CPU build; which one pip takes is up to its index: PIP_EXTRA_INDEX_URL or
# PIP_FIND_LINKS may name a place that has it. The full tier also makes the vLLM servers' environment
# (launch/install_vllm.sh), that of TRL and Tunix (launch/install_peers.sh) and that of the compilers for devices that
# are not here (launch/install_aot.sh), and installs Debian packages where root (or sudo without a password) permits it:
# Chromium and its driver, iproute2, openssl, bubblewrap; otherwise the tests that use them are skipped.
# Every part runs even if one before it failed; the exit code is 0 only if all went well.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
SAY=test
source launch/environment.sh

tier=full
while [ $# -gt 0 ]; do
  case $1 in
    --tier=fast | --tier=full | --tier=acceptance) tier=${1#--tier=} ;;
    --tier=*) fail "$1: wanted --tier=fast, --tier=full or --tier=acceptance" ;;
    --) shift && break ;;
    *) fail "$1: unknown argument; wanted [--tier=fast|full|acceptance] [-- PYTEST ARGUMENTS]" ;;
  esac
  shift
done

# What the full tier's tests run besides Python: Debian packages, installed where they are missing and may be.
ensure_commands() {
  local command packages=() missing=() root=()
  for command in chromium:chromium chromedriver:chromium-driver ip:iproute2 openssl:openssl bwrap:bubblewrap; do
    command -v "${command%%:*}" >/dev/null && continue
    missing+=("${command%%:*}")
    packages+=("${command##*:}")
  done
  if [ ${#missing[@]} = 0 ]; then
    say "chromium, chromedriver, ip, openssl and bwrap are there"
    return
  fi
  if [ "$(id -u)" != 0 ]; then
    if ! sudo -n true 2>/dev/null; then
      say "missing, and installing needs root: ${missing[*]}; the tests that use them will be skipped"
      return
    fi
    root=(sudo -n)
  fi
  if ! command -v apt-get >/dev/null; then
    say "missing, and there is no apt-get: ${missing[*]}; the tests that use them will be skipped"
    return
  fi
  say "installing the Debian packages ${packages[*]}"
  if ! { "${root[@]}" apt-get update -qq &&
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${packages[@]}"; } >/dev/null; then
    say "they could not be installed: the tests that use them will be skipped"
  fi
}

# Prints a Python 3.12 that runs, also one of pyenv's that is not switched on.
find_python312() {
  local candidate
  for candidate in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
    if [ "$(version_of "$candidate")" = 3.12 ]; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

summary=()
status=0

# part NAME COMMAND...: runs one part, and keeps its last line for the summary.
part() {
  local name=$1 log code
  shift
  say "$name: $*"
  log=$(mktemp)
  "$@" 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  summary+=("$name: $([ "$code" = 0 ] && echo passed || echo "FAILED (exit code $code)"): $(grep -v '^ *$' "$log" | tail -n 1)")
  rm -f "$log"
  [ "$code" = 0 ] || status=1
}

python=$(find_python) || exit 2
ensure_environment .venv "$python" test
[ "$tier" = fast ] || ensure_commands

# Bits may follow the number of threads of XLA's CPU pool, so it is said, not guessed.
export NPROC=${NPROC:-$(nproc)}
# A worker per core up to 8 (each holds about 1 GB); a file stays on one worker, for its module fixtures.
workers=$((NPROC < 8 ? NPROC : 8))
case $tier in
  fast) marks='not full and not acceptance' ;;
  full) marks='not acceptance' ;;
  acceptance) marks='' ;;
esac
# A worker that crashes ends its part: one started anew would leave --dist=loadfile waiting for ever.
# Files are dealt in the order of tests/conftest.py, not by how many tests they have.
pytest=(-m pytest --numprocesses="$workers" --dist=loadfile --no-loadscope-reorder --max-worker-restart=0)

[ "$tier" = fast ] || part 'vLLM environment' bash launch/install_vllm.sh
[ "$tier" = fast ] || part "peers' environment" bash launch/install_peers.sh
[ "$tier" = fast ] || part 'compilers for other devices' bash launch/install_aot.sh
part 'ruff' .venv/bin/python -m ruff check .
part "pytest, tier $tier, Python $(version_of .venv/bin/python)" .venv/bin/python "${pytest[@]}" -m "$marks" "$@"

if [ "$tier" != fast ]; then
  if [ "$(version_of .venv/bin/python)" = 3.12 ]; then
    say ".venv has Python 3.12 itself: no second pass"
  elif python312=$(find_python312); then
    ensure_environment .venv312 "$python312" test-without-torch
    part 'pytest, tier fast, Python 3.12' .venv312/bin/python "${pytest[@]}" -m 'not full and not acceptance' "$@"
  else
    summary+=('pytest, tier fast, Python 3.12: skipped: there is no python3.12 here')
  fi
fi

say 'summary'
printf '  %s\n' "${summary[@]}"
exit $status
