//go:build linux

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

func TestRotateFlags_say_when_and_from_what(t *testing.T) {
	now := time.Unix(1e9, 0).UTC()
	for name, tt := range map[string]struct {
		flags rotateFlags
		want  *spec.Rotation
		err   string
	}{
		"nothing":               {rotateFlags{}, nil, ""},
		"each wake":             {rotateFlags{to: "abc"}, &spec.Rotation{To: "abc"}, ""},
		"from a time on":        {rotateFlags{to: "abc", at: "2001-09-09T02:00:00Z"}, &spec.Rotation{To: "abc", At: time.Unix(1e9+800, 0).UTC()}, ""},
		"again and again":       {rotateFlags{to: "abc", every: "1h"}, &spec.Rotation{To: "abc", At: now.Add(time.Hour), Every: 3600}, ""},
		"again, from a time on": {rotateFlags{to: "abc", at: "2001-09-09T02:00:00Z", every: "1h"}, &spec.Rotation{To: "abc", At: time.Unix(1e9+800, 0).UTC(), Every: 3600}, ""},
		"never":                 {rotateFlags{never: true}, &spec.Rotation{}, ""},
		"never, and from one":   {rotateFlags{never: true, to: "abc"}, nil, "--no-rotate"},
		"a time without one":    {rotateFlags{every: "1h"}, nil, "--rotate-to"},
		"no time":               {rotateFlags{to: "abc", at: "noon"}, nil, "--rotate-at"},
		"too often":             {rotateFlags{to: "abc", every: "0s"}, nil, "--rotate-every"},
	} {
		got, err := tt.flags.rotation(now)
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%s: %v, want an error with %s", name, err, tt.err)
			}
			continue
		}
		if err != nil || (got == nil) != (tt.want == nil) || got != nil && (got.To != tt.want.To || !got.At.Equal(tt.want.At) || got.Every != tt.want.Every) {
			t.Errorf("%s: %+v, %v, want %+v", name, got, err, tt.want)
		}
	}
}
