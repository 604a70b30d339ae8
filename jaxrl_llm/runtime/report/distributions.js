// What the embedded rollouts are like: histograms, and rewards by domain and by task, of any range of steps.

const BINS = 24;
const RANGES = { all: ['All steps', 0, 1], first: ['First quarter', 0, 0.25], last: ['Last quarter', 0.75, 1] };
const TABLE_ROWS = 15;

function meanOfValues(values) {
  return values.reduce((a, b) => a + b, 0) / values.length;
}

// The sample standard deviation over sqrt(n); null for fewer than two values.
function standardError(values) {
  if (values.length < 2) return null;
  const mean = meanOfValues(values);
  return Math.sqrt(values.reduce((a, v) => a + (v - mean) ** 2, 0) / (values.length - 1) / values.length);
}

// 1 - C(n - c, k) / C(n, k): unbiased estimate that one of k samples is solved, of n of which c are (arXiv:2107.03374).
function passAtK(n, c, k) {
  let miss = 1;
  for (let i = 0; i < k; i += 1) miss *= Math.max(0, n - c - i) / (n - i);
  return 1 - miss;
}

function groupedBy(items, key) {
  const groups = new Map();
  for (const item of items) (groups.get(key(item)) ?? groups.set(key(item), []).get(key(item))).push(item);
  return groups;
}

// Rows of embedded rollouts in a range of the steps that the page has.
function inRange(rows, range) {
  const steps = [...new Set(rows.map((row) => row.x))].sort((a, b) => a - b);
  const [, from, to] = RANGES[range];
  const kept = new Set(steps.slice(Math.floor(from * steps.length), Math.max(1, Math.ceil(to * steps.length))));
  return rows.filter((row) => kept.has(row.x));
}

// Edges of at most BINS equal bins over the values; of few distinct whole numbers, one bin for each.
function edgesOf(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const v of values) { low = Math.min(low, v); high = Math.max(high, v); }
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  else if (values.every(Number.isInteger) && high - low < BINS) [low, high] = [low - 0.5, high + 0.5];
  const bins = Number.isInteger(high - low) && high - low <= BINS && values.every(Number.isInteger) ? high - low : BINS;
  return Array.from({ length: bins + 1 }, (_, i) => low + ((high - low) * i) / bins);
}

function counted(values, edges) {
  const counts = new Array(edges.length - 1).fill(0);
  const [low, width] = [edges[0], edges[1] - edges[0]];
  for (const v of values) counts[Math.min(counts.length - 1, Math.max(0, Math.floor((v - low) / width)))] += 1;
  return counts;
}

class Histogram {
  // spec: {title, unit, caption, parts: [{name, colour, values}]}; every part is drawn as shares of its own values.
  constructor(spec) {
    this.spec = spec;
    this.edges = edgesOf(spec.parts.flatMap((part) => part.values));
    this.parts = spec.parts.map((part) => ({ ...part, counts: counted(part.values, this.edges) }));
    this.svg = drawn('svg', { height: HEIGHT, role: 'img', 'aria-label': spec.title });
    const legend = element('div', { class: 'legend' }, ...this.parts.map((part) => element('span', { class: 'entry' },
      element('span', { class: `swatch b${part.colour}` }), element('span', {}, `${part.name} (${whole(part.values.length)})`))));
    this.node = element('section', { class: 'chart card histogram', 'data-chart': spec.title },
      element('div', { class: 'title' }, element('h3', {}, spec.title), exports(spec.title, () => this.rows(), () => this.parts, () => this.svg)),
      element('div', { class: 'caption' }, spec.caption), legend, this.svg);
    this.svg.addEventListener('pointermove', (event) => this.hover(event));
    this.svg.addEventListener('pointerleave', hideTip);
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  rows() {
    return [['from', 'to', ...this.parts.map((part) => part.name)],
      ...this.edges.slice(0, -1).map((edge, i) => [edge, this.edges[i + 1], ...this.parts.map((part) => part.counts[i])])];
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width) return;
    const { edges, parts } = this;
    const shares = parts.map((part) => part.counts.map((count) => count / Math.max(1, part.values.length)));
    const top = Math.max(...shares.flat(), 1e-9);
    const scale = ticks(0, top, 4);
    const labels = scale.values.map((v) => percent(v));
    const left = 30 + 7 * Math.max(...labels.map((l) => l.length));
    const floor = HEIGHT - BOTTOM;
    const [first, last] = [edges[0], edges.at(-1)];
    this.px = (v) => left + ((v - first) / (last - first)) * (width - left - 10);
    const py = (share) => floor - (share / (1.06 * top)) * (floor - TOP);
    const grid = scale.values.flatMap((v, i) => [drawn('line', { class: 'grid', x1: left, x2: width - 10, y1: py(v), y2: py(v) }),
      drawn('text', { x: left - 8, y: py(v) + 4, 'text-anchor': 'end' }, labels[i])]);
    const bars = shares.flatMap((of, p) => of.map((share, i) => {
      const [from, to] = [this.px(edges[i]), this.px(edges[i + 1])];
      const wide = (to - from) / parts.length;
      return drawn('rect', { class: `bar f${parts[p].colour}`, 'data-count': parts[p].counts[i], x: from + p * wide + 0.5, width: Math.max(0.5, wide - 1), y: py(share), height: Math.max(0, floor - py(share)) });
    }));
    const integers = edges.length - 1 === last - first; // one bin for each whole number
    const x = ticks(integers ? Math.ceil(first) : first, last, Math.max(2, Math.min(7, (width - left) / 80)), integers);
    const columns = x.values.map((v) => drawn('text', { x: this.px(v), y: floor + 16, 'text-anchor': 'middle' }, tickText(v, x.step)));
    this.svg.setAttribute('viewBox', `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...grid, ...bars, drawn('line', { class: 'axis', x1: left, x2: width - 10, y1: floor, y2: floor }), ...columns,
      ...axisTitles(left, width, this.spec.unit, 'share of rollouts'));
  }

  hover(event) {
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    const i = this.edges.findIndex((edge, j) => j < this.edges.length - 1 && this.px(edge) <= at && at < this.px(this.edges[j + 1]));
    if (i < 0) { hideTip(); return; }
    showTip(event.clientX + 14, event.clientY, false, element('div', { class: 'head' }, `${number(this.edges[i])} to ${number(this.edges[i + 1])}`),
      ...this.parts.map((part) => element('div', { class: 'row' }, element('span', { class: `swatch b${part.colour}` }), element('span', {}, part.name),
        element('b', {}, `${whole(part.counts[i])} (${percent(part.counts[i] / Math.max(1, part.values.length))})`))));
  }
}

// The advantage of a rollout: the mean over its tokens.
function advantageOf(row) {
  if (!Array.isArray(row.a)) return row.a;
  const values = row.a.filter((v) => v !== null);
  return values.length ? meanOfValues(values) : null;
}

function histograms(rows) {
  const parts = [['first', 2], ['last', 1]].map(([range, colour]) => ({ name: RANGES[range][0].toLowerCase(), colour, rows: inRange(rows, range) }));
  const quantities = [['Response lengths', 'tokens', (row) => row.t.length, 'Tokens of a response.'],
    ['Rewards', 'reward', (row) => row.r, 'Reward of a rollout, before any shaping.'],
    ['Advantages', 'advantage', advantageOf, 'Advantage of a rollout: the mean over its tokens.']];
  return quantities.flatMap(([name, unit, of, caption]) => {
    const found = parts.map((part) => ({ ...part, values: part.rows.map(of).filter((v) => v !== null && v !== undefined) }));
    if (found.some((part) => !part.values.length)) return [];
    return [new Histogram({ title: name, unit, caption: `${caption} The first and the last quarter of the steps that this page has.`, parts: found }).node];
  });
}

// The reward at which a rollout counts as solved: that of the run's evaluation, or else 1.
function solvedAt() {
  const set = (DATA.config?.evaluation ?? []).map((suite) => suite?.correct_at).filter((v) => typeof v === 'number');
  return set.length ? Math.min(...set) : 1;
}

function domainOf(task) {
  const { taskset, domain } = task;
  return [taskset, domain].filter((part, i, all) => part && all.indexOf(part) === i).join(' · ') || 'all';
}

// A line of the tables: mean reward with its standard error, and pass@k over the groups.
function rewardLine(name, rows, unitsOf, ks, threshold) {
  const scored = rows.filter((row) => row.r !== null);
  const units = [...groupedBy(scored, unitsOf).values()].map((of) => meanOfValues(of.map((row) => row.r)));
  const groups = [...groupedBy(scored, (row) => row.g).values()];
  const pass = ks.map((k) => {
    const of = groups.filter((group) => group.length >= k);
    return of.length ? meanOfValues(of.map((group) => passAtK(group.length, group.filter((row) => row.r >= threshold).length, k))) : null;
  });
  return { name, rollouts: rows.length, units: units.length, mean: units.length ? meanOfValues(units) : null, error: standardError(units), pass };
}

class RewardTable {
  // head: what a line is; unit: over what the standard error is; lines: (rows, ks) -> lines.
  constructor(title, head, unit, lines) {
    Object.assign(this, { title, head, unit, lines, sort: 'mean', down: false, page: 0 });
    this.body = element('tbody', {});
    this.top = element('tr', {});
    this.foot = element('div', { class: 'foot' });
    this.node = element('div', { class: 'card rewards', 'data-table': title }, element('div', { class: 'bar' }, element('h3', {}, title), element('span', { class: 'space' }), element('span', { class: 'exports' }, csvButton(title, () => this.rows()))),
      element('div', { class: 'scroll' }, element('table', {}, element('thead', {}, this.top), this.body)), this.foot);
  }

  // The lines of the table's CSV: all of them, in the order of the logs.
  rows() {
    return [[this.head, 'mean reward', 'standard error', 'rollouts', this.unit, ...this.ks.map((k) => `pass@${k}`)],
      ...this.found.map((l) => [l.name, l.mean, l.error, l.rollouts, l.units, ...l.pass])];
  }

  of(rows, ks) {
    Object.assign(this, { ks, found: this.lines(rows, ks), page: 0 });
    this.draw();
  }

  draw() {
    const columns = [['name', this.head], ['mean', 'Mean reward'], ['error', 'Standard error'], ['rollouts', 'Rollouts'], ['units', this.unit], ...this.ks.map((k, i) => [`pass${i}`, `pass@${k}`])];
    const value = (line, key) => (key.startsWith('pass') ? line.pass[Number(key.slice(4))] : line[key]);
    const by = (key) => () => { Object.assign(this, { down: this.sort === key ? !this.down : key !== 'name', sort: key, page: 0 }); this.draw(); };
    this.top.replaceChildren(...columns.map(([key, text]) => element('th', { class: key === 'name' ? null : 'number' },
      element('button', { type: 'button', class: this.sort === key ? 'on' : null, 'data-by': key, onclick: by(key) }, `${text}${this.sort === key ? (this.down ? ' ▼' : ' ▲') : ''}`))));
    const sign = this.down ? -1 : 1;
    const sorted = this.found.map((line) => [value(line, this.sort) ?? -Infinity, line]).sort((a, b) => (a[0] === b[0] ? 0 : sign * (a[0] < b[0] ? -1 : 1))).map(([, line]) => line);
    const pages = Math.max(1, Math.ceil(sorted.length / TABLE_ROWS));
    const cell = (v) => element('td', { class: 'number' }, v === null ? '–' : v.toFixed(3));
    this.body.replaceChildren(...sorted.slice(this.page * TABLE_ROWS, (this.page + 1) * TABLE_ROWS).map((line) => element('tr', {},
      element('td', { class: 'text' }, line.name.length > 300 ? `${line.name.slice(0, 300)}…` : line.name), cell(line.mean), element('td', { class: 'number' }, line.error === null ? '–' : `± ${line.error.toFixed(3)}`),
      element('td', { class: 'number' }, whole(line.rollouts)), element('td', { class: 'number' }, whole(line.units)), ...line.pass.map(cell))));
    const turn = (to) => () => { this.page += to; this.draw(); };
    this.foot.replaceChildren(...(pages < 2 ? [] : [element('span', { class: 'space' }), element('button', { type: 'button', disabled: this.page === 0, onclick: turn(-1) }, '‹ Previous'),
      element('span', {}, `page ${whole(this.page + 1)} of ${whole(pages)}`), element('button', { type: 'button', disabled: this.page + 1 >= pages, onclick: turn(1) }, 'Next ›')]));
  }
}

function rewardTables(rows) {
  const { tasks } = DATA.rollouts;
  const threshold = solvedAt();
  const domains = new RewardTable('Reward by domain', 'Domain', 'Tasks', (of, ks) => [...groupedBy(of, (row) => domainOf(tasks[row.k]))]
    .map(([name, some]) => rewardLine(name, some, (row) => row.k, ks, threshold)));
  const single = new RewardTable('Reward by task', 'Task', 'Scored', (of, ks) => [...groupedBy(of, (row) => row.k)]
    .map(([k, some]) => rewardLine(tasks[k].prompt, some, (row) => row, ks, threshold)));
  const draw = (range) => {
    const chosen = inRange(rows, range);
    const largest = Math.max(...[...groupedBy(chosen.filter((row) => row.r !== null), (row) => row.g).values()].map((group) => group.length), 1);
    const ks = [];
    for (let k = 1; k <= largest; k *= 2) ks.push(k);
    domains.of(chosen, ks);
    single.of(chosen, ks);
  };
  draw('last');
  const pick = choice(Object.entries(RANGES).map(([value, [text]]) => [value, text]), 'last', draw, 'Range of steps');
  return [element('div', { class: 'bar', id: 'range' }, element('label', {}, 'Steps', pick), element('span', { class: 'muted small' },
    `The standard error of a domain is over its tasks, that of a task over its rollouts. pass@k is estimated within groups; solved is a reward of at least ${number(threshold)}.`)),
  domains.node, single.node];
}

function distributions() {
  const { rows } = DATA.rollouts;
  if (!rows.some((row) => row.r !== null)) return null;
  return section('Rewards and lengths', 'distributions', element('p', { class: 'muted small' }, `Of the rollouts that this page has. ${DATA.rollouts.shown}`),
    element('div', { class: 'charts three' }, ...histograms(rows)), ...rewardTables(rows));
}
