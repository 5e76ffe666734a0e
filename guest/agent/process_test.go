package agent

import (
	"errors"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// A service that is started again at that moment would live on, and whoever waits for it with it.
func TestEndAll_ends_a_process_whose_start_has_begun_and_has_no_other_started(t *testing.T) {
	procs := newTable(false)
	begun := &process{out: newOutput(attachedOutput, false), exited: make(chan struct{})}
	if err := procs.reserve(begun, ""); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		procs.endAll()
		close(ended)
	}()
	for {
		if _, err := procs.start(&agentpb.ExecStart{Argv: []string{"/bin/sleep", "1000"}, Detach: true}); errors.Is(err, errStopping) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
	select {
	case <-ended:
		t.Fatal("it has ended while one is being started")
	default:
	}
	if err := procs.launch(begun, "/bin/sleep", nil, &agentpb.ExecStart{Argv: []string{"sleep", "1000"}}, account{}); err != nil {
		t.Fatal(err)
	}
	procs.starts.Done()
	<-ended
	select {
	case <-begun.exited:
	default:
		t.Error("the process lives on")
	}
	procs.wg.Wait()
}
