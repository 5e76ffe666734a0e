//go:build browser

package browsertest

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/test/chromium"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func (h *host) all(t *testing.T) []records.Sandbox {
	t.Helper()
	l, err := h.List(t.Context(), records.Filter{Limit: records.MaxPage})
	if err != nil {
		t.Fatal(err)
	}
	return l.Sandboxes
}

func testCreate(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.serve(t)
	p := open(t, b, h, "", 1280, 900)
	p.click("#new")
	p.wait(`document.querySelector('#new-image').value === 'image test:latest'`) // the only one
	p.fill("#new-name", "made")
	p.fill("#new-memory", "512")
	p.fill("#new-vcpus", "2")
	p.fill("#new-tags", "ci, team=web")
	p.fill("#new-purpose", "tries")
	p.fill("#new-idle", "5")
	p.fill("#new-expires", "48")
	p.wait(`!document.querySelector('#new-resolvers').checkVisibility() && !document.querySelector('#new-policy').checkVisibility()`)
	p.choose("#new-network", "own")
	p.wait(`document.querySelector('#new-policy').checkVisibility()`)
	p.both("create")
	p.choose("#new-network", "open")
	p.wait(`document.querySelector('#new-resolvers').checkVisibility() && document.querySelector('#new-resolvers').value === '192.0.2.53:53'`)
	p.must(p.Eval(p.ctx, `(() => { const b = document.querySelector('.form [type=submit]'); b.click(); b.click() })()`, nil))
	p.wait(`location.hash === '#/sandbox/made'`)
	p.sees("tries")
	s, err := h.Get(t.Context(), "made")
	if err != nil {
		t.Fatal(err)
	}
	if s.Memory != 512 || s.VCPUs != 2 || s.IdleSeconds != 300 || strings.Join(s.Tags, " ") != "ci team=web" || s.Network != spec.NetworkTAP || time.Until(s.Expires) < 47*time.Hour {
		t.Errorf("it is %+v", s)
	}
	if pol, err := h.Host.Sandbox("made").Policy(); err != nil || pol.Default.Egress != netpolicy.Allow || len(pol.DNS.Upstreams) != 1 {
		t.Errorf("its policy is %+v, %v", pol, err)
	}

	// The answer is lost, and Create is pressed again: the form is sent again with its key, and makes no second one.
	p.must(p.Eval(p.ctx, `location.hash = '#/new'`, nil))
	p.wait(`document.querySelector('#new-image').value === 'image test:latest'`)
	h.meanwhile(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Method != http.MethodPost {
			next.ServeHTTP(w, r)
			return
		}
		next.ServeHTTP(httptest.NewRecorder(), r) // the browser itself may send it again, too
		panic(http.ErrAbortHandler)
	})
	p.expected = append(p.expected, "/v1/sandboxes")
	p.fill("#new-purpose", "once")
	p.click(".form [type=submit]")
	p.sees("to press Create again makes no second one")
	p.shot("create-lost")
	h.meanwhile(nil)
	p.click(".form [type=submit]")
	p.wait(`location.hash.startsWith('#/sandbox/')`)
	if all := h.all(t); len(all) != 2 {
		t.Errorf("there are %d sandboxes, want 2: %+v", len(all), all)
	}
}

func testCreateByKeys(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.serve(t)
	p := open(t, b, h, "", 360, 740)
	p.sees("There are no sandboxes.")
	p.tabTo("#new")
	p.press("Enter")
	p.wait(`document.activeElement.tagName === 'H1' && document.querySelector('#new-image').options.length === 2`)
	p.fits("the form")
	p.shot("create-narrow")
	p.tabTo("#new-image")
	p.press("Home")
	p.press("End")
	p.tabTo("#new-name")
	p.keys("by-keys")
	p.tabTo("#new-memory")
	p.keys("8") // too little: the API says so
	p.tabTo(".form [type=submit]")
	p.expected = append(p.expected, "400")
	p.press("Enter")
	p.wait(`document.activeElement.id === 'new-memory' && document.activeElement.getAttribute('aria-invalid') === 'true'`)
	p.sees("8 MiB of memory: use 64 to 16384")
	if by := p.str(`document.activeElement.getAttribute('aria-describedby').split(' ').map((id) => document.getElementById(id).textContent).join()`); !strings.Contains(by, "use 64 to 16384") {
		t.Errorf("the field is described by %q", by)
	}
	p.fits("the form with an error")
	p.both("create-narrow-error")
	p.press("End")
	p.keys("00")
	p.press("Enter") // in a field it sends the form
	p.wait(`location.hash === '#/sandbox/by-keys'`)
	if s, err := h.Get(t.Context(), "by-keys"); err != nil || s.Memory != 800 {
		t.Errorf("%+v, %v", s, err)
	}
}

func testCreateErrors(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.run(t, "taken", spec.Metadata{})
	h.serve(t)
	p := open(t, b, h, "#/new", 1280, 900)
	p.expected = append(p.expected, "/v1/sandboxes")
	p.wait(`document.querySelector('#new-image').value === 'image test:latest'`)
	for _, c := range []struct{ field, value, want string }{
		{"name", "Upper", "use 1 to 40 lower-case letters"},
		{"name", `<img src=x onerror="window.pwned=1">`, `<img src=x onerror=`},
		{"name", "taken", "exists"},
		{"vcpus", "99", "use 1 to 8"},
		{"vcpus", "1.5", "vcpus"},
		{"memory", "1", "use 64 to 16384"},
		{"disk", "1", "use 64 to"},
		{"tags", "two words", "use a word without spaces"},
		{"idle", "999999", "sleep after"},
		{"expires", "9999999", "expires in the year"},
		{"expires", "99999999", "parsing time"},
		{"purpose", strings.Repeat("x", 2000), "use 1024 at most"},
		{"owner", strings.Repeat("x", 200), "use 128 at most"},
	} {
		p.must(p.Eval(p.ctx, `document.querySelector('#new-`+c.field+`').select()`, nil))
		p.fill("#new-"+c.field, c.value)
		p.click(".form [type=submit]")
		p.wait(`document.querySelector('#new-` + c.field + `').getAttribute('aria-invalid') === 'true' && document.querySelector('#new-` + c.field + `-error').textContent.includes(` + quote(c.want) + `)`)
		if id := p.str(`document.activeElement.id`); id != "new-"+c.field {
			t.Errorf("after an error of %s the focus is on %s", c.field, id)
		}
		p.must(p.Eval(p.ctx, `document.querySelector('#new-`+c.field+`').value = ''`, nil))
	}
	p.choose("#new-network", "own")
	policy := func(text, want string) {
		t.Helper()
		p.must(p.Eval(p.ctx, `document.querySelector('#new-policy').value = `+quote(text), nil))
		p.click(".form [type=submit]")
		p.wait(`document.querySelector('#new-policy-error').textContent.includes(` + quote(want) + `)`)
	}
	policy(`{`, "This is no JSON")
	policy(`{"rules":[{"direction":"up"}]}`, "direction")
	policy(`{"rulez":[]}`, "rulez")
	p.shot("create-errors")
	p.choose("#new-network", "none")
	p.choose("#new-image", "")
	p.click(".form [type=submit]")
	p.wait(`document.querySelector('#new-image-error').textContent.includes('no image')`)
	// What the API cannot say comes above the button.
	h.meanwhile(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Method == http.MethodPost {
			http.Error(w, "<b>bad gateway</b>", http.StatusBadGateway)
			return
		}
		next.ServeHTTP(w, r)
	})
	p.click(".form [type=submit]")
	p.sees("the server answered 502")
	if all := h.all(t); len(all) != 1 {
		t.Errorf("there are %d sandboxes", len(all))
	}
	if p.str(`String(window.pwned)`) != "undefined" {
		t.Error("a script ran")
	}
}
