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
