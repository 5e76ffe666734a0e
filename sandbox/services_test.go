package sandbox_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// service waits until a service of a VM is in a state, and returns it.
func service(e *guesttest.Env, vm, name, state string) records.Service {
	e.T.Helper()
	for deadline := time.Now().Add(10 * time.Minute); ; time.Sleep(500 * time.Millisecond) {
		list, err := e.Store.Sandbox(vm).Services(e.T.Context())
		if err != nil {
			e.T.Fatal(err)
		}
		var got records.Service
		for _, s := range list {
			if s.Name == name {
				got = s
			}
		}
		if got.State == state {
			return got
		}
		if time.Now().After(deadline) {
			e.T.Fatalf("service %s of %s is %+v, not %s", name, vm, got, state)
		}
	}
}

// The same services in a VM that was woken, and after a boot of it.
func TestServices_of_a_guest(t *testing.T) {
	t.Parallel()
	e, snap, _ := base(t)
	// The service is ready when it has begun. A check for a file needs no process in the guest.
	keep := spec.Service{
		Name: "keep", Argv: []string{"/bin/sh", "-c", "echo begins; : > /root/ready; exec sleep 1000000"},
		Check: &spec.ServiceCheck{File: "/root/ready", AliveFailures: 1},
	}
	clone(e, snap, "sv")
	if _, err := e.Store.Sandbox("sv").SetService(t.Context(), keep); err != nil {
		t.Fatal(err)
	}
	first := service(e, "sv", "keep", "running")
	if st, err := e.Store.Sandbox("sv").WaitService(t.Context(), "keep"); err != nil || !st.Ready || st.PID != first.PID {
		t.Errorf("waited for, it is %+v, %v", st, err)
	}
	if first.PID == 0 || first.Restarts != 0 {
		t.Errorf("begun, it is %+v", first)
	}

	crash := spec.Service{Name: "crash", Argv: []string{"/bin/false"}, Restart: guest.RestartOnFailure, MaxRestarts: 1}
	if _, err := e.Store.Sandbox("sv").SetService(t.Context(), crash); err != nil {
		t.Fatal(err)
	}
	failed := service(e, "sv", "crash", "failed")
	// More often on a busy machine: a run that is long enough does not count.
	if failed.Restarts < 1 || failed.ExitCode == nil || *failed.ExitCode != 1 {
		t.Errorf("one that fails is %+v", failed)
	}
	// A service without a check is ready while it runs, so only its failure shows.
	if _, err := e.Store.Sandbox("sv").WaitService(t.Context(), "crash"); !errors.Is(err, control.ErrServiceNotReady) {
		t.Errorf("waiting for one that fails: %v, want ErrServiceNotReady", err)
	}
	var log strings.Builder
	if err := e.Store.Sandbox("sv").ServiceLog(t.Context(), "keep", &log, false); err != nil || log.String() != "begins\n" {
		t.Errorf("its log is %q, %v", log.String(), err)
	}

	forks(e, "sv", sandbox.ForkOptions{Count: 1, Name: "sf"})
	if s := service(e, "sf", "keep", "running"); s.PID != first.PID {
		t.Errorf("in a fork it is %+v", s)
	}
	if s := service(e, "sf", "crash", "failed"); s.Restarts != failed.Restarts {
		t.Errorf("in a fork the other is %+v", s)
	}

	e.Sleep("sv")
	list, err := e.Store.Sandbox("sv").Services(t.Context())
	if err != nil || len(list) != 2 || list[1].Name != "keep" || list[1].State != records.ServiceAsleep {
		t.Errorf("asleep they are %+v, %v", list, err)
	}
	if _, err := e.Store.Sandbox("sv").SetService(t.Context(), keep); !errors.Is(err, sandbox.ErrNotRunning) {
		t.Errorf("setting one of a VM that sleeps: %v, want ErrNotRunning", err)
	}
	e.Wake("sv")
	if s := service(e, "sv", "keep", "running"); s.PID != first.PID || s.Restarts != 0 || !s.Ready {
		t.Errorf("after the wake it is %+v, before %+v", s, first)
	}
	// The trail also gets what the service does after a wake.
	if _, err := e.Store.Sandbox("sv").StopService(t.Context(), "keep"); err != nil {
		t.Fatal(err)
	}
	if s, err := e.Store.Sandbox("sv").StartService(t.Context(), "keep", false); err != nil || s.State != "running" || s.PID == first.PID {
		t.Errorf("started again it is %+v, %v", s, err)
	}
	if err := e.Store.Sandbox("sv").RemoveService(t.Context(), "crash"); err != nil {
		t.Fatal(err)
	}
	if err := e.Store.Sandbox("sv").RemoveService(t.Context(), "crash"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("removing it twice: %v, want ErrNotFound", err)
	}

	// A killed guest loses the entries that it has not sent.
	trailHas(e, "sv", map[string]int{"service-start keep": 2, "service-exit keep": 1, "service-stop keep": 1})
	if err := e.Store.Sandbox("sv").Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	// A stopped VM starts its services when it boots, including those that it gets while stopped.
	late := spec.Service{Name: "late", Argv: []string{"/no/such/program"}, Restart: guest.RestartNever}
	if s, err := e.Store.Sandbox("sv").SetService(t.Context(), late); err != nil || s.State != "" {
		t.Errorf("setting one of a VM that has stopped: %+v, %v", s, err)
	}
	if _, err := e.Store.With(e.Launcher).Sandbox("sv").Start(t.Context(), sandbox.StartOptions{}); err != nil {
		t.Fatal(err)
	}
	service(e, "sv", "keep", "running")
	if s := service(e, "sv", "late", "failed"); !strings.Contains(s.Problem, "no such file") {
		t.Errorf("one whose program is not there is %+v", s)
	}

	// The trail has a start for each run, and an end for each that has ended.
	trailHas(e, "sv", map[string]int{
		"service-start keep": 3, "service-exit keep": 1, "service-stop keep": 1,
		// The last exit is the one that gave it up.
		"service-start crash": int(failed.Restarts) + 1, "service-exit crash": int(failed.Restarts) + 2,
		"service-start late": 1,
	})
}

// trailHas waits until the trail of a VM has that many entries of each kind and service, and fails if it has more.
func trailHas(e *guesttest.Env, vm string, want map[string]int) {
	e.T.Helper()
	for deadline := time.Now().Add(10 * time.Minute); ; time.Sleep(200 * time.Millisecond) {
		got := map[string]int{}
		if _, err := e.Store.State.Audit(e.T.Context(), vm, audit.ReadOptions{}, func(en audit.Entry) error {
			if en.Process != "" {
				got[string(en.Kind)+" "+en.Process]++
			}
			return nil
		}); err != nil {
			e.T.Fatal(err)
		}
		missing := false
		for what, n := range want {
			missing = missing || got[what] < n
			if got[what] > n {
				e.T.Fatalf("the trail has %v, want %v", got, want)
			}
		}
		if !missing {
			return
		}
		if time.Now().After(deadline) {
			e.T.Fatalf("the trail has %v, want %v", got, want)
		}
	}
}
