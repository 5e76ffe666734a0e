package sandbox

import (
	"testing"
	"time"
)

func TestHoldSet_that_are_dismissed_are_waited_for(t *testing.T) {
	t.Parallel()
	var h holdSet
	leave, done := h.join()
	_, second := h.join()
	if n, ever := h.count(); n != 2 || ever != 2 {
		t.Errorf("%d hold it, and %d ever did, want 2", n, ever)
	}
	dismissed := make(chan struct{})
	go func() {
		defer close(dismissed)
		h.dismiss(time.Hour)
	}()
	<-leave
	done()
	select {
	case <-dismissed:
		t.Error("nobody waited for the second")
	case <-time.After(10 * time.Millisecond):
	}
	second()
	<-dismissed
	// Whoever comes later is not dismissed.
	leave, done = h.join()
	select {
	case <-leave:
		t.Error("one that came later was dismissed")
	default:
	}
	done()
	h.dismiss(time.Hour)
}

func TestHoldSet_that_do_not_go_are_not_waited_for_long(t *testing.T) {
	t.Parallel()
	var h holdSet
	_, done := h.join()
	h.dismiss(time.Millisecond)
	done()
	if n, ever := h.count(); n != 0 || ever != 1 {
		t.Errorf("%d hold it, and %d ever did, want none and 1", n, ever)
	}
}

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
			n, err := parseHeld([]byte(c.line))
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
