package sandbox_test

import (
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
)

// diskOfAGuest has a command change the disk of a real guest, and checks the reported changes.
func diskOfAGuest(t *testing.T, e *guesttest.Env, name string) {
	c := e.Agent(name)
	// The shell's builtins keep this to one process.
	st, err := c.Exec(t.Context(), guest.Cmd{
		Argv:    []string{"/bin/sh", "-c", "set -e; umask 077; cd /etc; echo x >> passwd; echo > 'a new\nname'; exec rm /etc/group"},
		Changes: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	ch := st.Changes
	if ch == nil || ch.Partial != "" || ch.More != 0 || !slices.Equal(ch.Added, []string{"/etc/a new\nname"}) ||
		!slices.Equal(ch.Changed, []string{"/etc/passwd"}) || !slices.Equal(ch.Removed, []string{"/etc/group"}) {
		t.Errorf("the command has changed %+v", ch)
	}
	want := map[string]guest.ChangeOp{"/etc/a new\nname": guest.PathAdded, "/etc/passwd": guest.PathChanged, "/etc/group": guest.PathRemoved}
	end, err := c.Changes(t.Context(), 100_000, func(ch guest.Change) error {
		if want[ch.Path] == ch.Op {
			delete(want, ch.Path)
		}
		if ch.Path == "/" || ch.Path == "/etc" {
			t.Errorf("a directory of the image, of which only a file has changed, is told as %+v", ch)
		}
		return nil
	})
	if err != nil || end.More || end.Partial != "" || len(want) > 0 {
		t.Errorf("since the image: %+v, %v, without %v", end, err, want)
	}
	t.Logf("%d paths of the disk differ from the image", end.Told)
}
