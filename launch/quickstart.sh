#!/usr/bin/env bash
# Sets up and trains the quickstart: SFT, then GRPO, on a procedural task, on this machine's CPU, in minutes.
#
#   bash launch/quickstart.sh [--config=FILE.py[:VARIANT]] [--workdir=DIR] [--config.KEY=VALUE ...]
#
# Arguments are passed to launch/train.py after those of this script, so they take precedence. Paths are relative to the
# repository. The script needs Python 3.11 or newer (PYTHON=... chooses one) and no root rights. It uses the network
# only to install packages the first time. If it is run again, it resumes the run, or reports that the run is finished.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SAY=quickstart
EXTRAS=reasoning-gym
source launch/environment.sh

python=$(find_python)
ensure_environment .venv "$python"

# The trainer does not need PyTorch, so silence transformers' advice to install it.
export TRANSFORMERS_NO_ADVISORY_WARNINGS=1
# NPROC is the number of threads of XLA's CPU pool. The last bits of results may depend on it, so a resumed run must
# have the same number as before.
export NPROC=${NPROC:-$(nproc)}
say "training (NPROC=$NPROC): launch/train.py --config=configs/quickstart.py --workdir=runs/quickstart $*"
exec .venv/bin/python launch/train.py --config=configs/quickstart.py --workdir=runs/quickstart "$@"
