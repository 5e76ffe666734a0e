package process

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/state/statetest"
)

func TestHoldSet_that_are_dismissed_are_waited_for(t *testing.T) {
	t.Parallel()
	var h wakeLocks
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
	// A later lock is not dismissed.
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
	var h wakeLocks
	_, done := h.join()
	h.dismiss(time.Millisecond)
	done()
	if n, ever := h.count(); n != 0 || ever != 1 {
		t.Errorf("%d hold it, and %d ever did, want none and 1", n, ever)
	}
}

func TestOrder_of_a_fork_has_no_hold(t *testing.T) {
	t.Parallel()
	s := statetest.TempStore(t)
	if err := obey(t.Context(), t.Context(), s, control.Order{Name: "a", Fork: true, WakeLock: true}, []*os.File{nil, nil}, madeAhead{}); err == nil {
		t.Error("it was obeyed")
	}
	var ord control.Order
	for _, o := range []control.Order{{Name: "a", Snapshot: "x", WakeLock: true}, {Name: "a", Fork: true}, {Name: "a"}} {
		p, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		ord = control.Order{}
		if err := json.Unmarshal(p, &ord); err != nil || ord != o {
			t.Errorf("%s becomes %+v, %v", bytes.TrimSpace(p), ord, err)
		}
	}
}
