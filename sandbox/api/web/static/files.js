// The files of a sandbox: a directory at a time. Contents go between the disk of the reader and the server in parts, as far as the browser can.
import { h, time, text, notice, clearNotices, ask, field, facts, off, isOff } from './dom.js';
import { at, get, work, send, token, session, lacks, failureOf, Failure } from './api.js';
import { bytes, count, exact, visible } from './format.js';

// MAX_ROWS is how many entries are in the document at once.
const MAX_ROWS = 1000;
// MAX_UPLOADS bounds what is dropped or chosen at once.
const MAX_UPLOADS = 1000;
// MAX_TREE bounds the files of a directory.
const MAX_TREE = 10_000;

const join = (dir, name) => (dir === '/' ? `/${name}` : `${dir}/${name}`);
const above = (path) => path.slice(0, path.lastIndexOf('/')) || '/';
const base = (path) => path.slice(path.lastIndexOf('/') + 1) || 'root';
const query = (path, more) => new URLSearchParams({ path, ...more });
const kinds = { file: 'file', dir: 'directory', symlink: 'symbolic link', fifo: 'pipe', socket: 'socket', block: 'block device', char: 'character device', other: 'of another kind' };

// saved is a name for the reader's disk: the browser bars what its system does not take.
const saved = (name) => visible(name, { max: 200 }).replace(/[\\/:*?"<>|]/g, '_').replace(/^\.+/, '_') || 'file';

export function filesPanel(root, name, first) {
  let dir = '';
  let entries = null;
  let sandbox = null;
  let wanted = false; // somebody has said that it may be woken
  let control = new AbortController();
  let last = Promise.resolve(); // the transfer before

  const here = (path) => `#/sandbox/${encodeURIComponent(name)}/files?${query(path)}`;
  const crumbs = h('nav', { className: 'crumbs', 'aria-label': 'Directories above' });
  const filter = h('input', { id: 'files-q', type: 'search', autocomplete: 'off', spellcheck: 'false', maxlength: 200, placeholder: 'name', oninput: () => draw() });
  const picker = h('input', { type: 'file', id: 'files-picker', className: 'unseen', tabIndex: -1, 'aria-hidden': 'true', multiple: true, onchange: () => {
    upload([...picker.files]);
    picker.value = '';
  } });
  // What it chooses has the paths below the chosen directory.
  const treePicker = h('input', { type: 'file', id: 'files-tree-picker', className: 'unseen', tabIndex: -1, 'aria-hidden': 'true', multiple: true, webkitdirectory: true, onchange: () => {
    const files = [...treePicker.files];
    treePicker.value = '';
    if (files.length > 0) uploadTree(base(`/${files[0].webkitRelativePath.split('/')[0]}`), files.map((file) => ({ file, path: file.webkitRelativePath })));
    else notice('Uploading', { message: 'there is no file in the directory' });
  } });
  const button = (id, label, f) => {
    const b = h('button', { type: 'button', id, onclick: () => isOff(b) || f() }, label);
    return b;
  };
  const up = button('upload', 'Upload…', () => picker.click());
  const upTree = button('upload-tree', 'Upload directory…', () => treePicker.click());
  const make = button('mkdir', 'New directory…', mkdir);
  const tree = button('download-tree', 'Download as tar', () => download({ name: base(dir), kind: 'dir' }, dir));
  const refresh = button('refresh', 'Refresh', list);
  const why = h('p', { id: 'files-why', className: 'hint', hidden: true });
  const done = h('p', { id: 'files-done', className: 'summary', role: 'status' });
  const transfers = h('ul', { id: 'transfers', 'aria-label': 'Transfers' });
  const box = h('div', { id: 'files' });
  root.append(crumbs,
    h('div', { className: 'filters' }, h('p', null, h('label', { htmlFor: 'files-q' }, 'Find'), filter), h('div', { className: 'actions', role: 'group', 'aria-label': 'Files', 'aria-describedby': 'files-why' }, up, picker, upTree, treePicker, make, tree, refresh)),
    why, done, transfers, box);

  function bar() {
    const reason = lacks('files');
    for (const b of [up, upTree, make, tree, refresh]) off(b, reason || (entries === null ? 'The directory is not listed.' : ''));
    if (reason === '') off(refresh, dir === '' ? 'No directory is chosen.' : '');
    why.hidden = reason === '';
    why.textContent = reason;
  }

  async function list() {
    control.abort();
    control = new AbortController();
    const { signal } = control;
    entries = null;
    bar();
    box.replaceChildren(h('p', { role: 'status' }, 'Loading…'));
    try {
      const doc = await get(`${at(name, 'files', 'list')}?${query(dir)}`, signal);
      if (signal.aborted) return;
      entries = doc.entries ?? [];
      entries.sort((a, b) => (b.kind === 'dir') - (a.kind === 'dir') || (a.name < b.name ? -1 : 1));
      draw();
    } catch (e) {
      if (signal.aborted) return;
      box.replaceChildren(h('p', { className: 'problem' }, text(e.message), e.remedy ? ['. ', text(e.remedy)] : null),
        dir === '/' ? '' : h('p', null, h('a', { href: here(above(dir)) }, 'The directory above')));
    }
    bar();
  }

  function draw() {
    if (entries === null) return;
    const q = filter.value.toLowerCase();
    const rows = entries.filter((e) => e.name.toLowerCase().includes(q));
    const shown = rows.slice(0, MAX_ROWS);
    box.replaceChildren(
      h('p', { className: 'summary' }, rows.length === entries.length ? count(entries.length, 'entry', 'entries') : `${rows.length.toLocaleString('en')} of ${count(entries.length, 'entry', 'entries')}`,
        rows.length > MAX_ROWS ? `; the first ${MAX_ROWS.toLocaleString('en')} are shown` : '', '. Files and directories dropped here are uploaded.'),
      shown.length ? h('div', { className: 'scroll', role: 'region', 'aria-label': 'Files', tabIndex: 0 }, h('table', { id: 'entries' },
        h('caption', { className: 'unseen' }, 'Files'),
        h('thead', null, h('tr', null, ['Name', 'Size', 'Modified', 'Mode'].map((c, i) => h('th', { scope: 'col', class: ['', 'number', 'number wide', 'wide'][i] }, c)), h('th', { scope: 'col' }, h('span', { className: 'unseen' }, 'Actions')))),
        h('tbody', null, shown.map(row)))) : h('p', { className: 'empty' }, entries.length ? 'No name is like that.' : 'The directory is empty.'));
  }

  function row(e) {
    const path = join(dir, e.name);
    const label = h('bdi', null, e.name);
    const to = e.kind === 'dir' ? h('a', { href: here(path) }, label, '/')
      : ['file', 'symlink'].includes(e.kind) ? h('button', { type: 'button', className: 'plain entry', title: e.kind === 'file' ? `Download ${e.name}` : `To ${e.link}`, onclick: () => (e.kind === 'file' ? download(e, path) : follow(path)) }, label) : label;
    return h('tr', { 'data-kind': e.kind },
      h('td', null, to, e.kind === 'symlink' ? h('span', { className: 'dim' }, ' → ', text(e.link)) : ['file', 'dir'].includes(e.kind) ? null : h('span', { className: 'dim' }, ` ${kinds[e.kind] ?? ''}`)),
      h('td', { class: 'number' }, e.kind === 'file' ? bytes(e.size) : ''), h('td', { class: 'number wide' }, time(e.modified)), h('td', { class: 'wide' }, h('code', null, e.mode)),
      h('td', { class: 'row-actions' }, h('button', { type: 'button', className: 'small', 'aria-label': `Actions for ${visible(e.name)}`, 'aria-haspopup': 'dialog', onclick: () => menu(e, path) }, '⋯')));
  }

  async function follow(path) {
    try {
      const is = await get(`${at(name, 'files', 'stat')}?${query(path)}`, control.signal);
      if (is.kind === 'dir') location.hash = here(path);
      else await download({ ...is, name: base(path) }, path);
    } catch (e) {
      if (!control.signal.aborted) notice(`Following ${base(path)}`, e);
    }
  }

  async function menu(e, path) {
    const v = await ask({ title: e.name, action: 'Do it', fields: [
      facts([['Kind', kinds[e.kind] ?? e.kind], ['Size', e.kind === 'file' ? bytes(e.size) : null], ['Mode', h('code', null, e.mode)], ['Owner', `${e.uid}:${e.gid}`], ['Modified', exact(e.modified).slice(0, 19)], ['Leads to', e.link ? text(e.link) : null]]),
      h('fieldset', null, h('legend', null, 'What to do'), [['download', e.kind === 'dir' ? 'Download it as a tar file' : 'Download it'], ['rename', 'Rename or move it'], ['delete', 'Delete it']]
        .filter(([op]) => op !== 'download' || ['file', 'dir', 'symlink'].includes(e.kind))
        .map(([op, label], i) => h('p', { className: 'check' }, h('input', { type: 'radio', id: `do-${op}`, name: 'op', value: op, checked: i === 0 }), h('label', { htmlFor: `do-${op}` }, label)))),
    ] });
    if (v?.op === 'download') await (e.kind === 'symlink' ? follow(path) : download(e, path));
    else if (v?.op === 'rename') await rename(e, path);
    else if (v?.op === 'delete') await remove(e, path);
  }

  // change does something that a directory is listed again after.
  async function change(what, words, f) {
    clearNotices();
    done.textContent = `${what}…`;
    try {
      await f();
      done.textContent = words;
    } catch (e) {
      done.textContent = '';
      notice(what, e);
    }
    if (!control.signal.aborted) {
      await list();
      (root.querySelector('#entries a, #entries button') ?? up).focus({ preventScroll: true });
    }
  }

  async function mkdir() {
    const v = await ask({ title: 'New directory', action: 'Make it', fields: [field('dir', 'Name', { required: true, maxlength: 255 }, `In ${visible(dir)}`)] });
    if (v) await change(`Making ${visible(v.dir)}`, `${visible(v.dir)} is made.`, () => work('POST', at(name, 'files', 'mkdir'), { path: v.dir.startsWith('/') ? v.dir : join(dir, v.dir) }));
  }

  async function rename(e, path) {
    const v = await ask({ title: `Rename ${e.name}`, action: 'Rename', fields: [field('to', 'New name, or a path', { required: true, maxlength: 4096, value: e.name })] });
    if (!v || v.to === e.name) return;
    const to = v.to.startsWith('/') ? v.to : join(dir, v.to);
    // rename(2) replaces what is there.
    let there = null;
    try {
      there = await get(`${at(name, 'files', 'stat')}?${query(to, { link: 1 })}`, control.signal);
    } catch (problem) {
      if (problem.code !== 'guest-not-found') return void notice(`Renaming ${e.name}`, problem);
    }
    if (there && !await ask({ title: `Replace ${to}?`, danger: true, action: 'Replace it', body: `There is a ${kinds[there.kind] ?? 'thing'} of this name already. It is lost.` })) return;
    await change(`Renaming ${visible(e.name)}`, `${visible(e.name)} is now ${visible(to)}.`, () => work('POST', at(name, 'files', 'move'), { from: path, to }));
  }

  async function remove(e, path) {
    const whole = e.kind === 'dir';
    if (!await ask({ title: `Delete ${e.name}?`, danger: true, action: 'Delete it', body: whole ? 'The directory is deleted with all that is in it. This cannot be taken back.' : 'This cannot be taken back.' })) return;
    await change(`Deleting ${visible(e.name)}`, `${visible(e.name)} is deleted.`, () => work('DELETE', `${at(name, 'files')}?${query(path, whole ? { recursive: 1 } : {})}`));
  }

  // transfer shows one with its progress, and what cancels it. work gets {signal, at(bytes)}.
  function transfer(label, total, work) {
    const abort = new AbortController();
    const meter = h('progress', { 'aria-label': visible(label) });
    const words = h('span', { className: 'dim' }, 'waits');
    const cancel = h('button', { type: 'button', className: 'small', 'aria-label': `Cancel: ${visible(label)}`, onclick: () => (abort.signal.aborted || cancel.dataset.over ? li.remove() : abort.abort()) }, 'Cancel');
    const li = h('li', null, h('span', { className: 'what' }, h('bdi', null, label)), meter, words, cancel);
    transfers.append(li);
    const told = (n) => {
      if (total > 0) {
        meter.max = total;
        meter.value = n;
      }
      words.textContent = total > 0 ? `${bytes(n)} of ${bytes(total)}` : bytes(n);
    };
    const over = (text) => {
      cancel.dataset.over = '1';
      cancel.textContent = 'Dismiss';
      cancel.setAttribute('aria-label', `Dismiss: ${visible(label)}`);
      meter.remove();
      words.textContent = text;
    };
    return work({ signal: abort.signal, at: told }).then((text) => {
      over(text);
      return true;
    }, (e) => {
      over(abort.signal.aborted ? 'canceled' : 'failed');
      // The browser has no words for a connection that ends in the middle.
      if (!abort.signal.aborted) notice(label, e instanceof TypeError ? new Failure(0, { code: 'unreachable', message: 'it ended before all was there', remedy: 'see whether `drowse serve` and the sandbox run, and try again' }) : e);
      return false;
    });
  }

  // download has three ways. A browser without a token to show follows a link. Where a page may write to a file of the reader, it gets
  // the parts. Otherwise the browser keeps the parts, on its disk if they are many, until they are all there.
  async function download(e, path) {
    const whole = e.kind === 'dir';
    const url = whole ? `${at(name, 'files', 'tree')}?${query(path)}` : `${at(name, 'files')}?${query(path)}`;
    const as = saved(e.name) + (whole ? '.tar' : '');
    if (token() === '') return void h('a', { href: url, download: as }).click();
    let file = null;
    if (window.showSaveFilePicker) {
      try {
        file = await window.showSaveFilePicker({ suggestedName: as });
      } catch (problem) {
        if (problem.name === 'AbortError') return;
      }
    }
    await transfer(`Download of ${e.name}`, whole ? 0 : e.size, async (t) => {
      const res = await send('GET', url, { signal: t.signal, accept: 'application/octet-stream, application/x-tar, application/json' });
      let n = 0;
      const counted = res.body.pipeThrough(new TransformStream({ transform(part, out) {
        n += part.byteLength;
        t.at(n);
        out.enqueue(part);
      } }));
      if (file) {
        await counted.pipeTo(await file.createWritable(), { signal: t.signal });
      } else {
        const href = URL.createObjectURL(await new Response(counted).blob());
        h('a', { href, download: as }).click();
        setTimeout(() => URL.revokeObjectURL(href), 60_000);
      }
      return `done, ${bytes(n)}`;
    });
  }

  // put sends a file. XMLHttpRequest, and not fetch, tells how far it is; both read the file as they send it.
  function put(path, file, t, only, parents) {
    return new Promise((ok, no) => {
      const x = new XMLHttpRequest();
      x.open('PUT', `${at(name, 'files')}?${query(path, parents ? { parents: 1 } : {})}`);
      if (token()) x.setRequestHeader('Authorization', `Bearer ${token()}`);
      x.setRequestHeader('Content-Type', 'application/octet-stream');
      if (only) x.setRequestHeader('If-None-Match', '*');
      x.upload.onprogress = (p) => t.at(p.loaded);
      x.onload = () => (x.status < 300 ? ok() : no(failureOf(x.status, x.responseText)));
      x.onerror = () => no(new Failure(0, { code: 'unreachable', message: 'the server cannot be reached, or has ended the upload', remedy: 'see whether `drowse serve` runs, and upload it again: the old file is as it was' }));
      x.onabort = () => no(new Failure(0, { message: 'canceled' }));
      t.signal.addEventListener('abort', () => x.abort());
      x.send(file);
    });
  }

  // upload sends one file after the other.
  function upload(files) {
    const to = dir;
    if (files.length > MAX_UPLOADS) return void notice('Uploading', { message: `${files.length} files at once: choose ${MAX_UPLOADS} at most, or use drowse cp` });
    for (const file of files) {
      last = last.then(async () => {
        const path = join(to, file.name);
        const ok = await transfer(`Upload of ${file.name}`, file.size, async (t) => {
          try {
            await put(path, file, t, true);
          } catch (e) {
            if (e.code !== 'precondition') throw e;
            if (!await ask({ title: `Replace ${file.name}?`, danger: true, action: 'Replace it', body: `There is one of this name already in ${to}.` })) return 'left as it was';
            await put(path, file, t, false);
          }
          return `done, ${bytes(file.size)}`;
        });
        if (ok && to === dir && !root.contains(document.activeElement?.closest('#entries'))) await list();
      });
    }
  }

  // uploadTree sends the files of a directory, {file, path}, as one transfer. What is there already stays, or is replaced.
  function uploadTree(label, files) {
    const to = dir;
    if (files.length > MAX_TREE) return void notice(`Uploading ${label}`, { message: `more than ${MAX_TREE.toLocaleString('en')} files`, remedy: 'use drowse cp' });
    const total = files.reduce((n, f) => n + f.file.size, 0);
    last = last.then(async () => {
      const ok = await transfer(`Upload of ${label}/`, total, async (t) => {
        let there = null;
        try {
          there = await get(`${at(name, 'files', 'stat')}?${query(join(to, label))}`, t.signal);
        } catch (e) {
          if (e.code !== 'guest-not-found') throw e;
        }
        if (there && !await ask({ title: `Upload into ${label}?`, danger: true, action: 'Upload', body: `There is one of this name already in ${to}. Files of the same names in it are replaced.` })) return 'left as it was';
        let sent = 0;
        for (const { file, path } of files) {
          t.signal.throwIfAborted();
          await put(join(to, path), file, { signal: t.signal, at: (n) => t.at(sent + n) }, false, true);
          t.at(sent += file.size);
        }
        return `done, ${count(files.length, 'file')}, ${bytes(total)}`;
      });
      if (ok && to === dir && !root.contains(document.activeElement?.closest('#entries'))) await list();
    });
  }

  // filesOf returns the files below a directory that was dropped. Empty directories in it have none.
  async function filesOf(entry, found) {
    const reader = entry.createReader();
    for (;;) {
      const some = await new Promise((ok, no) => reader.readEntries(ok, no));
      if (some.length === 0) return found;
      for (const e of some) {
        if (found.length > MAX_TREE) return found;
        if (e.isDirectory) await filesOf(e, found);
        else found.push({ file: await new Promise((ok, no) => e.file(ok, no)), path: e.fullPath.slice(1) });
      }
    }
  }

  root.addEventListener('dragover', (e) => {
    if (!e.dataTransfer.types.includes('Files')) return;
    e.preventDefault();
    e.dataTransfer.dropEffect = isOff(up) ? 'none' : 'copy';
    box.classList.toggle('drop', !isOff(up));
  });
  root.addEventListener('dragleave', (e) => {
    if (!root.contains(e.relatedTarget)) box.classList.remove('drop');
  });
  root.addEventListener('drop', (e) => {
    e.preventDefault();
    box.classList.remove('drop');
    if (isOff(up)) return;
    // They can be asked for until this returns.
    const items = [...e.dataTransfer.items].filter((i) => i.kind === 'file').map((i) => ({ entry: i.webkitGetAsEntry?.(), file: i.getAsFile() }));
    upload(items.filter((i) => !i.entry?.isDirectory).map((i) => i.file).filter(Boolean));
    for (const { entry } of items.filter((i) => i.entry?.isDirectory)) {
      filesOf(entry, []).then((files) => {
        if (files.length > 0) uploadTree(entry.name, files);
        else notice(`Uploading ${entry.name}`, { message: 'there is no file in the directory' });
      }, (problem) => notice(`Uploading ${entry.name}`, problem));
    }
  });

  function go(path) {
    const clean = path?.startsWith('/') ? path.replace(/\/+/g, '/').replace(/(.)\/$/, '$1') : '/';
    if (clean === dir && entries !== null) return;
    dir = clean;
    filter.value = '';
    const parts = dir.split('/').filter(Boolean);
    crumbs.replaceChildren(...[['/', '/'], ...parts.map((p, i) => [p, `/${parts.slice(0, i + 1).join('/')}`])].flatMap(([label, to], i, all) => [
      i > 1 ? h('span', { className: 'dim', 'aria-hidden': 'true' }, '/') : '', i === all.length - 1 ? h('span', { 'aria-current': 'page' }, h('bdi', null, label)) : h('a', { href: here(to), 'aria-label': i ? null : 'root directory' }, h('bdi', null, label))]));
    look();
  }

  // look lists the directory, unless that would wake the sandbox and nobody has said that it may.
  function look() {
    bar();
    if (lacks('files')) {
      box.replaceChildren(h('p', { className: 'empty' }, 'Files are shown with another token.'));
    } else if (sandbox === null) {
      box.replaceChildren(h('p', { role: 'status' }, 'Loading…'));
    } else if (sandbox.status === 'running' || sandbox.status === 'asleep' && wanted) {
      list();
    } else if (sandbox.status === 'asleep') {
      entries = null;
      box.replaceChildren(h('p', { className: 'empty' }, 'It is asleep. Its files are listed by a program in it, so it must be awake.'), h('p', null, h('button', { type: 'button', id: 'wake-files', onclick: () => { wanted = true; list(); } }, 'Wake it and list')));
    } else {
      entries = null;
      box.replaceChildren(h('p', { className: 'empty' }, `It is ${sandbox.status}: its files are listed while it runs.`));
    }
    bar();
  }

  const onChange = () => look();
  session.addEventListener('change', changed);
  let scopes = lacks('files');
  function changed() {
    if (lacks('files') === scopes) return;
    scopes = lacks('files');
    onChange();
  }
  go(first.path);
  return {
    sandbox(s, gone) {
      const before = sandbox?.status;
      sandbox = gone ? { status: 'removed' } : s;
      if (sandbox && sandbox.status !== before && !(entries !== null && sandbox.status === 'running')) look();
    },
    update(next) { go(next.path); },
    stop() {
      control.abort();
      session.removeEventListener('change', changed);
    },
  };
}
