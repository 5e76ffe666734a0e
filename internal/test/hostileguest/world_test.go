package hostileguest

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	stdnet "net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/devices/balloon"
	"github.com/drowse-vm/drowse/devices/blk"
	"github.com/drowse-vm/drowse/devices/fs"
	"github.com/drowse-vm/drowse/devices/net"
	"github.com/drowse-vm/drowse/devices/net/tap"
	"github.com/drowse-vm/drowse/devices/rng"
	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/devices/vsock"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/vmm"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// What the guest may fill, in bytes.
const (
	diskSize  = 64 << 20
	imageSize = 16 << 20
	shareSize = 64 << 20
)

// The devices, in the order in which the guest finds them.
const (
	nameImage   = "image"
	nameDisk    = "disk"
	nameVsock   = "vsock"
	nameRNG     = "rng"
	nameBalloon = "balloon"
	nameNet     = "net"
	nameShare   = "share"
	nameMirror  = "mirror" // a share that the guest may only read
)

var deviceNames = []string{nameImage, nameDisk, nameVsock, nameRNG, nameBalloon, nameNet, nameShare, nameMirror}

// world is everything behind the devices. It outlives the machines.
type world struct {
	dir    string
	image  *blk.Image
	disk   *disk.Disk
	tap    *tap.Device
	wire   *stdnet.UDPConn // to the guest's address
	share  *fs.Dir
	mirror *fs.Dir
	shared int // a descriptor of the shared directory
	hosts  []stdnet.Listener

	log    counter // what the machines log
	serial counter // what the guest writes to its consoles

	figures map[string]*figures
	entropy counter

	mu     sync.Mutex
	errors map[string]int // failures of the host, and how often each came

	closers []func() error
	done    chan struct{}
	wg      sync.WaitGroup
	serving atomic.Int64 // goroutines of the host's ends of connections; they do not belong to the VMM
}

// serve runs f, which must end when the world does.
func (w *world) serve(f func()) {
	w.serving.Add(1)
	w.wg.Go(func() {
		defer w.serving.Add(-1)
		f()
	})
}

// counter counts bytes.
type counter struct{ n atomic.Uint64 }

func (c *counter) Write(p []byte) (int, error) {
	c.n.Add(uint64(len(p)))
	return len(p), nil
}

// source gives predictable bytes, and counts them.
type source struct{ c *counter }

func (s source) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(i)
	}
	return s.c.Write(p)
}

func (w *world) hostError(device string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.errors[device+": "+err.Error()]++
}

// fullOrOdd reports whether a guest may well cause this failure of the share's file system: the file system is
// small, and the guest's requests are odd.
func fullOrOdd(err error) bool {
	var errno syscall.Errno
	return errors.As(err, &errno) && (errno == unix.ENOSPC || errno == unix.EFBIG || errno == unix.EOVERFLOW)
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{dir: t.TempDir(), figures: map[string]*figures{}, errors: map[string]int{}, done: make(chan struct{})}
	t.Cleanup(func() {
		close(w.done)
		for i := len(w.closers) - 1; i >= 0; i-- {
			if err := w.closers[i](); err != nil {
				t.Error(err)
			}
		}
		w.wg.Wait()
	})
	for _, name := range deviceNames {
		w.figures[name] = &figures{}
	}
	image := filepath.Join(w.dir, "image")
	if err := os.WriteFile(image, make([]byte, imageSize), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(image)
	if err != nil {
		t.Fatal(err)
	}
	if w.image, err = blk.NewImage(f); err != nil {
		t.Fatal(err)
	}
	w.closers = append(w.closers, w.image.Close)
	stack, err := disk.Create(filepath.Join(w.dir, "layer"), diskSize)
	if err != nil {
		t.Fatal(err)
	}
	if w.disk, err = disk.Open(stack, disk.Options{}); err != nil {
		t.Fatal(err)
	}
	w.closers = append(w.closers, w.disk.Close)
	w.openNamespace(t)
	for port, serve := range map[int]func(stdnet.Conn){
		1: func(c stdnet.Conn) { _, _ = io.Copy(c, c) },
		2: func(c stdnet.Conn) { _, _ = io.Copy(io.Discard, c) },
		3: func(stdnet.Conn) { // never reads
			select {
			case <-w.done:
			case <-time.After(5 * time.Second):
			}
		},
	} {
		w.listen(t, port, serve)
	}
	return w
}

// openNamespace makes what would otherwise change the host: a network device and a bounded file system, in
// namespaces of a thread that ends with the test.
func (w *world) openNamespace(t *testing.T) {
	t.Helper()
	made := make(chan error)
	w.wg.Go(func() {
		runtime.LockOSThread() // never unlocked: the thread, and its namespaces, end with this goroutine
		err := w.makeInNamespace()
		made <- err
		if err == nil {
			<-w.done
		}
	})
	if err := <-made; err != nil {
		t.Fatal(err)
	}
}

func (w *world) makeInNamespace() error {
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("making namespaces: %w: run this as root", err)
	}
	dir := filepath.Join(w.dir, "share")
	if err := errors.Join(
		os.Mkdir(dir, 0o700),
		unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""),
		unix.Mount("hostile", dir, "tmpfs", 0, "size="+strconv.Itoa(shareSize)+",nr_inodes=10000"),
	); err != nil {
		return fmt.Errorf("making the shared directory: %w", err)
	}
	var err error
	for _, to := range []**fs.Dir{&w.share, &w.mirror} {
		f, err := os.OpenFile(dir, fs.OpenFlags, 0)
		if err != nil {
			return err
		}
		if *to, err = fs.NewDir(f, to == &w.share); err != nil {
			return err
		}
		w.closers = append(w.closers, (*to).Close)
	}
	if w.shared, err = unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return err
	}
	w.closers = append(w.closers, func() error { return unix.Close(w.shared) })

	if w.tap, err = tap.Create("hostile0"); err != nil {
		return err
	}
	w.closers = append(w.closers, w.tap.Close)
	link, err := netlink.LinkByName(w.tap.Name())
	if err != nil {
		return err
	}
	address := &netlink.Addr{IPNet: &stdnet.IPNet{IP: stdnet.IPv4(10, 9, 0, 1), Mask: stdnet.CIDRMask(24, 32)}}
	if err := errors.Join(netlink.LinkSetHardwareAddr(link, stdnet.HardwareAddr{2, 0, 0, 0, 0, 1}), netlink.AddrAdd(link, address), w.tap.Up()); err != nil {
		return fmt.Errorf("setting up the network device: %w", err)
	}
	if err := netlink.NeighAdd(&netlink.Neigh{
		LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT,
		IP: stdnet.IPv4(10, 9, 0, 2), HardwareAddr: stdnet.HardwareAddr{2, 0, 0, 0, 0, 2},
	}); err != nil {
		return fmt.Errorf("naming the guest's address: %w", err)
	}
	if w.wire, err = stdnet.DialUDP("udp4", nil, &stdnet.UDPAddr{IP: stdnet.IPv4(10, 9, 0, 2), Port: 7}); err != nil {
		return err
	}
	w.closers = append(w.closers, w.wire.Close)
	return nil
}

// socket returns the path that leads to the guest's vsock ports.
func (w *world) socket() string { return filepath.Join(w.dir, "v.sock") }

// listen serves the guest's connections to a port of the host.
func (w *world) listen(t *testing.T, port int, serve func(stdnet.Conn)) {
	t.Helper()
	l, err := stdnet.Listen("unix", fmt.Sprintf("%s_%d", w.socket(), port))
	if err != nil {
		t.Fatal(err)
	}
	w.closers = append(w.closers, l.Close)
	w.serve(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			stop := make(chan struct{})
			w.serve(func() {
				select {
				case <-w.done:
				case <-stop:
				}
				_ = c.Close()
			})
			w.serve(func() {
				defer close(stop)
				serve(c)
			})
		}
	})
}

// emptyShare removes the guest's files from the share while the guest uses it.
func (w *world) emptyShare() {
	root := fmt.Sprintf("/proc/self/fd/%d", w.shared)
	names, err := os.ReadDir(root)
	if err != nil {
		return
	}
	for _, e := range names {
		_ = os.RemoveAll(filepath.Join(root, e.Name())) // the guest may add files meanwhile
	}
}

// machine is one life of the guest, or the part of it between two restores.
type machine struct {
	*vmm.Machine
	vsock *vsock.Device
	net   *net.Device
	blk   *blk.Device
	fs    *fs.Device
}

// newMachine makes a machine around mem, which the caller keeps.
func (w *world) newMachine(mem *guestmem.Memory) (m *machine, err error) {
	m = &machine{}
	shell, err := vmm.NewPrebuilt(vmm.PrebuiltConfig{VCPUs: 2, Memory: mem})
	if err != nil {
		return nil, err
	}
	onError := func(name string) func(error) {
		return func(err error) {
			if !fullOrOdd(err) {
				w.hostError(name, err)
			}
		}
	}
	m.blk = blk.New(w.disk, blk.Options{Serial: nameDisk, OnError: onError(nameDisk)})
	m.fs = fs.New(w.share, nameShare, fs.Options{OnError: onError(nameShare)})
	if m.vsock, err = vsock.New(mem, vsock.Config{CID: 3, Path: w.socket()}); err != nil {
		return nil, errors.Join(err, shell.Close())
	}
	if m.net, err = net.New(mem, w.tap, net.Config{MAC: net.MAC{2, 0, 0, 0, 0, 2}}); err != nil {
		return nil, errors.Join(err, m.vsock.Close(), shell.Close())
	}
	made := map[string]devices.Device{
		nameImage:   blk.New(w.image, blk.Options{Serial: nameImage, OnError: onError(nameImage)}),
		nameDisk:    m.blk,
		nameVsock:   m.vsock,
		nameRNG:     rng.New(rng.Options{Source: source{&w.entropy}}),
		nameBalloon: balloon.New(mem, balloon.Options{OnError: onError(nameBalloon)}),
		nameNet:     m.net,
		nameShare:   m.fs,
		nameMirror:  fs.New(w.mirror, nameMirror, fs.Options{OnError: onError(nameMirror)}),
	}
	var devs []vmm.Device
	for _, name := range deviceNames {
		devs = append(devs, vmm.Device{Name: name, Device: &watched{Device: made[name], name: name, figures: w.figures[name], hostError: w.hostError}})
	}
	if m.Machine, err = vmm.New(shell, vmm.Config{Devices: devs, Console: &w.serial, Log: slog.New(slog.NewTextHandler(&w.log, nil))}); err != nil {
		return nil, errors.Join(err, m.vsock.Close())
	}
	for i := range 3 {
		if err := m.Secrets().Set(secrets.Secret{Name: fmt.Sprint("secret", i), Mode: 0o400}, make([]byte, 100<<i)); err != nil {
			return nil, errors.Join(err, m.close())
		}
	}
	return m, nil
}

func (m *machine) close() error {
	return errors.Join(m.Close(), m.vsock.Close())
}

// use does what a host does with a VM from outside, while the guest attacks.
func (m *machine) use(w *world, r *rand.Rand) {
	switch r.IntN(5) {
	case 0:
		m.net.SetLink(r.IntN(4) > 0)
	case 1:
		for range 16 {
			_, _ = w.wire.Write(make([]byte, 1+r.IntN(1400))) // the guest does not answer
		}
	case 2:
		w.dial(r)
	case 3:
		name := fmt.Sprint("secret", r.IntN(4))
		if r.IntN(2) == 0 {
			m.Secrets().Remove(name)
		} else if err := m.Secrets().Set(secrets.Secret{Name: name, Mode: 0o400}, make([]byte, r.IntN(2000))); err != nil {
			w.hostError("secrets", err)
		}
	case 4:
		w.emptyShare()
	}
}

// dial connects to a port of the guest and holds the connection for a moment.
func (w *world) dial(r *rand.Rand) {
	c, err := stdnet.Dial("unix", w.socket())
	if err != nil {
		return // the socket is absent while a machine is made
	}
	port, size := 1000+r.IntN(64), r.IntN(100_000)
	w.serve(func() {
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(2 * time.Second))
		_, _ = fmt.Fprintf(c, "CONNECT %d\n", port)
		_, _ = c.Write(make([]byte, size))
		_, _ = io.Copy(io.Discard, c)
	})
}
