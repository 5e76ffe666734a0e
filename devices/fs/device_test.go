package fs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/internal/test/devicetest"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func needRoot(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, as a VM does")
	}
}

func tryDir(path string, writable bool) (*Dir, error) {
	f, err := os.OpenFile(path, OpenFlags, 0)
	if err != nil {
		return nil, err
	}
	return NewDir(f, writable)
}

func openDir(t testing.TB, path string, writable bool) *Dir {
	t.Helper()
	d, err := tryDir(path, writable)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// client is a guest's FUSE client over the device's queues.
type client struct {
	t testing.TB
	*devicetest.Driver
	unique uint64
}

func start(t testing.TB, path string, writable bool) *client {
	t.Helper()
	needRoot(t)
	mem := devicetest.NewMemory(t)
	c := &client{t: t, Driver: devicetest.NewDriver(t, New(openDir(t, path, writable), "share", Options{}), mem)}
	c.Start(devicetest.AllFeatures)
	c.mustDo(opInit, 0, words(7, 37, 1<<20, ^uint32(0)), initOutSize)
	return c
}

// words and longs encode 32-bit and 64-bit fields.
func words(vs ...uint32) (p []byte) {
	for _, v := range vs {
		p = binary.LittleEndian.AppendUint32(p, v)
	}
	return p
}

func longs(vs ...uint64) (p []byte) {
	for _, v := range vs {
		p = binary.LittleEndian.AppendUint64(p, v)
	}
	return p
}

func text(ss ...string) (p []byte) {
	for _, s := range ss {
		p = append(append(p, s...), 0)
	}
	return p
}

func header(op uint32, unique, node uint64, size int) []byte {
	p := words(uint32(inHeaderSize+size), op)
	p = append(p, longs(unique, node)...)
	return append(p, make([]byte, inHeaderSize-len(p))...)
}

// do makes a request and returns the reply without its header.
func (c *client) do(op uint32, node uint64, body []byte, room int) ([]byte, syscall.Errno) {
	c.t.Helper()
	c.unique++
	out := [][]byte{header(op, c.unique, node, len(body))}
	for b := body; len(b) > 0; {
		k := min(len(b), 4096)
		out = append(out, b[:k])
		b = b[k:]
	}
	in := []int{outHeaderSize}
	if room > 0 {
		in = append(in, room)
	}
	data, used := c.Queue(queueRequest).Do(out, in...)
	le := binary.LittleEndian
	n := int(le.Uint32(data))
	if n < outHeaderSize || n > len(data) || int(used) != n || le.Uint64(data[8:]) != c.unique {
		c.t.Fatalf("request %d: a reply of %d bytes, %d used, to request %d, want %d", op, n, used, le.Uint64(data[8:]), c.unique)
	}
	return data[outHeaderSize:n], syscall.Errno(-int32(le.Uint32(data[4:])))
}

func (c *client) mustDo(op uint32, node uint64, body []byte, room int) []byte {
	c.t.Helper()
	data, errno := c.do(op, node, body, room)
	if errno != 0 {
		c.t.Fatalf("request %d of node %d: %v", op, node, errno)
	}
	return data
}

func (c *client) want(errno syscall.Errno, op uint32, node uint64, body []byte, room int) {
	c.t.Helper()
	if _, got := c.do(op, node, body, room); got != errno {
		c.t.Errorf("request %d of node %d: %v, want %v", op, node, got, errno)
	}
}

func (c *client) lookup(parent uint64, name string) uint64 {
	c.t.Helper()
	return binary.LittleEndian.Uint64(c.mustDo(opLookup, parent, text(name), entrySize))
}

func (c *client) create(parent uint64, name string, flags, mode uint32) (node, fh uint64) {
	c.t.Helper()
	b := c.mustDo(opCreate, parent, append(words(flags, mode, 0, 0), text(name)...), entrySize+openOutSize)
	return binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[entrySize:])
}

func (c *client) open(node uint64, flags uint32) uint64 {
	c.t.Helper()
	return binary.LittleEndian.Uint64(c.mustDo(opOpen, node, words(flags, 0), openOutSize))
}

func writeBody(fh, off uint64, data []byte, how, flags uint32) []byte {
	p := append(longs(fh, off), words(uint32(len(data)), how)...)
	p = append(append(p, longs(0)...), words(flags, 0)...)
	return append(p, data...)
}

func (c *client) write(fh, off uint64, data []byte, flags uint32) {
	c.t.Helper()
	b := c.mustDo(opWrite, 0, writeBody(fh, off, data, 0, flags), 8)
	if n := binary.LittleEndian.Uint32(b); int(n) != len(data) {
		c.t.Fatalf("%d bytes written of %d", n, len(data))
	}
}

func readBody(fh, off uint64, size uint32) []byte {
	return append(append(longs(fh, off), words(size, 0)...), make([]byte, 16)...)
}

func (c *client) read(fh, off uint64, size int) []byte {
	c.t.Helper()
	return c.mustDo(opRead, 0, readBody(fh, off, uint32(size)), size)
}

func (c *client) names(node uint64) []string {
	c.t.Helper()
	fh := binary.LittleEndian.Uint64(c.mustDo(opOpendir, node, words(0, 0), openOutSize))
	var all []string
	for off := uint64(0); ; {
		b := c.mustDo(opReaddir, node, readBody(fh, off, 4096), 4096)
		if len(b) == 0 {
			break
		}
		for len(b) >= direntSize {
			n := int(binary.LittleEndian.Uint32(b[16:]))
			off = binary.LittleEndian.Uint64(b[8:])
			if name := string(b[direntSize : direntSize+n]); name != "." && name != ".." {
				all = append(all, name)
			}
			b = b[(direntSize+n+7)&^7:]
		}
	}
	c.mustDo(opReleasedir, node, append(longs(fh), make([]byte, 16)...), 0)
	return all
}

func pattern(n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i*31>>1) ^ byte(i>>8)
	}
	return p
}

func TestConformance(t *testing.T) {
	needRoot(t)
	path := t.TempDir()
	if err := os.WriteFile(filepath.Join(path, "there"), pattern(10000), 0o644); err != nil {
		t.Fatal(err)
	}
	devicetest.Run(t, devicetest.Case{
		New: func(t testing.TB, _ *guestmem.Memory) devices.Device {
			return New(openDir(t, path, true), "share", Options{})
		},
		Exercise: func(t testing.TB, d *devicetest.Driver) {
			c := &client{t: t, Driver: d}
			c.mustDo(opInit, 0, words(7, 37, 1<<20, ^uint32(0)), initOutSize)
			node := c.lookup(rootID, "there")
			fh := c.open(node, unix.O_RDONLY)
			if got := c.read(fh, 1000, 9500); !bytes.Equal(got, pattern(10000)[1000:]) {
				t.Fatal("what was read is not what is there")
			}
			c.mustDo(opRelease, node, append(longs(fh), make([]byte, 16)...), 0)
			if _, used := d.Queue(queueHiprio).Do([][]byte{header(opForget, 0, node, 8), longs(1)}); used != 0 {
				t.Fatalf("a reply of %d bytes to what has none", used)
			}
		},
		Pauses: 50, Moves: 10,
	})
}

func TestWhat_is_written_is_at_the_host_and_the_other_way_round(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chown(dir, 1234, 2345); err != nil {
		t.Skip(err)
	}
	c := start(t, dir, true)
	node, fh := c.create(rootID, "a", unix.O_RDWR, 0o100000|0o6751)
	data := pattern(MaxTransfer)
	c.write(fh, 0, data, 0)
	c.write(fh, 5, []byte("end"), unix.O_APPEND)
	if got, err := os.ReadFile(filepath.Join(dir, "a")); err != nil || !bytes.Equal(got, append(bytes.Clone(data), "end"...)) {
		t.Fatalf("%d bytes at the host, %v", len(got), err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "a"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString(" of it"); err != nil {
		t.Fatal(err)
	}
	if got := c.read(fh, MaxTransfer, 100); string(got) != "end of it" {
		t.Errorf("read %q", got)
	}
	if got := c.read(fh, MaxTransfer+100, 100); len(got) != 0 {
		t.Errorf("%d bytes after the end", len(got))
	}
	// Pages of the guest's cache go to their own position by any handle.
	c.mustDo(opWrite, 0, writeBody(fh, 1, []byte("X"), writeCached, unix.O_APPEND), 8)
	if got := c.read(fh, 0, 3); got[1] != 'X' {
		t.Errorf("read % x", got)
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(dir, "a"), &st); err != nil || st.Mode != unix.S_IFREG|0o751 || st.Uid != 1234 || st.Gid != 2345 {
		t.Errorf("mode %o, owner %d:%d, %v", st.Mode, st.Uid, st.Gid, err)
	}

	sub := binary.LittleEndian.Uint64(c.mustDo(opMkdir, rootID, append(words(0o42755, 0), text("sub")...), entrySize))
	c.mustDo(opRename, rootID, append(longs(sub), text("a", "b")...), 0)
	c.mustDo(opGetattr, node, make([]byte, 16), attrOutSize)
	c.mustDo(opLink, rootID, append(longs(node), text("c")...), entrySize)
	c.mustDo(opSymlink, rootID, text("l", "/etc/passwd"), entrySize)
	if got := c.mustDo(opReadlink, c.lookup(rootID, "l"), nil, 4095); string(got) != "/etc/passwd" {
		t.Errorf("the link leads to %q", got)
	}
	if got := c.names(rootID); !slices.Equal(slices.Sorted(slices.Values(got)), []string{"c", "l", "sub"}) {
		t.Errorf("the directory has %q", got)
	}
	c.mustDo(opRename2, rootID, append(append(longs(sub), words(unix.RENAME_EXCHANGE, 0)...), text("c", "b")...), 0)
	c.want(unix.ENOTEMPTY, opRmdir, rootID, text("sub"), 0)
	c.mustDo(opUnlink, sub, text("b"), 0)
	c.mustDo(opUnlink, rootID, text("c"), 0)
	c.mustDo(opRmdir, rootID, text("sub"), 0)
	// It is still open.
	c.mustDo(opGetattr, node, make([]byte, 16), attrOutSize)
	if got := c.read(fh, MaxTransfer, 3); string(got) != "end" {
		t.Errorf("of the file without a name %q was read", got)
	}
	c.mustDo(opRelease, node, append(longs(fh), make([]byte, 16)...), 0)
	c.want(unix.ESTALE, opGetattr, node, make([]byte, 16), attrOutSize)
}

func TestDirectory_of300_files_is_read_whole(t *testing.T) {
	dir := t.TempDir()
	var want []string
	for i := range 300 {
		name := fmt.Sprintf("file-%03d%s", i, strings.Repeat("x", i%200))
		want = append(want, name)
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got := start(t, dir, false).names(rootID)
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%d names of %d", len(got), len(want))
	}
}

func setattrBody(valid uint32, fh, size uint64, mode, uid uint32) []byte {
	p := append(words(valid, 0), longs(fh, size, 0, 1e9, 1e9, 0)...)
	return append(p, words(1, 2, 0, mode, 0, uid, 0, 0)...)
}

func TestRead_only_share_refuses_every_change(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("as it was"), 0o666); err != nil {
		t.Fatal(err)
	}
	c := start(t, dir, false)
	f := c.lookup(rootID, "f")
	fh := c.open(f, unix.O_RDONLY)
	for name, do := range map[string]func(){
		"open for writing": func() { c.want(unix.EROFS, opOpen, f, words(unix.O_RDWR, 0), openOutSize) },
		"write":            func() { c.want(unix.EROFS, opWrite, f, writeBody(fh, 0, []byte("x"), 0, 0), 8) },
		"truncate":         func() { c.want(unix.EROFS, opSetattr, f, setattrBody(setSize, 0, 0, 0, 0), attrOutSize) },
		"chmod":            func() { c.want(unix.EROFS, opSetattr, f, setattrBody(setMode, 0, 0, 0o777, 0), attrOutSize) },
		"create": func() {
			c.want(unix.EROFS, opCreate, rootID, append(words(0, 0o644, 0, 0), text("g")...), entrySize+openOutSize)
		},
		"mkdir":     func() { c.want(unix.EROFS, opMkdir, rootID, append(words(0o755, 0), text("g")...), entrySize) },
		"mknod":     func() { c.want(unix.EROFS, opMknod, rootID, append(words(0o100644, 0, 0, 0), text("g")...), entrySize) },
		"symlink":   func() { c.want(unix.EROFS, opSymlink, rootID, text("g", "f"), entrySize) },
		"link":      func() { c.want(unix.EROFS, opLink, rootID, append(longs(f), text("g")...), entrySize) },
		"unlink":    func() { c.want(unix.EROFS, opUnlink, rootID, text("f"), 0) },
		"rmdir":     func() { c.want(unix.EROFS, opRmdir, rootID, text("f"), 0) },
		"rename":    func() { c.want(unix.EROFS, opRename, rootID, append(longs(1), text("f", "g")...), 0) },
		"rename2":   func() { c.want(unix.EROFS, opRename2, rootID, append(longs(1, 0), text("f", "g")...), 0) },
		"fallocate": func() { c.want(unix.EROFS, opFallocate, f, append(longs(fh, 0, 100), words(0, 0)...), 0) },
	} {
		t.Run(name, func(*testing.T) { do() })
	}
	if got, err := os.ReadFile(filepath.Join(dir, "f")); err != nil || string(got) != "as it was" {
		t.Errorf("%q, %v", got, err)
	}
	if es, err := os.ReadDir(dir); err != nil || len(es) != 1 {
		t.Errorf("%v, %v", es, err)
	}
}

func TestHostile_requests_are_answered_with_errors(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "shared")
	for _, d := range []string{dir, filepath.Join(dir, "sub")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	secret := filepath.Join(parent, "secret")
	if err := errors.Join(os.WriteFile(secret, []byte("secret"), 0o644), os.Symlink(secret, filepath.Join(dir, "link")),
		os.Symlink("..", filepath.Join(dir, "up")), unix.Mkfifo(filepath.Join(dir, "fifo"), 0o644)); err != nil {
		t.Fatal(err)
	}
	c := start(t, dir, true)
	if err := unix.Mknod(filepath.Join(dir, "null"), unix.S_IFCHR|0o666, 1<<8|3); err != nil {
		t.Logf("no device nodes here: %v", err)
	}
	long := strings.Repeat("n", MaxName+1)
	link, up, fifo, sub := c.lookup(rootID, "link"), c.lookup(rootID, "up"), c.lookup(rootID, "fifo"), c.lookup(rootID, "sub")
	f, fh := c.create(rootID, "f", unix.O_RDWR, 0o644)
	ro := c.open(f, unix.O_RDONLY)
	for name, r := range map[string]struct {
		want syscall.Errno
		op   uint32
		node uint64
		body []byte
		room int
	}{
		"name with a slash":         {unix.EINVAL, opLookup, rootID, text("../secret"), entrySize},
		"name of a way down":        {unix.EINVAL, opLookup, rootID, text("sub/x"), entrySize},
		"dot dot":                   {unix.EINVAL, opLookup, rootID, text(".."), entrySize},
		"dot":                       {unix.EINVAL, opLookup, rootID, text("."), entrySize},
		"no name":                   {unix.EINVAL, opLookup, rootID, text(""), entrySize},
		"name without an end":       {unix.EINVAL, opLookup, rootID, []byte("f"), entrySize},
		"name that is too long":     {unix.ENAMETOOLONG, opLookup, rootID, text(long), entrySize},
		"file that is not there":    {unix.ENOENT, opLookup, rootID, text("nothing"), entrySize},
		"reply without room":        {unix.EINVAL, opLookup, rootID, text("f"), entrySize - 1},
		"lookup in a file":          {unix.ENOTDIR, opLookup, f, text("x"), entrySize},
		"lookup through a link up":  {unix.ENOTDIR, opLookup, up, text("secret"), entrySize},
		"node that is unknown":      {unix.ESTALE, opGetattr, 1 << 60, make([]byte, 16), attrOutSize},
		"node 0":                    {unix.ESTALE, opGetattr, 0, make([]byte, 16), attrOutSize},
		"open of a symbolic link":   {unix.EPERM, opOpen, link, words(0, 0), openOutSize},
		"open of a FIFO":            {unix.EPERM, opOpen, fifo, words(0, 0), openOutSize},
		"open of a directory":       {unix.EPERM, opOpen, sub, words(0, 0), openOutSize},
		"open with access 3":        {unix.EINVAL, opOpen, f, words(3, 0), openOutSize},
		"opendir of a file":         {unix.ENOTDIR, opOpendir, f, words(0, 0), openOutSize},
		"opendir of a link up":      {unix.ENOTDIR, opOpendir, up, words(0, 0), openOutSize},
		"create over a link":        {unix.EPERM, opCreate, rootID, append(words(unix.O_RDWR, 0o644, 0, 0), text("link")...), entrySize + openOutSize},
		"mknod of a device":         {unix.EPERM, opMknod, rootID, append(words(unix.S_IFCHR|0o666, 1<<8|3, 0, 0), text("n")...), entrySize},
		"mknod of a FIFO":           {unix.EPERM, opMknod, rootID, append(words(unix.S_IFIFO|0o666, 0, 0, 0), text("n")...), entrySize},
		"mkdir outside":             {unix.EINVAL, opMkdir, rootID, append(words(0o755, 0), text("../n")...), entrySize},
		"rename outside":            {unix.EINVAL, opRename, rootID, append(longs(1), text("f", "../g")...), 0},
		"rename into an unknown":    {unix.ESTALE, opRename, rootID, append(longs(99), text("f", "g")...), 0},
		"rename to a whiteout":      {unix.EINVAL, opRename2, rootID, append(append(longs(1), words(4, 0)...), text("f", "g")...), 0},
		"link of a directory":       {unix.EPERM, opLink, rootID, append(longs(sub), text("g")...), entrySize},
		"unlink outside":            {unix.EINVAL, opUnlink, rootID, text("../secret"), 0},
		"rmdir of the parent":       {unix.EINVAL, opRmdir, sub, text(".."), 0},
		"chown":                     {unix.EPERM, opSetattr, f, setattrBody(setUID, 0, 0, 0, 4321), attrOutSize},
		"chmod of a link":           {unix.EPERM, opSetattr, link, setattrBody(setMode, 0, 0, 0o777, 0), attrOutSize},
		"truncate of a FIFO":        {unix.EPERM, opSetattr, fifo, setattrBody(setSize, 0, 0, 0, 0), attrOutSize},
		"truncate to less than 0":   {unix.EINVAL, opSetattr, f, setattrBody(setSize, 0, 1<<63, 0, 0), attrOutSize},
		"handle that is unknown":    {unix.EBADF, opRead, f, readBody(999, 0, 10), 10},
		"read beyond all offsets":   {unix.EINVAL, opRead, f, readBody(fh, 1<<63, 10), 10},
		"read over the last offset": {unix.EINVAL, opRead, f, readBody(fh, 1<<63-5, 10), 10},
		"read that is cut off":      {unix.EINVAL, opRead, f, longs(fh), 10},
		"readdir of a file":         {unix.EBADF, opReaddir, f, readBody(fh, 0, 4096), 4096},
		"write without a right to":  {unix.EBADF, opWrite, f, writeBody(ro, 0, []byte("x"), 0, 0), 8},
		"write beyond all offsets":  {unix.EINVAL, opWrite, f, writeBody(fh, 1<<63-1, []byte("x"), 0, 0), 8},
		"write of more than it has": {unix.EINVAL, opWrite, f, writeBody(fh, 0, []byte("xyz"), 0, 0)[:writeInSize+1], 8},
		"write of too much":         {unix.EINVAL, opWrite, f, writeBody(fh, 0, make([]byte, MaxTransfer+1), 0, 0), 8},
		"fallocate beyond all":      {unix.EINVAL, opFallocate, f, append(longs(fh, 1<<62, 1<<62+1<<61), words(0, 0)...), 0},
		"fallocate that collapses":  {unix.EOPNOTSUPP, opFallocate, f, append(longs(fh, 0, 4096), words(8, 0)...), 0},
		"lseek to a position":       {unix.EINVAL, opLseek, f, append(longs(fh, 0), words(unix.SEEK_SET, 0)...), 8},
		"extended attribute":        {unix.ENOSYS, 22, f, text("user.x"), 100},
		"operation 0":               {unix.ENOSYS, 0, f, nil, 100},
		"operation that is unknown": {unix.ENOSYS, ^uint32(0), f, nil, 100},
		"body that is too long":     {unix.EINVAL, opLookup, rootID, make([]byte, maxBody+1), entrySize},
		"old protocol":              {unix.EPROTO, opInit, 0, words(7, 8, 0, 0), initOutSize},
	} {
		t.Run(name, func(t *testing.T) {
			if _, got := c.do(r.op, r.node, r.body, r.room); got != r.want {
				t.Errorf("%v, want %v", got, r.want)
			}
		})
	}
	for name, r := range map[string][][]byte{
		"half a header":        {make([]byte, 20)},
		"wrong length":         {header(opGetattr, 1, rootID, 17), make([]byte, 16)},
		"forget of the root":   {header(opForget, 1, rootID, 8), longs(1 << 63)},
		"forget of too many":   {header(opBatchForget, 1, 0, 24), words(^uint32(0), 0), longs(f, 0)},
		"forget without count": {header(opForget, 1, f, 0)},
		"interrupt":            {header(opInterrupt, 1, 0, 8), longs(1)},
	} {
		t.Run(name, func(*testing.T) { c.Queue(queueHiprio).Do(r, 64) })
	}
	c.mustDo(opGetattr, rootID, make([]byte, 16), attrOutSize)
	c.mustDo(opGetattr, f, make([]byte, 16), attrOutSize)
	if err := c.HostError(); err != nil {
		t.Error(err)
	}
}

func TestSetuid_is_taken_from_what_the_guest_changes(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "su")
	c := start(t, dir, true)
	for name, change := range map[string]func(node uint64){
		"write":    func(n uint64) { c.write(c.open(n, unix.O_RDWR), 0, []byte("evil"), 0) },
		"truncate": func(n uint64) { c.mustDo(opSetattr, n, setattrBody(setSize, 0, 1, 0, 0), attrOutSize) },
		"chmod":    func(n uint64) { c.mustDo(opSetattr, n, setattrBody(setMode, 0, 0, 0o6755, 0), attrOutSize) },
		"create":   func(uint64) { c.create(rootID, "su", unix.O_RDWR|unix.O_TRUNC, 0o644) },
		"fallocate": func(n uint64) {
			c.mustDo(opFallocate, n, append(longs(c.open(n, unix.O_RDWR), 0, 9), words(0, 0)...), 0)
		},
	} {
		if err := errors.Join(os.WriteFile(path, []byte("good"), 0o755), unix.Chmod(path, 0o6755)); err != nil {
			t.Fatal(err)
		}
		change(c.lookup(rootID, "su"))
		if fi, err := os.Stat(path); err != nil || fi.Mode()&(os.ModeSetuid|os.ModeSetgid) != 0 {
			t.Errorf("%s: %v, %v", name, fi.Mode(), err)
		}
	}
}

func TestNodes_and_handles_have_an_end(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	c := start(t, dir, true)
	f := c.lookup(rootID, "f")
	c.WithDevice(func(dev devices.Device) {
		d := dev.(*Device)
		d.mu.Lock()
		defer d.mu.Unlock()
		for i := len(d.nodes); i < MaxNodes; i++ {
			if _, err := d.know(identity{ino: 1 << 60, birth: int64(i)}, d.root, fmt.Sprint("n", i)); err != nil {
				t.Fatal(err)
			}
		}
		for len(d.handles) < MaxHandles {
			d.tree.open(d.nodes[f], -1, 0, false)
		}
	})
	c.want(unix.ENFILE, opOpen, f, words(0, 0), openOutSize)
	c.want(unix.ENFILE, opOpendir, rootID, words(0, 0), openOutSize)
	c.want(unix.ENFILE, opMknod, rootID, append(words(0o100644, 0, 0, 0), text("g")...), entrySize)
	if err := os.WriteFile(filepath.Join(dir, "h"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	c.want(unix.ENFILE, opLookup, rootID, text("h"), entrySize)
	// The largest state can be exported and imported.
	c.WithDevice(func(dev devices.Device) {
		p, err := dev.(*Device).Export()
		if err == nil {
			err = New(dev.(*Device).dir, "share", Options{}).Import(p)
		}
		if err != nil || len(p.Data) > devices.MaxPayload {
			t.Errorf("a state of %d bytes: %v", len(p.Data), err)
		}
	})
	c.Queue(queueHiprio).Do([][]byte{header(opForget, 0, f+1, 8), longs(1)})
	c.lookup(rootID, "h")
}

// move moves the share to a new device, as a sleep and a wake do.
func (c *client) move(dir string) {
	c.t.Helper()
	if err := c.Move(New(openDir(c.t, dir, true), "share", Options{})); err != nil {
		c.t.Fatal(err)
	}
}

func TestOpen_files_go_on_after_a_sleep_unless_they_have_gone(t *testing.T) {
	dir := t.TempDir()
	c := start(t, dir, true)
	sub := binary.LittleEndian.Uint64(c.mustDo(opMkdir, rootID, append(words(0o755, 0), text("sub")...), entrySize))
	kept, keptFH := c.create(sub, "kept", unix.O_RDWR, 0o644)
	_, goneFH := c.create(sub, "gone", unix.O_RDWR, 0o644)
	_, otherFH := c.create(sub, "other", unix.O_RDWR, 0o644)
	_, fifoFH := c.create(sub, "fifo", unix.O_RDWR, 0o644)
	dirFH := binary.LittleEndian.Uint64(c.mustDo(opOpendir, sub, words(0, 0), openOutSize))
	c.write(keptFH, 0, []byte("before "), 0)
	other := filepath.Join(dir, "sub", "other")
	old, err := os.Open(other) // so that its inode number is not reused
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	if err := errors.Join(os.Remove(filepath.Join(dir, "sub", "gone")), os.Remove(other), os.WriteFile(other, []byte("another"), 0o644),
		os.Remove(filepath.Join(dir, "sub", "fifo")), unix.Mkfifo(filepath.Join(dir, "sub", "fifo"), 0o644)); err != nil {
		t.Fatal(err)
	}
	c.move(dir)
	c.write(keptFH, 7, []byte("after"), 0)
	if got := c.read(keptFH, 0, 100); string(got) != "before after" {
		t.Errorf("read %q", got)
	}
	for name, fh := range map[string]uint64{"gone": goneFH, "other": otherFH, "fifo": fifoFH} {
		if _, errno := c.do(opRead, 0, readBody(fh, 0, 10), 10); errno != unix.ESTALE {
			t.Errorf("%s: %v", name, errno)
		}
	}
	c.mustDo(opReaddir, sub, readBody(dirFH, 0, 4096), 4096)
	if again := c.lookup(sub, "kept"); again != kept {
		t.Errorf("the same file is node %d, and was %d", again, kept)
	}
}

func TestState_of_another_share_is_refused(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	p, err := New(openDir(t, dir, true), "share", Options{}).Export()
	if err != nil {
		t.Fatal(err)
	}
	for name, d := range map[string]*Device{
		"another tag": New(openDir(t, dir, true), "other", Options{}),
		"read-only":   New(openDir(t, dir, false), "share", Options{}),
	} {
		if err := d.Import(p); !errors.Is(err, devices.ErrPayload) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestNothing_leads_out_of_the_share_while_the_host_moves_things(t *testing.T) {
	parent := t.TempDir()
	dir, outside := filepath.Join(parent, "shared"), filepath.Join(parent, "outside")
	if err := errors.Join(os.MkdirAll(filepath.Join(dir, "a", "b"), 0o755), os.MkdirAll(filepath.Join(outside, "b"), 0o755),
		os.WriteFile(filepath.Join(dir, "a", "b", "f"), []byte("inside"), 0o644),
		os.WriteFile(filepath.Join(outside, "b", "f"), []byte("outside"), 0o644)); err != nil {
		t.Fatal(err)
	}
	c := start(t, dir, true)
	a := c.lookup(rootID, "a")
	b := c.lookup(a, "b")
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		in, away := filepath.Join(dir, "a"), filepath.Join(parent, "away")
		for {
			select {
			case <-stop:
				return
			default:
			}
			// Move it out of the share, put a link to the outside in its place, and move it back.
			if os.Rename(in, away) == nil {
				_ = os.Symlink(outside, in)
				_ = os.Remove(in)
				_ = os.Rename(away, in)
			}
			runtime.Gosched()
		}
	})
	inside := 0
	for range 1000 {
		reply, errno := c.do(opLookup, b, text("f"), entrySize)
		if errno != 0 {
			continue
		}
		node := binary.LittleEndian.Uint64(reply)
		reply, errno = c.do(opOpen, node, words(unix.O_RDONLY, 0), openOutSize)
		if errno != 0 {
			continue
		}
		fh := binary.LittleEndian.Uint64(reply)
		if got := c.read(fh, 0, 100); string(got) != "inside" {
			t.Fatalf("read %q", got)
		}
		inside++
		c.mustDo(opRelease, node, append(longs(fh), make([]byte, 16)...), 0)
		if reply, errno = c.do(opCreate, b, append(words(unix.O_RDWR, 0o644, 0, 0), text("made")...), entrySize+openOutSize); errno == 0 {
			c.mustDo(opRelease, 0, append(bytes.Clone(reply[entrySize:entrySize+8]), make([]byte, 16)...), 0)
		}
	}
	close(stop)
	wg.Wait()
	if _, err := os.Lstat(filepath.Join(outside, "b", "made")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file was made outside: %v", err)
	}
	t.Logf("inside %d times", inside)
	// The guest can no longer reach what has left the share, though it knows the node.
	if err := os.Rename(filepath.Join(dir, "a"), filepath.Join(outside, "a")); err != nil {
		t.Fatal(err)
	}
	c.want(unix.ESTALE, opLookup, b, text("f"), entrySize)
	c.want(unix.ESTALE, opGetattr, a, make([]byte, 16), attrOutSize)
	c.want(unix.ESTALE, opMkdir, b, append(words(0o755, 0), text("x")...), entrySize)
	// Neither through a link in its place that leads to the very same files.
	if err := os.Symlink(filepath.Join(outside, "a"), filepath.Join(dir, "a")); err != nil {
		t.Fatal(err)
	}
	c.want(unix.ESTALE, opLookup, b, text("f"), entrySize)
	c.want(unix.ESTALE, opMkdir, b, append(words(0o755, 0), text("x")...), entrySize)
}

func TestWhat_is_mounted_below_the_share_is_not_seen(t *testing.T) {
	dir := t.TempDir()
	below := filepath.Join(dir, "below")
	if err := os.Mkdir(below, 0o755); err != nil {
		t.Fatal(err)
	}
	c := start(t, dir, true)
	node := c.lookup(rootID, "below")
	if err := unix.Mount("tmpfs", below, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("no tmpfs: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(below, unix.MNT_DETACH) })
	c.want(unix.EXDEV, opLookup, rootID, text("below"), entrySize)
	c.want(unix.ESTALE, opMkdir, node, append(words(0o755, 0), text("x")...), entrySize)
}

func TestFull_file_system_is_ENOSPC_and_the_owner_is_told_once(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("no tmpfs: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	told := 0
	c := &client{t: t}
	c.Driver = devicetest.NewDriver(t, New(openDir(t, dir, true), "share", Options{OnError: func(err error) {
		if told++; !errors.Is(err, unix.ENOSPC) {
			t.Error(err)
		}
	}}), devicetest.NewMemory(t))
	c.Start(devicetest.AllFeatures)
	c.mustDo(opInit, 0, words(7, 37, 1<<20, ^uint32(0)), initOutSize)
	_, fh := c.create(rootID, "f", unix.O_RDWR, 0o644)
	// The guest gets what fits written, and learns how much that is.
	b := c.mustDo(opWrite, 0, writeBody(fh, 0, pattern(100<<10), 0, 0), 8)
	n := binary.LittleEndian.Uint32(b)
	if n == 0 || n > 64<<10 {
		t.Errorf("%d bytes were written", n)
	}
	for range 3 {
		c.want(unix.ENOSPC, opWrite, 0, writeBody(fh, uint64(n), pattern(8192), 0, 0), 8)
	}
	if got := c.read(fh, 0, 128<<10); !bytes.Equal(got, pattern(100 << 10)[:n]) {
		t.Errorf("%d bytes are there", len(got))
	}
	c.Close()
	if told != 1 {
		t.Errorf("told %d times", told)
	}
}

func TestOpen_refuses_what_is_no_directory_of_files(t *testing.T) {
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, file + "-missing", "/proc", "/sys", "/proc/self/fd"} {
		if d, err := tryDir(path, false); err == nil {
			d.Close()
			t.Errorf("%s was opened", path)
		}
	}
}
