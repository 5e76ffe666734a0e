// One sandbox: what is known of it, what can be done with it, and what it has done.
import { h, time, at as moment, status, tags, text, code, short, sandboxLink, table, facts, notice, clearNotices, ask, field } from './dom.js';
import { at, get, work, listOf, bytesOf, watch, session, lacks } from './api.js';
import { bytes, span, terminal, count, exact } from './format.js';
import { polled } from './polled.js';
import { snapshotTable } from './snapshots.js';
import { terminalPanel } from './terminal.js';
import { filesPanel } from './files.js';
import { policyPanel } from './policy.js';

// MAX_FORKS is sandbox.MaxForks.
const MAX_FORKS = 64;
// MAX_HOURS is how far an expiry is put off here: a year.
const MAX_HOURS = 8784;
// MAX_ROWS is how many commands, sleeps or flows are in the document at once, the newest.
const MAX_ROWS = 500;
// Bytes of the console that are fetched, and every how many milliseconds while it is followed.
const TAIL = 64 << 10;
const TAIL_MORE = 1 << 20;
const FOLLOW = 1500;
// FLOWS is every how many milliseconds flows are read, HISTORY commands.
const FLOWS = 5000;
const HISTORY = 10_000;

// namePattern is sandbox.NamePattern, as patterns of inputs are written.
const namePattern = '[a-z0-9]([a-z0-9\\-]{0,38}[a-z0-9])?';

const tabs = {
  overview: 'Overview', terminal: 'Terminal', files: 'Files', policy: 'Policy', flows: 'Flows', snapshots: 'Snapshots', history: 'History', console: 'Console', stats: 'Stats',
};

// actions are what the buttons do. ask returns the body of the request, or null if it is given up.
const actions = [
  { op: 'start', label: 'Start', doing: 'Starting', done: 'Started', when: ['stopped', 'crashed', 'failed'] },
  { op: 'wake', label: 'Wake', doing: 'Waking', done: 'Awake', when: ['asleep'] },
  { op: 'sleep', label: 'Sleep', doing: 'Putting to sleep', done: 'Asleep', when: ['running'] },
  { op: 'snapshot', label: 'Snapshot…', doing: 'Writing a snapshot', done: 'Snapshot written', when: ['running'], ask: askSnapshot },
  { op: 'fork', label: 'Fork…', doing: 'Forking', done: 'Forked', when: ['running', 'asleep'], ask: askFork },
  { op: 'extend', label: 'Extend…', doing: 'Extending', done: 'Extended', when: null, ask: askExtend, has: (s) => s.expires },
  { op: 'stop', label: 'Stop…', doing: 'Stopping', done: 'Stopped', when: ['running'], danger: true, ask: askStop },
  { op: 'delete', label: 'Delete…', doing: 'Deleting', done: 'Deleted', when: null, danger: true, ask: askDelete },
];

async function askStop(name) {
  return await ask({ title: `Stop ${name}?`, danger: true, action: `Stop ${name}`,
    body: 'The guest is shut down. What is in its memory is lost: programs end. Its disk stays. To keep the memory, put it to sleep.' }) && {};
}

async function askDelete(name) {
  return await ask({ title: `Delete ${name}?`, danger: true, action: `Delete ${name}`,
    body: 'Its disk, its memory and its sleeps are deleted, also while it runs. This cannot be taken back. Snapshots that were named or tagged stay.' }) && {};
}

async function askSnapshot(name) {
  const v = await ask({ title: `Snapshot of ${name}`, action: 'Write it', body: 'It runs on meanwhile.', fields: [
    field('note', 'Note', { maxlength: 200 }, 'Words to remember it by'),
    h('p', { className: 'check' }, h('input', { id: 'field-disk', name: 'disk', type: 'checkbox' }), h('label', { htmlFor: 'field-disk' }, 'the disk alone, without memory')),
  ] });
  return v && { note: v.note, disk_only: v.disk };
}

async function askExtend(name, s) {
  const v = await ask({ title: `Extend ${name}`, action: 'Extend', body: s.expires ? `It expires at ${exact(s.expires)}.` : null, fields: [
    field('hours', 'Hours from now', { type: 'number', min: 1, max: MAX_HOURS, value: '24', required: true }),
  ] });
  return v && { until: new Date(Math.ceil(Date.now() / 1000) * 1000 + Number(v.hours) * 3_600_000).toISOString() };
}

async function askFork(name) {
  const v = await ask({ title: `Fork ${name}`, action: 'Fork', body: 'Each child begins with the memory and the disk as they are now.', fields: [
    field('count', 'Children', { type: 'number', min: 1, max: MAX_FORKS, value: '1', required: true }),
    field('name', 'Name', { pattern: namePattern, maxlength: 40 }, 'With several children, NAME-1, NAME-2 and so on; empty for names by chance'),
  ] });
  if (!v) return null;
  const n = Number(v.count);
  return { children: Array.from({ length: n }, (_, i) => ({ name: v.name === '' ? '' : n === 1 ? v.name : `${v.name}-${i + 1}` })) };
}

export function sandboxView(root, first) {
  const name = first.name;
  let tab = null;
  let panel = null;
  let s = null;
  let gone = false;
  let busy = '';

  const title = h('h1', { tabIndex: -1 }, h('bdi', null, name));
  const state = h('span');
  const problem = h('p', { className: 'problem', hidden: true });
  const done = h('p', { id: 'done', role: 'status' });
  const buttons = new Map(actions.map((a) => [a.op, h('button', { type: 'button', className: a.danger ? 'danger' : null, 'data-op': a.op, onclick: () => run(a) }, a.label)]));
  const why = h('p', { id: 'why', className: 'hint', hidden: true });
  const bar = h('div', { className: 'actions', role: 'group', 'aria-label': 'Actions', 'aria-describedby': 'why' }, [...buttons.values()]);
  const links = new Map(Object.entries(tabs).map(([key, label]) => [key, h('a', { href: `#/sandbox/${encodeURIComponent(name)}${key === 'overview' ? '' : `/${key}`}` }, label)]));
  const body = h('section', { id: 'panel' });
  root.replaceChildren(
    h('div', { className: 'heading' }, title, state), problem, bar, why, done,
    h('nav', { className: 'tabs', 'aria-label': 'Of this sandbox' }, [...links.values()]), body);

  function draw() {
    state.replaceChildren(status(gone ? 'removed' : s?.status ?? 'unknown'));
    problem.hidden = !s?.problem;
    problem.replaceChildren(s?.problem ? text(s.problem) : '');
    bar.hidden = gone;
    const reason = lacks('create');
    why.hidden = gone || reason === '';
    if (why.textContent !== reason) why.textContent = reason;
    for (const a of actions) {
      const b = buttons.get(a.op);
      const off = !s || busy !== '' || reason !== '' || a.when !== null && !a.when.includes(s.status);
      b.hidden = Boolean(a.has) && !(s && a.has(s));
      // A button that has just been pressed keeps the focus: it says that it is off, and does nothing.
      b.setAttribute('aria-disabled', String(off));
      b.title = reason;
      if (busy === a.op) b.setAttribute('aria-busy', 'true');
      else b.removeAttribute('aria-busy');
    }
    panel?.sandbox?.(s, gone);
  }

  async function run(a) {
    if (buttons.get(a.op).getAttribute('aria-disabled') === 'true') return;
    const body = a.ask ? await a.ask(name, s) : {};
    if (body === null || busy !== '') return;
    clearNotices();
    busy = a.op;
    done.textContent = `${a.doing}…`;
    draw();
    const begun = performance.now();
    try {
      const answer = a.op === 'delete' ? await work('DELETE', at(name)) : await work('POST', at(name, a.op), body);
      done.textContent = `${a.done}, in ${span((performance.now() - begun) / 1000)}.`;
      if (a.op === 'delete' && location.hash.startsWith(`#/sandbox/${encodeURIComponent(name)}`)) {
        location.replace('#/');
        return;
      }
      if (a.op === 'fork') {
        const children = Array.isArray(answer) ? answer : answer?.sandboxes ?? answer?.children ?? [];
        done.append(' ', ...children.flatMap((c) => [sandboxLink(c.name), ' ']));
      }
    } catch (e) {
      done.textContent = '';
      notice(`${a.label.replace('…', '')} ${name}`, e);
    } finally {
      busy = '';
      draw();
      w.soon();
      panel?.again?.();
    }
  }

  const w = watch(async (signal) => {
    try {
      const next = await get(at(name), signal);
      gone = false;
      if (JSON.stringify(next) !== JSON.stringify(s)) s = next;
      draw();
    } catch (e) {
      if (e.status !== 404) throw e;
      gone = true;
      draw();
    }
  });
  w.onerror = (e) => notice(`Reading ${name}`, e);
  const onChange = () => draw();
  session.addEventListener('change', onChange);

  function update(next) {
    const want = Object.hasOwn(panels, next.tab) ? next.tab : 'overview';
    if (want === tab) {
      panel?.update?.(next);
      return;
    }
    tab = want;
    for (const [key, a] of links) {
      if (key === tab) a.setAttribute('aria-current', 'page');
      else a.removeAttribute('aria-current');
    }
    panel?.stop?.();
    body.replaceChildren();
    body.setAttribute('aria-label', tabs[tab]);
    panel = panels[tab](body, name, next);
    draw();
  }
  update(first);
  return {
    get title() { return tab === 'overview' ? name : `${name}: ${tabs[tab].toLowerCase()}`; },
    update,
    stop() {
      panel?.stop?.();
      w.stop();
      session.removeEventListener('change', onChange);
    },
  };
}

// Each panel draws into root and returns {sandbox(s, gone), update(route), again(), stop()}.
const panels = { overview, terminal: terminalPanel, files: filesPanel, policy: policyPanel, flows, snapshots, history, console: consolePanel, stats };

function overview(root) {
  let drawn = '';
  return {
    sandbox(s, gone) {
      const key = JSON.stringify([s, gone, Math.floor(Date.now() / 30_000)]);
      if (key === drawn) return;
      drawn = key;
      if (gone) {
        root.replaceChildren(h('p', { className: 'empty' }, 'There is no sandbox of this name now. What is left of its history is kept for some time.'), h('p', null, h('a', { href: '#/' }, 'All sandboxes')));
        return;
      }
      if (!s) {
        root.replaceChildren(h('p', null, 'Loading…'));
        return;
      }
      const keep = [s.keep?.last && `the last ${s.keep.last} sleeps`, s.keep?.for_seconds && `each for ${span(s.keep.for_seconds)}`].filter(Boolean).join(', ');
      root.replaceChildren(facts([
        ['Owner', text(s.owner)], ['Purpose', text(s.purpose)], ['Tags', s.tags?.length ? tags(s.tags) : text('')], ['Class', text(s.class)],
        ['Image', [text(s.image), s.image_id ? [' ', code(short(s.image_id))] : null]], ['Kernel', s.kernel ? code(s.kernel) : text('')],
        ['Size', `${count(s.vcpus, 'vCPU')}, ${bytes(s.memory_mib * 1048576)} of memory, ${bytes(s.disk_mib * 1048576)} of disk`],
        ['Network', [text(s.network), s.policy_sha256 ? [' policy ', code(short(s.policy_sha256))] : null]],
        ['Hooks', s.hooks ? text(s.hooks) : null],
        ['Created', moment(s.created)], ['Sleeps after', s.idle_seconds ? `${span(s.idle_seconds)} without use` : text('', 'never by itself')],
        ['Expires', s.expires ? [moment(s.expires), ' (', time(s.expires), ')'] : text('', 'never')], ['Keeps', keep || text('', 'only what it needs')],
        ['Made from', s.parent_id || s.fork_point ? [s.parent ? [sandboxLink(s.parent), `, generation ${s.generation ?? 1}, `] : null,
          s.fork_point ? ['at ', h('a', { href: `#/snapshots?id=${encodeURIComponent(s.fork_point)}` }, code(short(s.fork_point)))] : null] : text('', 'its image')],
        ['Wakes from', s.snapshot ? h('a', { href: `#/snapshots?id=${encodeURIComponent(s.snapshot)}` }, code(short(s.snapshot))) : text('')],
        ['Id', code(s.id)],
      ]));
    },
  };
}

function snapshots(root, name) {
  let now = '';
  const p = polled(root, 'Snapshots', undefined, (signal) => listOf(at(name, 'snapshots'), 'snapshots', signal), (list) => snapshotTable(list, { withVM: false, now }));
  return { ...p, sandbox(s) {
    if (s && s.snapshot !== now) {
      now = s.snapshot;
      p.redraw();
    }
  } };
}

// words are the arguments of a command as a shell would take them, so that one argument is not mistaken for two.
export function words(argv) {
  return (argv ?? []).map((a) => (/^[\w@%+=:,./-]+$/.test(a) ? a : `'${a.replaceAll("'", `'\\''`)}'`)).join(' ');
}

function ending(r) {
  if (r.error) return h('span', { className: 'problem' }, text(r.error));
  if (r.state === 'running') return status('running');
  if (r.signal) return h('span', { className: 'bad' }, `signal ${r.signal}`);
  if (r.exit === undefined || r.exit === null) return text('', 'unknown');
  return h('span', { className: r.exit === 0 ? null : 'bad' }, `exit ${r.exit}`);
}

const lasted = (from, to) => (from && to ? span((Date.parse(to) - Date.parse(from)) / 1000) : text(''));

function history(root, name) {
  return polled(root, 'History', HISTORY, (signal) => get(`${at(name, 'history')}?limit=${MAX_ROWS}`, signal), (doc) => [
    doc.problems?.length ? h('p', { className: 'problem' }, `The history may lack something: ${doc.problems.slice(0, 3).join('; ')}`) : null,
    h('h2', null, 'Commands'),
    doc.runs?.length ? table('Commands', [
      { name: 'Begun', className: 'number', cell: (r) => moment(r.begun) },
      { name: 'Command', className: 'command', cell: (r) => code(words(r.command)) },
      { name: 'User', cell: (r) => text(r.user) },
      { name: 'End', cell: ending },
      { name: 'Lasted', className: 'number', cell: (r) => lasted(r.begun, r.ended) },
      { name: 'CPU', className: 'number', cell: (r) => (r.cpu_seconds ? span(r.cpu_seconds) : text('')) },
      { name: 'In', className: 'number', cell: (r) => bytes(r.in_bytes ?? 0) },
      { name: 'Out', className: 'number', cell: (r) => bytes(r.out_bytes ?? 0) },
    ], doc.runs.slice(0, MAX_ROWS)) : h('p', { className: 'empty' }, 'Nothing was run in it.'),
    h('h2', null, 'Sleeps'),
    doc.sleeps?.length ? table('Sleeps', [
      { name: 'Asleep', className: 'number', cell: (r) => moment(r.asleep) },
      { name: 'Was awake', className: 'number', cell: (r) => lasted(r.awake, r.asleep) },
      { name: 'Snapshot', cell: (r) => h('a', { href: `#/snapshots?id=${encodeURIComponent(r.snapshot)}` }, code(short(r.snapshot))) },
      { name: 'Memory', className: 'number', cell: (r) => bytes(r.raw_bytes) },
      { name: 'Stored', className: 'number', cell: (r) => bytes(r.stored_bytes) },
      { name: 'CPU', className: 'number', cell: (r) => span(r.cpu_seconds ?? 0) },
      { name: 'Net in', className: 'number', cell: (r) => bytes(r.network_in_bytes ?? 0) },
      { name: 'Net out', className: 'number', cell: (r) => bytes(r.network_out_bytes ?? 0) },
    ], doc.sleeps.slice(0, MAX_ROWS)) : h('p', { className: 'empty' }, 'It has not slept yet.'),
  ]);
}

const hostPort = (a, port) => (port ? (String(a).includes(':') ? `[${a}]:${port}` : `${a}:${port}`) : String(a));

// Only what is allowed has passed: reject is deny, and the sender was told.
const verdicts = { allow: 'allowed', deny: 'denied', reject: 'rejected' };
const denies = (r) => r.verdict !== 'allow';

const traffic = (c) => (c ? `${bytes(c.bytes ?? 0)}, ${c.packets ?? 0}` : text(''));

function flows(root, name) {
  const denied = h('input', { id: 'denied', type: 'checkbox', onchange: () => p.redraw() });
  const q = h('input', { id: 'flow-q', type: 'search', autocomplete: 'off', spellcheck: 'false', maxlength: 200, placeholder: 'name, address, rule', oninput: () => p.redraw() });
  root.append(h('div', { className: 'filters' }, h('p', null, h('label', { htmlFor: 'flow-q' }, 'Search'), q), h('p', { className: 'check' }, denied, h('label', { htmlFor: 'denied' }, 'only denied'))));
  const one = (r) => [r.name, r.server_name, r.peer, r.rule, r.reason, r.protocol].join('\n').toLowerCase();
  const p = polled(root, 'Flows', FLOWS, (signal) => listOf(at(name, 'flows'), 'flows', signal), (list) => {
    const lost = list.filter((r) => r.type === 'lost').reduce((sum, r) => sum + (r.flows ?? 0) + (r.denied ?? 0) + (r.records ?? 0), 0);
    const rows = list.filter((r) => r.type !== 'lost' && (!denied.checked || denies(r)) && one(r).includes(q.value.toLowerCase()));
    rows.sort((a, b) => Date.parse(b.first) - Date.parse(a.first));
    return [
      h('p', { className: 'summary', role: 'status' }, count(rows.length, 'flow'), rows.length > MAX_ROWS ? `; the newest ${MAX_ROWS} are shown` : '', lost ? `; ${lost} are not told of` : ''),
      rows.length ? table('Flows', [
        { name: 'First', className: 'number', cell: (r) => moment(r.first) },
        { name: 'Verdict', cell: (r) => h('span', { className: denies(r) ? 'verdict deny' : 'verdict' }, verdicts[r.verdict] ?? r.verdict) },
        { name: 'Rule', cell: (r) => text(r.rule || r.reason) },
        { name: 'Protocol', cell: (r) => text(r.protocol) },
        { name: 'Direction', cell: (r) => (r.direction === 'ingress' ? 'in' : 'out') },
        { name: 'Peer', cell: (r) => text(hostPort(r.peer, r.peer_port)) },
        { name: 'Name', cell: (r) => [text(r.name), r.server_name && r.server_name !== r.name ? [' ', h('span', { className: 'dim' }, 'TLS ', text(r.server_name))] : null] },
        { name: 'Sent, packets', className: 'number', cell: (r) => traffic(r.egress) },
        { name: 'Received, packets', className: 'number', cell: (r) => traffic(r.ingress) },
        { name: 'Lasted', className: 'number', cell: (r) => lasted(r.first, r.last) },
        { name: 'End', cell: (r) => text(r.end) },
      ], rows.slice(0, MAX_ROWS), (r) => (denies(r) ? 'denied' : null)) : h('p', { className: 'empty' }, denied.checked ? 'Nothing was denied.' : 'No flows are known.'),
    ];
  });
  return p;
}

function consolePanel(root, name) {
  let size = TAIL;
  let last = null;
  const follow = h('input', { id: 'follow', type: 'checkbox', checked: true, onchange: () => { w.soon(); end(); } });
  const more = h('button', { type: 'button', onclick: () => { size = TAIL_MORE; more.disabled = true; w.soon(); } }, `Show the last ${bytes(TAIL_MORE)}`);
  const pre = h('pre', { id: 'console', tabIndex: 0, role: 'log', 'aria-label': 'Console', 'aria-live': 'off' });
  const hint = h('p', { className: 'summary', role: 'status' }, 'Loading…');
  root.append(h('div', { className: 'filters' }, h('p', { className: 'check' }, follow, h('label', { htmlFor: 'follow' }, 'follow')), h('p', null, more)), hint, pre);
  const end = () => { if (follow.checked) pre.scrollTop = pre.scrollHeight; };
  // Who scrolls up reads; who comes back to the end follows.
  pre.addEventListener('scroll', () => {
    const bottom = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 4;
    if (!bottom && follow.checked && last !== null) follow.checked = false;
  });
  const w = watch(async (signal) => {
    if (!follow.checked && last !== null && last.size === size) return;
    const raw = await bytesOf(`${at(name, 'console')}?tail=${size}`, signal);
    // A tail may begin in the midst of a character or of a line.
    let shown = terminal(new TextDecoder().decode(raw.length > TAIL_MORE ? raw.subarray(raw.length - TAIL_MORE) : raw));
    if (raw.length >= size) shown = shown.slice(shown.indexOf('\n') + 1);
    if (last?.shown === shown) {
      last.size = size;
      return;
    }
    const selected = getSelection();
    if (selected && !selected.isCollapsed && pre.contains(selected.anchorNode)) return; // somebody is about to copy something
    last = { shown, size };
    pre.textContent = shown;
    hint.textContent = shown === '' ? 'The console is empty.' : `${raw.length >= size ? `The last ${bytes(size)}` : bytes(raw.length)} of the serial port. Escape sequences are left out.`;
    end();
  }, { every: FOLLOW });
  w.onerror = (e) => { hint.textContent = ''; notice(`Console of ${name}`, e); };
  return { stop: () => w.stop(), again: () => w.soon() };
}

function stats(root, name) {
  const button = h('button', { type: 'button', onclick: () => measure() }, 'Measure');
  const box = h('div', null, h('p', { className: 'hint' }, 'Measuring asks the guest, which counts as use: it delays a sleep by idle time. So it is done when you ask for it.'));
  root.append(h('p', null, button), box);
  const control = new AbortController();
  async function measure() {
    button.disabled = true;
    try {
      const s = await get(at(name, 'stats'), control.signal);
      const g = s.guest;
      const m = g?.memory;
      box.replaceChildren(
        s.problem ? h('p', { className: 'problem' }, text(s.problem)) : '',
        h('h2', null, 'Host'),
        facts([
          ['Measured', moment(s.time)], ['Process', String(s.host.pid)], ['Awake for', span(s.host.awake_ms / 1000)],
          ['CPU', `${span(s.host.cpu_user_ms / 1000)} user, ${span(s.host.cpu_system_ms / 1000)} system`],
          ['Memory', `${bytes(s.host.memory_private)} of its own, ${bytes(s.host.memory_shared)} shared, ${bytes(s.host.memory_swapped)} swapped`],
          ['Loaded', s.host.faults ? `${s.host.mib_touched.toFixed(1)} MiB, the guest waited ${count(s.host.faults, 'time')}` : null],
        ]),
        g ? h('h2', null, 'Guest') : '',
        g ? facts([
          ['Up for', span(g.uptime_ms / 1000)], ['Load', [g.load1, g.load5, g.load15].map((l) => l.toFixed(2)).join(' ')],
          ['CPU', `${span(g.cpu.user_ms / 1000)} user, ${span(g.cpu.system_ms / 1000)} system, on ${count(g.cpus, 'CPU')}`],
          ['Memory', `${bytes(m.available)} of ${bytes(m.total)} available, ${bytes(m.cached)} cached`],
          ['Tasks', `${g.tasks}, of which ${g.tasks_running} run`], ['Killed for memory', g.oom_kills ? String(g.oom_kills) : null],
        ]) : '',
        g?.file_systems?.length ? table('File systems', [
          { name: 'Path', cell: (f) => text(f.path) }, { name: 'Type', cell: (f) => text(f.type) },
          { name: 'Size', className: 'number', cell: (f) => bytes(f.size) }, { name: 'Available', className: 'number', cell: (f) => bytes(f.available) },
        ], g.file_systems) : '',
        g?.interfaces?.length ? table('Interfaces', [
          { name: 'Interface', cell: (i) => text(i.name) }, { name: 'Received', className: 'number', cell: (i) => bytes(i.received_bytes) }, { name: 'Sent', className: 'number', cell: (i) => bytes(i.sent_bytes) },
        ], g.interfaces) : '');
    } catch (e) {
      if (!control.signal.aborted) notice(`Measuring ${name}`, e);
    } finally {
      button.disabled = false;
    }
  }
  return { stop: () => control.abort() };
}
