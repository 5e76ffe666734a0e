// Package client does over HTTP, through a drowse server (package api), what packages sandbox and fleet do
// in-process. Its methods have the same names, arguments and results. Errors are *records.Error with the same
// codes, and wrap the errors of package spec for errors.Is. It builds on all systems, and links no VMM.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// maxAnswer is the most bytes of an answer.
const maxAnswer = 64 << 20

// Client is a client of one server. Its methods may be called from any goroutine. Make it with New or Unix.
type Client struct {
	base  string
	token string
	here  bool
	http  *http.Client
}

// Here returns the client whose requests the server does not pass on to other hosts of its cluster. Its lists have that
// host's sandboxes alone.
func (c *Client) Here() *Client {
	with := *c
	with.here = true
	return &with
}

// New returns a client of the server at a URL, such as "https://host:7300". An empty token is not sent. h sends the
// requests; nil is http.DefaultClient.
func New(base, token string, h *http.Client) *Client {
	if h == nil {
		h = http.DefaultClient
	}
	return &Client{base: strings.TrimSuffix(base, "/"), token: token, http: h}
}

// Unix returns a client of the server at a Unix socket: api.sock in a state directory. Close it when done.
func Unix(path string) *Client {
	t := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}, IdleConnTimeout: time.Minute}
	return &Client{base: "http://drowse", http: &http.Client{Transport: t}}
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// show says in a header who asks, and which host is to answer.
func (c *Client) show(h http.Header) {
	if c.here {
		h.Set(wire.HeaderHere, "1")
	}
	if c.token != "" {
		h.Set("Authorization", "Bearer "+c.token)
	}
}

// Do sends a request and returns its answer, whatever the status. The caller must close its body. path begins with
// a slash. body is sent as JSON; nil sends none.
func (c *Client) Do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	if body == nil {
		return c.send(ctx, method, path, nil, nil)
	}
	text, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	return c.send(ctx, method, path, http.Header{"Content-Type": {"application/json"}}, bytes.NewReader(text))
}

func (c *Client) send(ctx context.Context, method, path string, header http.Header, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, body)
	if err != nil {
		return nil, err
	}
	maps.Copy(req.Header, header)
	c.show(req.Header)
	resp, err := c.http.Do(req)
	var ue *url.Error
	if errors.As(err, &ue) {
		err = fmt.Errorf("asking the server at %s: %w", c.base, ue.Err)
	}
	return resp, err
}

// fail returns the error of an operation for an error on the way to the server or back.
func fail(op, name string, err error) error {
	var have *records.Error
	if err == nil || errors.As(err, &have) {
		return err
	}
	e := &records.Error{Op: op, Sandbox: name, Code: records.CodeOther, Remedy: "see the cause, and whether the server runs", Err: err}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		e.Code, e.Remedy = records.CodeTimeout, "try again with more time: what had begun can be repeated"
	case errors.Is(err, context.Canceled):
		e.Code, e.Remedy = records.CodeCanceled, "try again: what had begun can be repeated"
	}
	return e
}

// call sends a request and returns what is in the answer.
func call[T any](ctx context.Context, c *Client, op, name, method, path string, body any) (out T, err error) {
	_, err = c.ask(ctx, method, path, body, &out)
	return out, fail(op, name, err)
}

// ask also returns the status of the answer.
func (c *Client) ask(ctx context.Context, method, path string, body, out any) (status int, err error) {
	resp, err := c.Do(ctx, method, path, body)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return 0, fmt.Errorf("reading the server's answer: %w", err)
	}
	if len(text) > maxAnswer {
		return 0, fmt.Errorf("the server's answer has more than %d bytes", maxAnswer)
	}
	if resp.StatusCode/100 != 2 && (resp.StatusCode != http.StatusServiceUnavailable || !bytes.HasPrefix(text, []byte(`{"ok"`))) {
		return 0, errorIn(resp, text)
	}
	if raw, ok := out.(*[]byte); ok {
		*raw = text
		return resp.StatusCode, nil
	}
	if err := json.Unmarshal(text, out); err != nil {
		return 0, fmt.Errorf("reading the server's answer: %w", err)
	}
	return resp.StatusCode, nil
}

// errorIn returns the error in an answer.
func errorIn(resp *http.Response, text []byte) error {
	var e wire.ErrorDoc
	if json.Unmarshal(text, &e) != nil || e.Error.Message == "" {
		return fmt.Errorf("the server answered %s: is it drowse that serves there?", resp.Status)
	}
	return e.Error.Err()
}

// tell sends a request that is answered with nothing.
func tell(ctx context.Context, c *Client, op, name, method, path string, body any) error {
	_, err := call[wire.Empty](ctx, c, op, name, method, path, body)
	return err
}

func one(name string) string { return "/v1/sandboxes/" + url.PathEscape(name) }

// act posts a verb to a sandbox.
func act[T any](ctx context.Context, c *Client, verb, name string, body any) (T, error) {
	return call[T](ctx, c, verb, name, http.MethodPost, one(name)+"/"+verb, body)
}

// get reads a part of a sandbox.
func get[T any](ctx context.Context, c *Client, op, name, path string) (T, error) {
	return call[T](ctx, c, op, name, http.MethodGet, path, nil)
}

// Create is sandbox.Host.Create.
func (c *Client) Create(ctx context.Context, r records.Request) (records.Sandbox, error) {
	return call[records.Sandbox](ctx, c, "create", r.Spec.Name, http.MethodPost, "/v1/sandboxes", wire.Create{Spec: r.Spec, Metadata: r.Metadata, Disk: r.Disk, Boot: r.Boot})
}

// GetOrCreate is sandbox.Host.GetOrCreate.
func (c *Client) GetOrCreate(ctx context.Context, r records.Request) (s records.Sandbox, created bool, err error) {
	status, err := c.ask(ctx, http.MethodPost, "/v1/sandboxes", wire.Create{Spec: r.Spec, Metadata: r.Metadata, Disk: r.Disk, Boot: r.Boot, GetOrCreate: true}, &s)
	return s, status == http.StatusCreated, fail("get or create", r.Spec.Name, err)
}

// Get is fleet.Fleet.Get.
func (c *Client) Get(ctx context.Context, name string) (records.Sandbox, error) {
	return get[records.Sandbox](ctx, c, "get", name, one(name))
}

// List is fleet.Fleet.List.
func (c *Client) List(ctx context.Context, f records.Filter) (records.List, error) {
	path := "/v1/sandboxes"
	if q := query(f); len(q) > 0 {
		path += "?" + q.Encode()
	}
	l, err := get[wire.List](ctx, c, "list", "", path)
	return l.List, err
}

// query returns a filter as the query of a list.
func query(f records.Filter) url.Values {
	q := url.Values{}
	set := func(key, value string) {
		if value != "" {
			q.Set(key, value)
		}
	}
	set("owner", f.Owner)
	set("class", string(f.Class))
	set("after", f.After)
	if f.Limit != 0 {
		set("limit", strconv.Itoa(f.Limit))
	}
	for _, t := range f.Tags {
		q.Add("tag", t)
	}
	for _, s := range f.Statuses {
		q.Add("status", string(s))
	}
	return q
}

// Start is sandbox.Sandbox.Start with Awake.
func (c *Client) Start(ctx context.Context, name string) (records.Sandbox, error) {
	return act[records.Sandbox](ctx, c, "start", name, nil)
}

// Wake is sandbox.Sandbox.Wake.
func (c *Client) Wake(ctx context.Context, name string) (records.Sandbox, error) {
	return act[records.Sandbox](ctx, c, "wake", name, nil)
}

// Sleep is sandbox.Sandbox.Sleep.
func (c *Client) Sleep(ctx context.Context, name string, o spec.SleepOptions) (spec.SleepResult, error) {
	return act[spec.SleepResult](ctx, c, "sleep", name, wire.Sleep{Hooks: o.Hooks, Durable: o.Durable})
}

// Migrate is lease.Cluster.Migrate.
func (c *Client) Migrate(ctx context.Context, name string, o spec.MigrateOptions) (spec.MigrateResult, error) {
	return act[spec.MigrateResult](ctx, c, "migrate", name, wire.Migrate{To: o.To, Hooks: o.Hooks})
}

// Stop is sandbox.Sandbox.Stop; the zero value of o allows 30 s.
func (c *Client) Stop(ctx context.Context, name string, o wire.Stop) (records.Sandbox, error) {
	return act[records.Sandbox](ctx, c, "stop", name, o)
}

// Snapshot is sandbox.Sandbox.Snapshot.
func (c *Client) Snapshot(ctx context.Context, name string, o spec.SnapshotOptions) (spec.SleepResult, error) {
	return act[spec.SleepResult](ctx, c, "snapshot", name, wire.Snapshot{Note: o.Note, Hooks: o.Hooks, DiskOnly: o.DiskOnly})
}

// Promote is sandbox.Sandbox.Promote.
func (c *Client) Promote(ctx context.Context, name string) ([]spec.Promoted, error) {
	p, err := act[wire.Promoted](ctx, c, "promote", name, nil)
	return p.Promoted, err
}

// Restore is sandbox.Sandbox.Rewind.
func (c *Client) Restore(ctx context.Context, name, snapshot string) (records.Sandbox, error) {
	return act[records.Sandbox](ctx, c, "restore", name, wire.Restore{Snapshot: snapshot})
}

// Fork is fleet.Fleet.Fork.
func (c *Client) Fork(ctx context.Context, name string, children []records.Child) ([]records.Sandbox, error) {
	b := wire.Fork{Children: []wire.Child{}}
	for _, child := range children {
		b.Children = append(b.Children, wire.Child{Name: child.Name, Tags: child.Tags})
	}
	made, err := act[wire.Forked](ctx, c, "fork", name, b)
	return made.Sandboxes, err
}

// Rename is state.Store.Rename.
func (c *Client) Rename(ctx context.Context, name, to string) (records.Sandbox, error) {
	return act[records.Sandbox](ctx, c, "rename", name, wire.Rename{To: to})
}

// Extend is fleet.Fleet.Extend.
func (c *Client) Extend(ctx context.Context, name string, until time.Time) (records.Sandbox, error) {
	return act[records.Sandbox](ctx, c, "extend", name, wire.Extend{Until: until})
}

// Exec runs a command, and wakes the sandbox first if it sleeps. A command that fails is not an error.
func (c *Client) Exec(ctx context.Context, name string, e wire.Exec) (wire.Executed, error) {
	return act[wire.Executed](ctx, c, "exec", name, e)
}

// Update is fleet.Fleet.Update.
func (c *Client) Update(ctx context.Context, name string, ch records.Changes) (records.Sandbox, error) {
	return call[records.Sandbox](ctx, c, "update", name, http.MethodPatch, one(name), wire.ChangesOf(ch))
}

// Delete is sandbox.Sandbox.Delete with Force. A missing sandbox is not an error.
func (c *Client) Delete(ctx context.Context, name string) (spec.Freed, error) {
	return call[spec.Freed](ctx, c, "delete", name, http.MethodDelete, one(name), nil)
}

// History is fleet.Fleet.History.
func (c *Client) History(ctx context.Context, name string, span records.Span) (records.History, error) {
	q := url.Values{}
	if span.Limit != 0 {
		q.Set("limit", strconv.Itoa(span.Limit))
	}
	if !span.Before.IsZero() {
		q.Set("before", span.Before.Format(time.RFC3339Nano))
	}
	h, err := get[wire.History](ctx, c, "history", name, one(name)+"/history?"+q.Encode())
	return h.History, err
}

// Stats is sandbox.Sandbox.Stats.
func (c *Client) Stats(ctx context.Context, name string) (spec.Stats, error) {
	return get[spec.Stats](ctx, c, "stats", name, one(name)+"/stats")
}

// Policy is sandbox.Sandbox.Policy.
func (c *Client) Policy(ctx context.Context, name string) (*netpolicy.Policy, error) {
	return get[*netpolicy.Policy](ctx, c, "policy", name, one(name)+"/policy")
}

// SetPolicy is sandbox.Sandbox.SetPolicy.
func (c *Client) SetPolicy(ctx context.Context, name string, p *netpolicy.Policy) (spec.PolicyResult, error) {
	return call[spec.PolicyResult](ctx, c, "set policy", name, http.MethodPut, one(name)+"/policy", p)
}

// Flows returns the open flows of a running sandbox, and the latest that ended or were denied.
func (c *Client) Flows(ctx context.Context, name string) (wire.Flows, error) {
	return get[wire.Flows](ctx, c, "flows", name, one(name)+"/flows")
}

// Console returns the end of a sandbox's serial output: at most n bytes.
func (c *Client) Console(ctx context.Context, name string, n int) ([]byte, error) {
	return get[[]byte](ctx, c, "console", name, one(name)+"/console?tail="+strconv.Itoa(n))
}

// FollowConsole writes the last n bytes of a sandbox's serial output to w, and what comes, until it stops or ctx ends.
func (c *Client) FollowConsole(ctx context.Context, name string, n int, w io.Writer) error {
	_, err := c.download(ctx, "console", name, one(name)+"/console?follow=1&tail="+strconv.Itoa(n), nil, w)
	return err
}

// Events calls f for each event, as a JSON object: docs/guides/events.md. q is the query of GET /v1/events.
func (c *Client) Events(ctx context.Context, q url.Values, f func(json.RawMessage) error) error {
	return lines(ctx, c, "events", "", "/v1/events?"+q.Encode(), f)
}

// Snapshots lists the snapshots of a sandbox, or all snapshots if the name is empty.
func (c *Client) Snapshots(ctx context.Context, name string) ([]spec.SnapshotInfo, error) {
	path := "/v1/snapshots"
	if name != "" {
		path = one(name) + "/snapshots"
	}
	l, err := get[wire.Snapshots](ctx, c, "list snapshots", name, path)
	return l.Snapshots, err
}

// SnapshotInfo says what is known of a snapshot.
func (c *Client) SnapshotInfo(ctx context.Context, snapshot string) (spec.SnapshotInfo, error) {
	return get[spec.SnapshotInfo](ctx, c, "get snapshot", "", "/v1/snapshots/"+url.PathEscape(snapshot))
}

// TagSnapshot is state.Store.TagSnapshot.
func (c *Client) TagSnapshot(ctx context.Context, snapshot string, tags []string) (spec.SnapshotInfo, error) {
	if tags == nil {
		tags = []string{}
	}
	return call[spec.SnapshotInfo](ctx, c, "tag snapshot", "", http.MethodPost, "/v1/snapshots/"+url.PathEscape(snapshot)+"/tags", wire.Tags{Tags: tags})
}

// RemoveSnapshot is state.Store.RemoveSnapshot.
func (c *Client) RemoveSnapshot(ctx context.Context, snapshot string) error {
	return tell(ctx, c, "remove snapshot", "", http.MethodDelete, "/v1/snapshots/"+url.PathEscape(snapshot), nil)
}

// Images lists images.
func (c *Client) Images(ctx context.Context) (wire.Images, error) {
	return get[wire.Images](ctx, c, "list images", "", "/v1/images")
}

// ImageRecords lists images with their whole records, as `drowse image ls -o json`.
func (c *Client) ImageRecords(ctx context.Context) (records []json.RawMessage, problems []string, err error) {
	type list struct {
		Images   []json.RawMessage `json:"images"`
		Problems []string          `json:"problems"`
	}
	l, err := get[list](ctx, c, "list images", "", "/v1/images")
	return l.Images, l.Problems, err
}

// ImageRecord returns the whole record of an image, by a tag, its id or the beginning of that.
func (c *Client) ImageRecord(ctx context.Context, ref string) (json.RawMessage, error) {
	return get[json.RawMessage](ctx, c, "get image", "", "/v1/images/"+url.PathEscape(ref))
}

// Prune is fleet.Fleet.Prune.
func (c *Client) Prune(ctx context.Context, dryRun bool) (records.Pruned, error) {
	return call[records.Pruned](ctx, c, "prune", "", http.MethodPost, "/v1/prune", wire.Prune{DryRun: dryRun})
}

// Version returns the server's version.
func (c *Client) Version(ctx context.Context) (wire.Is, error) {
	return get[wire.Is](ctx, c, "version", "", "/v1/version")
}

// Ready is GET /readyz. A failed check is not an error.
func (c *Client) Ready(ctx context.Context) (wire.Health, error) {
	return get[wire.Health](ctx, c, "health", "", "/readyz")
}
