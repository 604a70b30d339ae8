// Elements, number formats and the tooltip. Text only ever enters the page as text nodes, and nothing in it is hidden.

const DATA = JSON.parse(document.getElementById('data').textContent);

// What is invisible or reorders text, except in an emoji: a policy could hide text with it, or show another text.
const HIDDEN = /(?![\t\n]|(?<=\p{Extended_Pictographic})\uFE0F|(?<=\p{Extended_Pictographic}\uFE0F?)\u200D(?=\p{Extended_Pictographic}))[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]/gu;

// The text with the codes of its hidden characters in their places.
function visible(text) {
  return text.replace(HIDDEN, (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}⟩`);
}

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  return fill(node, attributes, children);
}

function drawn(tag, attributes, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  return fill(node, attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : visible(String(child)))));
  return node;
}

// A row of buttons of which one is pressed. options: [[value, label], ...].
function choice(options, chosen, onchoose, label) {
  const buttons = options.map(([value, text]) => element('button', {
    type: 'button', 'data-value': value, 'aria-pressed': String(value === chosen),
    onclick: () => {
      buttons.forEach((b) => b.setAttribute('aria-pressed', String(b.dataset.value === value)));
      onchoose(value);
    },
  }, text));
  return element('span', { class: 'choice', role: 'group', 'aria-label': label }, ...buttons);
}

function whole(value) {
  return value.toLocaleString('en-US');
}

// Four significant digits, short: 0.4213, 12.3, 4,096, 1.2e-6.
function number(value) {
  if (value === null || value === undefined) return 'not finite';
  const size = Math.abs(value);
  if (value === 0) return '0';
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2).replace(/\.?0+e/, 'e').replace('e+', 'e');
  if (Number.isInteger(value)) return whole(value);
  if (size >= 1000) return whole(Math.round(value));
  return String(Number(value.toPrecision(4)));
}

function plural(count, noun) {
  return `${whole(count)} ${noun}${count === 1 ? '' : 's'}`;
}

// Shows the tooltip right of a point of the window, or below it; on the other side where it would leave the window.
function showTip(x, y, below, ...children) {
  const tip = document.getElementById('tip');
  (document.querySelector('dialog[open]') ?? document.body).append(tip); // a modal dialog covers what is outside it
  tip.replaceChildren(...children);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const fits = x + width < window.innerWidth - 8;
  const left = fits ? x : below ? window.innerWidth - 8 - width : x - 32 - width;
  const top = below ? (y + height < window.innerHeight - 8 ? y : y - height - 36) : Math.min(y - height / 2, window.innerHeight - height - 8);
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

function hideTip() {
  document.getElementById('tip').hidden = true;
}

// Index in the sorted numbers `values` that is nearest to `target`.
function nearest(values, target) {
  let low = 0;
  let high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < target) low = middle + 1;
    else high = middle;
  }
  return low > 0 && target - values[low - 1] <= values[low] - target ? low - 1 : low;
}
