package web

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"net/http"
	"path"
	"strings"
	"time"
)

//go:embed static
var static embed.FS

// Prefix is the path below which the page's files are.
const Prefix = "/ui/"

// Policy is the Content-Security-Policy of the page. Scripts, styles, images and requests come from its own origin
// alone. The page may not be in a frame and sends no form. Texts cannot become markup or scripts: trusted types
// are required, and none exist. The terminal's styles are set by script (static/styles.js), so that style-src needs no
// 'unsafe-inline'. Source: https://www.w3.org/TR/CSP3/ and https://www.w3.org/TR/trusted-types/.
const Policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// sendTime is how long a client may take to read a file: clients are unknown.
const sendTime = 30 * time.Second

// headers are the headers of every answer.
var headers = map[string]string{
	"Content-Security-Policy":      Policy,
	"X-Content-Type-Options":       "nosniff",
	"X-Frame-Options":              "DENY",
	"Referrer-Policy":              "no-referrer",
	"Cross-Origin-Opener-Policy":   "same-origin",
	"Cross-Origin-Resource-Policy": "same-origin",
	"Permissions-Policy":           "camera=(), geolocation=(), microphone=()",
	// A browser asks each time whether its copy is current, so that pages never mix files of two versions.
	"Cache-Control": "no-cache",
}

// types are media types by file name suffix. The host's table may differ.
var types = map[string]string{
	".html": "text/html; charset=utf-8",
	".css":  "text/css; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".mjs":  "text/javascript; charset=utf-8",
	".txt":  "text/plain; charset=utf-8",
	".svg":  "image/svg+xml",
}

// file is a file that the handler serves.
type file struct {
	content   []byte
	mediaType string
	etag      string
}

// load reads the embedded files. A file with a suffix that is not in types is an error.
func load() (map[string]file, error) {
	files := map[string]file{}
	err := fs.WalkDir(static, "static", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := static.ReadFile(name)
		if err != nil {
			return err
		}
		mediaType, ok := types[path.Ext(name)]
		if !ok {
			return fmt.Errorf("the page has a file %s of unknown kind: add it to types", name)
		}
		sum := sha256.Sum256(content)
		files[Prefix+strings.TrimPrefix(name, "static/")] = file{content, mediaType, `"` + hex.EncodeToString(sum[:16]) + `"`}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading the files of the page: %w", err)
	}
	index, ok := files[Prefix+"index.html"]
	if !ok {
		return nil, fmt.Errorf("reading the files of the page: there is no index.html")
	}
	files[Prefix] = index
	return files, nil
}

// Handler serves the page at Prefix, and redirects "/" there. The files have no secrets, so it needs no token. It
// answers GET and HEAD, reads no body, and may be called from any goroutine. An error means that the program was
// built wrong.
func Handler() (http.Handler, error) {
	files, err := load()
	if err != nil {
		return nil, err
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for name, value := range headers {
			w.Header().Set(name, value)
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "the page is only read", http.StatusMethodNotAllowed)
			return
		}
		if r.URL.Path == "/" || r.URL.Path+"/" == Prefix {
			http.Redirect(w, r, Prefix, http.StatusFound)
			return
		}
		f, ok := files[r.URL.Path]
		if !ok {
			http.Error(w, "the page has no such file", http.StatusNotFound)
			return
		}
		// Test writers may lack deadlines.
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(sendTime))
		w.Header().Set("Content-Type", f.mediaType)
		w.Header().Set("ETag", f.etag)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(f.content))
	}), nil
}
