"""Sandboxes for reasoning-gym verifiers that evaluate text as code.

Invariants: only verifiers that are known not to evaluate text run outside a sandbox. All other
verifiers, even unknown ones, run in a sandbox. Each answer gets its own sandbox, in which the
libraries are already loaded. An answer therefore cannot change the verdict on another answer.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
import json
import pathlib
import re
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from jaxrl_llm.rewards.sandbox.isolation import Isolation, Preload
from jaxrl_llm.rewards.sandbox.sandbox import (
  Ending,
  Limits,
  ProgramOutcome,
  SandboxError,
  Sandboxes,
)
from jaxrl_llm.rewards.scorers.answer.effort import explodes

T = TypeVar('T')

PLAIN = frozenset({
  'ab', 'acre', 'advanced_geometry', 'aiw', 'arc_1d', 'arc_agi', 'base_conversion',
  'basic_arithmetic', 'bf', 'binary_alternation', 'boxnet', 'caesar_cipher', 'calendar_arithmetic',
  'chain_sum', 'circuit_logic', 'codeio', 'coin_flip', 'color_cube_rotation', 'complex_arithmetic',
  'count_bits', 'count_primes', 'course_schedule', 'cryptarithm', 'decimal_arithmetic',
  'decimal_chain_sum', 'dice', 'emoji_mystery', 'family_relationships', 'figlet_font',
  'fraction_simplification', 'futoshiki', 'game_of_life', 'game_of_life_halting', 'gcd',
  'graph_color', 'group_anagrams', 'gsm_symbolic', 'isomorphic_strings', 'jugs', 'kakurasu',
  'knight_swap', 'knights_knaves', 'largest_island', 'lcm', 'leg_counting', 'letter_counting',
  'letter_jumble', 'list_functions', 'mahjong_puzzle', 'manipulate_matrix', 'maze', 'mini_sudoku',
  'modulo_grid', 'needle_haystack', 'number_filtering', 'number_format', 'number_sequence',
  'number_sorting', 'palindrome_generation', 'palindrome_partitioning', 'path_star',
  'polynomial_equations', 'pool_matrix', 'power_function', 'prime_factorization', 'products',
  'propositional_logic', 'quantum_lock', 'ransom_note', 'rearc', 'rectangle_count', 'rotate_matrix',
  'rotten_oranges', 'rubiks_cube', 'rush_hour', 'self_reference', 'sentence_reordering',
  'shortest_path', 'simple_equations', 'simple_geometry', 'sokoban', 'spell_backward',
  'string_manipulation', 'string_splitting', 'string_synthesis', 'sudoku', 'survo', 'syllogism',
  'time_intervals', 'tower_of_hanoi', 'tsumego', 'word_ladder', 'word_sequence_reversal',
  'word_sorting', 'zebra_puzzles',
})  # fmt: skip
"""Verifiers whose source was reviewed and does not evaluate answers (see
`tests/rewards/scorers/evaluating_test.py`).
"""

LIMITS = Limits(
  wall_s=6.0, cpu_s=2, memory_mib=1024, processes=4, files=64, file_mib=1, tmp_mib=1, output_kib=64
)
"""Resource limits for the sandbox of one answer."""
MAX_LENGTH = 2000
"""Maximum length, in characters, of an answer that is evaluated."""
BUDGET_S = 8.0
"""Time limit in seconds for an answer, including the start of its sandbox.

It is below the default deadline of a call. A call that misses its deadline counts against the
answer, which must not happen merely because a sandbox starts slowly.
"""

_FUNCTIONS = frozenset({
  'sqrt', 'cbrt', 'root', 'exp', 'log', 'ln', 'sin', 'cos', 'tan', 'cot', 'sec', 'csc', 'asin',
  'acos', 'atan', 'acot', 'asec', 'acsc', 'sinh', 'cosh', 'tanh', 'coth', 'sech', 'csch', 'asinh',
  'acosh', 'atanh', 'acoth', 'Abs', 'pi',
})  # fmt: skip
_NUMBER = r'[0-9]+(?:\.[0-9]*)?|\.[0-9]+'
_ARITHMETIC = re.compile(rf'(?:{_NUMBER}|[-+*/()\s])*+', re.ASCII)
_SYMBOLIC = re.compile(rf'(?:{_NUMBER}|[A-Za-z_][A-Za-z0-9_]*+|[-+*/(),\s])*+', re.ASCII)
_NAME = re.compile(r'[A-Za-z_][A-Za-z0-9_]*', re.ASCII)
_WORDS = re.compile(r'[A-Z0-9_\s]*+', re.ASCII)
_LITERAL = re.compile(rf"""(?:{_NUMBER}|'[^'\\\n]*+'|"[^"\\\n]*+"|[-\[\](),\s])*+""", re.ASCII)


def _is_arithmetic(answer: str, reference: str) -> bool:
  return _ARITHMETIC.fullmatch(answer) is not None and not explodes(answer)


def _is_symbolic(answer: str, reference: str) -> bool:
  """Returns whether the answer is arithmetic in which all names are one-letter symbols, common
  functions or names in the reference answer.
  """
  if _SYMBOLIC.fullmatch(answer) is None or explodes(answer):
    return False
  names = {name for name in _NAME.findall(answer) if len(name) > 1}
  return names <= _FUNCTIONS | (
    set(_NAME.findall(reference)) if _SYMBOLIC.fullmatch(reference) else set()
  )


def is_list(text: str) -> bool:
  """Returns whether the text has only numbers, strings, commas and brackets, so that evaluating it
  only builds lists.
  """
  return _LITERAL.fullmatch(text) is not None


def _is_literal(answer: str, reference: str) -> bool:
  """Returns whether the answer has only capitals, underscores and digits, or is a list of numbers
  and strings.

  In both forms, no name can stand before a bracket, so nothing can be called. Lower-case names are
  excluded because such a name may be a variable in the verifier: evaluating `oracle_answer` would
  return the reference answer.
  """
  return _WORDS.fullmatch(answer) is not None or is_list(answer)


GRAMMARS: Mapping[str, Callable[[str, str], bool]] = {
  'binary_matrix': _is_literal,
  # This verifier evaluates the problem statement, not the answer.
  'bitwise_arithmetic': lambda answer, reference: True,
  'countdown': _is_arithmetic,
  'intermediate_integration': _is_symbolic,
  'n_queens': _is_literal,
  'polynomial_multiplication': _is_symbolic,
  'puzzle24': _is_arithmetic,
  'simple_integration': _is_symbolic,
  'spiral_matrix': _is_literal,
  'string_insertion': _is_literal,
}
"""Grammars of the answers that may be evaluated, keyed by verifier.

A grammar is a function of an answer and the reference answer that returns whether the answer may be
evaluated. The verifier gets exactly the text that the grammar has checked.
"""


def evaluates(name: str) -> bool:
  """Returns whether verifier `name` may evaluate text as code. This is false only for the verifiers
  in `PLAIN` and for verifiers derived from them.
  """
  if name in PLAIN:
    return False
  from reasoning_gym.factory import DATASETS

  if name not in DATASETS:
    return True
  plain = {DATASETS[known][0] for known in PLAIN & DATASETS.keys()}
  bases = [
    base
    for base in DATASETS[name][0].__mro__
    if base.__module__.partition('.')[0] == 'reasoning_gym'
  ]
  return any(base not in plain and base.__module__ != 'reasoning_gym.dataset' for base in bases)


def may_evaluate(name: str, answer: str, reference: str) -> bool:
  """Returns whether the answer is in the grammar of verifier `name`, so that it cannot contain
  code.

  The result is always True for the reference answer, and for a verifier without a known grammar.
  """
  if answer == reference:
    return True
  return name not in GRAMMARS or (len(answer) <= MAX_LENGTH and GRAMMARS[name](answer, reference))


# Warm-up of the process from which sandboxes are forked. Its parsing, differentiation and
# simplification import modules and fill caches, so the sandboxes need not do so.
_PRELOAD = """
import reasoning_gym, sympy
x = sympy.Symbol('x')
f = sympy.parse_expr('x**2/2 + sin(x) + log(x)', local_dict={'x': x})
sympy.simplify(sympy.diff(f, x) - sympy.parse_expr('x + cos(x) + 1/x', local_dict={'x': x}))
float(sympy.parse_expr('(3 + 4)*5/2 - 1'))
"""
_PROGRAM = """
import json, sys
import reasoning_gym
name, answer, entry = json.load(sys.stdin)
score_answer = reasoning_gym.get_score_answer_fn(name)
try:
  score = float(score_answer(answer=answer, entry=entry))
except Exception:
  score_answer(answer=entry['answer'], entry=entry)
  score = 0.0
print()
print(json.dumps(score))
"""


def _directories(
  libraries: Collection[str] = ('reasoning_gym', 'sympy', 'numpy'),
) -> tuple[str, ...]:
  """Returns the directories in which the libraries are installed."""
  origins = [pathlib.Path(importlib.util.find_spec(library).origin) for library in libraries]
  return tuple(dict.fromkeys(str(origin.absolute().parents[1]) for origin in origins))


def _open(isolation: Isolation) -> Sandboxes:
  return Sandboxes(
    LIMITS, isolation=isolation, preload=Preload(path=_directories(), source=_PRELOAD)
  )


_opening = threading.Lock()
_opened: dict[Isolation, Sandboxes] = {}
"""This process's sandboxes, keyed by isolation. They end with the process."""


def _sandboxes(isolation: Isolation) -> Sandboxes:
  with _opening:
    if isolation not in _opened:
      _opened[isolation] = _open(isolation)
    return _opened[isolation]


def _within_budget(work: Callable[[], T]) -> T:
  """Returns the result of `work`. Raises SandboxError if there is none after `BUDGET_S` seconds;
  `work` then continues in its thread.
  """
  result: concurrent.futures.Future[T] = concurrent.futures.Future()

  def run() -> None:
    try:
      result.set_result(work())
    except BaseException as error:
      result.set_exception(error)

  threading.Thread(target=run, name='verifier-sandbox', daemon=True).start()
  try:
    return result.result(BUDGET_S)
  except TimeoutError:
    raise SandboxError(
      f'the sandbox of a verifier gave no verdict within {BUDGET_S:g} s; it may still be starting'
    ) from None


@functools.cache
def check_isolation(isolation: Isolation) -> None:
  """Raises NoIsolation if this machine cannot provide the isolation, or if the libraries do not
  load in a sandbox.
  """
  _open(isolation).close()


def score_in_sandbox(
  name: str, answer: str, entry: Mapping[str, Any], isolation: Isolation
) -> tuple[float | None, ProgramOutcome]:
  """Runs a verifier in a sandbox.

  Returns (number, outcome of the sandbox). The number is the verifier's result, or 0 if the
  verifier raises an exception on this answer but not on the reference answer. It is None if the
  verifier did not end normally, for example because the answer made it reach a limit.

  Raises:
    NoIsolation: this machine cannot provide the isolation.
    SandboxError: the sandbox failed, or the verifier raises an exception even on the reference
      answer.
  """
  program = json.dumps([name, answer, entry])
  outcome, printed = _within_budget(lambda: _sandboxes(isolation).output(_PROGRAM, program))
  if outcome.ended == Ending.EXCEPTION:
    raise SandboxError(
      f'verifier {name!r} raises an exception on its own reference answer: {outcome.detail}'
    )
  if outcome.ended != Ending.PASSED:
    return None, outcome
  try:
    return float(json.loads(printed.rstrip().rpartition('\n')[2])), outcome
  except (ValueError, TypeError):
    raise SandboxError(f'verifier {name!r} ended without a score') from None
