#!/usr/bin/env bash
# Sets up and trains the quickstart: SFT, then GRPO, on a procedural task, on this machine's CPU, in minutes.
#
#   bash launch/quickstart.sh [--config=FILE.py[:VARIANT]] [--workdir=DIR] [--config.KEY=VALUE ...]
#
# Arguments go to launch/train.py after the quickstart's own, so that yours win. Paths are relative to the repository.
# It needs Python 3.11 or newer (PYTHON=... chooses one), no root, and the network only to install packages the first
# time. Running it again resumes the run, or says that it is finished.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SAY=quickstart
EXTRAS=reasoning-gym
source launch/environment.sh

python=$(find_python)
ensure_environment .venv "$python"

# XLA's CPU pool has as many threads as NPROC says, and bits may follow their number: a run that is resumed must have as
# many as before.
# The trainer needs no PyTorch, so that transformers need not advise it.
export TRANSFORMERS_NO_ADVISORY_WARNINGS=1
export NPROC=${NPROC:-$(nproc)}
say "training (NPROC=$NPROC): launch/train.py --config=configs/quickstart.py --workdir=runs/quickstart $*"
exec .venv/bin/python launch/train.py --config=configs/quickstart.py --workdir=runs/quickstart "$@"
