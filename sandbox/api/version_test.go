package api_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

func TestVersion_says_what_the_caller_may_do(t *testing.T) {
	tokens := api.Tokens{Path: filepath.Join(t.TempDir(), api.TokensFile)}
	server := api.New(api.Options{Host: &sandbox.Host{}, Tokens: tokens, Version: "test"})
	for _, scope := range []api.Scope{api.ScopeRead, api.ScopeWrite} {
		token, err := tokens.Create("a-"+string(scope), scope)
		if err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequest(http.MethodGet, "http://localhost/v1/version", nil)
		r.Header.Set("Authorization", "Bearer "+token)
		w := httptest.NewRecorder()
		server.ServeHTTP(w, r)
		var is wire.Is
		if err := json.Unmarshal(w.Body.Bytes(), &is); err != nil || is.Scope != string(scope) {
			t.Errorf("a token of scope %s is told %s (%v)", scope, w.Body, err)
		}
	}
}
