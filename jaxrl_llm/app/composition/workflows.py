"""Builds the workflow that a configuration names. Does not import JAX, because explorer processes
import this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from jaxrl_llm.config.annotations import nearest
from jaxrl_llm.config.own import own_part
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.rollout.agents.workflow import ExternalAgent
from jaxrl_llm.rollout.episodes.environment_workflow import EnvironmentWorkflow
from jaxrl_llm.rollout.episodes.tool_workflow import ToolUse
from jaxrl_llm.rollout.episodes.workflow import Episodes
from jaxrl_llm.rollout.hub import Hub
from jaxrl_llm.rollout.workflow import SingleTurn, Workflow, WorkflowConfig
from jaxrl_llm.tasks.tokenizer import Tokenizer

WORKFLOWS: Mapping[str, Callable[..., Workflow]] = {
  'environment': EnvironmentWorkflow,
  'external': ExternalAgent,
  'single_turn': SingleTurn,
  'tools': ToolUse,
}
_EXTERNAL = 'external:'
"""Prefix of a workflow's name. The rest of the name is the command of an agent."""


def build_workflow(
  config: WorkflowConfig,
  hub: Hub,
  tokenizer: Tokenizer,
  max_tokens: int,
  max_steps: int = 1,
  max_prompt: int | None = None,
) -> Workflow:
  """Builds a workflow: one from the catalogue, or a user-defined one.

  Args:
    hub: access to the policy, the scorers and auxiliary models.
    tokenizer: the policy's tokenizer.
    max_tokens: maximum length of a completion in tokens.
    max_steps: maximum number of steps of an episode. Workflows other than `Episodes` do not get
      this number, but their trajectories are checked against it.
    max_prompt: maximum length of a prompt in tokens; None if the engine alone limits it.
  """
  kind, options = config.kind, dict(config.options)
  if kind.startswith(_EXTERNAL):
    kind, options['command'] = 'external', kind.removeprefix(_EXTERNAL)
  if ':' not in kind and kind not in WORKFLOWS:
    raise UserError(
      f'rollout.workflow: no workflow {kind!r}; {nearest(kind, WORKFLOWS)}; a custom one is '
      "'module:attribute'"
    )
  make = own_part(kind, 'workflow') if ':' in kind else WORKFLOWS[kind]
  try:
    given = inspect.signature(make).bind(hub, tokenizer, max_tokens=max_tokens, **options)
  except TypeError as error:
    raise UserError(
      f'rollout.workflow.options: workflow {kind!r} does not take {sorted(options)} ({error})'
    ) from None
  workflow = make(*given.args, **given.kwargs)
  if not isinstance(workflow, Workflow):
    raise UserError(
      f'workflow {kind!r}: returned a {type(workflow).__name__}, which lacks `run` or `text`'
    )
  if isinstance(workflow, Episodes):
    workflow.max_steps = max_steps
    workflow.max_prompt = max_prompt
  return workflow
