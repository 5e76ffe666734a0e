package control

import (
	"testing"
)

func TestParseHeld_first_line_gives(t *testing.T) {
	for _, c := range []struct {
		name, line string
		want       string // the address; - is none, and empty an error
	}{
		{"no network, or an older process", "held\n", "-"},
		{"the network", `held {"tap":"drowse1","address":"10.200.0.7","warnings":["x"]}` + "\n", "10.200.0.7"},
		{"something else", "gone\n", ""},
		{"a word that only begins like it", "heldx\n", ""},
		{"a network that is none", "held {\n", ""},
		{"nothing", "\n", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			n, err := ParseHeld([]byte(c.line))
			switch {
			case c.want == "":
				if err == nil {
					t.Errorf("%q is %+v, want an error", c.line, n)
				}
			case err != nil:
				t.Error(err)
			case c.want == "-":
				if n != nil {
					t.Errorf("%q is %+v, want no network", c.line, n)
				}
			case n == nil || n.Address.String() != c.want:
				t.Errorf("%q is %+v, want %s", c.line, n, c.want)
			}
		})
	}
}
