#!/usr/bin/env bash
# Builds the documentation as a static site, in a separate environment.
#
#   bash launch/docs.sh [--serve]
#
# The site is written to runs/docs; --serve shows it at 127.0.0.1:8000 and rebuilds it after each change. The
# environment is .venv-docs, with the group `docs` of pyproject.toml; the installation is skipped if nothing has
# changed. Any warning, such as a broken link, fails the build. Pages that are derived from the code are written by
# docs/generate.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SAY=docs
source launch/environment.sh

command=(build --strict)
while [ $# -gt 0 ]; do
  case $1 in
    --serve) command=(serve --strict) ;;
    *) fail "$1: unknown argument; wanted [--serve]" ;;
  esac
  shift
done

(
  venv=.venv-docs
  python=$(find_python)
  begin_separate_environment "$venv" "$python" docs launch/docs.sh pyproject.toml || exit 0
  say "installing mkdocs-material into $venv"
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --group docs ||
    fail "uv could not install the group docs (see its output above)"
  end_separate_environment
)
NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs "${command[@]}"
say "the site is in runs/docs"
