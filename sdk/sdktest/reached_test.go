//go:build sdk

package sdktest

import (
	"bytes"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
)

// leftOut are the parts of the API that a client's tests need not use, with the reason. A part is an operation, or an
// operation and the name of a parameter, header or field of its body.
var leftOut = map[string]string{
	"GET /v1/openapi.json":                           "the types are made from it",
	"GET /v1/sandboxes/{name}/files If-None-Match":   "the client keeps no copies of files",
	"GET /v1/sandboxes/{name}/files If-Range":        "the client keeps no copies of files",
	"GET /v1/sandboxes/{name}/network/events follow": "the methods send it, but nothing is denied in memory, so that no answer begins",
	"POST /v1/sandboxes/{name}/processes detach":     "what this starts is detached",
	"POST /v1/sandboxes/{name}/processes stdin":      "what this starts has a stdin, unless no_stdin",
	"POST /v1/sandboxes/{name}/processes window":     "it is a stream's",
	"PATCH /v1/sandboxes/{name} *":                   "the method takes any field",
	"PUT /v1/sandboxes/{name}/policy *":              "a policy is sent as it is given",
	"PUT /v1/sandboxes/{name}/services/{service} *":  "the method takes any field",
	"POST /v1/templates *":                           "the method takes any field",
}

// refused are operations that the server of the tests cannot do, with the status of its answer.
var refused = map[string]int{
	"POST /v1/snapshots/import":         http.StatusConflict,   // the snapshot is of another machine
	"POST /v1/sandboxes/{name}/migrate": http.StatusBadRequest, // it is in no cluster
	"POST /v1/sandboxes/{name}/promote": http.StatusBadRequest, // over TCP nobody may say to which directory of the host
}

// part is a documented operation.
type part struct {
	Parameters []struct {
		Name string `json:"name"`
		In   string `json:"in"`
	} `json:"parameters"`
	RequestBody struct {
		Content map[string]struct {
			Schema schema `json:"schema"`
		} `json:"content"`
	} `json:"requestBody"`
}

// reached notes what a client's requests have used.
type reached struct {
	mux        *http.ServeMux // knows the patterns of operations
	operations map[string]part
	schemas    document
	mu         sync.Mutex // guards used
	used       map[string]bool
}

func newReached(t *testing.T) *reached {
	t.Helper()
	text, err := os.ReadFile("../../sandbox/api/openapi.json")
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Paths map[string]map[string]part `json:"paths"`
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	r := &reached{mux: http.NewServeMux(), operations: map[string]part{}, schemas: read(t), used: map[string]bool{}}
	for path, methods := range d.Paths {
		for method, p := range methods {
			op := strings.ToUpper(method) + " " + path
			r.operations[op] = p
			r.mux.HandleFunc(op, func(http.ResponseWriter, *http.Request) {})
		}
	}
	return r
}

// proxy returns the address of a proxy that notes the requests that succeed.
func (r *reached) proxy(t *testing.T, where string) string {
	to, err := url.Parse(where)
	if err != nil {
		t.Fatal(err)
	}
	type key struct{}
	p := &httputil.ReverseProxy{
		Rewrite: func(q *httputil.ProxyRequest) { q.SetURL(to) },
		ModifyResponse: func(a *http.Response) error {
			_, op := r.mux.Handler(a.Request)
			if a.StatusCode >= 400 && a.StatusCode != refused[op] {
				return nil
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			r.used[op] = true
			for name := range a.Request.URL.Query() {
				r.used[op+" "+name] = true
			}
			for name := range a.Request.Header {
				r.used[op+" "+name] = true
			}
			return nil
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.Header.Get("Content-Type") == "application/json" {
			text, err := io.ReadAll(io.LimitReader(q.Body, 2<<20))
			if err != nil {
				panic(http.ErrAbortHandler)
			}
			q.Body = io.NopCloser(bytes.NewReader(text))
			r.fields(q, text)
		}
		p.ServeHTTP(w, q)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// fields notes the fields of a body.
func (r *reached) fields(q *http.Request, text []byte) {
	_, op := r.mux.Handler(q)
	var body map[string]any
	if json.Unmarshal(text, &body) != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for name := range body {
		r.used[op+" "+name] = true
	}
}

// check reports what no request has used.
func (r *reached) check(t *testing.T) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, op := range slices.Sorted(maps.Keys(r.operations)) {
		if !r.used[op] {
			if leftOut[op] == "" {
				t.Errorf("no method of the client sends %s with success: give it one with a test, or say in leftOut why not", op)
			}
			continue
		}
		var wanted []string
		for _, p := range r.operations[op].Parameters {
			switch p.In {
			case "query":
				wanted = append(wanted, p.Name)
			case "header":
				wanted = append(wanted, http.CanonicalHeaderKey(p.Name))
			}
		}
		body := r.operations[op].RequestBody.Content["application/json"].Schema
		if body.Ref != "" {
			body = *r.schemas[body.Ref[strings.LastIndex(body.Ref, "/")+1:]]
		}
		if leftOut[op+" *"] == "" {
			wanted = append(wanted, body.names()...)
		}
		for _, name := range wanted {
			if !r.used[op+" "+name] && leftOut[op+" "+name] == "" {
				t.Errorf("no method of the client sends %q of %s: let one have it, or say in leftOut why not", name, op)
			}
		}
	}
}
