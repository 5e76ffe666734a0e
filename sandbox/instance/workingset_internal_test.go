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
		hot  int
		bad  bool
	}{
		{"none", []snapshot.Payload{vcpu}, nil, 0, false},
		{"two pages of the version before", []snapshot.Payload{set(1, 5, 0, 0, 0, 0, 1, 0, 0), vcpu}, []uint64{5, 256}, 0, false},
		{"two pages, one hot", []snapshot.Payload{set(2, 1, 0, 0, 0, 5, 0, 0, 0, 0, 1, 0, 0), vcpu}, []uint64{5, 256}, 1, false},
		{"more hot than can be", []snapshot.Payload{set(2, 255, 255, 255, 255, 5, 0, 0, 0), vcpu}, []uint64{5}, snapshot.MaxHot, false},
		{"no number", []snapshot.Payload{set(2), vcpu}, nil, 0, false},
		{"a newer version is no hint", []snapshot.Payload{vcpu, set(3, 1)}, nil, 0, false},
		{"half a number", []snapshot.Payload{vcpu, set(1, 5, 0)}, nil, 0, true},
		{"two sets", []snapshot.Payload{set(1, 5, 0, 0, 0), set(1, 5, 0, 0, 0), vcpu}, nil, 0, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, states, err := takeWorkingSet(tt.in)
			if tt.bad {
				if !errors.Is(err, snapshot.ErrCorrupt) {
					t.Errorf("got %v, want ErrCorrupt", err)
				}
				return
			}
			if err != nil || !slices.Equal(got.pages, tt.want) || got.hot != tt.hot || len(states) != 1 || states[0].Name != vcpu.Name {
				t.Errorf("%+v, states %v, %v", got, states, err)
			}
		})
	}
}

func TestWorking_set_begins_with_what_restoring_takes(t *testing.T) {
	if s := newWorkingSet(nil, nil); len(s.pages) > 0 {
		t.Errorf("of nothing: %+v", s)
	}
	s, states, err := takeWorkingSet([]snapshot.Payload{newWorkingSet([]uint64{256, 5, 256}, nil).payload()})
	if err != nil || !slices.Equal(s.pages, []uint64{256, 5}) || s.hot != 0 || len(states) != 0 {
		t.Errorf("%+v, states %v, %v", s, states, err)
	}
}
