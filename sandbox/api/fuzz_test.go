package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// FuzzRequests sends any body, query and name to any path, with a token that may do everything. The answer must
// match the description, have a bounded length and never be a server error. A request refused as invalid must
// change nothing.
func FuzzRequests(f *testing.F) {
	var paths []string
	d, err := theDescription()
	if err != nil {
		f.Fatal(err)
	}
	for path, methods := range d.Paths {
		for method := range methods {
			paths = append(paths, strings.ToUpper(method)+" "+path)
		}
	}
	slices.Sort(paths)
	known := tokens.Open(filepath.Join(f.TempDir(), tokens.File))
	token, err := known.Create(tokens.Token{Name: "writer", Scopes: tokens.All()})
	if err != nil {
		f.Fatal(err)
	}
	for i, body := range []string{
		``, `{}`, `{"spec":{"name":"b","image":"test","memory_mib":128},"metadata":{"class":"resumable","tags":["x"]},"get_or_create":true}`, `{"children":[{"name":"c","tags":["t"]}]}`,
		`{"to":"b"}`, `{"until":"2100-01-01T00:00:00Z"}`, `{"command":["true"],"stdin":"eA==","timeout_seconds":1}`, `{"snapshot":"0123"}`, `{"version":1,"rules":[]}`,
		`{"owner":"o","no_expiry":true,"wake":{"at":"2100-01-01T00:00:00Z","every_seconds":60},"persist":{"drop":["/tmp"]}}`, `{"hooks":"skip"}`, `{"timeout_seconds":1,"kill":true}`, `{"dry_run":true}`,
	} {
		for p := range paths {
			if (p+i)%3 == 0 {
				f.Add(uint8(p), "a", "limit=1", []byte(body))
			}
		}
	}
	m := newMachines(f)
	f.Add(uint8(0), "..", "tag=a&tag=b&status=running", []byte(`{"a":`))
	f.Fuzz(func(t *testing.T, path uint8, name, query string, body []byte) {
		if len(body) > 16<<10 || len(name) > 256 || len(query) > 1024 {
			return
		}
		s := api.New(api.Options{Host: m.host, Tokens: known})
		onlyOne(t, m.host)
		before := stateOf(t, m.host)
		method, pattern, _ := strings.Cut(paths[int(path)%len(paths)], " ")
		where := inPath.ReplaceAllLiteralString(pattern, url.PathEscape(name))
		ctx := t.Context()
		if streams(method, pattern) {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, 50*time.Millisecond)
			defer cancel()
		}
		req := httptest.NewRequestWithContext(ctx, method, "http://localhost/", bytes.NewReader(body))
		req.URL = &url.URL{Path: inPath.ReplaceAllLiteralString(pattern, name), RawPath: where, RawQuery: query}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer "+token)
		w := httptest.NewRecorder()
		s.ServeHTTP(w, req)
		if w.Code == http.StatusMovedPermanently || w.Code == http.StatusTemporaryRedirect {
			return // a name with dots results in another path
		}
		if w.Code == http.StatusInternalServerError {
			t.Errorf("%s %s: %s", method, where, w.Body)
		}
		if most := 1<<20 + 64*(len(body)+len(name)+len(query)); w.Body.Len() > most {
			t.Errorf("%s %s: an answer of %d bytes to a body of %d", method, where, w.Body.Len(), len(body))
		}
		var e wire.ErrorDoc
		if w.Code >= 400 && pattern != "/readyz" && pattern != "/healthz" {
			if err := json.Unmarshal(w.Body.Bytes(), &e); err != nil || e.Error.Code == "" || e.Error.Message == "" {
				t.Errorf("%s %s: %d %v: %.200s", method, where, w.Code, err, w.Body)
			}
		} else if err := described(method, pattern, w.Code, w.Header().Get("Content-Type"), w.Body.Bytes()); err != nil {
			t.Errorf("%s %s: %d is not as described: %v: %.300s", method, where, w.Code, err, w.Body)
		}
		if w.Code == http.StatusBadRequest || w.Code == http.StatusNotFound || method == http.MethodGet {
			if after := stateOf(t, m.host); after != before {
				t.Errorf("%s %s: %d, and sandboxes were\n%s\nand are\n%s", method, where, w.Code, before, after)
			}
		}
	})
}

// inPath are the parameters of a path.
var inPath = regexp.MustCompile(`\{[a-z]+\}`)

// streams reports whether an answer may go on.
func streams(method, pattern string) bool {
	d, err := theDescription()
	if err != nil {
		return false
	}
	return d.Paths[pattern][strings.ToLower(method)].Responses["200"].Content["application/x-ndjson"].Schema != nil || strings.HasSuffix(pattern, "/log")
}

// onlyOne leaves a host with one sandbox "a", which is new and runs.
func onlyOne(t *testing.T, h *sandbox.Host) {
	t.Helper()
	all, err := h.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range all {
		if err := b.Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.Create(t.Context(), sandbox.Spec{Name: "a", Image: sandboxtest.Image, Network: spec.NetworkTAP}, sandbox.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// stateOf describes all sandboxes of a host.
func stateOf(t *testing.T, h *sandbox.Host) string {
	t.Helper()
	all, err := h.State.List()
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for _, r := range all {
		l, err := h.State.Metadata(r.Spec.Name)
		fmt.Fprintf(&out, "%s %s %s %s %+v %+v %v\n", r.ID, r.Spec.Name, r.Phase, r.Snapshot, r.Spec, l, err)
	}
	return out.String()
}

// FuzzChanges reads any body as changes of a sandbox. Accepted changes must survive encoding.
func FuzzChanges(f *testing.F) {
	for _, body := range []string{
		`{}`, `{"owner":"","tags":[],"expires":"2100-01-01T00:00:00Z"}`, `{"no_expiry":true}`, `{"no_wake":true,"no_rotate":true}`, `{"wake":{"at":"2100-01-01T00:00:00Z","every_seconds":7}}`,
		`{"rotate":{"to":"0123","every_seconds":60}}`, `{"wake":{},"no_wake":true}`, `{"vcpus":2,"memory_mib":64,"reset":true,"idle":{"sleep_seconds":1}}`, `{"expires":"0001-01-01T00:00:00Z"}`,
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var c wire.Changes
		if len(body) > 16<<10 || json.Unmarshal(body, &c) != nil {
			return
		}
		first, err := c.Fleet()
		if err != nil {
			return
		}
		text, err := json.Marshal(wire.ChangesOf(first))
		if err != nil {
			return // a time that JSON cannot express
		}
		var again wire.Changes
		if err := json.Unmarshal(text, &again); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		second, err := again.Fleet()
		if err != nil {
			t.Fatalf("%s is sent on as %s, which is refused: %v", body, text, err)
		}
		a, err := json.Marshal(first)
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(second)
		if err != nil || !bytes.Equal(a, b) {
			t.Errorf("%s says %s, and sent on %s", body, a, b)
		}
		if (first.Expires == nil) != (second.Expires == nil) || (first.Wake == nil) != (second.Wake == nil) || (first.Tags == nil) != (second.Tags == nil) || !reflect.DeepEqual(first.Tags, second.Tags) {
			t.Errorf("%s says %+v, and sent on %+v", body, first, second)
		}
	})
}
