"""Trains: `python launch/train.py --config=configs/quickstart.py [--workdir=DIR] [--config.field=value ...]`.

Starting the same command again resumes from the newest commit. Exit code 0 means finished; 130 and 143 mean stopped by
Ctrl-C and SIGTERM after a commit; 1 and 2 mean a run or an input that cannot go on, in one line.
"""

if __name__ == '__main__':
  # Scorer workers import this file again under another name: what is heavy stays out of their way.
  import signal
  import sys

  # Until the run takes over: Ctrl-C ends the process without a traceback.
  signal.signal(signal.SIGINT, signal.SIG_DFL)

  from jaxrl_llm.app.cli import main

  sys.exit(main(sys.argv))
