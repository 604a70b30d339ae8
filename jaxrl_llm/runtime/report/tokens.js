// Tokens of rollouts, coloured by what happened to them.

const TOKENS_AT_ONCE = 1500;

// The step of the version that sampled a token; null for a token that the policy did not sample.
function versionOf(row, i) {
  if (row.b && row.b[i] === null) return null;
  if (!row.l) return row.v ?? null;
  const span = row.l.find(([start, end]) => start <= i && i < end);
  return span ? span[2] : null;
}

// How many batches older than the newest one the version is that sampled a token.
function ageOf(row, i) {
  const version = versionOf(row, i);
  return typeof version === 'number' ? Math.max(0, row.p - 1 - version) : null;
}

const COLOURS = {
  advantage: { label: 'Advantage', none: 'all values are 0', of: (row, i) => (Array.isArray(row.a) ? row.a[i] : isObserved(row, i) ? null : row.a) },
  difference: { label: 'Trainer − sampler', none: 'all values are 0', of: (row, i) => (row.d ? row.d[i] : null) },
  version: { label: 'Version', none: 'all of the newest version', counts: true, of: ageOf },
};

// Whether the policy read a token instead of sampling it.
function isObserved(row, i) {
  const turn = row.w?.find(([, end]) => i < end);
  return turn !== undefined && turn[0] === 1;
}

// The background for a value of -1 ... 1: blue above 0, orange below. The root lets small values be seen.
function shade(value) {
  const strength = Math.sqrt(Math.min(1, Math.abs(value))).toFixed(3);
  return value ? `rgb(var(--${value > 0 ? 'positive' : 'negative'}) / calc(var(--strength) * ${strength}))` : 'transparent';
}

// The value at which a colour is full: the 98th percentile of |value|, so that one outlier does not pale the rest.
function limitOf(rows, name) {
  const values = [];
  const stride = Math.ceil(rows.length / 4000);
  for (let r = 0; r < rows.length; r += stride) {
    const row = rows[r];
    for (let i = 0; i < row.t.length; i += 1) {
      const v = COLOURS[name].of(row, i);
      if (v) values.push(Math.abs(v));
    }
  }
  values.sort((a, b) => a - b);
  return values.length ? values[Math.floor(0.98 * (values.length - 1))] : 0;
}

// Draws tokens inside nodes whose data-row is the number of their row, and colours them by the chosen quantity.
class Tokens {
  constructor(data, limits) {
    Object.assign(this, { data, limits, colour: 'advantage' });
    this.scale = element('span', { class: 'scale' });
    this.choice = element('span', {});
  }

  // The buttons that choose the colour; `repaint` is called after a choice.
  controls(repaint) {
    const colours = [...Object.entries(COLOURS).map(([value, c]) => [value, c.label]), ['none', 'None']];
    this.buttons = choice(colours, this.colour, (value) => { this.colour = value; repaint(); }, 'Colour of tokens');
    return [element('label', {}, 'Colour of tokens'), this.buttons, this.scale];
  }

  // The text of tokens [from, to) of a row.
  text(row, from = 0, to = row.t.length) {
    return row.t.slice(from, to).map((t) => this.data.tokens[t][1]).join('');
  }

  // Tokens [from, to) of a row, `count` at first and more on demand.
  draw(row, from, to, count, paint) {
    const node = element('div', { class: 'tokens' });
    const add = (start, most) => {
      const end = Math.min(to, start + most);
      const observed = (i) => isObserved(row, i);
      node.append(...row.t.slice(start, end).map((t, i) => element('span', { class: `token${row.w && observed(start + i) ? ' read' : ''}`, 'data-i': start + i },
        this.data.tokens[t][1].replaceAll('\n', '↵\n'))));
      if (end === to) return;
      const more = element('button', { type: 'button', class: 'link', onclick: (event) => {
        event.stopPropagation();
        more.remove();
        add(end, TOKENS_AT_ONCE);
        paint(node);
      } }, `show ${whole(Math.min(TOKENS_AT_ONCE, to - end))} more of ${plural(to - end, 'token')}`);
      node.append(' … ', count < TOKENS_AT_ONCE ? '' : more);
    };
    add(from, count);
    return node;
  }

  // Colours the tokens inside `root` anew.
  paint(root) {
    const limit = this.limits[this.colour];
    for (const span of root.querySelectorAll('.token')) {
      const row = this.data.rows[Number(span.closest('[data-row]').dataset.row)];
      const value = this.colour === 'none' ? null : COLOURS[this.colour].of(row, Number(span.dataset.i));
      span.style.background = limit && value ? shade(value / limit) : '';
    }
  }

  drawScale() {
    this.scale.hidden = this.colour === 'none';
    if (this.scale.hidden) return;
    const { none, counts } = COLOURS[this.colour];
    const limit = this.limits[this.colour];
    const gradient = element('i', {});
    const stops = [-1, -0.75, -0.5, -0.25, -0.1, 0, 0.1, 0.25, 0.5, 0.75, 1].filter((v) => !counts || v >= 0);
    gradient.style.background = `linear-gradient(90deg, ${stops.map((v) => `${shade(v)} ${counts ? 100 * v : 50 + 50 * v}%`).join(', ')})`;
    this.scale.replaceChildren(...(limit ? [counts ? 'newest' : `−${number(limit)}`, gradient, counts ? `${whole(limit)} older` : number(limit)] : [none]));
  }

  hover(event) {
    const span = event.target.closest('.token');
    if (!span) return;
    const row = this.data.rows[Number(span.closest('[data-row]').dataset.row)];
    const i = Number(span.dataset.i);
    const [id, text] = this.data.tokens[row.t[i]];
    const version = versionOf(row, i);
    const values = [['advantage', COLOURS.advantage.of(row, i)], ['sampler logprob', row.b?.[i]],
      ['trainer logprob', row.b && (row.d?.[i] ?? null) !== null ? row.b[i] + row.d[i] : undefined], ['trainer − sampler', row.d?.[i]],
      ['version of step', row.l ? version : undefined]];
    const box = span.getBoundingClientRect();
    const rows = values.filter(([, v]) => v !== undefined && v !== null)
      .map(([name, v]) => element('div', { class: 'row' }, element('span', {}, name), element('b', {}, number(v))));
    showTip(box.left, box.bottom + 6, true, element('div', { class: 'mono' }, JSON.stringify(text)),
      element('div', { class: 'head' }, `token ${whole(i + 1)}${id === null ? '' : ` · id ${id}`}`), ...rows);
  }
}
