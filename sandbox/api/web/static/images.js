// Images and templates: what sandboxes are made from.
import { h, time, text, code, short, tags, table, notice, ask, off, isOff } from './dom.js';
import { get, work, session, lacks } from './api.js';
import { bytes, count } from './format.js';
import { polled } from './polled.js';

// EVERY is how often the lists are read, in milliseconds.
const EVERY = 15_000;

export function imagesView(root) {
  const why = h('p', { id: 'why', className: 'hint', hidden: true });
  const done = h('p', { id: 'images-done', className: 'summary', role: 'status' });
  const names = new Map(); // of images by their ids
  const images = h('section', { id: 'images', 'aria-label': 'Images' });
  const templates = h('section', { id: 'templates', 'aria-label': 'Templates' });
  root.replaceChildren(h('h1', { tabIndex: -1 }, 'Images and templates'), why, done, h('h2', null, 'Images'), images, h('h2', null, 'Templates'), templates);

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
    ], doc.images) : h('p', { className: 'empty' }, 'There are no images. drowse image pull or image build makes one.'),
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
    why.textContent = reason && `${reason} Removing needs it.`;
    a.redraw();
    b2.redraw();
  }
  session.addEventListener('change', draw);
  draw();
  return {
    title: 'Images',
    update() {},
    stop() {
      a.stop();
      b2.stop();
      session.removeEventListener('change', draw);
    },
  };
}
