package proc

import (
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

func TestProcesses_one_more_than_there_may_be_is_refused(t *testing.T) {
	procs := NewTable(false)
	for i := range maxProcesses {
		if err := procs.reserve(&Process{}, ""); err != nil {
			t.Fatalf("process %d: %v", i, err)
		}
	}
	for _, id := range []string{"", "one-more"} {
		if err := procs.reserve(&Process{}, id); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("process %d, named %q: %v, want ResourceExhausted", maxProcesses, id, err)
		}
	}
}

// A service that is started again at that moment would live on, and whoever waits for it with it.
func TestEndAll_ends_a_process_whose_start_has_begun_and_has_no_other_started(t *testing.T) {
	procs := NewTable(false)
	begun := &Process{out: newOutput(attachedOutput, false), exited: make(chan struct{})}
	if err := procs.reserve(begun, ""); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		procs.EndAll()
		close(ended)
	}()
	for {
		if _, err := procs.Start(&agentpb.ExecStart{Argv: []string{"/bin/sleep", "1000"}, Detach: true}); errors.Is(err, ErrStopping) {
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
