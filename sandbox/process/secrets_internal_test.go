package process

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// secretVM is a VM with nothing but ports for secrets.
type secretVM struct {
	VM
	ports *secrets.Device
	serve error
}

// runningMachine is one that does not end.
type runningMachine struct{ Machine }

func (runningMachine) Done() <-chan struct{} { return nil }

func (v *secretVM) Machine() Machine                   { return runningMachine{} }
func (v *secretVM) Secrets() Secrets                   { return v.ports }
func (v *secretVM) KeepRunning() func()                { return func() {} }
func (v *secretVM) ServeSecrets(context.Context) error { return v.serve }

func TestHidden_secret_is_not_there_for_the_guest(t *testing.T) {
	s, err := state.OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := &state.Record{
		Version: state.RecordVersion, ID: spec.NewID(), Phase: state.Running, Created: time.Now(),
		Spec: spec.VM{Name: "a", VCPUs: 1},
	}
	l, err := s.Create(r)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	vm := &secretVM{ports: secrets.New()}
	defer vm.ports.Close()
	p := &process{store: s, r: r, in: vm, log: slog.New(slog.DiscardHandler)}
	defer p.hidden.Close()
	secret := func(name string, proxy bool) spec.Secret {
		return spec.Secret{SecretFile: spec.SecretFile{Name: name, Proxy: proxy}, Value: []byte("value-of-" + name)}
	}
	if err := p.setSecrets(t.Context(), []spec.Secret{secret("hidden", true), secret("seen", false)}); err != nil {
		t.Fatal(err)
	}
	if value, ok, _ := p.hidden.Secret("hidden"); !ok || value != "value-of-hidden" {
		t.Errorf("the proxy gets %q, %t", value, ok)
	}
	if _, ok, _ := p.hidden.Secret("seen"); ok {
		t.Error("the proxy gets a secret of the guest's")
	}
	// Whatever number the guest guesses, the table's 0 among them, it is not that.
	for id := range uint32(64) {
		vm.ports.WriteIO(secrets.Select, binary.LittleEndian.AppendUint32(nil, id))
		text := make([]byte, 256)
		for i := range text {
			vm.ports.ReadIO(secrets.Data, text[i:i+1])
		}
		if bytes.Contains(text, []byte("hidden")) {
			t.Errorf("number %d gives %q", id, text)
		}
	}
	// A request that fails leaves none of its new secrets.
	vm.serve = errors.New("made by the test")
	err = p.setSecrets(t.Context(), []spec.Secret{secret("more", true), secret("other", false)})
	if !errors.Is(err, vm.serve) {
		t.Errorf("got %v, want %v", err, vm.serve)
	}
	if n, m := len(p.hidden.List()), len(vm.ports.List()); n != 1 || m != 1 || len(p.r.Secrets) != 2 {
		t.Errorf("after a failure the proxy has %d secrets, the guest %d, the record %+v", n, m, p.r.Secrets)
	}
}
