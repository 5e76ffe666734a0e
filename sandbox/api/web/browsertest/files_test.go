//go:build browser

package browsertest

import (
	"bytes"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/test/chromium"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// put writes files into a guest.
func (h *host) put(t *testing.T, name string, files map[string]string) {
	t.Helper()
	for path, text := range files {
		if err := h.vms.Guest(name).WriteFile(path, []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
}

// has waits until a file of a guest has a content; none means that it is not there.
func (h *host) has(t *testing.T, name, path, want string) {
	t.Helper()
	var got []byte
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if got, err = h.vms.Guest(name).ReadFile(path); err == nil && string(got) == want || want == none && errors.Is(err, fs.ErrNotExist) {
			return
		}
	}
	t.Fatalf("%s has %d bytes, %.80q, %v; want %d", path, len(got), got, err, len(want))
}

const none = "\x00"

// chooses gives the page files as a file dialog does.
func (b *tab) chooses(selector string, paths ...string) {
	b.t.Helper()
	var doc struct {
		Root struct {
			NodeID int `json:"nodeId"`
		}
	}
	var is struct {
		NodeID int `json:"nodeId"`
	}
	b.must(b.Call(b.ctx, "DOM.getDocument", nil, &doc))
	b.must(b.Call(b.ctx, "DOM.querySelector", map[string]any{"nodeId": doc.Root.NodeID, "selector": selector}, &is))
	b.must(b.Call(b.ctx, "DOM.setFileInputFiles", map[string]any{"nodeId": is.NodeID, "files": paths}, nil))
}

func (b *tab) entries(want ...string) {
	b.t.Helper()
	b.wait(`JSON.stringify([...document.querySelectorAll('#entries tbody tr')].map((r) => r.cells[0].querySelector('bdi').textContent)) === JSON.stringify(` + string(mustJSON(append([]string{}, want...))) + `)`)
}

// does opens the dialog of a file's actions and chooses one.
func (b *tab) does(file, op string) {
	b.t.Helper()
	b.click(`button[aria-label=` + quote("Actions for "+file) + `]`)
	b.wait(`document.querySelector('dialog').open`)
	b.click("#do-" + op)
	b.click("dialog button.primary")
}

func testFiles(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.run(t, "a", spec.Metadata{})
	h.put(t, "a", map[string]string{"/srv/data/deep/x.txt": "deep", "/srv/data/b.txt": "bee", "/srv/data/a.txt": "ay", "/srv/empty": ""})
	h.serve(t)
	p := open(t, b, h, "#/sandbox/a/files", 1280, 800)
	p.sees("etc/")
	p.click(`#entries a[href*="path=%2Fsrv"]`)
	p.entries("data", "empty")
	p.click(`#entries a[href*="path=%2Fsrv%2Fdata"]`)
	p.entries("deep", "a.txt", "b.txt")
	p.wait(`location.hash === '#/sandbox/a/files?path=%2Fsrv%2Fdata'`)
	p.both("files")
	p.must(p.Eval(p.ctx, `history.back()`, nil))
	p.entries("data", "empty")
	p.must(p.Eval(p.ctx, `history.forward()`, nil))
	p.entries("deep", "a.txt", "b.txt")
	p.fill("#files-q", "B.T")
	p.entries("b.txt")
	p.must(p.Eval(p.ctx, `(() => { const q = document.querySelector('#files-q'); q.value = ''; q.dispatchEvent(new Event('input')) })()`, nil))

	// Uploads: a new file of some size, one that is there already, and one that is dropped.
	dir := t.TempDir()
	big := strings.Repeat("0123456789abcdef", 1<<20) // 16 MiB
	for name, text := range map[string]string{"big.bin": big, "a.txt": "new"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p.expected = append(p.expected, "412")
	p.chooses("#files-picker", filepath.Join(dir, "big.bin"), filepath.Join(dir, "a.txt"))
	p.wait(`document.querySelector('dialog').open && document.querySelector('dialog').innerText.includes('Replace a.txt?')`)
	h.has(t, "a", "/srv/data/big.bin", big)
	h.has(t, "a", "/srv/data/a.txt", "ay")
	p.shot("files-replace")
	p.press("Enter") // Cancel has the focus
	p.sees("left as it was")
	p.chooses("#files-picker", filepath.Join(dir, "a.txt"))
	p.click("dialog button.danger")
	h.has(t, "a", "/srv/data/a.txt", "new")
	p.must(p.Eval(p.ctx, `(() => {
		const data = new DataTransfer(); data.items.add(new File(['dropped'], 'drop <b>.txt'));
		const at = document.querySelector('#files');
		for (const kind of ['dragover', 'drop']) { at.dispatchEvent(new DragEvent(kind, {bubbles: true, cancelable: true, dataTransfer: data})); if (kind === 'dragover') window.marked = at.classList.contains('drop') }
	})()`, nil))
	h.has(t, "a", "/srv/data/drop <b>.txt", "dropped")
	if p.str(`String(window.marked && !document.querySelector('#files').classList.contains('drop'))`) != "true" {
		t.Error("what is dragged over the files is not marked")
	}
	p.entries("deep", "a.txt", "b.txt", "big.bin", "drop <b>.txt")
	p.shot("files-uploaded")

	// A directory, and again over what is there.
	whole := filepath.Join(dir, "tree")
	for name, text := range map[string]string{"one.txt": "1", "sub/two <i>.txt": "2", "sub/sub/empty": ""} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(whole, name)), 0o700), os.WriteFile(filepath.Join(whole, name), []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	p.expected = append(p.expected, "404") // it looks first
	p.chooses("#files-tree-picker", whole)
	p.wait(`[...document.querySelectorAll('#transfers li')].some((l) => l.innerText.includes('Upload of tree/') && l.innerText.includes('done, 3 files, 2 B'))`)
	for name, text := range map[string]string{"one.txt": "1", "sub/two <i>.txt": "2", "sub/sub/empty": ""} {
		h.has(t, "a", "/srv/data/tree/"+name, text)
	}
	p.entries("deep", "tree", "a.txt", "b.txt", "big.bin", "drop <b>.txt")
	if err := os.WriteFile(filepath.Join(whole, "one.txt"), []byte("other"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, answer := range []string{"", ".danger"} {
		p.chooses("#files-tree-picker", whole)
		p.wait(`document.querySelector('dialog').open && document.querySelector('dialog').innerText.includes('Upload into tree?')`)
		if answer == "" {
			p.press("Enter") // Cancel has the focus
			p.sees("left as it was")
			h.has(t, "a", "/srv/data/tree/one.txt", "1")
		} else {
			p.click("dialog button.danger")
			h.has(t, "a", "/srv/data/tree/one.txt", "other")
		}
	}
	p.shot("files-tree")
	p.does("tree", "delete")
	p.click("dialog button.danger")
	p.entries("deep", "a.txt", "b.txt", "big.bin", "drop <b>.txt")

	// Downloads: in parts into a file of the reader, and where a page may not do that, by the browser.
	p.must(p.Eval(p.ctx, `window.showSaveFilePicker = async (o) => { window.suggested = o.suggestedName; return (await navigator.storage.getDirectory()).getFileHandle('saved', {create: true}) }`, nil))
	p.does("big.bin", "download")
	p.wait(`[...document.querySelectorAll('#transfers li')].some((l) => l.innerText.includes('Download of big.bin') && l.innerText.includes('done, 16.0 MiB'))`)
	p.wait(`window.suggested === 'big.bin'`)
	if n := p.str(`(async () => { const f = await (await (await navigator.storage.getDirectory()).getFileHandle('saved')).getFile(); const t = await f.text(); return f.size + ' ' + t.slice(-16) })()`); n != "16777216 0123456789abcdef" {
		t.Errorf("the file has %s", n)
	}
	p.must(p.Eval(p.ctx, `window.showSaveFilePicker = undefined`, nil))
	to := t.TempDir()
	p.must(p.Call(p.ctx, "Page.setDownloadBehavior", map[string]any{"behavior": "allow", "downloadPath": to}, nil))
	p.click(`#entries tr:nth-child(2) button.entry`)
	comes := func(name string, is func([]byte) bool) {
		t.Helper()
		for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
			if got, err := os.ReadFile(filepath.Join(to, name)); err == nil && is(got) {
				return
			} else if time.Now().After(end) {
				list, _ := os.ReadDir(to)
				t.Fatalf("%s: %d bytes, %v; there is %v", name, len(got), err, list)
			}
		}
	}
	comes("a.txt", func(got []byte) bool { return string(got) == "new" })
	p.does("deep", "download")
	comes("deep.tar", func(got []byte) bool { return bytes.Contains(got, []byte("deep/x.txt")) })

	// Directories are made, files renamed and deleted.
	p.click("#mkdir")
	p.fill("#field-dir", "made")
	p.press("Enter")
	p.entries("deep", "made", "a.txt", "b.txt", "big.bin", "drop <b>.txt")
	p.does("b.txt", "rename")
	p.fill("#field-to", "c.txt")
	p.press("Enter")
	p.entries("deep", "made", "a.txt", "big.bin", "c.txt", "drop <b>.txt")
	p.expected = append(p.expected, "404")
	p.does("c.txt", "rename")
	p.fill("#field-to", "a.txt")
	p.press("Enter")
	p.wait(`document.querySelector('dialog').open && document.querySelector('dialog').innerText.includes('Replace /srv/data/a.txt?')`)
	p.press("Escape")
	h.has(t, "a", "/srv/data/a.txt", "new")
	p.does("c.txt", "rename")
	p.fill("#field-to", "/srv/data/made/moved.txt")
	p.press("Enter")
	h.has(t, "a", "/srv/data/made/moved.txt", "bee")
	p.entries("deep", "made", "a.txt", "big.bin", "drop <b>.txt")
	p.does("deep", "delete")
	p.wait(`document.querySelector('dialog').open && document.activeElement.textContent === 'Cancel'`)
	p.press("Enter")
	h.has(t, "a", "/srv/data/deep/x.txt", "deep")
	p.does("deep", "delete")
	p.click("dialog button.danger")
	h.has(t, "a", "/srv/data/deep/x.txt", none)
	p.entries("made", "a.txt", "big.bin", "drop <b>.txt")
}

func testFilesByKeys(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.run(t, "a", spec.Metadata{})
	long := "/srv/" + strings.Repeat("long-name-", 20) + ".txt"
	h.put(t, "a", map[string]string{"/srv/sub/x.txt": "x", long: "long"})
	h.serve(t)
	p := open(t, b, h, "#/sandbox/a/files?path=/srv", 360, 740)
	p.sees("sub/")
	p.fits("the files")
	p.both("files-narrow")
	p.tabTo(`#entries a[href*="sub"]`)
	p.press("Enter")
	p.entries("x.txt")
	p.tabTo("#mkdir")
	p.press("Enter")
	p.wait(`document.activeElement.id === 'field-dir'`)
	p.keys("keys")
	p.press("Enter")
	p.entries("keys", "x.txt")
	p.wait(`document.querySelector('#entries').contains(document.activeElement)`)
	p.tabTo(`button[aria-label="Actions for x.txt"]`)
	p.press("Enter")
	p.wait(`document.activeElement.id === 'do-download'`)
	p.fits("the dialog")
	p.shot("files-narrow-dialog")
	p.press("ArrowDown")
	p.press("Enter")
	p.wait(`document.activeElement.id === 'field-to'`)
	p.expected = append(p.expected, "404")
	p.press("End")
	p.keys("2")
	p.press("Enter")
	p.entries("keys", "x.txt2")
	p.tabTo(`button[aria-label="Actions for x.txt2"]`)
	p.press("Enter")
	p.wait(`document.activeElement.id === 'do-download'`)
	p.press("ArrowDown")
	p.press("ArrowDown")
	p.press("Enter")
	p.wait(`document.activeElement.textContent === 'Cancel'`)
	p.press("Tab")
	p.press("Enter")
	p.entries("keys")
	h.has(t, "a", "/srv/sub/x.txt2", none)
	p.tabTo(`.crumbs a:last-of-type`)
	p.press("Enter")
	p.sees("sub/")
}

func testFilesFail(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.run(t, "a", spec.Metadata{})
	h.put(t, "a", map[string]string{"/srv/big.bin": strings.Repeat("x", 8<<20), "/srv/old.txt": "old"})
	h.serve(t)
	p := open(t, b, h, "#/sandbox/a/files?path=/srv", 1280, 800)
	p.expected = append(p.expected, "/v1/", "ERR_")
	p.entries("big.bin", "old.txt")
	h.meanwhile(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.URL.Path != "/v1/sandboxes/a/files" {
			next.ServeHTTP(w, r)
			return
		}
		if r.Method == http.MethodGet { // a part, and then the end
			w.Header().Set("Content-Length", "8388608")
			_, _ = w.Write(make([]byte, 1<<20))
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}
		_, _ = r.Body.Read(make([]byte, 1000))
		panic(http.ErrAbortHandler)
	})
	p.must(p.Eval(p.ctx, `window.showSaveFilePicker = async () => (await navigator.storage.getDirectory()).getFileHandle('part', {create: true})`, nil))
	p.does("big.bin", "download")
	p.wait(`document.querySelector('#transfers').innerText.includes('failed') && document.querySelector('#notices').innerText.includes('Download of big.bin: it ended before all was there')`)
	if n := p.str(`(async () => String((await (await (await navigator.storage.getDirectory()).getFileHandle('part')).getFile()).size))()`); n != "0" {
		t.Errorf("a part of %s bytes is taken for the whole", n)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "old.txt"), bytes.Repeat([]byte("new"), 3<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	p.chooses("#files-picker", filepath.Join(dir, "old.txt"))
	p.wait(`document.querySelectorAll('#transfers li').length === 2 && document.querySelector('#transfers li:last-child').innerText.includes('failed') && document.querySelector('#notices').innerText.includes('the old file is as it was')`)
	p.shot("files-failed")
	h.has(t, "a", "/srv/old.txt", "old")
	h.meanwhile(nil)
	p.click("#transfers li:last-child button")
	p.click("#transfers li button")
	p.wait(`document.querySelectorAll('#transfers li').length === 0`)
	// A directory that is gone, and the way back.
	p.must(p.Eval(p.ctx, `location.hash = '#/sandbox/a/files?path=/srv/none'`, nil))
	p.sees("The directory above")
	p.click("#files a")
	p.entries("big.bin", "old.txt")
	// What sleeps is not woken without being asked.
	h.sleep(t, "a")
	p.must(p.Eval(p.ctx, `location.hash = '#/sandbox/a'`, nil))
	p.wait(`document.querySelector('.heading [data-status=asleep]')`)
	p.click(`.tabs a[href$="/files"]`)
	p.sees("It is asleep.")
	p.shot("files-asleep")
	if n := h.woken(); n != 0 {
		t.Errorf("it was woken %d times", n)
	}
	p.click("#wake-files")
	p.sees("etc/")
	if n := h.woken(); n != 1 {
		t.Errorf("it was woken %d times", n)
	}
}
