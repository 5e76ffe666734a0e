//go:build workloads

package jailproofs

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// patience bounds one operation: a machine that has stopped must end the test.
const patience = 10 * time.Minute

// witness says in a guest what time it is, what random numbers it has, and which timers have fired: a line of JSON for
// each request at a vsock port.
//
// It has two generators in user space with state in memory. One follows the VM generation ID as a program can on
// Linux before 6.11, whose vDSO has no getrandom: by the kernel's message about it, which it looks for before each
// answer. The other one does not: all clones must have the same of it, since their memory is that of one snapshot.
const witness = `
import ctypes, hashlib, json, os, select, socket, ssl, struct, time
libc = ctypes.CDLL(None, use_errno=True)

class Generator:
    def __init__(self):
        self.key = os.getrandom(32)
    def reseed(self):
        self.key = hashlib.sha256(self.key + os.getrandom(32)).digest()
    def read(self):
        out = hashlib.sha256(self.key + b'out').hexdigest()
        self.key = hashlib.sha256(self.key + b'next').digest()
        return out

follows, alone, heard = Generator(), Generator(), 0
kmsg = os.open('/dev/kmsg', os.O_RDONLY | os.O_NONBLOCK)
os.lseek(kmsg, 0, os.SEEK_END)
def listen():
    global heard
    while True:
        try:
            line = os.read(kmsg, 8192)
        except BlockingIOError:
            return
        except BrokenPipeError: # messages were lost, perhaps the one that counts
            line = b'crng reseeded due to virtual machine fork'
        if b'crng reseeded due to virtual machine fork' in line:
            follows.reseed()
            heard += 1

def text(path):
    try:
        return open(path).read().strip()
    except FileNotFoundError:
        return ''
def identity(_):
    listen()
    followed = follows.read()
    return {'followed': followed, 'alone': alone.read(), 'heard': heard, 'getrandom': os.getrandom(32).hex(),
        'uuid': text('/proc/sys/kernel/random/uuid'), 'boot_id': text('/proc/sys/kernel/random/boot_id'),
        'machine_id': text('/etc/machine-id'), 'hostname': socket.gethostname(), 'mac': text('/sys/class/net/eth0/address'),
        'host_keys': [n for n in os.listdir('/etc/ssh') if n.startswith('ssh_host_')] if os.path.isdir('/etc/ssh') else [],
        'wall': time.time_ns()}

# CLOCK_REALTIME is 0.
clocks = {'monotonic': time.CLOCK_MONOTONIC, 'boottime': time.CLOCK_BOOTTIME}
last, back = {}, 0
def look():
    global last, back
    now = {name: time.clock_gettime_ns(clock) for name, clock in clocks.items()}
    back += sum(now[name] < last[name] for name in last)
    last = now
    return now
def clock(_):
    return {**look(), 'back': back, 'wall': time.time_ns()}

# timerfd_create(2), timerfd_settime(2): TFD_NONBLOCK, TFD_TIMER_ABSTIME, TFD_TIMER_CANCEL_ON_SET
timers, states = {}, {}
def timer(name, clock, ns, flags):
    fd = libc.timerfd_create(clock, os.O_NONBLOCK)
    value = struct.pack('4q', 0, 0, ns // 10**9, ns % 10**9)
    if fd < 0 or libc.timerfd_settime(fd, flags, value, None):
        raise OSError(ctypes.get_errno(), name)
    timers[name], states[name] = fd, 'armed'
def arm(arg):
    for fd in timers.values():
        os.close(fd)
    later = time.time_ns() + int(arg) * 10**9
    timer('wall', time.CLOCK_REALTIME, later, 1)
    timer('canceled', time.CLOCK_REALTIME, later, 1 | 2)
    timer('monotonic', time.CLOCK_MONOTONIC, 10**9, 0)
    timer('boottime', time.CLOCK_BOOTTIME, 10**9, 0)
    return states
def fired(_):
    for name, fd in timers.items():
        try:
            os.read(fd, 8)
            if states[name] != 'canceled': # one that is canceled may expire as well
                states[name] = 'fired'
        except BlockingIOError:
            pass
        except OSError as e: # ECANCELED
            states[name] = 'canceled'
    return states

def tls(arg):
    host, port = os.environ['https_proxy'].removeprefix('http://').split(':')
    with socket.create_connection((host, int(port)), timeout=300) as s:
        s.sendall(('CONNECT %s:443 HTTP/1.1\r\nHost: %s:443\r\n\r\n' % (arg, arg)).encode())
        got = b''
        while b'\r\n\r\n' not in got:
            p = s.recv(1)
            if not p:
                raise OSError('the proxy said %r' % got)
            got += p
        # By SSL_CERT_FILE, and by this guest's clock.
        with ssl.create_default_context().wrap_socket(s, server_hostname=arg) as c:
            cert = c.getpeercert()
    return {'serial': cert['serialNumber'], 'not_before': int(ssl.cert_time_to_seconds(cert['notBefore'])), 'not_after': int(ssl.cert_time_to_seconds(cert['notAfter']))}

server = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
server.bind((socket.VMADDR_CID_ANY, 5000))
server.listen(64)
open('/run/witness', 'w').close()
while True:
    c, _ = server.accept()
    look()
    try:
        word, _, arg = c.makefile().readline().strip().partition(' ')
        try:
            out = {'identity': identity, 'clock': clock, 'arm': arm, 'fired': fired, 'tls': tls}[word](arg)
        except Exception as e:
            out = {'error': repr(e)}
        c.sendall((json.dumps(out) + '\n').encode())
    except OSError:
        pass
    c.close()
`

// witnessPort is where the witness listens.
const witnessPort = 5000

// onlyEmulated skips a test on a machine that is not one of package hwkvm's.
func onlyEmulated(t *testing.T) {
	t.Helper()
	if line, err := os.ReadFile("/proc/cmdline"); err != nil || !strings.Contains(string(line), "hwkvm.") {
		t.Skip("it looks at the whole host and sets its clock: only on a machine of its own, by `make jail-proofs`")
	}
	guesttest.New(t) // skips it without images
}

// proxied is a host whose connections the proxy ends.
const proxied = "api.example"

// policy has a name that needs the network process, and a proxy.
const policy = `
rules:
  - {name: api, direction: egress, verdict: allow, names: [` + proxied + `], protocols: [tcp], ports: [443]}
  - {name: host, direction: egress, verdict: allow, groups: [host], protocols: [any]}
dns: {upstreams: ["192.0.2.53:53"]}
proxy: {enabled: true, inject: [{secret: API_KEY, hosts: [` + proxied + `], header: Authorization, prefix: "Bearer "}]}
`

func mustPolicy(t *testing.T) *netpolicy.Policy {
	t.Helper()
	p, err := netpolicy.Parse([]byte(policy))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// startWitness boots a VM with a witness.
func startWitness(t *testing.T, e *guesttest.Env, name string) {
	t.Helper()
	e.Run(sandbox.Spec{Name: name, MemoryMiB: 128, DiskMiB: 256, Network: spec.NetworkTAP, Policy: mustPolicy(t)})
	c := e.Agent(name)
	if err := c.WriteFile(t.Context(), "/root/witness.py", strings.NewReader(witness), guest.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	cmd, err := e.Store.Sandbox(name).Command(guest.Cmd{Argv: []string{"python3", "-S", "/root/witness.py"}, Detach: true, ID: "witness"})
	if err != nil {
		t.Fatal(err)
	}
	p, err := c.Start(t.Context(), cmd)
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
	for end := time.Now().Add(patience); !e.Exists(name, "/run/witness"); time.Sleep(200 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the witness does not listen; it says %q", e.Sh(name, "timeout 60 python3 -S /root/witness.py 2>&1 | tail -5"))
		}
	}
}

// ask sends the witness of a VM a request, and decodes its answer.
func ask(ctx context.Context, e *guesttest.Env, name, request string, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c, err := guest.UnixDialer(e.Store.State.VsockPath(name))(ctx, witnessPort)
	if err != nil {
		return fmt.Errorf("the witness of %s: %w", name, err)
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	if _, err := fmt.Fprintln(c, request); err != nil {
		return fmt.Errorf("asking the witness of %s: %w", name, err)
	}
	line, err := bufio.NewReader(c).ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("the answer of the witness of %s to %s: %w", name, request, errors.Join(err, ctx.Err()))
	}
	var failed struct{ Error string }
	if err := json.Unmarshal(line, &failed); err == nil && failed.Error != "" {
		return fmt.Errorf("the witness of %s says to %s: %s", name, request, failed.Error)
	}
	return json.Unmarshal(line, answer)
}

// confined fails the test unless a VM's guest is in a confined process.
func confined(e *guesttest.Env, name string) error {
	r, err := e.Store.State.Get(name)
	if err == nil && !r.Confined {
		err = fmt.Errorf("%s is not confined", name)
	}
	return err
}

// moveClock sets this machine's clock to another time, by so much.
func moveClock(t *testing.T, by time.Duration) {
	t.Helper()
	ts := unix.NsecToTimespec(time.Now().Add(by).UnixNano())
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		t.Fatal(err)
	}
}
