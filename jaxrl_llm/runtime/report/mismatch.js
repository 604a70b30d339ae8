// Trainer against sampler: their difference over the steps, and by token over the rollouts that the page holds.

const TOKENS_SHOWN = 12;

// Of each token: how often it was sampled, the sum and the largest of |trainer − sampler|.
function differences(data) {
  const found = new Map();
  for (const row of data.rows) {
    row.t.forEach((token, i) => {
      const difference = row.d?.[i] ?? null;
      if (difference === null) return;
      const entry = found.get(token) ?? { token, count: 0, sum: 0, largest: 0 };
      entry.count += 1;
      entry.sum += Math.abs(difference);
      entry.largest = Math.max(entry.largest, Math.abs(difference));
      found.set(token, entry);
    });
  }
  return [...found.values()].sort((a, b) => b.sum / b.count - a.sum / a.count || b.count - a.count);
}

function byToken(data) {
  const found = differences(data);
  if (!found.length) return null;
  const body = element('tbody', {});
  const seen = element('span', { class: 'muted small' });
  const show = (least) => {
    const often = found.filter((entry) => entry.count >= least);
    const cell = (value) => element('td', { class: 'number' }, value);
    body.replaceChildren(...often.slice(0, TOKENS_SHOWN).map(({ token, count, sum, largest }) => {
      const [id, text] = data.tokens[token];
      return element('tr', {}, element('td', { class: 'text', title: id === null ? null : `id ${id}` }, JSON.stringify(text)),
        cell(whole(count)), cell(number(sum / count)), cell(number(largest)));
    }));
    seen.textContent = `${whole(Math.min(TOKENS_SHOWN, often.length))} of ${plural(often.length, 'token')}, by mean |trainer − sampler|`;
  };
  const least = element('select', { 'aria-label': 'Minimum count', onchange: (event) => show(Number(event.target.value)) },
    ...[1, 10, 100, 1000].filter((n) => n === 1 || found.some((entry) => entry.count >= n)).map((n) => element('option', { value: n }, whole(n))));
  const colour = element('button', { type: 'button', onclick: () => {
    const samples = document.getElementById('samples');
    samples.querySelector('button[data-value=difference]').click();
    samples.scrollIntoView();
  } }, 'Colour rollouts by difference');
  const head = ['Sampled', 'Mean |difference|', 'Largest'].map((name) => element('th', { class: 'number' }, name));
  show(1);
  const node = element('div', { class: 'card by-token' }, element('div', { class: 'bar' }, element('h3', {}, 'By token'), seen, element('span', { class: 'space' }),
    element('label', {}, 'sampled at least', least, 'times'), colour),
  element('div', { class: 'scroll' }, element('table', { id: 'tokens' }, element('thead', {}, element('tr', {}, element('th', {}, 'Token'), ...head)), body)));
  return node;
}

// The budgets of the run's configuration, as far as they are there.
function budgets() {
  const { warn_k3_kl: kl, warn_max_difference: largest } = DATA.config?.rollout?.mismatch ?? {};
  const parts = [['k3_kl', kl], ['largest |difference|', largest]].filter(([, budget]) => typeof budget === 'number')
    .map(([name, budget]) => `${name} ${number(budget)}`);
  return parts.length ? ` Warnings are logged above ${parts.join(', ')}.` : '';
}

function mismatch() {
  const all = { zero: true, full: true }; // the one step that stands out is what is looked for
  const charts = [
    chartOf('KL from sampler to trainer', ['rollout_corr/k3_kl'], all),
    chartOf('Effective sample size', ['rollout_corr/rollout_is_eff_sample_size'], { range: [0, 1] }),
    chartOf('Mean |difference|', ['sampling/sampling_logp_difference/mean'], all),
    chartOf('Largest |difference|', ['sampling/sampling_logp_difference/max'], all),
  ].filter(Boolean);
  const table = byToken(DATA.rollouts);
  if (!charts.length && !table) return null;
  return section('Trainer against sampler', 'mismatch', element('p', { class: 'muted small' },
    `Logprobs (nats) of the same sampled tokens, the trainer's before the batch and the sampler's.${budgets()}`),
  charts.length ? element('div', { class: 'charts' }, ...charts) : null, table);
}
