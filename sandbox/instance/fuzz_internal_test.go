package instance

import (
	"encoding/json"
	"errors"
	"reflect"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// A fork note has the version and the vCPUs that are wanted, or parseForkNote returns an error.
func FuzzForkNote(f *testing.F) {
	whole, err := json.Marshal(forkNote{forkVersion, 1, map[string]string{FactsKey: "{}"}, []snapshot.Payload{{Name: "vcpu0", Kind: "vcpu", Version: 1, Data: []byte{1}}}, "v"})
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range [][]byte{whole, whole[:len(whole)-2], []byte("null"), []byte(`{"version":1,"vcpus":1,"payloads":null}`), []byte(`{"version":1,"vcpus":-1}`)} {
		f.Add(s, 1)
	}
	f.Fuzz(func(t *testing.T, data []byte, vcpus int) {
		note, err := parseForkNote(data, vcpus)
		if err != nil {
			if !errors.Is(err, guestmem.ErrImage) && !errors.Is(err, spec.ErrInvalid) {
				t.Fatal(err)
			}
			return
		}
		if note.Version != forkVersion || note.VCPUs != vcpus {
			t.Fatalf("%d vCPUs are wanted, and %+v is taken", vcpus, note)
		}
		n := 0
		for _, p := range note.Payloads {
			n += len(p.Data)
		}
		if n > len(data) {
			t.Fatalf("%d bytes have %d bytes of states", len(data), n)
		}
		text, err := json.Marshal(note)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := parseForkNote(text, vcpus); err != nil || !reflect.DeepEqual(again, note) {
			t.Fatalf("%+v is read again as %+v (%v)", note, again, err)
		}
	})
}
