// The frame: which view the address asks for, and what is known of the connection.
import { clearNotices, notice } from './dom.js';
import { session, token, setToken, whoAmI } from './api.js';
import { listView } from './list.js';
import { sandboxView } from './sandbox.js';
import { lineageView } from './lineage.js';
import { snapshotsView } from './snapshots.js';
import { createView } from './create.js';
import { imagesView } from './images.js';
import { hostView } from './host.js';

const views = { list: listView, sandbox: sandboxView, lineage: lineageView, snapshots: snapshotsView, new: createView, images: imagesView, host: hostView };

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
  if (parts[0] === 'sandbox' && parts[1]) return { ...q, view: 'sandbox', key: `sandbox ${parts[1]}`, name: parts[1], tab: parts[2] ?? 'overview' };
  if (['lineage', 'snapshots', 'new', 'images', 'host'].includes(parts[0])) return { ...q, view: parts[0], key: parts[0] };
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

// ALL_SCOPES is how many there are: read, exec, files, create, admin.
const ALL_SCOPES = 5;

const words = { live: 'live', polling: 'polling', offline: 'no connection', connecting: 'connecting' };
function frame() {
  const link = document.getElementById('link');
  if (link.dataset.link !== session.link) {
    link.dataset.link = session.link;
    link.textContent = words[session.link];
  }
  const scope = document.getElementById('scope');
  const some = session.scopes !== null && session.scopes.length < ALL_SCOPES;
  scope.hidden = !some;
  if (some) scope.textContent = session.scopes.length === 1 && session.scopes[0] === 'read' ? 'read only' : `only ${session.scopes.join(', ')}`;
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
