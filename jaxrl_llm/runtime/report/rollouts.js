// The rollouts: by task, by group or flat, sorted, filtered, paged; tokens coloured by what happened to them.

const TASKS_A_PAGE = 10;
const ROLLOUTS_A_PAGE = 60;
const ROLLOUTS_A_TASK = 8;
const TOKENS_A_LINE = 600; // a closed row shows three lines anyway; an opened one shows all its tokens

const COLOURS = {
  advantage: { label: 'Advantage', of: (row, i) => (Array.isArray(row.a) ? row.a[i] : row.a) },
  difference: { label: 'Trainer − sampler', of: (row, i) => (row.d ? row.d[i] : null) },
};
// The background for a value of -1 ... 1: blue above 0, orange below. The root lets small values be seen.
function shade(value) {
  const strength = Math.sqrt(Math.min(1, Math.abs(value))).toFixed(3);
  return value ? `rgb(var(--${value > 0 ? 'positive' : 'negative'}) / calc(var(--strength) * ${strength}))` : 'transparent';
}

// What rollouts are shown under, and the noun of it in the count.
const GROUPINGS = { task: { of: (row) => row.k, noun: 'task' }, group: { of: (row) => row.g, noun: 'group' } };

const SORTS = { step: (row) => row.x, reward: (row) => row.r ?? -Infinity, length: (row) => row.t.length };

class Rollouts {
  constructor(data) {
    this.data = data;
    this.view = { sort: 'step', down: false, grouping: 'task', colour: 'advantage', text: '', stage: '', outcome: '', page: 0 };
    this.whole = Object.fromEntries(Object.entries(GROUPINGS).map(([name, { of }]) => [name, groupedBy(data.rows, of)]));
    this.limits = Object.fromEntries(Object.keys(COLOURS).map((name) => [name, this.limit(name)]));
    this.list = element('div', { id: 'rollouts', onpointerover: (e) => this.hover(e), onpointerout: hideTip });
    this.scale = element('span', { class: 'scale' });
    this.foot = element('div', { class: 'foot' });
    this.heads = Object.fromEntries(Object.keys(SORTS).map((name) => [name, element('button', {
      type: 'button', 'data-sort': name, onclick: () => this.sortBy(name),
    })]));
    this.columns = element('div', { class: 'columns' }, this.heads.step, this.heads.reward, this.heads.length, element('span', {}, 'Response'));
    this.node = element('div', {}, this.controls(), this.columns, this.list, this.foot);
    this.draw();
  }

  // The value at which a colour is full: the 98th percentile of |value|, so that one outlier does not pale the rest.
  limit(name) {
    const values = [];
    const stride = Math.ceil(this.data.rows.length / 4000);
    for (let r = 0; r < this.data.rows.length; r += stride) {
      const row = this.data.rows[r];
      for (let i = 0; i < row.t.length; i += 1) {
        const v = COLOURS[name].of(row, i);
        if (v) values.push(Math.abs(v));
      }
    }
    values.sort((a, b) => a - b);
    return values.length ? values[Math.floor(0.98 * (values.length - 1))] : 0;
  }

  controls() {
    const change = (name) => (event) => this.change({ [name]: event.target.value });
    const option = (value, label) => element('option', { value }, label);
    let timer = 0;
    const search = element('input', { type: 'search', placeholder: 'Filter by prompt or response', 'aria-label': 'Filter rollouts',
      oninput: (event) => { clearTimeout(timer); timer = setTimeout(() => this.change({ text: event.target.value.toLowerCase() }), 150); } });
    const stages = [...new Set(this.data.rows.map((row) => row.s))];
    const stage = element('select', { 'aria-label': 'Stage', onchange: change('stage') }, option('', 'all stages'),
      ...stages.map((i) => option(i, DATA.stages[i].name)));
    const outcome = element('select', { 'aria-label': 'Outcome', onchange: change('outcome') }, option('', 'all outcomes'),
      option('positive', 'reward above 0'), option('zero', 'reward 0 or less'), option('unscorable', 'without reward'), option('cut', 'cut at the limit'));
    const grouping = choice([['task', 'By task'], ['group', 'By group'], ['flat', 'All']], 'task', (grouping) => this.change({ grouping }), 'Grouping');
    const colours = [...Object.entries(COLOURS).map(([value, c]) => [value, c.label]), ['none', 'None']];
    const colour = choice(colours, 'advantage', (value) => { this.view.colour = value; this.recolour(); }, 'Colour of tokens');
    return element('div', {},
      element('div', { class: 'bar' }, search, stages.length > 1 ? stage : null, outcome, grouping),
      element('div', { class: 'bar' }, element('label', {}, 'Colour of tokens'), colour, this.scale));
  }

  change(values) {
    Object.assign(this.view, { page: 0 }, values);
    this.draw();
  }

  sortBy(name) {
    const { sort, down } = this.view;
    this.change({ sort: name, down: sort === name ? !down : name !== 'step' });
  }

  text(row) {
    row.text ??= row.q ?? row.t.map((t) => this.data.tokens[t][1]).join('');
    return row.text;
  }

  selected() {
    const { text, stage, outcome } = this.view;
    const outcomes = { positive: (r) => r.r > 0, zero: (r) => r.r !== null && r.r <= 0, unscorable: (r) => r.r === null, cut: (r) => r.f === 'length' };
    const found = this.data.tasks.map((task) => text && task.prompt.toLowerCase().includes(text));
    return this.data.rows.filter((row) => (stage === '' || row.s === Number(stage)) && (!outcome || outcomes[outcome](row))
      && (!text || found[row.k] || this.text(row).toLowerCase().includes(text)));
  }

  sorted(items, value) {
    const sign = this.view.down ? -1 : 1;
    const keyed = items.map((item, i) => [value(item), i, item]);
    keyed.sort((a, b) => (a[0] === b[0] ? a[1] - b[1] : sign * (a[0] < b[0] ? -1 : 1)));
    return keyed.map(([, , item]) => item);
  }

  // Tasks or groups with those of their rollouts that are shown. They sort by their earliest or latest step shown, or by
  // the mean reward or length over all of their rollouts, shown or not.
  groups(rows) {
    const { sort, down, grouping } = this.view;
    const { of } = GROUPINGS[grouping];
    const edge = (g) => g.reduce((a, row) => (down ? Math.max(a, row.x) : Math.min(a, row.x)), g[0].x);
    const mean = (g) => this.meanOf(this.whole[grouping].get(of(g[0])), sort === 'reward' ? (row) => row.r : SORTS[sort]) ?? -Infinity;
    return this.sorted([...groupedBy(rows, of).values()], sort === 'step' ? edge : mean);
  }

  // The mean over the rows that have the value; null where none has.
  meanOf(rows, value) {
    const values = rows.map(value).filter((v) => v !== null);
    return values.length ? meanOfValues(values) : null;
  }

  draw() {
    hideTip();
    const rows = this.selected();
    for (const [name, head] of Object.entries(this.heads)) {
      const on = this.view.sort === name;
      head.className = on ? 'on' : '';
      head.setAttribute('aria-label', `Sort by ${name}${on ? (this.view.down ? ', descending' : ', ascending') : ''}`);
      head.textContent = `${name[0].toUpperCase()}${name.slice(1)}${on ? (this.view.down ? ' ▼' : ' ▲') : ''}`;
    }
    const grouped = this.view.grouping in GROUPINGS;
    const items = grouped ? this.groups(rows) : this.sorted(rows, SORTS[this.view.sort]);
    const size = grouped ? TASKS_A_PAGE : ROLLOUTS_A_PAGE;
    const pages = Math.max(1, Math.ceil(items.length / size));
    const shown = items.slice(this.view.page * size, (this.view.page + 1) * size);
    if (!shown.length) this.list.replaceChildren(element('div', { class: 'card empty' }, 'No rollout matches.'));
    else if (grouped) this.list.replaceChildren(...shown.map((group) => this.task(group)));
    else this.list.replaceChildren(element('div', { class: 'task card' }, ...shown.map((row) => this.rollout(row, true))));
    this.drawFoot(rows.length, items.length, pages);
    this.recolour();
  }

  drawFoot(rows, items, pages) {
    const turn = (page) => { this.view.page = page; this.draw(); this.node.scrollIntoView(); };
    const { page, grouping } = this.view;
    const count = grouping in GROUPINGS ? `${plural(rows, 'rollout')} of ${plural(items, GROUPINGS[grouping].noun)}` : plural(rows, 'rollout');
    this.foot.replaceChildren(element('span', {}, count), element('span', { class: 'space' }),
      element('button', { type: 'button', disabled: page === 0, onclick: () => turn(page - 1) }, '‹ Previous'),
      element('span', {}, `page ${whole(page + 1)} of ${whole(pages)}`),
      element('button', { type: 'button', disabled: page + 1 >= pages, onclick: () => turn(page + 1) }, 'Next ›'));
  }

  task(group) {
    const task = this.data.tasks[group[0].k];
    const { grouping } = this.view;
    const all = this.whole[grouping].get(GROUPINGS[grouping].of(group[0]));
    const mean = this.meanOf(all, (row) => row.r);
    const count = group.length < all.length ? `${whole(group.length)} of ${plural(all.length, 'rollout')} shown` : plural(all.length, 'rollout');
    const place = grouping === 'group' ? `${DATA.stages[group[0].s].name} ${whole(group[0].p)} · ` : '';
    const node = element('article', { class: 'task card' }, element('div', { class: 'top' },
      element('div', { class: 'prompt', tabindex: task.prompt.length > 400 ? 0 : null }, task.prompt),
      element('div', { class: 'facts' }, ...(task.truth === null ? [] : ['truth ', element('b', {}, task.truth), ' · ']),
        `${place}mean reward ${mean === null ? 'none' : number(mean)} · ${count}`)));
    const rows = this.sorted(group, SORTS[this.view.sort]);
    node.append(...rows.slice(0, ROLLOUTS_A_TASK).map((row) => this.rollout(row, false)));
    if (rows.length > ROLLOUTS_A_TASK) node.append(this.more(rows, ROLLOUTS_A_TASK));
    return node;
  }

  // The button that shows the next rollouts of a task, ROLLOUTS_A_PAGE at a time.
  more(rows, from) {
    const next = rows.slice(from, from + ROLLOUTS_A_PAGE);
    const node = element('div', { class: 'more' }, element('button', { type: 'button', onclick: () => {
      node.before(...next.map((row) => this.rollout(row, false)));
      if (from + next.length < rows.length) node.replaceWith(this.more(rows, from + next.length));
      else node.remove();
      this.recolour();
    } }, `Show ${whole(next.length)} more of ${whole(rows.length - from)}`));
    return node;
  }

  rollout(row, withPrompt) {
    const node = element('div', { class: 'rollout', 'data-row': this.data.rows.indexOf(row) });
    const { prompt } = this.data.tasks[row.k];
    const stage = DATA.stages[row.s];
    const line = element('div', { class: 'line', role: 'button', tabindex: 0, 'aria-expanded': 'false' },
      element('span', { class: 'muted step' }, DATA.stages.length > 1 ? `${stage.name} ${whole(row.p)}` : whole(row.p)),
      element('span', { class: `reward ${row.r > 0 ? 'ok' : 'no'}` }, row.r === null ? 'none' : `${row.r > 0 ? '✓' : '✗'} ${number(row.r)}`),
      element('span', { class: 'length' }, `${whole(row.t.length)}${row.f === 'length' ? ' cut' : ''}`),
      element('div', {}, withPrompt ? element('div', { class: 'muted small' }, prompt.length > 160 ? `${prompt.slice(0, 160)}…` : prompt) : null,
        this.tokens(row, TOKENS_A_LINE)),
      element('span', { class: 'chevron', 'aria-hidden': 'true' }, '▸'));
    const toggle = () => {
      const open = node.classList.toggle('open');
      line.setAttribute('aria-expanded', String(open));
      line.lastChild.textContent = open ? '▾' : '▸';
      line.querySelector('.tokens').replaceWith(this.tokens(row, open ? Infinity : TOKENS_A_LINE));
      node.querySelector('.detail')?.remove();
      if (open) node.append(this.detail(row));
      this.recolour();
    };
    line.addEventListener('click', () => { if (!window.getSelection().toString()) toggle(); });
    line.addEventListener('keydown', (event) => { if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); toggle(); } });
    node.append(line);
    return node;
  }

  tokens(row, count) {
    if (!row.t.length) return element('div', { class: 'tokens' }, row.q || '');
    const spans = row.t.slice(0, count).map((t, i) => element('span', { class: 'token', 'data-i': i },
      this.data.tokens[t][1].replaceAll('\n', '↵\n')));
    return element('div', { class: 'tokens' }, ...spans, row.t.length > count ? ' …' : null);
  }

  detail(row) {
    const facts = [['uid', row.u], ['finish reason', row.f], ['generated by version of step', row.v], ['response as text', row.q ?? this.text(row)]];
    for (const [scorer, score] of Object.entries(this.data.scores[row.c] ?? {})) {
      const parts = Object.entries(score.parts ?? {}).map(([name, value]) => `${name} ${number(value)}`).join(', ');
      const value = score.value === null ? 'none' : number(score.value);
      facts.push([`scorer ${scorer}`, `${value} (${score.status}${parts ? `: ${parts}` : ''})`]);
    }
    return element('div', { class: 'detail' }, ...facts.filter(([, value]) => value !== null && value !== undefined)
      .map(([name, value]) => element('div', {}, `${name} `, element('b', { class: 'mono' }, String(value)))));
  }

  // Colours the tokens on the page anew.
  recolour() {
    const { colour } = this.view;
    const limit = this.limits[colour];
    for (const node of this.list.querySelectorAll('.rollout')) {
      const row = this.data.rows[Number(node.dataset.row)];
      for (const span of node.querySelectorAll('.token')) {
        const value = colour === 'none' ? null : COLOURS[colour].of(row, Number(span.dataset.i));
        span.style.background = limit && value ? shade(value / limit) : '';
      }
    }
    this.scale.hidden = colour === 'none';
    const gradient = element('i', {});
    const stops = [-1, -0.75, -0.5, -0.25, -0.1, 0, 0.1, 0.25, 0.5, 0.75, 1];
    gradient.style.background = `linear-gradient(90deg, ${stops.map((v) => `${shade(v)} ${50 + 50 * v}%`).join(', ')})`;
    this.scale.replaceChildren(...(limit ? [`−${number(limit)}`, gradient, number(limit)] : ['all values are 0']));
  }

  hover(event) {
    const span = event.target.closest('.token');
    if (!span) return;
    const row = this.data.rows[Number(span.closest('.rollout').dataset.row)];
    const i = Number(span.dataset.i);
    const [id, text] = this.data.tokens[row.t[i]];
    const values = [['advantage', COLOURS.advantage.of(row, i)], ['sampler logprob', row.b?.[i]],
      ['trainer logprob', row.b && (row.d?.[i] ?? null) !== null ? row.b[i] + row.d[i] : undefined], ['trainer − sampler', row.d?.[i]]];
    const box = span.getBoundingClientRect();
    const rows = values.filter(([, v]) => v !== undefined && v !== null)
      .map(([name, v]) => element('div', { class: 'row' }, element('span', {}, name), element('b', {}, number(v))));
    showTip(box.left, box.bottom + 6, true, element('div', { class: 'mono' }, JSON.stringify(text)),
      element('div', { class: 'head' }, `token ${whole(i + 1)}${id === null ? '' : ` · id ${id}`}`), ...rows);
  }
}
