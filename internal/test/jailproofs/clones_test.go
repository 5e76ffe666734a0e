//go:build workloads

package jailproofs

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
)

var (
	clones = flag.Int("clones", 8, "how many clones of one snapshot there are, and a fork for each ten")
	awake  = flag.Int("clones-awake", 4, "how many of them are awake at once")
)

// identity is what a witness says that it is.
type identity struct {
	Followed, Alone, Getrandom, UUID, Hostname, MAC string
	BootID                                          string   `json:"boot_id"`
	MachineID                                       string   `json:"machine_id"`
	HostKeys                                        []string `json:"host_keys"`
	Heard                                           int
	Wall                                            int64
}

// A register has what clones have said. Its methods may be called concurrently.
type register struct {
	mu sync.Mutex // guards what follows
	// seen is who has said a value, by its kind. held is who has one at the moment.
	seen, held map[string]map[string]string
	// late counts generators whose kernel had not told them when they were first asked.
	late int
}

func newRegister() *register {
	return &register{seen: map[string]map[string]string{}, held: map[string]map[string]string{}}
}

// put notes a value in a set, and returns an error if somebody else has it.
func put(set map[string]map[string]string, kind, value, who string) error {
	if set[kind] == nil {
		set[kind] = map[string]string{}
	}
	if value == "" {
		return fmt.Errorf("%s has no %s", who, kind)
	}
	if other, ok := set[kind][value]; ok {
		return fmt.Errorf("%s and %s have both the %s %q", who, other, kind, value)
	}
	set[kind][value] = who
	return nil
}

// start notes what a VM has on its host while it is awake, until end.
func (r *register) start(rep control.Report) (end func(), err error) {
	if rep.Network == nil {
		return func() {}, fmt.Errorf("%s has no network", rep.Name)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	address := rep.Network.Address.String()
	err = errors.Join(put(r.held, "address", address, rep.Name), put(r.seen, "TAP", rep.Network.TAP, rep.Name))
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.held["address"], address)
	}, err
}

// add notes what a guest has said first.
func (r *register) add(who string, id identity) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if id.Heard == 0 {
		r.late++
	}
	var errs []error
	for kind, value := range map[string]string{
		"getrandom": id.Getrandom, "uuid": id.UUID, "generator": id.Followed, "boot id": id.BootID, "machine id": id.MachineID, "host name": id.Hostname,
	} {
		errs = append(errs, put(r.seen, kind, value, who))
	}
	// These all have in common: the memory of the snapshot, and the MAC address, which the host's programs translate.
	for kind, value := range map[string]string{"memory": id.Alone, "MAC": id.MAC} {
		if r.seen[kind] == nil {
			r.seen[kind] = map[string]string{value: who}
		}
		if r.seen[kind][value] == "" {
			errs = append(errs, fmt.Errorf("%s has another %s than the others, %q", who, kind, value))
		}
	}
	return errors.Join(errs...)
}

func TestClones_and_forks_of_one_VM_share_no_random_number_and_no_identity(t *testing.T) {
	e := guesttest.New(t)
	startWitness(t, e, "base")
	host := e.Store.With(e.Launcher)
	r := newRegister()

	// first is what a guest says first, of its clock too.
	first := func(ctx context.Context, name string) error {
		var id identity
		before := time.Now()
		if err := errors.Join(confined(e, name), ask(ctx, e, name, "identity", &id)); err != nil {
			return err
		}
		if wall := time.Unix(0, id.Wall); wall.Before(before.Add(-time.Second)) || wall.After(time.Now().Add(time.Second)) {
			return fmt.Errorf("the clock of %s says %v, and it was asked at %v", name, wall, before)
		}
		return r.add(name, id)
	}
	forks := *clones / 10
	for done := 0; done < forks; {
		n := min(forks-done, *awake)
		children := make([]sandbox.ForkChild, n)
		for i := range children {
			children[i].Name = fmt.Sprintf("fork-%d", done+i)
		}
		var ends []func()
		res, err := host.Sandbox("base").Fork(t.Context(), sandbox.ForkOptions{Children: children})
		if err != nil {
			t.Fatal(err)
		}
		for _, rep := range res.Children {
			end, err := r.start(rep)
			if err := errors.Join(err, first(t.Context(), rep.Name)); err != nil {
				t.Error(err)
			}
			ends = append(ends, end)
		}
		for i, rep := range res.Children {
			ends[i]()
			if err := host.Sandbox(rep.Name).Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
				t.Fatal(err)
			}
		}
		done += n
	}
	snap := e.Sleep("base").Snapshot

	begin := time.Now()
	var next, done atomic.Int64
	var wg sync.WaitGroup
	for range *awake {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(*clones) && !t.Failed() && t.Context().Err() == nil; i = next.Add(1) {
				if err := oneClone(t.Context(), host, r, snap, fmt.Sprintf("clone-%d", i), first); err != nil {
					t.Errorf("clone %d: %v", i, err)
				}
				if n := done.Add(1); n%int64(max(1, *clones/20)) == 0 {
					t.Logf("%d clones after %v", n, time.Since(begin).Round(time.Second))
				}
			}
		})
	}
	wg.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, kind := range []string{"getrandom", "uuid", "generator", "boot id", "machine id", "host name", "TAP", "memory", "MAC"} {
		want := *clones + forks
		if kind == "memory" || kind == "MAC" {
			want = 1
		}
		t.Logf("%d clones and %d forks have %d different values of: %s", *clones, forks, len(r.seen[kind]), kind)
		if len(r.seen[kind]) != want {
			t.Errorf("want %d", want)
		}
	}
	t.Logf("%d generators in user space gave their first numbers before the kernel's message had come", r.late)
}

// oneClone has a clone say what it is.
func oneClone(ctx context.Context, h *sandbox.Host, r *register, snap, name string, first func(context.Context, string) error) (err error) {
	var rep control.Report
	box, err := h.Clone(ctx, snap, sandbox.CloneOptions{Name: name, Report: &rep})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, box.Delete(ctx, sandbox.DeleteOptions{Force: true})) }()
	end, err := r.start(rep)
	defer end()
	return errors.Join(err, first(ctx, name))
}
