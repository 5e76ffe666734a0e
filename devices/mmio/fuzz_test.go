package mmio

import (
	"bytes"
	"errors"
	"testing"

	"github.com/drowse-vm/drowse/devices"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// kept is a device with a state of its own. It imports exactly three bytes.
type kept struct {
	plain
	state [3]byte
}

func (k *kept) Export() (devices.Payload, error) {
	return devices.Payload{Kind: "kept", Version: 7, Data: bytes.Clone(k.state[:])}, nil
}

func (k *kept) Import(p devices.Payload) error {
	if err := p.Check("kept", 7); err != nil {
		return err
	}
	d := devices.NewDecoder(p.Data)
	s := [3]byte{d.Uint8(), d.Uint8(), d.Uint8()}
	if err := d.Finish(); err != nil {
		return err
	}
	k.state = s
	return nil
}

// FuzzImport: a refused state gives ErrPayload and leaves transport and device unchanged, ready for another. An
// accepted state exports as one that exports itself, starts the device once at most, on queues inside RAM, and a
// reset undoes it.
func FuzzImport(f *testing.F) {
	mem, err := guestmem.New(guestmem.MinSize)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { mem.Close() })
	irq, err := devices.NewEvent()
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { irq.Close() })
	kicks := func(t testing.TB, n int) (all []*devices.Event) {
		for range n {
			e, err := devices.NewEvent()
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, e)
		}
		return all
	}
	fresh := func(t testing.TB) (*kept, *Transport) {
		d := &kept{}
		tr, err := New(d, mem, irq, Options{OnError: func(err error) { t.Errorf("the owner was told: %v", err) }, Kicks: kicks(t, 2)})
		if err != nil {
			t.Fatal(err)
		}
		return d, tr
	}
	export := func(t testing.TB, tr *Transport) []byte {
		if err := tr.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		p, err := tr.Export()
		if err != nil {
			t.Fatal(err)
		}
		return p.Data
	}
	_, tr := fresh(f)
	idle := export(f, tr)
	f.Add(idle)
	m := &machine{Transport: tr}
	if err := tr.Resume(); err != nil {
		f.Fatal(err)
	}
	m.start()
	f.Add(export(f, tr))
	if err := tr.Close(); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		d, tr := fresh(t)
		defer tr.Close()
		p := devices.Payload{Kind: stateKind, Version: stateVersion, Data: data}
		if err := tr.Import(p); err != nil {
			if !errors.Is(err, devices.ErrPayload) {
				t.Fatalf("%v is not ErrPayload", err)
			}
			if d.activations != 0 || tr.status.Load() != 0 || !bytes.Equal(export(t, tr), idle) {
				t.Fatalf("it was refused (%v), and is changed", err)
			}
			return
		}
		again := export(t, tr)
		other, tr2 := fresh(t)
		defer tr2.Close()
		if err := tr2.Import(devices.Payload{Kind: stateKind, Version: stateVersion, Data: again}); err != nil {
			t.Fatalf("what it has saved is refused: %v", err)
		}
		if got := export(t, tr2); !bytes.Equal(got, again) || other.state != d.state {
			t.Fatalf("% x became % x", again, got)
		}
		if err := tr.Import(p); !errors.Is(err, ErrInUse) && tr.status.Load() != 0 {
			t.Fatalf("a second state: %v", err)
		}
		if err := tr.Restore(); err != nil {
			t.Fatalf("a state that was taken cannot be restored: %v", err)
		}
		if d.activations > 1 {
			t.Fatalf("it was started %d times", d.activations)
		}
		if d.activation != nil {
			for i, q := range d.activation.Queues {
				if q == nil {
					continue
				}
				if l := q.Layout(); l.Size > tr.queues[i].max || !mem.Contains(l.Desc, 16*uint64(l.Size)) {
					t.Fatalf("queue %d lies at %+v", i, l)
				}
			}
		}
		if err := tr.Resume(); err != nil {
			t.Fatal(err)
		}
		tr.WriteIO(regStatus, make([]byte, 4))
		if s := tr.status.Load(); s != 0 || d.activation != nil {
			t.Fatalf("status %#x after a reset", s)
		}
		(&machine{Transport: tr}).start()
		if s := tr.status.Load(); s != statusAcknowledge|statusDriver|statusFeaturesOK|statusDriverOK {
			t.Fatalf("status %#x when it is started after a reset", s)
		}
	})
}
