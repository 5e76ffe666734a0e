//go:build browser

package browsertest

import (
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/drowse-vm/drowse/internal/test/chromium"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func testImages(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	someSandboxes(t, h)
	if _, err := h.Host.MakeTemplates(t.Context(), spec.VM{Image: sandboxtest.Image, MemoryMiB: 384, VCPUs: 2}); err != nil {
		t.Fatal(err)
	}
	h.serve(t)
	p := open(t, b, h, "#/images", 1280, 800)
	p.sees("test:latest")
	p.sees("ready")
	p.wait(`document.querySelector('#templates tbody td').textContent === 'test:latest'`)
	p.both("images")
	// What sandboxes need is not removed, and the error says so.
	p.expected = append(p.expected, "/v1/images/")
	p.click("#images button.danger")
	p.click("dialog button.danger")
	p.wait(`document.querySelector('#notices').innerText.includes('Code: image-in-use')`)
	p.shot("images-in-use")
	// From a template to a sandbox of its shape.
	p.click(`#templates a[href^="#/new?template="]`)
	p.wait(`document.querySelector('#new-memory').value === '384' && document.querySelector('#new-vcpus').value === '2'`)
	p.fill("#new-name", "from-template")
	p.click(".form [type=submit]")
	p.wait(`location.hash === '#/sandbox/from-template'`)
	if s, err := h.Get(t.Context(), "from-template"); err != nil || s.Memory != 384 || s.VCPUs != 2 {
		t.Errorf("%+v, %v", s, err)
	}
	p.must(p.Eval(p.ctx, `location.hash = '#/images'`, nil))
	// From a registry, whose last image never ends, and from none.
	at := registryOf(t)
	for _, from := range []string{at + "/app:v1", "127.0.0.1:1/none:x"} {
		p.click("#pull")
		p.fill("#field-from", from)
		p.press("Enter")
	}
	p.wait(`[...document.querySelectorAll('#pulls li')].some((l) => l.innerText.includes('app:v1') && l.innerText.includes('done'))`)
	p.wait(`[...document.querySelectorAll('#pulls li')].some((l) => l.innerText.includes('none:x') && l.innerText.includes('failed'))`)
	p.wait(`document.querySelector('#notices').innerText.includes('Adding 127.0.0.1:1/none:x')`)
	p.wait(`[...document.querySelectorAll('#images tbody tr')].some((r) => r.innerText.includes('app:v1'))`)
	p.both("images-added")
	p.click("#pull")
	p.fill("#field-from", at+"/endless:v1")
	p.fill("#field-include", "git")
	p.press("Enter")
	p.wait(`document.querySelector('#notices').innerText.includes('packages go with debian:SUITE')`)
	p.click("#pull")
	p.fill("#field-from", at+"/endless:v1")
	p.press("Enter")
	p.wait(`[...document.querySelectorAll('#pulls li')].some((l) => l.innerText.includes('endless:v1'))`)
	// Another page shows it as well, and cancels it.
	q := open(t, b, h, "#/images", 360, 740)
	q.wait(`document.querySelectorAll('#pulls li').length === 1`)
	q.fits("images on their way")
	q.tabTo("#pulls button")
	q.press("Enter")
	q.sees("canceled")
	p.wait(`[...document.querySelectorAll('#pulls li')].some((l) => l.innerText.includes('endless:v1') && l.innerText.includes('canceled'))`)
	// By keys on a narrow screen.
	q.sees("ready")
	q.fits("images")
	q.both("images-narrow")
	before := q.str(`String(document.querySelectorAll('#templates tbody tr').length)`)
	q.tabTo("#templates button.danger")
	q.press("Enter")
	q.wait(`document.querySelector('dialog').open && document.activeElement.textContent === 'Cancel'`)
	q.press("Tab")
	q.press("Enter")
	q.sees("Removed the template.")
	q.wait(`String(document.querySelectorAll('#templates tbody tr').length) !== ` + quote(before))
	q.wait(`document.activeElement.tagName === 'H1'`)
	q.tabTo(`header a[href="#/host"]`)
	q.press("Enter")
	q.sees("of the")
	q.fits("the host")
	q.both("host-narrow")

	p.must(p.Eval(p.ctx, `location.hash = '#/host'`, nil))
	p.sees("192.0.2.53:53")
	counts := p.str(`[...document.querySelectorAll('.facts > div')].map((d) => d.innerText.replace(/\s+/g, ' ').trim()).sort().join('|')`)
	if counts != "All 5 sandboxes|asleep 1|running 3|stopped 1" {
		t.Errorf("it counts %q", counts)
	}
	p.both("host")
	p.click(`.facts a[href="#/?status=asleep"]`)
	p.lists("notebook")
}

// registryOf returns the address of a registry with an image app:v1, and with another one that it never gives.
func registryOf(t *testing.T) string {
	t.Helper()
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/endless/") {
			<-r.Context().Done()
			return
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	at := strings.TrimPrefix(s.URL, "http://")
	ref, err := name.ParseReference(at + "/app:v1")
	if err != nil {
		t.Fatal(err)
	}
	img, err := random.Image(1024, 1)
	var config *v1.ConfigFile
	if err == nil {
		config, err = img.ConfigFile()
	}
	if err == nil {
		config = config.DeepCopy()
		config.OS, config.Architecture = "linux", "amd64"
		img, err = mutate.ConfigFile(img, config)
	}
	if err == nil {
		err = remote.Write(ref, img)
	}
	if err != nil {
		t.Fatal(err)
	}
	return at
}

func testScopes(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.runNet(t, "a", aPolicy())
	token := func(name, owner string, scopes ...tokens.Scope) string {
		secret, err := h.tokens.Create(tokens.Token{Name: name, Owner: owner, Scopes: scopes})
		if err != nil {
			t.Fatal(err)
		}
		return secret
	}
	reads := token("reader", "", tokens.ScopeRead)
	h.serve(t)
	p := openWith(t, b, h, reads, "#/sandbox/a/files", 360, 740)
	p.wait(`document.querySelector('#scope').textContent === 'read only'`)
	off := func(selector, scope string) {
		t.Helper()
		p.wait(`(() => { const e = document.querySelector(` + quote(selector) + `); return e && e.getAttribute('aria-disabled') === 'true' && e.title.includes('no scope “` + scope + `”') })()`)
		p.sees("This token has no scope “" + scope + "”: it may only read.")
		// It can be reached by keys, is described by the reason, and does nothing.
		by := p.str(`(() => { const e = document.querySelector(` + quote(selector) + `); const by = e.closest('[aria-describedby]')?.getAttribute('aria-describedby') ?? ''; return by.split(' ').map((id) => document.getElementById(id)?.textContent ?? '').join(' ') + e.title })()`)
		if !strings.Contains(by, scope) {
			t.Errorf("%s is described by %q", selector, by)
		}
	}
	for _, id := range []string{"#upload", "#mkdir", "#download-tree", "#refresh"} {
		off(id, "files")
	}
	p.sees("Files are shown with another token.")
	p.fits("files of a reader")
	p.shot("scopes-files")
	p.must(p.Eval(p.ctx, `location.hash = '#/sandbox/a/terminal'`, nil))
	off("#terminal-open", "exec")
	p.shot("scopes-terminal")
	p.must(p.Eval(p.ctx, `location.hash = '#/sandbox/a/policy'`, nil))
	p.sees("pypi.org")
	off("#policy-save", "create")
	p.wait(`document.querySelector('#policy-text').readOnly`)
	p.must(p.Eval(p.ctx, `location.hash = '#/images'`, nil))
	p.sees("test:latest")
	off("#images button.danger", "admin")
	off("#pull", "admin")
	p.click("#images button.danger")
	p.wait(`!document.querySelector('dialog').open`)
	p.must(p.Eval(p.ctx, `location.hash = '#/new'`, nil))
	off(".form [type=submit]", "create")
	p.wait(`document.querySelector('#new-image').value === 'image test:latest'`)
	p.click(".form [type=submit]")
	for _, r := range p.Requests() {
		if method, _, _ := strings.Cut(r, " "); method != "GET" {
			t.Errorf("a reader's page has sent %s", r)
		}
	}
	if all := h.all(t); len(all) != 1 {
		t.Errorf("there are %d sandboxes", len(all))
	}

	// A token of an owner sees its own, and is told what is not for it.
	ours := token("ours", "us", tokens.ScopeRead, tokens.ScopeCreate)
	p = openWith(t, b, h, ours, "#/host", 1280, 800)
	p.expected = append(p.expected, "403")
	p.sees("is for sandboxes of one owner")
	p.must(p.Eval(p.ctx, `location.hash = '#/new'`, nil))
	p.wait(`document.querySelector('#new-image').value === 'image test:latest'`)
	p.fill("#new-owner", "them")
	p.click(".form [type=submit]")
	p.wait(`document.querySelector('#new-owner').getAttribute('aria-invalid') === 'true'`)
	p.fill("#new-owner", "us")
	p.fill("#new-name", "of-us")
	p.click(".form [type=submit]")
	p.wait(`location.hash === '#/sandbox/of-us'`)
}

func testHostileViews(t *testing.T, b *chromium.Browser) {
	h := shellHost(t)
	h.runNet(t, "evil", aPolicy())
	plain := newHost(t)
	plain.runNet(t, "evil", aPolicy())
	names := append([]string{}, hostile...)
	names = append(names, "a&b=c#d?e%2F..", " leading", "..hidden", "-rf")
	for _, s := range names {
		s = strings.ReplaceAll(s, "/", "∕")
		plain.put(t, "evil", map[string]string{"/srv/" + s: "x", "/srv/dir " + s + "/inner": "y"})
		plain.flows = append(plain.flows, flow("deny", s, s))
	}
	plain.serve(t)
	p := open(t, b, plain, "#/sandbox/evil/files?path=/srv", 1280, 900)
	p.expected = append(p.expected, "404")
	harmless := func(where string) {
		t.Helper()
		p.must(p.Eval(p.ctx, `new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))`, nil))
		if p.str(`String(window.pwned)`) != "undefined" {
			t.Errorf("a script ran in %s", where)
		}
		if n := p.str(`String(document.querySelectorAll('main script, main img, main iframe, main b, main a[href^="javascript"], main a[href*="//"], dialog img').length)`); n != "0" {
			t.Errorf("%s elements are made of texts in %s", n, where)
		}
		if shown := p.str(`document.querySelector('main').textContent + document.querySelector('dialog').textContent + document.querySelector('#notices').textContent + document.title + [...document.querySelectorAll('[aria-label], [title]')].map((e) => e.title + e.getAttribute('aria-label')).join('')`); strings.ContainsAny(shown, "\u202e\u202c\u200b\u0007\u001b\u009b\ufffe") {
			t.Errorf("what cannot be seen is in %s: %q", where, shown)
		}
	}
	p.sees(`<script>window.pwned = 1<∕script>`)
	p.shot("hostile-files")
	harmless("the files")
	// Each name leads where it says: into its directory, and to its dialog.
	rows := len(names)
	for i := range rows {
		p.wait(`document.querySelectorAll('#entries tbody tr').length === ` + quoteInt(2*rows))
		p.must(p.Eval(p.ctx, `document.querySelectorAll('#entries a')[`+quoteInt(i)+`].click()`, nil))
		p.entries("inner")
		harmless("a directory")
		p.must(p.Eval(p.ctx, `history.back()`, nil))
		p.wait(`document.querySelectorAll('#entries tbody tr').length === ` + quoteInt(2*rows))
		p.must(p.Eval(p.ctx, `document.querySelectorAll('#entries tr[data-kind=file] .row-actions button')[`+quoteInt(i)+`].click()`, nil))
		p.wait(`document.querySelector('dialog').open`)
		harmless("a dialog")
		p.press("Escape")
		p.wait(`!document.querySelector('dialog').open`)
	}
	// And is deleted as it is.
	p.must(p.Eval(p.ctx, `document.querySelectorAll('#entries tr[data-kind=file] .row-actions button')[0].click()`, nil))
	p.click("#do-delete")
	p.click("dialog button.primary")
	p.click("dialog button.danger")
	p.wait(`document.querySelectorAll('#entries tbody tr').length === ` + quoteInt(2*rows-1))
	harmless("the words about a deletion")
	p.must(p.Eval(p.ctx, `location.hash = '#/sandbox/evil/policy'`, nil))
	p.wait(`document.querySelectorAll('.suggestions li').length === ` + quoteInt(rows))
	p.must(p.Eval(p.ctx, `document.querySelectorAll('.suggestions button').forEach((b) => b.click())`, nil))
	p.shot("hostile-policy")
	harmless("the policy")
	p.must(p.Eval(p.ctx, `location.hash = '#/new?image=%3Cimg%20src=x%20onerror=window.pwned=1%3E&template=__proto__'`, nil))
	p.wait(`document.querySelector('#new-image')?.options.length === 2`)
	harmless("the form")

	// A program may write what it likes to the terminal.
	h.serve(t)
	p = open(t, b, h, "#/sandbox/evil/terminal", 1280, 900)
	p.wait(`document.querySelector('#terminal-open').getAttribute('aria-disabled') === 'false'`)
	p.click("#terminal-open")
	p.shows("$")
	for _, s := range hostile {
		p.enter("title " + strings.ReplaceAll(s, "\u0007", ""))
	}
	p.enter("colors")
	p.shows("link")
	harmless("the terminal's title")
	p.click(".xterm-rows > div:nth-child(2)")
	if n := p.str(`String(document.querySelector('dialog').open)`); n != "false" {
		t.Error("a link of another scheme asks to be opened")
	}
}
