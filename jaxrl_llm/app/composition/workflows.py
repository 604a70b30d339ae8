"""Builds the workflow that a configuration names. Does not import JAX, because explorer processes
import this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from jaxrl_llm.config.annotations import nearest
from jaxrl_llm.config.own import own_part
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rollout.episodes.environment import EnvironmentWorkflow
from jaxrl_llm.rollout.episodes.tools import ToolUse
from jaxrl_llm.rollout.hub import Hub
from jaxrl_llm.rollout.workflow import SingleTurn, Workflow, WorkflowConfig
from jaxrl_llm.tasks.tokenizer import Tokenizer

WORKFLOWS: Mapping[str, Callable[..., Workflow]] = {
  'environment': EnvironmentWorkflow,
  'single_turn': SingleTurn,
  'tools': ToolUse,
}


def build_workflow(
  config: WorkflowConfig, hub: Hub, tokenizer: Tokenizer, max_tokens: int
) -> Workflow:
  """Builds a workflow: one from the catalogue, or a user-defined one.

  Args:
    hub: access to the policy, the scorers and auxiliary models.
    tokenizer: the policy's tokenizer.
    max_tokens: maximum length of a completion in tokens.
  """
  kind = config.kind
  if ':' not in kind and kind not in WORKFLOWS:
    raise UserError(
      f'rollout.workflow: no workflow {kind!r}; {nearest(kind, WORKFLOWS)}; a custom one is '
      "'module:attribute'"
    )
  make = own_part(kind, 'workflow') if ':' in kind else WORKFLOWS[kind]
  try:
    given = inspect.signature(make).bind(hub, tokenizer, max_tokens=max_tokens, **config.options)
  except TypeError as error:
    raise UserError(
      f'rollout.workflow.options: workflow {kind!r} does not take {sorted(config.options)} '
      f'({error})'
    ) from None
  workflow = make(*given.args, **given.kwargs)
  if not isinstance(workflow, Workflow):
    raise UserError(
      f'workflow {kind!r}: made a {type(workflow).__name__}, which has no `run` and `text`'
    )
  return workflow
