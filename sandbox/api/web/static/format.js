// Texts as people read them. Everything here is pure.

// MAX_TEXT is how many characters of one text are shown: what a guest says is cut there.
export const MAX_TEXT = 4096;

// Control and format characters, which could hide, reorder or forge what is next to them, and lone surrogates. Tabs and line ends
// are kept where lines are wanted.
const unseen = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}]/gu;
const stacked = /(\p{M}{4})\p{M}+/gu;

function escaped(c) {
  return `\\u{${c.codePointAt(0).toString(16)}}`;
}

// visible is a text without anything that cannot be seen: such characters are written as \u{...}.
export function visible(text, { lines = false, max = MAX_TEXT } = {}) {
  let s = String(text);
  if (s.length > max) s = s.slice(0, max) + '…';
  return s.replace(stacked, '$1').replace(unseen, (c) => (lines && (c === '\n' || c === '\t') ? c : escaped(c)));
}

// ECMA-48: control strings (OSC, DCS, SOS, PM, APC) with their end, control sequences, other escapes.
const strings = /\x1b(?:\][^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_][^\x1b]*\x1b\\)/g;
const sequences = /\x1b(?:\[[0-?]*[ -/]*[@-~]|[ -/]*[0-~])/g;

// terminal is what is to be read of a terminal's bytes: escape sequences are left out, a line that was written over is written
// below, and characters that are not seen are escaped.
export function terminal(text) {
  const plain = text.replace(strings, '').replace(sequences, '').replace(/\r+\n/g, '\n').replace(/\r+/g, '\n');
  return visible(plain, { lines: true, max: Infinity });
}

const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];

export function bytes(n) {
  if (!Number.isFinite(n)) return '–';
  let at = 0;
  let v = n;
  while (Math.abs(v) >= 1024 && at < units.length - 1) {
    v /= 1024;
    at++;
  }
  return `${at === 0 || v >= 100 ? Math.round(v) : v.toFixed(1)} ${units[at]}`;
}

// span is a time in seconds in its two largest units at most.
export function span(seconds) {
  const s = Math.abs(seconds);
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${Number(s.toFixed(1))} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  const steps = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']];
  const at = steps.findIndex(([n]) => s >= n);
  const [n, unit] = steps[at];
  const whole = Math.floor(s / n);
  const next = steps[at + 1];
  const rest = next && whole < 10 ? Math.floor((s - whole * n) / next[0]) : 0;
  return rest > 0 ? `${whole} ${unit} ${rest} ${next[1]}` : `${whole} ${unit}`;
}

// relative is a time as it is from now.
export function relative(time, now = Date.now()) {
  const seconds = (Date.parse(time) - now) / 1000;
  if (!Number.isFinite(seconds)) return '–';
  const far = coarse(Math.abs(seconds));
  if (far === '') return 'now';
  return seconds < 0 ? `${far} ago` : `in ${far}`;
}

function coarse(s) {
  for (const [n, unit] of [[86400, 'd'], [3600, 'h'], [60, 'min']]) {
    if (s >= n) return `${Math.floor(s / n)} ${unit}`;
  }
  return s < 1 ? '' : `${Math.floor(s)} s`;
}

const two = (n) => String(n).padStart(2, '0');

// exact is a time to the second, by the reader's clock, with its offset from UTC.
export function exact(time) {
  const t = new Date(time);
  if (Number.isNaN(t.getTime())) return '–';
  const off = -t.getTimezoneOffset();
  const zone = `${off < 0 ? '-' : '+'}${two(Math.floor(Math.abs(off) / 60))}:${two(Math.abs(off) % 60)}`;
  return `${t.getFullYear()}-${two(t.getMonth() + 1)}-${two(t.getDate())} ${two(t.getHours())}:${two(t.getMinutes())}:${two(t.getSeconds())} ${zone}`;
}

export function count(n, one, many = one + 's') {
  return `${n.toLocaleString('en')} ${n === 1 ? one : many}`;
}
