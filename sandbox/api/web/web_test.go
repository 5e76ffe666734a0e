package web

import (
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/html"
)

func handler(t *testing.T) http.Handler {
	t.Helper()
	h, err := Handler()
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func ask(t *testing.T, method, target string, header map[string]string) *http.Response {
	t.Helper()
	r := httptest.NewRequest(method, target, nil)
	for k, v := range header {
		r.Header.Set(k, v)
	}
	w := httptest.NewRecorder()
	handler(t).ServeHTTP(w, r)
	return w.Result()
}

func TestAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		method, path string
		status       int
		kind, to     string
	}{
		"the page is HTML":                       {"GET", "/ui/", 200, "text/html; charset=utf-8", ""},
		"the page by its name":                   {"GET", "/ui/index.html", 200, "text/html; charset=utf-8", ""},
		"a module is JavaScript":                 {"GET", "/ui/app.js", 200, "text/javascript; charset=utf-8", ""},
		"a style sheet is CSS":                   {"GET", "/ui/style.css", 200, "text/css; charset=utf-8", ""},
		"a module of others is JavaScript":       {"GET", "/ui/vendor/xterm.mjs", 200, "text/javascript; charset=utf-8", ""},
		"their licence is text":                  {"GET", "/ui/vendor/xterm-LICENSE.txt", 200, "text/plain; charset=utf-8", ""},
		"a directory of others is not listed":    {"GET", "/ui/vendor/", 404, "text/plain; charset=utf-8", ""},
		"sums are no part of the page":           {"GET", "/ui/vendor.sum", 404, "text/plain; charset=utf-8", ""},
		"an icon is SVG":                         {"GET", "/ui/icon.svg", 200, "image/svg+xml", ""},
		"HEAD has the same headers":              {"HEAD", "/ui/app.js", 200, "text/javascript; charset=utf-8", ""},
		"the root leads to the page":             {"GET", "/", 302, "", "/ui/"},
		"without a slash it leads to the page":   {"GET", "/ui", 302, "", "/ui/"},
		"what is not there is not found":         {"GET", "/ui/other.js", 404, "text/plain; charset=utf-8", ""},
		"a path that climbs is not found":        {"GET", "/ui/../web.go", 404, "text/plain; charset=utf-8", ""},
		"a directory is not listed":              {"GET", "/ui/static/", 404, "text/plain; charset=utf-8", ""},
		"what is outside is not found":           {"GET", "/v1/sandboxes", 404, "text/plain; charset=utf-8", ""},
		"POST is refused":                        {"POST", "/ui/", 405, "text/plain; charset=utf-8", ""},
		"DELETE of a file that is not there too": {"DELETE", "/ui/x", 405, "text/plain; charset=utf-8", ""},
	} {
		t.Run(name, func(t *testing.T) {
			res := ask(t, c.method, c.path, nil)
			if res.StatusCode != c.status || c.kind != "" && res.Header.Get("Content-Type") != c.kind || res.Header.Get("Location") != c.to {
				t.Errorf("%s %s: %d, %q, %q: want %+v", c.method, c.path, res.StatusCode, res.Header.Get("Content-Type"), res.Header.Get("Location"), c)
			}
			// A browser could open a refused path as a page too, so it needs the headers.
			for name, value := range headers {
				if got := res.Header.Get(name); got != value {
					t.Errorf("%s is %q: want %q", name, got, value)
				}
			}
		})
	}
}

func TestPolicy_allows_nothing_inline_and_nothing_from_elsewhere(t *testing.T) {
	allowed := map[string]string{
		"default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "img-src": "'self'", "connect-src": "'self'",
		"base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'", "require-trusted-types-for": "'script'", "trusted-types": "'none'",
	}
	got := map[string]string{}
	for _, d := range strings.Split(Policy, ";") {
		name, value, _ := strings.Cut(strings.TrimSpace(d), " ")
		got[name] = value
	}
	if len(got) != len(allowed) {
		t.Errorf("directives are %v", got)
	}
	for name, value := range allowed {
		if got[name] != value {
			t.Errorf("%s is %q: want %q", name, got[name], value)
		}
	}
}

func TestFile_that_a_browser_has_is_not_sent_again(t *testing.T) {
	first := ask(t, "GET", "/ui/app.js", nil)
	etag := first.Header.Get("ETag")
	if etag == "" {
		t.Fatal("there is no ETag")
	}
	if again := ask(t, "GET", "/ui/app.js", map[string]string{"If-None-Match": etag}); again.StatusCode != http.StatusNotModified {
		t.Errorf("the same file again is %d", again.StatusCode)
	}
	if other := ask(t, "GET", "/ui/app.js", map[string]string{"If-None-Match": `"0123"`}); other.StatusCode != http.StatusOK {
		t.Errorf("another file is %d", other.StatusCode)
	}
}

// vendor has files of others: TestVendored_files_are_those_of_the_sums.
const vendor = "static/vendor"

// each calls f with each file of the page that is ours.
func each(t *testing.T, f func(name, text string)) {
	t.Helper()
	err := fs.WalkDir(static, "static", func(name string, d fs.DirEntry, err error) error {
		if name == vendor {
			return fs.SkipDir
		}
		if err != nil || d.IsDir() {
			return err
		}
		text, err := static.ReadFile(name)
		f(name, string(text))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestFiles_name_no_other_host(t *testing.T) {
	url := regexp.MustCompile(`(?i)(\b(?:https?|wss?)://|["'(]//)[^\s"')]*`)
	each(t, func(name, text string) {
		for _, u := range url.FindAllString(text, -1) {
			if u != "http://www.w3.org/2000/svg" { // an XML namespace
				t.Errorf("%s names %s: the page has all that it needs with it", name, u)
			}
		}
	})
}

// The scripts must not even contain what the page's policy makes a browser refuse.
func TestScripts_make_no_markup_and_no_code_of_texts(t *testing.T) {
	banned := regexp.MustCompile(`\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function|DOMParser|createContextualFragment|setHTMLUnsafe|srcdoc|localStorage|document\.cookie)\b|setAttribute\(\s*'(on|style)|javascript:`)
	each(t, func(name, text string) {
		if path.Ext(name) != ".js" {
			return
		}
		for i, line := range strings.Split(text, "\n") {
			if found := banned.FindString(line); found != "" {
				t.Errorf("%s:%d: %s", name, i+1, found)
			}
		}
	})
}

func TestScripts_import_only_files_that_are_there(t *testing.T) {
	imported := regexp.MustCompile(`(?m)^\s*(?:import|export)\b[^;]*?from\s+'([^']+)'|\bimport\((?:'([^']+)'\))?`)
	each(t, func(name, text string) {
		if path.Ext(name) != ".js" {
			return
		}
		for _, m := range imported.FindAllStringSubmatch(text, -1) {
			from := m[1] + m[2]
			if !strings.HasPrefix(from, "./") {
				t.Errorf("%s imports %q: import a file beside it, by its name", name, from)
				continue
			}
			if _, err := fs.Stat(static, path.Join(path.Dir(name), from)); err != nil {
				t.Errorf("%s imports %s: %v", name, from, err)
			}
		}
	})
}

func TestVendored_files_are_those_of_the_sums(t *testing.T) {
	sums, err := os.ReadFile("vendor.sum")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	for line := range strings.Lines(string(sums)) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		want[name] = sum
	}
	entries, err := fs.ReadDir(static, vendor)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		text, err := static.ReadFile(path.Join(vendor, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if sum := fmt.Sprintf("%x", sha256.Sum256(text)); sum != want[e.Name()] {
			t.Errorf("%s has the sum %s, want %q: run scripts/vendor-xterm", e.Name(), sum, want[e.Name()])
		}
		delete(want, e.Name())
	}
	if len(want) > 0 {
		t.Errorf("%v are missing: run scripts/vendor-xterm", slices.Collect(maps.Keys(want)))
	}
}

func TestPage_has_nothing_inline_and_names_files_that_are_there(t *testing.T) {
	files, err := load()
	if err != nil {
		t.Fatal(err)
	}
	doc, err := html.Parse(strings.NewReader(string(files[Prefix].content)))
	if err != nil {
		t.Fatal(err)
	}
	named := 0
	for n := range doc.Descendants() {
		if n.Type != html.ElementNode {
			continue
		}
		if (n.Data == "script" || n.Data == "style") && n.FirstChild != nil {
			t.Errorf("<%s> has its text in the page: put it into a file", n.Data)
		}
		for _, a := range n.Attr {
			switch {
			case strings.HasPrefix(a.Key, "on"), a.Key == "style":
				t.Errorf("<%s %s> is inline", n.Data, a.Key)
			case a.Key == "src", a.Key == "href" && n.Data == "link":
				named++
				if _, ok := files[a.Val]; !ok {
					t.Errorf("<%s> names %s, which is not there", n.Data, a.Val)
				}
			}
		}
	}
	if named < 3 {
		t.Errorf("the page names %d files: want its style sheet, icon and script at least", named)
	}
}

// Without node this tests nothing. `make test-browser` runs the scripts in a browser.
func TestScriptsParse(t *testing.T) {
	node, err := exec.LookPath("node")
	if err != nil {
		t.Log("there is no node: the scripts are not parsed")
		return
	}
	parse := func(text string) ([]byte, error) {
		cmd := exec.Command(node, "--check", "--input-type=module")
		cmd.Stdin = strings.NewReader(text)
		return cmd.CombinedOutput()
	}
	each(t, func(name, text string) {
		if path.Ext(name) != ".js" {
			return
		}
		if out, err := parse(text); err != nil {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	})
	if _, err := parse("const ="); err == nil {
		t.Error("what is no script parses too")
	}
}

func TestEach_file_of_the_folder_is_served(t *testing.T) {
	err := filepath.WalkDir("static", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		res := ask(t, "GET", Prefix+strings.TrimPrefix(filepath.ToSlash(name), "static/"), nil)
		got, _ := io.ReadAll(res.Body)
		want, err := os.ReadFile(name)
		if err != nil || res.StatusCode != http.StatusOK || string(got) != string(want) {
			t.Errorf("%s: %d, %d bytes of %d, %v", name, res.StatusCode, len(got), len(want), err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
