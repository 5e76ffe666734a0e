// A part of a view that is drawn again when what it fetches has changed.
import { h, text, code } from './dom.js';
import { watch } from './api.js';

// polled draws what it fetches when that has changed.
export function polled(root, what, every, fetch, draw) {
  const box = h('div', null, h('p', { role: 'status' }, 'Loading…'));
  root.append(box);
  let last = '';
  let value = null;
  const redraw = () => value !== null && box.replaceChildren(...[draw(value)].flat(Infinity).filter(Boolean));
  const w = watch(async (signal) => {
    let next;
    try {
      next = await fetch(signal);
    } catch (e) {
      if (signal.aborted) throw e;
      last = '';
      value = null;
      box.replaceChildren(h('p', { className: 'problem' }, text(e.message), e.remedy ? ['. ', text(e.remedy)] : null, e.code ? [' (', code(e.code), ')'] : null));
      throw e;
    }
    const key = JSON.stringify(next);
    if (key === last) return;
    last = key;
    value = next;
    redraw();
  }, { every });
  return { redraw, again: () => w.soon(), stop: () => w.stop() };
}
