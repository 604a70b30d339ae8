"""Files of a run directory that are archived with a commit."""

import exploring

from jaxrl_llm.app.composition.archiving import staged


def test_files_that_are_still_being_written_are_left_out(tmp_path):
  exploring.new_store(tmp_path / 'replay').close()
  (tmp_path / 'evals' / 'sft').mkdir(parents=True)
  for name in ('000006-held_out.jsonl', '000012-held_out.jsonl.tmp'):
    (tmp_path / 'evals' / 'sft' / name).touch()
  with staged(tmp_path, 0) as files:
    evaluations = [name for name in files if name.startswith('evals/')]
  assert evaluations == ['evals/sft/000006-held_out.jsonl']
  assert not (tmp_path / 'archive.staged').exists()
