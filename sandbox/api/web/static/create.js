// A form that makes a sandbox. What is wrong is said by the API, and shown at the field that it is about.
import { h, text, code, notice, off, isOff } from './dom.js';
import { get, listOf, work, session, lacks } from './api.js';
import { bytes, span } from './format.js';

// The policy that “a policy of its own” begins with.
const BEGIN = { version: 1, default: { egress: 'deny', ingress: 'deny' }, rules: [{ name: 'web', direction: 'egress', verdict: 'allow', groups: ['public'], protocols: ['tcp'], ports: [80, 443] }] };

// about says which field an error is about: by its code, or by its words.
const about = [
  ['name', (e) => e.code === 'exists' || /\bname "/.test(e.message)],
  ['image', (e) => /^image-/.test(e.code) || /\bno image\b|\bimage\b.*\bnot\b/.test(e.message)],
  ['resolvers', (e) => /upstream/.test(e.message)],
  ['policy', (e) => e.code === 'policy' || /\bpolicy\b|\bline \d+:/.test(e.message)],
  ['vcpus', (e) => /\bvCPUs\b|spec\.vcpus/.test(e.message)],
  ['memory', (e) => e.code === 'host-memory' || /MiB of memory: use|spec\.memory_mib/.test(e.message)],
  ['disk', (e) => /\ba disk of\b|spec\.disk_mib/.test(e.message)],
  ['network', (e) => /\bnetwork "/.test(e.message) || e.code.startsWith('network-')],
  ['idle', (e) => /\bsleep after\b|sleep_seconds/.test(e.message)],
  ['expires', (e) => /\bexpires\b|\bparsing time\b/.test(e.message)],
  ['tags', (e) => /\btags?\b/.test(e.message)],
  ['owner', (e) => e.code === 'owner-limit' || /\bowner\b|sandboxes of\b/.test(e.message)],
  ['purpose', (e) => /\bpurpose\b/.test(e.message)],
];

// fieldOf is the field that an error is about, or empty. What the error quotes is not the API's word.
export function fieldOf(error) {
  const message = (error.message ?? '').replace(/"(?:[^"\\]|\\.)*"/g, '""');
  return about.find(([, is]) => is({ code: error.code ?? '', message }))?.[0] ?? '';
}

// newKey is an Idempotency-Key. randomUUID is not there without TLS.
function newKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, '0')).join('');
}

const number = (e) => (e.value === '' ? undefined : Number(e.value));

export function createView(root, first) {
  let asked = first;
  let templates = [];
  let busy = false;
  let sent = { body: '', key: '' };
  const control = new AbortController();
  const fields = new Map(); // name -> {input, error}

  // row is a field with its label, hint and the place of its error.
  function row(name, label, input, hint, className = '') {
    const id = `new-${name}`;
    const error = h('p', { id: `${id}-error`, className: 'field-error', hidden: true });
    input.id = id;
    input.name = name;
    const tip = hint ? h('small', { id: `${id}-hint` }, hint) : null;
    input.setAttribute('aria-describedby', `${id}-error${tip ? ` ${id}-hint` : ''}`);
    const box = h('div', { className: `field ${className}` }, h('label', { htmlFor: id }, label), input, error, tip);
    fields.set(name, { input, error, box });
    return box;
  }
  const plain = (attributes) => h('input', { type: 'text', autocomplete: 'off', spellcheck: 'false', ...attributes });
  const amount = (attributes) => h('input', { type: 'number', step: 1, autocomplete: 'off', ...attributes });

  const image = h('select', { onchange: () => chosen() }, h('option', { value: '' }, 'Loading…'));
  const network = h('select', { onchange: () => shape() },
    h('option', { value: 'none' }, 'none'), h('option', { value: 'open' }, 'open: all public addresses'), h('option', { value: 'own' }, 'a policy of its own'));
  const policy = h('textarea', { rows: 12, spellcheck: 'false', autocomplete: 'off', className: 'code' });
  policy.value = JSON.stringify(BEGIN, null, 2);
  const button = h('button', { type: 'submit', className: 'primary', 'aria-describedby': 'new-why' }, 'Create');
  const why = h('p', { id: 'new-why', className: 'hint', hidden: true });
  const said = h('p', { id: 'done', role: 'status' });
  const wrong = h('div', { className: 'field-error', role: 'alert' });
  const form = h('form', { className: 'form', novalidate: true, onsubmit: (e) => { e.preventDefault(); create(); } },
    h('fieldset', null, h('legend', null, 'What it is'),
      row('image', 'Image or template', image, 'A template is a first boot that is kept: sandboxes of its shape start from it.', 'wide-field'),
      row('name', 'Name', plain({ maxlength: 64 }), 'Empty for one by chance'),
      row('purpose', 'Purpose', plain({}), null, 'two')),
    h('fieldset', null, h('legend', null, 'Size'),
      row('vcpus', 'CPUs', amount({ min: 1, placeholder: '1' })),
      row('memory', 'Memory in MiB', amount({ min: 1, placeholder: '256' })),
      row('disk', 'Disk in MiB', amount({ min: 1, placeholder: '8192' }), 'It takes only what is written.')),
    h('fieldset', null, h('legend', null, 'Network'),
      row('network', 'Network', network),
      row('resolvers', 'Name servers', plain({ placeholder: '192.0.2.53:53' }), 'Addresses with ports, with commas; without one it resolves no names.'),
      row('policy', 'Policy, as JSON', policy, null, 'wide-field')),
    h('fieldset', null, h('legend', null, 'How long'),
      row('idle', 'Sleeps after minutes without use', amount({ min: 0, placeholder: 'never' })),
      row('expires', 'Expires in hours', amount({ min: 0, placeholder: 'never' }))),
    h('fieldset', null, h('legend', null, 'Labels'),
      row('owner', 'Owner', plain({})),
      row('tags', 'Tags', plain({ placeholder: 'team=web, nightly' }), 'With commas between them')),
    wrong, h('p', { className: 'buttons' }, button, h('a', { className: 'button', href: '#/' }, 'Cancel')), why, said);
  root.replaceChildren(h('h1', { tabIndex: -1 }, 'New sandbox'), form);

  const value = (name) => fields.get(name).input.value.trim();

  // shape shows the fields that the chosen network has.
  function shape() {
    fields.get('resolvers').box.hidden = network.value !== 'open';
    fields.get('policy').box.hidden = network.value !== 'own';
  }

  // chosen puts in what a template was made for, so that it is the one that fits.
  function chosen() {
    const t = templates.find((one) => image.value === `template ${one.key}`);
    if (!t) return;
    for (const [name, v] of [['vcpus', t.vcpus], ['memory', t.memory_mib], ['disk', t.disk_mib]]) fields.get(name).input.value = v || '';
    if (t.network === 'tap' && network.value === 'none') network.value = 'open';
    if (t.network !== 'tap') network.value = 'none';
    shape();
  }

  function draw() {
    const reason = lacks('create');
    off(button, busy ? 'It is being created.' : reason);
    if (busy) button.setAttribute('aria-busy', 'true');
    else button.removeAttribute('aria-busy');
    why.hidden = reason === '';
    why.textContent = reason;
  }

  function clear() {
    wrong.replaceChildren();
    for (const { input, error } of fields.values()) {
      error.hidden = true;
      input.removeAttribute('aria-invalid');
    }
  }

  // complain says what is wrong at the field that it is about, and goes there.
  function complain(name, error) {
    const words = [h('bdi', null, error.message), error.remedy ? ['. What to do: ', h('bdi', null, error.remedy)] : null, error.code ? [' (', code(error.code), ')'] : null].flat(2).filter(Boolean);
    const f = fields.get(name);
    if (!f || f.box.hidden) {
      wrong.replaceChildren(h('p', null, words));
      return;
    }
    f.error.replaceChildren(...words);
    f.error.hidden = false;
    f.input.setAttribute('aria-invalid', 'true');
    f.input.focus();
  }

  // body is what is asked for, or null if a field says what no request can carry.
  function body() {
    for (const [name, { input }] of fields) {
      if (input.validity.badInput) {
        complain(name, { message: 'This is no number.' });
        return null;
      }
    }
    const t = templates.find((one) => image.value === `template ${one.key}`);
    const spec = { image: t ? t.image : image.value.replace(/^image /, ''), name: value('name'), vcpus: number(fields.get('vcpus').input), memory_mib: number(fields.get('memory').input), disk_mib: number(fields.get('disk').input) };
    if (t) Object.assign(spec, { kernel: t.kernel, ipv6: t.ipv6, cmdline: t.cmdline, no_acpi: t.no_acpi });
    spec.network = network.value === 'none' ? 'none' : 'tap';
    const list = (name) => value(name).split(/[\s,]+/).filter(Boolean);
    if (network.value === 'open') spec.policy = { version: 1, default: { egress: 'allow' }, rules: [], dns: list('resolvers').length ? { upstreams: list('resolvers') } : undefined };
    if (network.value === 'own') {
      try {
        spec.policy = JSON.parse(policy.value);
      } catch (e) {
        complain('policy', { message: `This is no JSON: ${e.message}` });
        return null;
      }
    }
    const idle = number(fields.get('idle').input);
    if (idle) spec.idle = { sleep_seconds: Math.round(idle * 60) };
    const hours = number(fields.get('expires').input);
    const metadata = { owner: value('owner') || undefined, purpose: value('purpose') || undefined, tags: value('tags').split(',').map((s) => s.trim()).filter(Boolean) };
    return { spec, metadata, hours };
  }

  async function create() {
    if (isOff(button)) return;
    clear();
    const want = body();
    if (!want) return;
    // The same form sent again is the same request: its expiry, too, counts from the first time.
    const key = JSON.stringify(want);
    if (sent.key === '' || sent.of !== key) {
      if (want.hours) {
        const at = new Date(Math.ceil(Date.now() / 1000) * 1000 + want.hours * 3_600_000);
        if (Number.isNaN(at.getTime())) return complain('expires', { message: 'No time is so late.' });
        want.metadata.expires = at.toISOString();
      }
      delete want.hours;
      sent = { of: key, key: newKey(), body: JSON.stringify(want) };
    }
    busy = true;
    draw();
    said.textContent = 'Creating…';
    const begun = performance.now();
    try {
      const made = await work('POST', '/v1/sandboxes', sent.body, { 'Idempotency-Key': sent.key });
      if (control.signal.aborted) return;
      said.textContent = `Created, in ${span((performance.now() - begun) / 1000)}.`;
      location.hash = `#/sandbox/${encodeURIComponent(made.name)}`;
    } catch (e) {
      said.textContent = '';
      if (control.signal.aborted) return;
      if (e.status === 0) complain('', Object.assign(e, { remedy: `${e.remedy}; to press Create again makes no second one` }));
      else complain(fieldOf(e), e);
    } finally {
      busy = false;
      draw();
    }
  }

  async function fill() {
    const lists = await Promise.allSettled([get('/v1/images', control.signal), listOf('/v1/templates', 'templates', control.signal), get('/v1/host', control.signal)]);
    if (control.signal.aborted) return;
    const [images, made, host] = lists;
    if (images.status === 'rejected') notice('Listing images', images.reason);
    // Templates and the host's name servers are for tokens without an owner: others go without.
    templates = made.status === 'fulfilled' ? made.value.filter((t) => t.state === 'ready') : [];
    if (host.status === 'fulfilled' && value('resolvers') === '') fields.get('resolvers').input.value = (host.value.resolvers ?? []).join(', ');
    const all = images.status === 'fulfilled' ? images.value.images ?? [] : [];
    const names = all.flatMap((i) => (i.tags?.length ? i.tags : [i.id]).map((t) => [t, i]));
    image.replaceChildren(
      h('option', { value: '' }, names.length ? 'Choose one' : 'There are no images'),
      names.length ? group('Images', names.map(([t, i]) => h('option', { value: `image ${t}` }, `${t.length > 60 ? t.slice(0, 12) : t}, ${bytes(i.content)}`))) : '',
      templates.length ? group('Templates', templates.map((t) => h('option', { value: `template ${t.key}` }, `${names.find(([, i]) => i.id === t.image)?.[0] ?? t.image.slice(0, 40)}, ${t.vcpus || 1} CPUs, ${t.memory_mib || 256} MiB, ${t.network === 'tap' ? 'network' : 'no network'}`))) : '');
    const want = asked.template ? `template ${asked.template}` : asked.image ? `image ${asked.image}` : names.length === 1 ? `image ${names[0][0]}` : '';
    if ([...image.options].some((o) => o.value === want)) image.value = want;
    chosen();
  }
  const group = (label, options) => {
    const e = h('optgroup', null, options);
    e.label = label;
    return e;
  };

  const onChange = () => draw();
  session.addEventListener('change', onChange);
  draw();
  shape();
  fill();
  return {
    title: 'New sandbox',
    update(next) { asked = next; },
    stop() {
      control.abort();
      session.removeEventListener('change', onChange);
    },
  };
}
