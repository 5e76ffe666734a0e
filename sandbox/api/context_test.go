package api_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
)

func TestContext_of_a_request_is_made_by_its_header_once_its_caller_is_known(t *testing.T) {
	known := tokens.Open(filepath.Join(t.TempDir(), tokens.File))
	token, err := known.Create(tokens.Token{Name: "reader", Scopes: tokens.Scopes{tokens.ScopeRead}})
	if err != nil {
		t.Fatal(err)
	}
	type key struct{}
	made, seen := 0, ""
	s := api.New(api.Options{
		Host: &sandbox.Host{}, Tokens: known,
		Context: func(ctx context.Context, h http.Header) context.Context {
			made++
			return context.WithValue(ctx, key{}, h.Get("Traceparent"))
		},
		Mounts: []api.Mount{{Pattern: "GET /mine", Scope: api.ScopeRead, Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			seen, _ = r.Context().Value(key{}).(string)
		})}},
	})
	for _, c := range []struct {
		token  string
		status int
		made   int
	}{{"", http.StatusUnauthorized, 0}, {token, http.StatusOK, 1}} {
		r := httptest.NewRequest(http.MethodGet, "http://localhost/mine", nil)
		r.Header.Set("Traceparent", "the parent")
		if c.token != "" {
			r.Header.Set("Authorization", "Bearer "+c.token)
		}
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		if w.Code != c.status || made != c.made {
			t.Errorf("with token %q the status is %d and %d contexts were made, want %d and %d", c.token, w.Code, made, c.status, c.made)
		}
	}
	if seen != "the parent" {
		t.Errorf("the handler sees %q", seen)
	}
}
