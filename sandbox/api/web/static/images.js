// Images and templates: what sandboxes are made from.
import { h, time, text, code, short, tags, table, notice, ask, field, off, isOff } from './dom.js';
import { get, work, session, lacks } from './api.js';
import { bytes, count } from './format.js';
import { polled } from './polled.js';

// EVERY is how often the lists are read, in milliseconds.
const EVERY = 15_000;
// EVERY_PULL is how often one looks how far a pull is.
const EVERY_PULL = 1000;

export function imagesView(root) {
  const why = h('p', { id: 'why', className: 'hint', hidden: true });
  const done = h('p', { id: 'images-done', className: 'summary', role: 'status' });
  const names = new Map(); // of images by their ids
  const images = h('section', { id: 'images', 'aria-label': 'Images' });
  const templates = h('section', { id: 'templates', 'aria-label': 'Templates' });
  const pulls = h('ul', { id: 'pulls', 'aria-label': 'Images on their way' });
  const shown = new Map(); // what shows an operation, by its id
  let asked = false;
  const pull = h('button', { type: 'button', id: 'pull', 'aria-describedby': 'why', onclick: () => isOff(pull) || add() }, 'Add an image…');
  root.replaceChildren(h('h1', { tabIndex: -1 }, 'Images and templates'), why, done, h('h2', null, 'Images'), h('p', { className: 'actions' }, pull), pulls, images, h('h2', null, 'Templates'), templates);

  // remover is the button that removes one.
  function remover(what, label, path, body) {
    const b = h('button', { type: 'button', className: 'danger small', 'aria-label': `Remove ${what}`, onclick: async () => {
      if (isOff(b) || !await ask({ title: `Remove ${what}?`, danger: true, action: 'Remove it', body })) return;
      off(b, 'It is being removed.');
      done.textContent = `Removing ${label}…`;
      try {
        await work('DELETE', path);
        done.textContent = `Removed ${label}.`;
        root.querySelector('h1').focus({ preventScroll: true }); // the button goes
      } catch (e) {
        done.textContent = '';
        notice(`Removing ${label}`, e);
      }
      draw();
      a.again();
      b2.again();
    } }, 'Remove…');
    off(b, lacks('admin'));
    return b;
  }

  // add has the host get an image of a registry, or build one of Debian packages.
  async function add() {
    const v = await ask({ title: 'Add an image', action: 'Add it', fields: [
      field('from', 'From', { required: true, maxlength: 512, placeholder: 'python:3.12' }, 'An image of a registry, or debian:SUITE to build one of Debian’s packages'),
      field('include', 'Packages', { maxlength: 4096, placeholder: 'python3, git' }, 'With debian:SUITE: what it has besides the system, with commas between'),
      field('tag', 'Tag', { maxlength: 256 }, 'Its name here; by default that of the registry'),
    ] });
    if (!v) return;
    const debian = /^debian:(trixie|bookworm|bullseye|sid|stable|testing|unstable|oldstable)$/.test(v.from);
    const source = debian || v.from.includes('://') ? v.from : `docker://${v.from}`;
    const include = v.include.split(/[\s,]+/).filter(Boolean);
    if (include.length > 0 && !debian) return void notice('Adding an image', { message: 'packages go with debian:SUITE', remedy: 'leave them out, or name a suite, such as debian:trixie' });
    try {
      show(await work('POST', '/v1/images/pull', { from: source, tag: v.tag || undefined, include: include.length ? include : undefined }), v.from);
    } catch (e) {
      notice(`Adding ${v.from}`, e);
    }
  }

  // show shows a pull until it is dismissed.
  function show(is, label = 'an image') {
    if (shown.has(is.id)) return;
    const meter = h('progress', { 'aria-label': `Adding ${label}` });
    const words = h('span', { className: 'dim' }, 'begins');
    const cancel = h('button', { type: 'button', className: 'small', 'aria-label': `Cancel: ${label}`, onclick: async () => {
      if (isOff(cancel)) return;
      if (cancel.dataset.over) {
        li.remove();
        pull.focus();
        return;
      }
      try {
        await work('DELETE', `/v1/operations/${encodeURIComponent(is.id)}`);
      } catch (e) {
        notice(`Canceling ${label}`, e);
      }
    } }, 'Cancel');
    off(cancel, lacks('admin'));
    const li = h('li', null, h('span', { className: 'what' }, h('bdi', null, label)), meter, words, cancel);
    pulls.append(li);
    const watched = polled(h('div'), label, EVERY_PULL, (signal) => get(`/v1/operations/${encodeURIComponent(is.id)}`, signal), (o) => {
      if (o.total > 0) {
        meter.max = o.total;
        meter.value = o.done;
      }
      if (o.state === 'running') {
        words.textContent = [o.stage, o.total > 0 ? `${bytes(o.done)} of ${bytes(o.total)}` : o.done > 0 ? bytes(o.done) : ''].filter(Boolean).join(', ');
        return [];
      }
      if (cancel.dataset.over) return [];
      cancel.dataset.over = '1';
      cancel.textContent = 'Dismiss';
      cancel.setAttribute('aria-label', `Dismiss: ${label}`);
      meter.remove();
      words.textContent = o.state;
      if (o.state === 'failed') notice(`Adding ${label}`, o.error ?? { message: 'it failed' });
      setTimeout(() => watched.stop()); // it is being drawn
      a.again();
      return [];
    });
    shown.set(is.id, watched);
  }

  const problems = (doc) => (doc.problems?.length ? h('p', { className: 'problem' }, `The list may lack something: ${doc.problems.slice(0, 3).join('; ')}`) : null);
  const from = (query, label) => (lacks('create') ? null : h('a', { className: 'button small', href: `#/new?${new URLSearchParams(query)}`, 'aria-label': `New sandbox from ${label}` }, 'Use'));

  const nameOf = (t) => names.get(t.image) ?? (/^[0-9a-f]{64}$/.test(t.image) ? short(t.image) : t.image);

  let b2 = null;
  const a = polled(images, 'Images', EVERY, async (signal) => {
    const doc = await get('/v1/images', signal);
    for (const i of doc.images ?? []) if (i.tags?.length) names.set(i.id, i.tags[0]);
    b2?.redraw();
    return doc;
  }, (doc) => [
    problems(doc),
    h('p', { className: 'summary' }, count(doc.images?.length ?? 0, 'image')),
    doc.images?.length ? table('Images', [
      { name: 'Image', cell: (i) => (i.tags?.length ? tags(i.tags) : text('', 'no tag')) },
      { name: 'Id', className: 'wide', cell: (i) => code(short(i.id)) },
      { name: 'Files', className: 'number', cell: (i) => bytes(i.content) },
      { name: 'Source', className: 'wider', cell: (i) => text(i.source) },
      { name: 'Architecture', className: 'widest', cell: (i) => text(i.architecture) },
      { name: 'Created', className: 'number wide', cell: (i) => time(i.created) },
      { name: 'Actions', className: 'row-actions', cell: (i) => {
        const name = i.tags?.[0] ?? short(i.id);
        return [from({ image: i.tags?.[0] ?? i.id }, name), remover(`image ${name}`, name, `/v1/images/${encodeURIComponent(i.id)}`,
          i.tags?.length > 1 ? `It has ${i.tags.length} tags, which go with it: ${i.tags.join(', ')}.` : 'Sandboxes can no longer be made from it.')];
      } },
    ], doc.images) : h('p', { className: 'empty' }, 'There are no images.'),
  ]);
  b2 = polled(templates, 'Templates', EVERY, (signal) => get('/v1/templates', signal), (doc) => [
    problems(doc),
    h('p', { className: 'summary' }, count(doc.templates?.length ?? 0, 'template')),
    doc.templates?.length ? table('Templates', [
      { name: 'Of image', cell: (t) => text(nameOf(t)) },
      { name: 'State', cell: (t) => [h('span', { className: t.state === 'failed' ? 'bad nowrap' : 'nowrap' }, t.state), t.problem ? [' ', h('span', { className: 'problem' }, text(t.problem))] : null] },
      { name: 'Size', className: 'wide', cell: (t) => `${count(t.vcpus || 1, 'CPU')}, ${bytes((t.memory_mib || 256) * 1048576)}` },
      { name: 'Network', className: 'wider', cell: (t) => text(t.network, 'none') },
      { name: 'Stored', className: 'number wide', cell: (t) => bytes(t.stored_bytes) },
      { name: 'Used', className: 'number wide', cell: (t) => time(t.used) },
      { name: 'Actions', className: 'row-actions', cell: (t) => [t.state === 'ready' ? from({ template: t.key }, `the template of ${nameOf(t)}`) : null,
        remover(`the template of ${nameOf(t)}`, 'the template', `/v1/templates/${encodeURIComponent(t.key)}`, 'Sandboxes that were made from it stay. The next of its shape boots.')] },
    ], doc.templates) : h('p', { className: 'empty' }, 'There are no templates. The first sandbox of a shape makes one.'),
  ]);

  function draw() {
    const reason = lacks('admin');
    why.hidden = reason === '';
    why.textContent = reason && `${reason} Adding and removing need it.`;
    off(pull, reason);
    a.redraw();
    b2.redraw();
    if (asked || session.scopes === null || reason !== '' || session.owner !== '') return;
    asked = true; // for those that were begun before
    get('/v1/operations').then((doc) => doc.operations.filter((o) => o.kind === 'pull image' && o.state === 'running').forEach((o) => show(o)), (e) => notice('Operations', e));
  }
  session.addEventListener('change', draw);
  draw();
  return {
    title: 'Images',
    update() {},
    stop() {
      a.stop();
      b2.stop();
      for (const w of shown.values()) w.stop();
      session.removeEventListener('change', draw);
    },
  };
}
