package secretfs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/guest/agentpb"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// devicePorts leads to a device in this process.
type devicePorts struct {
	d *secrets.Device

	mu   sync.Mutex
	last []byte // the buffer of the last value
	tear bool   // the next value loses its first byte
	left bool   // some value was not wiped
}

func (p *devicePorts) Write(reg uint16, v uint32) {
	p.d.WriteIO(uint64(reg), binary.LittleEndian.AppendUint32(nil, v))
}

func (p *devicePorts) Read(reg uint16) uint32 {
	var b [4]byte
	p.d.ReadIO(uint64(reg), b[:])
	return binary.LittleEndian.Uint32(b[:])
}

func (p *devicePorts) Fill(b []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.tear && p.d.Busy() {
		p.d.ReadIO(secrets.Data, make([]byte, 1))
		p.tear = false
	}
	for i := range b {
		p.d.ReadIO(secrets.Data, b[i:i+1])
	}
	p.last = b
}

func (p *devicePorts) Wiped() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left = p.left || len(bytes.Trim(p.last, "\x00")) > 0
	p.d.WriteIO(secrets.Wiped, []byte{1})
}

// mounted is a served file system.
type mounted struct {
	t     *testing.T
	dir   string
	ports *devicePorts
	poke  *os.File
}

func serveSecrets(t *testing.T, patience int) *mounted {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skipf("this kernel has no FUSE: %v", err)
	}
	m := &mounted{t: t, dir: filepath.Join(t.TempDir(), "secrets"), ports: &devicePorts{d: secrets.New()}}
	control, poke, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	m.poke = poke
	ready, done := make(chan struct{}), make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		done <- serve(m.dir, m.ports, control, patience, func() { close(ready) })
	}()
	t.Cleanup(func() {
		poke.Close()
		if err := <-done; err != nil {
			t.Errorf("serving: %v", err)
		}
		control.Close()
		m.ports.d.Close()
		if m.ports.left {
			t.Error("a value was left in the server's buffer")
		}
	})
	select {
	case <-ready:
	case err := <-done:
		done <- nil
		t.Fatal(err)
	}
	return m
}

func (m *mounted) set(s secrets.Secret, value string) {
	m.t.Helper()
	if err := m.ports.d.Set(s, []byte(value)); err != nil {
		m.t.Fatal(err)
	}
	if _, err := m.poke.Write([]byte{'\n'}); err != nil {
		m.t.Fatal(err)
	}
}

func (m *mounted) path(name string) string { return filepath.Join(m.dir, name) }

func TestServe_files_have_the_values_and_attributes_of_secrets(t *testing.T) {
	m := serveSecrets(t, waitTicks)
	large := strings.Repeat("0123456789abcdef", agentpb.MaxSecret/16)
	m.set(secrets.Secret{Name: "token", Mode: 0o440, UID: 7, GID: 8}, "swordfish")
	m.set(secrets.Secret{Name: "large", Mode: 0o444}, large)
	m.set(secrets.Secret{Name: "empty", Mode: 0o444}, "")
	for name, want := range map[string]string{"token": "swordfish", "large": large, "empty": ""} {
		for range 2 {
			got, err := os.ReadFile(m.path(name))
			if err != nil || string(got) != want {
				t.Errorf("%s: %d bytes, %v; want %d", name, len(got), err, len(want))
			}
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(m.path("token"), &st); err != nil {
		t.Fatal(err)
	}
	if st.Mode != unix.S_IFREG|0o440 || st.Uid != 7 || st.Gid != 8 || st.Size != 9 {
		t.Errorf("its attributes are mode %#o, owner %d:%d, size %d", st.Mode, st.Uid, st.Gid, st.Size)
	}
	list, err := os.ReadDir(m.dir)
	if err != nil || len(list) != 3 || list[0].Name() != "empty" || list[1].Name() != "large" || list[2].Name() != "token" {
		t.Errorf("the directory has %v, %v", list, err)
	}
	f, err := os.Open(m.path("large"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	part := make([]byte, 10)
	if n, err := f.ReadAt(part, 5); n != 10 || string(part) != large[5:15] {
		t.Errorf("from the middle: %q, %v", part[:n], err)
	}
	if _, err := os.ReadFile(m.path("none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("one that is not there: %v", err)
	}
	if err := os.WriteFile(m.path("new"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing: %v, want EROFS", err)
	}
	m.ports.d.Remove("large")
	if n, err := f.ReadAt(part, 5); !errors.Is(err, unix.ENOENT) {
		t.Errorf("an open file whose secret is gone: %d bytes, %v, want ENOENT", n, err)
	}
	m.set(secrets.Secret{Name: "token", Mode: 0o444}, "another one")
	if got, err := os.ReadFile(m.path("token")); string(got) != "another one" {
		t.Errorf("replaced: %q, %v", got, err)
	}
}

// What the kernel reads into its page cache would stay there.
func TestServe_a_mapped_file_gives_nothing(t *testing.T) {
	m := serveSecrets(t, waitTicks)
	m.set(secrets.Secret{Name: "token", Mode: 0o444}, "swordfish")
	f, err := os.Open(m.path("token"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := unix.Mmap(int(f.Fd()), 0, 9, unix.PROT_READ, unix.MAP_SHARED); err == nil {
		t.Error("it can be mapped and shared")
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, 9, unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return // a refused mmap is even better
	}
	defer unix.Munmap(mem)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	// The kernel reads the mapping, so that a fault is an error.
	if n, err := unix.Write(int(w.Fd()), mem); !errors.Is(err, unix.EFAULT) {
		t.Errorf("%d bytes of a mapped file, %v; want EFAULT", n, err)
	}
}

func TestServe_an_awaited_secret_is_waited_for(t *testing.T) {
	m := serveSecrets(t, waitTicks)
	for _, name := range []string{"a", "b"} {
		if err := m.ports.d.Await(secrets.Secret{Name: name, Mode: 0o444}); err != nil {
			t.Fatal(err)
		}
	}
	got := make(chan string, 2)
	read := func(name string) {
		b, err := os.ReadFile(m.path(name))
		if err != nil {
			got <- err.Error()
			return
		}
		got <- name + "=" + string(b)
	}
	go read("a")
	// The server serves other requests meanwhile.
	m.set(secrets.Secret{Name: "c", Mode: 0o444}, "there")
	if b, err := os.ReadFile(m.path("c")); string(b) != "there" {
		t.Errorf("got %q, %v", b, err)
	}
	m.set(secrets.Secret{Name: "a", Mode: 0o444}, "1")
	if s := <-got; s != "a=1" {
		t.Errorf("got %q", s)
	}
	// A program that waits can be killed.
	cmd := exec.Command("cat", m.path("b"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("it has read something")
	}
}

func TestServe_an_awaited_secret_that_does_not_come_is_an_error(t *testing.T) {
	m := serveSecrets(t, 1)
	if err := m.ports.d.Await(secrets.Secret{Name: "a", Mode: 0o444}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.ReadFile(m.path("a")); !errors.Is(err, unix.ETIMEDOUT) {
		t.Errorf("got %v, want ETIMEDOUT", err)
	}
}

func TestServe_takes_the_place_of_a_server_that_was_killed(t *testing.T) {
	m := serveSecrets(t, waitTicks)
	dir := filepath.Join(t.TempDir(), "secrets")
	fd, err := mount(dir)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	control, poke, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer control.Close()
	m.set(secrets.Secret{Name: "token", Mode: 0o444}, "swordfish")
	err = serve(dir, m.ports, control, waitTicks, func() {
		go func() {
			if b, err := os.ReadFile(filepath.Join(dir, "token")); err != nil || string(b) != "swordfish" {
				t.Errorf("got %q, %v", b, err)
			}
			poke.Close()
		}()
	})
	if err != nil {
		t.Error(err)
	}
}

func TestStore_a_torn_read_is_repeated(t *testing.T) {
	p := &devicePorts{d: secrets.New()}
	defer p.d.Close()
	if err := p.d.Set(secrets.Secret{Name: "a"}, []byte("swordfish")); err != nil {
		t.Fatal(err)
	}
	s := store{p}
	table, err := s.table()
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 9)
	if _, err := s.read(table[0], 0, buf); err != nil { // from here on the device is busy
		t.Fatal(err)
	}
	clear(buf)
	p.tear = true
	if n, err := s.read(table[0], 2, buf); err != nil || string(buf[:n]) != "ordfish" || p.tear {
		t.Errorf("got %q, %v", buf[:n], err)
	}
	p.d.Remove("a")
	if _, err := s.read(table[0], 0, buf); !errors.Is(err, errGone) {
		t.Errorf("one that is gone: %v", err)
	}
}

// nothing is a machine without the device.
type nothing struct{ Ports }

func (nothing) Write(uint16, uint32) {}
func (nothing) Read(uint16) uint32   { return ^uint32(0) }

func TestServe_a_machine_without_the_device_is_an_error(t *testing.T) {
	if err := Serve(t.TempDir(), nothing{}, os.Stdin, func() {}); !errors.Is(err, errNoDevice) {
		t.Errorf("got %v, want errNoDevice", err)
	}
}

func TestConstants_are_those_of_the_device(t *testing.T) {
	for _, c := range [][2]int{
		{secrets.Port, agentpb.SecretsPort}, {secrets.Ports, agentpb.SecretsPorts}, {secrets.Select, agentpb.SecretsSelect},
		{secrets.Seek, agentpb.SecretsSeek}, {secrets.Data, agentpb.SecretsData}, {secrets.Wiped, agentpb.SecretsWiped},
		{secrets.MaxSecrets, agentpb.MaxSecrets}, {secrets.MaxName, agentpb.MaxSecretName}, {secrets.MaxValue, agentpb.MaxSecret},
	} {
		if c[0] != c[1] {
			t.Errorf("the device has %#x, the agent %#x", c[0], c[1])
		}
	}
}

func FuzzDecodeSecrets(f *testing.F) {
	f.Add([]byte{1, 1, 2, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 7, 0, 0, 0, 8, 0, 0, 0, 0, 1, 1, 'a'})
	f.Add([]byte{1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		table, err := agentpb.DecodeSecrets(b)
		if err == nil && len(table) != int(b[1]) {
			t.Errorf("%d entries of %d", len(table), b[1])
		}
	})
}

// The kernel is not hostile, but a program in the guest decides what the kernel sends.
func FuzzHandle(f *testing.F) {
	f.Add([]byte{48, 0, 0, 0, opLookup, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 't', 0, 0, 0, 0, 0, 0, 0})
	null, err := os.OpenFile("/dev/null", os.O_WRONLY, 0)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { null.Close() })
	f.Fuzz(func(t *testing.T, b []byte) {
		p := &devicePorts{d: secrets.New()}
		defer p.d.Close()
		if err := errors.Join(p.d.Set(secrets.Secret{Name: "t"}, []byte("v")), p.d.Await(secrets.Secret{Name: "u"})); err != nil {
			t.Fatal(err)
		}
		s := &server{fuse: int(null.Fd()), store: store{p}, buf: make([]byte, outHeader+agentpb.MaxSecret), ids: map[string]uint64{}, nodes: map[uint64]*node{}, lastID: rootNode, patience: 1}
		for len(b) >= inHeader {
			n := min(max(int(b[0]), inHeader), len(b))
			msg := append([]byte{byte(n), 0, 0, 0}, b[4:n]...)
			b = b[n:]
			if r, ok := parse(msg); ok {
				s.handle(r)
			}
		}
		s.retry(true)
		if len(bytes.Trim(s.buf, "\x00")) > 0 || p.d.Busy() || len(s.waiting) > 0 {
			t.Error("something is left")
		}
	})
}
