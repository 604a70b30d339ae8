# Sourced by the launch scripts: finds a Python, makes a virtual environment, and installs the package into it.
#
# Installing is skipped when nothing changed since the last time: a stamp inside the environment holds a hash of what
# was installed (pyproject.toml, the constraints, Python's version, this directory, the dependency group).

SAY=${SAY:-jaxrl_llm}

say() { echo "$SAY: $*"; }

fail() {
  echo "$SAY: $*" >&2
  exit 2
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

is_new_enough() {
  case $(version_of "$1") in
    3.1[1-9] | 3.[2-9][0-9]) return 0 ;;
    *) return 1 ;;
  esac
}

# Prints the Python to use: $PYTHON where it is set, else python3, else a newer one beside it.
find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is Python $(version_of "$PYTHON" || echo '(does not run)'); wanted 3.11 or newer"
    echo "$PYTHON"
    return
  fi
  for candidate in python3 python3.12 python3.11 python3.13; do
    if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "python3 is $(version_of python3 || echo missing); wanted Python 3.11 or newer: install one, or name it with PYTHON=/path/to/python3.11"
}

# ensure_environment DIRECTORY PYTHON [GROUP]: afterwards DIRECTORY/bin/python has the package and the group.
# One script at a time: two pips in one environment break it. (The lock is this file; where flock is missing, there is none.)
ensure_environment() {
  exec 9<launch/environment.sh
  if command -v flock >/dev/null && ! flock --nonblock 9; then
    say "waiting for another script that is setting up an environment"
    flock 9
  fi
  install_environment "$@"
  exec 9<&-
}

install_environment() {
  local venv=$1 python=$2 group=${3:-} version constraints stamp want
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "creating $venv with Python $(version_of "$python")"
    "$python" -m venv --clear "$venv" ||
      fail "$python cannot create $venv; wanted Python's venv and ensurepip (Debian: apt-get install python3-venv)"
  fi
  is_new_enough "$venv/bin/python" ||
    fail "$venv has Python $(version_of "$venv/bin/python"); wanted 3.11 or newer: remove it and start again"
  version=$(version_of "$venv/bin/python")
  constraints=constraints/py${version/./}.txt
  stamp=$venv/installed${group:+-$group}
  want=$({ cat pyproject.toml launch/environment.sh; cat "$constraints" 2>/dev/null || true; echo "$version $PWD $group"; } |
    "$venv/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
  if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
    say "$venv is up to date"
    return
  fi
  local arguments=(--quiet --editable .)
  if [ -f "$constraints" ]; then
    say "installing packages into $venv (versions of $constraints${group:+, group $group})"
    arguments+=(--constraint "$constraints")
  else
    say "installing packages into $venv${group:+ (group $group)}; no tested versions are on record for Python $version"
  fi
  if [ -n "$group" ]; then
    # Groups are known to pip since 25.1.
    "$venv/bin/python" -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (25, 1))' ||
      "$venv/bin/python" -m pip install --quiet --upgrade 'pip>=25.1'
    arguments+=(--group "$group")
  fi
  "$venv/bin/python" -m pip install "${arguments[@]}" || fail "pip could not install the packages (its own words are above)"
  echo "$want" >"$stamp"
}

# begin_separate_environment DIRECTORY PYTHON NAME FILE...: an empty environment with uv in it, for what the trainer's own
# must not hold; 1 where it is up to date with the FILEs (and this script's text). One that no script made is left alone.
# What follows is installed, and `end_separate_environment` called. The lock is held until the script ends.
begin_separate_environment() {
  local venv=$1 python=$2 name=$3 made=$1/made-by-$3
  shift 3
  exec 9<launch/environment.sh
  if command -v flock >/dev/null && ! flock --nonblock 9; then
    say "waiting for another script that is setting up an environment"
    flock 9
  fi
  separate_stamp=$venv/installed
  separate_want=$(cat "$@" | "$python" -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest(), sys.version)')
  if [ "$(cat "$separate_stamp" 2>/dev/null)" = "$separate_want" ]; then
    say "$venv is up to date"
    return 1
  fi
  if [ -e "$venv" ] && [ ! -e "$made" ] && [ -n "$(ls -A "$venv")" ]; then
    fail "$venv is there and was not made by this script; it is left alone: remove it, or name another --target"
  fi
  say "creating $venv with Python $(version_of "$python")"
  "$python" -m venv --clear "$venv" ||
    fail "$python cannot create $venv; wanted Python's venv and ensurepip (Debian: apt-get install python3-venv)"
  touch "$made"
  "$venv/bin/python" -m pip install --quiet uv || fail "pip could not install uv (its own words are above)"
  # What pip would find in a folder, uv is to find there too.
  export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
}

end_separate_environment() { echo "$separate_want" >"$separate_stamp"; }
