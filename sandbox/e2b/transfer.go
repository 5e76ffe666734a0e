package e2b

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"path"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/e2b/answers"
	"github.com/drowse-vm/drowse/sandbox/e2b/bodies"
)

// answerFile answers a plain request of the protocol with an error.
func (s *Server) answerFile(w http.ResponseWriter, r *http.Request, err error) {
	unread(w, r)
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		envdError(w, r, http.StatusRequestEntityTooLarge, connect.CodeInvalidArgument, "the body is too large")
		return
	}
	err = s.asConnect(r.Context(), r.Pattern, err)
	var c *connect.Error
	errors.As(err, &c)
	status := map[connect.Code]int{
		connect.CodeNotFound: http.StatusNotFound, connect.CodeInvalidArgument: http.StatusBadRequest, connect.CodeUnauthenticated: http.StatusUnauthorized,
		connect.CodePermissionDenied: http.StatusForbidden, connect.CodeAlreadyExists: http.StatusConflict, connect.CodeFailedPrecondition: http.StatusBadRequest,
		connect.CodeResourceExhausted: http.StatusInsufficientStorage, connect.CodeUnavailable: http.StatusBadGateway, connect.CodeDeadlineExceeded: http.StatusGatewayTimeout,
	}[c.Code()]
	if status == 0 {
		status = http.StatusInternalServerError
	}
	envdError(w, r, status, c.Code(), c.Message())
}

func invalid(format string, args ...any) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(format, args...))
}

// content reads a file of a guest, for http.ServeContent: each Seek begins a new read.
type content struct {
	ctx  context.Context
	c    *guest.Client
	name string
	size int64

	at     int64
	pipe   *io.PipeReader
	cancel context.CancelFunc
	done   chan struct{}
}

func (f *content) Read(p []byte) (int, error) {
	if f.pipe == nil {
		if f.at >= f.size {
			return 0, io.EOF
		}
		var w *io.PipeWriter
		f.pipe, w = io.Pipe()
		ctx, cancel := context.WithCancel(f.ctx)
		f.cancel, f.done = cancel, make(chan struct{})
		go func(at int64, done chan struct{}) {
			defer close(done)
			_, err := f.c.ReadFile(ctx, f.name, w, at, f.size-at)
			_ = w.CloseWithError(err)
		}(f.at, f.done)
	}
	n, err := f.pipe.Read(p)
	f.at += int64(n)
	return n, err
}

func (f *content) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += f.at
	case io.SeekEnd:
		offset += f.size
	}
	if offset < 0 {
		return 0, errors.New("a position before the file")
	}
	if offset != f.at {
		f.Close()
	}
	f.at = offset
	return offset, nil
}

func (f *content) Close() {
	if f.pipe != nil {
		_ = f.pipe.Close()
		f.cancel()
		<-f.done
		f.pipe = nil
	}
}

func (s *Server) download(w http.ResponseWriter, r *http.Request) {
	c, name, err := files{s}.at(r.Context(), r.URL.Query().Get("path"))
	if err != nil {
		s.answerFile(w, r, err)
		return
	}
	defer c.Close()
	fi, err := c.Stat(r.Context(), name)
	switch {
	case err != nil:
		s.answerFile(w, r, err)
		return
	case fi.Mode.IsDir():
		s.answerFile(w, r, invalid("%q is a directory", name))
		return
	case !fi.Mode.IsRegular():
		s.answerFile(w, r, invalid("%q is not a regular file", name))
		return
	}
	h := w.Header()
	h.Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": path.Base(name)}))
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Vary", "Accept-Encoding")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	header := r.Header.Values("Accept-Encoding")
	zipped := bodies.Accepts(header, "gzip") && r.Header.Get("Range") == ""
	if !zipped && !bodies.Accepts(header, "identity") {
		envdError(w, r, http.StatusNotAcceptable, connect.CodeInvalidArgument, "no encoding of the answer is acceptable: gzip and identity are there")
		return
	}
	out := bodies.Writer{ResponseWriter: w, S: bodies.Stalling{ResponseController: http.NewResponseController(w)}}
	defer func() { _ = out.S.SetWriteDeadline(time.Time{}) }()
	// Files of /proc have no size, and content.
	if fi.Size == 0 {
		if n, err := c.ReadFile(r.Context(), name, out, 0, 0); err != nil && n == 0 {
			s.answerFile(w, r, err)
		} else if err != nil {
			panic(http.ErrAbortHandler) // the client must see that the file is not whole
		}
		return
	}
	f := &content{ctx: r.Context(), c: c.Client, name: name, size: fi.Size}
	defer f.Close()
	if !zipped {
		http.ServeContent(out, r, "", fi.ModTime, f)
		return
	}
	h.Set("Content-Encoding", "gzip")
	if r.Method == http.MethodHead {
		return
	}
	z, _ := gzip.NewWriterLevel(out, gzip.BestSpeed) // the level is one
	_, err = io.Copy(z, f)
	if err != nil {
		panic(http.ErrAbortHandler) // the client must see that the file is not whole
	}
	_ = z.Close()
}

// written is a file that was uploaded.
type written struct {
	Path     string            `json:"path"`
	Name     string            `json:"name"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// Metadata of files are extended attributes with this prefix.
const metadataPrefix = "user.e2b."

// Bounds of an upload's metadata, in bytes: XATTR_NAME_MAX of Linux for a name, and E2B's for all.
const (
	maxMetadataKey = 255 - len(metadataPrefix)
	maxMetadataAll = 4096
)

// metadataOf returns the attributes that the fields X-Metadata-KEY of a request ask for. Case is lost in names of
// fields: keys are in lower case.
func metadataOf(h http.Header) (*guest.Attributes, error) {
	out, all := &guest.Attributes{Prefix: metadataPrefix, Values: map[string][]byte{}}, 0
	for field, values := range h {
		key, ok := strings.CutPrefix(field, "X-Metadata-")
		if !ok {
			continue
		}
		all += len(key) + len(values[0])
		switch key = strings.ToLower(key); {
		case key == "" || len(key) > maxMetadataKey:
			return nil, invalid("metadata: a key has %d bytes: use 1 to %d", len(key), maxMetadataKey)
		case len(values) > 1:
			return nil, invalid("metadata: %q has two values", key)
		case strings.ContainsFunc(values[0], func(r rune) bool { return r < ' ' || r > '~' }):
			return nil, invalid("metadata: the value of %q is not printable ASCII", key)
		case all > maxMetadataAll:
			return nil, invalid("metadata: use at most %d bytes", maxMetadataAll)
		}
		out.Values[metadataPrefix+key] = []byte(values[0])
	}
	return out, nil
}

// metadata returns what clients have attached to a file, or nil.
func metadata(fi guest.FileInfo) map[string]string {
	var out map[string]string
	for name, value := range fi.Attributes {
		if key, ok := strings.CutPrefix(name, metadataPrefix); ok {
			if out == nil {
				out = map[string]string{}
			}
			out[text(key)] = text(string(value))
		}
	}
	return out
}

// Bounds of uploads.
const (
	maxParts = 1000
)

func (s *Server) upload(w http.ResponseWriter, r *http.Request) {
	out, err := s.receive(w, r)
	if err != nil {
		s.answerFile(w, r, err)
		return
	}
	answers.WriteJSON(w, http.StatusOK, out)
}

func (s *Server) receive(w http.ResponseWriter, r *http.Request) ([]written, error) {
	q := r.URL.Query()
	attributes, err := metadataOf(r.Header)
	if err != nil {
		return nil, err
	}
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return nil, invalid("use multipart/form-data or application/octet-stream")
	}
	body := io.Reader(bodies.Reader{Reader: r.Body, S: bodies.Stalling{ResponseController: http.NewResponseController(w)}})
	switch r.Header.Get("Content-Encoding") {
	case "", "identity":
	case "gzip":
		z, err := gzip.NewReader(body)
		if err != nil {
			return nil, invalid("the body is not gzip")
		}
		defer z.Close()
		body = z
	default:
		return nil, invalid("Content-Encoding: use gzip or none")
	}
	c, err := s.session(r.Context())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if kind == "application/octet-stream" {
		if q.Get("path") == "" {
			return nil, invalid("path is missing")
		}
		f, err := c.put(r.Context(), q.Get("path"), body, attributes)
		return []written{f}, err
	}
	if kind != "multipart/form-data" || params["boundary"] == "" {
		return nil, invalid("use multipart/form-data or application/octet-stream")
	}
	out := []written{}
	for parts := multipart.NewReader(body, params["boundary"]); ; {
		part, err := parts.NextRawPart()
		if errors.Is(err, io.EOF) {
			if len(out) == 0 {
				return nil, invalid("the body has no field named file")
			}
			return out, nil
		}
		if err != nil {
			return nil, invalid("the body is not what its type says")
		}
		if part.FormName() != "file" {
			continue
		}
		if len(out) == maxParts || len(out) > 0 && q.Get("path") != "" {
			return nil, invalid("with path the body has one file, and otherwise at most %d", maxParts)
		}
		// FileName drops directories.
		_, fields, _ := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
		name := q.Get("path")
		if name == "" {
			name = fields["filename"]
		}
		if name == "" {
			return nil, invalid("a file has no name")
		}
		f, err := c.put(r.Context(), name, part, attributes)
		if err != nil {
			return nil, err
		}
		out = append(out, f)
	}
}

// clientReader tells errors of the client's body from those of the guest.
type clientReader struct {
	io.Reader
	err error
}

func (r *clientReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		r.err = err
	}
	return n, err
}

// put writes a file, and missing directories above it, as the user's. The file has only the metadata of this upload.
func (c *session) put(ctx context.Context, means string, r io.Reader, a *guest.Attributes) (written, error) {
	name, err := pathOf(c.user, means)
	if err != nil {
		return written{}, err
	}
	if fi, err := c.Stat(ctx, name); err == nil && fi.Mode.IsDir() {
		return written{}, invalid("%q is a directory", name)
	}
	if err := c.MkdirFor(ctx, path.Dir(name), *c.user.Owner()); err != nil {
		return written{}, notDirectory(err)
	}
	body := &clientReader{Reader: r}
	err = c.WriteFile(ctx, name, body, guest.WriteOptions{Owner: c.user.Owner(), Attributes: a})
	if body.err != nil {
		return written{}, invalid("the body ended before its end")
	}
	out := written{Path: text(name), Name: text(path.Base(name)), Type: "file"}
	if err != nil || len(a.Values) == 0 {
		return out, err
	}
	fi, err := c.Stat(ctx, name)
	if err != nil {
		return written{}, err
	}
	if len(fi.Attributes) == 0 {
		return written{}, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("%q is written without its metadata: the agent in the sandbox is too old for them: use a new sandbox", name))
	}
	out.Metadata = metadata(fi)
	return out, nil
}

// maxSources bounds the files that are joined to one.
const maxSources = 1000

// compose joins files to one, and removes them.
func (s *Server) compose(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Sources     []string `json:"source_paths"`
		Destination string   `json:"destination"`
		Username    string   `json:"username"`
	}
	var api *answers.Error
	if err := answers.Read(w, r, &body); errors.As(err, &api) {
		envdError(w, r, api.Code, connect.CodeInvalidArgument, api.Message)
		return
	}
	ctx := r.Context()
	if body.Username != "" {
		ctx = context.WithValue(ctx, keyUser, body.Username)
	}
	e, err := s.joined(ctx, body.Sources, body.Destination)
	if err != nil {
		s.answerFile(w, r, err)
		return
	}
	answers.WriteJSON(w, http.StatusOK, e)
}

func (s *Server) joined(ctx context.Context, sources []string, destination string) (json.RawMessage, error) {
	if len(sources) == 0 || len(sources) > maxSources || destination == "" {
		return nil, invalid("name 1 to %d source_paths, and the destination", maxSources)
	}
	c, to, err := files{s}.at(ctx, destination)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	names := make([]string, len(sources))
	for i, source := range sources {
		if names[i], err = pathOf(c.user, source); err != nil {
			return nil, err
		}
		fi, err := c.Stat(ctx, names[i])
		if err != nil {
			return nil, err
		}
		if !fi.Mode.IsRegular() {
			return nil, invalid("%q is not a file", names[i])
		}
	}
	if err := c.MkdirFor(ctx, path.Dir(to), *c.user.Owner()); err != nil {
		return nil, notDirectory(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	pr, pw := io.Pipe()
	done := make(chan struct{})
	defer func() {
		cancel()
		_ = pr.Close()
		<-done
	}()
	go func() {
		defer close(done)
		var err error
		for _, name := range names {
			if _, err = c.ReadFile(ctx, name, pw, 0, 0); err != nil {
				break
			}
		}
		_ = pw.CloseWithError(err)
	}()
	// A source may be the destination: it gets its new content at once, in the end.
	if err := c.WriteFile(ctx, to, pr, guest.WriteOptions{Owner: c.user.Owner(), Atomic: true}); err != nil {
		return nil, err
	}
	for _, name := range names {
		if name != to {
			if err := c.Remove(ctx, name, false); err != nil {
				return nil, err
			}
		}
	}
	e, err := c.entry(ctx, to)
	if err != nil {
		return nil, err
	}
	return json.Marshal(map[string]any{
		"name": e.Name, "path": e.Path, "type": "file", "size": e.Size, "mode": e.Mode, "permissions": e.Permissions, "owner": e.Owner, "group": e.Group,
		"modifiedTime": e.ModifiedTime.AsTime(),
	})
}
