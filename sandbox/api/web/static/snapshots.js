// Snapshots, each below the one that it is a delta of.
import { h, time, tags, text, code, short, sandboxLink, table, notice, facts, at } from './dom.js';
import { listOf, watch } from './api.js';
import { bytes, count } from './format.js';

// MAX_ROWS is how many are in the document at once.
const MAX_ROWS = 500;

// arranged is the list in the order of a tree, with the depth of each; one whose base is gone begins anew.
export function arranged(list) {
  const nodes = new Map(list.map((i) => [i.id, { ...i, level: 0, children: [] }]));
  const roots = [];
  for (const n of nodes.values()) {
    const base = n.base && n.base !== n.id ? nodes.get(n.base) : null;
    if (base) base.children.push(n);
    else roots.push(n);
  }
  const newest = (a, b) => Date.parse(b.created || 0) - Date.parse(a.created || 0) || (a.id < b.id ? -1 : 1);
  const out = [];
  const seen = new Set();
  for (const start of [...roots.sort(newest), ...nodes.values()]) {
    const open = [start];
    while (open.length > 0) {
      const n = open.pop();
      if (seen.has(n.id)) continue;
      seen.add(n.id);
      out.push(n);
      for (const c of n.children.sort(newest).reverse()) {
        if (seen.has(c.id)) continue; // a circle, which only a damaged manifest can say
        c.level = n.level + 1;
        open.push(c);
      }
    }
  }
  return out;
}

// branch stands before a delta. Deeper than that it is a number.
const DEEP = 6;
function branch(level) {
  if (level === 0) return null;
  const deep = level > DEEP ? `${level} ` : '';
  return h('span', { className: 'branch', 'data-level': Math.min(level, DEEP), title: `a delta, ${level} below the first` }, `${deep}└ `);
}

export function snapshotColumns({ withVM, now }) {
  return [
    { name: 'Snapshot', cell: (i) => [branch(i.level), h('a', { href: `#/snapshots?id=${encodeURIComponent(i.id)}`, title: i.id }, code(short(i.id))), i.id === now ? h('span', { className: 'tag now' }, 'wakes from this') : null] },
    ...(withVM ? [{ name: 'Sandbox', cell: (i) => (i.vm ? sandboxLink(i.vm) : text('')) }] : []),
    { name: 'Kind', cell: (i) => text(i.kind) },
    { name: 'Created', className: 'number', cell: (i) => time(i.created) },
    { name: 'Stored', className: 'number', cell: (i) => bytes(i.stored_bytes) },
    { name: 'Own', className: 'number', cell: (i) => bytes(i.exclusive_bytes) },
    { name: 'Memory', className: 'number', cell: (i) => (i.ram_bytes ? bytes(i.ram_bytes) : text('')) },
    { name: 'Tags', cell: (i) => [tags(i.tags), i.kept && !i.tags?.length ? h('span', { className: 'tag' }, 'kept') : null] },
    { name: 'Note', cell: (i) => (i.problem ? h('span', { className: 'problem' }, text(i.problem)) : text(i.note, '')) },
  ];
}

export function snapshotTable(list, options) {
  const rows = arranged(list);
  const own = list.reduce((sum, i) => sum + (i.exclusive_bytes ?? 0), 0);
  return [
    h('p', { className: 'summary' }, `${count(list.length, 'snapshot')}, ${bytes(own)} of their own`, rows.length > MAX_ROWS ? `; the first ${MAX_ROWS} are shown` : ''),
    rows.length ? table('Snapshots', snapshotColumns(options), rows.slice(0, MAX_ROWS)) : h('p', { className: 'empty' }, 'There are no snapshots.'),
  ];
}

function details(i, list) {
  const below = list.filter((d) => d.base === i.id);
  const link = (id) => h('a', { href: `#/snapshots?id=${encodeURIComponent(id)}` }, code(id));
  return [
    h('p', null, h('a', { href: '#/snapshots' }, 'All snapshots')),
    facts([
      ['Id', code(i.id)], ['Sandbox', i.vm ? sandboxLink(i.vm) : text('')], ['Kind', text(i.kind)], ['Created', at(i.created)], ['Note', text(i.note)], ['Tags', i.tags?.length ? tags(i.tags) : text('')],
      ['Memory', i.ram_bytes ? bytes(i.ram_bytes) : 'none'], ['Stored', bytes(i.stored_bytes)], ['Of its own', bytes(i.exclusive_bytes)],
      ['Delta of', i.base ? link(i.base) : 'none, it is whole'], ['Deltas of it', below.length ? h('ul', null, below.slice(0, 100).map((d) => h('li', null, link(d.id)))) : 'none'],
      ['Problem', i.problem ? h('span', { className: 'problem' }, text(i.problem)) : null],
    ]),
  ];
}

export function snapshotsView(root, first) {
  let f = first;
  let list = null;
  let drawn = '';
  const body = h('div', null, h('p', { role: 'status' }, 'Loading…'));
  root.replaceChildren(h('h1', { tabIndex: -1 }, 'Snapshots'), body);
  function draw() {
    if (!list) return;
    const one = f.id ? list.filter((i) => i.id.startsWith(f.id)) : [];
    if (f.id && one.length !== 1) body.replaceChildren(h('p', { className: 'empty' }, 'There is no such snapshot any more: its sandbox may have slept again.'), h('p', null, h('a', { href: '#/snapshots' }, 'All snapshots')));
    else if (f.id) body.replaceChildren(...details(one[0], list));
    else body.replaceChildren(...snapshotTable(list, { withVM: true }));
  }
  const w = watch(async (signal) => {
    const next = await listOf('/v1/snapshots', 'snapshots', signal);
    const key = JSON.stringify(next);
    if (key === drawn) return;
    drawn = key;
    list = next;
    draw();
  });
  w.onerror = (e) => notice('Listing snapshots', e);
  return {
    title: 'Snapshots',
    update(next) {
      f = next;
      draw();
    },
    stop: () => w.stop(),
  };
}
