// Curves as inline SVG: lines (raw faint, smoothed bold), stacked areas, stage boundaries, crosshair with values.

const HEIGHT = 240;
const TOP = 24;
const BOTTOM = 42;
const MARKER_LIMIT = 40; // series with at most so many points show each as a dot and are never smoothed

// Round tick positions that cover [low, high] in about `count` steps, and how many decimals they need.
function ticks(low, high, count, integers) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  if (integers) step = Math.max(1, Math.ceil(step));
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) values.push(i * step || 0);
  return { values, step };
}

function tickText(value, step) {
  if (Math.abs(value) < step * 1e-6) return '0';
  if (step < 1e-4 || Math.abs(value) >= 1e6) return number(Number(value.toPrecision(6)));
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const exact = Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) < 1e-6;
  return value.toLocaleString('en-US', { minimumFractionDigits: exact ? decimals : decimals + 1,
    maximumFractionDigits: exact ? decimals : decimals + 1 });
}

// Mean of an exponential moving average from the left and one from the right: no lag, no bias to 0 at the ends, and
// nothing crosses from one stage into the next. Points outside the axis stay out of it, so that one does not smear.
function smoothed(series, weight, low, high) {
  const total = series.y.map(() => 0);
  const forth = series.y.map((_, i) => i);
  for (const order of [forth, [...forth].reverse()]) {
    let [sum, norm, stage] = [0, 0, null];
    for (const i of order) {
      if (series.stage[i] !== stage) [sum, norm, stage] = [0, 0, series.stage[i]];
      const y = series.y[i];
      const counts = y !== null && y >= low[i] && y <= high[i];
      sum = sum * weight + (counts ? y : 0);
      norm = norm * weight + (counts ? 1 : 0);
      total[i] += norm ? sum / norm / 2 : (y ?? 0) / 2;
    }
  }
  return total.map((v, i) => (series.y[i] === null ? null : v));
}

// The name of a metric; its key where it has none.
function nameOf(key) {
  return DATA.labels[key]?.name ?? key;
}

// The unit that all lines of a chart share; empty where they differ.
function unitOf(series) {
  const units = [...new Set(series.map((line) => line.unit ?? DATA.labels[line.key]?.unit ?? ''))];
  return units.length === 1 ? units[0] : '';
}

function axisTitles(left, width, x, y) {
  const middle = TOP + (HEIGHT - TOP - BOTTOM) / 2;
  return [drawn('text', { class: 'axis-title', x: (left + width - 10) / 2, y: HEIGHT - 6, 'text-anchor': 'middle' }, x),
    drawn('text', { class: 'axis-title', transform: `translate(11 ${middle}) rotate(-90)`, 'text-anchor': 'middle' }, y)];
}

// The range of y to show: all of it, unless a few points stand far outside the rest (a first step that compiles).
function yRange(values, spec) {
  const sorted = values.filter((v) => v !== null).sort((a, b) => a - b);
  if (!sorted.length) return { low: 0, high: 1, outside: 0 };
  let low = sorted[0];
  let high = sorted[sorted.length - 1];
  const largest = Math.max(Math.abs(low), Math.abs(high));
  // Rounding error is no curve: it stays on the line of 0, or of the constant that it is added to.
  if (largest > 0 && largest <= (spec.noise ?? 0)) return { low: low < 0 ? -10 * spec.noise : 0, high: 10 * spec.noise, outside: 0, rounding: largest };
  if (high > low && high - low < 1e-6 * largest && !spec.range) return { low: low - 0.5 * largest, high: high + 0.5 * largest, outside: 0, rounding: high - low };
  if (sorted.length >= 8 && !spec.full) {
    const cut = Math.max(1, Math.round(0.02 * (sorted.length - 1)));
    const [q1, q3] = [sorted[cut], sorted[sorted.length - 1 - cut]];
    const span = q3 - q1 || Math.abs(q3) || 1;
    if (high > q3 + 2 * span) high = q3 + 0.3 * span;
    if (low < q1 - 2 * span) low = q1 - 0.3 * span;
  }
  const outside = sorted.filter((v) => v > high || v < low).length;
  if (spec.range) [low, high] = [Math.min(low, spec.range[0]), Math.max(high, spec.range[1])];
  else if (low > 0 && (spec.zero || low < 0.5 * high)) low = 0;
  if (high === low) [low, high] = [Math.min(0, 2 * low), Math.max(0, 2 * high) || (low < 0 ? 0 : 1)];
  const margin = spec.range || spec.zero ? 0 : 0.06 * (high - low);
  return { low: low === 0 ? 0 : low - margin, high: spec.range ? high : high + 0.06 * (high - low), outside };
}

// The class of a line's dashes, for lines that share a colour.
function dash(line) {
  return line.dash ? ` d${line.dash}` : '';
}

// The key of a line beside its name, where that is another word.
function beside(line) {
  return line.key in DATA.labels && line.name !== line.key ? element('code', { class: 'key' }, ` ${line.key}`) : null;
}

function spread(line, i) {
  const error = line.high ? (line.high[i] - line.low[i]) / 2 : 0;
  return error ? ` ± ${Number(error.toPrecision(2))}` : '';
}

class Chart {
  // spec: {title, caption, series: [{key, name, x, y, stage, colour}], stages, band: {low, high}?, stacked?, zero?, range?,
  // joined?}; `joined` draws one line through all stages; stacked series have the same x and no gaps. A series may
  // have a band of its own, low and high at its x, a dash (1 or 2), and a title for the legend.
  constructor(spec, smoothing) {
    this.spec = { noise: Math.min(...spec.series.map((line) => DATA.labels[line.key]?.noise ?? 0)), ...spec };
    this.smoothing = smoothing;
    this.hidden = new Set();
    this.svg = drawn('svg', { height: HEIGHT, tabindex: 0, role: 'img', 'aria-label': spec.title });
    this.note = element('div', { class: 'note' });
    this.node = element('section', { class: `chart card${spec.wide ? ' wide' : ''}`, 'data-chart': spec.title },
      element('div', { class: 'title' }, element('h3', {}, spec.title), exports(spec.title, () => this.rows(), () => this.visible(), () => this.svg)),
      element('div', { class: 'caption' }, spec.caption || ''), this.legend(), this.svg, this.note);
    this.svg.addEventListener('pointermove', (event) => this.hover(event.clientX, event.clientY));
    this.svg.addEventListener('pointerdown', (event) => this.hover(event.clientX, event.clientY));
    this.svg.addEventListener('pointerleave', () => this.leave());
    this.svg.addEventListener('blur', () => this.leave());
    this.svg.addEventListener('keydown', (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  visible() {
    return this.spec.series.filter((line) => !this.hidden.has(line.key));
  }

  // The lines of the chart's CSV: the values as logged, not smoothed.
  rows() {
    const lines = this.visible();
    const at = new Map();
    lines.forEach((line, l) => line.x.forEach((x, i) => {
      const place = `${x} ${line.stage[i]}`;
      const row = at.get(place) ?? at.set(place, { x, stage: line.stage[i], values: new Array(lines.length).fill(null) }).get(place);
      row.values[l] = line.y[i];
    }));
    const { stages } = this.spec;
    return [['stage', 'step', ...lines.map((line) => line.key)], ...[...at.values()].sort((a, b) => a.x - b.x || a.stage - b.stage)
      .map((row) => [stages[row.stage].name, row.x - stages[row.stage].offset, ...row.values])];
  }

  legend() {
    const { series } = this.spec;
    if (series.length < 2) return null;
    return element('div', { class: 'legend' }, ...series.map((line) => element('button', {
      type: 'button', 'aria-pressed': 'true', title: line.title ?? (DATA.descriptions[line.key] || line.key),
      onclick: (event) => {
        if (this.hidden.has(line.key)) this.hidden.delete(line.key);
        else if (this.hidden.size < series.length - 1) this.hidden.add(line.key);
        event.currentTarget.setAttribute('aria-pressed', String(!this.hidden.has(line.key)));
        this.draw();
      },
    }, element('span', { class: `swatch b${line.colour}${dash(line)}` }), element('span', {}, line.name, ...[beside(line)].filter(Boolean)))));
  }

  // What is drawn: per visible series the points, smoothed where asked, and for stacked charts the lower edge too.
  layers() {
    const lines = this.visible();
    const band = this.spec.band && !this.hidden.size ? [...this.spec.band.low.y, ...this.spec.band.high.y] : [];
    for (const line of lines) band.push(...(line.low ?? []), ...(line.high ?? []));
    const totals = this.spec.stacked ? lines[0].x.map((_, i) => lines.reduce((a, line) => a + line.y[i], 0)) : null;
    this.range = yRange(totals ?? lines.flatMap((line) => line.y).concat(band), this.spec);
    const far = totals?.map((total) => total > this.range.high);
    let bottom = totals?.map(() => 0);
    return lines.map((line) => {
      const soft = this.smoothing.weight > 0 && line.x.length > MARKER_LIMIT;
      const low = line.y.map(() => (totals ? 0 : this.range.low));
      const high = line.y.map((_, i) => (!totals ? this.range.high : far[i] ? -1 : Infinity));
      let y = soft ? smoothed(line, this.smoothing.weight, low, high) : line.y;
      if (!totals) return { line, y, soft };
      const under = bottom;
      y = y.map((v, i) => under[i] + (far[i] ? line.y[i] : v));
      bottom = y;
      return { line, y, bottom: under, soft };
    });
  }

  draw() {
    const { spec } = this;
    const width = this.svg.clientWidth;
    if (!width) return;
    const layers = this.layers();
    const y = this.range;
    const scale = ticks(y.low, y.high, 4);
    const labels = scale.values.map((v) => tickText(v, scale.step));
    const left = 30 + 7 * Math.max(...labels.map((l) => l.length), 2);
    const xs = spec.series.flatMap((l) => [l.x[0], l.x[l.x.length - 1]]);
    const [first, last] = [Math.min(...xs), Math.max(...xs)];
    this.px = (x) => (last === first ? (left + width) / 2 : left + ((x - first) / (last - first)) * (width - left - 10));
    this.py = (v) => TOP + ((y.high - v) / (y.high - y.low)) * (HEIGHT - TOP - BOTTOM);
    this.cursor = drawn('g', {});
    const clip = `clip${Chart.count = (Chart.count || 0) + 1}`;
    const plot = drawn('g', { 'clip-path': `url(#${clip})` }, ...layers.flatMap((layer) => this.paths(layer)));
    if (spec.band && !this.hidden.size) plot.prepend(this.band());
    this.svg.setAttribute('viewBox', `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(
      drawn('clipPath', { id: clip }, drawn('rect', { x: left - 6, y: TOP - 5, width: width - left + 12, height: HEIGHT - TOP - BOTTOM + 10 })),
      ...this.axes(left, width, first, last, scale.values, labels), ...this.boundaries(left, width, first, last), plot, this.cursor,
      ...axisTitles(left, width, 'step', spec.unit ?? unitOf(spec.series)));
    const restore = element('button', { type: 'button', onclick: () => { spec.full = true; this.draw(); } }, 'show all');
    if (y.rounding) this.note.replaceChildren(`Rounding error alone: at most ${number(y.rounding)}.`);
    else this.note.replaceChildren(...(y.outside ? [`${plural(y.outside, 'point')} outside the axis · `, restore] : []));
  }

  axes(left, width, first, last, values, labels) {
    const floor = HEIGHT - BOTTOM;
    const rows = values.flatMap((v, i) => [
      drawn('line', { class: 'grid', x1: left, x2: width - 10, y1: this.py(v), y2: this.py(v) }),
      drawn('text', { x: left - 8, y: this.py(v) + 4, 'text-anchor': 'end' }, labels[i]),
    ]);
    const x = ticks(first, last, Math.max(2, Math.min(8, (width - left) / 80)), true);
    const columns = x.values.map((v) => drawn('text', { x: this.px(v), y: floor + 18, 'text-anchor': 'middle' }, whole(v)));
    return [...rows, drawn('line', { class: 'axis', x1: left, x2: width - 10, y1: floor, y2: floor }), ...columns];
  }

  // A dashed line where a stage begins, and each stage's name above its part where that is wide enough.
  boundaries(left, width, first, last) {
    return this.spec.stages.flatMap((stage, i) => {
      const from = Math.max(stage.start, first);
      const until = Math.min(i + 1 < this.spec.stages.length ? this.spec.stages[i + 1].start : last, last);
      if (until < from || (until === from && last > first)) return [];
      const parts = [];
      if (i && stage.start > first) {
        parts.push(drawn('line', { class: 'stage', x1: this.px(from), x2: this.px(from), y1: TOP - 12, y2: HEIGHT - BOTTOM }));
      }
      if (this.spec.stages.length > 1 && this.px(until) - this.px(from) > 7 * stage.name.length + 8) {
        parts.push(drawn('text', { x: this.px(from) + (parts.length ? 6 : 0), y: TOP - 6 }, stage.name));
      }
      return parts;
    });
  }

  trace(line, y) {
    let up = true;
    const parts = [];
    y.forEach((v, i) => {
      if (i && !this.spec.joined && line.stage[i] !== line.stage[i - 1]) up = true;
      if (v === null) { up = true; return; }
      parts.push(`${up ? 'M' : 'L'}${this.px(line.x[i]).toFixed(1)},${this.py(v).toFixed(1)}`);
      up = false;
    });
    return parts.join('');
  }

  paths({ line, y, bottom, soft }) {
    const named = { 'data-key': line.key };
    if (bottom) {
      const back = line.x.map((x, i) => `L${this.px(x).toFixed(1)},${this.py(bottom[i]).toFixed(1)}`).reverse().join('');
      const front = line.x.map((x, i) => `${i ? 'L' : 'M'}${this.px(x).toFixed(1)},${this.py(y[i]).toFixed(1)}`).join('');
      return [drawn('path', { ...named, class: `area f${line.colour}`, d: `${front}${back}Z` })];
    }
    const raw = drawn('path', { ...named, class: `raw k${line.colour}${dash(line)}${soft ? ' faint' : ''}`, d: this.trace(line, line.y) });
    const own = line.low ? [this.bandOf(line, soft)] : [];
    if (soft) return [...own, ...(line.low ? [] : [raw]), drawn('path', { ...(line.low ? named : {}), class: `smooth k${line.colour}${dash(line)}`, d: this.trace(line, y) })];
    const dots = line.x.length > MARKER_LIMIT ? [] : line.x.flatMap((x, i) => (line.y[i] === null ? [] : [drawn('circle',
      { class: `f${line.colour}`, cx: this.px(x), cy: this.py(line.y[i]), r: 3 })]));
    return [...own, raw, ...dots];
  }

  // The band of a series, with gaps where the series has them.
  bandOf(line, soft) {
    const edge = (y) => (soft ? smoothed({ ...line, y }, this.smoothing.weight, y.map(() => -Infinity), y.map(() => Infinity)) : y);
    const [low, high] = [edge(line.low), edge(line.high)];
    const runs = [];
    line.x.forEach((_, i) => {
      if (low[i] === null) return;
      if (!i || low[i - 1] === null || (!this.spec.joined && line.stage[i] !== line.stage[i - 1])) runs.push([]);
      runs.at(-1).push(i);
    });
    const at = (values) => (i) => `${this.px(line.x[i]).toFixed(1)},${this.py(values[i]).toFixed(1)}`;
    const d = runs.map((of) => `M${of.map(at(high)).join('L')}L${[...of].reverse().map(at(low)).join('L')}Z`).join('');
    return drawn('path', { class: `band f${line.colour}`, d });
  }

  band() {
    const { low, high } = this.spec.band;
    const at = (s, i) => `${this.px(s.x[i]).toFixed(1)},${this.py(s.y[i] ?? 0).toFixed(1)}`;
    const front = high.x.map((_, i) => `${i ? 'L' : 'M'}${at(high, i)}`).join('');
    return drawn('path', { class: 'band f1', d: `${front}${low.x.map((_, i) => `L${at(low, i)}`).reverse().join('')}Z` });
  }

  hover(clientX, clientY) {
    if (!this.px) return;
    const box = this.svg.getBoundingClientRect();
    const lines = this.visible();
    const target = clientX - box.left;
    const candidates = lines.map((l) => l.x[nearest(l.x.map(this.px), target)]);
    this.show(candidates.reduce((a, b) => (Math.abs(this.px(b) - target) < Math.abs(this.px(a) - target) ? b : a)), clientY);
  }

  // The crosshair at x, with the values there of all visible series that have a point within 3 pixels.
  show(x, clientY) {
    this.at = x;
    const box = this.svg.getBoundingClientRect();
    const found = this.layers().map((layer) => ({ ...layer, i: nearest(layer.line.x, x) }))
      .filter((f) => Math.abs(this.px(f.line.x[f.i]) - this.px(x)) <= 3);
    const [{ line, i }] = found;
    const stage = this.spec.stages[line.stage[i]];
    const dots = found.flatMap((f) => {
      const v = this.spec.stacked || f.soft ? f.y[f.i] : f.line.y[f.i];
      return v === null ? [] : [drawn('circle', { class: `ring f${f.line.colour}`, cx: this.px(x), cy: this.py(v), r: 4.5 })];
    });
    this.cursor.replaceChildren(
      drawn('line', { class: 'cross', x1: this.px(x), x2: this.px(x), y1: TOP, y2: HEIGHT - BOTTOM }), ...(this.spec.stacked ? [] : dots));
    const shown = this.spec.stacked ? [...found].reverse() : found;
    const rows = shown.filter((f) => !this.spec.stacked || f.line.y[f.i] > 0).map((f) => element('div', { class: 'row' }, element('span', { class: `swatch b${f.line.colour}${dash(f.line)}` }),
      element('span', {}, f.line.name), element('b', {}, number(f.line.y[f.i]) + spread(f.line, f.i))));
    if (this.spec.band) rows.push(this.bandRow(x));
    const step = element('div', { class: 'head' }, `${stage.name} · step ${whole(x - stage.offset)}`);
    showTip(box.left + this.px(x) + 16, clientY ?? box.top + HEIGHT / 2, false, step, ...rows);
  }

  bandRow(x) {
    const { low, high } = this.spec.band;
    const range = `${number(low.y[nearest(low.x, x)])} … ${number(high.y[nearest(high.x, x)])}`;
    return element('div', { class: 'row' }, element('span', {}, 'range'), element('b', {}, range));
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const { x } = this.spec.series.find((l) => !this.hidden.has(l.key));
    const i = this.at === undefined ? x.length - 1 : nearest(x, this.at) + move;
    this.show(x[Math.min(Math.max(i, 0), x.length - 1)]);
  }

  leave() {
    this.at = undefined;
    this.cursor?.replaceChildren();
    hideTip();
  }
}
