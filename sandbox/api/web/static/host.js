// What the host has for its sandboxes.
import { h, status, text, code, facts } from './dom.js';
import { get } from './api.js';
import { bytes, count } from './format.js';
import { polled } from './polled.js';

// EVERY is how often it is measured, in milliseconds.
const EVERY = 5000;

// gauge is a part of a whole, as a bar and in words. From warn on it says that little is left.
function gauge(label, used, most, words, warn = 0.9) {
  const id = `gauge-${label.replaceAll(' ', '-').toLowerCase()}`;
  const part = most > 0 ? used / most : 0;
  const bar = h('div', { className: part >= warn ? 'bar full' : 'bar' });
  bar.style.width = `${Math.min(1, part) * 100}%`;
  return h('div', { className: 'gauge' }, h('p', { id, className: 'label' }, label),
    h('div', { role: 'meter', 'aria-labelledby': id, 'aria-valuemin': 0, 'aria-valuemax': 100, 'aria-valuenow': Math.round(Math.min(1, part) * 100), 'aria-valuetext': words }, bar),
    h('p', null, words, part >= warn ? h('strong', { className: 'bad' }, ' Little is left.') : null));
}

export function hostView(root) {
  const box = h('div');
  root.replaceChildren(h('h1', { tabIndex: -1 }, 'Host'), box);
  const p = polled(box, 'Host', EVERY, (signal) => get('/v1/host', signal), (c) => {
    const statuses = Object.entries(c.sandboxes ?? {}).filter(([, n]) => n > 0);
    const all = statuses.reduce((sum, [, n]) => sum + n, 0);
    return [
      c.problems?.length ? h('p', { className: 'problem' }, `Some may be missing: ${c.problems.slice(0, 3).join('; ')}`) : null,
      h('div', { className: 'gauges' },
        c.memory_available_bytes ? gauge('Memory', c.memory_total_bytes - c.memory_available_bytes, c.memory_total_bytes, `${bytes(c.memory_available_bytes)} of ${bytes(c.memory_total_bytes)} available`) : null,
        gauge('Memory of awake sandboxes', c.awake_memory_bytes, c.awake_memory_most_bytes, `${bytes(c.awake_memory_bytes)} of the ${bytes(c.awake_memory_most_bytes)} that they may have`),
        gauge('Disk', c.disk_total_bytes - c.disk_free_bytes, c.disk_total_bytes, `${bytes(c.disk_free_bytes)} of ${bytes(c.disk_total_bytes)} free`)),
      h('h2', null, 'Sandboxes'),
      statuses.length ? facts([['All', h('a', { href: '#/' }, count(all, 'sandbox', 'sandboxes'))], ...statuses.map(([s, n]) => [status(s), h('a', { href: `#/?status=${encodeURIComponent(s)}` }, n.toLocaleString('en'))])])
        : h('p', { className: 'empty' }, 'There are no sandboxes.'),
      h('h2', null, 'Name servers'),
      h('p', null, c.resolvers?.length ? c.resolvers.map((r, n) => [n ? ', ' : null, code(r)]) : text('', 'none is known')),
    ];
  });
  return { title: 'Host', update() {}, stop: () => p.stop() };
}
