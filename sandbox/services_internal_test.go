package sandbox

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/state/statetest"
)

func TestServices_that_are_not_possible_are_refused(t *testing.T) {
	good := spec.Service{Name: "web", Argv: []string{"/bin/true"}}
	if err := spec.ValidateServices([]spec.Service{good, {Name: "a.b_c-1", Argv: []string{"x"}, Restart: "never", MaxRestarts: -1, BackoffSeconds: 1, MaxBackoffSeconds: 1, StopSignal: 64, StopSeconds: 300, LogKiB: 1024, Dir: "/x"}}); err != nil {
		t.Errorf("good ones: %v", err)
	}
	for name, change := range map[string]func(*spec.Service){
		"upper case":          func(s *spec.Service) { s.Name = "Web" },
		"no name":             func(s *spec.Service) { s.Name = "" },
		"no command":          func(s *spec.Service) { s.Argv = nil },
		"an empty command":    func(s *spec.Service) { s.Argv = []string{""} },
		"a zero byte":         func(s *spec.Service) { s.Env = []string{"A=\x00"} },
		"a directory":         func(s *spec.Service) { s.Dir = "x" },
		"a policy":            func(s *spec.Service) { s.Restart = "sometimes" },
		"a back-off":          func(s *spec.Service) { s.BackoffSeconds, s.MaxBackoffSeconds = 3, 2 },
		"negative back-off":   func(s *spec.Service) { s.BackoffSeconds = -1 },
		"restarts":            func(s *spec.Service) { s.MaxRestarts = -2 },
		"a signal":            func(s *spec.Service) { s.StopSignal = 65 },
		"a long stop":         func(s *spec.Service) { s.StopSeconds = 301 },
		"a large log":         func(s *spec.Service) { s.LogKiB = 1025 },
		"a very long command": func(s *spec.Service) { s.Argv = []string{strings.Repeat("x", spec.MaxServicesBytes)} },
	} {
		s := good
		change(&s)
		if err := spec.ValidateServices([]spec.Service{s}); !errors.Is(err, ErrSpec) {
			t.Errorf("%s: got %v, want ErrSpec", name, err)
		}
	}
	if err := spec.ValidateServices([]spec.Service{good, good}); !errors.Is(err, ErrSpec) {
		t.Errorf("two of a name: got %v, want ErrSpec", err)
	}
	var many []spec.Service
	for i := range spec.MaxServices + 1 {
		many = append(many, spec.Service{Name: fmt.Sprint("s", i), Argv: []string{"x"}})
	}
	if err := spec.ValidateServices(many); !errors.Is(err, ErrSpec) {
		t.Errorf("too many: got %v, want ErrSpec", err)
	}
}

func TestSecretNames(t *testing.T) {
	for _, name := range []string{"a", "A_b.c-9", strings.Repeat("x", spec.MaxSecretName)} {
		if err := spec.CheckSecretName(name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"", ".", "..", ".a", "a/b", "a b", "a\n", "ä", strings.Repeat("x", spec.MaxSecretName+1)} {
		if err := spec.CheckSecretName(name); !errors.Is(err, spec.ErrSecrets) {
			t.Errorf("%q: got %v, want spec.ErrSecrets", name, err)
		}
	}
}

// A clone gets its record from its snapshot.
func TestRecord_in_a_snapshot_has_services_and_no_secrets(t *testing.T) {
	r := &state.Record{Spec: Spec{Name: "a", Services: []spec.Service{{Name: "web", Argv: []string{"x"}}}}, Secrets: []spec.SecretFile{{Name: "token"}}}
	labels, err := statetest.TempStore(t).Labels(r, state.KindSleep)
	if err != nil {
		t.Fatal(err)
	}
	if text := labels[state.LabelRecord]; !strings.Contains(text, `"web"`) || strings.Contains(text, "token") {
		t.Errorf("it is %s", text)
	}
	if !slices.Equal(r.Secrets, []spec.SecretFile{{Name: "token"}}) {
		t.Error("the record itself has changed")
	}
}

func TestServiceCheck_that_cannot_be_is_refused(t *testing.T) {
	t.Parallel()
	want := func(c spec.ServiceCheck) spec.Service { return spec.Service{Name: "s", Argv: []string{"x"}, Check: &c} }
	for name, c := range map[string]spec.ServiceCheck{
		"nothing":            {},
		"two":                {TCP: "127.0.0.1:1", File: "/x"},
		"another machine":    {TCP: "10.0.0.1:80"},
		"a URL elsewhere":    {HTTP: "http://example.com/"},
		"https":              {HTTP: "https://127.0.0.1/"},
		"a relative path":    {Unix: "x"},
		"a zero byte":        {File: "/x\x00"},
		"an empty command":   {Exec: []string{""}},
		"a long interval":    {File: "/x", IntervalSeconds: 601},
		"a negative timeout": {File: "/x", TimeoutSeconds: -1},
		"a long start":       {File: "/x", StartSeconds: 3601},
		"many failures":      {File: "/x", AliveFailures: 1001},
	} {
		s := want(c)
		if err := s.Validate(); !errors.Is(err, ErrSpec) {
			t.Errorf("%s: %v, want ErrSpec", name, err)
		}
	}
	for _, c := range []spec.ServiceCheck{{TCP: "localhost:80"}, {TCP: "[::1]:80"}, {HTTP: "http://127.0.0.1/x?y"}, {HTTP: "http://[::1]:8080/"}, {Unix: "/x"}, {Exec: []string{"x"}, AliveFailures: 3}} {
		s := want(c)
		if err := s.Validate(); err != nil {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
