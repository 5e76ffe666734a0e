package instance

import (
	"errors"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/snapshot"
)

func TestWorking_set_is_taken_out_of_the_states(t *testing.T) {
	vcpu := snapshot.Payload{Name: "vcpu/0", Kind: "kvm-vcpu"}
	set := func(version uint32, data ...byte) snapshot.Payload {
		return snapshot.Payload{Name: workingSetName, Kind: workingSetKind, Version: version, Data: data}
	}
	for _, tt := range []struct {
		name string
		in   []snapshot.Payload
		want []uint64
		bad  bool
	}{
		{"none", []snapshot.Payload{vcpu}, nil, false},
		{"two pages", []snapshot.Payload{set(1, 5, 0, 0, 0, 0, 1, 0, 0), vcpu}, []uint64{5, 256}, false},
		{"a newer version is no hint", []snapshot.Payload{vcpu, set(2, 1)}, nil, false},
		{"half a number", []snapshot.Payload{vcpu, set(1, 5, 0)}, nil, true},
		{"two sets", []snapshot.Payload{set(1, 5, 0, 0, 0), set(1, 5, 0, 0, 0), vcpu}, nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			pages, states, err := takeWorkingSet(tt.in)
			if tt.bad {
				if !errors.Is(err, snapshot.ErrCorrupt) {
					t.Errorf("got %v, want ErrCorrupt", err)
				}
				return
			}
			if err != nil || !slices.Equal(pages, tt.want) || len(states) != 1 || states[0].Name != vcpu.Name {
				t.Errorf("pages %v, states %v, %v", pages, states, err)
			}
		})
	}
}

func TestWorking_set_begins_with_what_restoring_takes(t *testing.T) {
	if p, ok := workingSet(nil, nil); ok {
		t.Errorf("of nothing: %+v", p)
	}
	p, ok := workingSet([]uint64{256, 5, 256}, nil)
	if !ok {
		t.Fatal("there is none")
	}
	pages, states, err := takeWorkingSet([]snapshot.Payload{p})
	if err != nil || !slices.Equal(pages, []uint64{256, 5}) || len(states) != 0 {
		t.Errorf("pages %v, states %v, %v", pages, states, err)
	}
}
