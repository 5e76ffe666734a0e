// A terminal in a sandbox. Its program goes on without the page and through sleeps: it is attached to again.
import { h, text, notice, ask, off, isOff } from './dom.js';
import { at, get, work, session, lacks } from './api.js';
import { relative, visible } from './format.js';
import { Stream } from './stream.js';
import { styleByScript } from './styles.js';

// What begins a name of a process that a page has started.
const MARK = 'page-';
// Times between attempts to attach, in milliseconds.
const AGAIN = [500, 1000, 2000, 4000, 8000, 15_000];
// OUTPUT_KIB is how much output is kept for who attaches, and SCROLLBACK how many lines the page keeps.
const OUTPUT_KIB = 1024;
const SCROLLBACK = 5000;

// SHELL is bash where there is one.
const SHELL = 'if command -v bash >/dev/null; then exec bash -l; fi; exec sh -l';

const theme = {
  background: '#14171c', foreground: '#e4e7ec', cursor: '#8db8f0', cursorAccent: '#14171c', selectionBackground: '#3a5680',
  black: '#2a3039', red: '#ff8a80', green: '#6fcf97', yellow: '#e9b866', blue: '#8db8f0', magenta: '#d7a6f0', cyan: '#7fd6dc', white: '#d3d8e0',
  brightBlack: '#7d8796', brightRed: '#ffb0a8', brightGreen: '#97e2b5', brightYellow: '#f5d493', brightBlue: '#b3d2ff', brightMagenta: '#e8c8fa', brightCyan: '#aeeef2', brightWhite: '#ffffff',
};

const held = new Map(); // sandbox's name -> the process that this page has shown last

// lost are codes of errors after which the process may be there still: its sandbox sleeps, or the server ends.
const lost = new Set(['guest-lost', 'guest-unavailable', 'guest-protocol', 'canceled', 'not-running', 'timeout', 'error']);

export function terminalPanel(root, name) {
  let sandbox = null;
  let stopped = false;
  let term = null;
  let fit = null;
  let stream = null;
  let process = ''; // that the terminal shows
  let offset = 0; // of its output: what is shown
  let replayed = 0; // up to here output was shown before, to somebody: answers to its questions were given
  let tries = 0;
  let timer = 0;
  let waits = false; // to be attached again when the sandbox is awake
  const control = new AbortController();

  const command = h('input', { id: 'terminal-command', type: 'text', autocomplete: 'off', spellcheck: 'false', maxlength: 4096, placeholder: 'a shell' });
  const open = h('button', { type: 'submit', id: 'terminal-open', className: 'primary', 'aria-describedby': 'terminal-why' }, 'Open');
  const end = h('button', { type: 'button', id: 'terminal-end', className: 'danger', hidden: true, onclick: () => isOff(end) || kill(process) }, 'End…');
  const again = h('button', { type: 'button', id: 'terminal-again', className: 'primary', hidden: true, onclick: () => attach() }, 'Continue');
  const reader = h('input', { id: 'terminal-reader', type: 'checkbox', onchange: () => { if (term) term.options.screenReaderMode = reader.checked; } });
  const why = h('p', { id: 'terminal-why', className: 'hint', hidden: true });
  const says = h('p', { id: 'terminal-state', className: 'summary', role: 'status' });
  const title = h('span', { id: 'terminal-title', className: 'dim' });
  const others = h('ul', { id: 'terminals', 'aria-label': 'Terminals that run' });
  const box = h('div', { id: 'terminal', hidden: true });
  root.append(h('form', { className: 'filters', onsubmit: (e) => { e.preventDefault(); if (!isOff(open)) start(); } },
    h('p', null, h('label', { htmlFor: 'terminal-command' }, 'Command'), command), h('div', { className: 'actions' }, open, again, end), h('p', { className: 'check' }, reader, h('label', { htmlFor: 'terminal-reader' }, 'for a screen reader'))),
  why, others, h('p', { className: 'line' }, says, title), box,
  h('p', { className: 'hint', id: 'terminal-hint' }, 'Shift+F6 leaves the terminal. What runs in it goes on when this page is closed and while the sandbox sleeps, until it is ended.'));

  const say = (...words) => says.replaceChildren(...words.flat().filter(Boolean).map((w) => (w instanceof Node ? w : document.createTextNode(visible(w)))));

  function draw() {
    const reason = lacks('exec');
    const status = sandbox?.status;
    const able = status === 'running' || status === 'asleep';
    open.textContent = status === 'asleep' ? 'Wake and open' : 'Open';
    off(open, reason || (sandbox === null ? 'It is not read yet.' : able ? '' : `It is ${status}: start it first.`));
    off(end, reason);
    open.className = term && process ? '' : 'primary';
    command.disabled = reason !== '';
    end.hidden = process === '';
    why.hidden = reason === '';
    why.textContent = reason;
  }

  // begin makes the screen.
  async function begin() {
    const [{ Terminal }, { FitAddon }] = await Promise.all([import('./vendor/xterm.mjs'), import('./vendor/addon-fit.mjs')]);
    if (stopped) return false;
    styleByScript();
    term?.dispose();
    title.replaceChildren();
    box.hidden = false;
    term = new Terminal({
      cols: 80, rows: 24, fontSize: 13, fontFamily: 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace', theme, scrollback: SCROLLBACK, cursorBlink: false,
      screenReaderMode: reader.checked,
      // A link that a program has made says one thing and may lead to another.
      linkHandler: { activate: (_, to) => visit(to) },
    });
    fit = new FitAddon();
    term.loadAddon(fit);
    term.open(box);
    term.textarea.setAttribute('aria-label', `Terminal of ${name}`);
    term.textarea.setAttribute('aria-describedby', 'terminal-hint');
    term.attachCustomKeyEventHandler(keys);
    const encoder = new TextEncoder();
    const type = (bytes) => {
      // The program's questions of the past have their answers.
      if (offset < replayed || !stream?.open) return;
      if (!stream.write(bytes)) notice('Terminal', { message: 'what was pasted is too much at once', remedy: 'upload it as a file' });
    };
    term.onData((s) => type(encoder.encode(s)));
    term.onBinary((s) => type(Uint8Array.from(s, (c) => c.charCodeAt(0) & 0xff)));
    term.onResize(({ rows, cols }) => stream?.resize(rows, cols));
    term.onTitleChange((s) => title.replaceChildren(text(visible(s, { max: 120 }), '')));
    fit.fit();
    return true;
  }

  // keys leaves some keys to the browser and the page: those to leave, to copy what is selected, and to paste.
  function keys(e) {
    if (e.key === 'F6' && e.shiftKey) {
      if (e.type === 'keydown') {
        e.preventDefault();
        (end.hidden ? open : end).focus();
      }
      return false;
    }
    if (e.ctrlKey && !e.altKey && e.key.toLowerCase() === 'v' && e.shiftKey) return false;
    return !(e.ctrlKey && !e.altKey && e.key.toLowerCase() === 'c' && term.hasSelection());
  }

  async function visit(to) {
    let url;
    try {
      url = new URL(to);
    } catch {
      return;
    }
    if (!['http:', 'https:'].includes(url.protocol)) return;
    if (await ask({ title: 'Open this address?', action: 'Open it', body: `${url.href} A program in the sandbox has made this link.` })) window.open(url.href, '_blank', 'noopener,noreferrer');
  }

  function connect(path, ask) {
    clearTimeout(timer);
    stream?.leave();
    waits = false;
    again.hidden = true;
    const mine = new Stream(path, ask, {
      started(is) {
        if (mine !== stream) return;
        process = is.process;
        held.set(name, process);
        offset = is.offset;
        tries = 0;
        say('Connected.');
        others.replaceChildren();
        fit.fit();
        mine.resize(term.rows, term.cols);
        draw();
      },
      output(bytes, took) {
        if (mine !== stream) return;
        term.write(bytes, () => {
          if (mine === stream) offset += bytes.length;
          took();
        });
      },
      ended: (how) => mine === stream && ended(how),
    });
    stream = mine;
  }

  async function start() {
    const what = command.value.trim();
    const shell = ['/bin/sh', '-c', what || SHELL];
    process = '';
    offset = 0;
    replayed = 0;
    say(sandbox?.status === 'asleep' ? 'Waking the sandbox…' : 'Connecting…');
    try {
      if (!await begin()) return;
    } catch (e) {
      return void notice('Opening a terminal', e);
    }
    const id = MARK + Array.from(crypto.getRandomValues(new Uint8Array(5)), (b) => b.toString(16).padStart(2, '0')).join('');
    connect(at(name, 'exec'), { command: shell, tty: { rows: term.rows, cols: term.cols, term: 'xterm-256color' }, env: ['COLORTERM=truecolor'], detach: true, process: id, output_kib: OUTPUT_KIB });
    term.focus();
  }

  // attach goes on where the screen ends, or shows on a new screen what is kept of the output.
  async function attach(other) {
    if (other && (other.process !== process || !term)) {
      process = other.process;
      offset = 0;
      replayed = other.output_end ?? 0;
      if (!await begin()) return;
    }
    if (process === '') return;
    say(sandbox?.status === 'asleep' ? 'Waking the sandbox…' : 'Connecting…');
    connect(`${at(name, 'processes', encodeURIComponent(process), 'attach')}?offset=${offset}`, null);
    if (other || document.activeElement === again || document.activeElement === document.body) term.focus();
  }

  function ended({ exit, error, barred }) {
    stream = null;
    if (exit) {
      const words = exit.not_started ? `It could not be started: ${exit.not_started}` : exit.signal ? `Ended by signal ${exit.signal}.` : `Ended with exit status ${exit.exit_code ?? 0}.`;
      const was = process;
      over(words);
      if (was) work('DELETE', at(name, 'processes', encodeURIComponent(was))).catch(() => {}); // it is forgotten with the sandbox at the latest
      return;
    }
    if (barred) return failed({ message: 'The server would let you in, but no WebSocket reaches it', remedy: 'let what lies between pass WebSockets on, or use drowse exec' });
    if (error?.code === 'guest-not-found') return over('What ran in this terminal has ended.');
    if (error && !(process !== '' && lost.has(error.code))) return failed(error);
    if (process === '') return failed({ message: 'The connection was cut before the program began' });
    say('The connection was cut.');
    timer = setTimeout(reattach, AGAIN[Math.min(tries, AGAIN.length - 1)]);
  }

  // reattach looks first: to attach would wake a sandbox that has just gone to sleep.
  async function reattach() {
    if (stopped) return;
    tries++;
    try {
      sandbox = await get(at(name), control.signal);
    } catch (e) {
      if (stopped) return;
      if (e.status === 404) return over('The sandbox is gone.');
      say('The connection was cut. Trying again…');
      timer = setTimeout(reattach, AGAIN[Math.min(tries, AGAIN.length - 1)]);
      return;
    }
    if (sandbox.status === 'running') return attach();
    waits = true;
    again.hidden = false;
    again.textContent = sandbox.status === 'asleep' ? 'Wake and continue' : 'Continue';
    say(sandbox.status === 'asleep' ? 'The sandbox sleeps, with what runs in this terminal. It goes on when it wakes.' : `The sandbox is ${sandbox.status}.`);
    draw();
  }

  function over(words) {
    process = '';
    held.delete(name);
    again.hidden = true;
    say(words);
    draw();
    look();
  }

  function failed(e) {
    again.hidden = process === '';
    again.textContent = 'Try again';
    say(h('span', { className: 'problem' }, text(e.message)), e.remedy ? ['. What to do: ', text(e.remedy), '.'] : null, e.code ? ` (${e.code})` : null);
    if (!term || process === '') box.hidden = true;
    draw();
  }

  async function kill(id) {
    if (!await ask({ title: 'End this terminal?', danger: true, action: 'End it', body: 'What runs in it is killed.' })) return;
    try {
      if (id === process) {
        stream?.leave();
        stream = null;
      }
      await work('DELETE', at(name, 'processes', encodeURIComponent(id)));
      if (id === process) over('Ended.');
      else look();
    } catch (e) {
      notice('Ending the terminal', e);
    }
  }

  // look lists terminals that run and that this page does not show.
  async function look() {
    if (lacks('exec') || sandbox?.status !== 'running') return;
    let all;
    try {
      all = (await get(at(name, 'processes'), control.signal)).processes.filter((p) => p.tty && p.detached && !p.exit && p.process !== process);
    } catch (e) {
      if (!stopped) notice('Listing terminals', e);
      return;
    }
    if (stopped) return;
    const mine = all.find((p) => p.process === held.get(name));
    if (mine && stream === null && process === '') return attach(mine);
    others.replaceChildren(...all.map((p) => {
      const what = p.process.startsWith(MARK) && p.command[2] ? (p.command[2] === SHELL ? 'shell' : p.command[2]) : p.command.join(' ');
      return h('li', null, h('button', { type: 'button', className: 'small', 'aria-label': `Continue ${visible(what, { max: 80 })}`, onclick: () => attach(p) }, 'Continue'),
        h('button', { type: 'button', className: 'small danger', 'aria-label': `End ${visible(what, { max: 80 })}`, onclick: () => kill(p.process) }, 'End…'),
        h('span', null, text(visible(what, { max: 80 })), h('span', { className: 'dim' }, `, begun ${relative(p.started)}${p.attached ? ', somebody is attached' : ''}`)));
    }));
  }

  const sizes = new ResizeObserver(() => {
    if (term && !box.hidden && box.clientWidth > 0) fit.fit();
  });
  sizes.observe(box);
  const onChange = () => draw();
  session.addEventListener('change', onChange);
  let looked = false;
  draw();
  return {
    sandbox(s, gone) {
      sandbox = gone ? { status: 'removed' } : s;
      draw();
      if (sandbox?.status === 'running' && waits) attach();
      else if (sandbox?.status === 'running' && !looked) {
        looked = true;
        look();
      }
    },
    stop() {
      stopped = true;
      clearTimeout(timer);
      control.abort();
      stream?.leave();
      stream = null;
      sizes.disconnect();
      term?.dispose();
      session.removeEventListener('change', onChange);
    },
  };
}
