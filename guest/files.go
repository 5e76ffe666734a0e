package guest

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/guest/internal/flow"
	"github.com/drowse-vm/drowse/guest/internal/treetar"
)

// FileInfo is what the guest says about a file.
type FileInfo struct {
	Name    string // one path element; ReadDir checks that
	Size    int64
	Mode    fs.FileMode
	UID     int
	GID     int
	ModTime time.Time
	Link    string // target of a symbolic link
	// Attributes are the extended attributes of a file or directory whose names begin with "user.": at most 8 KiB with
	// their names. Agents before them give none.
	Attributes map[string][]byte
}

func fileInfo(f *agentpb.FileInfo) FileInfo {
	return FileInfo{
		Name: f.Name, Size: f.Size, Mode: fileMode(f.Mode), UID: int(f.Uid), GID: int(f.Gid),
		ModTime: time.Unix(0, f.MtimeNanos), Link: f.Link, Attributes: f.Attributes,
	}
}

// fileMode turns st_mode of inode(7), which tar uses too, into Go's form.
func fileMode(st uint32) fs.FileMode { return (&tar.Header{Mode: int64(st)}).FileInfo().Mode() }

// Stat describes a file, or the target of a symbolic link. Paths in the guest are absolute in this and all other
// calls.
func (c *Client) Stat(ctx context.Context, path string) (FileInfo, error) {
	return c.stat(ctx, path, true)
}

// Lstat describes a file without following a symbolic link.
func (c *Client) Lstat(ctx context.Context, path string) (FileInfo, error) {
	return c.stat(ctx, path, false)
}

func (c *Client) stat(ctx context.Context, path string, follow bool) (FileInfo, error) {
	f, err := call(ctx, c, "stat "+path, agentpb.AgentClient.Stat, &agentpb.StatRequest{Path: path, Follow: follow})
	if err != nil {
		return FileInfo{}, err
	}
	return fileInfo(f), nil
}

// MaxDirEntries is the most entries that ReadDir returns. For a larger directory it fails with ErrLimit.
const MaxDirEntries = 1 << 16

// maxDirNames bounds the names, targets of links and attributes that ReadDir returns, in bytes.
const maxDirNames = 32 << 20

// ReadDir lists a directory, sorted by name. The error is ErrLimit if it has more than MaxDirEntries entries, or 32 MiB
// of names.
func (c *Client) ReadDir(ctx context.Context, dir string) ([]FileInfo, error) {
	var out []FileInfo
	after, held := "", 0
	for {
		r, err := call(ctx, c, "read directory "+dir, agentpb.AgentClient.ReadDir, &agentpb.ReadDirRequest{Path: dir, After: after})
		if err != nil {
			return nil, err
		}
		for _, e := range r.Entries {
			held += len(e.Name) + len(e.Link)
			for k, v := range e.Attributes {
				held += len(k) + len(v)
			}
			if held > maxDirNames {
				return nil, fmt.Errorf("guest: read directory %s: %w: more than %d bytes of names", dir, ErrLimit, maxDirNames)
			}
			if e.Name <= after || e.Name == "." || e.Name == ".." || strings.ContainsAny(e.Name, "/\x00") {
				return nil, fmt.Errorf("guest: read directory %s: %w: an entry named %q after %q", dir, ErrProtocol, e.Name, after)
			}
			after = e.Name
			out = append(out, fileInfo(e))
		}
		if len(out) > MaxDirEntries {
			return nil, fmt.Errorf("guest: read directory %s: %w: more than %d entries", dir, ErrLimit, MaxDirEntries)
		}
		if !r.More {
			return out, nil
		}
		if len(r.Entries) == 0 {
			return nil, fmt.Errorf("guest: read directory %s: %w: more entries promised and none given", dir, ErrProtocol)
		}
	}
}

// Mkdir makes a directory; perm 0 means 0755. With parents it makes missing parents as well.
func (c *Client) Mkdir(ctx context.Context, path string, perm fs.FileMode, parents bool) error {
	a := audit.Action{Kind: audit.KindMkdir, Path: path}
	return done(ctx, c, a, "make directory "+path, agentpb.AgentClient.Mkdir, &agentpb.MkdirRequest{Path: path, Mode: uint32(perm.Perm()), Parents: parents})
}

// MkdirFor makes a directory and missing parents for an owner, and leaves one that exists alone. Older agents make them
// root's.
func (c *Client) MkdirFor(ctx context.Context, path string, owner Owner) error {
	a := audit.Action{Kind: audit.KindMkdir, Path: path}
	return done(ctx, c, a, "make directory "+path, agentpb.AgentClient.Mkdir, &agentpb.MkdirRequest{Path: path, Parents: true, Owner: owner.message()})
}

// Remove removes a file or an empty directory. With recursive it removes a whole tree, which need not exist.
func (c *Client) Remove(ctx context.Context, path string, recursive bool) error {
	a := audit.Action{Kind: audit.KindRemove, Path: path, Recursive: recursive}
	return done(ctx, c, a, "remove "+path, agentpb.AgentClient.Remove, &agentpb.RemoveRequest{Path: path, Recursive: recursive})
}

// Rename renames a file or directory.
func (c *Client) Rename(ctx context.Context, from, to string) error {
	a := audit.Action{Kind: audit.KindRename, Path: from, To: to}
	return done(ctx, c, a, "rename "+from, agentpb.AgentClient.Rename, &agentpb.RenameRequest{From: from, To: to})
}

// Symlink makes a symbolic link at path.
func (c *Client) Symlink(ctx context.Context, target, path string) error {
	a := audit.Action{Kind: audit.KindSymlink, Path: path, To: target}
	return done(ctx, c, a, "link "+path, agentpb.AgentClient.Symlink, &agentpb.SymlinkRequest{Target: target, Path: path})
}

// Readlink reads a symbolic link.
func (c *Client) Readlink(ctx context.Context, path string) (string, error) {
	r, err := call(ctx, c, "read link "+path, agentpb.AgentClient.Readlink, &agentpb.ReadlinkRequest{Path: path})
	if err != nil {
		return "", err
	}
	return r.Target, nil
}

// ReadFile copies length bytes of a file, from offset on, to w; length 0 means up to the end. It returns how many
// bytes it copied. The guest decides how much it sends: bound w, or give a length, which ReadFile enforces.
func (c *Client) ReadFile(ctx context.Context, path string, w io.Writer, offset, length int64) (n int64, err error) {
	p, err := c.record(ctx, "read "+path, audit.Action{Kind: audit.KindRead, Path: path})
	if err != nil {
		return 0, err
	}
	defer func() { p.End(audit.Outcome{BytesOut: n, Error: text(err)}) }()
	first := &agentpb.TransferRequest{Msg: &agentpb.TransferRequest_Read{Read: &agentpb.ReadFile{Path: path, Offset: offset, Length: length}}}
	t, err := c.transfer(ctx, "read "+path, first)
	if err != nil {
		return 0, err
	}
	defer t.close()
	err = t.converse(true, func(rw io.ReadWriter) (err error) {
		r := io.Reader(rw)
		if length != 0 {
			r = io.LimitReader(rw, length)
		}
		n, err = io.CopyBuffer(struct{ io.Writer }{w}, r, make([]byte, agentpb.MaxChunk))
		if err != nil || length == 0 {
			return err
		}
		if more, _ := rw.Read(make([]byte, 1)); more > 0 {
			err = fmt.Errorf("%w: more bytes than were asked for", ErrProtocol)
		}
		return err
	})
	return n, t.fail(err)
}

// WriteOptions says how WriteFile writes a file.
type WriteOptions struct {
	Perm    fs.FileMode // of a new file, and of an existing one unless 0; 0 is 0644
	Owner   *Owner      // nil: root, or the owner of the existing file
	ModTime time.Time   // zero: now
	// Atomic writes a temporary file and renames it: readers see the old file or the whole new one, even after a
	// crash.
	Atomic  bool
	Parents bool // make missing directories
	// Offset is where to write without truncating. Append writes at the end.
	Offset int64
	Append bool
	// Attributes, if not nil, replace some of the file's extended attributes. Agents before them leave them as they
	// are: Stat tells.
	Attributes *Attributes
}

// Attributes replace the extended attributes of a file whose names begin with Prefix, as "user.app.". Those of other
// names stay.
type Attributes struct {
	Prefix string            // begins with "user."
	Values map[string][]byte // by whole names; at most 8 KiB with them
}

// Owner is a user and a group of the guest.
type Owner struct{ UID, GID int }

func (o *Owner) message() *agentpb.Owner {
	if o == nil {
		return nil
	}
	return &agentpb.Owner{Uid: uint32(o.UID), Gid: uint32(o.GID)}
}

// WriteFile writes all data from r to a file in the guest.
func (c *Client) WriteFile(ctx context.Context, path string, r io.Reader, o WriteOptions) (err error) {
	p, err := c.record(ctx, "write "+path, audit.Action{Kind: audit.KindWrite, Path: path})
	if err != nil {
		return err
	}
	var sent int64
	defer func() { p.End(audit.Outcome{BytesIn: sent, Error: text(err)}) }()
	m := &agentpb.WriteFile{
		Path: path, Mode: uint32(o.Perm.Perm()), Owner: o.Owner.message(), Atomic: o.Atomic, Parents: o.Parents,
		Offset: o.Offset, Append: o.Append,
	}
	if !o.ModTime.IsZero() {
		m.MtimeNanos = o.ModTime.UnixNano()
	}
	if o.Attributes != nil {
		m.Attributes = &agentpb.Attributes{Prefix: o.Attributes.Prefix, Values: o.Attributes.Values}
	}
	t, err := c.transfer(ctx, "write "+path, &agentpb.TransferRequest{Msg: &agentpb.TransferRequest_Write{Write: m}})
	if err != nil {
		return err
	}
	defer t.close()
	t.sent = func(n int64) { sent += n }
	return t.fail(t.converse(false, func(rw io.ReadWriter) error {
		if _, err := io.CopyBuffer(rw, struct{ io.Reader }{r}, make([]byte, agentpb.MaxChunk)); err != nil {
			return err
		}
		return t.sendEnd()
	}))
}

// DefaultCopyBytes bounds a copy whose options say nothing else.
const DefaultCopyBytes = treetar.DefaultBytes

// CopyOptions bounds and shapes a copy of a tree.
type CopyOptions struct {
	MaxBytes   int64 // 0: DefaultCopyBytes
	MaxEntries int64 // 0: 1048576
	// EntryBytes is what CopyOut counts of MaxBytes for each entry, besides its content.
	EntryBytes int64
	// Owner owns everything that CopyIn creates in the guest; nil is root. CopyOut ignores it: its files belong to
	// the caller.
	Owner *Owner
	// KeepLinks makes CopyOut create symbolic links that are absolute or lead out of the tree. It skips them
	// otherwise: opening one would lead to a place of the guest's choice.
	KeepLinks bool
	// OwnerWrites makes CopyOut take the write permission from all but the owner of a file.
	OwnerWrites bool
	// Progress, if not nil, is called with the number of bytes moved so far: contents, names and other metadata. One
	// goroutine at a time calls it, often, and the copy waits for it.
	Progress func(bytes int64)
	// Resume continues a copy that was cut. Both ends read what the destination already has, and do not move a file
	// again if they find the same SHA-256, nor the beginning of an unfinished file. Whether the destination is the
	// copy or the directory above it stays as in the cut copy. With an older agent the copy fails with ErrNoResume.
	Resume bool
	// Exact says that the destination is the name of the copy even if it is an existing directory.
	Exact bool
}

// ErrNoResume says that the guest's agent is too old to resume a copy.
var ErrNoResume = errors.New("the agent in the guest cannot go on with a copy that was cut: copy anew, or boot the VM anew with this agent")

func resumeError(o CopyOptions, err error) error {
	var re *RemoteError
	if o.Resume && errors.As(err, &re) && re.Code == codes.InvalidArgument && strings.Contains(re.Message, agentpb.NoTransfer) {
		return fmt.Errorf("guest: %s: %w", re.Op, ErrNoResume)
	}
	return err
}

// tell returns a function that adds up the moved bytes and reports the total to Progress.
func (o *CopyOptions) tell(moved *int64) func(int64) {
	return func(n int64) {
		*moved += n
		if o.Progress != nil {
			o.Progress(*moved)
		}
	}
}

// CopyResult says what was copied.
type CopyResult struct {
	Entries, Bytes int64
	// Kept is how many bytes of content were already there, for a copy that was resumed. Bytes does not include
	// them.
	Kept int64
	// At is the name of the copy. It is set as soon as the copy has begun, even if it fails: with CopyOptions.Exact
	// it names the same copy again.
	At string
	// Skipped are the first 100 names of SkippedCount that were left out: devices, pipes, sockets, and for CopyOut
	// links out of the tree.
	Skipped      []string
	SkippedCount int64
}

func copyResult(r treetar.Result) CopyResult {
	out := CopyResult{Entries: r.Entries, Bytes: r.Bytes, Kept: r.Kept, SkippedCount: r.SkippedCount}
	for _, name := range r.Skipped {
		out.Skipped = append(out.Skipped, printable(name))
	}
	return out
}

// CopyIn copies a file or directory of the host into the guest. As with cp(1), dst is the directory to copy into if
// it is an existing directory, else the name of the copy; its parent must exist. A file gets its name only when it
// is whole. Until then it has another name beside it, and an unfinished file of 1 MiB or more stays if the copy is
// cut.
func (c *Client) CopyIn(ctx context.Context, src, dst string, o CopyOptions) (out CopyResult, err error) {
	if src, err = filepath.Abs(src); err != nil {
		return CopyResult{}, fmt.Errorf("guest: copy %s: %w", src, err)
	}
	if _, err := os.Stat(src); err != nil {
		return CopyResult{}, fmt.Errorf("guest: copy: %w", err)
	}
	p, err := c.record(ctx, "copy to "+dst, audit.Action{Kind: audit.KindCopyIn, Path: dst, HostPath: src})
	if err != nil {
		return CopyResult{}, err
	}
	var sent int64
	defer func() { p.End(audit.Outcome{BytesIn: sent, Error: text(err)}) }()
	base := filepath.Base(src)
	dir, name, err := c.target(ctx, dst, base, o)
	if err != nil {
		return CopyResult{}, err
	}
	defer func() { out.At = path.Join(dir, name) }()
	owner := o.Owner
	if owner == nil {
		owner = &Owner{}
	}
	m := &agentpb.Unpack{Path: dir, Owner: owner.message(), MaxBytes: o.MaxBytes, MaxEntries: o.MaxEntries, Marker: treetar.Marker(base)}
	first := &agentpb.TransferRequest{Msg: &agentpb.TransferRequest_Unpack{Unpack: m}}
	if o.Resume {
		first = &agentpb.TransferRequest{Msg: &agentpb.TransferRequest_ResumeUnpack{ResumeUnpack: m}}
	}
	if src, err = filepath.EvalSymlinks(src); err != nil {
		return CopyResult{}, fmt.Errorf("guest: copy: %w", err)
	}
	t, err := c.transfer(ctx, "copy to "+dst, first)
	if err != nil {
		return CopyResult{}, err
	}
	defer t.close()
	var res treetar.Result
	t.sent = o.tell(&sent)
	err = t.converse(o.Resume, func(rw io.ReadWriter) (err error) {
		if o.Resume {
			res, err = treetar.PackResumed(t.ctx, rw, src, name)
		} else {
			res, err = treetar.Pack(t.ctx, rw, src, name)
		}
		if err == nil {
			err = t.sendEnd()
		}
		return err
	})
	return copyResult(res), resumeError(o, t.fail(err))
}

// target decides where in the guest a copy goes: the directory, and the copy's name in it.
func (c *Client) target(ctx context.Context, dst, base string, o CopyOptions) (dir, name string, err error) {
	if o.Exact {
		dir, name = path.Split(path.Clean(dst))
		return dir, name, nil
	}
	fi, err := c.Stat(ctx, dst)
	if err == nil && fi.Mode.IsDir() && o.Resume {
		// dst may be what the cut copy has made.
		_, merr := c.Lstat(ctx, path.Join(dst, treetar.Marker(base)))
		if merr == nil {
			dir, name = path.Split(path.Clean(dst))
			return dir, name, nil
		}
		if !errors.Is(merr, fs.ErrNotExist) {
			return "", "", merr
		}
	}
	switch {
	case err == nil && fi.Mode.IsDir():
		return dst, base, nil
	case err == nil || errors.Is(err, fs.ErrNotExist):
		dir, name = path.Split(path.Clean(dst))
	default:
		return "", "", err
	}
	if strings.HasSuffix(dst, "/") && err == nil || name == "" {
		return "", "", fmt.Errorf("guest: copy to %s: not a directory", dst)
	}
	if _, err := c.Stat(ctx, dir); err != nil {
		return "", "", err
	}
	return dir, name, nil
}

// CopyOut copies a file or directory of the guest to the host. As with cp(1), dst is the directory to copy into if
// it is an existing directory, else the name of the copy. The copy has one name there, the last element of src or of
// dst. The guest can create or change only what has that name, and an unfinished file beside it if the copy of a
// single file is cut. CopyOut follows no link: an entry whose name leads through one is ErrUnsafe. It makes links
// last, and only those that stay in the copy unless KeepLinks is set. Existing content is kept: directories are
// merged, and files and links of the same names replaced.
func (c *Client) CopyOut(ctx context.Context, src, dst string, o CopyOptions) (out CopyResult, err error) {
	dir, name := filepath.Split(filepath.Clean(dst))
	if dir == "" {
		dir = "."
	}
	base := path.Base(path.Clean(src))
	if base == "/" || base == "." {
		base = "root"
	}
	marker := treetar.Marker(base)
	if fi, err := os.Stat(dst); err == nil && fi.IsDir() && !o.Exact {
		// With the marker, dst is what the cut copy has made.
		if _, err := os.Lstat(filepath.Join(dst, marker)); !o.Resume || err != nil {
			dir, name = dst, base
		}
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return CopyResult{}, fmt.Errorf("guest: copy to %s: %w", dst, err)
	}
	defer root.Close()
	at := dst
	if abs, err := filepath.Abs(dst); err == nil {
		at = abs
	}
	out, err = c.copyOut(ctx, src, root, name, marker, at, o)
	out.At = filepath.Join(dir, name)
	return out, err
}

// CopyOutTo is CopyOut into an open directory of the host. The copy is called name in it, and at in the audit trail.
func (c *Client) CopyOutTo(ctx context.Context, src string, root *os.Root, name, at string, o CopyOptions) (CopyResult, error) {
	out, err := c.copyOut(ctx, src, root, name, treetar.Marker(name), at, o)
	out.At = at
	return out, err
}

// copyOut copies src to name in the directory root.
func (c *Client) copyOut(ctx context.Context, src string, root *os.Root, name, marker, at string, o CopyOptions) (out CopyResult, err error) {
	p, err := c.record(ctx, "copy from "+src, audit.Action{Kind: audit.KindCopyOut, Path: src, HostPath: at})
	if err != nil {
		return CopyResult{}, err
	}
	var received int64
	defer func() { p.End(audit.Outcome{BytesOut: received, Error: text(err)}) }()
	first := &agentpb.TransferRequest{Msg: &agentpb.TransferRequest_Pack{Pack: &agentpb.Pack{Path: src}}}
	if o.Resume {
		first = &agentpb.TransferRequest{Msg: &agentpb.TransferRequest_ResumePack{ResumePack: &agentpb.Pack{Path: src}}}
	}
	t, err := c.transfer(ctx, "copy from "+src, first)
	if err != nil {
		return CopyResult{}, err
	}
	defer t.close()
	to := treetar.Options{
		Limits:    treetar.Limits{Bytes: o.MaxBytes, Entries: o.MaxEntries, Entry: o.EntryBytes},
		KeepLinks: o.KeepLinks, OwnerWrites: o.OwnerWrites, Rename: name, Marker: marker,
	}
	t.received = o.tell(&received)
	var res treetar.Result
	err = t.converse(true, func(rw io.ReadWriter) (err error) {
		if o.Resume {
			res, err = treetar.UnpackResumed(t.ctx, rw, root, to)
		} else {
			res, err = treetar.Unpack(t.ctx, rw, root, to)
		}
		return err
	})
	return copyResult(res), resumeError(o, t.fail(err))
}

// transfer is the host's end of one Transfer stream.
type transfer struct {
	*stream[agentpb.TransferRequest, agentpb.TransferResponse]
	// sent and received, if not nil, get the number of bytes of each data message.
	sent, received func(int64)
}

func (c *Client) transfer(ctx context.Context, op string, first *agentpb.TransferRequest) (*transfer, error) {
	s, err := begin(ctx, c, op, agentpb.AgentClient.Transfer, first)
	if err != nil {
		return nil, err
	}
	return &transfer{stream: s}, nil
}

// converse runs f, which sends data and, if reads, receives data, in one goroutine. It waits until the guest is
// done; what f reads then ends. A slow f slows the guest down.
func (t *transfer) converse(reads bool, f func(io.ReadWriter) error) error {
	// A guest that is done does not read what f still writes.
	writing, stop := context.WithCancel(t.ctx)
	defer stop()
	p := flow.NewPipe(t.ctx, writing, t.send, func(n uint64) error {
		return t.Send(&agentpb.TransferRequest{Msg: &agentpb.TransferRequest_Ack{Ack: n}})
	})
	talked := make(chan error, 1)
	go func() {
		err := f(p)
		if err != nil {
			t.cancel(err) // the guest has only a part: it must not commit, nor wait for more
		}
		talked <- err
	}()
	err := t.await(p, reads)
	cause := context.Cause(t.ctx)
	if err != nil {
		t.cancel(err)
	}
	stop()
	p.End()
	ferr := <-talked
	switch {
	case err == nil && cause == nil && errors.Is(ferr, context.Canceled):
		return fmt.Errorf("%w: done before everything was sent", ErrProtocol)
	case err == nil:
		return ferr
	case cause != nil && errors.Is(err, context.Canceled):
		return cause
	}
	return err
}

// await handles the guest's messages up to the done message.
func (t *transfer) await(p *flow.Pipe, reads bool) error {
	for {
		m, err := t.Recv()
		if err != nil {
			return err
		}
		data, isData := m.Msg.(*agentpb.TransferResponse_Data)
		_, isInfo := m.Msg.(*agentpb.TransferResponse_Info)
		switch ack, isAck := m.Msg.(*agentpb.TransferResponse_Ack); {
		case m.GetDone() != nil:
			return nil
		case isAck:
			err = p.Ack(ack.Ack)
		case isInfo && reads:
		case !isData || !reads:
			err = fmt.Errorf("%w: unexpected message %T", ErrProtocol, m.Msg)
		case len(data.Data) > agentpb.MaxChunk:
			err = fmt.Errorf("%w: %d bytes of data in one message", ErrProtocol, len(data.Data))
		case !p.Put(data.Data):
			err = fmt.Errorf("%w: more than %d data messages unacknowledged", ErrProtocol, agentpb.Window)
		case t.received != nil:
			t.received(int64(len(data.Data)))
		}
		if err != nil {
			return err
		}
	}
}

func (t *transfer) send(data []byte) error {
	err := t.Send(&agentpb.TransferRequest{Msg: &agentpb.TransferRequest_Data{Data: data}})
	if err == nil && t.sent != nil {
		t.sent(int64(len(data)))
	}
	return err
}

// sendEnd tells the guest that all data was sent.
func (t *transfer) sendEnd() error {
	return t.Send(&agentpb.TransferRequest{Msg: &agentpb.TransferRequest_End{End: &agentpb.Empty{}}})
}
