package api_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

func TestVersion_says_what_the_caller_may_do(t *testing.T) {
	known := tokens.Open(filepath.Join(t.TempDir(), tokens.File))
	server := api.New(api.Options{Host: &sandbox.Host{}, Tokens: known, Version: "test"})
	for scope, scopes := range map[string]tokens.Scopes{"read": {tokens.ScopeRead}, "write": tokens.All()} {
		token, err := known.Create(tokens.Token{Name: "a-" + scope, Scopes: scopes})
		if err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequest(http.MethodGet, "http://localhost/v1/version", nil)
		r.Header.Set("Authorization", "Bearer "+token)
		w := httptest.NewRecorder()
		server.ServeHTTP(w, r)
		var is wire.Is
		if err := json.Unmarshal(w.Body.Bytes(), &is); err != nil || is.Scope != scope || len(is.Scopes) != len(scopes) {
			t.Errorf("a token of scope %s is told %s (%v)", scope, w.Body, err)
		}
	}
}
