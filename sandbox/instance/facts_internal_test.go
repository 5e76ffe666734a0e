package instance

import (
	"errors"
	"testing"

	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm"
)

func TestFacts_of_another_host_are_refused_also_after_good_ones(t *testing.T) {
	const good = "those of this host"
	NoteGoodFacts(good)
	NoteGoodFacts("those of a machine that needs no KVM")
	for name, tc := range map[string]struct {
		facts string
		want  error
	}{
		"known to be good":     {good, nil},
		"of another processor": {`{"arch":"arm64"}`, vmm.ErrForeign},
		"no facts":             {"", snapshot.ErrForeign},
		"something like them":  {good + " ", snapshot.ErrForeign},
	} {
		t.Run(name, func(t *testing.T) {
			if err := CheckHost(map[string]string{FactsKey: tc.facts}); !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
			if tc.want != nil && factsAreGood(tc.facts) {
				t.Error("what was refused counts as good")
			}
		})
	}
}
