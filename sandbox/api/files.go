package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// filePath returns the path that a request names: absolute, without zero bytes.
func (r *request) filePath() (string, error) {
	return checkPath("path", r.URL.Query().Get("path"))
}

func checkPath(key, p string) (string, error) {
	const longest = 4096 // PATH_MAX
	if !path.IsAbs(p) || strings.ContainsRune(p, 0) || len(p) > longest {
		return "", spec.InField(key, fmt.Errorf("%w: %s %.64q: name an absolute path of the sandbox, of %d bytes at most", sandbox.ErrSpec, key, p, longest))
	}
	return p, nil
}

// flag returns a parameter that is 1 or 0.
func (r *request) flag(name string) (bool, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return false, nil
	}
	is, err := strconv.ParseBool(text)
	if err != nil {
		return false, spec.InField(name, fmt.Errorf("%w: %s=%.64q: use 1 or 0", sandbox.ErrSpec, name, text))
	}
	return is, nil
}

// modeOf reads octal permissions; empty is 0.
func modeOf(text string) (fs.FileMode, error) {
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(text, 8, 32)
	if err != nil || n == 0 || n > 0o777 {
		return 0, spec.InField("mode", fmt.Errorf("%w: mode %.64q: use octal digits from 0001 to 0777", sandbox.ErrSpec, text))
	}
	return fs.FileMode(n), nil
}

func kindOfFile(m fs.FileMode) string {
	switch m.Type() {
	case 0:
		return "file"
	case fs.ModeDir:
		return "dir"
	case fs.ModeSymlink:
		return "symlink"
	case fs.ModeNamedPipe:
		return "fifo"
	case fs.ModeSocket:
		return "socket"
	case fs.ModeDevice:
		return "block"
	case fs.ModeDevice | fs.ModeCharDevice:
		return "char"
	}
	return "other"
}

// octalMode returns the permissions, with setuid, setgid and sticky where chmod(1) has them.
func octalMode(m fs.FileMode) string {
	n := uint32(m.Perm())
	for i, b := range []fs.FileMode{fs.ModeSticky, fs.ModeSetgid, fs.ModeSetuid} {
		if m&b != 0 {
			n |= 0o1000 << i
		}
	}
	return fmt.Sprintf("%04o", n)
}

// etagOf returns the version of a file's content.
func etagOf(f guest.FileInfo) string {
	if !f.Mode.IsRegular() {
		return ""
	}
	return fmt.Sprintf(`"%x-%x"`, f.Size, uint64(f.ModTime.UnixNano()))
}

func infoOf(f guest.FileInfo) wire.FileInfo {
	return wire.FileInfo{
		Name: strings.ToValidUTF8(f.Name, "\uFFFD"), Kind: kindOfFile(f.Mode), Size: f.Size, Mode: octalMode(f.Mode), UID: f.UID, GID: f.GID,
		Modified: inYears(f.ModTime), Link: strings.ToValidUTF8(f.Link, "\uFFFD"), ETag: etagOf(f),
	}
}

// inYears returns a guest's time as JSON can have it.
func inYears(t time.Time) time.Time {
	const last = 9999
	t = t.UTC()
	if t.Year() < 0 || t.Year() > last {
		return time.Unix(0, 0).UTC()
	}
	return t
}

// onFiles returns the serve function of a route that works on the files of a sandbox, which it wakes.
func onFiles[T any](do func(ctx context.Context, c *guest.Client, r *request) (T, error)) func(*Server, *request) (int, any, error) {
	return func(_ *Server, r *request) (int, any, error) {
		c, err := r.agentOf(r.Context())
		if err != nil {
			return 0, nil, err
		}
		defer c.Close()
		out, err := do(r.Context(), c, r)
		return ok(out, err)
	}
}

// precondition is the error of a request whose condition does not hold.
func precondition(format string, args ...any) error {
	return own(wire.CodePrecondition, "read it again, and decide anew", format, args...)
}

// matches reports whether a header of entity tags names one: RFC 9110, section 13.1.
func matches(header, etag string) bool {
	if strings.TrimSpace(header) == "*" {
		return etag != ""
	}
	for one := range strings.SplitSeq(header, ",") {
		if etag != "" && strings.TrimPrefix(strings.TrimSpace(one), "W/") == etag {
			return true
		}
	}
	return false
}

// readFile answers with the content of a file, or a part of it.
func readFile(_ *Server, r *request) (int, any, error) {
	name, err := r.filePath()
	if err != nil {
		return 0, nil, err
	}
	c, err := r.agentOf(r.Context())
	if err != nil {
		return 0, nil, err
	}
	fi, err := c.Stat(r.Context(), name)
	if err == nil && !fi.Mode.IsRegular() && kindOfFile(fi.Mode) != "char" {
		err = fmt.Errorf("%w: %.64q is no file: it is a %s", sandbox.ErrSpec, name, kindOfFile(fi.Mode))
	}
	h, status, etag := r.w.Header(), http.StatusOK, etagOf(fi)
	var from, length int64
	if err == nil {
		h.Set("ETag", etag)
		h.Set("Last-Modified", fi.ModTime.UTC().Format(http.TimeFormat))
		h.Set("Accept-Ranges", "bytes")
		if m := r.Header.Get("If-None-Match"); m != "" && matches(m, etag) {
			return http.StatusNotModified, nothing{}, c.Close()
		}
		text := r.Header.Get("Range")
		if cond := r.Header.Get("If-Range"); cond != "" && cond != etag {
			text = ""
		}
		from, length, status, err = rangeOf(text, fi.Size)
	}
	if err != nil {
		return 0, nil, errors.Join(err, c.Close())
	}
	if status == http.StatusPartialContent {
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, from+length-1, fi.Size))
	}
	// Files of proc(5) say that they are empty, and are not.
	if fi.Mode.IsRegular() && fi.Size > 0 {
		h.Set("Content-Length", strconv.FormatInt(length, 10))
	}
	head := r.Method == http.MethodHead
	return status, &streamed{kind: "application/octet-stream", write: func(w io.Writer) error {
		defer c.Close()
		if head {
			return nil
		}
		n, err := c.ReadFile(r.Context(), name, w, from, length)
		if err == nil && length > 0 && n < length {
			err = fmt.Errorf("%.64q has become shorter", name)
		}
		return err
	}}, nil
}

// rangeOf reads a Range of one part (RFC 9110, section 14). Others are answered with the whole. length 0 is up to
// the end.
func rangeOf(header string, size int64) (from, length int64, status int, err error) {
	spec, ok := strings.CutPrefix(header, "bytes=")
	first, last, dash := strings.Cut(strings.TrimSpace(spec), "-")
	if !ok || !dash || strings.Contains(spec, ",") {
		return 0, size, http.StatusOK, nil
	}
	a, aerr := strconv.ParseUint(first, 10, 63)
	b, berr := strconv.ParseUint(last, 10, 63)
	switch {
	case first == "" && berr == nil && b > 0 && size > 0: // the last b bytes
		from = max(0, size-int64(min(b, 1<<62)))
		return from, size - from, http.StatusPartialContent, nil
	case aerr != nil || last != "" && (berr != nil || b < a):
		return 0, size, http.StatusOK, nil // invalid: ignored
	case int64(a) >= size:
		return 0, 0, 0, own(wire.CodeRange, "ask for a part that is there", "the file has %d bytes", size)
	}
	end := size - 1
	if last != "" {
		end = min(end, int64(b))
	}
	return int64(a), end - int64(a) + 1, http.StatusPartialContent, nil
}

// writeFile replaces a file, or makes one.
func writeFile(ctx context.Context, c *guest.Client, r *request) (out wire.FileInfo, err error) {
	name, err := r.filePath()
	if err != nil {
		return out, err
	}
	q := r.URL.Query()
	o := guest.WriteOptions{Atomic: true}
	if o.Perm, err = modeOf(q.Get("mode")); err != nil {
		return out, err
	}
	if o.Parents, err = r.flag("parents"); err != nil {
		return out, err
	}
	if o.Append, err = r.flag("append"); err != nil {
		return out, err
	}
	o.Atomic = !o.Append
	if o.Owner, err = r.ownerOfFile(); err != nil {
		return out, err
	}
	if none, match := r.Header.Get("If-None-Match"), r.Header.Get("If-Match"); none != "" || match != "" {
		fi, err := c.Stat(ctx, name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			if match != "" {
				return out, precondition("%.64q is not there", name)
			}
		case err != nil:
			return out, err
		case none == "*" || none != "" && matches(none, etagOf(fi)):
			return out, precondition("%.64q is there already", name)
		case match != "" && !matches(match, etagOf(fi)):
			return out, precondition("%.64q is another version: %s", name, etagOf(fi))
		}
	}
	if err := c.WriteFile(ctx, name, r.upload(), o); err != nil {
		return out, err
	}
	fi, err := c.Stat(ctx, name)
	if err != nil {
		return out, err
	}
	r.w.Header().Set("ETag", etagOf(fi))
	return infoOf(fi), nil
}

// ownerOfFile reads the parameters uid and gid.
func (r *request) ownerOfFile() (*guest.Owner, error) {
	q := r.URL.Query()
	if !q.Has("uid") && !q.Has("gid") {
		return nil, nil
	}
	const most = 1<<32 - 2
	uid, err := r.number("uid", 0, 0, most)
	gid, gerr := r.number("gid", 0, 0, most)
	return &guest.Owner{UID: int(uid), GID: int(gid)}, errors.Join(err, gerr)
}

// packTree answers with a file or tree as a tar stream.
func packTree(_ *Server, r *request) (int, any, error) {
	name, err := r.filePath()
	if err != nil {
		return 0, nil, err
	}
	c, err := r.agentOf(r.Context())
	if err != nil {
		return 0, nil, err
	}
	if _, err := c.Lstat(r.Context(), name); err != nil {
		return 0, nil, errors.Join(err, c.Close())
	}
	return http.StatusOK, &streamed{kind: "application/x-tar", write: func(w io.Writer) error {
		defer c.Close()
		_, err := c.PackTree(r.Context(), name, w)
		return err
	}}, nil
}

// unpackTree makes what a tar stream has.
func unpackTree(ctx context.Context, c *guest.Client, r *request) (out wire.Moved, err error) {
	name, err := r.filePath()
	if err != nil {
		return out, err
	}
	const entries = 1 << 22
	o := guest.CopyOptions{MaxBytes: 1 << 50, MaxEntries: entries} // its disk is the bound
	if o.Owner, err = r.ownerOfFile(); err != nil {
		return out, err
	}
	out.Bytes, err = c.UnpackTree(ctx, name, r.upload(), o)
	return out, err
}

// watchFiles answers with changes of files, a line each, until the client goes or the sandbox ends.
func watchFiles(s *Server, r *request) (int, any, error) {
	q := r.URL.Query()["path"]
	if len(q) == 0 || len(q) > maxPaths {
		return 0, nil, spec.InField("path", fmt.Errorf("%w: %d paths: give 1 to %d, each as path=", sandbox.ErrSpec, len(q), maxPaths))
	}
	for _, p := range q {
		if _, err := checkPath("path", p); err != nil {
			return 0, nil, err
		}
	}
	o := sandbox.WatchOptions{Paths: q}
	var err error
	if o.Recursive, err = r.flag("recursive"); err == nil {
		o.Use, err = r.flag("keep_awake")
	}
	if err != nil {
		return 0, nil, err
	}
	c, err := r.agentOf(r.Context()) // it wakes once
	if err != nil {
		return 0, nil, err
	}
	if err := c.Close(); err != nil {
		return 0, nil, err
	}
	return s.follow(r, func(ctx context.Context, give func(any) error) error {
		begun := false
		o.Ready = func() {
			if !begun {
				begun = true
				_ = give(wire.FileEvent{Time: time.Now().UTC(), Event: "ready"}) // an error shows again
			}
		}
		return s.o.Host.Sandbox(r.name()).Watch(ctx, o, func(e guest.WatchEvent) error {
			return give(wire.FileEvent{
				Time: inYears(e.Time), Event: e.Kind, Path: strings.ToValidUTF8(e.Path, "\uFFFD"), From: strings.ToValidUTF8(e.From, "\uFFFD"),
				Dir: e.Dir, Problem: e.Problem,
			})
		})
	})
}

// fileRoutes returns the routes of files. They wake a sandbox that sleeps.
func fileRoutes() []route {
	at := param{name: "path", says: "an absolute path of the sandbox", required: true}
	owner := []param{{name: "uid", says: "owner of what is made; root by default", integer: true}, {name: "gid", says: "group of what is made", integer: true}}
	const base = onOne + "/files"
	return []route{
		{
			method: http.MethodGet, path: base, scope: ScopeFiles, op: "read file", says: "Give the content of a file, or with Range a part of it.",
			kind: "application/octet-stream", partial: true, query: []param{at}, room: roomTransfers, noLimit: true, serve: readFile,
			headers: []param{{name: "Range", says: "bytes=FIRST-LAST, one part"}, {name: "If-None-Match", says: "answer 304 if the file has this ETag"}, {name: "If-Range", says: "an ETag with which Range counts"}},
		},
		{
			method: http.MethodPut, path: base, scope: ScopeFiles, op: "write file", says: "Write a file. It is replaced when all has arrived, unless it is appended to.",
			takesKind: "application/octet-stream", gives: wire.FileInfo{}, room: roomTransfers, noLimit: true, serve: onFiles(writeFile),
			query:   append([]param{at, {name: "mode", says: "octal permissions of a new file; 0644 by default"}, {name: "parents", says: "1 makes missing directories"}, {name: "append", says: "1 writes at the end"}}, owner...),
			headers: []param{{name: "If-None-Match", says: "* only makes a new file"}, {name: "If-Match", says: "only replaces the file with this ETag"}},
		},
		{
			method: http.MethodDelete, path: base, scope: ScopeFiles, op: "remove file", says: "Remove a file, an empty directory, or a tree.", gives: wire.Empty{},
			query: []param{at, {name: "recursive", says: "1 removes a tree"}}, serve: onFiles(func(ctx context.Context, c *guest.Client, r *request) (wire.Empty, error) {
				name, err := r.filePath()
				all, ferr := r.flag("recursive")
				if err := errors.Join(err, ferr); err != nil {
					return wire.Empty{}, err
				}
				return wire.Empty{}, c.Remove(ctx, name, all)
			}),
		},
		{
			method: http.MethodGet, path: base + "/stat", scope: ScopeFiles, op: "stat file", says: "Describe a file.", gives: wire.FileInfo{},
			query: []param{at, {name: "link", says: "1 describes a symbolic link itself"}}, serve: onFiles(func(ctx context.Context, c *guest.Client, r *request) (wire.FileInfo, error) {
				name, err := r.filePath()
				link, ferr := r.flag("link")
				if err := errors.Join(err, ferr); err != nil {
					return wire.FileInfo{}, err
				}
				stat := c.Stat
				if link {
					stat = c.Lstat
				}
				fi, err := stat(ctx, name)
				if err != nil {
					return wire.FileInfo{}, err
				}
				return infoOf(fi), nil
			}),
		},
		{
			method: http.MethodGet, path: base + "/list", scope: ScopeFiles, op: "list files", says: "List a directory of 65536 entries at most, by name.", gives: wire.Directory{},
			query: []param{at}, serve: onFiles(func(ctx context.Context, c *guest.Client, r *request) (out wire.Directory, err error) {
				name, err := r.filePath()
				if err != nil {
					return out, err
				}
				list, err := c.ReadDir(ctx, name)
				out.Entries = make([]wire.FileInfo, len(list))
				for i, f := range list {
					out.Entries[i] = infoOf(f)
				}
				return out, err
			}),
		},
		{
			method: http.MethodPost, path: base + "/mkdir", scope: ScopeFiles, op: "make directory", says: "Make a directory.", takes: wire.Mkdir{}, needsBody: true, gives: wire.Empty{},
			serve: onFiles(func(ctx context.Context, c *guest.Client, r *request) (wire.Empty, error) {
				m := r.body.(*wire.Mkdir)
				name, err := checkPath("path", m.Path)
				mode, merr := modeOf(m.Mode)
				if err := errors.Join(err, merr); err != nil {
					return wire.Empty{}, err
				}
				return wire.Empty{}, c.Mkdir(ctx, name, mode, m.Parents)
			}),
		},
		{
			method: http.MethodPost, path: base + "/move", scope: ScopeFiles, op: "move file", says: "Move a file or a tree, as rename(2).", takes: wire.Move{}, needsBody: true, gives: wire.Empty{},
			serve: onFiles(func(ctx context.Context, c *guest.Client, r *request) (wire.Empty, error) {
				m := r.body.(*wire.Move)
				from, err := checkPath("from", m.From)
				to, terr := checkPath("to", m.To)
				if err := errors.Join(err, terr); err != nil {
					return wire.Empty{}, err
				}
				return wire.Empty{}, c.Rename(ctx, from, to)
			}),
		},
		{
			method: http.MethodGet, path: base + "/tree", scope: ScopeFiles, op: "download tree", says: "Give a file or tree as a tar stream, whose names begin with the last element of the path. The sandbox has written it: extract it with care.",
			kind: "application/x-tar", query: []param{at}, room: roomTransfers, noLimit: true, serve: packTree,
		},
		{
			method: http.MethodPut, path: base + "/tree", scope: ScopeFiles, op: "upload tree", says: "Make what a tar stream has below a directory, and the directory. After an error a part is there.",
			takesKind: "application/x-tar", gives: wire.Moved{}, query: append([]param{at}, owner...), room: roomTransfers, noLimit: true, serve: onFiles(unpackTree),
		},
		{
			method: http.MethodGet, path: base + "/watch", scope: ScopeFiles, op: "watch files", says: "Tell of changes of files as they happen, through sleeps, which watching does not prevent.",
			lines: wire.FileEvent{}, room: roomStreams, noLimit: true, serve: watchFiles,
			query: []param{{name: "path", says: "an absolute path; may be given up to 64 times", many: true, required: true}, {name: "recursive", says: "1 includes what is below directories"}, {name: "keep_awake", says: "1 keeps the sandbox awake"}},
		},
	}
}
