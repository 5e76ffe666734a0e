package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// farHost is a server. All that it says is a stranger's: texts go through a screen or said, and lists have bounds.
type farHost struct {
	a *app
	*client.Client
	server *server
	listed int // bytes of lists so far
}

// place returns where the VMs are.
func (a *app) place() (place, error) {
	s, err := a.server()
	if err != nil {
		return nil, err
	}
	if s == nil {
		return a.local()
	}
	if a.far == nil {
		a.far = &farHost{a: a, Client: s.client(), server: s}
	}
	return a.far, nil
}

// client returns a client that sends the token to the server alone.
func (s *server) client() *client.Client {
	if s.url.Scheme == "unix" {
		return client.Unix(s.url.Path)
	}
	t := http.DefaultTransport.(*http.Transport).Clone() //nolint:forcetypeassert // net/http documents the type
	t.DisableCompression = true                          // bounds count what arrives
	if s.ClientCert != "" {
		if t.TLSClientConfig == nil {
			t.TLSClientConfig = &tls.Config{}
		}
		t.TLSClientConfig.GetClientCertificate = s.certificate
	}
	var by http.RoundTripper = t
	if s.TokenFile != "" {
		by = withToken{t, s.credentials}
	}
	return client.New(s.url.String(), s.token, &http.Client{Transport: by, CheckRedirect: s.redirected})
}

// maxRedirects bounds redirects within a server.
const maxRedirects = 5

// redirected refuses redirects that leave the server: neither the token nor a request's body is for another one.
func (s *server) redirected(to *http.Request, via []*http.Request) error {
	if origin(to.URL) != origin(s.url) {
		return fmt.Errorf("it redirects to %.200q: use that as the host if you trust it", to.URL.Scheme+"://"+to.URL.Host)
	}
	if len(via) >= maxRedirects {
		return errors.New("it redirects in a circle")
	}
	return nil
}

// Close ends the connections of a command.
func (a *app) closePlace() {
	if a.far != nil {
		a.far.Client.Close()
	}
}

// hostWork says of commands that need the host of the VMs why that is so. Names of subcommands begin with their
// group's.
var hostWork = map[string]string{
	"archive": "it moves files of the host's state directory",
	"bench":   "it measures the host",
	"demo":    "it shows the host",
	"df":      "it looks at the host's files",
	"doctor":  "it checks the host's devices and programs",
	"gateway": "it changes the host's gateway",
	"kernel":  "kernels are files of the host",
	"limits":  "limits are the host's administrator's",
	"mcp":     "it starts VMs by itself: let your client start it on the host, as by ssh",
	"net":     "it changes the host's network",
	"serve":   "it is the server",
	"ssh":     "it needs the host's sockets: `drowse exec -it NAME bash` opens a shell",
	"token":   "tokens are the host's administrator's",
	"top":     "it reads the host's processes: `drowse stats NAME` works here",

	"ssh-config": "it needs the host's sockets", "ssh-proxy": "it needs the host's sockets",
	"image build":      "it reads files and builds on the host: `drowse pull NAME` takes an image from a registry",
	"image prune":      "it removes files of the host",
	"snapshot compact": "it rewrites files of the host", "snapshot verify": "it reads files of the host",
	"secret source": "sources are the host's files, programs and variables",
	"policy check":  "it compiles for the host", "policy explain": "it compiles for the host", "policy tag": "the HTTP API cannot do it",
	"template prune": "it compares them with the host's files: `drowse template rm` removes one",
}

// hostFlagsOf says the same of flags.
var hostFlagsOf = map[string]map[string]string{
	"exec":            {"changes": "the HTTP API has no changes", "no-image-config": "a server adds the image's"},
	"run":             {"no-image-config": "a server adds the image's", "plain-http": "a server talks to registries with TLS"},
	"pull":            {"plain-http": "a server talks to registries with TLS"},
	"image pull":      {"plain-http": "a server talks to registries with TLS"},
	"start":           {"discard-memory": "the HTTP API does not give memory up"},
	"fork":            {"early": "a server waits", "policy": "children have the policy of the VM; use `drowse policy set`", "net": "children have the network of the VM", "allow": "children have the policy of the VM; use `drowse policy set`"},
	"snapshot import": {"trust": "a server does not take policy, tags and grants from a client"},
	"logs":            {"vmm": "it is a file of the host"},
	"cp":              {"resume": "the HTTP API begins anew"},
	"port-forward":    {"reverse": "the HTTP API connects into VMs only", "udp": "the HTTP API carries TCP only"},
}

// checkPlace refuses a command, or a flag of it, that the server cannot do.
func (a *app) checkPlace(cmd *cobra.Command) error {
	path := strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
	top, _, _ := strings.Cut(path, " ")
	why := hostWork[path]
	if why == "" {
		why = hostWork[top]
	}
	flags := hostFlagsOf[path]
	if why == "" && flags == nil {
		return nil // also of help, whatever the context is
	}
	s, err := a.server()
	if err != nil || s == nil {
		return err
	}
	if why != "" {
		return usageError{fmt.Errorf("`drowse %s` does not work with a server (%s): %s: use it on that host, or with --host %s here", path, s, why, localName)}
	}
	for name, why := range flags {
		if cmd.Flags().Changed(name) {
			return usageError{fmt.Errorf("--%s does not work with a server (%s): %s: leave it out, or use it on that host", name, s, why)}
		}
	}
	return nil
}

// serverWords translates the requests that a server's errors name into commands. $1 is a name.
var serverWords = records.NewWords([][2]string{
	{`POST /v1/sandboxes/([\w.-]+)/start\b`, "`drowse start $1`"},
	{`POST /v1/sandboxes/([\w.-]+)/wake\b`, "`drowse wake $1`"},
	{`POST /v1/sandboxes/([\w.-]+)/snapshot\b`, "`drowse snapshot $1`"},
	{`DELETE /v1/sandboxes/([\w.-]+)`, "`drowse rm $1`"},
	{`PATCH /v1/sandboxes/([\w.-]+)`, "`drowse update $1`"},
	{`GET /v1/sandboxes/NAME/console\b`, "`drowse logs`"},
	{`GET /v1/sandboxes\b`, "`drowse ps -a`"},
	{`POST /v1/prune\b`, "`drowse prune`"},
	{`GET /v1/snapshots\b`, "`drowse snapshot ls`"},
	{`GET /v1/images\b`, "`drowse image ls`"},
}...)

// maxServerText bounds what is shown of a server's error, in bytes.
const maxServerText = 4 << 10

// fromServer adds to the text of a server's error what to do about it.
func (a *app) fromServer(err error, text string) string {
	s, serr := a.server()
	var e *records.Error
	if serr != nil || s == nil || !errors.As(err, &e) {
		return text
	}
	if len(text) > maxServerText {
		text = strings.ToValidUTF8(text[:maxServerText], "") + "..."
	}
	text = serverWords.In(text)
	switch e.Code {
	case wire.CodeNoRoute, wire.CodeMethod:
		return fmt.Sprintf("the server %s is older than this drowse (%s), and cannot do this: update it, or use the command on that host", s, version())
	case wire.CodeUnauthorized:
		return text + ": give its token by $DROWSE_TOKEN or `drowse context add --token-file`"
	case wire.CodeForbidden:
		return text + ": see `drowse token` on that host"
	}
	return text
}

func (r *farHost) ready(context.Context) error { return nil }

// maxListBytes bounds what all pages of a list hold.
const maxListBytes = 64 << 20

func (r *farHost) List(ctx context.Context, f records.Filter) (records.List, error) {
	l, err := r.Client.List(ctx, f)
	if err != nil {
		return l, err
	}
	for _, b := range l.Sandboxes {
		r.listed += len(fmt.Sprint(b))
	}
	for _, p := range l.Problems {
		r.listed += len(p)
	}
	if len(l.Sandboxes) > records.MaxPage || r.listed > maxListBytes {
		return records.List{}, fmt.Errorf("the server %s sends a list of more than %d MiB, or pages of more than %d VMs: is it drowse that serves there?", r.server, maxListBytes>>20, records.MaxPage)
	}
	return l, nil
}

func (r *farHost) note(_ context.Context, b records.Sandbox) (pid int, note string, err error) {
	if b.Exit != "" {
		return 0, b.Exit, nil
	}
	return 0, b.Problem, nil
}

func (r *farHost) idle(ctx context.Context, name string) (spec.Idle, spec.Hooks, error) {
	text, err := r.Sandbox(name).Inspect(ctx)
	var is struct {
		Spec struct {
			Idle  spec.Idle  `json:"idle"`
			Hooks spec.Hooks `json:"hooks"`
		} `json:"spec"`
	}
	if err == nil {
		err = json.Unmarshal(text, &is)
	}
	return is.Spec.Idle, is.Spec.Hooks, err
}

// farUp says of a VM that it runs.
func farUp(b records.Sandbox, err error) (cameUp, error) {
	return cameUp{name: b.Name, doc: b, with: func(d execDoc) any {
		return struct {
			records.Sandbox
			Command execDoc `json:"command"`
		}{b, d}
	}}, err
}

func (r *farHost) start(ctx context.Context, name string, _ bool) (cameUp, error) {
	b, err := r.Get(ctx, name)
	switch { // a server leaves one alone that runs, and wakes one that sleeps
	case err != nil:
		return cameUp{}, err
	case b.Status == records.Asleep:
		return cameUp{}, fmt.Errorf("%w: %s is asleep: wake it with `drowse wake %s`", spec.ErrNotRunning, name, name)
	case b.Status.Live():
		return cameUp{}, fmt.Errorf("%w: %s", spec.ErrRunning, name)
	}
	return farUp(r.Start(ctx, name))
}

func (r *farHost) wake(ctx context.Context, name string) (cameUp, error) {
	return farUp(r.Wake(ctx, name))
}

func (r *farHost) clone(ctx context.Context, snapshot string, o cloneOptions) (cameUp, error) {
	return farUp(r.Clone(ctx, snapshot, wire.Clone{Name: o.name, Idle: o.idle, Policy: o.policy}))
}

func (r *farHost) rewind(ctx context.Context, name, snapshot string) (cameUp, error) {
	if _, err := r.Restore(ctx, name, snapshot); err != nil {
		return cameUp{}, err
	}
	return r.wake(ctx, name)
}

func (r *farHost) fork(ctx context.Context, name string, o forkOptions) (forked, error) {
	children := make([]records.Child, o.count)
	for i := range children {
		switch {
		case o.name == "":
		case o.count == 1:
			children[i].Name = o.name
		default:
			children[i].Name = o.name + "-" + strconv.Itoa(i+1)
		}
		if children[i].Name == "" {
			continue
		}
		switch _, err := r.Get(ctx, children[i].Name); { // a server returns one that exists
		case err == nil:
			return forked{}, fmt.Errorf("%w: %s: see `drowse ps -a`", spec.ErrExists, children[i].Name)
		case !errors.Is(err, spec.ErrNotFound):
			return forked{}, err
		}
	}
	made, err := r.Fork(ctx, name, children)
	out := forked{doc: wire.Forked{Sandboxes: some(made)}}
	for _, b := range made {
		up, _ := farUp(b, nil)
		out.children = append(out.children, up)
	}
	return out, err
}

func (*farHost) evacuees(context.Context) (records.List, error) {
	return records.List{}, usageError{errors.New("--all is for the VMs of the host that it runs on: run it there, or name them")}
}

func (r *farHost) sleepAll(ctx context.Context, o spec.SleepOptions) (asleep, awake []string, err error) {
	list, err := allOf(ctx, r, records.Filter{Statuses: []records.Status{records.Creating, records.Running, records.Waiting}})
	asleep, awake = []string{}, []string{}
	for _, b := range list.Sandboxes {
		if _, serr := r.Sleep(ctx, b.Name, o); serr != nil {
			r.a.log.Warn("a VM was not put to sleep", "vm", b.Name, "cause", printable(serr.Error()))
			awake = append(awake, b.Name)
			continue
		}
		asleep = append(asleep, b.Name)
	}
	return asleep, awake, err
}

func (r *farHost) stop(ctx context.Context, name string, limit time.Duration) error {
	if _, err := r.Get(ctx, name); err != nil {
		return err
	}
	seconds := int(math.Ceil(limit.Seconds()))
	if seconds < 1 || seconds > wire.MaxStopSeconds {
		return usageError{fmt.Errorf("--timeout %v: a server allows 1s to %v", limit, wire.MaxStopSeconds*time.Second)}
	}
	_, err := r.Stop(ctx, name, wire.Stop{TimeoutSeconds: seconds})
	return err
}

func (r *farHost) kill(ctx context.Context, name string) error {
	_, err := r.Stop(ctx, name, wire.Stop{Kill: true})
	return err
}

func (r *farHost) signal(ctx context.Context, name, process string, signal int) error {
	err := r.Sandbox(name).Signal(ctx, process, signal)
	if err != nil && !errors.Is(err, spec.ErrNotFound) && !errors.Is(err, spec.ErrNotRunning) {
		err = signalError(name, err)
	}
	return err
}

// remove looks first: a server removes also what runs, and finds nothing wrong with what is not there.
func (r *farHost) remove(ctx context.Context, name string, force bool) (spec.Freed, error) {
	b, err := r.Get(ctx, name)
	if err != nil && !errors.Is(err, spec.ErrRecord) {
		return spec.Freed{}, err
	}
	if err == nil && b.Status.Live() && !force {
		return spec.Freed{}, fmt.Errorf("%w: %s: put it to sleep, stop it, or use --force", spec.ErrRunning, name)
	}
	return r.Delete(ctx, name)
}

func (r *farHost) snapshots(ctx context.Context) ([]spec.SnapshotInfo, error) {
	return r.Snapshots(ctx, "")
}

func (r *farHost) images(ctx context.Context) (out []imageRow, err error) {
	list, problems, err := r.ImageRecords(ctx)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, p := range problems {
		errs = append(errs, errors.New(p))
	}
	for _, text := range list {
		var i struct {
			wire.Image
			Packages   []json.RawMessage `json:"packages"`
			Entrypoint []string          `json:"entrypoint"`
			Cmd        []string          `json:"cmd"`
		}
		if err := json.Unmarshal(text, &i); err != nil {
			errs = append(errs, fmt.Errorf("reading the server's answer: %w", err))
			continue
		}
		row := imageRow{
			ID: i.ID, Tags: i.Tags, Source: i.Source, Packages: len(i.Packages), Size: i.Size, Created: i.Created, Entrypoint: i.Entrypoint, Cmd: i.Cmd, doc: text,
		}
		if row.name = row.shortID(); len(row.Tags) > 0 {
			row.name = row.Tags[0] + " (" + row.name + ")"
		}
		out = append(out, row)
	}
	return out, errors.Join(errs...)
}

// tagOf returns the tag that an image of a registry gets: docker.io/library/python is python:latest.
func tagOf(ref string) string {
	for _, prefix := range []string{"index.docker.io/", "docker.io/", "library/"} {
		ref = strings.TrimPrefix(ref, prefix)
	}
	if _, digest, ok := strings.Cut(ref, "@"); ok {
		return strings.TrimSuffix(ref, "@"+digest) + ":" + strings.ReplaceAll(digest, ":", "-")
	}
	if !strings.Contains(ref[strings.LastIndexByte(ref, '/')+1:], ":") {
		ref += ":latest"
	}
	return ref
}

// minImageID is how many digits of an image's id name it.
const minImageID = 4

// findImage returns the image that a user names, or nil.
func (r *farHost) findImage(ctx context.Context, ref string) (*imageRow, error) {
	list, err := r.images(ctx)
	for _, i := range list {
		if slices.Contains(i.Tags, tagOf(ref)) {
			return &i, nil
		}
	}
	id := strings.TrimPrefix(ref, "sha256:")
	for _, i := range list {
		if len(id) >= minImageID && strings.HasPrefix(i.ID, id) {
			return &i, nil
		}
	}
	return nil, err
}

// operationPoll is how often an operation is looked at.
const operationPoll = 300 * time.Millisecond

func (r *farHost) pull(ctx context.Context, ref string, _ pullFlags) (imageRow, error) {
	o, err := r.PullImage(ctx, wire.Pull{From: "docker://" + ref, Tag: tagOf(ref)})
	if err != nil {
		return imageRow{}, err
	}
	p := r.a.newProgress("pull")
	o, err = r.await(ctx, o, p)
	p.finish(err)
	if err != nil {
		return imageRow{}, err
	}
	i, err := r.findImage(ctx, o.Image)
	if i == nil {
		return imageRow{ID: o.Image, name: ref, doc: o}, err
	}
	return *i, nil
}

func (r *farHost) removeImage(ctx context.Context, ref string) (wire.ImageRemoved, error) {
	return r.RemoveImage(ctx, ref)
}

func (r *farHost) log(ctx context.Context, name string, o logOptions, w io.Writer) error {
	if !o.follow {
		text, err := r.Console(ctx, name, wire.MaxTail)
		if err == nil {
			_, err = w.Write(lastLines(text, o.lines))
		}
		return err
	}
	if o.lines >= 0 { // the server counts bytes: find out how many these lines are
		text, err := r.Console(ctx, name, wire.MaxTail)
		if err != nil {
			return err
		}
		text = lastLines(text, o.lines)
		return r.FollowConsole(ctx, name, max(1, len(text)), w)
	}
	return r.FollowConsole(ctx, name, wire.MaxTail, w)
}

func (r *farHost) events(ctx context.Context, o eventOptions, give func(events.Event) error) error {
	q := url.Values{"type": o.filter.Types, "tag": o.filter.Tags}
	for key, value := range map[string]string{"since": o.since, "sandbox": o.filter.Sandbox, "owner": o.filter.Owner, "follow": map[bool]string{true: "1"}[o.follow]} {
		if value != "" {
			q.Set(key, value)
		}
	}
	return r.Events(ctx, q, func(text json.RawMessage) error {
		var e events.Event
		if err := json.Unmarshal(text, &e); err != nil {
			return fmt.Errorf("reading the server's answer: %w", err)
		}
		return give(e)
	})
}

func (r *farHost) info(ctx context.Context) (infoDoc, error) {
	i := infoDoc{versionDoc: thisVersion()}
	i.Server = r.server.String()
	is, err := r.Version(ctx)
	if err != nil {
		return i, err
	}
	i.ServerVersion = is.Version
	list, err := allOf(ctx, r, records.Filter{})
	i.counted(list)
	images, ierr := r.images(ctx)
	snapshots, serr := r.snapshots(ctx)
	volumes, verr := r.volumes(ctx)
	var e *records.Error
	if errors.As(verr, &e) && e.Code == wire.CodeForbidden {
		verr = nil // volumes are not of one owner
	}
	i.Images, i.Snapshots, i.Volumes = len(images), len(snapshots), len(volumes)
	return i, errors.Join(err, ierr, serr, verr)
}

func (r *farHost) run(ctx context.Context, q *runRequest) error {
	a, full := r.a, q.spec
	var entrypoint, command []string // a disk's image has its own record
	if q.disk == "" {
		img, err := r.findImage(ctx, full.Image)
		if err != nil && img == nil {
			return err
		}
		switch {
		case img == nil && q.pull.when == pullNever:
			return fmt.Errorf("there is no image %s on the server: see `drowse image ls`", full.Image)
		case img == nil || q.pull.when == pullAlways:
			if img == nil {
				fmt.Fprintf(a.stderr, "drowse: there is no image %s there: pulling it\n", printable(full.Image))
			}
			row, err := r.pull(ctx, full.Image, q.pull)
			if err != nil {
				return err
			}
			img = &row
		}
		if full.Image = img.ID; len(img.Tags) > 0 {
			full.Image = img.Tags[0]
		}
		entrypoint, command = img.Entrypoint, img.Cmd
	}
	argv, err := q.main.argv(entrypoint, command)
	if err != nil {
		return err
	}
	if full.Name == "" {
		if full.Name, err = newName(ctx, r); err != nil {
			return err
		}
	}
	list, err := readSecrets(q.secrets, os.Stdin)
	if err != nil {
		return err
	}
	defer wipeSecrets(list)
	limited, cancel := context.WithTimeout(ctx, q.limit)
	defer cancel()
	req := records.Request{Spec: full, Disk: q.disk, Boot: q.boot}
	if q.metadata != nil {
		req.Metadata = *q.metadata
	}
	up, err := farUp(r.Create(limited, req))
	if err != nil {
		return err
	}
	if err := handIn(limited, r, list, up.name); err != nil || len(argv) == 0 {
		return errors.Join(err, a.printUp(up))
	}
	return a.runMain(ctx, r, up, q.main, argv)
}

// farGuest is a VM of a server. The server wakes it for a command.
type farGuest struct {
	r *farHost
	*client.Sandbox
}

func (r *farHost) guest(_ context.Context, name string) (inGuest, error) {
	return &farGuest{r, r.Sandbox(name)}, nil
}

func (g *farGuest) Close() error { return nil }

func (g *farGuest) start(ctx context.Context, c command, s streams) (session, error) {
	c.TimeoutSeconds = int(math.Ceil(c.timeout.Seconds()))
	c.NoStdin = c.Detach && c.TTY == nil && !c.Stdin
	out, err := g.Sandbox.Start(ctx, client.Cmd{ExecStart: c.ExecStart, IO: client.IO{Stdin: s.stdin, Stdout: s.stdout, Stderr: s.stderr}})
	return farSessionOf(out, err, c.Detach)
}

func (g *farGuest) attach(ctx context.Context, process string, s streams) (session, error) {
	out, err := g.Sandbox.Attach(ctx, process, 0, client.IO{Stdin: s.stdin, Stdout: s.stdout, Stderr: s.stderr})
	return farSessionOf(out, err, true)
}

func (g *farGuest) processes(ctx context.Context) ([]wire.Process, error) {
	list, err := g.Sandbox.Processes(ctx)
	if errors.Is(err, spec.ErrNotRunning) {
		if _, err := g.r.Wake(ctx, g.Name()); err != nil {
			return nil, err
		}
		list, err = g.Sandbox.Processes(ctx)
	}
	return list, err
}

// farSession is a session through a server.
type farSession struct {
	*client.Session
	detached bool // the process goes on without it
}

func farSessionOf(s *client.Session, err error, detached bool) (session, error) {
	if err != nil {
		return nil, err
	}
	return farSession{s, detached}, nil
}

// leaveTime is how long a server may take to say that a session is over.
const leaveTime = 2 * time.Second

// Close leaves a detached process in words, so that all that was sent before arrives.
func (s farSession) Close() error {
	if s.detached {
		defer time.AfterFunc(leaveTime, func() { _ = s.Session.Close() }).Stop()
		_ = s.Detach()
	}
	return s.Session.Close()
}

func (s farSession) resize(rows, cols int) error {
	return s.Resize(wire.TTY{Rows: min(rows, math.MaxUint16), Cols: min(cols, math.MaxUint16)})
}

func (s farSession) wait() (*exit, error) {
	st, err := s.Wait()
	var is *client.ExitError
	if errors.As(err, &is) {
		err = nil
	}
	if st == nil {
		return nil, err
	}
	e := &exit{ExitStatus: *st}
	if e.ExitCode < 0 || e.ExitCode > 255 { // 256 would be a success
		e.ExitCode = 255
	}
	return e, err
}
