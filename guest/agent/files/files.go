package files

import (
	"context"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// Files serves the files of the guest: single ones, streams of them, and watches of changes.
type Files struct {
	settle  func() // called when a request may have changed the hooks
	trim    func() error
	watches watches
}

// New makes a Files. It calls settle after each change, and trim when the disk must discard unused blocks.
func New(settle func(), trim func() error) *Files { return &Files{settle: settle, trim: trim} }

// Close ends all watches.
func (f *Files) Close() { f.watches.close() }

// checkPath refuses paths that do not name a file from the guest's root.
func checkPath(path string) error {
	switch {
	case !filepath.IsAbs(path):
		return status.Errorf(codes.InvalidArgument, "path %q is not absolute", path)
	case len(path) > agentpb.MaxPath:
		return status.Errorf(codes.InvalidArgument, "path of %d bytes, at most %d", len(path), agentpb.MaxPath)
	case strings.IndexByte(path, 0) >= 0:
		return status.Errorf(codes.InvalidArgument, "path %q contains a zero byte", path)
	}
	return nil
}

// statFile describes one file.
func statFile(path string, follow bool) (*agentpb.FileInfo, error) {
	stat := unix.Lstat
	if follow {
		stat = unix.Stat
	}
	var st unix.Stat_t
	err := stat(path, &st)
	if err != nil {
		return nil, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	fi := &agentpb.FileInfo{
		Name: filepath.Base(path), Size: st.Size, Mode: st.Mode, Uid: st.Uid, Gid: st.Gid,
		MtimeNanos: st.Mtim.Nano(),
	}
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		if fi.Link, err = os.Readlink(path); err != nil {
			return nil, err
		}
	}
	if kind := st.Mode & unix.S_IFMT; kind == unix.S_IFREG || kind == unix.S_IFDIR {
		fi.Attributes = attributes(path)
	}
	return fi, nil
}

// Stat implements agentpb.AgentService.
func (f *Files) Stat(_ context.Context, m *agentpb.StatRequest) (*agentpb.FileInfo, error) {
	if err := checkPath(m.Path); err != nil {
		return nil, err
	}
	return statFile(m.Path, m.Follow)
}

// maxDirAnswer bounds the names, link targets and attributes of one ReadDir answer, in bytes, so that the message stays
// within what the host accepts.
const maxDirAnswer = agentpb.MaxMessage / 4

// ReadDir implements agentpb.AgentService.
func (f *Files) ReadDir(_ context.Context, m *agentpb.ReadDirRequest) (*agentpb.ReadDirResponse, error) {
	if err := checkPath(m.Path); err != nil {
		return nil, err
	}
	d, err := os.Open(m.Path)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	sort.Strings(names)
	names = names[sort.Search(len(names), func(i int) bool { return names[i] > m.After }):]
	out := &agentpb.ReadDirResponse{}
	size := 0
	for i, name := range names {
		if i == agentpb.MaxDirEntries || size > maxDirAnswer {
			out.More = true
			break
		}
		fi, err := statFile(filepath.Join(m.Path, name), false)
		if os.IsNotExist(err) {
			// Gone since, but the caller must get past it.
			continue
		}
		if err != nil {
			return nil, err
		}
		size += len(fi.Name) + len(fi.Link)
		for k, v := range fi.Attributes {
			size += len(k) + len(v)
		}
		out.Entries = append(out.Entries, fi)
	}
	return out, nil
}

const defaultDirMode = 0o755

// change checks paths and runs do, which changes them.
func (f *Files) change(do func() error, paths ...string) (*agentpb.Empty, error) {
	defer f.settle()
	for _, p := range paths {
		if err := checkPath(p); err != nil {
			return nil, err
		}
	}
	return &agentpb.Empty{}, do()
}

// Mkdir implements agentpb.AgentService.
func (f *Files) Mkdir(_ context.Context, m *agentpb.MkdirRequest) (*agentpb.Empty, error) {
	mode := os.FileMode(m.Mode & 0o777)
	if mode == 0 {
		mode = defaultDirMode
	}
	return f.change(func() error { return mkdir(filepath.Clean(m.Path), mode, m.Parents, m.Owner) }, m.Path)
}

// mkdir makes a directory for an owner, who owns each directory that is made.
func mkdir(path string, mode os.FileMode, parents bool, owner *agentpb.Owner) error {
	err := os.Mkdir(path, mode)
	if parents && os.IsNotExist(err) && path != "/" {
		if err := mkdir(filepath.Dir(path), mode, true, owner); err != nil {
			return err
		}
		err = os.Mkdir(path, mode)
	}
	if parents && os.IsExist(err) {
		// As os.MkdirAll: a directory that is there is well.
		if st, serr := os.Stat(path); serr == nil && st.IsDir() {
			return nil
		}
		return &os.PathError{Op: "mkdir", Path: path, Err: unix.ENOTDIR}
	}
	if err != nil || owner == nil {
		return err
	}
	return os.Lchown(path, int(owner.Uid), int(owner.Gid))
}

// Remove implements agentpb.AgentService.
func (f *Files) Remove(_ context.Context, m *agentpb.RemoveRequest) (*agentpb.Empty, error) {
	return f.change(func() error {
		switch {
		case !m.Recursive:
			return os.Remove(m.Path)
		case filepath.Clean(m.Path) == "/":
			return status.Error(codes.InvalidArgument, "the root directory is not removed")
		}
		return os.RemoveAll(m.Path)
	}, m.Path)
}

// Rename implements agentpb.AgentService.
func (f *Files) Rename(_ context.Context, m *agentpb.RenameRequest) (*agentpb.Empty, error) {
	return f.change(func() error { return os.Rename(m.From, m.To) }, m.From, m.To)
}

// Symlink implements agentpb.AgentService.
func (f *Files) Symlink(_ context.Context, m *agentpb.SymlinkRequest) (*agentpb.Empty, error) {
	return f.change(func() error {
		if m.Target == "" || len(m.Target) > agentpb.MaxPath || strings.IndexByte(m.Target, 0) >= 0 {
			return status.Errorf(codes.InvalidArgument, "a link cannot point to %q", m.Target)
		}
		return os.Symlink(m.Target, m.Path)
	}, m.Path)
}

// Readlink implements agentpb.AgentService.
func (f *Files) Readlink(_ context.Context, m *agentpb.ReadlinkRequest) (*agentpb.ReadlinkResponse, error) {
	if err := checkPath(m.Path); err != nil {
		return nil, err
	}
	target, err := os.Readlink(m.Path)
	if err != nil {
		return nil, err
	}
	return &agentpb.ReadlinkResponse{Target: target}, nil
}
