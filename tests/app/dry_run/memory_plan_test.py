"""The memory plan is the fastest one that fits, by the compiler's figures."""

import dataclasses
import itertools

import jax
import pytest

from jaxrl_llm.api import load_config
from jaxrl_llm.app.composition.automatic import with_named
from jaxrl_llm.app.composition.stages import policy_options
from jaxrl_llm.app.dry_run.costs import update_cost
from jaxrl_llm.app.dry_run.memory_plan import Fit, Search, Target, build, measure, memory_limit
from jaxrl_llm.core.errors import UserError
from jaxrl_llm.models.families import tiny
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh


def config_of(**overrides):
  """One stage of GRPO with batches of four sequences, whose layers are scanned: without a scan,
  remat saves nothing on a CPU.
  """
  fields = {
    'policy.scan_layers': True,
    'stages.grpo.source.groups_per_batch': 1,
    'stages.grpo.source.group_size': 4,
    'learner.chunks_per_rank': 'auto',
    'learner.logits_budget_bytes': 256 << 20,
    'learner.chunk_len': 16,
    **overrides,
  }
  config = load_config('quickstart', fields)
  return dataclasses.replace(config, stages=config.stages[1:], evaluation=())


@pytest.fixture(scope='module')
def target():
  spec = dataclasses.replace(tiny('qwen2', 64), num_hidden_layers=8)
  return Target(build_mesh(MeshConfig(), jax.devices()[:1]), None, spec, {})


@pytest.fixture(scope='module')
def sizes(target):
  """All plans and their memory, from the fastest to the slowest."""
  config, everything = config_of(), 10**15
  plans = Search(config, target, everything).plans
  fits = [measure(with_named(config, plan.values), target, everything)[0] for plan in plans]
  return [(plan, fit.needed) for plan, fit in zip(plans, fits, strict=True)]


def searched(target, sizes, limit):
  """The search with the measured sizes of the plans."""
  search = Search(config_of(), target, limit)
  while (plan := search.next()) is not None:
    size = next(size for measured, size in sizes if measured == plan)
    search.report(plan, Fit(size, 'update of grpo' if size > limit else ''))
  return search


def test_plans_are_sorted_by_their_cost_and_differ_in_remat_and_accumulation(sizes):
  plans = [plan for plan, _ in sizes]
  assert [plan.cost.seconds for plan in plans] == sorted(plan.cost.seconds for plan in plans)
  assert {plan.values['remat'] for plan in plans} == {'none', 'dots', 'full'}
  # A batch of four sequences needs no micro-batch of eight.
  assert {plan.values['chunks_per_rank'] for plan in plans} == {1, 2, 4}


def test_with_enough_memory_the_fastest_plan_is_taken_and_no_other_is_compiled(target, sizes):
  search = searched(target, sizes, sizes[0][1])
  assert search.chosen == sizes[0][0] and len(search.tried) == 1
  assert search.lines()[0].startswith(f'memory plan {search.chosen}: chosen, ')


def test_with_less_memory_it_is_the_fastest_of_those_that_fit(target, sizes):
  chosen = []
  needed = sorted({size for _, size in sizes})
  for less, more in itertools.pairwise(needed):
    search = searched(target, sizes, (less + more) // 2)
    assert search.chosen == next(plan for plan, size in sizes if size <= less)
    chosen.append(search.chosen.values)
    assert len(search.tried) < len(sizes) or search.chosen == sizes[-1][0]
  assert {values['remat'] for values in chosen} == {'none', 'dots', 'full'}
  assert len({values['chunks_per_rank'] for values in chosen}) > 1


def test_if_nothing_fits_one_line_says_what_the_smallest_plan_needs(target, sizes):
  plan, size = min(sizes, key=lambda of_plan: of_plan[0].levels)
  limit = size - 10**5
  with pytest.raises(UserError) as error:
    searched(target, sizes, limit)
  text = str(error.value)
  assert '\n' not in text and text.startswith('no memory plan fits a device: ')
  wanted = f'{size / 1e6:,.1f} MB a device of {limit / 1e6:,.1f}'
  assert f'the smallest one ({plan}): does not fit, update of grpo: {wanted}' in text
  assert plan.values['remat'] == 'full' and plan.values['chunks_per_rank'] == 1
  excess = measure(with_named(config_of(), plan.values), target, limit)[0].excess
  assert excess == 'update of grpo: by 0.1 MB'


def test_the_memory_of_logits_is_the_largest_that_fits(target):
  """Logits of 8,192 tokens of vocabulary take most of the memory of this model."""
  fields = {'learner.logits_budget_bytes': 'auto', 'learner.chunks_per_rank': 4}
  config = with_named(config_of(**fields), {'remat': 'none', 'offload': False})
  spec = dataclasses.replace(tiny('qwen2', 8192), num_hidden_layers=1)
  target, limit = target._replace(spec=spec), 30 * 10**6
  plans = Search(config, target, limit).plans
  budgets = [plan.values['logits_budget_bytes'] for plan in plans]
  # All logits fit the first budget, which is that of CPUs.
  assert budgets[0] == 256 << 20 and budgets == sorted(budgets, reverse=True) and len(plans) > 3
  assert all(plan.values.keys() == {'logits_budget_bytes'} for plan in plans)
  needed = [measure(with_named(config, plan.values), target, 10**15)[0].needed for plan in plans]
  assert needed == sorted(needed, reverse=True) and needed[0] - needed[-1] > 10**6
  for at, plan in enumerate(plans):
    search = Search(config, target, limit)
    search.limit = needed[at]
    while (tried := search.next()) is not None:
      size = needed[plans.index(tried)]
      search.report(tried, Fit(size, 'update of grpo' if size > needed[at] else ''))
    assert search.chosen == plan and len(search.tried) == at + 1
  smallest = search
  assert f'at most {budgets[at] / 1e6:,.1f} MB of logits: chosen, ' in search.lines()[at]
  search = Search(config, target, limit)
  search.report(search.next(), Fit(limit + 10**9, 'update of grpo'))
  assert search.next() == plans[1], 'smaller logits may save a gigabyte'
  search = Search(config, target, limit)
  search.report(search.next(), Fit(limit + 2 * 10**9, 'update of grpo'))
  with pytest.raises(UserError, match='no memory plan fits'):
    search.next()
  written = smallest.to_json()[-1]
  assert written['chosen'] and written['logits_budget_bytes'] == budgets[-1]


def test_what_stays_beside_a_program_counts(target):
  """The engine, and a reference that the update does not read."""
  config = with_named(config_of(), {'remat': 'none', 'chunks_per_rank': 1, 'offload': False})
  alone = measure(config, target, 10**15)[0].needed
  beside = measure(config, target._replace(engine_bytes=5000), 10**15)[0].needed
  assert beside == alone + 5000
  fields = {'stages.grpo.algorithm.options': {'kl_loss_coef': 0.1}}
  kl = with_named(config_of(**fields), {'remat': 'none', 'chunks_per_rank': 1, 'offload': False})
  _, model = build(kl, target, policy_options)
  parameters = sum(4 * leaf.size for leaf in jax.tree.leaves(model.shapes()))
  assert measure(kl, target, 10**15)[0].needed >= alone + parameters


def test_the_limit_is_the_one_given_or_the_chips(target):
  assert memory_limit(config_of(), target.mesh, None) is None
  given = config_of(**{'learner.memory_bytes': 10**9})
  assert memory_limit(given, target.mesh, None) == 10**9
  assert memory_limit(given, target.mesh, 'h100') == 10**9
  assert memory_limit(config_of(), target.mesh, 'h100') == 80 * 10**9


def test_the_cost_counts_recomputation_and_transfers(target):
  def cost(**values):
    values = {'remat': 'none', 'chunks_per_rank': 1, 'offload': False, **values}
    config = with_named(config_of(**{'learner.logits_budget_bytes': 'auto'}), values)
    mesh = build_mesh(MeshConfig(), jax.devices()[:2])
    stages, model = build(config, target._replace(mesh=mesh), policy_options)
    return update_cost(stages, model, mesh, 'h100'), stages[0].shape.micro_batches

  (plain, many), (wide, few) = cost(), cost(chunks_per_rank=2)
  # Each micro-batch gathers the weights once more.
  assert many > few and plain.exchange / many == pytest.approx(wide.exchange / few)
  assert plain.host == 0
  costs = {remat: cost(remat=remat)[0] for remat in ('dots', 'full', 'offload')}
  assert plain.compute < costs['dots'].compute < costs['full'].compute
  assert costs['offload'].compute == costs['full'].compute and costs['offload'].host > 0
  assert cost(offload=True)[0].host > 0
  # Of 16 tokens, at most four, and then one, have their logits at a time.
  whole = cost(chunks_per_rank=4)[0].head
  parts = [
    cost(chunks_per_rank=4, logits_budget_bytes=4 * tokens * 64 * 4)[0].head for tokens in (4, 1)
  ]
  assert parts == [pytest.approx(4 * whole), pytest.approx(16 * whole)] and whole > 0
