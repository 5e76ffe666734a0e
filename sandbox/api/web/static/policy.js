// The network policy of a sandbox: what holds, its text to edit, and what was denied as rules to add.
import { h, text, code, table, notice, off, isOff } from './dom.js';
import { at, listOf, work, tagged, watch, session, lacks } from './api.js';
import { count, visible } from './format.js';

// EVERY is how often flows are read, in milliseconds, and MAX_SUGGESTIONS how many are shown.
const EVERY = 5000;
const MAX_SUGGESTIONS = 50;
// MAX_DIFF bounds the lines that are compared: the table for it has their product.
const MAX_DIFF = 2000;

// compact leaves out what says nothing: an empty list and an absent one are the same.
export function compact(v) {
  if (Array.isArray(v)) return v.map(compact);
  if (v === null || typeof v !== 'object') return v;
  return Object.fromEntries(Object.entries(v).map(([k, x]) => [k, compact(x)]).filter(([, x]) => x !== null && x !== '' && !(Array.isArray(x) && x.length === 0) && !(typeof x === 'object' && !Array.isArray(x) && Object.keys(x).length === 0)));
}

// json is the text of a policy. What could hide or reorder what is next to it is escaped as JSON allows.
const json = (v) => JSON.stringify(v, null, 2).replace(/[\u007f-\u009f\u00ad\u0600-\u0605\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`);

const written = (policy) => json({ version: 1, rules: [], ...compact(policy) });

// difference is the lines of two texts: [' ', both], ['-', the first], ['+', the second].
export function difference(a, b) {
  const x = a.split('\n');
  const y = b.split('\n');
  if (x.length > MAX_DIFF || y.length > MAX_DIFF) return [...x.map((l) => ['-', l]), ...y.map((l) => ['+', l])];
  const same = Array.from({ length: x.length + 1 }, () => new Uint16Array(y.length + 1));
  for (let i = x.length - 1; i >= 0; i--) for (let j = y.length - 1; j >= 0; j--) same[i][j] = x[i] === y[j] ? same[i + 1][j + 1] + 1 : Math.max(same[i + 1][j], same[i][j + 1]);
  const out = [];
  let i = 0;
  let j = 0;
  while (i < x.length || j < y.length) {
    if (i < x.length && j < y.length && x[i] === y[j]) {
      out.push([' ', x[i]]);
      i++;
      j++;
    } else if (j >= y.length || i < x.length && same[i + 1][j] >= same[i][j + 1]) out.push(['-', x[i++]]);
    else out.push(['+', y[j++]]);
  }
  return out;
}

// near leaves of a difference what is within a few lines of a change, and an ellipsis for the rest.
const NEAR = 3;
function near(lines) {
  const keep = lines.map((_, i) => lines.slice(Math.max(0, i - NEAR), i + NEAR + 1).some(([sign]) => sign !== ' '));
  return lines.flatMap((l, i) => (keep[i] ? [l] : i === 0 || keep[i - 1] ? [[' ', '…']] : []));
}

// openable are the reasons of denials that a rule changes: others are of the floor, of limits, or of malformed packets.
const openable = new Set(['rule', 'default', 'tls-name', 'proxy']);

// suggestions are rules that would let pass what was denied, the most often denied first.
export function suggestions(flows) {
  const by = new Map();
  for (const f of flows) {
    if (f.type === 'lost' || f.verdict === 'allow' || !openable.has(f.reason) || f.direction !== 'egress' || !['tcp', 'udp', 'icmp', 'icmpv6'].includes(f.protocol)) continue;
    const name = f.server_name || f.name || '';
    const protocol = f.protocol === 'icmpv6' ? 'icmp' : f.protocol;
    if (protocol !== 'icmp' && !f.peer_port) continue;
    const label = `${protocol} ${name || f.peer}${f.peer_port && protocol !== 'icmp' ? ` port ${f.peer_port}` : ''}`;
    const known = by.get(label);
    if (known) {
      known.times++;
      if (f.last > known.last) known.last = f.last;
      continue;
    }
    const rule = { name: label.slice(0, 64), direction: 'egress', verdict: 'allow' };
    if (name) rule.names = [name];
    else rule.cidrs = [`${f.peer}/${String(f.peer).includes(':') ? 128 : 32}`];
    rule.protocols = [protocol];
    if (protocol !== 'icmp') rule.ports = [String(f.peer_port)]; // as the server writes it
    by.set(label, { label, rule, times: 1, last: f.last });
  }
  return [...by.values()].sort((a, b) => b.times - a.times || (a.label < b.label ? -1 : 1));
}

const peers = (r) => [...r.groups ?? [], ...r.cidrs ?? [], ...r.names ?? [], ...(r.agents ?? []).map((a) => `tag ${a}`)];

function summary(p) {
  const d = p.default ?? {};
  return [
    h('p', { className: 'summary' }, 'Where no rule matches: out ', h('strong', null, d.egress || 'deny'), ', in ', h('strong', null, d.ingress || 'deny'), '. Names are resolved by ',
      p.dns?.upstreams?.length ? p.dns.upstreams.map((u, i) => [i ? ', ' : '', code(u)]) : 'nothing', '.'),
    p.rules?.length ? table('Rules', [
      { name: 'Rule', cell: (r) => text(r.name) },
      { name: 'Direction', cell: (r) => (r.direction === 'ingress' ? 'in' : 'out') },
      { name: 'Verdict', cell: (r) => h('span', { className: r.verdict === 'allow' ? 'verdict' : 'verdict deny' }, r.verdict || 'deny') },
      { name: 'Peers', cell: (r) => text(peers(r).join(', '), r.verdict === 'allow' ? 'none' : 'any') },
      { name: 'Protocols', cell: (r) => text((r.protocols ?? []).join(', '), r.verdict === 'allow' ? 'none' : 'any') },
      { name: 'Ports', cell: (r) => text((r.ports ?? []).join(', '), r.verdict === 'allow' ? 'none' : 'any') },
    ], p.rules) : h('p', { className: 'empty' }, 'There are no rules.'),
    p.publish?.length ? h('p', null, 'Published: ', p.publish.map((x, i) => [i ? ', ' : '', code(`${x.listen} → ${x.port}/${x.protocol}`)])) : null,
  ];
}

export function policyPanel(root, name) {
  let held = null; // {doc, etag, text}: what the text began as
  let flows = [];
  let running = false;
  let busy = false;
  let drawn = '';
  const control = new AbortController();

  const holds = h('div', { id: 'policy-holds' }, h('p', { role: 'status' }, 'Loading…'));
  const area = h('textarea', { id: 'policy-text', className: 'code', rows: 18, spellcheck: 'false', autocomplete: 'off', 'aria-describedby': 'policy-error policy-why', oninput: () => draw() });
  const error = h('p', { id: 'policy-error', className: 'field-error', role: 'alert', hidden: true });
  const save = h('button', { type: 'button', id: 'policy-save', className: 'primary', 'aria-describedby': 'policy-why', onclick: () => isOff(save) || put(held.etag) }, 'Save');
  const revert = h('button', { type: 'button', id: 'policy-revert', onclick: () => { if (!isOff(revert)) take(held); } }, 'Undo changes');
  const why = h('p', { id: 'policy-why', className: 'hint', hidden: true });
  const done = h('p', { id: 'policy-done', className: 'summary', role: 'status' });
  const conflict = h('section', { id: 'policy-conflict', 'aria-label': 'Changed meanwhile', hidden: true });
  const proposed = h('div', { id: 'suggestions' });
  const editor = h('div', { hidden: true }, h('h2', null, h('label', { htmlFor: 'policy-text' }, 'Edit')), h('p', { className: 'hint' }, 'JSON. When it is saved, each packet of a running sandbox is judged by it alone.'),
    area, error, conflict, h('p', { className: 'actions' }, save, revert), why, done, h('h2', null, 'Denied lately'), proposed);
  root.append(holds, editor);

  const dirty = () => held !== null && area.value !== held.text;

  function draw() {
    const reason = lacks('create');
    off(save, busy ? 'It is being saved.' : reason || (held === null ? 'It is not read yet.' : dirty() ? '' : 'Nothing is changed.'));
    off(revert, dirty() ? '' : 'Nothing is changed.');
    area.readOnly = reason !== '';
    why.hidden = reason === '';
    why.textContent = reason;
    suggest();
  }

  function complain(e) {
    error.hidden = e === null;
    if (e === null) {
      area.removeAttribute('aria-invalid');
      return;
    }
    error.replaceChildren(...[h('bdi', null, e.message), e.code ? [' (', code(e.code), ')'] : null].flat().filter(Boolean));
    area.setAttribute('aria-invalid', 'true');
    area.focus();
    const line = /\bline (\d+)\b/.exec(e.message);
    if (!line) return;
    const lines = area.value.split('\n');
    const from = lines.slice(0, Number(line[1]) - 1).join('\n').length + (line[1] === '1' ? 0 : 1);
    area.setSelectionRange(from, from + (lines[Number(line[1]) - 1] ?? '').length);
  }

  // take begins anew with what the server has.
  function take(next) {
    held = next;
    area.value = next.text;
    conflict.hidden = true;
    conflict.replaceChildren();
    complain(null);
    draw();
  }

  async function read() {
    const { doc, etag } = await tagged(at(name, 'policy'), control.signal);
    return { doc, etag, text: written(doc) };
  }

  function show(next) {
    editor.hidden = false;
    holds.replaceChildren(h('h2', null, 'What holds'), ...summary(next.doc).filter(Boolean));
  }

  async function put(etag) {
    complain(null);
    done.textContent = 'Saving…';
    busy = true;
    draw();
    try {
      const res = await work('PUT', at(name, 'policy'), area.value, { 'If-Match': etag });
      const next = await read();
      busy = false;
      take(next);
      show(next);
      done.textContent = res.live ? 'Saved. It holds from now on.' : 'Saved. It holds from when the sandbox is awake.';
      area.focus({ preventScroll: true });
    } catch (e) {
      busy = false;
      done.textContent = '';
      if (e.code === 'precondition') await differ();
      else if (e.status === 400) complain(e);
      else notice(`Policy of ${name}`, e);
    }
    draw();
  }

  // differ shows what somebody else has changed, and asks which text is to be.
  async function differ() {
    let theirs;
    try {
      theirs = await read();
    } catch (e) {
      return void notice(`Policy of ${name}`, e);
    }
    show(theirs);
    const over = h('button', { type: 'button', id: 'policy-over', className: 'danger', onclick: () => {
      held = { ...theirs };
      conflict.hidden = true;
      put(theirs.etag);
    } }, 'Save mine in its place');
    const drop = h('button', { type: 'button', id: 'policy-theirs', onclick: () => { take(theirs); area.focus(); } }, 'Take theirs');
    conflict.hidden = false;
    const lines = near(difference(held.text, theirs.text));
    conflict.replaceChildren(h('p', { role: 'alert' }, h('strong', null, 'It was changed meanwhile.'), ' Nothing is saved. This is what differs from what you began with:'),
      h('pre', { className: 'diff', tabIndex: 0, 'aria-label': 'What was changed' }, lines.map(([sign, line]) => h('span', { className: sign === '+' ? 'added' : sign === '-' ? 'taken' : 'both' }, `${sign} ${line}`)).flatMap((e) => [e, document.createTextNode('\n')])),
      h('p', { className: 'actions' }, drop, over));
    drop.focus();
  }

  // has says whether the text has a rule already.
  function has(rule) {
    try {
      return (JSON.parse(area.value).rules ?? []).some((r) => JSON.stringify(compact(r)) === JSON.stringify(rule));
    } catch {
      return false;
    }
  }

  function add(rule) {
    let policy;
    try {
      policy = JSON.parse(area.value);
      // The first rule that matches decides: before one that denies.
      policy.rules = [rule, ...policy.rules ?? []];
    } catch (e) {
      return complain({ message: `The text is no JSON, so no rule can be added: ${e.message}` });
    }
    area.value = json(policy);
    complain(null);
    done.textContent = `Added to the text: ${visible(rule.name)}. Save puts it in force.`;
    draw();
  }

  function suggest() {
    const all = suggestions(flows);
    const reason = lacks('create');
    const key = JSON.stringify([all, running, reason, all.map((s) => has(s.rule))]);
    if (key === drawn) return;
    drawn = key;
    const had = proposed.contains(document.activeElement) ? document.activeElement.dataset.rule : null;
    proposed.replaceChildren(...(all.length === 0 ? [h('p', { className: 'empty' }, running ? 'Nothing that a rule could open was denied.' : 'What is denied is known while it runs.')] : [
      h('p', { className: 'hint' }, 'Each would be a rule of its own, before the others.'),
      h('ul', { className: 'suggestions' }, all.slice(0, MAX_SUGGESTIONS).map((s) => {
        const there = has(s.rule);
        const b = h('button', { type: 'button', className: 'small', 'data-rule': s.label, 'aria-label': `Allow ${s.label}`, onclick: () => isOff(b) || add(s.rule) }, there ? 'Added' : 'Allow');
        off(b, reason || (there ? 'The text has it.' : ''));
        return h('li', null, b, h('span', null, h('bdi', null, s.label), h('span', { className: 'dim' }, `, denied ${count(s.times, 'time')}`)));
      })),
    ]));
    if (had !== null) [...proposed.querySelectorAll('button')].find((b) => b.dataset.rule === had)?.focus();
  }

  const w = watch(async (signal) => {
    try {
      const next = await read();
      if (signal.aborted) return;
      show(next);
      // Nobody's text is taken away: a change is said when it is saved.
      if (held === null || !dirty()) take(next);
    } catch (e) {
      if (signal.aborted) return;
      if (held === null) holds.replaceChildren(h('p', { className: 'empty' }, text(e.message), e.remedy ? ['. ', text(e.remedy), '.'] : null));
      throw e;
    }
    flows = running ? await listOf(at(name, 'flows'), 'flows', signal).catch(() => flows) : [];
    draw();
  }, { every: EVERY });

  const onChange = () => draw();
  session.addEventListener('change', onChange);
  draw();
  return {
    sandbox(s) {
      const now = s?.status === 'running';
      if (now !== running) {
        running = now;
        w.soon();
      }
    },
    again: () => w.soon(),
    stop() {
      w.stop();
      control.abort();
      session.removeEventListener('change', onChange);
    },
  };
}
