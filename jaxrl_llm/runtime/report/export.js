// Charts as files: their numbers as CSV, and their drawing as PNG, made in the browser.

const PNG_SCALE = 2;
const DRAWN_STYLES = ['fill', 'fill-opacity', 'stroke', 'stroke-width', 'stroke-dasharray', 'stroke-linejoin', 'stroke-linecap', 'opacity',
  'font-family', 'font-size', 'font-weight', 'text-anchor', 'font-variant-numeric'];

function save(name, blob) {
  const url = URL.createObjectURL(blob);
  element('a', { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

function fileName(title, ending) {
  return `${DATA.name} ${title}`.replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-+|-+$/g, '').slice(0, 100) + ending;
}

// A cell of CSV. Text that a spreadsheet would take for a formula gets an apostrophe; a spreadsheet
// may also take a semicolon or a tab for the end of a cell, so these are quoted.
function csvCell(value) {
  if (value === null || value === undefined) return '';
  if (typeof value === 'number') return String(value);
  const text = /^[=+\-@\t\r\n＝＋－＠]/.test(value) ? `'${value}` : String(value);
  return /[",;\t\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function csvOf(rows) {
  return rows.map((row) => row.map(csvCell).join(',')).join('\r\n') + '\r\n';
}

// A copy of the drawing with its computed style in it, for an image has no style sheet.
function frozen(svg) {
  const copy = svg.cloneNode(true);
  const [from, to] = [[svg, ...svg.querySelectorAll('*')], [copy, ...copy.querySelectorAll('*')]];
  from.forEach((node, i) => {
    const style = getComputedStyle(node);
    for (const name of DRAWN_STYLES) to[i].style.setProperty(name, style.getPropertyValue(name));
    to[i].removeAttribute('class');
  });
  return copy;
}

// The title, the names of the lines and the drawing of a chart, on the card's background.
async function pngOf(title, legend, svg) {
  const { width, height } = svg.getBoundingClientRect();
  const copy = frozen(svg);
  copy.setAttribute('xmlns', 'http://www.w3.org/2000/svg');
  copy.setAttribute('width', width);
  copy.setAttribute('height', height);
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  await image.decode();
  const [margin, line] = [14, 18];
  const rows = [];
  const canvas = element('canvas', {});
  const pen = canvas.getContext('2d');
  const root = getComputedStyle(document.body);
  pen.font = `12.5px ${root.fontFamily}`;
  for (const entry of legend) {
    const wide = pen.measureText(entry.name).width + 34;
    if (!rows.length || rows.at(-1).wide + wide > width) rows.push({ wide: 0, entries: [] });
    rows.at(-1).entries.push({ ...entry, x: rows.at(-1).wide });
    rows.at(-1).wide += wide;
  }
  const top = margin + 22 + rows.length * line;
  canvas.width = PNG_SCALE * (width + 2 * margin);
  canvas.height = PNG_SCALE * (top + height + margin);
  pen.scale(PNG_SCALE, PNG_SCALE);
  pen.fillStyle = getComputedStyle(svg.closest('.card')).backgroundColor;
  pen.fillRect(0, 0, width + 2 * margin, top + height + margin);
  pen.fillStyle = root.color;
  pen.font = `600 15px ${root.fontFamily}`;
  pen.fillText(title, margin, margin + 12);
  pen.font = `12.5px ${root.fontFamily}`;
  rows.forEach((row, i) => row.entries.forEach((entry) => {
    const y = margin + 34 + i * line;
    pen.fillStyle = root.getPropertyValue(`--c${entry.colour}`);
    pen.fillRect(margin + entry.x, y - 10, 11, 11);
    pen.fillStyle = root.color;
    pen.fillText(entry.name, margin + entry.x + 17, y);
  }));
  pen.drawImage(image, margin, top, width, height);
  return new Promise((done) => canvas.toBlob(done, 'image/png'));
}

// The button that saves `rows()` as CSV.
function csvButton(title, rows) {
  return element('button', { type: 'button', 'data-export': 'CSV', title: 'save the numbers as CSV', 'aria-label': `${title}: save the numbers as CSV`,
    onclick: () => save(fileName(title, '.csv'), new Blob([csvOf(rows())], { type: 'text/csv' })) }, 'CSV');
}

// The buttons of a chart that save it. `rows` returns the lines of its CSV, `legend` its [{name, colour}], svg its drawing.
function exports(title, rows, legend, svg) {
  const label = 'save the drawing as PNG';
  return element('span', { class: 'exports' }, csvButton(title, rows),
    element('button', { type: 'button', 'data-export': 'PNG', title: label, 'aria-label': `${title}: ${label}`,
      onclick: async () => save(fileName(title, '.png'), await pngOf(title, legend(), svg())) }, 'PNG'));
}
