package e2b

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/e2b/accounts"
	"github.com/drowse-vm/drowse/sandbox/e2b/e2bpb/filesystem"
)

// files implements filesystem.Filesystem. The agent works with root's rights, as E2B's does; the user of a request
// owns what it makes.
type files struct{ *Server }

// session is a connection to the agent for one request for files.
type session struct {
	*guest.Client
	accounts accounts.Accounts
	user     accounts.Account
}

func (s *Server) session(ctx context.Context) (*session, error) {
	c, err := s.agent(ctx)
	if err != nil {
		return nil, err
	}
	out := &session{Client: c}
	if out.accounts, err = accounts.Read(ctx, c); err == nil {
		out.user, err = findUser(ctx, out.accounts)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return out, nil
}

// at is session with the absolute path that the client means.
func (f files) at(ctx context.Context, means string) (*session, string, error) {
	c, err := f.session(ctx)
	if err != nil {
		return nil, "", err
	}
	name, err := pathOf(c.user, means)
	if err != nil {
		c.Close()
		return nil, "", err
	}
	return c, name, nil
}

// maxLinks bounds the links that are followed: MAXSYMLINKS of Linux.
const maxLinks = 40

// entry describes what has a name.
func (c *session) entry(ctx context.Context, name string) (*filesystem.EntryInfo, error) {
	fi, err := c.Lstat(ctx, name)
	if err != nil {
		return nil, err
	}
	return c.entryOf(ctx, name, fi), nil
}

// entryOf is entry for something that was looked at. Of a link, the type is that of its target.
func (c *session) entryOf(ctx context.Context, name string, fi guest.FileInfo) *filesystem.EntryInfo {
	e := &filesystem.EntryInfo{
		Name: text(path.Base(name)), Path: text(name), Size: fi.Size, Mode: uint32(fi.Mode.Perm()), Permissions: fi.Mode.String(), Type: typeOf(fi.Mode),
		Owner: c.accounts.User(fi.UID), Group: c.accounts.Group(fi.GID), ModifiedTime: timestamppb.New(fi.ModTime),
		Metadata: metadata(fi),
	}
	if fi.Mode&fs.ModeSymlink == 0 {
		return e
	}
	at, to := name, fi
	for range maxLinks {
		if to.Mode&fs.ModeSymlink == 0 {
			break
		}
		if next := to.Link; path.IsAbs(next) {
			at = path.Clean(next)
		} else {
			at = path.Join(path.Dir(at), next)
		}
		target := text(at)
		e.SymlinkTarget = &target
		var err error
		if to, err = c.Lstat(ctx, at); err != nil {
			return e // it leads nowhere
		}
	}
	if to.Mode&fs.ModeSymlink == 0 {
		e.Type, e.Mode = typeOf(to.Mode), uint32(to.Mode.Perm())
	}
	return e
}

func typeOf(m fs.FileMode) filesystem.FileType {
	switch {
	case m.IsDir():
		return filesystem.FileType_FILE_TYPE_DIRECTORY
	case m.IsRegular():
		return filesystem.FileType_FILE_TYPE_FILE
	case m&fs.ModeSymlink != 0:
		return filesystem.FileType_FILE_TYPE_SYMLINK
	}
	return filesystem.FileType_FILE_TYPE_UNSPECIFIED
}

// Stat implements filesystem.FilesystemHandler.
func (f files) Stat(ctx context.Context, m *filesystem.StatRequest) (*filesystem.StatResponse, error) {
	c, name, err := f.at(ctx, m.GetPath())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	e, err := c.entry(ctx, name)
	return &filesystem.StatResponse{Entry: e}, err
}

// MakeDir implements filesystem.FilesystemHandler.
func (f files) MakeDir(ctx context.Context, m *filesystem.MakeDirRequest) (*filesystem.MakeDirResponse, error) {
	c, name, err := f.at(ctx, m.GetPath())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if fi, err := c.Client.Stat(ctx, name); err == nil {
		if fi.Mode.IsDir() {
			return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("the directory %q is there already", name))
		}
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%q is there, and not a directory", name))
	}
	if err := c.MkdirFor(ctx, name, *c.user.Owner()); err != nil {
		return nil, notDirectory(err)
	}
	e, err := c.entry(ctx, name)
	return &filesystem.MakeDirResponse{Entry: e}, err
}

// notDirectory is the error for a path that leads through a file: the agent calls that not found.
func notDirectory(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrExist) {
		return connect.NewError(connect.CodeInvalidArgument, err)
	}
	return err
}

// Move implements filesystem.FilesystemHandler.
func (f files) Move(ctx context.Context, m *filesystem.MoveRequest) (*filesystem.MoveResponse, error) {
	c, from, err := f.at(ctx, m.GetSource())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	to, err := pathOf(c.user, m.GetDestination())
	if err != nil {
		return nil, err
	}
	if _, err := c.Lstat(ctx, from); err != nil {
		return nil, err
	}
	if err := c.MkdirFor(ctx, path.Dir(to), *c.user.Owner()); err != nil {
		return nil, notDirectory(err)
	}
	if err := c.Rename(ctx, from, to); err != nil {
		return nil, err
	}
	e, err := c.entry(ctx, to)
	return &filesystem.MoveResponse{Entry: e}, err
}

// Bounds of a list.
const (
	maxDepth   = 128
	maxEntries = 1 << 16
	maxNames   = 16 << 20 // bytes of paths
	listWait   = 10 * time.Millisecond
)

// ListDir implements filesystem.FilesystemHandler.
func (f files) ListDir(ctx context.Context, m *filesystem.ListDirRequest) (*filesystem.ListDirResponse, error) {
	for {
		if leave, ok := f.enter(boxOf(ctx).Name()+"/list", maxListsOf); ok {
			defer leave()
			break
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-f.life.Done():
			return nil, errServerEnds
		case <-time.After(listWait):
		}
	}
	c, name, err := f.at(ctx, m.GetPath())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	fi, err := c.Client.Stat(ctx, name)
	if err != nil {
		return nil, err
	}
	if !fi.Mode.IsDir() {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%q is not a directory", name))
	}
	out := &filesystem.ListDirResponse{}
	bytes := 0
	var walk func(dir string, depth int) error
	walk = func(dir string, depth int) error {
		all, err := c.ReadDir(ctx, dir)
		if err != nil {
			if dir != name && errors.Is(err, fs.ErrNotExist) {
				return nil // gone meanwhile
			}
			return err
		}
		for _, fi := range all {
			at := path.Join(dir, fi.Name)
			if bytes += len(at); len(out.Entries) == maxEntries || bytes > maxNames {
				return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("more than %d entries, or %d bytes of names, are below %q: list its parts", maxEntries, maxNames, name))
			}
			out.Entries = append(out.Entries, c.entryOf(ctx, at, fi))
			if fi.Mode.IsDir() && depth > 1 {
				if err := walk(at, depth-1); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return out, walk(name, int(min(max(m.GetDepth(), 1), maxDepth)))
}

// Remove implements filesystem.FilesystemHandler.
func (f files) Remove(ctx context.Context, m *filesystem.RemoveRequest) (*filesystem.RemoveResponse, error) {
	c, name, err := f.at(ctx, m.GetPath())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if m.GetPath() == "" || name == "/" {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("name what to remove: the root directory stays"))
	}
	return &filesystem.RemoveResponse{}, c.Client.Remove(ctx, name, true)
}
