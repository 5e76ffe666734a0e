// The frame: which view the address asks for, and what is known of the connection.
import { clearNotices, notice } from './dom.js';
import { session, token, setToken, whoAmI } from './api.js';
import { listView } from './list.js';
import { sandboxView } from './sandbox.js';
import { lineageView } from './lineage.js';
import { snapshotsView } from './snapshots.js';

const views = { list: listView, sandbox: sandboxView, lineage: lineageView, snapshots: snapshotsView };

const main = document.getElementById('main');
let view = null;
let viewKey = '';

// route is what an address asks for. What it does not know is the list.
function route() {
  const [path, query = ''] = location.hash.replace(/^#/, '').split(/\?(.*)/s);
  const parts = path.split('/').filter(Boolean).map((p) => {
    try {
      return decodeURIComponent(p);
    } catch {
      return p;
    }
  });
  const q = Object.fromEntries(new URLSearchParams(query));
  if (parts[0] === 'sandbox' && parts[1]) return { view: 'sandbox', key: `sandbox ${parts[1]}`, name: parts[1], tab: parts[2] ?? 'overview' };
  if (parts[0] === 'lineage') return { ...q, view: 'lineage', key: 'lineage' };
  if (parts[0] === 'snapshots') return { ...q, view: 'snapshots', key: 'snapshots' };
  return { ...q, view: 'list', key: 'list' };
}

function show() {
  const { view: kind, key, ...r } = route();
  const first = viewKey === '';
  if (key === viewKey) {
    view.update(r);
  } else {
    view?.stop();
    clearNotices();
    viewKey = key;
    main.replaceChildren();
    view = views[kind](main, r);
    for (const a of document.querySelectorAll('header nav a')) {
      if (a.dataset.view === kind) a.setAttribute('aria-current', 'page');
      else a.removeAttribute('aria-current');
    }
    scrollTo(0, 0);
    // Who listens hears where this leads; the first view is announced by the title.
    if (!first && !document.getElementById('dialog').open) main.querySelector('h1')?.focus({ preventScroll: true });
  }
  document.title = `${view.title} · drowse`;
}

addEventListener('hashchange', show);
addEventListener('popstate', show);

document.getElementById('skip').addEventListener('click', (e) => {
  e.preventDefault(); // the address is the view's
  main.focus();
});

const forget = document.getElementById('token');
forget.addEventListener('click', () => {
  setToken('');
  location.reload();
});

const words = { live: 'live', polling: 'polling', offline: 'no connection', connecting: 'connecting' };
function frame() {
  const link = document.getElementById('link');
  if (link.dataset.link !== session.link) {
    link.dataset.link = session.link;
    link.textContent = words[session.link];
  }
  document.getElementById('scope').hidden = session.scope !== 'read';
  forget.hidden = token() === '';
}
session.addEventListener('change', frame);

let asked = null;
async function learn() {
  if (asked === token()) return;
  asked = token();
  try {
    await whoAmI();
  } catch (e) {
    if (e.status === 401) notice('Asking the server', e);
  }
}
session.addEventListener('change', learn);

frame();
learn();
show();
