package api_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	secretsources "github.com/drowse-vm/drowse/sandbox/sources"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestSources_are_used_over_the_API_by_name_and_by_whom_the_operator_lets(t *testing.T) {
	v := &sandboxtest.VMs{}
	h := v.Host(t)
	l, err := v.Launcher(h)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	key, marker := filepath.Join(dir, "key"), filepath.Join(dir, "was-run")
	if err := os.WriteFile(key, []byte("the-value"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DROWSE_TEST_SOURCE", "the-variable")
	known := secretsources.Open(filepath.Join(h.State.Dir(), secretsources.File), slog.New(slog.DiscardHandler))
	for _, one := range []secretsources.Source{
		{Name: "ours", File: key, Owners: []string{"us"}}, {Name: "theirs", Command: []string{"/usr/bin/touch", marker}, Owners: []string{"them"}},
		{Name: "host", Env: "DROWSE_TEST_SOURCE"}, {Name: "all", Command: []string{"/bin/echo", "x"}, AllOwners: true},
	} {
		if err := known.Add(one); err != nil {
			t.Fatal(err)
		}
	}
	l.Secrets = func(ctx context.Context, vm string, awaited []spec.SecretFile) ([]spec.Secret, error) {
		return known.Secrets(ctx, h.State.Owner(vm), awaited, nil)
	}
	h = h.With(l)
	file := tokens.Open(filepath.Join(dir, tokens.File))
	server := httptest.NewServer(api.New(api.Options{Host: h, Tokens: file, Sources: known}))
	t.Cleanup(server.Close)
	as := func(owner string) *client.Client {
		secret, err := file.Create(tokens.Token{Name: "of-" + owner, Owner: owner, Scopes: tokens.Scopes{tokens.ScopeRead, tokens.ScopeCreate}})
		if err != nil {
			t.Fatal(err)
		}
		return client.New(server.URL, secret, server.Client())
	}
	for name, owner := range map[string]string{"mine": "us", "free": ""} {
		if _, err := h.Create(t.Context(), sandbox.Spec{Name: name, Image: sandboxtest.Image}, sandbox.CreateOptions{Metadata: &spec.Metadata{Owner: owner}}); err != nil {
			t.Fatal(err)
		}
	}
	us, operator := as("us"), as("")
	for who, want := range map[*client.Client]string{
		us:       `[{"name":"all","kind":"command"},{"name":"ours","kind":"file"}]`,
		operator: `[{"name":"all","kind":"command","all_owners":true},{"name":"host","kind":"env"},{"name":"ours","kind":"file","owners":["us"]},{"name":"theirs","kind":"command","owners":["them"]}]`,
	} {
		list, err := who.SecretSources(t.Context())
		if text, _ := json.Marshal(list); err != nil || string(text) != want {
			t.Errorf("sources are %s, %v, want %s", text, err, want)
		}
	}
	set := func(c *client.Client, sandbox, from string) error {
		return c.Sandbox(sandbox).SetSecret(t.Context(), spec.Secret{SecretFile: spec.SecretFile{Name: "key", From: from}})
	}
	// What a caller might try, awake and asleep: the operator's token gives no rights to a sandbox with an owner.
	refused := func(when string) {
		t.Helper()
		for _, from := range []string{"theirs", "host", "none", "file:/etc/passwd", "/etc/passwd", "command:/bin/id", "env:PATH", "../x"} {
			for _, c := range []*client.Client{us, operator} {
				if err := set(c, "mine", from); !errors.Is(err, spec.ErrSecrets) || strings.Contains(err.Error(), dir) {
					t.Errorf("%s, source %s: %v", when, from, err)
				}
			}
		}
		if _, err := os.Stat(marker); err == nil {
			t.Errorf("%s: a command of others was run", when)
		}
	}
	refused("awake")
	if err := set(us, "mine", "ours"); err != nil {
		t.Fatal(err)
	}
	if err := set(operator, "free", "host"); err != nil {
		t.Error(err)
	}
	if _, err := us.Sleep(t.Context(), "mine", sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	refused("asleep")
	if err := set(us, "mine", "all"); err != nil {
		t.Errorf("a source for a sandbox that sleeps: %v", err)
	}
	is := func(when string, from string, present bool) {
		t.Helper()
		list, err := us.Sandbox("mine").Secrets(t.Context())
		if text, _ := json.Marshal(list); err != nil || len(list) != 1 || list[0].From != from || list[0].Present != present || strings.Contains(string(text), "the-value") {
			t.Errorf("%s: %s, %v", when, text, err)
		}
	}
	is("asleep", "all", false)
	if err := set(us, "mine", "ours"); err != nil {
		t.Fatal(err)
	}
	if _, err := us.Wake(t.Context(), "mine"); err != nil {
		t.Fatal(err)
	}
	is("awake", "ours", true)
	// The operator takes the source away: at the next wake it has no value.
	if err := known.Add(secretsources.Source{Name: "ours", File: key, Owners: []string{"them"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := us.Sleep(t.Context(), "mine", sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := us.Wake(t.Context(), "mine"); err != nil {
		t.Fatal(err)
	}
	is("without the right", "ours", false)

	for name, body := range map[string]wire.SetSecret{"neither": {}, "both": {Value: []byte("x"), From: "all"}} {
		resp, err := operator.Do(t.Context(), "PUT", "/v1/sandboxes/mine/secrets/key", body)
		if err != nil {
			t.Fatal(err)
		}
		if resp.Body.Close(); resp.StatusCode != 400 {
			t.Errorf("%s of value and from: %s", name, resp.Status)
		}
	}
}
