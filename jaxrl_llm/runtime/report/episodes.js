// Episodes as conversations in a dialog: one, or those of a group side by side.

const EPISODES_BESIDE = 4;
const TURNS_AT_ONCE = 50;
const TEXT_AT_ONCE = 20000;
const PREVIEW = 140;
const MESSAGES_AT_MOST = 40;
const CALLS_AT_MOST = 20;

// How chat templates mark messages: what opens one, what ends its role, and what ends it.
const MARKS = [
  ['<|im_start|>', '\n', ['<|im_end|>']],
  ['<|start_header_id|>', '<|end_header_id|>', ['<|eot_id|>', '<|eom_id|>']],
  ['<start_of_turn>', '\n', ['<end_of_turn>']],
];

// The messages of a text that a chat template rendered, as [{role, text}]; text without marks is a message without a role.
// The last of MESSAGES_AT_MOST has all that follows.
function messagesOf(text) {
  const marks = MARKS.find(([open]) => text.includes(open));
  if (!marks) return [{ role: null, text }];
  const [open, middle, ends] = marks;
  const [before, ...marked] = text.split(open);
  const pieces = [...marked.slice(0, MESSAGES_AT_MOST - 1), ...(marked.length < MESSAGES_AT_MOST ? [] : [marked.slice(MESSAGES_AT_MOST - 1).join(open)])];
  const bare = ends.reduce((rest, end) => rest.replaceAll(end, ''), before);
  const messages = bare.trim() ? [{ role: null, text: bare.trim() }] : [];
  for (const piece of pieces) {
    const at = piece.indexOf(middle);
    const role = at < 0 ? piece : piece.slice(0, at);
    const named = role.length <= 40 && /^[\w .-]+$/.test(role);
    const body = ends.reduce((rest, end) => rest.replaceAll(end, ''), named ? piece.slice(at < 0 ? piece.length : at + middle.length) : piece);
    if (body.trim() || !named) messages.push({ role: named ? role.trim() : null, text: body.trim() });
  }
  return messages;
}

// The tool calls in a turn of the policy, as this page reads them: [[name, arguments as text]]; a name is null where a call cannot be read.
function callsOf(text) {
  const after = text.includes('</think>') ? text.slice(text.lastIndexOf('</think>')) : text;
  const tagged = [...after.matchAll(/<tool_call>([\s\S]*?)(?:<\/tool_call>|$)/g)].map((match) => match[1]);
  const bare = after.replace('<|python_tag|>', '').replace(/<\|\w+\|>\s*$/, '').trim();
  const bodies = tagged.length ? tagged : bare.startsWith('{') && bare.includes('"name"') ? [bare] : [];
  return bodies.map((body) => {
    try {
      const { name, arguments: given, parameters } = JSON.parse(body);
      return typeof name === 'string' ? [name, JSON.stringify(given ?? parameters ?? {})] : [null, body];
    } catch {
      return [null, body];
    }
  });
}

// A text, TEXT_AT_ONCE characters at a time.
function longText(text) {
  const node = element('pre', { dir: 'auto', class: 'text' });
  const add = (from) => {
    node.append(visible(text.slice(from, from + TEXT_AT_ONCE)));
    const left = text.length - from - TEXT_AT_ONCE;
    if (left <= 0) return;
    const more = element('button', { type: 'button', class: 'link', onclick: () => { more.remove(); add(from + TEXT_AT_ONCE); } },
      ` … ${plural(left, 'more character')}`);
    node.append(more);
  };
  add(0);
  return node;
}

// What the policy read: the role and the beginning, and the whole when it is unfolded.
function folded(role, text, { open = false, facts = '' } = {}) {
  const line = text.slice(0, PREVIEW + 1).replaceAll(/\s+/g, ' ');
  const body = element('div', {});
  const node = element('details', { class: 'turn read', ontoggle: () => { if (node.open && !body.firstChild) body.append(longText(text)); } },
    element('summary', {}, element('b', {}, role), element('span', { class: 'preview' }, text.length > PREVIEW ? `${line.slice(0, PREVIEW)}…` : line),
      element('span', { class: 'muted facts' }, facts || plural(text.length, 'character'))), body);
  if (open) { node.open = true; body.append(longText(text)); }
  return node;
}

class Episodes {
  constructor(data, limits) {
    this.data = data;
    this.tokens = new Tokens(data, limits);
    this.rows = groupedBy(data.rows, (row) => row.e);
    for (const rows of this.rows.values()) if (rows.length > 1) rows.sort((a, b) => parseInt(a.i, 10) - parseInt(b.i, 10));
    this.groups = new Map();
    for (const [episode, [row]] of this.rows) {
      if (!this.groups.has(row.g)) this.groups.set(row.g, []);
      this.groups.get(row.g).push(episode);
    }
    this.view = { order: [], at: 0, beside: false, count: EPISODES_BESIDE, unfolded: false };
  }

  // The reward of an episode, which is in the row of its last step.
  reward(episode) {
    return this.rows.get(episode).at(-1).r;
  }

  // Opens the episode of a row, or its group. `order` are the rows among which the previous and next episodes are found.
  open(row, order, beside) {
    const episodes = [...new Set(order.map(({ e }) => e))];
    if (!episodes.includes(row.e)) episodes.unshift(row.e);
    Object.assign(this.view, { order: episodes, at: episodes.indexOf(row.e), beside, count: EPISODES_BESIDE });
    if (!this.dialog) this.build();
    if (!this.dialog.open) this.dialog.showModal();
    this.draw();
    this.body.focus();
  }

  build() {
    this.title = element('h2', {});
    this.place = element('span', { class: 'muted', role: 'status' });
    this.body = element('div', { class: 'episodes', tabindex: -1, onpointerover: (e) => this.tokens.hover(e), onpointerout: hideTip, onscroll: hideTip });
    this.mode = choice([['false', 'One'], ['true', 'Group']], '', (value) => this.show({ beside: value === 'true' }), 'Episodes shown');
    this.fold = element('button', { type: 'button', 'aria-pressed': 'false', onclick: () => this.show({ unfolded: !this.view.unfolded }) }, 'Unfold');
    const step = (by) => () => this.move(by);
    this.dialog = element('dialog', { id: 'episode', 'aria-label': 'Episode', onclose: () => this.closed(), onkeydown: (e) => this.key(e) },
      element('div', { class: 'top' }, this.title, element('button', { type: 'button', class: 'close', 'aria-label': 'Close', onclick: () => this.dialog.close() }, '✕')),
      element('div', { class: 'bar' }, element('button', { type: 'button', 'aria-keyshortcuts': 'ArrowLeft', onclick: step(-1) }, '‹ Previous'), this.place,
        element('button', { type: 'button', 'aria-keyshortcuts': 'ArrowRight', onclick: step(1) }, 'Next ›'), this.mode, this.fold,
        ...this.tokens.controls(() => this.paint()),
        element('span', { class: 'muted small keys' }, '← → previous, next · g group · o unfold · c colour · Esc close')),
      this.body);
    document.getElementById('report').append(this.dialog);
  }

  closed() {
    hideTip();
    document.body.append(document.getElementById('tip'));
    this.body.replaceChildren();
    window.history.replaceState(null, '', ' ');
  }

  show(values) {
    Object.assign(this.view, values);
    this.draw();
  }

  // To the previous or next episode, or to that of the previous or next group.
  move(by) {
    const { order, at, beside } = this.view;
    const group = (i) => this.rows.get(order[i])[0].g;
    let to = at + by;
    while (beside && to >= 0 && to < order.length && group(to) === group(at)) to += by;
    if (to >= 0 && to < order.length) this.show({ at: to, count: EPISODES_BESIDE });
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches('input, select')) return;
    const colours = [...this.tokens.buttons.children];
    const pressed = colours.findIndex((button) => button.getAttribute('aria-pressed') === 'true');
    const actions = { ArrowLeft: () => this.move(-1), ArrowRight: () => this.move(1), g: () => this.show({ beside: !this.view.beside }),
      o: () => this.show({ unfolded: !this.view.unfolded }), c: () => colours[(pressed + 1) % colours.length].click() };
    if (!(event.key in actions)) return;
    actions[event.key]();
    event.preventDefault();
  }

  draw() {
    const { order, at, beside, count, unfolded } = this.view;
    const [first] = this.rows.get(order[at]);
    const group = this.groups.get(first.g);
    const shown = beside ? [order[at], ...group.filter((episode) => episode !== order[at])].slice(0, count) : [order[at]];
    const stage = DATA.stages[first.s];
    const { prompt } = this.data.tasks[first.k];
    hideTip();
    this.title.replaceChildren(visible(`${stage.name} ${whole(first.p)} · ${prompt.length > 90 ? `${prompt.slice(0, 90)}…` : prompt}`));
    this.place.replaceChildren(beside ? `${whole(shown.length)} of ${plural(group.length, 'episode')} of the group` : `${whole(at + 1)} of ${plural(order.length, 'episode')}`);
    for (const button of this.mode.children) button.setAttribute('aria-pressed', String(button.dataset.value === String(beside)));
    this.fold.setAttribute('aria-pressed', String(unfolded));
    this.body.replaceChildren(...shown.map((episode) => this.episode(episode)));
    if (beside && shown.length < group.length) {
      const next = Math.min(EPISODES_BESIDE, group.length - shown.length);
      this.body.append(element('button', { type: 'button', class: 'link next', onclick: () => this.show({ count: count + next }) }, `Show ${whole(next)} more`));
    }
    this.body.scrollTo(0, 0);
    this.paint();
    window.history.replaceState(null, '', `#episode=${encodeURIComponent(String(first.u))}`);
  }

  paint() {
    this.tokens.paint(this.body);
    this.tokens.drawScale();
  }

  episode(episode) {
    const rows = this.rows.get(episode);
    const last = rows.at(-1);
    const parts = rows.flatMap((row) => this.step(row, rows));
    const count = rows.reduce((sum, row) => sum + turnsOf(row).filter(({ observed }) => !observed).length, 0);
    const facts = [plural(count, 'turn'), plural(rows.reduce((sum, row) => sum + row.t.length, 0), 'token'), last.f, versionsOf(rows)];
    const said = element('div', { class: 'said' });
    const add = (from) => {
      said.append(...parts.slice(from, from + TURNS_AT_ONCE).map((part) => part()));
      const left = parts.length - from - TURNS_AT_ONCE;
      if (left <= 0) return;
      const more = element('button', { type: 'button', class: 'link', onclick: () => { more.remove(); add(from + TURNS_AT_ONCE); this.paint(); } },
        `Show ${whole(Math.min(left, TURNS_AT_ONCE))} more of ${plural(left, 'turn')}`);
      said.append(more);
    };
    add(0);
    return element('article', { class: 'episode card', 'data-episode': episode },
      element('header', {}, element('div', {}, rewardOf(last.r), element('span', { class: 'muted' }, facts.filter((fact) => fact !== null && fact !== undefined).join(' · '))),
        element('div', { class: 'uid mono' }, String(rows[0].u)), ...this.scores(last)), said);
  }

  scores(row) {
    return Object.entries(this.data.scores[row.c] ?? {}).map(([scorer, score]) => {
      const parts = Object.entries(score.parts ?? {}).map(([name, value]) => `${name} ${number(value)}`).join(', ');
      const status = score.status === 'ok' ? '' : ` · ${score.status}`;
      return element('div', { class: 'small muted' }, `${scorer} `, element('b', {}, score.value === null ? 'none' : number(score.value)), `${status}${parts ? ` · ${parts}` : ''}`);
    });
  }

  // What a row shows, as functions that make the nodes: its prompt, its turns.
  step(row, rows) {
    const { unfolded, beside } = this.view;
    const opens = (role, text) => unfolded || (!beside && (text.length <= PREVIEW || (role === 'user' && text.length <= 2000)));
    const context = this.data.contexts[row.o] ?? this.data.tasks[row.k].prompt;
    const messages = messagesOf(context);
    const turns = turnsOf(row);
    let turn = 0;
    const parts = row === rows[0] ? messages.map(({ role, text }) => () => folded(role ?? 'prompt', text, { open: opens(role, text) }))
      : [() => folded(`prompt of step ${row.i}`, context, { open: unfolded, facts: 'a new prompt' })];
    for (const { observed, from, to, text } of turns) {
      const number = observed ? null : turn++;
      parts.push(() => (observed ? this.observation(row, from, to, text) : this.turn(row, from, to, number)));
    }
    return parts;
  }

  observation(row, from, to, text) {
    const messages = messagesOf(text ?? this.tokens.text(row, from, to));
    const facts = plural(to - from, 'token');
    const nodes = messages.filter((message) => message.text || messages.length === 1)
      .map((message) => folded(message.role ?? 'observation', message.text, { open: this.view.unfolded, facts }));
    return nodes.length === 1 ? nodes[0] : element('div', { class: 'several' }, ...nodes);
  }

  turn(row, from, to, number) {
    const calls = callsOf(this.tokens.text(row, from, to));
    const given = row.h?.[number];
    return element('div', { class: 'turn policy', 'data-row': row.n },
      element('div', { class: 'head' }, element('b', {}, 'policy'), element('span', { class: 'muted' }, `turn ${whole(number + 1)} · ${plural(to - from, 'token')}`),
        given === undefined ? null : rewardOf(given, true)),
      ...calls.slice(0, CALLS_AT_MOST).map(([name, text]) => element('div', { class: `call${name === null ? ' no' : ''}` }, element('b', {}, name ?? 'unreadable call'),
        ` ${text.length > 400 ? `${text.slice(0, 400)}…` : text}`)),
      calls.length > CALLS_AT_MOST ? element('div', { class: 'muted small' }, plural(calls.length - CALLS_AT_MOST, 'more call')) : null,
      this.tokens.draw(row, from, to, TOKENS_AT_ONCE, (node) => this.tokens.paint(node)));
  }
}

// The versions that sampled the tokens of an episode, from the oldest to the newest.
function versionsOf(rows) {
  const steps = rows.flatMap((row) => (row.l ? row.l.map(([, , step]) => step) : [row.v])).filter((step) => typeof step === 'number').sort((a, b) => a - b);
  if (!steps.length) return null;
  return steps[0] === steps.at(-1) ? `version ${steps[0]}` : `versions ${steps[0]} to ${steps.at(-1)}`;
}

// The turns of a row: whether the policy read or sampled them, their tokens [from, to), and the text where the tokens do not spell it.
function turnsOf(row) {
  let from = 0;
  return (row.w ?? [[0, row.t.length]]).map(([observed, to, text]) => {
    const turn = { observed: observed === 1, from, to, text };
    from = to;
    return turn;
  });
}

function rewardOf(value, ofTurn = false) {
  if (value === null) return element('b', { class: 'reward no' }, 'no reward');
  const sign = ofTurn && value > 0 ? '+' : '';
  return element('b', { class: `reward ${value > 0 ? 'ok' : 'no'}` }, ofTurn ? `${sign}${number(value)}` : `${value > 0 ? '✓' : '✗'} ${number(value)}`);
}
