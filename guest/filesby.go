package guest

import (
	"context"
	"errors"
	"io"
	"io/fs"
)

// Files gives access to a guest's files over a new connection for each call: see the methods of Client with the same
// names. Its methods may be called from any goroutine.
type Files struct {
	connect func(ctx context.Context) (*Client, error)
}

// FilesBy returns the files of the guest that connect connects to.
func FilesBy(connect func(ctx context.Context) (*Client, error)) Files { return Files{connect} }

// do calls do with a new client, and closes the client.
func (f Files) do(ctx context.Context, do func(*Client) error) error {
	c, err := f.connect(ctx)
	if err != nil {
		return err
	}
	return errors.Join(do(c), c.Close())
}

// Stat describes a file, or the target of a symbolic link.
func (f Files) Stat(ctx context.Context, path string) (fi FileInfo, err error) {
	err = f.do(ctx, func(c *Client) error { fi, err = c.Stat(ctx, path); return err })
	return fi, err
}

// ReadDir lists a directory.
func (f Files) ReadDir(ctx context.Context, dir string) (list []FileInfo, err error) {
	err = f.do(ctx, func(c *Client) error { list, err = c.ReadDir(ctx, dir); return err })
	return list, err
}

// ReadFile writes the content of a file to w. The guest decides how much it sends: bound w.
func (f Files) ReadFile(ctx context.Context, path string, w io.Writer) (n int64, err error) {
	err = f.do(ctx, func(c *Client) error { n, err = c.ReadFile(ctx, path, w, 0, 0); return err })
	return n, err
}

// WriteFile writes a file.
func (f Files) WriteFile(ctx context.Context, path string, r io.Reader, o WriteOptions) error {
	return f.do(ctx, func(c *Client) error { return c.WriteFile(ctx, path, r, o) })
}

// Mkdir makes a directory.
func (f Files) Mkdir(ctx context.Context, path string, perm fs.FileMode, parents bool) error {
	return f.do(ctx, func(c *Client) error { return c.Mkdir(ctx, path, perm, parents) })
}

// Remove removes a file, or a tree.
func (f Files) Remove(ctx context.Context, path string, recursive bool) error {
	return f.do(ctx, func(c *Client) error { return c.Remove(ctx, path, recursive) })
}

// Rename moves a file or a tree.
func (f Files) Rename(ctx context.Context, from, to string) error {
	return f.do(ctx, func(c *Client) error { return c.Rename(ctx, from, to) })
}

// CopyIn copies a tree of the host into the guest.
func (f Files) CopyIn(ctx context.Context, src, dst string, o CopyOptions) (out CopyResult, err error) {
	err = f.do(ctx, func(c *Client) error { out, err = c.CopyIn(ctx, src, dst, o); return err })
	return out, err
}

// CopyOut copies a tree of the guest to the host.
func (f Files) CopyOut(ctx context.Context, src, dst string, o CopyOptions) (out CopyResult, err error) {
	err = f.do(ctx, func(c *Client) error { out, err = c.CopyOut(ctx, src, dst, o); return err })
	return out, err
}
