package artifact

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

func TestStanzas(t *testing.T) {
	text := `
# before
Package: first
Depends: a,
# within
 b,
	c
Other: is
 left out
version:2

Other: alone

Package: last
no field
Version: 1
Version: 3`
	want := []map[string]string{
		{"package": "first", "depends": "a,\nb,\nc", "version": "2"},
		{"package": "last", "version": "3", "": "no field"},
	}
	got := slices.Collect(Stanzas(text, "package", "version", "depends", ""))
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	for first := range Stanzas(text, "version") {
		if first["version"] != "2" {
			t.Errorf("the first is %q", first)
		}
		break
	}
}

// A line costs the same, however many lines its field has: the database of an image may have any number.
func TestStanzas_field_of_many_lines_takes_little_time(t *testing.T) {
	const lines = 1 << 20
	text := "Version: 1\n" + strings.Repeat(" x\n", lines)
	for st := range Stanzas(text, "version") {
		if n := strings.Count(st["version"], "\n"); n != lines {
			t.Errorf("%d further lines, want %d", n, lines)
		}
	}
}
