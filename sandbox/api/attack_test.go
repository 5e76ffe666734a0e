package api_test

import (
	"fmt"
	"net/http"
	"path/filepath"
	"sync"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestAttack_owner_opens_what_belongs_to_the_host_by_a_policy(t *testing.T) {
	m := newMachines(t)
	box, err := m.host.Create(t.Context(), sandbox.Spec{Name: "box", Image: sandboxtest.Image, Network: spec.NetworkTAP}, sandbox.CreateOptions{Metadata: &spec.Metadata{Owner: "us"}})
	if err != nil {
		t.Fatal(err)
	}
	shot, err := box.Snapshot(t.Context(), sandbox.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	known := tokens.Open(filepath.Join(t.TempDir(), tokens.File))
	token := func(name, owner string) string {
		secret, err := known.Create(tokens.Token{Name: name, Owner: owner, Scopes: tokens.Scopes{tokens.ScopeRead, tokens.ScopeExec, tokens.ScopeFiles, tokens.ScopeCreate}})
		if err != nil {
			t.Fatal(err)
		}
		return secret
	}
	ours, operator := token("ours", "us"), token("operator", "")
	server := api.New(api.Options{Host: m.host, Tokens: known})
	trusting := api.New(api.Options{Host: m.host, Tokens: known, OwnersPrivate: true})
	const rule = `{"direction":"egress","verdict":"allow","protocols":["tcp"],"ports":[443],%s}`
	made := 0
	ways := map[string]func(policy string) (method, path, body string){
		"a new sandbox": func(p string) (string, string, string) {
			return "POST", "/v1/sandboxes", fmt.Sprintf(`{"spec":{"name":"new-%d","image":%q,"network":"tap","policy":%s}}`, made, sandboxtest.Image, p)
		},
		"a clone": func(p string) (string, string, string) {
			return "POST", "/v1/snapshots/" + shot.Snapshot + "/clone", fmt.Sprintf(`{"name":"clone-%d","policy":%s}`, made, p)
		},
		"a change": func(p string) (string, string, string) { return "PATCH", "/v1/sandboxes/box", `{"policy":` + p + `}` },
		"another policy": func(p string) (string, string, string) {
			return "PUT", "/v1/sandboxes/box/policy", p
		},
	}
	for name, c := range map[string]struct {
		policy          string
		refused, always bool // always: whatever the operator permits
	}{
		"an address of the host":    {`{"publish":[{"listen":"127.0.0.1:5432","port":80,"protocol":"tcp"}]}`, true, true},
		"a port of the host by DNS": {`{"dns":{"upstreams":["127.0.0.1:6379"]}}`, true, true},
		"the host's services":       {`{"rules":[` + fmt.Sprintf(rule, `"groups":["host"]`) + `]}`, true, false},
		"private networks":          {`{"rules":[` + fmt.Sprintf(rule, `"groups":["public","private"]`) + `]}`, true, false},
		"an address in one":         {`{"rules":[` + fmt.Sprintf(rule, `"cidrs":["10.0.0.7/32"]`) + `]}`, true, false},
		"the Internet":              {`{"rules":[` + fmt.Sprintf(rule, `"groups":["public"],"cidrs":["0.0.0.0/0"]`) + `],"dns":{"upstreams":["192.0.2.53:53"]}}`, false, false},
		"who may come from inside":  {`{"rules":[{"direction":"ingress","verdict":"allow","protocols":["tcp"],"ports":[80],"groups":["host","private"]}]}`, false, false},
		"nothing of what it denies": {`{"rules":[{"direction":"egress","verdict":"deny","groups":["host","private"]}]}`, false, false},
	} {
		for way, of := range ways {
			for who, by := range map[string]struct {
				server  *api.Server
				token   string
				refused bool
			}{
				"an owner": {server, ours, c.refused}, "an owner whom the operator trusts": {trusting, ours, c.always}, "the operator": {server, operator, false},
			} {
				made++
				code, says := asker(t, by.server, by.token)(of(c.policy))
				if (code == http.StatusForbidden) != by.refused || !by.refused && code/100 != 2 {
					t.Errorf("%s by %s of %s: %d %s", name, way, who, code, says)
				}
			}
		}
	}
}

func TestAttack_tokens_of_one_owner_take_the_room_of_others(t *testing.T) {
	known := tokens.Open(filepath.Join(t.TempDir(), tokens.File))
	begun, held := make(chan struct{}, api.MaxReads), make(chan struct{})
	server := api.New(api.Options{Host: newMachines(t).host, Tokens: known, Mounts: []api.Mount{{Pattern: "GET /hold", Scope: api.ScopeRead, Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		begun <- struct{}{}
		<-held
	})}}})
	as := func(name, owner string) func(method, path, body string) (int, string) {
		secret, err := known.Create(tokens.Token{Name: name, Owner: owner, Scopes: tokens.Scopes{tokens.ScopeRead}})
		if err != nil {
			t.Fatal(err)
		}
		return asker(t, server, secret)
	}
	one, another, other, operator := as("one", "us"), as("another", "us"), as("other", "them"), as("operator", "")
	var all sync.WaitGroup
	for range api.MaxReads / 2 {
		all.Go(func() { one("GET", "/hold", "") })
	}
	for range api.MaxReads / 2 {
		<-begun
	}
	if code, says := another("GET", "/v1/version", ""); code != http.StatusTooManyRequests {
		t.Errorf("another token of the owner: %d %s", code, says)
	}
	for who, ask := range map[string]func(method, path, body string) (int, string){"another owner": other, "the operator": operator} {
		if code, says := ask("GET", "/v1/version", ""); code != http.StatusOK {
			t.Errorf("%s: %d %s", who, code, says)
		}
	}
	close(held)
	all.Wait()
}
