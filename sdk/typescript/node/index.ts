// Copies of directories, for Node: browsers have none. Archives are of POSIX.1-2001 (pax).
import { constants } from "node:fs";
import { chmod, lstat, mkdir, open, opendir, readlink, rm, symlink, type FileHandle } from "node:fs/promises";
import { dirname, join, normalize, relative, resolve, sep } from "node:path";
import type { CallOptions, Sandbox } from "drowse";

const BLOCK = 512;
const PIECE = 256 << 10;
const MAX_PAX = 1 << 20; // bytes of an extended header
const TYPES = { file: "0", link: "1", symlink: "2", directory: "5", pax: "x", global: "g" } as const;

/** Copies a local directory into one of the sandbox, and returns the size of the archive: files, directories and symbolic links. */
export async function uploadDirectory(box: Sandbox, source: string, path: string, o: CallOptions & { uid?: number; gid?: number } = {}): Promise<number> {
  const parts = tarOf(source);
  return box.files.uploadTree(path, new ReadableStream<Uint8Array>({
    async pull(c) {
      const { done, value } = await parts.next();
      if (done) c.close();
      else c.enqueue(value);
    },
    async cancel() {
      await parts.return();
    },
  }), o);
}

/**
 * Copies a directory of the sandbox into a local one, as one of its name there, below which all of it stays: it follows no link, leaves out links that lead outside, devices and
 * sockets, and replaces files of the same names.
 */
export async function downloadDirectory(box: Sandbox, path: string, to: string, o?: CallOptions): Promise<void> {
  const stream = await box.files.downloadTree(path, o);
  try {
    await unpack(stream, resolve(to));
  } catch (e) {
    await stream.cancel().catch(() => {});
    throw e;
  }
}

async function* tarOf(directory: string): AsyncGenerator<Uint8Array, void, void> {
  async function* walk(dir: string): AsyncGenerator<Uint8Array, void, void> {
    const names: string[] = [];
    for await (const e of await opendir(dir)) names.push(e.name);
    for (const name of names.sort()) {
      const at = join(dir, name);
      const st = await lstat(at);
      const is = { name: relative(directory, at).split(sep).join("/"), mode: st.mode & 0o7777, mtime: Math.max(0, Math.floor(st.mtimeMs / 1000)) };
      if (st.isSymbolicLink()) yield header({ ...is, type: TYPES.symlink, size: 0, link: await readlink(at) });
      else if (st.isDirectory()) {
        yield header({ ...is, type: TYPES.directory, size: 0 });
        yield* walk(at);
      } else if (st.isFile()) yield* content(at, is);
    }
  }
  yield* walk(directory);
  yield new Uint8Array(2 * BLOCK);
}

async function* content(at: string, is: { name: string; mode: number; mtime: number }): AsyncGenerator<Uint8Array, void, void> {
  const f = await open(at, constants.O_RDONLY | (constants.O_NOFOLLOW ?? 0));
  try {
    const { size } = await f.stat();
    yield header({ ...is, type: TYPES.file, size });
    for (let left = size; left > 0; ) {
      const { bytesRead, buffer } = await f.read(new Uint8Array(Math.min(PIECE, left)), 0, Math.min(PIECE, left));
      if (bytesRead === 0) throw new Error(`${at} has become shorter`);
      left -= bytesRead;
      yield buffer.subarray(0, bytesRead);
    }
    if (size % BLOCK) yield new Uint8Array(BLOCK - (size % BLOCK));
  } finally {
    await f.close();
  }
}

interface Entry {
  name: string;
  mode: number;
  mtime: number;
  type: string;
  size: number;
  link?: string;
}

/** Returns the header of an entry, with an extended one before it for what does not fit. */
function header(e: Entry): Uint8Array {
  const pax: Record<string, string> = {};
  const long = (s: string) => Buffer.byteLength(s) > 100 || /[^\x20-\x7e]/.test(s);
  if (long(e.name)) pax["path"] = e.name;
  if (e.link !== undefined && long(e.link)) pax["linkpath"] = e.link;
  if (e.size >= 8 ** 11) pax["size"] = String(e.size);
  const all = Object.entries(pax).map(([k, v]) => record(k, v)).join("");
  if (!all) return block(e);
  const body = Buffer.from(all);
  const padded = Buffer.alloc(Math.ceil(body.length / BLOCK) * BLOCK);
  body.copy(padded);
  return Buffer.concat([block({ name: "pax", mode: 0o644, mtime: 0, type: TYPES.pax, size: body.length }), padded, block(e)]);
}

/** Returns a record of an extended header: its length counts itself. */
function record(key: string, value: string): string {
  const rest = ` ${key}=${value}\n`;
  let n = Buffer.byteLength(rest);
  for (let digits = String(n).length; ; digits++) {
    if (String(n + digits).length === digits) {
      n += digits;
      break;
    }
  }
  return n + rest;
}

function block(e: Entry): Uint8Array {
  const b = Buffer.alloc(BLOCK);
  const octal = (n: number, at: number, size: number) => b.write((n >= 8 ** (size - 1) ? 0 : n).toString(8).padStart(size - 1, "0") + "\0", at, "latin1");
  b.write(e.name, 0, 100, "utf8");
  octal(e.mode, 100, 8);
  octal(0, 108, 8);
  octal(0, 116, 8);
  octal(e.size, 124, 12);
  octal(e.mtime, 136, 12);
  b.fill(" ", 148, 156);
  b.write(e.type, 156, "latin1");
  b.write(e.link ?? "", 157, 100, "utf8");
  b.write("ustar\0" + "00", 257, "latin1");
  let sum = 0;
  for (const byte of b) sum += byte;
  b.write(sum.toString(8).padStart(6, "0") + "\0 ", 148, "latin1");
  return b;
}

/** Reads bytes of a stream as they are wanted. */
class Source {
  private held: Uint8Array = new Uint8Array(0);
  private readonly pieces: AsyncIterator<Uint8Array>;

  constructor(stream: ReadableStream<Uint8Array>) {
    this.pieces = (stream as unknown as AsyncIterable<Uint8Array>)[Symbol.asyncIterator]();
  }

  /** Returns 1 to n bytes. */
  async some(n: number): Promise<Uint8Array> {
    while (this.held.length === 0) {
      const { done, value } = await this.pieces.next();
      if (done) throw new Error("the archive ends before its end");
      this.held = value;
    }
    const out = this.held.subarray(0, n);
    this.held = this.held.subarray(out.length);
    return out;
  }

  async all(n: number): Promise<Buffer> {
    const parts: Uint8Array[] = [];
    for (let left = n; left > 0; ) {
      const p = await this.some(left);
      left -= p.length;
      parts.push(p);
    }
    return Buffer.concat(parts);
  }

  /** Hands n bytes on, and skips what fills their last block. */
  async each(n: number, use: (p: Uint8Array) => Promise<unknown>): Promise<void> {
    for (let left = n; left > 0; ) {
      const p = await this.some(left);
      left -= p.length;
      await use(p);
    }
    if (n % BLOCK) await this.all(BLOCK - (n % BLOCK));
  }

  /** Reads what is left. */
  async rest(): Promise<void> {
    while (!(await this.pieces.next()).done);
  }
}

const text = (b: Buffer, from: number, size: number) => {
  const end = b.indexOf(0, from);
  return b.toString("utf8", from, end < 0 || end > from + size ? from + size : end);
};

function number(b: Buffer, from: number, size: number): number {
  const s = text(b, from, size).trim();
  const n = s === "" ? 0 : /^[0-7]+$/.test(s) ? parseInt(s, 8) : NaN;
  if (!Number.isSafeInteger(n)) throw new Error("the archive has a header that is none");
  return n;
}

function records(b: Buffer): Map<string, string> {
  const out = new Map<string, string>();
  for (let at = 0; at < b.length; ) {
    const space = b.indexOf(0x20, at);
    const n = parseInt(b.toString("latin1", at, space), 10);
    const line = b.toString("utf8", space + 1, at + n - 1);
    const eq = line.indexOf("=");
    if (space < 0 || !(n > space - at + 1) || at + n > b.length || eq < 1) throw new Error("the archive has an extended header that is none");
    out.set(line.slice(0, eq), line.slice(eq + 1));
    at += n;
  }
  return out;
}

async function unpack(stream: ReadableStream<Uint8Array>, to: string): Promise<void> {
  const source = new Source(stream);
  const links: [string, string][] = [];
  const modes: [string, number][] = [];
  let pax = new Map<string, string>();
  await mkdir(to, { recursive: true });
  for (;;) {
    const h = await source.all(BLOCK);
    if (h.every((byte) => byte === 0)) break;
    const type = String.fromCharCode(h[156]!) === "\0" ? TYPES.file : String.fromCharCode(h[156]!);
    let size = number(h, 124, 12);
    if (type === TYPES.pax || type === TYPES.global) {
      if (size > MAX_PAX) throw new Error("the archive has an extended header that is too long");
      const body = await source.all(Math.ceil(size / BLOCK) * BLOCK);
      if (type === TYPES.pax) pax = records(body.subarray(0, size));
      continue;
    }
    const prefix = text(h, 345, 155);
    const name = pax.get("path") ?? (prefix ? prefix + "/" : "") + text(h, 0, 100);
    const link = pax.get("linkpath") ?? text(h, 157, 100);
    if (pax.has("size")) size = Number(pax.get("size"));
    if (!Number.isSafeInteger(size) || size < 0) throw new Error("the archive has a size that is none");
    pax = new Map();
    const mode = number(h, 100, 8) & 0o755;
    const at = inside(to, name);
    switch (type) {
      case TYPES.directory:
        await directories(to, at);
        modes.push([at, mode | 0o700]);
        break;
      case TYPES.file:
      case "7": {
        await directories(to, dirname(at));
        await rm(at, { recursive: true, force: true });
        const f = await open(at, "wx", mode | 0o200);
        try {
          await source.each(size, (p) => whole(f, p));
        } finally {
          await f.close();
        }
        modes.push([at, mode]);
        size = 0;
        break;
      }
      case TYPES.symlink:
        links.push([at, link]);
        break;
      case TYPES.link: {
        const from = inside(to, link);
        await directories(to, dirname(from));
        await directories(to, dirname(at));
        if (!(await lstat(from)).isFile()) throw new Error(`${link} of the archive is no file`);
        await copy(from, at, mode);
        break;
      }
    }
    await source.each(size, async () => {});
  }
  await source.rest();
  for (const [at, mode] of modes.reverse()) await chmod(at, mode);
  // Last: no name of the archive leads through one.
  for (const [at, link] of links) {
    const leads = resolve(dirname(at), link);
    if (link.startsWith("/") || link.includes("\\") || (leads !== to && !leads.startsWith(to + sep))) continue;
    await directories(to, dirname(at));
    await rm(at, { recursive: true, force: true });
    await symlink(link, at);
  }
}

async function whole(f: FileHandle, p: Uint8Array): Promise<void> {
  for (let done = 0; done < p.length; ) done += (await f.write(p, done)).bytesWritten;
}

async function copy(from: string, to: string, mode: number): Promise<void> {
  const source = await open(from, "r");
  try {
    await rm(to, { recursive: true, force: true });
    const f = await open(to, "wx", mode | 0o200);
    try {
      for await (const p of source.createReadStream({ autoClose: false })) await whole(f, p as Uint8Array);
    } finally {
      await f.close();
    }
  } finally {
    await source.close();
  }
}

/** Returns where an entry belongs. Names that lead out of the directory are an error. */
function inside(to: string, name: string): string {
  const clean = normalize(name);
  const at = join(to, clean);
  if (name === "" || name.includes("\0") || name.startsWith("/") || clean.split(sep).includes("..") || (at !== to && !at.startsWith(to + sep))) {
    throw new Error(`the archive has an entry named ${JSON.stringify(name.slice(0, 100))}, which would be outside`);
  }
  return at.endsWith(sep) && at !== to ? at.slice(0, -1) : at;
}

/** Makes directories, and fails where a link or a file is one of them. */
async function directories(to: string, at: string): Promise<void> {
  let dir = to;
  for (const part of relative(to, at).split(sep).filter((p) => p !== "")) {
    dir = join(dir, part);
    const st = await lstat(dir).catch(() => undefined);
    if (st === undefined) await mkdir(dir);
    else if (!st.isDirectory()) throw new Error(`${dir} is no directory: nothing is written through it`);
  }
}
