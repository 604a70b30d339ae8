#!/usr/bin/env bash
# Runs the fast tests with the lowest versions that pyproject.toml allows, in .venv-lowest.
#
#   bash tests/tools/lowest.sh [ARGUMENT...]
#
# Arguments go to pytest, such as tests/tasks or -k NAME; without any, the whole fast tier runs. uv takes the lowest
# version of what pyproject.toml names and the newest of what these need in turn (--resolution lowest-direct).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
SAY=lowest
source launch/environment.sh

venv=.venv-lowest
python=$(find_python)
if begin_separate_environment "$venv" "$python" lowest pyproject.toml tests/tools/lowest.sh; then
  say "installing the lowest versions into $venv"
  alone "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --resolution lowest-direct \
    --editable ".[$EXTRAS,sweep]" --group test || fail "uv could not install them (its own words are above)"
  end_separate_environment
fi
"$venv/bin/uv" pip freeze --quiet --python "$venv/bin/python" |
  grep -E '^(jax|flax|optax|orbax-checkpoint|grain|numpy|transformers|tokenizers|huggingface[-_]hub|pyarrow|datasets)=='
exec "$venv/bin/python" -m pytest -m 'not full and not acceptance' "$@"
