"""Scripts are read and never run: substitution, branches, and what hostile text may cost."""

import os

import pytest

from jaxrl_llm.app.importers.shell import read_script
from jaxrl_llm.core.errors import UserError


def words(text: str, **define: str) -> list[list[str]]:
  return [[word.text for word in c.words] for c in read_script(text, define).commands]


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('a b\\\n  c', [['a', 'b', 'c']]),
    ('a b=1\\\n  c=2 # d\nnext', [['a', 'b=1', 'c=2'], ['next']]),
    ('X=1; a "$X$X" ${X}2 \'$X\'', [['a', '11', '12', '$X']]),
    ('a ${X:-8} ${Y:-"p q"} ${Z:=r}; b $Z', [['a', '8', 'p', 'q', 'r'], ['b', 'r']]),
    ('X=; a ${X:-8} [${X-9}] ${X:+no}', [['a', '8', '[]']]),
    ('N=3; a $((N * (2 + 4) / 5 - -1)) $(( ${N} % 2 ))', [['a', '4', '1']]),
    ('A=(x=1 "y z"\n # note\n w); A+=(v); a "${A[@]}" "$@"', [['a', 'x=1', 'y z', 'w', 'v']]),
    ('P="k=1 m=2"; a $P "$P"', [['a', 'k=1', 'm=2', 'k=1 m=2']]),
    ('export X=1 Y=2; a $X$Y', [['a', '12']]),
    ('X=a; X+=b; c $X', [['c', 'ab']]),
    ('a l=["x","y"] m=[\'x\'] 2>&1 | tee f > g', [['a', 'l=[x,y]', 'm=[x]'], ['tee', 'f']]),
    ('cat <<E > f\nb $(rm -rf /)\nE\na', [['cat'], ['a']]),
    ('a ""', [['a', '']]),
    ('X=hf; if [ "$X" = vllm ]; then a; else b; fi', [['b']]),
    ('X=vllm; if [ "$X" == "vllm" ]; then a; elif [ 1 ]; then b; else c; fi', [['a']]),
    ('D=gpu; case "$D" in npu | tpu) a ;; gpu) b ;; *) c ;; esac; d', [['b'], ['d']]),
    ('case "$D" in esac; d', [['d']]),
    ('f() { X=9; }\nX=1\na $X', [['f'], ['a', '1']]),
    ('f()\n{ a; X=9; }\nX=1\nb $X', [['f'], ['a'], ['b', '1']]),
    (
      'a $((-7 / 2)) $((-7 % 3)) $((9007199254740993 / 1))',
      [['a', '-3', '-1', '9007199254740993']],
    ),
    ('if [ 1 = 2 ]; then b ${X:=1}; fi; a ${X-none}', [['a', 'none']]),
    ('cat <<A <<-B\nb\n\tA\nA\nc\n\tB\na', [['cat'], ['a']]),
  ],
)
def test_what_the_text_says_is_substituted(text, expected):
  assert words(text) == expected


def test_definitions_win_over_the_script():
  assert words('X=1; a $X $1', X='2', **{'1': 'one'}) == [['a', '2', 'one']]


@pytest.mark.parametrize(
  ('text', 'missing'),
  [
    ('a x-$(touch {file})', '$(touch {file})'),
    ('a `touch {file}`', '`touch {file}`'),
    ('a ${{X:-$(touch {file})}}', '$(touch {file})'),
    ('a $UNKNOWN', '$UNKNOWN'),
    ('a ${{X##*/}}', '${{X##*/}}'),
    ('a $((UNKNOWN + 1))', '$((UNKNOWN + 1))'),
    ('a $((9**9**9))', '$((9**9**9))'),
  ],
)
def test_what_only_running_would_tell_is_named_and_not_run(text, missing, tmp_path):
  file = tmp_path / 'made'
  script = read_script(text.format(file=file), {})
  assert missing.format(file=file)[:50] in ''.join(script.commands[0].words[1].missing)
  assert not file.exists()


def test_the_environment_is_not_read(monkeypatch):
  monkeypatch.setenv('SECRET_KEY', 'hunter2')
  assert words('a $SECRET_KEY') == [['a', '$SECRET_KEY']]
  assert words('a $HOME') == [['a', os.path.expanduser('~')]]


def test_an_undecided_branch_gives_a_value_only_where_there_is_none():
  script = read_script('X=1; if test -e f; then X=2; Y=3; fi; a $X $Y', {})
  assert [word.text for word in script.commands[-1].words] == ['a', '1', '3']
  assert len(script.notes) == 2 and 'X changes under a condition' in script.notes[0]


def test_a_command_has_the_number_of_its_line_whatever_lies_before_it():
  text = '\n' * 1_000_000 + 'cat ' + ''.join(f'<<E{i} ' for i in range(9_000)) + '\n'
  text += ''.join(f'E{i}\n' for i in range(9_000)) + 'A=(1\n2)\nb \\\n c'
  commands = read_script(text, {}).commands
  assert [(c.words[0].text, c.line) for c in commands] == [('cat', 1_000_001), ('b', 1_009_004)]


def test_long_numbers_are_not_computed_with():
  script = read_script('X=' + '1' * 90_000 + '\na $((' + 'X ' * 400_000 + ')) $((X + 1))', {})
  assert [word.text for word in script.commands[0].words] == ['a', '$(…)', '$(…)']


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('a "b', 'the closing " is missing'),
    ("a 'b", "the closing ' is missing"),
    ('a ${b', 'the closing } is missing'),
    ('a $(b', 'the closing ) is missing'),
    ('A=(b', 'the closing ) of an array is missing'),
    ('A=x' + 'x' * 9000 + '\n' + 'A=$A$A\n' * 30 + 'a $A', 'longer than 100,000 characters'),
    ('A=(x x x x x x x x)\n' + 'A=("${A[@]}" "${A[@]}" "${A[@]}")\n' * 12, 'words|longer'),
    ('a ' + '${X:-' * 400 + '}' * 400, 'nested more than'),
    ('a ' + 'b ' * 30_000, 'more than 20,000 words'),
    ('a ' + 'b' * 1_000_000, 'longer than 100,000 characters'),
    ('A=(' + '"" ' * 15_000 + ')\na "' + '${A[@]}' * 100_000 + '"', 'more than 20,000 words'),
    ('X=' + 'x' * 50_000 + '\na' + ' $X' * 10_000, 'more than 2,000,000 characters'),
  ],
)
def test_hostile_text_is_one_bounded_line(text, words):
  with pytest.raises(UserError, match=r'line [0-9]+: ') as caught:
    read_script(text, {})
  assert any(word in str(caught.value) for word in words.split('|'))
