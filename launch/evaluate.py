"""Measures what a run committed: `python launch/evaluate.py --workdir=runs/quickstart [--steps=500,780] [--out=FILE]`.

Every commit that is kept, or the steps that are named (0: what the run began with), on the suites of the run's own
configuration, which `--config.field=value` changes: more tasks, samples for pass@k, another engine. Nothing in the run
directory changes. FILE gets a JSON line for each completion.
"""

if __name__ == '__main__':
  # Scorer workers import this file again under another name: what is heavy stays out of their way.
  import sys

  from jaxrl_llm.app.evaluate_cli import main

  sys.exit(main(sys.argv))
