// Which sandbox was made from which: forks, and those that were made from a snapshot.
import { h, status, text, short, notice } from './dom.js';
import { sandboxes, listOf, watch } from './api.js';
import { count } from './format.js';

// MAX_DEPTH bounds how deep lists are in each other; what is below hangs side by side at that depth.
const MAX_DEPTH = 24;

// families arranges sandboxes below what they were made from. A parent that is gone, and has children here, has a node of its own.
export function families(rows, snapshots) {
  const nodes = new Map(rows.map((s) => [s.id, { id: s.id, s, children: [] }]));
  const owner = new Map(snapshots.map((i) => [i.id, i]));
  const parents = new Map();
  for (const s of rows) {
    const from = s.fork_point ? owner.get(s.fork_point) : null;
    const id = s.parent_id || from?.vm_id;
    if (!id || id === s.id) continue;
    if (!nodes.has(id)) nodes.set(id, { id, name: s.parent || from?.vm || id, children: [] });
    nodes.get(id).children.push(nodes.get(s.id));
    parents.set(s.id, id);
  }
  const name = (n) => n.s?.name ?? n.name;
  const order = (a, b) => (name(a) < name(b) ? -1 : 1);
  const roots = [];
  const seen = new Set();
  // What is in a circle, which only a damaged record can say, has no root: it begins wherever it is met.
  const candidates = [...nodes.values()].filter((n) => !parents.has(n.id)).concat([...nodes.values()]);
  for (const root of candidates) {
    if (seen.has(root.id)) continue;
    roots.push(root);
    const open = [[root, 1]];
    seen.add(root.id);
    for (let i = 0; i < open.length; i++) {
      const [n, depth] = open[i];
      n.depth = depth;
      n.children = n.children.filter((c) => !seen.has(c.id)).sort(order);
      for (const c of n.children) {
        seen.add(c.id);
        c.parent = n;
        open.push([c, depth + 1]);
      }
    }
    root.size = open.length;
  }
  return roots.sort(order);
}

export function lineageView(root, first) {
  let f = first;
  let drawn = '';
  let roots = [];
  const closed = new Set();
  const items = new Map(); // id -> the link that is the item
  let current = null;

  const all = h('input', { id: 'all', type: 'checkbox', checked: f.all === '1', onchange: () => { location.hash = `#/lineage${all.checked ? '?all=1' : ''}`; } });
  const total = h('p', { id: 'total', role: 'status' }, 'Loading…');
  const tree = h('ul', { role: 'tree', className: 'tree', 'aria-label': 'Lineage of sandboxes' });
  root.replaceChildren(
    h('h1', { tabIndex: -1 }, 'Lineage'),
    h('div', { className: 'filters' }, h('p', { className: 'check' }, all, h('label', { htmlFor: 'all' }, 'also those without forks')), total),
    h('p', { className: 'hint' }, 'Arrow keys go through the tree, Enter opens a sandbox.'),
    h('div', { className: 'scroll', role: 'region', 'aria-label': 'Lineage', tabIndex: -1 }, tree));

  function item(n, at, of) {
    const s = n.s;
    const leaf = n.children.length === 0;
    const label = s ? text(s.name) : h('span', { className: 'gone' }, text(n.name), ' (removed)');
    const attributes = {
      role: 'treeitem', tabIndex: -1, 'aria-level': n.depth, 'aria-posinset': at + 1, 'aria-setsize': of, 'data-id': n.id,
      'aria-expanded': leaf ? null : String(!closed.has(n.id)), 'data-name': s?.name ?? n.name,
    };
    const link = s ? h('a', { ...attributes, href: `#/sandbox/${encodeURIComponent(s.name)}` }, label) : h('span', attributes, label);
    items.set(n.id, { link, n });
    const li = h('li', { role: 'none' },
      h('div', { className: 'node' },
        h('span', { className: leaf ? 'twist leaf' : 'twist', 'aria-hidden': 'true', onclick: () => toggle(n) }, leaf ? '' : closed.has(n.id) ? '▸' : '▾'),
        link, s ? status(s.status) : null, s?.owner ? h('span', { className: 'dim' }, text(s.owner)) : null,
        s?.fork_point ? h('span', { className: 'dim' }, s.parent_id ? 'fork at ' : 'made from ', h('a', { href: `#/snapshots?id=${s.fork_point}`, tabIndex: -1 }, h('code', null, short(s.fork_point)))) : null));
    if (!leaf && !closed.has(n.id)) li.append(group(n));
    n.li = li;
    return li;
  }

  function group(n) {
    return h('ul', { role: 'group', className: n.depth >= MAX_DEPTH ? 'flat' : null }, n.children.map((c, i) => item(c, i, n.children.length)));
  }

  function toggle(n, open = closed.has(n.id)) {
    if (n.children.length === 0) return;
    if (open) closed.delete(n.id);
    else closed.add(n.id);
    n.li.querySelector(':scope > ul')?.remove();
    if (open) n.li.append(group(n));
    items.get(n.id).link.setAttribute('aria-expanded', String(open));
    n.li.querySelector(':scope > .node > .twist').textContent = open ? '▾' : '▸';
    if (!open && current && !tree.contains(items.get(current)?.link)) rove(n.id);
  }

  function rove(id, focus) {
    if (current) items.get(current)?.link.setAttribute('tabindex', '-1');
    current = id;
    const link = items.get(id)?.link;
    link?.setAttribute('tabindex', '0');
    if (focus) link?.focus();
  }

  tree.addEventListener('focusin', (e) => {
    const id = e.target.dataset?.id;
    if (id && id !== current) rove(id);
  });

  // Keys as in the tree pattern of the ARIA Authoring Practices Guide.
  tree.addEventListener('keydown', (e) => {
    const id = e.target.dataset?.id;
    if (!id || e.altKey || e.ctrlKey || e.metaKey) return;
    const { n } = items.get(id);
    const seen = [...tree.querySelectorAll('[role=treeitem]')];
    const at = seen.indexOf(e.target);
    const open = n.children.length > 0 && !closed.has(n.id);
    const moves = {
      ArrowDown: () => seen[at + 1], ArrowUp: () => seen[at - 1], Home: () => seen[0], End: () => seen.at(-1),
      ArrowRight: () => (open ? seen[at + 1] : (toggle(n, true), null)),
      ArrowLeft: () => (open ? (toggle(n, false), null) : n.parent ? items.get(n.parent.id).link : null),
    };
    if (!(e.key in moves)) return;
    e.preventDefault();
    const to = moves[e.key]();
    if (to) rove(to.dataset.id, true);
  });

  function draw() {
    const shown = roots.filter((r) => f.all === '1' || r.size > 1);
    const alone = roots.length - roots.filter((r) => r.size > 1).length;
    total.textContent = f.all === '1' ? count(roots.length, 'family', 'families') : `${count(shown.length, 'family', 'families')}; ${count(alone, 'sandbox', 'sandboxes')} without forks`;
    all.checked = f.all === '1';
    const focused = tree.contains(document.activeElement) ? document.activeElement.dataset.id : null;
    items.clear();
    tree.replaceChildren(...shown.map((r, i) => item(r, i, shown.length)));
    if (shown.length === 0) tree.replaceChildren(h('li', { role: 'none', className: 'empty' }, 'No sandbox was made from another one.'));
    rove(items.has(current) ? current : shown[0]?.id ?? null, false);
    if (focused && items.has(focused)) rove(focused, true);
  }

  const w = watch(async (signal) => {
    const [list, snapshots] = await Promise.all([sandboxes({}, signal), listOf('/v1/snapshots', 'snapshots', signal)]);
    const next = families(list.rows, snapshots);
    const key = JSON.stringify(list.rows.map((s) => [s.id, s.name, s.status, s.owner, s.parent_id, s.fork_point]).concat(snapshots.length));
    if (key === drawn) return;
    drawn = key;
    roots = next;
    draw();
  });
  w.onerror = (e) => notice('Reading the lineage', e);
  return {
    title: 'Lineage',
    update(next) {
      f = next;
      draw();
    },
    stop: () => w.stop(),
  };
}
