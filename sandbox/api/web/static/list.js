// All sandboxes: filtered, sorted, a page of rows at a time.
import { h, time, status, tags, text, sandboxLink, notice } from './dom.js';
import { sandboxes, watch, MAX_ROWS } from './api.js';
import { bytes, span, count } from './format.js';

// ROWS is how many are in the document at once.
const ROWS = 100;

const statuses = ['creating', 'running', 'waiting', 'asleep', 'stopped', 'crashed', 'failed', 'expired'];

const never = Number.MAX_SAFE_INTEGER;
const stamp = (t) => (t ? Date.parse(t) : never);

const columns = [
  { key: 'name', name: 'Name', by: (s) => s.name, sig: (s) => s.name + s.problem, cell: (s) => [sandboxLink(s.name), s.problem ? h('span', { className: 'mark', title: s.problem }, '!') : null] },
  { key: 'status', name: 'Status', by: (s) => statuses.indexOf(s.status), sig: (s) => s.status, cell: (s) => status(s.status) },
  { key: 'owner', name: 'Owner', className: 'wide', by: (s) => s.owner ?? '', sig: (s) => s.owner, cell: (s) => text(s.owner) },
  { key: 'tags', name: 'Tags', className: 'wider', by: (s) => (s.tags ?? []).join(','), sig: (s) => (s.tags ?? []).join(','), cell: (s) => tags(s.tags) },
  { key: 'image', name: 'Image', className: 'wider', by: (s) => s.image ?? '', sig: (s) => s.image, cell: (s) => text(s.image) },
  { key: 'memory', name: 'Memory', className: 'number wide', by: (s) => s.memory_mib, sig: (s) => s.memory_mib, cell: (s) => bytes(s.memory_mib * 1048576) },
  { key: 'idle', name: 'Sleeps after', className: 'number widest', by: (s) => s.idle_seconds || never, sig: (s) => s.idle_seconds,
    cell: (s) => (s.idle_seconds ? span(s.idle_seconds) : text('', 'never')) },
  { key: 'expires', name: 'Expires', className: 'number', by: (s) => stamp(s.expires), cell: (s) => (s.expires ? time(s.expires) : text('', 'never')) },
  { key: 'created', name: 'Created', className: 'number wide', by: (s) => -stamp(s.created), cell: (s) => time(s.created) },
];

function compare(a, b) {
  if (typeof a === 'number') return a - b;
  return a < b ? -1 : a > b ? 1 : 0;
}

function matches(s, f) {
  if (f.status && s.status !== f.status || f.owner && s.owner !== f.owner || f.tag && !(s.tags ?? []).includes(f.tag)) return false;
  if (!f.q) return true;
  const all = [s.name, s.owner, s.purpose, s.image, s.problem, s.id, s.parent, ...(s.tags ?? [])].join('\n').toLowerCase();
  return f.q.toLowerCase().split(/\s+/).every((word) => all.includes(word));
}

export function listView(root, first) {
  let f = first;
  let data = null;
  let shown = new Map(); // id -> {tr, cells, sigs}

  const q = h('input', { id: 'filter-q', type: 'search', autocomplete: 'off', spellcheck: 'false', maxlength: 200, placeholder: 'name, owner, tag, image' });
  const selects = Object.fromEntries(['status', 'owner', 'tag'].map((name) => [name, h('select', { id: `filter-${name}` })]));
  const total = h('p', { id: 'total', role: 'status' });
  const problems = h('p', { className: 'problem', hidden: true });
  const heads = new Map(columns.map((c) => [c.key, h('button', { type: 'button', onclick: () => sort(c.key) }, c.name)]));
  const headCells = new Map(columns.map((c) => [c.key, h('th', { scope: 'col', class: c.className }, heads.get(c.key))]));
  const body = h('tbody');
  const pager = h('nav', { className: 'pager', 'aria-label': 'Pages' });
  const empty = h('p', { className: 'empty', hidden: true });

  root.replaceChildren(
    h('div', { className: 'heading' }, h('h1', { tabIndex: -1 }, 'Sandboxes'), h('a', { id: 'new', className: 'button primary', href: '#/new' }, 'New sandbox')),
    h('form', { className: 'filters', role: 'search', onsubmit: (e) => e.preventDefault() },
      h('p', null, h('label', { htmlFor: 'filter-q' }, 'Search'), q),
      Object.entries(selects).map(([name, e]) => h('p', null, h('label', { htmlFor: `filter-${name}` }, name[0].toUpperCase() + name.slice(1)), e)),
      total),
    problems,
    h('div', { className: 'scroll', role: 'region', 'aria-label': 'Sandboxes', tabIndex: 0 },
      h('table', { id: 'sandboxes' }, h('caption', { className: 'unseen' }, 'Sandboxes'), h('thead', null, h('tr', null, [...headCells.values()])), body)),
    empty, pager);

  // go makes a change of the filter a part of the address: as a step of the history, or in place of the last one.
  function go(change, step) {
    f = { page: '', ...f, ...change };
    if (!('page' in change)) f.page = '';
    const p = new URLSearchParams(Object.entries(f).filter(([, v]) => v));
    const hash = p.size ? `#/?${p}` : '#/';
    if (step) history.pushState(null, '', hash);
    else history.replaceState(null, '', hash);
    draw();
    if (data?.more) w.soon();
  }

  function sort(key) {
    const now = f.sort || 'name';
    go({ sort: now === key ? `-${key}` : key === 'name' ? '' : key }, true);
  }

  q.addEventListener('input', () => go({ q: q.value }, false));
  for (const [name, e] of Object.entries(selects)) e.addEventListener('change', () => go({ [name]: e.value }, true));

  function options(name, values) {
    const e = selects[name];
    const all = [...new Set(f[name] ? [...values, f[name]] : values)];
    const key = JSON.stringify(all);
    if (e.dataset.key !== key) {
      e.replaceChildren(h('option', { value: '' }, 'any'), ...all.map((v) => h('option', { value: v }, v)));
      e.dataset.key = key;
    }
    e.value = f[name] ?? '';
  }

  function draw() {
    if (q.value !== (f.q ?? '')) q.value = f.q ?? '';
    const all = data?.rows ?? [];
    options('status', statuses);
    options('owner', all.map((s) => s.owner).filter(Boolean).sort(compare));
    options('tag', all.flatMap((s) => s.tags ?? []).sort(compare));
    const desc = f.sort?.startsWith('-');
    const key = (f.sort ?? '').replace(/^-/, '');
    const column = columns.find((c) => c.key === key) ?? columns[0];
    for (const c of columns) {
      if (c === column) headCells.get(c.key).setAttribute('aria-sort', desc ? 'descending' : 'ascending');
      else headCells.get(c.key).removeAttribute('aria-sort');
    }
    if (!data) {
      total.textContent = 'Loading…';
      return;
    }
    const rows = all.filter((s) => matches(s, f));
    rows.sort((a, b) => (desc ? -1 : 1) * compare(column.by(a), column.by(b)) || compare(a.name, b.name));
    const pages = Math.max(1, Math.ceil(rows.length / ROWS));
    const page = Math.min(pages, Math.max(1, Number.parseInt(f.page, 10) || 1));
    const of = rows.length === all.length ? count(all.length, 'sandbox', 'sandboxes') : `${rows.length.toLocaleString('en')} of ${count(all.length, 'sandbox', 'sandboxes')}`;
    const words = data.more ? `${of}; there are more than ${MAX_ROWS.toLocaleString('en')}: choose a status, an owner or a tag` : of;
    if (total.textContent !== words) total.textContent = words;
    problems.hidden = data.problems.length === 0;
    problems.replaceChildren(data.problems.length ? h('span', null, `The list may lack something: ${data.problems.slice(0, 3).join('; ')}`) : '');
    fill(rows.slice((page - 1) * ROWS, page * ROWS));
    empty.hidden = rows.length > 0;
    empty.textContent = all.length ? 'No sandbox is like that.' : 'There are no sandboxes.';
    turn(page, pages);
  }

  // fill makes the rows what they are to be, and leaves alone what is so already: focus and selections stay.
  function fill(rows) {
    const next = new Map();
    rows.forEach((s, i) => {
      const old = shown.get(s.id) ?? { tr: h('tr'), sigs: [] };
      columns.forEach((c, n) => {
        const sig = c.sig ? String(c.sig(s)) : null;
        if (sig !== null && old.sigs[n] === sig) return;
        const content = c.cell(s);
        let td = old.tr.cells[n];
        if (!td) old.tr.append(td = h('td', { class: c.className }));
        if (sig !== null || td.textContent !== content.textContent || td.firstChild?.title !== content.title) td.replaceChildren(...[content].flat().filter(Boolean));
        old.sigs[n] = sig;
      });
      next.set(s.id, old);
      if (body.children[i] !== old.tr) body.insertBefore(old.tr, body.children[i] ?? null);
    });
    while (body.children.length > rows.length) body.lastChild.remove();
    shown = next;
  }

  function turn(page, pages) {
    const key = `${page}/${pages}`;
    if (pager.dataset.key === key) return;
    pager.dataset.key = key;
    pager.hidden = pages === 1;
    const step = (to, label, rel) => h('button', { type: 'button', disabled: to < 1 || to > pages, 'data-page': rel,
      onclick: () => { go({ page: to === 1 ? '' : String(to) }, true); root.querySelector('h1').scrollIntoView(); } }, label);
    const had = pager.contains(document.activeElement) ? document.activeElement.dataset.page : null;
    pager.replaceChildren(step(page - 1, 'Previous', 'previous'), h('span', { role: 'status' }, `Page ${page} of ${pages}`), step(page + 1, 'Next', 'next'));
    if (had) (pager.querySelector(`[data-page=${had}]:enabled`) ?? pager.querySelector('button:enabled'))?.focus();
  }

  const w = watch(async (signal) => {
    const filter = data?.more ? Object.fromEntries(['status', 'owner', 'tag'].filter((k) => f[k]).map((k) => [k, f[k]])) : {};
    const got = await sandboxes(filter, signal);
    // Once there were more than can be loaded it stays so, that what is chosen goes on being asked for.
    if (data?.more) got.more = true;
    data = got;
    draw();
  });
  w.onerror = (e) => notice('Listing sandboxes', e);
  draw();

  return {
    title: 'Sandboxes',
    update(next) {
      f = next;
      draw();
      if (data?.more) w.soon();
    },
    stop: () => w.stop(),
  };
}
