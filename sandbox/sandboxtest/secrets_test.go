package sandboxtest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestSecrets_with_a_source_have_its_value_after_each_wake(t *testing.T) {
	v := &sandboxtest.VMs{}
	h := v.Host(t)
	var mu sync.Mutex
	values := map[string]string{"vault": "first-value"}
	l, err := v.Launcher(h)
	if err != nil {
		t.Fatal(err)
	}
	l.Secrets = func(_ context.Context, vm string, awaited []spec.SecretFile) (out []spec.Secret, err error) {
		mu.Lock()
		defer mu.Unlock()
		for _, f := range awaited {
			if v := values[f.From]; v != "" {
				out = append(out, spec.Secret{SecretFile: f, Value: []byte(v)})
			} else {
				err = errors.Join(err, fmt.Errorf("%w: no value for %s of %s", spec.ErrSecrets, f.Name, vm))
			}
		}
		return out, err
	}
	is := func(from, value string) {
		mu.Lock()
		defer mu.Unlock()
		values[from] = value
	}
	h = h.With(l)
	b := create(t, h, sandbox.Spec{Name: "a", Network: spec.NetworkTAP})
	check := func(when string, want ...spec.SecretState) {
		t.Helper()
		if got, err := b.Secrets(t.Context()); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %+v, %v, want %+v", when, got, err, want)
		}
	}
	ref := func(name, from string) spec.Secret {
		return spec.Secret{SecretFile: spec.SecretFile{Name: name, From: from}}
	}
	file := func(name, from string) spec.SecretFile {
		return spec.SecretFile{Name: name, Mode: spec.DefaultSecretMode, From: from}
	}
	sleep := func() {
		t.Helper()
		if _, err := b.Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.SetSecrets(t.Context(), ref("x", "none")); !errors.Is(err, spec.ErrSecrets) {
		t.Errorf("one without a value: %v", err)
	}
	if err := b.SetSecrets(t.Context(), ref("key", "vault")); err != nil {
		t.Fatal(err)
	}
	check("set while it runs", spec.SecretState{SecretFile: file("key", "vault"), Present: true, Size: 11, Kept: true})
	sleep()

	// More of them, while it sleeps. They need a value now, and one that is for the proxy has no file.
	if err := b.SetSecrets(t.Context(), ref("y", "none")); !errors.Is(err, spec.ErrSecrets) {
		t.Errorf("one without a value, asleep: %v", err)
	}
	if err := b.SetSecrets(t.Context(), ref("y", "bad/name")); !errors.Is(err, spec.ErrSecrets) {
		t.Errorf("a bad name of a source: %v", err)
	}
	hidden := ref("hidden", "vault")
	hidden.Proxy = true
	if err := b.SetSecrets(t.Context(), hidden, ref("late", "vault")); err != nil {
		t.Fatal(err)
	}
	if err := b.SetSecrets(t.Context(), ref("z", "vault"), spec.Secret{SecretFile: spec.SecretFile{Name: "v"}, Value: []byte("v")}); !errors.Is(err, sandbox.ErrNotRunning) {
		t.Errorf("a value for one that sleeps: %v", err)
	}
	record, err := os.ReadFile(filepath.Join(h.State.Dir(), "vms", "a", "vm.json"))
	if err != nil || bytes.Contains(record, []byte("first-value")) || !bytes.Contains(record, []byte("vault")) {
		t.Errorf("the record is %s, %v", record, err)
	}
	is("vault", "a-second-value")
	lock, err := b.WakeWithLock(t.Context()) // as for a connection
	if err != nil {
		t.Fatal(err)
	}
	lock.Release()
	proxied := spec.SecretFile{Name: "hidden", Proxy: true, From: "vault"}
	check("after the wake", spec.SecretState{SecretFile: proxied, Present: true, Size: 14, Kept: true},
		spec.SecretState{SecretFile: file("key", "vault"), Present: true, Size: 14, Kept: true}, spec.SecretState{SecretFile: file("late", "vault"), Present: true, Size: 14, Kept: true})
	sleep()

	// One fails: the others come, and the sandbox runs.
	is("vault", "third-value-x")
	is("other", "value")
	if err := b.SetSecrets(t.Context(), ref("late", "other")); err != nil {
		t.Fatal(err)
	}
	is("other", "")
	rep, err := b.Wake(t.Context())
	if err != nil || !strings.Contains(rep.SecretsProblem, "late") {
		t.Errorf("a wake without one of them: %+v, %v", rep, err)
	}
	check("after a failure", spec.SecretState{SecretFile: proxied, Present: true, Size: 13, Kept: true},
		spec.SecretState{SecretFile: file("key", "vault"), Present: true, Size: 13, Kept: true}, spec.SecretState{SecretFile: file("late", "other"), Kept: true})
	told := 0
	if _, err := h.State.Events().Read(t.Context(), events.ReadOptions{Filter: events.Filter{Types: []string{string(events.SecretsFailed)}}}, func(e events.Event) error {
		if told++; e.Sandbox != "a" || !strings.Contains(e.Details.Problem, "late") || strings.Contains(e.Details.Problem, "third") {
			t.Errorf("%+v", e)
		}
		return nil
	}); err != nil || told != 1 {
		t.Errorf("%d events, %v", told, err)
	}
	// One that the sandbox cannot have does not keep back the others.
	sleep()
	is("vault", "two\nlines-are-not-for-the-proxy")
	is("other", "value")
	if rep, err := b.Wake(t.Context()); err != nil || !strings.Contains(rep.SecretsProblem, "hidden") {
		t.Errorf("a wake with a value of two lines: %+v, %v", rep, err)
	}
	check("after a bad value", spec.SecretState{SecretFile: proxied, Kept: true},
		spec.SecretState{SecretFile: file("key", "vault"), Present: true, Size: 31, Kept: true}, spec.SecretState{SecretFile: file("late", "other"), Present: true, Size: 5, Kept: true})

	// A value takes the place of the source, and forks have neither.
	if err := b.SetSecrets(t.Context(), spec.Secret{SecretFile: spec.SecretFile{Name: "key"}, Value: []byte("v")}); err != nil {
		t.Fatal(err)
	}
	made, err := b.Fork(t.Context(), sandbox.ForkOptions{Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	if list, err := h.Sandbox(made.Children[0].Name).Secrets(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("a fork has %+v, %v", list, err)
	}
	if err := b.RemoveSecrets(t.Context(), "late", "hidden"); err != nil {
		t.Fatal(err)
	}
	sleep()
	if _, err := b.Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	check("without a source", spec.SecretState{SecretFile: file("key", ""), Kept: true})
}

func TestSecrets_come_although_the_caller_of_the_wake_goes_away(t *testing.T) {
	v := &sandboxtest.VMs{}
	h := v.Host(t)
	l, err := v.Launcher(h)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	l.Secrets = func(got context.Context, _ string, awaited []spec.SecretFile) ([]spec.Secret, error) {
		cancel()
		return []spec.Secret{{SecretFile: awaited[0], Value: []byte("value")}}, got.Err()
	}
	h = h.With(l)
	b := create(t, h, sandbox.Spec{Name: "a"})
	if err := b.SetSecrets(t.Context(), spec.Secret{SecretFile: spec.SecretFile{Name: "key", From: "s"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	if _, err := b.Wake(ctx); err != nil {
		t.Fatal(err)
	}
	if got, err := b.Secrets(t.Context()); err != nil || len(got) != 1 || !got[0].Present {
		t.Errorf("%+v, %v", got, err)
	}
}
