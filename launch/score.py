"""Scores a file of completions with one scorer: how to try it before a run.

python launch/score.py --scorer=answer --rows=FILE.jsonl --out=SCORES.jsonl    # mode chosen from the rows' truths
python launch/score.py --scorer=answer --options.mode=numeric --rows=FILE.jsonl --out=SCORES.jsonl
python launch/score.py --scorer=verl --options.function=my_reward.py:compute_score --rows=FILE.jsonl --out=SCORES.jsonl

A row is {"prompt", "completion", "reward_model": {"style", "ground_truth"}}, as verl has it, or for code {"prompt"?,
"completion", "tests", "entry_point"?}. NAME is one that launch/train.py --list prints, or 'module:attribute' for one
of your own (the current directory is searched too). SCORES.jsonl gets a score for each row, in their order, and is not
written where a row cannot be read. Options: --options='{"mode": "numeric"}' or --options.mode=numeric, whose values are
JSON, or else text.
"""

if __name__ == '__main__':
  # Scorer workers import this file again under another name: what is heavy stays out of their way.
  import signal
  import sys

  # Until the command takes over: Ctrl-C ends the process without a traceback.
  signal.signal(signal.SIGINT, signal.SIG_DFL)

  from jaxrl_llm.app.score_cli import main

  sys.exit(main(sys.argv))
