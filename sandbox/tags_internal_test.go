package sandbox

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestTagChange_what_tags_become(t *testing.T) {
	full := []string{"1", "2", "3", "4", "5", "6", "7", "8"}
	for name, tt := range map[string]struct {
		tags, add, remove, want []string
		err                     error
	}{
		"one more":                      {[]string{"a"}, []string{"b"}, nil, []string{"a", "b"}, nil},
		"one less":                      {[]string{"a", "b"}, nil, []string{"a"}, []string{"b"}, nil},
		"the last one less":             {[]string{"a"}, nil, []string{"a"}, []string{}, nil},
		"one for another":               {[]string{"a", "b"}, []string{"c"}, []string{"a"}, []string{"b", "c"}, nil},
		"one that is there":             {[]string{"a", "b"}, []string{"a"}, nil, []string{"a", "b"}, nil},
		"one less that is not there":    {[]string{"a"}, nil, []string{"b"}, []string{"a"}, nil},
		"the ninth":                     {full, []string{"9"}, nil, full, netpolicy.ErrPolicy},
		"the ninth in another's place":  {full, []string{"9"}, []string{"1"}, append(full[1:8:8], "9"), nil},
		"nothing":                       {full, nil, nil, full, ErrSpec},
		"one that cannot be":            {nil, []string{"a b"}, nil, nil, netpolicy.ErrPolicy},
		"one less that cannot be":       {nil, nil, []string{""}, nil, netpolicy.ErrPolicy},
		"one more and less":             {nil, []string{"a", "b"}, []string{"b"}, nil, ErrSpec},
		"the same twice":                {nil, []string{"a", "a"}, nil, nil, netpolicy.ErrPolicy},
		"more than there may be at all": {nil, append(full[:8:8], "9"), nil, nil, netpolicy.ErrPolicy},
	} {
		t.Run(name, func(t *testing.T) {
			s := Spec{Network: spec.NetworkTAP, Tags: tt.tags}
			before := slices.Clone(tt.tags)
			c := spec.TagChange{Add: tt.add, Remove: tt.remove}
			err := c.Validate()
			if err == nil {
				err = s.UseTags(c)
			}
			want := tt.want
			if !errors.Is(err, tt.err) || tt.err != nil && !errors.Is(err, ErrSpec) || !slices.Equal(s.Tags, want) {
				t.Errorf("%q, %v; want %q, %v", s.Tags, err, want, tt.err)
			}
			if !slices.Equal(tt.tags, before) {
				t.Errorf("the list that it began with has become %q", tt.tags)
			}
		})
	}
}

func TestSetTags_of_a_vm_without_a_process_is_stored(t *testing.T) {
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for name, network := range map[string]string{"with": spec.NetworkTAP, "without": spec.NetworkNone} {
		l, err := s.State.Create(&state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: Spec{Name: name, Network: network}, Phase: state.Asleep})
		if err != nil {
			t.Fatal(err)
		}
		l.Release()
	}
	// Concurrent callers each set a tag, and none is lost.
	var want []string
	var wg sync.WaitGroup
	for i := range netpolicy.MaxOwnTags {
		tag := fmt.Sprint("tag", i)
		want = append(want, tag)
		wg.Go(func() {
			if res, err := s.Sandbox("with").SetTags(t.Context(), []string{tag}, nil); err != nil || res.Live || !slices.Contains(res.Tags, tag) {
				t.Errorf("%+v, %v", res, err)
			}
		})
	}
	wg.Wait()
	tags := func() []string {
		t.Helper()
		r, err := s.State.Get("with")
		if err != nil {
			t.Fatal(err)
		}
		return slices.Sorted(slices.Values(r.Spec.Tags))
	}
	if got := tags(); !slices.Equal(got, want) {
		t.Errorf("tags %q, want %q", got, want)
	}
	if _, err := s.Sandbox("with").SetTags(t.Context(), []string{"one-more"}, nil); !errors.Is(err, ErrSpec) {
		t.Errorf("one more than there may be: %v", err)
	}
	if got := tags(); !slices.Equal(got, want) {
		t.Errorf("after that: %q", got)
	}
	if res, err := s.Sandbox("with").SetTags(t.Context(), nil, want); err != nil || res.Tags == nil || len(res.Tags) != 0 {
		t.Errorf("%+v, %v", res, err)
	}
	if _, err := s.Sandbox("without").SetTags(t.Context(), []string{"db"}, nil); !errors.Is(err, ErrSpec) {
		t.Errorf("of a VM without a network: %v", err)
	}
	if _, err := s.Sandbox("nobody").SetTags(t.Context(), []string{"db"}, nil); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
}
