package sandbox

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/proxy"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestProxyKey_is_made_once_and_for_its_owner_alone(t *testing.T) {
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	keys := make([][]byte, 16)
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() {
			var err error
			if keys[i], err = s.State.ProxyKey(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, k := range keys {
		if len(k) != proxy.KeyBytes || !bytes.Equal(k, keys[0]) {
			t.Fatalf("keys of %d and %d bytes that differ", len(k), len(keys[0]))
		}
	}
	path := filepath.Join(s.State.Dir(), state.ProxyKeyFile)
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	left, err := filepath.Glob(filepath.Join(s.State.Dir(), ".tmp-*"))
	if err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
	for what, spoil := range map[string]func() error{
		"others can read it": func() error { return os.Chmod(path, 0o640) },
		"it is cut off":      func() error { return errors.Join(os.Chmod(path, 0o600), os.Truncate(path, 31)) },
	} {
		if err := errors.Join(os.WriteFile(path, keys[0], 0o600), os.Chmod(path, 0o600), spoil()); err != nil {
			t.Fatal(err)
		}
		if _, err := s.State.ProxyKey(); !errors.Is(err, spec.ErrRecord) {
			t.Errorf("%s: %v, want spec.ErrRecord", what, err)
		}
	}
}

func TestRecord_inherits_what_is_in_memory(t *testing.T) {
	a := &state.Record{ID: spec.NewID(), TrustedCA: "f"}
	fork, grandchild, foreign := &state.Record{ID: spec.NewID()}, &state.Record{ID: spec.NewID()}, &state.Record{ID: spec.NewID()}
	fork.Inherit(a)
	grandchild.Inherit(fork)
	if a.MemoryOf() != a.ID || fork.MemoryOf() != a.ID || grandchild.MemoryOf() != a.ID || grandchild.TrustedCA != "f" {
		t.Errorf("%+v, %+v, %+v", a, fork, grandchild)
	}
	foreign.Inherit(&state.Record{ID: "../../x", Lineage: "../../y", TrustedCA: "f"})
	if foreign.MemoryOf() != foreign.ID || foreign.TrustedCA != "" {
		t.Errorf("%+v", foreign)
	}
}

func mustParse(t *testing.T, text string) *netpolicy.Policy {
	t.Helper()
	p, err := netpolicy.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

const injects = `
rules: [{direction: egress, verdict: allow, names: [api.example], protocols: [tcp], ports: [443]}]
dns: {upstreams: ["192.0.2.53:53"]}
proxy: {enabled: true, inject: [{secret: API_KEY, hosts: [api.example], header: Authorization}]}
`

func TestSecret_becomes_what_the_policy_says_and_stays_so(t *testing.T) {
	state := func(name string, proxy bool) []spec.SecretState {
		return []spec.SecretState{{SecretFile: spec.SecretFile{Name: name, Proxy: proxy}}}
	}
	file := func(name, value string) spec.Secret {
		return spec.Secret{SecretFile: spec.SecretFile{Name: name, Mode: 0o400, UID: 1}, Value: []byte(value)}
	}
	policy := mustParse(t, injects)
	for name, c := range map[string]struct {
		secret spec.Secret
		policy *netpolicy.Policy
		there  []spec.SecretState
		proxy  bool
		value  string
		bad    bool
	}{
		"a file":                                  {file("token", "x\n"), policy, nil, false, "x\n", false},
		"named by the policy":                     {file("API_KEY", "sk-12345678\n"), policy, nil, true, "sk-12345678", false},
		"named by the policy, with CRLF":          {file("API_KEY", "sk-12345678\r\n"), policy, nil, true, "sk-12345678", false},
		"for the proxy by its owner's word":       {spec.Secret{SecretFile: spec.SecretFile{Name: "LATER", Proxy: true}, Value: []byte("sk-12345678")}, nil, nil, true, "sk-12345678", false},
		"the proxy's, of which no policy speaks":  {file("API_KEY", "sk-12345678"), nil, state("API_KEY", true), true, "sk-12345678", false},
		"a file that the policy names afterwards": {file("API_KEY", "sk-12345678"), policy, state("API_KEY", false), true, "", true},
		"too short for a request":                 {file("API_KEY", "short\n"), policy, nil, true, "", true},
		"two lines":                               {file("API_KEY", "sk-12345678\nsk-12345678\n"), policy, nil, true, "", true},
	} {
		s := c.secret
		err := control.ForProxy(&s, c.policy, c.there)
		if c.bad {
			if !errors.Is(err, spec.ErrSecrets) {
				t.Errorf("%s: %v, want spec.ErrSecrets", name, err)
			}
			continue
		}
		if err != nil || s.Proxy != c.proxy || string(s.Value) != c.value || s.Proxy && (s.Mode != 0 || s.UID != 0) || !s.Proxy && s.Mode != 0o400 {
			t.Errorf("%s: %+v %q, %v", name, s.SecretFile, s.Value, err)
		}
	}
	if err := control.CheckSecret(&spec.Secret{SecretFile: spec.SecretFile{Name: "K", Proxy: true, Mode: 0o444}, Value: []byte("12345678")}); !errors.Is(err, spec.ErrSecrets) {
		t.Errorf("a mode for one of the proxy's: %v", err)
	}
}

func TestProxyEnvironment_is_that_of_the_lineage(t *testing.T) {
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	record := func(name string, p *netpolicy.Policy) *state.Record {
		t.Helper()
		r := &state.Record{Version: state.RecordVersion, ID: spec.NewID(), Phase: state.Stopped, Spec: Spec{Name: name, Network: spec.NetworkTAP, Policy: p}}
		if err := errors.Join(os.MkdirAll(s.State.VMDir(name), 0o700), s.State.Save(r)); err != nil {
			t.Fatal(err)
		}
		return r
	}
	parent := record("a", mustParse(t, injects))
	child := record("b", mustParse(t, injects))
	child.Inherit(parent)
	if err := s.State.Save(child); err != nil {
		t.Fatal(err)
	}
	record("c", mustParse(t, injects))
	record("d", mustParse(t, strings.Replace(injects, "enabled: true, inject: [{secret: API_KEY, hosts: [api.example], header: Authorization}]", "", 1)))
	record("e", nil)
	env := map[string][]string{}
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		if env[name], err = s.Sandbox(name).ProxyEnvironment(); err != nil {
			t.Fatal(err)
		}
	}
	if len(env["a"]) == 0 || !slices.Equal(env["a"], env["b"]) || slices.Equal(env["a"], env["c"]) {
		t.Errorf("a VM has %q, what began as it %q, another %q", env["a"], env["b"], env["c"])
	}
	if env["d"] != nil || env["e"] != nil {
		t.Errorf("without a proxy: %q, %q", env["d"], env["e"])
	}
}
