package sandbox

import (
	"errors"
	"testing"

	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm"
)

func TestFactsOfAnotherHostAreRefusedAlsoAfterGoodOnes(t *testing.T) {
	defer goodFacts.Store(goodFacts.Load())
	good := "those of this host"
	goodFacts.Store(&good)
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
			if err := checkHost(map[string]string{factsKey: tc.facts}); !errors.Is(err, tc.want) {
				t.Errorf("got %v, want %v", err, tc.want)
			}
			if *goodFacts.Load() != good {
				t.Error("what was refused counts as good")
			}
		})
	}
}
