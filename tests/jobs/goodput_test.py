"""The seconds and tokens in a job's ledgers add up."""

import job
import pytest
import spending

pytestmark = pytest.mark.full


def test_seconds_and_tokens_add_up_with_the_embedded_engine():
  run = job.quick_run()
  spending.check_seconds(run, 'trainer', 'scorers')
  classes = spending.check_tokens(run)
  assert classes['trained'] > 0 and classes['evaluated'] > 0 and classes['partial'] == 0


def test_tokens_of_partial_and_returned_groups_are_in_one_class():
  run = job.finished('partial', *job.PARTIAL)
  spending.check_seconds(run, 'trainer', 'scorers')
  assert spending.check_tokens(run)['discarded'] > 0
