// The page that compares runs, section by section, from DATA.

const SMOOTHING = { weight: 0.7 };
const VIEW = { mean: DATA.groups.some((group) => group.runs.length > 1) };
const CHARTS = [];

function section(title, id, ...children) {
  return element('section', { id }, element('h2', {}, title), ...children);
}

// Colour and dashes of a group: eight colours, then the same ones dashed.
function look(group) {
  return { colour: (group % 8) + 1, dash: Math.floor(group / 8) % 3 };
}

function swatch(group) {
  const { colour, dash: dashes } = look(group);
  return element('span', { class: `swatch b${colour}${dash({ dash: dashes })}` });
}

// Mean and standard error over runs, at the steps at which all runs that got so far have a value.
function meanOf(runs, key) {
  const series = runs.map((run) => DATA.runs[run].series[key]).filter(Boolean);
  if (!series.length) return null;
  const at = new Map();
  series.forEach((line) => line.x.forEach((x, i) => {
    if (line.y[i] !== null) (at.get(x) ?? at.set(x, { stage: line.stage[i], values: [] }).get(x)).values.push(line.y[i]);
  }));
  const ends = series.map((line) => line.x.at(-1));
  const x = [...at.keys()].sort((a, b) => a - b).filter((step) => at.get(step).values.length >= ends.filter((end) => end >= step).length);
  const stats = x.map((step) => {
    const { values } = at.get(step);
    const mean = values.reduce((a, b) => a + b, 0) / values.length;
    const spread2 = values.reduce((a, b) => a + (b - mean) ** 2, 0) / Math.max(1, values.length - 1);
    return [mean, values.length > 1 ? Math.sqrt(spread2 / values.length) : 0];
  });
  const line = { x, y: stats.map(([mean]) => mean), stage: x.map((step) => at.get(step).stage) };
  if (series.length < 2) return line;
  return { ...line, low: stats.map(([mean, error]) => mean - error), high: stats.map(([mean, error]) => mean + error) };
}

// One line for each group, or for each run.
function linesOf(key, suffix) {
  if (VIEW.mean) {
    return DATA.groups.flatMap((group, g) => {
      const line = meanOf(group.runs, key);
      return line ? [{ key: `${key}/${g}`, name: `${group.label}${suffix}`, title: DATA.descriptions[key] || key, ...look(g), ...line }] : [];
    });
  }
  return DATA.groups.flatMap((group, g) => group.runs.filter((run) => DATA.runs[run].series[key])
    .map((run) => ({ key: `${key}/${run}`, name: `${DATA.runs[run].name}${suffix}`, title: DATA.descriptions[key] || key,
      ...look(g), dash: group.runs.indexOf(run) % 3 || look(g).dash, ...DATA.runs[run].series[key] })));
}

function chartOf(title, key, options) {
  const series = linesOf(key, '');
  if (!series.length) return null;
  const caption = options?.caption ?? DATA.descriptions[key] ?? key;
  const chart = new Chart({ title, series, stages: DATA.stages, caption, unit: DATA.labels[key]?.unit, noise: DATA.labels[key]?.noise, ...options }, SMOOTHING);
  CHARTS.push(chart);
  return chart.node;
}

function charts() {
  CHARTS.splice(0);
  const { key } = DATA.objective;
  const accuracies = DATA.keys.filter((k) => /^val-core\/.*\/acc\/[^/]+$/.test(k) && k !== key);
  return [
    chartOf('Objective', key, { wide: true, joined: true, caption: `${key}${DATA.descriptions[key] ? `: ${DATA.descriptions[key]}` : ''}` }),
    ...(key === 'critic/score/mean' ? [] : [chartOf('Reward', 'critic/score/mean', {})]),
    ...accuracies.slice(0, 4).map((k) => chartOf(k.replace(/^val-core\//, '').replace('/acc/', ' '), k, { joined: true })),
    chartOf('Policy loss', 'actor/pg_loss', {}),
    chartOf('Supervised loss', 'actor/sft_loss', { zero: true }),
    chartOf('KL of the update', 'actor/ppo_kl', {}),
    chartOf('KL to the reference', 'actor/kl_loss', {}),
    chartOf('KL from sampler to trainer', 'rollout_corr/kl', {}),
    chartOf('Response length', 'response_length/mean', { zero: true }),
    chartOf('Entropy', 'actor/entropy', { zero: true }),
    chartOf('Gradient norm', 'actor/grad_norm', { zero: true }),
    chartOf('Value loss', 'critic/vf_loss', { zero: true }),
    key === 'rewards/accuracies' ? null : chartOf('Pairs won', 'rewards/accuracies', { range: [0, 1] }),
  ].filter(Boolean);
}

function curves() {
  const place = element('div', { class: 'charts' });
  const other = element('div', { class: 'charts' });
  const select = element('select', { 'aria-label': 'Metric', onchange: () => showOther() }, ...DATA.keys.map((key) => element('option', { value: key }, key)));
  let open = false;
  const showOther = () => { if (open) other.replaceChildren(chartOf(select.value, select.value, { wide: true })); };
  const draw = () => { place.replaceChildren(...charts()); showOther(); };
  draw();
  const slider = element('input', { type: 'range', min: 0, max: 0.98, step: 0.02, value: SMOOTHING.weight, 'aria-label': 'Smoothing',
    oninput: (event) => { SMOOTHING.weight = Number(event.target.value); CHARTS.forEach((chart) => chart.draw()); } });
  const note = element('span', { class: 'muted small' });
  const tell = () => { note.textContent = `${VIEW.mean ? 'Bands span one standard error. ' : ''}Hover for values; click a name to hide it.`; };
  const pick = VIEW.mean ? choice([['mean', 'Mean over seeds'], ['runs', 'Each run']], 'mean', (value) => { VIEW.mean = value === 'mean'; tell(); draw(); }, 'Lines') : null;
  tell();
  const box = element('details', { class: 'card', ontoggle: () => { open = box.open; if (open && !other.firstChild) showOther(); } },
    element('summary', {}, `All ${DATA.keys.length} metrics`), element('div', { class: 'body' }, element('div', { class: 'bar' }, select), other));
  box.style.marginTop = '16px';
  return section('Curves', 'curves', element('div', { class: 'bar' }, pick, element('label', {}, 'Smoothing', slider), note), place, box);
}

// Mean ± standard error of a group on a scale that all groups share, with each run as a ring.
function rangeOf(group, g, low, high) {
  const at = (v) => 4 + 92 * ((v - low) / (high - low || 1));
  const { colour } = look(g);
  const bar = group.stderr === null ? [] : [drawn('line', { class: `k${colour}`, x1: `${at(group.mean - group.stderr)}%`, x2: `${at(group.mean + group.stderr)}%`, y1: 9, y2: 9 })];
  return element('td', { class: 'range' }, drawn('svg', { role: 'img', 'aria-label': 'mean and runs' },
    drawn('line', { x1: '0%', x2: '100%', y1: 9, y2: 9 }), ...bar,
    ...group.values.map((v) => drawn('circle', { cx: `${at(v)}%`, cy: 9, r: 3 })),
    drawn('circle', { class: `f${colour}`, cx: `${at(group.mean)}%`, cy: 9, r: 4.5 })));
}

function ranking() {
  const known = DATA.groups.filter((group) => group.mean !== null);
  const ends = known.flatMap((g) => [...g.values, g.mean - (g.stderr ?? 0), g.mean + (g.stderr ?? 0)]);
  const [low, high] = [Math.min(...ends), Math.max(...ends)];
  const link = (run) => (DATA.runs[run].link ? element('a', { href: DATA.runs[run].link }, DATA.runs[run].name) : DATA.runs[run].name);
  const rows = DATA.groups.map((group, g) => element('tr', { class: g === 0 && group.mean !== null ? 'best' : null },
    element('td', { class: 'place' }, group.mean === null ? '–' : String(g + 1)), element('td', { class: 'long' }, swatch(g), group.label),
    element('td', { class: 'number' }, group.mean === null ? '–' : number(group.mean)),
    element('td', { class: 'number' }, group.stderr === null ? '–' : `± ${Number(group.stderr.toPrecision(2))}`),
    group.mean === null ? element('td', { class: 'range' }) : rangeOf(group, g, low, high),
    element('td', { class: 'number' }, `${group.values.length} of ${group.runs.length}`)));
  const runs = DATA.groups.flatMap((group, g) => group.runs.map((run) => {
    const { seed, state, steps, value } = DATA.runs[run];
    return element('tr', {}, element('td', { class: 'long' }, swatch(g), link(run)), element('td', { class: 'number' }, seed ?? '–'),
      element('td', {}, state || '–'), element('td', { class: 'number' }, whole(steps)), element('td', { class: 'number' }, value === null ? '–' : number(value)));
  }));
  const head = (...names) => element('thead', {}, element('tr', {}, ...names));
  const right = (text) => element('th', { class: 'number' }, text);
  const table = element('table', { id: 'ranking' }, head(element('th', { class: 'place' }), element('th', {}, 'Point'), right(DATA.objective.key), right('Standard error'),
    element('th', {}, 'Mean and runs'), right('Measured')), element('tbody', {}, ...rows));
  const list = element('table', { id: 'runs' }, head(element('th', {}, 'Run'), right('Seed'), element('th', {}, 'State'), right('Last step'), right(DATA.objective.key)),
    element('tbody', {}, ...runs));
  const box = element('details', { class: 'card' }, element('summary', {}, plural(DATA.runs.length, 'run')), element('div', { class: 'body scroll' }, list));
  box.style.marginTop = '16px';
  return section('Best by objective', 'ranking-section', element('div', { class: 'card scroll' }, table), box);
}

function differences() {
  const rows = DATA.differences;
  if (!rows.length) return section('What differs', 'differences', element('div', { class: 'card empty' }, 'The configurations are equal.'));
  const table = element('table', {}, element('thead', {}, element('tr', {}, element('th', {}, 'Field'), ...DATA.runs.map((run) => element('th', { class: 'run' }, swatch(run.group), run.name)))),
    element('tbody', {}, ...rows.map((row) => element('tr', {}, element('td', { class: 'key' }, row.key), ...row.values.map((v) => element('td', { class: v === '(absent)' ? 'value absent' : 'value' }, v))))));
  return section('What differs', 'differences', element('div', { class: 'card scroll tall' }, table));
}

function evaluation() {
  const keys = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.last)))].sort((a, b) => (a.startsWith('val-core') ? 0 : 1) - (b.startsWith('val-core') ? 0 : 1) || (a < b ? -1 : 1));
  if (!keys.length) return null;
  const cell = (value) => element('td', { class: 'number' }, value === undefined ? '–' : number(value));
  const table = element('table', {}, element('thead', {}, element('tr', {}, element('th', {}, 'Metric'),
    ...DATA.runs.map((run) => element('th', { class: 'number run' }, swatch(run.group), run.name)))),
  element('tbody', {}, ...keys.map((key) => element('tr', {}, element('td', { class: 'key', title: DATA.descriptions[key] ?? key }, key.replace(/^val-(core|aux)\//, '')),
    ...DATA.runs.map((run) => cell(run.last[key]))))));
  return section('Last evaluation', 'evaluation', element('div', { class: 'card scroll tall' }, table));
}

function tiles() {
  const [best] = DATA.groups;
  const steps = DATA.runs.reduce((total, run) => total + run.steps, 0);
  const states = Object.entries(DATA.runs.reduce((all, run) => ({ ...all, [run.state]: (all[run.state] ?? 0) + 1 }), {})).filter(([state]) => state);
  const tile = (label, value, detail) => element('div', { class: 'tile card' }, element('div', { class: 'label' }, label), element('div', { class: 'value' }, value), element('div', { class: 'detail' }, detail));
  return element('div', { class: 'tiles' },
    best.mean === null ? null : tile(`Best ${DATA.objective.key}`, number(best.mean), `${best.stderr === null ? 'one run' : `± ${Number(best.stderr.toPrecision(2))} over ${plural(best.values.length, 'run')}`}: ${best.label}`),
    tile('Runs', whole(DATA.runs.length), states.map(([state, count]) => `${count} ${state}`).join(', ') || plural(DATA.groups.length, 'point')),
    tile('Steps', whole(steps), 'in all runs'));
}

function page() {
  const sections = [ranking(), curves(), differences(), evaluation(), sideBySide()].filter(Boolean);
  const warnings = DATA.warnings.length ? element('div', { class: 'warnings card', role: 'status' }, ...DATA.warnings.map((w) => element('div', {}, w))) : null;
  document.getElementById('report').append(element('header', {}, element('h1', {}, DATA.name), element('p', { class: 'sub' }, DATA.subtitle),
    element('nav', {}, ...sections.map((s) => element('a', { href: `#${s.id}` }, s.firstChild.textContent))), tiles(), warnings), ...sections);
  window.addEventListener('scroll', hideTip, { passive: true });
}

page();
