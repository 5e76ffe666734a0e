//go:build browser

package browsertest

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/internal/test/chromium"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/web"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/fleet/fleettest"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

var shots = flag.String("shots", "", "write screenshots into this directory")

// patience is how long a test waits for a page. Results do not depend on it.
const patience = 2 * time.Minute

// host serves the API and the page on VMs in memory. It adds answers that these do not give.
type host struct {
	vms sandboxtest.VMs
	fleettest.Sandboxes
	tokens *tokens.Store
	writes string // a token
	page   http.Handler
	flows  []netpolicy.FlowRecord
	stats  sandbox.Stats
	events bool // there is a stream of events
	url    string

	mu      sync.Mutex // guards the fields below
	console string
	wakes   int
	fails   error // the error of wakes, if not nil
	// between, if not nil, may answer a request in the place of next.
	between func(w http.ResponseWriter, r *http.Request, next http.Handler)
	sockets []net.Conn // of WebSockets
}

// cut ends all WebSockets as a network does that fails.
func (h *host) cut() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.sockets {
		_ = c.Close() // it may have ended
	}
	h.sockets = nil
}

// meanwhile sets what stands between the page and the server from now on.
func (h *host) meanwhile(f func(w http.ResponseWriter, r *http.Request, next http.Handler)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.between = f
}

// started is the VMs.Fail function: it counts wakes, and fails them if h.fails is set.
func (h *host) started(op, _ string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if op != "restore" {
		return nil
	}
	h.wakes++
	return h.fails
}

func (h *host) woken() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.wakes
}

// follow writes a stream of events: a line for each change.
func (h *host) follow(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/x-ndjson")
	out := http.NewResponseController(w)
	last := ""
	for n := 0; ; n++ {
		stamps, _ := h.Host.State.FileStamps() // on an error the next round tries again
		if now := fmt.Sprint(stamps); now != last {
			last = now
			fmt.Fprintf(w, "{\"version\":1,\"cursor\":\"c%d\",\"type\":\"sandbox.updated\"}\n", n)
		}
		_ = out.Flush() // the client may have left
		select {
		case <-r.Context().Done():
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (h *host) text() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.console
}

func (h *host) print(s string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.console += s
}

func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{tokens: tokens.Open(filepath.Join(t.TempDir(), tokens.File))}
	h.vms.Commands = map[string]fakeguest.Command{"python3": func(context.Context, *fakeguest.Process) int { return 0 }}
	h.vms.Fail = h.started
	h.Sandboxes = fleettest.Of(h.vms.Host(t), fleet.Options{})
	var err error
	if h.writes, err = h.tokens.Create(tokens.Token{Name: "writer", Scopes: tokens.All()}); err != nil {
		t.Fatal(err)
	}
	if h.page, err = web.Handler(); err != nil {
		t.Fatal(err)
	}
	return h
}

// serve starts the server with the settings made so far.
func (h *host) serve(t *testing.T) {
	t.Helper()
	o := api.Options{
		Host: h.Host, Tokens: h.tokens, Version: "test", Resolvers: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")},
		Mounts: []api.Mount{{Pattern: "GET /{$}", Handler: h.page}, {Pattern: "GET " + web.Prefix, Handler: h.page}},
	}
	if h.events {
		o.Mounts = append(o.Mounts, api.Mount{Pattern: "GET /v1/events", Scope: api.ScopeRead, Handler: http.HandlerFunc(h.follow), Long: true})
	}
	mux := http.NewServeMux()
	mux.Handle("/", api.New(o))
	for path, answer := range map[string]func() any{
		"stats": func() any { return h.stats },
		"flows": func() any { return wire.Flows{Flows: append([]netpolicy.FlowRecord{}, h.flows...)} },
	} {
		mux.HandleFunc("GET /v1/sandboxes/{name}/"+path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(answer()) // the client may have left
		})
	}
	mux.HandleFunc("GET /v1/sandboxes/{name}/console", func(w http.ResponseWriter, r *http.Request) {
		text := h.text()
		if n, err := strconv.Atoi(r.URL.Query().Get("tail")); err == nil {
			text = text[max(0, len(text)-n):]
		}
		w.Header().Set("Content-Type", "application/octet-stream")
		_, _ = io.WriteString(w, text) // the client may have left
	})
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.mu.Lock()
		between := h.between
		h.mu.Unlock()
		if between == nil {
			mux.ServeHTTP(w, r)
			return
		}
		between(w, r, mux)
	}))
	s.Config.ConnState = func(c net.Conn, state http.ConnState) {
		if state == http.StateHijacked {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.sockets = append(h.sockets, c)
		}
	}
	s.Start()
	t.Cleanup(func() {
		h.cut()
		s.CloseClientConnections()
		s.Close()
	})
	h.url = s.URL
}

func (h *host) run(t *testing.T, name string, m spec.Metadata) {
	t.Helper()
	if _, err := h.Create(t.Context(), records.Request{Spec: sandbox.Spec{Name: name, Image: sandboxtest.Image, MemoryMiB: 512}, Metadata: m}); err != nil {
		t.Fatal(err)
	}
}

func (h *host) sleep(t *testing.T, name string) {
	t.Helper()
	if _, err := h.Sleep(t.Context(), name, sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
}

func (h *host) end(t *testing.T, name string) {
	t.Helper()
	if err := h.Host.Sandbox(name).Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (h *host) fork(t *testing.T, name string, children ...string) {
	t.Helper()
	var c []records.Child
	for _, n := range children {
		c = append(c, records.Child{Name: n})
	}
	if _, err := h.Fork(t.Context(), name, c); err != nil {
		t.Fatal(err)
	}
}

func (h *host) exec(t *testing.T, name string, argv ...string) {
	t.Helper()
	var exit *guest.ExitError
	if _, err := h.Host.Sandbox(name).Exec(t.Context(), guest.Cmd{Argv: argv}); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
}

// tab is a page under test.
type tab struct {
	*chromium.Page
	t    *testing.T
	ctx  context.Context
	host *host
	// expected lists parts of messages about answers that the test provokes.
	expected []string
}

// open opens a tab at a hash of the page. At its end the test checks what the page has logged. Only expected
// messages may be errors, the policy must not refuse anything, and all requests must go to the server.
func open(t *testing.T, b *chromium.Browser, h *host, hash string, width, height int) *tab {
	t.Helper()
	return openWith(t, b, h, h.writes, hash, width, height)
}

// openWith opens a tab, with a token unless that is empty.
func openWith(t *testing.T, b *chromium.Browser, h *host, token, hash string, width, height int) *tab {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	p, err := b.NewPage(ctx, width, height)
	if err != nil {
		t.Fatal(err)
	}
	tb := &tab{Page: p, t: t, ctx: ctx, host: h}
	if !h.events {
		tb.expected = []string{"/v1/events?"}
	}
	if token != "" {
		given := `if (location.protocol === 'http:') sessionStorage.setItem('drowse-token', ` + quote(token) + `)`
		tb.must(p.Call(ctx, "Page.addScriptToEvaluateOnNewDocument", map[string]any{"source": given}, nil))
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		for _, bad := range tb.complaints() {
			t.Errorf("the page says: %+v", bad)
		}
		for _, r := range p.Requests() {
			if _, url, _ := strings.Cut(r, " "); !strings.HasPrefix(url, h.url+"/") && url != "about:blank" {
				t.Errorf("the page asks for %s", r)
			}
		}
		if err := p.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	tb.must(p.Open(ctx, h.url+"/ui/"+hash))
	return tb
}

func (b *tab) complaints() (out []chromium.Entry) {
entries:
	for _, e := range b.Entries() {
		if e.Source != "violation" && e.Level != "error" && e.Level != "warning" {
			continue
		}
		for _, x := range b.expected {
			if e.Source == "network" && strings.Contains(e.Text, x) {
				continue entries
			}
		}
		out = append(out, e)
	}
	return out
}

func (b *tab) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *tab) wait(expression string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	if err := b.Wait(ctx, expression); err != nil {
		b.shot("failed")
		b.t.Fatal(err)
	}
}

func quote(s string) string {
	q, _ := json.Marshal(s)
	return string(q)
}

// sees waits for a text in the main part of the page.
func (b *tab) sees(text string) {
	b.t.Helper()
	b.wait(`document.querySelector('main').innerText.includes(` + quote(text) + `)`)
}

func (b *tab) click(selector string) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	if err := b.Click(ctx, selector); err != nil {
		b.shot("failed")
		b.t.Fatal(err)
	}
}

func (b *tab) press(key string) {
	b.t.Helper()
	b.must(b.Press(b.ctx, key))
}

func (b *tab) fill(selector, text string) {
	b.t.Helper()
	b.click(selector)
	b.must(b.Eval(b.ctx, `document.querySelector(`+quote(selector)+`).select()`, nil))
	b.must(b.Type(b.ctx, text))
}

func (b *tab) choose(selector, value string) {
	b.t.Helper()
	b.wait(`[...document.querySelector(` + quote(selector) + `).options].some((o) => o.value === ` + quote(value) + `)`)
	b.must(b.Eval(b.ctx, `(() => { const e = document.querySelector(`+quote(selector)+`); e.value = `+quote(value)+`; e.dispatchEvent(new Event('change', {bubbles: true})); })()`, nil))
}

func (b *tab) names() (out []string) {
	b.t.Helper()
	b.must(b.Eval(b.ctx, `[...document.querySelectorAll('#sandboxes tbody tr')].map((r) => r.cells[0].querySelector('a').textContent)`, &out))
	return out
}

func (b *tab) lists(names ...string) {
	b.t.Helper()
	names = append([]string{}, names...) // an empty list must become []
	b.wait(`JSON.stringify([...document.querySelectorAll('#sandboxes tbody tr')].map((r) => r.cells[0].querySelector('a').textContent)) === ` + quote(string(mustJSON(names))))
}

func mustJSON(v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return text
}

func (b *tab) str(expression string) (out string) {
	b.t.Helper()
	b.must(b.Eval(b.ctx, expression, &out))
	return out
}

// shot writes a screenshot if the user wants them.
func (b *tab) shot(name string) {
	b.t.Helper()
	if *shots == "" {
		return
	}
	f, err := os.Create(filepath.Join(*shots, name+".png"))
	b.must(err)
	b.must(b.Screenshot(b.ctx, f))
	b.must(f.Close())
}

func (b *tab) scheme(dark bool) {
	b.t.Helper()
	value := "light"
	if dark {
		value = "dark"
	}
	b.must(b.Call(b.ctx, "Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": value}}}, nil))
}

// hostile lists texts that guests and users choose, to put markup, scripts or a text order of their own into a
// page.
var hostile = []string{
	`<script>window.pwned = 1</script>`, `"><img src=x onerror="window.pwned = 1">`, `javascript:window.pwned=1`, "rtl \u202etxt.exe\u202c", "zero\u200bwidth", "\u0007bell\u001b[31mred",
	`{{constructor.constructor('window.pwned=1')()}}`, `</td></table><a href="//elsewhere.example/">here</a>`,
}

func TestPage_in_a_browser(t *testing.T) {
	path, err := chromium.Find()
	if err != nil {
		t.Fatal(err)
	}
	b, err := chromium.Start(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	for _, c := range []struct {
		name string
		test func(*testing.T, *chromium.Browser)
	}{
		{"list shows what the server has and filters it", testList},
		{"without events the list is asked for again", testPolling},
		{"list of a thousand has pages and stays quick", testThousand},
		{"buttons do what they say", testButtons},
		{"errors show code and remedy", testErrors},
		{"hostile texts are shown and do nothing", testHostile},
		{"the policy refuses markup of texts", testPolicy},
		{"lineage is a tree for keys", testLineage},
		{"snapshots are below their bases", testSnapshots},
		{"history, flows and stats show what was", testDetails},
		{"console follows", testConsole},
		{"tokens are asked for and kept for the tab", testTokens},
		{"back leads back", testBack},
		{"narrow screens need no sideways scrolling", testNarrow},
		{"a hidden tab asks for nothing", testHidden},
		{"create by mouse, twice clicked, makes one", testCreate},
		{"create by keys alone on a narrow screen", testCreateByKeys},
		{"create shows errors at their fields", testCreateErrors},
		{"terminal by mouse", testTerminal},
		{"terminal by keys alone on a narrow screen", testTerminalByKeys},
		{"terminal goes on after a cut and a sleep", testTerminalOutlives},
		{"terminal says why it is refused", testTerminalRefused},
		{"files by mouse", testFiles},
		{"files by keys alone on a narrow screen", testFilesByKeys},
		{"files fail in the middle and say so", testFilesFail},
		{"policy is edited, and not over another's", testPolicyEdit},
		{"policy takes what was denied by keys alone", testPolicySuggestions},
		{"images, templates and the host", testImages},
		{"narrower tokens see why controls are off", testScopes},
		{"hostile names do nothing in the new views", testHostileViews},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, b) })
	}
}

func someSandboxes(t *testing.T, h *host) {
	h.run(t, "build", spec.Metadata{Owner: "team-ci", Tags: []string{"ci", "nightly"}, Purpose: "builds of main"})
	h.run(t, "notebook", spec.Metadata{Owner: "research", Tags: []string{"gpu=no"}, Expires: time.Now().Add(72 * time.Hour)})
	h.run(t, "agent", spec.Metadata{Owner: "team-ci", Tags: []string{"ci"}})
	h.run(t, "old", spec.Metadata{Owner: "research"})
	h.sleep(t, "notebook")
	h.end(t, "old")
}

func testList(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.events = true
	someSandboxes(t, h)
	h.serve(t)
	p := open(t, b, h, "", 1280, 720)
	p.lists("agent", "build", "notebook", "old")
	p.sees("4 sandboxes")
	p.wait(`document.querySelector('#link').textContent === 'live'`)
	p.shot("list")
	row := p.str(`document.querySelector('#sandboxes tbody tr:nth-child(3)').innerText.replace(/\s+/g, ' ')`)
	for _, want := range []string{"notebook asleep research gpu=no test 512 MiB never in 2 d"} {
		if !strings.HasPrefix(row, want) {
			t.Errorf("the row of notebook is %q: want %q", row, want)
		}
	}
	if title := p.str(`document.querySelector('#sandboxes tbody tr:nth-child(3) time').title`); len(title) != len("2006-01-02 15:04:05 +00:00") {
		t.Errorf("the exact time is %q", title)
	}

	p.fill("#filter-q", "RESEARCH old")
	p.lists("old")
	p.sees("1 of 4 sandboxes")
	p.wait(`location.hash === '#/?q=RESEARCH+old'`)
	p.fill("#filter-q", "nothing is so")
	p.lists()
	p.sees("No sandbox is like that.")
	p.fill("#filter-q", "")
	p.must(p.Eval(p.ctx, `(() => { const q = document.querySelector('#filter-q'); q.value = ''; q.dispatchEvent(new Event('input')); })()`, nil))
	p.choose("#filter-owner", "team-ci")
	p.lists("agent", "build")
	p.choose("#filter-tag", "nightly")
	p.lists("build")
	p.choose("#filter-owner", "")
	p.choose("#filter-tag", "")
	p.choose("#filter-status", "asleep")
	p.lists("notebook")
	p.choose("#filter-status", "")

	p.click("#sandboxes th:nth-child(1) button") // already sorted by name: reverse the order
	p.lists("old", "notebook", "build", "agent")
	p.click("#sandboxes th:nth-child(2) button")
	p.lists("agent", "build", "notebook", "old")
	p.wait(`document.querySelector('#sandboxes th:nth-child(2)').getAttribute('aria-sort') === 'ascending'`)

	// Changes on the server show without a reload, and rows that stay are the same elements.
	p.must(p.Eval(p.ctx, `window.kept = document.querySelector('#sandboxes tbody tr')`, nil))
	if _, err := h.Wake(t.Context(), "notebook"); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Delete(t.Context(), "old"); err != nil {
		t.Fatal(err)
	}
	h.run(t, "zebra", spec.Metadata{})
	p.lists("agent", "build", "notebook", "zebra")
	p.wait(`document.querySelectorAll('#sandboxes [data-status=running]').length === 4`)
	p.wait(`window.kept === document.querySelector('#sandboxes tbody tr')`)
}

func testPolling(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	someSandboxes(t, h)
	h.meanwhile(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.URL.Path == "/v1/events" {
			http.NotFound(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
	h.serve(t)
	p := open(t, b, h, "", 1280, 720)
	p.wait(`document.querySelector('#link').textContent === 'polling'`)
	p.lists("agent", "build", "notebook", "old")
	h.run(t, "new", spec.Metadata{})
	p.lists("agent", "build", "new", "notebook", "old")
}

func testThousand(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.run(t, "vm-0000", spec.Metadata{})
	h.sleep(t, "vm-0000")
	record, err := os.ReadFile(h.Host.State.RecordPath("vm-0000"))
	if err != nil {
		t.Fatal(err)
	}
	first, err := h.Get(t.Context(), "vm-0000")
	if err != nil {
		t.Fatal(err)
	}
	for i := 1; i < 1234; i++ {
		name := fmt.Sprintf("vm-%04d", i)
		own := strings.NewReplacer("vm-0000", name, first.ID, fmt.Sprintf("%032x", i)).Replace(string(record))
		if err := errors.Join(os.Mkdir(h.Host.State.VMDir(name), 0o700), os.WriteFile(h.Host.State.RecordPath(name), []byte(own), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	h.serve(t)
	p := open(t, b, h, "", 1280, 720)
	p.sees("1,234 sandboxes")
	if n := len(p.names()); n != 100 {
		t.Errorf("%d rows are in the document: want 100", n)
	}
	p.click("[data-page=next]")
	p.wait(`document.querySelector('#sandboxes tbody a').textContent === 'vm-0100'`)
	p.wait(`location.hash === '#/?page=2'`)
	p.shot("thousand")
	p.fill("#filter-q", "vm-1233")
	p.lists("vm-1233")
	p.wait(`location.hash === '#/?q=vm-1233'`)
}

func testButtons(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	someSandboxes(t, h)
	h.serve(t)
	p := open(t, b, h, "#/sandbox/notebook", 1280, 720)
	p.wait(`document.querySelector('.heading [data-status=asleep]')`)
	p.shot("sandbox")
	p.wait(`document.querySelector('[data-op=sleep]').getAttribute('aria-disabled') === 'true'`)
	p.click("[data-op=wake]")
	p.wait(`document.querySelector('.heading [data-status=running]')`)
	if wakes := h.woken(); wakes != 1 {
		t.Errorf("%d wakes", wakes)
	}
	p.sees("Awake, in")
	// A disabled button does nothing.
	p.click("[data-op=wake]")
	p.click("[data-op=sleep]")
	p.wait(`document.querySelector('.heading [data-status=asleep]')`)
	if wakes := h.woken(); wakes != 1 {
		t.Errorf("a button that is off was pressed: %d wakes", wakes)
	}

	p.click("[data-op=fork]")
	p.wait(`document.querySelector('dialog').open`)
	p.fill("#field-count", "2")
	p.fill("#field-name", "try")
	p.shot("fork")
	p.press("Enter")
	p.sees("Forked, in")
	p.wait(`document.querySelector('#done a[href="#/sandbox/try-2"]')`)
	for _, name := range []string{"try-1", "try-2"} {
		if s, err := h.Get(t.Context(), name); err != nil || s.Parent != "notebook" {
			t.Errorf("%s: %+v, %v", name, s, err)
		}
	}

	// The page asks before it destroys something, and Enter alone does not confirm.
	p.click("[data-op=delete]")
	p.wait(`document.querySelector('dialog').open && document.activeElement.textContent === 'Cancel'`)
	p.shot("delete")
	p.press("Enter")
	p.wait(`!document.querySelector('dialog').open`)
	if _, err := h.Get(t.Context(), "notebook"); err != nil {
		t.Fatal(err)
	}
	p.click("[data-op=delete]")
	p.click("dialog button.danger")
	p.lists("agent", "build", "old", "try-1", "try-2")
	if _, err := h.Get(t.Context(), "notebook"); err == nil {
		t.Error("it is still there")
	}
}

func testErrors(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	someSandboxes(t, h)
	h.fails = spec.ErrExpired
	h.serve(t)
	p := open(t, b, h, "#/sandbox/notebook", 1280, 720)
	p.expected = append(p.expected, "/wake", "/sandboxes/nobody")
	p.click("[data-op=wake]")
	p.wait(`document.querySelector('#notices .notice')`)
	said := p.str(`document.querySelector('#notices').innerText`)
	for _, want := range []string{"Wake notebook: ", "What to do: extend it", "Code: expired"} {
		if !strings.Contains(said, want) {
			t.Errorf("the notice is %q: want %q in it", said, want)
		}
	}
	p.shot("error")
	p.click("#notices button")
	p.wait(`!document.querySelector('#notices .notice')`)
	p.must(p.Eval(p.ctx, `location.hash = '#/sandbox/nobody'`, nil))
	p.sees("There is no sandbox of this name now.")
	p.wait(`document.querySelector('.actions').hidden`)
}

func testHostile(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.run(t, "evil", spec.Metadata{Owner: `<script>window.pwned=1</script>`, Purpose: `"><img src=x onerror=window.pwned=1>`, Tags: []string{`<b>bold</b>`, `x"onmouseover="window.pwned=1`}})
	for _, s := range hostile {
		h.exec(t, "evil", "echo", s)
		h.flows = append(h.flows, flow("allow", s, s))
		h.print(s + "\r\n")
	}
	h.print("\x1b]0;title\x07\x1b[2J\x1b[1;31mred\x1b[0m plain\r\n" + "one\rtwo\r\n" + string([]byte{0xff, 0xfe, '\n'}))
	if _, err := h.Host.Sandbox("evil").Snapshot(t.Context(), sandbox.SnapshotOptions{Note: hostile[1]}); err != nil {
		t.Fatal(err)
	}
	h.serve(t)
	p := open(t, b, h, "", 1280, 720)
	harmless := func(where string) {
		t.Helper()
		p.must(p.Eval(p.ctx, `new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))`, nil))
		if p.str(`String(window.pwned)`) != "undefined" {
			t.Errorf("a script ran in %s", where)
		}
		var n int
		p.must(p.Eval(p.ctx, `document.querySelectorAll('main script, main img, main iframe, main b, main a[href^="javascript"], main a[href*="//"]').length`, &n))
		if n != 0 {
			t.Errorf("%d elements are made of texts in %s", n, where)
		}
		if shown := p.str(`document.querySelector('main').textContent`); strings.ContainsAny(shown, "\u202e\u202c\u200b\u0007\u001b\u009b\ufffe") {
			t.Errorf("what cannot be seen is in %s: %q", where, shown)
		}
	}
	p.lists("evil")
	p.sees(`<script>window.pwned=1</script>`)
	p.sees(`<b>bold</b>`)
	harmless("the list")
	p.click(`#sandboxes a[href="#/sandbox/evil"]`)
	p.sees(`"><img src=x onerror=window.pwned=1>`)
	harmless("the overview")
	p.click(`.tabs a[href$="/history"]`)
	p.sees(`</td></table>`)
	p.sees(`'rtl \u{202e}txt.exe\u{202c}'`)
	p.sees(`'zero\u{200b}width'`)
	p.shot("hostile-history")
	harmless("the history")
	p.click(`.tabs a[href$="/flows"]`)
	p.sees(`javascript:window.pwned=1`)
	harmless("the flows")
	p.click(`.tabs a[href$="/console"]`)
	p.sees("red plain\none\ntwo\n")
	p.sees(`\u{7}bellred`)
	p.shot("hostile-console")
	harmless("the console")
	p.click(`.tabs a[href$="/snapshots"]`)
	p.sees("1 snapshot")
	harmless("the snapshots")
	p.click(`header a[href="#/lineage"]`)
	p.click("#all")
	p.sees("evil")
	harmless("the lineage")
	// An address may come from a stranger.
	for _, hash := range []string{`#/sandbox/%3Cimg%20src=x%20onerror=window.pwned=1%3E`, `#/sandbox/..%2F..%2Fv1/flows`, `#/?q=%3Cscript%3E&status=%22%3E&sort=__proto__&page=-1`, `#/sandbox/%ff/__proto__`, `#/snapshots?id=%3Cb%3E`} {
		p.expected = append(p.expected, "/v1/sandboxes/")
		p.must(p.Eval(p.ctx, `location.hash = `+quote(hash), nil))
		p.wait(`document.querySelector('main h1')`)
		harmless(hash)
	}
}

// The test shows that the checks of the other tests find a violation if there is one.
func testPolicy(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.serve(t)
	p := open(t, b, h, "", 800, 600)
	p.sees("There are no sandboxes.")
	if c := p.complaints(); len(c) != 0 {
		t.Fatalf("the page says %+v", c)
	}
	before := len(p.complaints())
	for what, script := range map[string]string{
		"markup of a text":        `try { document.body.innerHTML = '<img src=x onerror="window.pwned=1">' } catch {}`,
		"an inline script":        `{ const s = document.createElement('script'); try { s.textContent = 'window.pwned=1' } catch {} document.body.append(s) }`,
		"an inline style":         `document.body.setAttribute('style', 'color: red')`,
		"a request to elsewhere":  `fetch('https://elsewhere.invalid/').catch(() => {})`,
		"an image from elsewhere": `{ const i = new Image(); i.src = 'https://elsewhere.invalid/x.png' }`,
	} {
		p.must(p.Eval(p.ctx, `(async () => { `+script+` ; await new Promise((done) => setTimeout(done, 0)) })()`, nil))
		deadline := time.Now().Add(patience)
		for len(p.complaints()) == before && time.Now().Before(deadline) {
			time.Sleep(10 * time.Millisecond)
		}
		if n := len(p.complaints()); n == before {
			t.Errorf("%s is not refused", what)
		} else {
			before = n
		}
	}
	if p.str(`String(window.pwned)`) != "undefined" {
		t.Error("a script ran")
	}
	p.must(p.Open(p.ctx, "about:blank"))
	// These complaints were wanted. So was the request to elsewhere, which the browser never sent.
	p.Forget()
}

func testLineage(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.run(t, "root", spec.Metadata{Owner: "team"})
	h.run(t, "alone", spec.Metadata{})
	h.fork(t, "root", "left", "right")
	h.fork(t, "left", "leaf-1", "leaf-2")
	h.run(t, "gone", spec.Metadata{})
	h.fork(t, "gone", "orphan")
	if _, err := h.Delete(t.Context(), "gone"); err != nil {
		t.Fatal(err)
	}
	h.serve(t)
	p := open(t, b, h, "#/lineage", 1280, 720)
	p.sees("2 families; 1 sandbox without forks")
	p.shot("lineage")
	const seen = `[...document.querySelectorAll('[role=treeitem]')].map((e) => e.getAttribute('aria-level') + e.dataset.name).join(' ')`
	if got := p.str(seen); got != "1gone 2orphan 1root 2left 3leaf-1 3leaf-2 2right" {
		t.Errorf("the tree is %q", got)
	}
	p.sees("gone (removed)")
	focus := func(name string) {
		t.Helper()
		p.wait(`document.activeElement.dataset.name === ` + quote(name) + ` && document.activeElement.tabIndex === 0 && document.querySelectorAll('[role=treeitem][tabindex="0"]').length === 1`)
	}
	p.click("#all")
	p.wait(`location.hash === '#/lineage?all=1'`)
	p.sees("3 families")
	p.press("Tab")
	p.press("End")
	focus("right")
	p.press("ArrowUp")
	focus("leaf-2")
	p.press("ArrowLeft")
	focus("left")
	p.press("ArrowLeft") // closes the node
	p.wait(seen + ` === '1alone 1gone 2orphan 1root 2left 2right'`)
	p.press("ArrowDown")
	focus("right")
	p.press("ArrowUp")
	p.press("ArrowRight")
	p.wait(seen + ` === '1alone 1gone 2orphan 1root 2left 3leaf-1 3leaf-2 2right'`)
	p.press("ArrowRight")
	focus("leaf-1")
	p.press("Enter")
	p.wait(`location.hash === '#/sandbox/leaf-1'`)
	p.sees("generation 2")
}

func testSnapshots(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.run(t, "a", spec.Metadata{})
	if err := h.vms.Guest("a").WriteFile("/run/x", []byte(strings.Repeat("x", 5000))); err != nil {
		t.Fatal(err)
	}
	res, err := h.Host.Sandbox("a").Snapshot(t.Context(), sandbox.SnapshotOptions{Note: "python is there"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Host.State.TagSnapshot(res.Snapshot, []string{"good", "release"}); err != nil {
		t.Fatal(err)
	}
	h.sleep(t, "a")
	h.serve(t)
	p := open(t, b, h, "#/sandbox/a/snapshots", 1280, 720)
	p.sees("2 snapshots, ")
	for _, want := range []string{"python is there", "release", "wakes from this", " KiB", "named", "sleep"} {
		p.sees(want)
	}
	p.shot("snapshots")
	p.click(`header a[href="#/snapshots"]`)
	p.sees("2 snapshots")
	p.click(`main a[href="#/snapshots?id=` + res.Snapshot + `"]`)
	p.sees(res.Snapshot)
	p.sees("none, it is whole")
	p.must(p.Eval(p.ctx, `location.hash = '#/snapshots?id=0000'`, nil))
	p.sees("There is no such snapshot any more")
	// A delta is shown below its base, whatever their ids are.
	got := p.str(`(async () => { const m = await import('/ui/snapshots.js'); return m.arranged([
		{id: 'c', base: 'b', created: '2026-01-03T00:00:00Z'}, {id: 'a', created: '2026-01-01T00:00:00Z'}, {id: 'b', base: 'a', created: '2026-01-02T00:00:00Z'},
		{id: 'd', base: 'gone', created: '2026-01-04T00:00:00Z'}, {id: 'x', base: 'y'}, {id: 'y', base: 'x'}]).map((i) => i.level + i.id).join(' ') })()`)
	if got != "0d 0a 1b 2c 0x 1y" {
		t.Errorf("they are in the order %q", got)
	}
}

func flow(verdict, name, rule string) netpolicy.FlowRecord {
	at := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	return netpolicy.FlowRecord{Type: netpolicy.RecordFlow, First: at, Last: at.Add(3 * time.Second), FlowInfo: &netpolicy.FlowInfo{
		End: netpolicy.FlowClosed, Direction: netpolicy.Egress, Protocol: "tcp", Peer: netip.MustParseAddr("203.0.113.7"), PeerPort: 443, Name: name,
		Guest: netip.MustParseAddr("10.0.0.2"), GuestPort: 40000, Verdict: netpolicy.Verdict(verdict), Reason: netpolicy.ReasonRule, Rule: rule,
		Egress: netpolicy.Count{Packets: 7, Bytes: 2048}, Ingress: netpolicy.Count{Packets: 9, Bytes: 1 << 20},
	}}
}

func testDetails(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.run(t, "a", spec.Metadata{})
	h.exec(t, "a", "python3", "-c", "print('hello')")
	h.exec(t, "a", "false")
	h.sleep(t, "a")
	h.flows = []netpolicy.FlowRecord{flow("allow", "pypi.org", "packages"), flow("deny", "tracker.example", ""), flow("reject", "", "no mail")}
	h.flows[2].PeerPort = 25
	h.flows[2].Peer = netip.MustParseAddr("2001:db8::25")
	h.flows = append(h.flows, netpolicy.FlowRecord{Type: netpolicy.RecordLost, FlowsLost: &netpolicy.FlowsLost{Flows: 4}})
	h.stats = sandbox.Stats{Name: "a", Time: time.Now(), Host: spec.HostStats{PID: 4321, AwakeMs: 65_000, MemoryPrivate: 64 << 20}, Problem: "the guest does not answer"}
	h.serve(t)
	p := open(t, b, h, "#/sandbox/a/history", 1280, 720)
	p.sees(`python3 -c 'print('\''hello'\'')'`)
	p.sees("exit 1")
	p.wait(`document.querySelectorAll('main table').length === 2`)
	p.shot("history")
	p.click(`.tabs a[href$="/flows"]`)
	p.sees("3 flows; 4 are not told of")
	p.sees("[2001:db8::25]:25")
	p.sees("1.0 MiB, 9")
	p.shot("flows")
	p.click("#denied")
	p.sees("2 flows")
	if shown := p.str(`document.querySelector('#panel tbody').innerText`); strings.Contains(shown, "pypi.org") || !strings.Contains(shown, "tracker.example") || !strings.Contains(shown, "rejected") {
		t.Errorf("denied are %q", shown)
	}
	p.fill("#flow-q", "mail")
	p.sees("1 flow")
	p.click(`.tabs a[href$="/stats"]`)
	p.sees("counts as use")
	p.click("#panel button")
	p.sees("4321")
	p.sees("the guest does not answer")
	p.sees("1 min 5 s")
	p.shot("stats")
}

func testConsole(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.run(t, "a", spec.Metadata{})
	for i := range 500 {
		h.print(fmt.Sprintf("[%d.000000] line %d of the kernel\r\n", i, i))
	}
	h.serve(t)
	p := open(t, b, h, "#/sandbox/a/console", 1280, 720)
	const bottom = `(() => { const e = document.querySelector('#console'); return e.scrollTop + e.clientHeight >= e.scrollHeight - 4 })()`
	p.sees("line 499 of the kernel")
	p.wait(bottom)
	p.shot("console")
	h.print("login: \r\n")
	p.sees("login: ")
	p.wait(bottom)
	// The view stays where the user has scrolled to.
	p.must(p.Eval(p.ctx, `document.querySelector('#console').scrollTop = 0`, nil))
	p.wait(`!document.querySelector('#follow').checked`)
	h.print("later\r\n")
	p.click("#follow")
	p.sees("later")
	p.wait(bottom)
}

func testTokens(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	someSandboxes(t, h)
	reads, err := h.tokens.Create(tokens.Token{Name: "reader", Scopes: tokens.Scopes{tokens.ScopeRead}})
	if err != nil {
		t.Fatal(err)
	}
	h.serve(t)
	p := openWith(t, b, h, "", "#/sandbox/build", 1280, 720)
	p.expected = append(p.expected, "401", "403")
	p.wait(`document.querySelector('dialog').open && document.activeElement.id === 'field-token'`)
	p.shot("token")
	p.must(p.Type(p.ctx, "wrong"))
	p.press("Enter")
	p.wait(`document.querySelector('dialog').open && document.querySelector('dialog').innerText.includes('does not accept')`)
	p.must(p.Type(p.ctx, reads))
	p.press("Enter")
	p.wait(`document.querySelector('.heading [data-status=running]')`)
	p.wait(`document.querySelectorAll('.actions [data-op][aria-disabled=true]').length === 8 && document.querySelector('#scope').textContent === 'read only'`)
	p.sees("This token has no scope “create”: it may only read.")
	p.click("[data-op=sleep]")
	p.shot("read-only")
	if kept := p.str(`sessionStorage.getItem('drowse-token') + localStorage.length + document.cookie`); kept != reads+"0" {
		t.Errorf("the tab keeps %q", kept)
	}
	// A reload keeps the token, and the address does not contain it.
	p.must(p.Open(p.ctx, h.url+"/ui/?again#/sandbox/build"))
	p.wait(`document.querySelector('.heading [data-status=running]') && !document.querySelector('dialog').open`)
	p.wait(`document.querySelector('[data-op=sleep]').getAttribute('aria-disabled') === 'true'`)
	p.click("#token")
	p.wait(`document.querySelector('dialog').open && document.activeElement.id === 'field-token'`)
	p.must(p.Type(p.ctx, h.writes))
	p.press("Enter")
	p.wait(`document.querySelector('.heading [data-status=running]') && document.querySelector('[data-op=sleep]').getAttribute('aria-disabled') === 'false' && document.querySelector('#scope').hidden`)
	p.click("[data-op=sleep]")
	p.wait(`document.querySelector('.heading [data-status=asleep]')`)
	// An answer to one question must not answer another that comes up while it is open.
	p.click("[data-op=delete]")
	p.wait(`document.querySelector('dialog').open && document.querySelector('dialog').innerText.includes('Delete build?')`)
	if err := h.tokens.Remove("writer"); err != nil {
		t.Fatal(err)
	}
	p.must(p.Eval(p.ctx, `window.refused = 0, new PerformanceObserver((l) => { refused += l.getEntries().filter((e) => e.responseStatus === 401).length }).observe({type: 'resource'})`, nil))
	p.wait(`window.refused > 0`)
	p.wait(`document.querySelector('dialog').open && document.querySelector('dialog').innerText.includes('Delete build?')`)
	p.press("Escape")
	p.wait(`document.querySelector('dialog').open && document.activeElement.id === 'field-token'`)
	p.press("Escape")
	if _, err := h.Get(t.Context(), "build"); err != nil {
		t.Errorf("it was deleted by an answer to another question: %v", err)
	}
	for _, r := range p.Requests() {
		if strings.Contains(r, reads) || strings.Contains(r, h.writes) {
			t.Errorf("a token is in an address: %s", r)
		}
	}
}

func testBack(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	someSandboxes(t, h)
	h.serve(t)
	p := open(t, b, h, "", 1280, 720)
	p.choose("#filter-status", "running")
	p.lists("agent", "build")
	p.click(`#sandboxes a[href="#/sandbox/build"]`)
	p.wait(`document.title === 'build · drowse' && document.activeElement.tagName === 'H1'`)
	p.click(`.tabs a[href$="/console"]`)
	p.wait(`document.title === 'build: console · drowse'`)
	back := func() { p.must(p.Eval(p.ctx, `history.back()`, nil)) }
	back()
	p.wait(`document.title === 'build · drowse'`)
	back()
	p.lists("agent", "build")
	p.wait(`document.querySelector('#filter-status').value === 'running'`)
	back()
	p.lists("agent", "build", "notebook", "old")
	p.wait(`document.querySelector('#filter-status').value === ''`)
}

func testNarrow(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	someSandboxes(t, h)
	h.run(t, "a-name-of-forty-characters-which-is-most", spec.Metadata{Owner: strings.Repeat("longowner", 10), Purpose: strings.Repeat("purpose", 30), Tags: []string{strings.Repeat("t", 60)}})
	h.fork(t, "a-name-of-forty-characters-which-is-most", "child-of-it")
	h.flows = []netpolicy.FlowRecord{flow("deny", strings.Repeat("long-name.", 20)+"example", strings.Repeat("rule", 16))}
	h.print(strings.Repeat("x", 500) + "\n")
	h.serve(t)
	p := open(t, b, h, "", 360, 740)
	p.scheme(true)
	for _, hash := range []string{"#/", "#/sandbox/a-name-of-forty-characters-which-is-most", "#/sandbox/a-name-of-forty-characters-which-is-most/flows", "#/sandbox/build/console", "#/lineage", "#/snapshots"} {
		p.must(p.Eval(p.ctx, `location.hash = `+quote(hash), nil))
		p.wait(`document.querySelector('main h1') && !document.querySelector('main').innerText.includes('Loading')`)
		p.shot("narrow" + strings.NewReplacer("#", "", "/", "-").Replace(hash))
		if wide := p.str(`document.documentElement.scrollWidth > innerWidth ? [...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll')).slice(0, 5).map((e) => e.outerHTML.slice(0, 120)).join('\n') || 'something' : ''`); wide != "" {
			t.Errorf("%s is wider than the screen: %s", hash, wide)
		}
	}
}

func testHidden(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	someSandboxes(t, h)
	h.serve(t)
	p := open(t, b, h, "#/sandbox/build/console", 1280, 720)
	p.sees("The console is empty.")
	set := func(hidden bool) {
		p.must(p.Eval(p.ctx, fmt.Sprintf(`(() => { Object.defineProperty(document, 'hidden', {configurable: true, value: %t}); document.dispatchEvent(new Event('visibilitychange')); })()`, hidden), nil))
	}
	set(true)
	// By then requests under way are done. In the second wait a visible tab would ask for the console three times.
	time.Sleep(500 * time.Millisecond)
	before := len(p.Requests())
	time.Sleep(5 * time.Second)
	if n := len(p.Requests()); n != before {
		t.Errorf("a hidden tab has sent %v", p.Requests()[before:])
	}
	h.print("news\n")
	set(false)
	p.sees("news")
}
