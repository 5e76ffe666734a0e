package guest_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/agent"
	"github.com/drowse-vm/drowse/guest/agent/upper"
	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/guest/internal/agenttest"
)

// guestWithDisk starts an agent with an overlay over an empty image. The overlay's upper directory is on the host.
// The agent's trail is beside its socket.
func guestWithDisk(t *testing.T) (c *guest.Client, dir, trail string) {
	t.Helper()
	dir = t.TempDir()
	image := t.TempDir()
	write(t, filepath.Join(image, "old"), "image", 0o644)
	g := agenttest.StartWith(t, agent.Config{Disk: func() (*upper.Tree, error) { return upper.OpenAt(dir, image) }})
	trail = audit.Path(g.Path)
	if err := audit.Ensure(t.Context(), trail, audit.Head{VM: "0123", Name: "vm"}); err != nil {
		t.Fatal(err)
	}
	c, err := guest.Dial(t.Context(), guest.UnixDialer(g.Path))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, dir, trail
}

func TestExec_with_changes_tells_them_and_records_them(t *testing.T) {
	c, dir, trail := guestWithDisk(t)
	write(t, dir+"/before", "1", 0o644)
	write(t, dir+"/gone", "1", 0o644)
	cmd := sh("echo x > new; echo x >> before; rm gone; echo x > old; printf x > 'a\nb'; exit 3")
	cmd.Dir, cmd.Changes = dir, true
	st, err := c.Exec(t.Context(), cmd)
	var exit *guest.ExitError
	if !errors.As(err, &exit) || st.Changes == nil {
		t.Fatalf("it ends with %v, %+v", err, st)
	}
	want := audit.Changes{Added: []string{"/a\nb", "/new"}, Changed: []string{"/before", "/old"}, Removed: []string{"/gone"}}
	same := func(what string, got *audit.Changes) {
		t.Helper()
		if got == nil || !slices.Equal(got.Added, want.Added) || !slices.Equal(got.Changed, want.Changed) || !slices.Equal(got.Removed, want.Removed) || got.More != 0 || got.Partial != "" {
			t.Errorf("%s has %+v", what, got)
		}
	}
	same("the status", st.Changes)
	all := trailOf(t, trail)
	if o := all[len(all)-1].Outcome; o == nil || *o.Exit != 3 {
		t.Errorf("the trail has %+v", all)
	} else {
		same("the trail", o.Changes)
	}
	cmd = sh("true")
	if st, err = c.Exec(t.Context(), cmd); err != nil || st.Changes != nil {
		t.Errorf("one that is not asked says %+v, %v", st, err)
	}
	cmd.Changes = true
	if st, err = c.Exec(t.Context(), cmd); err != nil || st.Changes == nil || len(st.Changes.Added) != 0 || st.Changes.Partial != "" {
		t.Errorf("one that changes nothing says %+v, %v", st, err)
	}
	cmd.Detach = true
	if _, err := c.Start(t.Context(), cmd); err == nil {
		t.Error("changes of a detached command are promised")
	}
}

func TestExec_that_changes_much_tells_the_first_and_how_many_more(t *testing.T) {
	c, dir, trail := guestWithDisk(t)
	cmd := sh("i=0; while [ $i -lt 600 ]; do : > n$i; i=$((i+1)); done")
	cmd.Dir, cmd.Changes = dir, true
	st, err := c.Exec(t.Context(), cmd)
	if err != nil || len(st.Changes.Added) != agentpb.MaxChanges || st.Changes.More != 600-agentpb.MaxChanges {
		t.Fatalf("%d are told, %d more, %v", len(st.Changes.Added), st.Changes.More, err)
	}
	all := trailOf(t, trail)
	if o := all[len(all)-1].Outcome; o == nil || o.Changes == nil || len(o.Changes.Added) != agentpb.MaxChanges || o.Changes.More != 600-agentpb.MaxChanges {
		t.Errorf("the trail has %+v", o)
	}
}

func TestChanges_are_told_in_parts_up_to_a_limit(t *testing.T) {
	c, dir, _ := guestWithDisk(t)
	long := strings.Repeat("x", 200)
	want := []string{}
	for i := range 700 {
		name := fmt.Sprintf("%04d%s", i, long)
		write(t, filepath.Join(dir, name), "ab", 0o640)
		want = append(want, "/"+name)
	}
	write(t, dir+"/old", "other", 0o600)
	want = append(want, "/old")
	var got []string
	var last guest.Change
	add := func(ch guest.Change) error { got, last = append(got, ch.Path), ch; return nil }
	end, err := c.Changes(t.Context(), 10_000, add)
	if err != nil || !slices.Equal(got, want) || end != (guest.ChangesEnd{Told: 701}) {
		t.Errorf("%d are told, %+v, %v", len(got), end, err)
	}
	if last.Op != guest.PathChanged || last.Mode != 0o600 || last.Before != 0o644 || last.Size != 5 {
		t.Errorf("the one of the image is %+v", last)
	}
	got = nil
	if end, err = c.Changes(t.Context(), 600, add); err != nil || len(got) != 600 || end != (guest.ChangesEnd{Told: 600, More: true}) {
		t.Errorf("of 600: %d, %+v, %v", len(got), end, err)
	}
	stop := errors.New("enough")
	if _, err = c.Changes(t.Context(), 600, func(guest.Change) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("one who has enough gets %v", err)
	}
}

func TestHostile_changes_are_refused(t *testing.T) {
	one := func(path string, op uint32) *agentpb.DiskChange {
		return &agentpb.DiskChange{Path: []byte(path), Op: op}
	}
	for name, m := range map[string]*agentpb.DiskChanges{
		"a path that climbs":         {Changes: []*agentpb.DiskChange{one("/../etc/passwd", 1)}},
		"a relative path":            {Changes: []*agentpb.DiskChange{one("x", 1)}},
		"the root":                   {Changes: []*agentpb.DiskChange{one("/", 1)}},
		"a zero byte":                {Changes: []*agentpb.DiskChange{one("/a\x00b", 1)}},
		"a long path":                {Changes: []*agentpb.DiskChange{one("/"+strings.Repeat("x", agentpb.MaxPath+1), 1)}},
		"another kind":               {Changes: []*agentpb.DiskChange{one("/a", 4)}},
		"no order":                   {Changes: []*agentpb.DiskChange{one("/b", 1), one("/a", 1)}},
		"one twice":                  {Changes: []*agentpb.DiskChange{one("/b", 1), one("/b", 2)}},
		"too many":                   {Changes: slices.Repeat([]*agentpb.DiskChange{one("/b", 1)}, agentpb.MaxChanges+1)},
		"more behind what is before": {Changes: []*agentpb.DiskChange{one("/b", 1)}, Until: []byte("/a")},
		"more behind nothing":        {Until: []byte("/")},
	} {
		t.Run(name, func(t *testing.T) {
			told := 0
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			_, err := hostileGuest(t, response(1, m)).Changes(ctx, 1000, func(guest.Change) error { told++; return nil })
			if !errors.Is(err, guest.ErrProtocol) || told > 1 {
				t.Errorf("%d are told, %v", told, err)
			}
		})
	}
	// The exit of a command reports changes as unknown, and the exit still counts.
	exit := func(m *agentpb.DiskChanges) []byte {
		return data(&agentpb.ExecResponse{Msg: &agentpb.ExecResponse_Exit{Exit: &agentpb.ExecExit{Changes: m}}})
	}
	for name, m := range map[string]*agentpb.DiskChanges{"none": nil, "a path that climbs": {Changes: []*agentpb.DiskChange{one("/..", 1)}}} {
		cmd := sh("true")
		cmd.Changes = true
		st, err := hostileGuest(t, started(), exit(m)).Exec(t.Context(), cmd)
		if err != nil || st.Changes == nil || st.Changes.Partial == "" || len(st.Changes.Added) != 0 {
			t.Errorf("%s: %+v, %v", name, st, err)
		}
	}
}

func FuzzChanges(f *testing.F) {
	f.Add([]byte("/a"), []byte("/b"), uint32(1), uint32(0o100644), int64(5))
	f.Add([]byte("/a\xff\x1b"), []byte(""), uint32(3), uint32(0), int64(-1))
	f.Fuzz(func(t *testing.T, p, until []byte, op, mode uint32, size int64) {
		m := &agentpb.DiskChanges{Changes: []*agentpb.DiskChange{{Op: op, Path: p, From: until, Mode: mode, Size: size}}, Until: until}
		list, err := guest.CheckChanges(m, "")
		for _, ch := range list {
			if err != nil || !filepath.IsAbs(ch.Path) || filepath.Clean(ch.Path) != ch.Path || ch.Size < 0 || len(ch.Path) > agentpb.MaxPath+1 {
				t.Errorf("%+v, %v", ch, err)
			}
		}
	})
}
