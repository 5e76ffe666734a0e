package chromium

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Names are those under which distributions install it.
var Names = []string{"chromium", "chromium-browser", "google-chrome"}

// Find returns the path of a Chromium on this host.
func Find() (string, error) {
	for _, name := range Names {
		if p, err := exec.LookPath(name); err == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("looking for %s: there is none: on Debian, run scripts/deps browser", strings.Join(Names, ", "))
}

// maxMessage bounds a message of the browser, in bytes: a screenshot is one.
const maxMessage = 64 << 20

// Browser is a process of it. Its methods may be called from any goroutine.
type Browser struct {
	cmd *exec.Cmd
	dir string

	writing sync.Mutex // held while a message is written
	out     *os.File

	mu    sync.Mutex // guards what follows
	last  int
	calls map[int]chan message
	pages map[string]*Page // by session
	err   error            // why the pipe has ended

	done chan struct{} // closed when the pipe has ended
}

// message is one of the protocol, either way.
type message struct {
	ID      int             `json:"id,omitempty"`
	Session string          `json:"sessionId,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  json.RawMessage `json:"params,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *struct {
		Message string `json:"message"`
	} `json:"error,omitempty"`
}

// Start starts a browser with an empty profile of its own, which Close removes. As root it is without a sandbox of its
// own: open only pages that you trust.
func Start(ctx context.Context, path string) (*Browser, error) {
	dir, err := os.MkdirTemp("", "chromium-")
	if err != nil {
		return nil, fmt.Errorf("starting a browser: %w", err)
	}
	b, err := start(path, dir)
	if err == nil {
		if err = b.call(ctx, "", "Browser.getVersion", nil, nil); err == nil {
			return b, nil
		}
		b.Close()
	}
	return nil, errors.Join(fmt.Errorf("starting a browser: %w", err), os.RemoveAll(dir))
}

func start(path, dir string) (*Browser, error) {
	toR, toW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	fromR, fromW, err := os.Pipe()
	if err != nil {
		toR.Close()
		toW.Close()
		return nil, err
	}
	cmd := exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
		"--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage", "--no-default-browser-check",
		"--no-proxy-server", "--metrics-recording-only", "--password-store=basic", "--remote-debugging-pipe", "--user-data-dir="+dir, "about:blank")
	cmd.ExtraFiles = []*os.File{toR, fromW}
	cmd.Env = append(os.Environ(), "HOME="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = cmd.Start()
	toR.Close()
	fromW.Close()
	if err != nil {
		toW.Close()
		fromR.Close()
		return nil, err
	}
	b := &Browser{cmd: cmd, dir: dir, out: toW, calls: map[int]chan message{}, pages: map[string]*Page{}, done: make(chan struct{})}
	go b.read(fromR)
	return b, nil
}

func (b *Browser) read(r *os.File) {
	defer r.Close()
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 1<<16), maxMessage)
	s.Split(func(data []byte, atEOF bool) (int, []byte, error) {
		if i := bytes.IndexByte(data, 0); i >= 0 {
			return i + 1, data[:i], nil
		}
		return 0, nil, nil
	})
	var err error
	for err == nil && s.Scan() {
		var m message
		if err = json.Unmarshal(s.Bytes(), &m); err != nil {
			break
		}
		b.mu.Lock()
		answer, page := b.calls[m.ID], b.pages[m.Session]
		delete(b.calls, m.ID)
		b.mu.Unlock()
		switch {
		case m.ID != 0 && answer != nil:
			answer <- m
		case m.Method != "" && page != nil:
			page.event(m)
		}
	}
	b.mu.Lock()
	b.err = errors.Join(errors.New("the browser has ended"), err, s.Err())
	b.mu.Unlock()
	close(b.done)
}

// call calls a method of the protocol, in a session if it is not empty.
func (b *Browser) call(ctx context.Context, session, method string, params, result any) error {
	fail := func(err error) error { return fmt.Errorf("asking the browser for %s: %w", method, err) }
	m := message{Session: session, Method: method}
	if params != nil {
		var err error
		if m.Params, err = json.Marshal(params); err != nil {
			return fail(err)
		}
	}
	answer := make(chan message, 1)
	b.mu.Lock()
	b.last++
	m.ID = b.last
	b.calls[m.ID] = answer
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		delete(b.calls, m.ID)
		b.mu.Unlock()
	}()
	text, err := json.Marshal(m)
	if err != nil {
		return fail(err)
	}
	b.writing.Lock()
	_, err = b.out.Write(append(text, 0))
	b.writing.Unlock()
	if err != nil {
		return fail(err)
	}
	select {
	case <-ctx.Done():
		return fail(ctx.Err())
	case <-b.done:
		return fail(b.err)
	case m := <-answer:
		if m.Error != nil {
			return fail(errors.New(m.Error.Message))
		}
		if result == nil {
			return nil
		}
		if err := json.Unmarshal(m.Result, result); err != nil {
			return fail(err)
		}
		return nil
	}
}

// endTime is how long a browser may take to end by itself.
const endTime = 5 * time.Second

// Close ends the browser with all its processes and removes its profile.
func (b *Browser) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	_ = b.call(ctx, "", "Browser.close", nil, nil) // it is killed otherwise
	select {
	case <-b.done:
	case <-ctx.Done():
	}
	_ = syscall.Kill(-b.cmd.Process.Pid, syscall.SIGKILL)
	b.out.Close()
	_ = b.cmd.Wait() // it was killed
	<-b.done
	return os.RemoveAll(b.dir)
}

// Entry is something that a page, or the browser about a page, has said.
type Entry struct {
	// Source is "console", "exception", "violation" (of the Content-Security-Policy), or one of Log.LogEntry, such as
	// "network".
	Source, Level, Text string
}

// Page is a tab of its own, with its own storage. Its methods may be called from any goroutine.
type Page struct {
	b                *Browser
	session, context string

	mu       sync.Mutex // guards what follows
	entries  []Entry
	requests []string
}

// violations tells of what the policy of a page has refused, by the console that is not the page's.
const violations = `addEventListener('securitypolicyviolation', (e) => console.debug('securitypolicyviolation', e.violatedDirective, e.blockedURI, e.sourceFile, e.lineNumber), true)`

// NewPage opens an empty tab of so many CSS pixels.
func (b *Browser) NewPage(ctx context.Context, width, height int) (*Page, error) {
	p := &Page{b: b}
	var made struct {
		Context string `json:"browserContextId"`
		Target  string `json:"targetId"`
		Session string `json:"sessionId"`
	}
	if err := b.call(ctx, "", "Target.createBrowserContext", nil, &made); err != nil {
		return nil, err
	}
	p.context = made.Context
	if err := b.call(ctx, "", "Target.createTarget", map[string]any{"url": "about:blank", "browserContextId": made.Context, "width": width, "height": height}, &made); err != nil {
		return nil, err
	}
	if err := b.call(ctx, "", "Target.attachToTarget", map[string]any{"targetId": made.Target, "flatten": true}, &made); err != nil {
		return nil, err
	}
	p.session = made.Session
	b.mu.Lock()
	b.pages[p.session] = p
	b.mu.Unlock()
	for _, c := range []struct {
		method string
		params any
	}{
		{"Page.enable", nil}, {"Runtime.enable", nil}, {"Log.enable", nil}, {"Network.enable", nil},
		{"Page.addScriptToEvaluateOnNewDocument", map[string]any{"source": violations}},
		{"Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false}},
	} {
		if err := p.Call(ctx, c.method, c.params, nil); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// Close closes the tab and forgets its storage.
func (p *Page) Close(ctx context.Context) error {
	err := p.b.call(ctx, "", "Target.disposeBrowserContext", map[string]any{"browserContextId": p.context}, nil)
	p.b.mu.Lock()
	delete(p.b.pages, p.session)
	p.b.mu.Unlock()
	return err
}

// Call calls a method of the protocol about this page.
func (p *Page) Call(ctx context.Context, method string, params, result any) error {
	return p.b.call(ctx, p.session, method, params, result)
}

func (p *Page) event(m message) {
	var v struct {
		Type string `json:"type"`
		Args []struct {
			Value       any    `json:"value"`
			Description string `json:"description"`
		} `json:"args"`
		Exception struct {
			Text      string `json:"text"`
			Exception struct {
				Description string `json:"description"`
			} `json:"exception"`
		} `json:"exceptionDetails"`
		Entry struct {
			Source, Level, Text, URL string
		} `json:"entry"`
		Request struct {
			Method, URL string
		} `json:"request"`
	}
	_ = json.Unmarshal(m.Params, &v) // fields of other events may be of other kinds
	p.mu.Lock()
	defer p.mu.Unlock()
	switch m.Method {
	case "Runtime.consoleAPICalled":
		var words []string
		for _, a := range v.Args {
			if a.Value == nil {
				words = append(words, a.Description)
			} else {
				words = append(words, fmt.Sprint(a.Value))
			}
		}
		e := Entry{"console", v.Type, strings.Join(words, " ")}
		if strings.HasPrefix(e.Text, "securitypolicyviolation ") {
			e.Source = "violation"
		}
		p.entries = append(p.entries, e)
	case "Runtime.exceptionThrown":
		p.entries = append(p.entries, Entry{"exception", "error", v.Exception.Text + " " + v.Exception.Exception.Description})
	case "Log.entryAdded":
		p.entries = append(p.entries, Entry{v.Entry.Source, v.Entry.Level, v.Entry.Text + " " + v.Entry.URL})
	case "Network.requestWillBeSent":
		p.requests = append(p.requests, v.Request.Method+" "+v.Request.URL)
	}
}

// Entries are what the page has said so far.
func (p *Page) Entries() []Entry {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]Entry(nil), p.entries...)
}

// Requests are what the page has asked for so far: method and URL.
func (p *Page) Requests() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.requests...)
}

// Open goes to an address.
func (p *Page) Open(ctx context.Context, url string) error {
	var r struct{ ErrorText string }
	if err := p.Call(ctx, "Page.navigate", map[string]any{"url": url}, &r); err != nil {
		return err
	}
	if r.ErrorText != "" {
		return fmt.Errorf("opening %s in the browser: %s", url, r.ErrorText)
	}
	return nil
}

// Eval evaluates an expression in the page, waits for it if it is a promise, and has its value in result unless that is
// nil.
func (p *Page) Eval(ctx context.Context, expression string, result any) error {
	var r struct {
		Result struct {
			Value json.RawMessage `json:"value"`
		} `json:"result"`
		Exception *struct {
			Text      string `json:"text"`
			Exception struct {
				Description string `json:"description"`
			} `json:"exception"`
		} `json:"exceptionDetails"`
	}
	err := p.Call(ctx, "Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true}, &r)
	if err != nil {
		return err
	}
	if e := r.Exception; e != nil {
		return fmt.Errorf("evaluating %s in the browser: %s %s", expression, e.Text, e.Exception.Description)
	}
	if result == nil {
		return nil
	}
	if len(r.Result.Value) == 0 {
		r.Result.Value = json.RawMessage("null")
	}
	return json.Unmarshal(r.Result.Value, result)
}

// Wait waits until an expression is true. One that throws is not true yet.
func (p *Page) Wait(ctx context.Context, expression string) error {
	const between = 20 * time.Millisecond
	for {
		var is bool
		err := p.Eval(ctx, "!!("+expression+")", &is)
		if err == nil && is {
			return nil
		}
		select {
		case <-ctx.Done():
			var seen string
			look, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			_ = p.Eval(look, "document.body.innerText.slice(0, 2000)", &seen) // it only helps to understand
			cancel()
			return errors.Join(fmt.Errorf("waiting for %s: %w; the page shows:\n%s", expression, ctx.Err(), seen), err)
		case <-p.b.done:
			return err
		case <-time.After(between):
		}
	}
}

// Click moves the mouse to the middle of an element, which a CSS selector names, and presses its left button. It waits
// until the element is there and nothing lies over it.
func (p *Page) Click(ctx context.Context, selector string) error {
	name, _ := json.Marshal(selector)
	at := `(() => { const e = document.querySelector(` + string(name) + `); if (!e) return null; e.scrollIntoView({block: 'center'});
		const r = e.getBoundingClientRect(); const x = r.x + r.width / 2, y = r.y + r.height / 2; const top = document.elementFromPoint(x, y);
		return r.width > 0 && top && (e.contains(top) || top.contains(e)) ? [x, y] : null; })()`
	if err := p.Wait(ctx, at); err != nil {
		return fmt.Errorf("clicking on %s: %w", selector, err)
	}
	var xy []float64
	if err := p.Eval(ctx, at, &xy); err != nil {
		return err
	}
	if len(xy) != 2 {
		return fmt.Errorf("clicking on %s: it has just gone", selector)
	}
	for _, kind := range []string{"mouseMoved", "mousePressed", "mouseReleased"} {
		button := map[string]any{"type": kind, "x": xy[0], "y": xy[1]}
		if kind != "mouseMoved" {
			button["button"], button["clickCount"] = "left", 1
		}
		if err := p.Call(ctx, "Input.dispatchMouseEvent", button, nil); err != nil {
			return err
		}
	}
	return nil
}

// keys are codes of keys: https://www.w3.org/TR/uievents-code/ and the legacy ones of Windows.
var keys = map[string]int{"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "F6": 117, "Space": 32}

// Press presses a key, by its name in keys, after "Shift+" with Shift.
func (p *Page) Press(ctx context.Context, key string) error {
	key, shift := strings.CutPrefix(key, "Shift+")
	code, ok := keys[key]
	if !ok {
		return fmt.Errorf("pressing %s: use another key, or add it to keys", key)
	}
	for _, kind := range []string{"keyDown", "keyUp"} {
		params := map[string]any{"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
		if shift {
			const bit = 8
			params["modifiers"] = bit
		}
		switch {
		case key == "Space":
			params["key"] = " "
			if kind == "keyDown" {
				params["text"] = " "
			}
		case key == "Enter" && kind == "keyDown":
			params["text"] = "\r"
		}
		if err := p.Call(ctx, "Input.dispatchKeyEvent", params, nil); err != nil {
			return err
		}
	}
	return nil
}

// Keys presses the keys of a text, one after the other.
func (p *Page) Keys(ctx context.Context, text string) error {
	for _, c := range text {
		for _, kind := range []string{"keyDown", "keyUp"} {
			params := map[string]any{"type": kind, "key": string(c)}
			if kind == "keyDown" {
				params["text"] = string(c)
			}
			if err := p.Call(ctx, "Input.dispatchKeyEvent", params, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// Type puts a text where the focus is, as one who pastes it.
func (p *Page) Type(ctx context.Context, text string) error {
	return p.Call(ctx, "Input.insertText", map[string]any{"text": text}, nil)
}

// Screenshot writes what is seen as a PNG.
func (p *Page) Screenshot(ctx context.Context, w io.Writer) error {
	var r struct{ Data string }
	if err := p.Call(ctx, "Page.captureScreenshot", map[string]any{"format": "png"}, &r); err != nil {
		return err
	}
	png, err := base64.StdEncoding.DecodeString(r.Data)
	if err != nil {
		return fmt.Errorf("reading a screenshot: %w", err)
	}
	_, err = w.Write(png)
	return err
}

// Forget empties what Entries and Requests give.
func (p *Page) Forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.entries, p.requests = nil, nil
}
