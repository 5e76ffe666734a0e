// A stream of the API: a process of a sandbox over a WebSocket. docs/reference/http-api.md describes its messages.
import { token, send, Failure } from './api.js';

// WINDOW bounds output that is not consumed, and input that is not acknowledged, in bytes; CHUNK bounds a message.
const WINDOW = 256 << 10;
const CHUNK = 32 << 10;
// MAX_WAITING bounds input that waits here: what is pasted beyond it is left out.
const MAX_WAITING = 16 << 20;

export class Stream {
  // on has started({process, offset}), output(bytes, consumed), and ended({exit}, {error} or {lost}), which comes once.
  constructor(path, start, on) {
    this.path = path;
    this.on = on;
    this.open = false; // it has started
    this.over = false;
    this.waiting = [];
    this.held = 0;
    this.sent = 0;
    this.acked = 0;
    this.consumed = 0;
    this.told = 0;
    const url = new URL(path, location.href);
    url.protocol = location.protocol === 'https:' ? 'wss:' : 'ws:';
    if (!start) url.searchParams.set('window', WINDOW);
    this.ws = new WebSocket(url, ['drowse.v1', ...(token() ? [`drowse.bearer.${token()}`] : [])]);
    this.ws.binaryType = 'arraybuffer';
    this.ws.onopen = () => {
      this.connected = true;
      if (start) this.say({ type: 'start', window: WINDOW, ...start });
    };
    this.ws.onmessage = (e) => this.heard(e.data);
    this.ws.onclose = () => this.closed();
  }

  say(control) {
    if (this.ws.readyState === WebSocket.OPEN) this.ws.send(JSON.stringify(control));
  }

  heard(data) {
    if (this.over) return;
    if (typeof data !== 'string') {
      if (data.byteLength < 2) return;
      const part = new Uint8Array(data, 1);
      this.on.output(part, () => this.took(part.length));
      return;
    }
    let c;
    try {
      c = JSON.parse(data);
    } catch {
      return this.end({ error: new Failure(0, { message: 'the server has sent what is no message' }) });
    }
    if (c.type === 'started') {
      this.open = true;
      this.on.started({ process: String(c.process ?? ''), offset: Number(c.offset ?? 0) });
    } else if (c.type === 'ack') {
      this.acked = Number(c.bytes ?? 0);
      this.flush();
    } else if (c.type === 'exit') this.end({ exit: c.exit ?? {} });
    else if (c.type === 'error') this.end({ error: new Failure(0, c.error) });
  }

  // took notes that output was consumed, and tells the server from time to time.
  took(n) {
    this.consumed += n;
    if (this.consumed - this.told < WINDOW / 2) return;
    this.told = this.consumed;
    this.say({ type: 'ack', bytes: this.consumed });
  }

  // write sends input, as far as the window is open. It returns false for what is too much.
  write(bytes) {
    if (this.over || this.held + bytes.length > MAX_WAITING) return false;
    for (let i = 0; i < bytes.length; i += CHUNK) this.waiting.push(bytes.subarray(i, i + CHUNK));
    this.held += bytes.length;
    this.flush();
    return true;
  }

  flush() {
    while (this.open && this.waiting.length > 0 && this.sent - this.acked + this.waiting[0].length <= WINDOW) {
      const part = this.waiting.shift();
      const message = new Uint8Array(1 + part.length);
      message.set(part, 1);
      this.ws.send(message);
      this.sent += part.length;
      this.held -= part.length;
    }
  }

  resize(rows, cols) {
    if (this.open) this.say({ type: 'resize', rows, cols });
  }

  // leave ends the stream, and leaves the process running.
  leave() {
    this.over = true;
    this.say({ type: 'detach' });
    this.ws.close();
  }

  end(how) {
    if (this.over) return;
    this.over = true;
    this.ws.close();
    this.on.ended(how);
  }

  // closed learns why a stream did not begin: a WebSocket does not say.
  async closed() {
    if (this.over) return;
    if (this.connected) return this.end({ lost: true });
    try {
      await send('GET', this.path, { limit: 30_000 });
      this.end({ lost: true });
    } catch (e) {
      // The path answers so to those whom it would have let in.
      if (e.code === 'upgrade') this.end({ lost: true, barred: true });
      else this.end(e.status === 0 ? { lost: true } : { error: e });
    }
  }
}
