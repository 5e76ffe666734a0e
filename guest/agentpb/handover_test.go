package agentpb

import (
	"errors"
	"strings"
	"testing"
)

func TestHandover(t *testing.T) {
	full := Handover{WallNanos: 1<<62 + 3, NewIdentity: true, Hostname: strings.Repeat("h", MaxHostname)}
	for i := range full.Entropy {
		full.Entropy[i] = byte(i + 1)
	}
	for name, m := range map[string]Handover{"nothing": {}, "everything": full, "before 1970": {WallNanos: -1}} {
		t.Run(name+" comes back as it was", func(t *testing.T) {
			var b [HandoverSize]byte
			var got Handover
			if err := errors.Join(m.Encode(&b), got.Decode(&b)); err != nil || got != m {
				t.Errorf("got %+v, %v; want %+v", got, err, m)
			}
		})
	}
	if err := (&Handover{Hostname: full.Hostname + "h"}).Encode(new([HandoverSize]byte)); !errors.Is(err, ErrHandover) {
		t.Errorf("a long host name: got %v, want ErrHandover", err)
	}
	for name, b := range map[string][HandoverSize]byte{
		"no device":        {0: 0xff, 1: 0xff, 2: 0xff},
		"another version":  {0: handoverVersion + 1},
		"an unknown flag":  {0: handoverVersion, 1: 2},
		"a long host name": {0: handoverVersion, 2: MaxHostname + 1},
		"zeros":            {},
	} {
		if err := new(Handover).Decode(&b); !errors.Is(err, ErrHandover) {
			t.Errorf("%s: got %v, want ErrHandover", name, err)
		}
	}
}
