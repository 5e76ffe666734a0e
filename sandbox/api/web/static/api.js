// The API of the same origin: requests with the token of this tab, and news of changes.
import { ask, field } from './dom.js';

// READ_TIME and WORK_TIME bound a request, in milliseconds: one that reads, and one that may have to boot a VM or write a snapshot.
const READ_TIME = 60_000;
const WORK_TIME = 15 * 60_000;
// MAX_LINE bounds a line of the stream of events, in characters.
const MAX_LINE = 1 << 20;
// MAX_ROWS is how many sandboxes are loaded, and PAGE how many with one request: the most that the API gives.
export const MAX_ROWS = 10_000;
const PAGE = 1000;

const KEY = 'drowse-token';
let unkept = ''; // the token, where the browser keeps nothing

export const session = new EventTarget();
session.scopes = null; // what the token may do, as soon as that is known
session.owner = '';
session.link = 'connecting';

function changed() {
  session.dispatchEvent(new Event('change'));
}

export function token() {
  try {
    return sessionStorage.getItem(KEY) ?? unkept;
  } catch {
    return unkept;
  }
}

export function setToken(value) {
  unkept = value;
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Then this tab knows it until it is loaded again.
  }
  changed();
}

function setLink(state) {
  if (session.link === state) return;
  session.link = state;
  changed();
}

// lacks is why a control that needs a scope is off, or empty. What is not known yet is tried.
export function lacks(scope) {
  if (session.scopes === null || session.scopes.includes(scope)) return '';
  return `This token has no scope “${scope}”: it may only ${session.scopes.join(', ')}.`;
}

// Failure is an error that the API has given, or that kept it from being reached.
export class Failure extends Error {
  constructor(status, { code = '', message = '', remedy = '' } = {}) {
    super(message || `the server answered ${status}`);
    this.status = status;
    this.code = code;
    this.remedy = remedy;
  }
}

let asking = null;

// askToken asks for a token once, however many requests want one.
function askToken(wrong) {
  asking ??= ask({
    title: 'Token', action: 'Use it',
    body: wrong ? 'The server does not accept this token.' : 'This server asks for a token. It is kept in this tab until the tab is closed.',
    fields: [field('token', 'Token', { type: 'password', required: true, maxlength: 4096 }, 'Made by: drowse token create')],
  }).then((values) => {
    asking = null;
    const given = values?.token.trim() ?? '';
    if (given) setToken(given);
    return given;
  });
  return asking;
}

export async function send(method, path, { body, signal, accept = 'application/json', limit, headers: more } = {}) {
  for (;;) {
    const used = token();
    const headers = { Accept: accept, ...more };
    if (used) headers.Authorization = `Bearer ${used}`;
    if (body !== undefined) headers['Content-Type'] = 'application/json';
    const signals = [signal, limit && AbortSignal.timeout(limit)].filter(Boolean);
    let res;
    try {
      res = await fetch(path, {
        method, headers, body: body === undefined || typeof body === 'string' ? body : JSON.stringify(body), signal: signals.length ? AbortSignal.any(signals) : undefined,
        cache: 'no-store', credentials: 'omit', redirect: 'error', referrerPolicy: 'no-referrer',
      });
    } catch (e) {
      if (signal?.aborted) throw e;
      setLink('offline');
      const late = e.name === 'TimeoutError';
      throw new Failure(0, {
        code: late ? 'timeout' : 'unreachable', message: late ? `no answer within ${limit / 1000} s` : 'the server cannot be reached',
        remedy: late ? 'look again later: what has begun goes on' : 'see whether `drowse serve` runs',
      });
    }
    if (session.link === 'offline') setLink('polling');
    if (res.ok) return res;
    const error = await failure(res);
    if (res.status === 401) {
      // Somebody may have given another one since this was sent.
      if (token() !== used || await askToken(used !== '')) continue;
    }
    throw error;
  }
}

async function failure(res) {
  return failureOf(res.status, await res.text().catch(() => ''));
}

// failureOf is the error in the text of an answer.
export function failureOf(status, text) {
  try {
    return new Failure(status, JSON.parse(text).error);
  } catch {
    return new Failure(status);
  }
}

export const at = (name, ...rest) => ['/v1/sandboxes', encodeURIComponent(name), ...rest].join('/');

export async function get(path, signal) {
  return (await send('GET', path, { signal, limit: READ_TIME })).json();
}

// tagged reads what several may edit, with the entity tag that a change of it names.
export async function tagged(path, signal) {
  const res = await send('GET', path, { signal, limit: READ_TIME });
  return { doc: await res.json(), etag: res.headers.get('ETag') ?? '' };
}

export async function bytesOf(path, signal) {
  const res = await send('GET', path, { signal, limit: READ_TIME, accept: 'text/plain, application/octet-stream' });
  return new Uint8Array(await res.arrayBuffer());
}

// work changes something. A body that is a text is sent as it is.
export async function work(method, path, body, headers) {
  const res = await send(method, path, { body, limit: WORK_TIME, headers });
  const text = await res.text();
  return text ? JSON.parse(text) : null;
}

// listOf is the list in an answer that may be the list, an object that has it, or a line for each.
export async function listOf(path, field, signal) {
  const text = await (await send('GET', path, { signal, limit: READ_TIME })).text();
  let doc;
  try {
    doc = JSON.parse(text);
  } catch {
    return text.split('\n').filter((l) => l.trim()).map((l) => JSON.parse(l));
  }
  if (Array.isArray(doc)) return doc;
  if (doc && field in doc) return doc[field] ?? [];
  return doc && Object.keys(doc).length > 0 ? [doc] : [];
}

// sandboxes loads all of them, up to MAX_ROWS; more says that there are others.
export async function sandboxes(filter, signal) {
  const rows = [];
  const problems = [];
  let after = '';
  do {
    const q = new URLSearchParams(filter);
    q.set('limit', PAGE);
    if (after) q.set('after', after);
    const page = await get(`/v1/sandboxes?${q}`, signal);
    rows.push(...(page.sandboxes ?? []));
    problems.push(...(page.problems ?? []));
    after = page.next ?? '';
  } while (after && rows.length < MAX_ROWS);
  return { rows, problems, more: after !== '' };
}

// whoAmI learns what the token may do, where the server says so.
export async function whoAmI(signal) {
  const doc = await get('/v1/version', signal);
  session.scopes = doc.scopes ?? null;
  session.owner = doc.owner ?? '';
  changed();
  return doc;
}

// Times between two looks, in milliseconds: without a stream of events, with one, and at most after failures.
const POLL = 5_000;
const POLL_STREAM = 30_000;
const POLL_MAX = 60_000;
// SETTLE is how long several events are waited for together.
const SETTLE = 200;

const watchers = new Set();
let stream = null;
let cursor = '';
let noStream = false; // the server has none

// watch calls look, which may fail, now and whenever something may have changed, as long as the tab is seen. It never runs twice at
// once. It returns what ends it.
export function watch(look, { every } = {}) {
  const w = { timer: 0, running: false, again: false, wait: 0, stopped: false, control: new AbortController() };
  w.run = async () => {
    clearTimeout(w.timer);
    if (w.stopped || document.hidden) return;
    if (w.running) {
      w.again = true;
      return;
    }
    w.running = true;
    w.again = false;
    let ok = true;
    try {
      await look(w.control.signal);
    } catch (e) {
      if (w.stopped) return;
      ok = false;
      w.onerror?.(e);
    } finally {
      w.running = false;
    }
    if (w.stopped) return;
    if (ok) {
      w.onok?.();
      w.wait = every ?? (session.link === 'live' ? POLL_STREAM : POLL);
    } else {
      w.wait = Math.min(Math.max(w.wait, POLL) * 2, POLL_MAX);
    }
    w.timer = setTimeout(w.run, w.again && ok ? SETTLE : w.wait);
  };
  w.soon = () => {
    if (w.running) {
      w.again = true;
      return;
    }
    clearTimeout(w.timer);
    w.timer = setTimeout(w.run, SETTLE);
  };
  w.stop = () => {
    w.stopped = true;
    clearTimeout(w.timer);
    w.control.abort();
    watchers.delete(w);
    if (watchers.size === 0) endStream();
  };
  watchers.add(w);
  w.run();
  beginStream();
  return w;
}

function endStream() {
  stream?.abort();
  stream = null;
}

document.addEventListener('visibilitychange', () => {
  if (document.hidden) {
    endStream();
    for (const w of watchers) clearTimeout(w.timer);
    return;
  }
  beginStream();
  for (const w of watchers) w.run();
});

// A new token may see what the one before could not.
let lastToken = token();
session.addEventListener('change', () => {
  if (token() === lastToken) return;
  lastToken = token();
  noStream = false;
  endStream();
  beginStream();
});

async function beginStream() {
  if (stream || noStream || document.hidden || watchers.size === 0) return;
  const mine = new AbortController();
  stream = mine;
  let wait = 1000;
  while (!mine.signal.aborted) {
    try {
      await followEvents(mine.signal, () => (wait = 1000));
    } catch (e) {
      if (mine.signal.aborted) break;
      if (e.status >= 400 && e.status < 500 || e.status === 501) {
        noStream = e.status !== 401;
        break;
      }
    }
    if (mine.signal.aborted) break;
    if (session.link === 'live') setLink('polling');
    await new Promise((done) => setTimeout(done, wait));
    wait = Math.min(wait * 2, POLL_MAX);
  }
  if (stream === mine) stream = null;
  if (session.link !== 'offline') setLink('polling');
}

async function followEvents(signal, ok) {
  const q = new URLSearchParams({ follow: '1' });
  if (cursor) q.set('since', cursor);
  const res = await send('GET', `/v1/events?${q}`, { signal, accept: 'application/x-ndjson, application/json' });
  setLink('live');
  ok();
  for (const w of watchers) w.soon();
  const reader = res.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    if (rest.length > MAX_LINE) throw new Error('an event is too long');
    const lines = rest.split('\n');
    rest = lines.pop();
    let news = false;
    for (const line of lines) {
      if (!line.trim()) continue; // it only keeps the connection
      const event = JSON.parse(line);
      cursor = String(event.cursor ?? event.id ?? cursor);
      news = true;
    }
    if (news) for (const w of watchers) w.soon();
  }
}
