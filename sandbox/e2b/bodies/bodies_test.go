package bodies

import (
	"strings"
	"testing"
)

func TestEncoding_is_accepted_as_RFC_9110_says(t *testing.T) {
	for header, want := range map[string][2]bool{ // gzip, identity
		"":                         {false, true},
		"gzip":                     {true, true},
		"GZIP;q=0.5":               {true, true},
		"gzip;q=0":                 {false, true},
		"*":                        {true, true},
		"*;q=0":                    {false, false},
		"gzip, identity;q=0":       {true, false},
		"br, deflate":              {false, true},
		"br;q=1, *;q=0, identity":  {false, true},
		"identity;q=0, *;q=0, br":  {false, false},
		"gzip;q=x":                 {true, true},
		strings.Repeat("gzip,", 9): {true, true},
	} {
		if got := [2]bool{Accepts([]string{header}, "gzip"), Accepts([]string{header}, "identity")}; header != "" && got != want {
			t.Errorf("%q: %v", header, got)
		}
	}
	if Accepts(nil, "gzip") || !Accepts(nil, "identity") {
		t.Error("without a header")
	}
}
