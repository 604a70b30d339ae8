"""Measures the tasks of a taskset with a run's policy and keeps those that are worth training on.

python launch/curate.py --workdir=RUN --taskset=NAME --out=FILE.jsonl [--low=0.1 --high=0.9] [--guess_tries=8]

Each task is attempted --samples times at --temperature with the newest commit (or --step), and kept if its share of
correct attempts is in [--low, --high]; of those, tasks that are answered correctly in --guess_tries tries without
reasoning are dropped. FILE gets the rows that are kept, with `pass_rate`, `hardness` (1 − pass_rate) and `guessed`: the
same taskset with source=FILE and no options reads them. Nothing in the run directory changes.
"""

if __name__ == '__main__':
  # Scorer workers import this file again under another name: what is heavy stays out of their way.
  import sys

  from jaxrl_llm.app.curate_cli import main

  sys.exit(main(sys.argv))
