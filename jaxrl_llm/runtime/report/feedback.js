// A page on which people judge the samples that wait for delayed rewards, one by one or in pairs.
// Judgements stay in the page until they are saved as JSON Lines.

const SINGLE = [['1', 1, 'good'], ['5', 0.5, 'in between'], ['0', 0, 'bad']];
const PAIRED = [['1', 'left', 'left is better'], ['0', 'tie', 'tie'], ['2', 'right', 'right is better']];
const KEYS = { ArrowLeft: '1', ArrowRight: '2', '=': '0' };

// Samples of a group next to each other in a ring, so that each is compared twice; in a group of two, once.
function pairsOf(group) {
  const count = group.samples.length;
  const starts = count > 2 ? [...group.samples.keys()] : count === 2 ? [0] : [];
  return starts.map((i) => ({ group, shown: [group.samples[i], group.samples[(i + 1) % count]] }));
}

const ITEMS = {
  single: DATA.groups.flatMap((group) => group.samples.map((sample) => ({ group, shown: [sample] }))),
  pairs: DATA.groups.flatMap(pairsOf),
};
const state = { mode: 'single', place: { single: 0, pairs: 0 }, answers: { single: new Map(), pairs: new Map() }, unsaved: { single: false, pairs: false } };
const who = element('input', { type: 'search', id: 'who', maxlength: '200', placeholder: 'Your name', 'aria-label': 'Your name', autocomplete: 'off' });
const view = element('div', { id: 'item' });
const progress = element('span', { id: 'progress', class: 'muted', role: 'status' });

function named() {
  return visible(who.value.replace(/\p{Z}+/gu, ' ').trim());
}

function rows() {
  const shared = (group, who) => ({ who, attempt: group.attempt, scorer: Object.keys(group.scorers)[0] });
  const singles = [...state.answers.single].map(([i, { value, who }]) => {
    const { group, shown } = ITEMS.single[i];
    return { uid: shown[0].uid, value, ...shared(group, who) };
  });
  const pairs = [...state.answers.pairs].map(([i, { value, who }]) => {
    const { group, shown } = ITEMS.pairs[i];
    const [chosen, rejected] = value === 'right' ? [shown[1], shown[0]] : shown;
    return { chosen: chosen.uid, rejected: rejected.uid, tie: value === 'tie', ...shared(group, who) };
  });
  return state.mode === 'single' ? singles : pairs;
}

function saveAll() {
  if (!named()) { who.focus(); return; }
  save(fileName(`${state.mode} ${named()}`, '.jsonl'), new Blob([rows().map((row) => JSON.stringify(row) + '\n').join('')], { type: 'application/jsonl' }));
  state.unsaved[state.mode] = false;
}

function move(by) {
  const last = ITEMS[state.mode].length - 1;
  state.place[state.mode] = Math.max(0, Math.min(last, state.place[state.mode] + by));
  draw();
}

function judge(key) {
  const answer = (state.mode === 'single' ? SINGLE : PAIRED).find(([name]) => name === key);
  if (!answer || !ITEMS[state.mode].length) return;
  if (!named()) { who.focus(); return; }
  state.answers[state.mode].set(state.place[state.mode], { value: answer[1], who: named() });
  state.unsaved[state.mode] = true;
  move(1);
}

function message({ role, content }) {
  const text = typeof content === 'string' ? content : JSON.stringify(content);
  return element('div', { class: 'said' }, element('div', { class: 'muted small' }, String(role)), element('pre', { dir: 'auto' }, text));
}

function draw() {
  const items = ITEMS[state.mode], place = state.place[state.mode], answers = state.answers[state.mode];
  progress.textContent = items.length ? `${place + 1} of ${items.length}, ${answers.size} judged` : 'Nothing to judge';
  view.replaceChildren();
  if (!items.length) return;
  const { group, shown } = items[place];
  const side = ['left', 'right'];
  view.append(
    element('div', { class: 'card judged' }, element('div', { class: 'muted small' }, group.name), ...group.prompt.map(message)),
    element('div', { class: `answers of${shown.length}` }, ...shown.map((sample, i) => element('div', { class: 'card judged answer', 'data-uid': sample.uid },
      element('div', { class: 'muted small' }, shown.length > 1 ? side[i] : 'answer'),
      ...(sample.turns ?? []).map(message), sample.turns ? null : element('pre', { dir: 'auto' }, sample.text)))),
    element('div', { class: 'bar' }, ...(state.mode === 'single' ? SINGLE : PAIRED).map(([key, value, label]) => element('button', {
      type: 'button', 'data-key': key, 'aria-pressed': String(answers.get(place)?.value === value), onclick: () => judge(key) }, `${key}  ${label}`))));
}

document.getElementById('report').append(
  element('header', {}, element('h1', {}, DATA.name), element('p', { class: 'sub' },
    `${whole(DATA.groups.length)} groups wait. Keys: 1 and 0 judge, 5 is in between; in pairs 1 or ← is left, 2 or → is right, 0 is a tie. Backspace goes back, n goes on, s saves.`)),
  element('div', { class: 'bar judging' }, who, choice([['single', 'One by one'], ['pairs', 'Pairs']], 'single', (mode) => { state.mode = mode; draw(); }, 'Mode'),
    progress, element('span', { class: 'space' }), element('button', { type: 'button', id: 'save', onclick: saveAll }, 'Save')),
  view);
document.addEventListener('keydown', (event) => {
  if (event.target === who || event.ctrlKey || event.metaKey || event.altKey) return;
  const key = KEYS[event.key] && state.mode === 'pairs' ? KEYS[event.key] : event.key;
  if (key === 'Backspace') move(-1);
  else if (key === 'n') move(1);
  else if (key === 's') saveAll();
  else if ('0125'.includes(key)) judge(key);
  else return;
  event.preventDefault();
});
window.addEventListener('beforeunload', (event) => { if (state.unsaved.single || state.unsaved.pairs) event.preventDefault(); });
draw();
