// Elements are made here and nowhere else: texts become text nodes, never markup, and show what they are made of.
import { visible, relative, exact } from './format.js';

const properties = new Set(['value', 'checked', 'disabled', 'hidden', 'selected', 'open', 'tabIndex', 'className', 'htmlFor', 'type', 'title']);

// h makes an element. Attributes whose value is null or false are left out; on... is a listener; texts among the children go
// through visible().
export function h(tag, attributes, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) e.addEventListener(name.slice(2), value);
    else if (name === 'title') e.title = visible(value);
    else if (name === 'aria-label') e.setAttribute(name, visible(value));
    else if (properties.has(name)) e[name] = value;
    else e.setAttribute(name, value === true ? '' : String(value));
  }
  add(e, children);
  return e;
}

function add(e, children) {
  for (const c of children) {
    if (c === null || c === undefined || c === false) continue;
    if (Array.isArray(c)) add(e, c);
    else e.append(c instanceof Node ? c : visible(c));
  }
}

export function time(t) {
  if (!t) return h('span', { className: 'none' }, '–');
  return h('time', { datetime: t, title: exact(t) }, relative(t));
}

// since is a time of which the exact one matters.
export function at(t) {
  if (!t) return h('span', { className: 'none' }, '–');
  return h('time', { datetime: t, title: relative(t) }, exact(t).slice(0, 19));
}

export function status(s) {
  return h('span', { className: 'status', 'data-status': s }, s);
}

export function tags(list) {
  return (list ?? []).map((t) => h('span', { className: 'tag' }, h('bdi', null, t)));
}

// text is one that somebody has chosen, in whatever direction it is written.
export function text(s, none = '–') {
  return s ? h('bdi', null, s) : h('span', { className: 'none' }, none);
}

export function code(s) {
  return h('code', null, h('bdi', null, s));
}

export const short = (id) => String(id ?? '').slice(0, 12);

export function sandboxLink(name, label = name) {
  return h('a', { href: `#/sandbox/${encodeURIComponent(name)}` }, label);
}

// table makes one with a caption for those who do not see it. Columns are {name, cell(row), className}.
export function table(caption, columns, rows, rowClass) {
  return h('div', { className: 'scroll', role: 'region', 'aria-label': caption, tabIndex: 0 },
    h('table', null, h('caption', { className: 'unseen' }, caption),
      h('thead', null, h('tr', null, columns.map((c) => h('th', { scope: 'col', class: c.className }, c.name)))),
      h('tbody', null, rows.map((r) => h('tr', { class: rowClass?.(r) }, columns.map((c) => h('td', { class: c.className }, c.cell(r))))))));
}

export function facts(pairs) {
  return h('dl', { className: 'facts' }, pairs.filter(([, v]) => v !== null && v !== undefined && v !== false)
    .map(([name, value]) => h('div', null, h('dt', null, name), h('dd', null, value))));
}

// notice puts an error where it is read aloud, with its code and what can be done about it.
export function notice(what, error) {
  const box = document.getElementById('notices');
  const key = `${what} ${error.message}`;
  for (const old of [...box.children]) if (old.dataset.key === key) old.remove();
  const e = h('div', { className: 'notice' },
    h('p', null, h('strong', null, what), ': ', h('bdi', null, error.message)),
    error.remedy ? h('p', { className: 'remedy' }, 'What to do: ', h('bdi', null, error.remedy)) : null,
    error.code ? h('p', { className: 'code' }, 'Code: ', code(error.code)) : null,
    h('button', { type: 'button', className: 'plain', 'aria-label': 'Dismiss this message', onclick: () => e.remove() }, '×'));
  e.dataset.key = key;
  box.prepend(e);
  while (box.children.length > 4) box.lastChild.remove();
}

export function clearNotices() {
  document.getElementById('notices').replaceChildren();
}

// ask shows a dialog and resolves to what its form has, or null if it was given up. fields are made by the caller; the button that
// does it is not focused first where something would be lost. One dialog is over before the next is shown, so that no answer is taken
// for that of another question.
let last = Promise.resolve();
export function ask(question) {
  last = last.then(() => show(question));
  return last;
}

function show({ title, body, fields = [], action, danger = false }) {
  const dialog = document.getElementById('dialog');
  return new Promise((done) => {
    const cancel = h('button', { type: 'button', onclick: () => dialog.close('') }, 'Cancel');
    const form = h('form', { method: 'dialog' },
      h('h2', { id: 'dialog-title' }, title), body ? h('p', null, body) : null, fields,
      h('p', { className: 'buttons' }, cancel, h('button', { type: 'submit', className: danger ? 'danger' : 'primary', value: 'yes' }, action)));
    form.addEventListener('submit', (e) => {
      e.preventDefault();
      dialog.close('yes');
    });
    dialog.replaceChildren(form);
    dialog.returnValue = '';
    dialog.addEventListener('close', () => {
      const values = dialog.returnValue === 'yes' ? Object.fromEntries([...form.elements].filter((f) => f.name && (f.type !== 'radio' || f.checked)).map((f) => [f.name, f.type === 'checkbox' ? f.checked : f.value])) : null;
      dialog.replaceChildren();
      done(values);
    }, { once: true });
    dialog.showModal();
    (form.querySelector('input, select') ?? (danger ? cancel : form.querySelector('[type=submit]'))).focus();
  });
}

// off turns a control off for a reason, or on. It keeps the focus, and says the reason.
export function off(control, reason) {
  control.setAttribute('aria-disabled', String(reason !== ''));
  control.title = reason;
}

// isOff says whether a control was turned off: its listener does nothing then.
export const isOff = (control) => control.getAttribute('aria-disabled') === 'true';

// choice is a field whose value is one of [value, label].
export function choice(name, label, options, value, hint) {
  const id = `field-${name}`;
  return h('p', { className: 'field' }, h('label', { htmlFor: id }, label),
    h('select', { id, name }, options.map(([v, words]) => h('option', { value: v, selected: v === value }, words))), hint ? h('small', null, hint) : null);
}

export function field(name, label, attributes, hint) {
  const id = `field-${name}`;
  return h('p', { className: 'field' }, h('label', { htmlFor: id }, label), h('input', { id, name, autocomplete: 'off', spellcheck: 'false', ...attributes }),
    hint ? h('small', null, hint) : null);
}
