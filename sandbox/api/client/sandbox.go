package client

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Sandbox is a handle of a sandbox, as sandbox.Sandbox is in-process. It holds nothing: the sandbox need not exist.
type Sandbox struct {
	c    *Client
	name string
}

// Sandbox returns the handle of the sandbox with that name.
func (c *Client) Sandbox(name string) *Sandbox { return &Sandbox{c, name} }

// Name returns the sandbox's name.
func (b *Sandbox) Name() string { return b.name }

func (b *Sandbox) path(rest string) string { return one(b.name) + rest }

// ask sends a request about the sandbox.
func ask[T any](ctx context.Context, b *Sandbox, op, method, path string, body any) (T, error) {
	return call[T](ctx, b.c, op, b.name, method, b.path(path), body)
}

// tell sends a request about the sandbox that is answered with nothing.
func (b *Sandbox) tell(ctx context.Context, op, method, path string, body any) error {
	return tell(ctx, b.c, op, b.name, method, b.path(path), body)
}

// Processes lists what was started in a running sandbox.
func (b *Sandbox) Processes(ctx context.Context) ([]wire.Process, error) {
	l, err := ask[wire.Processes](ctx, b, "list processes", http.MethodGet, "/processes", nil)
	return l.Processes, err
}

// StartProcess starts a process that goes on by itself: see Attach.
func (b *Sandbox) StartProcess(ctx context.Context, e wire.ExecStart) (wire.Started, error) {
	return ask[wire.Started](ctx, b, "start process", http.MethodPost, "/processes", e)
}

// Signal sends a signal to a process and its group.
func (b *Sandbox) Signal(ctx context.Context, process string, signal int) error {
	return b.tell(ctx, "signal", http.MethodPost, "/processes/"+url.PathEscape(process)+"/signal", wire.Signal{Signal: signal})
}

// RemoveProcess kills a process if it runs, and forgets it.
func (b *Sandbox) RemoveProcess(ctx context.Context, process string) error {
	return b.tell(ctx, "remove process", http.MethodDelete, "/processes/"+url.PathEscape(process), nil)
}

// SetSecret gives a running sandbox a secret, or any sandbox one that comes from a source of the host (From).
func (b *Sandbox) SetSecret(ctx context.Context, s spec.Secret) error {
	if s.From == "" && s.Value == nil {
		s.Value = []byte{}
	}
	m := wire.SetSecret{Value: s.Value, From: s.From, Mode: s.Mode, UID: s.UID, GID: s.GID, Proxy: s.Proxy, Transient: s.Transient}
	return b.tell(ctx, "set secret", http.MethodPut, "/secrets/"+url.PathEscape(s.Name), m)
}

// RemoveSecret takes a secret away.
func (b *Sandbox) RemoveSecret(ctx context.Context, name string) error {
	return b.tell(ctx, "remove secret", http.MethodDelete, "/secrets/"+url.PathEscape(name), nil)
}

// Secrets lists secrets, without values.
func (b *Sandbox) Secrets(ctx context.Context) ([]spec.SecretState, error) {
	l, err := ask[wire.Secrets](ctx, b, "list secrets", http.MethodGet, "/secrets", nil)
	return l.Secrets, err
}

// Gateway says whom the gateway lets in, with the token. Fleet.Update changes both.
func (b *Sandbox) Gateway(ctx context.Context) (wire.GatewayAccess, error) {
	return ask[wire.GatewayAccess](ctx, b, "gateway", http.MethodGet, "/gateway", nil)
}

// SecretSources lists where secrets of the caller's sandboxes may come from.
func (c *Client) SecretSources(ctx context.Context) ([]wire.SecretSource, error) {
	l, err := get[wire.SecretSources](ctx, c, "list secret sources", "", "/v1/secret-sources")
	return l.Sources, err
}

// SetService adds or replaces a service.
func (b *Sandbox) SetService(ctx context.Context, s wire.SetService) (records.Service, error) {
	return ask[records.Service](ctx, b, "set service", http.MethodPut, "/services/"+url.PathEscape(s.Name), s)
}

// RemoveService stops and removes a service.
func (b *Sandbox) RemoveService(ctx context.Context, name string) error {
	return b.tell(ctx, "remove service", http.MethodDelete, "/services/"+url.PathEscape(name), nil)
}

// Services lists services.
func (b *Sandbox) Services(ctx context.Context) ([]records.Service, error) {
	l, err := ask[wire.Services](ctx, b, "list services", http.MethodGet, "/services", nil)
	return l.Services, err
}

// StartService starts a service; with restart, in any case.
func (b *Sandbox) StartService(ctx context.Context, name string, restart bool) (records.Service, error) {
	verb := "start"
	if restart {
		verb = "restart"
	}
	return ask[records.Service](ctx, b, verb+" service", http.MethodPost, "/services/"+url.PathEscape(name)+"/"+verb, nil)
}

// StopService stops a service until it is started or the sandbox boots.
func (b *Sandbox) StopService(ctx context.Context, name string) (records.Service, error) {
	return ask[records.Service](ctx, b, "stop service", http.MethodPost, "/services/"+url.PathEscape(name)+"/stop", nil)
}

// WaitService waits until a service is ready, 10 min at most.
func (b *Sandbox) WaitService(ctx context.Context, name string) (records.Service, error) {
	return ask[records.Service](ctx, b, "wait for service", http.MethodGet, "/services/"+url.PathEscape(name)+"/wait?timeout_seconds=600", nil)
}

// ServiceLog writes the newest output of a service to w, and with follow what comes, until ctx ends.
func (b *Sandbox) ServiceLog(ctx context.Context, name string, w io.Writer, follow bool) error {
	path := "/services/" + url.PathEscape(name) + "/log"
	if follow {
		path += "?follow=1"
	}
	_, err := b.c.download(ctx, "service log", b.name, b.path(path), nil, w)
	return err
}

// AuditOptions say what to read of an audit trail. The zero value is all of it.
type AuditOptions struct {
	Since   time.Time // leaves out what had ended before
	Follow  bool      // goes on with what comes
	Trailer bool      // adds, without Follow, a last object whose field "trailer" has what is known of the trail
}

// Audit calls f for what was done in the sandbox through its agent: an object as `drowse audit -o json` prints.
func (b *Sandbox) Audit(ctx context.Context, o AuditOptions, f func(json.RawMessage) error) error {
	q := url.Values{}
	if !o.Since.IsZero() {
		q.Set("since", o.Since.Format(time.RFC3339Nano))
	}
	for name, set := range map[string]bool{"follow": o.Follow, "trailer": o.Trailer} {
		if set {
			q.Set(name, "1")
		}
	}
	return lines(ctx, b.c, "audit", b.name, b.path("/audit?"+q.Encode()), f)
}

// Diff calls f for each path that differs between the sandbox's disk and its image, and at last with End.
func (b *Sandbox) Diff(ctx context.Context, limit int, f func(wire.Diff) error) error {
	return lines(ctx, b.c, "diff", b.name, b.path("/diff?limit="+strconv.Itoa(limit)), f)
}

// Network says what the network has passed and denied.
func (b *Sandbox) Network(ctx context.Context) (spec.NetworkStats, error) {
	return ask[spec.NetworkStats](ctx, b, "network", http.MethodGet, "/network", nil)
}

// NetworkEvents calls f for the last packets that were denied, and with follow for those that come, until ctx ends.
func (b *Sandbox) NetworkEvents(ctx context.Context, follow bool, f func(spec.NetEvent) error) error {
	path := "/network/events"
	if follow {
		path += "?follow=1"
	}
	return lines(ctx, b.c, "network events", b.name, b.path(path), f)
}

// FollowFlows calls f for flows as they open, end or are denied, until ctx ends.
func (b *Sandbox) FollowFlows(ctx context.Context, f func(netpolicy.FlowRecord) error) error {
	return lines(ctx, b.c, "flows", b.name, b.path("/flows/follow"), f)
}

// Inspect returns the whole record.
func (b *Sandbox) Inspect(ctx context.Context) (json.RawMessage, error) {
	return ask[json.RawMessage](ctx, b, "inspect", http.MethodGet, "/inspect", nil)
}

// Files are the files of a sandbox. Operations on them wake it. Its methods may be called from any goroutine.
type Files struct{ b *Sandbox }

// Files returns the sandbox's files.
func (b *Sandbox) Files() Files { return Files{b} }

func (f Files) download(ctx context.Context, op, path string, header http.Header, w io.Writer) (int64, error) {
	return f.b.c.download(ctx, op, f.b.name, f.b.path(path), header, w)
}

func at(path string, more ...string) string {
	q := url.Values{"path": {path}}
	for i := 0; i+1 < len(more); i += 2 {
		if more[i+1] != "" {
			q.Set(more[i], more[i+1])
		}
	}
	return "?" + q.Encode()
}

// Stat describes a file, or the target of a symbolic link.
func (f Files) Stat(ctx context.Context, path string) (wire.FileInfo, error) {
	return ask[wire.FileInfo](ctx, f.b, "stat file", http.MethodGet, "/files/stat"+at(path), nil)
}

// Lstat describes a file, or a symbolic link itself.
func (f Files) Lstat(ctx context.Context, path string) (wire.FileInfo, error) {
	return ask[wire.FileInfo](ctx, f.b, "stat file", http.MethodGet, "/files/stat"+at(path, "link", "1"), nil)
}

// ReadDir lists a directory.
func (f Files) ReadDir(ctx context.Context, dir string) ([]wire.FileInfo, error) {
	l, err := ask[wire.Directory](ctx, f.b, "list files", http.MethodGet, "/files/list"+at(dir), nil)
	return l.Entries, err
}

// ReadFile writes the content of a file to w. The guest decides how much it sends: bound w.
func (f Files) ReadFile(ctx context.Context, path string, w io.Writer) (int64, error) {
	return f.download(ctx, "read file", "/files"+at(path), nil, w)
}

// ReadPart is ReadFile of length bytes from an offset on, or fewer at the end.
func (f Files) ReadPart(ctx context.Context, path string, w io.Writer, offset, length int64) (int64, error) {
	h := http.Header{"Range": {fmt.Sprintf("bytes=%d-%d", offset, offset+length-1)}}
	return f.download(ctx, "read file", "/files"+at(path), h, w)
}

// WriteOptions say how WriteFile writes. The zero value replaces the file, or makes one with mode 0644.
type WriteOptions struct {
	Mode    string // octal digits
	Parents bool   // make missing directories
	Append  bool
	Create  bool   // only make a new file
	IfMatch string // only replace the file with this FileInfo.ETag
	UID     int
	GID     int
}

// WriteFile writes a file from r, of any length. Its readers see the old file or the whole new one, unless Append.
func (f Files) WriteFile(ctx context.Context, path string, r io.Reader, o WriteOptions) (out wire.FileInfo, err error) {
	h := octets()
	if o.Create {
		h.Set("If-None-Match", "*")
	}
	if o.IfMatch != "" {
		h.Set("If-Match", o.IfMatch)
	}
	word := map[bool]string{true: "1"}
	q := at(path, "mode", o.Mode, "parents", word[o.Parents], "append", word[o.Append])
	if o.UID != 0 || o.GID != 0 {
		q += fmt.Sprintf("&uid=%d&gid=%d", o.UID, o.GID)
	}
	return upload[wire.FileInfo](ctx, f.b.c, "write file", f.b.name, http.MethodPut, f.b.path("/files"+q), h, r)
}

// Mkdir makes a directory; mode is octal digits, and "" is 0755.
func (f Files) Mkdir(ctx context.Context, path, mode string, parents bool) error {
	return f.b.tell(ctx, "make directory", http.MethodPost, "/files/mkdir", wire.Mkdir{Path: path, Mode: mode, Parents: parents})
}

// Remove removes a file, an empty directory, or with recursive a tree.
func (f Files) Remove(ctx context.Context, path string, recursive bool) error {
	return f.b.tell(ctx, "remove file", http.MethodDelete, "/files"+at(path, "recursive", map[bool]string{true: "1"}[recursive]), nil)
}

// Rename moves a file or a tree.
func (f Files) Rename(ctx context.Context, from, to string) error {
	return f.b.tell(ctx, "move file", http.MethodPost, "/files/move", wire.Move{From: from, To: to})
}

// Download writes a file or tree to w as a tar stream. The guest has written it: extract it with care.
func (f Files) Download(ctx context.Context, path string, w io.Writer) (int64, error) {
	return f.download(ctx, "download tree", "/files/tree"+at(path), nil, w)
}

// Upload makes what a tar stream has below a directory, and the directory if it is missing.
func (f Files) Upload(ctx context.Context, dir string, r io.Reader) (int64, error) {
	h := http.Header{"Content-Type": {"application/x-tar"}}
	m, err := upload[wire.Moved](ctx, f.b.c, "upload tree", f.b.name, http.MethodPut, f.b.path("/files/tree"+at(dir)), h, r)
	return m.Bytes, err
}

// WatchOptions say how Watch watches.
type WatchOptions struct {
	Recursive bool // also what is below the paths
	KeepAwake bool // count as use of the sandbox
}

// Watch calls give for changes of files and directories, until ctx ends or give fails. The first event is "ready".
func (f Files) Watch(ctx context.Context, paths []string, o WatchOptions, give func(wire.FileEvent) error) error {
	q := url.Values{"path": paths}
	for name, set := range map[string]bool{"recursive": o.Recursive, "keep_awake": o.KeepAwake} {
		if set {
			q.Set(name, "1")
		}
	}
	return lines(ctx, f.b.c, "watch files", f.b.name, f.b.path("/files/watch?"+q.Encode()), give)
}

// Clone makes a sandbox from a snapshot: sandbox.Host.Clone.
func (c *Client) Clone(ctx context.Context, snapshot string, m wire.Clone) (records.Sandbox, error) {
	return call[records.Sandbox](ctx, c, "clone", m.Name, http.MethodPost, "/v1/snapshots/"+url.PathEscape(snapshot)+"/clone", m)
}

// ExportSnapshot writes a snapshot to w for ImportSnapshot.
func (c *Client) ExportSnapshot(ctx context.Context, snapshot string, w io.Writer) (int64, error) {
	return c.download(ctx, "export snapshot", "", "/v1/snapshots/"+url.PathEscape(snapshot)+"/export", nil, w)
}

// ImportSnapshot makes a snapshot of what ExportSnapshot has written.
func (c *Client) ImportSnapshot(ctx context.Context, r io.Reader) (wire.Imported, error) {
	return upload[wire.Imported](ctx, c, "import snapshot", "", http.MethodPost, "/v1/snapshots/import", octets(), r)
}

// Volumes lists volumes.
func (c *Client) Volumes(ctx context.Context) ([]wire.Volume, error) {
	l, err := get[wire.Volumes](ctx, c, "list volumes", "", "/v1/volumes")
	return l.Volumes, err
}

// Volume says what is known of a volume.
func (c *Client) Volume(ctx context.Context, name string) (wire.Volume, error) {
	return get[wire.Volume](ctx, c, "get volume", "", "/v1/volumes/"+url.PathEscape(name))
}

// CreateVolume makes a volume.
func (c *Client) CreateVolume(ctx context.Context, m wire.MakeVolume) (wire.Volume, error) {
	return call[wire.Volume](ctx, c, "create volume", "", http.MethodPost, "/v1/volumes", m)
}

// ResizeVolume enlarges a volume.
func (c *Client) ResizeVolume(ctx context.Context, name string, sizeMiB int64) (wire.Volume, error) {
	return call[wire.Volume](ctx, c, "resize volume", "", http.MethodPost, "/v1/volumes/"+url.PathEscape(name)+"/resize", wire.ResizeVolume{SizeMiB: sizeMiB})
}

// RemoveVolume removes a volume that no sandbox names.
func (c *Client) RemoveVolume(ctx context.Context, name string) error {
	return tell(ctx, c, "remove volume", "", http.MethodDelete, "/v1/volumes/"+url.PathEscape(name), nil)
}

// Templates lists templates, and those that sandboxes have asked for.
func (c *Client) Templates(ctx context.Context) ([]wire.Template, error) {
	l, err := get[wire.Templates](ctx, c, "list templates", "", "/v1/templates")
	return l.Templates, err
}

// Template returns a template by its key or the beginning of it.
func (c *Client) Template(ctx context.Context, key string) (wire.Template, error) {
	return get[wire.Template](ctx, c, "get template", "", "/v1/templates/"+url.PathEscape(key))
}

// MakeTemplate begins to make a template: see Operation.
func (c *Client) MakeTemplate(ctx context.Context, t wire.TemplateSpec) (wire.Operation, error) {
	return call[wire.Operation](ctx, c, "make template", "", http.MethodPost, "/v1/templates", t)
}

// RemoveTemplate removes a template, by its key or the beginning of it.
func (c *Client) RemoveTemplate(ctx context.Context, key string) error {
	return tell(ctx, c, "remove template", "", http.MethodDelete, "/v1/templates/"+url.PathEscape(key), nil)
}

// PullImage begins to make an image from a registry or of Debian packages: see Operation.
func (c *Client) PullImage(ctx context.Context, m wire.Pull) (wire.Operation, error) {
	return call[wire.Operation](ctx, c, "pull image", "", http.MethodPost, "/v1/images/pull", m)
}

// ImportImage makes an image of a stream; format is docker-archive, oci-archive or tar.
func (c *Client) ImportImage(ctx context.Context, format, tag string, r io.Reader) (wire.Image, error) {
	path := "/v1/images/import?" + url.Values{"format": {format}, "tag": {tag}}.Encode()
	return upload[wire.Image](ctx, c, "import image", "", http.MethodPost, path, octets(), r)
}

// ExportImage writes an image to w; format is erofs, tar or oci-archive.
func (c *Client) ExportImage(ctx context.Context, ref, format string, w io.Writer) (int64, error) {
	return c.download(ctx, "export image", "", "/v1/images/"+url.PathEscape(ref)+"/export?format="+url.QueryEscape(format), nil, w)
}

// RemoveImage removes an image that nothing needs, or one of its tags.
func (c *Client) RemoveImage(ctx context.Context, ref string) (wire.ImageRemoved, error) {
	return call[wire.ImageRemoved](ctx, c, "remove image", "", http.MethodDelete, "/v1/images/"+url.PathEscape(ref), nil)
}

// Operations lists what goes on after its request.
func (c *Client) Operations(ctx context.Context) ([]wire.Operation, error) {
	l, err := get[wire.Operations](ctx, c, "list operations", "", "/v1/operations")
	return l.Operations, err
}

// Operation says how far an operation is.
func (c *Client) Operation(ctx context.Context, id string) (wire.Operation, error) {
	return get[wire.Operation](ctx, c, "get operation", "", "/v1/operations/"+url.PathEscape(id))
}

// CancelOperation cancels an operation.
func (c *Client) CancelOperation(ctx context.Context, id string) (wire.Operation, error) {
	return call[wire.Operation](ctx, c, "cancel operation", "", http.MethodDelete, "/v1/operations/"+url.PathEscape(id), nil)
}
