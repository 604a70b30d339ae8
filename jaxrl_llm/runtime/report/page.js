// The page, section by section, from DATA.

const SMOOTHING = { weight: 0.7 };
const CHARTS = [];

function lines(keys) {
  return keys.filter((key) => DATA.series[key]).map((key, i) => ({ key, name: nameOf(key), colour: (i % 8) + 1, ...DATA.series[key] }));
}

function matching(pattern) {
  return Object.keys(DATA.series).filter((key) => pattern.test(key));
}

// A chart of the keys that the run has; nothing where it has none of them. One key gets its description as the caption,
// and every chart of one key that key itself.
function chartOf(title, keys, options) {
  const series = lines(keys);
  if (!series.length) return null;
  const text = options?.caption ?? (series.length === 1 ? DATA.descriptions[series[0].key] ?? '' : '');
  const caption = element('span', {}, ...(series.length === 1 ? [element('code', {}, series[0].key), ' '] : []), text);
  const chart = new Chart({ title, series, stages: DATA.stages, ...options, caption }, SMOOTHING);
  CHARTS.push(chart);
  return chart.node;
}

function responseLength() {
  const [low, high] = ['min', 'max'].map((kind) => DATA.series[`response_length/${kind}`]);
  const options = low && high ? { band: { low, high }, caption: 'Mean response length in tokens; the band spans the shortest to the longest.' } : {};
  return chartOf('Response length', ['response_length/mean'], { ...options, zero: true });
}

// The series over the steps of all of them, 0 where one has no point, several points of a step added up.
function aligned(series) {
  const stages = new Map(series.flatMap((line) => line.x.map((x, i) => [x, line.stage[i]])));
  const x = [...stages.keys()].sort((a, b) => a - b);
  return series.map((line) => {
    const sums = new Map();
    line.x.forEach((at, i) => sums.set(at, (sums.get(at) ?? 0) + (line.y[i] ?? 0)));
    return { ...line, x, y: x.map((at) => sums.get(at) ?? 0), stage: x.map((at) => stages.get(at)) };
  });
}

function timePerPhase() {
  const order = ['gen', 'reward', 'reward_model', 'old_log_prob', 'ref', 'values', 'adv', 'update_critic', 'update_actor', 'update_weights', 'save_checkpoint', 'testing'];
  const place = (key) => { const i = order.indexOf(key.slice(9)); return i < 0 ? order.length : i; };
  const keys = matching(/^timing_s\/(?!(step|annotate|train)$)/).sort((a, b) => place(a) - place(b));
  const series = aligned(lines(keys).map((line) => ({ ...line, name: nameOf(line.key).replace(/^Time of /, '') })));
  return chartOf('Time per phase', keys, { series, stacked: true, zero: true, wide: true, caption: 'Seconds of each phase of a step, stacked.' });
}

function curves() {
  const accuracy = matching(/^val-core\/.*\/acc\/(?!pass@)[^/]+$/);
  const pass = matching(/^val-core\/.*\/acc\/pass@[^/]+$/).sort((a, b) => Number(a.split('@').at(-1)) - Number(b.split('@').at(-1)));
  const pairs = matching(/(^|^val-core\/.*\/)rewards\/accuracies$/);
  const charts = [
    chartOf('Reward', ['critic/score/mean'], {}),
    chartOf('Held-out accuracy', accuracy, { range: [0, 1], joined: true, unit: 'share of tasks',
      caption: 'Share of held-out tasks solved; greedy, and the mean over k samples where measured.' }),
    chartOf('KL', ['actor/ppo_kl', 'actor/kl_loss', 'rollout_corr/kl'], { caption:
      'Nats per token: ppo_kl to the policy before the update, kl_loss to the reference, rollout_corr/kl from sampler to trainer.' }),
    chartOf('Entropy', ['actor/entropy'], { zero: true }),
    responseLength(),
    chartOf('Gradient norm', ['actor/grad_norm'], { zero: true }),
    chartOf('Policy loss', ['actor/pg_loss'], {}),
    chartOf('pass@k', pass, { range: [0, 1], joined: true, unit: 'share of tasks', caption: 'Share of held-out tasks that at least one of k samples solves, estimated without bias.' }),
    chartOf('Pairs won', pairs, { range: [0, 1], caption: 'Share of pairs whose chosen answer wins, in training and held out.' }),
    chartOf('Margin of pairs', ['rewards/margins'], {}),
    chartOf("Critic's explained variance", ['critic/vf_explained_var'], { caption: '1 is a perfect critic, 0 no better than a constant.' }),
    chartOf('Value loss', ['critic/vf_loss'], { zero: true }),
    chartOf('Supervised loss', ['actor/sft_loss'], { zero: true }),
    chartOf('Groups without signal', ['frac_reward_zero_std'], { range: [0, 1] }),
    chartOf('Learning rate', ['actor/lr'], { zero: true }),
    timePerPhase(),
  ].filter(Boolean);
  const slider = element('input', { type: 'range', min: 0, max: 0.98, step: 0.02, value: SMOOTHING.weight, 'aria-label': 'Smoothing',
    oninput: (event) => { SMOOTHING.weight = Number(event.target.value); CHARTS.forEach((chart) => chart.draw()); } });
  return section('Curves', 'curves',
    element('div', { class: 'bar' }, element('label', {}, 'Smoothing', slider),
      element('span', { class: 'muted small' }, 'Hover for values. Bold lines are smoothed, faint ones raw.')),
    element('div', { class: 'charts' }, ...charts), anyMetric());
}

// Any other metric of the run, one at a time.
function anyMetric() {
  const keys = Object.keys(DATA.series).sort();
  const place = element('div', { class: 'charts' });
  const show = (key) => {
    CHARTS.splice(0, CHARTS.length, ...CHARTS.filter((chart) => !place.contains(chart.node)));
    place.replaceChildren(chartOf(nameOf(key), [key], { wide: true }));
  };
  const select = element('select', { 'aria-label': 'Metric', onchange: (event) => show(event.target.value) },
    ...keys.map((key) => element('option', { value: key }, nameOf(key) === key ? key : `${key} · ${nameOf(key)}`)));
  const box = element('details', { class: 'card', ontoggle: () => { if (box.open && !place.firstChild) show(select.value); } },
    element('summary', {}, `All ${keys.length} metrics`), element('div', { class: 'body' }, element('div', { class: 'bar' }, select), place));
  box.style.marginTop = '16px';
  return box;
}

const EVALUATIONS_SHOWN = 30;

// At most `count` of the items, evenly spaced, the first and the last among them.
function spreadEvenly(items, count) {
  if (items.length <= count) return items;
  return Array.from({ length: count }, (_, i) => items[Math.round((i * (items.length - 1)) / (count - 1))]);
}

function evaluation() {
  const { columns, rows } = DATA.evaluations;
  if (!rows.length) return null;
  const cell = (value, column) => element('td', { class: 'number' }, value === null ? '–' : /\/(acc|rewards)\//.test(column) ? value.toFixed(3) : number(value));
  const first = rows[0];
  const last = rows[rows.length - 1];
  const change = columns.map((column, i) => {
    if (!/\/acc\/[^/]+$/.test(column) || rows.length < 2 || first.values[i] === null || last.values[i] === null) return element('td', { class: 'number' }, '–');
    const delta = last.values[i] - first.values[i];
    return element('td', { class: `number delta${delta < 0 ? ' down' : ''}` }, `${delta < 0 ? '−' : '+'}${Math.abs(delta).toFixed(3)}`);
  });
  const body = element('tbody', {});
  const table = element('table', { id: 'evaluations' },
    element('thead', {}, element('tr', {}, element('th', {}, 'Stage'), element('th', { class: 'number' }, 'Step'),
      ...columns.map((c) => element('th', { class: 'number', title: DATA.descriptions[c] ?? c }, nameOf(c), element('code', { class: 'key under' }, c))))),
    body);
  const draw = (shown) => body.replaceChildren(...shown.map((row) => element('tr', { class: row === first || row === last ? 'mark' : null },
    element('td', {}, DATA.stages[row.stage].name), element('td', { class: 'number' }, whole(row.step)),
    ...row.values.map((v, i) => cell(v, columns[i])))), element('tr', {}, element('td', {}, 'Change'), element('td', {}), ...change));
  const some = spreadEvenly(rows, EVALUATIONS_SHOWN);
  draw(some);
  const all = some.length < rows.length ? element('div', { class: 'more' }, element('button', { type: 'button', onclick: () => { draw(rows); all.remove(); } },
    `Show all ${whole(rows.length)} evaluations; these are ${some.length}, evenly spaced`)) : null;
  const numbers = () => [['stage', 'step', ...columns], ...rows.map((row) => [DATA.stages[row.stage].name, row.step, ...row.values])];
  const bar = element('div', { class: 'bar' }, element('span', { class: 'space' }), element('span', { class: 'exports' }, csvButton('Evaluation', numbers)));
  return section('Evaluation', 'evaluation', element('div', { class: 'card' }, bar, element('div', { class: 'scroll' }, table), all), ...DATA.answers.map(answers));
}

// Answers to the same prompts at the evaluations that mark the run's way.
function answers(suite) {
  const view = { show: 'all', page: 0 };
  const size = 10;
  const solved = (answer) => answer !== null && answer[1];
  const tests = { all: () => true, learned: (r) => !solved(r.answers[0]) && solved(r.answers.at(-1)),
    wrong: (r) => !solved(r.answers.at(-1)), lost: (r) => solved(r.answers[0]) && !solved(r.answers.at(-1)) };
  const body = element('tbody', {});
  const foot = element('div', { class: 'foot' });
  const cell = (answer) => (answer === null ? element('td', { class: 'text muted' }, '–')
    : element('td', { class: 'text' }, element('span', { class: solved(answer) ? 'ok' : 'no' }, solved(answer) ? '✓ ' : '✗ '), answer[0]));
  const draw = () => {
    const rows = suite.rows.filter(tests[view.show]);
    const pages = Math.max(1, Math.ceil(rows.length / size));
    body.replaceChildren(...rows.slice(view.page * size, (view.page + 1) * size).map((row) => element('tr', {},
      element('td', { class: 'text' }, row.prompt), element('td', { class: 'text' }, row.truth ?? '–'), ...row.answers.map(cell))));
    const turn = (by) => () => { view.page += by; draw(); };
    foot.replaceChildren(element('span', {}, `${plural(rows.length, 'task')} of the ${whole(suite.rows.length)} shown here (${whole(suite.total)} evaluated)`),
      element('span', { class: 'space' }), element('button', { type: 'button', disabled: view.page === 0, onclick: turn(-1) }, '‹ Previous'),
      element('span', {}, `page ${view.page + 1} of ${pages}`), element('button', { type: 'button', disabled: view.page + 1 >= pages, onclick: turn(1) }, 'Next ›'));
  };
  const pick = choice([['all', 'All'], ['learned', 'Learned'], ['lost', 'Lost'], ['wrong', 'Still wrong']], 'all',
    (value) => { Object.assign(view, { show: value, page: 0 }); draw(); }, 'Which answers');
  draw();
  const heads = suite.columns.map((c) => element('th', {}, `${c.stage} ${whole(c.step)}`));
  const table = element('table', {}, element('thead', {}, element('tr', {}, element('th', {}, 'Prompt'), element('th', {}, 'Truth'), ...heads)), body);
  const node = element('details', { class: 'card answers', open: true }, element('summary', {}, `Greedy answers: ${suite.suite}`),
    element('div', { class: 'body' }, element('div', { class: 'bar' }, pick), element('div', { class: 'scroll' }, table), foot));
  node.style.marginTop = '16px';
  return node;
}

function rollouts() {
  if (!DATA.rollouts.rows.length) return null;
  const viewer = new Rollouts(DATA.rollouts);
  const text = `${DATA.rollouts.shown} Click a row for its scores, and for its conversation; hover over a token for its numbers.`;
  const keys = 'Keys: / filter, j and k from row to row, v conversation, g group side by side.';
  document.addEventListener('keydown', (event) => {
    if (event.key !== '/' || event.ctrlKey || event.metaKey || event.altKey || event.target.closest('input, select, dialog')) return;
    viewer.search.focus();
    event.preventDefault();
  });
  window.addEventListener('load', () => viewer.openLinked());
  return section('Rollouts', 'samples', element('p', { class: 'muted small' }, `${text} `, element('span', { class: 'keys' }, keys)), viewer.node);
}

// JSON as text nodes, keys and values told apart.
function pretty(value) {
  const text = JSON.stringify(value, null, 2);
  const parts = text.split(/("(?:[^"\\]|\\.)*"(?:\s*:)?|-?\d[\d.eE+-]*|true|false|null)/g);
  return element('pre', {}, ...parts.map((part) => {
    if (/^".*:$/s.test(part)) return element('span', { class: 'key' }, part);
    if (part.startsWith('"')) return element('span', { class: 'string' }, part);
    return /[\w]/.test(part) ? element('span', { class: 'value' }, part) : part;
  }));
}

function configuration() {
  if (DATA.config === null) return null;
  return section('Configuration', 'configuration', element('details', { class: 'card' }, element('summary', {}, 'config.json, as resolved'),
    element('div', { class: 'body' }, pretty(DATA.config))));
}

// Where the run comes from, and each change of its configuration with the first step made under it.
function history() {
  if (!DATA.history.length) return null;
  const when = (time) => new Date(time * 1000).toISOString().slice(0, 16).replace('T', ' ');
  const rows = DATA.history.flatMap(({ step, time, parent, changes }) => {
    const start = [element('td', { class: 'number' }, whole(step)), element('td', {}, when(time))];
    const cells = changes.map(([key, before, after]) => [element('td', {}, key), element('td', { class: 'text' }, before), element('td', { class: 'text' }, after)]);
    if (parent !== null) cells.unshift([element('td', { class: 'text', colspan: 3 }, parent)]);
    return cells.map((of) => element('tr', {}, ...start.map((cell) => cell.cloneNode(true)), ...of));
  });
  const heads = ['From step', 'Time (UTC)', 'Key', 'Before', 'After'].map((name, i) => element('th', { class: i ? null : 'number' }, name));
  return section('Changes', 'changes', element('div', { class: 'card scroll' },
    element('table', {}, element('thead', {}, element('tr', {}, ...heads)), element('tbody', {}, ...rows))));
}

function section(title, id, ...children) {
  return element('section', { id }, element('h2', {}, title), ...children);
}

function page() {
  const sections = [curves(), evaluation(), history(), distributions(), mismatch(), timeline(), rollouts(), configuration()].filter(Boolean);
  const tiles = DATA.summary.map((tile) => element('div', { class: 'tile card' }, element('div', { class: 'label' }, tile.label),
    element('div', { class: 'value' }, tile.value), element('div', { class: 'detail' }, tile.detail)));
  const warnings = DATA.warnings.length ? element('div', { class: 'warnings card', role: 'status' }, ...DATA.warnings.map((w) => element('div', {}, w))) : null;
  document.getElementById('report').append(element('header', {}, element('h1', {}, DATA.name), element('p', { class: 'sub' }, DATA.subtitle),
    element('nav', {}, ...sections.map((s) => element('a', { href: `#${s.id}` }, s.firstChild.textContent))),
    element('div', { class: 'tiles' }, ...tiles), warnings), ...sections);
  window.addEventListener('scroll', hideTip, { passive: true });
}

page();
