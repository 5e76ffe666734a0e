package sandbox_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
)

// recordedInTheTrail checks the audit trail of a clone, which has slept since, for the actions of
// sshServesAGuestWithoutAServer and forwardsEndWithTheSleep.
func recordedInTheTrail(t *testing.T, e *guesttest.Env, name string) {
	if got := e.Sh(name, "echo last"); got != "last" {
		t.Errorf("got %q", got)
	}
	var done []string
	is, err := e.Store.State.Audit(t.Context(), name, audit.ReadOptions{}, func(entry audit.Entry) error {
		exit := -1
		if entry.Outcome != nil && entry.Outcome.Exit != nil {
			exit = *entry.Outcome.Exit
		}
		done = append(done, fmt.Sprintf("%s by %q as %q: %q %s %d", entry.Kind, entry.Via, entry.User, entry.Argv, entry.Status, exit))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	r, err := e.Store.State.Get(name)
	if err != nil {
		t.Fatal(err)
	}
	if is.VM != r.ID || is.Name != name || is.Snapshot != r.Parent || is.Snapshot == "" || is.Part != 1 {
		t.Errorf("the trail is %+v", is)
	}
	next := 0
	for _, want := range []string{
		`exec by "ssh" as "root": ["cat; pwd; echo err >&2; exit 3"] ended 3`,
		`sftp by "ssh" as "root": [] ended 0`,
		`listen by "" as "": [] ended -1`,
		`forward by "" as "": [] running -1`, // its client is open until the test ends
		`listen by "" as "": [] ended -1`,
		`exec by "" as "root": ["/bin/sh" "-c" "echo last"] ended 0`,
	} {
		i := slices.Index(done[next:], want)
		if i < 0 {
			t.Fatalf("%s is not among %q", want, done[next:])
		}
		next += i + 1
	}
}
