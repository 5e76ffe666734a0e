package jail

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/jail/confine"
	"github.com/drowse-vm/drowse/sandbox/jail/rpc"
	"github.com/drowse-vm/drowse/snapshot"
)

// errRefused is the answer to what a VM's process has no right to.
var errRefused = fmt.Errorf("a confined process may not: %w", unix.EACCES)

// grants are the names that a confined process may use. It may read what its VM is made of, and, during a capture,
// make one layer and one snapshot, whose names the keeper has chosen. All else is refused. A name that the process
// gives is only compared, never interpreted.
type grants struct {
	// from is the directory of the snapshot that the VM comes from; empty after a boot.
	from string

	mu    sync.Mutex // guards what follows
	reads map[string]bool
	// links are directories of snapshots that this VM has made, the last maxLinks. The next snapshot may link to
	// their memory files, and to those in from.
	links []string
	// left is the layer that a failed capture has left unused. The process removes it before it makes another.
	left string
}

func newGrants(p instance.Parts, dir string) *grants {
	g := &grants{reads: map[string]bool{}}
	if dir != "" {
		g.from = filepath.Clean(dir)
	}
	for _, name := range append([]string{p.Image, p.SystemDisk, p.Kernel, p.Initramfs}, p.Disk.Layers...) {
		if name != "" {
			g.reads[filepath.Clean(name)] = true
		}
	}
	return g
}

// read lets the process read a file.
func (g *grants) read(name string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reads[filepath.Clean(name)] = true
}

// forget takes back what read has given. So the names are not more than the disk has layers.
func (g *grants) forget(names []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, name := range names {
		delete(g.reads, filepath.Clean(name))
	}
}

// leave lets the process remove a layer that the disk does not use.
func (g *grants) leave(layer string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.left = layer
}

// mayRemove reports whether a name is that of the layer that was left.
func (g *grants) mayRemove(name string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.left != "" && name == g.left
}

// link lets the next snapshots share files with the snapshot in a directory.
func (g *grants) link(dir string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.links) == maxLinks {
		g.links = slices.Delete(g.links, 0, 1)
	}
	g.links = append(g.links, filepath.Clean(dir))
}

// maxLinks bounds the memory for the snapshots of a VM that takes very many.
const maxLinks = 1024

// mayRead reports whether the process may open a file for reading: a part of the VM, or a file of a snapshot of its
// own.
func (g *grants) mayRead(name string) bool {
	g.mu.Lock()
	known := g.reads[name]
	g.mu.Unlock()
	return known || snapshot.IsFile(filepath.Base(name)) && g.mayLink(filepath.Dir(name))
}

// mayLink reports whether dir is that of a snapshot of the process's own.
func (g *grants) mayLink(dir string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.from != "" && dir == g.from || slices.Contains(g.links, dir)
}

// capture is a capture under way.
type capture struct {
	o        instance.CaptureOptions
	before   disk.Stack
	diskOnly bool
	names    []string // of the disk's layers, in the manifest
	result   *instance.Capture

	mu       sync.Mutex // guards what follows
	temp     string     // the directory in which the snapshot is being made
	lock     io.Closer
	draft    *os.File           // what the process writes as manifest
	manifest *snapshot.Manifest // of the snapshot that has its name
	switched bool               // the disk uses the new layer, whether or not the record says so
	sealed   bool               // the record says so
	over     bool
	linked   int  // files of earlier snapshots in temp
	judged   bool // the one attempt to commit has been made
	// What the process may ask for once.
	stilled, forked, resumed, prioritized bool

	running sync.WaitGroup // of what was asked for once; begins before over
}

// once does what the process may ask for once in a capture. The capture does not end before it is done.
func (c *capture) once(asked *bool, do func() error) error {
	c.mu.Lock()
	if c.over || *asked {
		c.mu.Unlock()
		return errRefused
	}
	*asked = true
	c.running.Add(1)
	c.mu.Unlock()
	defer c.running.Done()
	return do()
}

// layerTemp is the name that package disk gives a layer until it is complete.
func layerTemp(top string) string {
	return filepath.Join(filepath.Dir(top), "."+filepath.Base(top)+".tmp")
}

func newCapture(v *VM, o instance.CaptureOptions) *capture {
	before := v.Stack()
	return &capture{o: o, before: before, names: o.Names(before),
		result: &instance.Capture{ID: o.ID, Dir: o.Dir, Disk: before}}
}

func (v *VM) beginCapture(c *capture) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.capture != nil {
		return errors.New("capturing a VM: another capture is under way")
	}
	v.capture = c
	return nil
}

// endCapture takes the rights of a capture away, and removes what it has not finished.
func (v *VM) endCapture(c *capture) {
	c.mu.Lock()
	c.over = true
	c.mu.Unlock()
	c.running.Wait()
	v.mu.Lock()
	v.capture = nil
	calm := v.calm
	v.calm = nil
	v.mu.Unlock()
	if calm != nil {
		calm()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.switched {
		v.grants.leave(filepath.Clean(c.o.NewTop))
	}
	if err := os.Remove(layerTemp(filepath.Clean(c.o.NewTop))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		v.log.Warn("removing an unfinished layer", "error", err)
	}
	if c.temp != "" {
		if err := os.RemoveAll(c.temp); err != nil {
			v.log.Warn("removing an unfinished snapshot", "error", err)
		}
	}
	if c.lock != nil {
		_ = c.lock.Close()
	}
	if c.draft != nil {
		_ = c.draft.Close()
	}
}

// serveCapture answers what a confined process asks during a capture.
func (v *VM) serveCapture(c *capture, method string, body []byte, files []*os.File) (any, []*os.File, error) {
	switch method {
	case callStill:
		if c.o.Still == nil {
			return nil, nil, errRefused
		}
		return nil, nil, c.once(&c.stilled, c.o.Still)
	case callSealed:
		return nil, nil, v.sealed(c)
	case callPrioritize:
		if c.o.Prioritize == nil {
			return nil, nil, errRefused
		}
		return nil, nil, c.once(&c.prioritized, func() error {
			calm := c.o.Prioritize()
			v.mu.Lock()
			defer v.mu.Unlock()
			v.calm = calm
			return nil
		})
	case callResumed:
		if c.o.Resumed == nil {
			return nil, nil, errRefused
		}
		return nil, nil, c.once(&c.resumed, func() error { c.o.Resumed(); return nil })
	case callForked:
		var f instance.CaptureCosts
		if err := json.Unmarshal(body, &f); err != nil {
			return nil, nil, err
		}
		return nil, nil, v.forked(c, f, files)
	}
	return nil, nil, errRefused
}

// sealed records the disk's new stack, which the keeper knows by itself.
func (v *VM) sealed(c *capture) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.switched || c.over {
		return errRefused
	}
	if i, err := os.Lstat(c.o.NewTop); err != nil || !i.Mode().IsRegular() {
		return fmt.Errorf("sealing a disk without a new layer: %w", errRefused)
	}
	// The disk keeps the layer if it cannot be recorded: see disk.SealThen.
	st := c.before.With(c.o.NewTop)
	c.switched = true
	v.mu.Lock()
	v.stack = st
	v.mu.Unlock()
	v.grants.read(c.o.NewTop)
	if err := c.o.Sealed(st); err != nil {
		return err
	}
	c.sealed = true
	return nil
}

// forked delivers the image of a fork. Other VMs map it, so it must never change or shrink.
func (v *VM) forked(c *capture, f instance.CaptureCosts, files []*os.File) error {
	if c.o.Fork == nil || len(files) != 1 {
		return errRefused
	}
	const sealed = unix.F_SEAL_SEAL | unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	seals, err := unix.FcntlInt(files[0].Fd(), unix.F_GET_SEALS, 0)
	if err != nil || seals&sealed != sealed {
		return fmt.Errorf("the image of a fork is not sealed: %w", errRefused)
	}
	c.mu.Lock()
	ok := c.sealed && !c.over
	c.mu.Unlock()
	if !ok {
		return errRefused
	}
	result := *c.result
	result.CaptureCosts = boundCosts(f)
	return c.once(&c.forked, func() error { return c.o.Fork(files[0], &result) })
}

// file does what a confined process asks of a file, if it may.
func (v *VM) file(o fileOrder) (fileInfo, *os.File, error) {
	if !plain(o.Name) || o.To != "" && !plain(o.To) {
		return fileInfo{}, nil, errRefused
	}
	if o.Op == fileOpen && o.flags() == os.O_RDONLY && v.grants.mayRead(o.Name) {
		f, err := v.jail.openToRead(o.Name)
		return fileInfo{}, f, err
	}
	if o.Op == fileSyncDir && o.Name == filepath.Dir(v.parts.Disk.Top()) {
		return fileInfo{}, nil, osfile.SyncDir(o.Name)
	}
	if o.Op == fileRemove && v.grants.mayRemove(o.Name) {
		return fileInfo{}, nil, os.Remove(o.Name)
	}
	if o.Op == fileStat {
		if i, err, ok := v.stat(o.Name); ok {
			return i, nil, err
		}
	}
	v.mu.Lock()
	c := v.capture
	v.mu.Unlock()
	if c == nil {
		return fileInfo{}, nil, errRefused
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return fileInfo{}, nil, errRefused
	}
	return c.file(v, o)
}

// plain reports whether a name has one form only.
func plain(name string) bool { return filepath.IsAbs(name) && filepath.Clean(name) == name }

// flags are the flags of an open without those that openAs adds.
func (o fileOrder) flags() int {
	return o.Flags &^ (unix.O_CLOEXEC | unix.O_NOFOLLOW | unix.O_NONBLOCK)
}

// openAs opens a regular file that is no link.
func openAs(name string, flags int) (*os.File, error) {
	f, err := os.OpenFile(name, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	return ifRegular(f, err)
}

// openToRead is openAs for reading.
func (j *Jail) openToRead(name string) (*os.File, error) {
	f, err := j.toRead(name, unix.O_NOFOLLOW|unix.O_NONBLOCK)
	return ifRegular(f, err)
}

// ifRegular returns f if it is a regular file and err is nil.
func ifRegular(f *os.File, err error) (*os.File, error) {
	if err != nil {
		return nil, err
	}
	if err := regular(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func regular(f *os.File) error {
	i, err := f.Stat()
	if err != nil {
		return err
	}
	if !i.Mode().IsRegular() {
		return fmt.Errorf("%s is no regular file: %w", f.Name(), errRefused)
	}
	return confine.MayPass(f)
}

// stat looks at a file that the process may read, or at the directory of a snapshot of its own.
func (v *VM) stat(name string) (fileInfo, error, bool) {
	if !v.grants.mayRead(name) && !v.grants.mayLink(name) {
		return fileInfo{}, nil, false
	}
	return statInfo(name)
}

func statInfo(name string) (fileInfo, error, bool) {
	st, err := os.Lstat(name)
	if err != nil {
		return fileInfo{}, err, true
	}
	i := fileInfo{Size: st.Size(), Dir: st.IsDir(), ModTime: st.ModTime()}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		i.Device, i.Inode = sys.Dev, sys.Ino
	}
	return i, nil, true
}

// file does what belongs to the capture. c.mu is held.
func (c *capture) file(v *VM, o fileOrder) (none fileInfo, f *os.File, err error) {
	dir, isFile := filepath.Dir(o.Name), snapshot.IsFile(filepath.Base(o.Name))
	top := filepath.Clean(c.o.NewTop)
	temp := layerTemp(top)
	switch {
	// The new layer.
	case o.Op == fileOpen && o.Name == temp && o.flags() == os.O_RDWR|os.O_CREATE|os.O_TRUNC && !c.switched:
		f, err = openAs(temp, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
		return none, f, err
	case o.Op == fileRename && o.Name == temp && o.To == top && !c.switched:
		return none, nil, osfile.OS.RenameNew(temp, top)
	case o.Op == fileRemove && (o.Name == temp || o.Name == top) && !c.switched:
		return none, nil, os.Remove(o.Name)
	case o.Op == fileStat && (o.Name == top || o.Name == temp):
		i, err, _ := statInfo(o.Name)
		return i, nil, err
	}
	if c.diskOnly {
		return none, nil, errRefused
	}
	// The new snapshot.
	parent := filepath.Dir(filepath.Clean(c.o.Dir))
	final := filepath.Clean(c.o.Dir)
	switch {
	case o.Op == fileStat && (o.Name == final || (dir == final || dir == c.temp) && isFile):
		i, err, _ := statInfo(o.Name)
		return i, nil, err
	case o.Op == fileFree && o.Name == parent:
		n, err := osfile.OS.Free(parent)
		return fileInfo{Free: n}, nil, err
	case o.Op == fileSyncDir && o.Name == parent:
		return none, nil, osfile.SyncDir(o.Name)
	case o.Op == fileSyncDir && o.Name == c.temp && c.temp != "":
		return none, nil, nil // commit does it, with the manifest
	case o.Op == fileOpen && c.manifest != nil && dir == final && o.flags() == os.O_RDONLY && isFile:
		f, err = v.jail.openToRead(o.Name)
		return none, f, err
	case c.manifest != nil:
		return none, nil, errRefused // the snapshot is finished
	case o.Op == fileMkdir && c.temp == "" && dir == parent && snapshot.IsTemp(filepath.Base(o.Name)):
		if err := os.Mkdir(o.Name, 0o700); err != nil {
			return none, nil, err
		}
		c.temp = o.Name
		return none, nil, nil
	case c.temp == "":
		return none, nil, errRefused
	case o.Op == fileLock && o.Name == c.temp && c.lock == nil:
		c.lock, err = osfile.OS.Lock(c.temp)
		return none, nil, err
	case o.Op == fileOpen && dir == c.temp && o.flags() == os.O_WRONLY|os.O_CREATE|os.O_EXCL:
		switch filepath.Base(o.Name) {
		case snapshot.ManifestName:
			f, err = c.draftManifest()
			return none, f, err
		case snapshot.MemoryName:
		default:
			return none, nil, errRefused // other memory files are links
		}
		f, err = openAs(o.Name, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
		return none, f, err
	case o.Op == fileLink && filepath.Dir(o.To) == c.temp && v.grants.mayLink(dir) &&
		snapshot.LinkOf(filepath.Base(o.Name), filepath.Base(o.To)):
		if c.linked == snapshot.MaxFiles {
			return none, nil, errRefused
		}
		c.linked++
		return none, nil, os.Link(o.Name, o.To)
	case (o.Op == fileRemove || o.Op == fileRemoveAll) && dir == c.temp && isFile:
		return none, nil, os.Remove(o.Name)
	case o.Op == fileRemoveAll && o.Name == c.temp:
		err := os.RemoveAll(c.temp)
		if c.lock != nil {
			err = errors.Join(err, c.lock.Close())
		}
		c.temp, c.lock, c.linked = "", nil, 0
		return none, nil, err
	case o.Op == fileRenameNew && o.Name == c.temp && o.To == final:
		return none, nil, c.commit(v, final)
	}
	return none, nil, errRefused
}

// draftManifest returns a file in memory for the manifest. The process could change a file on disk after the keeper has
// checked it.
func (c *capture) draftManifest() (*os.File, error) {
	if c.draft != nil {
		return nil, errRefused
	}
	fd, err := unix.MemfdCreate("manifest", unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate("manifest", unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, fmt.Errorf("making room for a manifest: %w", err)
	}
	c.draft = os.NewFile(uintptr(fd), snapshot.ManifestName)
	return rpc.Dup(c.draft)
}

// commit writes the manifest if it is what the keeper has ordered, and gives the snapshot its name. There is one
// attempt in a capture: judging a manifest may take the keeper a second.
func (c *capture) commit(v *VM, final string) error {
	if !c.sealed || c.draft == nil || c.judged {
		return fmt.Errorf("a snapshot without its disk or its manifest: %w", errRefused)
	}
	c.judged = true
	body, err := readDraft(c.draft)
	if err != nil {
		return fmt.Errorf("reading a manifest: %w", err)
	}
	m, err := snapshot.ParseManifest(body)
	if err != nil {
		return err
	}
	if err := v.checkManifest(m, c); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(c.temp, snapshot.ManifestName), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(body)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := osfile.SyncDir(c.temp); err != nil {
		return err
	}
	if err := osfile.OS.RenameNew(c.temp, final); err != nil {
		return err
	}
	c.temp, c.manifest = "", m
	return nil
}

// readDraft copies a manifest that the process may still be changing.
func readDraft(f *os.File) ([]byte, error) {
	i, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if i.Size() > snapshot.MaxManifestBytes {
		return nil, fmt.Errorf("it has %d bytes, and the limit is %d: %w", i.Size(), snapshot.MaxManifestBytes, errForged)
	}
	body := make([]byte, i.Size())
	if _, err := f.ReadAt(body, 0); err != nil {
		return nil, err
	}
	return body, nil
}

// connect connects the guest to a port of the host: to the socket beside the VM's.
func (v *VM) connect(ctx context.Context, port uint32) (*os.File, bool, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", guest.HostPath(v.parts.Socket, port))
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			err = op.Err
		}
		return nil, false, err
	}
	defer conn.Close()
	uc, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, false, errRefused
	}
	own := peerIsSelf(uc)
	f, err := uc.File()
	return f, own, err
}

// peerIsSelf reports whether this process listens at the other end.
func peerIsSelf(c *net.UnixConn) (own bool) {
	rc, err := c.SyscallConn()
	if err != nil {
		return false
	}
	_ = rc.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		own = err == nil && int(cred.Pid) == os.Getpid()
	})
	return own
}
