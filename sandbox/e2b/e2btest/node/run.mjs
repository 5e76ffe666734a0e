// Runs the unmodified npm package e2b (argument 1: its name among the dependencies) against the server that
// E2B_API_URL and E2B_SANDBOX_URL name. Prints a line of JSON for each case: group, name, and outcome.
import fs from 'node:fs'
import http from 'node:http'
import https from 'node:https'
import os from 'node:os'
import { setTimeout as rest } from 'node:timers/promises'
import assert from 'node:assert/strict'

const pkg = process.argv[2]
const only = process.argv[3]
const e2b = await import(pkg)
const { Sandbox, CommandExitError, NotFoundError, InvalidArgumentError, TimeoutError } = e2b
const template = 'base'
const api = new URL(process.env.E2B_API_URL)
// A request to the files of a sandbox, with the query of a URL.
const files = (s, u, opts = {}) => fetch(api.origin + '/files' + new URL(u).search, { ...opts, headers: { 'e2b-sandbox-id': s.sandboxId, 'e2b-sandbox-port': '49983' } })

const groups = new Map()
let group = ''
const cases = []
const on = g => { group = g }
// need: names of members of Sandbox or its parts that older packages lack.
const it = (name, f, need) => cases.push({ group, name, f, need })

let shared // a sandbox that cases of commands and files use
const sbx = async () => (shared ??= await Sandbox.create(template, { timeoutMs: 600_000, metadata: { shared: 'yes' }, envs: { FROM_CREATE: 'c' } }))
const alone = async (opts, f) => {
  const s = await Sandbox.create(template, { timeoutMs: 60_000, ...opts })
  try { return await f(s) } finally { await s.kill().catch(() => {}) }
}
const until = async (what, f, ms = 20_000) => {
  for (const end = Date.now() + ms; ;) {
    const v = await f()
    if (v) return v
    if (Date.now() > end) throw new Error('not in time: ' + what)
    await rest(50)
  }
}
const rejects = (p, kind) => assert.rejects(p, e => {
  if (kind && !(e instanceof kind)) throw new Error(`is ${e.name} (${e.message}), want ${kind.name}`)
  return true
})
// A request to a port of a sandbox by its host name.
const get = (s, port, path, headers = {}) => new Promise((ok, bad) => {
  const host = s.getHost(port)
  const [name, at] = host.split(':')
  const r = (api.protocol === 'https:' ? https : http).request({ host: name, port: at, path, headers: { host, ...headers } }, res => {
    let body = ''
    res.setEncoding('utf8').on('data', d => (body += d)).on('end', () => ok({ status: res.statusCode, body, headers: res.headers }))
  })
  r.on('error', bad).end()
})
const all = async p => {
  const out = []
  while (p.hasNext) out.push(...(await p.nextItems()))
  return out
}
const list = opts => all(Sandbox.list(opts))

on('commands')
it('run gives stdout, stderr and 0', async () => {
  const r = await (await sbx()).commands.run('echo out; echo err >&2')
  assert.deepEqual([r.exitCode, r.stdout, r.stderr], [0, 'out\n', 'err\n'])
})
it('run rejects for an exit code', async () => {
  await assert.rejects((await sbx()).commands.run('echo a; exit 7'), e => e instanceof CommandExitError && e.exitCode === 7 && e.stdout === 'a\n')
})
it('special characters and multibyte output', async () => {
  const text = '!@#$%^&*()_+ äöü 漢字 😀'
  const r = await (await sbx()).commands.run(`printf '%s' "$X"`, { envs: { X: text } })
  assert.equal(r.stdout, text)
})
it('envs of creation and command', async () => {
  const r = await (await sbx()).commands.run('echo $FROM_CREATE $A', { envs: { A: 'b' } })
  assert.equal(r.stdout, 'c b\n')
})
it('env of a command wins', async () => {
  assert.equal((await (await sbx()).commands.run('echo $FROM_CREATE', { envs: { FROM_CREATE: 'mine' } })).stdout, 'mine\n')
})
it('the environment says that it is a sandbox', async () => {
  const s = await sbx()
  assert.equal((await s.commands.run('echo $E2B_SANDBOX $E2B_SANDBOX_ID')).stdout, `true ${s.sandboxId}\n`)
})
it('files say it as well', async () => {
  const s = await sbx()
  assert.equal((await s.commands.run('cd /run/e2b; for f in .E2B_SANDBOX .E2B_SANDBOX_ID .E2B_TEMPLATE_ID envs.json; do cat $f; echo; done; stat -c "%U %a" envs.json')).stdout,
    `true\n${s.sandboxId}\n${template}\n{"FROM_CREATE":"c"}\nuser 600\n`)
})
it('a command whose sandbox is killed', async () => {
  const s = await Sandbox.create(template, { timeoutMs: 60_000 })
  const h = await s.commands.run('sleep 1000', { background: true })
  await s.kill()
  await assert.rejects(h.wait(), e => e instanceof e2b.SandboxError && (!Sandbox.pause || e.message.includes('sandbox was killed or reached its end of life')))
})
it('default user, home and cwd', async () => {
  assert.equal((await (await sbx()).commands.run('id -un; pwd; echo $HOME $USER $LOGNAME')).stdout, 'user\n/home/user\n/home/user user user\n')
})
it('user root', async () => {
  assert.equal((await (await sbx()).commands.run('id -un; pwd', { user: 'root' })).stdout, 'root\n/root\n')
})
it('unknown user is refused', async () => {
  await rejects((await sbx()).commands.run('true', { user: 'nobody-there' }))
})
it('cwd', async () => {
  assert.equal((await (await sbx()).commands.run('pwd', { cwd: '/tmp' })).stdout, '/tmp\n')
})
it('missing cwd is an invalid argument', async () => {
  await rejects((await sbx()).commands.run('pwd', { cwd: '/not/there' }), InvalidArgumentError)
})
it('output as it comes', async () => {
  const seen = []
  await (await sbx()).commands.run('for i in 1 2 3; do echo $i; sleep 0.1; done', { onStdout: d => seen.push(d) })
  assert.ok(seen.length >= 2, `${seen.length} pieces`)
})
it('large output is whole', async () => {
  const r = await (await sbx()).commands.run('head -c 5000000 /dev/zero | tr "\\0" x')
  assert.equal(r.stdout.length, 5_000_000)
})
it('timeout kills', async () => {
  const s = await sbx()
  await rejects(s.commands.run('sleep 31415', { timeoutMs: 1000 }), TimeoutError)
  await until('the end of the process', async () => !(await s.commands.list()).some(p => p.args.join(' ').includes('31415')))
})
it('background, list and kill', async () => {
  const s = await sbx()
  const h = await s.commands.run('sleep 1000', { background: true })
  const p = (await s.commands.list()).find(p => p.pid === h.pid)
  assert.deepEqual([p.cmd, p.args.at(-1)], ['/bin/bash', 'sleep 1000'])
  assert.equal(await s.commands.kill(h.pid), true)
  await rejects(h.wait(), CommandExitError)
  assert.equal(await s.commands.kill(h.pid), false)
})
it('kill of nothing is false', async () => {
  assert.equal(await (await sbx()).commands.kill(999999), false)
})
it('killed by a signal', async () => {
  await assert.rejects((await sbx()).commands.run('kill -9 $$'), e => e instanceof CommandExitError && e.exitCode !== 0)
})
it('connect gets later output and the end', async () => {
  const s = await sbx()
  const h = await s.commands.run('sleep 1; echo late; exit 4', { background: true })
  const c = await s.commands.connect(h.pid)
  assert.equal(c.pid, h.pid)
  await assert.rejects(c.wait(), e => e.exitCode === 4 && e.stdout === 'late\n')
  await assert.rejects(h.wait(), e => e.exitCode === 4 && e.stdout === 'late\n')
})
it('a process outlives its client, and is joined', async () => {
  const s = await sbx()
  const h = await s.commands.run('sleep 2; echo joined', { background: true })
  await h.disconnect()
  await rest(200)
  const c = await s.commands.connect(h.pid)
  assert.equal((await c.wait()).stdout, 'joined\n')
})
it('the end of a finished process is kept', async () => {
  const s = await sbx()
  const h = await s.commands.run('exit 5', { background: true })
  await assert.rejects(h.wait(), e => e.exitCode === 5)
  const c = await s.commands.connect(h.pid)
  await assert.rejects(c.wait(), e => e.exitCode === 5)
})
it('connect to nothing is not found', async () => { await rejects((await sbx()).commands.connect(999999), NotFoundError) })
it('stdin', async () => {
  const s = await sbx()
  const h = await s.commands.run('read a; read b; echo "$b $a"', { background: true, stdin: true })
  await s.commands.sendStdin(h.pid, 'one\n')
  await s.commands.sendStdin(h.pid, 'two\n')
  assert.equal((await h.wait()).stdout, 'two one\n')
})
it('stdin of a process that nobody follows', async () => {
  const s = await sbx()
  const h = await s.commands.run('read a; echo $a > /tmp/read; sleep 0.5; exit 3', { background: true, stdin: true })
  await h.disconnect()
  await rest(2500)
  await s.commands.sendStdin(h.pid, 'unfollowed\n')
  await until('what it has read', async () => (await s.commands.run('cat /tmp/read || true')).stdout === 'unfollowed\n')
})
it('closed stdin', async () => {
  const s = await sbx()
  const h = await s.commands.run('cat; echo end', { background: true, stdin: true })
  await s.commands.sendStdin(h.pid, 'x')
  await s.commands.closeStdin(h.pid)
  assert.equal((await h.wait()).stdout, 'xend\n')
}, ['commands.closeStdin'])
it('no stdin by default', async () => { assert.equal((await (await sbx()).commands.run('cat; echo end')).stdout, 'end\n') })
it('stdin to nothing is not found', async () => { await rejects((await sbx()).commands.sendStdin(999999, 'x'), NotFoundError) })
it('twenty at once', async () => {
  const s = await sbx()
  const out = await Promise.all([...Array(20).keys()].map(i => s.commands.run(`echo ${i}`)))
  assert.deepEqual(out.map(r => +r.stdout), [...Array(20).keys()])
})
it('git', async () => {
  const r = await (await sbx()).commands.run('rm -rf g && git init -q g && cd g && git config user.email a@b.c && git config user.name n && echo x > f && git add f && git commit -qm m && git log --oneline | wc -l')
  assert.equal(r.stdout.trim(), '1')
})
it('python', async () => { assert.equal((await (await sbx()).commands.run('python3 -c "print(6*7)"')).stdout, '42\n') })

on('files')
it('write, read and what is told of it', async () => {
  const s = await sbx()
  const info = await s.files.write('a.txt', 'hello')
  assert.deepEqual([info.path, info.name], ['/home/user/a.txt', 'a.txt'])
  assert.equal(await s.files.read('a.txt'), 'hello')
  assert.equal((await s.commands.run('stat -c "%U %a" a.txt')).stdout, 'user 644\n')
})
it('overwrite shortens', async () => {
  const s = await sbx()
  await s.files.write('o.txt', 'longer than that')
  await s.files.write('o.txt', 'short')
  assert.equal(await s.files.read('o.txt'), 'short')
})
it('as root', async () => {
  const s = await sbx()
  const info = await s.files.write('r.txt', 'r', { user: 'root' })
  assert.equal(info.path, '/root/r.txt')
  assert.equal(await s.files.read('r.txt', { user: 'root' }), 'r')
})
it('parents are made, and are the user’s', async () => {
  const s = await sbx()
  await s.files.write('/home/user/p/q/r.txt', 'deep')
  assert.equal((await s.commands.run('stat -c %U p p/q p/q/r.txt')).stdout, 'user\nuser\nuser\n')
})
it('several at once', async () => {
  const s = await sbx()
  const out = await s.files.write([{ path: 'm1', data: 'one' }, { path: 'm/2', data: 'two' }])
  assert.deepEqual(out.map(f => f.path), ['/home/user/m1', '/home/user/m/2'])
  assert.equal(await s.files.read('m/2'), 'two')
})
it('bytes, blobs and streams', async () => {
  const s = await sbx()
  const data = new Uint8Array(300_000).map((_, i) => i * 7)
  await s.files.write('b', data.buffer)
  assert.deepEqual(await s.files.read('b', { format: 'bytes' }), data)
  await s.files.write('blob', new Blob(['blob']))
  assert.equal(await (await s.files.read('blob', { format: 'blob' })).text(), 'blob')
  const chunks = []
  for await (const c of await s.files.read('b', { format: 'stream' })) chunks.push(...c)
  assert.equal(chunks.length, data.length)
})
it('an empty file', async () => {
  const s = await sbx()
  await s.files.write('empty', '')
  assert.equal(await s.files.read('empty'), '')
})
it('names with spaces and letters of the world', async () => {
  const s = await sbx()
  await s.files.write('dir x/ä ü %41 漢.txt', 'n')
  assert.equal(await s.files.read('dir x/ä ü %41 漢.txt'), 'n')
})
it('a missing file is not found', async () => { await rejects((await sbx()).files.read('missing'), NotFoundError) })
it('a directory is no file', async () => { await rejects((await sbx()).files.read('/tmp')) })
it('writing to a directory is an invalid argument', async () => { await rejects((await sbx()).files.write('/tmp', 'x'), InvalidArgumentError) })
it('exists', async () => {
  const s = await sbx()
  assert.deepEqual([await s.files.exists('a.txt'), await s.files.exists('missing'), await s.files.exists('/tmp')], [true, false, true])
})
it('list', async () => {
  const s = await sbx()
  await s.files.write('l/f', 'abc')
  await s.files.makeDir('l/d/e')
  await s.files.write('l/d/e/g', '')
  const one = await s.files.list('l')
  assert.deepEqual(one.map(e => [e.name, e.type, e.path]), [['d', 'dir', '/home/user/l/d'], ['f', 'file', '/home/user/l/f']])
  const deep = await s.files.list('l', { depth: 3 })
  assert.deepEqual(deep.map(e => e.path.slice('/home/user/l/'.length)), ['d', 'd/e', 'd/e/g', 'f'])
})
it('list of what is missing, and of a file', async () => {
  const s = await sbx()
  await rejects(s.files.list('missing'), NotFoundError)
  await rejects(s.files.list('a.txt'), InvalidArgumentError)
  await rejects(s.files.list('l', { depth: 0 }), InvalidArgumentError)
})
it('makeDir says whether it was there', async () => {
  const s = await sbx()
  assert.equal(await s.files.makeDir('md/x'), true)
  assert.equal(await s.files.makeDir('md/x'), false)
  await rejects(s.files.makeDir('a.txt'))
})
it('rename', async () => {
  const s = await sbx()
  await s.files.write('from', 'moved')
  const e = await s.files.rename('from', 'new-dir/to')
  assert.equal(e.path, '/home/user/new-dir/to')
  assert.equal(await s.files.read('new-dir/to'), 'moved')
  assert.equal(await s.files.exists('from'), false)
  await rejects(s.files.rename('from', 'x'), NotFoundError)
})
it('remove of files, trees and nothing', async () => {
  const s = await sbx()
  await s.files.write('gone/a/b', '')
  await s.files.remove('gone')
  assert.equal(await s.files.exists('gone'), false)
  await s.files.remove('gone')
})
it('getInfo of a file', async () => {
  const s = await sbx()
  await s.files.write('i.sh', '12345')
  await s.commands.run('chmod 750 i.sh')
  const i = await s.files.getInfo('i.sh')
  assert.deepEqual([i.name, i.type, i.path, i.size, i.mode, i.permissions, i.owner, i.group], ['i.sh', 'file', '/home/user/i.sh', 5, 0o750, '-rwxr-x---', 'user', 'user'])
  assert.ok(Math.abs(i.modifiedTime - Date.now()) < 60_000)
})
it('getInfo of a directory and a link', async () => {
  const s = await sbx()
  assert.equal((await s.files.getInfo('/tmp')).type, 'dir')
  await s.files.write('target', 't')
  await s.commands.run('ln -sf target link; ln -sf nowhere dangling')
  const i = await s.files.getInfo('link')
  assert.deepEqual([i.type, i.symlinkTarget], ['file', '/home/user/target'])
  assert.equal((await s.files.getInfo('dangling')).symlinkTarget, '/home/user/nowhere')
  await rejects(s.files.getInfo('missing'), NotFoundError)
})
it('10 MB there and back', async () => {
  const s = await sbx()
  const data = new Uint8Array(10_000_000).fill(120)
  await s.files.write('big', new Blob([data]))
  assert.equal((await s.commands.run('stat -c %s big')).stdout, '10000000\n')
  assert.equal((await s.files.read('big', { format: 'bytes' })).length, 10_000_000)
})
it('gzip of an upload', async () => {
  const s = await sbx()
  await s.files.write('z', 'z'.repeat(100_000), { gzip: true, useOctetStream: true })
  assert.equal((await s.files.read('z', { gzip: true })).length, 100_000)
}, ['files.octet'])
it('metadata', async () => {
  const s = await sbx()
  const of = async f => (await s.files.getInfo(f)).metadata
  for (const useOctetStream of [false, true]) {
    const f = 'meta/' + useOctetStream
    assert.deepEqual((await s.files.write(f, 'x', { metadata: { Who: 'a b', n: '' }, useOctetStream })).metadata, { who: 'a b', n: '' })
    assert.deepEqual(await of(f), { who: 'a b', n: '' })
  }
  assert.deepEqual((await s.files.list('meta')).map(e => e.metadata?.who), ['a b', 'a b'])
  assert.deepEqual((await s.files.rename('meta/true', 'meta/moved')).metadata, { who: 'a b', n: '' })
  assert.equal((await s.files.write('meta/moved', 'y')).metadata, undefined) // an upload replaces all of it
  assert.equal(await of('meta/moved'), undefined)
  await s.commands.run(`python3 -c 'import os; os.setxattr("meta/moved", "user.e2b.set", b"inside"); os.setxattr("meta/moved", "user.other", b"x")'`)
  assert.deepEqual(await of('meta/moved'), { set: 'inside' })
  await rejects(s.files.write('meta/moved', 'z', { metadata: { long: 'x'.repeat(4096) } }), InvalidArgumentError)
  assert.equal(await s.files.read('meta/moved'), 'y')
}, ['files.octet'])

on('watch')
const events = async (f, opts = {}) => {
  const s = await sbx()
  const dir = 'w' + Math.random().toString(36).slice(2)
  await s.files.makeDir(dir + '/sub')
  await s.files.write(dir + '/old', 'old')
  const seen = []
  const h = await s.files.watchDir(dir, e => seen.push(e), opts)
  try { await f(s, dir, seen) } finally { await h.stop() }
}
const event = (seen, type, name) => until(`${type} ${name} in ${JSON.stringify(seen)}`, async () => seen.find(e => e.type === type && e.name === name))
it('a new file', () => events(async (s, dir, seen) => {
  await s.files.write(dir + '/new', 'x')
  await event(seen, 'create', 'new')
  await event(seen, 'write', 'new')
}))
it('a file changes, its mode, its name, and it goes', () => events(async (s, dir, seen) => {
  await s.files.write(dir + '/old', 'more')
  await event(seen, 'write', 'old')
  await s.commands.run(`chmod 600 ${dir}/old`)
  await event(seen, 'chmod', 'old')
  await s.files.rename(dir + '/old', dir + '/renamed')
  await event(seen, 'rename', 'old')
  await event(seen, 'create', 'renamed')
  await s.files.remove(dir + '/renamed')
  await event(seen, 'remove', 'renamed')
}))
it('recursive', () => events(async (s, dir, seen) => {
  await s.files.write(dir + '/sub/deep', 'x')
  await event(seen, 'write', 'sub/deep')
  await s.files.write(dir + '/sub/made/deeper', 'x')
  await event(seen, 'create', 'sub/made')
}, { recursive: true }))
it('not recursive', () => events(async (s, dir, seen) => {
  await s.files.write(dir + '/sub/deep', 'x')
  await s.files.write(dir + '/flat', 'x')
  await event(seen, 'write', 'flat')
  assert.ok(!seen.some(e => e.name.includes('deep')))
}))
it('missing and not a directory', async () => {
  const s = await sbx()
  await rejects(s.files.watchDir('missing', () => {}), NotFoundError)
  await rejects(s.files.watchDir('a.txt', () => {}))
})

on('pty')
const terminal = async (f, opts = {}) => {
  const s = await sbx()
  let out = ''
  const dec = new TextDecoder()
  const h = await s.pty.create({ cols: 80, rows: 24, onData: d => (out += dec.decode(d)), timeoutMs: 60_000, ...opts })
  const type = text => s.pty.sendInput(h.pid, new TextEncoder().encode(text))
  try { await f({ s, h, type, out: () => out }) } finally { await s.pty.kill(h.pid) }
}
it('a shell', () => terminal(async ({ h, type, out }) => {
  await type('echo $((40+2)) $TERM\n')
  await until('42 in ' + out(), async () => out().includes('42 xterm-256color'))
  await type('exit\n')
  assert.equal((await h.wait()).exitCode, 0)
}))
it('size and its change', () => terminal(async ({ s, h, type, out }) => {
  await type('stty size\n')
  await until('24 80', async () => out().includes('24 80'))
  await s.pty.resize(h.pid, { cols: 100, rows: 30 })
  await type('stty size\n')
  await until('30 100', async () => out().includes('30 100'))
}))
it('envs and cwd', () => terminal(async ({ type, out }) => {
  await type('echo "<$PWD $A>"\n')
  await until('the variable', async () => out().includes('</tmp b>'))
}, { envs: { A: 'b' }, cwd: '/tmp' }))
it('interrupt', () => terminal(async ({ type, out }) => {
  await type('sleep 1000; echo after\n')
  await rest(300)
  await type('\x03')
  await type('echo st$((1))ll\n')
  await until('the shell', async () => out().includes('st1ll'))
}))
it('joined by another', () => terminal(async ({ s, h, type }) => {
  let other = ''
  const c = await s.pty.connect(h.pid, { onData: d => (other += new TextDecoder().decode(d)) })
  await type('echo b$((0))th\n')
  await until('the output', async () => other.includes('b0th'))
  await c.disconnect()
}), ['pty.connect'])
it('kill', async () => {
  const s = await sbx()
  const h = await s.pty.create({ cols: 80, rows: 24, onData: () => {} })
  assert.equal(await s.pty.kill(h.pid), true)
  await rejects(h.wait())
  assert.equal(await s.pty.kill(h.pid), false)
})

on('lifecycle')
it('create, info, kill', async () => {
  const s = await Sandbox.create(template, { timeoutMs: 100_000, metadata: { a: 'b' } })
  assert.match(s.sandboxId, /^[a-z0-9]+$/)
  assert.equal(await s.isRunning(), true)
  const i = await s.getInfo()
  assert.deepEqual([i.sandboxId, i.templateId, i.metadata, i.state], [s.sandboxId, template, { a: 'b' }, 'running'])
  assert.ok(Math.abs(i.endAt - Date.now() - 100_000) < 30_000, `ends ${i.endAt}`)
  assert.equal(await Sandbox.kill(s.sandboxId), true)
  assert.equal(await s.isRunning(), false)
  assert.equal(await Sandbox.kill(s.sandboxId), false)
  await rejects(s.commands.run('true'))
})
it('kill of nothing is false', async () => { assert.equal(await Sandbox.kill('inothing'), false) })
it('unknown template', async () => { await rejects(Sandbox.create('no-such-template')) })
it('list by metadata and state', () => alone({ metadata: { k: 'v w', l: 'm' } }, async s => {
  const ids = async q => (await list({ query: q })).map(x => x.sandboxId)
  assert.deepEqual(await ids({ metadata: { k: 'v w', l: 'm' } }), [s.sandboxId])
  assert.deepEqual(await ids({ metadata: { k: 'v w', l: 'other' } }), [])
  assert.ok((await ids({ state: ['running'] })).includes(s.sandboxId))
  assert.ok(!(await ids({ state: ['paused'] })).includes(s.sandboxId))
}))
it('pages', () => alone({ metadata: { page: 'x' } }, a => alone({ metadata: { page: 'x' } }, async b => {
  const p = Sandbox.list({ query: { metadata: { page: 'x' } }, limit: 1 })
  const first = await p.nextItems()
  assert.deepEqual([first.length, p.hasNext], [1, true])
  const second = await p.nextItems()
  assert.deepEqual([first[0].sandboxId, second[0].sandboxId].sort(), [a.sandboxId, b.sandboxId].sort())
  assert.equal(p.hasNext, false)
})))
it('connect', () => alone({}, async s => {
  await s.files.write('c', 'c')
  const c = await Sandbox.connect(s.sandboxId)
  assert.equal(await c.files.read('c'), 'c')
}))
it('connect to nothing', async () => { await rejects(Sandbox.connect('inothing')) })
const pause = s => (s.pause ? s.pause() : s.betaPause())
it('pause keeps id, files and processes', () => alone({}, async s => {
  await s.files.write('kept', 'kept')
  const h = await s.commands.run('sleep 1000', { background: true })
  await pause(s)
  assert.equal(await s.isRunning(), false)
  assert.equal((await Sandbox.list ? (await list({ query: { state: ['paused'] } })) : []).some(x => x.sandboxId === s.sandboxId), true)
  await rejects(s.commands.run('true'))
  const c = await Sandbox.connect(s.sandboxId, { timeoutMs: 60_000 })
  assert.equal(c.sandboxId, s.sandboxId)
  assert.equal(await c.files.read('kept'), 'kept')
  assert.ok((await c.commands.list()).some(p => p.pid === h.pid))
  assert.equal(await s.isRunning(), true)
  assert.equal(await s.files.read('kept'), 'kept') // the token is the same
}))
it('a process is followed again after a pause', () => alone({}, async s => {
  const h = await s.commands.run('read x; echo got $x', { background: true, stdin: true })
  await pause(s)
  await Sandbox.connect(s.sandboxId)
  const c = await s.commands.connect(h.pid)
  await s.commands.sendStdin(h.pid, 'it\n')
  assert.equal((await c.wait()).stdout, 'got it\n')
}))
it('a second pause', () => alone({}, async s => {
  await pause(s)
  if (s.pause) assert.equal(await s.pause(), false)
}))
it('kill of a paused one', () => alone({}, async s => {
  await pause(s)
  assert.equal(await Sandbox.kill(s.sandboxId), true)
  await rejects(Sandbox.connect(s.sandboxId))
}))
it('pause without memory, and a reboot', () => alone({}, async s => {
  await s.files.write('kept', 'kept')
  await s.commands.run('sleep 1000', { background: true })
  const boot = async () => (await s.commands.run('cat /proc/sys/kernel/random/boot_id')).stdout
  const first = await boot()
  await pause(s)
  await Sandbox.connect(s.sandboxId)
  assert.equal(await boot(), first)
  await s.pause({ keepMemory: false })
  const c = await Sandbox.connect(s.sandboxId)
  assert.notEqual(await boot(), first)
  assert.equal(await c.files.read('kept'), 'kept')
  assert.equal((await c.commands.list()).length, 0)
}), ['newest'])

on('timeout')
it('a sandbox is gone after its time', async () => {
  const s = await Sandbox.create(template, { timeoutMs: 1000 })
  await until('its end', async () => !(await s.isRunning()))
  await rejects(s.getInfo())
})
it('setTimeout shortens', () => alone({ timeoutMs: 600_000 }, async s => {
  await s.setTimeout(1000)
  await until('its end', async () => !(await s.isRunning()))
}))
it('setTimeout lengthens', () => alone({ timeoutMs: 3000 }, async s => {
  await s.setTimeout(300_000)
  const i = await s.getInfo()
  assert.ok(i.endAt - Date.now() > 200_000)
}))
it('connect does not shorten', () => alone({ timeoutMs: 300_000 }, async s => {
  await Sandbox.connect(s.sandboxId, { timeoutMs: 1000 })
  assert.ok((await s.getInfo()).endAt - Date.now() > 200_000)
}))
it('pause at the end of the time', () => alone({ timeoutMs: 1500, lifecycle: { onTimeout: 'pause' } }, async s => {
  await s.files.write('kept', 'kept')
  await until('the pause', async () => (await Sandbox.getInfo(s.sandboxId)).state === 'paused')
  const c = await Sandbox.connect(s.sandboxId, { timeoutMs: 60_000 })
  assert.equal(await c.files.read('kept'), 'kept')
}), ['lifecycle'])
it('a pause at the end of the time that keeps the disk only', () => alone({ timeoutMs: 1500, lifecycle: { onTimeout: { action: 'pause', keepMemory: false } } }, async s => {
  await s.files.write('kept', 'kept')
  // It ignores the end for as long as it may: whoever connects meanwhile waits for a boot.
  await s.commands.run('trap "" TERM; sync; sleep 1000', { background: true })
  await until('the pause', async () => (await Sandbox.getInfo(s.sandboxId)).state === 'paused', 40_000)
  const c = await Sandbox.connect(s.sandboxId, { timeoutMs: 60_000 })
  assert.equal(await c.files.read('kept'), 'kept')
  assert.deepEqual(await c.commands.list(), [])
  assert.equal((await c.commands.run('cat /run/e2b/.E2B_SANDBOX_ID')).stdout, s.sandboxId)
}), ['newest'])
it('traffic resumes', () => alone({ timeoutMs: 1500, lifecycle: { onTimeout: 'pause', autoResume: true } }, async s => {
  await s.files.write('kept', 'kept')
  await until('the pause', async () => (await Sandbox.getInfo(s.sandboxId)).state === 'paused')
  assert.equal((await s.commands.run('cat kept')).stdout, 'kept')
}), ['lifecycle'])
it('traffic does not resume unasked', () => alone({ timeoutMs: 1500, lifecycle: { onTimeout: 'pause' } }, async s => {
  await until('the pause', async () => (await Sandbox.getInfo(s.sandboxId)).state === 'paused')
  await rejects(s.commands.run('true'))
  assert.equal((await Sandbox.getInfo(s.sandboxId)).state, 'paused')
}), ['lifecycle'])

on('snapshot, fork')
it('a sandbox of a snapshot', () => alone({}, async s => {
  await s.files.write('before', 'b')
  const snap = await s.createSnapshot()
  await s.files.write('after', 'a')
  const c = await Sandbox.create(snap.snapshotId, { timeoutMs: 60_000 })
  try {
    assert.notEqual(c.sandboxId, s.sandboxId)
    assert.deepEqual([await c.files.read('before'), await c.files.exists('after')], ['b', false])
    assert.equal(await s.files.read('after'), 'a')
  } finally { await c.kill() }
  const mine = await all(Sandbox.listSnapshots({ sandboxId: s.sandboxId }))
  assert.deepEqual(mine.map(x => x.snapshotId), [snap.snapshotId])
  assert.equal(await Sandbox.deleteSnapshot(snap.snapshotId), true)
  assert.equal(await Sandbox.deleteSnapshot(snap.snapshotId), false)
  await rejects(Sandbox.create(snap.snapshotId))
}), ['createSnapshot'])
it('fork', () => alone({ metadata: { f: 'f' } }, async s => {
  await s.files.write('before', 'b')
  const out = await s.fork({ count: 2, timeoutMs: 60_000 })
  const kids = out.map(o => o.sandbox ?? o)
  try {
    assert.equal(new Set([s.sandboxId, ...kids.map(k => k.sandboxId)]).size, 3)
    await kids[0].files.write('own', '0')
    assert.equal(await kids[1].files.exists('own'), false)
    assert.equal(await kids[1].files.read('before'), 'b')
    assert.equal(await s.isRunning(), true)
  } finally { await Promise.all(kids.map(k => k.kill())) }
}), ['fork'])

on('metrics')
it('of a sandbox', () => alone({}, async s => {
  const m = await s.getMetrics()
  assert.ok(m.length > 0 && m[0].memTotal > 0 && m[0].cpuCount > 0 && m[0].diskTotal > 0, JSON.stringify(m))
}))

it('of the time before, also asleep', () => alone({}, async s => {
  const begun = new Date()
  await rest(6000)
  await s.commands.run('timeout 3 sh -c "while :; do :; done" || true')
  await until('three samples', async () => (await s.getMetrics()).length > 2)
  const all = await s.getMetrics()
  assert.ok(all.every((m, i) => !i || m.timestamp > all[i - 1].timestamp), JSON.stringify(all))
  assert.ok(Math.max(...all.map(m => m.cpuUsedPct)) > 0, JSON.stringify(all))
  const at = all[0].timestamp.getTime() // the package rounds to seconds
  assert.deepEqual(await s.getMetrics({ start: new Date(at - 1000), end: new Date(at + 1000) }), [all[0]])
  assert.deepEqual(await s.getMetrics({ start: new Date(begun - 7200_000), end: new Date(begun - 3600_000) }), [])
  await pause(s)
  assert.deepEqual((await s.getMetrics()).slice(0, all.length), all)
  assert.equal(await s.isRunning(), false)
}), ['network'])

on('network')
it('without the internet', () => alone({ allowInternetAccess: false }, async s => { assert.equal((await s.commands.run('echo ok')).stdout, 'ok\n') }))
it('lists', () => alone({ network: { denyOut: ['0.0.0.0/0'], allowOut: ['1.1.1.1', '8.8.8.0/24', 'example.com', '*.example.org'] } }, async s => {
  assert.equal((await s.commands.run('echo ok')).stdout, 'ok\n')
}), ['network'])
it('names need a denial', async () => { await rejects(Sandbox.create(template, { network: { allowOut: ['example.com'] } })) }, ['network'])
it('update', () => alone({}, async s => { await s.updateNetwork({ denyOut: ['10.0.0.0/8'] }) }), ['updateNetwork'])
it('a proxy of the client is refused by name', async () => {
  await assert.rejects(Sandbox.create(template, { network: { egressProxy: { address: '127.0.0.1:1080' } } }), /egressProxy/)
}, ['newest'])

on('secure, signatures')
it('urls with signatures', () => alone({ secure: true }, async s => {
  await s.files.write('signed.txt', 'signed')
  const url = await s.downloadUrl('signed.txt', { useSignatureExpiration: 60 })
  assert.equal(await (await files(s, url)).text(), 'signed')
  assert.equal((await files(s, url.replace('signed.txt', 'other.txt'))).status, 401)
  const up = await s.uploadUrl('up.txt', {})
  const form = new FormData()
  form.append('file', new Blob(['uploaded']), 'up.txt')
  const r = await files(s, up, { method: 'POST', body: form })
  assert.equal(r.status, 200)
  assert.equal(await s.files.read('up.txt'), 'uploaded')
}))
it('an expired signature', () => alone({ secure: true }, async s => {
  await s.files.write('x', 'x')
  const url = await s.downloadUrl('x', { useSignatureExpiration: -10 })
  const r = await files(s, url)
  assert.equal(r.status, 401)
  assert.deepEqual(await r.json(), { code: 401, message: 'signature is already expired' })
}))
it('a wrong key', async () => { await rejects(Sandbox.create(template, { apiKey: 'e2b_' + '0'.repeat(40) })) })
it('the token of another sandbox', () => alone({ secure: true }, a => alone({ secure: true }, async b => {
  const r = await fetch(api.origin + '/process.Process/List', {
    method: 'POST', body: '{}',
    headers: { 'content-type': 'application/json', 'e2b-sandbox-id': a.sandboxId, 'x-access-token': b.envdAccessToken ?? 'x' }
  })
  assert.equal(r.status, 401)
})))

on('hosts')
it('a server of the guest', () => alone({}, async s => {
  await s.files.write('www/index.html', 'served')
  await s.commands.run('cd www && exec python3 -m http.server 8000 --bind 127.0.0.1', { background: true, timeoutMs: 0 })
  await until('the server', async () => (await get(s, 8000, '/index.html')).body === 'served')
  const closed = await get(s, 8001, '/')
  assert.deepEqual([closed.status, JSON.parse(closed.body).port, JSON.parse(closed.body).sandboxId], [502, 8001, s.sandboxId])
  assert.equal(closed.headers['access-control-allow-origin'], '*')
  const page = await get(s, 8001, '/', { 'user-agent': 'Mozilla/5.0 (X11; Linux x86_64)' })
  assert.deepEqual([page.status, page.headers['content-type']], [502, 'text/html; charset=utf-8'])
  assert.match(page.body, /<title>Closed Port Error<\/title>/)
  await s.kill()
  const gone = await get(s, 8000, '/')
  assert.deepEqual([gone.status, JSON.parse(gone.body).message], [502, 'The sandbox was not found'])
}))
it('a private one wants the traffic token', () => alone({ network: { allowPublicTraffic: false } }, async s => {
  await s.commands.run('cd /tmp && exec python3 -m http.server 8000 --bind 127.0.0.1', { background: true, timeoutMs: 0 })
  assert.equal((await get(s, 8000, '/')).status, 403)
  assert.ok(s.trafficAccessToken)
  await until('the server', async () => (await get(s, 8000, '/', { 'e2b-traffic-access-token': s.trafficAccessToken })).status === 200)
}), ['network'])
it('a server that speaks HTTPS', () => alone({ network: { httpsPorts: [8443] } }, async s => {
  await s.files.write('serve.py', `import http.server, ssl
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"encrypted")
server = http.server.HTTPServer(("127.0.0.1", 8443), H)
c = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
c.load_cert_chain("cert.pem", "key.pem")
server.socket = c.wrap_socket(server.socket, server_side=True)
server.serve_forever()
`)
  await s.commands.run('openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=any -keyout key.pem -out cert.pem')
  await s.commands.run('exec python3 serve.py', { background: true, timeoutMs: 0 })
  await until('the server', async () => (await get(s, 8443, '/')).body === 'encrypted')
  assert.deepEqual((await s.getInfo()).network.httpsPorts, [8443])
  if (s.updateNetwork) {
    await s.updateNetwork({ denyOut: ['8.8.8.8'] })
    assert.equal((await get(s, 8443, '/')).body, 'encrypted')
  }
}), ['newest'])

on('templates')
const { Template } = e2b
const context = fs.mkdtempSync(os.tmpdir() + '/e2b-context-')
process.on('exit', () => fs.rmSync(context, { recursive: true }))
fs.mkdirSync(context + '/src')
fs.writeFileSync(context + '/src/a.txt', 'copied')
fs.symlinkSync('a.txt', context + '/src/link')
const build = (alias, steps) => Template.build(steps(Template({ fileContextPath: context }).fromTemplate(template)), { alias, cpuCount: 1, memoryMB: 512 })
it('its sandboxes begin as its steps ended', async () => {
  await build('steps', t => t.copy('src/*', 'in').copy('src/a.txt', 'one/b.txt', { user: 'root', mode: 0o600 }).setEnvs({ A: 'a' })
    .runCmd('test "$(readlink in/link) $(stat -c "%U %a" one/b.txt)" = "a.txt root 600"').setWorkdir('/opt/work').runCmd('echo $A > made', { user: 'root' })
    .setStartCmd('sleep 1000', 'test -f /opt/work/made'))
  const s = await Sandbox.create('steps', { envs: { B: 'b' } })
  try {
    assert.equal((await s.commands.run('pwd; echo $A $B; cat made /home/user/in/a.txt')).stdout, '/opt/work\na b\na\ncopied')
    await s.files.write('rel', '', { user: 'root' })
    assert.equal(await s.files.exists('/opt/work/rel'), true)
  } finally { await s.kill() }
}, ['template'])
it('a failure says why', async () => {
  await assert.rejects(build('fails', t => t.runCmd('true').runCmd('exit 3')), /exit 3/)
  await assert.rejects(build('fails', t => t.runCmd('whoami', { user: 'nobody-there' })), /invalid username: 'nobody-there'/)
  await assert.rejects(Template.build(Template().fromImage('none:1'), { alias: 'fails' }), /none:1 .*not on the host|could not be pulled/)
  await rejects(Sandbox.create('fails'))
}, ['template'])
it('one built anew, and removed', async () => {
  const first = await build('anew', t => t.runCmd('echo 1 > n'))
  const second = await build('anew', t => t.runCmd('echo 2 > n'))
  assert.equal(first.templateId, second.templateId)
  const s = await Sandbox.create('anew')
  try { assert.equal(await s.files.read('n'), '2\n') } finally { await s.kill() }
  assert.equal(await Sandbox.deleteSnapshot(first.templateId), true)
  await rejects(Sandbox.create('anew'))
}, ['template', 'createSnapshot'])
it('tags', async () => {
  await build('tagged:v1', t => t)
  assert.deepEqual((await Template.assignTags('tagged:v1', ['a', 'b'])).tags, ['a', 'b'])
  await (await Sandbox.create('tagged:b')).kill()
  await Template.removeTags('tagged', ['v1', 'a', 'b'])
  assert.equal(await Template.exists('tagged:b'), false)
}, ['tags'])
it('its program mcp-gateway gets what mcp says, and its failure ends the sandbox', async () => {
  await build('mcp', t => t.runCmd('printf "#!/bin/sh\\necho \\$2 > /tmp/mcp" > /usr/local/bin/mcp-gateway; chmod 755 /usr/local/bin/mcp-gateway', { user: 'root' }))
  const s = await Sandbox.create('mcp', { mcp: { a: { b: 1 } } })
  try { assert.deepEqual(JSON.parse(await s.files.read('/tmp/mcp')), { a: { b: 1 } }) } finally { await s.kill() }
  await assert.rejects(Sandbox.create(template, { mcp: { a: {} }, metadata: { mcp: 'none' } }), /MCP gateway/)
  assert.deepEqual(await list({ query: { metadata: { mcp: 'none' } } }), [])
}, ['newest'])

on('code interpreter')
// The unmodified @e2b/code-interpreter shares the package e2b. DROWSE_INTERPRETER is the server for the guest.
const source = process.env.DROWSE_INTERPRETER
const served = f => async () => {
  const ci = await import('@e2b/code-interpreter')
  const s = await ci.Sandbox.create(template, { timeoutMs: 300_000, envs: { AT_CREATE: 'it"s' } })
  try {
    await s.files.write('interpreter.py', source)
    // The service that runs it in the image has no variables of the sandbox.
    await s.commands.run('exec env -u AT_CREATE /usr/bin/python3 interpreter.py', { background: true, timeoutMs: 0 })
    await until('the kernel', async () => (await get(s, 49999, '/health')).status === 200, 80_000)
    return await f(s)
  } finally { await s.kill().catch(() => {}) }
}
const code = (name, f) => it(name, served(f), ['interpreter'])
code('state, output and results', async s => {
  await s.runCode('x = 41')
  const r = await s.runCode('import sys; print("ä漢😀"); print("err", file=sys.stderr); x + 1')
  assert.deepEqual([r.logs.stdout.join(''), r.logs.stderr.join(''), r.text, r.error, r.executionCount], ['ä漢😀\n', 'err\n', '42', undefined, 2])
  assert.equal((await s.runCode('import os; os.getcwd()')).text, '/home/user')
  const rich = await s.runCode('from IPython.display import *; display(HTML("<b>"), Markdown("*m*"), Latex("$x$"), JSON({"a": 1})); Image(data=b"\\x89PNG\\r\\n\\x1a\\n0000", format="png")')
  assert.deepEqual(rich.results.map(x => x.formats().join()), ['html', 'markdown', 'latex', 'json', 'png'])
  assert.deepEqual(rich.results.map(x => x.isMainResult), [false, false, false, false, true])
  assert.deepEqual(rich.results[3].json, { a: 1 })
})
code('errors leave the state', async s => {
  const bad = await s.runCode('y = 1\nx ==')
  assert.equal(bad.error.name, 'SyntaxError')
  const zero = await s.runCode('y = 2; 1 / 0')
  assert.deepEqual([zero.error.name, zero.error.value], ['ZeroDivisionError', 'division by zero'])
  assert.match(zero.error.traceback, /1 \/ 0|ZeroDivisionError/)
  assert.equal((await s.runCode('y')).text, '2')
  assert.equal((await s.runCode('import os; os._exit(3)')).error.name, 'KernelDied')
  assert.equal((await s.runCode('y')).error.name, 'NameError')
})
code('variables of an execution', async s => {
  const get = 'import os; os.environ.get("A_B")'
  assert.equal((await s.runCode(get, { envs: { A_B: 'it"s' } })).text, 'it"s')
  assert.equal((await s.runCode(get)).text, undefined)
})
code('variables of the sandbox, and of a clone of it', async s => {
  const get = 'import os; os.environ.get("AT_CREATE")'
  assert.equal((await s.runCode(get)).text, 'it"s')
  assert.equal((await s.runCode(get, { envs: { AT_CREATE: 'mine' } })).text, 'mine')
  assert.equal((await s.runCode(get)).text, 'it"s')
  await s.runCode('os.environ["AT_CREATE"] = "changed"')
  assert.equal((await s.runCode(get)).text, 'changed')
  // The host tells a clone of a warm kernel others.
  await s.files.write('/run/e2b/envs.json', '{"OTHER": "o"}')
  assert.equal((await s.runCode('str([os.environ.get(k) for k in ("AT_CREATE", "OTHER")])')).text, "[None, 'o']")
  assert.equal((await s.runCode('import os; os.environ["OTHER"]', { context: await s.createCodeContext() })).text, 'o')
  await s.files.remove('/run/e2b/envs.json')
  assert.equal((await s.runCode('os.environ.get("OTHER")')).text, undefined)
})
code('1 MiB of output', async s => {
  const r = await s.runCode('print("ä" * (1 << 19)); print("x" * (1 << 20))')
  assert.equal(r.logs.stdout.join(''), 'ä'.repeat(1 << 19) + '\n' + 'x'.repeat(1 << 20) + '\n')
})
code('output without end, and code that is too long', async s => {
  await s.runCode('x = 5')
  assert.equal((await s.runCode('while True: print("y" * 100000)')).error.name, 'OutputTooLarge')
  await assert.rejects(s.runCode('#' + 'x'.repeat(1 << 20)), /413/)
  await assert.rejects(s.runCode('1', { language: 'r' }), /400/)
  assert.equal((await s.runCode('x')).text, '5')
})
code('an endless loop and a client that leaves', async s => {
  await s.runCode('x = 5')
  await rejects(s.runCode('while True: pass', { timeoutMs: 1500 }), TimeoutError)
  // It was interrupted, not ended: the next waits for it.
  assert.equal((await s.runCode('x')).text, '5')
})
code('contexts', async s => {
  const [a, b] = await Promise.all([s.createCodeContext({ cwd: '/tmp' }), s.createCodeContext()])
  assert.deepEqual([a.cwd, a.language, b.cwd], ['/tmp', 'python', '/home/user'])
  assert.deepEqual((await s.listCodeContexts()).map(c => c.id).sort(), [a.id, b.id, 'default'].sort())
  // Both at once: each waits for the other's file.
  const meet = (mine, other) => `import os, time\nopen("/tmp/${mine}", "w").close()\nwhile not os.path.exists("/tmp/${other}"): time.sleep(.05)\nv = "${mine}"\nv`
  const r = await Promise.all([s.runCode(meet('a', 'b'), { context: a }), s.runCode(meet('b', 'a'), { context: b })])
  assert.deepEqual(r.map(x => x.text), ['a', 'b'])
  assert.deepEqual((await Promise.all([s.runCode('v', { context: a }), s.runCode('v', { context: b })])).map(x => x.text), ['a', 'b'])
  await s.restartCodeContext(a)
  assert.equal((await s.runCode('v', { context: a })).error.name, 'NameError')
  await s.removeCodeContext(b)
  await rejects(s.runCode('v', { context: b }), NotFoundError)
  await rejects(s.removeCodeContext(b), NotFoundError)
  await assert.rejects(s.createCodeContext({ cwd: '/not/there' }), /400/)
})
code('state over pause and resume', async s => {
  await s.runCode('x = 42')
  await s.pause()
  const c = await s.connect()
  assert.equal((await c.runCode('x')).text, '42')
})

const lacks = {
  interpreter: async () => pkg !== 'e2b' || !source,
  'commands.closeStdin': async () => !(await sbx()).commands.closeStdin,
  'pty.connect': async () => !(await sbx()).pty.connect,
  'files.octet': async () => !(await sbx()).fork, // came before fork
  template: async () => !Template?.build, tags: async () => !Template?.assignTags,
  createSnapshot: async () => !Sandbox.createSnapshot, fork: async () => !Sandbox.fork, updateNetwork: async () => !Sandbox.updateNetwork,
  lifecycle: async () => !Sandbox.createSnapshot, network: async () => !Sandbox.pause, newest: async () => !Sandbox.fork || pkg !== 'e2b'
}
for (const c of cases) {
  if (only && !c.group.startsWith(only) && !c.name.includes(only)) continue
  const out = { group: c.group, name: c.name }
  const begun = Date.now()
  try {
    let skip = false
    for (const n of c.need ?? []) skip ||= await lacks[n]()
    if (skip) out.skipped = true
    else {
      let timer
      await Promise.race([c.f(), new Promise((_, bad) => { timer = setTimeout(() => bad(new Error('it hangs')), 90_000) })])
      clearTimeout(timer)
      out.passed = true
    }
  } catch (e) { out.failed = String(e?.stack ?? e).slice(0, 1500) }
  out.ms = Date.now() - begun
  console.log(JSON.stringify(out))
}
await shared?.kill()
process.exit(0)
