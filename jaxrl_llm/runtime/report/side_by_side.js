// Two runs side by side: their last greedy answers, and their rollouts, of the same tasks.

const TASKS_BESIDE = 10;

// The places in DATA.beside to begin with: of two points, the best first, or of two runs of the only point.
function firstPair() {
  const first = Math.max(0, DATA.beside.findIndex((run) => DATA.runs[run].group === 0));
  const others = DATA.beside.map((_, i) => i).filter((i) => i !== first);
  const group = (i) => DATA.runs[DATA.beside[i]].group;
  return [first, others.find((i) => group(i) === 1) ?? others.find((i) => group(i) !== 0) ?? others[0]];
}

// Two runs to choose; `draw` is called with their places in DATA.beside.
function pair(draw) {
  const names = DATA.beside.map((run) => DATA.runs[run].name);
  const chosen = names.length > 2 ? firstPair() : [0, 1];
  if (names.length < 3) return [element('span', { class: 'muted' }, names.join(' and ')), () => draw(...chosen)];
  const select = (side) => element('select', { 'aria-label': side ? 'Second run' : 'First run',
    onchange: (event) => { chosen[side] = Number(event.target.value); draw(...chosen); } },
  ...names.map((name, i) => element('option', { value: i, selected: i === chosen[side] }, name)));
  return [element('span', { class: 'bar' }, select(0), element('span', { class: 'muted' }, 'against'), select(1)), () => draw(...chosen)];
}

// Pages of `rows`; `show` draws the rows of one page.
class Pages {
  constructor(size, count, show) {
    Object.assign(this, { size, count, show, page: 0, rows: [] });
    this.node = element('div', { class: 'foot' });
  }

  of(rows) {
    Object.assign(this, { rows, page: 0 });
    this.draw();
  }

  draw() {
    const pages = Math.max(1, Math.ceil(this.rows.length / this.size));
    const turn = (by) => () => { this.page += by; this.draw(); };
    this.show(this.rows.slice(this.page * this.size, (this.page + 1) * this.size));
    this.node.replaceChildren(element('span', {}, this.count(this.rows.length)), element('span', { class: 'space' }),
      element('button', { type: 'button', disabled: this.page === 0, onclick: turn(-1) }, '‹ Previous'),
      element('span', {}, `page ${whole(this.page + 1)} of ${whole(pages)}`),
      element('button', { type: 'button', disabled: this.page + 1 >= pages, onclick: turn(1) }, 'Next ›'));
  }
}

function answersBeside(suite) {
  const view = { show: 'all', first: 0, second: 1 };
  const right = (answer) => Boolean(answer && answer[1]);
  const tests = { all: () => true, differ: (a, b) => right(a) !== right(b), first: (a, b) => right(a) && !right(b),
    second: (a, b) => !right(a) && right(b), neither: (a, b) => !right(a) && !right(b) };
  const cell = (answer) => (answer === null ? element('td', { class: 'text muted' }, '–') : element('td', { class: 'text' },
    element('span', { class: right(answer) ? 'ok' : 'no' }, right(answer) ? '✓ ' : '✗ '), answer[0]));
  const head = element('tr', {});
  const body = element('tbody', {});
  const of = (row) => [row.answers[view.first], row.answers[view.second]];
  const pages = new Pages(TASKS_BESIDE, (n) => `${plural(n, 'task')} of the ${whole(suite.rows.length)} shown here (${whole(suite.total)} evaluated)`,
    (rows) => body.replaceChildren(...rows.map((row) => element('tr', {}, element('td', { class: 'text' }, row.prompt),
      element('td', { class: 'text' }, row.truth ?? '–'), ...of(row).map(cell)))));
  const draw = () => {
    const names = [view.first, view.second].map((i) => DATA.runs[DATA.beside[i]].name);
    head.replaceChildren(element('th', {}, 'Prompt'), element('th', {}, 'Truth'), ...names.map((name) => element('th', { class: 'run' }, name)));
    pages.of(suite.rows.filter((row) => of(row).some(Boolean) && tests[view.show](...of(row))));
  };
  const [controls, start] = pair((first, second) => { Object.assign(view, { first, second }); draw(); });
  const pick = choice([['all', 'All'], ['differ', 'Differ'], ['first', 'Only the first right'], ['second', 'Only the second right'], ['neither', 'Neither']],
    'all', (value) => { view.show = value; draw(); }, 'Which answers');
  start();
  return element('details', { class: 'card answers', open: true }, element('summary', {}, `Last greedy answers: ${suite.suite}`),
    element('div', { class: 'body' }, element('div', { class: 'bar' }, controls, pick),
      element('div', { class: 'scroll' }, element('table', {}, element('thead', {}, head), body)), pages.node));
}

function rolloutsBeside() {
  const list = element('div', {});
  const side = (task, i) => element('div', {}, element('div', { class: 'name' }, DATA.runs[DATA.beside[i]].name),
    ...task.runs[i].map((rollout) => element('div', { class: 'one' },
      element('span', { class: 'muted' }, `step ${whole(rollout.x)} · ${rollout.r === null ? 'no reward' : number(rollout.r)}`),
      element('span', { class: 'tokens' }, rollout.text))));
  const view = { first: 0, second: 1 };
  const pages = new Pages(TASKS_BESIDE, (n) => (n ? `${plural(n, 'task')} that both trained on, the latest rollouts of each` : ''),
    (tasks) => list.replaceChildren(...(tasks.length ? tasks.map((task) => element('article', { class: 'task card' },
      element('div', { class: 'top' }, element('div', { class: 'prompt' }, task.prompt),
        element('div', { class: 'facts' }, ...(task.truth === null ? [] : ['truth ', element('b', {}, task.truth)]))),
      element('div', { class: 'columns2' }, side(task, view.first), side(task, view.second))))
      : [element('div', { class: 'card empty' }, 'The rollouts read for this page have no task in common.')])));
  const [controls, start] = pair((first, second) => {
    Object.assign(view, { first, second });
    pages.of(DATA.rollouts.filter((task) => task.runs[first].length && task.runs[second].length));
  });
  start();
  return element('details', { class: 'card rollouts-beside', open: true }, element('summary', {}, 'Rollouts of the same task'),
    element('div', { class: 'body' }, element('div', { class: 'bar' }, controls), list, pages.node));
}

function sideBySide() {
  if (DATA.beside.length < 2) return null;
  const suites = DATA.answers.map(answersBeside);
  const rollouts = rolloutsBeside();
  rollouts.style.marginTop = suites.length ? '16px' : '';
  return section('Same tasks, side by side', 'beside', ...suites, rollouts);
}
