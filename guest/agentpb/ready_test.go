package agentpb

import (
	"errors"
	"strings"
	"testing"
)

func TestReady_line_is_read_as_it_was_written(t *testing.T) {
	for _, r := range []Ready{
		{Version: "v1.2.3"},
		{Version: "v1-dirty", VMCoreInfo: 0x12345000, VMCoreInfoSize: 0x1024},
		{Version: "v1", VMCoreInfo: 1<<64 - 1, VMCoreInfoSize: 1},
	} {
		line := r.Line()
		if len(line) > MaxReadyLine {
			t.Errorf("%+v makes %d bytes", r, len(line))
		}
		if got, err := ParseReady(strings.TrimSuffix(line, "\n")); err != nil || got != r {
			t.Errorf("%q is read as %+v, %v", line, got, err)
		}
	}
}

func TestReady_line_of_something_else_is_refused(t *testing.T) {
	for _, line := range []string{"", "hello", "ready", "ready v1 vmcoreinfo=", "ready v1 vmcoreinfo=12", "ready v1 vmcoreinfo=12+",
		"ready v1 vmcoreinfo=+12", "ready v1 vmcoreinfo=1+2x", "ready v1 vmcoreinfo=fffffffffffffffff+1"} {
		if r, err := ParseReady(line); !errors.Is(err, ErrReady) {
			t.Errorf("%q is read as %+v, %v", line, r, err)
		}
	}
}
