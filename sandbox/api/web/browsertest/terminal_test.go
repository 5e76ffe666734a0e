//go:build browser

package browsertest

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest/fakeguest"
	"github.com/drowse-vm/drowse/internal/test/chromium"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// shellHost is a host whose guests have a shell and go on while their VMs sleep.
func shellHost(t *testing.T) *host {
	t.Helper()
	h := newHost(t)
	k := &keepers{t: t, commands: map[string]fakeguest.Command{"sh": shell}, from: map[string]*keeper{}}
	h.vms.Guests = k.start
	return h
}

// shows waits for a text on the screen of the terminal.
func (b *tab) shows(text string) {
	b.t.Helper()
	b.wait(`document.querySelector('.xterm-rows')?.innerText.replaceAll('\u00a0', ' ').includes(` + quote(text) + `)`)
}

func (b *tab) screen() string {
	b.t.Helper()
	return b.str(`[...document.querySelectorAll('.xterm-rows > div')].map((r) => r.innerText.replaceAll('\u00a0', ' ').trimEnd()).join('\n').trim()`)
}

// enter types a line into the terminal.
func (b *tab) enter(line string) {
	b.t.Helper()
	b.keys(line)
	b.press("Enter")
}

func testTerminal(t *testing.T, b *chromium.Browser) {
	h := shellHost(t)
	h.run(t, "a", spec.Metadata{})
	h.serve(t)
	p := open(t, b, h, "#/sandbox/a/terminal", 1280, 800)
	p.wait(`document.querySelector('#terminal-open').getAttribute('aria-disabled') === 'false'`)
	p.click("#terminal-open")
	p.shows("$")
	p.sees("Connected.")
	p.wait(`document.activeElement === document.querySelector('.xterm-helper-textarea')`)
	p.enter("hello")
	p.shows("$ hello")
	p.enter("colors")
	p.shows("true red much link")
	// Colors of 24 bits show although the policy allows no styles inline.
	if c := p.str(`(() => { const e = [...document.querySelectorAll('.xterm-rows span')].find((s) => s.textContent === 'true'); const s = getComputedStyle(e); return s.color + ' on ' + s.backgroundColor })()`); c != "rgb(10, 200, 30) on rgb(90, 0, 90)" {
		t.Errorf("colors are %s", c)
	}
	if c := p.str(`getComputedStyle([...document.querySelectorAll('.xterm-rows span')].find((s) => s.textContent === 'red')).color`); c != "rgb(255, 138, 128)" {
		t.Errorf("red is %s", c)
	}
	p.enter("title <img src=x onerror=window.pwned=1>\u202etxt")
	p.shows("titled")
	p.wait(`document.querySelector('#terminal-title').textContent === '<img src=x onerror=window.pwned=1>\\u{202e}txt' && !document.querySelector('#terminal-title img') && document.title === 'a: terminal · drowse'`)
	p.both("terminal")

	// The program learns of the size, and of changes.
	p.enter("size")
	rows, cols := p.str(`String(document.querySelectorAll('.xterm-rows > div').length)`), ""
	p.shows("size " + rows + "x")
	before := p.screen()
	p.must(p.Call(p.ctx, "Emulation.setDeviceMetricsOverride", map[string]any{"width": 900, "height": 600, "deviceScaleFactor": 1, "mobile": false}, nil))
	p.wait(`String(document.querySelectorAll('.xterm-rows > div').length) !== ` + quote(rows))
	rows = p.str(`String(document.querySelectorAll('.xterm-rows > div').length)`)
	p.enter("size")
	p.shows("size " + rows + "x")
	if cols = p.screen(); cols == before {
		t.Error("the screen is as it was")
	}
	// Much output comes whole, beyond the window of the stream.
	p.enter("count")
	p.shows("line 1999")

	// In another tab of the sandbox and back, the terminal is there again.
	p.click(`.tabs a[href$="/a"]`)
	p.wait(`!document.querySelector('#terminal')`)
	p.click(`.tabs a[href$="/terminal"]`)
	p.shows("line 1999")
	p.sees("Connected.")
	p.enter("ask") // the answers of the terminal come once, not again when the output is shown again
	p.shows("asked")
	p.press("Enter")
	// A page that is loaded again offers it.
	p.must(p.Open(p.ctx, h.url+"/ui/?again#/sandbox/a/terminal"))
	p.wait(`document.querySelector('#terminals button')`)
	p.sees("shell, begun")
	p.shot("terminals")
	p.click("#terminals button")
	p.shows("asked")
	time.Sleep(300 * time.Millisecond) // answers would come by now
	p.enter("after")
	p.shows("$ after")

	p.enter("exit")
	p.sees("Ended with exit status 3.")
	p.wait(`document.querySelector('#terminal-end').hidden`)
	// A command that is not there.
	p.fill("#terminal-command", "exit")
	p.click("#terminal-open")
	p.shows("$")
	p.click("#terminal-end")
	p.wait(`document.querySelector('dialog').open`)
	p.click("dialog button.danger")
	p.sees("Ended.")
}

func testTerminalByKeys(t *testing.T, b *chromium.Browser) {
	h := shellHost(t)
	h.run(t, "a-name-of-forty-characters-which-is-most", spec.Metadata{})
	h.serve(t)
	p := open(t, b, h, "#/sandbox/a-name-of-forty-characters-which-is-most/terminal", 360, 740)
	p.wait(`document.querySelector('#terminal-open').getAttribute('aria-disabled') === 'false'`)
	p.tabTo("#terminal-command")
	p.press("Enter")
	p.shows("$")
	p.enter("by keys")
	p.shows("$ by keys")
	// Tab belongs to the program; another key leaves.
	p.press("Tab")
	p.wait(`document.activeElement === document.querySelector('.xterm-helper-textarea')`)
	p.press("Shift+F6")
	p.wait(`document.activeElement.id === 'terminal-end'`)
	p.press("Shift+Tab")
	p.wait(`document.activeElement.id === 'terminal-open'`)
	p.press("Tab")
	p.fits("the terminal")
	p.both("terminal-narrow")
	p.press("Enter")
	p.wait(`document.querySelector('dialog').open && document.activeElement.textContent === 'Cancel'`)
	// The dialog keeps the focus.
	for range 6 {
		p.press("Tab")
		if inside := p.str(`String(document.activeElement === document.body || document.querySelector('dialog').contains(document.activeElement))`); inside != "true" {
			t.Errorf("the focus is outside of the dialog: %s", p.str(`document.activeElement.outerHTML.slice(0, 100)`))
		}
	}
	p.press("Escape")
	p.wait(`!document.querySelector('dialog').open && document.activeElement.id === 'terminal-end'`)
	p.press("Enter")
	p.wait(`document.querySelector('dialog').open`)
	p.press("Tab")
	p.press("Enter")
	p.sees("Ended.")
}

func testTerminalOutlives(t *testing.T, b *chromium.Browser) {
	h := shellHost(t)
	h.events = true
	h.run(t, "a", spec.Metadata{})
	h.serve(t)
	p := open(t, b, h, "#/sandbox/a/terminal", 1280, 800)
	p.expected = append(p.expected, "/v1/")
	p.wait(`document.querySelector('#terminal-open').getAttribute('aria-disabled') === 'false'`)
	p.click("#terminal-open")
	p.shows("$")
	p.enter("one")
	p.shows("$ one")
	p.must(p.Eval(p.ctx, `window.said = '', new MutationObserver(() => { said += document.querySelector('#terminal-state').textContent + '|' }).observe(document.querySelector('#terminal-state'), {childList: true})`, nil))
	h.cut()
	p.wait(`said.startsWith('The connection was cut.|') && said.endsWith('Connected.|')`)
	p.enter("two")
	p.shows("$ two")
	if got := p.screen(); strings.Count(got, "$ one") != 1 || strings.Count(got, "$ two") != 1 {
		t.Errorf("after a cut the screen is %q", got)
	}
	// A sleep: the page does not wake what it has to wait for.
	h.sleep(t, "a")
	p.sees("The sandbox sleeps, with what runs in this terminal.")
	p.shot("terminal-asleep")
	time.Sleep(3 * time.Second)
	if n := h.woken(); n != 0 {
		t.Errorf("the page has woken it %d times", n)
	}
	if _, err := h.Wake(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	p.sees("Connected.")
	p.click("#terminal")
	p.enter("three")
	p.shows("$ three")
	if got := p.screen(); strings.Count(got, "$ one") != 1 || strings.Count(got, "$ two") != 1 || strings.Count(got, "$ three") != 1 {
		t.Errorf("after a sleep the screen is %q", got)
	}
	// The button wakes it.
	h.sleep(t, "a")
	p.sees("The sandbox sleeps, with what runs in this terminal.")
	p.click("#terminal-again")
	p.sees("Connected.")
	p.wait(`document.activeElement === document.querySelector('.xterm-helper-textarea')`)
	p.enter("four")
	p.shows("$ four")
	// Another takes it: this page does not take it back.
	q := open(t, b, h, "#/sandbox/a/terminal", 1280, 800)
	q.wait(`document.querySelector('#terminals button')`)
	q.click("#terminals button")
	q.shows("$ four")
	p.sees("another connection attached")
	time.Sleep(2 * time.Second)
	q.enter("mine")
	q.shows("$ mine")
	if said := q.str(`document.querySelector('#terminal-state').textContent`); said != "Connected." {
		t.Errorf("it was taken back: %s", said)
	}
	if _, err := h.Delete(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	q.expected = append(q.expected, "/v1/")
	q.sees("The sandbox is gone.")
}

func testTerminalRefused(t *testing.T, b *chromium.Browser) {
	h := shellHost(t)
	h.run(t, "a", spec.Metadata{})
	h.run(t, "off", spec.Metadata{})
	h.end(t, "off")
	less, err := h.tokens.Create(tokens.Token{Name: "less", Scopes: tokens.Scopes{tokens.ScopeRead, tokens.ScopeFiles, tokens.ScopeCreate}})
	if err != nil {
		t.Fatal(err)
	}
	h.serve(t)
	p := openWith(t, b, h, less, "#/sandbox/a/terminal", 1280, 800)
	p.sees("This token has no scope “exec”")
	p.wait(`document.querySelector('#terminal-open').getAttribute('aria-disabled') === 'true' && document.querySelector('#terminal-open').title.includes('exec')`)
	p.click("#terminal-open")
	p.wait(`document.querySelector('#terminal').hidden`)
	p.shot("terminal-refused")

	p = open(t, b, h, "#/sandbox/off/terminal", 1280, 800)
	p.wait(`document.querySelector('#terminal-open').title === 'It is stopped: start it first.'`)

	// The server refuses what the page thinks is allowed, and a proxy passes no WebSocket on.
	p = open(t, b, h, "#/sandbox/a/terminal", 1280, 800)
	p.expected = append(p.expected, "WebSocket", "/exec", "/v1/")
	p.wait(`document.querySelector('#terminal-open').getAttribute('aria-disabled') === 'false'`)
	h.meanwhile(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.HasSuffix(r.URL.Path, "/exec") {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusForbidden)
			_, _ = w.Write([]byte(`{"error":{"code":"forbidden","message":"<b>you</b> may not","remedy":"ask somebody"}}`))
			return
		}
		next.ServeHTTP(w, r)
	})
	p.click("#terminal-open")
	p.sees("<b>you</b> may not. What to do: ask somebody. (forbidden)")
	h.meanwhile(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Header.Get("Upgrade") != "" {
			http.Error(w, "no", http.StatusBadGateway)
			return
		}
		next.ServeHTTP(w, r)
	})
	p.click("#terminal-open")
	p.sees("no WebSocket reaches it")
	h.meanwhile(nil)
	p.click("#terminal-open")
	p.shows("$")
}
