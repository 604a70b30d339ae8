#!/usr/bin/env bash
# Sets up and runs the tests.
#
#   bash launch/test.sh [--tier=fast|full|acceptance] [--changed[=COMMIT]] [--workers=N] [-- PYTEST ARGUMENTS]
#
# fast: the tests that need no real job, kill or browser. full (the default): these tests and those marked `full`. If
# there is a python3.12, the fast tests in the files that tests/tools/newest.txt lists also run on Python 3.12 with the
# newest JAX. acceptance: only the tests marked `acceptance`, which take hours.
#
# --changed: runs only the test files that may be affected (tests/tools/affected.py) by uncommitted changes and by
# commits since COMMIT. By default, COMMIT is the point at which the branch left origin/main or main. --workers: number
# of test processes; by default one per core, up to 8, and in the full tier one more, because its tests wait for a fifth
# of their time. Test files among the pytest arguments replace any other choice.
#
# A CPU build of PyTorch suffices for the parity tests. PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS can name an index or a
# folder that has one. The full and acceptance tiers also install the environments of the vLLM servers
# (launch/install_vllm.sh), of TRL and Tunix (launch/install_peers.sh) and of the compilers for absent devices
# (launch/install_aot.sh). With root rights, or sudo without a password, they also install Debian packages: Chromium and
# its driver, iproute2, openssl, bubblewrap and, on a machine without systemd, openssh-server. Otherwise, the tests that
# need these packages are skipped.
#
# The output of each part is in runs/tests/*.log, and a report of the times in runs/tests/times.md. Every part runs even
# if an earlier one failed; the exit code is 0 only if all of them passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
SAY=test
source launch/environment.sh

tier=full
changed=
since=
workers=
while [ $# -gt 0 ]; do
  case $1 in
    --tier=fast | --tier=full | --tier=acceptance) tier=${1#--tier=} ;;
    --tier=*) fail "$1: wanted --tier=fast, --tier=full or --tier=acceptance" ;;
    --changed) changed=yes ;;
    --changed=?*)
      changed=yes
      since=${1#--changed=}
      ;;
    --workers=[1-9] | --workers=[1-9][0-9]) workers=${1#--workers=} ;;
    --workers=*) fail "$1: wanted --workers=N, a number from 1 to 99" ;;
    --) shift && break ;;
    *) fail "$1: unknown argument; wanted [--tier=fast|full|acceptance] [--changed[=COMMIT]] [--workers=N] [-- PYTEST ARGUMENTS]" ;;
  esac
  shift
done

# Installs the Debian packages of missing commands that tests of the full tier run, if this user has root rights.
ensure_commands() {
  local command packages=() missing=() root=()
  local commands=(chromium:chromium chromedriver:chromium-driver ip:iproute2 openssl:openssl bwrap:bubblewrap)
  # If systemd is running, it would start the server at once, which would open this machine to the network.
  [ -d /run/systemd/system ] || commands+=(sshd:openssh-server)
  for command in "${commands[@]}"; do
    PATH=$PATH:/usr/sbin command -v "${command%%:*}" >/dev/null && continue
    missing+=("${command%%:*}")
    packages+=("${command##*:}")
  done
  if [ ${#missing[@]} = 0 ]; then
    say "already installed: ${commands[*]%%:*}"
    return
  fi
  if [ "$(id -u)" != 0 ]; then
    if ! sudo -n true 2>/dev/null; then
      say "missing: ${missing[*]}; installing them needs root, so the tests that use them will be skipped"
      return
    fi
    root=(sudo -n)
  fi
  if ! command -v apt-get >/dev/null; then
    say "missing: ${missing[*]}; there is no apt-get to install them, so the tests that use them will be skipped"
    return
  fi
  say "installing the Debian packages ${packages[*]}"
  if ! { "${root[@]}" apt-get update -qq &&
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${packages[@]}"; } >/dev/null; then
    say "the packages could not be installed; the tests that use them will be skipped"
  fi
}

# Prints the path of a Python 3.12 that works. Inactive versions of pyenv are tried, too.
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

# names_tests ARGUMENT...: succeeds if one of pytest's arguments is an existing test file or folder.
names_tests() {
  local argument
  for argument; do
    case $argument in
      tests | tests/* | *_test.py | *_test.py::*) [ ! -e "${argument%%::*}" ] || return 0 ;;
    esac
  done
  return 1
}

summary=()
status=0
declare -A parts=()  # Process id of each part in the background, keyed by the name of its log.

# timed NAME COMMAND...: runs a command, appends its times to $logs/phases.jsonl, and returns its exit code.
timed() {
  local name=$1 begin code
  shift
  begin=$(date +%s.%N)
  ("$@")
  code=$?
  printf '{"name": "%s", "begin": %s, "end": %s, "code": %d}\n' "$name" "$begin" "$(date +%s.%N)" "$code" \
    >>"$logs/phases.jsonl"
  return "$code"
}

# begin_part LOG NAME COMMAND...: starts a part in the background; its output goes to $logs/LOG.log.
begin_part() {
  local log=$1
  shift
  # By default, a command in the background ignores SIGINT.
  (trap - INT && timed "$@") >"$logs/$log.log" 2>&1 </dev/null 7>&- &
  parts[$log]=$!
}

# run_part LOG NAME COMMAND...: runs a part, also prints its output as it arrives, and returns its exit code.
run_part() {
  local log=$1
  shift
  timed "$@" 2>&1 </dev/null 7>&- | tee -i "$logs/$log.log"
  return "${PIPESTATUS[0]}"
}

# count_part LOG NAME CODE: adds a line to the summary, with the last line of the part's output.
count_part() {
  summary+=("$2: $([ "$3" = 0 ] && echo passed || echo "FAILED (exit code $3)"): $(grep -v '^ *$' "$logs/$1.log" | tail -n 1)")
  [ "$3" = 0 ] || status=1
}

# finish_part LOG NAME: waits for a part in the background, prints its output, adds it to the summary, and returns its
# exit code.
finish_part() {
  local code
  wait "${parts[$1]}"
  code=$?
  say "$2:"
  cat "$logs/$1.log"
  count_part "$1" "$2" "$code"
  return "$code"
}

# part LOG NAME COMMAND...: runs a part, and adds it to the summary.
part() {
  local log=$1 name=$2
  say "$name: ${*:3}"
  run_part "$@"
  count_part "$log" "$name" $?
}

# pytest_part LOG NAME PYTHON MARKS ARGUMENTS...: runs tests. The part fails if no test runs, unless --changed chose the
# files.
pytest_part() {
  local log=$1 name=$2 python=$3 marks=$4 code
  shift 4
  # All tests of a file run on one worker, because of module fixtures. Files are assigned to workers in the order of
  # tests/conftest.py, not by their numbers of tests. If a worker crashes, the part ends: if the worker were replaced,
  # --dist=loadfile would wait forever.
  local command=("$python" -m pytest --numprocesses="$workers" --dist=loadfile --no-loadscope-reorder)
  command+=(--max-worker-restart=0 "${plugins[@]}" -m "$marks" "$@")
  say "$name: ${command[*]}"
  JAXRL_TEST_TIMES=$PWD/$logs/$log.jsonl run_part "$log" "$name" "${command[@]}"
  code=$?
  if [ "$code" = 5 ] && [ -n "$changed" ]; then
    summary+=("$name: no test of this tier in the files that the change affects")
  else
    count_part "$log" "$name" "$code"
  fi
}

run_all() {
  python=$(find_python) || exit 2
  files=()
  if [ -n "$changed" ]; then
    affected=$("$python" tests/tools/affected.py ${since:+"--since=$since"}) || exit 2
    [ -z "$affected" ] || mapfile -t files <<<"$affected"
    say "test files that the change affects: ${#files[@]}"
  fi
  if names_tests "$@"; then
    files=()
    changed=
    chosen=yes
  else
    chosen=
  fi
  has_tests() { [ -z "$changed" ] || [ ${#files[@]} -gt 0 ]; }

  # If two of these scripts run in the same tree, each has separate logs.
  logs=runs/tests
  mkdir -p "$logs"
  exec 7>>runs/tests.lock
  if command -v flock >/dev/null && ! flock --nonblock 7; then
    logs=runs/tests-$$
    say "another test.sh is running here; the logs of this one are in $logs"
    mkdir -p "$logs"
  fi
  rm -f "$logs"/*.log "$logs"/*.jsonl "$logs"/times.md

  # The environments are independent of each other, so they are installed concurrently.
  beside=(vllm peers aot packages)
  declare -A names=([vllm]='vLLM environment' [peers]="peers' environment" [aot]='compilers for other devices'
    [packages]='Debian packages')
  if [ "$tier" = fast ] || ! has_tests; then
    beside=()
  else
    begin_part packages "${names[packages]}" ensure_commands
    for log in vllm peers aot; do begin_part "$log" "${names[$log]}" bash "launch/install_$log.sh"; done
  fi
  run_part environment '.venv' ensure_environment .venv "$python" test || exit

  # Results may depend on the number of threads of XLA's CPU pool, so it is fixed.
  export NPROC=${NPROC:-$(nproc)}
  # Each worker needs about 1 GB of memory.
  if [ -z "$workers" ]; then
    workers=$((NPROC < 8 ? NPROC : 8))
    [ "$tier" != full ] || workers=$((workers + 1))
  fi
  plugins=()
  case $tier in
    fast) marks='not full and not acceptance' ;;
    full) marks='not acceptance' ;;
    acceptance)
      marks='acceptance'
      export JAXRL_TEST_LEDGER=$PWD/runs
      plugins=(-p ledger)
      export PYTHONPATH=tests/tools${PYTHONPATH:+:$PYTHONPATH}
      ;;
  esac

  part ruff 'ruff' .venv/bin/python -m ruff check .
  for log in "${beside[@]}"; do
    if [ "$log" = packages ]; then
      wait "${parts[packages]}"
      cat "$logs/packages.log"
    else
      finish_part "$log" "${names[$log]}"
    fi
  done

  version=$(version_of .venv/bin/python)
  python312=
  if [ "$tier" = full ] && has_tests && [ "$version" != 3.12 ] && python312=$(find_python312); then
    begin_part environment312 "Python 3.12's environment" nice -n 10 bash -c \
      'SAY=$1; source launch/environment.sh; ensure_environment .venv312 "$2" test-without-torch' - "$SAY" "$python312"
  fi

  name="pytest, tier $tier, Python $version"
  if has_tests; then
    pytest_part pytest "$name" .venv/bin/python "$marks" "${files[@]}" "$@"
  else
    summary+=("$name: the change affects no test")
  fi

  name='pytest, tier fast, Python 3.12'
  if [ -n "$python312" ]; then
    newest=()
    if [ -z "$chosen" ]; then
      # With --changed, use only the listed files that the change affects.
      mapfile -t newest < <(sed -n 's/^\([^# ][^ ]*\).*/\1/p' tests/tools/newest.txt |
        { [ -z "$changed" ] && cat || grep -Fx -f <(printf '%s\n' "${files[@]}"); })
    fi
    if ! finish_part environment312 "Python 3.12's environment"; then
      summary+=("$name: not run: it has no environment")
    elif [ -n "$changed" ] && [ ${#newest[@]} = 0 ]; then
      summary+=("$name: the change affects none of tests/tools/newest.txt")
    else
      pytest_part pytest312 "$name" .venv312/bin/python 'not full and not acceptance' "${newest[@]}" "$@"
    fi
  elif [ "$tier" = full ] && has_tests; then
    if [ "$version" = 3.12 ]; then
      say ".venv itself has Python 3.12: no second pass"
    else
      summary+=("$name: skipped: there is no python3.12 here")
    fi
  fi

  .venv/bin/python tests/tools/times.py "$logs"
  say 'summary'
  printf '  %s\n' "${summary[@]}"
  exit $status
}

# SIGINT and SIGTERM end every part: run_all and its parts form one process group, for which this shell only waits.
# (bash 5.2 loses a trapped signal that arrives while it reads a command substitution.)
end_all() {
  local tries
  trap '' INT TERM
  exec 2>/dev/null  # Otherwise, bash would report each process that a signal ends.
  kill -0 -- "-$!" || return
  kill -KILL "$!"  # Kill run_all first, so that it begins no further part.
  kill -INT -- "-$!"
  for ((tries = 0; tries < 100; tries++)); do
    kill -0 -- "-$!" || break
    sleep 0.1
  done
  kill -KILL -- "-$!"
}
trap end_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
set -m
run_all "$@" &
set +m
wait "$!"
