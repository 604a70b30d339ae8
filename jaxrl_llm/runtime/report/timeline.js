// Messages as spans on lanes over time, a few steps at once; and the idle shares of trainer and rollout over all steps.

const SPAN_COLOURS = { training_data: 'f1 soft', gradient_update: 'f1', rollout: 'f2', suite: 'f6', eval: 'f3', store: 'f4', fetch: 'f7', weights: 'f5' };
const SPAN_NAMES = { eval: 'scoring', suite: 'evaluation', auxiliary_score: 'scoring in mid-episode' };
const LANE_GAP = 14;
const HEAD = 40; // pixels above the lanes, where the steps are named
const FOOT = 24;

function spanName(edge) {
  return SPAN_NAMES[edge] ?? edge.replace('_', ' ');
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}

function seconds(value) {
  if (value >= 100) return `${whole(Math.round(value))} s`;
  if (value >= 1) return `${Number(value.toPrecision(3))} s`;
  return value >= 1e-3 ? `${Number((1e3 * value).toPrecision(3))} ms` : `${Math.round(1e6 * value)} µs`;
}

class Timeline {
  constructor(data) {
    this.data = data;
    this.view = { count: Math.min(3, data.steps.length), last: data.steps.length };
    this.svg = drawn('svg', { role: 'img', 'aria-label': 'Timeline of messages' });
    this.place = element('span', { class: 'muted small' });
    this.turns = [['‹ Earlier', -1], ['Later ›', 1]].map(([text, by]) => element('button', { type: 'button', onclick: () => this.turn(by) }, text));
    const counts = [...new Set([1, 3, data.steps.length].filter((n) => n <= data.steps.length))].map((n) => [String(n), n === data.steps.length ? `all ${n}` : String(n)]);
    const pick = choice(counts, String(this.view.count), (count) => { this.view.count = Number(count); this.turn(0); }, 'Number of steps');
    const shown = Object.keys(data.edges).filter((edge) => data.spans.some((span) => span.e === edge));
    const legend = element('div', { class: 'legend' }, ...shown.map((edge) => element('span', { class: 'entry', title: data.edges[edge].text },
      drawn('svg', { class: 'swatch' }, drawn('rect', { class: this.colour({ e: edge }), width: 11, height: 11, rx: 3 })), spanName(edge))));
    this.node = element('div', { class: 'card chart timeline' }, element('div', { class: 'bar' }, element('label', {}, 'Steps shown', pick),
      this.place, element('span', { class: 'space' }), ...this.turns, exports('Timeline', () => this.rows(), () => [], () => this.svg)), legend, this.svg);
    this.svg.addEventListener('pointermove', (event) => this.hover(event));
    this.svg.addEventListener('pointerdown', (event) => this.hover(event));
    this.svg.addEventListener('pointerleave', hideTip);
    new ResizeObserver(() => this.draw()).observe(this.node);
    this.turn(0);
  }

  // The lines of the timeline's CSV: every message that the page has.
  rows() {
    return [['message', 'start (s)', 'seconds', 'from', 'to', 'id', 'reply'], ...this.data.spans.map((span) => [spanName(span.e), span.t, span.d,
      this.data.edges[span.e].from, this.data.edges[span.e].to, span.id, span.reply])];
  }

  colour(span) {
    return `${SPAN_COLOURS[span.e] ?? 'f8'}${span.unanswered ? ' unanswered' : ''}`;
  }

  turn(by) {
    const { view, data } = this;
    view.last = Math.min(Math.max(view.last + by * view.count, view.count), data.steps.length);
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width) return;
    const { data, view } = this;
    const steps = data.steps.slice(view.last - view.count, view.last);
    this.turns[0].disabled = view.last === view.count;
    const from = steps[0].t;
    // After the last step: its evaluation and its commit.
    const atEnd = view.last === data.steps.length;
    const until = atEnd ? data.end : steps.at(-1).t + steps.at(-1).d;
    this.turns[1].disabled = atEnd;
    const cut = data.hidden ? `, the first ${whole(data.spans.length)} messages only` : '';
    this.place.textContent = `${steps.length > 1 ? `steps ${whole(steps[0].n)} to ${whole(steps.at(-1).n)}` : `step ${whole(steps[0].n)}`}: ${seconds(until - from)}${cut}`;
    const left = 128;
    this.px = (t) => left + ((t - from) / (until - from || 1)) * (width - left - 12);
    const visible = data.spans.map((span, index) => ({ ...span, index })).filter((span) => (atEnd || span.t < until - 1e-6) && (span.t >= from || span.t + span.d > from));
    let top = HEAD;
    const lanes = data.lanes.map((name) => {
      const spans = visible.filter((span) => data.edges[span.e].lane === name);
      const rows = 1 + Math.max(0, ...spans.map((span) => span.row));
      const row = Math.min(16, Math.max(128 / rows, Math.min(3, 256 / rows)));
      const lane = { name, spans, row, top, height: rows * row };
      top += lane.height + LANE_GAP;
      return lane;
    });
    const floor = top - LANE_GAP / 2;
    this.svg.setAttribute('viewBox', `0 0 ${width} ${floor + FOOT}`);
    this.svg.setAttribute('height', floor + FOOT);
    this.svg.replaceChildren(...this.heads(steps, until, floor), ...lanes.flatMap((lane) => this.lane(lane, steps, left, width, until)), ...this.axis(from, until, left, width, floor));
  }

  heads(steps, until, floor) {
    const fits = (text, room) => 6.4 * text.length < room - 10;
    const nodes = steps.flatMap((step, i) => {
      const [x, room] = [this.px(step.t), this.px(step.t + step.d) - this.px(step.t)];
      const name = [`step ${whole(step.n)} · ${seconds(step.d)}`, `step ${whole(step.n)}`, whole(step.n)].find((text) => fits(text, room));
      const shares = Object.entries(step.idle);
      const idle = [`idle: ${shares.map(([role, share]) => `${role} ${percent(share)}`).join(', ')}`, shares.map(([, share]) => percent(share)).join(', ')].find((text) => fits(text, room));
      return [i ? drawn('line', { class: 'stage', x1: x, x2: x, y1: 2, y2: floor }) : null,
        name ? drawn('text', { class: 'name', x: x + 5, y: 12 }, name) : null, idle ? drawn('text', { x: x + 5, y: 27 }, idle) : null];
    });
    const end = steps.at(-1).t + steps.at(-1).d;
    if (until > end) nodes.push(drawn('line', { class: 'stage', x1: this.px(end), x2: this.px(end), y1: 2, y2: floor }));
    if (fits('afterwards', this.px(until) - this.px(end))) nodes.push(drawn('text', { x: this.px(end) + 5, y: 12 }, 'afterwards'));
    return nodes.filter(Boolean);
  }

  lane(lane, steps, left, width, until) {
    const middle = lane.top + lane.height / 2;
    const timed = steps.filter((step) => lane.name in step.idle);
    const total = timed.reduce((sum, step) => sum + step.d, 0);
    const idle = total ? `idle ${percent(timed.reduce((sum, step) => sum + step.d * step.idle[lane.name], 0) / total)}` : '';
    const under = lane.height >= 28 && idle;
    const label = under ? [drawn('text', { class: 'name', x: 0, y: middle - 3 }, lane.name), drawn('text', { x: 0, y: middle + 12 }, idle)]
      : [drawn('text', { x: 0, y: middle + 4 }, drawn('tspan', { class: 'name' }, lane.name), idle ? ` ${idle}` : '')];
    const line = lane.top + lane.height + LANE_GAP / 2;
    const rects = lane.spans.map((span) => {
      const x = Math.max(this.px(span.t), left);
      const end = Math.min(this.px(span.t + span.d), this.px(until));
      return drawn('rect', { class: this.colour(span), 'data-span': span.index, 'data-edge': span.e, x: x.toFixed(2), width: Math.max(2, end - x).toFixed(2),
        y: (lane.top + span.row * lane.row).toFixed(2), height: (lane.row > 6 ? lane.row - 2 : 0.8 * lane.row).toFixed(2), rx: lane.row > 6 ? 2 : 0 });
    });
    return [drawn('line', { class: 'grid', x1: 0, x2: width - 12, y1: line, y2: line }), ...label, ...rects];
  }

  axis(from, until, left, width, floor) {
    const scale = ticks(0, until - from, Math.max(2, Math.min(8, (width - left) / 90)));
    return scale.values.filter((t) => t <= until - from).map((t) => drawn('text', { x: this.px(from + t), y: floor + 17, 'text-anchor': t ? 'middle' : 'start' }, t ? seconds(t) : '0'));
  }

  hover(event) {
    const index = event.target.dataset?.span;
    if (index === undefined) { hideTip(); return; }
    const span = this.data.spans[Number(index)];
    const edge = this.data.edges[span.e];
    const ids = span.reply === null ? [['id', span.id]] : [['request', span.id], ['reply', span.reply]];
    const facts = [...ids, ...Object.entries(span.fields)];
    const took = span.unanswered ? 'no reply' : span.reply === null ? 'message' : seconds(span.d);
    const rows = facts.map(([name, value]) => element('div', { class: 'row fact' }, element('span', {}, name), element('b', {}, String(value))));
    showTip(event.clientX + 14, event.clientY + 14, true, element('div', {}, element('b', {}, `${spanName(span.e)} · ${took}`)),
      element('div', { class: 'head' }, `${edge.from} → ${edge.to}`), ...rows);
  }
}

function timeline() {
  if (!DATA.timeline) return null;
  const series = Object.entries(DATA.idle).map(([role, points], i) => ({ key: `idle/${role}`, name: role, colour: i + 1, ...points }));
  const chart = new Chart({ title: 'Idle share', series, stages: DATA.stages, range: [0, 1], wide: true, unit: 'share of the step',
    caption: 'Share of each step in which the trainer had no batch and wrote no checkpoint, and share in which no rollout or suite was running.'
      + (DATA.idle_from === null ? '' : ` From step ${whole(DATA.idle_from)} on: of a long run, the page has the messages of the last steps.`) }, SMOOTHING);
  CHARTS.push(chart);
  return section('Timeline', 'timeline', element('p', { class: 'muted small' },
    'The messages of the last steps, from events.jsonl. A bar spans a request and its reply; a tick is a message without a reply. Hover over one for its ids. A step begins when training on the previous batch has ended.'),
  new Timeline(DATA.timeline).node, element('div', { class: 'charts' }, chart.node));
}
