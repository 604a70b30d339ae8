// The rollouts: by task, by group or flat, sorted, filtered, paged; tokens coloured by what happened to them.

const TASKS_A_PAGE = 10;
const ROLLOUTS_A_PAGE = 60;
const ROLLOUTS_A_TASK = 8;
const TOKENS_A_LINE = 600; // a closed row shows three lines anyway; an opened one shows all its tokens

// What rollouts are shown under, and the noun of it in the count.
const GROUPINGS = { task: { of: (row) => row.k, noun: 'task' }, group: { of: (row) => row.g, noun: 'group' } };

const SORTS = { step: (row) => row.x, reward: (row) => row.r ?? -Infinity, length: (row) => row.t.length };

class Rollouts {
  constructor(data) {
    this.data = data;
    this.view = { sort: 'step', down: false, grouping: 'task', text: '', stage: '', outcome: '', page: 0,
      stepFrom: null, stepTo: null, rewardFrom: null, rewardTo: null };
    this.whole = Object.fromEntries(Object.entries(GROUPINGS).map(([name, { of }]) => [name, groupedBy(data.rows, of)]));
    this.tokens = new Tokens(data, Object.fromEntries(Object.keys(COLOURS).map((name) => [name, limitOf(data.rows, name)])));
    this.episodes = new Episodes(data, this.tokens.limits);
    data.rows.forEach((row, i) => { row.n = i; });
    this.list = element('div', { id: 'rollouts', onpointerover: (e) => this.tokens.hover(e), onpointerout: hideTip, onkeydown: (e) => this.key(e) });
    this.foot = element('div', { class: 'foot' });
    this.heads = Object.fromEntries(Object.keys(SORTS).map((name) => [name, element('button', {
      type: 'button', 'data-sort': name, onclick: () => this.sortBy(name),
    })]));
    this.columns = element('div', { class: 'columns' }, this.heads.step, this.heads.reward, this.heads.length, element('span', {}, 'Response'));
    this.node = element('div', {}, this.controls(), this.columns, this.list, this.foot);
    this.draw();
  }

  controls() {
    const change = (name) => (event) => this.change({ [name]: event.target.value });
    const option = (value, label) => element('option', { value }, label);
    let timer = 0;
    let typed = {};
    const later = (values) => {
      clearTimeout(timer);
      Object.assign(typed, values);
      timer = setTimeout(() => { this.change(typed); typed = {}; }, 150);
    };
    this.search = element('input', { type: 'search', placeholder: 'Filter by prompt, conversation or uid', 'aria-label': 'Filter rollouts', 'aria-keyshortcuts': '/',
      oninput: (event) => later({ text: event.target.value.toLowerCase() }) });
    const bound = (name, label) => element('input', { type: 'number', step: 'any', placeholder: label.split(' ')[1], 'aria-label': label,
      oninput: (event) => later({ [name]: event.target.value === '' ? null : Number(event.target.value) }) });
    const range = (noun, from, to) => element('label', {}, noun, bound(from, `${noun} from`), '–', bound(to, `${noun} to`));
    const stages = [...new Set(this.data.rows.map((row) => row.s))];
    const stage = element('select', { 'aria-label': 'Stage', onchange: change('stage') }, option('', 'all stages'),
      ...stages.map((i) => option(i, DATA.stages[i].name)));
    const outcome = element('select', { 'aria-label': 'Outcome', onchange: change('outcome') }, option('', 'all outcomes'),
      option('positive', 'reward above 0'), option('zero', 'reward 0 or less'), option('unscorable', 'without reward'), option('cut', 'cut at the limit'));
    const grouping = choice([['task', 'By task'], ['group', 'By group'], ['flat', 'All']], 'task', (grouping) => this.change({ grouping }), 'Grouping');
    return element('div', {},
      element('div', { class: 'bar' }, this.search, stages.length > 1 ? stage : null, outcome, range('step', 'stepFrom', 'stepTo'),
        range('reward', 'rewardFrom', 'rewardTo'), grouping),
      element('div', { class: 'bar' }, ...this.tokens.controls(() => this.recolour())));
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
    row.text ??= `${row.q ?? ''}\n${row.w ? row.w.map(([, , text]) => text ?? '').join('\n') : ''}\n${this.tokens.text(row)}`.toLowerCase();
    return row.text;
  }

  selected() {
    const { text, stage, outcome, stepFrom, stepTo, rewardFrom, rewardTo } = this.view;
    const outcomes = { positive: (r) => r.r > 0, zero: (r) => r.r !== null && r.r <= 0, unscorable: (r) => r.r === null, cut: (r) => r.f === 'length' };
    const within = (value, from, to) => (from === null || value >= from) && (to === null || value <= to);
    const ofReward = (value) => (rewardFrom === null && rewardTo === null) || (value !== null && within(value, rewardFrom, rewardTo));
    const has = (value) => Boolean(text) && value.toLowerCase().includes(text);
    const prompts = this.data.tasks.map((task) => has(task.prompt));
    const contexts = this.data.contexts.map(has);
    const named = (row) => text.includes('/') && String(row.u).toLowerCase().includes(text); // only uids have a slash in every run
    return this.data.rows.filter((row) => (stage === '' || row.s === Number(stage)) && (!outcome || outcomes[outcome](row))
      && within(row.p, stepFrom, stepTo) && ofReward(this.episodes.reward(row.e))
      && (!text || prompts[row.k] || contexts[row.o] || named(row) || this.text(row).includes(text)));
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
    this.order = grouped ? items.flatMap((group) => this.sorted(group, SORTS[this.view.sort])) : items;
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
        `${place}mean reward ${mean === null ? 'none' : number(mean)} · ${count}`,
        grouping === 'group' ? element('div', {}, this.opener(group[0], true)) : null)));
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
    const node = element('div', { class: 'rollout', 'data-row': row.n });
    const { prompt } = this.data.tasks[row.k];
    const stage = DATA.stages[row.s];
    const line = element('div', { class: 'line', role: 'button', tabindex: 0, 'aria-expanded': 'false' },
      element('span', { class: 'muted step' }, DATA.stages.length > 1 ? `${stage.name} ${whole(row.p)}` : whole(row.p)),
      element('span', { class: `reward ${row.r > 0 ? 'ok' : 'no'}` }, row.r === null ? 'none' : `${row.r > 0 ? '✓' : '✗'} ${number(row.r)}`),
      element('span', { class: 'length' }, `${whole(row.t.length)}${['length', 'steps'].includes(row.f) ? ' cut' : ''}${row.i ? ` · step ${row.i}` : ''}`),
      element('div', {}, withPrompt ? element('div', { class: 'muted small' }, prompt.length > 160 ? `${prompt.slice(0, 160)}…` : prompt) : null,
        this.line(row, TOKENS_A_LINE)),
      element('span', { class: 'chevron', 'aria-hidden': 'true' }, '▸'));
    const toggle = () => {
      const open = node.classList.toggle('open');
      line.setAttribute('aria-expanded', String(open));
      line.lastChild.textContent = open ? '▾' : '▸';
      line.querySelector('.tokens').replaceWith(this.line(row, open ? TOKENS_AT_ONCE : TOKENS_A_LINE));
      node.querySelector('.detail')?.remove();
      if (open) node.append(this.detail(row));
      this.recolour();
    };
    line.addEventListener('click', () => { if (!window.getSelection().toString()) toggle(); });
    line.addEventListener('keydown', (event) => { if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); toggle(); } });
    node.append(line);
    return node;
  }

  line(row, count) {
    if (!row.t.length) return element('div', { class: 'tokens' }, row.q || '');
    return this.tokens.draw(row, 0, row.t.length, count, (node) => this.tokens.paint(node));
  }

  // The button that opens the episode of a row, alone or with the others of its group.
  opener(row, beside) {
    return element('button', { type: 'button', class: beside ? 'beside' : 'conversation', onclick: () => this.episodes.open(row, this.order, beside) },
      beside ? 'Group side by side' : 'Conversation');
  }

  // Opens the episode that the page's address names: report.html#episode=UID.
  openLinked() {
    const uid = /^#episode=(.*)$/.exec(window.location.hash)?.[1];
    const row = uid && this.data.rows.find(({ u }) => encodeURIComponent(String(u)) === uid);
    if (row) this.episodes.open(row, this.order, false);
  }

  // Keys of the list: j and k move from row to row, v and g open the row's episode or group.
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !event.target.matches('.line')) return;
    const lines = [...this.list.querySelectorAll('.line')];
    const to = lines[lines.indexOf(event.target) + ({ j: 1, k: -1 }[event.key] ?? 0)];
    const row = this.data.rows[Number(event.target.parentNode.dataset.row)];
    if (event.key === 'v' || event.key === 'g') this.episodes.open(row, this.order, event.key === 'g');
    else if (event.key === 'j' || event.key === 'k') to?.focus();
    else return;
    event.preventDefault();
  }

  detail(row) {
    const facts = [['uid', row.u], ['step', row.i], ['finish reason', row.f], ['generated by version of step', row.v], ['response as text', row.q ?? this.tokens.text(row)]];
    for (const [scorer, score] of Object.entries(this.data.scores[row.c] ?? {})) {
      const parts = Object.entries(score.parts ?? {}).map(([name, value]) => `${name} ${number(value)}`).join(', ');
      const value = score.value === null ? 'none' : number(score.value);
      facts.push([`scorer ${scorer}`, `${value} (${score.status}${parts ? `: ${parts}` : ''})`]);
    }
    return element('div', { class: 'detail' }, element('div', { class: 'bar' }, this.opener(row, false), this.opener(row, true)),
      ...facts.filter(([, value]) => value !== null && value !== undefined)
        .map(([name, value]) => element('div', {}, `${name} `, element('b', { class: 'mono' }, String(value)))));
  }

  // Colours the tokens on the page anew.
  recolour() {
    this.tokens.paint(this.list);
    this.tokens.drawScale();
  }
}
