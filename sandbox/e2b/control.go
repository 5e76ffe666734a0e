package e2b

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/identity"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/cluster/peer"
	"github.com/drowse-vm/drowse/sandbox/e2b/answers"
	"github.com/drowse-vm/drowse/sandbox/e2b/templates"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Timeouts of sandboxes whose creators name none, in seconds.
const (
	defaultTimeout    = 300
	oldDefaultTimeout = 15 // of the paths before /v2
)

// handler answers a request of the control plane. A nil body is no content.
type handler = templates.Handler

// routes sets up the control plane.
func (s *Server) routes() {
	routes := map[string]handler{
		"POST /sandboxes":                 s.created(oldDefaultTimeout),
		"POST /v2/sandboxes":              s.created(defaultTimeout),
		"POST /sandboxes/{id}/connect":    s.onBox(s.connect),
		"POST /v2/sandboxes/{id}/connect": s.onBox(s.connect),
		"POST /sandboxes/{id}/resume":     s.onBox(s.resumeOld),
		"GET /sandboxes":                  s.list,
		"GET /v2/sandboxes":               s.list,
		"GET /sandboxes/{id}":             s.onBox(s.detail),
		"DELETE /sandboxes/{id}":          s.onBox(s.kill),
		"POST /sandboxes/{id}/pause":      s.onBox(s.pause),
		"POST /sandboxes/{id}/fork":       s.onBox(s.forked(oldDefaultTimeout)),
		"POST /v2/sandboxes/{id}/fork":    s.onBox(s.forked(defaultTimeout)),
		"POST /sandboxes/{id}/timeout":    s.onBox(s.timeout),
		"POST /sandboxes/{id}/refreshes":  s.onBox(s.refresh),
		"PUT /sandboxes/{id}/network":     s.onBox(s.setNetwork),
		"GET /sandboxes/{id}/metrics":     s.onBox(s.metricsOf),
		"GET /sandboxes/metrics":          s.metricsOfAll,
		"GET /sandboxes/{id}/logs":        s.onBox(s.logs),
		"GET /v2/sandboxes/{id}/logs":     s.onBox(s.logs),
		"POST /sandboxes/{id}/snapshots":  s.onBox(s.snapshot),
		"GET /snapshots":                  s.snapshots,
		"/volumes":                        noVolumes, "/volumes/{rest...}": noVolumes, "/volumecontent/{rest...}": noVolumes,
		"/secrets": noSecrets, "/secrets/{rest...}": noSecrets,
	}
	maps.Copy(routes, s.templates.Routes())
	for pattern, h := range routes {
		s.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			status, body, err := h(w, r)
			switch {
			case errors.Is(err, errAnswered):
			case err != nil:
				s.answerError(w, r, err)
			case body == nil:
				w.WriteHeader(status)
			default:
				answers.WriteJSON(w, status, body)
			}
		})
	}
}

// answerError answers with an error, and logs one of the host.
func (s *Server) answerError(w http.ResponseWriter, r *http.Request, err error) {
	e := asAPI(err, r.PathValue("id"))
	if e.Code >= http.StatusInternalServerError && r.Context().Err() == nil {
		id := r.PathValue("id")
		if !idRE.MatchString(id) {
			id = ""
		}
		s.report(r.Pattern, id, cmp.Or(e.Cause, error(e)))
	}
	unread(w, r)
	e.Write(w)
}

func noVolumes(http.ResponseWriter, *http.Request) (int, any, error) {
	return 0, nil, answers.Fail(http.StatusNotImplemented, "volumes are not supported on this wire: use drowse's own API")
}

func noSecrets(http.ResponseWriter, *http.Request) (int, any, error) {
	return 0, nil, answers.Fail(http.StatusNotImplemented, "secrets are not supported on this wire: use drowse's own API")
}

// serveControl serves the control plane to callers with a key.
func (s *Server) serveControl(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/health" && r.Method == http.MethodGet {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	if r.Method == http.MethodPut && strings.HasPrefix(r.URL.Path, templates.UploadPath) {
		if err := s.templates.Put(w, r); err != nil {
			s.answerError(w, r, err)
		}
		return
	}
	if r.URL.Path == "/files" && r.URL.Query().Has("signature") {
		s.answerError(w, r, answers.Fail(http.StatusBadRequest, "the URL names no sandbox: send the header %s, or make URLs with E2B_DOMAIN and without E2B_SANDBOX_URL", headerSandbox))
		return
	}
	key, err := s.key(r)
	if err != nil {
		s.answerError(w, r, err)
		return
	}
	if !key.Scopes.Has(tokens.ScopeRead) || r.Method != http.MethodGet && !mayAct(key) {
		s.answerError(w, r, answers.Fail(http.StatusForbidden, "the key does not allow it: make one with `drowse token create --e2b --scope read,exec,files,create`"))
		return
	}
	leave, ok := s.slots.take(key.Owner)
	if !ok {
		s.answerError(w, r, answers.Fail(http.StatusTooManyRequests, "too many requests are under way"))
		return
	}
	defer leave()
	ctx, cancel := context.WithTimeout(r.Context(), controlTime)
	defer cancel()
	if _, pattern := s.mux.Handler(r); pattern == "" {
		s.answerError(w, r, answers.Fail(http.StatusNotFound, "there is no such route"))
		return
	}
	s.mux.ServeHTTP(w, r.WithContext(context.WithValue(ctx, keyToken, key)))
}

// mayAct reports whether a key allows more than to look. Whoever makes or resumes a sandbox gets its token, which is
// for commands and files.
func mayAct(key tokens.Token) bool {
	return key.Scopes.Has(tokens.ScopeCreate) && key.Scopes.Has(tokens.ScopeExec) && key.Scopes.Has(tokens.ScopeFiles)
}

// keyOf returns the key of a request to the control plane.
func keyOf(ctx context.Context) tokens.Token { return ctx.Value(keyToken).(tokens.Token) }

// key returns the key of a request, or whom the certificate of its client vouches for. A key beside one decides alone.
func (s *Server) key(r *http.Request) (tokens.Token, error) {
	if is := peer.From(r.Context()); is != nil {
		return s.passedKey(r, is)
	}
	shown := r.Header.Values("X-API-KEY")
	for _, a := range r.Header.Values("Authorization") {
		if t, ok := strings.CutPrefix(a, "Bearer "); ok {
			shown = append(shown, t)
		}
	}
	var id identity.Identity
	var wait time.Duration
	var err error
	switch {
	case len(shown) == 0 && len(r.Header.Values("Authorization")) == 0 && r.TLS != nil && len(r.TLS.PeerCertificates) > 0:
		// A browser shows its user's certificate for any page that asks.
		if r.Header.Get("Origin") != "" || r.Header.Get("Sec-Fetch-Site") != "" {
			return tokens.Token{}, answers.Fail(http.StatusForbidden, "a page needs a key: send it as X-API-KEY")
		}
		id, wait, err = s.o.Identities.AdmitCertificate(r.TLS)
	case len(shown) == 0:
		return tokens.Token{}, answers.Fail(http.StatusUnauthorized, "a key is missing: send it as X-API-KEY")
	default:
		for _, other := range shown[1:] {
			if other != shown[0] {
				return tokens.Token{}, answers.Fail(http.StatusUnauthorized, "the request has two keys")
			}
		}
		id, wait, err = s.o.Identities.Admit(r.Context(), s.o.Tokens, shown[0])
	}
	switch {
	case errors.Is(err, tokens.ErrExpired), errors.Is(err, tokens.ErrUnknown):
		return id.Token, answers.Fail(http.StatusUnauthorized, "the key is not valid: %v", err)
	case errors.Is(err, identity.ErrUnmapped):
		return id.Token, answers.Fail(http.StatusForbidden, "%v", err)
	case errors.Is(err, identity.ErrIssuer):
		return id.Token, answers.Fail(http.StatusServiceUnavailable, "%v: try again in %v", err, identity.RetryAfter)
	case errors.Is(err, tokens.ErrRate):
		return id.Token, answers.Fail(http.StatusTooManyRequests, "the key is used too often: try again in %v", wait.Round(time.Millisecond))
	}
	return id.Token, err
}

// starting lets few requests start VMs of an owner, and of all, at once. The caller calls the function in the end.
func (s *Server) starting(owner string) (func(), error) {
	leave, ok := s.start.take(owner)
	if !ok {
		e := answers.Fail(http.StatusTooManyRequests, "too many sandboxes are being started")
		e.Kind = "sandbox_capacity_unavailable"
		return nil, e
	}
	return leave, nil
}

// onBox is a handler for the sandbox of the path.
func (s *Server) onBox(h func(w http.ResponseWriter, r *http.Request, b *box) (int, any, error)) handler {
	return func(w http.ResponseWriter, r *http.Request) (int, any, error) {
		if err := s.locate(w, r, r.PathValue("id")); err != nil {
			return 0, nil, err
		}
		b, err := s.findOf(r.Context(), r.PathValue("id"))
		if err != nil {
			return 0, nil, err
		}
		return h(w, r, b)
	}
}

// findOf is find for the key of a request. A sandbox of another owner does not exist for it.
func (s *Server) findOf(ctx context.Context, id string) (*box, error) {
	b, err := s.find(id)
	if c := s.o.Cluster; c != nil && errors.Is(err, sandbox.ErrNotFound) && idRE.MatchString(id) {
		if o, oerr := c.Published(ctx, id); oerr == nil && o.Metadata.E2B != nil {
			b, err = &box{s.host.Sandbox(id), o.Record, o.Metadata}, nil
		}
	}
	if err == nil && !b.isOf(keyOf(ctx)) {
		return nil, fmt.Errorf("%w: %s is not of the key's owner", sandbox.ErrNotFound, id)
	}
	return b, err
}

func (b *box) isOf(key tokens.Token) bool { return key.Owner == "" || b.meta.Owner == key.Owner }

// sandboxBody is a sandbox that a client is about to use.
type sandboxBody struct {
	TemplateID   string  `json:"templateID"`
	SandboxID    string  `json:"sandboxID"`
	ClientID     string  `json:"clientID"`
	EnvdVersion  string  `json:"envdVersion"`
	EnvdToken    string  `json:"envdAccessToken"`
	TrafficToken *string `json:"trafficAccessToken"`
	Domain       *string `json:"domain"`
}

// clientID has no meaning any more, and clients want one.
const clientID = "drowse"

func (s *Server) domain() *string {
	if s.o.Domain == "" {
		return nil
	}
	return &s.o.Domain
}

func (s *Server) body(name string) (*sandboxBody, error) {
	b, err := s.find(name)
	if err != nil {
		return nil, err
	}
	out := &sandboxBody{TemplateID: b.meta.E2B.Template, SandboxID: name, ClientID: clientID, EnvdVersion: EnvdVersion, Domain: s.domain()}
	if out.EnvdToken, err = token(s.host.State, b.record, useEnvd); err != nil {
		return nil, err
	}
	if b.meta.E2B.Network.Private {
		t, err := token(s.host.State, b.record, useTraffic)
		if err != nil {
			return nil, err
		}
		out.TrafficToken = &t
	}
	return out, nil
}

// class returns the class of a running sandbox.
func class(e *spec.E2B) lifetime.Class {
	if e.Pause {
		return lifetime.Workspace
	}
	return lifetime.Ephemeral
}

// created returns the handler that creates sandboxes.
func (s *Server) created(otherwise int64) handler {
	return func(w http.ResponseWriter, r *http.Request) (int, any, error) {
		var body createBody
		if err := answers.Read(w, r, &body); err != nil {
			return 0, nil, err
		}
		if err := body.check(); err != nil {
			return 0, nil, err
		}
		timeout, err := seconds(body.Timeout, otherwise)
		if err != nil {
			return 0, nil, err
		}
		e := &spec.E2B{
			Template: body.TemplateID, Metadata: body.Metadata, EnvVars: body.EnvVars, Timeout: int64(timeout / time.Second),
			Pause: body.AutoPause, DiskOnly: body.AutoPauseMemory != nil && !*body.AutoPauseMemory, Resume: body.AutoResume != nil && body.AutoResume.Enabled,
		}
		n := body.Network
		if n == nil {
			n = &networkBody{}
		}
		if e.Network, err = n.network(body.Internet, s.opensPrivate(r)); err != nil {
			return 0, nil, err
		}
		asked := body.Internet != nil && *body.Internet || body.Network != nil && !e.Network.NoInternet
		if !s.o.Network && asked {
			return 0, nil, answers.Refused("network", "sandboxes of this host have none")
		}
		done, err := s.starting(keyOf(r.Context()).Owner)
		if err != nil {
			return 0, nil, err
		}
		defer done()
		id := answers.NewID()
		m := &spec.Metadata{Owner: keyOf(r.Context()).Owner, Class: class(e), Expires: expiry(time.Now(), timeout+controlTime), E2B: e}
		if err := s.make(r.Context(), id, m); err != nil {
			return 0, nil, err
		}
		s.introduceAll(r.Context(), []string{id})
		if err := s.begin(r.Context(), id, timeout); err != nil {
			return 0, nil, err
		}
		out, err := s.body(id)
		s.log.Info("created", "sandbox", id, "template", e.Template)
		return http.StatusCreated, out, err
	}
}

// opensPrivate reports whether the key of a request may allow its sandboxes private addresses.
func (s *Server) opensPrivate(r *http.Request) bool {
	return s.o.OwnersPrivate || keyOf(r.Context()).Owner == ""
}

// make makes a sandbox of a template: a snapshot, or an image.
func (s *Server) make(ctx context.Context, id string, m *spec.Metadata) error {
	snap, err := s.templates.Lookup(m.Owner, m.E2B.Template)
	if err != nil {
		return err
	}
	img := ""
	if snap == "" {
		if img, err = s.templates.Image(m.E2B.Template); err != nil {
			return err
		}
	}
	b, err := s.boxFor(ctx, id, snap, img, s.o.Spec, m.E2B.Network, m)
	if err != nil || snap == "" {
		return err
	}
	if err := s.inherit(ctx, b); err != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), controlTime)
		defer cancel()
		return errors.Join(err, b.Delete(ctx, sandbox.DeleteOptions{Force: true}))
	}
	return nil
}

// makeForBuild makes a sandbox that a template is built in. No list has it.
func (s *Server) makeForBuild(ctx context.Context, snap, img string, size sandbox.Spec, m *spec.Metadata) (*sandbox.Sandbox, error) {
	for {
		if leave, ok := s.start.take(m.Owner); ok {
			defer leave()
			break
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(listWait):
		}
	}
	return s.boxFor(ctx, answers.NewID(), snap, img, size, spec.E2BNetwork{}, m)
}

// boxFor makes a sandbox of a snapshot, or of an image in a size.
func (s *Server) boxFor(ctx context.Context, id, snap, img string, size sandbox.Spec, n spec.E2BNetwork, m *spec.Metadata) (*sandbox.Sandbox, error) {
	p := policy(n, s.o.DNS)
	if snap != "" {
		if !s.o.Network {
			p = nil
		}
		return s.host.Clone(ctx, snap, sandbox.CloneOptions{Name: id, Policy: p, Metadata: m, Idle: &spec.Idle{}})
	}
	want := s.o.Spec
	want.Name, want.Hostname, want.Image, want.VCPUs, want.MemoryMiB = id, "", img, size.VCPUs, size.MemoryMiB
	want.Network, want.Policy = spec.NetworkNone, nil
	if s.o.Network {
		want.Network, want.Policy = spec.NetworkTAP, p
	}
	return s.host.Create(ctx, want, sandbox.CreateOptions{Metadata: m})
}

// inherit gives a new sandbox of a snapshot the defaults of the template.
func (s *Server) inherit(ctx context.Context, b *sandbox.Sandbox) error {
	c, err := b.Agent(ctx)
	if err != nil {
		return err
	}
	d, err := templates.ReadDefaults(ctx, c)
	c.Close()
	if err != nil || len(d.Env) == 0 && d.User == "" && d.Workdir == "" {
		return err
	}
	return s.edit(ctx, b.Name(), func(l *spec.Metadata) {
		env := maps.Clone(d.Env)
		if env == nil {
			env = map[string]string{}
		}
		maps.Copy(env, l.E2B.EnvVars)
		l.E2B.EnvVars, l.E2B.User, l.E2B.Workdir = env, d.User, d.Workdir
	})
}

// edit changes the metadata of a sandbox of this wire.
func (s *Server) edit(ctx context.Context, id string, change func(*spec.Metadata)) error {
	_, err := s.host.State.SetMetadata(ctx, id, func(l *spec.Metadata, unreadable error) error {
		if unreadable != nil {
			return unreadable
		}
		if l.E2B == nil {
			return fmt.Errorf("%w: %s", sandbox.ErrNotFound, id)
		}
		l.E2B = l.E2B.Clone()
		change(l)
		return nil
	})
	return err
}

// begin begins the time of a new sandbox, which can be used now. Until then it has more, however slow the host is.
func (s *Server) begin(ctx context.Context, id string, timeout time.Duration) error {
	return s.edit(ctx, id, func(l *spec.Metadata) { l.Expires = expiry(time.Now(), timeout) })
}

// extend makes a sandbox last at least for a time from now on.
func (s *Server) extend(ctx context.Context, id string, timeout time.Duration) error {
	return s.edit(ctx, id, func(l *spec.Metadata) {
		if until := expiry(time.Now(), timeout); l.Expires.Before(until) {
			l.Expires = until
		}
	})
}

// resume brings a paused sandbox up for a time. With reboot, what was in its memory is discarded.
func (s *Server) resume(ctx context.Context, b *box, timeout time.Duration, reboot bool) error {
	done, err := s.starting(b.meta.Owner)
	if err != nil {
		return err
	}
	defer done()
	set := func(c lifetime.Class, fresh bool) error {
		return s.edit(ctx, b.Name(), func(l *spec.Metadata) {
			if until := expiry(time.Now(), timeout); fresh || l.Expires.Before(until) {
				l.Expires = until
			}
			l.Class = c
		})
	}
	// Whatever fails, it stays: only a running sandbox is removed at the end of its time.
	if err := set(lifetime.Workspace, true); err != nil {
		return err
	}
	if reboot || b.record.Phase == state.Stopped {
		_, err = b.Start(ctx, sandbox.StartOptions{DiscardMemory: reboot})
		if errors.Is(err, sandbox.ErrRunning) {
			err = nil // another request was first
		} else if err == nil {
			s.introduce(ctx, b)
		}
	} else {
		_, err = b.BringUp(ctx)
	}
	if err != nil {
		return err
	}
	s.log.Info("resumed", "sandbox", b.Name())
	return set(class(b.meta.E2B), false)
}

// connectBody is the body of a connection.
type connectBody struct {
	Timeout *int64 `json:"timeout"`
	Memory  *bool  `json:"memory"`
	// AutoPause is of the older form.
	AutoPause *bool `json:"autoPause"`
}

func (s *Server) connect(w http.ResponseWriter, r *http.Request, b *box) (int, any, error) {
	var body connectBody
	if err := answers.Read(w, r, &body); err != nil {
		return 0, nil, err
	}
	timeout, err := seconds(body.Timeout, defaultTimeout)
	if err != nil {
		return 0, nil, err
	}
	if b, err = s.ended(r.Context(), b); err != nil {
		return 0, nil, err
	}
	status := http.StatusOK
	if b.paused() {
		status = http.StatusCreated
		err = s.resume(r.Context(), b, timeout, body.Memory != nil && !*body.Memory && b.record.Phase == state.Asleep)
	} else {
		err = s.extend(r.Context(), b.Name(), timeout)
	}
	if err != nil {
		return 0, nil, err
	}
	out, err := s.body(b.Name())
	return status, out, err
}

func (s *Server) resumeOld(w http.ResponseWriter, r *http.Request, b *box) (int, any, error) {
	if !b.paused() {
		return 0, nil, answers.Fail(http.StatusConflict, "the sandbox runs")
	}
	return s.connect(w, r, b)
}

func (s *Server) kill(_ http.ResponseWriter, r *http.Request, b *box) (int, any, error) {
	// Whoever has begun it wants it done, also if he leaves.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), controlTime)
	defer cancel()
	// Whoever looks for what has expired may remove it as well, once it has ended.
	if err := b.Delete(ctx, sandbox.DeleteOptions{Force: true}); err != nil && !errors.Is(err, sandbox.ErrNotFound) {
		return 0, nil, err
	}
	s.log.Info("removed", "sandbox", b.Name())
	return http.StatusNoContent, nil, nil
}

func (s *Server) pause(w http.ResponseWriter, r *http.Request, b *box) (int, any, error) {
	var body struct {
		Memory *bool `json:"memory"`
	}
	if err := answers.Read(w, r, &body); err != nil {
		return 0, nil, err
	}
	if b.paused() {
		return 0, nil, answers.Fail(http.StatusConflict, "the sandbox is paused already")
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), controlTime)
	defer cancel()
	var before lifetime.Class
	// A paused sandbox stays. Its time is over when it is resumed, which sets another one.
	if err := s.edit(ctx, b.Name(), func(l *spec.Metadata) { before, l.Class = l.Class, lifetime.Workspace }); err != nil {
		return 0, nil, err
	}
	var err error
	if body.Memory != nil && !*body.Memory {
		err = b.Stop(ctx)
	} else {
		_, err = b.Sleep(ctx, sandbox.SleepOptions{})
	}
	if err != nil {
		return 0, nil, errors.Join(err, s.edit(ctx, b.Name(), func(l *spec.Metadata) { l.Class = before }))
	}
	s.log.Info("paused", "sandbox", b.Name())
	return http.StatusNoContent, nil, nil
}

// forkedBody is a child, or why there is none.
type forkedBody struct {
	Sandbox *sandboxBody   `json:"sandbox,omitempty"`
	Error   *answers.Error `json:"error,omitempty"`
}

// maxForks is the most children of one request.
const maxForks = 100

// forked returns the handler that forks sandboxes.
func (s *Server) forked(otherwise int64) func(http.ResponseWriter, *http.Request, *box) (int, any, error) {
	return func(w http.ResponseWriter, r *http.Request, b *box) (int, any, error) {
		var body struct {
			Timeout *int64 `json:"timeout"`
			Count   *int   `json:"count"`
			Memory  *bool  `json:"memory"`
		}
		if err := answers.Read(w, r, &body); err != nil {
			return 0, nil, err
		}
		if body.Memory != nil && !*body.Memory {
			return 0, nil, answers.Refused("memory false", "a fork has the memory of its sandbox")
		}
		timeout, err := seconds(body.Timeout, otherwise)
		if err != nil {
			return 0, nil, err
		}
		return s.fork(r, b, timeout, body.Count)
	}
}

func (s *Server) fork(r *http.Request, b *box, timeout time.Duration, asked *int) (int, any, error) {
	count := 1
	if asked != nil {
		count = *asked
	}
	if count < 1 || count > maxForks {
		return 0, nil, answers.Fail(http.StatusBadRequest, "count %d: use 1 to %d", count, maxForks)
	}
	done, err := s.starting(b.meta.Owner)
	if err != nil {
		return 0, nil, err
	}
	defer done()
	var out []forkedBody
	for first := true; len(out) < count; first = false {
		e := b.meta.E2B.Clone()
		e.Timeout = int64(timeout / time.Second)
		var children []sandbox.ForkChild
		for range min(count-len(out), sandbox.MaxForks) {
			m := &spec.Metadata{Owner: b.meta.Owner, Class: class(e), Expires: expiry(time.Now(), timeout+controlTime), E2B: e.Clone()}
			children = append(children, sandbox.ForkChild{Name: answers.NewID(), Metadata: m})
		}
		_, err := b.Fork(r.Context(), sandbox.ForkOptions{Children: children})
		if err != nil && first {
			return 0, nil, err
		}
		var made []string
		for _, c := range children {
			made = append(made, c.Name)
		}
		s.introduceAll(r.Context(), made)
		for _, c := range children {
			f := forkedBody{}
			if err == nil {
				if err := s.begin(r.Context(), c.Name, timeout); err != nil {
					f.Error = asAPI(err, c.Name)
				} else if f.Sandbox, err = s.body(c.Name); err != nil {
					f.Error = asAPI(err, c.Name)
				}
			} else {
				f.Error = asAPI(err, b.Name())
			}
			out = append(out, f)
		}
	}
	s.log.Info("forked", "sandbox", b.Name(), "children", len(out))
	return http.StatusCreated, out, nil
}

func (s *Server) timeout(w http.ResponseWriter, r *http.Request, b *box) (int, any, error) {
	var body struct {
		Timeout *int64 `json:"timeout"`
	}
	if err := answers.Read(w, r, &body); err != nil {
		return 0, nil, err
	}
	if body.Timeout == nil {
		return 0, nil, answers.Fail(http.StatusBadRequest, "timeout is missing")
	}
	timeout, err := seconds(body.Timeout, 0)
	if err != nil {
		return 0, nil, err
	}
	if b.paused() || b.ending(time.Now()) {
		return 0, nil, answers.Fail(http.StatusNotFound, "sandbox %s is paused", b.Name())
	}
	return http.StatusNoContent, nil, s.edit(r.Context(), b.Name(), func(l *spec.Metadata) {
		l.Expires, l.E2B.Timeout = expiry(time.Now(), timeout), int64(timeout/time.Second)
	})
}

// maxRefresh is the longest time of a refresh, in seconds.
const maxRefresh = 3600

func (s *Server) refresh(w http.ResponseWriter, r *http.Request, b *box) (int, any, error) {
	var body struct {
		Duration *int64 `json:"duration"`
	}
	if err := answers.Read(w, r, &body); err != nil {
		return 0, nil, err
	}
	timeout, err := seconds(body.Duration, oldDefaultTimeout)
	if err != nil {
		return 0, nil, err
	}
	if timeout > maxRefresh*time.Second {
		return 0, nil, answers.Fail(http.StatusBadRequest, "duration: use at most %d s", maxRefresh)
	}
	if b.paused() || b.ending(time.Now()) {
		return 0, nil, answers.Fail(http.StatusNotFound, "sandbox %s is paused", b.Name())
	}
	return http.StatusNoContent, nil, s.extend(r.Context(), b.Name(), timeout)
}

func (s *Server) setNetwork(w http.ResponseWriter, r *http.Request, b *box) (int, any, error) {
	var body networkBody
	if err := answers.Read(w, r, &body); err != nil {
		return 0, nil, err
	}
	for name, set := range map[string]bool{
		"allowPublicTraffic": body.AllowPublic != nil, "maskRequestHost": body.Host != "", "httpsPorts": body.HTTPSPorts != nil,
	} {
		if set {
			return 0, nil, answers.Refused("network."+name, "it is set when a sandbox is created")
		}
	}
	n, err := body.network(nil, s.opensPrivate(r))
	if err != nil {
		return 0, nil, err
	}
	if b.paused() {
		return 0, nil, answers.Fail(http.StatusConflict, "the sandbox is paused")
	}
	if b.record.Spec.Network != spec.NetworkTAP {
		return 0, nil, answers.Refused("network", "the sandbox has none")
	}
	if _, err := b.SetPolicy(r.Context(), policy(n, s.o.DNS)); err != nil {
		return 0, nil, err
	}
	return http.StatusNoContent, nil, s.edit(r.Context(), b.Name(), func(l *spec.Metadata) {
		n.Private, n.Host, n.HTTPSPorts = l.E2B.Network.Private, l.E2B.Network.Host, l.E2B.Network.HTTPSPorts
		l.E2B.Network = n
	})
}

// listed is a sandbox in a list.
type listed struct {
	TemplateID  string            `json:"templateID"`
	SandboxID   string            `json:"sandboxID"`
	ClientID    string            `json:"clientID"`
	StartedAt   time.Time         `json:"startedAt"`
	EndAt       time.Time         `json:"endAt"`
	CPUCount    int               `json:"cpuCount"`
	MemoryMB    int               `json:"memoryMB"`
	DiskSizeMB  int               `json:"diskSizeMB"`
	State       string            `json:"state"`
	EnvdVersion string            `json:"envdVersion"`
	Metadata    map[string]string `json:"metadata,omitempty"`
}

const (
	stateRunning = "running"
	statePaused  = "paused"
)

func (b *box) listed() listed {
	l := listed{
		TemplateID: b.meta.E2B.Template, SandboxID: b.Name(), ClientID: clientID, StartedAt: b.record.Created, EndAt: b.meta.Expires,
		CPUCount: b.record.Spec.VCPUs, MemoryMB: b.record.Spec.MemoryMiB, DiskSizeMB: b.record.Spec.DiskMiB,
		State: stateRunning, EnvdVersion: EnvdVersion, Metadata: b.meta.E2B.Metadata,
	}
	if b.paused() || b.ending(time.Now()) {
		l.State = statePaused
	}
	if b.paused() || l.EndAt.IsZero() {
		l.EndAt = l.StartedAt
		if n := len(b.record.Sleeps); n > 0 {
			l.EndAt = b.record.Sleeps[n-1].Asleep
		}
	}
	return l
}

// detailed is a sandbox in full.
type detailed struct {
	listed
	EnvdToken string        `json:"envdAccessToken,omitempty"` // not for keys that may only read
	Domain    *string       `json:"domain"`
	Internet  bool          `json:"allowInternetAccess"`
	Network   networkOut    `json:"network"`
	Lifecycle lifecycleBody `json:"lifecycle"`
}

type networkOut struct {
	AllowOut []string `json:"allowOut,omitempty"`
	DenyOut  []string `json:"denyOut,omitempty"`
	Public   bool     `json:"allowPublicTraffic"`
	Host     string   `json:"maskRequestHost,omitempty"`
	HTTPS    []uint16 `json:"httpsPorts,omitempty"`
}

type lifecycleBody struct {
	Resume    bool   `json:"autoResume"`
	OnTimeout string `json:"onTimeout"`
}

func (s *Server) detail(_ http.ResponseWriter, r *http.Request, b *box) (int, any, error) {
	t := ""
	if mayAct(keyOf(r.Context())) {
		var err error
		if t, err = token(s.host.State, b.record, useEnvd); err != nil {
			return 0, nil, err
		}
	}
	n := b.meta.E2B.Network
	out := detailed{
		listed: b.listed(), EnvdToken: t, Domain: s.domain(), Internet: !n.NoInternet && b.record.Spec.Network == spec.NetworkTAP,
		Network: networkOut{n.AllowOut, n.DenyOut, !n.Private, n.Host, n.HTTPSPorts}, Lifecycle: lifecycleBody{b.meta.E2B.Resume, "kill"},
	}
	if b.meta.E2B.Pause {
		out.Lifecycle.OnTimeout = "pause"
	}
	return http.StatusOK, out, nil
}

// boxes returns the sandboxes of this wire that a key reaches.
func (s *Server) boxes(ctx context.Context, key tokens.Token) ([]*box, error) {
	// A record that cannot be read is reported elsewhere, and hides only itself.
	records, err := s.host.State.List()
	if len(records) == 0 && err != nil {
		return nil, err
	}
	var out []*box
	now := time.Now()
	elsewhere := map[string]bool{}
	if s.o.Cluster != nil {
		others := s.o.Cluster.Others(ctx)
		for _, p := range others.Problems {
			s.report("list", "", errors.New(p))
		}
		for _, o := range others.List {
			name := o.Record.Spec.Name
			if others.Held(name) || !idRE.MatchString(name) {
				continue
			}
			elsewhere[name] = true
			if b := (&box{s.host.Sandbox(name), o.Record, o.Metadata}); o.Metadata.E2B != nil && b.isOf(key) && !b.gone(now) {
				out = append(out, b)
			}
		}
	}
	for _, r := range records {
		if elsewhere[r.Spec.Name] || !idRE.MatchString(r.Spec.Name) || r.Creating() {
			continue
		}
		m, err := s.host.State.Metadata(r.Spec.Name)
		if err != nil || m.E2B == nil {
			continue
		}
		if b := (&box{s.host.Sandbox(r.Spec.Name), r, m}); b.isOf(key) && !b.gone(now) {
			out = append(out, b)
		}
	}
	return out, nil
}

// unescaped decodes a word of a filter once more: older clients encode both key and value twice.
func unescaped(v string) string {
	if out, err := url.PathUnescape(v); err == nil {
		return out
	}
	return v
}

func (s *Server) list(w http.ResponseWriter, r *http.Request) (int, any, error) {
	q := r.URL.Query()
	want, err := url.ParseQuery(q.Get("metadata"))
	if err != nil {
		return 0, nil, answers.Fail(http.StatusBadRequest, "metadata: use KEY=VALUE&KEY=VALUE, encoded as a query")
	}
	states := strings.FieldsFunc(strings.Join(q["state"], ","), func(r rune) bool { return r == ',' })
	if strings.HasPrefix(r.URL.Path, "/sandboxes") {
		states = []string{stateRunning} // the older route knows no others
	}
	for _, st := range states {
		if st != stateRunning && st != statePaused {
			return 0, nil, answers.Fail(http.StatusBadRequest, "state: use running and paused")
		}
	}
	var after time.Time
	if text := q.Get("startedAfter"); text != "" {
		if after, err = time.Parse(time.RFC3339, text); err != nil {
			return 0, nil, answers.Fail(http.StatusBadRequest, "startedAfter: use a time of RFC 3339")
		}
	}
	order := q.Get("order")
	if order != "" && order != "asc" && order != "desc" {
		return 0, nil, answers.Fail(http.StatusBadRequest, "order: use asc or desc")
	}
	all, err := s.boxes(r.Context(), keyOf(r.Context()))
	if err != nil {
		return 0, nil, err
	}
	rows, running := []listed{}, 0
	for _, b := range all {
		l := b.listed()
		if l.State == stateRunning {
			running++
		}
		ok := (len(states) == 0 || slices.Contains(states, l.State)) && (after.IsZero() || l.StartedAt.After(after))
		if t := q.Get("template"); t != "" {
			ok = ok && l.TemplateID == t
		}
		for k, v := range want {
			have, there := l.Metadata[k]
			if !there {
				have, there = l.Metadata[unescaped(k)]
			}
			ok = ok && there && (have == v[0] || have == unescaped(v[0]))
		}
		if ok {
			rows = append(rows, l)
		}
	}
	key := func(l listed) string { return answers.Position(l.StartedAt, l.SandboxID) }
	if order == "asc" {
		key = func(l listed) string { return fmt.Sprintf("%020d %s", l.StartedAt.UnixNano(), l.SandboxID) }
	}
	slices.SortFunc(rows, func(a, b listed) int { return cmp.Compare(key(a), key(b)) })
	w.Header().Set("X-Total-Running", strconv.Itoa(running))
	rows, err = answers.Page(w, q, rows, key)
	return http.StatusOK, rows, err
}
