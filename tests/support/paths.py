"""Directories of the repository."""

import pathlib

SUPPORT = pathlib.Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
FIXTURES = SUPPORT / 'fixtures'
TOOLS = TESTS / 'tools'
PEERS_PYTHON = ROOT / '.venv-peers' / 'bin' / 'python'
"""Python interpreter with TRL, peft and Tunix (see launch/install_peers.sh)."""
