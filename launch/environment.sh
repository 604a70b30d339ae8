# Sourced by the launch scripts: finds a Python, creates a virtual environment, and installs the package into it.
#
# The installation is skipped if nothing has changed since the last one: a stamp file in the environment contains a hash
# of pyproject.toml, this script, the constraints, Python's version, the current directory, the extras and the
# dependency group.

SAY=${SAY:-jaxrl_llm}
# Extras of the package to install, separated by commas.
EXTRAS=${EXTRAS:-math,reasoning-gym,datasets}
# If it were set, every process would compile every module again.
unset PYTHONDONTWRITEBYTECODE

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

# Prints the Python to use: $PYTHON if it is set, otherwise the first of several commands that is new enough.
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

# lock_environment DIRECTORY: waits until no other script is setting up DIRECTORY, and makes other scripts wait until
# this shell ends. The lock is a file beside DIRECTORY. Without flock, nothing is locked.
lock_environment() {
  mkdir -p "$(dirname "$1")"
  exec 9>>"${1%/}.lock"
  if command -v flock >/dev/null && ! flock --nonblock 9; then
    say "waiting for another script that is setting up $1"
    flock 9
  fi
}

# adopt_pip_settings DIRECTORY: sets uv's environment variables, so that uv uses the package indexes of pip's settings.
adopt_pip_settings() {
  local name value
  while IFS='=' read -r name value; do
    [ -n "${!name:-}" ] || export "$name=$value"
  done < <("$1/bin/python" -m pip config list 2>/dev/null | "$1/bin/python" -c '
import ast, os, sys
# Later sections override earlier ones.
sections = {"global": {}, "install": {}, ":env:": {}}
for line in sys.stdin:
  key, _, value = line.partition("=")
  section, _, name = key.rpartition(".")
  if section in sections:
    sections[section][name] = ast.literal_eval(value).split()
settings = {name: words for found in sections.values() for name, words in found.items() if words}
if "find-links" in settings:
  # Unlike pip, uv fails if a folder does not exist.
  places = [place for place in settings["find-links"] if ":" in place or os.path.exists(place)]
  if places:
    print("UV_FIND_LINKS=" + ",".join(places))
if "extra-index-url" in settings and not os.environ.get("UV_EXTRA_INDEX_URL"):
  print("UV_INDEX=" + " ".join(settings["extra-index-url"]))
if "index-url" in settings and not os.environ.get("UV_INDEX_URL"):
  print("UV_DEFAULT_INDEX=" + settings["index-url"][0])
for name, variable in (("no-index", "UV_NO_INDEX"), ("cert", "SSL_CERT_FILE")):
  if name in settings:
    print(variable + "=" + settings[name][0])
')
  # As with pip, the best version in any index or folder is installed, such as a CPU build of PyTorch in a folder.
  export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
}

# ensure_uv DIRECTORY: installs uv if it is missing. If uv does not run then, prints pip's last line and returns 1.
ensure_uv() {
  local words
  "$1/bin/python" -m uv --version >/dev/null 2>&1 && return
  words=$("$1/bin/python" -m pip install --quiet --retries 2 uv 2>&1) ||
    words=$(grep -v '^ *$' <<<"$words" | tail -n 1)
  "$1/bin/python" -m uv --version >/dev/null 2>&1 && return
  echo "${words:-uv does not run}"
  return 1
}

# alone COMMAND...: runs a command that writes jaxrl_llm.egg-info into this directory, one such command at a time.
alone() {
  (
    exec 8<pyproject.toml
    ! command -v flock >/dev/null || flock 8
    "$@"
  )
}

# install_packages DIRECTORY CONSTRAINTS [GROUP]: installs the package (editable) and the group, with uv or else pip.
install_packages() {
  local venv=$1 constraints=$2 group=${3:-} chosen=() extras=() uv words installed=
  [ "${PWD%/jaxrl_llm/app/environments}" = "$PWD" ] || installed=yes  # This is an installed package, not a checkout.
  [ ! -f "$constraints" ] || chosen+=(--constraint "$constraints")
  [ -z "$group" ] || chosen+=(--group "$group")
  for words in ${EXTRAS//,/ }; do extras+=(--extra "$words"); done
  if words=$(ensure_uv "$venv"); then
    adopt_pip_settings "$venv"
    uv=("$venv/bin/python" -m uv pip install --quiet --python "$venv/bin/python")
    if "${uv[@]}" --requirements pyproject.toml "${extras[@]}" "${chosen[@]}"; then
      if [ -n "$installed" ]; then
        cp -R ../../../jaxrl_llm "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        return
      fi
      ! alone "${uv[@]}" --no-deps --editable . || return 0
    fi
    say "uv could not install the packages into $venv; trying pip"
  else
    say "uv cannot be installed into $venv ($words); installing with pip"
  fi
  [ -z "$installed" ] || fail "uv is needed, because pip cannot install this package again; see above"
  # pip supports groups since 25.1.
  "$venv/bin/python" -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (25, 1))' ||
    [ -z "$group" ] || "$venv/bin/python" -m pip install --quiet --upgrade 'pip>=25.1'
  alone "$venv/bin/python" -m pip install --quiet --editable ".[$EXTRAS]" "${chosen[@]}" ||
    fail "pip could not install the packages (see its output above)"
}

# ensure_environment DIRECTORY PYTHON [GROUP]: creates the environment if necessary, with the package and the group.
ensure_environment() {
  (
    lock_environment "$1"
    install_environment "$@"
  ) || exit
}

install_environment() {
  local venv=$1 python=$2 group=${3:-} version constraints stamp want
  if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    say "creating $venv with Python $(version_of "$python")"
    "$python" -m venv --clear "$venv" ||
      fail "$python cannot create $venv; wanted Python's venv and ensurepip (Debian: apt-get install python3-venv)"
  fi
  is_new_enough "$venv/bin/python" ||
    fail "$venv has Python $(version_of "$venv/bin/python"); wanted 3.11 or newer: remove it and start again"
  version=$(version_of "$venv/bin/python")
  constraints=constraints/py${version/./}.txt
  stamp=$venv/installed${group:+-$group}
  want=$({ cat pyproject.toml launch/environment.sh; cat "$constraints" 2>/dev/null || true; echo "$version $PWD $EXTRAS $group"; } |
    "$venv/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
  if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
    say "$venv is up to date"
    return
  fi
  if [ -f "$constraints" ]; then
    say "installing packages into $venv (versions of $constraints${group:+, group $group})"
  else
    say "installing packages into $venv${group:+ (group $group)}; there are no tested versions for Python $version"
  fi
  install_packages "$venv" "$constraints" "$group"
  echo "$want" >"$stamp"
}

# begin_separate_environment DIRECTORY PYTHON NAME FILE...: creates an environment with only uv, for packages that the
# trainer's environment must not contain. Returns 1 if the environment is up to date with the FILEs. Fails if DIRECTORY
# was not made by the script NAME. The caller then installs the packages and calls `end_separate_environment`. The lock
# is held until the script ends.
begin_separate_environment() {
  local venv=$1 python=$2 name=$3 made=$1/made-by-$3 words
  shift 3
  lock_environment "$venv"
  separate_stamp=$venv/installed
  separate_want=$(cat "$@" | "$python" -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest(), sys.version)')
  if [ "$(cat "$separate_stamp" 2>/dev/null)" = "$separate_want" ]; then
    say "$venv is up to date"
    return 1
  fi
  if [ -e "$venv" ] && [ ! -e "$made" ] && [ -n "$(ls -A "$venv")" ]; then
    fail "$venv exists and was not made by this script, so it is not changed: remove it, or choose another --target"
  fi
  say "creating $venv with Python $(version_of "$python")"
  "$python" -m venv --clear "$venv" ||
    fail "$python cannot create $venv; wanted Python's venv and ensurepip (Debian: apt-get install python3-venv)"
  touch "$made"
  words=$(ensure_uv "$venv") || fail "pip could not install uv: $words"
  adopt_pip_settings "$venv"
}

end_separate_environment() { echo "$separate_want" >"$separate_stamp"; }
