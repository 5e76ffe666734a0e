package main

import (
	"io"
	"slices"
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	for _, c := range []struct {
		name string
		in   []string
		args []string
		ok   bool
	}{
		{"the command follows two dashes", []string{"-timeout", "5s", "--", "true", "-v"}, []string{"true", "-v"}, true},
		{"the command ends the flags", []string{"true", "-v"}, []string{"true", "-v"}, true},
		{"no command", []string{"-v"}, nil, false},
		{"no command is needed to prepare", []string{"-prepare"}, nil, true},
		{"an unknown flag", []string{"-bogus", "--", "true"}, nil, false},
		{"a time that is none", []string{"-timeout", "soon", "--", "true"}, nil, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			o, err := parse(c.in, io.Discard)
			if (err == nil) != c.ok || c.ok && !slices.Equal(o.args, c.args) {
				t.Errorf("arguments %q, error %v", o.args, err)
			}
		})
	}
	o, err := parse([]string{"-timeout", "90s", "-env", "A", "-env", "B=1", "-cpus", "1", "--", "x"}, io.Discard)
	if err != nil || o.timeout != 90*time.Second || o.cpus != 1 || !slices.Equal(o.env, []string{"A", "B=1"}) {
		t.Errorf("options %+v, error %v", o, err)
	}
}

func TestEnvironment_passes_what_is_listed_or_asked_for(t *testing.T) {
	got := environment([]string{"PATH=/bin", "GOCACHE=/c", "DROWSE_STATE=/s", "SECRET=1", "WANTED=2", "LC_ALL=C", "PATHS=no"}, []string{"WANTED", "SET=3"})
	want := []string{"PATH=/bin", "GOCACHE=/c", "DROWSE_STATE=/s", "WANTED=2", "LC_ALL=C", "SET=3"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestUsage_error_is_status2(t *testing.T) {
	if got := run([]string{"-bogus"}); got != statusUsage {
		t.Errorf("status %d, want %d", got, statusUsage)
	}
}
